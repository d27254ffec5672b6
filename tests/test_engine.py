"""What the engine guarantees one call at a time; races and crashes have their own directories."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest
from django.db import OperationalError, connection, transaction

from idempotency import engine, executions, keys, ownership
from idempotency.exceptions import (
    IdempotencyError,
    InProgress,
    KeyExpired,
    Mismatch,
    OutcomeUnknown,
    Unavailable,
)
from idempotency.models import Event, Operation, Outcome, Status
from tests import callers
from tests.app.models import Effect
from tests.callers import age, effect_view, effects, events, intent, operation, post
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
