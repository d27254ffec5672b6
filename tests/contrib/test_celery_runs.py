"""`@idempotent_task`: retries, failures, duplicates that meet the first, workers that die, canvas."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from celery import chain, chord, group, shared_task
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from django.db import DatabaseError, OperationalError, connections, transaction
from django.utils import timezone as django_timezone

from idempotency import db, engine, ownership
from idempotency.admin import story
from idempotency.contrib.celery import KEY_HEADER, idempotent_task
from idempotency.contrib.celery_beat import slot_headers
from idempotency.exceptions import (
    InProgress,
    Mismatch,
    OutcomeUnknown,
    StoredFailure,
    Unavailable,
)
from idempotency.executions import Execution
from idempotency.models import Operation, Outcome, Status
from tests.app.models import Effect
from tests.callers import RETRY_SECONDS, effects, intent
from tests.processes import Child, Died, eventually, in_threads
from tests.queues import Queue, effect

pytestmark = pytest.mark.django_db(transaction=True)


class Sold(Exception):
    """A failure that a retry cannot change."""


def only() -> Operation:
    return Operation.objects.get()


# Failures and retries --------------------------------------------------------------------------


def test_after_a_failure_the_next_call_runs_at_once(broker: Queue) -> None:
    """BUGS O03."""
    fail = [True]

    @broker.task
    @idempotent_task(key="order_id")
    def pay(order_id: int) -> int:
        pk = effect("pay")
        if fail.pop():
            raise ValueError("not this time")
        return pk

    pay.delay(1)
    assert broker.work()[0].state == "FAILURE"
    assert effects("pay") == 0
    fail.append(False)
    pay.delay(1)
    assert broker.work()[0].state == "SUCCESS"
    assert effects("pay") == 1


def test_declared_failures_are_final_and_raised_on_every_delivery(broker: Queue) -> None:
    calls = []

    @broker.task
    @idempotent_task(key="order_id", failures=(Sold,))
    def ship(order_id: int) -> None:
        calls.append(order_id)
        effect("ship")
        raise Sold("nothing left")

    ship.delay(1)
    ship.delay(1)
    ended = broker.work()
    assert [(each.state, str(each.value)) for each in ended] == [("FAILURE", "nothing left")] * 2
    assert all(isinstance(each.value, StoredFailure) for each in ended)
    assert calls == [1]
    assert effects("ship") == 0


def test_a_final_failure_reaches_whoever_waits_for_the_result(broker: Queue) -> None:
    @broker.task
    @idempotent_task(failures=(Sold,))
    def ship() -> None:
        raise Sold("nothing left")

    result = ship.delay()
    delivery = broker.sent()
    for _ in range(2):
        broker.deliver(delivery)
        with pytest.raises(StoredFailure, match=r"^nothing left$") as error:
            result.get()
        assert error.value.error_type == f"{__name__}.Sold"


def test_retry_keeps_the_operation_and_counts_its_attempts(broker: Queue) -> None:
    @broker.task(bind=True, max_retries=5)
    @idempotent_task()
    def pay(self: Any) -> int:
        effect("pay", self.request.retries)
        if self.request.retries < 2:
            raise self.retry(countdown=60)
        return int(self.request.retries)

    pay.apply_async(headers={KEY_HEADER: "intent", "custom": "kept"})
    ended = broker.work()
    assert [each.state for each in ended] == ["RETRY", "RETRY", "SUCCESS"]
    assert [row.amount for row in Effect.objects.all()] == [2]
    operation = only()
    assert (operation.key, operation.attempt, operation.status) == ("intent", 3, "succeeded")


@pytest.mark.parametrize("again", ["retry", "replace"])
def test_what_comes_again_with_other_arguments_has_to_say_what_stays_the_same(
    broker: Queue, again: str
) -> None:
    def pages(self: Any, page: int) -> int:
        if page < 2:
            if again == "retry":
                raise self.retry(args=(page + 1,))
            raise self.replace(self.s(page + 1))
        return effect("pages")

    @broker.task(bind=True, name="strict")
    @idempotent_task()
    def strict(self: Any, page: int) -> int:
        return pages(self, page)

    @broker.task(bind=True, name="loose")
    @idempotent_task(fingerprint=lambda *args, **kwargs: None)
    def loose(self: Any, page: int) -> int:
        return pages(self, page)

    strict.delay(0)
    assert isinstance(broker.work()[-1].value, Mismatch)
    loose.delay(0)
    assert broker.work()[-1].state == "SUCCESS"
    assert effects("pages") == 1


def test_automatic_retries_work_as_without_protection(broker: Queue) -> None:
    @broker.task(bind=True, autoretry_for=(Exception,), max_retries=3, retry_backoff=True)
    @idempotent_task(failures=(Sold,))
    def pay(self: Any, hopeless: bool) -> int:
        effect("pay")
        if hopeless:
            raise Sold("gone")
        if self.request.retries < 2:
            raise ConnectionError
        return 7

    pay.delay(False)
    assert [each.state for each in broker.work()] == ["RETRY", "RETRY", "SUCCESS"]
    assert (effects("pay"), only().attempt) == (1, 3)


def test_a_final_failure_is_not_worth_automatic_retries(broker: Queue) -> None:
    @broker.task(autoretry_for=(Exception,), dont_autoretry_for=(StoredFailure,))
    @idempotent_task(failures=(Sold,))
    def pay() -> None:
        raise Sold("gone")

    pay.delay()
    assert [each.state for each in broker.work()] == ["FAILURE"]


@pytest.mark.parametrize("error", [Ignore("mine"), SoftTimeLimitExceeded()])
def test_control_flow_is_never_stored_as_a_failure(broker: Queue, error: Exception) -> None:
    """`failures=(Exception,)` names the base class of how Celery steers tasks, too."""
    raised = [error]

    @broker.task
    @idempotent_task(key=lambda: "k", failures=(Exception,))
    def pay() -> int:
        pk = effect("pay")
        if raised:
            raise raised.pop()
        return pk

    pay.delay()
    assert broker.work()[0].state in {"IGNORED", "FAILURE"}
    assert (effects("pay"), only().status) == (0, Status.PROCESSING)
    pay.delay()
    assert broker.work()[0].state == "SUCCESS"
    assert effects("pay") == 1


@pytest.mark.parametrize(
    "error", [InProgress(), Unavailable(), OperationalError(1213, "Deadlock found")]
)
def test_what_may_pass_is_never_stored_as_a_failure(broker: Queue, error: Exception) -> None:
    """Another operation in progress inside the task, a deadlock: the task comes again by itself."""
    raised = [error]

    @broker.task
    @idempotent_task(failures=(Exception,))
    def pay() -> int:
        pk = effect("pay")
        if raised:
            cause = raised.pop()
            cause.__cause__ = type("Driver", (Exception,), {})()
            raise cause
        return pk

    pay.delay()
    assert [each.state for each in broker.work()] == ["IGNORED", "SUCCESS"]
    assert effects("pay") == 1


def test_a_retry_is_never_stored_as_a_failure(broker: Queue) -> None:
    @broker.task(bind=True)
    @idempotent_task(failures=(Exception,))
    def pay(self: Any) -> int:
        if not self.request.retries:
            raise self.retry(countdown=1)
        return effect("pay")

    pay.delay()
    assert [each.state for each in broker.work()] == ["RETRY", "SUCCESS"]


def test_nothing_is_published_by_an_attempt_that_rolls_back(broker: Queue) -> None:
    """BUGS S14, S22: `delay_on_commit` inside a task waits for the transaction of its effects."""

    @broker.task
    def follow(label: str) -> None:
        effect(label)

    @broker.task(bind=True)
    @idempotent_task()
    def pay(self: Any) -> None:
        follow.delay_on_commit(f"retries {self.request.retries}")
        assert not broker.waiting()
        if not self.request.retries:
            raise self.retry(countdown=1)

    pay.delay()
    broker.work()
    assert [row.label for row in Effect.objects.all()] == ["retries 1"]


def test_sending_writes_nothing_that_the_worker_could_meet(broker: Queue) -> None:
    """BUGS O11: enqueue and start both upsert the row. Here the row is the worker's alone."""

    @broker.task
    @idempotent_task()
    def pay() -> int:
        return effect("pay")

    with transaction.atomic():
        pay.delay_on_commit()
        assert broker.waiting() == []
    assert Operation.objects.count() == 0
    assert broker.work()[0].state == "SUCCESS"


