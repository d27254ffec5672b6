"""From "we do not know" to a final state, a re-run, or a person.

@reconciler("shop.pay")            asked about operations of that name that are `reconciling`
reconcile_due()                    asks about all that are due: beat task, management command
resolve(), resolve_by_reference()  settle one: a webhook or a person knows the answer
complete_abandoned()               runs stepwise functions again whose executor vanished
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils.module_loading import import_string

from . import db, encoding, signals
from .conf import conf
from .exceptions import ConfigurationError, IllegalTransition, Refusal
from .executions import send, settle
from .models import (
    TRANSITIONS,
    EventKind,
    Operation,
    Outcome,
    Reference,
    Status,
    Step,
    StepStatus,
    describe_error,
)
from .policies import Policy
from .steps import Absent, Confirmed, StillUnknown

__all__ = [
    "Absent",
    "Confirmed",
    "StillUnknown",
    "complete_abandoned",
    "reconcile_due",
    "reconciler",
    "resolve",
    "resolve_by_reference",
]

logger = logging.getLogger("idempotency")

Answer = Confirmed | Absent | StillUnknown | Outcome

#: Seconds between two questions about one operation: doubled each time, up to the last value.
FIRST_PAUSE, LONGEST_PAUSE = 5, 3600
#: Seconds that a question may take before another process asks it again.
ASKING = 300
#: Seconds until a question that is a person's now: ten years.
NEVER = 10 * 365 * 24 * 3600

_reconcilers: dict[str, Callable[[Operation], Answer]] = {}


def reconciler(*names: str) -> Callable[[Callable[[Operation], Answer]], Any]:
    """Register a function that finds out what became of a `reconciling` operation of these names.

    It gets the operation, asks the provider by a derived key or a reference, and returns Confirmed
    (with the result, or an Outcome to replay as it is), Absent or StillUnknown. It must not assume that
    "not found yet" is Absent: say Absent only when the effect can no longer appear.
    """

    def register(function: Callable[[Operation], Answer]) -> Callable[[Operation], Answer]:
        for name in names:
            if _reconcilers.setdefault(name, function) is not function:
                raise ConfigurationError(f"two reconcilers for {name!r}")
        return function

    return register


@dataclass(frozen=True)
class Report:
    """What one run of `reconcile_due` or `complete_abandoned` did, in operations."""

    asked: int = 0
    settled: int = 0
    rerun: int = 0
    waiting: int = 0
    handed_over: int = 0


def reconcile_due(using: str | None = None, *, limit: int = 100) -> Report:
    """Ask about every `reconciling` operation whose next question is due. Safe to run concurrently."""
    using = using or conf.USING
    counts = {"asked": 0, "settled": 0, "rerun": 0, "waiting": 0, "handed_over": 0}
    for operation in _due(using, Status.RECONCILING, limit):
        pause = min(FIRST_PAUSE * 2**operation.checks, LONGEST_PAUSE)
        if not _postpone(operation, max(pause, ASKING)):
            continue  # another process asks it
        counts["asked"] += 1
        try:
            counts[_reconcile(operation, pause)] += 1
        except Exception as error:
            logger.exception("reconciling operation %s failed", operation.pk)
            _wait(operation, pause)
            _event(operation, EventKind.ATTEMPT_FAILED, describe_error(error))
            counts["waiting"] += 1
    return Report(**counts)


def _reconcile(operation: Operation, pause: float) -> str:
    using = operation._state.db
    step = (
        Step.objects.using(using)
        .filter(operation_id=operation.pk, status=StepStatus.STARTED)
        .order_by("id")
        .first()
    )
    answer = _ask(operation, step)
    if not isinstance(answer, StillUnknown):
        resolve(operation, answer, evidence="reconciler")
        return "rerun" if step is not None or isinstance(answer, Absent) else "settled"
    too_old = db.now(using, after=-conf.RECONCILE_MAX_AGE)
    if not Operation.objects.using(using).filter(pk=operation.pk, created_at__lte=too_old).exists():
        _wait(operation, pause)
        return "waiting"
    _wait(operation, NEVER)
    _event(operation, EventKind.HANDED_OVER, "")
    logger.error("nobody knows the outcome of operation %s: a person must decide", operation.pk)
    return "handed_over"


def _ask(operation: Operation, step: Step | None) -> Answer:
    if step is not None and step.reconciler:
        return import_string(step.reconciler)(key=operation.derive_key(step.name))  # type: ignore[no-any-return]
    found = _reconcilers.get(operation.name)
    return StillUnknown() if found is None else found(operation)


def resolve(
    operation: Operation,
    answer: Confirmed | Absent | Outcome,
    *,
    evidence: str,
    policy: Policy | None = None,
) -> None:
    """Settle an operation that is `reconciling` or `requires_action`, in one transaction.

    Confirmed: a stepwise operation records the result of its open call and goes on (its next retry,
    or the completer, runs the rest); another one succeeds with the result. Absent: the next retry
    runs it with the same downstream keys. An Outcome is stored and replayed as it is. `evidence` is
    a short note for the timeline; nothing secret. `policy` gives the window (default: the project's).

    Raises IllegalTransition when it was settled already; whoever comes first decides.
    """
    using = operation._state.db
    with transaction.atomic(using):
        locked = db.lock(using, operation.pk)
        if locked is None or locked.status not in (Status.RECONCILING, Status.REQUIRES_ACTION):
            raise IllegalTransition(
                f"operation {operation.pk} is {'busy' if locked is None else locked.status}, not waiting to be settled"
            )
        operation.attempt, operation.owner = locked.attempt, locked.owner
        step = (
            Step.objects.using(using)
            .filter(operation_id=operation.pk, status=StepStatus.STARTED)
            .first()
        )
        if isinstance(answer, Outcome):
            _settle(operation, answer, policy)
        elif isinstance(answer, Confirmed) and (step is not None or operation.stepwise):
            if step is not None:
                values = (
                    StepStatus.DONE,
                    operation.attempt,
                    encoding.dumps(answer.result),
                    step.name,
                )
                db.execute(using, "step_finished", values, operation.pk)
            _release(operation)
        elif isinstance(answer, Confirmed):
            body = encoding.dumps(answer.result).encode()
            headers = {"Content-Type": "application/json"}
            _settle(operation, Outcome(status=Status.SUCCEEDED, headers=headers, body=body), policy)
        else:
            if step is not None:
                db.execute(using, "step_withdrawn", (step.name,), operation.pk)
            _release(operation)
        db.add_event(
            using,
            operation.pk,
            EventKind.RESOLVED,
            operation.attempt,
            f"{operation.status}: {evidence}",
        )
    if operation.is_final:
        send(signals.operation_finished, operation)


def resolve_by_reference(
    value: str, answer: Confirmed | Absent | Outcome, *, evidence: str, using: str | None = None
) -> list[Operation]:
    """`resolve` every waiting operation known by this reference (a provider's id); returns them.

    What is settled already is left alone, so a webhook may say the same thing twice.
    """
    alias = using or conf.USING
    references = Reference.objects.using(alias).filter(value=value)
    waiting = Operation.objects.using(alias).filter(
        pk__in=references.values("operation_id"),
        status__in=(Status.RECONCILING, Status.REQUIRES_ACTION),
    )
    resolved = []
    for operation in waiting:
        try:
            resolve(operation, answer, evidence=evidence)
        except IllegalTransition:
            continue
        resolved.append(operation)
    return resolved


def _settle(operation: Operation, outcome: Outcome, policy: Policy | None) -> None:
    if outcome.status not in TRANSITIONS[Status.RECONCILING]:
        raise IllegalTransition(f"an outcome cannot be {outcome.status}")
    values = settle(operation, outcome, (policy or Policy()).resolved())
    db.execute(operation._state.db, "complete", values, operation.pk)


def _release(operation: Operation) -> None:
    """Let the next attempt run at once."""
    operation.status = Status.PROCESSING
    using = operation._state.db
    Operation.objects.using(using).filter(pk=operation.pk).update(
        status=Status.PROCESSING,
        last_error="settled: may run again",
        lease_expires_at=None,
        expires_at=None,
        tombstone_until=None,
        finished_at=None,
        due_at=db.now(using),
    )


def complete_abandoned(using: str | None = None, *, limit: int = 100) -> Report:
    """Run abandoned stepwise functions and tasks again with their stored arguments.

    Views are not run without their client; they stay visible as interrupted. Failures are recorded
    like every failed attempt and tried again with growing pauses.
    """
    using = using or conf.USING
    asked = settled = waiting = 0
    for operation in _due(using, Status.PROCESSING, limit):
        pause = min(FIRST_PAUSE * 2**operation.attempt, LONGEST_PAUSE)
        if not _postpone(operation, pause):
            continue
        asked += 1
        call = encoding.loads(operation.arguments or "null")
        try:
            import_string(call["function"])(*call["args"], **call["kwargs"])
            settled += 1
        except Refusal:
            waiting += 1
        except Exception:
            logger.warning("running operation %s again failed", operation.pk, exc_info=True)
            waiting += 1
    return Report(asked=asked, settled=settled, waiting=waiting)


def _due(using: str, status: str, limit: int) -> list[Operation]:
    due = Operation.objects.using(using).filter(status=status, due_at__lte=db.now(using))
    if status == Status.PROCESSING:
        due = due.filter(stepwise=True, arguments__isnull=False)
    return list(due.defer("body").order_by("due_at")[:limit])


def _postpone(operation: Operation, pause: float) -> bool:
    """Move the next look away; False when another process did, or the executor is alive."""
    using = operation._state.db
    mine = Operation.objects.using(using).filter(
        pk=operation.pk, status=operation.status, due_at__lte=db.now(using)
    )
    changed = mine.update(due_at=db.now(using, after=pause), checks=F("checks") + 1)
    if operation.status == Status.PROCESSING:
        leased = Operation.objects.using(using).filter(
            pk=operation.pk, lease_expires_at__gt=db.now(using)
        )
        return bool(changed) and not leased.exists()
    return bool(changed)


def _wait(operation: Operation, pause: float) -> None:
    using = operation._state.db
    waiting = Operation.objects.using(using).filter(pk=operation.pk, status=Status.RECONCILING)
    waiting.update(due_at=db.now(using, after=pause))


def _event(operation: Operation, kind: str, detail: str) -> None:
    db.add_event(operation._state.db, operation.pk, kind, operation.attempt, detail)
