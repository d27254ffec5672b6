"""Webhook views in the URLconf: what would be refused, forgotten or lost."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage

from ..exceptions import ConfigurationError
from ..webhooks import stored
from ..webhooks.deliveries import Delivery
from ..webhooks.views import WebhookView
from .urls import Endpoint, endpoints, is_checkable, view_class


def check_webhooks(**kwargs: object) -> list[CheckMessage]:
    if not is_checkable():
        return []
    messages: dict[tuple[Any, ...], CheckMessage] = {}
    for endpoint in endpoints():
        cls = view_class(endpoint.callback)
        if cls is not None and issubclass(cls, WebhookView):
            view = cls(**getattr(endpoint.callback, "view_initkwargs", {}))
            for message in _judge(endpoint, view):
                messages.setdefault((message.id, endpoint.name), message)
    return list(messages.values())


def _judge(endpoint: Endpoint, view: WebhookView) -> Iterator[CheckMessage]:
    where = f"{endpoint.name} at {endpoint.path}"
    if not view.source:
        yield checks.Error(
            f"{where} has no source, so that the ids of different senders would mix.",
            hint="Set `source`, such as 'stripe'.",
            id="idempotency.E090",
        )
    if not _takes(view.verify, b"", {}):
        yield checks.Error(
            f"{where} cannot verify who sends.",
            hint="Set `verify` to a verifier of idempotency.webhooks or a callable(body, headers).",
            id="idempotency.E091",
        )
    if not _has_carriers(view):
        yield checks.Error(
            f"{where} does not say where the id of a delivery, or its type, is found.",
            hint='Set `delivery_id` to "header:NAME", "json:FIELD", "form:FIELD", "body" or a '
            "callable(delivery), and `event_type` to one of the first three.",
            id="idempotency.E092",
        )
    policy = view.get_policy().resolved()
    retention = (policy.retention + policy.tombstone).total_seconds()  # each recognises a duplicate
    if view.retry_horizon is not None and retention < view.retry_horizon:
        yield checks.Warning(
            f"{where} remembers deliveries for {retention / 3600:.1f} h, and its sender repeats them "
            f"for {view.retry_horizon / 3600:.1f} h: a late one would be handled again.",
            hint="Raise Policy.retention (default: 7 days), or set `retry_horizon` to the seconds for "
            "which this sender really retries.",
            id="idempotency.W093",
        )
    if not view.handlers():
        yield checks.Warning(
            f"{where} has no handlers: every delivery is acknowledged and lost.",
            hint="Register them with @View.handles(...), and import their module in AppConfig.ready().",
            id="idempotency.W094",
        )
    if view.acknowledge_first and not _is_found(view):
        yield checks.Error(
            f"{where} acknowledges first, and the relay cannot import it.",
            hint="Define the view in a module, not inside a function.",
            id="idempotency.E095",
        )


def _is_found(view: WebhookView) -> bool:
    try:
        return stored.find(stored.place(view)) is type(view)
    except (ImportError, AttributeError, ValueError):
        return False


def _takes(function: Any, *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def _has_carriers(view: WebhookView) -> bool:
    id_of = view.known("delivery_id")
    empty = Delivery(source="", id="", body=b"", headers={})
    for hook in (view.get_delivery_id, view.get_event_type):
        try:
            with suppress(ValueError, LookupError, TypeError, AttributeError):
                hook(empty)  # which has neither
        except ConfigurationError:
            return False
    return not callable(id_of) or _takes(id_of, empty)
