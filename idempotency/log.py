"""Puts the current operation's id on every log record.

    LOGGING = {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"operation": {"()": "idempotency.log.OperationFilter"}},
        "formatters": {"plain": {"format": "%(levelname)s %(operation_id)s %(name)s %(message)s"}},
        "handlers": {
            "console": {
                "class": "logging.StreamHandler",
                "filters": ["operation"],
                "formatter": "plain",
            },
        },
        "root": {"handlers": ["console"], "level": "INFO"},
    }

Put the filter on handlers, not on loggers: a logger's filter does not see the records of its
children. The package itself logs to the logger `idempotency`, never a key, a body or a person.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar

#: Ids of the operations that sent the tasks this context runs; "" for a task sent outside of one.
_senders: ContextVar[tuple[str, ...]] = ContextVar("idempotency_senders", default=())


def sender() -> str:
    """The id of the operation that sent the running task, or ""."""
    senders = _senders.get()
    return senders[-1] if senders else ""


def push_sender(operation_id: str) -> None:
    """A task that `operation_id` sent starts here; `pop_sender` ends it."""
    _senders.set((*_senders.get(), operation_id))


def pop_sender() -> None:
    _senders.set(_senders.get()[:-1])


class OperationFilter(logging.Filter):
    """Adds `operation_id`, `operation_name` and `sent_by`; they are `-` where there is none.

    `sent_by` is the id of the operation that sent the running task. A task that is no operation
    itself has it as its `operation_id` too, so one id finds the request and what followed from it.
    Lets every record pass, and leaves values that were given as `extra` alone.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        # Imported late: LOGGING is set up before the apps are loaded.
        from . import engine

        operation = engine.current()
        values = record.__dict__
        values.setdefault("sent_by", sender() or "-")
        found = values["sent_by"] if operation is None else str(operation.pk)
        values.setdefault("operation_id", found)
        values.setdefault("operation_name", "-" if operation is None else operation.name)
        return True
