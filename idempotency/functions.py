"""`@idempotent_function`: the engine for everything that is called rather than requested."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from asgiref.sync import iscoroutinefunction, sync_to_async

from . import db, encoding, engine, fingerprints, keys
from .exceptions import (
    ConfigurationError,
    LeaseLost,
    OutcomeUnknown,
    Refusal,
    ResponseNotRetained,
    StoredFailure,
)
from .executions import raise_translated
from .models import Operation, Outcome, Status
from .policies import Policy, Resolved
from .scopes import Scope

#: Header of a stored outcome that is an exception: its dotted type.
FAILURE = "failure"

#: Policy fields that mean nothing for a call.
VIEWS_ONLY = {"methods", "required", "exclude_fields", "store", "authorize_replay"}

P = ParamSpec("P")
R = TypeVar("R")


def idempotent_function(
    *,
    key: Callable[..., str],
    name: str | None = None,
    scope: Scope | Callable[..., Scope] | None = None,
    failures: tuple[type[Exception], ...] = (),
    **options: Any,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run the function once per key; later calls return an equal result without running it.

    `key` is called with the function's arguments and names the intent. `scope` says who shares the
    keys (default: all callers of this function). `failures` are exceptions that are final: effects
    are rolled back and every call raises StoredFailure with the original message; any other exception
    rolls back and lets the next call run. Results must be JSON-able by `idempotency.encoding`, or a
    TypeError is raised before anything commits. Other keyword arguments build a Policy; the
    arguments are the fingerprint unless `fingerprint` (called with them) says otherwise.

    Inside somebody's transaction the operation joins it; otherwise it opens its own. Works on async
    functions. Raises Mismatch, InProgress and the other Refusals of the engine.
    """
    if not callable(key):
        raise ConfigurationError(
            f"key is called with the function's arguments; {key!r} is no function"
        )
    get_fingerprint = options.pop("fingerprint", None)
    policy = policy_of(options, failures)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        operation_name = name or path_of(function)
        signature = inspect.signature(function)

        def intent(args: Any, kwargs: Any) -> engine.Intent:
            found = scope(*args, **kwargs) if callable(scope) else scope
            if get_fingerprint is not None:
                identity = get_fingerprint(*args, **kwargs)
            else:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                identity = bound.arguments
            resolved = policy.resolved()
            return intent_of(
                operation_name,
                key(*args, **kwargs),
                identity,
                resolved,
                scope=found,
                arguments=call_again(function, args, kwargs) if resolved.stepwise else None,
            )

        if iscoroutinefunction(function):

            @wraps(function)
            async def awrapper(*args: Any, **kwargs: Any) -> Any:
                found = await sync_to_async(intent)(args, kwargs)
                return await arun(found, lambda: function(*args, **kwargs), failures)

            wrapper: Any = awrapper
        else:

            @wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return run(intent(args, kwargs), lambda: function(*args, **kwargs), failures)

        wrapper.idempotency_policy = policy
        wrapper.idempotency_intent = intent
        return cast("Callable[P, R]", wrapper)

    return decorate


def policy_of(options: dict[str, Any], failures: object) -> Policy:
    """The policy of a call. Raises ConfigurationError for what could only be noticed when it runs."""
    unknown = VIEWS_ONLY & options.keys()
    if unknown:
        raise ConfigurationError(f"{', '.join(sorted(unknown))}: for views only")
    if not isinstance(failures, tuple) or not all(
        isinstance(kind, type) and issubclass(kind, Exception) for kind in failures
    ):
        raise ConfigurationError(f"failures is a tuple of exception classes, not {failures!r}")
    return Policy(**options)


