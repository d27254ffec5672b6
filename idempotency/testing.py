"""What a project's own tests need.

    from idempotency import testing

    def test_ordering_twice_orders_once(self):
        first, _ = testing.assert_idempotent(
            lambda headers: self.client.post("/orders/", {"sku": "cup"}, headers=headers),
            effects=Order.objects.count,
        )
        testing.expire(testing.operation(key=...))

Works in `TestCase`. Signals of the package and other `on_commit` hooks need `TransactionTestCase`
or `captureOnCommitCallbacks(execute=True)`, and so does anything with more than one connection.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db.models import F
from django.utils import timezone

from .conf import conf
from .http.responses import KEPT
from .models import Operation

_TIMES = (
    "created_at",
    "finished_at",
    "expires_at",
    "tombstone_until",
    "due_at",
    "lease_expires_at",
)


def new_key() -> str:
    """A key that nobody has used."""
    return str(uuid.uuid4())


def headers(key: str | None = None) -> dict[str, str]:
    """The request headers that carry `key` (default: a new one), for `client.post(headers=...)`."""
    quoted = (key or new_key()).replace("\\", "\\\\").replace('"', '\\"')
    return {conf.KEY_HEADER: f'"{quoted}"'}


def operation(key: str, *, using: str | None = None) -> Operation:
    """The operation with this key, as it is in the database.

    Raises Operation.DoesNotExist, or MultipleObjectsReturned if several scopes used the key.
    """
    return Operation.objects.using(using or conf.USING).get(key=key)


def assert_idempotent(
    send: Callable[[dict[str, str]], Any],
    *,
    effects: Callable[[], Any],
    key: str | None = None,
) -> tuple[Any, Any]:
    """Assert that a request sent twice has one effect and gets the same answer; returns both answers.

    `send(headers)` sends the request with the given headers and returns its response; it is called
    twice. `effects()` returns something that each effect changes, such as a number of rows or a
    balance. Raises AssertionError, also if the first request fails or has no effect: then the
    second one would prove nothing.
    """
    sent = headers(key)
    before = effects()
    first = send(dict(sent))
    if first.status_code >= 400:
        raise AssertionError(f"The first request failed: {_shown(first)}")
    if first.has_header("Idempotent-Replayed"):
        raise AssertionError("The first request was a replay: use a new key.")
    after = effects()
    if after == before:
        raise AssertionError(f"The first request had no effect: effects() stayed {before!r}.")

    second = send(dict(sent))
    again = effects()
    if again != after:
        raise AssertionError(
            f"The retry had an effect of its own: effects() went from {after!r} to {again!r}. "
            "Is the view protected for this method, and does it read the key from this header?"
        )
    if second.get("Idempotent-Replayed") != "true":
        raise AssertionError(
            f"The retry was not answered from the stored outcome: {_shown(second)}"
        )
    if _answer(second) != _answer(first):
        raise AssertionError(
            f"The retry was answered differently: {_shown(first)}, then {_shown(second)}"
        )
    return first, second


def age(operation: Operation, seconds: float) -> None:
    """Let `seconds` pass for this operation: its times move into the past. Refreshes the instance."""
    by = timedelta(seconds=seconds)
    rows = Operation.objects.using(operation._state.db).filter(pk=operation.pk)
    rows.update(**{name: F(name) - by for name in _TIMES})
    operation.refresh_from_db()


def expire(operation: Operation, *, tombstone: bool = False) -> None:
    """Let the replay window be over just now; with `tombstone`, also the time the key is refused.

    Raises ValueError for an operation that has not finished: it has no window yet.
    """
    operation.refresh_from_db()
    end = operation.tombstone_until if tombstone else operation.expires_at
    if end is None:
        raise ValueError(f"{operation} has not finished; use age()")
    age(operation, max(0.0, (end - timezone.now()).total_seconds() + 1))


def _answer(response: Any) -> tuple[int, dict[str, str], bytes]:
    """What a replay repeats: status, the headers that are stored, the body."""
    stored = {*KEPT, *(name.lower() for name in conf.REPLAY_HEADERS)}
    kept = {name.lower(): value for name, value in response.items() if name.lower() in stored}
    return response.status_code, kept, response.getvalue()


def _shown(response: Any) -> str:
    status, kept, body = _answer(response)
    return f"{status} {kept} {body[:300]!r}"
