"""Becoming the executor: by the row's lock, or by a lease that was given back or has lapsed."""

from __future__ import annotations

import logging
import time
from typing import NoReturn, TypeGuard

from django.db import transaction

from . import db, signals
from .claims import Intent, times
from .conf import conf
from .exceptions import InProgress
from .executions import Execution, send, settle
from .models import EventKind, Operation, Outcome, Status, new_owner
from .policies import Resolved
from .steps import StepwiseExecution

logger = logging.getLogger("idempotency")

#: Pauses, in seconds, before a claimant says in-progress: whoever probes a lock (another
#: claimant, the admin, the purge) holds it for less.
LOCK_PAUSES = (0.002, 0.005, 0.01, 0.02)

AnyExecution = Execution | StepwiseExecution


def execute(operation: Operation, intent: Intent, *, is_ours: bool) -> AnyExecution | None:
    """Become the executor. None: the row changed hands, claim again. Raises InProgress."""
    if intent.policy.stepwise:
        if is_ours:  # the claim itself took the lease
            return StepwiseExecution(operation, intent.policy, resumed=False)
        return lease(operation, intent.policy, give_up=intent.give_up)
    using = intent.policy.using
    pauses = iter(LOCK_PAUSES)
    just_claimed = is_ours
    while True:
        block = transaction.atomic(using)
        joined = db.in_transaction(using)
        block.__enter__()
        try:
            # What is ours already is not left to lie as if we had vanished. Nobody else can execute it,
            # but a duplicate inside a caller's transaction keeps the lock that it has tried.
            has_started = is_ours and not just_claimed and intent.give_up is not None
            wait = has_started or (is_ours and intent.policy.on_interrupted == "reconcile")
            locked = db.lock(using, operation.pk, wait=wait)
            # A claimant's own short lease does not stop it.
            may_run = _is_unchanged(locked, operation) and (is_ours or not locked.leased)
            free = locked if may_run else None
            pause = None
            if free is not None and not (is_ours or joined or free.last_error):
                pause = next(pauses, None)  # it may be just about to start, or to say how it failed
            if pause is not None:
                free = None
            if free is not None and (is_ours or _take_over_plain(operation, free, intent)):
                return Execution(operation, intent.policy, block, joined=joined)
        except BaseException as error:
            block.__exit__(type(error), error, error.__traceback__)
            raise
        block.__exit__(None, None, None)
        if pause is not None:
            time.sleep(pause)
            continue
        if free is not None and free.owner != operation.owner:  # the takeover is on record now
            is_ours = True
            continue
        if locked is not None and not locked.leased:
            return None  # somebody finished or took over meanwhile: the next claim reads what
        if just_claimed:
            return None  # perhaps a rival came first: the next claim reads whose row it is
        pause = next(pauses, None)
        if pause is None or locked is not None or db.in_transaction(using):
            if locked is None and db.read(using, operation.pk) is None:
                return None  # not locked but purged
            in_progress(operation)
        time.sleep(pause)


def _take_over_plain(operation: Operation, locked: db.Locked, intent: Intent) -> bool:
    """Take an interrupted or failed operation over. False: what was written must commit first."""
    if _is_unsafe(locked, intent.policy):
        _reconcile(operation, locked)
        return False
    _, lease = times(intent.policy)
    if intent.give_up is None and lease is None:
        _take_over(operation, locked)
        return True
    # The attempt is put on record before it runs: if it vanishes too, that shows.
    interruptions = _vanished_in_a_row(locked)
    limit, outcome = intent.give_up or (None, None)
    if limit is not None and outcome is not None and interruptions >= limit:
        logger.error("operation %s given up: it took down %d executors", operation.pk, limit)
        values = settle(operation, outcome, intent.policy)
        db.execute(intent.policy.using, "complete", values, operation.pk)
        send(signals.operation_finished, operation)
        return False
    _take_over(operation, locked)
    started = (operation.attempt, operation.owner, interruptions, lease)
    db.execute(intent.policy.using, "start", started, operation.pk)
    return False


def lease(
    operation: Operation, policy: Resolved, *, give_up: tuple[int, Outcome] | None = None
) -> StepwiseExecution | None:
    """Continue a stepwise operation whose lease was given back or has lapsed.

    None: the row changed since `operation` was read, or after `give_up[0]` executors that vanished it
    is `reconciling` now. Raises InProgress while another has the lease.
    """
    with transaction.atomic(policy.using):
        locked = db.lock(policy.using, operation.pk)
        if locked is None or (locked.leased and _is_unchanged(locked, operation)):
            in_progress(operation)
        if not _is_unchanged(locked, operation):
            return None
        if _is_unsafe(locked, policy):
            _reconcile(operation, locked)
            return None
        interruptions = _vanished_in_a_row(locked)
        if give_up is not None and interruptions >= give_up[0]:
            logger.error("operation %s given up: it took down its executors", operation.pk)
            _reconcile(operation, locked)  # its steps may have had effects: no failure to store
            return None
        _take_over(operation, locked)
        if give_up is not None:
            counted = (operation.attempt, operation.owner, interruptions, None)
            db.execute(policy.using, "start", counted, operation.pk)
        seconds = policy.lease.total_seconds()
        values = (operation.attempt, operation.owner, True, seconds, seconds)
        db.execute(policy.using, "lease", values, operation.pk)
    return StepwiseExecution(operation, policy, resumed=True)


def _is_unchanged(locked: db.Locked | None, operation: Operation) -> TypeGuard[db.Locked]:
    """Whether the locked row is still the one that was judged: the owner changes with every executor."""
    return (
        locked is not None
        and locked.owner == operation.owner
        and locked.status == Status.PROCESSING
    )


def _is_unsafe(locked: db.Locked, policy: Resolved) -> bool:
    """Whether the executor vanished, and the policy says that only a reconciler knows what it did."""
    return policy.on_interrupted == "reconcile" and not locked.last_error


def _vanished_in_a_row(locked: db.Locked) -> int:
    """Executors that vanished since one said how it failed. Copies that come while another is about to
    start may be mistaken once in a while; such mistakes do not add up.
    """
    return 0 if locked.last_error else locked.interruptions + 1


def _reconcile(operation: Operation, locked: db.Locked) -> None:
    values = (Status.RECONCILING, locked.attempt, locked.owner, "interrupted", conf.RETRY_AFTER)
    db.execute(operation.using, "fail", values, operation.pk)
    db.add_event(
        operation.using, operation.pk, EventKind.RECONCILING, locked.attempt, "interrupted"
    )
    send(signals.operation_reconciling, operation)


def in_progress(operation: Operation) -> NoReturn:
    refusal = InProgress(operation_id=operation.pk, retry_after=conf.RETRY_AFTER)
    refusal.__dict__["operation"] = operation
    raise refusal


def _take_over(operation: Operation, locked: db.Locked) -> None:
    """Be the next executor of a claimed operation: its claimant failed, crashed, or was slower."""
    operation.attempt = locked.attempt + 1
    operation.owner = new_owner()
    operation.last_error = locked.last_error
    if not locked.last_error:  # nobody recorded how the attempt before ended
        db.add_event(operation.using, operation.pk, EventKind.TAKEN_OVER, operation.attempt, "")
        send(signals.operation_taken_over, operation)
