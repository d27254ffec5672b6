"""`@idempotent` for views; `@idempotent_function` for everything else that is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.utils.module_loading import import_string

from .conf import conf
from .exceptions import ConfigurationError
from .functions import idempotent_function
from .http import doors
from .http.bodies import is_drf
from .policies import Policy

__all__ = ["idempotent", "idempotent_function"]

# By name: only a view that got a REST framework request needs REST framework.
_REST_FRAMEWORK_DOOR = "idempotency.contrib.rest_framework.protect"


def idempotent(policy: Policy | Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Protect a view, sync or async: one intent, one response, replayed to every retry.

    Keyword arguments build a Policy; or pass a ready one. Works on function views, on methods, with
    `method_decorator` on class-based views, on the result of `as_view()`, and below `@api_view`.

    Order: below decorators that decide who may call (`login_required`), because a request that may
    not run must not claim a key; above those that change the response, so that it is stored as
    changed. In a project with ATOMIC_REQUESTS a view protected below `@api_view` or by its method
    stays in the request's transaction: a duplicate is not waited for, and what it raises is not stored.
    Put `transaction.non_atomic_requests` above `@api_view`, or use IdempotencyMixin.

    Raises ConfigurationError where it could not protect: on a class, twice, and around a REST
    framework view, whose authentication would come after the claim. All at import, but for
    `dispatch` of a REST framework class, which is known when the first request arrives.
    """
    if policy is not None and not isinstance(policy, Policy):
        if options or not callable(policy):
            raise ConfigurationError("@idempotent takes one Policy or keyword arguments of Policy.")
        return _decorate(policy, Policy())
    if policy is not None and options:
        raise ConfigurationError(
            "@idempotent takes one Policy or keyword arguments of Policy, not both."
        )
    return partial(_decorate, policy=policy or Policy(**options))


def _decorate(view: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    _refuse_undecoratable(view)
    name = policy.name or _dotted_name(view)
    using = policy.using or conf.USING
    non_atomic: set[str] = getattr(view, "_non_atomic_requests", set())
    was_atomic = using not in non_atomic

    if iscoroutinefunction(view):

        @wraps(view)
        async def awrapper(*args: Any, **kwargs: Any) -> Any:
            _, request = _owner_and_request(view, args)
            call = partial(view, *args, **kwargs)
            return await doors.aprotect(request, policy.resolved(), name, call)

        wrapper: Any = awrapper
    else:

        @wraps(view)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            owner, request = _owner_and_request(view, args)
            call = partial(view, *args, **kwargs)
            if is_drf(request):
                door = import_string(_REST_FRAMEWORK_DOOR)
                return door(request, policy.resolved(), name, call)
            if getattr(owner, "view_is_async", False):  # dispatch() returns its handler's coroutine
                return doors.aprotect(request, policy.resolved(), name, call)
            return doors.protect(request, policy.resolved(), name, call, was_atomic=was_atomic)

    # The operation opens its own transactions: inside the request's, its claim would be invisible.
    wrapper._non_atomic_requests = non_atomic | {using}
    wrapper.idempotency_policy = policy
    decorated: Callable[..., Any] = wrapper
    return decorated


def _refuse_undecoratable(view: Any) -> None:
    if isinstance(view, type):
        raise ConfigurationError(
            f"{_dotted_name(view)} is a class: use @method_decorator(idempotent(...), name='dispatch')."
        )
    _refuse_rest_framework(getattr(view, "cls", None), view)
    if getattr(view, "idempotency_policy", None) is not None:
        raise ConfigurationError(f"{_dotted_name(view)} is idempotent already.")


def _refuse_rest_framework(owner: Any, view: Any) -> None:
    if hasattr(owner, "initialize_request"):
        raise ConfigurationError(
            f"{_dotted_name(view)} is a REST framework view: its authentication and permissions would "
            "come after the claim. Put @idempotent below @api_view, on the handler method, or use "
            "idempotency.contrib.rest_framework.IdempotencyMixin."
        )


def _owner_and_request(view: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """The view object, if the call is one of its methods, and the request."""
    owner = getattr(getattr(view, "func", None), "__self__", None)  # method_decorator's partial
    for candidate in args[:2]:  # a function's first argument, or a method's second
        if is_drf(candidate):
            return owner, candidate
        if isinstance(candidate, HttpRequest):
            _refuse_rest_framework(owner, view)
            return owner, candidate
        owner = candidate
    raise TypeError(f"@idempotent protects views, and {_dotted_name(view)} got no request.")


def _dotted_name(view: Any) -> str:
    while isinstance(view, partial):
        view = view.func
    owner = getattr(view, "__self__", None)
    if owner is not None:  # the class that was decorated, not the one that has the method
        return f"{type(owner).__module__}.{type(owner).__qualname__}.{view.__name__}"
    return f"{getattr(view, '__module__', '')}.{getattr(view, '__qualname__', type(view).__qualname__)}"
