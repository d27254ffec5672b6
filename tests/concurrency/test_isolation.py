"""Other isolation levels, callers' transactions, operations inside operations."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F

from idempotency import engine
from idempotency.exceptions import ReentrantOperation, Unavailable
from idempotency.models import Operation, Outcome, Status
from tests import callers
from tests.app.models import Effect
from tests.callers import effect_view, effects, is_replay, operation, post, problem
from tests.processes import Child, Signal, in_threads, running

pytestmark = pytest.mark.django_db(transaction=True)

needs_row_locks = pytest.mark.vendor("postgresql", "mysql")


def isolate(level: str) -> None:
    """Set this session's isolation for every transaction that begins from now on."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {level}")
        else:
            cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")


@pytest.fixture(params=["REPEATABLE READ", "SERIALIZABLE"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    connection.close()  # the session forgets


def executing(key: str) -> AbstractContextManager[Child]:
    """A child executes the operation as long as the block lasts."""
    inside, go_on = Signal(), Signal()

    def handler(operation: Operation) -> Outcome:
        inside.set()
        go_on.wait()
        return callers.succeed(operation)

    def execute() -> str:
        engine.run(callers.intent(key), handler)
        return "done"

    return running(execute, inside, go_on)


def elsewhere(function: Any) -> Any:
    """Run it in a thread, so on another connection."""
    return in_threads([function])[0]


# Sessions that are stricter than READ COMMITTED


@needs_row_locks
def test_twins_in_strict_sessions_have_one_effect(level: str) -> None:
    """A serialization failure is retried or refused; it never reaches the client as a fault.


    BUGS H08.
    """
    key = callers.new_key()
    view = effect_view()

    def client() -> list[str]:
        isolate(level)
        answers = []
        while not answers or answers[-1] in {"in-progress", "unavailable"}:
            response = post(view, key)
            answers.append(problem(response) or str(response.status_code))
        return answers

    answers = in_threads([client] * 8)
    assert {each[-1] for each in answers} == {"201"}
    assert effects(key) == 1
    assert Effect.objects.count() == 1


@needs_row_locks
def test_many_keys_in_strict_sessions_all_run(level: str) -> None:
    keys = [callers.new_key() for _ in range(24)]
    view = effect_view()

    def client(mine: list[str]) -> None:
        isolate(level)
        for key in mine:
            while (response := post(view, key)).status_code == 503:
                pass
            assert response.status_code == 201
            assert is_replay(post(view, key))

    in_threads([lambda part=part: client(keys[part::6]) for part in range(6)])
    assert [effects(key) for key in keys] == [1] * len(keys)


@needs_row_locks
def test_a_claim_in_an_old_snapshot_is_answered_properly(level: str) -> None:
    """The caller's snapshot is older than the winner's row: a replay or a 503, never a second run.


    BUGS H07.
    """
    key = callers.new_key()
    isolate(level)

    def run() -> str:
        try:
            result = engine.run(callers.intent(key), callers.succeed)
        except (Unavailable, engine.InProgress):
            return "later"
        return "replay" if result.replayed else "new"

    with transaction.atomic():
        list(Operation.objects.all()[:1])  # the snapshot is taken here
        # MariaDB's SERIALIZABLE has locked what it has read, and the other one must come later.
        winner = elsewhere(run)
        answer = run()
        if answer == "later":  # the caller has to begin again, as after every such failure
            transaction.set_rollback(True)
    assert (winner, answer) in {("new", "replay"), ("new", "later"), ("later", "new")}
    assert run() == "replay"
    assert effects(key) == 1


# Handlers that get into each other's way


@needs_row_locks
def test_a_deadlock_of_two_handlers_is_503_for_one_and_its_retry_runs() -> None:
    """BUGS.md A14, I03: the handler is not run again behind its back, the client is told to retry."""
    rows = [Effect.objects.create(label="row").pk for _ in range(2)]
    both = threading.Barrier(2, timeout=30)

    def update(order: list[int]) -> None:
        Effect.objects.filter(pk=order[0]).update(amount=F("amount") + 1)
        with suppress(threading.BrokenBarrierError):  # nobody to meet in the retry
            both.wait()
        Effect.objects.filter(pk=order[1]).update(amount=F("amount") + 1)

    def client(order: list[int]) -> list[str]:
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SET deadlock_timeout = '50ms'")
        key, answers = callers.new_key(), []
        view = effect_view(before=lambda: update(order))
        while not answers or answers[-1] == "unavailable":
            response = post(view, key)
            answers.append(problem(response) or str(response.status_code))
            both.abort()
        return answers

    answers = in_threads([lambda: client(rows), lambda: client(rows[::-1])])
    # The retry may be so fast that it meets the other one again.
    assert sum(len(each) for each in answers) > 2
    assert all(set(each[:-1]) <= {"unavailable"} and each[-1] == "201" for each in answers)
    assert list(Effect.objects.filter(pk__in=rows).values_list("amount", flat=True)) == [2, 2]


@pytest.mark.vendor("postgresql")
def test_a_serialization_failure_of_two_handlers_is_503_for_one_and_its_retry_runs() -> None:
    """Two handlers that each read what the other writes: PostgreSQL lets only one of them commit."""
    rows = [Effect.objects.create(label="row").pk for _ in range(2)]
    both = threading.Barrier(2, timeout=30)

    def move(number: int) -> None:
        total = sum(Effect.objects.filter(pk__in=rows).values_list("amount", flat=True))
        with suppress(threading.BrokenBarrierError):
            both.wait()
        Effect.objects.filter(pk=rows[number]).update(amount=total + 1)

    def client(number: int) -> list[str]:
        isolate("SERIALIZABLE")
        key, answers = callers.new_key(), []
        view = effect_view(before=lambda: move(number))
        while not answers or answers[-1] == "unavailable":
            response = post(view, key)
            answers.append(problem(response) or str(response.status_code))
            both.abort()
        return answers

    answers = in_threads([lambda: client(0), lambda: client(1)])
    # It may refuse one that would have been right, too: it goes by the pages that were read.
    assert sum(len(each) for each in answers) > 2
    assert all(set(each[:-1]) <= {"unavailable"} and each[-1] == "201" for each in answers)
    amounts = Effect.objects.filter(pk__in=rows).values_list("amount", flat=True)
    assert sorted(amounts) == [1, 2]  # as if one had run after the other


# Inside the caller's own transaction


def test_twice_in_one_transaction_is_one_effect() -> None:
    """BUGS A12."""
    key = callers.new_key()
    with transaction.atomic():
        first = engine.run(callers.intent(key), callers.succeed)
        again = engine.run(callers.intent(key), callers.succeed)
        assert Effect.objects.exists()  # the transaction still works
    assert (first.replayed, again.replayed) == (False, True)
    assert again.outcome.body == first.outcome.body
    assert effects(key) == 1


def test_an_operation_goes_with_the_transaction_it_joined() -> None:
    key = callers.new_key()
    with transaction.atomic():
        engine.run(callers.intent(key), callers.succeed)
        transaction.set_rollback(True)
    assert effects(key) == 0
    assert not Operation.objects.filter(key=key).exists()
    assert not engine.run(callers.intent(key), callers.succeed).replayed


def test_a_failure_inside_a_callers_transaction_undoes_only_its_own_effects() -> None:
    key = callers.new_key()
    with transaction.atomic():
        Effect.objects.create(label=f"before {key}")
        with pytest.raises(ValueError, match="detail"):
            engine.run(callers.intent(key), callers.fail)
        Effect.objects.create(label=f"after {key}")
    assert (effects(f"before {key}"), effects(key), effects(f"after {key}")) == (1, 0, 1)
    assert operation(key).last_error
    assert not engine.run(callers.intent(key), callers.succeed).replayed


@needs_row_locks
def test_a_duplicate_inside_a_callers_transaction_leaves_it_usable() -> None:
    """The refusal is not a database error: what the caller did before and after is committed.


    BUGS H14.
    """
    key = callers.new_key()
    with executing(key) as child, transaction.atomic():
        Effect.objects.create(label=f"before {key}")
        with pytest.raises(engine.InProgress):
            engine.run(callers.intent(key), callers.succeed)
        with pytest.raises(engine.Mismatch):
            engine.run(callers.intent(key, "another value"), callers.succeed)
        Effect.objects.create(label=f"after {key}")
    assert child.result() == "done"
    assert (effects(f"before {key}"), effects(key), effects(f"after {key}")) == (1, 1, 1)


@needs_row_locks
def test_a_joined_duplicate_does_not_wait_however_patient_its_policy() -> None:
    """Waiting would hold the caller's transaction open."""
    key = callers.new_key()
    with executing(key) as child, transaction.atomic(), pytest.raises(engine.InProgress):
        engine.run(callers.intent(key, wait=3600), callers.succeed)
    assert child.result() == "done"


@needs_row_locks
@pytest.mark.parametrize("joining", [False, True])
@pytest.mark.parametrize("policy", [{}, {"on_interrupted": "reconcile"}], ids=["plain", "leased"])
def test_a_duplicate_of_an_operation_in_an_open_transaction_is_told_at_once(
    joining: bool, policy: dict[str, Any]
) -> None:
    """Its row is not committed; an insert of the same one would wait for how that ends."""
    key = callers.new_key()
    inside, go_on = Signal(), Signal()

    def joined() -> str:
        with transaction.atomic():
            engine.run(callers.intent(key, **policy), callers.succeed)
            inside.set()
            go_on.wait()
        return "done"

    def duplicate() -> engine.Result | None:
        with transaction.atomic() if joining else nullcontext():
            before = lock_timeout()
            try:
                return engine.run(callers.intent(key, **policy), callers.succeed)
            except engine.InProgress:
                return None
            finally:  # the caller's transaction is usable, and as it was
                Effect.objects.create(label=f"after {key}")
                assert lock_timeout() == before

    with running(joined, inside, go_on) as child:
        assert duplicate() is None
    assert child.result() == "done"
    found = duplicate()
    assert found is not None
    assert found.replayed
    assert (effects(key), effects(f"after {key}")) == (1, 2)


def lock_timeout() -> Any:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT current_setting('lock_timeout')")
        else:
            cursor.execute("SELECT @@innodb_lock_wait_timeout")
        return cursor.fetchone()


@needs_row_locks
def test_a_claim_in_a_callers_transaction_leaves_its_lock_timeout_alone() -> None:
    with transaction.atomic():
        before = lock_timeout()
        for _ in range(2):  # the first one claims, the second one finds
            engine.run(callers.intent("lock-timeout"), callers.succeed)
            assert lock_timeout() == before


# Operations inside operations


def test_the_same_operation_inside_itself_is_an_error_not_a_deadlock() -> None:
    key = callers.new_key()

    def again(operation: Operation) -> Outcome:
        return engine.run(callers.intent(key), callers.succeed).outcome

    with pytest.raises(ReentrantOperation, match="derive_key"):
        engine.run(callers.intent(key), again)
    assert effects(key) == 0
    assert not engine.run(callers.intent(key), callers.succeed).replayed


def test_an_inner_operation_is_undone_with_the_outer_one() -> None:
    outer, inner = callers.new_key(), callers.new_key()
    fails = True

    def handler(operation: Operation) -> Outcome:
        assert engine.current() is operation
        engine.run(callers.intent(inner), callers.succeed)
        assert engine.current() is operation
        if fails:
            raise ValueError
        return Outcome(status=Status.SUCCEEDED, code=201)

    with pytest.raises(ValueError):  # noqa: PT011
        engine.run(callers.intent(outer), handler)
    assert effects(inner) == 0
    assert not Operation.objects.filter(key=inner).exists()
    fails = False
    assert not engine.run(callers.intent(outer), handler).replayed
    assert engine.run(callers.intent(outer), handler).replayed
    assert engine.run(callers.intent(inner), callers.succeed).replayed
    assert effects(inner) == 1
    assert engine.current() is None


def test_an_inner_operation_with_a_derived_key_runs_once_over_all_attempts() -> None:
    outer = callers.new_key()

    def handler(operation: Operation) -> Outcome:
        inner = callers.intent(operation.derive_key("inner"))
        for _ in range(2):
            result = engine.run(inner, callers.succeed)
        return result.outcome

    first = engine.run(callers.intent(outer), handler)
    assert Effect.objects.count() == 1
    assert engine.run(callers.intent(outer), handler).outcome == first.outcome
    assert Effect.objects.count() == 1
