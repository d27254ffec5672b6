"""Idempotent consumer: a message's effects and the mark that it was received commit together.

Source: microservices.io "Idempotent Consumer"; Hohpe & Woolf, "Idempotent Receiver".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import models

from . import db, engine, fingerprints, keys
from .exceptions import InvalidKey
from .models import Operation, Outcome, Status
from .policies import Policy

#: Longer than every sender's retry schedule we know (Standard Webhooks: 75 h 35 m 5 s).
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
    (an order's id, say) run one after the other. If the block raises, everything in it is rolled back
    and the next delivery is new again. `policy` overrides retention (default 7 days), `using` and
    `wait`.

    Raises InProgress when another delivery of the message is being worked on: do not acknowledge,
    let the broker deliver again, for the other one may still fail. Raises Mismatch when the id comes
    with another payload, Unavailable when the database could not commit: deliver again.
    """
    resolved = (policy or Policy(retention=RETENTION)).resolved()
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
    begun = engine.begin(intent)
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


def key_of(message_id: str) -> str:
    """The message id as a key; ids with other characters, or too long ones, by their digest."""
    if not message_id:
        raise InvalidKey("A message without an id cannot be recognised when it comes again.")
    try:
        return keys.validate(message_id)
    except InvalidKey:
        return f"sha256:{hashlib.sha256(message_id.encode()).hexdigest()}"


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
