"""Acknowledged first: deliveries are kept in the outbox, and its relay runs their handlers.

The other half, which the relay finds, is `idempotency/outbox_handlers.py`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from django.db import transaction
from django.utils.datastructures import CaseInsensitiveMapping

from .. import inbox, outbox
from ..exceptions import Mismatch
from .deliveries import Delivery, NotBegun

if TYPE_CHECKING:
    from .views import WebhookView

#: Prefix of the topics of stored deliveries.
TOPIC = "idempotency.webhook."


def keep(view: WebhookView, events: Iterable[Delivery]) -> None:
    """Keep the events, one message for each handler, all or none; a repeated one adds nothing.

    Raises NotBegun when all others are kept, if an id was kept with another body before.
    """
    using, is_mismatch = view.get_policy().using, False
    with transaction.atomic(using):
        for event in events:
            for handler in view.takers(event):
                message = outbox.enqueue(
                    f"{TOPIC}{event.source}",
                    _pack(view, handler.name, event),
                    key=inbox.digest(event.endpoint, handler.name, event.id),
                    using=using,
                )
                before = unpack(json.loads(message.payload))
                is_mismatch |= view.get_fingerprint(before) != view.get_fingerprint(event)
    if is_mismatch:
        raise NotBegun(Mismatch())


def place(view: WebhookView) -> str:
    """Where the relay finds the class of a view."""
    return f"{type(view).__module__}:{type(view).__qualname__}"


def find(place: str) -> Any:
    """What is there. Raises ImportError, AttributeError or ValueError if nothing is."""
    module, _, name = place.partition(":")
    return attrgetter(name)(import_module(module))


def _pack(view: WebhookView, handler: str, delivery: Delivery) -> dict[str, Any]:
    kept = {name.lower() for name in view.keep_headers}
    return {
        "view": place(view),
        "handler": handler,
        "source": delivery.source,
        "endpoint": delivery.endpoint,
        "id": delivery.id,
        "event_type": delivery.event_type,
        "body": base64.b64encode(delivery.body).decode(),
        # No others: signatures and credentials are not kept.
        "headers": {k: v for k, v in delivery.headers.items() if k.lower() in kept},
    }


def unpack(payload: dict[str, Any], *, attempt: int = 1) -> Delivery:
    """The delivery that a message's payload keeps."""
    return Delivery(
        source=payload["source"],
        endpoint=payload["endpoint"],
        id=payload["id"],
        event_type=payload["event_type"],
        body=base64.b64decode(payload["body"]),
        headers=CaseInsensitiveMapping(payload["headers"]),
        attempt=attempt,
    )
