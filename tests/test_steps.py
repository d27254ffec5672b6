"""Steps and calls: recovery points, unknown outcomes, ownership, compensation, actions."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import User
from django.db import IntegrityError, OperationalError, connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import override_settings
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory, force_authenticate
from rest_framework.views import APIView

from idempotency import engine
from idempotency.contrib.rest_framework import IdempotencyMixin
from idempotency.decorators import idempotent
from idempotency.exceptions import (
    ConfigurationError,
    IllegalTransition,
    InProgress,
    LeaseLost,
    OutcomeUnknown,
    StoredFailure,
)
from idempotency.functions import idempotent_function
from idempotency.models import (
    TRANSITIONS,
    EventKind,
    Operation,
    Outcome,
    Reference,
    Status,
    Step,
    StepStatus,
)
from idempotency.policies import Policy
from idempotency.reconciliation import Absent, Confirmed, StillUnknown, resolve
from idempotency.retention import purge
from tests import shops
from tests.app.models import Effect
from tests.callers import age as end_window
from tests.callers import effects, events, intent, new_key, post, problem
from tests.processes import Child, Died, eventually
from tests.shops import find

pytestmark = pytest.mark.django_db(transaction=True)

undone: list[tuple[str, Any, str]] = []
fail_to_undo: list[str] = []


class Refused(Exception):
    """A declared failure."""


@pytest.fixture(autouse=True)
def _nothing_undone() -> None:
    undone.clear()
    fail_to_undo.clear()


def undo_local(result: Any, key: str) -> None:
    Effect.objects.create(label="undone")
    _undo("local", result, key)


def undo_call(result: Any, key: str) -> None:
    assert not connection.in_atomic_block
    _undo("call", result, key)


def _undo(kind: str, result: Any, key: str) -> None:
    if kind in fail_to_undo:
        raise ConnectionError
    undone.append((kind, result, key))


def confirm(key: str) -> Confirmed:
    return Confirmed({"found": key})


def deny(key: str) -> Absent:
    return Absent()


def shrug(key: str) -> StillUnknown:
    return StillUnknown()


def forget_to_return(key: str) -> None:
    """A reconciler with a bug: it returns nothing."""


def effect(label: str) -> str:
    Effect.objects.create(label=label)
    return label


class Calls(list[Any]):
    """A function that notes its calls, and raises what it is told to, once each."""

    def __init__(self, *raised: BaseException) -> None:
        super().__init__()
        self.raised = list(raised)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.append((args, kwargs))
        if self.raised:
            raise self.raised.pop(0)
        return len(self)


def run(key: str, body: Callable[[Operation], Any], **options: Any) -> Any:
    """One attempt of a stepwise function with this body."""

    @idempotent_function(
        name="steps", key=lambda: key, stepwise=True, lease=600, failures=(Refused,), **options
    )
    def function() -> Any:
        operation = engine.current()
        assert operation is not None
        return body(operation)

    return function()


def attempt(key: str, body: Callable[[Operation], Any]) -> BaseException:
    """One attempt that fails."""
    with pytest.raises(BaseException) as error:  # noqa: PT011 - which one is the test's to say
        run(key, body)
    return error.value


def begin(key: str) -> Any:
    """An executor of its own, as another process would have it."""
    return engine.begin(intent(key, stepwise=True, lease=600))


def steps(key: str) -> dict[str, str]:
    return dict(Step.objects.filter(operation__key=key).values_list("name", "status"))


# Recovery points


def test_a_recorded_step_is_not_run_again_and_returns_what_it_returned() -> None:
    """BUGS T11."""
    key, reserve = new_key(), Calls()

    def body(operation: Operation, fail: bool) -> Any:
        first = operation.step("reserve", reserve, 1, unit="piece")
        if fail:
            raise ValueError
        return first

    attempt(key, lambda operation: body(operation, True))
    assert run(key, lambda operation: body(operation, False)) == 1
    assert reserve == [((1,), {"unit": "piece"})]
    assert (find(key).status, find(key).attempt) == (Status.SUCCEEDED, 2)
    assert run(key, lambda operation: body(operation, False)) == 1  # a replay
    assert len(reserve) == 1


def test_a_step_commits_its_effects_together_with_its_result() -> None:
    key = new_key()

    def twice(label: str) -> None:
        effect(label)
        raise ValueError

    attempt(key, lambda operation: operation.step("one", twice, key))
    assert (effects(key), steps(key)) == (0, {})
    run(key, lambda operation: operation.step("one", effect, key))
    assert (effects(key), steps(key)) == (1, {"one": "done"})


def test_a_step_whose_result_cannot_be_stored_has_no_effect() -> None:
    key = new_key()

    def body(operation: Operation) -> Any:
        return operation.step("one", lambda: (effect(key), object())[1])

    assert "cannot be stored" in str(attempt(key, body))
    assert (effects(key), steps(key)) == (0, {})


def test_errors_name_the_step() -> None:
    key = new_key()
    error = attempt(key, lambda operation: operation.step("reserve", Calls(ValueError("secret"))))
    operation = find(key)
    assert error.__notes__ == [f"in step 'reserve' of steps ({operation.pk})"]
    assert operation.last_error.startswith("step 'reserve': builtins.ValueError in ")
    assert "secret" not in operation.last_error
    assert events(key) == [(EventKind.ATTEMPT_FAILED, operation.last_error)]


def test_an_error_outside_of_the_steps_names_none() -> None:
    key = new_key()

    def body(operation: Operation) -> None:
        operation.step("reserve", Calls())
        raise ValueError

    attempt(key, body)
    assert find(key).last_error.startswith("builtins.ValueError in ")


def test_a_deploy_may_add_remove_and_reorder_steps() -> None:
    key, calls = new_key(), {name: Calls() for name in "abcd"}

    def body(names: str, *, fail: bool = False) -> Callable[[Operation], Any]:
        def run_steps(operation: Operation) -> str:
            for name in names:
                operation.step(name, calls[name])
            if fail:
                raise ValueError
            return names

        return run_steps

    attempt(key, body("abc", fail=True))
    assert run(key, body("dcb")) == "dcb"
    assert [len(calls[name]) for name in "abcd"] == [1, 1, 1, 1]


def test_a_deploy_that_removes_a_call_in_doubt_does_not_forget_it() -> None:
    key = new_key()
    attempt(key, lambda operation: operation.call("charge", Calls(TimeoutError()), repeatable=True))
    error = attempt(key, lambda operation: "done without it")
    assert isinstance(error, OutcomeUnknown)
    assert find(key).status == Status.RECONCILING


@pytest.mark.parametrize("name", ["", "~undo", "x" * 195])
def test_a_step_needs_a_name_that_fits(name: str) -> None:
    error = attempt(new_key(), lambda operation: operation.step(name, Calls()))
    assert isinstance(error, ConfigurationError)


def test_long_names_are_undone_one_by_one() -> None:
    key, start = new_key(), "x" * 190

    def body(operation: Operation) -> None:
        operation.step(start + "1", lambda: 1, compensate=undo_local)
        operation.step(start + "2", lambda: 2, compensate=undo_local)
        raise Refused

    attempt(key, body)
    assert [result for _, result, _ in undone] == [2, 1]


def test_a_name_is_used_once() -> None:
    def body(operation: Operation) -> None:
        operation.step("one", Calls())
        operation.step("one", Calls())

    assert "already used" in str(attempt(new_key(), body))


def test_a_step_inside_a_transaction_is_refused() -> None:
    """What it records could be rolled back after its effects at the provider."""
    call = Calls()

    def body(operation: Operation) -> None:
        with transaction.atomic():
            operation.call("charge", call)

    assert isinstance(attempt(new_key(), body), ConfigurationError)
    assert call == []


def test_a_stepwise_operation_inside_a_transaction_is_refused() -> None:
    with transaction.atomic(), pytest.raises(ConfigurationError, match="inside a transaction"):
        run(new_key(), lambda operation: None)


@pytest.mark.django_db(transaction=False)
def test_inside_a_test_case_stepwise_operations_work_as_everywhere() -> None:
    """Its transaction never commits anyway; a project's tests need not be slow ones."""
    key, reserve = new_key(), Calls()

    def body(operation: Operation) -> Any:
        first = operation.step("reserve", reserve)
        return [first, operation.call("charge", lambda: "ch_1")]

    assert connection.in_atomic_block
    assert run(key, body) == run(key, body) == [1, "ch_1"]
    assert len(reserve) == 1


