"""Signals: after the commit, never for what was rolled back, and never in anybody's way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, transaction
from django.dispatch import Signal

from idempotency import engine, fingerprints, signals, testing
from idempotency.exceptions import Mismatch, OutcomeUnknown
from idempotency.models import Event, EventKind, Operation, Outcome, Status
from idempotency.policies import Policy
from tests.app.models import Effect

SIGNALS = {name: signal for name, signal in vars(signals).items() if isinstance(signal, Signal)}
DONE = Outcome(status=Status.SUCCEEDED, code=200, body=b"done")


class Receiver:
    """Remembers what was sent, with the state of the database at that moment."""

    def __init__(self) -> None:
        self.received: list[tuple[str, dict[str, Any]]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.received]

    def connect(self, name: str) -> Any:
        def receive(sender: Any, signal: Signal, **kwargs: Any) -> None:
            assert sender is Operation
            kwargs["in_transaction"] = connection.in_atomic_block
            self.received.append((name, kwargs))

        SIGNALS[name].connect(receive, weak=False)
        return receive


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    connected = {name: receiver.connect(name) for name in SIGNALS}
    yield receiver
    for name, receive in connected.items():
        SIGNALS[name].disconnect(receive)


def intent(what: str = "pay", *, key: str = "k", **policy: Any) -> engine.Intent:
    return engine.Intent(
        name="pay",
        scope=("user:1",),
        key=key,
        fingerprint=fingerprints.of(what),
        policy=Policy(**policy).resolved(),
    )


def pay(operation: Operation) -> Outcome:
    Effect.objects.create(label="paid")
    return DONE


def fail(operation: Operation) -> Outcome:
    raise ZeroDivisionError("card 4111 1111 1111 1111")


@pytest.mark.django_db(transaction=True)
def test_success_and_replay_are_announced_after_the_commit(receiver: Receiver) -> None:
    engine.run(intent(), pay)
    engine.run(intent(), pay)

    assert receiver.names == ["operation_finished", "operation_replayed"]
    for _, sent in receiver.received:
        assert sent["operation"].status == Status.SUCCEEDED
        assert sent["in_transaction"] is False


@pytest.mark.django_db(transaction=True)
def test_a_refusal_carries_the_exception(receiver: Receiver) -> None:
    engine.run(intent(), pay)
    with pytest.raises(Mismatch):
        engine.run(intent("something else"), pay)

    name, sent = receiver.received[-1]
    assert name == "operation_refused"
    assert isinstance(sent["refusal"], Mismatch)


@pytest.mark.django_db(transaction=True)
def test_a_failed_attempt_is_announced_without_its_message(receiver: Receiver) -> None:
    with pytest.raises(ZeroDivisionError):
        engine.run(intent(), fail)

    assert receiver.names == ["operation_attempt_failed"]
    _, sent = receiver.received[0]
    assert "ZeroDivisionError" in sent["error"]
    assert "4111" not in sent["error"]


@pytest.mark.django_db(transaction=True)
def test_a_takeover_is_announced(receiver: Receiver) -> None:
    execution = engine.begin(intent())
    assert isinstance(execution, engine.Execution)
    execution.abort(KeyboardInterrupt())  # vanished without a word: nothing was recorded

    engine.run(intent(), pay)

    assert receiver.names == ["operation_taken_over", "operation_finished"]
    assert [event.kind for event in Event.objects.all()] == [EventKind.TAKEN_OVER]


@pytest.mark.django_db(transaction=True)
def test_an_outcome_that_must_be_checked_is_announced(receiver: Receiver) -> None:
    execution = engine.begin(intent())
    assert isinstance(execution, engine.Execution)
    execution.abort(KeyboardInterrupt())
    testing.age(execution.operation, 3600)

    with pytest.raises(OutcomeUnknown):
        engine.run(intent(on_interrupted="reconcile"), pay)

    assert "operation_reconciling" in receiver.names
    assert "operation_finished" not in receiver.names


@pytest.mark.django_db(transaction=True)
def test_nothing_is_announced_when_the_callers_transaction_rolls_back(receiver: Receiver) -> None:
    with transaction.atomic():
        engine.run(intent(), pay)
        assert receiver.names == []
        transaction.set_rollback(True)

    assert receiver.names == []
    assert not Effect.objects.exists()

    with transaction.atomic():
        engine.run(intent(), pay)
    assert receiver.names == ["operation_finished"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("joined", [False, True])
def test_a_broken_receiver_breaks_neither_the_operation_nor_other_receivers(
    receiver: Receiver, joined: bool
) -> None:
    def broken(**kwargs: Any) -> None:
        raise RuntimeError

    late = Receiver()  # after the broken one
    connected = {}
    for name, signal in SIGNALS.items():
        signal.connect(broken)
        connected[name] = late.connect(name)
    try:
        if joined:
            with transaction.atomic():
                engine.run(intent(), pay)
        else:
            engine.run(intent(), pay)
        assert engine.run(intent(), pay).replayed
        with pytest.raises(Mismatch):
            engine.run(intent("something else"), pay)
        with pytest.raises(ZeroDivisionError):
            engine.run(intent(key="other"), fail)
    finally:
        for name, signal in SIGNALS.items():
            signal.disconnect(broken)
            signal.disconnect(connected[name])

    assert late.names == receiver.names
    assert receiver.names == [
        "operation_finished",
        "operation_replayed",
        "operation_refused",
        "operation_attempt_failed",
    ]
