"""`@idempotent` for views and `@idempotent_function` for everything that is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest

from .conf import conf
from .exceptions import ConfigurationError
from .http import doors
from .policies import Policy


def idempotent(policy: Policy | Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Protect a view, sync or async: one intent, one response, replayed to every retry.

    Keyword arguments build a Policy; or pass a ready one. Works on function views, on methods, with
    `method_decorator` on class-based views, on the result of `as_view()`, and below `@api_view`.
    Put it under decorators that decide who may call (`login_required`): a request that may not run
    must not claim a key.

    Raises ConfigurationError at import where it could not protect: above a DRF view, whose
    authentication has not happened yet (use IdempotencyMixin, or put it below `@api_view`).
    """
    if policy is not None and not isinstance(policy, Policy):
        if options or not callable(policy):
            raise ConfigurationError("@idempotent takes one Policy or keyword arguments of Policy")
        return _decorate(policy, Policy())
    if policy is not None and options:
        raise ConfigurationError(
            "@idempotent takes one Policy or keyword arguments of Policy, not both"
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
            request = _request_of(args, name)
            call = partial(view, *args, **kwargs)
            return await doors.aprotect(request, policy.resolved(), name, call)

        wrapper: Any = markcoroutinefunction(awrapper)
    else:

        @wraps(view)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            request = _request_of(args, name)
            call = partial(view, *args, **kwargs)
            if hasattr(request, "parser_context") and doors.rest_framework_door is not None:
                drf_view = request.parser_context["view"]
                return doors.rest_framework_door(drf_view, request, policy.resolved(), name, call)
            return doors.protect(request, policy.resolved(), name, call, was_atomic=was_atomic)

    # The operation opens its own transactions: inside the request's, its claim would be invisible.
    wrapper._non_atomic_requests = non_atomic | {using}
    wrapper.idempotency_policy = policy
    return wrapper


def _refuse_undecoratable(view: Any) -> None:
    if getattr(view, "idempotency_policy", None) is not None:
        raise ConfigurationError(f"{_dotted_name(view)} is already idempotent")
    owner = getattr(view, "cls", None) or getattr(view, "view_class", None)
    bound = getattr(getattr(view, "func", None), "__self__", None)  # method_decorator's partial
    name = getattr(getattr(view, "func", None), "__name__", "")
    if hasattr(owner, "initialize_request") or (
        hasattr(bound, "initialize_request") and name == "dispatch"
    ):
        raise ConfigurationError(
            f"{_dotted_name(view)} is a REST framework view: authentication and permissions would come "
            "after the claim. Put @idempotent below @api_view, or use "
            "idempotency.contrib.rest_framework.IdempotencyMixin."
        )
    if isinstance(view, type):
        raise ConfigurationError(
            f"{_dotted_name(view)} is a class: use @method_decorator(idempotent(...), name='dispatch')."
        )


def _request_of(args: tuple[Any, ...], name: str) -> Any:
    for candidate in args[:2]:  # a function's first argument, or a method's second
        if isinstance(candidate, HttpRequest) or hasattr(candidate, "parser_context"):
            return candidate
    raise TypeError(f"@idempotent protects views, and {name} was called without a request")


def _dotted_name(view: Any) -> str:
    while isinstance(view, partial):
        view = view.func
    return f"{getattr(view, '__module__', '')}.{getattr(view, '__qualname__', type(view).__qualname__)}"