def test_steps_belong_into_stepwise_operations() -> None:
    @idempotent_function(key=lambda: "k")
    def plain() -> None:
        operation = engine.current()
        assert operation is not None
        operation.step("one", Calls())

    with pytest.raises(ConfigurationError, match="stepwise=True"):
        plain()


def test_a_compensation_must_be_found_again_by_its_name() -> None:
    call = Calls()
    error = attempt(
        new_key(), lambda operation: operation.call("a", call, compensate=lambda result, key: None)
    )
    assert "module-level function" in str(error)
    assert call == []


# Calls


def test_a_call_is_on_record_before_it_is_made_and_holds_no_transaction() -> None:
    key, seen = new_key(), []

    def charge() -> str:
        seen.append((connection.in_atomic_block, steps(key)))
        return "ch_1"

    assert run(key, lambda operation: operation.call("charge", charge)) == "ch_1"
    assert seen == [(False, {"charge": "started"})]
    assert steps(key) == {"charge": "done"}


def test_a_call_that_ends_without_an_answer_is_an_unknown_outcome() -> None:
    key, charge = new_key(), Calls(TimeoutError("no answer"))
    error = attempt(key, lambda operation: operation.call("charge", charge))
    assert isinstance(error, OutcomeUnknown)
    assert isinstance(error.__cause__, TimeoutError)
    operation = find(key)
    assert (operation.status, operation.lease_expires_at) == (Status.RECONCILING, None)
    assert "'charge'" in operation.last_error
    assert [kind for kind, _ in events(key)] == [EventKind.RECONCILING]
    again = attempt(key, lambda operation: operation.call("charge", charge))
    assert isinstance(again, OutcomeUnknown)
    assert len(charge) == 1  # neither charged again nor called failed


