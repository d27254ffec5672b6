"""`on_interrupted="reconcile"`: an executor that vanishes may have called out, whichever attempt it was."""

import pytest

from idempotency import engine
from idempotency.exceptions import InProgress, OutcomeUnknown
from idempotency.models import Status
from idempotency.testing import age
from tests import callers
from tests.callers import intent, operation

pytestmark = pytest.mark.django_db(transaction=True)


def begin(key: str) -> engine.Execution:
    begun = engine.begin(intent(key, on_interrupted="reconcile"))
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


def test_a_second_attempt_that_vanishes_is_not_run_again_although_the_first_failed_openly():
    key = callers.new_key()
    begin(key).fail(ValueError())
    vanish(begin(key))
    age(operation(key), 3)
    with pytest.raises(OutcomeUnknown):
        begin(key)
    assert operation(key).attempt == 2
