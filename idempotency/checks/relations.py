"""Foreign keys of other apps to `Operation`: the purge must not take business rows with it."""

from __future__ import annotations

from django.core import checks
from django.core.checks import CheckMessage
from django.db import models

from ..models import Operation


def check_relations(**kwargs: object) -> list[CheckMessage]:
    messages: list[CheckMessage] = []
    for relation in Operation._meta.related_objects:
        field = relation.field
        if field.model._meta.app_label == Operation._meta.app_label:
            continue
        name = f"{field.model._meta.label}.{field.name}"
        on_delete = getattr(relation, "on_delete", None)
        if on_delete is models.CASCADE:
            messages.append(
                checks.Error(
                    f"{name} cascades: purging an operation deletes the {field.model._meta.verbose_name}.",
                    hint="Use null=True, on_delete=models.SET_NULL.",
                    obj=field.model,
                    id="idempotency.E060",
                )
            )
        elif on_delete in (models.PROTECT, models.RESTRICT):
            messages.append(
                checks.Warning(
                    f"{name} protects its operation: the purge stops at the first one that is due.",
                    hint="Use null=True, on_delete=models.SET_NULL, or store the operation's id only.",
                    obj=field.model,
                    id="idempotency.W061",
                )
            )
    return messages
