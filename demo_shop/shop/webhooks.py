"""What the payment provider tells the shop, in whatever order and however often it does."""

from __future__ import annotations

import uuid

from django.conf import settings

from demo_shop.provider.models import Charge
from idempotency.models import Event, EventKind
from idempotency.webhooks import Delivery, StandardWebhooksVerifier, WebhookView

from . import payments
from .models import Order, PaymentEvent

RECORD = "shop.record"


class PaymentWebhook(WebhookView):
    source = "payments"
    verify = StandardWebhooksVerifier(settings.PROVIDER_WEBHOOK_SECRET)


@PaymentWebhook.handles("payment.*", name=RECORD)
def record(delivery: Delivery) -> None:
    PaymentEvent.objects.create(
        order_id=uuid.UUID(delivery.payload["data"]["reference"]),
        event_id=delivery.id,
        type=delivery.event_type,
    )


@PaymentWebhook.handles("payment.succeeded", "payment.failed", name="shop.learn")
def learn(delivery: Delivery) -> None:
    """An event says that something happened; what holds now is asked, so their order does not matter."""
    data = delivery.payload["data"]
    order = Order.objects.filter(pk=data["reference"]).first()
    if order is not None:
        payments.learn(order, Charge.objects.get(pk=data["charge"]))


def counts(order: uuid.UUID | None = None) -> tuple[int, int]:
    """How many events were received, and how many deliveries more that repeated one of them."""
    events = PaymentEvent.objects.all()
    repeats = Event.objects.filter(operation__name__endswith=RECORD, kind=EventKind.REPLAYED)
    if order is not None:
        events = events.filter(order_id=order)
        repeats = repeats.filter(operation__key__in=events.values("event_id"))
    return events.count(), repeats.count()
