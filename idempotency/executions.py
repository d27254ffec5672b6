"""The right to execute an operation, and the ways it ends."""

from __future__ import annotations

import json
import logging
from typing import Any, NoReturn

from django.db import (
    DatabaseError,
    InterfaceError,
    InternalError,
    OperationalError,
    connections,
    transaction,
)
from django.dispatch import Signal

from . import db, signals
from .conf import conf
from .exceptions import (
    ConfigurationError,
    IllegalTransition,
    OutcomeUnknown,
    RolledBack,
    Unavailable,
)
from .models import FINAL, EventKind, Operation, Outcome, Status, describe_error
from .policies import Resolved

logger = logging.getLogger("idempotency")


class Execution:
    """The right to run the handler: an open transaction that holds the operation's row lock.

    Exactly one of `complete`, `fail`, `store_failure` or `abort` ends it.
    """

    def __init__(
        self, operation: Operation, policy: Resolved, block: transaction.Atomic, *, joined: bool
    ) -> None:
        self.operation = operation
        self.policy = policy
        self._block: transaction.Atomic | None = block
        #: Around `_block`, where that is a savepoint of our own.
        self._outer: transaction.Atomic | None = None
        # Whoever finds the block open can see whose it is.
        vars(block)["operation_id"] = operation.pk
        #: Inside the caller's transaction: durable only when that commits.
        self.joined = joined
        self.declared_status: str | None = None
        #: What the handler said with `operation.unknown()`; it cannot be swallowed.
        self.unknown: OutcomeUnknown | None = None
        operation.execution = self

    def savepoint(self) -> None:
        """Let a failure be recorded before the row's lock is let go.

        Else whoever comes in between takes a failed attempt for one that vanished, where those count.
        """
        if self.joined:
            return  # nobody else can lock the row before the caller's transaction ends
        block = transaction.atomic(self.policy.using)
        block.__enter__()
        vars(block)["operation_id"] = self.operation.pk
        self._outer, self._block = self._block, block

    def complete(self, outcome: Outcome) -> None:
        """Write the outcome into the transaction of the effects and commit both.

        Raises RolledBack if the handler marked its transaction for rollback, Unavailable if the
        database could not commit (nothing happened, the same key may be retried at once), and
        whatever the commit or its on_commit hooks raised.
        """
        using = self.policy.using
        try:
            if self.unknown is not None:
                raise self.unknown
            if not self._is_innermost():
                raise ConfigurationError(
                    f"{self.operation.name}: a transaction that began inside the operation is still open, "
                    "in a task it has started perhaps. Await the task before you return."
                )
            if connections[using].needs_rollback:
                raise RolledBack(
                    f"{self.operation.name}: the handler returned an answer although its transaction "
                    "cannot be committed (a database error was swallowed, or set_rollback(True) was called)."
                )
            if self._outer is not None:
                self._leave(None)
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
        send(signals.operation_finished, self.operation)

    def fail(self, error: BaseException) -> None:
        """Roll the effects back; the operation stays claimable and remembers the error."""
        if self.undo(error):
            self.record(error)
            try:
                self._leave(None)
                return
            except (DatabaseError, InterfaceError):
                logger.debug("a failed attempt could not be committed", exc_info=True)
        self.abort(error)
        self.record(error)

    def undo(self, error: BaseException) -> bool:
        """Roll the effects back to the savepoint and keep the lock; `complete` or `fail` comes next.

        False: there is no savepoint, or the transaction is lost.
        """
        if self._outer is None or not self._is_innermost():
            return False
        self._leave(error)
        connection = connections[self.policy.using]
        return not (connection.needs_rollback or connection.closed_in_transaction)

    def abort(self, error: BaseException) -> None:
        """Roll the effects back and write nothing."""
        while self._block is not None:
            try:
                self._leave(error)
            except (DatabaseError, InterfaceError):
                logger.debug("rollback found the connection gone", exc_info=True)

    def store_failure(self, outcome: Outcome) -> None:
        """After `abort`: store a deterministic failure, unless somebody executes meanwhile."""
        using = self.policy.using
        if self.unknown is not None:
            self.record(self.unknown)
            raise self.unknown
        try:
            with transaction.atomic(using):
                if not self._relock():
                    return
                self._write(outcome)
        except (DatabaseError, InterfaceError) as error:
            if not isinstance(error, OperationalError | InterfaceError | InternalError):
                raise
            # The effects are rolled back; a retry finds out the same by itself.
            logger.warning(
                "failure of operation %s was not stored: %s",
                self.operation.pk,
                describe_error(error),
            )
            self._mend()
            return
        send(signals.operation_finished, self.operation)

    def _mend(self) -> None:
        """Replace a broken connection, unless that would hide the loss of the caller's transaction."""
        if not self.joined:
            db.drop_if_broken(self.policy.using)

    def _relock(self) -> bool:
        # Somebody who happens to hold the lock is waited for where silence would be misunderstood.
        # Elsewhere it may be the next executor.
        is_doubt = self.operation.status == Status.RECONCILING
        must_tell = is_doubt or self.policy.on_interrupted == "reconcile"
        locked = db.lock(self.policy.using, self.operation.pk, wait=must_tell and not self.joined)
        return (
            locked is not None
            and locked.status == Status.PROCESSING
            and locked.attempt <= self.operation.attempt
        )

    def _write(self, outcome: Outcome) -> None:
        values = settle(self.operation, outcome, self.policy, self.declared_status)
        if db.execute(self.policy.using, "complete", values, self.operation.pk) != 1:
            raise RolledBack(f"{self.operation.name}: the operation's row is gone")

    def record(self, error: BaseException) -> None:
        """Remember a failed attempt. Best effort: the retry works without it."""
        if self.joined and db.is_transient(error):
            return  # the caller's transaction is most likely lost, and would be touched again
        operation, using = self.operation, self.policy.using
        error = self.unknown or error
        operation.last_error = describe_error(error)
        is_unknown = isinstance(error, OutcomeUnknown) and error.operation_id == operation.pk
        operation.status = Status.RECONCILING if is_unknown else Status.PROCESSING
        kind = EventKind.RECONCILING if is_unknown else EventKind.ATTEMPT_FAILED
        keep = (self.policy.retention + self.policy.tombstone).total_seconds()
        values = (
            operation.status,
            operation.attempt,
            operation.owner,
            operation.last_error,
            conf.RETRY_AFTER if is_unknown else keep,
        )
        try:
            self._mend()
            with transaction.atomic(using):
                if not self._relock():
                    return
                db.execute(using, "fail", values, operation.pk)
                if isinstance(error, OutcomeUnknown):
                    remember_reference(operation, error)
                db.note(using, operation, kind, operation.last_error, conf.EVENTS_PER_OPERATION)
        except (DatabaseError, InterfaceError):
            logger.warning(
                "attempt of operation %s failed; the error could not be recorded", operation.pk
            )
            self._mend()
        if is_unknown:
            send(signals.operation_reconciling, operation)
        else:
            send(signals.operation_attempt_failed, operation, error=operation.last_error)

    def _leave(self, error: BaseException | None) -> None:
        is_innermost = self._is_innermost()
        block, self._block, self._outer = self._block, self._outer, None
        assert block is not None, "an Execution ends once"
        if error is None:
            block.__exit__(None, None, None)
        else:
            block.__exit__(type(error), error, error.__traceback__)
        if not is_innermost:  # Django has left the block inside ours instead: whoever is in it must
            connections[self.policy.using].needs_rollback = True  # not commit what we give up

    def _is_innermost(self) -> bool:
        return connections[self.policy.using].atomic_blocks[-1:] == [self._block]

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


