"""Messages as Celery tasks: sent once per attempt, run once per message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from idempotency import outbox
from idempotency.contrib.celery import idempotent_task
from idempotency.contrib.celery_outbox import CeleryPublisher
from idempotency.models import MessageStatus, OutboxMessage
from tests.app.models import Effect
from tests.outboxes import make_due, row, send

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _long_backoff(settings: Any) -> None:
    """What has failed is not due again before the test says so, however slow the machine is."""
    settings.IDEMPOTENCY = {"OUTBOX_BACKOFF": 60}


@pytest.fixture
def app() -> Iterator[Celery]:
    """An application on a broker in memory; its messages are read instead of worked on."""
    application = Celery("outbox-tests", broker="memory://", set_as_current=False)
    application.conf.task_default_queue = "outbox-tests"
    with application.connection_for_read() as connection:
        connection.SimpleQueue("outbox-tests").clear()
    yield application
    application.close()


def queued(app: Celery) -> list[tuple[dict[str, Any], Any]]:
    """Headers and arguments of what is in the queue."""
    found = []
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue("outbox-tests")
        while queue.qsize():
            message = queue.get(block=False)
            message.ack()
            found.append((message.headers, message.payload[0]))
    return found


def test_a_message_is_sent_as_the_first_matching_task_under_its_own_id(app: Celery) -> None:
    publisher = CeleryPublisher({"order.*": "shop.order_changed", "*": "shop.any"}, app=app)
    message = send("order.created", {"order_id": 1})
    other = send("stock.low", {"sku": "lamp"})
    assert outbox.relay(publisher=publisher) == outbox.Summary(sent=2)
    assert [(headers["task"], headers["id"], args) for headers, args in queued(app)] == [
        ("shop.order_changed", str(message.message_id), [{"order_id": 1}]),
        ("shop.any", str(other.message_id), [{"sku": "lamp"}]),
    ]


def test_a_repeated_message_is_the_same_task_again_and_runs_once(app: Celery) -> None:
    @app.task(name="shop.pay")
    @idempotent_task()
    def pay(payload: dict[str, Any]) -> int:
        return Effect.objects.create(label="paid", amount=payload["amount"]).pk

    publisher = CeleryPublisher({"*": "shop.pay"}, app=app)
    send("order.paid", {"amount": 5})
    outbox.relay(publisher=publisher)
    OutboxMessage.objects.update(status=MessageStatus.PENDING)  # as if the mark had been lost
    make_due()
    outbox.relay(publisher=publisher)
    deliveries = queued(app)
    assert len(deliveries) == 2
    for headers, args in deliveries:
        pay.apply(args=args, task_id=headers["id"], throw=True)
    assert Effect.objects.filter(label="paid", amount=5).count() == 1


def test_options_go_on_to_celery_which_does_not_retry_by_itself(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay has a back-off, and other messages to send meanwhile."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(app, "send_task", lambda task, **options: sent.append(options))
    send("t", 1)
    outbox.relay(publisher=CeleryPublisher({"t": "shop.t"}, app=app, queue="q"))
    send("t", 1)
    outbox.relay(publisher=CeleryPublisher({"t": "shop.t"}, app=app, retry=True))
    assert [(options["retry"], options.get("queue")) for options in sent] == [
        (False, "q"),
        (True, None),
    ]


def test_the_task_names_the_operation_that_caused_the_message(app: Celery) -> None:
    from idempotency import engine
    from idempotency.models import Operation, Outcome, Status
    from tests.callers import intent, new_key

    def handler(operation: Operation) -> Outcome:
        outbox.enqueue("t", 1)
        return Outcome(status=Status.SUCCEEDED)

    operation = engine.run(intent(new_key()), handler).operation
    outbox.relay(publisher=CeleryPublisher({"t": "shop.t"}, app=app))
    [(headers, _)] = queued(app)
    assert headers["idempotency_operation"] == str(operation.pk)


def test_a_topic_without_a_task_and_a_broker_that_is_away_fail_alone(app: Celery) -> None:
    away = Celery("away", broker="amqp://127.0.0.1:1//", set_as_current=False)
    away.conf.broker_connection_timeout = 1
    unknown, lost = send("unknown", 1), send("lost", 1)
    publish = outbox.by_topic(
        {
            "lost": CeleryPublisher({"*": "shop.t"}, app=away),
            "*": CeleryPublisher({"known": "shop.t"}, app=app),
        }
    )
    known = send("known", 1)
    assert outbox.relay(publisher=publish) == outbox.Summary(sent=1, retried=2)
    assert row(known).status == MessageStatus.SENT
    assert row(unknown).last_error == "UnknownTopic: no task for topic 'unknown'"
    assert row(lost).last_error.startswith("kombu.exceptions.OperationalError")
