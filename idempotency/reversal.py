"""Undoing a finished operation later, a refund for instance: itself one stepwise operation."""

from __future__ import annotations

import uuid

from django.db import transaction

from . import db, encoding, functions, signals
from .exceptions import IllegalTransition
from .executions import send
from .models import EventKind, Operation, Status, Step, StepStatus
from .policies import Policy
from .steps import StepwiseExecution

#: What may be reversed; `reversed` itself replays the reversal.
REVERSIBLE = (Status.SUCCEEDED, Status.REQUIRES_ACTION, Status.REVERSED)


def reverse(operation: Operation, *, reason: str) -> None:
    """Run the compensations of the operation's steps, last one first; status `reversed`.

    However often it is called, each compensation has one effect: the reversal is an operation of its
    own, named by this one's id, resumable by the next call or the completer. `reason` is a short note
    for the timeline; nothing secret. The stored outcome stays what replays show.

    Raises IllegalTransition when the operation has not finished or has failed, InProgress when it is
    being reversed right now, and what a compensation raised (call again to continue).
    """
    _run(str(operation.pk), reason, operation._state.db)


def _run(operation_id: str, reason: str, using: str) -> None:
    call = {"function": f"{__name__}._run", "args": [operation_id, reason, using], "kwargs": {}}
    intent = functions.intent_of(
        "idempotency.reverse",
        operation_id,
        operation_id,
        Policy(stepwise=True, using=using).resolved(),
        scope=("reversal",),
        arguments=encoding.dumps(call),
    )
    original = Operation.objects.using(using).get(pk=uuid.UUID(operation_id))
    if original.status not in REVERSIBLE:
        raise IllegalTransition(
            f"operation {original.pk} is {original.status}; it cannot be reversed"
        )
    begun = functions.engine.begin(intent)
    if not isinstance(begun, StepwiseExecution):
        return
    with functions.engine.running(begun.operation):
        try:
            _undo(begun, original, reason)
            outcome = functions.succeeded(None)
        except BaseException as error:
            begun.fail(error)
            functions.engine.raise_translated(error, begun.operation)
        begun.complete(outcome)
    send(signals.operation_finished, original)


def _undo(reversal: StepwiseExecution, original: Operation, reason: str) -> None:
    using = reversal.using
    steps = (
        Step.objects.using(using)
        .filter(operation_id=original.pk, status=StepStatus.DONE)
        .exclude(compensation="")
        .order_by("-id")
    )
    for step in steps:
        reversal.undo(step)
    with transaction.atomic(using):
        reversal.fence()
        changed = (
            Operation.objects.using(using)
            .filter(pk=original.pk, status__in=REVERSIBLE)
            .update(status=Status.REVERSED)
        )
        if not changed:
            raise IllegalTransition(f"operation {original.pk} changed while it was being reversed")
        db.add_event(using, original.pk, EventKind.REVERSED, original.attempt, reason)
    original.status = Status.REVERSED
