"""Read-only admin pages, and a change list that never counts: it pages by the last row seen."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest

#: Query parameters: the id of the row before, or after, the page.
AFTER, BEFORE = "after", "before"


if TYPE_CHECKING:
    BaseAdmin = admin.ModelAdmin[Any]  # not subscriptable at run time
else:
    BaseAdmin = admin.ModelAdmin


class ReadOnlyAdmin(BaseAdmin):
    """Who may do what: look."""

    list_per_page = 50
    sortable_by = ()
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER

    class Media:
        css: ClassVar = {"all": ("idempotency/admin.css",)}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class KeysetChangeList(ChangeList):
    """Newest first by `created_at`; a page costs the same wherever it is. Needs unsortable columns.

    Where a page starts is a row's id, and the database compares with that row's own time: a time
    that went through Python may have lost what SQLite stores.
    """

    order: ClassVar[tuple[str, ...]] = ("-created_at", "-pk")
    pk_type: ClassVar[Callable[[str], Any]] = uuid.UUID
    #: Query strings of the neighbouring pages; None where there is none.
    previous_page: str | None = None
    next_page: str | None = None

    def get_filters_params(self, params: Any = None) -> Any:
        found = super().get_filters_params(params)
        return {name: value for name, value in found.items() if name not in (AFTER, BEFORE)}

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        return super().get_query_string(new_params, [*(remove or ()), AFTER, BEFORE])

    def get_results(self, request: HttpRequest) -> None:
        size = self.list_per_page
        after, before = (self._pk(self.params.pop(name, "")) for name in (AFTER, BEFORE))
        if before is not None:
            rows = self._beyond(before, backwards=True)
        elif after is not None:
            rows = self._beyond(after)
        else:
            rows = self.queryset.order_by(*self.order)
        found = list(rows[: size + 1])
        more, found = len(found) > size, found[:size]
        if before is not None:
            found.reverse()
        newer = more if before is not None else after is not None
        older = before is not None or more
        if found and newer:
            self.previous_page = self.get_query_string({BEFORE: str(found[0].pk)})
        if found and older:
            self.next_page = self.get_query_string({AFTER: str(found[-1].pk)})
        self.result_list = found
        self.result_count = self.full_result_count = len(found)
        self.show_full_result_count = False
        self.show_admin_actions = bool(found)
        self.can_show_all = self.multi_page = False
        self.paginator = Paginator(found, size)  # of a list: counts no table

    def _pk(self, value: str) -> Any:
        try:
            return type(self).pk_type(value)
        except ValueError:
            return None

    def _beyond(self, pk: Any, *, backwards: bool = False) -> QuerySet[Model]:
        """The rows after this one in the list, nearest first; or those before it."""
        rows: QuerySet[Model]
        this = self.root_queryset.order_by().filter(pk=pk).values("created_at")
        if backwards:
            rows = self.queryset.filter(Q(created_at__gt=this) | Q(pk__gt=pk), created_at__gte=this)
            rows = rows.order_by("created_at", "pk")
            return rows
        rows = self.queryset.filter(Q(created_at__lt=this) | Q(pk__lt=pk), created_at__lte=this)
        rows = rows.order_by("-created_at", "-pk")
        return rows


class IdChangeList(KeysetChangeList):
    """Newest first by a primary key that counts."""

    order = ("-pk",)
    pk_type = int

    def _beyond(self, pk: Any, *, backwards: bool = False) -> QuerySet[Model]:
        rows: QuerySet[Model]
        if backwards:
            rows = self.queryset.filter(pk__gt=pk).order_by("pk")
        else:
            rows = self.queryset.filter(pk__lt=pk).order_by("-pk")
        return rows
