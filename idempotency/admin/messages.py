"""The admin page of outbox messages: what waits and why, what was given up, and a way to send it again."""

from __future__ import annotations

import uuid
from typing import Any, cast

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from .. import db, outbox
from ..conf import conf
from ..models import MessageStatus, OutboxMessage
from . import story
from .pages import IdChangeList, ReadOnlyAdmin
from .search import UUID

LOOKS = {
    MessageStatus.PENDING: story.WAITING,
    MessageStatus.SENT: story.GOOD,
    MessageStatus.DEAD: story.BAD,
}


@admin.register(OutboxMessage)
class OutboxMessageAdmin(ReadOnlyAdmin):
    """Read-only, but for `send_again`. Payloads are not shown: they may hold people's data."""

    list_display = ("topic", "state", "ordering_key", "created")
    list_filter = ("status",)
    ordering = ("-pk",)
    search_fields = ("message_id",)  # shows the box; get_search_results says what it finds
    search_help_text = _(
        "Paste a message's id, the id of the operation that wrote it, or the ordering key of messages "
        "that are not sent yet."
    )
    actions = ("send_again",)
    fields = ("message_id", "topic", "ordering_key", "written_by", "attempts", "created", "due")

    def has_send_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("idempotency.change_outboxmessage")

    # The list.

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[IdChangeList]:
        return IdChangeList

    def get_queryset(self, request: HttpRequest) -> QuerySet[OutboxMessage]:
        rows = OutboxMessage.objects.using(conf.USING)
        return rows.defer("payload").order_by(*self.ordering)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[OutboxMessage], search_term: str
    ) -> tuple[QuerySet[OutboxMessage], bool]:
        """One look-up in one index after the other; a term that is several of these is the first."""
        pasted = search_term.strip()
        if not pasted:
            return queryset, False
        for found in UUID.findall(pasted):
            for match in ({"message_id": uuid.UUID(found)}, {"operation_id": uuid.UUID(found)}):
                if self.get_queryset(request).filter(**match).exists():
                    return queryset.filter(**match), False
        return queryset.filter(_unsent(pasted)), False

    @admin.display(description=_("state"))
    def state(self, message: OutboxMessage) -> str:
        note = message.last_error if message.status != MessageStatus.SENT else ""
        return format_html(
            '<span class="idempotency-state {}">{}</span> <small>{}</small>',
            LOOKS[MessageStatus(message.status)],
            message.get_status_display(),
            note,
        )

    @admin.display(description=_("created"))
    def created(self, message: OutboxMessage) -> str:
        return story.when(message.created_at)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        context = {"title": capfirst(self.opts.verbose_name_plural), **(extra_context or {})}
        return super().changelist_view(request, context)

    @admin.action(description=_("Send again, with all attempts"), permissions=["send"])
    def send_again(self, request: HttpRequest, queryset: QuerySet[OutboxMessage]) -> None:
        chosen = list(queryset)
        count = outbox.redrive(queryset)
        LogEntry.objects.log_actions(
            user_id=cast(int, request.user.pk),
            queryset=[message for message in chosen if message.status != MessageStatus.SENT],
            action_flag=CHANGE,
            change_message=gettext("Asked to be sent again."),
        )
        text = ngettext("%d message will be sent again.", "%d messages will be sent again.", count)
        self.message_user(request, text % count, messages.SUCCESS if count else messages.INFO)
        if count < len(chosen):
            text = gettext("The others are sent, in the hands of a relay, or have not failed yet.")
            self.message_user(request, text, messages.INFO)

    # One message.

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        message = context["original"]
        first = self._held_by(message)
        context |= {
            "title": message.topic,
            "subtitle": None,
            "look": LOOKS[MessageStatus(message.status)],
            "headline": _headline(message, is_held=first is not None),
            "first": first,
            "blocks": message.status == MessageStatus.DEAD
            and message.ordering_key
            and conf.OUTBOX_DEAD_HEAD == "block",
        }
        return super().render_change_form(request, context, *args, **kwargs)

    def _held_by(self, message: OutboxMessage) -> OutboxMessage | None:
        """The oldest message that has to go first, if there is one."""
        if message.status != MessageStatus.PENDING or not message.ordering_key:
            return None
        rows = OutboxMessage.objects.using(message._state.db).defer("payload")
        before = rows.filter(_unsent(message.ordering_key), pk__lt=message.pk)
        if conf.OUTBOX_DEAD_HEAD == "skip":
            before = before.exclude(status=MessageStatus.DEAD)
        return before.order_by("pk").first()

    @admin.display(description=_("operation"))
    def written_by(self, message: OutboxMessage) -> str:
        if message.operation_id is None:
            return "-"
        url = reverse(
            f"{self.admin_site.name}:idempotency_operation_change", args=[message.operation_id]
        )
        return format_html('<a href="{}">{}</a>', url, message.operation_id)

    @admin.display(description=_("due"))
    def due(self, message: OutboxMessage) -> str:
        return story.when(message.available_at) if message.status == MessageStatus.PENDING else "-"


def _unsent(ordering_key: str) -> Q:
    """As the index of these rows says it."""
    return ~Q(ordering_key="") & ~Q(status=MessageStatus.SENT) & Q(ordering_key=ordering_key)


def _headline(message: OutboxMessage, *, is_held: bool) -> str:
    attempts = message.attempts
    if message.status == MessageStatus.SENT:
        return gettext("Sent at %s.") % story.when(message.sent_at)
    if message.status == MessageStatus.DEAD:
        return (
            ngettext("Given up after %d attempt.", "Given up after %d attempts.", attempts)
            % attempts
        )
    if message.owner:
        leased = OutboxMessage.objects.using(message._state.db).filter(
            pk=message.pk, lease_expires_at__gt=db.now(message._state.db or conf.USING)
        )
        if leased.exists():
            return gettext("A relay has it in hand.")
        return gettext("The relay that had it in hand is gone; the next one tries it alone.")
    if is_held:
        return gettext("It waits for an earlier message of its ordering key.")
    if attempts:
        text = gettext("Attempt %(attempt)d failed; the next is due at %(due)s.")
        return text % {"attempt": attempts, "due": story.when(message.available_at)}
    return gettext("It waits for the relay, which may take it from %s on.") % story.when(
        message.available_at
    )
