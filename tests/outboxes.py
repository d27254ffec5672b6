"""Publishers and rows for tests of the outbox."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

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


def relayed(recorder: Recorder, **kwargs: Any) -> outbox.Summary:
    return outbox.relay(publisher=recorder, **kwargs)


def row(message: OutboxMessage) -> OutboxMessage:
    return OutboxMessage.objects.get(pk=message.pk)


def make_due() -> int:
    """Let every back-off and every lease be over."""
    return OutboxMessage.objects.filter(status=MessageStatus.PENDING).update(available_at=PAST)


def statuses() -> dict[str, str]:
    return dict(OutboxMessage.objects.order_by("pk").values_list("topic", "status"))


def fill(messages: list[tuple[str, Any, str]], using: str = "default") -> None:
    """Many messages at once: (topic, payload, ordering key)."""
    import uuid

    OutboxMessage.objects.using(using).bulk_create(
        [
            OutboxMessage(
                message_id=uuid.uuid4(),
                topic=topic,
                payload=json.dumps(payload),
                ordering_key=ordering_key,
                status=MessageStatus.PENDING,
                available_at=PAST,
                created_at=PAST,
                attempts=0,
                owner="",
                last_error="",
            )
            for topic, payload, ordering_key in messages
        ],
        batch_size=1000,
    )
