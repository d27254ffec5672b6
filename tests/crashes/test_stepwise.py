"""SIGKILL before, during and after every step and call of a stepwise operation, then life goes on.

Whatever the provider did with the call: it charges at most once, no order is lost, nothing stays
reserved for nothing, and every operation ends in a final state or in front of a person.
"""

from functools import partial
from pathlib import Path

import pytest

from idempotency.completion import complete_abandoned
from idempotency.models import EventKind, Operation, Status
from idempotency.reconciliation import reconcile_due
from tests import callers, shops
from tests.crashes.points import Points, crashes, passed_by
from tests.processes import Child, Died

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]


def come_back(key: str, style: str, *, sold_out: bool = False) -> None:
    """Maintenance runs; a client whose very claim was lost has nothing but its own retry."""
    shops.life_goes_on()
    if not Operation.objects.filter(key=key).exists():
        shops.tried(key, style, sold_out)
        shops.life_goes_on()


@pytest.mark.parametrize("behaviour", ["ok", "timeout", "charged", "decline"])
@pytest.mark.parametrize(("style", "honours_keys"), [("repeatable", True), ("asked", False)])
def test_a_purchase_may_die_anywhere(
    tmp_path: Path, behaviour: str, style: str, honours_keys: bool
) -> None:
    shops.provider.open(tmp_path, behaviour, honours_keys=honours_keys)
    labels = set()
    for each in crashes(callers.new_key, lambda key: shops.tried(key, style), between=True):
        come_back(each.key, style)
        shops.assert_consistent(each.key, each)
        expected = Status.REVERSED if behaviour == "decline" else Status.SUCCEEDED
        assert shops.find(each.key).status == expected, str(each)
        labels.add(each.label)
    assert labels >= {  # the enumeration itself must not go blind
        "before the charge",
        "before INSERT idempotency_step",
        "before INSERT testapp_effect",
        "before UPDATE idempotency_operation",
        "before COMMIT",
        "before the response",
    }
    if behaviour in ("ok", "charged"):
        assert "before the answer" in labels


def test_a_takeover_may_die_anywhere_and_so_may_the_next(tmp_path: Path) -> None:
    """One purchase, killed at one point after the other, each time by the attempt that goes on."""
    shops.provider.open(tmp_path)
    key = callers.new_key()

    def attempt(number: int) -> None:
        with Points(at=number).watched():
            shops.tried(key, "asked")

    deaths = 0
    while True:
        try:
            Child(partial(attempt, deaths + 1)).result()
            break
        except Died:
            deaths += 1
            shops.age()
    assert deaths > 20
    assert shops.find(key).attempt > 1
    shops.assert_consistent(key)


def test_a_compensation_may_die_anywhere(tmp_path: Path) -> None:
    """Sold out after the charge: refunded once, put back once, whoever does the rest."""
    style = "asked"
    shops.provider.open(tmp_path)
    labels = set()
    for each in crashes(callers.new_key, lambda key: shops.tried(key, style, True), between=True):
        come_back(each.key, style, sold_out=True)
        shops.assert_consistent(each.key, each)
        assert shops.find(each.key).status == Status.REVERSED, str(each)
        assert shops.provider.refunds(shops.downstream(each.key)) == 1, str(each)
        labels.add(each.label)
    assert {"before the refund", "before the thanks"} <= labels


def test_a_reversal_may_die_anywhere(tmp_path: Path) -> None:
    shops.provider.open(tmp_path)

    def bought() -> str:
        key = callers.new_key()
        shops.pay(key, "asked")
        return key

    labels = set()
    for each in crashes(bought, lambda key: shops.find(key).reverse(reason="refund"), between=True):
        shops.life_goes_on()
        if shops.find(each.key).status == Status.SUCCEEDED:  # not even asked for: ask again
            shops.find(each.key).reverse(reason="refund")
        assert shops.find(each.key).status == Status.REVERSED, str(each)
        assert shops.provider.refunds(shops.downstream(each.key)) == 1, str(each)
        assert shops.stock(each.key) == 0, str(each)
        shops.find(each.key).reverse(reason="again")
        assert shops.provider.refunds(shops.downstream(each.key)) == 1, str(each)
        labels.add(each.label)
    assert {"before the refund", "before the thanks"} <= labels


@pytest.mark.parametrize("behaviour", ["timeout", "charged"])
def test_reconciling_may_die_anywhere(tmp_path: Path, behaviour: str) -> None:
    shops.provider.open(tmp_path, behaviour, honours_keys=False)

    def in_doubt() -> str:
        key = callers.new_key()
        assert shops.tried(key, "asked") == "OutcomeUnknown"
        shops.age(key=key)
        return key

    def maintain(key: str) -> None:
        reconcile_due()
        complete_abandoned()

    for each in crashes(in_doubt, maintain, between=True):
        shops.life_goes_on()
        shops.assert_consistent(each.key, each)
        assert shops.find(each.key).status == Status.SUCCEEDED, str(each)


def test_what_nobody_can_find_out_ends_in_front_of_a_person(tmp_path: Path) -> None:
    style = "nobody knows"
    shops.provider.open(tmp_path, "charged", honours_keys=False)
    ends = set()
    for each in crashes(callers.new_key, lambda key: shops.tried(key, style), between=True):
        come_back(each.key, style)
        operation = shops.find(each.key)
        assert shops.provider.charges(operation.derive_key("charge")) <= 1, str(each)
        if not operation.is_final:
            assert operation.status == Status.RECONCILING, str(each)
            shops.age_all(days=2)
            shops.life_goes_on(1)
            kinds = operation.events.values_list("kind", flat=True)
            assert EventKind.HANDED_OVER in kinds, str(each)
            operation.delete()  # by the person
        ends.add(operation.status)
    assert Status.RECONCILING in ends


def test_points_outside_the_database_are_counted(tmp_path: Path) -> None:
    shops.provider.open(tmp_path)
    labels = passed_by(lambda: shops.pay("counted", "asked"))
    assert labels.index("before the charge") < labels.index("before the answer")