# A duplicate that meets the first --------------------------------------------------------------


@pytest.fixture
def running(broker: Queue) -> Any:
    """A task whose first delivery runs until `finish()`: a lease, so that it works with one writer."""
    inside, go = threading.Event(), threading.Event()
    results: list[Any] = []

    @broker.task(name="long")
    @idempotent_task(countdown=30, stepwise=True)
    def long(*args: Any) -> int:
        inside.set()
        assert go.wait(60)
        return current_step()

    def current_step() -> int:
        operation = engine.current()
        assert operation is not None
        return int(operation.step("effect", effect, "long"))

    def start(delivery: Any) -> None:
        def run() -> None:
            results.append(broker.deliver(delivery))
            connections.close_all()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert inside.wait(60)

        def finish() -> Any:
            go.set()
            thread.join(60)
            return results[0]

        long.finish = finish

    long.start = start
    yield long
    go.set()


def test_it_is_put_back_and_returns_the_result_later(broker: Queue, running: Any) -> None:
    """BUGS N03, RULES 103: not run in parallel, not acknowledged and dropped."""
    running.delay()
    delivery = broker.sent()
    running.start(delivery)
    assert [broker.deliver(delivery).state for _ in range(2)] == ["IGNORED", "IGNORED"]
    again = broker.waiting()
    assert [each.id for each in again] == [delivery.id] * 2
    assert all(each.headers["eta"] and each.headers["retries"] == 0 for each in again)
    first = running.finish()
    assert [broker.deliver(each) for each in again] == [first, first]
    assert (first.state, effects("long")) == ("SUCCESS", 1)


