"""The relay: claim, publish outside any transaction, mark. At least once, never less.

A crash after a publish and before its mark repeats the message under the same id.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from django.db import DatabaseError, InterfaceError, OperationalError, connections

from .. import db
from ..conf import conf
from ..models import describe_error
from .claims import Claim, Claims, reset
from .messages import Message, PermanentFailure, PublishFailed, RetryAfter
from .publishers import Publish, Publisher, resolve

logger = logging.getLogger("idempotency")

T = TypeVar("T")

#: Published messages wait at most this many seconds for their mark: a crash repeats no more.
FLUSH_SECONDS = 0.1
#: Pauses between attempts to reach a database that is away, in seconds.
FIRST_RECONNECT, LAST_RECONNECT = 0.1, 5.0
#: How long a relay that is asked to stop keeps trying to write its marks, in seconds.
STOP_SECONDS = 5.0

VANISHED = "the relay vanished at the last attempt"


@dataclass(kw_only=True)
class Summary:
    """What a relay did, in messages."""

    sent: int = 0
    #: Failed and to be tried again.
    retried: int = 0
    #: Given up: dead letters.
    dead: int = 0


def seconds(duration: float | timedelta) -> float:
    """A duration as settings may give it, in seconds."""
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)


def backoff(attempt: int) -> float:
    """Seconds to wait after this attempt failed: doubling, capped, with jitter of up to a half."""
    first, most = seconds(conf.OUTBOX_BACKOFF), seconds(conf.OUTBOX_BACKOFF_MAX)
    delay = min(most, first * 2.0 ** min(attempt - 1, 60))
    return random.uniform(delay / 2, delay)  # noqa: S311 (spreads load, guards nothing)


def relay(
    *,
    using: str | None = None,
    batch_size: int | None = None,
    publisher: Publisher | Publish | str | None = None,
    max_seconds: float | None = None,
) -> Summary:
    """Publish what is due in the database `using` until nothing is, or `max_seconds` are over.

    Any number of relays may run at the same time. Raises RuntimeError inside a transaction, and
    OperationalError or InterfaceError when the database cannot be reached.
    """
    worker = Relay(using=using, batch_size=batch_size, publisher=publisher)
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    try:
        while worker.next_batch():
            if deadline is not None and time.monotonic() >= deadline:
                break
    finally:
        worker.flush()
    return worker.summary


class Relay:
    """A relay that runs until `stop()`; defaults come from the `OUTBOX_*` settings.

    `using` is the database alias, `batch_size` the number of messages claimed at once, `interval`
    the pause in seconds when nothing is due.
    """

    def __init__(
        self,
        *,
        using: str | None = None,
        batch_size: int | None = None,
        interval: float | None = None,
        publisher: Publisher | Publish | str | None = None,
    ) -> None:
        self.using = using or conf.USING
        self.batch_size = batch_size or conf.OUTBOX_BATCH_SIZE
        self.interval = seconds(conf.OUTBOX_INTERVAL if interval is None else interval)
        self.publish = resolve(conf.OUTBOX_PUBLISHER if publisher is None else publisher)
        self.summary = Summary()
        self.stopping = False
        self.lease = seconds(conf.OUTBOX_LEASE)
        self._claims = Claims(self.using, self.batch_size, self.lease)
        self._last: _Batch | None = None

    def stop(self) -> None:
        """Finish the message in hand, give the others back and return. May be called by a signal handler."""
        self.stopping = True

    def run(self, *, once: bool = False) -> None:
        """Relay until `stop()`, or with `once` until nothing is due.

        Outlives the database: while it is away, tries to come back.
        """
        pause = FIRST_RECONNECT
        try:
            while not self.stopping:
                try:
                    found = self.next_batch()
                except (OperationalError, InterfaceError) as error:
                    self._reconnect(error)
                    self._sleep(pause)
                    pause = min(pause * 2, LAST_RECONNECT)
                    continue
                pause = FIRST_RECONNECT
                if not found:
                    if once:
                        return
                    connections[self.using].close_if_unusable_or_obsolete()
                    self._sleep(self.interval)
        finally:
            self.flush()

    def run_once(self) -> int:
        """Claim one batch, publish and mark it. Returns how many messages were claimed."""
        try:
            return self.next_batch()
        finally:
            self.flush()

    def next_batch(self) -> int:
        """`run_once`, but the marks may wait for the next call, whose claim they share a commit with."""
        last = self._last
        claimed = self._claims.take(last.mark if last is not None and last.published else None)
        if last is not None:
            last.marked()
        if claimed is None:
            self._last = None
            return 0
        self._last = _Batch(self, claimed)
        self._last.run()
        return len(claimed.messages)

    def flush(self) -> None:
        """Write the marks that still wait."""
        if self._last is not None:
            self._last.flush()

    def _reconnect(self, error: DatabaseError | InterfaceError) -> None:
        if connections[self.using].in_atomic_block or not db.is_transient(error):
            raise error
        logger.warning("outbox relay: database %r does not answer, trying again", self.using)
        reset(self.using)

    def _sleep(self, seconds: float) -> None:
        # In slices: a sleep goes on after a signal handler has returned.
        deadline = time.monotonic() + seconds
        while not self.stopping and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))


class _Batch:
    """One claim on its way out."""

    def __init__(self, relay: Relay, claimed: Claim) -> None:
        self.relay = relay
        self.claimed = claimed
        #: Published, not yet marked.
        self.published: list[int] = []
        self.flushed = time.monotonic()
        #: How many of them the last mark found still ours.
        self.found = 0
        #: Ordering keys of which a message has failed: the later ones have to wait.
        self.held: set[str] = set()
        self.max_attempts = conf.OUTBOX_MAX_ATTEMPTS

    def run(self) -> None:
        untried: list[int] = []
        messages = iter(self.claimed.messages)
        try:
            for message in messages:
                if self._is_over():
                    untried.append(message.pk)
                    break
                if message.ordering_key and message.ordering_key in self.held:
                    untried.append(message.pk)
                    continue
                if message.attempt > self.max_attempts:
                    self._bury(message, VANISHED, tried=False)
                else:
                    self._try(message)
                if time.monotonic() - self.flushed >= FLUSH_SECONDS:
                    self.flush()
        finally:
            # A message interrupted by an exit (KeyboardInterrupt) stays claimed: nobody knows how it ended.
            untried += [message.pk for message in messages]
            if untried:
                self._write(lambda: self.claimed.give_back(untried))

    def _is_over(self) -> bool:
        # Half of the lease is left for the message that is begun last.
        return self.relay.stopping or time.monotonic() - self.claimed.started > self.relay.lease / 2

    def _try(self, message: Message) -> None:
        try:
            self.relay.publish(message)
        except Exception as error:
            self.held.add(message.ordering_key)
            self._failed(message, error)
        else:
            self.published.append(message.pk)

    def _failed(self, message: Message, error: Exception) -> None:
        reason = describe(error)
        if isinstance(error, PermanentFailure) or message.attempt >= self.max_attempts:
            self._bury(message, reason)
            return
        after = error.seconds if isinstance(error, RetryAfter) else backoff(message.attempt)
        logger.warning(
            "message %s (%s) failed at attempt %d, next in %.1f s: %s",
            message.id,
            message.topic,
            message.attempt,
            after,
            reason,
        )
        self.relay.summary.retried += self._write(
            lambda: self.claimed.retry(message.pk, after, reason)
        )

    def _bury(self, message: Message, reason: str, *, tried: bool = True) -> None:
        logger.error("message %s (%s) is a dead letter: %s", message.id, message.topic, reason)
        self.held.add(message.ordering_key)
        self.relay.summary.dead += self._write(
            lambda: self.claimed.dead(message.pk, reason, tried=tried)
        )

    def mark(self) -> int:
        """Mark what was published; may be said again."""
        self.found = self.claimed.sent(self.published)
        return self.found

    def marked(self) -> None:
        """The mark is committed."""
        lost = len(self.published) - self.found
        self.relay.summary.sent += self.found
        self.published, self.found = [], 0
        if lost:
            logger.warning(
                "%d published messages could not be marked and may be published again: the claim's "
                "lease was over, or the database was away. Publishing must be faster than OUTBOX_LEASE.",
                lost,
            )

    def flush(self) -> None:
        self.flushed = time.monotonic()
        if self.published:
            self._write(self.mark)
            self.marked()

    def _write(self, write: Callable[[], int]) -> int:
        """The number of rows written; 0 when the database stays away until the lease is over."""
        pause, stop_at = FIRST_RECONNECT, None
        while True:
            try:
                return write()
            except (OperationalError, InterfaceError) as error:
                self.relay._reconnect(error)
                now = time.monotonic()
                if self.relay.stopping and stop_at is None:
                    stop_at = now + STOP_SECONDS
                if now - self.claimed.started > self.relay.lease or (stop_at and now > stop_at):
                    logger.error(
                        "outbox relay: database %r did not come back in time", self.relay.using
                    )
                    return 0
                time.sleep(pause)
                pause = min(pause * 2, LAST_RECONNECT)


def describe(error: Exception) -> str:
    """What an operator reads about a failed attempt, at most 255 characters."""
    if isinstance(error, PublishFailed) and str(error):
        return f"{type(error).__name__}: {error}"[:255]
    return describe_error(error)
