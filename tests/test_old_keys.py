"""RULES 91: a key that says itself that it is older than anything remembered is refused, not executed."""

import time
import uuid
from dataclasses import replace

import pytest
from django.test import override_settings

from idempotency import engine, inbox
from idempotency.decorators import idempotent_function
from idempotency.exceptions import KeyTooOld
from idempotency.models import Operation
from tests import callers
from tests.callers import intent

pytestmark = pytest.mark.django_db(transaction=True)

DAY = 24 * 3600


def uuid7(seconds_ago: float) -> str:
    made = int((time.time() - seconds_ago) * 1000)
    return str(uuid.UUID(int=made << 80 | 7 << 76 | 2 << 62 | uuid.uuid4().int & (1 << 62) - 1))


def test_a_key_from_before_the_window_is_refused_and_leaves_no_row():
    key = uuid7(3 * DAY)
    with pytest.raises(KeyTooOld) as refusal:
        engine.run(intent(key), callers.succeed)
    assert refusal.value.status == 400
    assert not Operation.objects.exists()


def test_an_old_key_whose_outcome_is_still_there_is_replayed():
    key = uuid7(3 * DAY)
    engine.run(intent(key, retention=7 * DAY), callers.succeed)
    assert engine.run(intent(key), callers.succeed).replayed


def test_a_young_key_a_key_within_its_tombstone_and_a_random_key_run():
    for key in (uuid7(60), str(uuid.uuid4()), uuid7(-DAY)):
        assert not engine.run(intent(key), callers.succeed).replayed
    assert not engine.run(intent(uuid7(3 * DAY), tombstone=7 * DAY), callers.succeed).replayed


@override_settings(IDEMPOTENCY={"REFUSE_OLD_KEYS": False})
def test_a_project_whose_clients_queue_for_days_can_turn_it_off():
    assert not engine.run(intent(uuid7(3 * DAY)), callers.succeed).replayed


def test_a_key_made_of_the_domain_has_no_age():
    """An order of last week may be paid today, and a dead letter may be received for the first time."""
    key = uuid7(30 * DAY)
    assert not engine.run(replace(intent(key), from_client=False), callers.succeed).replayed
    with inbox.receive(consumer="billing", message_id=key) as message:
        assert message.is_new
    assert idempotent_function(key=str)(lambda order_id: order_id)(key) == key


def test_over_http_the_header_has_an_age_and_a_key_that_the_policy_makes_has_none():
    key = uuid7(30 * DAY)
    assert callers.problem(callers.post(callers.effect_view(), key)) == "key-too-old"
    of_the_order = callers.effect_view(key=lambda request: key)
    assert callers.post(of_the_order, "any").status_code == 201
