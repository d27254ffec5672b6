"""Consumers at the same time: one effect per message, turns per object."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections

from idempotency import inbox
from idempotency.exceptions import InProgress, Unavailable
from idempotency.models import Operation, Status
from tests.app.models import Effect
from tests.callers import effects
from tests.processes import PATIENCE_SECONDS, Child, Signal, in_processes, in_threads

pytestmark = pytest.mark.django_db(transaction=True)


def until_received(receive: Callable[[], Any]) -> Any:
    """What a broker does: deliver again while the consumer does not acknowledge."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return receive()
        except (InProgress, Unavailable):
            assert time.monotonic() < deadline
            time.sleep(random.random() * 0.05)


def receive(message_id: str, work: Callable[[], Any] = lambda: None, **options: Any) -> bool:
    with inbox.receive(consumer="billing", message_id=message_id, **options) as message:
        if message.is_new:
            Effect.objects.create(label=message_id)
            work()
    return message.is_new


def test_copies_of_one_message_have_one_effect() -> None:
    new = in_processes([lambda: until_received(lambda: receive("m"))] * 6)
    assert sorted(new) == [False] * 5 + [True]
    assert effects("m") == 1


@pytest.mark.vendor("postgresql", "mysql")
def test_a_copy_that_meets_the_first_is_not_acknowledged() -> None:
    """RULES 103: the first may still fail."""
    with inbox.receive(consumer="billing", message_id="m"):

        def copy() -> None:
            with pytest.raises(InProgress):
                receive("m")

        in_threads([copy])
    assert Operation.objects.get().status == Status.SUCCEEDED


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


def test_messages_of_one_object_never_overlap() -> None:
    """BUGS R03: "created" and "updated" 1 ms apart, in several processes' worth of connections.


    BUGS H11.
    """
    overlap = Overlap()

    def consumer(number: int) -> None:
        for step in range(4):
            until_received(
                lambda: receive(f"{number}-{step}", overlap.work, serialize_on="order:1")  # noqa: B023
            )

    in_threads([lambda number=number: consumer(number) for number in range(4)])  # type: ignore[misc]
    assert overlap.most == 1
    assert Effect.objects.count() == 16


@pytest.mark.vendor("postgresql", "mysql")
def test_whoever_gets_the_turn_sees_what_was_committed_before() -> None:
    def count_up() -> None:
        row = Effect.objects.get(label="counter")
        time.sleep(0.01)
        row.amount += 1  # a lost update unless the turns work
        row.save()

    Effect.objects.create(label="counter")

    def consumer(number: int) -> None:
        until_received(lambda: receive(str(number), count_up, serialize_on="order:1"))

    in_threads([lambda number=number: consumer(number) for number in range(8)])  # type: ignore[misc]
    assert Effect.objects.get(label="counter").amount == 8


@pytest.mark.vendor("postgresql", "mysql")
@pytest.mark.parametrize(
    "objects", [("order:1", "order:2"), ("", "")], ids=["objects", "no object"]
)
def test_messages_of_different_objects_are_received_side_by_side(objects: tuple[str, str]) -> None:
    """RULES 107. SQLite has one writer by nature."""
    both_inside = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    in_threads(
        [
            lambda name=name, number=number: receive(  # type: ignore[misc]
                str(number), both_inside.wait, serialize_on=name
            )
            for number, name in enumerate(objects)
        ]
    )
    assert Effect.objects.count() == 2


@pytest.mark.vendor("postgresql", "mysql")
def test_other_consumers_of_the_same_object_do_not_wait() -> None:
    with inbox.receive(consumer="mail", message_id="m", serialize_on="order:1"):
        assert Child(lambda: receive("m", serialize_on="order:1")).result() is True


def test_a_turn_of_a_killed_consumer_is_free() -> None:
    def die() -> None:
        with inbox.receive(consumer="billing", message_id="m", serialize_on="order:1"):
            Effect.objects.create(label="m")
            started.set()
            time.sleep(PATIENCE_SECONDS)

    started = Signal()
    child = Child(die)
    started.wait()
    child.kill()
    assert until_received(lambda: receive("m", serialize_on="order:1")) is True
    assert effects("m") == 1


def test_versions_applied_at_the_same_time_leave_the_newest() -> None:
    """BUGS R03, R04."""
    row = Effect.objects.create(label="state", amount=0)
    versions = list(range(1, 17))
    random.shuffle(versions)

    def apply(version: int) -> None:
        def change() -> None:
            rows = Effect.objects.filter(pk=row.pk)
            inbox.apply_if_newer(rows, "amount", version, label=f"v{version}")

        until_received(lambda: receive(f"event-{version}", change))
        connections.close_all()

    halves = [versions[:4], versions[4:8], versions[8:12], versions[12:]]
    in_threads([lambda half=half: [apply(version) for version in half] for half in halves])  # type: ignore[misc]
    row.refresh_from_db()
    assert (row.amount, row.label) == (16, "v16")
