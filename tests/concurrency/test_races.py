"""Requests at the same moment, from real processes and threads."""

import threading
from collections import Counter
from functools import partial
from itertools import chain
from typing import Any

import pytest
from django.db import connections
from django.http import HttpResponse

from idempotency import engine
from tests import callers
from tests.callers import effect_view, effects, events, is_replay, operation, post, problem, retry
from tests.processes import Signal, in_processes, in_threads, running

pytestmark = pytest.mark.django_db(transaction=True)

#: SQLite has one writer: while a handler runs, every other claim waits for the whole database.
needs_row_locks = pytest.mark.vendor("postgresql", "mysql")


def describe(response: HttpResponse) -> str:
    return f"{response.status_code} {problem(response) or ('replay' if is_replay(response) else 'new')}"


def assert_one_effect(answers: list[str], key: str) -> None:
    assert set(answers) <= {"201 new", "201 replay", "409 in-progress"}, Counter(answers)
    assert answers.count("201 new") == 1, Counter(answers)
    assert effects(key) == 1


@pytest.mark.parametrize("run_all", [in_processes, in_threads])
def test_twenty_requests_with_one_key_have_one_effect(run_all: Any) -> None:
    """BUGS A09, I12."""
    key = callers.new_key()
    view = effect_view()
    answers = run_all([lambda: describe(post(view, key))] * 20)
    assert_one_effect(answers, key)


def test_twenty_calls_of_the_engine_have_one_effect() -> None:
    key = callers.new_key()

    def call() -> str:
        try:
            result = engine.run(callers.intent(key), callers.succeed)
        except engine.InProgress:
            return "409 in-progress"
        return "201 replay" if result.replayed else "201 new"

    assert_one_effect(in_threads([call] * 20), key)


def test_a_storm_of_240_requests_over_20_keys_has_20_effects() -> None:
    """BUGS A15."""
    keys = [callers.new_key() for _ in range(20)]
    view = effect_view()

    def client(number: int) -> list[tuple[str, bytes]]:
        answers = []
        for step in range(3):
            key = keys[(number + step) % len(keys)]
            response = retry(lambda key=key: post(view, key))
            assert response.status_code == 201
            answers.append((key, response.content))
        return answers

    answers = list(chain(*in_threads([partial(client, number) for number in range(80)])))
    assert len(answers) == 240
    assert len(set(answers)) == 20  # one answer per key, whoever got it
    assert [effects(key) for key in keys] == [1] * 20
    assert all(is_replay(post(view, key)) for key in keys)  # nothing is left locked


