"""The provider's outbox: what it has to tell the shop, signed and repeated until somebody says 2xx."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
import uuid
from datetime import timedelta

from django.conf import settings
from django.db.models import F
from django.utils import timezone
from standardwebhooks import Webhook

from .models import Charge, Notice

logger = logging.getLogger(__name__)

#: Seconds between two events that are sent in the wrong order.
LATE = 2.5
TIMEOUT = 10.0  # seconds


def announce(charge: Charge, *events: str) -> None:
    """Queue webhooks about the charge, in the transaction that changed it."""
    if charge.webhooks == "never":
        return
    for position, event in enumerate(events):
        is_late = charge.webhooks == "shuffled" and position < len(events) - 1
        event_id = f"evt_{uuid.uuid4().hex}"
        body = {
            "type": event,
            "timestamp": timezone.now().isoformat(),
            "data": {
                "charge": str(charge.pk),
                "reference": charge.reference,
                "amount": str(charge.amount),
            },
        }
        due = timezone.now() + timedelta(seconds=LATE if is_late else 0)
        for _ in range(2 if charge.webhooks == "twice" else 1):
            Notice.objects.create(
                charge=charge, event_id=event_id, body=json.dumps(body), due_at=due
            )


def deliver_due(limit: int = 50) -> dict[str, int]:
    """Send what is due, in its order; what fails is sent again later. Returns the numbers of both."""
    counts = {"delivered": 0, "failed": 0}
    due = Notice.objects.filter(delivered_at=None, due_at__lte=timezone.now())
    for notice in due.order_by("due_at", "pk")[:limit]:
        status = deliver(notice)
        if 200 <= status < 300:
            Notice.objects.filter(pk=notice.pk).update(
                delivered_at=timezone.now(), attempts=F("attempts") + 1
            )
            counts["delivered"] += 1
        else:
            logger.info("webhook %s answered %s", notice.event_id, status)
            pause = timedelta(seconds=min(2**notice.attempts, 600))
            Notice.objects.filter(pk=notice.pk).update(
                due_at=timezone.now() + pause, attempts=F("attempts") + 1
            )
            counts["failed"] += 1
    return counts


def deliver(notice: Notice) -> int:
    """POST it once; the status of the answer, 0 if there is none."""
    now = timezone.now()
    signature = Webhook(settings.PROVIDER_WEBHOOK_SECRET).sign(notice.event_id, now, notice.body)
    request = urllib.request.Request(  # noqa: S310 - the URL is a setting
        settings.PROVIDER_WEBHOOK_URL,
        notice.body.encode(),
        {
            "Content-Type": "application/json",
            "webhook-id": notice.event_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": signature,
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
