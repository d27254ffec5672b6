"""Webhooks at the same moment: one effect per delivery, whoever is killed in between."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

from idempotency import outbox, outbox_handlers
from idempotency.models import MessageStatus, Operation, OutboxMessage, Status
from idempotency.webhooks import Delivery
from tests.app.models import Effect
from tests.callers import effects
from tests.crashes.points import die
from tests.outboxes import make_due
from tests.processes import (
    PATIENCE_SECONDS,
    Child,
    Died,
    Signal,
    eventually,
    in_processes,
    in_threads,
    running,
)
from tests.senders import Hook, deliver, event

pytestmark = pytest.mark.django_db(transaction=True)

#: SQLite has one writer: while a handler runs, every other claim waits for the whole database.
needs_row_locks = pytest.mark.vendor("postgresql", "mysql")

assert outbox_handlers  # the relay's


def nothing(delivery: Delivery) -> None: ...


class At:
    """What the handlers call in a test: before and after their effect."""

    before: Any = staticmethod(nothing)
    after: Any = staticmethod(nothing)


@pytest.fixture(autouse=True)
def at(monkeypatch: pytest.MonkeyPatch) -> type[At]:
    monkeypatch.setattr(At, "before", staticmethod(nothing))
    monkeypatch.setattr(At, "after", staticmethod(nothing))
    return At


class Now(Hook):
    """Handled while the sender waits."""


class First(Hook):
    """Acknowledged first."""

    acknowledge_first = True


@Now.handles("paid", "refunded", name="handle")
@First.handles("paid", "refunded", name="handle")
def handle(delivery: Delivery) -> None:
    At.before(delivery)
    Effect.objects.create(label=delivery.id)
    At.after(delivery)


def persistently(view: Any, delivery: str, body: bytes | None = None) -> list[int]:
    """What a sender does: every answer until the first that says success."""
    answers: list[int] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not answers or answers[-1] != 200:
        assert time.monotonic() < deadline, Counter(answers)
        response = deliver(view, delivery, body)
        answers.append(response.status_code)
        assert ("Retry-After" in response) is (response.status_code in (409, 503))
        time.sleep(0.005)
    return answers


@pytest.mark.parametrize("run_all", [in_threads, in_processes])
@pytest.mark.parametrize("view", [Now, First])
def test_ten_copies_of_one_delivery_have_one_effect(run_all: Any, view: Any) -> None:
    """BUGS P02, P06, P09, P10: nobody meets a unique error, everybody ends with success."""
    answers = run_all([lambda: persistently(view, "m1")] * 10)
    assert {code for answer in answers for code in answer} <= {200, 409}
    outbox.relay()
    assert effects("m1") == 1
    assert OutboxMessage.objects.count() == (view is First)


@needs_row_locks
def test_a_duplicate_in_flight_is_told_to_come_back(at: type[At]) -> None:
    """RULES 114: the first may still fail, so it must not be acknowledged."""
    inside, go_on = Signal(), Signal()

    def wait(delivery: Delivery) -> None:
        inside.set()
        go_on.wait()

    at.after = staticmethod(wait)
    with running(lambda: deliver(Now).status_code, inside, go_on) as child:
        response = deliver(Now)
        assert (response.status_code, response["Retry-After"]) == (409, "1")
        assert deliver(Now, body=event(amount=2)).status_code == 422
        at.after = staticmethod(nothing)
        assert deliver(Now, "m2").status_code == 200  # nobody else waits
    assert child.result() == 200
    assert deliver(Now).status_code == 200
    assert (effects("m1"), effects("m2")) == (1, 1)


@needs_row_locks
def test_the_relay_and_a_request_with_one_delivery_at_once_have_one_effect(at: type[At]) -> None:
    """The mode was changed between two attempts: both know the delivery as the same."""
    at_once = First.as_view(acknowledge_first=False)
    assert deliver(First).status_code == 200
    inside, go_on = Signal(), Signal()

    def wait(delivery: Delivery) -> None:
        inside.set()
        go_on.wait()

    at.after = staticmethod(wait)
    with running(lambda: outbox.relay().sent, inside, go_on) as child:
        assert deliver(at_once).status_code == 409
    assert child.result() == 1
    assert effects("m1") == 1

    assert deliver(First, "m2").status_code == 200
    inside, go_on = Signal(), Signal()
    with running(lambda: deliver(at_once, "m2").status_code, inside, go_on) as child:
        at.after = staticmethod(nothing)
        assert outbox.relay().retried == 1
    assert child.result() == 200
    make_due()
    assert outbox.relay().sent == 1
    assert effects("m2") == 1


def test_a_process_killed_in_a_handler_has_done_nothing(at: type[At]) -> None:
    """BUGS P13: the effect and the mark that it happened are one commit."""
    at.after = staticmethod(lambda delivery: die())
    with pytest.raises(Died):
        Child(lambda: deliver(Now).status_code).result()
    assert effects("m1") == 0
    at.after = staticmethod(nothing)
    assert persistently(Now, "m1")[-1] == 200
    assert effects("m1") == 1


def test_a_process_killed_after_the_commit_has_done_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender never got its answer."""
    with monkeypatch.context() as patch:
        patch.setattr(Now, "get_success_response", lambda self, delivery: die())
        with pytest.raises(Died):
            Child(lambda: deliver(Now).status_code).result()
    assert effects("m1") == 1
    assert deliver(Now).status_code == 200
    assert effects("m1") == 1


