"""Senders of webhooks, as the tests of receiving them use them."""

from __future__ import annotations

import json
import time
from typing import Any

from django.core.handlers.exception import convert_exception_to_response
from django.http import HttpResponse
from django.test import RequestFactory
from standardwebhooks.webhooks import hmac_data

from idempotency.webhooks import StandardWebhooksVerifier, WebhookView
from tests.callers import drop_broken_connections

KEY = b"a key of twenty-four bytes"


class Hook(WebhookView):
    """What most tests subclass: Standard Webhooks, signed with KEY."""

    source = "acme"
    verify = StandardWebhooksVerifier(KEY)


def signed(
    body: bytes, delivery: str, *, key: bytes = KEY, at: float | None = None
) -> dict[str, str]:
    """The headers of Standard Webhooks for this body."""
    import base64

    timestamp = str(int(time.time() if at is None else at))
    content = f"{delivery}.{timestamp}.".encode() + body
    return {
        "webhook-id": delivery,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{base64.b64encode(hmac_data(key, content)).decode()}",
    }


def event(event_type: str = "paid", **fields: Any) -> bytes:
    return json.dumps({"type": event_type, **fields}).encode()


def deliver(
    view: Any,
    delivery: str = "m1",
    body: bytes | None = None,
    *,
    headers: dict[str, str] | None = None,
    content_type: str = "application/json",
    **kwargs: Any,
) -> HttpResponse:
    """One attempt to deliver to a view (or a class of one), answered as Django's handler answers it."""
    body = event() if body is None else body
    callback = view.as_view() if isinstance(view, type) else view
    request = RequestFactory().generic(
        "POST",
        "/hook/",
        body,
        content_type=content_type,
        headers=signed(body, delivery) if headers is None else headers,
    )
    try:
        return convert_exception_to_response(lambda request: callback(request, **kwargs))(request)
    finally:
        drop_broken_connections()
