"""Celery tasks. The module has this name because Celery's autodiscovery looks for it.

Importing it needs Celery and no database, so that a settings module can use the schedule:

    from idempotency.tasks import BEAT_SCHEDULE
    CELERY_BEAT_SCHEDULE = {**BEAT_SCHEDULE, ...}
"""

from __future__ import annotations

from typing import Any

from celery import shared_task

#: Entries for Celery beat; intervals in seconds. A run that waited until the next one is dropped.
BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "idempotency-purge": {
        "task": "idempotency.tasks.purge_expired",
        "schedule": 600.0,
        "kwargs": {"max_seconds": 300},
        "options": {"expires": 600},
    },
    "idempotency-relay-outbox": {
        "task": "idempotency.tasks.relay_outbox",
        "schedule": 10.0,
        "kwargs": {"max_seconds": 60},
        "options": {"expires": 10},
    },
    "idempotency-reconcile": {
        "task": "idempotency.tasks.reconcile",
        "schedule": 10.0,
        "options": {"expires": 10},
    },
    "idempotency-complete": {
        "task": "idempotency.tasks.complete",
        "schedule": 10.0,
        "options": {"expires": 10},
    },
}


@shared_task(name="idempotency.tasks.purge_expired", ignore_result=True)
def purge_expired(
    using: str | None = None, batch_size: int | None = None, max_seconds: float | None = None
) -> dict[str, Any]:
    """`retention.purge()` and `outbox.purge_sent()`: schedule it for every database with operations.

    `using` is the database alias (default: the `USING` setting), `max_seconds` stops each of the two
    early; the next run goes on. Returns the number of rows by what happened to them.
    """
    from dataclasses import asdict

    from . import outbox, retention

    size = retention.BATCH_SIZE if batch_size is None else batch_size
    purged = asdict(retention.purge(using, batch_size=size, max_seconds=max_seconds))
    purged["messages"] = outbox.purge_sent(using, batch_size=size, max_seconds=max_seconds)
    return purged


@shared_task(name="idempotency.tasks.relay_outbox", ignore_result=True)
def relay_outbox(using: str | None = None, max_seconds: float | None = None) -> dict[str, int]:
    """`outbox.relay()`, for projects that run no `manage.py relay_outbox`. Runs may overlap.

    Returns the number of messages by what happened to them.
    """
    from dataclasses import asdict

    from . import outbox

    return asdict(outbox.relay(using=using, max_seconds=max_seconds))


@shared_task(name="idempotency.tasks.reconcile", ignore_result=True)
def reconcile(using: str | None = None, limit: int = 100) -> dict[str, int]:
    """`reconciliation.reconcile_due()`: asks what became of operations whose outcome is unknown.

    Returns the number of operations by what happened to them. Runs may overlap.
    """
    from dataclasses import asdict

    from . import reconciliation

    return asdict(reconciliation.reconcile_due(using, limit=limit))


@shared_task(name="idempotency.tasks.complete", ignore_result=True)
def complete(using: str | None = None, limit: int = 100) -> dict[str, int]:
    """`completion.complete_abandoned()`: goes on with stepwise operations nobody executes.

    Returns the number of operations by what happened to them. Runs may overlap.
    """
    from dataclasses import asdict

    from . import completion

    return asdict(completion.complete_abandoned(using, limit=limit))
