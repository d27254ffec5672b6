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


class OperationFilter(logging.Filter):
    """Adds `operation_id` and `operation_name`; both are `-` outside a protected call.

    Lets every record pass, and leaves values that were given as `extra` alone.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        # Imported late: LOGGING is set up before the apps are loaded.
        from . import engine

        operation = engine.current()
        values = record.__dict__
        values.setdefault("operation_id", "-" if operation is None else str(operation.pk))
        values.setdefault("operation_name", "-" if operation is None else operation.name)
        return True
