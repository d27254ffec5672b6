"""JSON for stored results and payloads: exact round trip for the plain types, a clear error for the rest.

Decimal, UUID, date, time, datetime, timedelta, bytes, set, frozenset, tuple, Enum members and
dataclasses are written as tagged objects and read back as what they were. An Enum or dataclass is
looked up by its module and name on reading; rename it and old results cannot be read.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import pkgutil
import uuid
from collections.abc import Callable
from typing import Any

from django.utils.dateparse import parse_duration
from django.utils.duration import duration_iso_string

from .conf import conf
from .exceptions import ConfigurationError

#: Begins a text that a codec has written; no JSON does.
SEALED = "sealed:"

#: The member that marks a tagged value: {"$": "decimal", "v": "1.10"}.
TAG = "$"

_ENCODERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    decimal.Decimal: ("decimal", str),
    uuid.UUID: ("uuid", str),
    dt.datetime: ("datetime", dt.datetime.isoformat),
    dt.date: ("date", dt.date.isoformat),
    dt.time: ("time", dt.time.isoformat),
    dt.timedelta: ("timedelta", duration_iso_string),
    bytes: ("bytes", lambda value: base64.b64encode(value).decode()),
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "decimal": decimal.Decimal,
    "uuid": uuid.UUID,
    "datetime": dt.datetime.fromisoformat,
    "date": dt.date.fromisoformat,
    "time": dt.time.fromisoformat,
    "timedelta": parse_duration,
    "bytes": base64.b64decode,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
}


def dumps(value: Any, place: str = "result") -> str:
    """JSON text of `value`. Raises TypeError naming the place of what cannot be stored."""
    return json.dumps(_plain(value, place), separators=(",", ":"), allow_nan=False)


def loads(text: str | bytes) -> Any:
    """The value that `dumps` was given."""
    return json.loads(text, object_hook=_restored)


def _plain(value: Any, place: str) -> Any:
    kind = type(value)
    if value is None or kind in (str, bool, int):
        return value
    if kind is float:
        # JSON has no word for infinity and not-a-number.
        return value if math.isfinite(value) else _tagged("float", repr(value))
    if kind is list:
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if kind is dict:
        if TAG not in value and all(type(key) is str for key in value):
            return {key: _plain(item, f"{place}[{key!r}]") for key, item in value.items()}
        return _tagged(
            "dict",
            [[_plain(k, f"{place} key"), _plain(v, f"{place}[…]")] for k, v in value.items()],
        )
    if kind in _ENCODERS:
        tag, encode = _ENCODERS[kind]
        return _tagged(tag, encode(value))
    if kind in (tuple, set, frozenset):
        return _tagged(kind.__name__, [_plain(item, f"{place}[…]") for item in value])
    if isinstance(value, enum.Enum):
        return {**_tagged("enum", value.name), "of": _dotted(kind, place)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: _plain(getattr(value, f.name), f"{place}.{f.name}")
            for f in dataclasses.fields(value)
            if f.init
        }
        return {**_tagged("dataclass", fields), "of": _dotted(kind, place)}
    raise TypeError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored. Return plain "
        "values (str, int, float, bool, None, list, dict, Decimal, UUID, date, datetime, tuple, set, "
        "Enum, dataclass); for a model instance return its primary key."
    )


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {TAG: tag, "v": value}


def _dotted(kind: type, place: str) -> str:
    if "<" in kind.__qualname__:
        raise TypeError(
            f"{place}: {kind.__qualname__} is local to a function; it cannot be found again"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def _restored(item: dict[str, Any]) -> Any:
    tag = item.get(TAG)
    if tag is None:
        return item
    if tag == "enum":
        return _class(item["of"], lambda kind: issubclass(kind, enum.Enum))[item["v"]]
    if tag == "dataclass":
        return _class(item["of"], dataclasses.is_dataclass)(**item["v"])
    return _DECODERS[tag](item["v"])


def _class(name: str, is_expected: Callable[[type], bool]) -> Any:
    """The class of that name; never another callable, whatever the table says."""
    found = pkgutil.resolve_name(name)
    if not (isinstance(found, type) and is_expected(found)):
        raise TypeError(f"{name} is not the class that was stored")
    return found


def seal(text: str) -> str:
    """JSON as the project's CODEC keeps it at rest, for text columns."""
    if conf.CODEC is None:
        return text
    return SEALED + base64.b64encode(conf.CODEC.encode(text.encode())).decode()


def unseal(text: str) -> str:
    """What was sealed; what was written while the project had no CODEC is read as it is."""
    if not text.startswith(SEALED):
        return text
    if conf.CODEC is None:
        raise ConfigurationError("IDEMPOTENCY['CODEC'] is needed to read what it has written.")
    opened: bytes = conf.CODEC.decode(base64.b64decode(text.removeprefix(SEALED)))
    return opened.decode()
