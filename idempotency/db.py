"""The only file that asks what the database can do: claim, lock, clock, retryable errors.

SQL is written out instead of built by the ORM because these statements run on every request
(building them would cost more than running them), and because none of them exists in the ORM:
an insert that yields to an earlier row and returns it, on the clock of the database.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django.db import DatabaseError, InterfaceError, OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import DateTimeField
from django.db.models.expressions import RawSQL

from .models import Branch, Event, Operation, Reference, Step, StepStatus, Turn

#: What a duplicate's answer needs, beside the id that is known already.
READ = (
    "scope",
    "key",
    "name",
    "status",
    "fingerprint",
    "attempt",
    "owner",
    "stepwise",
    "code",
    "headers",
    "body",
    "last_error",
)  # fmt: skip

#: What a step's row is written with, beside its times.
STEP = (
    "operation_id",
    "name",
    "is_external",
    "status",
    "attempt",
    "result",
    "compensation",
    "reconciler",
)

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
    cause = error.__cause__ or error
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    if state:
        return str(state).startswith(_TRANSIENT_SQLSTATES)
    if isinstance(error, InterfaceError):
        return True
    if not isinstance(error, OperationalError):
        return False
    if type(cause).__module__ == "sqlite3":
        return any(word in str(error) for word in _SQLITE_BUSY)
    return True  # psycopg without an SQLSTATE: the connection broke before the server could say why


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
    if connection.connection is None or in_transaction(using) or not connection.errors_occurred:
        return
    if not connection.is_usable():
        connection.close()


def _is_lock_timeout(error: OperationalError) -> bool:
    return bool(error.args) and error.args[0] == 1205


#: What tells one plain operation from another when it is claimed.
PLAIN = ("id", "scope", "key", "name", "fingerprint", "owner", "arguments")

#: Makes the transaction it is executed in commit without waiting for the disk (PostgreSQL).
UNFLUSHED = "set_config('synchronous_commit', 'off', true)"


class Statements:
    """The protocol's statements for one kind of database.

    `claim` comes in three shapes, by what the database can return from an insert that conflicts:
    PostgreSQL must not touch the existing row (the executor holds its lock and an update would wait),
    MariaDB and SQLite return it from a no-op upsert (SQLite has no row locks; MariaDB gives up at
    once when the row is locked), and MySQL can return nothing, so it reads first.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.vendor = connection.vendor
        self.is_mariadb = bool(getattr(connection, "mysql_is_mariadb", False))
        features = connection.features
        self.upserts = self.vendor == "sqlite" or self.is_mariadb
        self.row_locks = bool(features.has_select_for_update)
        quote = connection.ops.quote_name
        self.table = quote(Operation._meta.db_table)
        self.events = quote(Event._meta.db_table)
        steps = quote(Step._meta.db_table)

        if self.vendor == "postgresql":
            now = "STATEMENT_TIMESTAMP()"
            self.after = "STATEMENT_TIMESTAMP() + %s * INTERVAL '1 second'"
        elif self.vendor == "mysql":
            # Not NOW(): the session time zone is the server's, the column holds UTC.
            now = "UTC_TIMESTAMP(6)"
            self.after = "UTC_TIMESTAMP(6) + INTERVAL %s SECOND"
        else:
            now = "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW')"
            self.after = "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW', %s || ' seconds')"
        self.now = now
        q = quote
        t = self.table
        columns = ", ".join(f"{t}.{q(c)}" for c in READ)
        events_of_row = f"SELECT COUNT(*) FROM {self.events} WHERE {q('operation_id')} = "
        # PostgreSQL plans anew each time, so a first request would pay for what only a duplicate
        # needs: there the count is part of `note`. MySQL would lock what such an insert counts.
        event_count = "0" if self.vendor == "postgresql" else f"({events_of_row}{t}.{q('id')})"
        expired, forgotten = (f"{t}.{q(c)} <= {now}" for c in ("expires_at", "tombstone_until"))
        self.read_columns = f"{columns}, {expired}, {forgotten}, {event_count}"
        self.read = f"SELECT {self.read_columns} FROM {t} WHERE {q('id')} = %s"

        inserted = (
            "id",
            "scope",
            "key",
            "name",
            "status",
            "fingerprint",
            "attempt",
            "owner",
            "stepwise",
            "arguments",
        )
        into = (
            f"INTO {t} ({', '.join(map(q, inserted))}, "
            f"{q('lease_expires_at')}, {q('created_at')}, {q('due_at')})"
        )
        values = f"{', '.join(['%s'] * len(inserted))}, {self.after}, {now}, {self.after}"
        self.insert = f"{into} VALUES ({values})"
        if self.vendor == "postgresql":
            # Even DO NOTHING waits for a transaction that has updated the row: look first.
            absent = f"found.{q('scope')} IS NULL"
            self.claim = (
                f"WITH found AS (SELECT {self.read_columns} "
                f"FROM (SELECT 1) one LEFT JOIN {t} ON {t}.{q('id')} = %s), "
                f"claimed AS (INSERT {into} SELECT {values} FROM found WHERE {absent} "
                f"ON CONFLICT ({q('id')}) DO NOTHING RETURNING 1) "
                "SELECT (SELECT 1 FROM claimed), found.* FROM found"
            )
            # The usual one: planning a join and constants that are always the same costs a fifth of
            # it. Its commit need not wait for the disk: the log is flushed in order, so the commit of
            # the effects flushes the claim too, and a crash before that leaves nothing to protect.
            columns = ", ".join(map(q, (*PLAIN, "status", "attempt", "created_at", "due_at")))
            self.claim_plain = (
                f"WITH found AS ({self.read}), claimed AS (INSERT INTO {t} ({columns}) "
                f"SELECT {', '.join(['%s'] * len(PLAIN))}, 'processing', 1, {now}, {self.after} "
                f"WHERE NOT EXISTS (SELECT 1 FROM found) "
                f"ON CONFLICT ({q('id')}) DO NOTHING RETURNING {UNFLUSHED}) TABLE found"
            )
        elif self.is_mariadb:
            owner = f"{t}.{q('owner')}"
            self.claim = (
                f"SET STATEMENT innodb_lock_wait_timeout=0 FOR INSERT {self.insert} "
                f"ON DUPLICATE KEY UPDATE {owner} = {owner} RETURNING {self.read_columns}"
            )
        elif self.upserts:
            self.claim = (
                f"INSERT {self.insert} ON CONFLICT ({q('id')}) DO UPDATE SET {q('owner')} = {t}.{q('owner')} "
                f"RETURNING {self.read_columns}"
            )
        else:
            self.claim = f"INSERT IGNORE {self.insert}"

        locked = (
            f"{q('status')}, {q('attempt')}, {q('owner')}, "
            f"CASE WHEN {q('tombstone_until')} <= {now} THEN 1 ELSE 0 END, {q('last_error')}, "
            f"CASE WHEN {q('lease_expires_at')} > {now} THEN 1 ELSE 0 END, {q('interruptions')}"
        )
        self.lock = self.lock_waiting = f"SELECT {locked} FROM {t} WHERE {q('id')} = %s"
        # NO KEY: FOR UPDATE would also stop the foreign-key checks of other transactions' child rows.
        # SKIP LOCKED, not NOWAIT: it says the same without aborting the transaction it runs in.
        if self.vendor == "postgresql":
            self.lock_waiting += " FOR NO KEY UPDATE"
            self.lock = f"{self.lock_waiting} SKIP LOCKED"
        elif self.row_locks:
            self.lock = self.lock_waiting = f"{self.lock} FOR UPDATE"
            if features.has_select_for_update_skip_locked:
                self.lock += " SKIP LOCKED"
        else:
            # SQLite locks the whole database, and a transaction that has read may be refused the
            # write lock later: the first statement must write.
            self.lock = f"UPDATE {t} SET {q('owner')} = {q('owner')} WHERE {q('id')} = %s RETURNING {locked}"
            self.lock_waiting = self.lock

        settled = (
            f"UPDATE {t} SET {q('status')} = %s, {q('attempt')} = %s, {q('owner')} = %s, {q('code')} = %s, "
            f"{q('headers')} = %s, {q('body')} = %s, {q('last_error')} = '', {q('finished_at')} = {now}, "
            f"{q('expires_at')} = {self.after}, {q('tombstone_until')} = {self.after}, "
            f"{q('due_at')} = {self.after}, {q('lease_expires_at')} = NULL"
        )
        self.complete = f"{settled} WHERE {q('id')} = %s"
        self.start = (
            f"UPDATE {t} SET {q('attempt')} = %s, {q('owner')} = %s, {q('interruptions')} = %s, "
            f"{q('last_error')} = '', {q('lease_expires_at')} = {self.after} WHERE {q('id')} = %s"
        )
        self.fail = (
            f"UPDATE {t} SET {q('status')} = %s, {q('attempt')} = %s, {q('owner')} = %s, {q('last_error')} = %s, "
            f"{q('due_at')} = {self.after}, {q('lease_expires_at')} = NULL WHERE {q('id')} = %s"
        )
        self.renew = (
            f"UPDATE {t} SET {q('name')} = %s, {q('status')} = %s, {q('fingerprint')} = %s, {q('attempt')} = %s, "
            f"{q('owner')} = %s, {q('stepwise')} = %s, {q('code')} = NULL, {q('headers')} = NULL, "
            f"{q('body')} = NULL, {q('last_error')} = '', {q('created_at')} = {now}, {q('finished_at')} = NULL, "
            f"{q('expires_at')} = NULL, {q('tombstone_until')} = NULL, {q('checks')} = 0, {q('interruptions')} = 0, "
            f"{q('arguments')} = %s, {q('lease_expires_at')} = {self.after}, {q('due_at')} = {self.after} "
            f"WHERE {q('id')} = %s"
        )
        self.forget_steps = f"DELETE FROM {steps} WHERE {q('operation_id')} = %s"
        references = quote(Reference._meta.db_table)
        self.forget_references = f"DELETE FROM {references} WHERE {q('operation_id')} = %s"

        # Stepwise operations: ownership is a lease, and every write is conditional on its fence.
        fence = f"{q('owner')} = %s AND {q('attempt')} = %s AND {q('status')} = 'processing' AND {q('id')} = %s"
        self.finish = f"{settled} WHERE {fence}"
        # due_at stays: an update of unindexed columns only is a cheap (HOT) one on PostgreSQL.
        self.fence = f"UPDATE {t} SET {q('lease_expires_at')} = {self.after} WHERE {fence}"
        self.lease = (
            f"UPDATE {t} SET {q('attempt')} = %s, {q('owner')} = %s, {q('stepwise')} = %s, "
            f"{q('lease_expires_at')} = {self.after}, {q('due_at')} = {self.after} WHERE {q('id')} = %s"
        )
        self.release = (
            f"UPDATE {t} SET {q('status')} = %s, {q('last_error')} = %s, {q('lease_expires_at')} = NULL, "
            f"{q('due_at')} = {self.after} WHERE {fence}"
        )
        self.step_done = (
            f"INSERT INTO {steps} ({', '.join(map(q, STEP))}, {q('started_at')}, {q('done_at')}) "
            f"VALUES (%s, %s, %s, %s, %s, %s, %s, %s, {now}, {now})"
        )
        self.step_started = (
            f"INSERT INTO {steps} ({', '.join(map(q, STEP))}, {q('started_at')}) "
            f"VALUES (%s, %s, %s, %s, %s, %s, %s, %s, {now})"
        )
        self.step_finished = (
            f"UPDATE {steps} SET {q('status')} = %s, {q('attempt')} = %s, {q('result')} = %s, {q('done_at')} = {now} "
            f"WHERE {q('name')} = %s AND {q('operation_id')} = %s"
        )
        self.step_withdrawn = (
            f"DELETE FROM {steps} WHERE {q('name')} = %s AND {q('operation_id')} = %s"
        )
        # The count of calls says which of them made the row.
        branches = (
            f"{quote(Branch._meta.db_table)} ({q('id')}, {q('transaction')}, {q('name')}, {q('status')}, {q('calls')}, "
            f"{q('created_at')}, {q('changed_at')}) VALUES (%s, %s, %s, %s, 1, {now}, {now})"
        )
        calls = f"{quote(Branch._meta.db_table)}.{q('calls')}"
        self.branch = (
            f"INSERT INTO {branches} ON DUPLICATE KEY UPDATE {calls} = {calls} + 1"
            if self.vendor == "mysql"
            else f"INSERT INTO {branches} ON CONFLICT ({q('id')}) DO UPDATE SET {q('calls')} = {calls} + 1"
        )
        # One upsert takes the row's exclusive lock whether the row is there or not; an insert that
        # ignores conflicts would share it on MySQL, and two sharers deadlock when both want more.
        turns = f"{quote(Turn._meta.db_table)} ({q('id')}, {q('used_at')}) VALUES (%s, {now})"
        self.turn = (
            f"INSERT INTO {turns} ON DUPLICATE KEY UPDATE {q('used_at')} = {now}"
            if self.vendor == "mysql"
            else f"INSERT INTO {turns} ON CONFLICT ({q('id')}) DO UPDATE SET {q('used_at')} = {now}"
        )
        row = (
            f"({q('operation_id')}, {q('kind')}, {q('attempt')}, {q('detail')}, {q('created_at')})"
        )
        self.event = f"INSERT INTO {self.events} {row} VALUES (%s, %s, %s, %s, {now})"
        self.note = self.note_alone = self.event
        if self.vendor == "postgresql":
            self.note = (
                f"INSERT INTO {self.events} {row} SELECT %s, %s, %s, %s, {now} "
                f"WHERE ({events_of_row}%s) < %s"
            )
            self.note_alone = f"{self.note} RETURNING {UNFLUSHED}"


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
    Never waits for an executor that holds the row's lock. `due` and `lease` are in seconds.
    """
    connection = connections[using]
    sql = statements(connection)
    pk = values["id"]
    key = _pk(connection, pk)
    params = [
        key,
        values["scope"],
        values["key"],
        values["name"],
        values["status"],
        values["fingerprint"],
        values["attempt"],
        values["owner"],
        values["stepwise"],
        values["arguments"],
        lease,
        due,
    ]
    with connection.cursor() as cursor:
        if sql.vendor == "postgresql":
            # A claim that is evidence of an interrupted attempt must survive a crash by itself.
            if lease is None and not in_transaction(using):
                plain = [values[name] for name in PLAIN[1:]]
                cursor.execute(sql.claim_plain, [key, key, *plain, due])
                row = cursor.fetchone()
                return row is None, None if row is None else _operation(connection, pk, row)
            cursor.execute(sql.claim, [key, *params])
            row = cursor.fetchone()
            if row[0]:
                return True, None
            return False, None if row[1] is None else _operation(connection, pk, row[1:])
        if sql.upserts:
            try:
                cursor.execute(sql.claim, params)
            except OperationalError as error:
                if not _is_lock_timeout(error):
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
    forgotten: bool
    last_error: str
    leased: bool
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
