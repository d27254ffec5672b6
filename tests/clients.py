"""Browsers and API clients for tests that go through Django's whole request cycle."""

from collections.abc import Callable
from typing import Any

from django.contrib.auth import get_user_model
from django.http import HttpResponse
from django.test import Client
from django.urls import URLPattern, path


def login(name: str = "alice", **options: Any) -> Client:
    """A client signed in as `name`, who is created if need be; a failing view is a 500."""
    user, _ = get_user_model().objects.get_or_create(username=name)
    client = Client(raise_request_exception=False, **options)
    client.force_login(user)
    return client


def send(
    client: Any,
    url: str,
    key: str | None = None,
    data: Any = None,
    *,
    method: str = "post",
    headers: dict[str, str] | None = None,
    **options: Any,
) -> HttpResponse:
    """One request with JSON `data`, an idempotency key and further headers."""
    sent = dict(headers or {})
    if key is not None:
        sent["Idempotency-Key"] = key
    options.setdefault("content_type", "application/json")
    return getattr(client, method)(url, {} if data is None else data, headers=sent, **options)


def routes(patterns: list[URLPattern]) -> Callable[[Any], Any]:
    """A decorator that adds a view to `patterns` as /its-name/ (a decorated one, a class's too)."""

    def add(view: Any, name: str | None = None) -> Any:
        name = name or view.__name__
        patterns.append(path(f"{name}/", view, name=name))
        return view

    return add
