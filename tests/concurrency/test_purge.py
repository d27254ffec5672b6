"""Purges at the same moment; beside live traffic they are in `test_databases.py`."""

from __future__ import annotations

import pytest

from idempotency import retention
from idempotency.models import Event, Operation
from tests import callers
from tests.callers import effect_view, post
from tests.processes import in_threads
from tests.test_retention import PAST

pytestmark = pytest.mark.django_db(transaction=True)


def test_purges_leave_nothing_behind_of_what_they_delete() -> None:
    keys = [callers.new_key() for _ in range(20)]
    view = effect_view()

    def client() -> None:
        for key in keys:
            post(view, key)
            post(view, key)

    in_threads([client, client])
    Operation.objects.update(expires_at=PAST, tombstone_until=PAST, due_at=PAST)
    in_threads([lambda: retention.purge(batch_size=3)] * 2)

    assert not Operation.objects.exists()
    assert not Event.objects.exists()
