"""JSON for stored results and payloads: exact round trip for the plain types, a clear error for the rest.

Decimal, UUID, date, time, datetime, timedelta, bytes, set, frozenset, tuple, Enum members and
dataclasses are written as tagged objects and read back as what they were. An Enum or dataclass is
looked up by its module and name on reading; rename it and old results cannot be read. A dataclass is
made again from the fields that its __init__ takes.
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
from zoneinfo import ZoneInfo

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
        tagged = _tagged(tag, encode(value))
        zone = getattr(value, "tzinfo", None)
        if isinstance(zone, ZoneInfo) and zone.key:
            # As an offset alone, the hour that clocks repeat would not come back equal.
            tagged |= {"zone": zone.key, "fold": value.fold}
        return tagged
    if kind in (tuple, set, frozenset):
        return _tagged(kind.__name__, [_plain(item, f"{place}[…]") for item in value])
    if isinstance(value, enum.Flag):  # several at once have no name of their own
        return {**_tagged("flag", value.value), "of": _dotted(kind, place)}
    if isinstance(value, enum.Enum):
        return {**_tagged("enum", value.name), "of": _dotted(kind, place)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        fields = {name: _plain(item, f"{place}.{name}") for name, item in given.items()}
        if not _can_be_made_again(value, given):
            raise TypeError(
                f"{place}: made again from the fields that its __init__ takes, this {kind.__qualname__} "
                "is not the same; __post_init__, InitVar or a field with init=False is in the way"
            )
        return {**_tagged("dataclass", fields), "of": _dotted(kind, place)}
    raise TypeError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored. Return plain "
        "values (str, int, float, bool, None, list, dict, Decimal, UUID, date, datetime, tuple, set, "
        "Enum, dataclass); for a model instance return its primary key."
    )


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {TAG: tag, "v": value}


def _can_be_made_again(value: Any, given: dict[str, Any]) -> bool:
    try:
        again = type(value)(**given)
    except Exception:
        return False
    compared = [f.name for f in dataclasses.fields(value) if f.compare]
    return [getattr(again, name) for name in compared] == [
        getattr(value, name) for name in compared
    ]


def _dotted(kind: type, place: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not kind:
        raise TypeError(
            f"{place}: {name} does not name this class (is it local to a function?); it cannot be found again"
        )
    return name


def _restored(item: dict[str, Any]) -> Any:
    tag = item.get(TAG)
    if tag is None:
        return item
    if tag == "enum":
        return _class(item["of"], lambda kind: issubclass(kind, enum.Enum))[item["v"]]
    if tag == "flag":
        return _class(item["of"], lambda kind: issubclass(kind, enum.Flag))(item["v"])
    if tag == "dataclass":
        return _class(item["of"], dataclasses.is_dataclass)(**item["v"])
    value = _DECODERS[tag](item["v"])
    if "zone" in item:
        return value.replace(tzinfo=ZoneInfo(item["zone"]), fold=item["fold"])
    return value


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
