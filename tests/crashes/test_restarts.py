"""The database server itself stops, crashes and comes back."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import InterfaceError, OperationalError, connection, connections
from django.utils import timezone
from pytest_django import DjangoDbBlocker

from idempotency import engine, retention
from idempotency.completion import complete_abandoned, submit
from idempotency.exceptions import OutcomeUnknown
from idempotency.functions import idempotent_function
from idempotency.models import Event, Operation, OutboxMessage, Reference, Step, Turn
from idempotency.policies import Policy
from idempotency.reconciliation import Confirmed, reconcile_due, reconciler
from tests import callers
from tests.app.models import Effect
from tests.callers import effect_view, effects, events, is_replay, post, problem
from tests.crashes.points import Points
from tests.proxies import database_alias
from tests.servers import mariadb, postgresql
from tests.servers.base import Server
from tests.settings import database

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # SQLite has no server: a crash of its process is the crash table's subject.
    pytest.mark.vendor("postgresql", "mysql"),
]

PRIVATE = "private"


@pytest.fixture(scope="module")
def private_server() -> Iterator[Server]:
    """A server that these tests may stop: one that keeps what it has committed, as in production."""
    module = postgresql if connection.vendor == "postgresql" else mariadb
    if not module.available():
        pytest.skip(f"no {connection.vendor} server binaries on this machine to start and stop")
    with module.server(fsync=True) as server:
        yield server


@pytest.fixture(scope="module")
def tables(private_server: Server, django_db_blocker: DjangoDbBlocker) -> None:
    with (
        django_db_blocker.unblock(),
        database_alias(PRIVATE, **database(private_server.url())),
        connections[PRIVATE].schema_editor() as editor,
    ):
        for model in (Operation, Event, Reference, Step, Turn, OutboxMessage, Effect):
            editor.create_model(model)


@pytest.fixture
def server(private_server: Server, tables: None) -> Iterator[Server]:
    with database_alias(PRIVATE, **database(private_server.url())):
        yield private_server


def post_until_answered(key: str) -> int:
    """A client retries on 503, with the same key, as the problem document tells it."""
    for _ in range(100):
        response = post(effect_view(using=PRIVATE), key)
        if response.status_code != 503:
            return response.status_code
    raise AssertionError("unavailable for ever")


def test_a_restart_between_two_requests_is_not_noticed(server: Server) -> None:
    key = callers.new_key()
    view = effect_view(using=PRIVATE)
    assert post(view, key).status_code == 201
    server.restart()
    assert is_replay(post(view, key))
    server.restart()
    assert post(view, callers.new_key()).status_code == 201
    assert effects(key, PRIVATE) == 1


def test_a_restart_between_claim_and_lock_is_not_noticed(server: Server) -> None:
    view = effect_view(using=PRIVATE)
    dry = Points()
    with dry.watched(PRIVATE):
        post(view, callers.new_key())
    key = callers.new_key()
    number = dry.passed.index("after INSERT idempotency_operation") + 1
    with Points(number, server.restart).watched(PRIVATE):
        response = post(view, key)
    assert (response.status_code, is_replay(response), effects(key, PRIVATE)) == (201, False, 1)
    assert events(key, PRIVATE) == []


@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "crashed"])
def test_a_restart_in_the_handler_is_503_and_the_retry_runs(server: Server, crash: bool) -> None:
    key = callers.new_key()

    def restart() -> None:
        (server.kill if crash else server.stop)()
        server.start()

    response = post(effect_view(after=restart, using=PRIVATE), key)
    assert (response.status_code, problem(response)) == (503, "unavailable")
    assert effects(key, PRIVATE) == 0
    assert (post_until_answered(key), effects(key, PRIVATE)) == (201, 1)


def test_a_server_that_is_down_means_503_and_nothing_runs(server: Server) -> None:
    key, ran = callers.new_key(), []
    view = effect_view(before=lambda: ran.append(1), using=PRIVATE)
    server.stop()
    try:
        for _ in range(2):
            response = post(view, key)
            assert (response.status_code, problem(response)) == (503, "unavailable")
            assert response["Retry-After"]
        assert not ran
    finally:
        server.start()
    assert (post(view, key).status_code, effects(key, PRIVATE)) == (201, 1)


def test_what_was_answered_survives_the_crash_of_the_server(server: Server) -> None:
    key = callers.new_key()
    view = effect_view(using=PRIVATE)
    first = post(view, key)
    assert first.status_code == 201
    server.kill()
    server.start()
    again = post(view, key)
    assert (again.status_code, is_replay(again)) == (201, True)
    assert again.content == first.content
    assert effects(key, PRIVATE) == 1


# Maintenance: a restart costs the operation in hand its turn, and nothing else

restarts: list[Callable[[], None]] = []


def restart_once() -> None:
    """Restart, and find out by the next statement."""
    if restarts:
        restarts.pop()()
        Effect.objects.using(PRIVATE).count()


def name_of(number: int) -> str:
    if number == 2:
        restart_once()
    return f"work-{number}"


@idempotent_function(name="restarts.work", key=name_of, stepwise=True, using=PRIVATE)
def work(number: int) -> None:
    """Runs after a restart that happened while its key was made."""


@idempotent_function(name="restarts.step", key=lambda n: f"step-{n}", stepwise=True, using=PRIVATE)
def work_in_steps(number: int) -> None:
    operation = engine.current()
    assert operation is not None
    operation.step("step", restart_once if number == 2 else int)


@reconciler("restarts.ask", policy=Policy(using=PRIVATE))
def ask(operation: Operation) -> Confirmed:
    if operation.key == "ask-2" and restarts:
        restarts.pop()()  # found out when the answer is written
    return Confirmed()


@pytest.mark.parametrize("function", [work, work_in_steps])
def test_the_completer_goes_on_after_a_restart(server: Server, function: Any) -> None:
    keys = [submit(function, number) for number in (1, 2, 3)]
    restarts.append(server.restart)
    report = complete_abandoned(PRIVATE)
    assert (report.asked, report.settled) == (3, 2)
    made_due(keys)
    assert complete_abandoned(PRIVATE).settled == 1


def test_the_reconciler_goes_on_after_a_restart(server: Server) -> None:
    keys = []
    for number in (1, 2, 3):
        intent = replace(callers.intent(f"ask-{number}", using=PRIVATE), name="restarts.ask")
        with pytest.raises(OutcomeUnknown) as error:
            engine.run(intent, lambda operation: operation.unknown())
        keys.append(error.value.operation_id)
    made_due(keys)
    restarts.append(server.restart)
    report = reconcile_due(PRIVATE)
    assert (report.asked, report.settled) == (3, 2)
    made_due(keys)
    assert reconcile_due(PRIVATE).settled == 1


def test_the_purge_goes_on_after_a_restart(server: Server) -> None:
    retention.purge(PRIVATE)
    keys = [callers.new_key() for _ in range(3)]
    for key in keys:
        engine.run(callers.intent(key, using=PRIVATE), callers.succeed)
        callers.age(key, using=PRIVATE)
    restarts.append(server.restart)
    purged = retention.purge(
        PRIVATE, batch_size=1, on_progress=lambda _: restarts and restarts.pop()()
    )
    assert purged.deleted == 3


@pytest.mark.parametrize("run", [complete_abandoned, reconcile_due])
def test_a_loop_of_ones_own_around_maintenance_recovers(server: Server, run: Any) -> None:
    """No request ends in such a process, so nobody else replaces the connection."""
    run(PRIVATE)
    server.restart()
    with pytest.raises((OperationalError, InterfaceError)):
        run(PRIVATE)
    run(PRIVATE)


def test_without_its_database_the_command_says_so(server: Server) -> None:
    server.stop()
    try:
        with pytest.raises(CommandError, match="run the command again"):
            call_command("reconcile_operations", database=PRIVATE)
    finally:
        server.start()


def made_due(keys: list[Any]) -> None:
    past = timezone.now() - timedelta(hours=1)
    Operation.objects.using(PRIVATE).filter(pk__in=keys).exclude(status="succeeded").update(
        due_at=past
    )
