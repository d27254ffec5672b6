"""Dead letters, what waits, and the purge."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from idempotency import outbox
from idempotency.models import MessageStatus, OutboxMessage
from idempotency.outbox.claims import claim
from tests.outboxes import PAST, Recorder, relayed, row, send, statuses

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _long_backoff(settings: Any) -> None:
    """What has failed is not due again before the test says so, however slow the machine is."""
    settings.IDEMPOTENCY = {"OUTBOX_BACKOFF": 60}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_dead_letters_are_redriven_with_all_attempts_before_them(
    recorder: Recorder, settings: Any
) -> None:
    """BUGS S10."""
    settings.IDEMPOTENCY |= {"OUTBOX_MAX_ATTEMPTS": 1}
    recorder.faults["t"] = ValueError
    messages = [send() for _ in range(3)]
    relayed(recorder)
    assert outbox.backlog() == outbox.Backlog(pending=0, due=0, dead=3, oldest_due=None)
    chosen = OutboxMessage.objects.filter(pk__in=[m.pk for m in messages[:2]])
    assert outbox.redrive(chosen) == 2
    assert row(messages[0]).attempts == 0
    recorder.faults.clear()
    assert relayed(recorder) == outbox.Summary(sent=2)
    assert {m.id for m in recorder.messages} == {m.message_id for m in messages}


def test_redrive_leaves_alone_what_is_sent_or_in_the_hands_of_a_relay(recorder: Recorder) -> None:
    """BUGS S12."""
    recorder.faults["failing"] = ValueError
    sent, failing, running = send("sent"), send("failing"), send("running")
    redriven = []

    def redrive(message: outbox.Message) -> None:
        if message.topic == "running":
            redriven.append(outbox.redrive(OutboxMessage.objects.all()))

    recorder.before = redrive
    relayed(recorder)
    assert redriven == [1]  # `failing`, whose back-off is not worth waiting for any more
    assert row(running).status == row(sent).status == MessageStatus.SENT
    assert row(failing).status == MessageStatus.PENDING
    assert recorder.topics.count("running") == 1


def test_the_backlog_counts_what_waits(recorder: Recorder) -> None:
    assert outbox.backlog() == outbox.Backlog(pending=0, due=0, dead=0, oldest_due=None)
    first = send()
    OutboxMessage.objects.update(available_at=PAST)
    send(not_before=timedelta(hours=1))
    assert outbox.backlog() == outbox.Backlog(pending=2, due=1, dead=0, oldest_due=PAST)
    assert row(first).available_at == PAST
    assert claim("default", 10, 60) is not None
    assert outbox.backlog() == outbox.Backlog(pending=2, due=0, dead=0, oldest_due=None)


def test_the_purge_removes_old_sent_messages_and_nothing_that_was_not_delivered(
    recorder: Recorder,
) -> None:
    """BUGS S09."""
    recorder.faults["dead"] = outbox.PermanentFailure("no")
    old, new, dead, pending = send("old"), send("new"), send("dead"), send("pending")
    OutboxMessage.objects.filter(pk=pending.pk).update(available_at=timezone.now() + timedelta(1))
    relayed(recorder)
    OutboxMessage.objects.filter(pk__in=[old.pk, dead.pk]).update(available_at=PAST)
    OutboxMessage.objects.filter(pk=pending.pk).update(available_at=PAST)
    assert outbox.purge_sent() == 1
    assert set(statuses()) == {"new", "dead", "pending"}
    assert outbox.purge_dead(older_than=timedelta(days=30)) == 1
    assert set(statuses()) == {"new", "pending"}
    assert outbox.purge_sent(older_than=0) == 1
    assert row(pending).status == MessageStatus.PENDING
    assert not OutboxMessage.objects.filter(pk=new.pk).exists()


def test_the_purge_works_in_batches_and_stops_when_its_time_is_over(recorder: Recorder) -> None:
    for _ in range(5):
        send()
    relayed(recorder)
    assert outbox.purge_sent(older_than=0, batch_size=2, max_seconds=0) == 2
    assert outbox.purge_sent(older_than=0, batch_size=2) == 3
