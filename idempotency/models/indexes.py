"""An index that leaves out rows nobody looks up by it."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.models import Q


class PartialIndex(models.Index):
    """An index of the rows that meet `where`; of all rows where the database has only that (MySQL).

    Django's own `condition` leaves such a database without the index.
    """

    def __init__(self, *, where: Q, **kwargs: Any) -> None:
        self.where = where
        super().__init__(**kwargs)

    def deconstruct(self) -> Any:
        path, args, kwargs = super().deconstruct()
        return path, args, {**kwargs, "where": self.where}

    def create_sql(
        self,
        model: type[models.Model],
        schema_editor: BaseDatabaseSchemaEditor,
        using: str = "",
        **kwargs: Any,
    ) -> Any:
        is_partial = schema_editor.connection.features.supports_partial_indexes
        condition = self.where if is_partial else None
        index = models.Index(fields=self.fields, name=self.name, condition=condition)
        return index.create_sql(model, schema_editor, using, **kwargs)
