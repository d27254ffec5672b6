"""`Operation`, and what is known about it: events and references."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn, TypeVar

from django.db import models
from django.db.models import Q
from django.utils.module_loading import import_string
from django.utils.translation import gettext_lazy as _

from .. import keys
from ..conf import conf
from ..exceptions import ConfigurationError, NotFinal, OutcomeUnknown

T = TypeVar("T")


class Status(models.TextChoices):
    PROCESSING = "processing", _("Processing")
    SUCCEEDED = "succeeded", _("Succeeded")
    FAILED = "failed", _("Failed")
    REQUIRES_ACTION = "requires_action", _("Requires action")
    RECONCILING = "reconciling", _("Reconciling")
    REVERSED = "reversed", _("Reversed")


#: Statuses with a stored outcome: a duplicate gets it replayed.
FINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.REQUIRES_ACTION, Status.REVERSED})

#: Where a status may go. Re-use of a key after its window starts a new life at `processing`.
TRANSITIONS: dict[str, frozenset[str]] = {
    Status.PROCESSING: frozenset(
        {
            Status.SUCCEEDED,
            Status.FAILED,
            Status.REQUIRES_ACTION,
            Status.RECONCILING,
            Status.REVERSED,
        }
    ),
    Status.RECONCILING: frozenset(
        {
            Status.PROCESSING,
            Status.SUCCEEDED,
            Status.FAILED,
            Status.REQUIRES_ACTION,
            Status.REVERSED,
        }
    ),
    Status.REQUIRES_ACTION: frozenset(
        {Status.PROCESSING, Status.SUCCEEDED, Status.FAILED, Status.RECONCILING, Status.REVERSED}
    ),
    Status.SUCCEEDED: frozenset({Status.REVERSED}),
    Status.FAILED: frozenset(),
    Status.REVERSED: frozenset(),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a duplicate will be answered with. `body` is None when it was not retained."""

    status: str
    code: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = b""


