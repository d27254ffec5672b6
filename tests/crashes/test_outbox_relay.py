"""Relays and their databases die at any moment: nothing is lost, and repeats carry the same id."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction

from idempotency import inbox, outbox
from idempotency.models import MessageStatus, OutboxMessage
from idempotency.outbox import relays
from tests.app.models import Effect
from tests.callers import sever
from tests.crashes.points import Points
from tests.outboxes import File, Recorder, fill, make_due, row, send, statuses
from tests.processes import Child, Died, Signal, eventually
from tests.servers import mariadb, postgresql
from tests.servers.base import Server
from tests.settings import database

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _long_backoff(settings: Any) -> None:
    """What has failed is not due again before the test says so, however slow the machine is."""
    settings.IDEMPOTENCY = {"OUTBOX_BACKOFF": 60}


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "published")


def kill_me(message: outbox.Message) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_order_but_for_repeats(payloads: list[int]) -> bool:
    """A repeat may go back; a first publication never overtakes another."""
    first = list(dict.fromkeys(payloads))
    return first == sorted(first)


def test_a_relay_killed_between_publish_and_mark_repeats_the_message_under_the_same_id(
    file: File,
) -> None:
    """BUGS S05, S06."""
    message = send("t", {"n": 1})
    file.after = kill_me
    with pytest.raises(Died):
        Child(lambda: outbox.relay(publisher=file)).result()
    assert row(message).status == MessageStatus.PENDING
    file.after = lambda message: None
    assert outbox.relay(publisher=file) == outbox.Summary()  # the dead relay's lease still runs
    make_due()
    assert outbox.relay(publisher=file) == outbox.Summary(sent=1)
    assert [line.id for line in file.lines()] == [str(message.message_id)] * 2
    assert row(message).attempts == 2


def test_a_message_that_kills_its_relay_becomes_a_dead_letter_and_takes_nobody_with_it(
    file: File, settings: Any
) -> None:
    """BUGS S13."""
    settings.IDEMPOTENCY |= {"OUTBOX_MAX_ATTEMPTS": 4}
    for topic in ("a", "killer", "b"):
        send(topic, topic)
    file.before = lambda message: kill_me(message) if message.topic == "killer" else None
    for _ in range(5):
        with suppress(Died):
            Child(lambda: outbox.relay(publisher=file)).result()
        make_due()
    assert statuses() == {"a": "sent", "killer": "dead", "b": "sent"}
    killer = OutboxMessage.objects.get(topic="killer")
    assert killer.attempts == 4
    assert "vanished" in killer.last_error
    assert OutboxMessage.objects.get(topic="b").attempts == 2


def test_a_relay_may_die_at_every_point_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUGS B11, S01."""
    monkeypatch.setattr(relays, "FLUSH_SECONDS", 3600)  # the same points on every machine

    def prepared(number: int) -> File:
        OutboxMessage.objects.all().delete()
        for topic, key in (("a", "k"), ("b", "k"), ("bad", ""), ("c", "")):
            send(topic, topic, ordering_key=key)
        file = File(tmp_path / str(number))
        file.before = refuse
        return file

    def refuse(message: outbox.Message) -> None:
        if message.topic == "bad":
            raise ValueError

    def act(file: File, kill_at: int | None) -> list[str]:
        points = Points(kill_at)
        with points.watched():
            outbox.relay(publisher=file)
        return points.passed

    file = prepared(0)
    labels = Child(lambda: act(file, None)).result()
    assert any("COMMIT" in label for label in labels)
    for number in range(1, len(labels) + 1):
        file = prepared(number)
        with pytest.raises(Died):
            Child(partial(act, file, number)).result()
        file.before = lambda message: None
        for _ in range(4):  # the others of the dead relay's batch are tried one by one
            make_due()
            outbox.relay(publisher=file)
        where = f"{number} {labels[number - 1]}"
        assert set(statuses().values()) == {"sent"}, where
        ids = {str(i) for i in OutboxMessage.objects.values_list("message_id", flat=True)}
        assert {line.id for line in file.lines()} == ids, where
        keyed = [line.payload for line in file.lines() if line.ordering_key]
        assert in_order_but_for_repeats([ord(payload) for payload in keyed]), where


def test_every_effect_is_there_once_after_a_storm_of_killed_relays() -> None:
    """BUGS S07: The relay repeats, the inbox does not."""
    total, seed = 300, random.randrange(1 << 30)
    fill([("t", number, f"key {number % 5}") for number in range(total)])

    def consume(message: outbox.Message) -> None:
        with inbox.receive(consumer="shop", message_id=str(message.id)) as received:
            if received.is_new:
                Effect.objects.create(label=message.ordering_key, amount=message.payload)

    def doomed(number: int) -> None:
        chance = random.Random(seed + number)

        def publish(message: outbox.Message) -> None:
            consume(message)
            if chance.random() < 0.02:
                kill_me(message)

        outbox.relay(publisher=publish)

    for number in range(6):
        with suppress(Died):
            Child(partial(doomed, number)).result()
        make_due()
    while OutboxMessage.objects.filter(status=MessageStatus.PENDING).exists():
        outbox.relay(publisher=consume)
        make_due()
    effects = Effect.objects.order_by("pk").values_list("label", "amount")
    assert Counter(amount for _, amount in effects) == Counter(range(total)), seed
    for _, group in itertools.groupby(sorted(effects, key=lambda e: e[0]), key=lambda e: e[0]):
        amounts = [amount for _, amount in group]
        assert amounts == sorted(amounts), seed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_finishes_the_message_in_hand_when_it_is_told_to_stop(
    file: File, settings: Any, number: signal.Signals
) -> None:
    for topic in ("in hand", "later"):
        send(topic, topic)
    began, told = Signal(), Signal()

    def hold(message: outbox.Message) -> None:
        began.set()
        told.wait()

    file.before = hold
    settings.IDEMPOTENCY |= {"OUTBOX_PUBLISHER": file}
    child = Child(lambda: call_command("relay_outbox", verbosity=0))
    began.wait()
    os.kill(child.pid, number)
    told.set()
    assert child.result() is None  # it returned, nothing killed it
    assert [line.payload for line in file.lines()] == ["in hand"]
    assert statuses() == {"in hand": "sent", "later": "pending"}
    later = OutboxMessage.objects.get(topic="later")
    assert (later.attempts, later.owner) == (0, "")


