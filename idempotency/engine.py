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
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from asgiref.sync import sync_to_async
from django.db import DatabaseError, InterfaceError, OperationalError, connections, transaction
from django.dispatch import Signal

from . import db, keys, scopes, signals
from .conf import conf
from .exceptions import (
    IdempotencyError,
    InProgress,
    KeyExpired,
    Mismatch,
    OutcomeUnknown,
    ReentrantOperation,
    Refusal,
    ResponseNotRetained,
    RolledBack,
    Unavailable,
)
from .fingerprints import Fingerprint
from .models import EventKind, Operation, Outcome, Status, describe_error, new_owner
from .policies import Resolved

logger = logging.getLogger("idempotency")

#: Pauses, in seconds, before a claimant says in-progress: whoever probes a lock (another
#: claimant, the admin, the purge) holds it for less.
LOCK_PAUSES = (0.002, 0.005, 0.01, 0.02)
#: How often a claim may be lost to a purge or a commit that happens at the same moment.
CLAIM_ROUNDS = 8

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


@dataclass(frozen=True)
class Replay:
    """The stored outcome of an operation that has finished."""

    operation: Operation
    outcome: Outcome


def begin(intent: Intent) -> Execution | Replay:
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


async def abegin(intent: Intent) -> Execution | Replay:
    """`begin` for async callers: waits without blocking the event loop."""
    pauses = _pauses(intent)
    while True:
        try:
            return await sync_to_async(_try)(intent)
        except InProgress as refusal:
            pause = next(pauses, None)
            if pause is None:
                await sync_to_async(_refused)(refusal)
            await asyncio.sleep(pause)


def _pauses(intent: Intent) -> Iterator[float]:
    """Growing pauses that add up to the policy's wait."""
    if connections[intent.policy.using].in_atomic_block:
        return  # a transaction must not be held open while waiting
    deadline = time.monotonic() + intent.policy.wait.total_seconds()
    pause = 0.05
    while (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 1.5, 0.5)


def _refused(refusal: InProgress) -> NoReturn:
    operation = refusal.__dict__.pop("operation")
    _refuse(operation, refusal)


def _try(intent: Intent) -> Execution | Replay:
    policy = intent.policy
    pk = keys.operation_id(intent.scope, intent.key)
    if any(operation.pk == pk for operation in _running.get()):
        raise ReentrantOperation(
            f"{intent.name}: this operation is being executed by this very call. "
            "Give the inner operation a key of its own, for example current().derive_key('inner')."
        )
    fresh = Operation(
        id=pk,
        scope=scopes.encode(intent.scope),
        key=intent.key,
        name=intent.name,
        status=Status.PROCESSING,
        fingerprint=intent.fingerprint.digest(),
        attempt=1,
        owner=new_owner(),
        stepwise=policy.stepwise,
    )
    fresh._state.adding = False
    fresh._state.db = policy.using
    cause: BaseException | None = None
    for round_ in range(CLAIM_ROUNDS):
        time.sleep(0.001 * round_)
        try:
            operation = _claim(fresh, intent)
            if operation is None:
                continue
            if isinstance(operation, Replay):
                return operation
            execution = _execute(operation, intent, is_ours=operation is fresh)
            if execution is not None:
                return execution
        except (OperationalError, InterfaceError) as error:
            # Nothing has been executed yet, so deadlocks, serialization failures and a connection
            # that died idle are simply tried again; SQLite has waited for its lock already.
            if not db.is_transient(error):
                raise
            db.drop_if_broken(policy.using)
            connection = connections[policy.using]
            cause = error
            if connection.in_atomic_block or connection.vendor == "sqlite" or round_ >= 2:
                break
    raise Unavailable(operation_id=pk, retry_after=conf.RETRY_AFTER) from cause


def _claim(fresh: Operation, intent: Intent) -> Operation | Replay | None:
    """The operation to execute, or its replay; None when the row changed hands: claim again."""
    policy = intent.policy
    keep = (policy.retention + policy.tombstone).total_seconds()
    is_new, found = db.claim(policy.using, fresh.__dict__, keep)
    if is_new:
        return fresh
    if found is None:
        return None
    if found.owner == fresh.owner:  # our own claim, whose answer was lost with the connection
        return fresh
    if found.scope != fresh.scope or found.key != fresh.key:  # SHA-256 would have collided
        raise IdempotencyError(f"operation {found.pk} belongs to another key")
    if found.is_final and found.forgotten:
        return fresh if _renew(fresh, intent) else found
    if not intent.fingerprint.matches(found.fingerprint):
        _refuse(found, Mismatch(operation_id=found.pk))
    if found.is_final:
        if found.expired:
            _refuse(found, KeyExpired(operation_id=found.pk))
        return _replay(found, policy)
    if found.status == Status.RECONCILING:
        _refuse(found, OutcomeUnknown(operation_id=found.pk, retry_after=conf.RETRY_AFTER))
    return found


