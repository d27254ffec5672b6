"""Databases: what the protocol needs from them, and how fast a server notices a lost worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import retention
from ..conf import Settings
from ..models import Operation
from .settings import RULES

SUPPORTED = ("postgresql", "mysql", "sqlite")
#: Seconds after which a server should give up on a client that is silent inside a transaction.
LONGEST_SILENCE = 600
#: How far the purge may lag behind.
LAG = timedelta(days=1)


def alias() -> str | None:
    """The database of operations by default; None when the setting is wrong (another check says so)."""
    using = Settings.user_settings().get("USING", "default")
    return using if RULES["USING"][0](using) else None


def check_database_settings(**kwargs: object) -> list[CheckMessage]:
    using = alias()
    if using is None:
        return []
    return [*_clock(using), *_routing(using)]


def _clock(using: str) -> Iterator[CheckMessage]:
    connection = connections[using]
    if not settings.USE_TZ:
        yield checks.Warning(
            "USE_TZ is False: the times of operations are stored in UTC and shown as if they were local.",
            hint="Set USE_TZ = True.",
            id="idempotency.W020",
        )
    if connection.vendor in ("mysql", "sqlite") and connection.settings_dict.get("TIME_ZONE"):
        yield checks.Error(
            f"DATABASES[{using!r}]['TIME_ZONE'] is set: Django would read times that the database "
            "writes in UTC as times of that zone.",
            hint="Remove TIME_ZONE from this database, or keep operations in another one "
            "(IDEMPOTENCY['USING']).",
            id="idempotency.E021",
        )
    if not connection.settings_dict.get("AUTOCOMMIT", True):
        yield checks.Error(
            f"DATABASES[{using!r}]['AUTOCOMMIT'] is False: claims would not be committed.",
            hint="Remove AUTOCOMMIT from this database.",
            id="idempotency.E022",
        )
    if connection.vendor not in SUPPORTED:
        yield checks.Error(
            f"Database {using!r} is {connection.display_name}, which is not supported.",
            hint="Keep operations and their effects in PostgreSQL, MariaDB, MySQL or SQLite.",
            id="idempotency.E023",
        )


def _routing(using: str) -> Iterator[CheckMessage]:
    if not router.allow_migrate_model(using, Operation):
        yield checks.Error(
            f"Operations live in database {using!r}, and a database router keeps their table out of it.",
            hint="Let the router's allow_migrate() return True or None for the app 'idempotency' "
            "there, or set IDEMPOTENCY['USING'] to the database of the effects.",
            id="idempotency.E024",
        )
    elif (written := router.db_for_write(Operation)) != using:
        yield checks.Warning(
            f"Operations live in database {using!r}, and a database router sends queries for them "
            f"to {written!r}.",
            hint="Let the router's db_for_write() return the same database as IDEMPOTENCY['USING'], "
            "so that shell, admin and protocol see the same rows.",
            id="idempotency.W025",
        )


def check_server(*, databases: Sequence[str] | None = None, **kwargs: object) -> list[CheckMessage]:
    """What the server of each given database is able to do."""
    messages: list[CheckMessage] = []
    for using in databases or ():
        connection = connections[using]
        if not router.allow_migrate_model(using, Operation) or connection.vendor not in SUPPORTED:
            continue
        messages += _abilities(connection)
        if connection.vendor == "mysql":
            messages += _storage_engine(connection)
    return messages


def _abilities(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    features, vendor = connection.features, connection.vendor
    needed = {
        "postgresql": "PostgreSQL 9.5",
        "mysql": "MariaDB 10.6 or MySQL 8.0.1",
        "sqlite": "SQLite 3.35",
    }[vendor]
    # The same features that `db` goes by.
    lacks = (
        "INSERT … RETURNING"
        if vendor == "sqlite" and not features.can_return_columns_from_insert
        else "SKIP LOCKED"
        if vendor != "sqlite" and not features.has_select_for_update_skip_locked
        else ""
    )
    if lacks:
        yield checks.Error(
            f"Database {connection.alias!r} is too old: it lacks {lacks}.",
            hint=f"Use {needed} or later.",
            id="idempotency.E030",
        )


def _storage_engine(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    engine, where = None, f"The table {Operation._meta.db_table}"
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT ENGINE FROM information_schema.TABLES "
            "WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = %s",
            [Operation._meta.db_table],
        )
        row = cursor.fetchone()
        if row is None:
            where = "The default of new tables"
            cursor.execute("SELECT @@default_storage_engine")
            row = cursor.fetchone()
        engine = str(row[0])
    if engine.lower() != "innodb":
        yield checks.Error(
            f"{where} in database {connection.alias!r} is {engine}: it has neither transactions nor row locks.",
            hint="ALTER TABLE … ENGINE=InnoDB, and remove default_storage_engine from the server's "
            "and Django's options.",
            id="idempotency.E031",
        )


def check_deployed_database(
    *, databases: Sequence[str] | None = None, **kwargs: object
) -> list[CheckMessage]:
    """The state of each given database in production: `check --deploy --database default`."""
    messages: list[CheckMessage] = []
    for using in databases or ():
        connection = connections[using]
        if not router.allow_migrate_model(using, Operation) or connection.vendor not in SUPPORTED:
            continue
        if connection.vendor == "postgresql":
            messages += _postgresql_timeouts(connection)
        elif connection.vendor == "mysql":
            messages += _mysql_timeouts(connection)
        messages += _table(connection)
    return messages


def _table(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    using = connection.alias
    if Operation._meta.db_table not in connection.introspection.table_names():
        if using == alias():
            yield checks.Error(
                f"Database {using!r} has no table of operations.",
                hint=f"Run `manage.py migrate --database {using}`.",
                id="idempotency.E032",
            )
    elif since := retention.overdue_since(using, by=LAG):
        yield checks.Warning(
            f"Operations in database {using!r} should have been purged since {since:%Y-%m-%d %H:%M} UTC.",
            hint="Schedule idempotency.tasks.purge_expired or `manage.py purge_operations "
            f"--database {using}`, more often or without --max-seconds.",
            id="idempotency.W033",
        )


def _variables(connection: BaseDatabaseWrapper, sql: str) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchone())


def _postgresql_timeouts(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    idle, keepalive, user, local = _variables(
        connection,
        "SELECT (SELECT setting::bigint FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'), "
        "(SELECT setting::bigint FROM pg_settings WHERE name = 'tcp_keepalives_idle'), "
        "(SELECT setting::bigint FROM pg_settings WHERE name = 'tcp_user_timeout'), "
        "inet_server_addr() IS NULL",
    )
    if not idle:
        yield checks.Warning(
            f"Database {connection.alias!r}: a worker that freezes in a transaction keeps its operation "
            "locked for ever.",
            hint="Set idle_in_transaction_session_timeout on the server, or in Django: "
            "OPTIONS = {'options': '-c idle_in_transaction_session_timeout=60s'}. It must be longer "
            "than a handler is silent towards the database.",
            id="idempotency.W040",
        )
    if not local and not user and not 0 < keepalive <= LONGEST_SILENCE:
        yield checks.Warning(
            f"Database {connection.alias!r}: when a worker's host is lost, its operations stay locked "
            "until the server's TCP keepalive notices, two hours by default.",
            hint="Set tcp_keepalives_idle=60, tcp_keepalives_interval=10, tcp_keepalives_count=3 or "
            "tcp_user_timeout=90s on the server.",
            id="idempotency.W041",
        )


def _mysql_timeouts(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    limits = _variables(connection, "SELECT @@session.wait_timeout")
    if getattr(connection, "mysql_is_mariadb", False):
        limits += _variables(
            connection, "SELECT @@idle_transaction_timeout, @@idle_write_transaction_timeout"
        )
    if not any(0 < limit <= LONGEST_SILENCE for limit in limits):
        yield checks.Warning(
            f"Database {connection.alias!r}: a worker that freezes or whose host is lost keeps its "
            f"operation locked for {limits[0]} s.",
            hint="MariaDB: SET GLOBAL idle_transaction_timeout=60. MySQL: wait_timeout=600 or less, "
            "with CONN_MAX_AGE below it. It must be longer than a handler is silent towards the database.",
            id="idempotency.W042",
        )
