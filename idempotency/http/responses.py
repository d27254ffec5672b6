"""Response ⇄ stored outcome: status, allowed headers and exact bytes; never a pickled object."""

from __future__ import annotations

import gzip
import zlib

from django.http import HttpResponse
from django.http.response import HttpResponseBase

from ..conf import conf
from ..models import Outcome, Status

#: Headers that belong to the outcome. IDEMPOTENCY["REPLAY_HEADERS"] adds to them.
KEPT = frozenset(
    {
        "content-type",
        "content-language",
        "content-location",
        "content-disposition",
        "location",
        "etag",
        "last-modified",
        "link",
    }
)

#: Headers that belong to one exchange, connection, session or client. Never stored, whatever the
#: project adds: each would be wrong, or somebody else's, on the replay (RFC 9110 §7.6.1 among others).
NEVER_KEPT = frozenset(
    """
    set-cookie date age server via content-length content-encoding transfer-encoding connection
    keep-alive te trailer upgrade vary www-authenticate proxy-authenticate proxy-authorization
    proxy-connection authentication-info authorization strict-transport-security
    content-security-policy content-security-policy-report-only clear-site-data x-csrftoken
    retry-after x-request-id traceparent tracestate server-timing x-runtime
    """.split()
)
_NEVER_KEPT_PREFIXES = ("access-control-", "ratelimit", "x-ratelimit", "x-rate-limit")


def is_kept(header: str) -> bool:
    name = header.lower()
    if name in NEVER_KEPT or name.startswith(_NEVER_KEPT_PREFIXES):
        return False
    return name in KEPT or name in {extra.lower() for extra in conf.REPLAY_HEADERS}


def render(response: HttpResponseBase) -> None:
    """Render a template or DRF response now, while a failure can still roll the effects back."""
    if not getattr(response, "is_rendered", True):
        response.render()  # type: ignore[attr-defined]


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
    """A fresh response with the stored status, headers and bytes, marked as a replay."""
    response = HttpResponse(outcome.body or b"", status=outcome.code, headers=outcome.headers)
    if not any(name.lower() == "content-type" for name in outcome.headers):
        del response["Content-Type"]
    response["Idempotent-Replayed"] = "true"
    response["Cache-Control"] = "no-store"
    return response
