"""What the engine guarantees one call at a time; races and crashes have their own directories."""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import Permission
from django.db import DatabaseError, IntegrityError, OperationalError, connection, transaction

from idempotency import engine, executions, keys, ownership
from idempotency.exceptions import (
    IdempotencyError,
    InProgress,
    KeyExpired,
    Mismatch,
    OutcomeUnknown,
    ResponseNotRetained,
    RolledBack,
    Unavailable,
)
from idempotency.models import Event, Operation, Outcome, Status
from tests import callers
from tests.app.models import Effect
from tests.callers import age, effect_view, effects, events, intent, is_replay, operation, post
from tests.crashes.points import Points
from tests.processes import Signal, in_threads, running

pytestmark = pytest.mark.django_db(transaction=True)

needs_row_locks = pytest.mark.vendor("postgresql", "mysql")


@pytest.fixture
def key() -> str:
    return callers.new_key()


def run(key: str, value: Any = "value", **policy: Any) -> engine.Result:
    return engine.run(intent(key, value, **policy), callers.succeed)


def statements(call: Callable[[], Any]) -> Counter[str]:
    """The statements and commits of a call, by what they do and where."""
    points = Points()
    with points.watched():
        call()
    return Counter(
        label.removeprefix("before ")
        for label in points.passed
        if label.startswith("before ") and label != "before the response"
    )


# What it costs


def test_a_first_request_costs_three_statements_and_one_commit_more() -> None:
    def unprotected() -> None:
        with transaction.atomic():
            Effect.objects.create(label="unprotected")

    view = effect_view()
    added = statements(lambda: post(view, callers.new_key())) - statements(unprotected)
    lock = "UPDATE" if connection.vendor == "sqlite" else "SELECT"
    # The claim commits itself, so that others can see it: the commit there is more, without COMMIT.
    assert added == Counter(
        {"INSERT idempotency_operation": 1, "UPDATE idempotency_operation": 1}
    ) + (Counter([f"{lock} idempotency_operation"]))


def test_a_replay_costs_two_statements_in_all(key: str) -> None:
    view = effect_view()
    post(view, key)
    assert statements(lambda: post(view, key)) == {
        "INSERT idempotency_operation": 1,  # finds the row that is there
        "INSERT idempotency_event": 1,
    }


def test_a_replay_beyond_the_cap_of_events_costs_no_more(key: str, settings: Any) -> None:
    settings.IDEMPOTENCY = {"EVENTS_PER_OPERATION": 2}
    view = effect_view()
    for _ in range(3):
        post(view, key)
    assert statements(lambda: post(view, key)).total() <= 2
    assert len(events(key)) == 2


def test_no_savepoint_is_made_unless_a_transaction_is_joined(key: str) -> None:
    def joined() -> None:
        with transaction.atomic():
            run(callers.new_key())

    assert not [label for label in statements(lambda: run(key)) if "SAVEPOINT" in label]
    assert [label for label in statements(joined) if "SAVEPOINT" in label]


def test_a_first_success_writes_no_event(key: str) -> None:
    run(key)
    assert events(key) == []


# The order of the checks


def test_another_body_is_refused_before_anything_is_replayed(key: str) -> None:
    """BUGS E03."""
    run(key)
    with pytest.raises(Mismatch):
        run(key, "another value")
    assert events(key) == [("refused", "mismatch")]
    assert run(key).replayed


def test_another_body_is_a_mismatch_even_after_the_window(key: str) -> None:
    run(key, tombstone=3600)
    age(key, tombstone=False)
    with pytest.raises(Mismatch):
        run(key, "another value", tombstone=3600)


def test_another_body_is_a_mismatch_even_while_the_outcome_is_unknown(key: str) -> None:
    run(key)
    Operation.objects.filter(key=key).update(status=Status.RECONCILING, expires_at=None)
    with pytest.raises(Mismatch):
        run(key, "another value")
    with pytest.raises(OutcomeUnknown):
        run(key)
    assert effects(key) == 1


@pytest.mark.parametrize("status", [Status.FAILED, Status.REQUIRES_ACTION, Status.REVERSED])
def test_every_final_status_is_replayed(key: str, status: str) -> None:
    run(key)
    Operation.objects.filter(key=key).update(status=status)
    replay = run(key)
    assert (replay.replayed, replay.outcome.status) == (True, status)


def test_a_claimed_operation_without_an_executor_is_taken_over(key: str) -> None:
    with suppress(ValueError):
        engine.run(intent(key), callers.fail)
    assert not run(key).replayed
    assert (operation(key).attempt, effects(key)) == (2, 1)


# The window, the tombstone, and the next life


