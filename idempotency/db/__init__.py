"""The only place that asks what the database can do: claim, lock, clock, retryable errors.

The SQL is in `statements`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django.db import DatabaseError, InterfaceError, OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import DateTimeField
from django.db.models.expressions import RawSQL

from ..models import Branch, Operation, StepStatus
from .statements import INSERTED, PLAIN, READ, Statements

#: Seconds within which every claimant has taken its lock, unless it was stopped in between.
STARTING = 2.0

#: SQLSTATE classes and MySQL error numbers after which the same statements may simply succeed.
_TRANSIENT_SQLSTATES = ("40001", "40P01", "55P03", "57P", "08", "53", "25P03", "25006")
_TRANSIENT_ERRNOS = {
    *(1020, 1205, 1213),  # changed since read, lock timeout, deadlock
    *(1040, 1203, 2002, 2003),  # no connection to be had
    *(1053, 1927, 2006, 2013, 2055, 4031),  # the connection is gone
    1290,  # a server that has become a replica
}
_SQLITE_BUSY = ("locked", "busy")


def is_transient(error: BaseException) -> bool:
    """Deadlock, serialization failure, lock timeout, lost connection, busy SQLite."""
    if not isinstance(error, DatabaseError | InterfaceError):
        return False
    if error.args and isinstance(error.args[0], int):  # MySQL; its SQLSTATEs say too little
        return isinstance(error, InterfaceError) or (
            isinstance(error, OperationalError) and error.args[0] in _TRANSIENT_ERRNOS
        )
    if state := _sqlstate(error):
        return state.startswith(_TRANSIENT_SQLSTATES)
    if isinstance(error, InterfaceError):
        return True
    if not isinstance(error, OperationalError):
        return False
    if type(error.__cause__).__module__ == "sqlite3":
        return any(word in str(error) for word in _SQLITE_BUSY)
    return True  # psycopg without an SQLSTATE: the connection broke before the server could say why


def is_lock_timeout(error: BaseException) -> bool:
    """Whether somebody else kept a lock for longer than this session waits."""
    return error.args[:1] == (1205,) or _sqlstate(error) == "55P03"


def _sqlstate(error: BaseException) -> str:
    cause = error.__cause__ or error
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""


def now(using: str, *, after: float = 0) -> RawSQL:
    """The database's time `after` seconds from now, for the ORM.

    Django's Now() is in the session's time zone on MySQL, where the columns hold UTC.
    """
    sql = statements(connections[using])
    return RawSQL(sql.after, [round(after, 3)], output_field=DateTimeField())  # noqa: S611


def in_transaction(using: str) -> bool:
    """Whether a transaction of the caller's is open: an atomic block, or autocommit switched off."""
    connection = connections[using]
    is_manual = connection.connection is not None and not connection.autocommit
    return connection.in_atomic_block or is_manual


def drop_if_broken(using: str) -> None:
    """Close a connection whose server side is gone, so that the next statement opens another."""
    connection = connections[using]
    if (
        connection.connection is None
        or connection.in_atomic_block  # not in_transaction(): a lost connection forgets autocommit
        or not connection.errors_occurred
    ):
        return
    if not connection.is_usable():
        connection.close()


_statements: dict[str, Statements] = {}


def statements(connection: BaseDatabaseWrapper) -> Statements:
    found = _statements.get(connection.alias)
    if found is None or found.vendor != connection.vendor:
        found = _statements[connection.alias] = Statements(connection)
    return found


def _pk(connection: BaseDatabaseWrapper, value: uuid.UUID) -> Any:
    return Operation._meta.pk.get_db_prep_value(value, connection, prepared=True)


def _operation(connection: BaseDatabaseWrapper, pk: uuid.UUID, row: Sequence[Any]) -> Operation:
    operation = Operation.from_db(connection.alias, ("id", *READ), (pk, *row[: len(READ)]))
    operation.expired, operation.forgotten = bool(row[-3]), bool(row[-2])
    operation.event_count = row[-1]
    return operation


def claim(
    using: str, values: Mapping[str, Any], due: float, lease: float | None
) -> tuple[bool, Operation | None]:
    """Insert the operation unless it exists. Returns (is it new, the row that was there).

    (False, None) means the row vanished meanwhile (purged) or appeared just now: ask again. A plain
    operation is called new also when it appeared just now: its lock, or its owner, tells.
    Never waits for an executor that holds the row's lock; raises a lock timeout, which leaves a caller's
    transaction as it was, when the row was inserted in a transaction that stays open. `due` and
    `lease` are in seconds.
    """
    connection = connections[using]
    sql = statements(connection)
    pk = values["id"]
    key = _pk(connection, pk)
    params = [key, *(values[name] for name in INSERTED[1:]), lease, due]
    with connection.cursor() as cursor:
        if sql.vendor == "postgresql":
            # A claim that is evidence of an interrupted attempt must survive a crash by itself.
            if lease is None and not in_transaction(using):
                plain = [values[name] for name in PLAIN[1:]]
                cursor.execute(sql.claim_plain, [key, key, *plain, due])
                row = cursor.fetchone()
                return row is None, None if row is None else _operation(connection, pk, row)
            # atomic() would leave a lost connection with autocommit off "in a transaction" for good.
            savepoint = connection.savepoint() if in_transaction(using) else None
            try:
                cursor.execute(sql.claim, [key, *params])
            except DatabaseError as error:
                if savepoint and is_lock_timeout(error):
                    connection.savepoint_rollback(savepoint)
                raise
            _, is_new, _, *row = cursor.fetchone()
            if savepoint:
                connection.savepoint_commit(savepoint)
            return is_new, None if row[0] is None else _operation(connection, pk, row)
        if sql.upserts:
            try:
                cursor.execute(sql.claim, params)
            except OperationalError as error:
                if not is_lock_timeout(error):
                    raise
                return False, _read(connection, cursor, sql, pk, key)
            row = cursor.fetchall()[0]
            if row[READ.index("owner")] == values["owner"]:
                return True, None
            return False, _operation(connection, pk, row)
        found = _read(connection, cursor, sql, pk, key)
        if found is not None:
            return False, found
        cursor.execute(sql.claim, params)
        return cursor.rowcount == 1, None