def test_a_slot_that_is_sent_again_while_it_runs_is_put_back(broker: Queue, running: Any) -> None:
    """BUGS N09: another message with another id, for the same slot."""
    headers = slot_headers("nightly", datetime(2026, 1, 1, 2, 30, tzinfo=UTC))
    running.apply_async(headers=headers)
    running.start(broker.sent())
    running.apply_async(headers=headers)
    assert broker.deliver(broker.sent()).state == "IGNORED"
    first = running.finish()
    assert broker.work() == [first]
    assert effects("long") == 1


def test_what_is_put_back_is_the_same_task_in_every_respect(broker: Queue, running: Any) -> None:
    callback = broker.app.signature("callback")
    signature = running.s(1).set(
        headers={KEY_HEADER: "k", "custom": "x"}, expires=9000, ignore_result=True, shadow="shade"
    )
    signature.apply_async(
        link=callback, link_error=callback, retries=2, group_id="g", chord=callback
    )
    delivery = broker.sent()
    running.start(delivery)
    broker.deliver(delivery)
    again = broker.sent()
    changed = {"eta", "origin", "parent_id"}
    assert {k: v for k, v in again.headers.items() if k not in changed} == {
        k: v for k, v in delivery.headers.items() if k not in changed
    }
    assert again.body[0] == delivery.body[0]
    for part in ("callbacks", "errbacks", "chord"):
        assert again.body[2][part], part
    running.finish()


