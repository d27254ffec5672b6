"""What happens after the commit: the outbox relay sends these tasks, one per message."""

from __future__ import annotations

from typing import Any

from celery import shared_task
from django.conf import settings
from django.core.mail import EmailMessage

from idempotency import engine
from idempotency.contrib.celery import idempotent_task
from idempotency.contrib.celery_outbox import CeleryPublisher

from .models import Order, SentMail

#: Subject and text by the topic's last word.
TEXTS = {
    "placed": ("Your order {number}", "We have your order of € {total}. It is not paid yet."),
    "paid": (
        "Order {number} is paid",
        "We have your € {total}, once. Your goods are on their way.",
    ),
    "refunded": ("Order {number} is refunded", "Your € {total} are on their way back to you."),
}

#: A message's id is its task's id, so a message that is relayed twice is one task for the decorator.
publisher = CeleryPublisher(
    {f"order.{kind}": f"{__name__}.mail_{kind}" for kind in TEXTS}, queue="shop"
)


@shared_task(ignore_result=True)
@idempotent_task(name="shop.mail_placed")
def mail_placed(payload: dict[str, Any]) -> None:
    mail("placed", payload)


@shared_task(ignore_result=True)
@idempotent_task(name="shop.mail_paid")
def mail_paid(payload: dict[str, Any]) -> None:
    mail("paid", payload)


@shared_task(ignore_result=True)
@idempotent_task(name="shop.mail_refunded")
def mail_refunded(payload: dict[str, Any]) -> None:
    mail("refunded", payload)


def mail(kind: str, payload: dict[str, Any]) -> None:
    """Tell the customer. The record and the mail server cannot commit together, so the mail's own id
    follows from the operation: should a crash come between them, the second copy has the same.
    """
    order = Order.objects.select_related("customer").get(pk=payload["order"])
    SentMail.objects.create(order=order, kind=kind)
    subject, text = (words.format(number=order.number, total=order.total) for words in TEXTS[kind])
    EmailMessage(
        subject,
        text,
        settings.DEFAULT_FROM_EMAIL,
        [order.customer.email],
        headers={"Message-ID": f"<{engine.current().derive_key('mail')}@shop.example>"},
    ).send()
