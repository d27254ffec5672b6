"""Stepwise operations: recovery points around external effects, owned by a lease.

No transaction stays open across a network call. Ownership is a lease on the database's clock plus the
pair (owner, attempt) as fencing token: every write is conditional on it, and a stale owner's write
raises LeaseLost inside the transaction of its effects, which rolls them back.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.utils.module_loading import import_string

from . import db, encoding, signals
from .conf import conf
from .exceptions import ConfigurationError, LeaseLost, OutcomeUnknown
from .executions import note, raise_translated, remember_reference, send, settle
from .models import EventKind, Operation, Outcome, Status, Step, StepStatus, describe_error
from .policies import Resolved

logger = logging.getLogger("idempotency")

T = TypeVar("T")

#: Name of the step that records that compensation has begun, and the outcome it ends with.
COMPENSATING = "~compensating"


@dataclass(frozen=True)
class Confirmed:
    """A reconciler's answer: the effect exists; `result` is what the call would have returned."""

    result: Any = None


@dataclass(frozen=True)
class Absent:
    """A reconciler's answer: there is no effect and there will be none; the call may be made (again)."""


@dataclass(frozen=True)
class StillUnknown:
    """A reconciler's answer: ask again later."""


class StepwiseExecution:
    """The right to execute a stepwise operation for as long as the lease is held.

    Ends like `executions.Execution`; `step` and `call` are reached through the operation.
    """

    joined = False

    def __init__(self, operation: Operation, policy: Resolved, *, resumed: bool) -> None:
        self.operation = operation
        self.policy = policy
        self.declared_status: str | None = None
        self.using = policy.using
        self._recorded: dict[str, Step] = {}
        self._named: set[str] = set()
        if resumed:
            steps = Step.objects.using(self.using).filter(operation_id=operation.pk)
            self._recorded = {step.name: step for step in steps}
        operation.execution = self

    # Steps

    def step(
        self,
        name: str,
        function: Callable[..., T],
        *args: Any,
        compensate: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> T:
        recorded = self._claim_name(name)
        if recorded is not None:
            if recorded.status == StepStatus.STARTED:
                raise self._unknown(name)
            return cast("T", encoding.loads(recorded.result or "null"))
        with self._named_in_errors(name), transaction.atomic(self.using):
            self.fence()
            result = function(*args, **kwargs)
            self._add(name, is_external=False, result=encoding.dumps(result), compensate=compensate)
        return result

    def call(
        self,
        name: str,
        function: Callable[..., T],
        *args: Any,
        repeatable: bool = False,
        reconcile: Callable[..., Any] | None = None,
        failures: tuple[type[Exception], ...] = (),
        compensate: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> T:
        recorded = self._claim_name(name)
        if recorded is not None and recorded.status == StepStatus.DONE:
            return cast("T", encoding.loads(recorded.result or "null"))
        with self._named_in_errors(name):
            if recorded is None:
                with transaction.atomic(self.using):
                    self.fence()
                    self._add(name, is_external=True, compensate=compensate, reconcile=reconcile)
            elif repeatable:
                self.heartbeat()
            else:
                answer = self._ask(name, reconcile)
                if isinstance(answer, Confirmed):
                    self._finish(name, answer.result)
                    return cast("T", answer.result)
                self.heartbeat()
            try:
                result = function(*args, **kwargs)
            except failures:
                with transaction.atomic(self.using):
                    self.fence()
                    db.execute(self.using, "step_withdrawn", (name,), self.operation.pk)
                raise
            except Exception as error:
                if repeatable:
                    raise  # the next attempt makes the same call with the same key
                raise self._unknown(name) from error
            self._finish(name, result)
        return result

    def _ask(self, name: str, reconcile: Callable[..., Any] | None) -> Confirmed | Absent:
        """How a call ended that an earlier attempt started and nobody recorded."""
        if reconcile is None:
            raise self._unknown(name)
        answer = reconcile(key=self.operation.derive_key(name))
        if not isinstance(answer, Confirmed | Absent):
            raise self._unknown(name)
        return answer

    def _finish(self, name: str, result: Any) -> None:
        text = encoding.dumps(result)
        values = (StepStatus.DONE, self.operation.attempt, text, name)
        with transaction.atomic(self.using):
            self.fence()
            db.execute(self.using, "step_finished", values, self.operation.pk)

    def _add(
        self,
        name: str,
        *,
        is_external: bool,
        result: str | None = None,
        compensate: Callable[..., Any] | None = None,
        reconcile: Callable[..., Any] | None = None,
    ) -> None:
        db.add_step(
            self.using,
            self.operation.pk,
            name,
            attempt=self.operation.attempt,
            is_external=is_external,
            result=result,
            compensation=_importable(compensate, name, "compensate"),
            reconciler=_importable(reconcile, name, "reconcile"),
        )

    def _claim_name(self, name: str) -> Step | None:
        if not name or len(name) > 200 or name.startswith("~"):
            raise ConfigurationError(
                f"{name!r} cannot name a step: 1–200 characters, no leading '~'"
            )
        if name in self._named:
            raise ConfigurationError(
                f"{self.operation.name}: step {name!r} was already used in this operation; a name is how "
                "a step is found again, so give each its own"
            )
        self._named.add(name)
        if connections[self.using].in_atomic_block and not in_test_transaction(self.using):
            raise ConfigurationError(
                f"{self.operation.name}: step {name!r} would run inside a transaction that may still roll back"
            )
        return self._recorded.get(name)

    def _named_in_errors(self, name: str) -> _NoteStep:
        return _NoteStep(f"in step {name!r} of {self.operation.name} ({self.operation.pk})")

    def _unknown(self, name: str) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"Step {name!r} was started and its outcome is not known.",
            operation_id=self.operation.pk,
        )

    # Ownership

    def fence(self) -> None:
        """Extend the lease if it is still ours. Raises LeaseLost."""
        lease = self.policy.lease.total_seconds()
        if not self._fenced("fence", (lease,)):
            raise LeaseLost(
                f"{self.operation.name}: another executor owns operation {self.operation.pk}"
            )

    heartbeat = fence

    def _fenced(self, statement: str, values: tuple[Any, ...]) -> bool:
        token = (self.operation.owner, self.operation.attempt)
        return db.execute(self.using, statement, (*values, *token), self.operation.pk) == 1

    # Ends

    def complete(self, outcome: Outcome) -> None:
        """Store the outcome; a failed one first compensates the steps that were done.

        Raises LeaseLost when another executor owns the operation by now.
        """
        if outcome.status == Status.FAILED and self.declared_status is None:
            outcome = self._compensated(outcome)
        try:
            with transaction.atomic(self.using):
                self.fence()
                values = settle(self.operation, outcome, self.policy, self.declared_status)
                db.execute(self.using, "complete", values, self.operation.pk)
        except Exception as error:
            raise_translated(error, self.operation)
        send(signals.operation_finished, self.operation)

    store_failure = complete

    def abort(self, error: BaseException) -> None:
        """Nothing to roll back: steps have committed, or rolled back on their own."""

    def fail(self, error: BaseException) -> None:
        """Give the lease back; the next attempt continues after the recorded steps at once."""
        self.record(error)

    def record(self, error: BaseException) -> None:
        operation = self.operation
        operation.last_error = describe_error(error)
        is_unknown = isinstance(error, OutcomeUnknown) and error.operation_id == operation.pk
        status = Status.RECONCILING if is_unknown else Status.PROCESSING
        kind = EventKind.RECONCILING if is_unknown else EventKind.ATTEMPT_FAILED
        try:
            db.drop_if_broken(self.using)
            with transaction.atomic(self.using):
                if not self._fenced("release", (status, operation.last_error, conf.RETRY_AFTER)):
                    logger.info("operation %s has another executor by now", operation.pk)
                    return
                if isinstance(error, OutcomeUnknown):
                    remember_reference(operation, error)
                note(operation, kind, operation.last_error)
        except (DatabaseError, InterfaceError):
            logger.warning("attempt of operation %s failed; it could not be recorded", operation.pk)
            db.drop_if_broken(self.using)
            return
        operation.status = status
        if is_unknown:
            send(signals.operation_reconciling, operation)
        else:
            send(signals.operation_attempt_failed, operation, error=operation.last_error)

    # Compensation

    def pending_compensation(self) -> Outcome | None:
        """The outcome an earlier attempt was compensating for when it vanished."""
        marker = self._recorded.get(COMPENSATING)
        return None if marker is None else _outcome_of(marker.result or "")

    def _compensated(self, outcome: Outcome) -> Outcome:
        """Undo the done steps that declared a compensation, last one first."""
        steps = list(
            Step.objects.using(self.using)
            .filter(operation_id=self.operation.pk, status=StepStatus.DONE)
            .exclude(compensation="")
            .exclude(name__startswith="~")
            .order_by("-id")
        )
        if not steps:
            return outcome
        if COMPENSATING not in self._recorded:
            with transaction.atomic(self.using):
                self.fence()
                self._add(COMPENSATING, is_external=False, result=_text_of(outcome))
        for step in steps:
            self.undo(step)
        return Outcome(
            status=Status.REVERSED, code=outcome.code, headers=outcome.headers, body=outcome.body
        )

    def undo(self, step: Step) -> None:
        """Run one step's compensation, itself an idempotent step of the same kind."""
        name = f"~undo:{step.name}"[:200]
        done = self._recorded.get(name)
        if done is not None and done.status == StepStatus.DONE:
            return
        compensate = import_string(step.compensation)
        result = encoding.loads(step.result or "null")
        key = self.operation.derive_key(name)
        with self._named_in_errors(name):
            if not step.is_external:
                with transaction.atomic(self.using):
                    self.fence()
                    compensate(result, key=key)
                    self._add(name, is_external=False, result="null")
                return
            if done is None:
                with transaction.atomic(self.using):
                    self.fence()
                    self._add(name, is_external=True)
            compensate(result, key=key)
            self._finish(name, None)


class _NoteStep:
    """Adds the step's name to an exception that passes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(self.text)


def in_test_transaction(using: str) -> bool:
    """Whether the open transaction is a django.test.TestCase's, which never commits anyway."""
    return all(block._from_testcase for block in connections[using].atomic_blocks)


def _importable(function: Callable[..., Any] | None, step: str, role: str) -> str:
    """Dotted name of a module-level function. Raises ConfigurationError for any other callable."""
    if function is None:
        return ""
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    try:
        if import_string(name) is function and len(name) <= 255:
            return name
    except ImportError:
        pass
    raise ConfigurationError(
        f"step {step!r}: {role}= must be a module-level function, because another process may have to "
        f"run it after a crash; {name or function!r} cannot be imported"
    )


def _text_of(outcome: Outcome) -> str:
    body = None if outcome.body is None else base64.b64encode(outcome.body).decode()
    return json.dumps([outcome.status, outcome.code, outcome.headers, body])


def _outcome_of(text: str) -> Outcome:
    status, code, headers, body = json.loads(text)
    return Outcome(
        status=status,
        code=code,
        headers=headers,
        body=None if body is None else base64.b64decode(body),
    )
