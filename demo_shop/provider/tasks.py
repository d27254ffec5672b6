"""The provider's own worker, which happens to run in the shop's."""

from __future__ import annotations

from celery import shared_task

from . import webhooks


@shared_task(ignore_result=True)
def deliver_webhooks() -> dict[str, int]:
    return webhooks.deliver_due()