def test_a_repeatable_call_is_made_again_with_the_same_key() -> None:
    """BUGS T10."""
    key, charge = new_key(), Calls(TimeoutError())

    def body(operation: Operation) -> Any:
        return operation.call("charge", charge, key=operation.derive_key("charge"), repeatable=True)

    assert isinstance(attempt(key, body), TimeoutError)
    assert find(key).status == Status.PROCESSING
    assert run(key, body) == 2
    assert charge[0] == charge[1] == ((), {"key": find(key).derive_key("charge")})


def interrupted_call(key: str, charge: Calls, **options: Any) -> Callable[[Operation], Any]:
    """Interrupt the call at its end; returns the body of the next attempt."""

    def body(operation: Operation) -> Any:
        return operation.call("charge", charge, **options)

    charge.raised.append(SystemExit())
    assert isinstance(attempt(key, body), SystemExit)
    assert steps(key) == {"charge": "started"}
    return body


def test_an_interrupted_call_that_is_confirmed_is_not_made_again() -> None:
    """BUGS T11."""
    key, charge = new_key(), Calls()
    body = interrupted_call(key, charge, reconcile=confirm)
    assert run(key, body) == {"found": find(key).derive_key("charge")}
    assert (len(charge), steps(key)) == (1, {"charge": "done"})


def test_an_interrupted_call_that_is_absent_is_made_again() -> None:
    key, charge = new_key(), Calls()
    assert run(key, interrupted_call(key, charge, reconcile=deny)) == 2


@pytest.mark.parametrize("reconcile", [None, shrug, forget_to_return])
def test_an_interrupted_call_that_nobody_can_judge_is_an_unknown_outcome(reconcile: Any) -> None:
    key, charge = new_key(), Calls()
    error = attempt(key, interrupted_call(key, charge, reconcile=reconcile))
    assert isinstance(error, OutcomeUnknown)
    assert (len(charge), find(key).status) == (1, Status.RECONCILING)


def test_an_exception_that_proves_there_was_no_effect_closes_the_call() -> None:
    key, charge = new_key(), Calls(Refused("declined"))
    error = attempt(key, lambda operation: operation.call("charge", charge, failures=(Refused,)))
    assert isinstance(error, StoredFailure)
    assert (find(key).status, steps(key)) == (Status.FAILED, {})


def test_a_handler_cannot_swallow_that_an_outcome_is_unknown() -> None:
    """`except Exception` around a call must not turn a charge in doubt into a stored failure."""
    key, charge = new_key(), Calls(TimeoutError())

    def body(operation: Operation) -> str:
        try:
            operation.call("charge", charge, repeatable=True)
        except Exception:
            return "the payment failed"
        return "paid"

    assert isinstance(attempt(key, body), OutcomeUnknown)
    assert find(key).status == Status.RECONCILING


def test_a_step_that_was_a_call_in_an_earlier_deploy_stays_in_doubt() -> None:
    key, charge = new_key(), Calls()
    interrupted_call(key, charge)
    error = attempt(key, lambda operation: operation.step("charge", charge))
    assert isinstance(error, OutcomeUnknown)
    assert len(charge) == 1


def test_a_result_that_cannot_be_stored_leaves_the_call_open() -> None:
    key = new_key()
    error = attempt(key, lambda operation: operation.call("charge", object, reconcile=confirm))
    assert isinstance(error, TypeError)
    assert steps(key) == {"charge": "started"}


def test_a_call_may_say_that_it_does_not_know_and_how_the_provider_calls_it() -> None:
    key = new_key()

    def body(operation: Operation) -> None:
        operation.call("charge", operation.unknown, provider_ref="ch_" + "9" * 200)

    error = attempt(key, body)
    assert isinstance(error, OutcomeUnknown)
    assert find(key).status == Status.RECONCILING
    [reference] = Reference.objects.filter(operation=find(key))
    assert reference.name == "provider"
    assert reference.value == Reference.shortened("ch_" + "9" * 200)


