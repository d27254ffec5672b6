"""The statements a relay repeats for every batch.

Written out, because building them with the ORM would cost about as much as running them. Nothing here
depends on the kind of database but what `db` and Django's features say.
"""
# ruff: noqa: S608 (table and columns come from the model, ids from the database; values are bound)

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from django.conf import settings
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from .. import db
from ..conf import conf
from ..exceptions import ConfigurationError
from ..models import OutboxMessage

#: What is read of a message.
COLUMNS = (
    "id",
    "message_id",
    "topic",
    "payload",
    "ordering_key",
    "operation_id",
    "attempts",
    "created_at",
    "owner",
)  # fmt: skip
PK, KEY, OWNER = COLUMNS.index("id"), COLUMNS.index("ordering_key"), COLUMNS.index("owner")
CREATED = COLUMNS.index("created_at")

Row = Sequence[Any]

#: The statuses of a message that hold up later ones of its ordering key.
BLOCKING = {"block": "'pending', 'dead'", "skip": "'pending'"}


class Statements:
    """The statements for one connection; `rule` says what a dead letter does to its ordering key."""

    def __init__(self, connection: BaseDatabaseWrapper, rule: str) -> None:
        q, sql, features = connection.ops.quote_name, db.statements(connection), connection.features
        self.connection = connection
        self.rule = rule
        t = q(OutboxMessage._meta.db_table)
        columns = ", ".join(f"{t}.{q(column)}" for column in COLUMNS)
        if connection.vendor == "postgresql":
            # Django has psycopg parse timestamps in Python, which costs more than all else that is read.
            columns = columns.replace(
                f"{t}.{q('created_at')}", f"EXTRACT(EPOCH FROM {t}.{q('created_at')})::float8"
            )
        lease = f"{t}.{q('lease_expires_at')}"
        due = (
            f"{t}.{q('status')} = 'pending' AND {t}.{q('available_at')} <= {sql.now} "
            f"AND ({lease} IS NULL OR {lease} <= {sql.now})"
        )

        def blocks(row: str) -> str:
            # The first two conditions are those of the partial index, word for word (SQLite).
            return (
                f"NOT ({row}.{q('ordering_key')} = '') AND NOT ({row}.{q('status')} = 'sent') "
                f"AND {row}.{q('status')} IN ({BLOCKING[rule]})"
            )

        locked = ""
        if features.has_select_for_update:
            locked = connection.ops.for_update_sql(
                skip_locked=features.has_select_for_update_skip_locked,
                no_key=features.has_select_for_no_key_update,
            )

        self.is_due = f"SELECT 1 FROM {t} WHERE {due} LIMIT 1"
        #: SQLite: a transaction that has read first may be refused the write lock later.
        self.first = (
            ""
            if features.has_select_for_update
            else f"UPDATE {t} SET {q('owner')} = '' WHERE {q('id')} = 0"
        )
        self.edge = f"SELECT {q('available_at')} FROM {t} WHERE {due} ORDER BY {q('available_at')} LIMIT 1 OFFSET %s"
        older = (
            f"SELECT 1 FROM {t} older WHERE older.{q('ordering_key')} = {t}.{q('ordering_key')} "
            f"AND {blocks('older')} AND older.{q('id')} < {t}.{q('id')}"
        )
        head = f"({t}.{q('ordering_key')} = '' OR NOT EXISTS ({older}))"
        order = f"ORDER BY {t}.{q('available_at')}, {t}.{q('id')} LIMIT %s {locked}"
        candidates = f"SELECT {columns} FROM {t} WHERE {due}"
        self.oldest = f"{candidates} {order}"
        key = q("ordering_key")
        # MySQL's collations make one group of keys that differ in case, and name it after one of them.
        exact = f"CAST({key} AS BINARY)" if connection.vendor == "mysql" else key
        #: The first message of each ordering key that is none of these.
        self.others = (
            f"SELECT MIN({key}), MIN({q('id')}) FROM {t} WHERE {blocks(t)} AND {q('id')} < %s "
            f"AND NOT ({q('id')} {{ids}}) AND {key} IN ({{keys}}) GROUP BY {exact}"
        )
        self.heads = f"{candidates} AND {head} {order}"
        self.heads_before = f"{candidates} AND {t}.{q('available_at')} <= %s AND {head} {order}"
        self.followers = (
            f"SELECT {columns}, CASE WHEN {due} THEN 1 ELSE 0 END FROM {t} WHERE {blocks(t)} "
            f"AND {q('id')} > %s AND {q('ordering_key')} IN "
        )
        self.in_order = f"ORDER BY {q('id')} LIMIT %s"
        self.claim = (
            f"UPDATE {t} SET {q('owner')} = %s, {q('lease_expires_at')} = {sql.after}, "
            f"{q('attempts')} = {q('attempts')} + 1 WHERE {due} AND {q('id')} {{ids}}"
        )
        self.sent = (
            f"UPDATE {t} SET {q('status')} = 'sent', {q('sent_at')} = {sql.now}, "
            f"{q('available_at')} = {sql.now}, {q('last_error')} = '' WHERE {q('owner')} = %s AND {q('id')} {{ids}}"
        )
        #: PostgreSQL reads one array faster than a list of numbers.
        self.ids = "= ANY ('{{{}}}'::bigint[])" if connection.vendor == "postgresql" else "IN ({})"
        self.converters = list(_converters(connection))

    def ask(self, sql: str, params: Sequence[Any]) -> list[Any]:
        """The rows of a query as the database gives them."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            return list(cursor.fetchall())

    def rows(self, sql: str, params: Sequence[Any]) -> list[Row]:
        """The rows of a query for COLUMNS (and perhaps more) as Python values."""
        found: list[Row] = self.ask(sql, params)
        if not self.converters:
            return found
        converted: list[Row] = []
        for raw in found:
            row = list(raw)
            for index, convert in self.converters:
                row[index] = convert(row[index])
            converted.append(row)
        return converted

    def write(self, sql: str, params: Sequence[Any], ids: Collection[int] = ()) -> int:
        """Run an update, for these ids if it has a place for them; returns the number of matched rows."""
        with self.connection.cursor() as cursor:
            cursor.execute(self._filled(sql, ids), params)
            return int(cursor.rowcount)

    def first_others(self, rows: Collection[Row]) -> dict[str, int]:
        """For the ordering keys of these rows, the oldest message that comes before them and is not theirs."""
        ids, keys = [row[PK] for row in rows], {row[KEY] for row in rows}
        if not keys:
            return {}
        sql = self._filled(self.others, ids).replace("{keys}", ", ".join(["%s"] * len(keys)))
        return dict(self.ask(sql, [max(ids), *keys]))

    def _filled(self, sql: str, ids: Collection[int]) -> str:
        return sql.replace("{ids}", self.ids.format(",".join(map(str, ids))))


def _converters(connection: BaseDatabaseWrapper) -> Iterator[tuple[int, Callable[[Any], Any]]]:
    """What turns the values of this database into those of the fields, by position."""
    if connection.vendor == "postgresql":
        yield CREATED, _aware if settings.USE_TZ else _naive
        return
    for index, name in enumerate(COLUMNS):
        field: Any = OutboxMessage._meta.get_field(name)
        column = field.get_col(OutboxMessage._meta.db_table)
        for convert in (
            *connection.ops.get_db_converters(column),
            *column.get_db_converters(connection),
        ):
            yield index, partial(_convert, convert, column, connection)


def _aware(epoch: float) -> datetime:
    return datetime.fromtimestamp(epoch, UTC)


def _naive(epoch: float) -> datetime:
    return datetime.fromtimestamp(epoch, timezone.get_default_timezone()).replace(tzinfo=None)


def _convert(convert: Any, column: Any, connection: BaseDatabaseWrapper, value: Any) -> Any:
    return convert(value, column, connection)


def statements(using: str) -> Statements:
    """The statements for this thread's connection and the current settings."""
    rule = conf.OUTBOX_DEAD_HEAD
    if rule not in BLOCKING:
        raise ConfigurationError(f'OUTBOX_DEAD_HEAD is "block" or "skip", not {rule!r}')
    connection = connections[using]
    found = connection.__dict__.get("_outbox_statements")
    if found is None or found.rule != rule:
        found = Statements(connection, rule)
        connection.__dict__["_outbox_statements"] = found
    return found
