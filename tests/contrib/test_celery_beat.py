"""Slots of schedules, the scheduler that sends them, and catching up. Two real beats: test_celery_brokers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery.beat import ScheduleEntry
from celery.schedules import BaseSchedule, crontab

from idempotency.contrib.celery import KEY_HEADER, idempotent_task
from idempotency.contrib.celery_beat import (
    SLOT_HEADER,
    SlotScheduler,
    catch_up,
    current_slot,
    latest_slot,
    slots,
)
from idempotency.models import Operation
from tests.app.models import Effect
from tests.queues import Queue, queue

DAY = timedelta(days=1)


@pytest.fixture
def broker() -> Iterator[Queue]:
    with queue() as found:
        found.app.conf.timezone = "Europe/Berlin"
        yield found


def at(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type,misc]


def nightly(broker: Queue) -> crontab:
    return crontab(hour=2, minute=30, app=broker.app)


@pytest.mark.parametrize(
    ("day", "expected"),
    [
        (at(2026, 3, 28), ["28T01:30", "29T01:30", "30T00:30"]),  # 29th: 02:30 does not exist
        (at(2026, 10, 24), ["24T00:30", "25T00:30", "26T01:30"]),  # 25th: 02:30 comes twice
    ],
)
def test_a_daily_task_has_one_slot_a_day_also_when_clocks_change(
    broker: Queue, day: datetime, expected: list[str]
) -> None:
    found = slots(nightly(broker), day, day + 3 * DAY)
    assert [slot.isoformat()[8:16] for slot in found] == expected


def test_intervals_are_counted_from_one_instant_for_every_beat() -> None:
    noon = at(2026, 1, 1, 12)
    assert list(slots(600, noon, noon + timedelta(minutes=25))) == [
        noon + timedelta(minutes=10),
        noon + timedelta(minutes=20),
    ]
    late = timedelta(minutes=9, seconds=59)
    assert latest_slot(timedelta(minutes=10), noon) == noon
    assert latest_slot(timedelta(minutes=10), noon + late) == noon


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"minute": "*"}, at(2026, 7, 8, 9, 10)),
        ({"minute": 0}, at(2026, 7, 8, 9)),
        ({"minute": 0, "hour": 0}, at(2026, 7, 7, 22)),
        ({"minute": 0, "hour": 6, "day_of_week": "sun"}, at(2026, 7, 5, 4)),
        ({"minute": 0, "hour": 0, "day_of_month": 1}, at(2026, 6, 30, 22)),
        ({"minute": 0, "hour": 0, "day_of_month": 29, "month_of_year": 2}, at(2024, 2, 28, 23)),
        (
            {"minute": 0, "hour": 0, "day_of_month": 29, "month_of_year": 2, "day_of_week": "mon"},
            at(2016, 2, 28, 23),
        ),
    ],
)
def test_the_latest_slot_is_the_last_one_that_is_due(
    broker: Queue, schedule: dict[str, Any], expected: datetime
) -> None:
    found = latest_slot(crontab(**schedule, app=broker.app), at(2026, 7, 8, 9, 10, 59))
    assert found == expected


def test_a_slot_is_due_at_its_very_instant(broker: Queue) -> None:
    assert latest_slot(nightly(broker), at(2026, 7, 8, 0, 30)) == at(2026, 7, 8, 0, 30)
    assert list(slots(nightly(broker), at(2026, 7, 7, 0, 30), at(2026, 7, 8, 0, 30))) == [
        at(2026, 7, 8, 0, 30)
    ]


@pytest.mark.parametrize("day", [at(2026, 3, 29), at(2026, 10, 25)])
def test_what_runs_every_hour_misses_none_when_clocks_change(broker: Queue, day: datetime) -> None:
    often = crontab(minute="*/15", app=broker.app)
    since = day + timedelta(minutes=7)
    expected = [day + timedelta(minutes=15 * number) for number in range(1, 4 * 24 + 1)]
    assert list(slots(often, since, day + DAY)) == expected
    assert [latest_slot(often, slot + timedelta(minutes=14)) for slot in expected] == expected


@pytest.mark.parametrize("day", [at(2026, 3, 28), at(2026, 10, 24)])
@pytest.mark.parametrize(
    "schedule",
    [
        {"hour": 2, "minute": 30},
        {"hour": 0, "minute": 0},
        {"hour": "1-3", "minute": "0,30"},
        {"hour": "*/2", "minute": 15},
        {"hour": 2, "minute": 30, "day_of_week": "sun"},
        {"minute": "*/15"},
    ],
)
def test_whatever_beat_sends_when_clocks_change_is_a_slot_of_its_own(
    broker: Queue, day: datetime, schedule: dict[str, Any]
) -> None:
    """What beat sends without a slot of its own would be taken for a duplicate, and not run."""
    now = last = day
    zone = broker.app.timezone
    when = crontab(**schedule, app=broker.app, nowfun=lambda: now.astimezone(zone))
    found = []
    while now < day + 3 * DAY:
        now += timedelta(minutes=15)
        if when.is_due(last.astimezone(zone)).is_due:
            found.append(latest_slot(when, now))
            last = now
    assert found
    assert len(found) == len(set(found))
    assert set(found) <= set(slots(when, day, now))


def test_a_crontab_keeps_the_time_zone_of_its_own_app(broker: Queue) -> None:
    with queue() as other:  # the current application, in UTC
        assert other.app.conf.timezone is None
        assert latest_slot(nightly(broker), at(2026, 7, 8, 1)) == at(2026, 7, 8, 0, 30)


def test_one_off_tasks_have_the_slot_they_are_set_to() -> None:
    """BUGS N09: django-celery-beat's clocked schedule, due again whenever schedules are saved."""
    assert latest_slot(SimpleNamespace(clocked_time=at(2026, 1, 1)), at(2026, 2, 1)) == at(
        2026, 1, 1
    )


