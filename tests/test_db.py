"""What `db.py` says about each database, provoked on the database itself."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    connection,
    connections,
    transaction,
)
from django.utils import timezone

from idempotency import db, engine
from idempotency.models import Event, Operation, Status
from tests import callers
from tests.app.models import Effect
from tests.callers import effects, intent, operation
from tests.processes import in_threads
from tests.proxies import database_alias
from tests.servers.base import free_port

pytestmark = pytest.mark.django_db(transaction=True)

postgresql = pytest.mark.vendor("postgresql")
mysql = pytest.mark.vendor("mysql")
sqlite = pytest.mark.vendor("sqlite")
has_sessions = pytest.mark.vendor("postgresql", "mysql")


def execute(sql: str, *params: Any) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(sql, params or None)
        return cursor.fetchone() if cursor.description else None


def error_of(function: Callable[[], Any]) -> Exception:
    with pytest.raises((DatabaseError, InterfaceError)) as error:
        function()
    return error.value


def in_thread(function: Callable[[], Any]) -> Any:
    """Run it on another connection."""
    return in_threads([function])[0]


@pytest.fixture(autouse=True)
def fresh_session() -> Iterator[None]:
    """Session settings of a test end with it."""
    yield
    connection.close()


# Errors after which the same may simply be tried again


@has_sessions
def test_a_deadlock_is_transient() -> None:
    first, second = (Effect.objects.create(label="row") for _ in range(2))
    both = threading.Barrier(2, timeout=30)

    def lock(*rows: Effect) -> Exception | None:
        if connection.vendor == "postgresql":
            execute("SET deadlock_timeout = '50ms'")
        try:
            with transaction.atomic():
                Effect.objects.filter(pk=rows[0].pk).update(amount=1)
                both.wait()
                Effect.objects.filter(pk=rows[1].pk).update(amount=1)
        except OperationalError as error:
            return error
        return None

    errors = in_threads([lambda: lock(first, second), lambda: lock(second, first)])
    (error,) = [each for each in errors if each is not None]
    assert db.is_transient(error)


@has_sessions
def test_a_serialization_failure_is_transient() -> None:
    row = Effect.objects.create(label="row")
    if connection.vendor == "postgresql":
        execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    elif execute("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'"):
        execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        execute("SET SESSION innodb_snapshot_isolation = ON")
    else:
        pytest.skip("this MariaDB has no snapshot isolation, so no serialization failures")

    def update_what_has_changed() -> None:
        with transaction.atomic():
            list(Effect.objects.all())  # the snapshot
            in_thread(lambda: Effect.objects.filter(pk=row.pk).update(amount=1))
            Effect.objects.filter(pk=row.pk).update(amount=2)

    assert db.is_transient(error_of(update_what_has_changed))


@has_sessions
def test_a_lock_timeout_is_transient() -> None:
    row = Effect.objects.create(label="row")

    def impatient() -> Exception:
        if connection.vendor == "postgresql":
            execute("SET lock_timeout = '10ms'")
        else:
            execute("SET SESSION innodb_lock_wait_timeout = 1")
        return error_of(lambda: Effect.objects.filter(pk=row.pk).update(amount=2))

    with transaction.atomic():
        Effect.objects.filter(pk=row.pk).update(amount=1)
        assert db.is_transient(in_thread(impatient))


@has_sessions
def test_an_ended_session_is_transient_in_all_that_it_says() -> None:
    """The first statement hears why, later ones only that the connection is closed."""
    number = execute(
        "SELECT pg_backend_pid()" if connection.vendor == "postgresql" else "SELECT CONNECTION_ID()"
    )[0]
    end = "SELECT pg_terminate_backend(%s)" if connection.vendor == "postgresql" else "KILL %s"
    in_thread(lambda: execute(end, number))
    for _ in range(3):
        try:
            execute("SELECT 1")
        except (OperationalError, InterfaceError) as error:
            assert db.is_transient(error), repr(error)  # noqa: PT017
    db.drop_if_broken("default")
    assert execute("SELECT 1")


@postgresql
def test_a_transaction_ended_for_idleness_is_transient() -> None:
    execute("SET idle_in_transaction_session_timeout = 10")

    def idle() -> None:
        with transaction.atomic():
            execute("SELECT 1")
            in_thread(lambda: execute("SELECT pg_sleep(0.2)"))
            execute("SELECT 1")

    error = error_of(idle)
    assert db.is_transient(error)


@has_sessions
def test_a_server_that_is_not_there_is_transient() -> None:
    with database_alias("nowhere", HOST="127.0.0.1", PORT=free_port()):
        assert db.is_transient(error_of(connections["nowhere"].ensure_connection))


@postgresql
def test_a_server_that_has_become_a_replica_is_unavailable_and_nothing_runs() -> None:
    """After a failover the old primary answers, but takes no writes (HARD_CASES 6)."""
    execute("SET default_transaction_read_only = on")
    key, ran = callers.new_key(), []
    response = callers.post(callers.effect_view(before=lambda: ran.append(1)), key)
    assert (response.status_code, callers.problem(response)) == (503, "unavailable")
    assert not ran
    connection.close()
    assert callers.post(callers.effect_view(), key).status_code == 201


@sqlite
def test_a_busy_sqlite_database_is_transient() -> None:
    """BUGS I05."""

    def blocked() -> Exception:
        execute("PRAGMA busy_timeout = 1")
        return error_of(lambda: Effect.objects.create(label="blocked"))

    with transaction.atomic():
        Effect.objects.create(label="some writer")
        assert db.is_transient(in_thread(blocked))


def test_a_closed_connection_is_transient() -> None:
    execute("SELECT 1")
    callers.sever()
    error = error_of(lambda: execute("SELECT 1"))
    if connection.vendor == "sqlite":  # ProgrammingError: closing it was the program's own mistake
        assert not db.is_transient(error)
    else:
        assert db.is_transient(error)


# Errors that will come again


def test_mistakes_and_violations_are_not_transient() -> None:
    row = Effect.objects.create(label="row")

    def duplicate() -> None:
        Effect.objects.create(pk=row.pk, label="duplicate")

    def unknown_table() -> None:
        execute("SELECT 1 FROM nothing_of_that_name")

    def nonsense() -> None:
        execute("SELEKT 1")

    for mistake in (duplicate, unknown_table, nonsense):
        assert not db.is_transient(error_of(mistake))
    assert not db.is_transient(IntegrityError())
    assert not db.is_transient(ProgrammingError())
    assert not db.is_transient(DataError())


@postgresql
def test_a_statement_that_takes_too_long_is_not_transient() -> None:
    execute("SET statement_timeout = 10")
    assert not db.is_transient(error_of(lambda: execute("SELECT pg_sleep(10)")))


def test_what_does_not_come_from_the_database_is_not_transient() -> None:
    for error in (ValueError(), TimeoutError(), ConnectionResetError(), KeyboardInterrupt()):
        assert not db.is_transient(error)


# A broken connection


@has_sessions
def test_a_broken_connection_is_replaced_and_a_sound_one_kept() -> None:
    execute("SELECT 1")
    before = connection.connection
    with pytest.raises(DatabaseError):
        execute("SELECT 1 FROM nothing_of_that_name")
    db.drop_if_broken("default")
    assert connection.connection is before
    callers.sever()
    error_of(lambda: execute("SELECT 1"))
    db.drop_if_broken("default")
    assert execute("SELECT 1") == (1,)
    assert connection.connection is not before


# Claim and lock


def claim(pk: Any, **values: Any) -> tuple[bool, Operation | None]:
    fresh = Operation(
        id=pk,
        scope="user:1",
        key="key",
        name="name",
        status=Status.PROCESSING,
        fingerprint="fingerprint",
        attempt=1,
        owner=uuid4().hex,
        stepwise=False,
    )
    for name, value in values.items():
        setattr(fresh, name, value)
    return db.claim("default", fresh.__dict__, 60, None)


def test_a_claim_inserts_and_the_next_one_finds_it() -> None:
    pk = uuid4()
    assert claim(pk, owner="a" * 32, scope="user:\u00e4", key="k\U0001f511") == (True, None)
    is_new, found = claim(pk, owner="b" * 32, fingerprint="another")
    assert not is_new
    assert found is not None
    assert (found.pk, found.owner, found.scope, found.key, found.fingerprint) == (
        pk,
        "a" * 32,
        "user:\u00e4",
        "k\U0001f511",
        "fingerprint",
    )
    assert (found.status, found.attempt, found.stepwise) == ("processing", 1, False)
    assert (found.expired, found.forgotten, found.event_count) == (False, False, 0)
    stored = Operation.objects.get(pk=pk)
    assert stored.due_at - stored.created_at == timedelta(seconds=60)
    assert stored.lease_expires_at is None


def test_the_clock_is_the_databases_and_its_hours_are_utc() -> None:
    if connection.vendor == "mysql":
        execute("SET SESSION time_zone = '+09:00'")
    elif connection.vendor == "postgresql":
        execute("SET TIME ZONE 'Asia/Tokyo'")
    pk = uuid4()
    claim(pk)
    connection.close()
    created = Operation.objects.get(pk=pk).created_at
    assert abs(created - timezone.now()) < timedelta(hours=1)


@has_sessions
def test_a_claim_does_not_wait_for_the_holder_of_the_lock() -> None:
    pk = uuid4()
    claim(pk)
    with transaction.atomic():
        assert db.lock("default", pk) is not None
        is_new, found = in_thread(lambda: claim(pk))
        assert not is_new
        assert found is not None
        assert in_thread(lambda: db_lock(pk)) is None
        Operation.objects.filter(pk=pk).update(status=Status.RECONCILING)  # an index entry moves
        is_new, found = in_thread(lambda: claim(pk))
        assert not is_new
        assert found is not None
        assert found.status == "processing"
        assert in_thread(lambda: db_lock(pk)) is None
    assert in_thread(lambda: db_lock(pk)).status == "reconciling"


def db_lock(pk: Any) -> db.Locked | None:
    with transaction.atomic():
        return db.lock("default", pk)


def test_the_lock_ends_with_the_transaction_or_the_connection() -> None:
    pk = uuid4()
    claim(pk)
    with transaction.atomic():
        assert db.lock("default", pk) is not None
        transaction.set_rollback(True)
    assert in_thread(lambda: db_lock(pk)) is not None
    transaction.atomic().__enter__()
    assert db.lock("default", pk) is not None
    callers.forget_connection()
    assert in_thread(lambda: db_lock(pk)) is not None


def test_there_is_no_lock_without_a_row() -> None:
    assert db_lock(uuid4()) is None
    assert db.read("default", uuid4()) is None


@has_sessions
def test_the_lock_does_not_hold_up_child_rows_of_others() -> None:
    """A refusal's event is written while the executor it reports still runs."""
    pk = uuid4()
    claim(pk)
    with transaction.atomic():
        db.lock("default", pk)
        in_thread(lambda: db.add_event("default", pk, "refused", 1, "in-progress"))
    assert Event.objects.filter(operation_id=pk).count() == 1


