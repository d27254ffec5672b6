"""Response ⇄ stored outcome: status, allowed headers and exact bytes; never a pickled object."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase

from ..conf import conf
from ..models import Outcome, Status

#: Marks a replay; a first response does not have it.
REPLAYED = "Idempotent-Replayed"

#: Headers that belong to the outcome. IDEMPOTENCY["REPLAY_HEADERS"] adds to them.
KEPT = frozenset({
    "content-type", "content-language", "content-location", "content-disposition", "location",
    "etag", "last-modified", "link",
})  # fmt: skip

#: Headers that belong to one exchange, connection, session or client. Never stored, whatever the
#: project adds: each would be wrong, or somebody else's, on the replay (RFC 9110 section 7.6.1
#: among others).
NEVER_KEPT = frozenset({
    "age", "authentication-info", "authorization", "baggage", "cache-control",
    "clear-site-data", "connection", "content-encoding", "content-length",
    "content-security-policy", "content-security-policy-report-only", "cookie", "date",
    "expires", "idempotent-replayed", "keep-alive", "nel", "pragma", "report-to",
    "reporting-endpoints", "retry-after", "server", "server-timing", "set-cookie",
    "set-cookie2", "strict-transport-security", "te", "traceparent", "tracestate", "trailer",
    "transfer-encoding", "upgrade", "vary", "via", "www-authenticate", "x-correlation-id",
    "x-csrftoken", "x-request-id", "x-runtime",
})  # fmt: skip
_NEVER_KEPT_PREFIXES = (
    "access-control-",
    "proxy-",
    "ratelimit",
    "sec-",
    "x-b3-",
    "x-rate-limit",
    "x-ratelimit",
)


def is_kept(header: str) -> bool:
    """Whether the header is stored with the outcome."""
    name = header.lower()
    if name in KEPT:
        return True
    if name in NEVER_KEPT or name.startswith(_NEVER_KEPT_PREFIXES):
        return False
    return name in {extra.lower() for extra in conf.REPLAY_HEADERS}


def rendered(response: Any) -> HttpResponseBase:
    """The response with its content, rendered now, while a failure can still roll the effects back.

    Raises TypeError if the view returned something else, and whatever rendering raises.
    """
    if not isinstance(response, HttpResponseBase):
        raise TypeError(f"The view returned {type(response).__name__} instead of an HttpResponse.")
    if getattr(response, "is_rendered", True):
        return response
    # A post-render callback may put another response in its place.
    final: HttpResponseBase = response.render()  # type: ignore[attr-defined]
    return final


def capture(response: HttpResponseBase) -> Outcome:
    """The outcome to store for a rendered response.

    The body is None, and replays are refused with 410 response-not-retained, when it does not
    exist yet (streaming and file responses) or is in a coding only this client may understand.
    """
    code = response.status_code
    return Outcome(
        status=Status.SUCCEEDED if code < 400 else Status.FAILED,
        code=code,
        headers={name: value for name, value in response.items() if is_kept(name)},
        body=_identity_body(response),
    )


def _identity_body(response: HttpResponseBase) -> bytes | None:
    if response.streaming or not isinstance(response, HttpResponse):
        return None
    coding = response.get("Content-Encoding", "identity").strip().lower()
    if coding in ("", "identity"):
        return response.content
    if coding in ("gzip", "x-gzip"):
        # Stored decoded: the retry may come from a client, or through a proxy, that cannot.
        try:
            return gzip.decompress(response.content)
        except (OSError, EOFError, zlib.error):
            return None
    return None


def replay(outcome: Outcome) -> HttpResponse:
    """A fresh response with the stored status, headers and bytes, marked as a replay.

    What belongs to the exchange (date, length, coding, cookies, CORS) is left to the server and the
    middleware, as for any other response.
    """
    response = HttpResponse(outcome.body or b"", status=outcome.code, headers=outcome.headers)
    if not any(name.lower() == "content-type" for name in outcome.headers):
        del response["Content-Type"]
    if 300 <= response.status_code < 400 and response.has_header("Location"):
        response.url = response["Location"]  # type: ignore[attr-defined]  # as of HttpResponseRedirect
    response[REPLAYED] = "true"
    response["Cache-Control"] = "no-store"
    return response
