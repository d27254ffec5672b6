"""Undoing a finished operation later, a refund for instance: itself one stepwise operation."""

from __future__ import annotations

import uuid

from django.db import transaction

from . import compensation, encoding, engine, functions, signals
from .exceptions import IllegalTransition
from .executions import raise_translated, send
from .models import EventKind, Operation, Status, Step
from .policies import Policy
from .reconciliation import add_event
from .steps import StepwiseExecution

#: What may be reversed; of a reversed one, a reversal that was interrupted at its end is finished.
REVERSIBLE = (Status.SUCCEEDED, Status.REVERSED)


def reverse(operation: Operation, *, reason: str) -> None:
    """Run the compensations of the operation's steps, last one first; status `reversed`.

    However often it is called, each compensation has one effect: the reversal is an operation of its
    own, named by this one, resumable by the next call or the completer. `reason` is a short note for
    the timeline; nothing secret. The stored outcome stays what replays show. Reversing needs the
    steps: they go when the operation's retention and tombstone are over.

    Raises IllegalTransition unless the operation has succeeded (give one that waits for an action an
    Outcome with `resolve`, which compensates too), InProgress when it is being reversed right now, and
    what a compensation raised (call again to continue).
    """
    _run(str(operation.pk), reason, operation.using)
    operation.refresh_from_db(fields=["status"])


def _run(operation_id: str, reason: str, using: str, attempt: int | None = None) -> None:
    """`attempt` is the completer's: a reversal that comes late must not undo the key's next life."""
    original = Operation.objects.using(using).get(pk=uuid.UUID(operation_id))
    if attempt not in (None, original.attempt):
        raise _changed(original)
    if original.status not in REVERSIBLE:
        raise IllegalTransition(
            f"operation {original.pk} is {original.status}; only one that succeeded can be reversed"
        )
    args = [operation_id, reason, using, original.attempt]
    call = {"function": f"{__name__}._run", "args": args, "kwargs": {}}
    intent = functions.intent_of(
        "idempotency.reverse",
        # The attempt tells the lives of one key apart: each has its own steps to undo.
        f"{operation_id}.{original.attempt}",
        operation_id,
        Policy(stepwise=True, using=using).resolved(),
        scope=("reversal",),
        arguments=encoding.dumps(call),
    )
    begun = engine.begin(intent)
    if not isinstance(begun, StepwiseExecution):
        return
    with engine.running(begun.operation):
        try:
            _undo(begun, original, reason)
        except BaseException as error:
            begun.fail(error)
            raise_translated(error, begun.operation)
        begun.complete(functions.succeeded(None))


def _undo(reversal: StepwiseExecution, original: Operation, reason: str) -> None:
    using = reversal.using
    # Read again: whoever had the lease before may have reversed it, longer ago than is remembered.
    owner = original.owner
    original.refresh_from_db(fields=["status", "owner"])
    if original.owner != owner:
        raise _changed(original)
    if original.status == Status.REVERSED:
        return
    steps = Step.objects.using(using).filter(operation_id=original.pk).order_by("-id")
    for step in steps:
        if compensation.is_compensable(step):
            compensation.undo(reversal, step)
    with transaction.atomic(using):
        reversal.fence()
        changed = (
            Operation.objects.using(using)
            .filter(pk=original.pk, status=Status.SUCCEEDED, owner=original.owner)
            .update(status=Status.REVERSED)
        )
        if not changed:
            raise _changed(original)
        original.status = Status.REVERSED
        add_event(original, EventKind.REVERSED, reason)
        send(signals.operation_finished, original)


def _changed(original: Operation) -> IllegalTransition:
    return IllegalTransition(f"operation {original.pk} changed while it was being reversed")
