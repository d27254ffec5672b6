"""Idempotent consumer: a message's effects and the mark that it was received commit together.

Source: microservices.io "Idempotent Consumer"; Hohpe & Woolf, "Idempotent Receiver".
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from django.db import models

from . import db, engine, fingerprints, keys
from .exceptions import (
    ConfigurationError,
    IdempotencyError,
    InvalidKey,
    KeyExpired,
    ResponseNotRetained,
)
from .models import Operation, Outcome, Status
from .policies import Policy

logger = logging.getLogger("idempotency")

#: Longer than most senders' retry schedules (Standard Webhooks: 75 h 35 m 5 s; but Adyen: 30 days).
RETENTION = timedelta(days=7)


@dataclass(frozen=True)
class Received:
    """A message inside `receive`: do the work if and only if `is_new`."""

    is_new: bool
    operation: Operation


@contextmanager
def receive(
    *,
    consumer: str,
    message_id: str,
    payload: Any = None,
    serialize_on: str = "",
    policy: Policy | None = None,
) -> Iterator[Received]:
    """Receive a message once per consumer; the block is one transaction with its effects.

    `message_id` is the producer's id of the message, the same on every delivery. `payload` (bytes or
    JSON-able), if given, must then be the same too. Consumers with the same non-empty `serialize_on`
    (an order's id, say) run one after the other; messages for other objects do not wait. If the block
    raises, everything in it is rolled back and the next delivery is new again. Inside the caller's
    transaction the block is a savepoint of it, and lasts only if the caller commits: acknowledge
    after that. `policy` overrides retention (default 7 days), `using` and `wait`.

    Raises InProgress when another delivery of the message is being worked on: do not acknowledge,
    let the broker deliver again, for the other one may still fail. Raises Mismatch when the id comes
    with another payload, Unavailable when the database could not commit: deliver again. Raises
    RolledBack if the block ends although its transaction cannot be committed, and
    ConfigurationError for a stepwise policy, whose steps would not be one transaction.
    """
    given = policy or Policy()
    if given.stepwise:
        raise ConfigurationError("inbox.receive is one transaction; it cannot be stepwise")
    # The project's defaults for views do not shorten what a sender's schedule needs.
    resolved = replace(given, retention=given.retention or RETENTION, stepwise=False).resolved()
    fingerprint = (
        fingerprints.of(payload) if isinstance(payload, bytes) else fingerprints.of_value(payload)
    )
    intent = engine.Intent(
        name=f"inbox:{consumer}"[:200],
        scope=("inbox", consumer),
        key=key_of(message_id),
        fingerprint=fingerprint,
        policy=resolved,
    )
    try:
        begun = engine.begin(intent)
    except (KeyExpired, ResponseNotRetained):  # it was received; only the result is gone
        yield Received(False, _operation(intent))
        return
    if isinstance(begun, engine.Replay):
        engine.replayed(begun)
        yield Received(False, begun.operation)
        return
    with engine.running(begun.operation):
        try:
            if serialize_on:
                turn = keys.operation_id(("turn", consumer), serialize_on)
                db.take_turn(resolved.using, turn)
            yield Received(True, begun.operation)
        except BaseException as error:
            begun.fail(error)
            engine.raise_translated(error, begun.operation)
        begun.complete(Outcome(status=Status.SUCCEEDED, body=b"null"))


def _operation(intent: engine.Intent) -> Operation:
    """The operation that was finished before; the purge may have taken it meanwhile."""
    pk = keys.operation_id(intent.scope, intent.key)
    found = db.read(intent.policy.using, pk)
    return found or Operation(id=pk, key=intent.key, name=intent.name, status=Status.SUCCEEDED)


@dataclass(frozen=True)
class Item:
    """What became of one message of a batch.

    `status` is `received`, `duplicate` (received before), `failed` (`error` says why) or `held`: not
    tried, because an earlier message of the same object failed. Acknowledge if `is_done`.
    """

    message: Any
    message_id: str
    status: str
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.status in ("received", "duplicate")


def receive_batch(
    messages: Iterable[Any],
    handle: Callable[[Any], Any],
    *,
    consumer: str,
    message_id: Callable[[Any], str],
    payload: Callable[[Any], Any] | None = None,
    serialize_on: Callable[[Any], str] | None = None,
    policy: Policy | None = None,
) -> list[Item]:
    """Receive every message of a batch for itself; returns one Item per message, in order.

    `message_id`, `payload` and `serialize_on` are called with the message. Each message has a
    transaction of its own, so one that fails takes no other with it. With `serialize_on`, messages of
    an object whose message failed are held, so that the order survives the redelivery. Exceptions
    of the callables are returned, not raised.
    """
    items: list[Item] = []
    failed: set[str] = set()
    for message in messages:
        found = group = ""
        status, cause = "held", None
        try:
            try:
                found = message_id(message)
            finally:  # a message without an id still keeps its place in the order
                group = serialize_on(message) if serialize_on is not None else ""
            if not group or group not in failed:
                with receive(
                    consumer=consumer,
                    message_id=found,
                    payload=None if payload is None else payload(message),
                    serialize_on=group,
                    policy=policy,
                ) as received:
                    if received.is_new:
                        handle(message)
                status = "received" if received.is_new else "duplicate"
        except Exception as error:
            level = logging.INFO if isinstance(error, IdempotencyError) else logging.ERROR
            logger.log(level, "a message for %s failed: %s", consumer, type(error).__qualname__)
            status, cause = "failed", error
        item = Item(message, found, status, cause)
        if group and not item.is_done:
            failed.add(group)
        items.append(item)
    return items


def key_of(message_id: str) -> str:
    """The message id as a key; ids with other characters, or too long ones, by their digest."""
    if not message_id:
        raise InvalidKey("A message without an id cannot be recognised when it comes again.")
    return keys.from_value(message_id)


def digest(*parts: bytes | str) -> str:
    """A message id made of content, for senders without ids: the same bytes are the same message."""
    raw = [part.encode() if isinstance(part, str) else part for part in parts]
    lengths = json.dumps([len(part) for part in raw]).encode()
    return f"sha256:{hashlib.sha256(lengths + b''.join(raw)).hexdigest()}"


def is_stale(current: Any, incoming: Any) -> bool:
    """Whether an event is older than what was applied already and must be skipped.

    `current` is the version or occurred-at of the state (None: nothing applied yet), `incoming` that of
    the event; both of one comparable type. Tie rule: equal is not stale, so of two events with the same
    version the one delivered last wins; give events distinct versions where that matters.
    """
    return current is not None and incoming < current


def apply_if_newer(
    queryset: models.QuerySet[Any], field: str, incoming: Any, **changes: Any
) -> bool:
    """Update the rows unless they are newer than `incoming`, in one statement; False: stale.

    The comparison and the write are one UPDATE, so two events cannot pass each other in between.
    """
    is_older = models.Q(**{f"{field}__lte": incoming}) | models.Q(**{f"{field}__isnull": True})
    return bool(queryset.filter(is_older).update(**{field: incoming}, **changes))
