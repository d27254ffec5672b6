"""Django REST framework: `IdempotencyMixin`, and `@idempotent` below `@api_view`.

The claim comes after authentication, permissions and throttles, and before the handler; the
response is finalized and rendered inside the transaction of its effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from django.db import transaction
from django.http import Http404
from django.http.response import HttpResponseBase

from .. import db, engine
from ..conf import conf
from ..exceptions import Refusal
from ..fingerprints import Fingerprint
from ..http import doors, requests
from ..http.problems import problem
from ..http.responses import capture, render
from ..policies import Policy, Resolved
from ..scopes import Scope


class IdempotencyMixin:
    """Put before APIView, a generic view or a ViewSet; configure with `idempotency_policy`.

    A Policy protects every method in `Policy.methods`; a dict maps action names (or methods, in
    lower case) to policies and leaves the rest unprotected.
    """

    idempotency_policy: Policy | Mapping[str, Policy] = Policy()

    def get_idempotency_policy(self, request: Any) -> Policy | None:
        """The policy of this request, or None to leave it unprotected."""
        policy = self.idempotency_policy
        if isinstance(policy, Policy):
            return policy
        action = getattr(self, "action", None)
        return policy.get(action or "") or policy.get(request.method.lower())

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
        """Whether the caller may still see the stored response.

        Authentication, permissions and throttles have run. For views of one object its object
        permissions are checked again, and an object that is there but hidden from the caller by now
        is a 404; one that was deleted since does not stop the replay.
        """
        lookup = getattr(self, "lookup_url_kwarg", None) or getattr(self, "lookup_field", None)
        kwargs: dict[str, Any] = getattr(self, "kwargs", {})
        if lookup not in kwargs or not hasattr(self, "get_object"):
            return True
        try:
            self.get_object()
        except Http404:
            model = self.get_queryset().model  # type: ignore[attr-defined]
            match = {self.lookup_field: kwargs[lookup]}  # type: ignore[attr-defined]
            if model._base_manager.filter(**match).exists():
                raise
        return True

    @classmethod
    def as_view(cls, *args: Any, **kwargs: Any) -> Any:
        view = super().as_view(*args, **kwargs)  # type: ignore[misc]
        for using in _aliases(cls):
            view = transaction.non_atomic_requests(using=using)(view)
        view.idempotency_policy = cls.idempotency_policy
        return view

    def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
        policy = self.get_idempotency_policy(request)
        resolved = None if policy is None else policy.resolved()
        if resolved is not None and request.method in resolved.methods:
            requests.spool(request)  # before a permission reads request.data and the bytes are gone
        super().initial(request, *args, **kwargs)  # type: ignore[misc]
        method = request.method.lower()
        if method not in self.http_method_names or not hasattr(self, method):  # type: ignore[attr-defined]
            return
        # dispatch() looks the handler up after initial(), on the instance.
        setattr(self, method, partial(_handle, self, getattr(self, method), resolved))


def _aliases(cls: type[IdempotencyMixin]) -> set[str]:
    policy = cls.idempotency_policy
    policies = [policy] if isinstance(policy, Policy) else policy.values()
    return {p.using or conf.USING for p in policies}


def _handle(
    view: Any,
    handler: Callable[..., HttpResponseBase],
    policy: Resolved | None,
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> HttpResponseBase:
    call = partial(handler, request, *args, **kwargs)
    opted_out = _aliases(type(view))
    if policy is None:
        with doors.request_atomic(*opted_out):
            return call()
    name = f"{type(view).__module__}.{type(view).__qualname__}.{getattr(view, 'action', request.method)}"
    with doors.request_atomic(*(opted_out - {policy.using})):
        return protect(
            view,
            request,
            policy,
            name,
            call,
            authorize_replay=view.authorize_replay,
            get_key=partial(view.get_idempotency_key, policy=policy),
            get_scope=partial(view.get_idempotency_scope, policy=policy),
            get_fingerprint=partial(view.get_idempotency_fingerprint, policy=policy),
        )


def protect(
    view: Any,
    request: Any,
    policy: Resolved,
    name: str,
    call: Callable[[], HttpResponseBase],
    *,
    authorize_replay: Callable[[Any, Any], bool] | None = None,
    **sources: Any,
) -> HttpResponseBase:
    """`doors.protect` for a call inside a REST framework view.

    Exceptions leave through the view's own `handle_exception`, after the effects are rolled back.
    """
    try:
        intent = doors.intent_of(request, policy, name, **sources)
        if intent is None:
            with doors.request_atomic(policy.using):
                return call()
        begun = engine.begin(intent)
        if isinstance(begun, engine.Replay):
            if authorize_replay is not None and not authorize_replay(request, begun.operation):
                view.permission_denied(request)
            return doors.show(begun, request, policy)
        with engine.running(begun.operation):
            request._request.operation = begun.operation
            try:
                response = _finalize(view, request, call())
            except Exception as error:
                if isinstance(error, Refusal) or db.is_transient(error):
                    begun.fail(error)
                    engine.raise_translated(error, begun.operation)
                begun.abort(error)
                view.handle_exception = partial(
                    _handle_exception, view, view.handle_exception, begun, request
                )
                raise
            except BaseException as error:
                begun.fail(error)
                raise
            return doors.finish(begun, response)
    except Refusal as refusal:
        return problem(refusal, request)


def _finalize(view: Any, request: Any, response: HttpResponseBase) -> HttpResponseBase:
    """What dispatch() and the handler would do after the transaction, done inside it, once."""
    response = view.finalize_response(request, response, *view.args, **view.kwargs)
    render(response)
    view.finalize_response = lambda request, response, *args, **kwargs: response
    return response


def _handle_exception(
    view: Any,
    handle: Callable[[Exception], HttpResponseBase],
    begun: engine.Execution,
    request: Any,
    error: Exception,
) -> HttpResponseBase:
    """The response the view makes of its exception; stored when it is final."""
    try:
        response = handle(error)
        if not begun.policy.is_final(response.status_code):
            begun.record(error)
            return response
        response = _finalize(view, request, response)
        outcome = capture(response)
    except Exception as unhandled:
        begun.record(unhandled)
        raise
    begun.store_failure(outcome)
    return response


doors.rest_framework_door = protect
