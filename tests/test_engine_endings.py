"""How an execution ends: with an outcome, a failure that is kept, or one that is not."""

import logging
from contextlib import suppress
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import DatabaseError, IntegrityError, OperationalError, connection, transaction

from idempotency import engine
from idempotency.exceptions import (
    ResponseNotRetained,
    RolledBack,
)
from idempotency.models import Operation, Outcome, Status
from tests import callers
from tests.app.models import Effect
from tests.callers import effect_view, effects, events, intent, is_replay, operation, post
from tests.processes import Signal, running

pytestmark = pytest.mark.django_db(transaction=True)

needs_row_locks = pytest.mark.vendor("postgresql", "mysql")


@pytest.fixture
def key() -> str:
    return callers.new_key()


def run(key: str, value: Any = "value", **policy: Any) -> engine.Result:
    return engine.run(intent(key, value, **policy), callers.succeed)


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
