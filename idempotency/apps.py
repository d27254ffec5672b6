from __future__ import annotations

from importlib.util import find_spec

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class IdempotencyConfig(AppConfig):
    name = "idempotency"
    verbose_name = _("Idempotency")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks

        checks.register()
        if find_spec("rest_framework"):
            from .contrib import rest_framework  # noqa: F401  (registers how its requests are protected)