class Operation(models.Model):
    """One logical user intent, named by (scope, key); `id` is derived from both."""

    id = models.UUIDField(primary_key=True, editable=False)
    scope = models.CharField(_("scope"), max_length=255)
    key = models.CharField(_("key"), max_length=255)
    name = models.CharField(_("operation"), max_length=200)
    status = models.CharField(_("status"), max_length=16, choices=Status)
    fingerprint = models.CharField(_("fingerprint"), max_length=80)
    #: Executions so far, including the running one; only ever grows, also over re-use of the key.
    attempt = models.PositiveIntegerField(_("attempts"))
    #: Token of the latest executor: what it wrote can be told from what others wrote.
    owner = models.CharField(max_length=32, editable=False)
    stepwise = models.BooleanField(_("stepwise"), db_default=False)
    lease_expires_at = models.DateTimeField(_("lease expires"), null=True, blank=True)

    code = models.PositiveSmallIntegerField(_("response code"), null=True, blank=True)
    headers = models.TextField(_("response headers"), null=True, blank=True)  # noqa: DJ001 (no default on MySQL)
    body = models.BinaryField(_("response body"), null=True, blank=True)
    last_error = models.CharField(_("last error"), max_length=255, db_default="")

    created_at = models.DateTimeField(_("created"))
    finished_at = models.DateTimeField(_("finished"), null=True, blank=True)
    expires_at = models.DateTimeField(_("replays until"), null=True, blank=True)
    tombstone_until = models.DateTimeField(_("refuses until"), null=True, blank=True)
    #: When maintenance looks at the row next: purge, completer or reconciler, by status.
    due_at = models.DateTimeField(editable=False)
    #: How often a reconciler has asked without an answer.
    checks = models.PositiveIntegerField(_("checks"), db_default=0)
    #: Executors that vanished without recording an error; counted where a policy gives up.
    interruptions = models.PositiveIntegerField(_("interruptions"), db_default=0)
    #: JSON arguments of a stepwise function or task, so that the completer can run it again.
    arguments = models.TextField(_("arguments"), null=True, blank=True)  # noqa: DJ001 (no default on MySQL)

    #: Set while this process executes the operation.
    execution: Any = None
    # Answers of the database's clock, filled in by `db`.
    expired: bool = False
    forgotten: bool = False
    event_count: int = 0

    class Meta:
        verbose_name = _("operation")
        verbose_name_plural = _("operations")
        permissions = (("view_operation_body", _("Can view stored responses")),)
        ordering = ("-created_at",)
        indexes = (
            # Serves equality and prefixes on PostgreSQL; others ignore the operator class.
            models.Index(
                fields=["key"], opclasses=["varchar_pattern_ops"], name="idempotency_op_key"
            ),
            models.Index(fields=["created_at"], name="idempotency_op_created"),
            models.Index(fields=["status", "due_at"], name="idempotency_op_due"),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(status__in=Status.values), name="idempotency_op_status_known"
            ),
            models.CheckConstraint(
                condition=Q(
                    status__in=(Status.PROCESSING, Status.RECONCILING), expires_at__isnull=True
                )
                | Q(status__in=sorted(FINAL), expires_at__isnull=False),
                name="idempotency_op_final_expires",
            ),
            models.CheckConstraint(condition=Q(attempt__gte=1), name="idempotency_op_attempt"),
            models.CheckConstraint(
                condition=Q(lease_expires_at__isnull=True) | Q(status=Status.PROCESSING),
                name="idempotency_op_lease_processing",
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} {self.id}"

    @classmethod
    def to_claim(cls, using: str, **values: Any) -> Operation:
        """The row that a claim will insert. Model() would spend longer on its database defaults."""
        row = _blank(cls) | values
        return cls.from_db(using, row.keys(), row.values())

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @property
    def using(self) -> str:
        """Alias of the database it was read from; its effects are there, too."""
        return self._state.db or conf.USING

    @property
    def is_waiting(self) -> bool:
        """Whether it goes on after somebody's action; its steps are not forgotten with its window."""
        return self.stepwise and self.status == Status.REQUIRES_ACTION

    @property
    def may_start_anew(self) -> bool:
        """Whether the key names a new intent by now.

        Never after a reversal: the derived keys would be those of what was undone, and a provider
        that remembers them would answer with the refunded charge.
        """
        may = self.is_final and self.forgotten
        return may and not self.is_waiting and self.status != Status.REVERSED

    def derive_key(self, name: str) -> str:
        """A key for a downstream system: the same on every attempt, takeover, deploy and re-use.

        `name` tells the calls of one operation apart. Returns a UUID as text (36 characters).
        """
        return keys.derive(self.id, name)

    def step(
        self,
        name: str,
        function: Callable[..., T],
        *args: Any,
        compensate: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> T:
        """Run a local step once: its effects and its JSON result commit in one transaction.

        On a later attempt the recorded result is returned. `compensate` is a module-level function
        called with (result, key=...) when the operation is reversed. Raises LeaseLost when another
        executor owns the operation by now; the step's effects are then rolled back.
        """
        return self._steps().step(name, function, *args, compensate=compensate, **kwargs)  # type: ignore[no-any-return]

    async def astep(self, name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`step` from async code: the function is a sync one and runs in the request's thread."""
        return await self._steps().astep(name, function, *args, **kwargs)  # type: ignore[no-any-return]

    def call(
        self,
        name: str,
        function: Callable[..., T],
        *args: Any,
        repeatable: bool = False,
        reconcile: Callable[..., Any] | None = None,
        failures: tuple[type[Exception], ...] = (),
        compensate: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> T:
        """Run an external step: the intent is committed before the call, the result after it.

        No transaction is open across the call. When an earlier attempt started the call and nobody
        recorded how it ended: `repeatable` calls again (pass a key from `derive_key`, the same on
        every attempt); `reconcile`, a module-level function called with (key=...), answers
        Confirmed, Absent or StillUnknown; without either the operation becomes `reconciling` and
        OutcomeUnknown is raised. `failures` are exceptions that prove there was no effect.
        """
        return self._steps().call(  # type: ignore[no-any-return]
            name,
            function,
            *args,
            repeatable=repeatable,
            reconcile=reconcile,
            failures=failures,
            compensate=compensate,
            **kwargs,
        )

    async def acall(
        self, name: str, function: Callable[..., Awaitable[T]], *args: Any, **options: Any
    ) -> T:
        """`call` of a coroutine function."""
        return await self._steps().acall(name, function, *args, **options)  # type: ignore[no-any-return]

    def reverse(self, *, reason: str) -> None:
        """Undo a finished stepwise operation: see `idempotency.reversal.reverse`."""
        # By name: it stands above this module.
        import_string("idempotency.reversal.reverse")(self, reason=reason)

    def heartbeat(self) -> None:
        """Extend the lease during long work between steps. Raises LeaseLost."""
        self._steps().heartbeat()

    def unknown(self, provider_ref: str = "") -> NoReturn:
        """Say that the effects may or may not exist: status `reconciling`, nothing is re-run.

        Raises OutcomeUnknown, which ends the handler. `provider_ref` is how a webhook, a reconciler or
        a person will find the operation again.
        """
        unknown = OutcomeUnknown(operation_id=self.pk, provider_ref=provider_ref)
        if self.execution is not None:
            self.execution.unknown = unknown
        raise unknown

    def requires_action(self, name: str = "action") -> Any:
        """Store the handler's answer as `requires_action` instead of `succeeded` or `failed`.

        The answer tells the caller what to do (a redirect, say) and is replayed until somebody resolves
        the operation. A stepwise operation then runs on: the next attempt comes here again, and this
        returns what it was resolved with. The first time it returns None. `name` tells several actions
        of one operation apart.
        """
        if self.execution is None:
            raise ConfigurationError("requires_action() belongs inside the operation's handler")
        if hasattr(self.execution, "action"):
            return self.execution.action(name)
        self.execution.declared_status = Status.REQUIRES_ACTION
        return None

    def refer(self, name: str, value: object) -> None:
        """Record another name of the operation ("order", 42), in the current transaction."""
        Reference.objects.using(self.using).get_or_create(
            operation_id=self.pk, name=name, value=Reference.shortened(value)
        )

    def _steps(self) -> Any:
        if not hasattr(self.execution, "step"):
            raise ConfigurationError(
                f"{self.name}: steps need Policy(stepwise=True) and belong inside the operation's handler"
            )
        return self.execution

    def outcome(self) -> Outcome:
        """The stored outcome as it lies in the database."""
        return Outcome(
            status=self.status,
            code=self.code,
            headers=json.loads(self.headers) if self.headers else {},
            body=None if self.body is None else bytes(self.body),
        )


class EventKind(models.TextChoices):
    REPLAYED = "replayed", _("Replayed")
    REFUSED = "refused", _("Refused")
    ATTEMPT_FAILED = "attempt_failed", _("Attempt failed")
    TAKEN_OVER = "taken_over", _("Taken over")
    RENEWED = "renewed", _("Key used again")
    RECONCILING = "reconciling", _("Outcome unknown")
    RESOLVED = "resolved", _("Outcome settled")
    HANDED_OVER = "handed_over", _("Handed over to people")
    REVERSED = "reversed", _("Reversed")
    ADMIN = "admin", _("Changed by staff")


class Event(models.Model):
    """Something rare that happened to an operation. A plain first success writes none.

    No database-level foreign key: a refusal is written while the executor holds the parent's
    row lock, and MySQL's constraint check would wait for it.
    """

    operation = models.ForeignKey(
        Operation,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        related_name="events",
        db_index=False,
    )
    kind = models.CharField(_("event"), max_length=20, choices=EventKind)
    attempt = models.PositiveIntegerField(_("attempt"))
    detail = models.CharField(_("detail"), max_length=255)
    created_at = models.DateTimeField(_("time"))

    class Meta:
        verbose_name = _("event")
        verbose_name_plural = _("events")
        ordering = ("id",)
        indexes = (models.Index(fields=["operation", "id"], name="idempotency_event_op"),)

    def __str__(self) -> str:
        return f"{self.get_kind_display()} {self.detail}".strip()


class Reference(models.Model):
    """Another name an operation is known by: the order it made, the charge at the provider."""

    operation = models.ForeignKey(
        Operation, on_delete=models.DO_NOTHING, db_constraint=False, related_name="references"
    )
    name = models.CharField(_("name"), max_length=100)
    value = models.CharField(_("value"), max_length=150)

    class Meta:
        verbose_name = _("reference")
        verbose_name_plural = _("references")
        indexes = (models.Index(fields=["value"], name="idempotency_ref_value"),)
        constraints = (
            models.UniqueConstraint(
                fields=["operation", "name", "value"], name="idempotency_ref_once"
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} {self.value}"

    @staticmethod
    def shortened(value: object) -> str:
        """What is stored and looked up: the value, or its beginning and a hash when it is too long."""
        text = str(value)
        if len(text) <= 150:
            return text
        return f"{text[:85]}:{hashlib.sha256(text.encode()).hexdigest()}"


def describe_error(error: BaseException) -> str:
    """Class and place of an exception, never its message: messages carry people's data."""
    if isinstance(error, NotFinal | OutcomeUnknown):  # our own words
        return str(error)[:255]
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        module = trace.tb_frame.f_globals.get("__name__", "?")
        place = f" in {module}.{code.co_name} line {trace.tb_lineno}"
    cls = type(error)
    return f"{cls.__module__}.{cls.__qualname__}{place}"[:255]


@cache
def _blank(model: type[Operation]) -> dict[str, Any]:
    """The columns in their order, with what the database puts there by itself."""
    return {
        f.attname: f.db_default if f.has_db_default() else None for f in model._meta.concrete_fields
    }


def new_owner() -> str:
    return secrets.token_hex(16)
