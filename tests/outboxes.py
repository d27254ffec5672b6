"""Publishers and rows for tests of the outbox."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from django.db import transaction

from idempotency import outbox
from idempotency.models import MessageStatus, OutboxMessage

PAST = datetime(2020, 1, 1, tzinfo=UTC)


class Recorder:
    """A publisher that keeps what it was given. `faults` maps a topic to what it raises."""

    def __init__(self, **faults: Exception | type[Exception]) -> None:
        self.messages: list[outbox.Message] = []
        self.faults = faults
        #: Called with every message before anything else.
        self.before: Callable[[outbox.Message], Any] = lambda message: None

    def publish(self, message: outbox.Message) -> None:
        self.before(message)
        self.messages.append(message)
        if message.topic in self.faults:
            raise self.faults[message.topic]

    @property
    def topics(self) -> list[str]:
        return [message.topic for message in self.messages]

    @property
    def payloads(self) -> list[Any]:
        return [message.payload for message in self.messages]


def send(topic: str = "t", payload: Any = None, **kwargs: Any) -> OutboxMessage:
    with transaction.atomic(kwargs.get("using")):
        return outbox.enqueue(topic, payload, **kwargs)


def relayed(recorder: Any, **kwargs: Any) -> outbox.Summary:
    return outbox.relay(publisher=recorder, **kwargs)


def row(message: OutboxMessage) -> OutboxMessage:
    return OutboxMessage.objects.get(pk=message.pk)


def make_due() -> int:
    """Let every back-off and every lease be over."""
    rows = OutboxMessage.objects.filter(status=MessageStatus.PENDING)
    rows.filter(lease_expires_at__isnull=False).update(lease_expires_at=PAST)
    return rows.update(available_at=PAST)


def statuses() -> dict[str, str]:
    return dict(OutboxMessage.objects.order_by("pk").values_list("topic", "status"))


def fill(messages: list[tuple[str, Any, str]], using: str = "default") -> None:
    """Many messages at once: (topic, payload, ordering key)."""
    OutboxMessage.objects.using(using).bulk_create(
        [
            OutboxMessage(
                message_id=uuid.uuid4(),
                topic=topic,
                payload=json.dumps(payload),
                ordering_key=ordering_key,
                status=MessageStatus.PENDING,
                available_at=PAST + timedelta(milliseconds=number),
                created_at=PAST,
                attempts=0,
                owner="",
                last_error="",
            )
            for number, (topic, payload, ordering_key) in enumerate(messages)
        ],
        batch_size=1000,
    )


class Line(NamedTuple):
    """One publication: by which process, of which message."""

    process: int
    id: str
    ordering_key: str
    payload: Any


class File:
    """A publisher for several processes: a line per message, in the order they were published."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()
        #: Called with every message before and after its line is written.
        self.before: Callable[[outbox.Message], Any] = lambda message: None
        self.after: Callable[[outbox.Message], Any] = lambda message: None

    def __call__(self, message: outbox.Message) -> None:
        self.before(message)
        line = [os.getpid(), str(message.id), message.ordering_key, message.payload]
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, f"{json.dumps(line)}\n".encode())  # one write: lines do not mix
        finally:
            os.close(descriptor)
        self.after(message)

    def lines(self) -> list[Line]:
        return [Line(*json.loads(line)) for line in self.path.read_text().splitlines()]
