"""Several databases, a router with a replica, neighbouring keys, and a purge in between."""

import itertools
import random
import threading
from collections import Counter
from functools import partial
from itertools import chain
from typing import Any
from uuid import UUID

import pytest
from django.db import connections, transaction
from django.http import HttpResponse
from django.utils import timezone

from idempotency import db, engine, keys, retention
from idempotency.exceptions import RolledBack
from idempotency.models import Event, Operation, Outcome, Status
from tests import callers
from tests.app.models import Effect
from tests.callers import effect_view, effects, is_replay, operation, post, problem
from tests.processes import in_threads

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


# using="other"


def test_an_operation_lives_where_its_effects_are() -> None:
    key = callers.new_key()
    view = effect_view(using="other")
    assert post(view, key).status_code == 201
    assert is_replay(post(view, key))
    assert effects(key, "other") == 1
    assert operation(key, "other").status == Status.SUCCEEDED
    assert not Operation.objects.filter(key=key).exists()
    assert not Event.objects.exists()


def test_a_failure_is_rolled_back_where_the_effects_are() -> None:
    key = callers.new_key()

    def fail() -> None:
        raise ValueError

    assert post(effect_view(after=fail, using="other"), key).status_code == 500
    assert effects(key, "other") == 0
    assert operation(key, "other").status == Status.PROCESSING
    assert post(effect_view(using="other"), key).status_code == 201


def test_twins_on_another_database_have_one_effect() -> None:
    key = callers.new_key()
    view = effect_view(using="other")
    answers = in_threads([lambda: post(view, key)] * 8)
    assert {each.status_code for each in answers} <= {201, 409}
    assert [is_replay(each) for each in answers if each.status_code == 201].count(False) == 1
    assert effects(key, "other") == 1


def test_an_open_transaction_on_one_database_is_not_joined_on_another() -> None:
    key = callers.new_key()
    with transaction.atomic("default"):
        begun = engine.begin(callers.intent(key, using="other"))
        assert isinstance(begun, engine.Execution)
        assert not begun.joined
        begun.complete(callers.succeed(begun.operation))
        transaction.set_rollback(True, using="default")
    assert effects(key, "other") == 1


class ReadsFromReplica:
    """Sends reads to a database that must not be asked, as a project with a lagging replica does."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        if model._meta.app_label != "idempotency":
            return None
        self.asked.append(model.__name__)
        return "other"

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"


def test_the_protocol_never_asks_the_replica(settings: Any) -> None:
    router = ReadsFromReplica()
    settings.DATABASE_ROUTERS = [router]
    statements: list[str] = []

    def forbidden(execute: Any, sql: str, *args: Any) -> Any:
        statements.append(sql)
        return execute(sql, *args)

    key, failing = callers.new_key(), callers.new_key()
    view = effect_view()
    fail = effect_view(after=lambda: HttpResponse(status=503))
    with connections["other"].execute_wrapper(forbidden):
        assert post(view, key).status_code == 201
        assert is_replay(post(view, key))
        assert problem(post(view, key, body="another body")) == "mismatch"
        assert post(fail, failing).status_code == 503
        assert post(view, failing).status_code == 201
        callers.age(key, using="default")
        assert not is_replay(post(view, key))
    assert statements == []
    assert router.asked == []


# Neighbours (BUGS.md I01): keys whose ids lie side by side in the index


def test_neighbouring_new_keys_do_not_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids 1 to 240 in random order, claimed by 12 threads: every one runs, no database error shows.


    BUGS I01.
    """
    numbers = list(range(1, 241))
    random.Random(5).shuffle(numbers)
    monkeypatch.setattr(keys, "operation_id", lambda scope, key: UUID(int=int(key)))
    view = effect_view()

    def client(mine: list[int]) -> list[int]:
        return [post(view, str(number)).status_code for number in mine]

    answers = in_threads([partial(client, numbers[part::12]) for part in range(12)])
    assert Counter(chain(*answers)) == {201: 240}
    assert Effect.objects.count() == 240


# A purge in a tight loop (BUGS.md L05, L06)


class Ager:
    """Ends lives of operations and purges what is over, as fast as it can; counts what it ended."""

    def __init__(self, keys: list[str], *, purges: bool) -> None:
        self.keys = keys
        self.purges = purges
        self.ended: Counter[str] = Counter()
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.is_set():
            self.age()
            if self.purges:
                retention.purge(batch_size=7)

    def age(self) -> None:
        past = timezone.now() - timezone.timedelta(days=1)
        for key in self.keys:
            self.ended[key] += Operation.objects.filter(
                key=key, status=Status.SUCCEEDED, tombstone_until__gt=db.now("default")
            ).update(expires_at=past, tombstone_until=past, due_at=past)


@pytest.mark.parametrize("purges", [True, False], ids=["purged", "renewed in place"])
def test_every_life_of_a_key_has_one_effect_however_often_it_is_ended(purges: bool) -> None:
    """BUGS L05."""
    keys = [callers.new_key() for _ in range(4)]
    ager = Ager(keys, purges=purges)
    chance = random.Random(7)

    def stumble() -> None:
        if chance.random() < 0.2:
            raise ValueError

    view = effect_view(after=stumble)

    def client(number: int) -> Counter[tuple[str, str]]:
        answers: Counter[tuple[str, str]] = Counter()
        for step in itertools.count():
            # Until there was something to race with: on SQLite the ager may be the last to get the lock.
            if step >= 40 and ager.ended.total() > len(keys):
                break
            key = keys[(number // 2 + step) % len(keys)]
            response = post(view, key)
            kind = problem(response) or str(response.status_code)
            answers[key, "new" if kind == "201" and not is_replay(response) else kind] += 1
        return answers

    def clients() -> Counter[tuple[str, str]]:
        try:
            return sum(in_threads([partial(client, number) for number in range(6)]), Counter())
        finally:
            ager.done.set()

    answers, _ = in_threads([clients, ager.run])
    assert {kind for _, kind in answers} <= {"new", "201", "500", "in-progress", "unavailable"}
    ager.age()  # the lives that are still going on
    for key in keys:
        assert effects(key) == answers[key, "new"] == ager.ended[key], key


def test_a_failed_attempt_that_is_purged_meanwhile_is_run_again() -> None:
    """The row goes away between a refused duplicate and its retry: that is simply a new claim.


    BUGS L06.
    """
    key = callers.new_key()
    with pytest.raises(ValueError, match="detail"):
        engine.run(callers.intent(key), callers.fail)
    Operation.objects.filter(key=key).update(due_at=timezone.now() - timezone.timedelta(days=1))
    assert retention.purge().interrupted == 1
    assert engine.run(callers.intent(key), callers.succeed).replayed is False
    assert effects(key) == 1


def test_a_row_that_is_gone_at_completion_undoes_the_effects() -> None:
    """Somebody deletes the row of a running operation by hand; on SQLite nobody else can."""
    key = callers.new_key()

    def handler(operation: Operation) -> Outcome:
        outcome = callers.succeed(operation)
        Operation.objects.filter(key=key).delete()
        return outcome

    with pytest.raises(RolledBack, match="gone"):
        engine.run(callers.intent(key), handler)
    assert effects(key) == 0
    assert engine.run(callers.intent(key), callers.succeed).replayed is False
