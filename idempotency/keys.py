"""Idempotency keys: from a header value to a key, and from a key to the operation's identity."""

from __future__ import annotations

import hashlib
import re
import uuid
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from urllib.parse import quote

from .exceptions import InvalidKey

#: Longest key, in characters.
MAX_LENGTH = 255

_KEY = re.compile(r"[\x21-\x7e]+")
_PART = "!$&'()*+,-./;<=>?@[]^_`{|}~"  # what a part of a composed key keeps: all but % and :
_BARE = re.compile(r"[\x21\x23-\x2b\x2d-\x5b\x5d-\x7e]+")  # visible ASCII without " , \

# RFC 9651 section 4.2: an Item that is a String, and the parameters that may follow it.
_STRING = r'"(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*"'
_PARAMETER_VALUE = "|".join(
    (
        r"-?[0-9]{1,12}\.[0-9]{1,3}",  # Decimal
        r"@?-?[0-9]{1,15}",  # Integer, Date
        _STRING,
        r"[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*",  # Token
        r":[A-Za-z0-9+/=]*:",  # Byte Sequence
        r"\?[01]",  # Boolean
        r'%"(?:[\x20\x21\x23\x24\x26-\x7e]|%[0-9a-f]{2})*"',  # Display String
    )
)
_ITEM = re.compile(rf"({_STRING})(?:; *[a-z*][a-z0-9_\-.*]*(?:=(?:{_PARAMETER_VALUE}))?)*")
_ESCAPED = re.compile(r'\\(["\\])')


def parse(value: str) -> str:
    """The key that a header value carries.

    Accepts an RFC 9651 String in quotes (its parameters are checked and ignored) and the bare form
    that most clients send; both name the same key. Raises InvalidKey for everything else, also for
    two header lines, which reach Django joined by a comma.
    """
    value = value.strip(" ")
    if not value:
        raise InvalidKey("The key is empty.")
    if not value.startswith('"'):
        if _BARE.fullmatch(value):
            return validate(value)
        if "," in value:
            raise InvalidKey("Send one key in one header line; a key with a comma needs quotes.")
        if '"' in value or "\\" in value:
            raise InvalidKey('Put a key that contains " or \\ in quotes and escape them with \\.')
        return validate(value)
    item = _ITEM.fullmatch(value)
    if item is None:
        raise InvalidKey(
            "The quoted key is not one RFC 9651 string: it needs a closing quote, ASCII characters "
            'only, no other escapes than \\" and \\\\, and nothing after it but parameters.'
        )
    return validate(_ESCAPED.sub(r"\1", item[1][1:-1]))


def validate(key: object) -> str:
    """The key itself, from whatever carried it: 1 to 255 characters, each visible ASCII.

    Raises InvalidKey otherwise. The detail never repeats the key.
    """
    if not isinstance(key, str):
        raise InvalidKey("The key must be a string.")
    if not key:
        raise InvalidKey("The key is empty.")
    if len(key) > MAX_LENGTH:
        raise InvalidKey(f"The key has {len(key)} characters; at most {MAX_LENGTH} are allowed.")
    if not _KEY.fullmatch(key):
        raise InvalidKey("The key may contain visible ASCII characters only, without spaces.")
    return key


def from_value(value: object) -> str:
    """The key that a plain value, or a tuple or list of them, makes: 7, or ("receipt", order_id).

    Takes str, int, UUID, Decimal, date, datetime (aware ones as instants) and Enum (its value). Texts that
    no key can be, for their characters or length, become their SHA-256. Raises TypeError for
    anything else: two objects that print alike are not the same intent.
    """
    if isinstance(value, tuple | list):
        text = ":".join(quote(_text(part), safe=_PART) for part in value)
    else:
        text = _text(value)
    if not text:
        raise InvalidKey("The key is empty.")
    if len(text) <= MAX_LENGTH and _KEY.fullmatch(text):
        return text
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _text(value: object) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return value
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    if isinstance(value, date):  # also datetime
        return value.isoformat()
    if isinstance(value, int | Decimal | uuid.UUID) and not isinstance(value, bool):
        return str(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(
        f"A key cannot be made of a {kind}. Use plain values that name the intent: "
        "of a model instance its primary key."
    )


def operation_id(scope: tuple[str, ...], key: str) -> uuid.UUID:
    """The identity of the operation that `key` names in `scope`; the same in every process."""
    return _uuid("operation", *scope, key)


def derive(operation_id: uuid.UUID, name: str) -> str:
    """The key for the downstream call `name` of an operation: a UUID in its 36-character form.

    It survives retry, takeover and redeploy, because it depends on nothing but the two arguments.
    """
    return str(_uuid("derived", str(operation_id), name))


def issued_at(key: str) -> float | None:
    """The moment a UUIDv7 key was made, as a Unix timestamp in seconds (RFC 9562); None for other keys."""
    try:
        found = uuid.UUID(key)
    except ValueError:
        return None
    if found.version != 7 or str(found) != key.lower():
        return None
    return (found.int >> 80) / 1000


def _uuid(*parts: str) -> uuid.UUID:
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    # The length first: ("a", "bc") and ("ab", "c") must not meet.
    data = b"".join([b"%d:%b" % (len(part), part) for part in encoded])
    number = int.from_bytes(hashlib.sha256(data).digest()[:16])
    number = number & ~(0xF << 76) | 8 << 76  # version 8, RFC 9562 section 5.8
    # Variant 10, and the bit after it: MariaDB's UUID type refuses version 8 with 0x80 in this byte.
    number = number & ~(0x7 << 61) | 0b101 << 61
    return uuid.UUID(int=number)
