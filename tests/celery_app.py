"""The Celery application of the worker and beat processes that tests start.

`CELERY_BROKER_URL` names the broker, `RESULT_BACKEND` where results go, `VISIBILITY_TIMEOUT` when Redis
delivers a message again that nobody acknowledged.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

app = Celery("tests")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.conf.update(
    result_backend=os.environ.get("RESULT_BACKEND"),
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    broker_transport_options={
        "visibility_timeout": float(os.environ.get("VISIBILITY_TIMEOUT", "3600")),
        "unacked_restore_interval": 0.5,
        "unacked_restore_throttle": 1,
    }
    if os.environ.get("CELERY_BROKER_URL", "").startswith("redis:")
    else {},
    beat_schedule={"every-second": {"task": "tests.scheduled", "schedule": 1.0}},
)

# The apps are not loaded when Celery imports this module, so the tasks are defined when they are.


@app.on_after_finalize.connect
def define_tasks(**kwargs: Any) -> None:
    import django

    django.setup()
    from idempotency.contrib.celery import idempotent_task
    from idempotency.contrib.celery_beat import current_slot
    from tests.app.models import Effect

    def effect(label: str) -> int:
        return Effect.objects.create(label=label).pk

    @app.task(name="tests.quick")
    @idempotent_task(countdown=0.2)
    def quick(label: str) -> int:
        return effect(label)

    @app.task(name="tests.held")
    @idempotent_task(countdown=0.2)
    def held(label: str, directory: str) -> int:
        """Has its effect, says who it is, and waits until it may end."""
        pk = effect(label)
        place = Path(directory)
        place.joinpath(f"started-{os.getpid()}").touch()
        while not place.joinpath("go").exists():
            time.sleep(0.01)
        return pk

    @app.task(name="tests.limited", time_limit=1)
    @idempotent_task(key="label", countdown=0.2)
    def limited(label: str, directory: str) -> int:
        return held.run.__wrapped__(label, directory)

    @app.task(name="tests.dies")
    @idempotent_task(countdown=0.2, give_up_after=3)
    def dies(label: str) -> None:
        effect(label)
        os.kill(os.getpid(), signal.SIGKILL)

    @app.task(name="tests.total")
    @idempotent_task(countdown=0.2)
    def total(numbers: list[int], label: str) -> int:
        effect(label)
        return len(numbers)

    @app.task(name="tests.scheduled")
    @idempotent_task(countdown=0.2)
    def scheduled() -> None:
        effect(f"slot {current_slot()}")
