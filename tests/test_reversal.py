"""Undoing later: once, resumable, by whoever asks first."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db.models import F

from idempotency import engine, signals
from idempotency.completion import complete_abandoned
from idempotency.exceptions import IllegalTransition, KeyExpired, ReentrantOperation
from idempotency.models import EventKind, Operation, Outcome, Status
from idempotency.retention import purge
from tests import shops
from tests.callers import age as end_window
from tests.callers import events, intent, new_key
from tests.shops import age, find

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _provider(tmp_path: Path) -> None:
    shops.provider.open(tmp_path)


@pytest.fixture
def key() -> str:
    """The key of a purchase that succeeded."""
    key = new_key()
    shops.pay(key, "asked")
    return key


@pytest.fixture
def no_refunds(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The provider takes no refunds until `undo()`."""

    def refuse(result: str, key: str) -> None:
        raise ConnectionError

    monkeypatch.setattr(shops.refund, "__code__", refuse.__code__)
    return monkeypatch


def reverse(key: str) -> None:
    find(key).reverse(reason="the customer changed their mind")


def refunds(key: str) -> int:
    return shops.provider.refunds(shops.downstream(key))


def reversal(key: str) -> Operation:
    return Operation.objects.get(name="idempotency.reverse", key__startswith=str(find(key).pk))


def test_a_reversal_undoes_every_step_once_and_the_stored_result_stays(key: str) -> None:
    operation = find(key)
    operation.reverse(reason="refund")
    assert operation.status == Status.REVERSED
    for _ in range(2):
        reverse(key)
    assert (find(key).status, refunds(key), shops.stock(key)) == (Status.REVERSED, 1, 0)
    assert events(key) == [(EventKind.REVERSED, "refund")]
    assert shops.pay(key, "asked").startswith("charge-")


def test_the_refund_has_a_key_of_its_own(key: str) -> None:
    reverse(key)
    [entry] = [entry for entry in shops.provider._all() if entry["kind"] == "refund"]
    assert entry["key"] == reversal(key).derive_key("~undo:charge")
    assert entry["key"] != find(key).derive_key("charge")


def test_a_failed_reversal_is_visible_and_the_next_call_goes_on(
    key: str, no_refunds: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConnectionError):
        reverse(key)
    assert (find(key).status, shops.stock(key)) == (Status.SUCCEEDED, -1)
    assert reversal(key).last_error.startswith("step '~undo:charge': builtins.ConnectionError")
    no_refunds.undo()
    reverse(key)
    assert (find(key).status, refunds(key), shops.stock(key)) == (Status.REVERSED, 1, 0)


def test_the_completer_goes_on_with_a_reversal(key: str, no_refunds: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionError):
        reverse(key)
    no_refunds.undo()
    age()
    assert complete_abandoned().settled == 1
    assert (find(key).status, refunds(key)) == (Status.REVERSED, 1)


def test_a_reversal_that_is_remembered_no_more_is_not_made_again(key: str) -> None:
    """The record of the reversal has a window of its own; the operation's status has none."""
    reverse(key)
    end_window(reversal(key).key)
    reverse(key)
    assert (refunds(key), shops.stock(key)) == (1, 0)


def test_the_completer_does_not_finish_a_reversal_at_the_next_life_of_the_key(
    key: str, no_refunds: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConnectionError):
        reverse(key)
    end_window(key)
    shops.provider.honours_keys = False
    shops.pay(key, "asked")
    no_refunds.undo()
    age()
    assert complete_abandoned().settled == 0
    assert (find(key).status, refunds(key), shops.stock(key)) == (Status.SUCCEEDED, 0, -2)


@pytest.mark.parametrize(
    ("behaviour", "style", "status"),
    [
        ("timeout", "repeatable", Status.PROCESSING),
        ("charged", "unprotected", Status.RECONCILING),
    ],
)
def test_what_has_not_succeeded_cannot_be_reversed(behaviour: str, style: str, status: str) -> None:
    """A refund of a charge in doubt waits for its reconciliation; it never races it."""
    key = new_key()
    shops.provider.behaviour = behaviour
    shops.tried(key, style)
    with pytest.raises(IllegalTransition, match=status):
        reverse(key)
    assert (find(key).status, shops.stock(key)) == (status, -1)
    assert not Operation.objects.filter(name="idempotency.reverse").exists()


def test_a_failed_operation_cannot_be_reversed() -> None:
    key = new_key()
    begun = engine.begin(intent(key))
    assert not isinstance(begun, engine.Replay)
    begun.complete(Outcome(status=Status.FAILED))
    with pytest.raises(IllegalTransition):
        reverse(key)


def test_a_reversal_inside_itself_is_an_error(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[type[BaseException]] = []
    refund = shops.provider.refund

    def again(charge: str, key_: str) -> None:
        try:
            reverse(key)
        except BaseException as error:
            refused.append(type(error))
        refund(charge, key_)

    monkeypatch.setattr(shops.provider, "refund", again)
    reverse(key)
    assert refused == [ReentrantOperation]
    assert refunds(key) == 1


def test_a_reversal_is_announced(key: str) -> None:
    seen: list[tuple[str, str]] = []

    def receiver(operation: Operation, **kwargs: Any) -> None:
        seen.append((operation.name, operation.status))

    signals.operation_finished.connect(receiver)
    try:
        reverse(key)
    finally:
        signals.operation_finished.disconnect(receiver)
    assert ("shop.pay", Status.REVERSED) in seen


def test_an_operation_that_changed_during_its_reversal_is_not_marked(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refund = shops.provider.refund

    def renew(charge: str, key_: str) -> None:
        refund(charge, key_)
        Operation.objects.filter(key=key).update(owner="x" * 32, attempt=F("attempt") + 1)

    monkeypatch.setattr(shops.provider, "refund", renew)
    with pytest.raises(IllegalTransition, match="changed"):
        reverse(key)
    assert find(key).status == Status.SUCCEEDED


def test_without_its_steps_there_is_nothing_to_reverse(key: str) -> None:
    """Retention and tombstone say how long an operation can be reversed."""
    operation = find(key)
    end_window(key, tombstone=False)
    Operation.objects.filter(key=key).update(
        tombstone_until=F("tombstone_until") + timedelta(days=30)
    )
    purge()
    reverse(key)
    assert refunds(key) == 1
    Operation.objects.filter(key=key).delete()
    with pytest.raises(Operation.DoesNotExist):
        operation.reverse(reason="too late")


@pytest.mark.parametrize("purged", [False, True])
def test_a_refunded_charge_never_pays_for_a_new_life_of_the_key(key: str, purged: bool) -> None:
    """The provider would recognise the derived key and answer with the charge that was undone."""
    reverse(key)
    end_window(key)
    if purged:
        purge()
        assert find(key).body is None
        assert purge().tombstoned == 0  # nothing is left to do for it
    with pytest.raises(KeyExpired):
        shops.pay(key, "asked")
    assert find(key).status == Status.REVERSED
