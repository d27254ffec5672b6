"""The provider's interface, called by the shop as it would call a company over the network.

The provider is idempotent itself, the way Stripe or Adyen are: per merchant account, the first call
with a key charges, a later one answers with the same charge, and another amount is refused.
"""

from __future__ import annotations

import time
from decimal import Decimal

from django.conf import settings
from django.db import IntegrityError, router, transaction

from .models import Charge

DECLINED_CARD = "tok_declined"


class ProviderError(Exception):
    """The provider answered, and no money moved."""


class CardDeclined(ProviderError):
    """The bank said no; trying the same card again will not help."""


class KeyReused(ProviderError):
    """The idempotency key belongs to a charge with other parameters."""


def charge(
    *, account: str, idempotency_key: str, amount: Decimal, card: str, reference: str
) -> Charge:
    """Take `amount` from `card`, once per (`account`, `idempotency_key`).

    Raises CardDeclined or KeyReused, and in both cases takes nothing.
    """
    known = Charge.objects.filter(account=account, idempotency_key=idempotency_key).first()
    if known is None:
        time.sleep(settings.PROVIDER_LATENCY)
        if card == DECLINED_CARD:
            raise CardDeclined("The card was declined.")
        try:
            with transaction.atomic(using=router.db_for_write(Charge)):
                return Charge.objects.create(
                    account=account,
                    idempotency_key=idempotency_key,
                    amount=amount,
                    card=card,
                    reference=reference,
                )
        except IntegrityError:  # somebody with the same key was faster
            known = Charge.objects.get(account=account, idempotency_key=idempotency_key)
    if (known.amount, known.card, known.reference) != (amount, card, reference):
        raise KeyReused("This key was used for another charge.")
    return known
