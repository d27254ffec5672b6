"""What sends a message on: one callable, or an object with `publish(message)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol

from django.utils.module_loading import import_string

from ..exceptions import ConfigurationError
from .messages import Message, PublishFailed

Publish = Callable[[Message], Any]


class Publisher(Protocol):
    """Returns when the message is safe on the other side; its value is ignored.

    Raises RetryAfter or PermanentFailure to decide what happens next, anything else to be called
    again after a back-off. Called outside any transaction, and again with the same message when
    nobody could record how a call ended. Must give up well before the lease (`OUTBOX_LEASE`) ends.
    """

    def publish(self, message: Message, /) -> Any: ...


class UnknownTopic(PublishFailed):
    """Nothing takes messages of this topic, here and now; another deploy may."""


def resolve(publisher: Publisher | Publish | str) -> Publish:
    """The callable behind what a setting or caller names. Raises ConfigurationError."""
    if isinstance(publisher, str):
        found: Any = import_string(publisher)
        return resolve(found() if isinstance(found, type) else found)
    publish = getattr(publisher, "publish", publisher)
    if not callable(publish):
        raise ConfigurationError(
            f"{publisher!r} is no publisher: it is neither callable nor has it a publish(message)"
        )
    if inspect.iscoroutinefunction(publish):
        raise ConfigurationError(
            f"{publisher!r} is async: nothing would be sent; use async_to_sync"
        )
    return publish


def by_topic(routes: Mapping[str, Publisher | Publish | str]) -> Publish:
    """A publisher that gives each message to the first route whose pattern matches its topic.

    Patterns are shell-style and case-sensitive: `order.*`. A topic without a route raises
    UnknownTopic, and the message is tried again later.
    """
    resolved = {pattern: resolve(publisher) for pattern, publisher in routes.items()}

    def publish(message: Message) -> Any:
        for pattern, publisher in resolved.items():
            if fnmatchcase(message.topic, pattern):
                return publisher(message)
        raise UnknownTopic(f"no publisher for topic {message.topic!r}")

    return publish
