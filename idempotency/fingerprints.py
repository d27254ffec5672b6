"""Fingerprints: what a request or call asks for, as a keyed hash to store and compare."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted
from math import isfinite
from typing import Any
from uuid import UUID

from django.conf import settings
from django.utils.crypto import constant_time_compare

from .conf import conf
from .exceptions import ConfigurationError

#: Changes whenever equal requests would get other canonical bytes.
VERSION = "1"
#: Deeper JSON is compared byte for byte. Fixed, so that no interpreter limit decides.
MAX_DEPTH = 100

Exclude = Collection[str]


@dataclass(frozen=True)
class Fingerprint:
    """The canonical bytes of what is asked for. Only `digest()` is ever stored."""

    canonical: bytes

    def digest(self) -> str:
        """`version:key id:HMAC-SHA256`, 75 characters. Keyed: plain hashes can be guessed."""
        key_id, secret = _secrets()[0]
        return f"{VERSION}:{key_id}:{self._hmac(secret)}"

    def matches(self, stored: str) -> bool:
        """Whether `stored`, the digest of an earlier request, asks for the same.

        Digests made with a rotated secret compare as long as the secret is configured. An unknown
        version or secret is no match.
        """
        version, _, rest = stored.partition(":")
        key_id, _, mac = rest.partition(":")
        if version != VERSION:
            return False
        for known_id, secret in _secrets():
            if known_id == key_id:
                return constant_time_compare(self._hmac(secret), mac)
        return False

    def _hmac(self, secret: bytes) -> str:
        return hmac.digest(secret, self.canonical, "sha256").hex()


def of(*parts: bytes | str) -> Fingerprint:
    """The fingerprint of a sequence of parts; where one part ends and the next begins counts."""
    return Fingerprint(_joined(parts))


def of_value(value: Any, exclude: Exclude = frozenset()) -> Fingerprint:
    """The fingerprint of plain Python data, for function arguments.

    Takes None, bool, int, finite float, str, bytes, Decimal, UUID, dates and times, Enum (by
    value), saved model instances (by label and primary key), and lists, tuples, sets and dicts of
    these. Aware datetimes are compared as instants. Raises TypeError for anything else.
    """
    return of(canonical_value(value, exclude))


def canonical_value(
    value: Any,
    exclude: Exclude = frozenset(),
    unknown: Callable[[Any], bytes | str] | None = None,
) -> bytes:
    """The canonical bytes behind `of_value`; `unknown` names values of other types."""
    try:
        return _Encoder(exclude, unknown).encode(value).encode()
    except RecursionError:
        raise TypeError(
            f"A value nested deeper than {MAX_DEPTH} levels has no fingerprint. {_ADVICE}"
        ) from None


def canonical_json(raw: bytes, exclude: Exclude = frozenset()) -> bytes | None:
    """JSON with sorted members and without whitespace, or None if `raw` is not plain JSON.

    Numbers stay as written: 1 is not 1.0, and no digit is lost. None for invalid JSON, NaN,
    duplicate member names and more than 100 levels: the caller hashes the raw bytes then. `exclude`
    names members by dotted path ("meta.sent_at"); a path goes through lists as if they were not
    there.
    """
    try:
        return _Encoder(exclude).encode(_json.decode(raw.decode())).encode()
    except (ValueError, RecursionError):
        return None


def canonical_query(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Query parameters sorted by name; the values of one name keep their order."""
    return canonical_form(pairs)


def canonical_form(pairs: Iterable[tuple[bytes, bytes]], exclude: Exclude = frozenset()) -> bytes:
    """Form fields sorted by name; the values of one name keep their order."""
    return canonical_records(pairs, exclude)


def canonical_records(
    records: Iterable[tuple[bytes, ...]], exclude: Exclude = frozenset()
) -> bytes:
    """Records sorted by their first item, the field name; equal names keep their order.

    The upload of a multipart body is the record (field, file name, content type, SHA-256).
    """
    kept = [record for record in records if record[0].decode(errors="replace") not in exclude]
    kept.sort(key=lambda record: record[0])
    return _joined(_joined(record) for record in kept)


def _joined(parts: Iterable[bytes | str]) -> bytes:
    out = []
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else bytes(part)
        out.append(b"%d:%b," % (len(data), data))
    return b"".join(out)


