"""Scopes: who shares a key space. Always from what the server knows, never from client input."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

from django.conf import settings

from .exceptions import AnonymousKey, ConfigurationError

Scope = tuple[str, ...]
GetScope = Callable[[Any], Scope]

#: Longest encoded scope, in characters.
MAX_LENGTH = 255

_LONGEST_VALUE = 100
_UNSAFE = re.compile(r"[\\|]|[\x00-\x1f\x7f\ud800-\udfff]")


def encode(scope: Scope) -> str:
    """The stored, readable form of a scope, such as `tenant:acme|user:42`; no two scopes share one.

    Raises ConfigurationError if the scope is not a tuple of at least one string, or is longer than
    255 characters when encoded.
    """
    parts: object = scope  # user code made it
    if not isinstance(parts, tuple) or not parts or not all(isinstance(p, str) for p in parts):
        raise ConfigurationError(
            "A scope must be a tuple of one or more strings, such as ('user:42',); "
            f"got {type(scope).__name__}."
        )
    encoded = "|".join(_UNSAFE.sub(_escape, part) for part in scope)
    if len(encoded) > MAX_LENGTH:
        raise ConfigurationError(
            f"A scope has {len(encoded)} characters; at most {MAX_LENGTH} are allowed. "
            "Use a hash of its longest part."
        )
    return encoded


def principal(request: Any) -> Scope:
    """The authenticated user, by primary key: the same after a new login or a new token.

    A user object without a database row (stateless tokens) is taken for the user its `pk` or `id`
    names, else it is named by its user name. Raises AnonymousKey when nobody is authenticated.
    """
    user = getattr(request, "user", None)
    if user is None or not getattr(user, "is_authenticated", False):
        raise AnonymousKey("Authenticate the request. Where a key is optional, it may be left out.")
    for attribute in ("pk", "id"):
        identity = getattr(user, attribute, None)
        if identity is not None and identity != "":
            return (_part(_kind(user), identity),)
    get_username = getattr(user, "get_username", None)
    name = get_username() if callable(get_username) else getattr(user, "username", None)
    if not name:
        raise AnonymousKey("The authenticated caller has neither an id nor a name.")
    return (_part("username", name),)


def session(request: Any) -> Scope:
    """The browser session, for visitors who are not logged in; created if there is none yet.

    A login or logout starts a new key space. Raises ConfigurationError without server-side
    sessions.
    """
    if settings.SESSION_ENGINE == "django.contrib.sessions.backends.signed_cookies":
        raise ConfigurationError(
            "scopes.session needs server-side sessions: a signed-cookie session has no stable id."
        )
    store = getattr(request, "session", None)
    if store is None:
        raise ConfigurationError("scopes.session needs SessionMiddleware.")
    store.keys()  # loads it: an id that the client made up is dropped here
    if store.session_key is None:
        store.create()
    # The session id is a credential; only its hash is kept.
    return ("session:" + hashlib.sha256(store.session_key.encode()).hexdigest()[:32],)


def anonymous(request: Any) -> Scope:
    """One key space for everybody. Anyone who learns or guesses a key can read the stored response.

    Only for responses that are public and keys that nobody can guess.
    """
    return ("anonymous",)


def tenant(get_tenant: Callable[[Any], Any], scope: GetScope = principal) -> GetScope:
    """A scope callable that puts the tenant before `scope`.

    `get_tenant(request)` returns a model instance (named by its primary key), a string, a number, a
    UUID, or None for "no tenant", which is a key space of its own.
    """

    def tenant_scope(request: Any) -> Scope:
        value = get_tenant(request)
        if value is None:
            return ("no-tenant", *scope(request))
        identity = value.pk if hasattr(value, "pk") else value
        if identity is None or identity == "":
            raise ConfigurationError("The tenant of a scope needs a primary key or a name.")
        return (_part("tenant", identity), *scope(request))

    return tenant_scope


def endpoint(scope: GetScope = principal) -> GetScope:
    """A scope callable that adds the route, so one key on two endpoints names two operations.

    Without it the second endpoint answers 422 mismatch. Path arguments stay in the fingerprint.
    """

    def endpoint_scope(request: Any) -> Scope:
        match = getattr(request, "resolver_match", None)
        route = match.view_name if match is not None else request.path
        return (*scope(request), _part("endpoint", route))

    return endpoint_scope


def _kind(user: Any) -> str:
    """`user`, or the model's label: a key space must not be shared by API client 42 and user 42."""
    model = getattr(getattr(user, "_meta", None), "concrete_model", None)
    if model is None:
        return "user"
    label: str = model._meta.label_lower
    return "user" if label == settings.AUTH_USER_MODEL.lower() else label


def _part(kind: str, value: object) -> str:
    text = str(value)
    if len(text) <= _LONGEST_VALUE:
        return f"{kind}:{text}"
    return f"{kind}-sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return "\\" + character if character in "\\|" else f"\\u{ord(character):04x}"
