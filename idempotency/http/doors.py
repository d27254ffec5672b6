"""What every HTTP entry point does: request → intent → engine → response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import iscoroutine
from typing import Any, NoReturn

from asgiref.sync import sync_to_async
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.http.response import HttpResponseBase

from .. import engine
from ..aio import in_thread
from ..conf import conf
from ..exceptions import ConfigurationError, InProgress, LeaseLost, MissingKey, NotFinal, Refusal
from ..executions import raise_translated
from ..fingerprints import Fingerprint
from ..policies import Resolved
from ..scopes import Scope
from .problems import problem
from .requests import find_key, request_fingerprint, where_keys_belong
from .responses import capture, rendered, replay


def _scope(request: Any, policy: Resolved) -> Scope:
    return policy.scope(request)


def intent_of(
    request: Any,
    policy: Resolved,
    name: str,
    *,
    get_key: Callable[[Any, Resolved], str | None] = find_key,
    get_scope: Callable[[Any, Resolved], Scope] = _scope,
    get_fingerprint: Callable[[Any, Resolved], Fingerprint] = request_fingerprint,
) -> engine.Intent | None:
    """What the request asks for, or None when it is not protected (other method, no key).

    Raises MissingKey, InvalidKey or AnonymousKey, and what Django raises for a bad body.
    """
    if request.method not in policy.methods:
        return None
    key = get_key(request, policy)
    if key is None:
        if policy.required:
            raise MissingKey(where_keys_belong(policy))
        return None
    return engine.Intent(
        name=(policy.name or _route(request) or name)[:200],
        scope=get_scope(request, policy),
        key=key,
        fingerprint=get_fingerprint(request, policy),
        policy=policy,
        from_client=not callable(policy.key),
    )


def _route(request: Any) -> str:
    match = getattr(request, "resolver_match", None)
    return match.view_name if match is not None and match.url_name else ""


@contextmanager
def request_atomic(*aliases: str) -> Iterator[None]:
    """What ATOMIC_REQUESTS would have opened for a view that opted out of it."""
    with ExitStack() as stack:
        for using in aliases:
            if connections[using].settings_dict["ATOMIC_REQUESTS"]:
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
    """Answer the request once: run `view`, replay its stored response, or refuse.

    `was_atomic` says whether the view would run in the transaction of ATOMIC_REQUESTS if it were
    not protected; requests that need no protection get it back.
    """
    try:
        intent = intent_of(request, policy, name)
        if intent is None:
            with request_atomic(*[policy.using] * was_atomic):
                return view()
        begun = engine.begin(intent)
        if isinstance(begun, engine.Replay):
            return show(begun, request, policy)
        request.operation = begun.operation
        with engine.running(begun.operation):
            try:
                response = view()
            except BaseException as error:
                give_up(begun, error)
            return finish(begun, response)
    except Refusal as refusal:
        return problem(refusal, request)


async def aprotect(
    request: Any, policy: Resolved, name: str, view: Callable[[], Awaitable[HttpResponseBase]]
) -> HttpResponseBase:
    """`protect` for async views. The engine runs in the request's thread, which owns the connection.

    A client that hangs up cancels the view, but neither the rollback nor the commit.
    """
    try:
        intent = await sync_to_async(intent_of)(request, policy, name)
        if intent is None:
            return await view()  # Django has no ATOMIC_REQUESTS for async views: nothing to restore
        begun = await engine.abegin(intent)
        if isinstance(begun, engine.Replay):
            return await in_thread(show, begun, request, policy)
        request.operation = begun.operation
        with engine.running(begun.operation):
            try:
                response = await view()
            except BaseException as error:
                await in_thread(give_up, begun, error)
            return await in_thread(finish, begun, response)
    except Refusal as refusal:
        return await sync_to_async(problem)(refusal, request)


def show(found: engine.Replay, request: Any, policy: Resolved) -> HttpResponseBase:
    """The replay, if the policy still allows this caller to see it. Raises PermissionDenied."""
    request.operation = found.operation
    authorize = policy.authorize_replay
    if authorize is not None and not said_yes(authorize(request, found.operation)):
        raise PermissionDenied
    engine.replayed(found)
    return replay(found.outcome)


def said_yes(answer: Any) -> bool:
    """What an `authorize_replay` answered. A coroutine that nobody awaits would count as a yes."""
    if not isinstance(answer, bool):
        if iscoroutine(answer):
            answer.close()  # or Python warns of it, some time later and somewhere else
        raise ConfigurationError(
            f"authorize_replay must return True or False, not {type(answer).__name__}."
        )
    return answer


def finish(begun: engine.AnyExecution, response: Any) -> HttpResponseBase:
    """Render the response; store a final one and commit, or roll back what is not final.

    Whatever goes wrong here rolls the effects back, and the retry runs again.
    """
    try:
        final = rendered(response)
        outcome = capture(final) if begun.policy.is_final(final.status_code) else None
    except BaseException as error:
        give_up(begun, error)
    if outcome is None:
        begun.fail(NotFinal(f"HTTP {final.status_code} returned"))
        return final
    try:
        begun.complete(outcome)
    except LeaseLost as error:
        raise overtaken(begun) from error
    return final


def give_up(begun: engine.AnyExecution, error: BaseException) -> NoReturn:
    """Roll back, remember the error and raise it; a passing fault becomes the refusal that says so."""
    begun.fail(error)
    if isinstance(error, LeaseLost):
        raise overtaken(begun) from error
    raise_translated(error, begun.operation)


def overtaken(begun: engine.AnyExecution) -> InProgress:
    """What the caller of an executor is told that has lost its lease to another one."""
    return InProgress(operation_id=begun.operation.pk, retry_after=conf.RETRY_AFTER)