def _secrets() -> tuple[tuple[str, bytes], ...]:
    configured = conf.FINGERPRINT_SECRETS
    if not configured:
        configured = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    elif isinstance(configured, str | bytes):
        raise ConfigurationError(
            "IDEMPOTENCY['FINGERPRINT_SECRETS'] is a list of secrets, newest first."
        )
    return tuple(map(_derived, configured))


@lru_cache(maxsize=64)
def _derived(secret: str | bytes) -> tuple[str, bytes]:
    """Key id and key. By value, so a changed setting needs no signal to be seen."""
    data = secret.encode() if isinstance(secret, str) else secret
    key = hmac.digest(data, b"django-idempotency fingerprint", "sha256")
    return hmac.digest(key, b"key id", "sha256")[:4].hex(), key


_ADVICE = "Pass plain values (a primary key, not an object), or give the policy a `fingerprint`."


class _Number(str):
    """A JSON number as the client wrote it."""

    __slots__ = ()


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("duplicate member names")
    return members


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_json = json.JSONDecoder(
    object_pairs_hook=_members,
    parse_int=_Number,
    parse_float=_Number,
    parse_constant=_refuse,
)

_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping)


class _Encoder:
    """Values to text: JSON where JSON has the type, else `type"text"`, which no JSON equals."""

    def __init__(
        self, exclude: Exclude, unknown: Callable[[Any], bytes | str] | None = None
    ) -> None:
        self.exclude = exclude
        self.unknown = unknown

    def encode(self, value: Any, path: str = "", depth: int = 0) -> str:
        kind = type(value)
        if kind is str:
            return quoted(value)
        if kind is _Number:
            return value  # type: ignore[no-any-return]
        if isinstance(value, Enum):
            return self.encode(value.value, path, depth)
        if isinstance(value, str):
            return quoted(value)
        if value is None:
            return "null"
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, _CONTAINERS):
            if depth == MAX_DEPTH:
                raise RecursionError
            return self.container(value, path, depth + 1)
        return self.scalar(value)

    def container(self, value: Any, path: str, depth: int) -> str:
        if isinstance(value, list | tuple):
            return "[" + ",".join([self.encode(item, path, depth) for item in value]) + "]"
        if isinstance(value, set | frozenset):
            return (
                "set[" + ",".join(sorted([self.encode(item, path, depth) for item in value])) + "]"
            )
        members = []
        for name, member in value.items():
            inner = f"{path}.{name}" if path else str(name)
            if inner not in self.exclude:
                members.append((self.encode(name, "", depth), member, inner))
        members.sort(key=lambda m: m[0])
        return (
            "{"
            + ",".join([f"{name}:{self.encode(v, inner, depth)}" for name, v, inner in members])
            + "}"
        )

    def scalar(self, value: Any) -> str:
        if isinstance(value, int):
            # Python refuses to write very long integers in decimal.
            return int.__repr__(value) if value.bit_length() < 4096 else f"int{quoted(hex(value))}"
        if isinstance(value, float):
            if isfinite(value):
                return float.__repr__(value)
            raise TypeError(f"NaN and infinity have no fingerprint. {_ADVICE}")
        if isinstance(value, Decimal | UUID):
            return ("decimal" if isinstance(value, Decimal) else "uuid") + quoted(str(value))
        if isinstance(value, datetime):
            if value.tzinfo is not None:
                value = value.astimezone(UTC)
            return "datetime" + quoted(value.isoformat())
        if isinstance(value, date | time):
            return ("date" if isinstance(value, date) else "time") + quoted(value.isoformat())
        if isinstance(value, timedelta):
            return f'timedelta"{value.days} {value.seconds} {value.microseconds}"'
        if isinstance(value, bytes | bytearray | memoryview):
            return f'bytes"{bytes(value).hex()}"'
        model = getattr(getattr(value, "_meta", None), "concrete_model", None)
        if model is not None and not isinstance(value, type):
            label = model._meta.label_lower
            if value.pk is None:
                raise TypeError(f"An unsaved {label} has no fingerprint. {_ADVICE}")
            return f"{label}[{self.encode(value.pk)}]"
        if self.unknown is not None:
            name = self.unknown(value)
            return "unknown" + quoted(name if isinstance(name, str) else name.hex())
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"A value of type {kind} has no fingerprint. {_ADVICE}")
