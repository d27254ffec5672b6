"""Undoing the done steps of a stepwise operation, last one first, each once, from any process."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import transaction
from django.utils.module_loading import import_string

from . import encoding
from .models import Outcome, Status, Step, StepStatus

if TYPE_CHECKING:
    from .steps import StepwiseExecution

#: Name of the step that records that compensation has begun, and the outcome it ends with.
COMPENSATING = "~compensating"
#: Before the name of a step: the name of the step that undoes it.
UNDO = "~undo:"


def pending(execution: StepwiseExecution) -> Outcome | None:
    """The outcome an earlier attempt was compensating for when it ended."""
    marker = execution.recorded.get(COMPENSATING)
    return None if marker is None else _outcome_of(encoding.unseal(marker.result or ""))


def compensated(execution: StepwiseExecution, outcome: Outcome) -> Outcome:
    """Undo the done steps that declared a compensation; the outcome is `reversed` then.

    That it has begun is committed first: from then on no attempt runs the handler again, and the
    next one goes on with what is not undone yet.
    """
    execution.recorded = execution.read_steps()
    steps = [step for step in execution.recorded.values() if is_compensable(step)]
    if not steps:
        return outcome
    if COMPENSATING not in execution.recorded:
        with transaction.atomic(execution.using):
            execution.fence()
            execution.add(COMPENSATING, result=text_of(outcome))
    for step in reversed(steps):
        undo(execution, step)
    return replace(outcome, status=Status.REVERSED)


def undo(execution: StepwiseExecution, step: Step) -> None:
    """Run one step's compensation, itself an idempotent step of the same kind."""
    name = f"{UNDO}{step.name}"
    done = execution.recorded.get(name)
    if done is not None and done.status == StepStatus.DONE:
        return
    key = execution.operation.derive_key(name)
    with execution.named_in_errors(name):
        compensate = partial(import_string(step.compensation), result_of(step), key=key)
        if not step.is_external:
            with transaction.atomic(execution.using):
                execution.fence()
                compensate()
                execution.add(name, result="null")
            return
        with transaction.atomic(execution.using):
            execution.fence()
            if done is None:
                execution.add(name)
        compensate()
        execution.finish(name, None)


def is_compensable(step: Step) -> bool:
    return step.status == StepStatus.DONE and bool(step.compensation)


def result_of(step: Step) -> Any:
    """What the step returned."""
    return encoding.loads(encoding.unseal(step.result or "null"))


def text_of_result(result: Any) -> str:
    """What a step returned, as it is stored. Raises TypeError for what JSON cannot hold."""
    return encoding.seal(encoding.dumps(result))


def text_of(outcome: Outcome) -> str:
    """The outcome as the result of the step COMPENSATING."""
    body = None if outcome.body is None else base64.b64encode(outcome.body).decode()
    return encoding.seal(json.dumps([outcome.status, outcome.code, outcome.headers, body]))


def _outcome_of(text: str) -> Outcome:
    status, code, headers, body = json.loads(text)
    return Outcome(
        status=status,
        code=code,
        headers=headers,
        body=None if body is None else base64.b64decode(body),
    )
