"""Public reports that no other module is the place for. All are listed in docs/proof.md."""

from __future__ import annotations

import random
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import transaction
from django.http import HttpRequest, HttpResponse

from idempotency import engine, outbox, retention, scopes
from idempotency.decorators import idempotent
from idempotency.exceptions import ConfigurationError
from idempotency.models import Operation, OutboxMessage
from idempotency.policies import Policy
from tests import callers
from tests.callers import effects, is_replay, operation, post
from tests.processes import in_threads


@pytest.mark.parametrize("lease", [0, -1, 0.5, timedelta(0), True, "60"])
def test_a_lease_that_is_no_length_of_time_is_refused(lease: Any) -> None:
    """B02: nothing is read as "no limit"."""
    with pytest.raises(ConfigurationError, match=r"Policy\.lease"):
        Policy(stepwise=True, lease=lease)


def test_a_policy_that_names_no_lease_has_a_finite_one() -> None:
    """B02."""
    assert timedelta(0) < Policy(stepwise=True).resolved().lease < timedelta(hours=1)


@pytest.mark.django_db(transaction=True)
def test_a_purge_right_after_a_failed_attempt_leaves_its_record() -> None:
    """C04: a failed attempt is kept as long as any other, whatever the attempt before had left."""
    key = callers.new_key()
    for attempts in (1, 2):
        with pytest.raises(ValueError, match="detail"):
            engine.run(callers.intent(key), callers.fail)
        assert retention.purge() == retention.Purged()
        assert operation(key).attempt == attempts
        assert operation(key).last_error
    assert not engine.run(callers.intent(key), callers.succeed).replayed


@pytest.mark.django_db(transaction=True)
def test_two_views_with_one_policy_recognise_every_retry() -> None:
    """E14: using a shared policy changes nothing about it, so the tenth call has the key of the first."""
    policy = Policy(required=True, scope=scopes.endpoint(), exclude_fields={"sent_at"})
    before = policy.resolved()

    def handler(request: HttpRequest) -> HttpResponse:
        return HttpResponse(callers.succeed(Operation(key=key)).body, status=201)

    def another(request: HttpRequest) -> HttpResponse:
        return handler(request)

    views = [idempotent(policy)(handler), idempotent(policy)(another)]
    keys = [callers.new_key(), callers.new_key()]
    for view, key in zip(views, keys, strict=True):
        answers = [post(view, key, {"n": 1, "sent_at": number}) for number in range(10)]
        assert [is_replay(answer) for answer in answers] == [False] + [True] * 9
        assert effects(key) == 1
    assert policy.resolved() == before


@pytest.mark.django_db(transaction=True)
def test_neighbouring_messages_are_written_side_by_side() -> None:
    """I02: no writer of the outbox meets a gap lock of another one."""
    numbers = list(range(120))
    random.Random(3).shuffle(numbers)

    def write(mine: list[int]) -> None:
        for number in mine:
            with transaction.atomic():
                outbox.enqueue("t", number, key=f"order:{number:03}", ordering_key="k")

    in_threads([partial(write, numbers[part::6]) for part in range(6)])
    assert OutboxMessage.objects.count() == 120