def test_a_plain_operation_may_say_that_it_does_not_know() -> None:
    key = new_key()

    @idempotent_function(name="plain", key=lambda: key)
    def pay() -> None:
        effect(key)
        operation = engine.current()
        assert operation is not None
        operation.unknown(provider_ref="ch_1")

    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            pay()
    assert (find(key).status, find(key).attempt, effects(key)) == (Status.RECONCILING, 1, 0)
    assert find(key).references.get().value == "ch_1"


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("status", [200, 400, 502])
def test_a_view_cannot_swallow_that_the_outcome_is_unknown(status: int, stepwise: bool) -> None:
    """Any other end would let the client, or a retry, have the effect again."""
    key = new_key()

    @idempotent(required=True, name="doubtful", stepwise=stepwise)
    def view(request: HttpRequest) -> HttpResponse:
        with suppress(OutcomeUnknown):
            request.operation.unknown(provider_ref="ch_1")  # type: ignore[attr-defined]
        return HttpResponse("swallowed", status=status)

    post(view, key)
    assert find(key).status == Status.RECONCILING
    assert problem(post(view, key)) == "outcome-unknown"
    assert find(key).attempt == 1


def test_a_plain_operation_that_calls_out_may_be_reconciled_instead_of_run_again() -> None:
    key, policy = new_key(), {"on_interrupted": "reconcile"}

    def die() -> None:
        engine.begin(intent(key, **policy))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(Died):
        Child(die).result()
    shops.age_all(hours=1)

    def asked() -> bool:
        try:
            engine.begin(intent(key, **policy)).fail(ValueError())
        except InProgress:  # the server has not noticed yet that the executor is gone
            return False
        except OutcomeUnknown:
            return True
        raise AssertionError("it ran again")

    eventually(asked, "409 outcome-unknown")
    assert find(key).status == Status.RECONCILING


# Ownership


def lapse(key: str) -> None:
    shops.age(key=key)


def test_a_heartbeat_extends_the_lease() -> None:
    key = new_key()
    executor = begin(key)
    lapse(key)
    executor.operation.heartbeat()
    with pytest.raises(InProgress):
        begin(key)


def test_whoever_lost_the_lease_can_write_nothing() -> None:
    key = new_key()
    old = begin(key)
    lapse(key)
    new = begin(key)
    calls = Calls()
    for attempt_to_write in (
        lambda: old.operation.step("one", effect, key),
        lambda: old.operation.call("two", calls),
        old.operation.heartbeat,
        lambda: old.complete(Outcome(status=Status.SUCCEEDED, body=b"old")),
        lambda: old.store_failure(Outcome(status=Status.FAILED, body=b"old")),
    ):
        with pytest.raises(LeaseLost):
            attempt_to_write()
    assert (effects(key), calls, steps(key)) == (0, [], {})
    new.operation.step("one", effect, key)
    new.complete(Outcome(status=Status.SUCCEEDED, body=b"new"))
    assert (effects(key), bytes(find(key).body)) == (1, b"new")


def test_the_error_path_of_a_zombie_does_not_release_the_new_owners_lease() -> None:
    """BUGS C01."""
    key = new_key()
    old = begin(key)
    lapse(key)
    new = begin(key)
    for error in (ValueError(), OutcomeUnknown(operation_id=old.operation.pk)):
        old.fail(error)
    assert (find(key).status, find(key).owner) == (Status.PROCESSING, new.operation.owner)
    assert [kind for kind, _ in events(key)] == [EventKind.TAKEN_OVER]
    with pytest.raises(InProgress):
        begin(key)


def test_a_call_of_a_zombie_is_not_recorded() -> None:
    key = new_key()
    old = begin(key)

    def charge() -> str:
        lapse(key)
        begin(key)
        return "ch_old"

    with pytest.raises(LeaseLost):
        old.operation.call("charge", charge)
    assert steps(key) == {"charge": "started"}


def test_a_zombie_that_notices_during_a_call_says_so() -> None:
    key = new_key()
    old = begin(key)

    def charge() -> None:
        lapse(key)
        begin(key)
        old.operation.heartbeat()

    with pytest.raises(LeaseLost):
        old.operation.call("charge", charge)


def test_a_failed_attempt_gives_the_lease_back_at_once() -> None:
    key = new_key()
    begin(key).fail(ValueError())
    assert find(key).lease_expires_at is None
    assert begin(key).operation.attempt == 2


def test_a_failure_that_cannot_be_recorded_is_raised_all_the_same_and_its_lease_lapses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = new_key()

    def away(*args: Any) -> None:
        raise OperationalError("the database is away")

    monkeypatch.setattr("idempotency.steps.note", away)
    assert isinstance(
        attempt(key, lambda operation: operation.step("a", Calls(KeyError()))), KeyError
    )
    assert "could not be recorded" in caplog.text
    monkeypatch.undo()
    assert find(key).lease_expires_at is not None
    lapse(key)
    assert run(key, lambda operation: operation.step("a", Calls())) == 1


