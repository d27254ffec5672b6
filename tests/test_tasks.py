"""The Celery tasks: thin, named, schedulable."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import celery
import pytest
from celery.beat import Scheduler

from idempotency import tasks
from idempotency.models import Operation
from tests.test_retention import FUTURE, make, make_message


@pytest.mark.django_db
def test_the_task_purges_and_says_how_much() -> None:
    make("over")
    make("tombstone", tombstone_until=FUTURE)
    make_message()
    result: Any = tasks.purge_expired.apply(kwargs={"batch_size": 10}).get()
    assert result == {
        "deleted": 1,
        "tombstoned": 1,
        "interrupted": 0,
        "complete": True,
        "messages": 1,
    }
    assert list(Operation.objects.values_list("key", flat=True)) == ["tombstone"]


@pytest.mark.django_db(databases=["default", "other"])
def test_the_task_purges_the_named_database() -> None:
    make()
    make(using="other")
    assert tasks.purge_expired.apply(args=["other"]).get()["deleted"] == 1
    assert Operation.objects.count() == 1


def test_the_schedule_names_tasks_that_exist_with_arguments_they_take() -> None:
    app = celery.Celery("schedule", set_as_current=False, broker="memory://")
    app.conf.beat_schedule = tasks.BEAT_SCHEDULE
    app.finalize()
    scheduler = Scheduler(app, lazy=True)
    scheduler.merge_inplace(app.conf.beat_schedule)
    assert set(scheduler.schedule) == set(tasks.BEAT_SCHEDULE)
    for entry in scheduler.schedule.values():
        task = app.tasks[entry.task]
        assert task.name == entry.task
        task.__header__(*entry.args, **entry.kwargs)  # raises TypeError for a wrong argument


def test_a_settings_module_can_import_the_schedule_before_the_apps_are_loaded() -> None:
    code = "from idempotency.tasks import BEAT_SCHEDULE; print(*BEAT_SCHEDULE)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "idempotency-purge" in done.stdout
