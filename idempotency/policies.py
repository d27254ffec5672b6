"""`Policy`: the frozen value every entry point is configured with."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import lru_cache
from typing import Any

from django.core.signals import setting_changed
from django.dispatch import receiver

from .conf import conf
from .exceptions import ConfigurationError

#: Statuses that say nothing about the intent itself: the caller, the moment or the route was wrong.
NEVER_FINAL = frozenset({401, 403, 405, 406, 407, 408, 413, 415, 421, 423, 425, 429})


def store_final(code: int) -> bool:
    """2xx, 3xx and deterministic 4xx are final; what is not final is rolled back, not stored."""
    return 200 <= code < 500 and code not in NEVER_FINAL


def store_success(code: int) -> bool:
    """Only 2xx and 3xx are final; a refused request may be corrected under the same key."""
    return 200 <= code < 400


def store_everything(code: int) -> bool:
    """Returned 5xx are final too (Stripe API v1); an unhandled exception has no response to store."""
    return 200 <= code < 600 and code not in NEVER_FINAL


Seconds = float | int | timedelta


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How an operation is protected. A field left at None takes the project's default.

    Raises ConfigurationError for a value that can protect nothing.
    """

    #: Stored operation name; default: the route or the dotted name of the view or function.
    name: str | None = None
    #: HTTP methods that are protected; others pass untouched.
    methods: Collection[str] | None = None
    #: Refuse requests without a key (400 missing-key) instead of running them unprotected.
    required: bool | None = None
    #: Where the key comes from: a callable(request) -> str | None, or "header:NAME", "json:FIELD", "form:FIELD".
    key: Callable[..., str | None] | str | None = None
    #: callable(request) -> tuple of strings naming who shares the key space.
    scope: Callable[..., tuple[str, ...]] | None = None
    #: callable(request) -> Fingerprint, bytes or JSON-able value, instead of the built-in one.
    fingerprint: Callable[..., Any] | None = None
    #: Body fields that may differ between retries ("sent_at", "meta.trace_id").
    exclude_fields: Collection[str] | None = None
    #: Replay window: how long the outcome is kept, counted from its completion.
    retention: Seconds | None = None
    #: How long after the window a late retry is still refused (410 key-expired).
    tombstone: Seconds | None = None
    #: How long a duplicate waits for a running first request before 409.
    wait: Seconds | None = None
    #: callable(status code) -> bool, or the collection of final status codes.
    store: Callable[[int], bool] | Collection[int] | None = None
    #: Steps with external effects; ownership is a lease.
    stepwise: bool | None = None
    #: Length of a stepwise lease.
    lease: Seconds | None = None
    #: What happens to an operation whose executor vanished: "rerun" or "reconcile".
    on_interrupted: str | None = None
    #: callable(request, operation) -> bool, asked before a replay is shown.
    authorize_replay: Callable[..., bool] | None = None
    #: Database alias of the effects; the operation lives there too.
    using: str | None = None
    #: Larger responses are delivered but not kept.
    max_response_bytes: int | None = None
    #: Object with encode(bytes) -> bytes and decode(bytes) -> bytes for bodies at rest.
    codec: Any = None

    def __post_init__(self) -> None:
        for field in ("methods", "exclude_fields", "store"):
            value = getattr(self, field)
            if value is not None and not callable(value):
                if isinstance(value, str):
                    raise ConfigurationError(f"Policy.{field} takes a collection, not {value!r}")
                items = (v.upper() for v in value) if field == "methods" else value
                object.__setattr__(self, field, frozenset(items))
        for field, least in (("retention", 1), ("tombstone", 0), ("wait", 0), ("lease", 1)):
            value = getattr(self, field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
                raise ConfigurationError(
                    f"Policy.{field} takes seconds or a timedelta, not {value!r}"
                )
            if not isinstance(value, timedelta):
                object.__setattr__(self, field, timedelta(seconds=value))
            if getattr(self, field) < timedelta(seconds=least):
                raise ConfigurationError(
                    f"Policy.{field} must be at least {least} s, not {value!r}"
                )
        if self.on_interrupted not in (None, "rerun", "reconcile"):
            raise ConfigurationError(
                f'Policy.on_interrupted is "rerun" or "reconcile", not {self.on_interrupted!r}'
            )
        if self.max_response_bytes is not None and self.max_response_bytes < 0:
            raise ConfigurationError("Policy.max_response_bytes cannot be negative")

    def __hash__(self) -> int:
        # Equal policies have these equal; a codec or a callable need not be hashable.
        return hash((self.name, self.methods, self.retention, self.using))

    def resolved(self) -> Resolved:
        """This policy with the project's defaults filled in."""
        return _resolve(self)

    def is_final(self, code: int) -> bool:
        """Whether an outcome with this status code is stored and its effects committed."""
        store = self.store
        assert store is not None, "resolve the policy first"
        return store(code) if callable(store) else code in store


class Resolved(Policy):
    """A Policy without unset fields; the types say so."""

    name: str | None
    methods: frozenset[str]
    required: bool
    key: Callable[..., str | None] | str | None
    scope: Callable[..., tuple[str, ...]]
    exclude_fields: frozenset[str]
    retention: timedelta
    tombstone: timedelta
    wait: timedelta
    stepwise: bool
    lease: timedelta
    on_interrupted: str
    using: str
    max_response_bytes: int


@lru_cache(maxsize=1024)
def _resolve(policy: Policy) -> Resolved:
    unset = {
        field.name: getattr(conf, field.name.upper())
        for field in fields(Policy)
        if field.name != "name" and getattr(policy, field.name) is None
    }
    filled = replace(policy, **unset)
    return Resolved(**{field.name: getattr(filled, field.name) for field in fields(Policy)})


@receiver(setting_changed)
def _forget(*, setting: str, **kwargs: object) -> None:
    if setting == "IDEMPOTENCY":
        _resolve.cache_clear()
