"""Handlers of deliveries: each runs once, in one transaction with the record that it ran."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from .. import db, inbox, keys, scopes
from ..exceptions import ConfigurationError, IdempotencyError, Refusal
from .deliveries import Delivery, NotBegun, NotYet

if TYPE_CHECKING:
    from .views import WebhookView

logger = logging.getLogger("idempotency")


@dataclass(frozen=True)
class Handler:
    """A function and the event types it takes."""

    name: str
    patterns: tuple[str, ...]
    function: Callable[[Delivery], Any]

    def takes(self, event_type: str) -> bool:
        return any(fnmatchcase(event_type, pattern) for pattern in self.patterns)


class NotHandled(IdempotencyError):
    """A handler did not do its work; what it did is rolled back, and the sender delivers again."""


def run_all(view: WebhookView, events: Iterable[Delivery]) -> None:
    """Run every handler that has not succeeded for these events; one's failure stops no other.

    Raises one of the failures when all had their turn, and logs the others.
    """
    failures: list[tuple[Handler, Exception]] = []
    for event in events:
        for handler in view.takers(event):
            try:
                run(view, handler, event)
            except Exception as error:
                failures.append((handler, error))
    # A failure of our own is what people must see; "come back later" only if it is all there is.
    failures.sort(key=lambda pair: is_later(pair[1]))
    for failed, failure in failures[1:]:
        if is_later(failure):
            logger.info("webhook handler %s: the delivery has to come again", failed.name)
        else:
            logger.error("webhook handler %s failed", failed.name, exc_info=failure)
    if failures:
        raise failures[0][1]


def run(view: WebhookView, handler: Handler, delivery: Delivery) -> None:
    """Run one handler, or nothing if it has succeeded for this delivery before.

    Raises NotBegun if the delivery was refused, else what the handler raises.
    """
    is_running = False
    try:
        with inbox.receive(
            consumer=_consumer(delivery, handler),
            message_id=delivery.id,
            payload=view.get_fingerprint(delivery),
            policy=view.get_policy(),
        ) as received:
            if not received.is_new:
                return
            is_running = True
            operation = received.operation
            if group := view.serialize_on(delivery):
                # Of all handlers: "created" and "updated" of one object have different ones.
                scope = ("webhook", delivery.source, delivery.endpoint)
                db.take_turn(operation.using, keys.operation_id(scope, group))
            attempt = max(delivery.attempt, operation.attempt)
            if handler.function(replace(delivery, attempt=attempt)) is False:
                raise NotHandled(f"{handler.name} returned False")
    except Refusal as refusal:
        if is_running:
            raise
        raise NotBegun(refusal) from refusal


def _consumer(delivery: Delivery, handler: Handler) -> str:
    """What a handler is to the inbox: one consumer for each source, endpoint and handler."""
    consumer = keys.from_value(("webhook", delivery.source, delivery.endpoint, handler.name))
    try:
        scopes.encode(("inbox", consumer))
    except ConfigurationError:  # too long
        return inbox.digest(consumer)
    return consumer


def is_later(error: Exception) -> bool:
    """Whether the same delivery may succeed later without anybody doing anything about it."""
    if isinstance(error, NotBegun):
        error = error.refusal
    is_wait = isinstance(error, Refusal) and (error.retryable or error.key_action == "wait")
    return is_wait or isinstance(error, NotYet)
