"""Dead letters and what lies around: count, re-drive, purge."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Count, Min, Q, QuerySet

from .. import db
from ..conf import conf
from ..models import MessageStatus, OutboxMessage
from .relays import seconds

#: Rows per statement.
BATCH_SIZE = 1000


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """What waits, for alerts and health checks."""

    #: Not sent yet, whatever for.
    pending: int
    #: Of these: a relay could take them now, but for the order.
    due: int
    dead: int
    #: When the oldest due message became available.
    oldest_due: datetime | None


def backlog(using: str | None = None) -> Backlog:
    """Count the messages of the database `using` that are not sent."""
    using = using or conf.USING
    pending = Q(status=MessageStatus.PENDING)
    now = db.now(using)
    is_held = Q(lease_expires_at__isnull=False) & Q(lease_expires_at__gt=now)
    due = pending & Q(available_at__lte=now) & ~is_held
    counts = (
        OutboxMessage.objects.using(using)
        .filter(~Q(status=MessageStatus.SENT))
        .aggregate(
            pending=Count("pk", filter=pending),
            due=Count("pk", filter=due),
            dead=Count("pk", filter=Q(status=MessageStatus.DEAD)),
            oldest_due=Min("available_at", filter=due),
        )
    )
    return Backlog(**counts)


def redrive(messages: QuerySet[OutboxMessage]) -> int:
    """Let the relay take these dead letters again, with all attempts before them.

    Messages in `messages` that wait for their next attempt become due at once; what is sent or in the
    hands of a relay is left alone. Returns how many were re-driven.
    """
    using = messages._db or conf.USING  # type: ignore[attr-defined] # `db` would ask a router
    pks = list(messages.using(using).order_by().values_list("pk", flat=True))
    stuck = Q(status=MessageStatus.DEAD) | Q(status=MessageStatus.PENDING, owner="", attempts__gt=0)
    redriven = 0
    for start in range(0, len(pks), BATCH_SIZE):
        rows = OutboxMessage.objects.using(using).filter(
            stuck, pk__in=pks[start : start + BATCH_SIZE]
        )
        redriven += rows.update(
            status=MessageStatus.PENDING,
            available_at=db.now(using),
            attempts=0,
            owner="",
        )
    return redriven


def purge_sent(
    using: str | None = None,
    *,
    older_than: float | timedelta | None = None,
    batch_size: int = BATCH_SIZE,
    max_seconds: float | None = None,
) -> int:
    """Delete messages that were sent longer ago than `older_than` (default: `OUTBOX_RETENTION`).

    In short statements, next to live traffic; may run more than once at the same time. A key given
    to `enqueue` keeps out a second message only while the first is still there. Returns the number
    of deleted rows.
    """
    age = conf.OUTBOX_RETENTION if older_than is None else older_than
    return _purge(using or conf.USING, MessageStatus.SENT, age, batch_size, max_seconds)


def purge_dead(
    using: str | None = None,
    *,
    older_than: float | timedelta,
    batch_size: int = BATCH_SIZE,
    max_seconds: float | None = None,
) -> int:
    """Delete dead letters that nobody re-drove for `older_than`. What waited behind them goes on.

    Nothing does this by itself: a dead letter is a message that was never delivered.
    """
    return _purge(using or conf.USING, MessageStatus.DEAD, older_than, batch_size, max_seconds)


def _purge(
    using: str, status: str, age: float | timedelta, batch_size: int, max_seconds: float | None
) -> int:
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    rows = OutboxMessage.objects.using(using)
    # `available_at` of a message that is done is the time of its last attempt, and has the index.
    old = Q(status=status, available_at__lte=db.now(using, after=-seconds(age)))
    deleted = 0
    while pks := list(
        rows.filter(old).order_by("available_at").values_list("pk", flat=True)[:batch_size]
    ):
        deleted += rows.filter(old, pk__in=pks).delete()[0]
        if len(pks) < batch_size or (deadline is not None and time.monotonic() >= deadline):
            break
    return deleted
