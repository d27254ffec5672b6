"""Signals, sent with `send_robust` after the transaction that caused them has committed.

Sender is the `Operation` class; every signal carries `operation` (never a body, key or person in
anything else): `operation_replayed` and `operation_taken_over` nothing more, `operation_refused`
`refusal` (the exception), `operation_attempt_failed` `error` (a short, value-free description).
"""

from django.dispatch import Signal

operation_finished = (
    Signal()
)  # succeeded, failed, requires_action or reversed: see operation.status
operation_replayed = Signal()
operation_refused = Signal()
operation_attempt_failed = Signal()
operation_taken_over = Signal()
operation_reconciling = Signal()
