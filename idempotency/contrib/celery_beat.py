"""Celery beat: every scheduled slot is an operation of its own, whoever sends it and how often.

    celery -A shop beat -S idempotency.contrib.celery_beat:SlotScheduler

The scheduler puts the slot and its key into the task's headers; a task with `@idempotent_task()` and
no key of its own then runs each slot once. For django-celery-beat, mix `Slots` into its scheduler:
`class Scheduler(Slots, DatabaseScheduler): ...`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import current_task
from celery.beat import PersistentScheduler
from celery.schedules import crontab, maybe_schedule, schedule
from celery.signals import before_task_publish

from .celery import KEY_HEADER, header, slot_key

#: Task header: the slot that the run stands for, an ISO 8601 instant.
SLOT_HEADER = "idempotency_slot"

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: How far back the latest slot of a crontab is looked for, in growing steps.
_LOOK_BACK = (
    timedelta(minutes=2),
    timedelta(hours=2),
    timedelta(days=2),
    timedelta(days=8),
    timedelta(days=32),
    timedelta(days=367),
    timedelta(days=8 * 366),  # 29 February, over a century without one
)


def slots(when: Any, since: datetime, until: datetime) -> Iterator[datetime]:
    """The slots of a schedule after `since` up to and including `until`, oldest first, in UTC.

    `when` is a crontab (in the time zone of its app), a timedelta or a number of seconds; intervals
    are counted from 1970-01-01T00:00Z, so that every beat counts alike. Raises TypeError for a
    schedule without slots (solar, custom).
    """
    when = maybe_schedule(when)
    slot = _next(when, since)
    while slot <= until:
        yield slot
        slot = _next(when, slot)


def latest_slot(when: Any, at: datetime) -> datetime | None:
    """The slot that is due at `at`: the last one not after it. None if a schedule has no slots."""
    when = maybe_schedule(when)
    clocked = getattr(when, "clocked_time", None)  # django-celery-beat: once, at that time
    if clocked is not None:
        return clocked.astimezone(UTC)  # type: ignore[no-any-return]
    if isinstance(when, crontab):
        for back in _LOOK_BACK:
            found = list(slots(when, at - back, at))
            if found:
                return found[-1]
        return None
    if isinstance(when, schedule):
        every = _interval(when)
        return EPOCH + (at - EPOCH) // every * every
    return None


def _next(when: Any, after: datetime) -> datetime:
    if isinstance(when, crontab):
        start = after
        while True:
            local, delta, _ = when.remaining_delta(start)
            # Arithmetic on the wall clock: when clocks go back, the same reading comes twice.
            for fold in (0, 1):
                slot: datetime = (local + delta).replace(fold=fold).astimezone(UTC)
                if slot > after:
                    return slot
            start += timedelta(hours=1)
    if isinstance(when, schedule):
        every = _interval(when)
        return EPOCH + ((after - EPOCH) // every + 1) * every
    raise TypeError(f"{when!r} has no slots that can be counted")


def _interval(when: Any) -> timedelta:
    return when.run_every  # type: ignore[no-any-return]


def slot_headers(entry: str, slot: datetime) -> dict[str, str]:
    """Headers of a task that stands for this slot of this schedule entry."""
    return {KEY_HEADER: slot_key(entry, slot), SLOT_HEADER: slot.astimezone(UTC).isoformat()}


def current_slot() -> datetime | None:
    """The slot that the running task stands for; None when it was not scheduled.

    Work with it instead of now(): a run may be late, repeated or caught up.
    """
    task: Any = current_task
    found = header(task._get_current_object(), SLOT_HEADER) if task else None
    return None if found is None else datetime.fromisoformat(found)


def catch_up(entry: str, task: Any, when: Any, since: datetime, **options: Any) -> list[Any]:
    """Send `task` once for every slot after `since` that is due by now; returns the results.

    `entry` is the name in the beat schedule. Slots that were run already do nothing, so `since` may
    be generous. Other keyword arguments go to `apply_async`.
    """
    return [
        task.apply_async(headers=slot_headers(entry, slot), **options)
        for slot in slots(when, since, datetime.now(UTC))
    ]


_sending: ContextVar[dict[str, str] | None] = ContextVar("idempotency_slot", default=None)


@contextmanager
def _headers(entry: str, slot: datetime | None) -> Iterator[None]:
    token = _sending.set(None if slot is None else slot_headers(entry, slot))
    try:
        yield
    finally:
        _sending.reset(token)


@before_task_publish.connect(dispatch_uid="idempotency.slot_header")
def _carry_slot(headers: dict[str, Any] | None = None, **kwargs: Any) -> None:
    found = _sending.get()
    if found is not None and headers is not None:
        headers.update(found)


class Slots:
    """Mixin for a beat scheduler: every task it sends carries its slot and the slot's key.

    After a pause only the latest slot is sent; `catch_up` sends those before it.
    """

    def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> Any:
        with _headers(entry.name, latest_slot(entry.schedule, datetime.now(UTC))):
            return super().apply_async(entry, *args, **kwargs)  # type: ignore[misc]


class SlotScheduler(Slots, PersistentScheduler):
    """Celery's own scheduler with slots."""