def test_a_process_killed_around_the_acknowledgement_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the commit: the sender comes again. After it: the same, and it is one message."""
    real = outbox.enqueue
    with monkeypatch.context() as patch:

        def enqueue_and_die(*args: Any, **options: Any) -> None:
            real(*args, **options)
            die()

        patch.setattr(outbox, "enqueue", enqueue_and_die)
        with pytest.raises(Died):
            Child(lambda: deliver(First).status_code).result()
    assert not OutboxMessage.objects.exists()
    with monkeypatch.context() as patch:
        patch.setattr(First, "get_success_response", lambda self, delivery: die())
        with pytest.raises(Died):
            Child(lambda: deliver(First).status_code).result()
    assert OutboxMessage.objects.count() == 1
    assert persistently(First, "m1")[-1] == 200
    assert OutboxMessage.objects.count() == 1
    outbox.relay()
    assert effects("m1") == 1


@pytest.mark.parametrize("moment", ["handler", "mark"])
def test_a_relay_killed_at_any_moment_neither_loses_nor_repeats(
    moment: str, at: type[At], monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUGS P13: in the handler, or after its commit and before the message is marked as sent."""
    assert deliver(First).status_code == 200

    def relay() -> None:
        if moment == "handler":
            at.after = staticmethod(lambda delivery: die())
        else:
            from idempotency.outbox.claims import Claim

            monkeypatch.setattr(Claim, "sent", lambda self, pks: die())
        outbox.relay()

    with pytest.raises(Died):
        Child(relay).result()
    assert effects("m1") == (moment == "mark")
    assert OutboxMessage.objects.get().status == MessageStatus.PENDING
    assert deliver(First).status_code == 200
    make_due()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while outbox.relay().sent != 1:  # the killed one's locks go with its connection
        assert time.monotonic() < deadline
        make_due()
    assert effects("m1") == 1


# One object --------------------------------------------------------------------------------------


class Payments(Hook):
    """Several events about one payment."""

    def serialize_on(self, delivery: Delivery) -> str:
        return f"payment:{delivery.payload['payment']}"


class PaymentsFirst(Payments):
    acknowledge_first = True


class Overlap:
    """Counts how many are inside at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def work(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.02)  # long enough that everybody who may come in does
        with self._lock:
            self.now -= 1


overlap = Overlap()


@Payments.handles("paid", name="settle")
def settle(delivery: Delivery) -> None:
    overlap.work()
    payment, _ = Effect.objects.get_or_create(label="payment")
    if payment.amount == 0:  # read, then write: right only if nobody is in between
        time.sleep(0.02)
        Effect.objects.create(label="settled")
        payment.amount = 1
        payment.save()


@Payments.handles("created", "updated", name="note")
def note(delivery: Delivery) -> None:
    overlap.work()
    Effect.objects.get_or_create(label="payment")


def test_a_burst_of_events_about_one_object_is_handled_one_by_one() -> None:
    """BUGS P01, P08, R03: different ids, different handlers, one payment; it is settled once.


    BUGS H02.
    """
    overlap.most = 0
    types = [
        "created",
        "paid",
        "updated",
        "paid",
        "paid",
        "updated",
        "created",
        "paid",
        "paid",
        "updated",
    ]
    answers = in_threads(
        [
            lambda number=number, name=name: persistently(  # type: ignore[misc]
                Payments, f"m{number}", event(name, payment=1)
            )
            for number, name in enumerate(types)
        ]
    )
    assert {answer[-1] for answer in answers} == {200}
    assert 500 not in {code for answer in answers for code in answer}
    assert overlap.most == 1
    assert (effects("payment"), effects("settled")) == (1, 1)
    assert Operation.objects.filter(status=Status.SUCCEEDED).count() == 10


def test_relays_take_turns_with_one_object_too(settings: Any) -> None:
    """BUGS P01, P08, R03 for deliveries that were acknowledged first."""
    settings.IDEMPOTENCY = {"OUTBOX_BATCH_SIZE": 1, "OUTBOX_BACKOFF": 0}
    overlap.most = 0
    for number, name in enumerate(["created", "paid", "updated", "paid", "paid", "updated"]):
        assert deliver(PaymentsFirst, f"m{number}", event(name, payment=1)).status_code == 200

    def relay() -> None:
        eventually(lambda: outbox.relay().sent == 0 and not pending(), "everything is handled")

    def pending() -> bool:
        return OutboxMessage.objects.filter(status=MessageStatus.PENDING).exists()

    in_threads([relay] * 3)
    assert overlap.most == 1
    assert (effects("payment"), effects("settled")) == (1, 1)
    assert set(OutboxMessage.objects.values_list("status", flat=True)) == {MessageStatus.SENT}


@needs_row_locks
def test_events_about_different_objects_are_handled_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    monkeypatch.setattr(overlap, "work", together.wait)
    answers = in_threads(
        [
            lambda number=number: (
                deliver(  # type: ignore[misc]
                    Payments, f"m{number}", event("created", payment=number)
                ).status_code
            )
            for number in range(2)
        ]
    )
    assert answers == [200, 200]
