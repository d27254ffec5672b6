"""Which messages a relay may take, and what it writes about them afterwards.

A claim moves `available_at` to the end of its lease, so that the very predicate it selected by is
false for everybody else, and leaves a token in `owner`. Whatever is written later is conditional on
that token: a relay that slept too long changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import InterfaceError, OperationalError, connections, transaction
from django.db.models import BooleanField, Exists, ExpressionWrapper, F, OuterRef, Q, QuerySet

from .. import db
from ..conf import conf
from ..exceptions import ConfigurationError
from ..models import MessageStatus, OutboxMessage, new_owner
from . import clock
from .messages import Message

FIELDS = (
    "pk",
    "message_id",
    "topic",
    "payload",
    "ordering_key",
    "operation_id",
    "attempts",
    "created_at",
    "owner",
)  # fmt: skip
_PK, _KEY, _OWNER = FIELDS.index("pk"), FIELDS.index("ordering_key"), FIELDS.index("owner")

_TRIES = 5
#: Heads are looked for among this many of the oldest due messages first.
WINDOW = 1000


class _Interfered(Exception):
    """A message changed between its selection and its claim: staff re-drove or deleted it."""


@dataclass(frozen=True)
class Claim:
    """Messages that nobody else will take before the lease ends."""

    using: str
    owner: str
    #: In the order to publish; those of one ordering key are in the order they were written.
    messages: tuple[Message, ...]
    #: `time.monotonic()` before the claim: the lease ends later than this plus its length.
    started: float

    def _mine(self, pks: Collection[int]) -> QuerySet[OutboxMessage]:
        return _rows(self.using).filter(owner=self.owner, pk__in=pks, status=MessageStatus.PENDING)

    def sent(self, pks: Collection[int]) -> int:
        """Returns how many of them were still ours, also when it is said again."""
        # The token stays, so that a repetition after a lost answer finds the same rows.
        rows = _rows(self.using).filter(owner=self.owner, pk__in=pks)
        now = clock.now(self.using)
        return rows.update(status=MessageStatus.SENT, sent_at=now, available_at=now, last_error="")

    def retry(self, pk: int, after: float, error: str) -> int:
        """Let the message be taken again `after` seconds from now."""
        available = clock.now(self.using, after=after)
        return self._mine([pk]).update(owner="", available_at=available, last_error=error)

    def dead(self, pk: int, error: str, *, tried: bool = True) -> int:
        return self._mine([pk]).update(
            owner="",
            attempts=F("attempts") - (0 if tried else 1),
            status=MessageStatus.DEAD,
            available_at=clock.now(self.using),
            last_error=error,
        )

    def give_back(self, pks: Collection[int]) -> int:
        """These were not tried: the attempt does not count."""
        now = clock.now(self.using)
        return self._mine(pks).update(owner="", available_at=now, attempts=F("attempts") - 1)


class Claims:
    """The claims of one relay, one after the other."""

    def __init__(self, using: str, size: int, lease: float) -> None:
        self.using = using
        self.size = size
        self.lease = lease
        #: Whether there was more than the last claim took, and whether it was of few ordering keys.
        self._more = False
        self._crowded = True

    def take(self, finish: Callable[[], Any] | None = None) -> Claim | None:
        """Take up to `size` due messages for `lease` seconds, counting an attempt for each.

        None: nothing is due. `finish` writes the marks of the last claim, in the transaction of this
        one; it may be called several times. Raises RuntimeError inside a transaction: a message must
        not be published before its claim is committed.
        """
        due = _due(self.using)
        if finish is None and not self._more and not _rows(self.using).filter(due).exists():
            return None  # an idle relay takes no locks
        for attempt in range(1, _TRIES + 1):
            try:
                with transaction.atomic(self.using, durable=True):
                    if finish is not None:
                        finish()
                    return self._claimed(due)
            except _Interfered:
                continue
            except (OperationalError, InterfaceError) as error:
                connection = connections[self.using]
                # MariaDB: two relays may deadlock. SQLite has waited for its lock already.
                retriable = connection.features.has_select_for_update and db.is_transient(error)
                if connection.in_atomic_block or not retriable or attempt == _TRIES:
                    raise
                db.drop_if_broken(self.using)
        if finish is not None:
            finish()
        return None

    def _claimed(self, due: Q) -> Claim | None:
        started, owner = time.monotonic(), new_owner()
        chosen = _choose(self.using, self.size, due, crowded=self._crowded)
        self._more = len(chosen) == self.size
        self._crowded = any(row[_KEY] for row in chosen) or not chosen
        if not chosen:
            return None
        pks = [row[_PK] for row in chosen]
        end = clock.now(self.using, after=self.lease)
        claimed = (
            _rows(self.using)
            .filter(due, pk__in=pks)
            .update(owner=owner, available_at=end, attempts=F("attempts") + 1)
        )
        if claimed != len(chosen):
            raise _Interfered
        messages = tuple(_message(self.using, row) for row in chosen)
        return Claim(self.using, owner, messages, started)


def claim(using: str, size: int, lease: float) -> Claim | None:
    """A single claim; see `Claims.take`."""
    return Claims(using, size, lease).take()


def _rows(using: str) -> QuerySet[OutboxMessage]:
    return OutboxMessage.objects.using(using)


def _due(using: str) -> Q:
    return Q(status=MessageStatus.PENDING, available_at__lte=clock.now(using))


def _message(using: str, row: Sequence[Any]) -> Message:
    pk, message_id, topic, payload, ordering_key, operation_id, attempts, created_at, _ = row
    return Message(
        id=message_id,
        topic=topic,
        body=payload,
        ordering_key=ordering_key,
        operation_id=operation_id,
        attempt=attempts + 1,
        created_at=created_at,
        using=using,
        pk=pk,
    )


def _blocking() -> list[str]:
    """The statuses of a message that hold up later ones of its ordering key."""
    rule = conf.OUTBOX_DEAD_HEAD
    if rule not in ("block", "skip"):
        raise ConfigurationError(f'OUTBOX_DEAD_HEAD is "block" or "skip", not {rule!r}')
    return [MessageStatus.PENDING, *([MessageStatus.DEAD] if rule == "block" else [])]


def _choose(using: str, size: int, due: Q, *, crowded: bool) -> list[Sequence[Any]]:
    """The rows to claim, in the order to publish them."""
    features = connections[using].features
    rows = _rows(using)
    if not features.has_select_for_update:
        # SQLite: a transaction that has read first may be refused the write lock later.
        rows.filter(pk=0).update(attempts=F("attempts"))
    blocking = _blocking()
    older = rows.filter(
        ordering_key=OuterRef("ordering_key"), status__in=blocking, pk__lt=OuterRef("pk")
    )
    found = (
        rows.filter(due)
        .filter(Q(ordering_key="") | ~Exists(older))
        .order_by("available_at", "pk")
        .select_for_update(
            skip_locked=features.has_select_for_update_skip_locked,
            no_key=features.has_select_for_no_key_update,
        )
        .values_list(*FIELDS)
    )
    heads: list[Sequence[Any]] = []
    if crowded:
        # A long backlog of few ordering keys has few heads; they are at its front unless blocked.
        edge = rows.filter(due).order_by("available_at").values_list("available_at", flat=True)
        if (last := next(iter(edge[WINDOW : WINDOW + 1]), None)) is not None:
            heads = list(found.filter(available_at__lte=last)[:size])
    heads = heads or list(found[:size])
    if heads and heads[0][_OWNER]:
        # Its relay vanished while it held the message. If the message was the reason, it must not
        # take others with it again: it is tried alone.
        return heads[:1]
    heads = [row for row in heads if not row[_OWNER]]
    return heads + _followers(using, heads, size - len(heads), due, blocking)


def _followers(
    using: str, heads: list[Sequence[Any]], room: int, due: Q, blocking: list[str]
) -> list[Sequence[Any]]:
    """What comes after the heads of their ordering keys; nobody else can claim it before a head is done.

    Each key is followed up to its first message that has to wait.
    """
    open_keys = {row[_KEY] for row in heads if row[_KEY]}
    if not open_keys or room <= 0:
        return []
    known = {row[_PK] for row in heads}
    found = (
        _rows(using)
        .filter(ordering_key__in=open_keys, status__in=blocking, pk__gt=min(known))
        .order_by("pk")
        .values_list(*FIELDS, ExpressionWrapper(due, output_field=BooleanField()))
    )
    followers: list[Sequence[Any]] = []
    for *row, is_due in found[: room + len(known)]:
        if row[_PK] in known or row[_KEY] not in open_keys:
            continue
        if not is_due or row[_OWNER]:
            open_keys.discard(row[_KEY])
        elif len(followers) < room:
            followers.append(row)
    return followers
