"""The database ends the session, or the network does: nothing is guessed, nothing happens twice."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError, connection, connections, transaction

from idempotency import engine
from idempotency.exceptions import Unavailable
from idempotency.models import Status
from tests import callers
from tests.callers import effect_view, effects, events, is_replay, operation, post, problem, retry
from tests.crashes.points import Points
from tests.processes import Child, Signal, eventually
from tests.proxies import ANSWER_LOST, REQUEST_LATE, REQUEST_LOST, Proxy, database_alias

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # SQLite is a library in the process: there is no session to lose, and no network.
    pytest.mark.vendor("postgresql", "mysql"),
]

PROXIED = "proxied"


def session_id() -> int:
    function = "pg_backend_pid()" if connection.vendor == "postgresql" else "CONNECTION_ID()"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {function}")
        return int(cursor.fetchone()[0])


def is_alive(session: int) -> bool:
    table, column = (
        ("pg_stat_activity", "pid")
        if connection.vendor == "postgresql"
        else ("information_schema.processlist", "id")
    )
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT COUNT(*) FROM {table} WHERE {column} = %s", [session])  # noqa: S608
        return bool(cursor.fetchone()[0])


def end_session(session: int) -> None:
    """What an administrator does to a session, from another one; returns when it is gone."""

    def end() -> None:
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SELECT pg_terminate_backend(%s)", [session])
            else:
                cursor.execute("KILL %s", [session])
        eventually(lambda: not is_alive(session), "the end of the session")
        connection.close()

    thread = threading.Thread(target=end)  # a thread has a connection of its own
    thread.start()
    thread.join()


def end_own_session() -> None:
    end_session(session_id())


def test_a_session_ended_in_the_handler_is_503_and_the_retry_runs() -> None:
    key = callers.new_key()
    response = post(effect_view(after=end_own_session), key)
    assert (response.status_code, problem(response)) == (503, "unavailable")
    assert response["Retry-After"]
    assert effects(key) == 0
    assert operation(key).status == Status.PROCESSING
    assert [kind for kind, _ in events(key)] == ["attempt_failed"]  # on a new connection
    assert (post(effect_view(), key).status_code, effects(key)) == (201, 1)


def test_a_handler_that_goes_on_after_its_session_ended_changes_nothing() -> None:
    key = callers.new_key()

    def goes_on() -> None:
        end_own_session()
        try:
            callers.Effect.objects.create(label=key)
        except Exception:
            return  # a careless handler: it answers 201 all the same

    response = post(effect_view(after=goes_on), key)
    assert response.status_code in (500, 503)
    assert effects(key) == 0
    assert (post(effect_view(), key).status_code, effects(key)) == (201, 1)


def test_a_session_may_end_at_any_point() -> None:
    """Ended while nothing has been executed it is not even noticed; later it is a 503."""
    view = effect_view()
    points = Points()
    with points.watched():
        post(view, callers.new_key())
    answers = {}
    for number, label in enumerate(points.passed, start=1):
        key = callers.new_key()
        session = session_id()
        ended = Points(number, lambda session=session: end_session(session))
        with ended.watched():
            response = post(view, key)
        callers.drop_broken_connections()
        committed = effects(key)
        answers[label] = response.status_code
        assert (response.status_code, committed) in {(201, 1), (503, 0)}, f"{number} {label}"
        again = retry(lambda key=key: post(view, key))
        assert (again.status_code, effects(key)) == (201, 1), f"{number} {label}"
        assert is_replay(again) == bool(committed), f"{number} {label}"
    assert answers["before INSERT idempotency_operation"] == 201
    assert answers["before SELECT idempotency_operation"] == 201
    assert answers["before INSERT testapp_effect"] == 503
    assert answers["before COMMIT"] == 503
    assert answers["after COMMIT"] == 201


def test_a_session_that_ended_between_two_requests_is_not_noticed() -> None:
    key = callers.new_key()
    end_own_session()
    assert post(effect_view(), key).status_code == 201
    end_own_session()
    assert is_replay(post(effect_view(), key))
    assert effects(key) == 1


def test_an_operation_joined_to_a_lost_transaction_is_unavailable_and_leaves_nothing() -> None:
    key = callers.new_key()

    def joined() -> None:
        with transaction.atomic():
            callers.Effect.objects.create(label=f"before {key}")
            end_own_session()
            engine.run(callers.intent(key), callers.succeed)

    with pytest.raises(Unavailable):
        joined()
    callers.drop_broken_connections()
    assert effects(f"before {key}") == effects(key) == 0
    assert engine.run(callers.intent(key), callers.succeed).replayed is False


def test_a_lost_transaction_is_not_continued_on_a_new_connection_with_autocommit_off() -> None:
    """The caller's earlier statements are gone: later ones must not be committed without them."""
    key = callers.new_key()
    transaction.set_autocommit(False)
    try:
        callers.Effect.objects.create(label=f"before {key}")
        end_own_session()
        with pytest.raises(Unavailable):
            engine.run(callers.intent(key), callers.succeed)
        with pytest.raises((DatabaseError, InterfaceError)):
            callers.Effect.objects.create(label=f"after {key}")
    finally:
        connection.close()
    assert effects(f"before {key}") == effects(key) == effects(f"after {key}") == 0
    assert not engine.run(callers.intent(key), callers.succeed).replayed


