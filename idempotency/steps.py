"""Stepwise operations: recovery points around external effects, owned by a lease.

No transaction stays open across a network call. Ownership is a lease on the database's clock plus the
pair (owner, attempt) as fencing token: every write is conditional on it, and a stale owner's write
raises LeaseLost inside the transaction of its effects, which rolls them back.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.utils.module_loading import import_string

from . import compensation, db, signals
from .aio import in_thread
from .compensation import UNDO, result_of, text_of_result
from .conf import conf
from .exceptions import ConfigurationError, LeaseLost, OutcomeUnknown
from .executions import note, raise_translated, remember_reference, send, settle
from .models import EventKind, Operation, Outcome, Status, Step, StepStatus, describe_error
from .policies import Resolved

logger = logging.getLogger("idempotency")

T = TypeVar("T")

#: Longest name of a step, in characters, so that both fit into the column.
LONGEST_NAME = 200 - len(UNDO)
#: Seconds between two looks at one operation: doubled each time, up to the last value.
FIRST_PAUSE, LONGEST_PAUSE = 5, 3600


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
        self.unknown: OutcomeUnknown | None = None
        self.using = policy.using
        #: Names of this attempt, and of external steps whose outcome is not recorded.
        self._named: set[str] = set()
        self._open: set[str] = set()
        self.recorded: dict[str, Step] = {}
        self._action = ""
        self._failed: tuple[BaseException, str] | None = None
        if resumed:
            self.recorded = self.read_steps()
            self._open = {
                name
                for name, step in self.recorded.items()
                if step.status == StepStatus.STARTED and not name.startswith("~")
            }
        operation.execution = self

    def read_steps(self) -> dict[str, Step]:
        steps = Step.objects.using(self.using).filter(operation_id=self.operation.pk)
        return {step.name: step for step in steps.order_by("id")}

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
            if recorded.status == StepStatus.STARTED:  # it was a call when it started
                raise self._unknown(name)
            return result_of(recorded)  # type: ignore[no-any-return]
        undo = _importable(compensate, name, "compensate")
        with self.named_in_errors(name), transaction.atomic(self.using):
            self.fence()
            result = function(*args, **kwargs)
            self.add(name, result=text_of_result(result), compensation=undo)
        return result

    async def astep(self, name: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        return await in_thread(partial(self.step, name, function, *args, **options))

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
        with self.named_in_errors(name):
            known = self._start(name, repeatable, reconcile, compensate)
            if known is not None:
                return known.result  # type: ignore[no-any-return]
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                self._broke(name, error, repeatable, failures)
            self.finish(name, result)
        return result

    async def acall(
        self,
        name: str,
        function: Callable[..., Awaitable[T]],
        *args: Any,
        repeatable: bool = False,
        reconcile: Callable[..., Any] | None = None,
        failures: tuple[type[Exception], ...] = (),
        compensate: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> T:
        with self.named_in_errors(name):
            known = await in_thread(self._start, name, repeatable, reconcile, compensate)
            if known is not None:
                return known.result  # type: ignore[no-any-return]
            try:
                result = await function(*args, **kwargs)
            except BaseException as error:
                await in_thread(self._broke, name, error, repeatable, failures)
            await in_thread(self.finish, name, result)
        return result

    def _start(
        self,
        name: str,
        repeatable: bool,
        reconcile: Callable[..., Any] | None,
        compensate: Callable[..., Any] | None,
    ) -> Confirmed | None:
        """Commit the intent to call, or find out how an earlier attempt's call ended."""
        recorded = self._claim_name(name)
        reconciler = _importable(reconcile, name, "reconcile")
        undo = _importable(compensate, name, "compensate")
        if recorded is None:
            with transaction.atomic(self.using):
                self.fence()
                self.add(name, compensation=undo, reconciler=reconciler)
            self._open.add(name)
            return None
        if recorded.status == StepStatus.DONE:
            return Confirmed(result_of(recorded))
        if not repeatable:
            if reconcile is None:
                raise self._unknown(name)
            answer = reconcile(key=self.operation.derive_key(name))
            if isinstance(answer, Confirmed):
                self.finish(name, answer.result)
                return answer
            if not isinstance(answer, Absent):
                raise self._unknown(name)
        self.fence()
        return None

    def _broke(
        self,
        name: str,
        error: BaseException,
        repeatable: bool,
        failures: tuple[type[Exception], ...],
    ) -> NoReturn:
        """The call raised. Without proof that it had no effect, its outcome stays open."""
        if isinstance(error, failures):
            with transaction.atomic(self.using):
                self.fence()
                db.execute(self.using, "step_withdrawn", (name,), self.operation.pk)
            self._open.discard(name)
            raise error
        is_own = isinstance(error, OutcomeUnknown) and error.operation_id == self.operation.pk
        if repeatable or is_own or isinstance(error, LeaseLost) or not isinstance(error, Exception):
            raise error  # the next attempt makes the same call with the same key, or asks
        raise self._unknown(name) from error

    def finish(self, name: str, result: Any) -> None:
        values = (StepStatus.DONE, self.operation.attempt, text_of_result(result), name)
        with transaction.atomic(self.using):
            self.fence()
            db.execute(self.using, "step_finished", values, self.operation.pk)
        self._open.discard(name)

    def action(self, name: str) -> Any:
        """What somebody's action resulted in; None when the handler's answer shall ask for it."""
        recorded = self._claim_name(name)
        if recorded is not None and recorded.status == StepStatus.DONE:
            return result_of(recorded)
        self.declared_status = Status.REQUIRES_ACTION
        self._action = name
        self._open.discard(name)
        return None

    def add(
        self, name: str, *, result: str | None = None, compensation: str = "", reconciler: str = ""
    ) -> None:
        """Record a step: done when it has a result, else started."""
        db.add_step(
            self.using,
            self.operation.pk,
            name,
            attempt=self.operation.attempt,
            is_external=result is None,
            result=result,
            compensation=compensation,
            reconciler=reconciler,
        )

    def _claim_name(self, name: str) -> Step | None:
        if not name or len(name) > LONGEST_NAME or name.startswith("~"):
            raise ConfigurationError(
                f"{name!r} cannot name a step: 1 to {LONGEST_NAME} characters, no leading '~'"
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
        return self.recorded.get(name)

    @contextmanager
    def named_in_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failed = (error, name)
            error.add_note(f"in step {name!r} of {self.operation.name} ({self.operation.pk})")
            raise

    def _unknown(self, name: str) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"Step {name!r} was started and its outcome is not known.",
            operation_id=self.operation.pk,
        )

    # Ownership

    def fence(self) -> None:
        """Extend the lease if it is still ours. Raises LeaseLost."""
        self._fenced("fence", (self.policy.lease.total_seconds(),))

    heartbeat = fence

    def _fenced(self, statement: str, values: tuple[Any, ...]) -> None:
        token = (self.operation.owner, self.operation.attempt)
        if db.execute(self.using, statement, (*values, *token), self.operation.pk) != 1:
            raise LeaseLost(
                f"{self.operation.name}: another executor owns operation {self.operation.pk}"
            )

    # Ends

    def complete(self, outcome: Outcome) -> None:
        """Store the outcome; a failed one first compensates the steps that were done.

        Whatever goes wrong is recorded and raised: LeaseLost when another executor owns the operation
        by now, OutcomeUnknown when the handler has swallowed that a call's outcome is not known, and
        what a compensation raised.
        """
        try:
            if self.unknown is not None:
                raise self.unknown
            if self._open:
                raise self._unknown(min(self._open))
            if outcome.status == Status.FAILED and self.declared_status is None:
                outcome = compensation.compensated(self, outcome)
            values = settle(self.operation, outcome, self.policy, self.declared_status)
            if self._action and self._action not in self.recorded:
                with transaction.atomic(self.using):
                    self._fenced("finish", values)
                    self.add(self._action)
            else:
                self._fenced("finish", values)
        except BaseException as error:
            self.fail(error)
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
        error = self.unknown or error
        operation.last_error = self._described(error)
        is_unknown = isinstance(error, OutcomeUnknown) and error.operation_id == operation.pk
        status = Status.RECONCILING if is_unknown else Status.PROCESSING
        kind = EventKind.RECONCILING if is_unknown else EventKind.ATTEMPT_FAILED
        pause = conf.RETRY_AFTER if is_unknown else backoff(operation.attempt - 1)
        try:
            db.drop_if_broken(self.using)
            with transaction.atomic(self.using):
                self._fenced("release", (status, operation.last_error, pause))
                if isinstance(error, OutcomeUnknown):
                    remember_reference(operation, error)
                note(operation, kind, operation.last_error)
        except LeaseLost:
            logger.info("operation %s has another executor by now", operation.pk)
            return
        except (DatabaseError, InterfaceError):
            logger.warning("attempt of operation %s failed; it could not be recorded", operation.pk)
            db.drop_if_broken(self.using)
            return
        operation.status = status
        if is_unknown:
            send(signals.operation_reconciling, operation)
        else:
            send(signals.operation_attempt_failed, operation, error=operation.last_error)

    def _described(self, error: BaseException) -> str:
        description = describe_error(error)
        if self._failed is None or self._failed[0] is not error:
            return description
        name = self._failed[1]
        return description if repr(name) in description else f"step {name!r}: {description}"[:255]


def backoff(times: int) -> int:
    """Seconds until the next look at something that was looked at in vain `times` before."""
    return int(min(FIRST_PAUSE * 2 ** min(times, 20), LONGEST_PAUSE))


def in_test_transaction(using: str) -> bool:
    """Whether the open transaction is a django.test.TestCase's, which never commits anyway."""
    blocks = connections[using].atomic_blocks
    return all(getattr(block, "_from_testcase", False) for block in blocks)


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
