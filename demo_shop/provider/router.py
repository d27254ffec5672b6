"""Keeps the provider's books in the provider's own database."""

from __future__ import annotations

from typing import Any

from django.db.models import Model


class ProviderRouter:
    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        return "provider" if model._meta.app_label == "provider" else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return (db == "provider") == (app_label == "provider")
