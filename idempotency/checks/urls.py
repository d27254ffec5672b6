"""The URLconf: views whose policy cannot do what it says, and unsafe URLs without one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage
from django.db import connections
from django.urls import URLPattern, URLResolver, get_resolver

from .. import scopes
from ..conf import conf
from ..policies import Policy, Resolved
from .settings import check_settings

SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_HANDLERS = ("get", "post", "put", "patch", "delete")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One URL pattern and what is known about its view."""

    #: As in `/orders/<pk>/`.
    path: str
    callback: Callable[..., Any]
    #: Upper-case methods the view answers to; None when that cannot be seen.
    methods: frozenset[str] | None
    #: Policies by method; "" is for all methods and actions.
    policies: Mapping[str, Policy]

    @property
    def name(self) -> str:
        view = view_class(self.callback) or inspect.unwrap(self.callback)
        return f"{view.__module__}.{getattr(view, '__qualname__', type(view).__qualname__)}"


def endpoints(urlconf: Any = None) -> Iterator[Endpoint]:
    """Every URL pattern of the project, except those of Django's admin."""
    for prefix, pattern in _patterns(get_resolver(urlconf).url_patterns, ""):
        callback = pattern.callback
        route = prefix + str(pattern.pattern)
        if "(?P<format>" in route or "drf_format_suffix" in route:
            continue  # REST framework's second pattern for the same view
        yield Endpoint(
            path="/" + _readable(route),
            callback=callback,
            methods=_methods(callback),
            policies=_policies(callback),
        )


def _patterns(
    patterns: list[URLPattern | URLResolver], prefix: str
) -> Iterator[tuple[str, URLPattern]]:
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            if pattern.app_name == "admin":
                continue
            yield from _patterns(pattern.url_patterns, prefix + str(pattern.pattern))
        else:
            yield prefix, pattern


def _readable(route: str) -> str:
    """`orders/<pk>/` for a regular expression; a path() route as it is written."""
    route = re.sub(r"\(\?P(<\w+>)(?:[^()]|\([^()]*\))*\)", r"\1", route)
    return re.sub(r"(?<!\\)[\^$]|\\[AZ]", "", route).replace("\\", "")


def view_class(callback: Any) -> type | None:
    """The class of a class-based view or of a REST framework view."""
    return getattr(callback, "cls", None) or getattr(callback, "view_class", None)


def _handlers(callback: Any) -> dict[str, Any]:
    """The handler of each method of a class-based view, by upper-case method."""
    cls = view_class(callback)
    actions = getattr(callback, "actions", None) or {}
    names = {method: actions.get(method, method) for method in _HANDLERS}
    if actions:
        names = {method: name for method, name in names.items() if method in actions}
    allowed = getattr(cls, "http_method_names", _HANDLERS)
    return {
        method.upper(): getattr(cls, name)
        for method, name in names.items()
        if method in allowed and hasattr(cls, name)
    }


def _methods(callback: Any) -> frozenset[str] | None:
    if view_class(callback) is not None:
        return frozenset(_handlers(callback))
    view: Any = callback
    while view is not None:  # @require_http_methods keeps its list in a closure
        if inspect.isfunction(view):
            kept = inspect.getclosurevars(view).nonlocals.get("request_method_list")
            if kept:
                return frozenset(kept)
        view = getattr(view, "__wrapped__", None)
    return None


def _policies(callback: Any) -> dict[str, Policy]:
    found = getattr(callback, "idempotency_policy", None)
    if isinstance(found, Policy):
        return {"": found}
    policies: dict[str, Policy] = {}
    if isinstance(found, Mapping):  # IdempotencyMixin: by action or by lower-case method
        actions = getattr(callback, "actions", None) or {}
        for method in _HANDLERS:
            policy = found.get(actions.get(method, "")) or found.get(method)
            if policy is not None:
                policies[method.upper()] = policy
    for method, handler in _handlers(callback).items():
        policy = _policy_of(handler)
        if policy is not None:
            policies[method] = policy
    return policies


def _policy_of(handler: Any) -> Policy | None:
    policy = getattr(handler, "idempotency_policy", None)
    if policy is None and inspect.isfunction(handler):  # @api_view keeps the function in a closure
        function = inspect.getclosurevars(handler).nonlocals.get("func")
        policy = getattr(function, "idempotency_policy", None)
    return policy if isinstance(policy, Policy) else None


