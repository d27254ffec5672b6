"""The database's clock as an ORM expression, and durations as settings give them."""

from __future__ import annotations

from datetime import timedelta

from django.db import connections
from django.db.models import DateTimeField
from django.db.models.expressions import RawSQL

from .. import db


def now(using: str, *, after: float = 0.0) -> RawSQL:
    """The time `after` seconds from now. Django's Now() is in the session's time zone on MySQL."""
    sql = db.statements(connections[using])
    # Rounded: SQLite reads no exponents.
    return RawSQL(sql.after, [round(after, 3)], output_field=DateTimeField())  # noqa: S611


def seconds(duration: float | timedelta) -> float:
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
