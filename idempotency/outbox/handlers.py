"""The publisher that runs functions of this project: each handler once per message."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeVar

from django.utils.module_loading import autodiscover_modules

from .. import engine, fingerprints
from ..conf import conf
from ..exceptions import ConfigurationError, KeyExpired, ResponseNotRetained
from ..models import Outcome, Status
from ..policies import Policy
from .messages import Message, PermanentFailure
from .publishers import UnknownTopic

logger = logging.getLogger("idempotency")

F = TypeVar("F", bound=Callable[[Message], Any])


@dataclass(frozen=True, kw_only=True)
class Handler:
    """A function and the topics it takes."""

    name: str
    topics: tuple[str, ...]
    function: Callable[[Message], Any]
    using: str | None
    retention: float | timedelta | None

    def takes(self, topic: str) -> bool:
        return any(fnmatchcase(topic, pattern) for pattern in self.topics)

    def __call__(self, message: Message) -> None:
        """Run the function in one transaction with the record that it ran; nothing when it has."""
        retention = conf.OUTBOX_HANDLER_RETENTION if self.retention is None else self.retention
        intent = engine.Intent(
            name=self.name[:200],
            scope=("outbox", self.name),
            key=str(message.id),
            # The id alone: a dead letter whose payload was put right is still the same message.
            fingerprint=fingerprints.of(str(message.id)),
            policy=Policy(
                name=self.name,
                using=self.using or message.using,
                retention=retention,
                wait=0,
                stepwise=False,
            ).resolved(),
        )

        is_running = False

        def run(operation: Any) -> Outcome:
            nonlocal is_running
            is_running = True
            self.function(message)
            return Outcome(status=Status.SUCCEEDED)

        try:
            engine.run(intent, run)
        except (KeyExpired, ResponseNotRetained):
            if is_running:  # that of another operation, which the function has called
                raise


_handlers: dict[str, Handler] = {}


def handler(
    *topics: str,
    name: str | None = None,
    using: str | None = None,
    retention: float | timedelta | None = None,
) -> Callable[[F], F]:
    """Run the function for every message whose topic matches one of the patterns (`order.*`).

    The call is an operation of its own, (("outbox", name), message id), and commits together with the
    function's effects in the database `using` (default: that of the message): a message that is
    published twice has one effect, and when one of several handlers fails, the others are not
    repeated with it. Raise RetryAfter or PermanentFailure to decide what happens next.

    `name` identifies the handler for ever (default: its dotted name): name it before you move or
    rename the function. Put handlers into a module `outbox_handlers` of an installed app, where the
    relay finds them. Raises ConfigurationError when the name is taken.
    """
    if not topics:
        raise ConfigurationError('Name the topics of a handler: @outbox.handler("order.*")')

    def register(function: F) -> F:
        if inspect.iscoroutinefunction(function):
            raise ConfigurationError(
                f"{function.__qualname__} is async: it would never run; use async_to_sync"
            )
        found = Handler(
            name=name or f"{function.__module__}.{function.__qualname__}",
            topics=topics,
            function=function,
            using=using,
            retention=retention,
        )
        before = _handlers.get(found.name)
        if before is not None and _place(before.function) != _place(function):
            raise ConfigurationError(f"Two outbox handlers are named {found.name!r}")
        _handlers[found.name] = found
        return function

    return register


def _place(function: Any) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def dispatch(message: Message) -> None:
    """Publish by running every handler of the message's topic; the default publisher.

    A failing handler does not keep the others from running. Raises what one of them raised (the
    first that a retry may help, if any), or UnknownTopic.
    """
    _discover()
    takers = [handler for handler in list(_handlers.values()) if handler.takes(message.topic)]
    if not takers:
        raise UnknownTopic(f"no handler for topic {message.topic!r}")
    failures = []
    for taker in takers:
        try:
            taker(message)
        except Exception as error:
            logger.warning("handler %s failed for message %s", taker.name, message.id)
            failures.append(error)
    if failures:
        raise min(failures, key=lambda error: isinstance(error, PermanentFailure))


@cache
def _discover() -> None:
    autodiscover_modules("outbox_handlers")
