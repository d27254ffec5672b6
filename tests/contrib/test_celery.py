"""`@idempotent_task`: which intent a task stands for, and what it tells others about itself.

Tasks are delivered as a worker delivers them: from a queue, through Celery's own tracer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from io import StringIO
from typing import Any
from uuid import UUID

import pytest
from celery import shared_task

from idempotency import log
from idempotency.contrib.celery import KEY_HEADER, OPERATION_HEADER, idempotent_task, slot_key
from idempotency.exceptions import (
    ConfigurationError,
    Mismatch,
)
from idempotency.models import EventKind, Operation
from tests.app.models import Effect
from tests.callers import effect_view, effects, new_key, post
from tests.processes import in_threads
from tests.queues import Queue, effect

pytestmark = pytest.mark.django_db(transaction=True)

INVOICE = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


class Colour(Enum):
    RED = "red"


def test_the_decorator_above_the_task_is_refused() -> None:
    """It would give a function without delay()."""
    with pytest.raises(ConfigurationError, match="below the decorator"):
        idempotent_task()(shared_task(effect))


# Which intent a task stands for ----------------------------------------------------------------


def test_a_redelivery_returns_the_stored_result(broker: Queue) -> None:
    """BUGS N06: sequential second delivery after success. RULES 101."""

    @broker.task
    @idempotent_task()
    def pay(amount: int) -> dict[str, Any]:
        return {"effect": effect("pay", amount), "paid": Decimal("5.00"), "on": date(2026, 1, 1)}

    pay.delay(5)
    delivery = broker.sent()
    first, second = broker.deliver(delivery), broker.deliver(delivery)
    assert first.state == second.state == "SUCCESS"
    assert first.value == second.value
    assert isinstance(second.value["paid"], Decimal)
    assert effects("pay") == 1


def test_every_delivery_of_one_message_has_one_effect(broker: Queue) -> None:
    """BUGS N01: the same delayed message four times, on two workers; N02: with a countdown."""

    @broker.task
    @idempotent_task()
    def pay() -> int:
        return effect("pay")

    pay.apply_async(countdown=7200)
    delivery = broker.sent()
    assert delivery.headers["eta"]

    def worker() -> list[Any]:
        return [broker.deliver(delivery).value for _ in range(2)]

    results = in_threads([worker, worker])
    assert effects("pay") == 1
    values = {value for pair in results for value in pair if isinstance(value, int)}
    assert len(values) == 1
    assert {ended.value for ended in broker.work()} <= values  # those that met the running one


def test_a_call_with_missing_arguments_is_not_sent(broker: Queue) -> None:
    """Celery checks them where the call is made; a decorator must not hide them from it."""

    @broker.task(bind=True)
    @idempotent_task()
    def pay(self: Any, amount: int, *, note: str = "") -> None: ...

    for arguments in ({}, {"other": 1}, {"amount": 1, "other": 1}):
        with pytest.raises(TypeError, match="argument"):
            pay.delay(**arguments)
    pay.delay(1, note="a")
    assert broker.sent().body[0] == [1]


def test_two_messages_without_a_key_are_two_intents(broker: Queue) -> None:
    @broker.task
    @idempotent_task()
    def pay() -> int:
        return effect("pay")

    pay.delay()
    pay.delay()
    assert len({ended.value for ended in broker.work()}) == 2
    assert effects("pay") == 2


@pytest.mark.parametrize(
    "key",
    [
        "order_id",
        ["order_id"],
        lambda order_id, **kwargs: order_id,
        lambda order_id, note="": f"receipt:{order_id}",
    ],
)
def test_a_key_of_arguments_makes_messages_one_intent(broker: Queue, key: Any) -> None:
    @broker.task
    @idempotent_task(key=key)
    def send_receipt(order_id: int, note: str = "") -> int:
        return effect(f"receipt {order_id}")

    send_receipt.delay(7)
    send_receipt.delay(order_id=7, note="")  # the same call, written in another way
    send_receipt.delay(8)
    ended = broker.work()
    assert [each.state for each in ended] == ["SUCCESS"] * 3
    assert ended[0].value == ended[1].value
    assert (effects("receipt 7"), effects("receipt 8")) == (1, 1)


def test_several_arguments_can_be_the_key(broker: Queue) -> None:
    @broker.task
    @idempotent_task(key=("shop", "day"))
    def report(shop: str, day: date) -> int:
        return effect("report")

    for shop, day in (("a:b", date(2026, 1, 1)), ("a", date(2026, 1, 1)), ("a", date(2026, 1, 2))):
        report.delay(shop, day)
        report.delay(shop, day)
    broker.work()
    assert effects("report") == 3
    assert set(Operation.objects.values_list("key", flat=True)) == {
        "a%3Ab:2026-01-01",
        "a:2026-01-01",
        "a:2026-01-02",
    }


def test_the_key_header_names_the_intent(broker: Queue) -> None:
    """RULES 101: explicit key, then the header, then the task id."""

    @broker.task
    @idempotent_task()
    def pay() -> int:
        return effect("pay")

    @broker.task
    @idempotent_task(key=lambda: "explicit")
    def refund() -> int:
        return effect("refund")

    for task in (pay, refund):
        task.apply_async(headers={KEY_HEADER: "from the outbox"})
        task.apply_async(headers={KEY_HEADER: "from the outbox"})
    refund.apply_async()
    broker.work()
    assert (effects("pay"), effects("refund")) == (1, 1)


@pytest.mark.parametrize(
    ("value", "equal", "other"),
    [
        (INVOICE, str(INVOICE), UUID(int=7)),
        (Decimal("1.10"), Decimal("1.10"), Decimal("1.1")),
        (
            datetime(2026, 3, 1, 12, tzinfo=UTC),
            datetime(2026, 3, 1, 13, tzinfo=timezone(timedelta(hours=1))),
            datetime(2026, 3, 1, 13, tzinfo=UTC),
        ),
        (date(2026, 3, 1), date(2026, 3, 1), date(2026, 3, 2)),
        (Colour.RED, "red", "blue"),
        ("a b ü", "a b ü", "a b u"),
        ("x" * 300, "x" * 300, "x" * 301),
        (12, 12, 13),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_arguments_of_every_kind_make_keys(
    broker: Queue, value: Any, equal: Any, other: Any
) -> None:
    """BUGS O06. Run eagerly where the wire format has no such type."""

    @broker.task
    @idempotent_task(key="what", fingerprint=lambda what: None)
    def run(what: Any) -> int:
        return effect("run")

    results = [run.apply((what,), throw=True).get() for what in (value, equal, other)]
    assert results[0] == results[1] != results[2]


def test_typed_arguments_survive_the_queue(broker: Queue) -> None:
    """BUGS O06: what a redelivery brings has the fingerprint of what was sent."""

    @broker.task
    @idempotent_task(key=("invoice", "amount", "at"))
    def run(invoice: UUID, amount: Decimal, at: datetime) -> str:
        effect("run")
        return f"{type(invoice).__name__} {type(amount).__name__} {type(at).__name__}"

    run.delay(INVOICE, Decimal("1.10"), datetime(2026, 3, 1, tzinfo=UTC))
    delivery = broker.sent()
    ended = [broker.deliver(delivery), broker.deliver(delivery)]
    assert [each.value for each in ended] == ["UUID Decimal datetime"] * 2
    assert effects("run") == 1


@pytest.mark.parametrize("place", [lambda row: row, lambda row: [row], lambda row: {"a": (row,)}])
def test_model_instances_are_refused_as_arguments(broker: Queue, place: Any) -> None:
    """BUGS O07: two instances that print alike must not be one intent."""

    @broker.task
    @idempotent_task(key=lambda row: "constant")
    def ship(row: Any) -> int:
        return effect("shipped")

    row = Effect.objects.create(label="row")
    with pytest.raises(TypeError, match=r"row holds a testapp\.Effect instance.*primary key"):
        ship.apply((place(row),), throw=True)
    assert effects("shipped") == Operation.objects.count() == 0


def test_a_model_instance_is_refused_as_a_key(broker: Queue) -> None:
    @broker.task
    @idempotent_task(key=lambda pk: Effect.objects.get(pk=pk))
    def ship(pk: int) -> int:
        return effect("shipped")

    with pytest.raises(TypeError, match="primary key"):
        ship.apply((Effect.objects.create(label="row").pk,), throw=True)


def test_the_same_key_with_other_arguments_is_refused_visibly(broker: Queue) -> None:
    @broker.task
    @idempotent_task(key="order_id")
    def pay(order_id: int, amount: int) -> int:
        return effect("pay", amount)

    pay.delay(1, 10)
    pay.delay(1, 11)
    ended = broker.work()
    assert [each.state for each in ended] == ["SUCCESS", "FAILURE"]
    assert isinstance(ended[1].value, Mismatch)
    assert Effect.objects.get().amount == 10


def test_a_call_without_a_task_id_needs_a_key(broker: Queue) -> None:
    @broker.task
    @idempotent_task()
    def pay() -> int:
        return effect("pay")

    @broker.task
    @idempotent_task(key=lambda: "constant")
    def refund() -> int:
        return effect("refund")

    with pytest.raises(TypeError, match="without a task id"):
        pay()
    assert refund() == refund()
    assert effects("refund") == 1


def test_other_tasks_and_scopes_have_keys_of_their_own(broker: Queue) -> None:
    def body(tenant: str) -> int:
        return effect("ran")

    @broker.task(name="one")
    @idempotent_task(key=lambda tenant: "k", name="one", fingerprint=lambda tenant: None)
    def one(tenant: str) -> int:
        return body(tenant)

    @broker.task(name="two")
    @idempotent_task(key=lambda tenant: "k", name="two", scope=lambda tenant: ("tenant", tenant))
    def two(tenant: str) -> int:
        return body(tenant)

    for task in (one, two):
        for tenant in ("a", "b", "a"):
            task.delay(tenant)
    broker.work()
    assert effects("ran") == 1 + 2


def test_bound_tasks_and_task_classes_keep_self_out_of_the_intent(broker: Queue) -> None:
    @broker.task(bind=True)
    @idempotent_task(key="order_id")
    def bound(self: Any, order_id: int) -> tuple[str, int]:
        return self.request.id, effect("bound")

    class Ship(broker.app.Task):  # type: ignore[name-defined,misc]
        name = "ship"

        @idempotent_task(key="order_id")
        def run(self, order_id: int) -> int:
            return effect(self.name)

    ship = broker.app.register_task(Ship())
    for task in (bound, ship):
        task.delay(1)
        task.delay(order_id=1)
    ended = broker.work()
    assert [each.state for each in ended] == ["SUCCESS"] * 4
    bound.run(1)  # without a worker around it
    assert (effects("bound"), effects("ship")) == (1, 1)


# Options that contradict each other ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_interrupted": "reconcile", "give_up_after": 3}, "never runs an interrupted task"),
        ({"give_up_after": 0}, "at least 1"),
        ({"countdown": 0}, "spins"),
        ({"methods": ["POST"]}, "for views only"),
        ({"required": True}, "for views only"),
        ({"key": "order"}, "no argument 'order'"),
        ({"key": ()}, "no argument"),
        ({"exclude_fields": ["sent_at"]}, "for views only"),
        ({"failures": ValueError}, "tuple"),
        ({"failures": ("ValueError",)}, "tuple"),
        ({"lease": -1}, "lease"),
    ],
)
def test_contradictory_options_are_errors_at_import(options: Any, message: str) -> None:
    """BUGS O09."""

    def pay(order_id: int) -> None: ...

    with pytest.raises(ConfigurationError, match=message):
        idempotent_task(**options)(pay)


def test_a_coroutine_function_is_refused() -> None:
    async def pay() -> None: ...

    with pytest.raises(ConfigurationError, match="does not await"):
        idempotent_task()(pay)


# Headers and logs ------------------------------------------------------------------------------


@pytest.fixture
def lines() -> Iterator[StringIO]:
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(log.OperationFilter())
    handler.setFormatter(logging.Formatter("%(operation_id)s %(sent_by)s %(message)s"))
    logger = logging.getLogger("shop.tasks")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)


def test_the_operations_id_travels_with_what_it_sends(broker: Queue, lines: StringIO) -> None:
    logger = logging.getLogger("shop.tasks")

    @broker.task
    def plain() -> None:
        logger.info("plain")
        last.delay()

    @broker.task
    def last() -> None:
        logger.info("last")

    @broker.task
    @idempotent_task()
    def receive() -> None:
        logger.info("protected")

    @broker.task
    @idempotent_task()
    def send() -> None:
        logger.info("send")
        plain.delay()
        receive.delay_on_commit()

    send.delay()
    broker.work()
    logger.info("outside")
    ids = dict(Operation.objects.values_list("name", "pk"))
    sender = next(pk for name, pk in ids.items() if name.endswith("send"))
    receiver = next(pk for name, pk in ids.items() if name.endswith("receive"))
    assert lines.getvalue().splitlines() == [
        f"{sender} - send",
        f"{sender} {sender} plain",
        f"{receiver} {sender} protected",
        f"{sender} {sender} last",
        "- - outside",
    ]


def test_a_task_sent_by_a_view_names_the_views_operation(broker: Queue) -> None:
    @broker.task
    def follow() -> None: ...

    key = new_key()
    response = post(effect_view(after=lambda: follow.delay_on_commit()), key)
    assert response.status_code == 201
    assert broker.sent().headers[OPERATION_HEADER] == str(Operation.objects.get(key=key).pk)


def test_the_headers_survive_a_retry(broker: Queue) -> None:
    seen = []

    @broker.task(bind=True)
    @idempotent_task()
    def pay(self: Any) -> None:
        seen.append((self.request.headers[OPERATION_HEADER], self.request.headers[KEY_HEADER]))
        if not self.request.retries:
            raise self.retry(countdown=1)

    pay.apply_async(headers={KEY_HEADER: "k", OPERATION_HEADER: "from"})
    broker.work()
    assert seen == [("from", "k")] * 2


def test_a_slot_is_an_instant() -> None:
    """RULES 105."""
    slot = datetime(2026, 10, 25, 2, 30, tzinfo=timezone(timedelta(hours=2)))
    assert slot_key("nightly", slot) == "nightly@2026-10-25T00:30:00+00:00"
    assert slot_key("nightly", slot) == slot_key("nightly", slot.astimezone(UTC))
    assert slot_key("nightly", slot) != slot_key("nightly", slot + timedelta(hours=1))
    with pytest.raises(ValueError, match="time zone"):
        slot_key("nightly", datetime(2026, 10, 25, 2, 30))  # noqa: DTZ001


def test_events_tell_replays_of_a_task(broker: Queue) -> None:
    @broker.task
    @idempotent_task()
    def pay() -> int:
        return effect("pay")

    pay.delay()
    delivery = broker.sent()
    for _ in range(3):
        broker.deliver(delivery)
    assert [event.kind for event in Operation.objects.get().events.all()] == [
        EventKind.REPLAYED
    ] * 2