def test_retries_of_the_task_are_not_used_up_by_waiting(broker: Queue, running: Any) -> None:
    running.max_retries = 1
    running.delay()
    delivery = broker.sent()
    running.start(delivery)
    for _ in range(5):
        assert broker.deliver(delivery).state == "IGNORED"
        delivery = broker.sent()
    running.finish()
    assert broker.deliver(delivery).state == "SUCCESS"


@pytest.mark.parametrize("autoretry_for", [(), (Exception,)])
def test_if_nothing_can_be_published_the_broker_keeps_the_delivery(
    broker: Queue, autoretry_for: Any
) -> None:
    @broker.task(autoretry_for=autoretry_for)
    @idempotent_task()
    def pay() -> None:
        raise Unavailable

    pay.delay()
    delivery = broker.sent()
    with mock.patch.object(broker.app.amqp, "send_task_message", side_effect=ConnectionError):
        ended = broker.deliver(delivery)
    assert (ended.state, ended.value.requeue) == ("REJECTED", True)


def test_a_database_that_is_away_puts_the_task_back(broker: Queue) -> None:
    @broker.task
    @idempotent_task()
    def pay() -> int:
        return effect("pay")

    pay.delay()
    delivery = broker.sent()
    with mock.patch.object(engine, "begin", side_effect=Unavailable):
        assert broker.deliver(delivery).state == "IGNORED"
    assert [each.state for each in broker.work()] == ["SUCCESS"]


def test_the_late_result_of_a_run_that_lost_its_lease_changes_nothing(broker: Queue) -> None:
    """BUGS N11."""
    runs: list[str] = []

    @broker.task
    @idempotent_task(key=lambda: "k", stepwise=True)
    def slow() -> int:
        runs.append("run")
        number = len(runs)
        if number == 1:  # stalls beyond its lease, and the broker delivers again
            Operation.objects.update(lease_expires_at=django_timezone.now() - timedelta(hours=1))
            [other] = in_threads([lambda: broker.deliver(delivery)])
            assert other.value == 2
        return number

    slow.delay()
    delivery = broker.sent()
    assert broker.deliver(delivery).state == "IGNORED"  # it must not say "1"
    assert [each.value for each in broker.work()] == [2]


def test_six_copies_at_once_have_one_effect(broker: Queue) -> None:
    """BUGS N05, O05: six copies start within a second; nobody's lookup fails."""

    @broker.task
    @idempotent_task()
    def pay() -> int:
        return effect("pay")

    pay.delay()
    delivery = broker.sent()
    ended = in_threads([lambda: broker.deliver(delivery)] * 6)
    ended += broker.work()
    assert {each.state for each in ended} <= {"SUCCESS", "IGNORED"}
    assert [each.state for each in ended].count("SUCCESS") == 6
    assert effects("pay") == 1


# Workers that die ------------------------------------------------------------------------------


def dies_when_told(broker: Queue, **options: Any) -> Any:
    parent = os.getpid()

    @broker.task(name="dies")
    @idempotent_task(key=lambda death: "k", fingerprint=lambda death: None, **options)
    def dies(death: bool) -> int:
        pk = effect("dies")
        if death:
            assert os.getpid() != parent, "run once more than it may"
            os.kill(os.getpid(), signal.SIGKILL)
        return pk

    return dies


def killed(broker: Queue, delivery: Any) -> None:
    with pytest.raises(Died) as end:
        Child(lambda: broker.deliver(delivery).state).result()
    assert end.value.signal == signal.SIGKILL


def after_death(broker: Queue, delivery: Any) -> Any:
    """The next delivery that is not put back: the server needs a moment to see a client is gone."""
    deadline = django_timezone.now() + timedelta(seconds=RETRY_SECONDS)
    while (ended := broker.deliver(delivery)).state == "IGNORED":
        assert django_timezone.now() < deadline
        broker.waiting()
    return ended