def test_after_the_window_the_tombstone_refuses_and_then_the_key_is_new(key: str) -> None:
    """BUGS L04."""
    first = run(key, tombstone=3600)
    age(key, tombstone=False)
    with pytest.raises(KeyExpired):
        run(key, tombstone=3600)
    assert effects(key) == 1
    age(key)
    again = run(key, tombstone=3600)
    assert not again.replayed
    assert again.outcome.body != first.outcome.body
    assert run(key).outcome == again.outcome
    assert effects(key) == 2
    assert [kind for kind, _ in events(key)] == ["refused", "renewed", "replayed"]


def test_without_a_tombstone_the_key_is_new_after_the_window(key: str) -> None:
    """BUGS L03."""
    run(key)
    age(key)
    assert not run(key).replayed


def test_a_new_life_may_be_another_request(key: str) -> None:
    """BUGS L02."""
    run(key)
    age(key)
    assert not run(key, "another value").replayed
    assert run(key, "another value").replayed
    with pytest.raises(Mismatch):
        run(key)


def test_a_new_life_keeps_counting_attempts_and_nothing_else(key: str) -> None:
    with suppress(ValueError):
        engine.run(intent(key), callers.fail)
    first = run(key)
    age(key)
    with suppress(ValueError):
        engine.run(intent(key), callers.fail)
    row = operation(key)
    assert row.attempt == first.operation.attempt + 1 == 3
    assert (row.status, row.code, row.body, row.finished_at) == (
        Status.PROCESSING,
        None,
        None,
        None,
    )
    assert run(key).operation.derive_key("x") == first.operation.derive_key("x")


