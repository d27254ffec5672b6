"""Celery: `@idempotent_task`, slot keys for scheduled tasks, and the operation's id in task headers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any, TypeVar, cast

from celery import current_task
from celery.exceptions import Ignore
from celery.signals import before_task_publish
from django.utils import timezone

from .. import encoding, engine, functions
from ..exceptions import InProgress, Unavailable
from ..models import Outcome, Status
from ..policies import Policy
from ..scopes import Scope

logger = logging.getLogger("idempotency")

F = TypeVar("F", bound=Callable[..., Any])

#: Task headers: an explicit key, and the operation in which the task was sent.
KEY_HEADER = "idempotency_key"
OPERATION_HEADER = "idempotency_operation"


def idempotent_task(
    key: Callable[..., str] | None = None,
    *,
    name: str | None = None,
    scope: Scope | Callable[..., Scope] | None = None,
    failures: tuple[type[Exception], ...] = (),
    countdown: float = 5,
    give_up_after: int = 5,
    **options: Any,
) -> Callable[[F], F]:
    """Put below `@shared_task`: one effect per key, however often the broker delivers.

    The key is what `key` makes of the task's arguments (without `self`), else the task header
    `idempotency_key`, else the task id, which redelivery and `self.retry` keep. A duplicate returns the
    stored result. One that meets a running first delivery, or a database that is away, is sent again
    after `countdown` seconds, with the same id, and never dropped. Exceptions in `failures` are final
    and raise StoredFailure on every delivery; others roll back, and the next delivery or `self.retry`
    runs again. After `give_up_after` workers in a row died running it, the operation fails for good
    with StoredFailure instead of killing another. Other keyword arguments build a Policy.

    Redelivery after a worker's death needs `acks_late=True, reject_on_worker_lost=True`.
    """
    policy = Policy(**options)

    def decorate(function: F) -> F:
        operation_name = name or f"{function.__module__}.{function.__qualname__}"

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            request = _request()
            own = args[1:] if args and _is_current_task(args[0]) else args
            intent = functions.intent_of(
                operation_name,
                _key(key, own, kwargs, request),
                [list(own), kwargs],
                policy.resolved(),
                scope=scope(*own, **kwargs)
                if callable(scope)
                else scope or ("task", operation_name),
                give_up=(give_up_after, _dead(operation_name, give_up_after)),
            )
            try:
                return functions.run(intent, lambda: function(*args, **kwargs), failures)
            except (InProgress, Unavailable) as refusal:
                if request is None or request.called_directly or request.is_eager:
                    raise
                logger.info("task %s waits: %s", request.id, refusal.code)
                _send_again(request, countdown)
                raise Ignore from None

        return cast("F", wrapper)

    return decorate


def _request() -> Any:
    task = current_task._get_current_object() if current_task else None
    return None if task is None else task.request


def _is_current_task(candidate: Any) -> bool:
    return bool(current_task) and candidate is current_task._get_current_object()


def _key(key: Callable[..., str] | None, args: Any, kwargs: dict[str, Any], request: Any) -> str:
    if key is not None:
        return key(*args, **kwargs)
    headers = (getattr(request, "headers", None) or {}) if request is not None else {}
    found = headers.get(KEY_HEADER) or getattr(request, KEY_HEADER, None)
    if found:
        return str(found)
    if request is None or not request.id:
        raise TypeError(
            "An idempotent task called as a plain function needs key=: it has no task id."
        )
    return str(request.id)


def _dead(name: str, limit: int) -> Outcome:
    message = f"{name}: {limit} executors in a row vanished while running it"
    return Outcome(
        status=Status.FAILED,
        headers={functions.FAILURE: "idempotency.contrib.celery.ExecutorsLost"},
        body=encoding.dumps(message).encode(),
    )


def _send_again(request: Any, countdown: float) -> None:
    """Publish the same task again, then let this delivery be acknowledged.

    Unlike `self.retry` it does not use up one of the task's retries. If publishing fails, the
    exception keeps the delivery unacknowledged.
    """
    task = current_task._get_current_object()
    signature = task.signature_from_request(
        request, request.args, request.kwargs, countdown=countdown, retries=request.retries or 0
    )
    signature.apply_async()


def slot_key(task_name: str, slot: datetime) -> str:
    """The key of one scheduled run: the task and the slot it stands for, with its time zone.

    Two beats that send the same slot run it once; a slot caught up later is its own operation. `slot`
    is the scheduled time (never `now()`) and must be aware.
    """
    if timezone.is_naive(slot):
        raise ValueError("a slot needs a time zone: 02:30 happens twice when clocks go back")
    return f"{task_name}@{slot.isoformat()}"


@before_task_publish.connect(dispatch_uid="idempotency.operation_header")
def _carry_operation(headers: dict[str, Any] | None = None, **kwargs: Any) -> None:
    operation = engine.current()
    if operation is not None and headers is not None:
        headers.setdefault(OPERATION_HEADER, str(operation.pk))
