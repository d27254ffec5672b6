"""Stepwise operations without an executor: run, compensated, asked about, or handed over to people."""

from __future__ import annotations

import inspect
import logging
import uuid
from collections.abc import Callable
from typing import Any, ParamSpec

from asgiref.sync import async_to_sync
from django.db import DatabaseError, transaction
from django.db.models import Q
from django.utils.module_loading import import_string

from . import claims, compensation, db, encoding, ownership, signals
from .conf import conf
from .exceptions import ConfigurationError, Mismatch, Refusal, StoredFailure
from .executions import send
from .models import EventKind, Operation, Status, describe_error
from .policies import Policy
from .reconciliation import (
    Report,
    add_event,
    can_be_asked,
    due,
    hand_over_if_older,
    open_step,
    postpone,
)
from .steps import backoff

logger = logging.getLogger("idempotency")

P = ParamSpec("P")


def complete_abandoned(using: str | None = None, *, limit: int = 100) -> Report:
    """Go on with stepwise operations whose executor failed or vanished, and whose next look is due.

    Functions and tasks run again with their stored arguments, after their lease. Views are not run
    without their client, who may have been logged out since. But a compensation that has begun is
    finished, an open call with a reconciler is asked about (status `reconciling`), and what is older
    than `RECONCILE_MAX_AGE` is handed over to people, as is a function that keeps failing.

    Failures are recorded like those of every attempt. Safe to run concurrently.
    """
    using = using or conf.USING
    counts = dict.fromkeys(("asked", "settled", "rerun", "waiting", "handed_over"), 0)
    is_free = Q(lease_expires_at=None) | Q(lease_expires_at__lte=db.now(using))
    for operation in due(using, is_free & Q(status=Status.PROCESSING, stepwise=True), limit):
        if not postpone(operation, backoff(operation.checks)):
            continue
        counts["asked"] += 1
        counts[_complete(operation)] += 1
    return Report(**counts)


def submit(function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> uuid.UUID:
    """Leave a stepwise idempotent function to `complete_abandoned`; returns the operation's id.

    In the caller's transaction: what is submitted with a view's own answer is as durable as that.
    A call that was submitted or made before is left alone. Raises Mismatch, InProgress while another
    transaction that may still roll back has submitted it, and ConfigurationError for a function that
    the completer could not call.
    """
    get_intent = getattr(function, "idempotency_intent", None)
    intent = None if get_intent is None else get_intent(args, kwargs)
    if intent is None or intent.arguments is None:
        raise ConfigurationError(
            f"submit() takes a stepwise @idempotent_function at module level, not {function!r}"
        )
    using, fresh = intent.policy.using, claims.first_row(intent)
    with transaction.atomic(using):
        try:
            is_new, found = db.claim(using, fresh.__dict__, 0, None)
        except DatabaseError as error:
            if not db.is_lock_timeout(error):
                raise
            is_new, found = False, None
        if not is_new:
            found = found or db.read(using, fresh.pk)
            if found is not None and found.may_start_anew:
                is_new = claims.renew(fresh, intent)
            elif found is not None and not intent.fingerprint.matches(found.fingerprint):
                raise Mismatch(operation_id=found.pk)
            if found is None or (found.may_start_anew and not is_new):
                ownership.in_progress(fresh)
        if is_new:
            values = (Status.PROCESSING, fresh.attempt, fresh.owner, "submitted", 0)
            db.execute(using, "fail", values, fresh.pk)
    return fresh.pk


def _complete(operation: Operation) -> str:
    done = "waiting"
    try:
        if operation.arguments is not None:
            _call(encoding.loads(encoding.unseal(operation.arguments)))
            done = "rerun"  # a task has only been sent
        else:
            _compensate(operation)
    except StoredFailure:
        pass
    except Refusal as refusal:
        logger.info("operation %s goes on later: %s", operation.pk, refusal.code)
    except Exception as error:
        logger.warning("running operation %s again failed: %s", operation.pk, describe_error(error))
        db.drop_if_broken(operation.using)
    operation.refresh_from_db(fields=["status", "owner", "attempt"])
    if operation.is_final:
        return "settled"
    if operation.status != Status.PROCESSING:
        return "waiting"  # for the reconciler
    step = open_step(operation)
    if operation.arguments is None and step is not None and can_be_asked(operation, step):
        _ask_later(operation)
        return "waiting"
    return "handed_over" if hand_over_if_older(operation, None) else done


def _call(call: dict[str, Any]) -> None:
    function = import_string(call["function"])
    if inspect.iscoroutinefunction(function):
        function = async_to_sync(function)
    function(*call["args"], **call["kwargs"])


def _compensate(operation: Operation) -> None:
    """Finish a compensation that has begun; its outcome and what to undo are stored with it."""
    using = operation.using
    if not operation.steps.using(using).filter(name=compensation.COMPENSATING).exists():
        return
    policy = Policy(using=using, stepwise=True, on_interrupted="rerun")
    execution = ownership.lease(operation, policy.resolved())
    outcome = None if execution is None else compensation.pending(execution)
    if execution is not None and outcome is not None:
        execution.complete(outcome)


def _ask_later(operation: Operation) -> None:
    """From interrupted to `reconciling`, unless somebody goes on with it at this moment."""
    using = operation.using
    same = Operation.objects.using(using).filter(
        Q(lease_expires_at=None) | Q(lease_expires_at__lte=db.now(using)),
        pk=operation.pk,
        status=Status.PROCESSING,
        owner=operation.owner,
    )
    changed = same.update(
        status=Status.RECONCILING, lease_expires_at=None, checks=0, due_at=db.now(using)
    )
    if changed:
        operation.status = Status.RECONCILING
        add_event(operation, EventKind.RECONCILING, "interrupted")
        send(signals.operation_reconciling, operation)
