"""What happened to an operation, in plain words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import DatabaseError, connections, transaction
from django.utils.timezone import is_aware, localtime
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from .. import compensation, db, exceptions
from ..models import Event, EventKind, Operation, Status, Step

#: Looks of a state; style sheet classes.
GOOD, WAITING, BAD, OVER = "good", "waiting", "bad", "over"

STATES: dict[str, tuple[Any, str]] = {
    "succeeded": (_("Succeeded"), GOOD),
    "failed": (_("Failed"), BAD),
    "requires_action": (_("Requires action"), WAITING),
    "reversed": (_("Reversed"), OVER),
    "reconciling": (_("Reconciling"), BAD),
    "processing": (_("Processing"), WAITING),
    "executing": (_("Being executed"), WAITING),
    "interrupted": (_("Interrupted"), BAD),
    "retriable": (_("Waiting for a retry"), WAITING),
}

_REFUSALS: dict[str, str] = {
    cls.code: cls.title
    for cls in vars(exceptions).values()
    if isinstance(cls, type) and issubclass(cls, exceptions.Refusal) and hasattr(cls, "code")
}


@dataclass(frozen=True)
class Verdict:
    """The answer for the person who asks: what is it, and may it be sent again?"""

    state: str
    headline: str
    explanation: str
    retry: str

    @property
    def label(self) -> str:
        return str(STATES[self.state][0])

    @property
    def look(self) -> str:
        return STATES[self.state][1]


@dataclass(frozen=True)
class Moment:
    """One line of the timeline."""

    time: datetime
    text: str
    detail: str = ""
    look: str = ""

    @property
    def shown(self) -> str:
        return when(self.time)


def state_in_list(operation: Operation) -> str:
    """The state as far as the row alone tells it."""
    if operation.status == Status.PROCESSING and operation.last_error:
        return "retriable"
    return operation.status


def state(operation: Operation) -> str:
    """The state, after asking the database whether somebody executes a `processing` operation.

    `operation.lapsed` says whether the lease of a stepwise operation is over. Takes the row's lock
    for a moment; a claimant of a fresh row waits out such moments. SQLite cannot tell.
    """
    if operation.status != Status.PROCESSING:
        return operation.status
    if operation.stepwise:
        is_executed = not getattr(operation, "lapsed", True)
    else:
        found = _is_locked(operation)
        if found is None:
            return state_in_list(operation)
        is_executed = found
    if is_executed:
        return "executing"
    return "retriable" if operation.last_error else "interrupted"


def _is_locked(operation: Operation) -> bool | None:
    using = operation._state.db or ""
    if not connections[using].features.has_select_for_update_skip_locked:
        return None  # taking SQLite's one lock could wait for any writer
    try:
        with transaction.atomic(using):
            is_locked = db.lock(using, operation.pk) is None
            transaction.set_rollback(True, using)
    except DatabaseError:
        return None
    return is_locked


def verdict(operation: Operation, state: str, events: Iterable[Event]) -> Verdict:
    """The state in words. `operation.over` and `operation.gone` say whether window and tombstone are."""
    window, gone = getattr(operation, "over", False), getattr(operation, "gone", False)
    until = {
        "expires": when(operation.expires_at),
        "tombstone": when(operation.tombstone_until),
        "due": when(operation.due_at),
        "finished": when(operation.finished_at),
    }
    undone = _undone(events)
    texts = {
        "executing": (
            gettext("Somebody is executing it right now."),
            gettext("The outcome and its effects will appear together, or not at all."),
            gettext("Not yet: a retry is told to wait and come back."),
        ),
        "processing": (
            gettext("It was claimed and has no outcome yet."),
            gettext(
                "It is being executed, or its executor has vanished; this database cannot tell."
            ),
            gettext("Yes, with the same key: if nobody executes it, the retry does."),
        ),
        "interrupted": (
            gettext("Its executor vanished without an outcome, and nobody executes it now."),
            gettext("Its transaction was rolled back: nothing of this attempt was saved.")
            if not operation.stepwise
            else gettext("Finished steps are kept; the next attempt goes on after them."),
            gettext(
                "Yes, with the same key: the next retry runs it at once, or has it checked first if "
                "its policy says so."
            ),
        ),
        "retriable": (
            gettext("The last attempt failed, and nobody executes it now."),
            gettext("The attempt was rolled back: nothing of it was saved.")
            if not operation.stepwise
            else gettext("Finished steps are kept; the next attempt goes on after them."),
            gettext("Yes, with the same key: the next retry runs it at once."),
        ),
        "reconciling": (
            gettext("Nobody knows yet whether its effects exist."),
            gettext(
                "The reconciler gave up: somebody has to look on the other side, and settle it with "
                "idempotency.reconciliation.resolve()."
            )
            if any(event.kind == EventKind.HANDED_OVER for event in events)
            else gettext("It is asked about again at %(due)s.") % until,
            gettext("No: not with another key, or the effects may come twice."),
        ),
        "succeeded": (
            gettext("Done once, at %(finished)s.") % until,
            _replays(events),
            "",
        ),
        "failed": (
            gettext("Refused for good at %(finished)s; only a new key would be a new try.") % until,
            _replays(events),
            "",
        ),
        "requires_action": (
            gettext("It waits for somebody to do something, such as confirming a payment."),
            _replays(events),
            "",
        ),
        "reversed": (
            gettext("Done, and undone again at %s.") % when(undone.created_at)
            if undone
            else gettext("It failed, and what it had done was undone at %(finished)s.") % until,
            _replays(events),
            "",
        ),
    }
    headline, explanation, retry = texts[state]
    if not retry:
        if gone and state == "reversed":
            retry = gettext("It is refused for good: its key stands for what was undone.")
        elif gone:
            retry = gettext("It would be done again: the key was forgotten at %(tombstone)s.")
        elif window:
            retry = gettext("It is refused until %(tombstone)s: the answer is no longer kept.")
        else:
            retry = gettext(
                "Safe: until %(expires)s it gets the same answer, and nothing is repeated."
            )
        retry %= until
    return Verdict(state, headline, explanation, retry)


def _undone(events: Iterable[Event]) -> Event | None:
    """The later reversal of what had succeeded; None if its own failure undid it."""
    return next((event for event in events if event.kind == EventKind.REVERSED), None)


def _replays(events: Iterable[Event]) -> str:
    times = sum(event.kind == EventKind.REPLAYED for event in events)
    if not times:
        return gettext("No retry has asked for it since.")
    return (
        ngettext("%d retry got the same answer.", "%d retries got the same answer.", times) % times
    )


def timeline(operation: Operation, events: Iterable[Event]) -> list[Moment]:
    """Everything that is known to have happened, and what is going to, oldest first."""
    moments = [Moment(operation.created_at, gettext("Claimed"))]
    moments += [_moment(event) for event in events]
    if operation.finished_at is not None:
        code = f"HTTP {operation.code}" if operation.code else ""
        # A later reversal is an event, and leaves the time at which the operation finished.
        label, look = STATES["succeeded" if _undone(events) else operation.status]
        text = gettext("Finished: %s") % label
        moments.append(Moment(operation.finished_at, text, code, look))
    if operation.expires_at is not None:
        is_over = getattr(operation, "over", False)
        text = (
            gettext("The answer was forgotten")
            if is_over
            else gettext("The answer is kept until then")
        )
        moments.append(Moment(operation.expires_at, text, look=OVER))
    if operation.tombstone_until is not None and operation.tombstone_until != operation.expires_at:
        moments.append(
            Moment(operation.tombstone_until, gettext("Retries are refused until then"), look=OVER)
        )
    # A key that is used again keeps the events of its former life.
    return sorted(moments, key=lambda moment: moment.time)


def steps(rows: Iterable[Step]) -> list[Step]:
    """The steps under names for people, without the marker that says that undoing has begun."""
    shown = [step for step in rows if step.name != compensation.COMPENSATING]
    for step in shown:
        name = step.name.removeprefix(compensation.UNDO)
        if name != step.name:
            step.name = gettext("undo of %s") % name
    return shown


def _moment(event: Event) -> Moment:
    attempt = {"attempt": event.attempt}
    texts: dict[str, tuple[str, str]] = {
        EventKind.REPLAYED: (gettext("A retry got the stored answer"), ""),
        EventKind.REFUSED: (gettext("A request was refused"), BAD),
        EventKind.ATTEMPT_FAILED: (gettext("Attempt %(attempt)d failed") % attempt, BAD),
        EventKind.TAKEN_OVER: (
            gettext("Attempt %(attempt)d took over from one that vanished") % attempt,
            WAITING,
        ),
        EventKind.RENEWED: (gettext("The key was used again after its window"), WAITING),
    }
    text, look = texts.get(event.kind, (event.get_kind_display(), WAITING))
    detail = _REFUSALS.get(event.detail, "") if event.kind == EventKind.REFUSED else ""
    return Moment(
        event.created_at, text, f"{event.detail}: {detail}" if detail else event.detail, look
    )


def when(time: datetime | None) -> str:
    """A time as logs write it: people compare the two."""
    if time is None:
        return ""
    return f"{localtime(time) if is_aware(time) else time:%Y-%m-%d %H:%M:%S}"