def test_after_a_kill_the_next_call_runs_without_any_clean_up(broker: Queue) -> None:
    """BUGS N10, O01, O12, C05: no lock stays behind that somebody would have to release."""
    dies = dies_when_told(broker)
    dies.delay(True)
    killed(broker, broker.sent())
    assert effects("dies") == 0
    dies.delay(False)
    assert after_death(broker, broker.sent()).state == "SUCCESS"
    assert effects("dies") == 1


@pytest.mark.vendor("postgresql", "mysql")
def test_a_task_that_nobody_delivers_again_is_shown_as_interrupted(broker: Queue) -> None:
    """BUGS N10: without `acks_late` it is lost, and the admin says so. SQLite cannot tell."""
    dies = dies_when_told(broker)
    dies.delay(True)
    killed(broker, broker.sent())
    eventually(lambda: story.state(only()) == "interrupted", "the server sees the process is gone")


def test_a_task_that_kills_its_worker_again_and_again_ends_dead(broker: Queue) -> None:
    """RULES 104."""
    dies = dies_when_told(broker, give_up_after=3)
    dies.delay(True)
    delivery = broker.sent()
    for _ in range(3):
        assert only_or_none() in (None, Status.PROCESSING)
        killed(broker, delivery)
    ended = after_death(broker, delivery)
    assert ended.state == "FAILURE"
    assert isinstance(ended.value, StoredFailure)
    assert ended.value.error_type == "idempotency.contrib.task_calls.ExecutorsLost"
    assert "3 executors vanished" in str(ended.value)
    assert (only().status, effects("dies")) == (Status.FAILED, 0)
    assert broker.deliver(delivery).state == "FAILURE"  # and stays dead


def test_deaths_count_in_a_row(broker: Queue) -> None:
    parent = os.getpid()

    @broker.task(name="moody")
    @idempotent_task(key=lambda how: "k", fingerprint=lambda how: None, give_up_after=3)
    def moody(how: str) -> int:
        pk = effect("moody")
        if how == "die":
            assert os.getpid() != parent
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "fail":
            raise ValueError
        return pk

    def send(how: str) -> Any:
        moody.delay(how)
        return broker.sent()

    for last, state in (("fail", "FAILURE"), ("end", "SUCCESS")):
        for _ in range(2):
            killed(broker, send("die"))
        assert after_death(broker, send(last)).state == state
    assert effects("moody") == 1


def test_a_stepwise_task_that_kills_its_workers_waits_for_people(broker: Queue) -> None:
    """Its steps may have had effects: neither failed nor succeeded can be claimed."""
    dies = dies_when_told(broker, give_up_after=2, stepwise=True)
    dies.delay(True)
    delivery = broker.sent()
    for _ in range(2):
        killed(broker, delivery)
        Operation.objects.update(lease_expires_at=django_timezone.now() - timedelta(hours=1))
    ended = broker.deliver(delivery)
    assert (ended.state, type(ended.value)) == ("FAILURE", OutcomeUnknown)
    assert only().status == Status.RECONCILING


def only_or_none() -> str | None:
    return Operation.objects.values_list("status", flat=True).first()


def test_failures_that_are_reported_do_not_count_as_deaths(broker: Queue) -> None:
    calls: list[int] = []

    @broker.task
    @idempotent_task(key=lambda: "k", give_up_after=1)
    def pay() -> int:
        calls.append(1)
        if len(calls) < 4:
            raise ValueError
        return effect("pay")

    for _ in range(4):
        pay.delay()
    assert [each.state for each in broker.work()] == ["FAILURE"] * 3 + ["SUCCESS"]


