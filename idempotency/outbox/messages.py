"""`enqueue`: one row in the caller's transaction. `Message`: what a publisher gets."""

from __future__ import annotations

import dataclasses
import enum
import json
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from django.db import connections
from django.utils import timezone

from .. import db, engine, keys
from ..conf import conf
from ..exceptions import ConfigurationError, IdempotencyError
from ..models import MessageStatus, OutboxMessage

#: Longest topic, in characters.
MAX_TOPIC = 200
#: Longest ordering key, in characters.
MAX_ORDERING_KEY = 255
#: Longest key, in characters.
MAX_KEY = 1000


class PublishFailed(IdempotencyError):
    """Raised by a publisher or handler that can say why: the message is tried again after a back-off.

    The text is shown to operators, unlike that of other exceptions; keep personal data out of it.
    """


class RetryAfter(PublishFailed):
    """Raised by a publisher or handler: try this message again in `seconds`, which counts as an attempt."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        super().__init__(reason or f"again in {seconds:g} s")
        self.seconds = max(0.0, float(seconds))


class PermanentFailure(PublishFailed):
    """Raised by a publisher or handler: no retry can help, the message is a dead letter now."""


@dataclass(kw_only=True, eq=False)
class Message:
    """One message on its way out; the same `id` on every attempt."""

    #: What consumers deduplicate by.
    id: uuid.UUID
    topic: str
    #: The payload as JSON text, byte for byte the same on every attempt.
    body: str
    ordering_key: str
    #: The operation that caused the message, if one did.
    operation_id: uuid.UUID | None
    #: This attempt; the first is 1.
    attempt: int
    created_at: datetime
    #: Database alias the message lives in.
    using: str
    #: Primary key of its row.
    pk: int

    @cached_property
    def payload(self) -> Any:
        """The payload as `enqueue` got it, in the plain types of JSON."""
        return json.loads(self.body)


def enqueue(
    topic: str,
    payload: Any,
    *,
    ordering_key: str = "",
    key: str | None = None,
    not_before: datetime | timedelta | None = None,
    using: str | None = None,
) -> OutboxMessage:
    """Write a message into the caller's transaction; the relay publishes it after the commit.

    `payload`: anything JSON can say, also Decimal and UUID (as strings), dates and times (ISO 8601),
    enum members (their value) and dataclasses (as objects).
    `ordering_key`: messages that share it are published in the order they were written.
    `key`: names the message within its topic. Enqueuing the same key again adds nothing and
    returns the message that is there, whatever its payload; its id depends on topic and key only.
    `not_before`: an aware datetime, or a timedelta from now on the database's clock.
    `using`: database alias; default: that of the operation being executed, else the `USING` setting.

    The result's `message_id` is known at once and never changes. Raises ConfigurationError outside
    a transaction, TypeError or ValueError for a payload or argument that cannot be stored.
    """
    operation = engine.current()
    if using is None:
        using = (operation._state.db if operation is not None else None) or conf.USING
    if not db.in_transaction(using):
        raise ConfigurationError(
            f"outbox.enqueue({topic!r}) needs an open transaction on {using!r}: the message must commit "
            f"together with what it tells about. Use transaction.atomic(using={using!r}) around both."
        )
    _check_text("topic", topic, MAX_TOPIC)
    if ordering_key != "":
        _check_text("ordering_key", ordering_key, MAX_ORDERING_KEY)
    if key is not None:
        _check_text("key", key, MAX_KEY)
    message = OutboxMessage(
        message_id=uuid.uuid4() if key is None else keys.operation_id(("outbox", topic), key),
        operation_id=operation.pk
        if operation is not None and operation._state.db == using
        else None,
        topic=topic,
        payload=_dumps(topic, payload),
        ordering_key=ordering_key,
        status=MessageStatus.PENDING,
        attempts=0,
        owner="",
        last_error="",
    )
    return _insert(using, message, _available(using, not_before), is_keyed=key is not None)


def _insert(using: str, message: OutboxMessage, available: Any, *, is_keyed: bool) -> OutboxMessage:
    message.created_at = db.now(using)
    message.available_at = available
    rows = OutboxMessage.objects.using(using)
    if is_keyed:
        # Waits for another transaction that enqueues the same key, and yields when that commits.
        rows.bulk_create([message], ignore_conflicts=True)
        found = rows.filter(message_id=message.message_id)
        # A repeatable-read snapshot may be older than the row; a locking read never is.
        return found.first() or found.select_for_update().get()
    message.save(using=using, force_insert=True)
    # The values are expressions of the database's clock: read when somebody asks.
    for field in ("created_at", "available_at"):
        if not isinstance(message.__dict__[field], datetime):
            del message.__dict__[field]
    return message


def _available(using: str, not_before: object) -> Any:
    if not_before is None:
        return db.now(using)
    if isinstance(not_before, timedelta):
        return db.now(using, after=not_before.total_seconds())
    if not isinstance(not_before, datetime) or timezone.is_naive(not_before):
        raise ValueError("outbox.enqueue: not_before takes an aware datetime or a timedelta")
    if not settings.USE_TZ and connections[using].vendor != "postgresql":
        return not_before.astimezone(UTC).replace(tzinfo=None)  # what the column holds there
    return not_before


def _check_text(name: str, value: object, longest: int) -> None:
    if not isinstance(value, str):
        raise TypeError(f"outbox.enqueue: {name} must be a string, not {type(value).__name__}")
    if not 1 <= len(value) <= longest:
        raise ValueError(
            f"outbox.enqueue: {name} has {len(value)} characters; 1 to {longest} are allowed"
        )
    if "\x00" in value:
        raise ValueError(f"outbox.enqueue: {name} contains a NUL character")


class Encoder(DjangoJSONEncoder):
    """Plain JSON for the outside world."""

    def default(self, o: Any) -> Any:
        if dataclasses.is_dataclass(o) and not isinstance(o, type):
            return {field.name: getattr(o, field.name) for field in dataclasses.fields(o)}
        if isinstance(o, enum.Enum):
            return o.value
        return super().default(o)


def _dumps(topic: str, payload: Any) -> str:
    try:
        return json.dumps(payload, cls=Encoder, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"The payload of {topic!r} cannot be written as JSON: {error}. Use plain values; for a model "
            "instance its primary key."
        ) from None