def _renew(fresh: Operation, intent: Intent) -> bool:
    """Start a new life of a row whose window and tombstone are over. False: somebody else has it."""
    policy = intent.policy
    with transaction.atomic(policy.using):
        locked = db.lock(policy.using, fresh.pk)
        if locked is None or not locked.forgotten:
            return False
        fresh.attempt = locked.attempt + 1  # attempts of the old life stay below every new one
        keep = (policy.retention + policy.tombstone).total_seconds()
        values = (
            fresh.name,
            fresh.status,
            fresh.fingerprint,
            fresh.attempt,
            fresh.owner,
            fresh.stepwise,
            keep,
        )
        db.execute(policy.using, "renew", values, fresh.pk)
        db.add_event(policy.using, fresh.pk, EventKind.RENEWED, fresh.attempt, "")
    return True


def _execute(operation: Operation, intent: Intent, *, is_ours: bool) -> Execution | None:
    """Open the business transaction and take the row's lock. None: claim again."""
    using = intent.policy.using
    pauses = iter(LOCK_PAUSES)
    while True:
        block = transaction.atomic(using)
        joined = connections[using].in_atomic_block
        block.__enter__()
        try:
            locked = db.lock(using, operation.pk)
            # The owner tells whether the row is still the one that was judged.
            if (
                locked is not None
                and locked.owner == operation.owner
                and locked.status == Status.PROCESSING
            ):
                if not is_ours:
                    _take_over(operation, locked)
                return Execution(operation, intent, block, joined=joined)
        except BaseException as error:
            block.__exit__(type(error), error, error.__traceback__)
            raise
        block.__exit__(None, None, None)
        if locked is not None:
            return None  # somebody finished or took over meanwhile: the next claim reads what
        pause = next(pauses, None)
        if pause is None or connections[using].in_atomic_block:
            refusal = InProgress(operation_id=operation.pk, retry_after=conf.RETRY_AFTER)
            refusal.__dict__["operation"] = operation
            raise refusal
        time.sleep(pause)


def _take_over(operation: Operation, locked: db.Locked) -> None:
    """Be the next executor of a claimed operation: its claimant failed, crashed, or was slower."""
    operation.attempt = locked.attempt + 1
    operation.owner = new_owner()
    operation.last_error = locked.last_error
    if not locked.last_error:  # nobody recorded how the attempt before ended
        db.add_event(operation._state.db, operation.pk, EventKind.TAKEN_OVER, operation.attempt, "")
        _send(signals.operation_taken_over, operation)