def _read(
    connection: BaseDatabaseWrapper, cursor: Any, sql: Statements, pk: uuid.UUID, key: Any
) -> Operation | None:
    cursor.execute(sql.read, [key])
    row = cursor.fetchone()
    return None if row is None else _operation(connection, pk, row)


def read(using: str, pk: uuid.UUID) -> Operation | None:
    """The row as it is now on the primary."""
    connection = connections[using]
    with connection.cursor() as cursor:
        return _read(connection, cursor, statements(connection), pk, _pk(connection, pk))


class Locked(NamedTuple):
    """The state that decides, seen while holding the row's lock."""

    status: str
    attempt: int
    owner: str
    forgotten: bool | None
    last_error: str
    leased: bool | None
    #: Executors that vanished without recording an error.
    interruptions: int


def lock(using: str, pk: uuid.UUID, *, wait: bool = False) -> Locked | None:
    """Take the row's lock inside the current transaction; None: somebody else has it, or no row.

    With `wait`, None means that there is no row.
    """
    connection = connections[using]
    sql = statements(connection)
    with connection.cursor() as cursor:
        cursor.execute(sql.lock_waiting if wait else sql.lock, [_pk(connection, pk)])
        rows = cursor.fetchall()
    return Locked(*rows[0]) if rows else None


def execute(using: str, statement: str, params: Sequence[Any], pk: uuid.UUID) -> int:
    """Run one of the row's updates (the id is its last parameter); returns the matched rows."""
    connection = connections[using]
    sql = statements(connection)
    with connection.cursor() as cursor:
        cursor.execute(getattr(sql, statement), [*params, _pk(connection, pk)])
        return int(cursor.rowcount)


def add_event(using: str, pk: uuid.UUID, kind: str, attempt: int, detail: str) -> None:
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(
            statements(connection).event, [_pk(connection, pk), kind, attempt, detail[:255]]
        )


def note(using: str, operation: Operation, kind: str, detail: str, limit: int) -> None:
    """Write an event unless the operation has `limit` of them."""
    if operation.event_count >= limit:
        return
    connection = connections[using]
    sql = statements(connection)
    key = _pk(connection, operation.pk)
    params = [key, kind, operation.attempt, detail[:255]]
    if sql.vendor == "postgresql":
        params += [key, limit]
    with connection.cursor() as cursor:
        cursor.execute(sql.note if in_transaction(using) else sql.note_alone, params)


def add_step(
    using: str,
    pk: uuid.UUID,
    name: str,
    *,
    attempt: int,
    is_external: bool,
    result: str | None,
    compensation: str = "",
    reconciler: str = "",
) -> None:
    """Record a step: as done when it is local, as started when it is external."""
    connection = connections[using]
    sql = statements(connection)
    status = StepStatus.STARTED if is_external else StepStatus.DONE
    key = _pk(connection, pk)
    values = [key, name, is_external, status, attempt, result, compensation, reconciler]
    with connection.cursor() as cursor:
        cursor.execute(sql.step_started if is_external else sql.step_done, values)


def visit_branch(
    using: str, pk: uuid.UUID, transaction: str, name: str, status: str
) -> tuple[bool, str]:
    """Insert the branch with this status, or lock the one that is there: (is it new, its status).

    One upsert, so that rivals queue for the row's exclusive lock instead of sharing it, which would
    deadlock on MySQL, and so that PostgreSQL's transaction survives a conflict.
    """
    connection = connections[using]
    key = _pk(connection, pk)
    table = Branch._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(statements(connection).branch, [key, transaction, name, status])
        quote = connection.ops.quote_name
        # Our own lock makes this the latest row, but under REPEATABLE READ only a locking read sees it.
        locking = " FOR UPDATE" if connection.vendor == "mysql" else ""
        cursor.execute(
            f"SELECT {quote('calls')}, {quote('status')} FROM {quote(table)} WHERE {quote('id')} = %s{locking}",
            [key],
        )
        calls, found = cursor.fetchone()
    return calls == 1, found


def take_turn(using: str, pk: uuid.UUID) -> None:
    """Lock the turn until the current transaction ends, waiting for whoever has it."""
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(statements(connection).turn, [_pk(connection, pk)])
