"""The tables. `Operation` is one user intent; everything else is about it.

Rows on the request path are written by `db`; the ORM serves admin, maintenance and tests.
"""

from .messages import MessageStatus, OutboxMessage, Turn
from .operations import (
    FINAL,
    TRANSITIONS,
    Event,
    EventKind,
    Operation,
    Outcome,
    Reference,
    Status,
    describe_error,
    new_owner,
)
from .steps import Branch, BranchStatus, Step, StepStatus

__all__ = [
    "FINAL",
    "TRANSITIONS",
    "Branch",
    "BranchStatus",
    "Event",
    "EventKind",
    "MessageStatus",
    "Operation",
    "OutboxMessage",
    "Outcome",
    "Reference",
    "Status",
    "Step",
    "StepStatus",
    "Turn",
    "describe_error",
    "new_owner",
]
