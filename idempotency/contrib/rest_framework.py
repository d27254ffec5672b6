"""Django REST framework: `IdempotencyMixin`, and `@idempotent` below `@api_view` and on methods.

The claim comes after authentication, permissions and throttles, and before the handler; the
response is finalized and rendered inside the transaction of its effects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from django.core.exceptions import ValidationError
from django.db import connections, transaction
from django.http import Http404
from django.http.response import HttpResponseBase
from django.views import View
from rest_framework import permissions
from rest_framework.generics import GenericAPIView
from rest_framework.response import Response
from rest_framework.views import APIView

from .. import db, engine
from ..conf import conf
from ..exceptions import ConfigurationError, LeaseLost, Refusal
from ..fingerprints import Fingerprint
from ..http import doors, requests, status
from ..http.problems import problem
from ..http.responses import capture, rendered
from ..policies import Policy, Resolved
from ..scopes import Scope

Policies = Policy | Mapping[str, Policy]


class IdempotencyMixin:
    """Put before APIView, a generic view or a ViewSet; configure with `idempotency_policy`.

    A Policy protects every method in `Policy.methods`. A dict maps action names (or methods, in lower
    case) to policies, each for the method the action is called with unless it names others, and
    leaves the rest unprotected. `@action(idempotency_policy=...)` and
    `as_view(idempotency_policy=...)` set it for one action or route.

    Raises ConfigurationError at import behind APIView among the bases, where it could do nothing,
    and in `as_view` for a name that the view does not have.

    Requests without protection keep what ATOMIC_REQUESTS gives them: a transaction around the
    handler, rolled back by every exception.
    """

    idempotency_policy: Policies = Policy()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if APIView in order and order.index(APIView) < order.index(IdempotencyMixin):
            raise ConfigurationError(f"{cls.__qualname__}: IdempotencyMixin comes before the view.")

    def get_idempotency_policy(self, request: Any) -> Policy | None:
        """The policy of this request, or None to leave it unprotected."""
        policies = self.idempotency_policy
        if isinstance(policies, Policy):
            return policies
        action = getattr(self, "action", None)
        policy = policies.get(action or "") or policies.get(request.method.lower())
        if policy is None or request.method in permissions.SAFE_METHODS:
            return None
        return _for_method(policy, request.method)

    def get_idempotency_key(self, request: Any, policy: Resolved) -> str | None:
        """The key, or None. Raises InvalidKey."""
        return requests.find_key(request, policy)

    def get_idempotency_scope(self, request: Any, policy: Resolved) -> Scope:
        """Who shares the key space; never client input."""
        return policy.scope(request)

    def get_idempotency_fingerprint(self, request: Any, policy: Resolved) -> Fingerprint:
        """What the same key must come with again."""
        return requests.request_fingerprint(request, policy)

    def authorize_replay(self, request: Any, operation: Any) -> bool:
        """Whether the caller may still see the stored response; authentication, permissions and
        throttles have run. Override where an action hides its own object from the queryset.

        For views of one object its object permissions are checked again, and an object that is
        there but hidden from the caller by now is a 404. One that was deleted since does not stop
        the replay.
        """
        may_see_object(self)
        return True

    @classmethod
    def as_view(cls, *args: Any, **kwargs: Any) -> Any:
        view = super().as_view(*args, **kwargs)  # type: ignore[misc]
        policies = kwargs.get("idempotency_policy", cls.idempotency_policy)
        if not isinstance(policies, Policy):
            for name in policies:
                if not hasattr(cls, name) and name not in View.http_method_names:
                    raise ConfigurationError(
                        f"{cls.__qualname__} has no action or method {name!r}."
                    )
        for using in _aliases(policies):
            transaction.non_atomic_requests(using=using)(view)
        view.idempotency_policy = policies
        return view

    def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
        policy = self.get_idempotency_policy(request)
        resolved = None if policy is None else policy.resolved()
        may_have_key = resolved is not None and (
            resolved.key is not None or conf.KEY_HEADER in request.headers
        )
        if resolved is not None and may_have_key and request.method in resolved.methods:
            # A permission may read request.data, and the bytes would be gone; a caller who is turned
            # away before anybody reads makes the server keep nothing.
            requests.spool_when_read(request)
        super().initial(request, *args, **kwargs)  # type: ignore[misc]
        method = request.method.lower()
        handler = getattr(self, method, None)
        if handler is None or method not in self.http_method_names:  # type: ignore[attr-defined]
            return  # 405
        # dispatch() looks the handler up after initial(), on the instance.
        setattr(self, method, partial(_handle, self, handler, resolved))

    def handle_exception(self, exc: Exception) -> Any:
        # REST framework marks the ATOMIC_REQUESTS transactions it finds open for rollback. The
        # view opted out of them: those of somebody else (a TestCase) are not the ones it means.
        with doors.request_atomic(*_aliases(self.idempotency_policy)):
            return super().handle_exception(exc)  # type: ignore[misc]


def may_see_object(view: Any) -> None:
    """Fetch the object of a view of one object once more, with its filters and permissions.

    Raises what `get_object` raises, unless the object was deleted.
    """
    if not isinstance(view, GenericAPIView):
        return
    value = view.kwargs.get(view.lookup_url_kwarg or view.lookup_field)
    if value is None and not _has_custom_object(view):
        return
    queryset = view.get_queryset()
    with transaction.atomic(using=queryset.db):  # for a queryset with select_for_update()
        try:
            view.get_object()
        except Http404:
            if value is None or _exists(queryset.model, view.lookup_field, value):
                raise


def _has_custom_object(view: Any) -> bool:
    """Whether the object is found by other arguments of the path than the declared one."""
    is_custom = type(view).get_object is not GenericAPIView.get_object
    return is_custom and bool(view.kwargs) and getattr(view, "detail", None) is not False


def _exists(model: Any, field: str, value: Any) -> bool:
    try:
        return bool(model._base_manager.filter(**{field: value}).exists())
    except (TypeError, ValueError, ValidationError):
        return False  # no object can have this value


@lru_cache(maxsize=256)
def _for_method(policy: Policy, method: str) -> Policy:
    return policy if policy.methods is not None else replace(policy, methods=(method,))


def _aliases(policies: Policies) -> set[str]:
    several: Collection[Policy]
    several = [policies] if isinstance(policies, Policy) else policies.values()
    return {policy.using or conf.USING for policy in several}


def _handle(
    view: Any,
    handler: Callable[..., HttpResponseBase],
    policy: Resolved | None,
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> HttpResponseBase:
    call = partial(handler, request, *args, **kwargs)
    opted_out = _aliases(view.idempotency_policy)
    if policy is None:
        with doors.request_atomic(*opted_out):
            return call()
    name = f"{type(view).__module__}.{type(view).__qualname__}.{getattr(view, 'action', request.method)}"
    with doors.request_atomic(*(opted_out - {policy.using})):
        return protect(request, policy, name, call, restore=opted_out & {policy.using})


def protect(
    request: Any,
    policy: Resolved,
    name: str,
    call: Callable[[], Any],
    *,
    restore: Collection[str] = (),
) -> HttpResponseBase:
    """`doors.protect` for a call inside a REST framework view.

    Exceptions leave through the view's own `handle_exception`, after the effects are rolled back.
    `restore` names the databases whose ATOMIC_REQUESTS an unprotected request gets back.
    """
    view = request.parser_context["view"]
    try:
        intent = _intent_of(view, request, policy, name)
        if intent is None:
            with doors.request_atomic(*restore):
                return call()  # type: ignore[no-any-return]
        begun = engine.begin(intent)
        if isinstance(begun, engine.Replay):
            _authorize(view, request, begun)
            return doors.show(begun, request, policy)
        request._request.operation = begun.operation
        with engine.running(begun.operation):
            try:
                response = _finalized(view, request, call())
            except Exception as error:
                if isinstance(error, Refusal | LeaseLost) or db.is_transient(error):
                    doors.give_up(begun, error)
                begun.abort(error)
                handle = partial(_handle_exception, view, view.handle_exception, begun, request)
                view.handle_exception = handle
                raise
            except BaseException as error:
                doors.give_up(begun, error)
            return doors.finish(begun, response)
    except Refusal as refusal:
        return problem(refusal, request)


def _intent_of(view: Any, request: Any, policy: Resolved, name: str) -> engine.Intent | None:
    if not isinstance(view, IdempotencyMixin):
        return doors.intent_of(request, policy, name)
    return doors.intent_of(
        request,
        policy,
        name,
        get_key=view.get_idempotency_key,
        get_scope=view.get_idempotency_scope,
        get_fingerprint=view.get_idempotency_fingerprint,
    )


def _authorize(view: Any, request: Any, found: engine.Replay) -> None:
    if not isinstance(view, IdempotencyMixin):
        may_see_object(view)
    elif not doors.said_yes(view.authorize_replay(request, found.operation)):
        view.permission_denied(request)  # type: ignore[attr-defined]


def _finalized(view: Any, request: Any, response: Any) -> HttpResponseBase:
    """What dispatch() and the handler would do after the transaction, done inside it, once."""
    finalize = view.finalize_response
    final = rendered(finalize(request, response, *view.args, **view.kwargs))

    def finalize_once(request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
        return final if response is final else finalize(request, response, *args, **kwargs)

    view.finalize_response = finalize_once
    return final


def _handle_exception(
    view: Any,
    handle: Callable[[Exception], HttpResponseBase],
    begun: engine.AnyExecution,
    request: Any,
    error: Exception,
) -> HttpResponseBase:
    """The response the view makes of its exception; stored when it is final."""
    connection = connections[begun.policy.using]
    outcome = None
    try:
        response = handle(error)
        if begun.policy.is_final(response.status_code):
            response = _finalized(view, request, response)
            outcome = capture(response)
    except Exception as unhandled:
        begun.record(unhandled)
        raise
    if connection.in_atomic_block and connection.needs_rollback:
        return response  # the request's own transaction: the claim goes with it, nothing can stay
    if outcome is None:
        begun.record(error)
        return response
    try:
        begun.store_failure(outcome)
    except Refusal as refusal:  # the view has swallowed that a call's outcome is unknown, say
        return problem(refusal, request)
    except LeaseLost:
        return problem(doors.overtaken(begun), request)
    return response


class OperationStatusView(APIView):
    """`http.status.OperationStatusView` behind REST framework's authentication, permissions and throttles."""

    http_method_names = ["get", "head", "options"]
    policy = Policy()
    show_result = False

    def get(self, request: Any, operation: str = "") -> Response:
        found = status.find(request, operation, self.policy)
        if found is None:
            raise Http404
        members = status.describe(found, self.policy, show_result=self.show_result)
        headers = {"Cache-Control": "no-store"}
        wait = status.retry_after(found)
        if wait is not None:
            headers["Retry-After"] = str(wait)
        return Response(members, headers=headers)