def test_attempts_grow_over_the_reuse_of_a_key_and_steps_start_anew() -> None:
    key, reserve = new_key(), Calls()

    def body(operation: Operation) -> Any:
        operation.refer("provider", "ch_1")
        return operation.step("reserve", reserve)

    run(key, body)
    old = find(key)
    end_window(key)
    assert run(key, lambda operation: operation.step("reserve", reserve)) == 2
    new = find(key)
    assert new.attempt > old.attempt
    assert new.derive_key("reserve") == old.derive_key("reserve")
    # A webhook about the old life must not find the new one.
    assert not new.references.exists()


# Compensation


def failing(*, then: Callable[[], Any] = lambda: None) -> Callable[[Operation], Any]:
    def body(operation: Operation) -> None:
        operation.step("reserve", lambda: {"seat": 7}, compensate=undo_local)
        operation.call("charge", lambda: "ch_1", compensate=undo_call)
        operation.step("note", lambda: None)
        then()
        raise Refused("sold out")

    return body


def test_a_failure_undoes_the_done_steps_last_one_first() -> None:
    key = new_key()
    error = attempt(key, failing())
    assert isinstance(error, StoredFailure)
    operation = find(key)
    assert operation.status == Status.REVERSED
    assert undone == [
        ("call", "ch_1", operation.derive_key("~undo:charge")),
        ("local", {"seat": 7}, operation.derive_key("~undo:reserve")),
    ]
    again = attempt(key, failing())
    assert (str(again), len(undone)) == ("sold out", 2)


def test_a_failure_without_compensations_is_a_failure() -> None:
    key = new_key()

    def body(operation: Operation) -> None:
        operation.step("note", lambda: None)
        raise Refused

    attempt(key, body)
    assert find(key).status == Status.FAILED


@pytest.mark.parametrize(("kind", "step"), [("call", "charge"), ("local", "reserve")])
def test_a_failed_compensation_stays_visible_and_the_next_attempt_goes_on(
    kind: str, step: str
) -> None:
    key, runs = new_key(), Calls()
    fail_to_undo.append(kind)
    assert isinstance(attempt(key, failing(then=runs)), ConnectionError)
    operation = find(key)
    assert (operation.status, operation.lease_expires_at) == (Status.PROCESSING, None)
    assert operation.last_error.startswith(f"step '~undo:{step}': builtins.ConnectionError")
    fail_to_undo.clear()
    assert isinstance(attempt(key, failing(then=runs)), StoredFailure)
    assert find(key).status == Status.REVERSED
    assert sorted(kind for kind, _, _ in undone) == ["call", "local"]
    assert len(runs) == 1  # the handler is not run again
    assert effects("undone") == 1


def test_other_exceptions_undo_nothing() -> None:
    key = new_key()

    def fail() -> None:
        raise ValueError

    attempt(key, failing(then=fail))
    assert (undone, find(key).status) == ([], Status.PROCESSING)


# Actions


def action_body(operation: Operation) -> Any:
    operation.step("reserve", lambda: 1, compensate=undo_local)
    proof = operation.requires_action("3-d-secure")
    if proof is None:
        return {"redirect": "https://bank.example/"}
    if not proof:
        raise Refused("not authenticated")
    return {"paid": proof}


def test_an_action_is_asked_for_until_somebody_resolves_it_and_then_goes_on() -> None:
    key = new_key()
    for _ in range(2):
        assert run(key, action_body) == {"redirect": "https://bank.example/"}
    assert (find(key).status, find(key).attempt) == (Status.REQUIRES_ACTION, 1)
    resolve(find(key), Confirmed("proof"), evidence="webhook")
    assert find(key).status == Status.PROCESSING
    assert run(key, action_body) == {"paid": "proof"}
    assert find(key).status == Status.SUCCEEDED


def test_an_action_that_failed_fails_the_operation_through_its_handler() -> None:
    key = new_key()
    run(key, action_body)
    resolve(find(key), Confirmed(False), evidence="webhook")
    assert isinstance(attempt(key, action_body), StoredFailure)
    assert (find(key).status, len(undone)) == (Status.REVERSED, 1)


def test_an_action_that_is_absent_is_asked_for_again() -> None:
    key = new_key()
    run(key, action_body)
    resolve(find(key), Absent(), evidence="the session expired")
    assert run(key, action_body) == {"redirect": "https://bank.example/"}
    assert find(key).status == Status.REQUIRES_ACTION


def test_a_failure_from_outside_undoes_what_was_done() -> None:
    key = new_key()
    run(key, action_body)
    failure = Outcome(status=Status.FAILED, headers={"failure": "Cancelled"}, body=b'"cancelled"')
    resolve(find(key), failure, evidence="the customer cancelled")
    assert isinstance(attempt(key, action_body), StoredFailure)
    assert (find(key).status, len(undone)) == (Status.REVERSED, 1)