def test_the_clock_of_this_machine_decides_nothing(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUGS L04."""
    run(key, retention=60)
    monkeypatch.setattr("time.time", lambda: 4e9)
    monkeypatch.setattr("django.utils.timezone.now", lambda: None)
    assert run(key, retention=60).replayed


# Endings


def test_an_exception_undoes_the_effects_and_is_remembered_without_its_message(key: str) -> None:
    """BUGS U05."""
    with pytest.raises(ValueError, match="must not be stored"):
        engine.run(intent(key), callers.fail)
    assert effects(key) == 0
    row = operation(key)
    assert (row.status, row.attempt) == (Status.PROCESSING, 1)
    assert row.last_error.startswith("builtins.ValueError in tests.callers.fail line ")
    assert events(key) == [("attempt_failed", row.last_error)]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_is_no_exception_also_undoes_the_effects(key: str, error: type) -> None:
    def interrupted(operation: Operation) -> Outcome:
        callers.succeed(operation)
        raise error

    with pytest.raises(error):
        engine.run(intent(key), interrupted)
    assert not connection.in_atomic_block
    assert effects(key) == 0
    assert error.__name__ in operation(key).last_error
    assert not run(key).replayed
    assert effects(key) == 1


def test_an_answer_from_a_transaction_marked_for_rollback_is_an_error(key: str) -> None:
    """HARD_CASES 11: a 201 for something that is not there must be neither sent nor stored."""

    def careless(operation: Operation) -> Outcome:
        outcome = callers.succeed(operation)
        transaction.set_rollback(True)
        return outcome

    with pytest.raises(RolledBack, match="cannot be committed"):
        engine.run(intent(key), careless)
    assert effects(key) == 0
    assert operation(key).status == Status.PROCESSING
    assert not run(key).replayed


def test_an_answer_after_a_swallowed_database_error_is_an_error(key: str) -> None:
    def careless(operation: Operation) -> Outcome:
        outcome = callers.succeed(operation)
        with suppress(IntegrityError), transaction.atomic(savepoint=False):
            Effect.objects.create(pk=int(outcome.body or b""), label="the same primary key")
        return outcome

    with pytest.raises(RolledBack):
        engine.run(intent(key), careless)
    assert effects(key) == 0
    assert not run(key).replayed


@pytest.mark.vendor("postgresql")
def test_a_statement_error_that_was_swallowed_without_django_noticing_is_an_error(key: str) -> None:
    """PostgreSQL refuses everything else in that transaction; others just go on."""

    def careless(operation: Operation) -> Outcome:
        outcome = callers.succeed(operation)
        with suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
        return outcome

    with pytest.raises(DatabaseError):
        engine.run(intent(key), careless)
    assert effects(key) == 0
    assert not run(key).replayed


def test_a_handler_that_fails_while_its_transaction_is_broken_is_rolled_back(key: str) -> None:
    def broken(operation: Operation) -> Outcome:
        callers.succeed(operation)
        with connection.cursor() as cursor:
            cursor.execute("SELECT nothing_of_that_name")
        raise AssertionError("unreachable")

    with pytest.raises(DatabaseError):
        engine.run(intent(key), broken)
    assert (effects(key), run(key).replayed, effects(key)) == (0, False, 1)


@pytest.mark.vendor("postgresql", "sqlite")  # MariaDB has no deferred constraints
def test_a_constraint_that_fails_at_commit_undoes_everything(key: str) -> None:
    """BUGS.md A07: nothing of the stored outcome survives, and the retry runs the handler."""

    def dangling(operation: Operation) -> Outcome:
        outcome = callers.succeed(operation)
        Permission.objects.create(name="x", codename="x", content_type_id=987654)
        return outcome

    with pytest.raises(IntegrityError):
        engine.run(intent(key), dangling)
    assert not connection.in_atomic_block
    assert effects(key) == 0
    row = operation(key)
    assert (row.status, row.body) == (Status.PROCESSING, None)
    assert "IntegrityError" in row.last_error
    assert not run(key).replayed
    assert effects(key) == 1


def test_a_failing_on_commit_hook_changes_nothing_that_was_committed(key: str) -> None:
    """HARD_CASES 12: a 500 for the first, the stored answer for the retry, the hook not again."""
    calls = []

    def hook() -> None:
        calls.append(1)
        raise ZeroDivisionError

    view = effect_view(after=lambda: transaction.on_commit(hook))
    assert post(view, key).status_code == 500
    assert operation(key).status == Status.SUCCEEDED
    response = post(view, key)
    assert (response.status_code, is_replay(response)) == (201, True)
    assert calls == [1]
    assert effects(key) == 1
    assert [kind for kind, _ in events(key)] == ["replayed"]


def test_an_on_commit_hook_that_loses_another_database_does_not_lose_the_answer(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    def hook() -> None:
        raise OperationalError("another database went away")

    with caplog.at_level(logging.WARNING, logger="idempotency"):
        assert post(effect_view(after=lambda: transaction.on_commit(hook)), key).status_code == 201
    assert "confirmed by reading back" in caplog.text
    assert effects(key) == 1


def test_a_body_over_the_limit_is_not_kept_and_the_effect_not_repeated(key: str) -> None:
    run(key, max_response_bytes=0)
    with pytest.raises(ResponseNotRetained):
        run(key)
    assert effects(key) == 1


def test_an_execution_ends_once(key: str) -> None:
    begun = engine.begin(intent(key))
    assert isinstance(begun, engine.Execution)
    begun.complete(callers.succeed(begun.operation))
    begun.abort(ValueError())  # nothing is open any more
    assert run(key).replayed


def test_with_autocommit_off_only_the_caller_commits(key: str) -> None:
    """HARD_CASES 18: as inside an atomic block, and the caller's commit is as durable as ever."""

    def durability() -> object:
        if connection.vendor != "postgresql":
            return None
        with connection.cursor() as cursor:
            cursor.execute("SHOW synchronous_commit")
            return cursor.fetchone()

    usual = durability()
    transaction.set_autocommit(False)
    try:
        begun = engine.begin(intent(key))
        assert isinstance(begun, engine.Execution)
        assert begun.joined
        begun.complete(callers.succeed(begun.operation))
        transaction.rollback()
        assert effects(key) == 0
        assert not Operation.objects.filter(key=key).exists()
        with pytest.raises(ValueError, match="detail"):
            engine.run(intent(key), callers.fail)
        assert not run(key).replayed
        assert run(key).replayed
        assert durability() == usual
        transaction.commit()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert run(key).replayed
    assert effects(key) == 1


# Deterministic failures


REFUSED = Outcome(status=Status.FAILED, code=400, body=b"no")


def fail_for_good(key: str) -> engine.Execution:
    """An execution whose effects are undone, and whose failure is not stored yet."""
    begun = engine.begin(intent(key))
    assert isinstance(begun, engine.Execution)
    callers.succeed(begun.operation)
    begun.abort(ValueError())
    return begun


def test_a_stored_failure_is_replayed_and_leaves_no_effect(key: str) -> None:
    fail_for_good(key).store_failure(REFUSED)
    replay = run(key)
    assert (replay.replayed, replay.outcome.code, replay.outcome.body) == (True, 400, b"no")
    assert effects(key) == 0


def test_a_failure_is_not_stored_over_what_came_meanwhile(key: str) -> None:
    late = fail_for_good(key)
    succeeded = run(key)
    late.store_failure(REFUSED)
    assert run(key).outcome == succeeded.outcome


def test_a_failure_is_not_stored_over_a_later_attempt(key: str) -> None:
    late = fail_for_good(key)
    with suppress(ValueError):
        engine.run(intent(key), callers.fail)
    late.store_failure(REFUSED)
    assert operation(key).status == Status.PROCESSING
    assert not run(key).replayed


@needs_row_locks
def test_a_failure_is_not_stored_while_somebody_else_executes(key: str) -> None:
    late = fail_for_good(key)
    inside, go_on = Signal(), Signal()

    def handler(operation: Operation) -> Outcome:
        inside.set()
        go_on.wait()
        return callers.succeed(operation)

    def other() -> bool:
        return engine.run(intent(key), handler).replayed

    with running(other, inside, go_on) as child:
        late.store_failure(REFUSED)
        late.record(ValueError())
        assert operation(key).status == Status.PROCESSING
        assert operation(key).last_error == ""
    assert child.result() is False
    assert run(key).outcome.code == 201


def test_an_error_is_not_recorded_over_what_came_meanwhile(key: str) -> None:
    late = fail_for_good(key)
    run(key)
    late.record(ValueError())
    assert (operation(key).status, operation(key).last_error) == (Status.SUCCEEDED, "")


# Waiting


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


@needs_row_locks
@pytest.mark.parametrize("wait", [0, 0.3, 5])
def test_waiting_for_the_first_ends(key: str, wait: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    inside, go_on = Signal(), Signal()

    def handler(operation: Operation) -> Outcome:
        inside.set()
        go_on.wait()
        return callers.succeed(operation)

    with running(lambda: engine.run(intent(key), handler).replayed, inside, go_on):
        monkeypatch.setattr(engine, "time", clock)
        monkeypatch.setattr(ownership, "time", clock)
        with pytest.raises(InProgress):
            run(key, wait=wait)
    assert wait <= sum(clock.slept) <= wait + 0.1  # every look at the lock takes some milliseconds
    assert max(clock.slept) <= 0.5
    assert [detail for _, detail in events(key)] == ["in-progress"]  # one, however often it looked


@pytest.mark.vendor("sqlite")
def test_a_locked_sqlite_database_is_unavailable_and_nothing_runs(key: str) -> None:
    """The lock may be anybody's, so it does not say that this operation is in progress."""

    def blocked() -> None:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout = 1")
        with pytest.raises(Unavailable) as refusal:
            run(key)
        assert refusal.value.retry_after

    with transaction.atomic():
        Effect.objects.create(label="some writer")
        in_threads([blocked])
    assert effects(key) == 0
    assert not run(key).replayed


# Identity


def test_two_keys_with_one_id_are_never_mixed_up(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "operation_id", lambda scope, key: UUID(int=7))
    run(key)
    with pytest.raises(IdempotencyError, match="another key"):
        run(callers.new_key())
    assert Effect.objects.count() == 1


def test_the_same_key_of_another_user_is_another_operation(key: str) -> None:
    run(key)
    result = engine.run(intent(key, user=2), callers.succeed)
    assert not result.replayed
    assert effects(key) == 2


@pytest.mark.parametrize(
    "pair", [("Key", "kEY"), ("caf\u00e9", "cafe"), ("a", "a "), ("ss", "\u00df")]
)
def test_keys_are_compared_byte_for_byte(pair: tuple[str, str]) -> None:
    """BUGS.md I08, I09: whatever the collation of the database thinks of them."""
    for each in pair:
        assert not run(each).replayed
        assert run(each).replayed
    assert Effect.objects.count() == 2


# What is noted


def test_events_are_capped_and_never_fail_an_answer(
    key: str, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings.IDEMPOTENCY = {"EVENTS_PER_OPERATION": 3}
    for _ in range(5):
        with suppress(ValueError):
            engine.run(intent(key), callers.fail)
    assert Event.objects.count() == 3
    run(key)
    settings.IDEMPOTENCY = {"EVENTS_PER_OPERATION": 50}

    def full(*args: Any) -> None:
        raise OperationalError("the disk is full")

    monkeypatch.setattr(executions.db, "note", full)
    assert run(key).replayed
    assert "was not written" in caplog.text
    assert Event.objects.count() == 3


def test_an_event_that_fails_inside_a_callers_transaction_leaves_it_usable(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUGS H14."""
    run(key)

    def broken(using: str, *args: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT nothing_of_that_name")

    monkeypatch.setattr(executions.db, "note", broken)
    with transaction.atomic():
        assert run(key).replayed
        Effect.objects.create(label=f"after {key}")
    assert effects(f"after {key}") == 1


def test_a_takeover_after_a_crash_is_noted_and_one_after_a_failure_is_not(key: str) -> None:
    begun = engine.begin(intent(key))
    assert isinstance(begun, engine.Execution)
    callers.forget_connection()
    run(key)
    assert [kind for kind, _ in events(key)] == ["taken_over"]
    assert operation(key).attempt == 2

    other = callers.new_key()
    with suppress(ValueError):
        engine.run(intent(other), callers.fail)
    run(other)
    assert [kind for kind, _ in events(other)] == ["attempt_failed"]