def test_an_idle_command_picks_up_what_comes_and_stops(file: File, settings: Any) -> None:
    settings.IDEMPOTENCY |= {"OUTBOX_PUBLISHER": file}
    child = Child(lambda: call_command("relay_outbox", interval=0.05, verbosity=0))
    for number in range(3):
        send("t", number)
        eventually(lambda: len(file.lines()) == OutboxMessage.objects.count(), "it was published")
    os.kill(child.pid, signal.SIGTERM)
    child.result()
    assert set(OutboxMessage.objects.values_list("status", flat=True)) == {"sent"}


@pytest.fixture
def private(vendor: str, transactional_db: None) -> Iterator[Server]:
    """A database server of this run's kind that a test may restart, behind the alias `other`."""
    kind = {"postgresql": postgresql, "mysql": mariadb}[vendor]
    if not kind.available():
        pytest.skip(f"no {vendor} server can be started here")

    def connect_to(config: dict[str, Any]) -> None:
        connections["other"].close()
        del connections["other"]
        connections.settings["other"] = config

    before = connections.settings["other"]
    with kind.server(fsync=True) as server:
        settings = {"default": {}, "other": database(server.url())}
        connect_to(connections.configure_settings(settings)["other"])
        try:
            call_command("migrate", "idempotency", database="other", verbosity=0)
            yield server
        finally:
            connect_to(before)


@pytest.mark.vendor("postgresql", "mysql")  # SQLite has no server
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize("kill", [False, True], ids=["restart", "crash"])
def test_a_relay_survives_the_restart_of_its_database(
    private: Server, file: File, settings: Any, kill: bool
) -> None:
    """BUGS S17."""
    settings.IDEMPOTENCY |= {"OUTBOX_LEASE": 3, "OUTBOX_INTERVAL": 0.05}

    def enqueue(numbers: range) -> None:
        with transaction.atomic("other"):
            for number in numbers:
                outbox.enqueue("t", number, ordering_key=f"k{number % 3}", using="other")

    def run() -> None:
        worker = outbox.Relay(using="other", publisher=file)
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
        worker.run()

    def payloads() -> list[int]:
        return [line.payload for line in file.lines()]

    def all_sent() -> None:
        try:
            eventually(lambda: not rows.filter(status="pending").exists(), "everything sent")
        except AssertionError:
            os.kill(child.pid, signal.SIGTERM)
            child.result()  # raises what ended the relay, if anything did
            raise

    rows = OutboxMessage.objects.using("other")
    enqueue(range(300))
    file.before = lambda message: time.sleep(0.005)  # so that it is in the middle of them
    child = Child(run)
    eventually(payloads, "a first message published")
    private.kill() if kill else private.stop()
    assert len(payloads()) < 300
    connections["other"].close()
    private.start()
    enqueue(range(300, 400))
    all_sent()
    private.restart()  # while the relay is idle
    connections["other"].close()
    enqueue(range(400, 410))
    all_sent()
    os.kill(child.pid, signal.SIGTERM)
    child.result()
    assert set(payloads()) == set(range(410))
    assert len({line.id for line in file.lines()}) == 410
    for key in range(3):
        assert in_order_but_for_repeats([n for n in payloads() if n % 3 == key])


@pytest.mark.parametrize(
    "work",
    [lambda relay: relay.run(once=True), lambda relay: relay.run_once()],
    ids=["with the next claim", "alone"],
)
def test_a_mark_that_fails_for_a_moment_is_written_again(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[outbox.Relay], Any]
) -> None:
    """BUGS S06: The message was published: only the mark is repeated."""
    from django.db import OperationalError

    from idempotency.outbox.claims import Claim

    message, recorder = send(), Recorder()
    sent, failures = Claim.sent, [OperationalError(2013, "Lost connection")]

    def flaky(self: Claim, pks: list[int]) -> int:
        if failures:
            raise failures.pop()
        return sent(self, pks)

    monkeypatch.setattr(Claim, "sent", flaky)
    worker = outbox.Relay(publisher=recorder)
    work(worker)
    assert worker.summary == outbox.Summary(sent=1)
    assert len(recorder.messages) == 1
    assert row(message).status == MessageStatus.SENT
    assert failures == []


@pytest.mark.vendor("postgresql", "mysql")
def test_a_connection_that_breaks_with_autocommit_off_is_replaced(file: File) -> None:
    """What a block leaves behind when even its rollback finds nobody to talk to."""
    send("t", 1)
    worker = outbox.Relay(publisher=file)

    def break_off(message: outbox.Message) -> None:
        sever()
        connections["default"].autocommit = False

    file.after = break_off
    worker.run(once=True)
    assert worker.summary == outbox.Summary(sent=1)
    assert [line.payload for line in file.lines()] == [1]