# MySQL can return nothing from an insert, so the claim looks first


@pytest.fixture
def as_mysql(monkeypatch: pytest.MonkeyPatch) -> None:
    """MariaDB, driven by the statements for MySQL. A MySQL server is not among the test databases."""
    monkeypatch.setitem(connection.__dict__, "mysql_is_mariadb", False)
    statements = db.Statements(connection)
    assert not statements.upserts
    assert statements.claim.startswith("INSERT IGNORE")
    monkeypatch.undo()
    monkeypatch.setitem(db._statements, "default", statements)


@mysql
def test_the_branch_for_mysql_runs_once_and_replays(as_mysql: None) -> None:
    """BUGS I07."""
    key = callers.new_key()
    first = engine.run(intent(key), callers.succeed)
    again = engine.run(intent(key), callers.succeed)
    assert (first.replayed, again.replayed) == (False, True)
    assert again.outcome == first.outcome
    with pytest.raises(engine.Mismatch):
        engine.run(intent(key, "another value"), callers.succeed)
    with pytest.raises(ValueError, match="detail"):
        engine.run(intent(key, user=2), callers.fail)
    assert not engine.run(intent(key, user=2), callers.succeed).replayed
    assert effects(key) == 2


@mysql
def test_the_branch_for_mysql_lets_one_of_twenty_run(as_mysql: None) -> None:
    key = callers.new_key()

    def call() -> str:
        try:
            return str(engine.run(intent(key), callers.succeed).replayed)
        except engine.InProgress:
            return "in progress"

    answers = in_threads([call] * 20)
    assert answers.count("False") == 1
    assert effects(key) == 1
    assert operation(key).status == Status.SUCCEEDED


@mysql
def test_the_branch_for_mysql_survives_crashes(as_mysql: None) -> None:
    key = callers.new_key()
    assert isinstance(engine.begin(intent(key)), engine.Execution)
    callers.forget_connection()
    assert not engine.run(intent(key), callers.succeed).replayed
    assert effects(key) == 1
