from django.contrib import admin
from django.http import HttpRequest

from .models import Charge


@admin.register(Charge)
class ChargeAdmin(admin.ModelAdmin):
    """Read only: the shop does not write the provider's books."""

    list_display = ["reference", "amount", "card", "account", "idempotency_key", "created_at"]
    list_filter = ["account"]
    search_fields = ["reference", "idempotency_key"]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Charge | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Charge | None = None) -> bool:
        return False
