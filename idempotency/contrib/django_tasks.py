"""Django's own tasks (Django 6.0, or the `django-tasks` backport): one effect per key, and the upkeep.

    @task
    @idempotent_task(key="order_id")
    def send_receipt(order_id): ...

The upkeep of this package as tasks, for whatever enqueues them on time: `purge_expired`,
`relay_outbox`, `reconcile_due` and `complete_abandoned`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict
from datetime import timedelta
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.utils import timezone

from .. import completion, functions, outbox, reconciliation, retention
from ..scopes import Scope
from .task_calls import COMES_AGAIN, Key, TaskCalls

try:
    from django.tasks import task
    from django.tasks.signals import task_finished, task_started
except ImportError:  # Django 5.2
    from django_tasks import task  # type: ignore[no-redef]
    from django_tasks.signals import task_finished, task_started  # type: ignore[no-redef]

logger = logging.getLogger("idempotency")

F = TypeVar("F", bound=Callable[..., Any])

#: Results of the tasks that this context runs, the innermost last.
_running: ContextVar[tuple[Any, ...]] = ContextVar("idempotency_task_results", default=())


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
    """Put below `@task`: one effect per key, however often the task is enqueued or run.

    As `contrib.celery.idempotent_task`, with two differences that Django's tasks make. The default
    key is the id of the task result; there are no headers. And a task cannot be put back: a duplicate
    that meets a running first is enqueued anew for `countdown` seconds later, if the backend can defer
    (`supports_defer`) and the key is made of arguments, so that the new task has the same key; its
    own result fails with InProgress, which is raised in every case. Functions may be async.
    """

    def decorate(function: F) -> F:
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

        def intent(args: Any, kwargs: Any) -> Any:
            result = _result_of(wrapper)
            has_context = result is not None and result.task.takes_context
            return calls.intent(
                args,
                kwargs,
                skip=1 if has_context else 0,
                default_key=None if result is None else str(result.id),
            )

        if iscoroutinefunction(function):

            @wraps(function)
            async def awrapper(*args: Any, **kwargs: Any) -> Any:
                try:
                    found = await sync_to_async(intent)(args, kwargs)
                    return await functions.arun(found, lambda: function(*args, **kwargs), failures)
                except COMES_AGAIN as error:
                    await sync_to_async(_enqueue_again)(wrapper, calls, countdown, error)

            wrapper: Any = awrapper
        else:

            @wraps(function)
            def swrapper(*args: Any, **kwargs: Any) -> Any:
                try:
                    return functions.run(
                        intent(args, kwargs), lambda: function(*args, **kwargs), failures
                    )
                except COMES_AGAIN as error:
                    _enqueue_again(wrapper, calls, countdown, error)

            wrapper = swrapper
        wrapper.idempotency_policy = calls.policy
        return cast("F", wrapper)

    return decorate


def _enqueue_again(wrapper: Any, calls: TaskCalls, countdown: float, error: Exception) -> NoReturn:
    result = _result_of(wrapper)
    if result is not None and calls.key is not None and result.task.get_backend().supports_defer:
        later = timezone.now() + timedelta(seconds=countdown)
        again = result.task.using(run_after=later).enqueue(*result.args, **result.kwargs)
        logger.info("task %s waits: enqueued again as %s", result.id, again.id)
        error.add_note(f"Enqueued again as task {again.id}.")
    raise error


def _result_of(wrapper: Any) -> Any:
    """The result of the task that runs this very function now, or None when it is just called."""
    running = _running.get()
    return running[-1] if running and running[-1].task.func is wrapper else None


def _started(*, task_result: Any, **kwargs: Any) -> None:
    _running.set((*_running.get(), task_result))


def _finished(*, task_result: Any, **kwargs: Any) -> None:
    _running.set(tuple(each for each in _running.get() if each.id != task_result.id))


task_started.connect(_started, dispatch_uid="idempotency.task_started")
task_finished.connect(_finished, dispatch_uid="idempotency.task_finished")


@task
def purge_expired(using: str | None = None, max_seconds: float | None = None) -> dict[str, Any]:
    """`retention.purge()` and `outbox.purge_sent()`; returns what they removed."""
    purged = asdict(retention.purge(using, max_seconds=max_seconds))
    purged["messages"] = outbox.purge_sent(using, max_seconds=max_seconds)
    return purged


@task
def relay_outbox(using: str | None = None, max_seconds: float | None = None) -> dict[str, Any]:
    """`outbox.relay()`; returns the number of messages by what happened to them."""
    return asdict(outbox.relay(using=using, max_seconds=max_seconds))


@task
def reconcile_due(using: str | None = None, limit: int = 100) -> dict[str, Any]:
    """`reconciliation.reconcile_due()`; returns how many operations were asked about and settled."""
    return asdict(reconciliation.reconcile_due(using, limit=limit))


@task
def complete_abandoned(using: str | None = None, limit: int = 100) -> dict[str, Any]:
    """`completion.complete_abandoned()`; returns how many operations were gone on with."""
    return asdict(completion.complete_abandoned(using, limit=limit))
