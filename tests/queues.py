"""A Celery application on a broker in memory, and deliveries as a worker makes them, without a worker."""

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from celery import Celery, current_app
from celery.app.trace import build_tracer
from kombu.serialization import dumps, loads

from tests.app.models import Effect


@dataclass(frozen=True)
class Ended:
    """How a worker saw a delivery end: SUCCESS, FAILURE, RETRY, IGNORED or REJECTED."""

    state: str
    value: Any


@dataclass(frozen=True)
class Delivery:
    """A message as the broker hands it to a worker; the same one again is a redelivery."""

    headers: dict[str, Any]
    body: Any
    queue: str

    @property
    def id(self) -> str:
        return str(self.headers["id"])


class Queue:
    """The application `app`, with `send` and `receive` on one queue."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.name = app.conf.task_default_queue

    def task(self, function: Any = None, **options: Any) -> Any:
        """`@app.task`, without Celery's habit of adding it to every other application."""
        decorate = self.app.task(shared=False, **options)
        return decorate if function is None else decorate(function)

    def waiting(self) -> list[Delivery]:
        """Take what is in the queue."""
        found = []
        with self.app.connection_for_read() as connection:
            queue = connection.SimpleQueue(self.name)
            while queue.qsize():
                message = queue.get(block=False)
                message.ack()
                found.append(Delivery(dict(message.headers), message.payload, self.name))
        return found

    def sent(self) -> Delivery:
        """The one message in the queue."""
        [delivery] = self.waiting()
        return delivery

    def deliver(self, delivery: Delivery) -> Ended:
        """Run a delivery as a worker process does; what it publishes waits in the queue."""
        task = self.app.tasks[delivery.headers["task"]]
        content_type, encoding, raw = dumps(delivery.body, "json")  # as over a wire
        args, kwargs, embed = loads(raw, content_type, encoding)
        request = {
            **delivery.headers,
            "args": args,
            "kwargs": kwargs,
            "delivery_info": {
                "exchange": "",
                "routing_key": delivery.queue,
                "priority": 0,
                "redelivered": False,
            },
            "hostname": "test",
            "is_eager": False,
            **embed,
        }
        tracer = build_tracer(task.name, task, app=self.app)
        result, info, _, _ = tracer(delivery.id, args, kwargs, request)
        if info is None:
            return Ended("SUCCESS", result)
        return Ended(info.state, info.retval)

    def work(self, limit: int = 50) -> list[Ended]:
        """Deliver until the queue is empty; countdowns are not waited for."""
        ended: list[Ended] = []
        while deliveries := self.waiting():
            for delivery in deliveries:
                ended.append(self.deliver(delivery))
                assert len(ended) < limit, f"goes on for ever: {ended[-3:]}"
        return ended


def effect(label: str, amount: int = 0) -> int:
    """One visible effect; returns its primary key."""
    return Effect.objects.create(label=label, amount=amount).pk


@contextmanager
def queue() -> Iterator[Queue]:
    """A fresh application and queue. Tasks are defined with `queue.app.task`."""
    name = f"tests-{uuid.uuid4().hex}"
    before = current_app._get_current_object()
    app = Celery(name, broker="memory://", set_as_current=False)
    app.conf.task_default_queue = name
    app.conf.result_backend = "cache+memory://"
    app.set_current()
    level = logging.getLogger("celery.app.trace").level
    logging.getLogger("celery.app.trace").setLevel(logging.CRITICAL)  # failures are expected
    try:
        yield Queue(app)
    finally:
        logging.getLogger("celery.app.trace").setLevel(level)
        before.set_current()
        app.close()
