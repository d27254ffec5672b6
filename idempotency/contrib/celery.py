"""Celery: `@idempotent_task`, and the current operation's id in task headers and in the worker's log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, NoReturn, TypeVar, cast

from celery import Task, current_task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded, TaskPredicate
from celery.signals import before_task_publish, task_postrun, task_prerun
from django.utils import timezone

from .. import engine, functions, log
from ..exceptions import ConfigurationError, Refusal
from ..scopes import Scope
from .task_calls import COMES_AGAIN, Key, TaskCalls

logger = logging.getLogger("idempotency")

F = TypeVar("F", bound=Callable[..., Any])

#: Task headers: an explicit key, and the operation in which the task was sent.
KEY_HEADER = "idempotency_key"
OPERATION_HEADER = "idempotency_operation"

#: How Celery steers a task, and what says nothing about the next run: never a stored failure.
NEVER_FINAL = (TaskPredicate, SoftTimeLimitExceeded)


def idempotent_task(
    key: Key = None,
    *,
    name: str | None = None,
    scope: Scope | Callable[..., Scope] | None = None,
    failures: tuple[type[Exception], ...] = (),
    countdown: float = 5,
    give_up_after: int | None = None,
    **options: Any,
) -> Callable[[F], F]:
    """Put below `@shared_task`: one effect per key, however often the broker delivers.

    The key is `key`: the name of an argument, several names, or a callable of the arguments (without
    `self`); else the task header `idempotency_key`; else the task id, which redelivery and
    `self.retry` keep. A duplicate returns the stored result. One that meets a running first delivery,
    or a database that is away, is sent again after `countdown` seconds with the same id, and never
    dropped; this uses up none of the task's retries.

    Exceptions in `failures` are final and raise StoredFailure on every delivery. All others, also
    `self.retry`, `Ignore` and the soft time limit, roll back; the next delivery runs again. After
    `give_up_after` (5) workers in a row died running it, the operation fails for good with StoredFailure; a
    stepwise one becomes `reconciling`, because its steps may have had effects. `fingerprint` is a
    callable of the arguments; without it, the same key with other arguments raises Mismatch. Other
    keyword arguments build a Policy.

    Redelivery after a worker's death needs `acks_late=True, reject_on_worker_lost=True`. Raises
    ConfigurationError when options contradict each other.
    """

    def decorate(function: F) -> F:
        if iscoroutinefunction(function):
            raise ConfigurationError(f"{function.__qualname__}: Celery does not await a task")
        calls = TaskCalls(
            function,
            key=key,
            name=name,
            scope=scope,
            failures=failures,
            countdown=countdown,
            give_up_after=give_up_after,
            options=dict(options),
        )

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            task = _current_task()
            intent = calls.intent(
                args,
                kwargs,
                skip=1 if args and isinstance(args[0], Task) else 0,
                default_key=None if task is None else _key_of(task),
            )
            try:
                return functions.run(
                    intent, lambda: function(*args, **kwargs), failures, never=NEVER_FINAL
                )
            except COMES_AGAIN as error:
                if task is None or task.request.called_directly or task.request.is_eager:
                    raise
                _put_back(task, countdown, error)

        wrapper.idempotency_policy = calls.policy  # type: ignore[attr-defined]
        # Celery looks no further than the wrapper to see what a caller has to pass.
        wrapper.__signature__ = calls.signature  # type: ignore[attr-defined]
        return cast("F", wrapper)

    return decorate


class _NotSent(Ignore, Reject):
    """Rejects the delivery, and is not retried: `autoretry_for` lets an Ignore pass."""


def _put_back(task: Any, countdown: float, reason: Exception) -> NoReturn:
    """Publish the same task again, then let this delivery be acknowledged.

    If nothing can be published, the broker keeps the delivery (with `acks_late`).
    """
    request = task.request
    logger.info(
        "task %s waits: %s",
        request.id,
        reason.code if isinstance(reason, Refusal) else "another worker has it",
    )
    again = task.signature_from_request(request, countdown=countdown, retries=request.retries or 0)
    try:
        again.apply_async()
    except Exception as error:
        raise _NotSent(f"task {request.id} could not be put back", True) from error
    raise Ignore(f"put back for {countdown:g} s") from None


def _current_task() -> Any:
    proxy: Any = current_task
    return proxy._get_current_object() if proxy else None


def header(task: Any, name: str) -> Any:
    """A custom header of the message that `task` runs for, or None."""
    return (task.request.headers or {}).get(name)


def _key_of(task: Any) -> str | None:
    found = header(task, KEY_HEADER) or task.request.id
    return None if found is None else str(found)


def slot_key(entry: str, slot: datetime) -> str:
    """The key of one scheduled run: the schedule's entry and the slot, an instant in UTC.

    Two beats that send the same slot run it once, whatever their time zones; a slot caught up later
    is its own operation. `slot` is the scheduled time, never `now()`. Raises ValueError for a naive
    one: 02:30 happens twice when clocks go back.
    """
    if timezone.is_naive(slot):
        raise ValueError("a slot needs a time zone: 02:30 happens twice when clocks go back")
    return f"{entry}@{slot.astimezone(UTC).isoformat()}"


# What was sent in an operation says so, in its headers and in the log of whoever receives it.


@before_task_publish.connect(dispatch_uid="idempotency.operation_header")
def _carry_operation(headers: dict[str, Any] | None = None, **kwargs: Any) -> None:
    operation = engine.current()
    found = log.sender() if operation is None else str(operation.pk)
    if found and headers is not None:
        headers.setdefault(OPERATION_HEADER, found)


@task_prerun.connect(dispatch_uid="idempotency.log_sender")
def _begin_log(task: Any, **kwargs: Any) -> None:
    log.push_sender(header(task, OPERATION_HEADER) or "")


@task_postrun.connect(dispatch_uid="idempotency.log_sender_end")
def _end_log(**kwargs: Any) -> None:
    log.pop_sender()
