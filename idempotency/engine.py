"""Claim, then run, replay or refuse. START READING HERE.

The row lock is the liveness test: the transaction that commits the effects holds the lock on the
operation's row, so a crashed executor's lock vanishes with its connection, a slow executor cannot
be overtaken, and effects and stored outcome commit together or not at all.

    begin()  →  Execution: run the handler, then complete() or one of the failing ends
             →  Replay:    the stored outcome, nothing was executed
             →  raises Refusal: not executed; it says what the caller may do next

Knows no HTTP and no Celery.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import NoReturn, TypeGuard, TypeVar

from asgiref.sync import sync_to_async
from django.db import (
    InterfaceError,
    OperationalError,
    connections,
    transaction,
)

from . import compensation, db, keys, scopes, signals
from .aio import in_thread as in_thread
from .conf import conf
from .exceptions import (
    ConfigurationError,
    IdempotencyError,
    InProgress,
    KeyExpired,
    KeyTooOld,
    Mismatch,
    OutcomeUnknown,
    ReentrantOperation,
    Refusal,
    ResponseNotRetained,
    Unavailable,
)
from .executions import Execution, note, send, settle
from .executions import raise_translated as raise_translated
from .fingerprints import Fingerprint
from .models import EventKind, Operation, Outcome, Status, new_owner
from .policies import Resolved
from .steps import StepwiseExecution, in_test_transaction

logger = logging.getLogger("idempotency")

T = TypeVar("T")

#: Pauses, in seconds, before a claimant says in-progress: whoever probes a lock (another
#: claimant, the admin, the purge) holds it for less.
LOCK_PAUSES = (0.002, 0.005, 0.01, 0.02)
#: How often a claim may be lost to a purge or a commit that happens at the same moment.
CLAIM_ROUNDS = 8

AnyExecution = Execution | StepwiseExecution

_running: ContextVar[tuple[Operation, ...]] = ContextVar("idempotency_running", default=())


def current() -> Operation | None:
    """The operation being executed in this context, or None."""
    running = _running.get()
    return running[-1] if running else None


@contextmanager
def running(operation: Operation) -> Iterator[Operation]:
    """Make `operation` the current one for the block."""
    before = _running.get()
    _running.set((*before, operation))
    try:
        yield operation
    finally:
        _running.set(before)


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


@dataclass(frozen=True)
class Replay:
    """The stored outcome of an operation that has finished."""

    operation: Operation
    outcome: Outcome


def begin(intent: Intent) -> AnyExecution | Replay:
    """Claim the operation, waiting for a running first request as long as the policy says.

    Guarantees that at most one caller holds an Execution of this operation at a time, and that no
    transaction is open while waiting. Raises Refusal, or ReentrantOperation.
    """
    pauses = _pauses(intent)
    while True:
        try:
            return _try(intent)
        except InProgress as refusal:
            pause = next(pauses, None)
            if pause is None:
                _refused(refusal)
            time.sleep(pause)


async def abegin(intent: Intent) -> AnyExecution | Replay:
    """`begin` for async callers: waits without blocking the event loop."""
    pauses = _pauses(intent)
    while True:
        try:
            return await in_thread(_try, intent, discard=_discard)
        except InProgress as refusal:
            pause = next(pauses, None)
            if pause is None:
                await sync_to_async(_refused)(refusal)
            await asyncio.sleep(pause)


def _discard(begun: AnyExecution | Replay) -> None:
    if not isinstance(begun, Replay):
        begun.fail(asyncio.CancelledError())


def _pauses(intent: Intent) -> Iterator[float]:
    """Growing pauses that add up to the policy's wait."""
    if db.in_transaction(intent.policy.using):
        return  # a transaction must not be held open while waiting
    deadline = time.monotonic() + intent.policy.wait.total_seconds()
    pause = 0.05
    while (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 1.5, 0.5)


def _refused(refusal: InProgress) -> NoReturn:
    operation = refusal.__dict__.pop("operation")
    _refuse(operation, refusal)