def test_a_handler_whose_callers_transaction_was_lost_leaves_it_lost() -> None:
    key = callers.new_key()

    def handler(operation: engine.Operation) -> engine.Outcome:
        end_own_session()
        return callers.succeed(operation)

    transaction.set_autocommit(False)
    try:
        with pytest.raises(Unavailable):
            engine.run(callers.intent(key), handler)
        with pytest.raises((DatabaseError, InterfaceError)):
            callers.Effect.objects.create(label=f"after {key}")
    finally:
        connection.close()
    assert effects(key) == effects(f"after {key}") == 0
    assert not engine.run(callers.intent(key), callers.succeed).replayed


# The network


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy, with the alias `proxied` that connects through it."""
    with Proxy() as proxy:
        options = dict(connections.settings["default"]["OPTIONS"])
        if connection.vendor == "postgresql":
            options["sslmode"] = "disable"  # the proxy reads along
        with database_alias(PROXIED, HOST="127.0.0.1", PORT=proxy.port, OPTIONS=options):
            connections[PROXIED].ensure_connection()
            yield proxy


def call(key: str) -> Any:
    return post(effect_view(using=PROXIED), key)


def test_a_commit_whose_answer_was_lost_is_read_back(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    key = callers.new_key()
    proxy.lose(ANSWER_LOST, b"COMMIT")
    response = call(key)
    assert (response.status_code, is_replay(response), effects(key)) == (201, False, 1)
    assert "confirmed by reading back" in caplog.text
    replay = call(key)
    assert (is_replay(replay), replay.content, effects(key)) == (True, response.content, 1)


def test_a_commit_that_never_arrived_is_503_and_the_retry_runs(proxy: Proxy) -> None:
    key = callers.new_key()
    proxy.lose(REQUEST_LOST, b"COMMIT")
    response = call(key)
    assert (response.status_code, problem(response)) == (503, "unavailable")
    assert effects(key) == 0
    response = retry(lambda: call(key))
    assert (response.status_code, is_replay(response), effects(key)) == (201, False, 1)


def test_a_commit_that_arrives_after_it_was_given_up_counts(proxy: Proxy) -> None:
    """The cruellest order: reading back finds nothing yet, and then the commit succeeds."""
    key = callers.new_key()
    proxy.lose(REQUEST_LATE, b"COMMIT")
    assert call(key).status_code == 503
    assert effects(key) == 0
    assert problem(call(key)) == "in-progress"  # the server still holds the lock of the first
    proxy.deliver()
    eventually(lambda: effects(key), "the late commit")
    response = retry(lambda: call(key))
    assert (response.status_code, is_replay(response), effects(key)) == (201, True, 1)


def test_a_commit_that_cannot_be_read_back_is_503_and_the_retry_replays(proxy: Proxy) -> None:
    key = callers.new_key()

    def cut_off() -> None:
        proxy.lose(ANSWER_LOST, b"COMMIT")
        proxy.refusing = True

    response = post(effect_view(after=cut_off, using=PROXIED), key)
    assert (response.status_code, problem(response)) == (503, "unavailable")
    assert call(key).status_code == 503  # the database is not to be reached: nothing is run
    proxy.refusing = False
    response = retry(lambda: call(key))
    assert (response.status_code, is_replay(response), effects(key)) == (201, True, 1)


def test_a_claim_whose_answer_was_lost_is_known_as_ones_own(proxy: Proxy) -> None:
    key = callers.new_key()
    proxy.lose(ANSWER_LOST, b"IDEMPOTENCY_OPERATION")
    assert call(key).status_code == 201
    assert (operation(key).attempt, events(key), effects(key)) == (1, [], 1)


def test_a_failure_whose_storing_was_lost_is_found_again_by_the_retry(proxy: Proxy) -> None:
    def attempt(key: str) -> Any:
        begun = engine.begin(callers.intent(key, using=PROXIED))
        if isinstance(begun, engine.Execution):
            begun.abort(ValueError())
            begun.store_failure(engine.Outcome(status=Status.FAILED, code=400, body=b"no"))
        return begun

    key = callers.new_key()
    proxy.lose(REQUEST_LOST, b"FINISHED_AT")
    attempt(key)
    assert operation(key).status == Status.PROCESSING
    attempt(key)
    assert operation(key).status == Status.FAILED
    assert isinstance(attempt(key), engine.Replay)


def test_a_database_that_refuses_connections_runs_nothing(proxy: Proxy) -> None:
    proxy.refusing = True
    connections[PROXIED].close()
    key = callers.new_key()
    ran = []
    response = post(effect_view(before=lambda: ran.append(1), using=PROXIED), key)
    assert (response.status_code, problem(response)) == (503, "unavailable")
    assert response["Retry-After"]
    assert not ran


# A process that is alive, but does not move


def test_a_frozen_worker_is_bounded_by_the_servers_timeout() -> None:
    """SIGSTOP: the client is silent, its connection open. Only the server can end that."""
    key = callers.new_key()
    inside, go_on = Signal(), Signal()

    def wait_inside() -> None:
        inside.set()
        go_on.wait()

    def worker() -> list[Any]:
        setting = (
            "idle_in_transaction_session_timeout = 1000"
            if connection.vendor == "postgresql"
            else "SESSION idle_transaction_timeout = 1"
        )
        with connection.cursor() as cursor:
            cursor.execute(f"SET {setting}")
        response = post(effect_view(after=wait_inside), key)
        return [response.status_code, problem(response)]

    child = Child(worker)
    inside.wait()
    child.stop()
    assert problem(post(effect_view(), key)) == "in-progress"
    response = retry(lambda: post(effect_view(), key))
    assert (response.status_code, is_replay(response)) == (201, False)
    child.resume()
    go_on.set()
    assert child.result() == [503, "unavailable"]
    assert effects(key) == 1
    assert is_replay(post(effect_view(), key))
