"""Messages on their way out, and the turns of those that come in."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from .indexes import PartialIndex
from .operations import Operation


class MessageStatus(models.TextChoices):
    PENDING = "pending", _("Pending")
    SENT = "sent", _("Sent")
    DEAD = "dead", _("Dead letter")


class OutboxMessage(models.Model):
    """Something that happened, written in the transaction in which it did; the relay publishes it."""

    #: Order of writing; `message_id` is what the outside sees.
    id = models.BigAutoField(primary_key=True)
    message_id = models.UUIDField(_("message id"), unique=True, editable=False)
    operation = models.ForeignKey(
        Operation,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        null=True,
        blank=True,
        related_name="messages",
        db_index=False,
    )
    topic = models.CharField(_("topic"), max_length=200)
    payload = models.TextField(_("payload"))
    #: Messages with the same non-empty ordering key are published one after the other.
    ordering_key = models.CharField(_("ordering key"), max_length=255, db_default="")
    status = models.CharField(_("status"), max_length=16, choices=MessageStatus)
    #: When the relay may take the message.
    available_at = models.DateTimeField(_("available"))
    #: Until when it belongs to the relay that claimed it. In no index: a claim need not write to any.
    lease_expires_at = models.DateTimeField(_("lease ends"), null=True, blank=True)
    #: Publishing attempts, counted before each try.
    attempts = models.PositiveIntegerField(_("attempts"), db_default=0)
    #: Token of the relay that claimed the message last: its fence.
    owner = models.CharField(max_length=32, db_default="", editable=False)
    last_error = models.CharField(_("last error"), max_length=255, db_default="")
    created_at = models.DateTimeField(_("created"))
    sent_at = models.DateTimeField(_("sent"), null=True, blank=True)

    class Meta:
        verbose_name = _("outbox message")
        verbose_name_plural = _("outbox messages")
        ordering = ("-id",)
        indexes = (
            models.Index(fields=["status", "available_at"], name="idempotency_msg_due"),
            # Every claim and every mark writes to each index of the row: most rows are not in these.
            PartialIndex(
                fields=["ordering_key", "status", "id"],
                name="idempotency_msg_order",
                where=~Q(ordering_key="") & ~Q(status=MessageStatus.SENT),
            ),
            PartialIndex(
                fields=["operation"], name="idempotency_msg_op", where=Q(operation__isnull=False)
            ),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(status__in=MessageStatus.values), name="idempotency_msg_status_known"
            ),
        )

    def __str__(self) -> str:
        return f"{self.topic} {self.message_id}"


class Turn(models.Model):
    """A row to lock for consumers that must take turns on one object (`inbox.receive(serialize_on=)`)."""

    id = models.UUIDField(primary_key=True, editable=False)
    used_at = models.DateTimeField(_("used"))

    class Meta:
        verbose_name = _("turn")
        verbose_name_plural = _("turns")
        indexes = (models.Index(fields=["used_at"], name="idempotency_turn_used"),)

    def __str__(self) -> str:
        return str(self.id)