@pytest.mark.vendor("sqlite")
def test_sqlite_without_immediate_transactions_has_one_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Django's default: a transaction that read before it wrote would be refused the lock.


    BUGS I05.
    """
    options = connections.settings["default"]["OPTIONS"]
    monkeypatch.setitem(options, "transaction_mode", "DEFERRED")
    key = callers.new_key()
    view = effect_view()
    answers = in_threads([lambda: describe(post(view, key))] * 20)
    assert_one_effect(answers, key)


@needs_row_locks
def test_ten_keys_run_at_the_same_time() -> None:
    """Every handler waits until all ten run: with anything serialised they would wait for ever.


    BUGS A11.
    """
    together = threading.Barrier(10, timeout=30)
    view = effect_view(before=together.wait)
    answers = in_threads([lambda: describe(post(view, callers.new_key()))] * 10)
    assert answers == ["201 new"] * 10


@needs_row_locks
def test_a_slow_operation_does_not_hold_up_another_key() -> None:
    slow, other = callers.new_key(), callers.new_key()
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(30)

    def first() -> str:
        return describe(post(effect_view(after=wait), slow))

    def second() -> str:
        assert inside.wait(30)
        try:
            return describe(post(effect_view(), other))
        finally:
            go_on.set()

    assert in_threads([first, second]) == ["201 new", "201 new"]


def test_two_tenants_with_the_same_key_are_two_operations() -> None:
    key = callers.new_key()
    view = effect_view()
    answers = in_threads([lambda user=user: post(view, key, user=user) for user in (1, 2, 1, 2)])
    final = [retry(lambda user=user: post(view, key, user=user)) for user in (1, 2)]
    assert effects(key) == 2
    assert final[0].content != final[1].content
    for response, expected in zip(answers, final * 2, strict=True):
        assert response.status_code == 409 or response.content == expected.content


@needs_row_locks
def test_duplicates_while_the_first_runs_are_told_at_once() -> None:
    """The same request: 409 in progress. Another body: 422, not a 409 that invites to retry.


    BUGS C02.
    """
    key = callers.new_key()
    inside, go_on = Signal(), Signal()

    def wait() -> None:
        inside.set()
        go_on.wait()

    with running(lambda: describe(post(effect_view(after=wait), key)), inside, go_on) as child:
        duplicate = post(effect_view(), key)
        other = post(effect_view(), key, body="another body")
    assert child.result() == "201 new"
    assert describe(duplicate) == "409 in-progress"
    assert duplicate["Retry-After"]
    assert describe(other) == "422 mismatch"
    assert "Retry-After" not in other
    assert effects(key) == 1
    assert events(key) == [("refused", "in-progress"), ("refused", "mismatch")]


@needs_row_locks
def test_a_duplicate_during_the_commit_of_the_first_is_told_at_once() -> None:
    """The outcome is written, not committed: nobody waits for it, nobody sees it."""
    key = callers.new_key()
    inside, go_on = Signal(), Signal()

    def first() -> str:
        begun = engine.begin(callers.intent(key))
        assert isinstance(begun, engine.Execution)
        outcome = callers.succeed(begun.operation)
        begun._write(outcome)  # as complete() does, but the commit keeps us waiting
        inside.set()
        go_on.wait()
        begun._leave(None)
        return "done"

    with running(first, inside, go_on) as child:
        with pytest.raises(engine.InProgress):
            engine.begin(callers.intent(key))
        with pytest.raises(engine.Mismatch):
            engine.begin(callers.intent(key, "another value"))
    assert child.result() == "done"
    assert engine.run(callers.intent(key), callers.succeed).replayed
    assert effects(key) == 1


@needs_row_locks
def test_a_duplicate_runs_as_soon_as_the_first_has_failed() -> None:
    key = callers.new_key()
    inside, go_on = Signal(), Signal()

    def fail() -> None:
        inside.set()
        go_on.wait()
        raise ValueError

    def first() -> int:
        return post(effect_view(after=fail), key).status_code

    with running(first, inside, go_on) as child:
        assert describe(post(effect_view(), key)) == "409 in-progress"
        assert effects(key) == 0
    assert child.result() == 500
    assert describe(post(effect_view(), key)) == "201 new"
    assert effects(key) == 1


def test_duplicates_while_attempts_fail_end_with_one_effect() -> None:
    """The first three executions fail, whoever gets them; everybody retries what is retryable.


    BUGS H09.
    """
    key = callers.new_key()
    failures = iter(range(3))
    turn = threading.Lock()

    def fail_three_times() -> None:
        with turn:
            if next(failures, None) is not None:
                raise ValueError

    view = effect_view(after=fail_three_times)

    def client() -> list[str]:
        answers = []
        while not answers or answers[-1] in {"500 new", "409 in-progress", "503 unavailable"}:
            answers.append(describe(post(view, key)))
        return answers

    answers = in_threads([client] * 8)
    counted = Counter(chain(*answers))
    assert counted["500 new"] == 3
    assert counted["201 new"] == 1
    assert counted["201 replay"] == 7
    assert effects(key) == 1
    # Who fails cannot note it once the next one runs, and a twin that is faster than the claimant
    # counts as its successor.
    assert 1 <= operation(key).attempt <= 5


@needs_row_locks
def test_a_duplicate_that_waits_gets_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """BUGS A13: The first ends while the duplicate sleeps, which it does without a transaction."""
    key = callers.new_key()
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(30)

    first = threading.Thread(
        target=in_threads, args=([lambda: post(effect_view(after=wait), key)],)
    )
    first.start()
    assert inside.wait(30)
    polls = []
    real_sleep = engine.time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is first or seconds < 0.04:
            return real_sleep(seconds)
        polls.append(engine.connections["default"].in_atomic_block)
        go_on.set()
        first.join(30)
        return None

    monkeypatch.setattr(engine.time, "sleep", sleep)
    response = post(effect_view(wait=20), key)
    assert describe(response) == "201 replay"
    assert polls == [False]
    assert effects(key) == 1


def test_the_same_request_again_and_again_while_it_is_replayed() -> None:
    """Replays lock nothing that other replays would have to wait for, and never go wrong."""
    key = callers.new_key()
    view = effect_view()
    first = post(view, key)
    answers = in_threads([lambda: [post(view, key) for _ in range(5)]] * 10)
    for response in chain(*answers):
        assert (describe(response), response.content) == ("201 replay", first.content)
    assert effects(key) == 1