def settle(
    operation: Operation, outcome: Outcome, policy: Resolved, status: str | None = None
) -> tuple[Any, ...]:
    """Put the outcome on the operation; returns the values of the `complete` statement.

    Raises IllegalTransition for a status that is no outcome.
    """
    final = status or outcome.status
    if final not in FINAL:
        raise IllegalTransition(f"{operation.name}: an outcome cannot be {final!r}")
    body = outcome.body
    if body is not None and len(body) > policy.max_response_bytes:
        body = None
    if body is not None and policy.codec is not None:
        body = policy.codec.encode(body)
    operation.status = final
    operation.code = outcome.code
    operation.headers = json.dumps(outcome.headers, separators=(",", ":"))
    operation.body = body
    window = policy.retention.total_seconds()
    until = window + policy.tombstone.total_seconds()
    return (
        operation.status,
        operation.attempt,
        operation.owner,
        operation.code,
        operation.headers,
        operation.body,
        window,
        until,
        window,
    )


def remember_reference(operation: Operation, unknown: OutcomeUnknown) -> None:
    """Keep the provider's name for what may have happened, so that its webhook finds the operation."""
    if unknown.provider_ref:
        operation.refer("provider", unknown.provider_ref)


def raise_translated(error: BaseException, operation: Operation) -> NoReturn:
    """Raise `error`, or Unavailable for a database error after which a retry may simply succeed.

    The handler is not run again here: only its author knows what it did outside the database.
    """
    if db.is_transient(error):
        raise Unavailable(operation_id=operation.pk, retry_after=conf.RETRY_AFTER) from error
    raise error


def note(operation: Operation, kind: str, detail: str) -> None:
    """Write an event unless the operation has its share. An answer never fails for an event."""
    using = operation.using
    try:
        if db.in_transaction(using):
            with transaction.atomic(using):
                db.note(using, operation, kind, detail, conf.EVENTS_PER_OPERATION)
        else:
            db.note(using, operation, kind, detail, conf.EVENTS_PER_OPERATION)
    except (DatabaseError, InterfaceError):
        logger.warning("event %s of operation %s was not written", kind, operation.pk)


def send(signal: Signal, operation: Operation, **details: Any) -> None:
    """Send after the transaction that caused it; at once when none is open."""
    if signal.receivers:
        transaction.on_commit(
            lambda: signal.send_robust(Operation, operation=operation, **details),
            using=operation.using,
            robust=True,
        )