def path_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def call_again(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> str | None:
    """What the completer needs to call it. None if its name does not find it: it is local, or a method."""
    if "." in function.__qualname__:
        return None
    call = {"function": path_of(function), "args": args, "kwargs": kwargs}
    return encoding.dumps(call, "call")


def intent_of(
    name: str,
    key: str,
    identity: Any,
    policy: Resolved,
    *,
    scope: Scope | None = None,
    arguments: str | None = None,
    give_up: tuple[int, Outcome] | None = None,
) -> engine.Intent:
    """The intent of a call: `identity` is what the same key must come with again.

    `arguments` is what the completer needs to make a stepwise call again.
    """
    return engine.Intent(
        name=name[:200],
        scope=scope or ("function", name),
        key=keys.validate(key),
        fingerprint=fingerprints.of_value(identity),
        policy=policy,
        arguments=arguments,
        give_up=give_up,
    )


def run(
    intent: engine.Intent,
    call: Callable[[], R],
    failures: tuple[type[Exception], ...] = (),
    *,
    never: tuple[type[BaseException], ...] = (),
) -> R:
    """Return `call()`, or what it returned for this intent before.

    Exceptions in `never` are not final, even if `failures` names a base class of them.
    """
    begun = engine.begin(intent)
    if isinstance(begun, engine.Replay):
        return cast("R", shown(begun))
    with engine.running(begun.operation):
        try:
            _tell_from_vanished(begun, intent)
            value = call()
            outcome = succeeded(value)
        except BaseException as error:
            raise_failed(begun, error, failures, never)
        begun.complete(outcome)
    return value


async def arun(
    intent: engine.Intent, call: Callable[[], Any], failures: tuple[type[Exception], ...] = ()
) -> Any:
    """`run` for a coroutine function."""
    begun = await engine.abegin(intent)
    if isinstance(begun, engine.Replay):
        return await sync_to_async(shown)(begun)
    with engine.running(begun.operation):
        try:
            await engine.in_thread(_tell_from_vanished, begun, intent)
            value = await call()
            outcome = succeeded(value)
        except BaseException as error:
            await engine.in_thread(raise_failed, begun, error, failures)
        await engine.in_thread(begun.complete, outcome)
    return value


def succeeded(value: Any) -> Outcome:
    """The outcome of a call that returned. Raises TypeError for a value that cannot be stored."""
    return Outcome(status=Status.SUCCEEDED, body=encoding.dumps(value).encode())


def shown(replay: engine.Replay) -> Any:
    """The stored result, or the stored failure raised."""
    engine.replayed(replay)
    return result_of(replay.operation, replay.outcome)


def result_of(operation: Operation, outcome: Outcome) -> Any:
    """The value an outcome stands for. Raises StoredFailure, or ResponseNotRetained."""
    if outcome.body is None:
        raise ResponseNotRetained(operation_id=operation.pk)
    value = encoding.loads(outcome.body)
    if FAILURE in outcome.headers:
        raise StoredFailure(value, outcome.headers[FAILURE])
    return value


def _tell_from_vanished(begun: engine.AnyExecution, intent: engine.Intent) -> None:
    """Where executors that vanish are counted, one that fails must not pass for one of them."""
    if intent.give_up is not None and isinstance(begun, engine.Execution):
        begun.savepoint()


def raise_failed(
    begun: engine.AnyExecution,
    error: BaseException,
    failures: tuple[type[Exception], ...],
    never: tuple[type[BaseException], ...] = (),
) -> NoReturn:
    """End an execution whose call raised: store a declared failure, remember any other."""
    if not isinstance(error, failures) or isinstance(error, never) or _is_open(error):
        begun.fail(error)
        raise_translated(error, begun.operation)
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    message = _message(error)
    body = encoding.dumps(message).encode()
    outcome = Outcome(status=Status.FAILED, headers={FAILURE: kind}, body=body)
    if isinstance(begun, engine.Execution) and begun.undo(error):
        begun.complete(outcome)
    else:
        begun.abort(error)
        begun.store_failure(outcome)
    raise StoredFailure(message, kind) from error


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # in the middle of ending a transaction
        return type(error).__qualname__


def _is_open(error: BaseException) -> bool:
    """Whether it is no deterministic failure, whatever its class: a retry may simply succeed, somebody
    else has the operation, or nobody knows the outcome, so that saying "failed" could double it.
    """
    if isinstance(error, OutcomeUnknown | LeaseLost) or db.is_transient(error):
        return True
    return isinstance(error, Refusal) and error.retryable