def _try(intent: Intent) -> AnyExecution | Replay:
    policy = intent.policy
    fresh = first_row(intent)
    pk = fresh.pk
    if any(operation.pk == pk for operation in _running.get()):
        raise ReentrantOperation(
            f"{intent.name}: this operation is being executed by this very call. "
            "Give the inner operation a key of its own, for example current().derive_key('inner')."
        )
    is_open = db.in_transaction(policy.using)
    if policy.stepwise and is_open and not in_test_transaction(policy.using):
        raise ConfigurationError(
            f"{intent.name}: a stepwise operation cannot run inside a transaction, which would "
            "stay open across its external calls and could undo what it recorded."
        )
    cause: BaseException | None = None
    for round_ in range(CLAIM_ROUNDS):
        if round_:
            time.sleep(0.001 * round_)
        try:
            operation = _claim(fresh, intent)
            if operation is None:
                continue
            if isinstance(operation, Replay):
                return operation
            execution = _execute(operation, intent, is_ours=operation is fresh)
            if isinstance(execution, StepwiseExecution):
                return _compensate(execution) or execution
            if execution is not None:
                return execution
        except (OperationalError, InterfaceError) as error:
            # Nothing has been executed yet, so deadlocks, serialization failures and a connection
            # that died idle are simply tried again; SQLite has waited for its lock already.
            if not db.is_transient(error):
                raise
            cause = error
            if db.in_transaction(policy.using):
                break
            db.drop_if_broken(policy.using)
            if connections[policy.using].vendor == "sqlite" or round_ >= 2:
                break
    if cause is None:  # somebody is just claiming it, perhaps in a longer transaction of their own
        _in_progress(fresh)
    raise Unavailable(operation_id=pk, retry_after=conf.RETRY_AFTER) from cause


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
        arguments=intent.arguments,
    )


def _claim(fresh: Operation, intent: Intent) -> Operation | Replay | None:
    """The operation to execute, or its replay; None when the row changed hands: claim again."""
    policy = intent.policy
    keep, lease = _times(policy)
    if intent.from_client and conf.REFUSE_OLD_KEYS and _is_late(intent.key, keep):
        is_new, found = False, db.read(policy.using, fresh.pk)
        if found is None or (found.is_final and found.forgotten):
            raise KeyTooOld(operation_id=fresh.pk)
    else:
        due = lease if policy.stepwise and lease else keep
        is_new, found = db.claim(policy.using, fresh.__dict__, due, lease)
    if is_new:
        return fresh
    if found is None:
        return None
    if found.owner == fresh.owner:  # our own claim, whose answer was lost with the connection
        return fresh
    if found.scope != fresh.scope or found.key != fresh.key:  # SHA-256 would have collided
        raise IdempotencyError(f"operation {found.pk} belongs to another key")
    if found.is_final and found.forgotten and not found.is_waiting:
        return fresh if renew(fresh, intent) else found
    if not intent.fingerprint.matches(found.fingerprint):
        _refuse(found, Mismatch(operation_id=found.pk))
    if found.is_final:
        if found.expired and not found.is_waiting:
            _refuse(found, KeyExpired(operation_id=found.pk))
        return _replay(found, policy)
    if found.status == Status.RECONCILING:
        _refuse(found, OutcomeUnknown(operation_id=found.pk, retry_after=conf.RETRY_AFTER))
    return found


def _times(policy: Resolved) -> tuple[float, float | None]:
    """How long the row is kept, and the claim's lease, in seconds.

    A plain operation needs none, unless its executor's disappearance means that effects may exist:
    then a short lease covers the moment between claim and lock, and tells the purge what it is.
    """
    keep = (policy.retention + policy.tombstone).total_seconds()
    if policy.stepwise:
        return keep, policy.lease.total_seconds()
    return keep, None if policy.on_interrupted == "rerun" else db.STARTING


def _is_late(key: str, keep: float) -> bool:
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
        if locked is None or not locked.forgotten:
            return False
        fresh.attempt = locked.attempt + 1  # attempts of the old life stay below every new one
        keep, lease = _times(policy)
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


def _execute(operation: Operation, intent: Intent, *, is_ours: bool) -> AnyExecution | None:
    """Become the executor. None: the row changed hands, claim again. Raises InProgress."""
    if intent.policy.stepwise:
        if is_ours:  # the claim itself took the lease
            return StepwiseExecution(operation, intent.policy, resumed=False)
        return lease(operation, intent.policy, give_up=intent.give_up)
    using = intent.policy.using
    pauses = iter(LOCK_PAUSES)
    while True:
        block = transaction.atomic(using)
        joined = db.in_transaction(using)
        block.__enter__()
        try:
            locked = db.lock(using, operation.pk)
            # A claimant's own short lease does not stop it.
            may_run = _is_unchanged(locked, operation) and (is_ours or not locked.leased)
            free = locked if may_run else None
            if free is not None and (is_ours or _take_over_plain(operation, free, intent)):
                return Execution(operation, intent.policy, block, joined=joined)
        except BaseException as error:
            block.__exit__(type(error), error, error.__traceback__)
            raise
        block.__exit__(None, None, None)
        if free is not None and free.owner != operation.owner:  # the takeover is on record now
            is_ours = True
            continue
        if locked is not None and not locked.leased:
            return None  # somebody finished or took over meanwhile: the next claim reads what
        pause = next(pauses, None)
        if pause is None or locked is not None or db.in_transaction(using):
            if locked is None and db.read(using, operation.pk) is None:
                return None  # not locked but purged
            _in_progress(operation)
        time.sleep(pause)


