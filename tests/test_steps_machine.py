"""Random histories of executors, zombies, steps, calls and answers, against a model in memory."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from idempotency import engine
from idempotency.exceptions import InProgress, LeaseLost, OutcomeUnknown
from idempotency.models import Operation, Outcome, Status
from idempotency.reconciliation import Absent, Confirmed, resolve
from idempotency.steps import StepwiseExecution
from tests.app.models import Effect
from tests.callers import intent, new_key
from tests.shops import age

STEPS, CALLS = ("a", "b", "c"), ("x", "y", "z")
#: What the world does with a call: an answer, proof of no effect, silence before or after the effect.
WORLDS = st.sampled_from(["ok", "declined", "lost", "charged"])


class Declined(Exception):
    """Proof that there was no effect."""


class Executor:
    """A real executor, and what the model knows about it."""

    def __init__(self, execution: StepwiseExecution, known: dict[str, str]) -> None:
        self.execution = execution
        self.operation = execution.operation
        self.known = dict(known)  # what was recorded when it began: its memory of the past
        self.used: set[str] = set()
        self.open = {name for name, state in known.items() if state == "started"}


class Steps(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.key = new_key()
        self.executors: list[Executor] = []
        self.owner: Executor | None = None
        self.leased = False
        self.status = ""
        self.steps: dict[str, str] = {}
        self.effects: dict[str, int] = {}
        self.attempts = 0
        self.begin()

    # The model

    def may_write(self, executor: Executor) -> bool:
        return executor is self.owner and self.status == Status.PROCESSING

    def end(self, status: str) -> None:
        self.status, self.leased = status, False

    # Executors

    @rule()
    def begin(self) -> None:
        try:
            begun = engine.begin(intent(self.key, stepwise=True, lease=600))
        except InProgress:
            assert self.status == Status.PROCESSING
            assert self.leased
            return
        except OutcomeUnknown:
            assert self.status == Status.RECONCILING
            return
        if isinstance(begun, engine.Replay):
            assert self.status in (Status.SUCCEEDED, Status.FAILED)
            return
        assert self.status in ("", Status.PROCESSING)
        assert not self.leased
        assert isinstance(begun, StepwiseExecution)
        assert begun.operation.attempt == self.attempts + 1
        self.attempts, self.leased, self.status = begun.operation.attempt, True, Status.PROCESSING
        self.owner = Executor(begun, self.steps)
        self.executors.append(self.owner)

    @precondition(lambda self: self.leased)
    @rule()
    def lapse(self) -> None:
        age(key=self.key)
        self.leased = False

    @precondition(lambda self: self.executors)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        executor = self.pick(data)
        self.write(executor, executor.operation.heartbeat)

    @precondition(lambda self: self.executors)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        executor = self.pick(data)
        name = self.unused(data, executor, STEPS)
        if not name:
            return
        if name in executor.known:
            assert executor.operation.step(name, self.never) == name
            return
        ok = self.write(executor, lambda: executor.operation.step(name, self.effect, name))
        if ok:
            self.steps[name] = "done"
            self.effects[name] = self.effects.get(name, 0) + 1

    @precondition(lambda self: self.executors)
    @rule(data=st.data(), world=WORLDS, repeatable=st.booleans())
    def call(self, data: st.DataObject, world: str, repeatable: bool) -> None:
        executor = self.pick(data)
        name = self.unused(data, executor, CALLS)
        if not name:
            return
        known = executor.known.get(name)
        if known == "done":
            assert executor.operation.call(name, self.never) == name
            return
        call = lambda: executor.operation.call(  # noqa: E731
            name, self.outside, world, name, repeatable=repeatable, failures=(Declined,)
        )
        if known == "started" and not repeatable:
            with pytest.raises(OutcomeUnknown):
                call()
            return
        if not self.may_write(executor):
            with pytest.raises(LeaseLost):
                call()
            return
        self.leased = True
        self.steps[name] = "started"
        executor.open.add(name)
        if world == "ok":
            assert call() == name
            self.steps[name] = "done"
            executor.open.discard(name)
        elif world == "declined":
            with pytest.raises(Declined):
                call()
            del self.steps[name]
            executor.open.discard(name)
        else:
            with pytest.raises(TimeoutError if repeatable else OutcomeUnknown):
                call()
        if world in ("ok", "charged"):
            self.effects[name] = 1  # a provider that knows its keys

    @precondition(lambda self: self.executors)
    @rule(data=st.data(), status=st.sampled_from([Status.SUCCEEDED, Status.FAILED]))
    def complete(self, data: st.DataObject, status: str) -> None:
        executor = self.pick(data)
        if data.draw(st.integers(0, 2)):  # an end does not come as often as a step
            return
        outcome = Outcome(status=status, body=b"x")
        if executor.open:
            with pytest.raises(OutcomeUnknown):
                executor.execution.complete(outcome)
            if self.may_write(executor):
                self.end(Status.RECONCILING)
        elif self.write(executor, lambda: executor.execution.complete(outcome)):
            self.end(status)

    @precondition(lambda self: self.executors)
    @rule(data=st.data(), knows=st.booleans())
    def fail(self, data: st.DataObject, knows: bool) -> None:
        executor = self.pick(data)
        pk = executor.operation.pk
        executor.execution.fail(ValueError() if knows else OutcomeUnknown(operation_id=pk))
        if self.may_write(executor):
            self.end(Status.PROCESSING if knows else Status.RECONCILING)

    @precondition(lambda self: self.status in (Status.SUCCEEDED, Status.FAILED))
    @rule()
    def go_on_with_another(self) -> None:
        for executor in self.executors:
            self.write(executor, executor.operation.heartbeat)
        self.start()

    # The outside

    @precondition(lambda self: self.status == Status.RECONCILING)
    @rule(confirmed=st.booleans())
    def settle(self, confirmed: bool) -> None:
        """What is found out is true: confirmed if and only if the provider has it."""
        started = [name for name, state in self.rows() if state == "started"]
        operation = Operation.objects.get(key=self.key)
        if not started:
            resolve(operation, Confirmed() if confirmed else Absent(), evidence="test")
            self.end(Status.SUCCEEDED if confirmed else Status.PROCESSING)
            self.owner = None
            return
        name = started[0]
        if self.effects.get(name):
            resolve(operation, Confirmed(name), evidence="test")
            self.steps[name] = "done"
        else:
            resolve(operation, Absent(), evidence="test")
            del self.steps[name]
        self.end(Status.PROCESSING)
        self.owner = None  # whoever began before knows less than is recorded now

    # Helpers

    def pick(self, data: st.DataObject) -> Executor:
        zombies = self.executors[-3:-1]
        return data.draw(st.sampled_from([*zombies, *[self.executors[-1]] * 4]))

    def unused(self, data: st.DataObject, executor: Executor, names: tuple[str, ...]) -> str:
        left = [name for name in names if name not in executor.used]
        in_doubt = [name for name in left if executor.known.get(name) == "started"]
        name = data.draw(st.sampled_from([*in_doubt * 3, *left])) if left else ""
        executor.used.add(name)
        return name

    def write(self, executor: Executor, call: Any) -> bool:
        """Make a fenced write; whether the model says that it may succeed."""
        if not self.may_write(executor):
            with pytest.raises(LeaseLost):
                call()
            return False
        call()
        self.leased = True
        return True

    def never(self) -> None:
        raise AssertionError("a recorded step was run again")

    def effect(self, name: str) -> str:
        Effect.objects.create(label=f"{self.key} {name}")
        return name

    def outside(self, world: str, name: str) -> str:
        label = f"{self.key} {name}"
        if world in ("ok", "charged") and not Effect.objects.filter(label=label).exists():
            Effect.objects.create(label=label)
        if world == "declined":
            raise Declined
        if world != "ok":
            raise TimeoutError
        return name

    def rows(self) -> list[tuple[str, str]]:
        operation = Operation.objects.filter(key=self.key).first()
        if operation is None:
            return []
        return list(operation.steps.order_by("id").values_list("name", "status"))

    @invariant()
    def the_rows_are_what_the_model_says(self) -> None:
        operation = Operation.objects.filter(key=self.key).first()
        if operation is None:
            assert self.status == ""
            return
        assert (operation.status, operation.attempt) == (self.status, self.attempts)
        assert dict(self.rows()) == self.steps
        assert (operation.lease_expires_at is None) or operation.status == Status.PROCESSING
        for name in (*STEPS, *CALLS):
            count = Effect.objects.filter(label=f"{self.key} {name}").count()
            assert count == self.effects.get(name, 0) <= 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(300)
def test_any_history_is_what_the_model_says() -> None:
    run_state_machine_as_test(
        Steps,
        settings=settings(
            max_examples=30,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
