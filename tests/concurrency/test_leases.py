"""Stepwise operations under rivals: lapsed leases, zombies, takeovers, and many callers at once.

A lease lapses by making its row older, never by waiting.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from idempotency import engine
from idempotency.completion import complete_abandoned
from idempotency.exceptions import IllegalTransition, InProgress, LeaseLost, OutcomeUnknown
from idempotency.models import EventKind, Operation, Outcome, Status, Step
from idempotency.reconciliation import Absent, Confirmed, reconcile_due, resolve
from idempotency.steps import StepwiseExecution
from tests import shops
from tests.app.models import Effect
from tests.callers import effects, intent, new_key
from tests.crashes.points import Points, passed_by
from tests.processes import Signal, in_threads
from tests.shops import age, find

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _provider(tmp_path: Path) -> None:
    shops.provider.open(tmp_path)


def begin(key: str) -> StepwiseExecution:
    begun = engine.begin(intent(key, stepwise=True, lease=600))
    assert isinstance(begun, StepwiseExecution)
    return begun


def succeed(execution: StepwiseExecution, body: bytes = b"done") -> None:
    execution.complete(Outcome(status=Status.SUCCEEDED, body=body))


def attempt(call: Callable[[], Any]) -> Any:
    """What the call returned, or the type of what it raised."""
    try:
        return call()
    except Exception as error:
        return type(error)


def effect(label: str, who: str) -> str:
    Effect.objects.create(label=label)
    return who


# The zombie and the new owner, both interleavings, each on a connection of its own


def test_a_takeover_before_the_zombies_step_rolls_the_step_back() -> None:
    """BUGS C01."""
    key, lapsed, taken = new_key(), Signal(), Signal()

    def zombie() -> list[Any]:
        execution = begin(key)
        lapsed.set()
        taken.wait()
        answers = [
            attempt(lambda: execution.operation.step("pay", effect, key, "zombie")),
            attempt(lambda: succeed(execution, b"zombie")),
        ]
        execution.fail(ValueError())
        return answers

    def owner() -> str:
        lapsed.wait()
        age(key=key)
        execution = begin(key)
        taken.set()
        who = execution.operation.step("pay", effect, key, "owner")
        succeed(execution, b"owner")
        return who

    assert in_threads([zombie, owner]) == [[LeaseLost, LeaseLost], "owner"]
    assert effects(key) == 1
    assert (find(key).status, bytes(find(key).body or b"")) == (Status.SUCCEEDED, b"owner")
    assert Step.objects.get(operation__key=key).attempt == 2


def test_a_step_that_is_under_way_is_not_overtaken_though_its_lease_is_over() -> None:
    """Its transaction holds the row: whoever comes is told to wait, and the step is the only one.


    BUGS C02.
    """
    key, inside, asked = new_key(), Signal(), Signal()

    def slow(label: str) -> str:
        inside.set()
        asked.wait()
        return effect(label, "zombie")

    def zombie() -> str:
        execution = begin(key)
        age(key=key)
        who = execution.operation.step("pay", slow, key)
        succeed(execution)
        return who

    def rival() -> Any:
        inside.wait()
        if connection.vendor == "sqlite":
            asked.set()  # else the rival would wait for the only writer of the whole database
        answer = attempt(lambda: begin(key))
        asked.set()
        return answer

    who, answer = in_threads([zombie, rival])
    assert who == "zombie"
    # On SQLite the rival may come when all is done: then `begin` got a replay.
    assert answer in (
        {InProgress, AssertionError} if connection.vendor == "sqlite" else {InProgress}
    )
    assert (effects(key), find(key).attempt) == (1, 1)


def test_a_takeover_that_has_not_committed_yet_still_wins() -> None:
    """The zombie's fence waits for the row, finds it changed, and raises inside its transaction."""
    key, lapsed, holding = new_key(), Signal(), Signal()
    old = begin(key)
    age(key=key)
    labels = passed_by(lambda: begin(key))
    age(key=key)
    Operation.objects.filter(key=key).update(owner=old.operation.owner, attempt=1)
    committing = len(labels) - labels[::-1].index("before COMMIT")

    def owner() -> str:
        lapsed.wait()

        def pause() -> None:
            holding.set()
            zombie_is_coming.wait()
            time.sleep(0.1)  # by now it waits for the row; should it not, it comes too late as well

        with Points(at=committing, action=pause).watched():
            execution = begin(key)
        who = execution.operation.step("pay", effect, key, "owner")
        succeed(execution)
        return who

    zombie_is_coming = Signal()

    def zombie() -> Any:
        lapsed.set()
        holding.wait()
        zombie_is_coming.set()
        return attempt(lambda: old.operation.step("pay", effect, key, "zombie"))

    assert in_threads([owner, zombie]) == ["owner", LeaseLost]
    assert effects(key) == 1


