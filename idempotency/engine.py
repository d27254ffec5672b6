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
from typing import NoReturn

from asgiref.sync import sync_to_async
from django.db import (
    DatabaseError,
    InterfaceError,
    connections,
)

from . import compensation, db, signals
from .aio import in_thread as in_thread
from .claims import Intent as Intent
from .claims import first_row, is_late, renew, times
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
from .executions import Execution as Execution
from .executions import note, send
from .executions import raise_translated as raise_translated
from .models import EventKind, Operation, Outcome, Status
from .ownership import AnyExecution as AnyExecution
from .ownership import execute, in_progress
from .policies import Resolved
from .steps import StepwiseExecution, in_test_transaction

logger = logging.getLogger("idempotency")


#: How often a claim may be lost to a purge or a commit that happens at the same moment.
CLAIM_ROUNDS = 8

_running: ContextVar[tuple[Operation, ...]] = ContextVar("idempotency_running", default=())


def current() -> Operation | None:
    """The operation being executed in this context, or None."""
    running = _executing()
    return running[-1] if running else None


def _executing() -> list[Operation]:
    # A task or thread that was started by a handler has a copy of its context, and may outlive it.
    return [operation for operation in _running.get() if operation.execution is not None]


@contextmanager
def running(operation: Operation) -> Iterator[Operation]:
    """Make `operation` the current one for the block."""
    before = _running.get()
    _running.set((*before, operation))
    try:
        yield operation
    finally:
        _running.set(before)
        operation.execution = None


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
    if any(operation.pk == pk for operation in _executing()):
        raise ReentrantOperation(
            f"{intent.name}: this operation is being executed by this very call. "
            "Give the inner operation a key of its own, for example current().derive_key('inner')."
        )
    is_open = db.in_transaction(policy.using)
    if is_open:
        _refuse_sibling(intent)
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
            execution = execute(operation, intent, is_ours=operation is fresh)
            if isinstance(execution, StepwiseExecution):
                return _compensate(execution) or execution
            if execution is not None:
                return execution
        except (DatabaseError, InterfaceError) as error:
            # Nothing has been executed yet, so deadlocks, serialization failures and a connection
            # that died idle are simply tried again; SQLite has waited for its lock already.
            if not db.is_transient(error):
                raise
            cause = error
            if is_open:  # the error has broken the caller's transaction
                break
            db.drop_if_broken(policy.using)
            if connections[policy.using].vendor == "sqlite" or round_ >= 2:
                break
    # Somebody is just claiming it, perhaps in a longer transaction of their own.
    if cause is None or db.is_lock_timeout(cause):
        in_progress(fresh)
    raise Unavailable(operation_id=pk, retry_after=conf.RETRY_AFTER) from cause


def _refuse_sibling(intent: Intent) -> None:
    """Two tasks of one event loop may share a connection; their transactions would become one."""
    known = {None, *(operation.pk for operation in _executing())}
    for block in connections[intent.policy.using].atomic_blocks:
        if vars(block).get("operation_id") not in known:
            raise ConfigurationError(
                f"{intent.name}: another task executes an operation on the same database connection. "
                "Await idempotent calls one after the other instead of gathering them."
            )


def _claim(fresh: Operation, intent: Intent) -> Operation | Replay | None:
    """The operation to execute, or its replay; None when the row changed hands: claim again."""
    policy = intent.policy
    keep, lease = times(policy)
    if intent.from_client and conf.REFUSE_OLD_KEYS and is_late(intent.key, keep):
        is_new, found = False, db.read(policy.using, fresh.pk)
        if found is None or found.may_start_anew:
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
    if found.may_start_anew:
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


def _compensate(execution: StepwiseExecution) -> Replay | None:
    """Finish a compensation that an earlier attempt began; the handler is not run again."""
    outcome = compensation.pending(execution)
    if outcome is None:
        return None
    execution.complete(outcome)
    return _replay(execution.operation, execution.policy)


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
