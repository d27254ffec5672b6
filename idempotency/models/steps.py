"""Recovery points of stepwise operations, and branches of try/confirm/cancel transactions."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from .operations import Operation


class StepStatus(models.TextChoices):
    STARTED = "started", _("Started")
    DONE = "done", _("Done")


class Step(models.Model):
    """A recovery point of a stepwise operation, identified by its name."""

    operation = models.ForeignKey(
        Operation,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        related_name="steps",
        db_index=False,
    )
    name = models.CharField(_("step"), max_length=200)
    is_external = models.BooleanField(_("external"))
    status = models.CharField(_("status"), max_length=16, choices=StepStatus)
    #: Attempt of the operation that wrote the row last.
    attempt = models.PositiveIntegerField(_("attempt"))
    result = models.TextField(_("result"), null=True, blank=True)  # noqa: DJ001 (no default on MySQL)
    #: Dotted names, so that neither needs the handler to run again.
    compensation = models.CharField(_("compensation"), max_length=255, db_default="")
    reconciler = models.CharField(_("reconciler"), max_length=255, db_default="")
    started_at = models.DateTimeField(_("started"))
    done_at = models.DateTimeField(_("done"), null=True, blank=True)

    class Meta:
        verbose_name = _("step")
        verbose_name_plural = _("steps")
        ordering = ("id",)
        constraints = (
            models.CheckConstraint(
                condition=Q(status=StepStatus.STARTED, done_at__isnull=True)
                | Q(status=StepStatus.DONE, done_at__isnull=False),
                name="idempotency_step_done_at",
            ),
            models.UniqueConstraint(fields=["operation", "name"], name="idempotency_step_once"),
        )

    def __str__(self) -> str:
        return self.name


class BranchStatus(models.TextChoices):
    TRIED = "tried", _("Tried")
    CONFIRMED = "confirmed", _("Confirmed")
    CANCELLED = "cancelled", _("Cancelled")
    #: Cancelled before it was tried: the marker that refuses every late try.
    SUSPENDED = "suspended", _("Suspended")


class Branch(models.Model):
    """One participant of a try/confirm/cancel transaction; see `idempotency.barrier`."""

    id = models.UUIDField(primary_key=True, editable=False)
    transaction = models.CharField(_("transaction"), max_length=255)
    name = models.CharField(_("branch"), max_length=255)
    status = models.CharField(_("status"), max_length=16, choices=BranchStatus)
    #: Tries and cancels that arrived; the one that made it 1 made the row.
    calls = models.PositiveIntegerField(_("calls"), default=1)
    created_at = models.DateTimeField(_("created"))
    changed_at = models.DateTimeField(_("changed"))

    class Meta:
        verbose_name = _("branch")
        verbose_name_plural = _("branches")
        indexes = (models.Index(fields=["transaction"], name="idempotency_branch_trans"),)
        constraints = (
            models.CheckConstraint(
                condition=Q(status__in=BranchStatus.values), name="idempotency_branch_status_known"
            ),
        )

    def __str__(self) -> str:
        return f"{self.transaction} {self.name}"
