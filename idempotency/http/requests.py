"""What a request says: its key, its fingerprint. Works on Django requests and on DRF's wrapper."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.http import HttpRequest

from idempotency import fingerprints, keys
from idempotency.conf import conf
from idempotency.exceptions import ConfigurationError, InvalidKey
from idempotency.fingerprints import Fingerprint
from idempotency.policies import Resolved

from .bodies import (
    canonical_body,
    django_request,
    is_drf,
    is_json,
    spool,
    spool_when_read,
    url_pairs,
)

__all__ = ["find_key", "request_fingerprint", "spool", "spool_when_read", "where_keys_belong"]

#: Headers that change what is asked for.
_COMPARED_HEADERS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")


def find_key(request: Any, policy: Resolved) -> str | None:
    """The request's idempotency key, or None if it has none.

    Raises InvalidKey for a key that is there but malformed or empty: running such a request
    unprotected is the one thing its sender did not ask for.
    """
    carrier = policy.key
    if carrier is None:
        return _header_key(request, conf.KEY_HEADER)
    if callable(carrier):
        key = carrier(request)
        if key is not None and not isinstance(key, str):
            raise ConfigurationError(
                f"Policy.key must return a string or None, not {type(key).__name__}."
            )
        return None if key is None else keys.validate(key)
    kind, _, name = carrier.partition(":")
    if kind == "header" and name:
        return _header_key(request, name)
    if kind in ("json", "form") and name:
        return _field_key(_fields(request, kind), name)
    raise ConfigurationError(
        f'Policy.key is a callable, "header:NAME", "json:FIELD" or "form:FIELD", not {carrier!r}.'
    )


def where_keys_belong(policy: Resolved) -> str:
    """What to tell the sender of a request without a key; nothing where the project's code finds it."""
    if callable(policy.key):
        return ""
    kind, _, name = (policy.key or f"header:{conf.KEY_HEADER}").partition(":")
    return (
        f"Send one in the {kind} {name}."
        if kind == "header"
        else f"Send one in the {kind} field {name}."
    )


def request_fingerprint(request: Any, policy: Resolved) -> Fingerprint:
    """What the request asks for: method, path, query, media type, body, preconditions, API version.

    Equal for every honest retry: neither credentials, cookies, dates, trace ids and content
    negotiation nor JSON member order, whitespace and multipart boundaries count. A body with a
    Content-Encoding is compared as it was sent. A value returned by `policy.fingerprint` replaces
    all but method and path; a `Fingerprint` replaces everything.

    Raises what Django raises for a body it cannot parse or finds too big, and UnreadablePostError.
    """
    http = django_request(request)
    if policy.fingerprint is not None:
        return _custom(policy.fingerprint(request), http)
    meta = http.META
    return fingerprints.of(
        http.method or "",
        http.path,
        fingerprints.canonical_query(url_pairs(_raw(meta.get("QUERY_STRING", "")))),
        http.content_type or "",
        *(meta.get(header, "") for header in _COMPARED_HEADERS),
        _version(request),
        *canonical_body(request, policy.exclude_fields),
    )


def _custom(value: Any, request: HttpRequest) -> Fingerprint:
    if isinstance(value, Fingerprint):
        return value
    if value is None:
        raise ConfigurationError(
            "Policy.fingerprint returned None. Return what identifies the request, or b'' to "
            "compare nothing but method and path."
        )
    if isinstance(value, bytes | str):
        kind, data = type(value).__name__, value
    else:
        kind, data = "value", fingerprints.canonical_value(value)
    return fingerprints.of("custom", request.method or "", request.path, kind, data)


def _header_key(request: Any, name: str) -> str | None:
    value = request.META.get("HTTP_" + name.upper().replace("-", "_"))
    return None if value is None else keys.parse(value)


def _field_key(fields: Any, name: str) -> str | None:
    if not isinstance(fields, Mapping) or name not in fields:
        return None
    values = fields.getlist(name) if hasattr(fields, "getlist") else [fields[name]]
    if len(values) != 1:
        raise InvalidKey("Send one key in one field.")
    return keys.validate(values[0])


def _fields(request: Any, kind: str) -> Any:
    if is_drf(request):
        return request.data
    if kind == "form":
        return request.POST
    if not is_json(request.content_type):
        return None
    try:
        return json.loads(request.body)
    except (ValueError, RecursionError):
        return None  # the view says what is wrong with it


def _version(request: Any) -> str:
    """The API version the client asked for; the server's default may change between two retries."""
    version = getattr(request, "version", None) if is_drf(request) else None
    default = getattr(getattr(request, "versioning_scheme", None), "default_version", None)
    return "" if version is None or version == default else str(version)


def _raw(text: str) -> bytes:
    try:
        return text.encode("latin-1")  # how WSGI decodes
    except UnicodeEncodeError:
        return text.encode()  # ASGI