@pytest.mark.parametrize("tombstone", [True, False])
def test_an_action_is_waited_for_longer_than_the_window(tombstone: bool) -> None:
    """Its steps are not forgotten: what they have done is still to be finished or undone."""
    key = new_key()
    run(key, action_body)
    end_window(key, tombstone=tombstone)
    purge()
    assert run(key, action_body) == {"redirect": "https://bank.example/"}
    assert find(key).attempt == 1
    assert steps(key) == {"reserve": "done", "3-d-secure": "started"}


def test_a_plain_operation_may_require_an_action_too() -> None:
    key = new_key()

    @idempotent_function(name="plain", key=lambda: key)
    def pay() -> str:
        operation = engine.current()
        assert operation is not None
        assert operation.requires_action() is None
        return "redirect"

    assert (pay(), find(key).status) == ("redirect", Status.REQUIRES_ACTION)
    resolve(find(key), Confirmed("paid"), evidence="webhook")
    assert (pay(), find(key).status) == ("paid", Status.SUCCEEDED)


# Transitions


def put(status: str) -> str:
    """The key of an operation that is really in this status."""
    key = new_key()
    if status == Status.PROCESSING:
        begin(key).fail(ValueError())
    elif status == Status.RECONCILING:
        begin(key).fail(OutcomeUnknown(operation_id=find(key).pk))
    elif status == Status.REQUIRES_ACTION:
        executor = begin(key)
        executor.operation.requires_action()
        executor.complete(Outcome(status=Status.SUCCEEDED))
    else:
        begin(key).complete(Outcome(status=status))
    assert find(key).status == status
    return key


ILLEGAL = [
    (before, after)
    for before in Status.values
    for after in Status.values
    if after not in TRANSITIONS[before]
]


@pytest.mark.parametrize(("before", "after"), ILLEGAL)
def test_every_illegal_transition_raises_and_changes_nothing(before: str, after: str) -> None:
    key = put(before)
    row = Operation.objects.filter(key=key).values()

    def unchanged() -> dict[str, Any]:
        return dict(row.get(), due_at=None, last_error=None)

    expected = unchanged()
    with pytest.raises(IllegalTransition):
        resolve(find(key), Outcome(status=after), evidence="illegal")
    assert unchanged() == expected
    assert not find(key).events.filter(kind=EventKind.RESOLVED).exists()


@pytest.mark.parametrize("status", [Status.PROCESSING, Status.RECONCILING, "nonsense"])
@pytest.mark.parametrize("stepwise", [True, False])
def test_an_executor_can_only_store_an_outcome(status: str, stepwise: bool) -> None:
    key = new_key()
    execution = engine.begin(intent(key, stepwise=stepwise))
    assert not isinstance(execution, engine.Replay)
    with pytest.raises(IllegalTransition):
        execution.complete(Outcome(status=status))
    assert (find(key).status, find(key).code) == (Status.PROCESSING, None)


@pytest.mark.parametrize(
    "change",
    [
        {"status": "paid"},
        {"status": Status.SUCCEEDED},
        {"attempt": 0},
        {"status": Status.RECONCILING, "lease_expires_at": "2026-01-01T00:00Z"},
    ],
)
def test_the_database_refuses_states_that_do_not_exist(change: dict[str, Any]) -> None:
    key = new_key()
    begin(key)
    with pytest.raises((IntegrityError, OperationalError)), transaction.atomic():
        Operation.objects.filter(key=key).update(**change)


@pytest.mark.parametrize("status", StepStatus.values)
def test_the_database_refuses_steps_that_do_not_fit(status: str) -> None:
    key = new_key()
    executor = begin(key)
    executor.operation.step("one", Calls())
    wrong = {"status": status, "done_at": None} if status == "done" else {"status": status}
    with pytest.raises((IntegrityError, OperationalError)), transaction.atomic():
        Step.objects.filter(operation__key=key).update(**wrong)


# Over HTTP


def stepwise_view(body: Callable[[Operation, HttpRequest], HttpResponse]) -> Any:
    @idempotent(required=True, name="steps.view", stepwise=True, lease=600)
    def view(request: HttpRequest) -> HttpResponse:
        return body(request.operation, request)

    return view


def test_a_stepwise_view_goes_on_after_its_last_step() -> None:
    key, reserve, later = new_key(), Calls(), Calls(ValueError())

    def body(operation: Operation, request: HttpRequest) -> HttpResponse:
        number = operation.step("reserve", reserve)
        operation.call("charge", later, repeatable=True)
        return JsonResponse({"reserved": number}, status=201)

    view = stepwise_view(body)
    assert post(view, key).status_code == 500
    response = post(view, key)
    assert (response.status_code, json.loads(response.content)) == (201, {"reserved": 1})
    assert post(view, key).content == response.content
    assert len(reserve) == 1


