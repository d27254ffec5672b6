"""Several relays, late commits and relays that slept too long: each message, in its order, once."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from idempotency import inbox, outbox
from idempotency.models import MessageStatus, OutboxMessage
from idempotency.outbox.claims import claim
from tests.app.models import Effect
from tests.outboxes import File, Recorder, fill, make_due, relayed, row, send, statuses
from tests.processes import Signal, eventually, in_processes, in_threads

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _long_backoff(settings: Any) -> None:
    """What has failed is not due again before the test says so, however slow the machine is."""
    settings.IDEMPOTENCY = {"OUTBOX_BACKOFF": 60}


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "published")


def in_order(lines: list[Any]) -> bool:
    """Whether the payloads of every ordering key, which are numbers, only grow."""
    by_key: dict[str, list[int]] = {}
    for line in lines:
        by_key.setdefault(line.ordering_key, []).append(line.payload)
    return all(a < b for numbers in by_key.values() for a, b in itertools.pairwise(numbers))


def drain(file: File, batch_size: int = 10) -> dict[str, int]:
    """Relay until nothing is left, as long as others hold some of it."""
    worker = outbox.Relay(publisher=file, batch_size=batch_size)
    while OutboxMessage.objects.filter(status=MessageStatus.PENDING).exists():
        worker.run(once=True)
        time.sleep(0.01)
    return dataclasses.asdict(worker.summary)


def test_relays_at_the_same_time_publish_each_message_once_and_keep_the_order(file: File) -> None:
    """BUGS I04, S04, S05."""
    fill([("t", number, f"key {number % 7}") for number in range(400)])
    fill([("t", number, "") for number in range(100)])
    summaries = in_processes([lambda: drain(file)] * 3)
    lines = file.lines()
    assert Counter(line.id for line in lines) == Counter(
        str(i) for i in OutboxMessage.objects.values_list("message_id", flat=True)
    )
    assert in_order([line for line in lines if line.ordering_key])
    assert sum(summary["sent"] for summary in summaries) == 500


def test_a_claimed_message_is_not_due_for_anybody_else_also_after_a_retry() -> None:
    fresh, retried = send("fresh"), send("retried")
    relayed(Recorder(fresh=ValueError, retried=ValueError))
    make_due()
    first = claim("default", 10, 60)
    assert first is not None
    assert {message.pk for message in first.messages} == {fresh.pk, retried.pk}
    assert claim("default", 10, 60) is None


def test_claims_at_the_same_time_share_no_message() -> None:
    """BUGS I07."""
    fill([("t", number, f"key {number % 40}" if number % 2 else "") for number in range(200)])

    def take() -> list[int]:
        taken: list[int] = []
        for _ in range(5):
            claimed = claim("default", 10, 60)
            taken += [message.pk for message in claimed.messages] if claimed else []
        return taken

    taken = list(itertools.chain(*in_threads([take] * 4)))
    assert len(taken) == len(set(taken)) > 100


@pytest.mark.vendor("postgresql", "mysql")  # SQLite has one writer: nothing commits in between
def test_a_lower_id_that_is_committed_later_is_not_skipped() -> None:
    """BUGS S02, S03."""
    written, relayed_higher = Signal(), Signal()
    recorder = Recorder()

    def slow() -> int:
        with transaction.atomic():
            message = outbox.enqueue("lower", 1)
            written.set()
            relayed_higher.wait()
        return message.pk

    def fast() -> int:
        written.wait()
        message = send("higher", 2)
        relayed(recorder)
        relayed_higher.set()
        return message.pk

    lower, higher = in_threads([slow, fast])
    assert lower < higher
    assert recorder.topics == ["higher"]
    relayed(recorder)
    assert recorder.topics == ["higher", "lower"]


def test_nobody_publishes_the_next_message_of_a_key_while_its_head_is_in_hand() -> None:
    for topic, key in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        send(topic, ordering_key=key)
    other = Recorder()
    outer = Recorder()

    def meanwhile(message: outbox.Message) -> None:
        if message.topic == "a1":
            in_threads([lambda: relayed(other)])

    outer.before = meanwhile
    relayed(outer, batch_size=1)
    assert other.topics == ["b1"]
    assert outer.topics == ["a1", "a2"]


def test_a_relay_whose_lease_is_over_changes_nothing_any_more() -> None:
    """BUGS H09."""
    message = send("t", ordering_key="a")
    stale = claim("default", 10, 60)
    assert stale is not None
    make_due()
    current = claim("default", 10, 60)
    assert current is not None
    before = row(message).__dict__
    assert stale.sent([message.pk]) == 0
    assert stale.retry(message.pk, 0, "") == 0
    assert stale.dead(message.pk, "") == 0
    assert stale.give_back([message.pk]) == 0
    after = row(message).__dict__
    assert {k: v for k, v in after.items() if k != "_state"} == {
        k: v for k, v in before.items() if k != "_state"
    }
    assert current.sent([message.pk]) == 1
    assert current.sent([message.pk]) == 1  # repeated after a lost answer
    assert stale.retry(message.pk, 0, "") == 0
    assert row(message).status == MessageStatus.SENT


def test_a_slow_relay_gives_back_what_it_cannot_publish_before_its_lease_ends(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.IDEMPOTENCY |= {"OUTBOX_LEASE": 600}
    ahead = 0.0
    monkeypatch.setattr(time, "monotonic", lambda read=time.monotonic: read() + ahead)

    def takes_long(message: outbox.Message) -> None:
        nonlocal ahead
        ahead += 400

    for number in range(3):
        send(str(number))
    recorder = Recorder()
    recorder.before = takes_long
    worker = outbox.Relay(publisher=recorder)
    eventually(worker.run_once, "a batch")
    assert recorder.topics == ["0"]
    assert sorted(OutboxMessage.objects.values_list("attempts", "status")) == [
        (0, MessageStatus.PENDING),
        (0, MessageStatus.PENDING),
        (1, MessageStatus.SENT),
    ]
    assert OutboxMessage.objects.filter(owner="", status=MessageStatus.PENDING).count() == 2


def test_messages_whose_relay_vanished_are_tried_one_by_one() -> None:
    """One that kills its relay must not use up the attempts of its neighbours."""
    for topic in ("killer", "a", "b"):
        send(topic, ordering_key="k" if topic != "killer" else "")
    vanished = claim("default", 10, 60)
    assert vanished is not None
    assert len(vanished.messages) == 3
    send("fresh")
    make_due()
    batches = []
    while claimed := claim("default", 10, 60):
        batches.append([message.topic for message in claimed.messages])
        claimed.sent([message.pk for message in claimed.messages])
    assert batches == [["killer"], ["a"], ["b"], ["fresh"]]


def test_a_message_changed_by_staff_during_a_claim_is_claimed_as_it_is_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from idempotency.outbox import claims

    message, other = send("t", 1), send("t", 2)
    choose = claims.Claims._choose
    interference = [lambda: OutboxMessage.objects.filter(pk=message.pk).delete()]

    def interfered(*args: Any, **kwargs: Any) -> Any:
        chosen = choose(*args, **kwargs)
        if interference:
            interference.pop()()
        return chosen

    monkeypatch.setattr(claims.Claims, "_choose", interfered)
    claimed = claim("default", 10, 60)
    assert claimed is not None
    # The first try rolled back with the deletion it had made; the second took both.
    assert {m.pk for m in claimed.messages} == {message.pk, other.pk}
    rows = OutboxMessage.objects.values_list("pk", "owner", "attempts")
    assert set(rows) == {(pk, claimed.owner, 1) for pk in (message.pk, other.pk)}


@pytest.mark.timeout(600)  # it works all the time; a busy machine needs minutes
def test_ten_thousand_messages_with_poison_among_them(file: File, settings: Any) -> None:
    """BUGS S10."""
    settings.IDEMPOTENCY |= {
        "OUTBOX_MAX_ATTEMPTS": 2,
        "OUTBOX_BACKOFF": 0.01,
        "OUTBOX_DEAD_HEAD": "skip",
    }
    total, poison = 10_000, 50
    fill(
        [
            ("poison" if number % (total // poison) == 7 else "t", number, f"key {number % 100}")
            for number in range(total)
        ]
    )

    def refuse(message: outbox.Message) -> None:
        if message.topic == "poison":
            raise ValueError("poison")

    file.before = refuse

    summaries = in_processes([lambda: drain(file, batch_size=50)] * 2)
    lines = file.lines()
    assert len({line.id for line in lines}) == len(lines) == total - poison
    assert in_order(lines)
    assert sum(summary["sent"] for summary in summaries) == total - poison
    assert sum(summary["retried"] for summary in summaries) == poison
    dead = OutboxMessage.objects.filter(status=MessageStatus.DEAD)
    assert set(dead.values_list("topic", "attempts")) == {("poison", 2)}
    assert dead.count() == poison
    assert OutboxMessage.objects.filter(status=MessageStatus.SENT).count() == total - poison

    file.before = lambda message: None  # the fault is mended
    assert outbox.redrive(dead) == poison
    relayed(file)
    published = [line.id for line in file.lines()]
    assert set(published) == {
        str(i) for i in OutboxMessage.objects.values_list("message_id", flat=True)
    }
    assert set(statuses().values()) == {MessageStatus.SENT}

    consume([*published, *published[::20]])
    labels = Effect.objects.filter(amount=total).values_list("label", flat=True)
    assert sorted(labels) == sorted(set(published))


def consume(message_ids: list[str], size: int = 500) -> None:
    """Receive messages, some of them again, with one effect each; a transaction for each batch."""
    for start in range(0, len(message_ids), size):
        with transaction.atomic():
            effects = []
            for message_id in message_ids[start : start + size]:
                with inbox.receive(consumer="shop", message_id=message_id) as message:
                    if message.is_new:
                        effects.append(Effect(label=message_id, amount=10_000))
            Effect.objects.bulk_create(effects)