def test_a_zombie_in_a_call_cannot_record_it_and_the_charge_is_one() -> None:
    key, calling, taken = new_key(), Signal(), Signal()

    def slow_charge(downstream: str, amount: int) -> str:
        calling.set()
        taken.wait()
        return shops.provider.charge(downstream, amount)

    def zombie() -> Any:
        execution = begin(key)
        downstream = execution.operation.derive_key("charge")
        return attempt(
            lambda: execution.operation.call("charge", slow_charge, downstream, 5, repeatable=True)
        )

    def owner() -> str:
        calling.wait()
        age(key=key)
        execution = begin(key)
        downstream = execution.operation.derive_key("charge")
        charge = execution.operation.call(
            "charge", shops.provider.charge, downstream, 5, repeatable=True
        )
        taken.set()
        succeed(execution)
        return charge

    lost, charge = in_threads([zombie, owner])
    assert lost is LeaseLost
    assert shops.provider.find(shops.downstream(key)) == charge
    assert shops.provider.charges(shops.downstream(key)) == 1
    assert find(key).status == Status.SUCCEEDED


def test_a_zombies_doubts_do_not_stop_the_new_owner() -> None:
    key = new_key()
    old = begin(key)
    age(key=key)
    new = begin(key)
    old.fail(OutcomeUnknown(operation_id=old.operation.pk, provider_ref="ch_1"))
    assert not new.operation.references.exists()
    succeed(new)
    assert find(key).status == Status.SUCCEEDED


def test_a_compensation_that_is_overtaken_is_not_made_twice() -> None:
    key, undoing, done = new_key(), Signal(), Signal()
    refund = shops.provider.refund

    def slow_refund(charge: str, downstream: str) -> None:
        if not undoing.is_set():
            undoing.set()
            done.wait()
        refund(charge, downstream)

    shops.provider.refund = slow_refund  # type: ignore[method-assign]
    try:

        def zombie() -> Any:
            return attempt(lambda: shops.pay(key, "asked", True))

        def owner() -> str:
            undoing.wait()
            age(key=key)
            answer = shops.tried(key, "asked", True)
            done.set()
            return answer

        assert in_threads([zombie, owner]) == [LeaseLost, "StoredFailure"]
    finally:
        del shops.provider.refund
    shops.assert_consistent(key)
    assert shops.provider.refunds(shops.downstream(key)) == 1


# Many at once


def test_of_many_callers_of_a_new_key_one_executes() -> None:
    key = new_key()
    answers = in_threads([partial(attempt, partial(shops.pay, key, "asked"))] * 8)
    charges = {answer for answer in answers if answer is not InProgress}
    assert len(charges) == 1
    shops.assert_consistent(key)
    assert find(key).attempt == 1


def test_of_many_callers_of_an_abandoned_key_one_takes_over() -> None:
    """BUGS B04."""
    for _ in range(3):
        key = new_key()
        begin_as_shop(key)
        age(key=key)
        answers = in_threads([partial(attempt, partial(shops.pay, key, "asked"))] * 8)
        assert len({answer for answer in answers if answer is not InProgress}) == 1
        shops.assert_consistent(key)
        assert find(key).attempt == 2
        assert find(key).events.filter(kind=EventKind.TAKEN_OVER).count() == 1


def begin_as_shop(key: str) -> None:
    found = shops.pay.idempotency_intent((key, "asked"), {})  # type: ignore[attr-defined]
    assert isinstance(engine.begin(found), StepwiseExecution)


def test_completers_and_clients_at_once_make_one_charge() -> None:
    key = new_key()
    begin_as_shop(key)
    age(key=key)
    in_threads(
        [complete_abandoned, complete_abandoned, partial(attempt, partial(shops.pay, key, "asked"))]
    )
    shops.life_goes_on()
    shops.assert_consistent(key)
    assert find(key).attempt == 2


def test_ten_reversals_at_once_undo_once() -> None:
    key = new_key()
    shops.pay(key, "asked")

    def reverse() -> Any:
        return attempt(lambda: find(key).reverse(reason="refund"))

    answers = in_threads([reverse] * 10)
    assert set(answers) <= {None, InProgress}
    assert None in answers
    assert find(key).status == Status.REVERSED
    assert shops.provider.refunds(shops.downstream(key)) == 1
    assert shops.stock(key) == 0
    assert find(key).events.filter(kind=EventKind.REVERSED).count() == 1


@pytest.mark.parametrize("answer", [Confirmed("ch_1"), Absent()])
def test_of_many_who_settle_one_decides(answer: Any) -> None:
    key = new_key()
    shops.provider.behaviour = "charged"
    assert shops.tried(key, "unprotected") == "OutcomeUnknown"
    operations = [find(key) for _ in range(8)]

    def settle(operation: Operation) -> Any:
        return attempt(lambda: resolve(operation, answer, evidence="webhook"))

    answers = in_threads([partial(settle, operation) for operation in operations])
    assert sorted(map(str, answers)) == sorted(map(str, [None, *[IllegalTransition] * 7]))
    assert find(key).events.filter(kind=EventKind.RESOLVED).count() == 1


def test_reconcilers_at_once_ask_once() -> None:
    key = new_key()
    shops.provider.behaviour = "charged"
    assert shops.tried(key, "asked") == "OutcomeUnknown"
    age(key=key)
    reports = in_threads([reconcile_due] * 4)
    assert sum(report.asked for report in reports) == 1
    shops.life_goes_on()
    shops.assert_consistent(key)
