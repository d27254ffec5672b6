"""From "we do not know" to a final state, a re-run, or a person.

@reconciler("shop.pay")            asked about operations of that name that are `reconciling`
reconcile_due()                    asks about all that are due: beat task, management command
resolve(), resolve_by_reference()  settle one: a webhook or a person knows the answer
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from django.db import OperationalError, transaction
from django.db.models import F, Q, QuerySet
from django.utils.module_loading import import_string

from . import db, encoding, signals
from .compensation import COMPENSATING, is_compensable, text_of, text_of_result
from .conf import conf
from .exceptions import ConfigurationError, IllegalTransition
from .executions import send, settle
from .models import (
    FINAL,
    TRANSITIONS,
    EventKind,
    Operation,
    Outcome,
    Reference,
    Status,
    Step,
    StepStatus,
    describe_error,
    new_owner,
)
from .policies import Policy
from .steps import Absent, Confirmed, StillUnknown, backoff

__all__ = [
    "Absent",
    "Confirmed",
    "StillUnknown",
    "reconcile_due",
    "reconciler",
    "resolve",
    "resolve_by_reference",
]

logger = logging.getLogger("idempotency")

Answer = Confirmed | Absent | StillUnknown | Outcome
AskT = TypeVar("AskT", bound=Callable[..., Any])

#: Seconds that a question may take before another process asks it again.
ASKING = 300
#: Seconds until a question that is a person's now: ten years.
NEVER = 10 * 365 * 24 * 3600

#: What can be settled from outside.
WAITING = (Status.RECONCILING, Status.REQUIRES_ACTION)


@dataclass(frozen=True)
class _Registered:
    ask: Callable[[Operation], Answer]
    policy: Policy | None


_reconcilers: dict[str, _Registered] = {}


def reconciler(*names: str, policy: Policy | None = None) -> Callable[[AskT], AskT]:
    """Register a function that finds out what became of a `reconciling` operation of these names.

    It gets the operation, asks the provider by a derived key or a reference, and returns Confirmed
    (with the result, or an Outcome to replay as it is), Absent or StillUnknown. It must not assume that
    "not found yet" is Absent: say Absent only when the effect can no longer appear. `policy` is that of
    the operation (default: the project's): retention and codec of an outcome that is stored here.

    A `reconcile=` given with a call is asked before this one.
    """

    def register(function: AskT) -> AskT:
        for name in names:
            known = _reconcilers.setdefault(name, _Registered(function, policy))
            if known.ask is not function:
                raise ConfigurationError(f"two reconcilers for {name!r}")
        return function

    return register


@dataclass(frozen=True)
class Report:
    """What one run of `reconcile_due` or `complete_abandoned` did, in operations."""

    #: Looked at: each is one of the following.
    asked: int = 0
    #: Have a final status now.
    settled: int = 0
    #: Continue with their next attempt.
    rerun: int = 0
    #: Will be looked at again later.
    waiting: int = 0
    #: Are a person's to decide now.
    handed_over: int = 0


def reconcile_due(using: str | None = None, *, limit: int = 100) -> Report:
    """Ask about every operation whose outcome is unknown and whose next question is due.

    Also about stepwise ones that wait for an action longer than their window. Questions are asked
    with growing pauses; after `RECONCILE_MAX_AGE` without an answer the operation is handed over to
    people: an event says so, and nobody asks until they do. Safe to run concurrently.
    """
    using = using or conf.USING
    counts = dict.fromkeys(("asked", "settled", "rerun", "waiting", "handed_over"), 0)
    waiting = Q(status=Status.RECONCILING) | Q(status=Status.REQUIRES_ACTION, stepwise=True)
    for operation in due(using, waiting, limit):
        if not postpone(operation, max(backoff(operation.checks), ASKING)):
            continue  # another process asks it
        counts["asked"] += 1
        counts[_reconcile(operation)] += 1
    return Report(**counts)


def _reconcile(operation: Operation) -> str:
    step, before = open_step(operation), (operation.status, operation.owner)
    try:
        answer = _ask(operation, step)
        if not isinstance(answer, StillUnknown):
            resolve(operation, answer, evidence="reconciler")
            return "settled" if operation.is_final else "rerun"
    except Exception as error:
        db.drop_if_broken(operation.using)
        now = db.read(operation.using, operation.pk)
        if now is None or (now.status, now.owner) != before:
            return "settled"  # by somebody else, while this was being asked
        operation.status, operation.owner = before
        description = describe_error(error)
        logger.error("reconciling operation %s failed: %s", operation.pk, description)
        add_event(operation, EventKind.ATTEMPT_FAILED, description)
    if hand_over_if_older(operation, step):
        return "handed_over"
    wait(operation, backoff(operation.checks))
    return "waiting"


def _ask(operation: Operation, step: Step | None) -> Answer:
    if step is not None and step.reconciler:
        return import_string(step.reconciler)(key=operation.derive_key(step.name))  # type: ignore[no-any-return]
    found = _reconcilers.get(operation.name)
    return StillUnknown() if found is None else found.ask(operation)


def can_be_asked(operation: Operation, step: Step) -> bool:
    """Whether there is a reconciler for this open step."""
    return bool(step.reconciler) or operation.name in _reconcilers


def open_step(operation: Operation) -> Step | None:
    """The external step whose outcome is not recorded, the first one if there are several."""
    steps = Step.objects.using(operation.using).filter(operation_id=operation.pk)
    return steps.filter(status=StepStatus.STARTED).order_by("id").first()


def resolve(
    operation: Operation,
    answer: Confirmed | Absent | Outcome,
    *,
    evidence: str,
    policy: Policy | None = None,
) -> None:
    """Settle an operation that is `reconciling` or `requires_action`, in one transaction.

    Confirmed: a stepwise operation records the result of its open call or action and goes on (its
    next retry, or the completer, runs the rest); another one succeeds with the result. Absent: the
    next retry runs it with the same downstream keys. An Outcome is stored and replayed as it is; a
    failed one first compensates the steps that were done. `evidence` is a short note for the
    timeline; nothing secret. `policy` is that of the operation, as in `reconciler`.

    Raises IllegalTransition when the operation was settled, or went on, since it was read: whoever
    comes first decides.
    """
    _check(answer)
    using = operation.using
    with transaction.atomic(using):
        locked = db.lock(using, operation.pk, wait=True)
        if locked is None or locked.status not in WAITING:
            found = "gone" if locked is None else locked.status
            raise IllegalTransition(
                f"operation {operation.pk} is {found}: nothing is to be settled"
            )
        if (locked.attempt, locked.owner) != (operation.attempt, operation.owner):
            raise IllegalTransition(f"operation {operation.pk} has gone on since it was read")
        step = open_step(operation)
        if isinstance(answer, Outcome):
            _settle(operation, answer, policy, step, locked.status)
        elif isinstance(answer, Confirmed) and step is not None:
            result = text_of_result(answer.result)
            values = (StepStatus.DONE, operation.attempt, result, step.name)
            db.execute(using, "step_finished", values, operation.pk)
            _release(operation, policy)
        elif isinstance(answer, Confirmed):
            body = encoding.dumps(answer.result).encode()
            headers = {"Content-Type": "application/json"}
            outcome = Outcome(status=Status.SUCCEEDED, headers=headers, body=body)
            _settle(operation, outcome, policy, step, locked.status)
        else:
            _withdraw(operation, step)
            _release(operation, policy)
        add_event(operation, EventKind.RESOLVED, f"{operation.status}: {evidence}")
    if operation.is_final:
        send(signals.operation_finished, operation)


def resolve_by_reference(
    value: str,
    answer: Confirmed | Absent | Outcome,
    *,
    evidence: str,
    name: str = "provider",
    using: str | None = None,
) -> list[Operation]:
    """`resolve` every waiting operation known by this reference (a provider's id); returns them.

    What is settled already is left alone, so a webhook may say the same thing twice. One that comes
    while its operation is still processing finds nothing to settle: answer it with success all the
    same; should the operation become `reconciling`, its reconciler asks.
    """
    _check(answer)
    alias = using or conf.USING
    references = Reference.objects.using(alias).filter(name=name, value=Reference.shortened(value))
    waiting = Operation.objects.using(alias).filter(
        pk__in=references.values("operation_id"), status__in=WAITING
    )
    resolved = []
    for operation in waiting:
        try:
            resolve(operation, answer, evidence=evidence)
        except IllegalTransition:
            continue
        resolved.append(operation)
    return resolved


def _check(answer: object) -> None:
    if not isinstance(answer, Confirmed | Absent | Outcome):
        raise TypeError(f"{answer!r} settles nothing: give Confirmed, Absent or an Outcome")
    if isinstance(answer, Outcome) and answer.status not in FINAL:
        raise IllegalTransition(f"{answer.status!r} is no outcome")


def _policy(operation: Operation, policy: Policy | None) -> Policy:
    found = _reconcilers.get(operation.name)
    return policy or (found.policy if found is not None else None) or Policy()


def _settle(
    operation: Operation, outcome: Outcome, policy: Policy | None, step: Step | None, status: str
) -> None:
    if outcome.status not in TRANSITIONS[status]:
        raise IllegalTransition(f"operation {operation.pk} cannot go to {outcome.status}")
    using = operation.using
    if outcome.status == Status.FAILED:
        _withdraw(operation, step)
        steps = Step.objects.using(using).filter(operation_id=operation.pk)
        if any(is_compensable(done) for done in steps):
            db.add_step(
                using,
                operation.pk,
                COMPENSATING,
                attempt=operation.attempt,
                is_external=False,
                result=text_of(outcome),
            )
            _release(operation, policy)
            return
    values = settle(operation, outcome, _policy(operation, policy).resolved())
    db.execute(using, "complete", values, operation.pk)


def _withdraw(operation: Operation, step: Step | None) -> None:
    if step is not None:
        db.execute(operation.using, "step_withdrawn", (step.name,), operation.pk)


def _release(operation: Operation, policy: Policy | None) -> None:
    """Let the next attempt run at once; who executed before knows less now and writes no more."""
    operation.status, operation.owner = Status.PROCESSING, new_owner()
    operation.last_error = "settled: may run again"
    using = operation.using
    keep = _policy(operation, policy).resolved()
    # The completer looks at a stepwise one now; the purge at another one when nobody came back.
    idle = 0 if operation.stepwise else (keep.retention + keep.tombstone).total_seconds()
    Operation.objects.using(using).filter(pk=operation.pk).update(
        status=operation.status,
        owner=operation.owner,
        last_error=operation.last_error,
        checks=0,
        interruptions=0,
        lease_expires_at=None,
        expires_at=None,
        tombstone_until=None,
        finished_at=None,
        due_at=db.now(using, after=idle),
    )


# What the reconciler and the completer share


def due(using: str, which: Q, limit: int) -> QuerySet[Operation]:
    """Operations that are to be looked at now, the longest overdue first."""
    db.drop_if_broken(using)  # for whoever calls this again and again in one process
    found = Operation.objects.using(using).filter(which, due_at__lte=db.now(using))
    return found.defer("body").order_by("due_at")[:limit]


def postpone(operation: Operation, pause: float) -> bool:
    """Take the look at an operation: nobody else does for `pause` seconds. False: another one did."""
    using = operation.using
    mine = Operation.objects.using(using).filter(
        pk=operation.pk,
        status=operation.status,
        owner=operation.owner,
        due_at__lte=db.now(using),
    )
    values = {"due_at": db.now(using, after=pause), "checks": F("checks") + 1}
    try:
        return mine.update(**values) == 1
    except OperationalError as error:
        # MariaDB: it may deadlock with others that want the row, through the index of what is due.
        if db.in_transaction(using) or not db.is_transient(error):
            raise
        return mine.update(**values) == 1


def wait(operation: Operation, pause: float) -> None:
    """Look again in `pause` seconds, unless the operation has gone on meanwhile."""
    using = operation.using
    same = Operation.objects.using(using).filter(
        pk=operation.pk, status=operation.status, owner=operation.owner
    )
    same.update(due_at=db.now(using, after=pause))


def hand_over_if_older(operation: Operation, step: Step | None) -> bool:
    """Leave an operation to people whose open step, or itself, is older than `RECONCILE_MAX_AGE`."""
    using = operation.using
    limit = conf.RECONCILE_MAX_AGE
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
    oldest = db.now(using, after=-seconds)
    old = (
        Operation.objects.using(using).filter(pk=operation.pk, created_at__lte=oldest)
        if step is None
        else Step.objects.using(using).filter(pk=step.pk, started_at__lte=oldest)
    )
    if not old.exists():
        return False
    wait(operation, NEVER)
    add_event(operation, EventKind.HANDED_OVER, "")
    logger.error("operation %s is stuck: a person must decide", operation.pk)
    return True


def add_event(operation: Operation, kind: str, detail: str) -> None:
    db.add_event(operation.using, operation.pk, kind, operation.attempt, detail)
