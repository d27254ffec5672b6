"""What every HTTP entry point does: request → intent → engine → response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from asgiref.sync import sync_to_async
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.http.response import HttpResponseBase

from .. import engine
from ..exceptions import MissingKey, NotFinal, Refusal
from ..fingerprints import Fingerprint
from ..policies import Resolved
from .problems import problem
from .requests import find_key, request_fingerprint
from .responses import capture, render, replay

#: Set by contrib.rest_framework: protects a call that got a DRF request.
rest_framework_door: Callable[..., HttpResponseBase] | None = None


def intent_of(
    request: Any,
    policy: Resolved,
    name: str,
    *,
    get_key: Callable[[Any], str | None] | None = None,
    get_scope: Callable[[Any], tuple[str, ...]] | None = None,
    get_fingerprint: Callable[[Any], Fingerprint] | None = None,
) -> engine.Intent | None:
    """What the request asks for, or None when it is not protected (other method, no key).

    Raises MissingKey, InvalidKey or AnonymousKey.
    """
    if request.method not in policy.methods:
        return None
    key = get_key(request) if get_key else find_key(request, policy)
    if key is None:
        if policy.required:
            raise MissingKey
        return None
    return engine.Intent(
        name=(policy.name or _route(request) or name)[:200],
        scope=get_scope(request) if get_scope else policy.scope(request),
        key=key,
        fingerprint=get_fingerprint(request)
        if get_fingerprint
        else request_fingerprint(request, policy),
        policy=policy,
    )


def _route(request: Any) -> str:
    match = getattr(request, "resolver_match", None)
    return match.view_name if match is not None and match.url_name else ""


@contextmanager
def request_atomic(*aliases: str) -> Iterator[None]:
    """The ATOMIC_REQUESTS transactions that a protected view opted out of, for an unprotected request."""
    with ExitStack() as stack:
        for using in aliases:
            if connections[using].settings_dict.get("ATOMIC_REQUESTS"):
                stack.enter_context(transaction.atomic(using))
        yield


def protect(
    request: Any,
    policy: Resolved,
    name: str,
    view: Callable[[], HttpResponseBase],
    *,
    was_atomic: bool,
) -> HttpResponseBase:
    """Answer the request once: run `view`, replay its stored response, or refuse."""
    try:
        intent = intent_of(request, policy, name)
        if intent is None:
            with request_atomic(*[policy.using] * was_atomic):
                return view()
        begun = engine.begin(intent)
        if isinstance(begun, engine.Replay):
            return show(begun, request, policy)
        with engine.running(begun.operation):
            request.operation = begun.operation
            try:
                response = view()
                render(response)
            except BaseException as error:
                begun.fail(error)
                engine.raise_translated(error, begun.operation)
            return finish(begun, response)
    except Refusal as refusal:
        return problem(refusal, request)


async def aprotect(
    request: Any, policy: Resolved, name: str, view: Callable[[], Awaitable[HttpResponseBase]]
) -> HttpResponseBase:
    """`protect` for async views. The engine runs in the request's thread, which owns the connection."""
    try:
        intent = await sync_to_async(intent_of)(request, policy, name)
        if intent is None:
            return (
                await view()
            )  # Django refuses ATOMIC_REQUESTS for async views: nothing to restore
        begun = await engine.abegin(intent)
        if isinstance(begun, engine.Replay):
            return await sync_to_async(show)(begun, request, policy)
        with engine.running(begun.operation):
            request.operation = begun.operation
            try:
                response = await view()
                await sync_to_async(render)(response)
            except BaseException as error:
                # Shielded: a client that hangs up cancels the view, not the rollback.
                await _shielded(begun.fail, error)
                engine.raise_translated(error, begun.operation)
            await _shielded(finish, begun, response)
            return response
    except Refusal as refusal:
        return problem(refusal, request)


async def _shielded(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.shield(asyncio.ensure_future(sync_to_async(function)(*args)))


def show(found: engine.Replay, request: Any, policy: Resolved) -> HttpResponseBase:
    """The replay, if the policy still allows this caller to see it. Raises PermissionDenied."""
    request.operation = found.operation
    if policy.authorize_replay is not None and not policy.authorize_replay(
        request, found.operation
    ):
        raise PermissionDenied
    engine.replayed(found)
    return replay(found.outcome)


def finish(begun: engine.Execution, response: HttpResponseBase) -> HttpResponseBase:
    """Store a final response and commit, or roll back what the policy does not call final."""
    if begun.policy.is_final(response.status_code):
        begun.complete(capture(response))
    else:
        begun.fail(NotFinal(f"HTTP {response.status_code} returned"))
    return response
