"""What a caller wants, and the row that stands for it: the first one, and each new life of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from django.db import transaction

from . import db, encoding, keys, scopes
from .fingerprints import Fingerprint
from .models import EventKind, Operation, Outcome, Status, new_owner
from .policies import Resolved


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What a caller wants done: who (`scope`), which (`key`), what (`fingerprint`) and how."""

    name: str
    scope: scopes.Scope
    key: str
    fingerprint: Fingerprint
    policy: Resolved
    #: A client made the key for this request, so the key's age says how late the request may be. One
    #: that is made of the domain (an order's id, a message's) says nothing of the kind.
    from_client: bool = False
    #: JSON of what a stepwise operation needs to be run again without its caller.
    arguments: str | None = None
    #: (n, outcome): after n executors that vanished without a word, store this outcome instead of
    #: letting the operation take down another one. Attempts are then counted before they run.
    give_up: tuple[int, Outcome] | None = None


def first_row(intent: Intent) -> Operation:
    """The row that a first claim inserts."""
    return Operation.to_claim(
        intent.policy.using,
        id=keys.operation_id(intent.scope, intent.key),
        scope=scopes.encode(intent.scope),
        key=intent.key,
        name=intent.name,
        status=Status.PROCESSING,
        fingerprint=intent.fingerprint.digest(),
        attempt=1,
        owner=new_owner(),
        stepwise=intent.policy.stepwise,
        arguments=intent.arguments and encoding.seal(intent.arguments),
    )


def times(policy: Resolved) -> tuple[float, float | None]:
    """How long the row is kept, and the claim's lease, in seconds.

    A plain operation needs none, unless its executor's disappearance means that effects may exist:
    then a short lease covers the moment between claim and lock, and tells the purge what it is.
    """
    keep = (policy.retention + policy.tombstone).total_seconds()
    if policy.stepwise:
        return keep, policy.lease.total_seconds()
    return keep, None if policy.on_interrupted == "rerun" else db.STARTING


def is_late(key: str, keep: float) -> bool:
    """Whether the key says itself that its outcome may have been stored and forgotten by now.

    The only use of the host's clock, with five minutes to spare: it can refuse, never execute.
    """
    issued = keys.issued_at(key)
    return issued is not None and issued + keep + 300 < time.time()


def renew(fresh: Operation, intent: Intent) -> bool:
    """Start a new life of a row whose window and tombstone are over. False: somebody else has it."""
    policy = intent.policy
    with transaction.atomic(policy.using):
        locked = db.lock(policy.using, fresh.pk)
        if locked is None or not locked.forgotten or locked.status == Status.REVERSED:
            return False
        fresh.attempt = locked.attempt + 1  # attempts of the old life stay below every new one
        keep, lease = times(policy)
        values = (
            fresh.name,
            fresh.status,
            fresh.fingerprint,
            fresh.attempt,
            fresh.owner,
            fresh.stepwise,
            fresh.arguments,
            lease,
            lease if policy.stepwise else keep,
        )
        db.execute(policy.using, "renew", values, fresh.pk)
        db.execute(policy.using, "forget_steps", (), fresh.pk)
        db.execute(policy.using, "forget_references", (), fresh.pk)
        db.add_event(policy.using, fresh.pk, EventKind.RENEWED, fresh.attempt, "")
    return True
