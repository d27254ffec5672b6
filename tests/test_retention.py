"""The purge: what it removes, what it must never touch, and what it costs."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib import import_module
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from idempotency import db, engine, keys, retention
from idempotency.models import (
    FINAL,
    Event,
    EventKind,
    MessageStatus,
    Operation,
    OutboxMessage,
    Reference,
    Status,
    Step,
    StepStatus,
)
from idempotency.retention import Purged, purge
from tests import callers

PAST = datetime(2020, 1, 1, tzinfo=UTC)
FUTURE = datetime(2100, 1, 1, tzinfo=UTC)


def make(
    key: str = "k", *, status: str = Status.SUCCEEDED, using: str = "default", **values: Any
) -> Operation:
    """A row as the engine leaves it; by default finished, and over in every respect."""
    is_final = status in FINAL
    fields: dict[str, Any] = {
        "id": keys.operation_id(("user:1",), key),
        "scope": "user:1",
        "key": key,
        "name": "order-create",
        "status": status,
        "fingerprint": "1:x",
        "attempt": 1,
        "owner": uuid.uuid4().hex,
        "created_at": PAST,
        "finished_at": PAST if is_final else None,
        "expires_at": PAST if is_final else None,
        "tombstone_until": PAST if is_final else None,
        "due_at": PAST,
        "code": 201 if is_final else None,
        "headers": "{}" if is_final else None,
        "body": b"paid" if is_final else None,
    }
    return Operation.objects.using(using).create(**{**fields, **values})


def make_message(**values: Any) -> OutboxMessage:
    """A message that was sent long ago."""
    fields = {
        "message_id": uuid.uuid4(),
        "topic": "order.created",
        "payload": "{}",
        "status": MessageStatus.SENT,
        "available_at": PAST,
        "created_at": PAST,
    }
    return OutboxMessage.objects.create(**{**fields, **values})


def left() -> set[str]:
    return set(Operation.objects.values_list("key", flat=True))


@pytest.mark.django_db
@pytest.mark.parametrize("status", sorted(FINAL - {Status.REVERSED}))
def test_a_finished_operation_is_deleted_when_window_and_tombstone_are_over(status: str) -> None:
    """BUGS L01."""
    make(status=status)
    make("later", status=status, due_at=FUTURE, expires_at=FUTURE, tombstone_until=FUTURE)

    assert purge() == Purged(deleted=1)
    assert left() == {"later"}
    assert purge() == Purged()


@pytest.mark.django_db
def test_a_tombstone_loses_its_outcome_and_lives_until_it_ends() -> None:
    operation = make(tombstone_until=FUTURE)

    assert purge() == Purged(tombstoned=1)

    operation.refresh_from_db()
    assert operation.body is None
    assert operation.headers is None
    assert (operation.due_at, operation.status) == (FUTURE, Status.SUCCEEDED)
    assert purge() == Purged()

    Operation.objects.update(tombstone_until=PAST, due_at=PAST)
    assert purge() == Purged(deleted=1)


@pytest.mark.django_db
def test_what_belongs_to_an_operation_goes_with_it_and_nothing_else() -> None:
    for key in ("over", "kept"):
        operation = make(key, **({} if key == "over" else {"due_at": FUTURE}))
        Event.objects.create(
            operation=operation, kind=EventKind.REPLAYED, attempt=1, detail="", created_at=PAST
        )
        Reference.objects.create(operation=operation, name="order", value="1")
        Step.objects.create(
            operation=operation,
            name="charge",
            is_external=True,
            status=StepStatus.DONE,
            attempt=1,
            started_at=PAST,
            done_at=PAST,
        )
        for status in MessageStatus.values:
            make_message(operation=operation, status=status)

    purge()

    kept = keys.operation_id(("user:1",), "kept")
    for model in (Event, Reference, Step):
        assert list(model._base_manager.values_list("operation_id", flat=True)) == [kept]
    # A message that was not sent is still owed to somebody.
    over = OutboxMessage.objects.exclude(operation_id=kept)
    assert set(over.values_list("status", flat=True)) == {MessageStatus.PENDING, MessageStatus.DEAD}
    assert OutboxMessage.objects.filter(operation_id=kept).count() == 3


@pytest.mark.django_db
def test_reconciling_and_unfinished_stepwise_operations_are_never_purged() -> None:
    """BUGS L01."""
    make("unknown", status=Status.RECONCILING)
    make("steps", status=Status.PROCESSING, stepwise=True)
    make("waits", status=Status.REQUIRES_ACTION, stepwise=True)

    assert purge(batch_size=1) == Purged()
    assert left() == {"unknown", "steps", "waits"}
    assert retention.overdue_since() is None


@pytest.mark.django_db
def test_an_interrupted_operation_is_deleted_when_it_is_due_and_not_before() -> None:
    make("over", status=Status.PROCESSING)
    make("recent", status=Status.PROCESSING, due_at=FUTURE)

    assert purge() == Purged(interrupted=1)
    assert left() == {"recent"}


@pytest.mark.django_db
def test_batches_add_up_and_report_progress() -> None:
    for number in range(7):
        make(f"done-{number}")
    make("tombstone", tombstone_until=FUTURE)
    make("interrupted", status=Status.PROCESSING)
    seen: list[Purged] = []

    total = purge(batch_size=3, on_progress=seen.append)

    assert total == Purged(deleted=7, tombstoned=1, interrupted=1)
    assert seen[-1] == total
    assert len(seen) >= 4
    assert left() == {"tombstone"}


@pytest.mark.django_db
def test_it_stops_when_the_time_is_over_and_the_next_run_goes_on() -> None:
    """BUGS L02."""
    for number in range(4):
        make(str(number))

    assert purge(batch_size=2, max_seconds=0) == Purged(deleted=2, complete=False)
    assert purge(batch_size=2) == Purged(deleted=2)


@pytest.mark.django_db
def test_a_dry_run_counts_and_changes_nothing() -> None:
    make("over")
    make("tombstone", tombstone_until=FUTURE)
    make("interrupted", status=Status.PROCESSING)
    make("unknown", status=Status.RECONCILING)
    make("live", due_at=FUTURE)

    assert purge(dry_run=True) == Purged(deleted=1, tombstoned=1, interrupted=1)
    assert len(left()) == 5
    assert Operation.objects.get(key="tombstone").body is not None


@pytest.mark.django_db
@pytest.mark.parametrize("size", [0, -1, 10_001])
def test_a_batch_size_that_cannot_work_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="between 1 and"):
        purge(batch_size=size)


@pytest.mark.django_db(databases=["default", "other"])
def test_each_database_is_purged_by_itself() -> None:
    make()
    make(using="other")

    assert purge("other") == Purged(deleted=1)
    assert left() == {"k"}


@pytest.mark.django_db(databases=["default", "other"])
def test_the_default_database_is_the_one_of_the_using_setting(settings: Any) -> None:
    settings.IDEMPOTENCY = {"USING": "other"}
    make()
    make(using="other")

    assert purge() == Purged(deleted=1)
    assert left() == {"k"}


@pytest.mark.django_db
def test_the_clock_of_the_database_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    monkeypatch.setattr("django.utils.timezone.now", lambda: PAST - timedelta(days=1))
    assert purge() == Purged(deleted=1)


@pytest.mark.django_db
def test_a_row_that_changed_between_the_look_and_the_lock_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make()
    values = {"status": Status.PROCESSING, "due_at": FUTURE, "expires_at": None}
    original = retention._over

    def renewed_meanwhile(using: str) -> Any:
        Operation.objects.update(**values)
        return original(using)

    monkeypatch.setattr(retention, "_over", renewed_meanwhile)
    assert purge() == Purged()
    assert left() == {"k"}


@pytest.mark.django_db
def test_bodies_are_never_read() -> None:
    make()
    make("tombstone", tombstone_until=FUTURE)
    with CaptureQueriesContext(connection) as queries:
        purge()
    reads = [q["sql"] for q in queries if q["sql"].lstrip("(").startswith("SELECT")]
    assert reads
    assert not [sql for sql in reads if "body" in sql]


@pytest.mark.django_db
def test_the_search_for_due_rows_uses_its_index() -> None:
    for number in range(200):
        make(str(number), due_at=FUTURE)
    due = retention._due("default", Status.SUCCEEDED).order_by("due_at", "pk")
    query = due.values_list("due_at", "pk")[:10]
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL enable_seqscan = off")  # 200 rows do not pay for an index
    assert "idempotency_op_due" in query.explain()


@pytest.mark.django_db
def test_lag_is_the_age_of_the_oldest_finished_row_that_is_due() -> None:
    assert retention.overdue_since() is None
    make("unknown", status=Status.RECONCILING)
    make("live", due_at=FUTURE)
    assert retention.overdue_since() is None
    make("newer", status=Status.FAILED, due_at=PAST + timedelta(days=1))
    make("older")
    assert retention.overdue_since() == PAST
    assert retention.overdue_since(by=timedelta(days=365 * 60)) is None
    purge()
    assert retention.overdue_since() is None


# Other connections ---------------------------------------------------------------------------


@contextmanager
def elsewhere(function: Any) -> Iterator[threading.Event]:
    """Run `function(release)` in a thread with its own connection; it holds until the block ends."""
    holds, release = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def target() -> None:
        try:
            function(holds, release)
        except BaseException as error:
            errors.append(error)
            holds.set()
        finally:
            connections.close_all()

    thread = threading.Thread(target=target)
    thread.start()
    assert holds.wait(30)
    try:
        yield release
    finally:
        release.set()
        thread.join(30)
    assert not errors


def hold_lock(pk: uuid.UUID) -> Any:
    def hold(holds: threading.Event, release: threading.Event) -> None:
        with transaction.atomic():
            assert db.lock("default", pk) is not None
            holds.set()
            release.wait(30)

    return hold


@pytest.mark.vendor("postgresql", "mysql")
@pytest.mark.django_db(transaction=True)
def test_an_operation_that_somebody_executes_is_skipped_without_waiting() -> None:
    live = make("live", status=Status.PROCESSING)
    being_changed = make("held")
    make("free")
    make("free-too", status=Status.PROCESSING)
    with elsewhere(hold_lock(live.pk)), elsewhere(hold_lock(being_changed.pk)):
        # In batches of one, the held rows must not be found again and again either.
        assert purge(batch_size=1) == Purged(deleted=1, interrupted=1)
        assert left() == {"live", "held"}
    assert purge() == Purged(deleted=1, interrupted=1)


@pytest.mark.vendor("sqlite")
@pytest.mark.django_db(transaction=True)
def test_on_sqlite_an_executor_makes_the_purge_give_up_not_delete() -> None:
    live = make("live", status=Status.PROCESSING)
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 50")
    try:
        with elsewhere(hold_lock(live.pk)):
            with pytest.raises(OperationalError, match="locked"):
                purge()
            with pytest.raises(CommandError, match="run the command again"):
                call_command("purge_operations")
    finally:
        connection.close()  # back to the configured timeout
    assert purge() == Purged(interrupted=1)


@pytest.mark.django_db(transaction=True)
def test_purges_that_run_at_the_same_time_share_the_work() -> None:
    for number in range(60):
        make(str(number))
    results: list[Purged] = []
    errors: list[BaseException] = []
    start = threading.Barrier(3)

    def run() -> None:
        try:
            start.wait(30)
            results.append(purge(batch_size=4))
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert not errors
    # Rows one run skipped while another held them are that other run's work.
    assert sum(result.deleted for result in results) == 60
    assert left() == set()


# The command ---------------------------------------------------------------------------------


def run(*args: str, **options: Any) -> str:
    out = StringIO()
    call_command("purge_operations", *args, stdout=out, **options)
    return out.getvalue()


@pytest.mark.django_db
def test_the_command_purges_and_says_what_it_did() -> None:
    make("over")
    make("tombstone", tombstone_until=FUTURE)
    make_message()
    make_message(status=MessageStatus.DEAD)
    out = run()
    assert "1 finished deleted, 1 reduced to tombstones, 0 interrupted deleted" in out
    assert "1 sent messages deleted" in out
    assert left() == {"tombstone"}
    assert OutboxMessage.objects.get().status == MessageStatus.DEAD


@pytest.mark.django_db
def test_the_command_shows_progress_for_every_batch_when_asked() -> None:
    for number in range(4):
        make(str(number))
    out = run("--batch-size=2", verbosity=2)
    assert out.index("2 finished deleted") < out.index("4 finished deleted")
    assert run(verbosity=0) == ""


@pytest.mark.django_db
def test_the_command_shows_a_sign_of_life_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("idempotency.management.commands.purge_operations")
    for number in range(4):
        make(str(number))
    assert "…" not in run("--batch-size=1")
    for number in range(4):
        make(str(number))
    monkeypatch.setattr(module, "PROGRESS_EVERY", 0)
    assert run("--batch-size=1").count("…") == 4


@pytest.mark.django_db
def test_the_commands_dry_run_changes_nothing() -> None:
    make()
    make_message()
    out = run("--dry-run")
    assert OutboxMessage.objects.exists()
    assert "nothing was changed" in out
    assert "1 finished deleted" in out
    assert left() == {"k"}


@pytest.mark.django_db
def test_the_command_says_when_more_is_due() -> None:
    for number in range(3):
        make(str(number))
    assert "run the command again" in run("--batch-size=1", "--max-seconds=0.000001")


@pytest.mark.django_db(databases=["default", "other"])
def test_the_command_purges_the_named_database() -> None:
    make()
    make(using="other")
    assert "'other'" in run("--database=other")
    assert left() == {"k"}


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--batch-size=0",), "--batch-size must be between 1 and 10000"),
        (("--max-seconds=0",), "--max-seconds must be more than 0"),
        (("--database=nowhere",), "invalid choice"),
    ],
)
def test_the_command_explains_wrong_arguments(args: tuple[str, ...], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        run(*args)


@pytest.mark.django_db
def test_the_command_explains_a_database_without_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Operation._meta, "db_table", "not_there")
    with pytest.raises(CommandError, match="migrate --database default"):
        run()


@pytest.mark.django_db(transaction=True)
def test_an_interrupted_operation_that_may_have_called_out_is_never_forgotten():
    """A crash without a retry must not lose the only trace of an effect outside the database."""
    crashed, failed = callers.new_key(), callers.new_key()
    for key in (crashed, failed):
        begun = engine.begin(callers.intent(key, on_interrupted="reconcile"))
        assert isinstance(begun, engine.Execution)
        if key == failed:
            begun.fail(ValueError())  # it said so itself: nothing is unknown
        else:
            begun.abort(SystemExit())  # what a killed process leaves behind
    rows = Operation.objects.filter(key__in=(crashed, failed))
    rows.update(due_at=datetime.now(UTC) - timedelta(days=1))

    retention.purge()

    assert rows.get().key == crashed
    assert rows.get().status == Status.RECONCILING
    assert [event.detail for event in rows.get().events.all()] == ["interrupted"]
