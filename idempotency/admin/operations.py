"""The admin page of operations."""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

from django.contrib import admin
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import PermissionDenied
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.db.models.functions import Length
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from .. import db, retention
from ..conf import conf
from ..models import Event, Operation, OutboxMessage, Reference, Status, Step
from . import search, story
from .pages import KeysetChangeList, ReadOnlyAdmin

#: Longest key shown in the list; longest body shown on its page, in characters.
SHORT, LONG = 40, 100_000
#: Most rows of each kind shown on an operation's page.
MOST = 200


#: How long an operation may be unfinished before somebody should look at it.
LONG_UNFINISHED = timedelta(minutes=5)
#: How far the purge may lag behind before the list says so.
LATE = timedelta(days=1)


class UnfinishedFilter(admin.SimpleListFilter):
    """Claimed a while ago and still without an outcome: interrupted, waiting for a retry, or very slow."""

    title = _("attention")
    parameter_name = "attention"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("unfinished", _("Unfinished for 5 minutes"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Operation]) -> QuerySet[Operation]:
        if self.value() != "unfinished":
            return queryset
        claimed = db.now(queryset.db, after=-LONG_UNFINISHED.total_seconds())
        return queryset.filter(
            status__in=(Status.PROCESSING, Status.RECONCILING), created_at__lte=claimed
        )


