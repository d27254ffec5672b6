"""Tasks for Django's task framework, which wants them at module level."""

from typing import Any

from idempotency import engine
from idempotency.contrib.django_tasks import idempotent_task, task
from tests.app.models import Effect


class Sold(Exception):
    """A failure that a retry cannot change."""


@task
@idempotent_task()
def pay(amount: int) -> int:
    return Effect.objects.create(label="pay", amount=amount).pk


@task
@idempotent_task(key="order_id", countdown=60)
def ship(order_id: int, note: str = "") -> int:
    return Effect.objects.create(label=f"ship {order_id}").pk


@task
@idempotent_task(key=lambda order_id: f"order:{order_id}", failures=(Sold,))
def sell(order_id: int) -> None:
    Effect.objects.create(label="sell")
    raise Sold("nothing left")


@task(takes_context=True)
@idempotent_task(key="order_id")
def with_context(context: Any, order_id: int) -> list[Any]:
    Effect.objects.create(label="context")
    return [context.attempt, order_id]


@task
@idempotent_task(key="order_id")
async def asynchronous(order_id: int) -> int:
    operation = engine.current()
    assert operation is not None
    return (await Effect.objects.acreate(label="async")).pk


@task
def outer(amount: int) -> list[int]:
    """A task that runs another one inside itself."""
    return [pay.enqueue(amount).return_value, pay.enqueue(amount).return_value]


@task
def misuse(amount: int) -> int:
    """Calls another task's function instead of enqueuing it: it has no id of its own then."""
    return pay.call(amount)