def test_an_unknown_outcome_is_a_409_that_advises_no_other_try() -> None:
    key, charge = new_key(), Calls(TimeoutError())

    def body(operation: Operation, request: HttpRequest) -> HttpResponse:
        operation.call("charge", charge)
        return HttpResponse()

    view = stepwise_view(body)
    for _ in range(2):
        response = post(view, key)
        assert (response.status_code, problem(response)) == (409, "outcome-unknown")
        members = json.loads(response.content)
        assert (members["retryable"], members["key_action"]) == (False, "wait")
        assert members["operation_id"] == str(find(key).pk)
    assert len(charge) == 1


def test_a_returned_refusal_undoes_what_was_done_and_is_replayed() -> None:
    key = new_key()

    def body(operation: Operation, request: HttpRequest) -> HttpResponse:
        operation.step("reserve", lambda: 1, compensate=undo_local)
        return JsonResponse({"error": "declined"}, status=402)

    view = stepwise_view(body)
    assert [post(view, key).status_code for _ in range(2)] == [402, 402]
    assert (find(key).status, len(undone)) == (Status.REVERSED, 1)


def test_a_returned_server_error_is_not_stored_and_keeps_the_steps() -> None:
    key, reserve, codes = new_key(), Calls(), [503, 201]

    def body(operation: Operation, request: HttpRequest) -> HttpResponse:
        operation.step("reserve", reserve, compensate=undo_local)
        return HttpResponse(status=codes.pop(0))

    view = stepwise_view(body)
    assert [post(view, key).status_code for _ in range(3)] == [503, 201, 201]
    assert (len(reserve), undone) == (1, [])


def test_a_failed_compensation_of_a_view_is_an_error_and_the_retry_finishes_it() -> None:
    key = new_key()

    def body(operation: Operation, request: HttpRequest) -> HttpResponse:
        operation.step("reserve", lambda: 1, compensate=undo_local)
        return HttpResponse("declined", status=402)

    view = stepwise_view(body)
    fail_to_undo.append("local")
    assert post(view, key).status_code == 500
    fail_to_undo.clear()
    response = post(view, key)
    assert (response.status_code, response.content) == (402, b"declined")
    assert find(key).status == Status.REVERSED


def test_whoever_was_overtaken_says_that_the_request_is_in_progress() -> None:
    key = new_key()

    def body(operation: Operation, request: HttpRequest) -> HttpResponse:
        lapse(key)
        begin_as_view(operation)
        return HttpResponse("too late")

    def begin_as_view(operation: Operation) -> None:
        Operation.objects.filter(pk=operation.pk).update(owner="x" * 32, attempt=9)

    response = post(stepwise_view(body), key)
    assert (response.status_code, problem(response)) == (409, "in-progress")


class StepsView(IdempotencyMixin, APIView):
    idempotency_policy = Policy(required=True, stepwise=True, lease=600, name="steps.rest")

    def post(self, request: Any) -> Response:
        operation = request._request.operation
        operation.step("reserve", lambda: 1, compensate=undo_local)
        if raised:
            error = raised.pop(0)
            operation.call("charge", Calls(error), failures=(ValidationError,))
        return Response({"paid": True}, status=201)


raised: list[Exception] = []


@pytest.mark.parametrize(
    ("error", "codes", "status"),
    [
        (None, [201, 201], Status.SUCCEEDED),
        (ValidationError("declined"), [400, 400], Status.REVERSED),
        (TimeoutError(), [409, 409], Status.RECONCILING),
    ],
)
def test_a_rest_framework_view_may_be_stepwise(
    error: Exception | None, codes: list[int], status: str
) -> None:
    key = new_key()
    raised[:] = [] if error is None else [error]
    view = StepsView.as_view()
    assert [rest_post(view, key).status_code for _ in codes] == codes
    assert find(key).status == status
    assert len(undone) == (status == Status.REVERSED)


def test_a_rest_framework_view_goes_on_after_its_outcome_was_settled() -> None:
    key = new_key()
    raised[:] = [TimeoutError()]
    view = StepsView.as_view()
    response = rest_post(view, key)
    assert (response.status_code, find(key).status) == (409, Status.RECONCILING)
    resolve(find(key), Absent(), evidence="provider")
    assert rest_post(view, key).status_code == 201
    assert steps(key) == {"reserve": "done"}


def rest_post(view: Any, key: str) -> Any:
    request = APIRequestFactory().post("/", {}, format="json", headers={"Idempotency-Key": key})
    force_authenticate(request, User(pk=1))
    return view(request)


# Async


