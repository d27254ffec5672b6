"""Clients of protected views and of the engine, as the tests of races and crashes use them."""

import json
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from django.contrib.auth.models import User
from django.core.handlers.exception import convert_exception_to_response
from django.db import connections
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import RequestFactory
from django.utils import timezone

from idempotency import engine, fingerprints
from idempotency.decorators import idempotent
from idempotency.models import Operation, Outcome, Status
from idempotency.policies import Policy
from tests.app.models import Effect

View = Callable[[HttpRequest], HttpResponse]

#: How long a client goes on retrying before a test calls it stuck. No timeout of the protocol is
#: as short, so nothing here can pass by waiting for one.
RETRY_SECONDS = 10


def new_key() -> str:
    return uuid4().hex


def effects(label: str, using: str = "default") -> int:
    return Effect.objects.using(using).filter(label=label).count()


def operation(key: str, using: str = "default") -> Operation:
    return Operation.objects.using(using).get(key=key)


def events(key: str, using: str = "default") -> list[tuple[str, str]]:
    """(kind, detail) of what was noted about the operation, oldest first."""
    return list(operation(key, using).events.values_list("kind", "detail"))


def age(key: str, *, window: bool = True, tombstone: bool = True, using: str = "default") -> None:
    """Let the replay window, and the tombstone after it, be over."""
    past = timezone.now() - timezone.timedelta(hours=1)
    values = {"expires_at": past, "due_at": past} if window else {}
    if tombstone:
        values["tombstone_until"] = past
    assert Operation.objects.using(using).filter(key=key).update(**values) == 1


# Over HTTP


def effect_view(
    before: Callable[[], Any] = lambda: None,
    after: Callable[[], Any] = lambda: None,
    *,
    using: str = "default",
    **policy: Any,
) -> View:
    """A protected view with one effect, labelled with the key. It runs `before()` and `after()` it."""

    @idempotent(required=True, name="effect", using=using, **policy)
    def view(request: HttpRequest) -> HttpResponse:
        before()
        label = request.headers["Idempotency-Key"]
        effect = Effect.objects.using(using).create(label=label)
        response = after()
        if isinstance(response, HttpResponse):
            return response
        return JsonResponse({"effect": effect.pk}, status=201)

    return view


def post(view: View, key: str, body: Any = "body", user: int = 1) -> HttpResponse:
    """One request to `view`, answered as Django's handler answers it: an exception is a 500."""
    request = RequestFactory().post(
        "/effects/",
        json.dumps(body),
        content_type="application/json",
        headers={"Idempotency-Key": key},
    )
    request.user = request._force_auth_user = User(pk=user)  # for Django, and for REST framework
    try:
        return convert_exception_to_response(view)(request)
    finally:
        drop_broken_connections()


def drop_broken_connections() -> None:
    """What Django does at the end of a request, without closing the sound ones."""
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None and not connection.is_usable():
            connection.close()


def is_replay(response: HttpResponse) -> bool:
    return response.get("Idempotent-Replayed") == "true"


def problem(response: HttpResponse) -> str:
    """The last word of the problem type, such as `in-progress`; empty when it is none."""
    if response.get("Content-Type") != "application/problem+json":
        return ""
    return str(json.loads(response.content)["type"].rpartition(":")[2])


def retry(call: Callable[[], HttpResponse]) -> HttpResponse:
    """What a patient client gets: `call` again while the answer is 409 in-progress.

    The server needs a moment to notice that a client is gone; a lease would need much more.
    """
    deadline = time.monotonic() + RETRY_SECONDS
    while problem(response := call()) == "in-progress" and time.monotonic() < deadline:
        time.sleep(0.005)
    return response


# The engine itself


def intent(key: str, value: Any = "value", user: int = 1, **policy: Any) -> engine.Intent:
    return engine.Intent(
        name="effect",
        scope=(f"user:{user}",),
        key=key,
        fingerprint=fingerprints.of_value(value),
        policy=Policy(**policy).resolved(),
        from_client=True,
    )


def succeed(operation: Operation) -> Outcome:
    """A handler with one effect, labelled with the key."""
    using = operation._state.db
    effect = Effect.objects.using(using).create(label=operation.key)
    return Outcome(status=Status.SUCCEEDED, code=201, body=str(effect.pk).encode())


def fail(operation: Operation) -> Outcome:
    """A handler that fails after its effect."""
    succeed(operation)
    raise ValueError("a detail that must not be stored")


def sever(using: str = "default") -> None:
    """Cut this thread's connection as the death of the process would; nothing is said good-bye to."""
    connection = connections[using]
    raw = connection.connection
    if connection.vendor == "postgresql":
        raw.pgconn.finish()
    elif hasattr(raw, "_force_close"):  # PyMySQL
        raw._force_close()
    else:
        raw.close()


def forget_connection(using: str = "default") -> None:
    """As if this thread had died and another took its place: the open transaction is just gone."""
    sever(using)
    del connections[using]
