"""Celery: outbox messages become tasks.

# settings.py
IDEMPOTENCY = {"OUTBOX_PUBLISHER": "shop.outbox.publisher"}
# shop/outbox.py
publisher = CeleryPublisher({"order.*": "shop.tasks.order_changed"})
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from celery import Celery, current_app

from ..outbox import Message, UnknownTopic
from .celery import OPERATION_HEADER


class CeleryPublisher:
    """Sends each message as the first task whose topic pattern (`order.*`) matches.

    The task is called with the payload as its only argument. Its id is the message's id, the same
    however often the relay repeats the message, so that `@idempotent_task` without a key runs it once.
    A task is looked up by name on the worker only: the relay need not import it.

    A message counts as sent when the broker took it. RabbitMQ says so only with
    `broker_transport_options = {"confirm_publish": True}`. Keyword arguments go to
    `Celery.send_task` (queue, priority, ...).
    """

    def __init__(
        self, tasks: Mapping[str, str], *, app: Celery | None = None, **options: Any
    ) -> None:
        self.tasks = dict(tasks)
        self.app = app
        self.options = options

    def publish(self, message: Message) -> None:
        headers = dict(self.options.get("headers") or {})
        if message.operation_id is not None:
            headers.setdefault(OPERATION_HEADER, str(message.operation_id))
        # Without Celery's own retries: the relay has a back-off, and other messages to send.
        options = {"retry": False, **self.options, "headers": headers}
        app = self.app or current_app
        app.send_task(
            self._task(message.topic), args=[message.payload], task_id=str(message.id), **options
        )

    def _task(self, topic: str) -> str:
        for pattern, task in self.tasks.items():
            if fnmatchcase(topic, pattern):
                return task
        raise UnknownTopic(f"no task for topic {topic!r}")
