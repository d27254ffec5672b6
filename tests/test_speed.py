"""What protection costs in statements and waits; what it costs in time is measured, in benchmarks/."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test.utils import CaptureQueriesContext

from idempotency import engine
from tests.app.models import Effect
from tests.callers import effect_view, events, intent, is_replay, new_key, post, succeed

pytestmark = pytest.mark.django_db(transaction=True)


@transaction.atomic
def unprotected(request: HttpRequest) -> HttpResponse:
    effect = Effect.objects.create(label=json.loads(request.body)["label"])
    return JsonResponse({"effect": effect.pk}, status=201)


def statements(call: Any, *args: Any) -> list[str]:
    connection.ensure_connection()
    with CaptureQueriesContext(connection) as queries:
        call(*args)
    return [query["sql"] for query in queries]


def test_a_first_request_costs_three_statements_more_than_an_atomic_view():
    post(effect_view(), new_key())  # the first of a connection asks the server what it is
    without = statements(post, unprotected, new_key(), {"label": "unprotected"})
    assert len(without) == 3  # BEGIN, INSERT, COMMIT

    first = statements(post, effect_view(), new_key())

    # MySQL, unlike MariaDB, cannot return the row that an insert met.
    claim = (
        2
        if connection.vendor == "mysql" and not connection.features.can_return_columns_from_insert
        else 1
    )
    assert len(first) == len(without) + claim + 2, first


def test_a_replay_costs_two_statements():
    view, key = effect_view(), new_key()
    post(view, key)

    assert len(statements(post, view, key)) == 2


def test_a_replay_beyond_the_limit_of_events_writes_none(settings):
    settings.IDEMPOTENCY = {"EVENTS_PER_OPERATION": 3}
    view, key = effect_view(), new_key()

    answers = [post(view, key) for _ in range(6)]

    assert [is_replay(answer) for answer in answers] == [False] + [True] * 5
    assert events(key) == [("replayed", "")] * 3


@pytest.mark.vendor("postgresql")
def test_a_plain_claim_does_not_wait_for_the_disk():
    claim, *others = statements(engine.run, intent(new_key()), succeed)

    assert "synchronous_commit" in claim
    assert not any("synchronous_commit" in sql for sql in others)  # its effects do wait


@pytest.mark.vendor("postgresql")
@pytest.mark.parametrize("policy", [{"stepwise": True}, {"on_interrupted": "reconcile"}])
def test_a_claim_that_is_evidence_of_an_attempt_waits_for_the_disk(policy):
    key = new_key()

    claim, *_ = statements(engine.run, intent(key, **policy), succeed)

    assert key in claim
    assert "synchronous_commit" not in claim


@pytest.mark.vendor("postgresql")
def test_the_caller_s_transaction_still_waits_for_the_disk():
    def synchronous_commit() -> str:
        with connection.cursor() as cursor:
            cursor.execute("SHOW synchronous_commit")
            return str(cursor.fetchone()[0])

    before, key = synchronous_commit(), new_key()
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = on")
    try:
        engine.run(intent(key), succeed)
        assert synchronous_commit() == "on"
        with transaction.atomic():
            engine.run(intent(new_key()), succeed)
            assert engine.run(intent(key), succeed).replayed
            assert synchronous_commit() == "on"
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"SET synchronous_commit = {before}")
