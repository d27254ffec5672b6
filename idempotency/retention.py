"""The purge: the only code that removes operations.

A finished operation is due when its replay window ends. If its key is still to be refused after
that, it loses its outcome and becomes a tombstone that is due again when the tombstone ends; then
it is deleted with everything that belongs to it. An operation that was claimed and never finished
is deleted when it is due and nobody executes it. A reversed one keeps its key for ever, without its
outcome: see `Operation.may_start_anew`. Never touched: `reconciling` operations, stepwise
operations that are unfinished or wait for an action, and whatever somebody holds the row lock of.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.db.models import BooleanField, ExpressionWrapper, F, Q, QuerySet

from . import db
from .conf import conf
from .models import (
    FINAL,
    Event,
    EventKind,
    MessageStatus,
    Operation,
    OutboxMessage,
    Reference,
    Status,
    Step,
    Turn,
)

logger = logging.getLogger("idempotency")

#: Rows per transaction: few enough that nobody waits noticeably for one of them.
BATCH_SIZE = 1000
#: More ids than this do not fit into one statement on every database.
LARGEST_BATCH = 10_000

#: A turn that nobody took for so long is deleted; the next consumer of the object makes another.
TURN_UNUSED = timedelta(days=1)

_TRIES = 3

#: Statuses from which a stepwise operation goes on: reconciler and completer end it, not time.
_KEPT_IF_STEPWISE = (Status.PROCESSING, Status.REQUIRES_ACTION)


@dataclass(frozen=True, kw_only=True)
class Purged:
    """What a purge did, in rows."""

    #: Finished operations that lost their outcome and now only refuse their key.
    tombstoned: int = 0
    #: Finished operations that were deleted.
    deleted: int = 0
    #: Operations that were claimed, never finished, and deleted.
    interrupted: int = 0
    #: Whether nothing that was due is left; False when the time ran out.
    complete: bool = True

    def __add__(self, other: Purged) -> Purged:
        return Purged(
            tombstoned=self.tombstoned + other.tombstoned,
            deleted=self.deleted + other.deleted,
            interrupted=self.interrupted + other.interrupted,
            complete=self.complete and other.complete,
        )


def purge(
    using: str | None = None,
    *,
    batch_size: int = BATCH_SIZE,
    max_seconds: float | None = None,
    dry_run: bool = False,
    on_progress: Callable[[Purged], None] | None = None,
) -> Purged:
    """Remove what is over, by the clock of the database `using` (default: the `USING` setting).

    Each batch is a short transaction that skips rows somebody else works on, so purges may run at
    the same time, next to live traffic, be killed and be started again. Stops after `max_seconds`;
    `on_progress` gets the sums after every batch. With `dry_run` nothing is changed and the result
    says how many rows are due (an interrupted one may turn out to be executed).

    Raises ValueError for a batch size outside 1 to 10,000, and DatabaseError when the database
    stays unavailable.
    """
    if not 1 <= batch_size <= LARGEST_BATCH:
        raise ValueError(f"batch_size must be between 1 and {LARGEST_BATCH}, not {batch_size}")
    using = using or conf.USING
    if dry_run:
        return _count(using)
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    total = Purged()
    for batch in _batches(using, batch_size):
        total += batch
        if on_progress is not None:
            on_progress(total)
        if deadline is not None and time.monotonic() >= deadline:
            total += Purged(complete=False)
            break
    else:
        _forget_turns(using, batch_size)
    logger.info(
        "purge of %s: %d deleted, %d tombstoned, %d interrupted%s",
        using,
        total.deleted,
        total.tombstoned,
        total.interrupted,
        "" if total.complete else ", out of time",
    )
    return total


def overdue_since(using: str | None = None, *, by: timedelta = timedelta(0)) -> datetime | None:
    """When the oldest finished operation that is still there became due, if that is longer than `by` ago.

    None says that the purge runs and keeps up. It reads one index entry per status.
    """
    using = using or conf.USING
    oldest = (
        _due(using, status, by=by).order_by("due_at").values_list("due_at", flat=True).first()
        for status in FINAL
    )
    return min((due for due in oldest if due is not None), default=None)


def _due(using: str, status: str, *, by: timedelta = timedelta(0)) -> QuerySet[Operation]:
    due = Operation.objects.using(using).filter(
        status=status, due_at__lte=db.now(using, after=-by.total_seconds())
    )
    if status == Status.REVERSED:  # once their outcome is gone there is nothing more to do
        return due.filter(headers__isnull=False)
    return due.filter(stepwise=False) if status in _KEPT_IF_STEPWISE else due


def _over(using: str) -> Q:
    return Q(tombstone_until__lte=db.now(using))


def _count(using: str) -> Purged:
    total = Purged(interrupted=_due(using, Status.PROCESSING).count())
    for status in FINAL:
        due = _due(using, status)
        deleted = 0 if status == Status.REVERSED else due.filter(_over(using)).count()
        total += Purged(deleted=deleted, tombstoned=due.count() - deleted)
    return total


def _batches(using: str, size: int) -> Iterator[Purged]:
    features = connections[using].features
    statuses = [*sorted(FINAL)]
    if features.has_select_for_update_skip_locked or not features.has_select_for_update:
        statuses.append(Status.PROCESSING)  # else it could wait for an executor
    for status in statuses:
        after: _Cursor = None
        found = size
        while found == size:
            batch, found, after = _retried(using, status, size, after)
            if found:
                yield batch


_Cursor = tuple[datetime, uuid.UUID] | None


def _retried(using: str, status: str, size: int, after: _Cursor) -> tuple[Purged, int, _Cursor]:
    for attempt in range(_TRIES):
        try:
            with _write_transaction(using):
                return _batch(using, status, size, after)
        except (DatabaseError, InterfaceError) as error:
            connection = connections[using]
            # SQLite has waited for its lock as long as it is configured to.
            is_last = attempt == _TRIES - 1 or not connection.features.has_select_for_update
            if is_last or connection.in_atomic_block or not db.is_transient(error):
                raise
            db.drop_if_broken(using)
    raise AssertionError("unreachable")


@contextmanager
def _write_transaction(using: str) -> Iterator[None]:
    with transaction.atomic(using):
        if not connections[using].features.has_select_for_update:
            # SQLite: a transaction that has read first may be refused the write lock later, and with
            # the lock nobody else is executing anything.
            Operation.objects.using(using).filter(pk=uuid.UUID(int=0)).update(checks=F("checks"))
        yield


def _batch(using: str, status: str, size: int, after: _Cursor) -> tuple[Purged, int, _Cursor]:
    """One batch: what was done, how many rows were looked at, where the next batch starts."""
    due = _due(using, status)
    if after is not None:
        due = due.filter(Q(due_at__gt=after[0]) | Q(pk__gt=after[1]), due_at__gte=after[0])
    found = list(due.order_by("due_at", "pk").values_list("due_at", "pk")[:size])
    if not found:
        return Purged(), 0, after

    # Locked by primary key, after a plain read: a locking scan would hold entries of the index that
    # an executor's own update needs. Judged again under the lock: the row may have changed.
    features = connections[using].features
    is_over = ExpressionWrapper(_over(using), output_field=BooleanField())
    is_due = ExpressionWrapper(Q(due_at__lte=db.now(using)), output_field=BooleanField())
    locked = (
        Operation.objects.using(using)
        .filter(pk__in=[pk for _, pk in found])
        .order_by()
        .select_for_update(skip_locked=features.has_select_for_update_skip_locked)
        .values_list(
            "pk", "status", "stepwise", "attempt", "last_error", "lease_expires_at", is_due, is_over
        )
    )
    finished, gone, rows = [], [], 0
    for pk, status_now, stepwise, attempt, last_error, mark, due_now, over in locked:
        rows += 1
        if status_now != status or not due_now:
            continue
        if stepwise and status in _KEPT_IF_STEPWISE:
            continue
        if status == Status.PROCESSING and mark is not None and not last_error:
            _hand_to_reconciler(using, pk, attempt)
        elif status == Status.PROCESSING or (over and status != Status.REVERSED):
            gone.append(pk)
        else:
            finished.append(pk)
    _forget_outcomes(using, finished)
    _delete(using, gone)
    is_interrupted = status == Status.PROCESSING
    done = Purged(
        tombstoned=len(finished),
        deleted=0 if is_interrupted else len(gone),
        interrupted=len(gone) if is_interrupted else 0,
    )
    # Rows that stay where they are must not be found again and again.
    stayed = len(finished) + len(gone) < len(found)
    return done, len(found), found[-1] if stayed else after


def _hand_to_reconciler(using: str, pk: uuid.UUID, attempt: int) -> None:
    """An executor vanished whose policy is `on_interrupted="reconcile"`, and no retry came."""
    Operation.objects.using(using).filter(pk=pk).update(
        status=Status.RECONCILING,
        last_error="interrupted",
        lease_expires_at=None,
        due_at=db.now(using),
    )
    db.add_event(using, pk, EventKind.RECONCILING, attempt, "interrupted")


def _forget_turns(using: str, size: int) -> None:
    """Delete turns that nobody took for long, except those that somebody holds now."""
    features = connections[using].features
    if features.has_select_for_update and not features.has_select_for_update_skip_locked:
        return  # it could wait for whoever holds one
    unused = Turn.objects.using(using).filter(
        used_at__lte=db.now(using, after=-TURN_UNUSED.total_seconds())
    )
    found = size
    while found == size:
        try:
            with _write_transaction(using):
                due = list(unused.order_by("used_at").values_list("pk", flat=True)[:size])
                free = unused.filter(pk__in=due).select_for_update(
                    skip_locked=features.has_select_for_update_skip_locked
                )
                found, _ = (
                    Turn.objects.using(using)
                    .filter(pk__in=list(free.values_list("pk", flat=True)))
                    .delete()
                )
        except (DatabaseError, InterfaceError) as error:
            if connections[using].in_atomic_block or not db.is_transient(error):
                raise
            db.drop_if_broken(using)
            return  # they cost nothing but room; the next run takes them


def _forget_outcomes(using: str, ids: list[uuid.UUID]) -> None:
    if ids:
        Operation.objects.using(using).filter(pk__in=ids).update(
            body=None, headers=None, due_at=F("tombstone_until")
        )


def _delete(using: str, ids: list[uuid.UUID]) -> None:
    """Operations with their events, references, steps and the messages that were sent for them."""
    if not ids:
        return
    for model in (Event, Reference, Step):
        model._base_manager.using(using).filter(operation_id__in=ids).delete()
    OutboxMessage.objects.using(using).filter(
        operation_id__in=ids, status=MessageStatus.SENT
    ).delete()
    # Through the ORM: a project's own foreign key to Operation may say SET_NULL.
    Operation.objects.using(using).filter(pk__in=ids).only("pk").delete()
