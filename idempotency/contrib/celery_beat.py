"""Celery beat: every scheduled slot is an operation of its own, whoever sends it and how often.

    celery -A shop beat -S idempotency.contrib.celery_beat:SlotScheduler

The scheduler puts the slot and its key into the task's headers; a task with `@idempotent_task()` and
no key of its own then runs each slot once. For django-celery-beat, mix `Slots` into its scheduler:
`class Scheduler(Slots, DatabaseScheduler): ...`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, date, datetime, time, timedelta
from itertools import product
from typing import Any

from celery import current_task
from celery.beat import PersistentScheduler
from celery.schedules import crontab, schedule
from celery.signals import before_task_publish

from .celery import KEY_HEADER, header, slot_key

#: Task header: the slot that the run stands for, an ISO 8601 instant.
SLOT_HEADER = "idempotency_slot"

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: How far back the latest slot of a crontab is looked for: a 29 February that is a Monday is rare.
_LOOK_BACK = 41 * 366  # days
_DAY = timedelta(days=1)


def slots(when: Any, since: datetime, until: datetime) -> Iterator[datetime]:
    """The slots of a schedule after `since` up to and including `until`, oldest first, in UTC.

    `when` is a crontab (in the time zone of its app), a timedelta or a number of seconds; intervals
    are counted from 1970-01-01T00:00Z, so that every beat counts alike. Raises TypeError for a
    schedule without slots (solar, custom).
    """
    if isinstance(when, crontab):
        day, last = _local_day(when, since), _local_day(when, until)
        while day <= last:
            yield from (slot for slot in _slots_of(when, day) if since < slot <= until)
            day += _DAY
        return
    every = _interval(when)
    if every is None:
        raise TypeError(f"{when!r} has no slots that can be counted")
    slot = _latest(every, since) + every
    while slot <= until:
        yield slot
        slot += every


def latest_slot(when: Any, at: datetime) -> datetime | None:
    """The slot that is due at `at`: the last one not after it. None if a schedule has no slots."""
    clocked = getattr(when, "clocked_time", None)  # django-celery-beat: once, at that time
    if clocked is not None:
        return clocked.astimezone(UTC)  # type: ignore[no-any-return]
    if isinstance(when, crontab):
        return _latest_of_crontab(when, at)
    every = _interval(when)
    return None if every is None else _latest(every, at)


def _local_day(when: Any, at: datetime) -> date:
    return at.astimezone(when.tz).date()


def _latest_of_crontab(when: Any, at: datetime) -> datetime | None:
    day, hour = _local_day(when, at), at.astimezone(when.tz).hour
    for back in range(_LOOK_BACK):
        # The last hours are enough, also where a change of clocks has moved one.
        hours = sorted(h for h in when.hour if h <= hour)[-3:]
        found = [slot for slot in _slots_of(when, day - back * _DAY, hours) if slot <= at]
        if found:
            return found[-1]
        hour = 23
    return None


def _slots_of(when: Any, day: date, hours: Iterable[int] | None = None) -> list[datetime]:
    """The slots of some hours of one day, made of the fields alone: Celery's own sums differ by version.

    When clocks go forward, 02:30 is an hour later, as Celery has it. When they go back, it is the first
    of the two; only what runs every hour has both.
    """
    is_that_day = (
        day.month in when.month_of_year
        and day.day in when.day_of_month
        and day.isoweekday() % 7 in when.day_of_week
    )
    if not is_that_day:
        return []
    found = set()
    for hour, minute in product(when.hour if hours is None else hours, when.minute):
        local = datetime.combine(day, time(hour, minute), when.tz)
        slot = local.astimezone(UTC)
        found.add(slot)
        if len(when.hour) == 24:
            found.add(max(slot, local.replace(fold=1).astimezone(UTC)))
    return sorted(found)


def _interval(when: Any) -> timedelta | None:
    if isinstance(when, int | float | timedelta):
        when = schedule(when)
    return when.run_every if isinstance(when, schedule) else None  # type: ignore[attr-defined]


def _latest(every: timedelta, at: datetime) -> datetime:
    return EPOCH + (at - EPOCH) // every * every


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