@admin.register(Operation)
class OperationAdmin(ReadOnlyAdmin):
    """Read-only. A stored response is shown to holders of `idempotency.view_operation_body` only."""

    list_display = ("short_key", "state", "scope", "created")
    list_filter = ("status", UnfinishedFilter)
    ordering = ("-created_at", "-pk")
    search_fields = ("key",)  # shows the box; get_search_results says what it finds
    search_help_text = _(
        "Paste an idempotency key or its header line, an operation's id, or a reference such as an "
        "order number."
    )
    actions = None
    fieldsets = (
        (_("Identity and answer"), {"fields": ("key", "scope", "name", "id", "response")}),
        (
            _("Technical details"),
            {
                "classes": ("collapse",),
                "fields": (
                    "status",
                    "code",
                    "attempt",
                    "stepwise",
                    "lease",
                    "checks",
                    "due",
                    "fingerprint",
                ),
            },
        ),
    )

    def has_view_body_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("idempotency.view_operation_body")

    # The list.

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[KeysetChangeList]:
        return KeysetChangeList

    def get_queryset(self, request: HttpRequest) -> QuerySet[Operation]:
        # Where the protocol keeps them, whatever a router says, and never with their bodies.
        operations = Operation.objects.using(conf.USING)
        return operations.defer("body", "headers", "arguments").order_by(*self.ordering)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Operation], search_term: str
    ) -> tuple[QuerySet[Operation], bool]:
        if not search_term.strip():
            return queryset, False
        return search.find(queryset, search_term), False

    @admin.display(description=_("key"))
    def short_key(self, operation: Operation) -> str:
        key = operation.key
        return key if len(key) <= SHORT else f"{key[: SHORT - 1]}…"

    @admin.display(description=_("state"))
    def state(self, operation: Operation) -> str:
        label, look = story.STATES[story.state_in_list(operation)]
        attempts = "" if operation.attempt == 1 else f" · {gettext('attempt')} {operation.attempt}"
        return format_html(
            '<span class="idempotency-state {}">{}</span> <small>{}{}</small>',
            look,
            label,
            operation.name,
            attempts,
        )

    @admin.display(description=_("created"))
    def created(self, operation: Operation) -> str:
        return story.when(operation.created_at)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        context = {"title": capfirst(self.opts.verbose_name_plural), **(extra_context or {})}
        if not request.GET:
            since = retention.overdue_since(by=LATE)
            context["purge_overdue_since"] = story.when(since)
        return super().changelist_view(request, context)

    # One operation.

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Operation | None:
        try:
            pk = uuid.UUID(object_id)
        except ValueError:
            return None
        now = db.now(conf.USING)
        operation = (
            self.get_queryset(request)
            .annotate(
                body_bytes=Length("body"),
                lapsed=_is(Q(lease_expires_at__isnull=True) | Q(lease_expires_at__lte=now)),
                over=_is(Q(expires_at__lte=now)),
                gone=_is(Q(tombstone_until__lte=now)),
            )
            .filter(pk=pk)
            .first()
        )
        if operation is not None:
            operation.__dict__["may_show_body"] = self.has_view_body_permission(request)
        return operation

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        operation = context["original"]
        events = _children(Event, operation)
        context |= {
            "title": operation.name,
            "verdict": story.verdict(operation, story.state(operation), events),
            "timeline": story.timeline(operation, events),
            "subtitle": None,
            "is_cut": len(events) >= min(conf.EVENTS_PER_OPERATION or 1, MOST),
            "references": _children(Reference, operation),
            "steps": story.steps(_children(Step, operation, "result")),
            "messages_sent": _children(OutboxMessage, operation, "payload"),
        }
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.display(description=_("lease expires"))
    def lease(self, operation: Operation) -> str:
        return story.when(operation.lease_expires_at) or "-"

    @admin.display(description=_("maintenance looks at it"))
    def due(self, operation: Operation) -> str:
        return story.when(operation.due_at)

    @admin.display(description=_("stored response"))
    def response(self, operation: Operation) -> str:
        size = getattr(operation, "body_bytes", None)
        if size is None:
            return gettext("not kept") if operation.is_final else gettext("none yet")
        if not getattr(operation, "may_show_body", False):
            return gettext("%s; you have no permission to see it") % _bytes(size)
        url = reverse(f"{self.admin_site.name}:idempotency_operation_body", args=[operation.pk])
        return format_html('{} · <a href="{}">{}</a>', _bytes(size), url, gettext("Show"))

    def get_urls(self) -> list[URLPattern]:
        body = path(
            "<uuid:pk>/body/",
            self.admin_site.admin_view(self.body_view),
            name="idempotency_operation_body",
        )
        return [body, *super().get_urls()]

    def body_view(self, request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
        """The stored headers and body. Who looks at them is written to the admin's log."""
        if not (self.has_view_permission(request) and self.has_view_body_permission(request)):
            raise PermissionDenied
        operation = Operation.objects.using(conf.USING).filter(pk=pk).first()
        if operation is None:
            raise Http404
        LogEntry.objects.log_actions(
            user_id=cast(int, request.user.pk),
            queryset=[operation],
            action_flag=CHANGE,
            change_message=gettext("Looked at the stored response."),
            single_object=True,
        )
        headers = json.loads(operation.headers) if operation.headers else {}
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "original": operation,
            "title": gettext("Stored response"),
            "headers": sorted(headers.items()),
            "body": _readable(operation),
            "media": self.media,
        }
        return TemplateResponse(request, "admin/idempotency/operation/body.html", context)


def _is(condition: Q) -> ExpressionWrapper[Q]:
    return ExpressionWrapper(condition, output_field=BooleanField())


def _children(model: Any, operation: Operation, *without: str) -> list[Any]:
    rows = model._base_manager.using(operation._state.db).filter(operation_id=operation.pk)
    return list(rows.defer(*without).order_by("pk")[:MOST])


def _bytes(size: int) -> str:
    return gettext("%s bytes") % size


def _readable(operation: Operation) -> str:
    """The body as text: indented if it is JSON; its size if it is neither text nor decodable."""
    if operation.body is None:
        return gettext("not kept") if operation.is_final else gettext("none yet")
    body = bytes(operation.body)
    if conf.CODEC is not None:
        try:
            body = conf.CODEC.decode(body)
        except Exception:  # written by the codec of another policy
            return gettext("%s bytes, encoded") % len(body)
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return gettext("%s bytes, not text") % len(body)
    with suppress(ValueError):
        text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    return text if len(text) <= LONG else f"{text[:LONG]}…"