def test_schedules_without_slots_are_left_alone(broker: Queue) -> None:
    sunrise = BaseSchedule(app=broker.app)  # as Celery's solar, or one of the project's own
    assert latest_slot(sunrise, at(2026, 1, 1)) is None
    with pytest.raises(TypeError, match="no slots"):
        list(slots(sunrise, at(2026, 1, 1), at(2026, 1, 2)))


# Sending -----------------------------------------------------------------------------------------


def report(broker: Queue) -> Any:
    @broker.task(name="report")
    @idempotent_task()
    def report() -> str:
        Effect.objects.create(label=f"report {current_slot()}")
        return str(current_slot())

    return report


def scheduler(broker: Queue, schedule: Any) -> Any:
    """A beat that has just started; nothing is kept between two of them."""
    made = SlotScheduler(broker.app, lazy=True)
    made.data = {}
    entry = ScheduleEntry(
        name="every-hour",
        task="report",
        schedule=schedule,
        options={"headers": {"custom": "kept"}},
        app=broker.app,
    )
    made._store = {"entries": {"every-hour": entry}}
    made.sync = lambda: None
    return made, entry


@pytest.mark.django_db(transaction=True)
def test_two_schedulers_that_send_one_slot_run_it_once(broker: Queue) -> None:
    """BUGS N07, N13: the second sends 5 s later, with another schedule file."""
    report(broker)
    for _ in range(2):
        made, entry = scheduler(broker, timedelta(days=365 * 500))
        made.apply_async(entry)
    first, second = broker.waiting()
    assert first.id != second.id
    assert first.headers[KEY_HEADER] == second.headers[KEY_HEADER]
    assert first.headers["custom"] == "kept"
    values = [broker.deliver(each).value for each in (first, second)]
    assert values == [str(datetime.fromisoformat(first.headers[SLOT_HEADER]))] * 2
    assert Effect.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_a_schedule_without_slots_is_sent_without_a_key(broker: Queue) -> None:
    report(broker)
    made, entry = scheduler(broker, BaseSchedule(app=broker.app))
    made.apply_async(entry)
    assert KEY_HEADER not in broker.sent().headers


@pytest.mark.django_db(transaction=True)
def test_the_slot_ends_with_the_sending(broker: Queue) -> None:
    task = report(broker)
    made, entry = scheduler(broker, timedelta(hours=1))
    made.apply_async(entry)
    task.delay()
    assert [KEY_HEADER in each.headers for each in broker.waiting()] == [True, False]


@pytest.mark.django_db(transaction=True)
def test_slots_that_are_caught_up_are_operations_of_their_own_and_run_once(broker: Queue) -> None:
    task = report(broker)
    decade = timedelta(days=3650)
    made, entry = scheduler(broker, decade)
    made.apply_async(entry)  # the latest one ran already
    broker.work()
    for _ in range(2):
        assert len(catch_up("every-hour", task, decade, at(1985, 1, 1))) == 4
    assert {ended.state for ended in broker.work()} == {"SUCCESS"}
    assert Effect.objects.count() == Operation.objects.count() == 4


@pytest.mark.django_db(transaction=True)
def test_a_task_that_was_not_scheduled_has_no_slot(broker: Queue) -> None:
    report(broker).delay()
    assert [ended.value for ended in broker.work()] == ["None"]
    assert current_slot() is None