def test_async_functions_have_steps_and_calls_of_their_own() -> None:
    key, reserve, charges = new_key(), Calls(), []

    async def charge(fail: bool) -> str:
        charges.append(await sync_to_async(lambda: connection.in_atomic_block)())
        if fail:
            raise ConnectionError
        return "ch_1"

    @idempotent_function(
        name="async", key=lambda fail: key, stepwise=True, fingerprint=lambda fail: 1
    )
    async def pay(fail: bool) -> list[Any]:
        operation = engine.current()
        assert operation is not None
        first = await operation.astep("reserve", reserve)
        second = await operation.acall("charge", charge, fail, repeatable=True)
        return [first, second]

    with pytest.raises(ConnectionError):
        async_to_sync(pay)(True)
    assert async_to_sync(pay)(False) == [1, "ch_1"]
    assert async_to_sync(pay)(False) == [1, "ch_1"]
    assert (len(reserve), charges, find(key).attempt) == (1, [False, False], 2)


def test_a_recorded_async_call_is_not_made_again() -> None:
    key, charges = new_key(), []

    async def charge() -> str:
        charges.append(1)
        return "ch_1"

    @idempotent_function(name="async", key=lambda: key, stepwise=True)
    async def pay() -> str:
        operation = engine.current()
        assert operation is not None
        found = await operation.acall("charge", charge)
        if operation.attempt == 1:
            raise ConnectionError
        return found

    with pytest.raises(ConnectionError):
        async_to_sync(pay)()
    assert async_to_sync(pay)() == "ch_1"
    assert charges == [1]


@pytest.mark.parametrize(
    ("error", "options", "status"),
    [
        (TimeoutError(), {}, Status.RECONCILING),
        (Refused(), {"failures": (Refused,)}, Status.FAILED),
        (TimeoutError(), {"repeatable": True}, Status.PROCESSING),
    ],
)
def test_async_calls_fail_like_sync_ones(
    error: Exception, options: dict[str, Any], status: str
) -> None:
    key = new_key()

    async def charge() -> None:
        raise error

    @idempotent_function(name="async", key=lambda: key, stepwise=True, failures=(Refused,))
    async def pay() -> None:
        operation = engine.current()
        assert operation is not None
        await operation.acall("charge", charge, **options)

    with pytest.raises((OutcomeUnknown, StoredFailure, TimeoutError)):
        async_to_sync(pay)()
    assert find(key).status == status


def test_a_cancelled_async_call_stays_open_and_gives_the_lease_back() -> None:
    key = new_key()

    @idempotent_function(name="async", key=lambda: key, stepwise=True, lease=600)
    async def pay() -> None:
        operation = engine.current()
        assert operation is not None
        await operation.acall("charge", asyncio.sleep, 60)

    async def cancel() -> None:
        task = asyncio.ensure_future(pay())
        while not await sync_to_async(lambda: steps(key))():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async_to_sync(cancel)()
    operation = find(key)
    assert (operation.status, operation.lease_expires_at) == (Status.PROCESSING, None)
    assert steps(key) == {"charge": "started"}


# At rest


class Backwards:
    """A codec whose texts nobody can read."""

    def encode(self, data: bytes) -> bytes:
        return data[::-1]

    decode = encode


@pytest.mark.parametrize("since", ["start", "later"])
@pytest.mark.parametrize(
    ("style", "sold_out"), [("asked", False), ("nobody knows", False), ("asked", True)]
)
def test_the_projects_codec_keeps_arguments_and_results_unreadable(
    tmp_path: Any, style: str, sold_out: bool, since: str
) -> None:
    """They are as private as the response; what was written before there was a codec is read all the same."""
    codec = {"IDEMPOTENCY": {"CODEC": Backwards()}}
    key = new_key()
    shops.provider.open(tmp_path, "charged")
    with override_settings(**codec if since == "start" else {}):
        shops.tried(key, style, sold_out)
    with override_settings(**codec):
        if style == "nobody knows":
            operation = find(key)
            resolve(
                operation,
                Confirmed(shops.provider.find(operation.derive_key("charge"))),
                evidence="a person",
            )
        shops.life_goes_on()
        shops.assert_consistent(key)
    stored = [step.result for step in find(key).steps.exclude(result=None)]
    if since == "start":
        stored.append(find(key).arguments)
        assert len(stored) > 2
        assert not [text for text in stored if key in text or "charge-" in text]
    else:
        assert any(text.startswith("sealed:") for text in stored)


def test_what_cannot_be_decoded_is_not_done_again(settings: Any) -> None:
    key, reserve = new_key(), Calls()

    def body(operation: Operation) -> Any:
        operation.step("reserve", reserve)
        if len(reserve) == 1:
            reserve.append("fail once")
            raise ValueError

    settings.IDEMPOTENCY = {"CODEC": Backwards()}
    attempt(key, body)
    settings.IDEMPOTENCY = {}
    assert isinstance(attempt(key, body), ConfigurationError)
    settings.IDEMPOTENCY = {"CODEC": Backwards()}
    run(key, body)
    assert len(reserve) == 2
