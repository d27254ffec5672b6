"""The books of a payment provider, as its own company would keep them."""

from __future__ import annotations

import uuid

from django.db import models
from django.utils import timezone


class ChargeQuerySet(models.QuerySet["Charge"]):
    def that_moved_money(self) -> ChargeQuerySet:
        """Also those that were refunded later: the card was charged."""
        return self.filter(status__in=[Charge.Status.CAPTURED, Charge.Status.REFUNDED])


class Charge(models.Model):
    """Money taken from a card once. A double charge is two of these rows."""

    class Status(models.TextChoices):
        PENDING = "pending", "waits for the bank's approval"
        CAPTURED = "captured", "captured"
        VOID = "void", "void"
        REFUNDED = "refunded", "refunded"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    #: The merchant account charged for; it owns the key space.
    account = models.CharField(max_length=40)
    #: The merchant's idempotency key; the same key never charges twice.
    idempotency_key = models.CharField(max_length=255)
    amount = models.DecimalField(max_digits=10, decimal_places=2)
    card = models.CharField(max_length=40)
    #: The merchant's name for what is paid.
    reference = models.CharField(max_length=60)
    status = models.CharField(max_length=10, choices=Status, default=Status.CAPTURED)
    #: How its webhooks are sent: see `gateway.WEBHOOKS`.
    webhooks = models.CharField(max_length=10, default="once")
    created_at = models.DateTimeField(auto_now_add=True)

    objects = ChargeQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["account", "idempotency_key"], name="provider_charge_once_per_key"
            )
        ]

    def __str__(self) -> str:
        return f"{self.amount} for {self.reference}"


class Attempt(models.Model):
    """A call to charge, whatever came of it: the provider knows what is still under way."""

    account = models.CharField(max_length=40)
    idempotency_key = models.CharField(max_length=255)
    started_at = models.DateTimeField(auto_now_add=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["account", "idempotency_key"], name="provider_attempt_once_per_key"
            )
        ]

    def __str__(self) -> str:
        return self.idempotency_key


class Notice(models.Model):
    """One webhook request that the provider still has to make, or has made."""

    charge = models.ForeignKey(Charge, on_delete=models.CASCADE, related_name="notices")
    #: The same on every delivery of one event.
    event_id = models.CharField(max_length=40)
    body = models.TextField()
    due_at = models.DateTimeField(default=timezone.now)
    attempts = models.PositiveIntegerField(default=0)
    delivered_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["pk"]
        indexes = [models.Index(fields=["delivered_at", "due_at"], name="provider_notice_due")]

    def __str__(self) -> str:
        return self.event_id
