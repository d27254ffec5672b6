"""`on_interrupted="reconcile"`: an executor that vanishes may have called out, whichever attempt it was."""

from contextlib import contextmanager

import pytest
from django.db import transaction

from idempotency import db, engine, ownership
from idempotency.exceptions import InProgress, OutcomeUnknown
from idempotency.models import EventKind, Status, describe_error
from idempotency.testing import age
from tests import callers
from tests.callers import intent, operation
from tests.processes import Signal, running

pytestmark = pytest.mark.django_db(transaction=True)


def begin(key: str, on_interrupted: str = "reconcile") -> engine.Execution:
    begun = engine.begin(intent(key, on_interrupted=on_interrupted))
    assert isinstance(begun, engine.Execution)
    return begun


def vanish(begun: engine.Execution) -> None:
    """What a killed process leaves behind: its transaction is rolled back, nothing is recorded."""
    begun.abort(SystemExit())


def test_a_first_attempt_that_vanishes_is_not_run_again():
    key = callers.new_key()
    vanish(begin(key))
    with pytest.raises(InProgress):  # it might be between its claim and its lock
        begin(key)
    age(operation(key), 3)
    with pytest.raises(OutcomeUnknown):
        begin(key)
    assert operation(key).status == Status.RECONCILING


def test_an_attempt_that_said_how_it_failed_is_followed_by_another_at_once():
    key = callers.new_key()
    begin(key).fail(ValueError())
    begin(key).complete(callers.succeed(operation(key)))
    assert operation(key).status == Status.SUCCEEDED


@pytest.mark.parametrize("policy", ["rerun", "reconcile"])
def test_an_attempt_is_given_a_moment_to_say_how_it_failed(monkeypatch, policy):
    """Between its rollback and its record the row looks as if its executor had vanished."""
    key = callers.new_key()
    failing = begin(key, policy)
    vanish(failing)
    age(operation(key), 3)  # longer than the lease of a beginning
    monkeypatch.setattr(ownership.time, "sleep", lambda seconds: failing.record(ValueError()))
    begin(key, policy).complete(callers.succeed(operation(key)))
    assert operation(key).status == Status.SUCCEEDED
    assert (EventKind.TAKEN_OVER, "") not in callers.events(key)


@pytest.mark.parametrize("policy", ["rerun", "reconcile"])
def test_an_attempt_is_given_a_moment_to_say_that_nobody_knows(monkeypatch, policy):
    """A duplicate in that moment would run what may have happened."""
    key = callers.new_key()
    doubting = begin(key, policy)
    vanish(doubting)
    age(operation(key), 3)
    doubt = OutcomeUnknown(operation_id=operation(key).pk)
    monkeypatch.setattr(ownership.time, "sleep", lambda seconds: doubting.record(doubt))
    with pytest.raises(OutcomeUnknown):
        begin(key, policy)


@contextmanager
def locked_until_somebody_waits(monkeypatch, key):
    """A duplicate inside a caller's transaction keeps the lock that it has tried."""
    inside, go_on = Signal(), Signal()

    def hold():
        with transaction.atomic():
            assert real_lock("default", operation(key).pk)
            inside.set()
            go_on.wait()

    def lock(*args, wait=False):
        if wait:
            go_on.set()
        return real_lock(*args, wait=wait)

    real_lock = db.lock
    with running(hold, inside, go_on) as child, monkeypatch.context() as patch:
        patch.setattr(db, "lock", lock)
        yield
    child.result()


@pytest.mark.vendor("postgresql", "mysql")
@pytest.mark.parametrize("policy", ["rerun", "reconcile"])
def test_somebody_who_happens_to_hold_the_lock_does_not_silence_an_attempt(monkeypatch, policy):
    key = callers.new_key()
    failing = begin(key, policy)
    vanish(failing)
    error = (
        ValueError() if policy == "reconcile" else OutcomeUnknown(operation_id=operation(key).pk)
    )
    with locked_until_somebody_waits(monkeypatch, key):
        failing.record(error)
    assert operation(key).last_error == describe_error(error)


@pytest.mark.vendor("postgresql", "mysql")
def test_somebody_who_happens_to_hold_the_lock_does_not_keep_a_claim_from_running(monkeypatch):
    """Else nobody would ever have run it, and it would lie there as if its executor had vanished."""
    key = callers.new_key()

    def claim(*args):
        claimed = real_claim(*args)
        if not stack:
            stack.append(locked_until_somebody_waits(monkeypatch, key))
            stack[0].__enter__()
        return claimed

    stack, real_claim = [], db.claim
    monkeypatch.setattr(db, "claim", claim)
    try:
        begin(key).complete(callers.succeed(operation(key)))
    finally:
        stack[0].__exit__(None, None, None)
    assert operation(key).status == Status.SUCCEEDED


def test_a_second_attempt_that_vanishes_is_not_run_again_although_the_first_failed_openly():
    key = callers.new_key()
    begin(key).fail(ValueError())
    vanish(begin(key))
    age(operation(key), 3)
    with pytest.raises(OutcomeUnknown):
        begin(key)
    assert operation(key).attempt == 2
