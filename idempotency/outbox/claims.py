"""Which messages a relay may take, and what it writes about them afterwards.

A claim begins a lease, so that the very predicate it selected by is false for everybody else, and
leaves a token in `owner`. Whatever is written later is conditional on that token: a relay that slept
too long changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from django.db import InterfaceError, OperationalError, connections, transaction
from django.db.models import F, QuerySet

from .. import db
from ..models import MessageStatus, OutboxMessage, new_owner
from .messages import Message
from .statements import KEY, OWNER, PK, Row, Statements, statements

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
        rows = OutboxMessage.objects.using(self.using)
        return rows.filter(owner=self.owner, pk__in=pks, status=MessageStatus.PENDING)

    def sent(self, pks: Collection[int]) -> int:
        """Returns how many of them were still ours, also when it is said again."""
        # The token stays, so that a repetition after a lost answer finds the same rows.
        sql = statements(self.using)
        return sql.write(sql.sent, [self.owner], pks)

    def retry(self, pk: int, after: float, error: str) -> int:
        """Let the message be taken again `after` seconds from now."""
        available = db.now(self.using, after=after)
        return self._mine([pk]).update(
            owner="", lease_expires_at=None, available_at=available, last_error=error
        )

    def dead(self, pk: int, error: str, *, tried: bool = True) -> int:
        return self._mine([pk]).update(
            owner="",
            lease_expires_at=None,
            attempts=F("attempts") - (0 if tried else 1),
            status=MessageStatus.DEAD,
            available_at=db.now(self.using),
            last_error=error,
        )

    def give_back(self, pks: Collection[int]) -> int:
        """These were not tried: the attempt does not count."""
        return self._mine(pks).update(owner="", lease_expires_at=None, attempts=F("attempts") - 1)


class Claims:
    """The claims of one relay, one after the other."""

    def __init__(self, using: str, size: int, lease: float) -> None:
        self.using = using
        self.size = size
        self.lease = lease
        self._begun = False
        #: Whether there may be more than the last claim took.
        self._more = False
        #: The oldest due messages wait for others: look behind them.
        self._blocked = False

    def take(self, finish: Callable[[], Any] | None = None) -> Claim | None:
        """Take up to `size` due messages for `lease` seconds, counting an attempt for each.

        None: nothing is due. `finish` writes the marks of the last claim, in the transaction of this
        one; it may be called several times. Raises RuntimeError inside a transaction: a message must
        not be published before its claim is committed.
        """
        if db.in_transaction(self.using) and not connections[self.using].in_atomic_block:
            if not self._begun:
                raise RuntimeError(
                    "A relay needs autocommit: its claim must commit before it publishes."
                )
            reset(self.using)
        self._begun = True
        sql = statements(self.using)
        if finish is None and not self._more and not sql.ask(sql.is_due, []):
            return None  # an idle relay takes no locks
        for attempt in range(1, _TRIES + 1):
            try:
                with transaction.atomic(self.using, durable=True):
                    if finish is not None:
                        finish()
                    claimed = self._claimed()
                if claimed is not None or not self._blocked:
                    return claimed
            except _Interfered:
                continue
            except (OperationalError, InterfaceError) as error:
                connection = connections[self.using]
                # MariaDB: two relays may deadlock. SQLite has waited for its lock already.
                retriable = connection.features.has_select_for_update and db.is_transient(error)
                if connection.in_atomic_block or not retriable or attempt == _TRIES:
                    raise
                reset(self.using)
        if finish is not None:
            finish()
        return None

    def _claimed(self) -> Claim | None:
        started, owner = time.monotonic(), new_owner()
        sql = statements(self.using)
        chosen = self._choose(sql)
        if not chosen:
            return None
        claimed = sql.write(sql.claim, [owner, self.lease], [row[PK] for row in chosen])
        if claimed != len(chosen):
            raise _Interfered
        messages = tuple(_message(self.using, row) for row in chosen)
        return Claim(self.using, owner, messages, started)

    def _choose(self, sql: Statements) -> list[Row]:
        """The rows to claim, in the order to publish them."""
        if sql.first:
            sql.write(sql.first, [])
        if self._blocked:
            chosen = _heads(sql, self.size)
            self._more = self._blocked = len(chosen) == self.size
            return chosen
        oldest = sql.rows(sql.oldest, [self.size])
        chosen = _in_turn(sql, oldest)
        self._more = len(oldest) == self.size
        self._blocked = self._more and len(chosen) < self.size / 2
        return _alone(chosen) or chosen


def reset(using: str) -> None:
    """Let the next statement open another connection, unless this one is well.

    A block whose connection broke may leave it behind with autocommit off.
    """
    connection = connections[using]
    if connection.connection is not None and not (connection.autocommit and connection.is_usable()):
        connection.close()


def claim(using: str, size: int, lease: float) -> Claim | None:
    """A single claim; see `Claims.take`."""
    return Claims(using, size, lease).take()


def _message(using: str, row: Row) -> Message:
    pk, message_id, topic, payload, ordering_key, operation_id, attempts, created_at, *_ = row
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


def _in_turn(sql: Statements, locked: list[Row]) -> list[Row]:
    """Those of the rows that no other message of their ordering key holds up.

    Waits for nobody: what another relay holds is not among them, and holds up what comes after it.
    """
    chosen = [row for row in locked if not row[KEY]]
    keyed = sorted((row for row in locked if row[KEY]), key=itemgetter(PK))
    others, begun = sql.first_others(keyed), set()
    for row in keyed:
        # What a vanished relay left behind is the first of its key, or has to wait for it.
        if row[PK] < others.get(row[KEY], row[PK] + 1) and not (row[OWNER] and row[KEY] in begun):
            chosen.append(row)
            begun.add(row[KEY])
        else:
            others[row[KEY]] = 0
    return chosen


def _alone(rows: list[Row]) -> list[Row]:
    """The first row whose relay vanished while it held the message.

    If the message was the reason, it must not take others with it again: it is tried alone.
    """
    return [row for row in rows if row[OWNER]][:1]


def _heads(sql: Statements, size: int) -> list[Row]:
    """The first message of each ordering key, however far behind, and what comes after it."""
    heads: list[Row] = []
    # A long backlog of few ordering keys has few heads; they are at its front unless blocked.
    if edge := sql.ask(sql.edge, [WINDOW]):
        heads = sql.rows(sql.heads_before, [edge[0][0], size])
    heads = heads or sql.rows(sql.heads, [size])
    return _alone(heads) or heads + _followers(sql, heads, size - len(heads))


def _followers(sql: Statements, heads: list[Row], room: int) -> list[Row]:
    """What comes after the heads of their ordering keys; nobody else can claim it before a head is done.

    Each key is followed up to its first message that has to wait.
    """
    open_keys = {row[KEY] for row in heads if row[KEY]}
    if not open_keys or room <= 0:
        return []
    known = {row[PK] for row in heads}
    query = f"{sql.followers}({', '.join(['%s'] * len(open_keys))}) {sql.in_order}"
    params = [min(known), *open_keys, room + len(known)]
    followers: list[Row] = []
    for row in sql.rows(query, params):
        if row[PK] in known or row[KEY] not in open_keys:
            continue
        is_due = row[-1]
        if not is_due or row[OWNER]:
            open_keys.discard(row[KEY])
        elif len(followers) < room:
            followers.append(row)
    return followers
