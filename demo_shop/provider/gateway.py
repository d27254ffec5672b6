"""The provider's interface, called by the shop as it would call a company over the network.

The provider is idempotent itself, the way Stripe or Adyen are: per merchant account, the first call
with a key charges, a later one answers with the same charge, and another amount is refused.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal

from django.conf import settings
from django.db import IntegrityError, router, transaction
from django.utils import timezone

from .models import Attempt, Charge
from .webhooks import announce

DECLINED_CARD = "tok_declined"
#: The card whose bank wants to ask its holder first (3-D Secure).
ASKING_CARD = "tok_3ds"

#: How the provider behaves when it is called, by name.
MODES = {
    "ok": "answers",
    "slow": "is slow",
    "charged": "charges, its answer is lost",
    "lost": "misses the first call",
}
#: How the provider sends its webhooks, by name.
WEBHOOKS = {
    "once": "once",
    "twice": "every one twice",
    "shuffled": "in the wrong order",
    "never": "not at all",
}

#: Times the usual latency.
SLOW = 8
#: A call without an end is known to have ended after this long.
LONGEST_CALL = timedelta(seconds=60)


class ProviderError(Exception):
    """The provider answered, and no money moved."""


class CardDeclined(ProviderError):
    """The bank said no; trying the same card again will not help."""


class KeyReused(ProviderError):
    """The idempotency key belongs to a charge with other parameters."""


class ProviderTimeout(Exception):
    """No answer. The card was charged, or not."""


class StillRunning(Exception):
    """The provider is working on it: nobody can say yet whether there will be a charge."""


def charge(
    *,
    account: str,
    idempotency_key: str,
    amount: Decimal,
    card: str,
    reference: str,
    mode: str = "ok",
    webhooks: str = "once",
) -> Charge:
    """Take `amount` from `card`, once per (`account`, `idempotency_key`).

    Returns the charge: `captured`, or `pending` while the bank asks the card's holder. Raises
    CardDeclined or KeyReused, and in both cases takes nothing; ProviderTimeout, and may have.
    """
    with _attempt(account, idempotency_key) as is_first:
        known = Charge.objects.filter(account=account, idempotency_key=idempotency_key).first()
        if known is None:
            time.sleep(settings.PROVIDER_LATENCY * (SLOW if mode == "slow" else 1))
            if mode == "lost" and is_first:
                raise ProviderTimeout("The provider does not answer.")
            if card == DECLINED_CARD:
                raise CardDeclined("The card was declined.")
            known = _create(account, idempotency_key, amount, card, reference, webhooks)
            if mode == "charged" and is_first:
                raise ProviderTimeout("The provider does not answer.")
    if (known.amount, known.card, known.reference) != (amount, card, reference):
        raise KeyReused("This key was used for another charge.")
    return known


@contextmanager
def _attempt(account: str, key: str) -> Iterator[bool]:
    """Whether this is the first call with the key; others see that it is under way."""
    attempt, is_first = Attempt.objects.get_or_create(account=account, idempotency_key=key)
    if not is_first:
        Attempt.objects.filter(pk=attempt.pk).update(started_at=timezone.now(), finished_at=None)
    try:
        yield is_first
    finally:
        Attempt.objects.filter(pk=attempt.pk).update(finished_at=timezone.now())


def _create(
    account: str, key: str, amount: Decimal, card: str, reference: str, webhooks: str
) -> Charge:
    is_asked = card == ASKING_CARD
    try:
        with transaction.atomic(using=router.db_for_write(Charge)):
            made = Charge.objects.create(
                account=account,
                idempotency_key=key,
                amount=amount,
                card=card,
                reference=reference,
                status=Charge.Status.PENDING if is_asked else Charge.Status.CAPTURED,
                webhooks=webhooks,
            )
            events = ["payment.created"] if is_asked else ["payment.created", "payment.succeeded"]
            announce(made, *events)
            return made
    except IntegrityError:  # somebody with the same key was faster
        return Charge.objects.get(account=account, idempotency_key=key)


def find(*, account: str, idempotency_key: str) -> Charge | None:
    """The charge made with the key, or None: there is none, and no call that could still make one.

    Raises StillRunning.
    """
    attempt = Attempt.objects.filter(account=account, idempotency_key=idempotency_key).first()
    found = Charge.objects.filter(account=account, idempotency_key=idempotency_key).first()
    is_open = attempt is not None and attempt.finished_at is None
    if found is None and is_open and attempt.started_at > timezone.now() - LONGEST_CALL:
        raise StillRunning
    return found


def refund(charge_id: uuid.UUID) -> Charge:
    """Give the money back, or release what was only reserved. Saying it again changes nothing."""
    with transaction.atomic(using=router.db_for_write(Charge)):
        found = Charge.objects.select_for_update().get(pk=charge_id)
        if found.status == Charge.Status.CAPTURED:
            _become(found, Charge.Status.REFUNDED, "payment.refunded")
        elif found.status == Charge.Status.PENDING:
            _become(found, Charge.Status.VOID, "payment.canceled")
    return found


def authenticate(charge_id: uuid.UUID, *, approved: bool) -> Charge:
    """What the card's holder told the bank: capture the pending charge, or drop it."""
    with transaction.atomic(using=router.db_for_write(Charge)):
        found = Charge.objects.select_for_update().get(pk=charge_id)
        if found.status == Charge.Status.PENDING:
            if approved:
                _become(found, Charge.Status.CAPTURED, "payment.succeeded")
            else:
                _become(found, Charge.Status.VOID, "payment.failed")
    return found


def _become(charge: Charge, status: str, event: str) -> None:
    charge.status = status
    charge.save(update_fields=["status"])
    announce(charge, event)