def _take_over_plain(operation: Operation, locked: db.Locked, intent: Intent) -> bool:
    """Take an interrupted or failed operation over. False: what was written must commit first."""
    if _is_unsafe(operation, locked, intent.policy):
        _reconcile(operation, locked)
        return False
    _, lease = _times(intent.policy)
    if intent.give_up is None and lease is None:
        _take_over(operation, locked)
        return True
    # The attempt is put on record before it runs: if it vanishes too, that shows.
    interruptions = locked.interruptions + (not locked.last_error)
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
            _in_progress(operation)
        if not _is_unchanged(locked, operation):
            return None
        if _is_unsafe(operation, locked, policy):
            _reconcile(operation, locked)
            return None
        interruptions = locked.interruptions + (not locked.last_error)
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


def _compensate(execution: StepwiseExecution) -> Replay | None:
    """Finish a compensation that an earlier attempt began; the handler is not run again."""
    outcome = compensation.pending(execution)
    if outcome is None:
        return None
    execution.complete(outcome)
    return _replay(execution.operation, execution.policy)


def _is_unchanged(locked: db.Locked | None, operation: Operation) -> TypeGuard[db.Locked]:
    """Whether the locked row is still the one that was judged: the owner changes with every executor."""
    return (
        locked is not None
        and locked.owner == operation.owner
        and locked.status == Status.PROCESSING
    )


def _is_unsafe(operation: Operation, locked: db.Locked, policy: Resolved) -> bool:
    """Whether the executor vanished, and the policy says that only a reconciler knows what it did."""
    return policy.on_interrupted == "reconcile" and not locked.last_error


def _reconcile(operation: Operation, locked: db.Locked) -> None:
    values = (Status.RECONCILING, locked.attempt, locked.owner, "interrupted", conf.RETRY_AFTER)
    db.execute(operation.using, "fail", values, operation.pk)
    db.add_event(
        operation.using, operation.pk, EventKind.RECONCILING, locked.attempt, "interrupted"
    )
    send(signals.operation_reconciling, operation)


def _in_progress(operation: Operation) -> NoReturn:
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


def _replay(operation: Operation, policy: Resolved) -> Replay:
    outcome = operation.outcome()
    if outcome.body is not None and policy.codec is not None:
        try:
            outcome = replace(outcome, body=policy.codec.decode(outcome.body))
        except Exception:
            logger.exception("outcome of operation %s cannot be decoded", operation.pk)
            outcome = replace(outcome, body=None)
    if outcome.body is None:
        _refuse(operation, ResponseNotRetained(operation_id=operation.pk))
    return Replay(operation, outcome)


def replayed(replay: Replay) -> None:
    """Note that a replay was shown."""
    note(replay.operation, EventKind.REPLAYED, "")
    send(signals.operation_replayed, replay.operation)


def _refuse(operation: Operation, refusal: Refusal) -> NoReturn:
    note(operation, EventKind.REFUSED, refusal.code)
    send(signals.operation_refused, operation, refusal=refusal)
    raise refusal


@dataclass(frozen=True)
class Result:
    """What `run` returns: the outcome, and whether it was stored before."""

    operation: Operation
    outcome: Outcome
    replayed: bool


def run(intent: Intent, handler: Callable[[Operation], Outcome]) -> Result:
    """Run `handler` once for this intent, or return what it returned then.

    `handler` gets the operation and returns its outcome. If it raises, its effects are rolled back,
    the error is remembered and re-raised, and the next call runs it again at once.
    """
    begun = begin(intent)
    if isinstance(begun, Replay):
        replayed(begun)
        return Result(begun.operation, begun.outcome, replayed=True)
    with running(begun.operation) as operation:
        try:
            outcome = handler(operation)
        except BaseException as error:
            begun.fail(error)
            raise_translated(error, operation)
        begun.complete(outcome)
    return Result(operation, outcome, replayed=False)
