"""Real brokers, real worker processes, SIGKILL: one effect each time.

One database is enough here: what differs between databases is proven without a broker.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chord

from idempotency.models import EventKind, Operation, Status
from tests.app.models import Effect
from tests.callers import effects
from tests.processes import eventually
from tests.servers import rabbitmq, redis
from tests.workers import Broker, Held, beat, worker

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.vendor("postgresql")]

#: Shorter than the tasks that are held: Redis delivers them again while they run.
VISIBILITY = 2


@pytest.fixture(scope="module")
def on_redis() -> Iterator[Broker]:
    if not redis.available():
        pytest.skip("no redis-server here; apt install redis-server")
    with redis.server() as server:
        broker = Broker(server.url(0), server.url(1), visibility=VISIBILITY)
        yield broker
        broker.close()


@pytest.fixture(scope="module")
def on_rabbitmq() -> Iterator[Broker]:
    if not rabbitmq.available():
        pytest.skip("no RabbitMQ here; apt install rabbitmq-server")
    with rabbitmq.server() as server:
        broker = Broker(server.url(), None)
        yield broker
        broker.close()


@pytest.fixture(scope="module")
def at_redis(
    on_redis: Broker, django_db_setup: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Broker]:
    """Redis, with one worker of three processes on the default queue."""
    with worker(on_redis, tmp_path_factory.mktemp("worker"), "celery"):
        yield on_redis


@pytest.fixture(scope="module")
def at_rabbitmq(
    on_rabbitmq: Broker, django_db_setup: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Broker]:
    """RabbitMQ, with one worker of three processes on the default queue."""
    with worker(on_rabbitmq, tmp_path_factory.mktemp("worker"), "celery"):
        yield on_rabbitmq


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> Broker:
    return request.getfixturevalue(f"on_{request.param}")


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def at_work(request: pytest.FixtureRequest) -> Broker:
    return request.getfixturevalue(f"at_{request.param}")


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    found = Held(tmp_path / "held")
    yield found
    found.let_go()


def new_label() -> str:
    return f"label-{uuid.uuid4().hex}"


def status(task_id: str) -> str | None:
    return Operation.objects.filter(key=task_id).values_list("status", flat=True).first()


def succeeded(task_id: str) -> Operation:
    eventually(lambda: status(task_id) == Status.SUCCEEDED, "the operation succeeds")
    return Operation.objects.get(key=task_id)


def events(task_id: str, kind: str) -> int:
    return Operation.objects.get(key=task_id).events.filter(kind=kind).count()


def test_a_process_killed_in_the_middle_has_no_effect_and_another_one_has_it(
    at_work: Broker, held: Held
) -> None:
    """BUGS N10 with `acks_late` and `reject_on_worker_lost`."""
    label = new_label()
    task = at_work.send("tests.held", label, str(held.directory))
    victim = held.started()
    os.kill(victim, signal.SIGKILL)
    held.started(not_by={victim})
    assert effects(label) == 0
    held.let_go()
    operation = succeeded(task.id)
    assert (effects(label), operation.attempt) == (1, 2)


def test_a_whole_worker_killed_in_the_middle_is_replaced_by_another(
    broker: Broker, held: Held, tmp_path: Path, django_db_setup: None
) -> None:
    """BUGS N10: RabbitMQ delivers again at once, Redis after the visibility timeout."""
    label = new_label()
    task = broker.send("tests.held", label, str(held.directory), queue="mortal")
    with worker(broker, tmp_path, "mortal", processes=1) as first:
        victim = held.started()
        first.kill()
    with worker(broker, tmp_path, "mortal", processes=1):
        held.started(not_by={victim})
        held.let_go()
        operation = succeeded(task.id)
    assert (effects(label), operation.attempt) == (1, 2)


def test_a_task_that_kills_every_worker_ends_dead_and_the_queue_goes_on(at_work: Broker) -> None:
    """RULES 104."""
    label, other = new_label(), new_label()
    task = at_work.send("tests.dies", label)
    eventually(lambda: status(task.id) == Status.FAILED, "the task is given up")
    operation = Operation.objects.get(key=task.id)
    assert (operation.interruptions, effects(label)) == (2, 0)
    assert events(task.id, EventKind.TAKEN_OVER) == 2  # and the third death was the last one
    succeeded(at_work.send("tests.quick", other).id)
    assert effects(other) == 1


def test_six_copies_at_once(at_work: Broker) -> None:
    """BUGS N05."""
    label, task_id = new_label(), str(uuid.uuid4())
    for _ in range(6):
        at_work.send("tests.quick", label, task_id=task_id)
    succeeded(task_id)
    eventually(lambda: events(task_id, EventKind.REPLAYED) >= 5, "every copy gets the result")
    assert effects(label) == 1


def test_a_hard_time_limit_leaves_the_key_free(at_redis: Broker, held: Held) -> None:
    """BUGS O02."""
    label = new_label()
    at_redis.send("tests.limited", label, str(held.directory))
    victim = held.started()
    eventually(lambda: victim not in held.pids(), "the time limit kills the process")
    assert effects(label) == 0
    held.let_go()
    at_redis.send("tests.limited", label, str(held.directory))
    succeeded(label)
    assert effects(label) == 1


@pytest.mark.parametrize("terminate", [False, True], ids=["before the start", "while it runs"])
def test_a_revoked_task_does_not_block_its_key(
    at_redis: Broker, held: Held, terminate: bool
) -> None:
    """BUGS O04."""
    label, task_id = new_label(), str(uuid.uuid4())
    headers = {"idempotency_key": task_id}
    options = {} if terminate else {"countdown": 3600}
    first = at_redis.send("tests.held", label, str(held.directory), headers=headers, **options)
    victim = held.started() if terminate else None
    at_redis.sender.control.revoke(first.id, terminate=terminate, signal="SIGKILL")
    if victim:
        eventually(lambda: victim not in held.pids(), "the process is terminated")
    held.let_go()
    at_redis.send("tests.held", label, str(held.directory), headers=headers)
    succeeded(task_id)
    assert effects(label) == 1


def test_redelivery_during_the_run_is_put_back_and_replayed(at_redis: Broker, held: Held) -> None:
    """BUGS N02, N03: a visibility timeout shorter than the task. RULES 102, HARD_CASES 32."""
    label = new_label()
    task = at_redis.send("tests.held", label, str(held.directory))
    first = held.started()
    eventually(lambda: refusals(task.id) >= 2, "redelivered, put back, and delivered once more")
    assert held.pids() == {first}
    held.let_go()
    succeeded(task.id)
    eventually(lambda: events(task.id, EventKind.REPLAYED) >= 1, "the copy gets the result")
    assert effects(label) == 1
    assert events(task.id, EventKind.TAKEN_OVER) == 0


def refusals(task_id: str) -> int:
    found = Operation.objects.filter(key=task_id).first()
    return 0 if found is None else found.events.filter(detail="in-progress").count()


def test_a_chord_whose_member_died_has_one_body(at_redis: Broker, held: Held) -> None:
    label, body_label = new_label(), new_label()
    sender = at_redis.sender
    header = [
        sender.signature("tests.held", args=(label, str(held.directory))),
        sender.signature("tests.quick", args=(new_label(),)),
    ]
    result: Any = chord(header, app=sender)(sender.signature("tests.total", args=(body_label,)))
    victim = held.started()
    os.kill(victim, signal.SIGKILL)
    held.started(not_by={victim})
    held.let_go()
    assert result.get(timeout=60) == 2
    assert (effects(label), effects(body_label)) == (1, 1)


def test_two_beats_run_every_slot_once(at_redis: Broker, tmp_path: Path) -> None:
    """BUGS N07, N09, N13. RULES 105."""
    with beat(at_redis, tmp_path, "one"), beat(at_redis, tmp_path, "two"):
        eventually(lambda: len(duplicates()) >= 3, "both beats have sent three slots")
    labels = list(Effect.objects.filter(label__startswith="slot ").values_list("label", flat=True))
    assert len(labels) == len(set(labels)) >= 3
    slots = {key.partition("@")[2] for key in Operation.objects.values_list("key", flat=True)}
    assert {label.removeprefix("slot ").replace(" ", "T") for label in labels} <= slots


def duplicates() -> set[str]:
    """Slots that came twice."""
    replayed = Operation.objects.filter(key__startswith="every-second@", events__kind="replayed")
    return set(replayed.values_list("key", flat=True))