class Execution:
    """The right to run the handler: an open transaction that holds the operation's row lock.

    Exactly one of `complete`, `fail`, `store_failure` or `abort` ends it.
    """

    def __init__(
        self, operation: Operation, intent: Intent, block: transaction.Atomic, *, joined: bool
    ) -> None:
        self.operation = operation
        self.intent = intent
        self.policy = intent.policy
        self._block: transaction.Atomic | None = block
        #: Inside the caller's transaction: durable only when that commits.
        self.joined = joined

    def complete(self, outcome: Outcome) -> None:
        """Write the outcome into the transaction of the effects and commit both.

        Raises RolledBack if the handler marked its transaction for rollback, Unavailable if the
        database could not commit (nothing happened, the same key may be retried at once), and
        whatever the commit or its on_commit hooks raised.
        """
        using = self.policy.using
        try:
            if connections[using].needs_rollback:
                raise RolledBack(
                    f"{self.operation.name}: the handler returned an answer although its transaction "
                    "cannot be committed (a database error was swallowed, or set_rollback(True) was called)."
                )
            self._write(outcome)
        except BaseException as error:
            self.fail(error)
            raise_translated(error, self.operation)
        try:
            self._leave(None)
        except BaseException as error:
            if not self._committed():
                self.record(error)
                raise_translated(error, self.operation)
            if not isinstance(error, OperationalError | InterfaceError):
                raise  # an on_commit hook failed; the outcome is stored and will be replayed
            logger.warning(
                "commit of operation %s was confirmed by reading back", self.operation.pk
            )
        _send(signals.operation_finished, self.operation)

    def fail(self, error: BaseException) -> None:
        """Roll the effects back; the operation stays claimable and remembers the error."""
        self.abort(error)
        self.record(error)

    def abort(self, error: BaseException) -> None:
        """Roll the effects back and write nothing."""
        if self._block is not None:
            try:
                self._leave(error)
            except (DatabaseError, InterfaceError):
                logger.debug("rollback found the connection gone", exc_info=True)

    def store_failure(self, outcome: Outcome) -> None:
        """After `abort`: store a deterministic failure, unless somebody executes meanwhile."""
        using = self.policy.using
        try:
            with transaction.atomic(using):
                if not self._relock():
                    return
                self._write(outcome)
        except (OperationalError, InterfaceError) as error:
            # The effects are rolled back; a retry finds out the same by itself.
            logger.warning(
                "failure of operation %s was not stored: %s",
                self.operation.pk,
                describe_error(error),
            )
            db.drop_if_broken(using)
            return
        _send(signals.operation_finished, self.operation)

    def _relock(self) -> bool:
        locked = db.lock(self.policy.using, self.operation.pk)
        return (
            locked is not None
            and locked.status == Status.PROCESSING
            and locked.attempt <= self.operation.attempt
        )

    def _write(self, outcome: Outcome) -> None:
        operation, policy = self.operation, self.policy
        body = outcome.body
        if body is not None and len(body) > policy.max_response_bytes:
            body = None
        if body is not None and policy.codec is not None:
            body = policy.codec.encode(body)
        operation.status = outcome.status
        operation.code = outcome.code
        operation.headers = _dump_headers(outcome.headers)
        operation.body = body
        window = policy.retention.total_seconds()
        until = window + policy.tombstone.total_seconds()
        values = (
            operation.status,
            operation.attempt,
            operation.owner,
            operation.code,
            operation.headers,
            operation.body,
            "",
            window,
            until,
            window,
        )
        if db.execute(policy.using, "complete", values, operation.pk) != 1:
            raise RolledBack(f"{operation.name}: the row of operation {operation.pk} is gone")

    def record(self, error: BaseException) -> None:
        """Remember a failed attempt. Best effort: the retry works without it."""
        operation, using = self.operation, self.policy.using
        operation.status = Status.PROCESSING
        operation.last_error = describe_error(error)
        keep = (self.policy.retention + self.policy.tombstone).total_seconds()
        try:
            db.drop_if_broken(using)
            with transaction.atomic(using):
                if not self._relock():
                    return
                values = (operation.attempt, operation.owner, operation.last_error, keep)
                db.execute(using, "fail", values, operation.pk)
                if operation.event_count < conf.EVENTS_PER_OPERATION:
                    db.add_event(
                        using,
                        operation.pk,
                        EventKind.ATTEMPT_FAILED,
                        operation.attempt,
                        operation.last_error,
                    )
        except (DatabaseError, InterfaceError):
            logger.warning(
                "attempt of operation %s failed; the error could not be recorded", operation.pk
            )
            db.drop_if_broken(using)
        _send(signals.operation_attempt_failed, operation, error=operation.last_error)

    def _leave(self, error: BaseException | None) -> None:
        block, self._block = self._block, None
        assert block is not None, "an Execution ends once"
        if error is None:
            block.__exit__(None, None, None)
        else:
            block.__exit__(type(error), error, error.__traceback__)

    def _committed(self) -> bool:
        """Whether a commit that raised happened after all: read back, never guessed."""
        if self.joined:
            return False
        using = self.policy.using
        try:
            db.drop_if_broken(using)
            found = db.read(using, self.operation.pk)
        except (DatabaseError, InterfaceError):
            return False
        return found is not None and found.is_final and found.owner == self.operation.owner


def raise_translated(error: BaseException, operation: Operation) -> NoReturn:
    """Raise `error`, or Unavailable for a database error after which a retry may simply succeed.

    The handler is not run again here: only its author knows what it did outside the database.
    """
    if db.is_transient(error):
        raise Unavailable(operation_id=operation.pk, retry_after=conf.RETRY_AFTER) from error
    raise error


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
    _note(replay.operation, EventKind.REPLAYED, "")
    _send(signals.operation_replayed, replay.operation)


def _refuse(operation: Operation, refusal: Refusal) -> NoReturn:
    _note(operation, EventKind.REFUSED, refusal.code)
    _send(signals.operation_refused, operation, refusal=refusal)
    raise refusal


def _note(operation: Operation, kind: str, detail: str) -> None:
    """Write an event unless the operation has its share. An answer never fails for an event."""
    if operation.event_count >= conf.EVENTS_PER_OPERATION:
        return
    using = operation._state.db
    try:
        if connections[using].in_atomic_block:
            with transaction.atomic(using):
                db.add_event(using, operation.pk, kind, operation.attempt, detail)
        else:
            db.add_event(using, operation.pk, kind, operation.attempt, detail)
    except (DatabaseError, InterfaceError):
        logger.warning("event %s of operation %s was not written", kind, operation.pk)


def _send(signal: Signal, operation: Operation, **details: Any) -> None:
    """Send after the transaction that caused it; at once when none is open."""
    if signal.receivers:
        transaction.on_commit(
            lambda: signal.send_robust(Operation, operation=operation, **details),
            using=operation._state.db,
            robust=True,
        )


def _dump_headers(headers: dict[str, str]) -> str:
    return json.dumps(headers, separators=(",", ":"))


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
