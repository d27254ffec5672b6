"""Celery's settings, if the project uses Celery. Reads them without importing Celery."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage

PURGE_TASK = "idempotency.tasks.purge_expired"


#: Seconds after which these brokers deliver again what nobody acknowledged, unless told otherwise.
VISIBILITY = {"redis": 3600, "rediss": 3600, "sentinel": 3600, "sqs": 1800}


def _configuration() -> Any:
    """The configuration of the project's Celery app; None when it has none.

    `sys.modules`, not an import: a project without Celery must not load it, and one with it has.
    """
    celery = sys.modules.get("celery")
    if celery is None:
        return None
    app = celery.current_app
    return None if app.main == "default" else app.conf  # "default": what Celery makes up by itself


def check_celery(**kwargs: object) -> list[CheckMessage]:
    conf = _configuration()
    if conf is None:
        return []
    return [*_lost_tasks(conf), *_redelivered_tasks(conf), *_single_tasks(conf)]


def _lost_tasks(conf: Any) -> Iterator[CheckMessage]:
    if conf.task_acks_late and not conf.task_reject_on_worker_lost:
        yield checks.Warning(
            "Celery acknowledges late, but a task whose worker process is killed is still lost: "
            "task_acks_late is set without task_reject_on_worker_lost.",
            hint="Set CELERY_TASK_REJECT_ON_WORKER_LOST = True as well; idempotent tasks may run again.",
            id="idempotency.W070",
        )


def _visibility(conf: Any) -> float | None:
    given = (conf.broker_transport_options or {}).get("visibility_timeout")
    return given or VISIBILITY.get(str(conf.broker_url or "").partition(":")[0])


def _redelivered_tasks(conf: Any) -> Iterator[CheckMessage]:
    """A broker that hides messages for a while delivers a task again that takes longer than that."""
    visibility, longest = _visibility(conf), conf.task_time_limit
    if conf.task_acks_late and visibility and longest and longest >= visibility:
        yield checks.Warning(
            f"A task may run for {longest:g} s, and the broker delivers it again after {visibility:g} s "
            "while it still runs.",
            hint="Set broker_transport_options['visibility_timeout'] above task_time_limit.",
            id="idempotency.W071",
        )


def _single_tasks(conf: Any) -> Iterator[CheckMessage]:
    """Idempotent tasks with options of their own, where the project's are in order."""
    visibility = _visibility(conf)
    for task in sys.modules["celery"].current_app.tasks.values():
        if not hasattr(task.run, "idempotency_policy") or not task.acks_late:
            continue
        if not task.reject_on_worker_lost and not conf.task_acks_late:
            yield checks.Warning(
                f"{task.name} acknowledges late, but is lost when its worker process is killed.",
                hint="Give it reject_on_worker_lost=True as well; it is idempotent and may run again.",
                obj=task.name,
                id="idempotency.W073",
            )
        longest = task.time_limit
        if visibility and longest and longest >= visibility and longest != conf.task_time_limit:
            yield checks.Warning(
                f"{task.name} may run for {longest:g} s, and the broker delivers it again after "
                f"{visibility:g} s while it still runs.",
                hint="Set broker_transport_options['visibility_timeout'] above its time_limit.",
                obj=task.name,
                id="idempotency.W074",
            )


def check_purge_schedule(**kwargs: object) -> list[CheckMessage]:
    conf = _configuration()
    if conf is None:
        return []
    entries = (conf.beat_schedule or {}).values()
    if any(entry.get("task") == PURGE_TASK for entry in entries):
        return []
    return [
        checks.Info(
            "Celery beat does not run the purge: operations pile up unless something else does.",
            hint="Add idempotency.tasks.BEAT_SCHEDULE to CELERY_BEAT_SCHEDULE. If cron or a database "
            "scheduler runs it, silence this with SILENCED_SYSTEM_CHECKS.",
            id="idempotency.I072",
        )
    ]