@pytest.mark.vendor("postgresql", "mysql")
@pytest.mark.parametrize("error", [ValueError, Sold])
def test_a_copy_cannot_come_before_a_failure_is_recorded(
    broker: Queue, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the failed attempt for a death; some copies of a failing task, and it is given up."""
    calls: list[int] = []

    @broker.task
    @idempotent_task(failures=(Sold,))
    def pay() -> None:
        calls.append(effect("pay"))
        raise error

    pay.delay()
    delivery = broker.sent()
    relock = Execution._relock
    copies: list[Any] = []

    def copy_first(self: Execution, **options: bool) -> bool:
        if not copies:
            copies.append(None)
            copies.extend(in_threads([lambda: broker.deliver(delivery)]))
        return relock(self, **options)

    monkeypatch.setattr(Execution, "_relock", copy_first)
    assert broker.deliver(delivery).state == "FAILURE"
    assert {copy.state for copy in copies[1:]} <= {"IGNORED"}
    assert (len(calls), effects("pay")) == (1, 0)
    assert (only().interruptions, only().last_error != "") == (0, error is ValueError)


def test_an_attempt_that_is_about_to_start_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its claim and its lock the row looks as if its executor had vanished."""
    dead = Outcome(status=Status.FAILED, body=b"null")
    counted = replace(intent("k"), give_up=(5, dead))
    first = engine.begin(counted)
    assert isinstance(first, Execution)
    first.abort(SystemExit())
    monkeypatch.setattr(ownership.time, "sleep", lambda seconds: first.record(ValueError()))
    second = engine.begin(counted)
    assert isinstance(second, Execution)
    second.complete(Outcome(status=Status.SUCCEEDED, body=b"null"))
    assert only().interruptions == 0


@pytest.mark.vendor("postgresql", "mysql")
def test_copies_that_look_do_not_keep_a_started_attempt_from_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is on record as started: if it went away now, the next one would take it for a death."""
    counted = replace(intent("k"), give_up=(5, Outcome(status=Status.FAILED, body=b"null")))
    begin, real_lock = engine.begin, db.lock
    failed = begin(counted)
    assert isinstance(failed, Execution)
    failed.fail(ValueError())
    looking, looked = threading.Event(), threading.Event()
    locks: list[bool] = []

    def look() -> None:
        with transaction.atomic():
            assert real_lock("default", failed.operation.pk)
            looking.set()
            looked.wait(60)
        connections.close_all()

    def lock(*args: Any, wait: bool = False) -> Any:
        locks.append(wait)
        if len(locks) == 2:  # after the record of the takeover
            copy.start()
            assert looking.wait(60)
        if wait:
            looked.set()
        return real_lock(*args, wait=wait)

    copy = threading.Thread(target=look)
    with monkeypatch.context() as patch:
        patch.setattr(db, "lock", lock)
        try:
            started = begin(counted)
        finally:
            looked.set()
            copy.join(60)
    assert isinstance(started, Execution)
    started.complete(Outcome(status=Status.SUCCEEDED, body=b"null"))
    assert (only().status, only().attempt) == (Status.SUCCEEDED, 2)


@pytest.mark.parametrize("how", ["swallowed", "marked", "closed"])
def test_a_task_whose_transaction_is_lost_has_no_effect(broker: Queue, how: str) -> None:
    lose = [True]

    @broker.task
    @idempotent_task()
    def pay() -> int:
        pk = effect("pay")
        if lose.pop():
            if how == "swallowed":
                with suppress(DatabaseError):
                    Effect.objects.create(pk=pk, label="the same key")
            elif how == "marked":
                transaction.set_rollback(True)
            else:
                connections["default"].close()
        return pk

    pay.delay()
    delivery = broker.sent()
    assert broker.deliver(delivery).state != "SUCCESS"
    assert (effects("pay"), only().status) == (0, Status.PROCESSING)
    lose.append(False)
    broker.waiting()
    assert broker.deliver(delivery).state == "SUCCESS"
    assert effects("pay") == 1


def test_an_interrupted_task_that_must_not_rerun_waits_for_a_decision(broker: Queue) -> None:
    dies = dies_when_told(broker, on_interrupted="reconcile")
    dies.delay(True)
    delivery = broker.sent()
    killed(broker, delivery)
    Operation.objects.update(created_at=django_timezone.now() - timedelta(minutes=1))
    ended = after_death(broker, delivery)
    assert (ended.state, only().status) == ("FAILURE", Status.RECONCILING)
    assert effects("dies") == 0


# Eager mode, canvas, results -------------------------------------------------------------------


def test_eager_tasks_behave_alike(broker: Queue) -> None:
    broker.app.conf.task_always_eager = True

    @broker.task(bind=True, max_retries=3)
    @idempotent_task(key="order_id")
    def pay(self: Any, order_id: int) -> int:
        effect("pay")
        if self.request.retries < 2:
            raise self.retry(countdown=60)
        return order_id

    for propagates in (False, True):
        broker.app.conf.task_eager_propagates = propagates
        assert pay.delay(1).get() == 1
        assert pay.delay(2).get() == 2
    assert effects("pay") == 2
    assert list(Operation.objects.values_list("attempt", flat=True)) == [3, 3]


def test_an_eager_duplicate_has_no_broker_to_be_put_back_into(broker: Queue) -> None:
    @broker.task
    @idempotent_task(key=lambda: "k", stepwise=True)
    def pay() -> int:
        return 1

    pay.apply()
    Operation.objects.update(
        status=Status.PROCESSING,
        lease_expires_at=django_timezone.now() + timedelta(hours=1),
        finished_at=None,
        expires_at=None,
        tombstone_until=None,
    )
    with pytest.raises(InProgress):
        pay.apply(throw=True)


def test_eager_tasks_join_the_callers_transaction(broker: Queue) -> None:
    broker.app.conf.task_always_eager = True

    @broker.task
    @idempotent_task(key=lambda: "k")
    def pay() -> int:
        return effect("pay")

    with transaction.atomic():
        pay.delay()
        transaction.set_rollback(True)
    assert Operation.objects.count() == effects("pay") == 0
    pay.delay()
    assert effects("pay") == 1


def test_results_are_kept_for_duplicates_even_if_celery_ignores_them(broker: Queue) -> None:
    """RULES 101."""

    @broker.task(ignore_result=True)
    @idempotent_task()
    def pay() -> int:
        return effect("pay")

    pay.delay()
    delivery = broker.sent()
    assert broker.deliver(delivery).value == broker.deliver(delivery).value
    assert broker.app.AsyncResult(delivery.id).result is None


def test_a_duplicate_in_a_chain_hands_the_same_result_to_the_same_next_task(broker: Queue) -> None:
    @broker.task
    @idempotent_task()
    def first() -> int:
        return effect("first")

    @broker.task
    @idempotent_task()
    def second(pk: int) -> int:
        return effect("second", pk)

    chain(first.s(), second.s())()
    delivery = broker.sent()
    broker.deliver(delivery)
    broker.deliver(delivery)  # the worker died before it could acknowledge
    assert [each.state for each in broker.work()] == ["SUCCESS", "SUCCESS"]
    assert (effects("first"), effects("second")) == (1, 1)


def test_groups_and_eager_chords_pass_results_on(broker: Queue) -> None:
    broker.app.conf.task_always_eager = True

    @broker.task
    @idempotent_task(key="number")
    def square(number: int) -> int:
        effect("square")
        return number * number

    @broker.task
    @idempotent_task(key=lambda squares: "total")
    def total(squares: list[int]) -> int:
        effect("total")
        return sum(squares)

    for _ in range(2):
        assert group(square.s(n) for n in (1, 2, 3))().get() == [1, 4, 9]
        assert chord([square.s(n) for n in (1, 2, 3)])(total.s()).get() == 14
    assert (effects("square"), effects("total")) == (3, 1)


def test_shared_tasks_are_protected_too(broker: Queue) -> None:
    @shared_task(name=f"{broker.name}.shared")
    @idempotent_task(key="order_id")
    def ship(order_id: int) -> int:
        return effect("ship")

    for _ in range(2):
        ship.apply((1,), throw=True)
    assert effects("ship") == 1
