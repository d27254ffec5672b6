"""The books of a payment provider, as its own company would keep them."""

from __future__ import annotations

import uuid

from django.db import models


class Charge(models.Model):
    """Money taken from a card once. A double charge is two of these rows."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    #: The merchant account charged for; it owns the key space.
    account = models.CharField(max_length=40)
    #: The merchant's idempotency key; the same key never charges twice.
    idempotency_key = models.CharField(max_length=255)
    amount = models.DecimalField(max_digits=10, decimal_places=2)
    card = models.CharField(max_length=40)
    reference = models.CharField(max_length=60)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["account", "idempotency_key"], name="provider_charge_once_per_key"
            )
        ]

    def __str__(self) -> str:
        return f"{self.amount} for {self.reference}"
