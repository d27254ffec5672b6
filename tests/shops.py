"""A stepwise purchase with reserve, charge and confirm, and a world that goes on after a crash."""

from datetime import timedelta
from typing import Any

from django.db.models import F
from django.utils import timezone

from idempotency import engine
from idempotency.completion import complete_abandoned
from idempotency.exceptions import OutcomeUnknown, StoredFailure
from idempotency.functions import idempotent_function
from idempotency.models import FINAL, Operation, Status
from idempotency.reconciliation import Absent, Confirmed, StillUnknown, reconcile_due
from tests.app.models import Effect
from tests.providers import Declined, Provider

#: The provider of this process and its children.
provider = Provider()


class SoldOut(Exception):
    """Found out after the charge: everything must be undone."""


def reserve(key: str) -> str:
    Effect.objects.create(label=f"{key} stock", amount=-1)
    return key


def unreserve(result: str, key: str) -> None:
    Effect.objects.create(label=f"{result} stock", amount=1)


def refund(result: str, key: str) -> None:
    provider.refund(result, key)


def look_up(key: str) -> Confirmed | Absent:
    charge = provider.find(key)
    return Absent() if charge is None else Confirmed(charge)


def shrug(key: str) -> StillUnknown:
    return StillUnknown()


def confirm(key: str, charge: str) -> None:
    Effect.objects.create(label=f"{key} order")


#: How the charge is protected.
STYLES: dict[str, dict[str, Any]] = {
    "repeatable": {"repeatable": True},
    "asked": {"reconcile": look_up},
    "nobody knows": {"reconcile": shrug},
    "unprotected": {},
}


@idempotent_function(
    name="shop.pay",
    key=lambda key, *rest: key,
    stepwise=True,
    lease=3600,
    failures=(Declined, SoldOut),
)
def pay(key: str, style: str, sold_out: bool = False) -> str:
    operation = engine.current()
    assert operation is not None
    operation.step("reserve", reserve, key, compensate=unreserve)
    charge = operation.call(
        "charge",
        provider.charge,
        operation.derive_key("charge"),
        5,
        failures=(Declined,),
        compensate=refund,
        **STYLES[style],
    )
    if sold_out:
        raise SoldOut
    operation.step("confirm", confirm, key, charge)
    return str(charge)


def tried(key: str, style: str, sold_out: bool = False) -> str:
    """What one attempt came to, in a word."""
    try:
        return pay(key, style, sold_out)
    except (OutcomeUnknown, StoredFailure, TimeoutError) as error:
        return type(error).__name__


def find(key: str) -> Operation:
    return Operation.objects.get(key=key)


def downstream(key: str) -> str:
    return find(key).derive_key("charge")


def age(**which: Any) -> None:
    """Let every lease lapse and everything be due: hours pass."""
    past = timezone.now() - timedelta(hours=2)
    unfinished = Operation.objects.filter(**which).exclude(status__in=FINAL)
    unfinished.update(due_at=past)
    unfinished.exclude(lease_expires_at=None).update(lease_expires_at=past)


def age_all(**by: float) -> None:
    """Move what is unfinished into the past, with the steps it has begun."""
    ago = timedelta(**by)
    for operation in Operation.objects.exclude(status__in=FINAL):
        operation.steps.update(started_at=F("started_at") - ago)
    Operation.objects.exclude(status__in=FINAL).update(created_at=F("created_at") - ago)


def life_goes_on(rounds: int = 6) -> None:
    """Hours pass and maintenance runs, until nothing changes any more."""
    for _ in range(rounds):
        if not Operation.objects.exclude(status__in=FINAL).exists():
            return
        age()
        complete_abandoned()
        reconcile_due()


def stock(key: str) -> int:
    return sum(Effect.objects.filter(label=f"{key} stock").values_list("amount", flat=True))


def orders(key: str) -> int:
    return Effect.objects.filter(label=f"{key} order").count()


def assert_consistent(key: str, where: object = "") -> None:
    """Either bought once and paid once, or as if nothing had been; never in between."""
    operation = find(key)
    charges, refunds = provider.charges(downstream(key)), provider.refunds(downstream(key))
    seen = (stock(key), charges - refunds * bool(charges), orders(key))
    assert charges <= 1, f"{where}: charged {charges} times"
    assert refunds <= charges, f"{where}: refunded {refunds} times"
    if operation.status == Status.SUCCEEDED:
        assert seen == (-1, 1, 1), f"{where}: {seen}"
    elif operation.status in (Status.FAILED, Status.REVERSED):
        assert seen[:2] == (0, 0), f"{where}: {seen}"
    else:
        raise AssertionError(f"{where}: still {operation.status}, {operation.last_error}")
