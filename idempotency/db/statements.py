"""The protocol's SQL, written out for each kind of database.

Written out instead of built by the ORM because these statements run on every request (building
them would cost more than running them), and because none of them exists in the ORM: an insert
that yields to an earlier row and returns it, on the clock of the database.
"""

from __future__ import annotations

from django.db.backends.base.base import BaseDatabaseWrapper

from ..models import Branch, Event, Operation, Reference, Step, Turn

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

#: What a claim is written with, beside its times.
INSERTED = ("id", *READ[:8], "arguments")

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

#: What tells one plain operation from another when it is claimed.
PLAIN = ("id", "scope", "key", "name", "fingerprint", "owner", "arguments")

#: Makes the transaction it is executed in commit without waiting for the disk (PostgreSQL).
UNFLUSHED = "set_config('synchronous_commit', 'off', true)"

#: Makes the statement it is part of give up a lock that somebody else keeps (PostgreSQL).
PATIENT = "set_config('lock_timeout', '50ms', true) IS NOT NULL"


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

        into = (
            f"INTO {t} ({', '.join(map(q, INSERTED))}, "
            f"{q('lease_expires_at')}, {q('created_at')}, {q('due_at')})"
        )
        values = f"{', '.join(['%s'] * len(INSERTED))}, {self.after}, {now}, {self.after}"
        self.insert = f"{into} VALUES ({values})"
        if self.vendor == "postgresql":
            # Even DO NOTHING waits for a transaction that has updated the row: look first. It waits
            # too, but only so long, for one that has inserted the row and stays open: a caller's. Our
            # own caller's transaction gets its setting back.
            absent = f"found.{q('scope')} IS NULL AND {PATIENT}"
            self.claim = (
                f"WITH found AS (SELECT current_setting('lock_timeout') before, {self.read_columns} "
                f"FROM (SELECT 1) one LEFT JOIN {t} ON {t}.{q('id')} = %s), "
                f"claimed AS (INSERT {into} SELECT {values} FROM found WHERE {absent} "
                f"ON CONFLICT ({q('id')}) DO NOTHING RETURNING 1), "
                "done AS (SELECT COUNT(*) > 0 is_new FROM claimed) "
                "SELECT set_config('lock_timeout', before, true), is_new, found.* FROM found, done"
            )
            # The usual one: planning a join and constants that are always the same costs a fifth of
            # it. Its commit need not wait for the disk: the log is flushed in order, so the commit of
            # the effects flushes the claim too, and a crash before that leaves nothing to protect.
            columns = ", ".join(map(q, (*PLAIN, "status", "attempt", "created_at", "due_at")))
            self.claim_plain = (
                f"WITH found AS ({self.read}), claimed AS (INSERT INTO {t} ({columns}) "
                f"SELECT {', '.join(['%s'] * len(PLAIN))}, 'processing', 1, {now}, {self.after} "
                f"WHERE NOT EXISTS (SELECT 1 FROM found) AND {PATIENT} "
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
            f"{q('tombstone_until')} <= {now}, {q('last_error')}, {q('lease_expires_at')} > {now}, "
            f"{q('interruptions')}"
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
