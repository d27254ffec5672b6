"""Retries, failures, crashes, expiry and purges in any order, against a model of a few lines."""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from django.db import transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from idempotency import engine, retention
from idempotency.exceptions import KeyExpired, Mismatch, RolledBack
from idempotency.models import Operation, Outcome, Status
from tests import callers
from tests.app.models import Effect

KEYS = ("a", "b", "c")
BODIES = ("one", "two")


@dataclass
class Model:
    """What must be true of one key: nothing else decides what the next request gets."""

    #: "" (no row), "claimed" (no outcome yet), "done", "expired" (refused), "over" (like no row).
    state: str = ""
    body: str = ""
    outcome: Outcome | None = None
    attempts: int = 0
    effects: int = 0


class Machine(RuleBasedStateMachine):
    """Every rule is one thing that may happen; the invariant compares the database with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = uuid4().hex[:8]  # examples share the database
        self.models = {key: Model() for key in KEYS}

    def intent(self, key: str, body: str) -> engine.Intent:
        return callers.intent(f"{self.prefix}-{key}", body, tombstone=3600)

    def expect(self, key: str, body: str) -> str:
        """What the request must get: `run`, `replay`, `mismatch` or `expired`."""
        model = self.models[key]
        if model.state in {"", "over"}:
            return "run"
        if model.body != body:
            return "mismatch"
        return {"claimed": "run", "done": "replay", "expired": "expired"}[model.state]

    def request(self, key: str, body: str, handler: Any) -> bool:
        """Send it; returns whether the handler was to run, after checking that it did, or did not."""
        model, expected = self.models[key], self.expect(key, body)
        ran = []

        def counted(operation: Operation) -> Outcome:
            ran.append(operation.attempt)
            return handler(operation)

        try:
            result = engine.run(self.intent(key, body), counted)
        except Mismatch:
            assert expected == "mismatch"
        except KeyExpired:
            assert expected == "expired"
        except (ZeroDivisionError, RolledBack):
            assert expected == "run"
        else:
            assert expected in {"run", "replay"}
            assert result.replayed == (expected == "replay")
            if result.replayed:
                assert result.outcome == model.outcome
            else:
                model.outcome = result.outcome
        assert bool(ran) == (expected == "run")
        if ran:
            assert ran[0] > model.attempts or model.state == ""  # attempts only grow in a row
            model.attempts = ran[0]
            model.body = body
            model.state = "claimed"
        return bool(ran)

    @rule(key=st.sampled_from(KEYS), body=st.sampled_from(BODIES))
    def succeed(self, key: str, body: str) -> None:
        if self.request(key, body, callers.succeed):
            self.models[key].state = "done"
            self.models[key].effects += 1

    @rule(key=st.sampled_from(KEYS), body=st.sampled_from(BODIES))
    def refuse_for_good(self, key: str, body: str) -> None:
        """A returned refusal is an outcome, with its effect."""

        def handler(operation: Operation) -> Outcome:
            callers.succeed(operation)
            return Outcome(status=Status.FAILED, code=409, body=b"sold out")

        if self.request(key, body, handler):
            self.models[key].state = "done"
            self.models[key].effects += 1

    @rule(key=st.sampled_from(KEYS), body=st.sampled_from(BODIES), careless=st.booleans())
    def fail(self, key: str, body: str, careless: bool) -> None:
        """The handler raises, or answers although its transaction is marked for rollback."""

        def handler(operation: Operation) -> Outcome:
            outcome = callers.succeed(operation)
            if not careless:
                raise ZeroDivisionError
            transaction.set_rollback(True)
            return outcome

        self.request(key, body, handler)

    @rule(key=st.sampled_from(KEYS), body=st.sampled_from(BODIES), late=st.booleans())
    def crash(self, key: str, body: str, late: bool) -> None:
        """The process dies in its handler, before or after writing the outcome."""
        model = self.models[key]
        if self.expect(key, body) != "run":
            return
        begun = engine.begin(self.intent(key, body))
        assert isinstance(begun, engine.Execution)
        outcome = callers.succeed(begun.operation)
        if late:
            begun._write(outcome)
        callers.forget_connection()
        if model.state in {"", "over"}:  # a takeover counts in the transaction that is gone
            model.attempts = begun.operation.attempt
        model.state, model.body = "claimed", body

    @rule(key=st.sampled_from(KEYS), body=st.sampled_from(BODIES), stored=st.booleans())
    def fail_deterministically(self, key: str, body: str, stored: bool) -> None:
        """Effects undone, then the failure stored; or the process dies in between."""
        model = self.models[key]
        if self.expect(key, body) != "run":
            return
        begun = engine.begin(self.intent(key, body))
        assert isinstance(begun, engine.Execution)
        callers.succeed(begun.operation)
        begun.abort(ZeroDivisionError())
        if stored:
            model.outcome = Outcome(status=Status.FAILED, code=400, body=b"no")
            begun.store_failure(model.outcome)
            model.attempts = begun.operation.attempt
        elif model.state in {"", "over"}:
            model.attempts = begun.operation.attempt
        model.state, model.body = "done" if stored else "claimed", body

    @rule(key=st.sampled_from(KEYS))
    def end_the_window(self, key: str) -> None:
        if self.models[key].state == "done":
            callers.age(f"{self.prefix}-{key}", tombstone=False)
            self.models[key].state = "expired"

    @rule(key=st.sampled_from(KEYS))
    def end_the_tombstone(self, key: str) -> None:
        if self.models[key].state in {"done", "expired"}:
            callers.age(f"{self.prefix}-{key}")
            self.models[key].state = "over"

    @precondition(lambda self: any(m.state in {"over", "expired"} for m in self.models.values()))
    @rule()
    def purge(self) -> None:
        retention.purge()
        for model in self.models.values():
            if model.state == "over":
                model.state, model.attempts = "", 0

    @invariant()
    def the_database_agrees(self) -> None:
        effects = dict.fromkeys(KEYS, 0)
        for label in Effect.objects.filter(label__startswith=self.prefix).values_list(
            "label", flat=True
        ):
            effects[label.removeprefix(f"{self.prefix}-")] += 1
        rows = {
            row.key.removeprefix(f"{self.prefix}-"): row
            for row in Operation.objects.filter(key__startswith=self.prefix)
        }
        for key, model in self.models.items():
            assert effects[key] == model.effects, f"{key}: {model}"
            assert (key in rows) == bool(model.state), f"{key}: {model}"
            if model.state:
                assert (rows[key].status == Status.PROCESSING) == (model.state == "claimed")
                assert rows[key].attempt == model.attempts, f"{key}: {model}"


@pytest.mark.django_db(transaction=True)
def test_any_order_of_events_agrees_with_the_model() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
