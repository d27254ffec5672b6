"""Django's tasks, on the Immediate backend, and on one that can run a task again, as a worker may."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from idempotency import engine
from idempotency.exceptions import ConfigurationError, InProgress, StoredFailure
from idempotency.models import EventKind, Operation, OutboxMessage, Status
from tests.app.models import Effect
from tests.callers import effects, intent, new_key, succeed
from tests.outboxes import send

pytest.importorskip(
    "django.tasks" if __import__("django").VERSION >= (6, 0) else "django_tasks",
    reason="Django 5.2 without the backport: pip install django-tasks",
)

from idempotency.contrib import django_tasks
from tests.app import deferred as tasks

pytestmark = pytest.mark.django_db(transaction=True)

#: `django.tasks.base`, or the backport's.
base: Any = __import__(type(tasks.pay).__module__, fromlist=["base"])
package = type(tasks.pay).__module__.removesuffix(".base")
backends: Any = __import__(f"{package}.backends.immediate", fromlist=["immediate"])
signals: Any = __import__(f"{package}.signals", fromlist=["signals"])


class RecordingBackend(backends.ImmediateBackend):  # type: ignore[misc]
    """Keeps what is enqueued until a test runs it, as often as it likes, as a worker would."""

    supports_defer = True
    queued: list[Any] = []

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        self.validate_task(task)
        result = base.TaskResult(
            task=task,
            id=uuid.uuid4().hex,
            status=base.TaskResultStatus.READY,
            enqueued_at=timezone.now(),
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=list(args),
            kwargs=dict(kwargs),
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        self.queued.append(result)
        return result

    def run(self, result: Any) -> Any:
        result.errors.clear()
        self._execute_task(result)
        return result


@pytest.fixture
def worker(settings: Any) -> RecordingBackend:
    settings.TASKS = {"default": {"BACKEND": f"{__name__}.RecordingBackend"}}
    RecordingBackend.queued = []
    return tasks.pay.get_backend()


def failed_with(result: Any) -> type[BaseException]:
    assert result.status == "FAILED"
    return result.errors[-1].exception_class  # type: ignore[no-any-return]


def test_a_task_that_is_run_again_returns_the_stored_result(worker: RecordingBackend) -> None:
    result = tasks.pay.enqueue(5)
    first = worker.run(result).return_value
    assert worker.run(result).return_value == first
    assert effects("pay") == 1
    assert Operation.objects.get().key == result.id


def test_two_tasks_without_a_key_are_two_intents() -> None:
    assert tasks.pay.enqueue(5).return_value != tasks.pay.enqueue(5).return_value
    assert effects("pay") == 2


def test_a_key_of_arguments_makes_tasks_one_intent() -> None:
    first = tasks.ship.enqueue(1)
    again = tasks.ship.enqueue(order_id=1, note="")
    assert again.return_value == first.return_value
    tasks.ship.enqueue(2)
    assert (effects("ship 1"), effects("ship 2")) == (1, 1)
    assert first.id != again.id


def test_the_context_is_no_part_of_the_intent() -> None:
    assert tasks.with_context.enqueue(7).return_value == [1, 7]
    assert tasks.with_context.enqueue(7).return_value == [1, 7]
    assert effects("context") == 1


def test_coroutine_functions_are_tasks_too() -> None:
    first = tasks.asynchronous.enqueue(1)
    assert tasks.asynchronous.enqueue(1).return_value == first.return_value
    assert effects("async") == 1


def test_a_task_inside_a_task_has_its_own_id() -> None:
    first, second = tasks.outer.enqueue(1).return_value
    assert first != second
    assert effects("pay") == 2


def test_a_function_called_inside_a_task_does_not_borrow_its_id() -> None:
    assert failed_with(tasks.misuse.enqueue(1)) is TypeError
    assert effects("pay") == 0


def test_declared_failures_are_final() -> None:
    for _ in range(2):
        assert failed_with(tasks.sell.enqueue(1)) is StoredFailure
    assert effects("sell") == 0
    assert Operation.objects.get().events.get().kind == EventKind.REPLAYED


def test_calling_the_function_needs_a_key_of_arguments() -> None:
    tasks.pay.enqueue(3)  # has ended: its id is nobody's any more
    assert tasks.ship.call(3) == tasks.ship.call(3)
    with pytest.raises(TypeError, match="without a task id"):
        tasks.pay.call(3)


def interrupt(key: str) -> None:
    """As if another worker were executing it: a lease, so that one connection is enough."""
    Operation.objects.filter(key=key).update(
        status=Status.PROCESSING,
        stepwise=True,
        lease_expires_at=timezone.now() + timedelta(hours=1),
        finished_at=None,
        expires_at=None,
        tombstone_until=None,
    )


def test_a_duplicate_that_meets_the_first_is_enqueued_anew(worker: RecordingBackend) -> None:
    result = tasks.ship.enqueue(1)
    worker.run(result)
    interrupt("1")
    assert failed_with(worker.run(result)) is InProgress
    assert "Enqueued again as task" in result.errors[-1].traceback
    _, again = worker.queued
    assert (again.task.func, again.args) == (result.task.func, [1])
    assert again.task.run_after > timezone.now()


def test_a_duplicate_without_a_key_of_arguments_only_fails(worker: RecordingBackend) -> None:
    result = tasks.pay.enqueue(1)
    worker.run(result)
    interrupt(result.id)
    assert failed_with(worker.run(result)) is InProgress
    assert len(worker.queued) == 1  # a new task would have a new id, and be another intent


def test_a_backend_that_cannot_defer_is_not_asked_to() -> None:
    tasks.ship.enqueue(1)
    interrupt("1")
    assert failed_with(tasks.ship.enqueue(1)) is InProgress


def test_contradictions_are_errors_at_import() -> None:
    with pytest.raises(ConfigurationError, match="spins"):
        django_tasks.idempotent_task(countdown=0)(lambda: None)
    with pytest.raises(ConfigurationError, match="for views only"):
        django_tasks.idempotent_task(required=True)(lambda: None)


# Upkeep ------------------------------------------------------------------------------------------


def test_the_purge_is_a_task() -> None:
    past = timezone.now() - timedelta(days=30)
    tasks.ship.enqueue(1)
    Operation.objects.update(expires_at=past, tombstone_until=past, due_at=past)
    result = django_tasks.purge_expired.enqueue(max_seconds=60)
    assert result.return_value == {
        "tombstoned": 0,
        "deleted": 1,
        "interrupted": 0,
        "complete": True,
        "messages": 0,
    }
    assert not Operation.objects.exists()


def test_the_relay_is_a_task(settings: Any) -> None:
    settings.IDEMPOTENCY = {"OUTBOX_PUBLISHER": f"{__name__}.publish"}
    send("order.created", {"order_id": 1})
    assert django_tasks.relay_outbox.enqueue().return_value["sent"] == 1
    assert OutboxMessage.objects.get().status == "sent"


def publish(message: Any) -> None:
    """Takes every message."""


@pytest.mark.parametrize("name", ["reconcile_due", "complete_abandoned"])
def test_reconciler_and_completer_are_tasks(name: str) -> None:
    result = getattr(django_tasks, name).enqueue()
    assert result.status == "SUCCESSFUL", result.errors
    assert result.return_value["asked"] == 0


def test_an_operation_that_waits_for_its_outcome_is_asked_about() -> None:
    past = timezone.now() - timedelta(hours=1)
    engine.run(intent(new_key()), succeed)
    Operation.objects.update(
        status=Status.RECONCILING,
        due_at=past,
        finished_at=None,
        expires_at=None,
        tombstone_until=None,
    )
    assert django_tasks.reconcile_due.enqueue().return_value["asked"] == 1
    assert Effect.objects.count() == 1