def is_protected(endpoint: Endpoint, method: str) -> bool:
    policy = endpoint.policies.get("") or endpoint.policies.get(method)
    return policy is not None and method in policy.resolved().methods


def unprotected(urlconf: Any = None) -> Iterator[tuple[Endpoint, list[str]]]:
    """Endpoints that a retry may repeat, with those of their methods.

    The methods looked at are the `METHODS` setting: PUT and DELETE are idempotent by definition
    (RFC 9110 section 9.2.2). A function view that does not say which methods it takes is listed.
    """
    for endpoint in endpoints(urlconf):
        methods = [
            method
            for method in sorted(conf.METHODS)
            if (endpoint.methods is None or method in endpoint.methods)
            and not is_protected(endpoint, method)
        ]
        if methods:
            yield endpoint, methods


def check_urls(**kwargs: object) -> list[CheckMessage]:
    if not is_checkable():
        return []
    found = list(endpoints())
    # A ViewSet has several URLs with some of its methods each.
    methods: dict[str, set[str]] = {}
    for endpoint in found:
        methods.setdefault(endpoint.name, set()).update(endpoint.methods or ())
    messages: dict[tuple[Any, ...], CheckMessage] = {}
    for endpoint in found:
        for method, policy in endpoint.policies.items():
            for message in _judge(endpoint, method, policy.resolved(), methods[endpoint.name]):
                # One view below several URLs is one mistake.
                messages.setdefault((message.id, endpoint.name, method), message)
    return list(messages.values())


def is_checkable() -> bool:
    """Whether there are URLs, and settings that policies can be resolved with (their check says why)."""
    has_urls = bool(getattr(settings, "ROOT_URLCONF", None))
    return has_urls and not any(message.is_serious() for message in check_settings())


def _judge(
    endpoint: Endpoint, method: str, policy: Resolved, methods: Collection[str]
) -> Iterator[CheckMessage]:
    where = f"{endpoint.name} at {endpoint.path}"
    if policy.using not in connections:
        yield checks.Error(
            f"{where} keeps its operations in database {policy.using!r}, which is not in DATABASES.",
            hint="Correct Policy.using.",
            id="idempotency.E080",
        )
        return
    opted_out: set[str] = getattr(endpoint.callback, "_non_atomic_requests", set())
    if connections[policy.using].settings_dict.get("ATOMIC_REQUESTS") and (
        policy.using not in opted_out
    ):
        yield checks.Warning(
            f"{where} still runs inside ATOMIC_REQUESTS: its claim shows only when the whole request "
            "has committed, and an error answer may lose its record.",
            hint="Decorate dispatch() instead of a single method, or keep "
            "@transaction.non_atomic_requests on the outermost function.",
            id="idempotency.W081",
        )
    if _protects_nothing(method, policy, methods):
        yield checks.Warning(
            f"{where} is idempotent for {', '.join(sorted(policy.methods))} and answers none of them "
            "with an effect.",
            hint="Name the unsafe methods of the view in Policy.methods, or remove the policy.",
            id="idempotency.W082",
        )
    elif _refuses_anonymous(endpoint, policy):
        yield checks.Warning(
            f"{where} lets anonymous callers in, and their keys are refused (400 anonymous-key): the "
            "default scope is the logged-in user.",
            hint="Give the policy a scope that identifies them, such as scope=scopes.session, or "
            "require a login.",
            id="idempotency.W083",
        )


def _protects_nothing(method: str, policy: Resolved, methods: Collection[str]) -> bool:
    unsafe = policy.methods - SAFE
    if method:
        return method not in unsafe
    return not unsafe or (bool(methods) and not unsafe.intersection(methods))


def _refuses_anonymous(endpoint: Endpoint, policy: Resolved) -> bool:
    cls = view_class(endpoint.callback)
    permissions = getattr(cls, "permission_classes", None)
    if policy.scope is not scopes.principal or permissions is None:
        return False
    # By name and module: REST framework need not be installed. A hook may know better.
    hooks = {
        "get_permissions": "rest_framework.views",
        "get_idempotency_scope": "idempotency.contrib.rest_framework",
    }
    if any(getattr(getattr(cls, h, None), "__module__", m) != m for h, m in hooks.items()):
        return False
    return all(getattr(found, "__name__", "") == "AllowAny" for found in permissions)
