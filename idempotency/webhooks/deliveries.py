"""A delivery: the exact bytes of a request, and where its id and type are found in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, QueryDict
from django.http.request import RawPostDataException, UnreadablePostError

from ..exceptions import ConfigurationError, Refusal
from ..http.bodies import url_pairs


class NotYet(Exception):
    """Raised by a handler for an event that comes too early: not a failure, deliver again."""


class NotBegun(Exception):
    """The delivery itself was refused. (A Refusal out of a handler is that handler's failure.)"""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.code)
        self.refusal = refusal


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One verified delivery. Every handler gets one of its own."""

    source: str
    endpoint: str = ""
    #: The sender's id of it, the same on every attempt.
    id: str
    #: What the patterns of `handles` were matched with; "" if the delivery does not say.
    event_type: str = ""
    #: Exactly what was sent and signed.
    body: bytes
    #: Names in any case. A delivery that was acknowledged first has only those of `keep_headers`.
    headers: Mapping[str, str] = field(compare=False)
    #: Executions of this handler for this delivery so far, this one included.
    attempt: int = field(default=1, compare=False)

    @cached_property
    def payload(self) -> Any:
        """The body as JSON. Raises ValueError if it is none."""
        try:
            return json.loads(self.body)
        except RecursionError:
            raise ValueError("the body is nested too deep") from None

    @cached_property
    def form(self) -> QueryDict:
        """The body as an urlencoded form."""
        return QueryDict(self.body)

    def part(self, id: str, payload: Any) -> Delivery:  # noqa: A002 (the word of the field)
        """One event of a batch, to be handled as a delivery of its own."""
        body = json.dumps(payload, separators=(",", ":"), sort_keys=True).encode()
        return replace(self, id=id, body=body)


def look_up(where: str, delivery: Delivery) -> str | None:
    """What a "header:NAME", "json:FIELD.FIELD" or "form:FIELD" names in the delivery, if it is text or int.

    Raises ValueError if the body cannot be read, ConfigurationError for other values of `where`.
    """
    carrier, _, name = where.partition(":")
    found: Any = None
    if carrier == "header" and name:
        found = delivery.headers.get(name)
    elif carrier == "form" and name:
        pairs = dict(reversed(url_pairs(delivery.body)))  # the first one counts
        value = pairs.get(name.encode())
        found = None if value is None else value.decode(errors="backslashreplace")
    elif carrier == "json" and name:
        found = delivery.payload
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
    else:
        raise ConfigurationError(
            f'{where!r} is none of "header:NAME", "json:FIELD" and "form:FIELD"'
        )
    if isinstance(found, bool) or not isinstance(found, str | int):
        return None
    return str(found)


def read_body(request: HttpRequest, most: int) -> bytes:
    """The exact bytes of the body, also if somebody has read `request.body` or a form's POST before.

    Raises RequestDataTooBig if there are more than `most`, RawPostDataException if they are gone,
    UnreadablePostError if the sender went away, ValueError for a Content-Length that is no number.
    """
    http: Any = request
    if not hasattr(http, "_body"):
        if http._read_started:
            raise RawPostDataException("a middleware has used the body up")
        length = int(http.META.get("CONTENT_LENGTH") or 0)
        if length > most:
            raise RequestDataTooBig
        if not length and http.META.get("wsgi.input_terminated"):
            http._stream = http.META["wsgi.input"]  # chunked: Django takes it for empty
        try:
            body = http.read(most + 1)
        except Exception as error:  # of the server's own: what is no chunk is no OSError to some
            raise UnreadablePostError(str(error)) from error
        if len(body) > most:
            raise RequestDataTooBig
        http._body = body  # whoever reads request.body later, a log for example, finds it
    if len(http._body) > most:
        raise RequestDataTooBig
    return bytes(http._body)
