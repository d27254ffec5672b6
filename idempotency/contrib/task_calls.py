"""What Celery and django.tasks have in common: from one call of a task's function to its intent."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.db.models import Model

from .. import encoding, engine, functions, keys
from ..exceptions import ConfigurationError, InProgress, LeaseLost, Unavailable
from ..models import Outcome, Status
from ..scopes import Scope

#: How a task names its intent: a callable of its arguments, or the names of the arguments that do.
Key = Callable[..., object] | str | Sequence[str] | None

#: Executors that may vanish before a task is given up, unless it says otherwise.
GIVE_UP_AFTER = 5


#: After these the same call may simply succeed a little later.
COMES_AGAIN = (InProgress, Unavailable, LeaseLost)


class ExecutorsLost(Exception):
    """Named by the StoredFailure of a task that took down one worker after the other."""


class TaskCalls:
    """Checks an idempotent task's options when it is defined, and makes the intent of each call."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        key: Key,
        name: str | None,
        scope: Scope | Callable[..., Scope] | None,
        failures: tuple[type[Exception], ...],
        countdown: float,
        give_up_after: int | None,
        options: dict[str, Any],
    ) -> None:
        if any(hasattr(function, name) for name in ("apply_async", "enqueue")):
            raise ConfigurationError("idempotent_task goes below the decorator that makes the task")
        self.function = function
        self.name = name or functions.path_of(function)
        self.key = key
        self.scope = scope
        self.fingerprint = options.pop("fingerprint", None)
        self.signature = inspect.signature(function)
        self.policy = functions.policy_of(options, failures)
        self._refuse_contradictions(give_up_after, countdown)
        limit = GIVE_UP_AFTER if give_up_after is None else give_up_after
        self._give_up = (limit, self._dead(limit))

    def intent(
        self, args: Sequence[Any], kwargs: dict[str, Any], *, skip: int, default_key: str | None
    ) -> engine.Intent:
        """The intent of `function(*args, **kwargs)`; the first `skip` arguments are not the caller's.

        Raises TypeError for arguments the function does not take, for model instances among them,
        and when nothing says which intent this is.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        own = dict(list(bound.arguments.items())[skip:])
        _refuse_models(own, self.name)
        given = (args[skip:], kwargs)
        resolved = self.policy.resolved()
        identity = own if self.fingerprint is None else self.fingerprint(*given[0], **given[1])
        scope = self.scope(*given[0], **given[1]) if callable(self.scope) else self.scope
        return functions.intent_of(
            self.name,
            self._key_of(given, own, default_key),
            identity,
            resolved,
            scope=scope or ("task", self.name),
            # The completer has no task id, so only a key of arguments will do.
            arguments=(
                functions.call_again(self.function, *given)
                if resolved.stepwise and self.key is not None
                else None
            ),
            give_up=self._give_up,
        )

    def _key_of(
        self, given: tuple[Sequence[Any], dict[str, Any]], own: dict[str, Any], default: str | None
    ) -> str:
        if callable(self.key):
            return keys.from_value(self.key(*given[0], **given[1]))
        if self.key is not None:
            return keys.from_value(_only(tuple(own[name] for name in _names(self.key))))
        if default is None:
            raise TypeError(
                f"{self.name} was called without a task id: give idempotent_task a key=, "
                "or send the task instead of calling it."
            )
        return keys.from_value(default)

    def _refuse_contradictions(self, give_up_after: int | None, countdown: float) -> None:
        if countdown <= 0:
            raise ConfigurationError(
                f"{self.name}: countdown: a duplicate that comes back at once only spins"
            )
        if self.key is not None and not callable(self.key):
            missing = set(_names(self.key)) - set(self.signature.parameters)
            if missing or not _names(self.key):
                raise ConfigurationError(
                    f"{self.name} takes no argument {', '.join(sorted(missing))!r} that could be its key"
                )
        if give_up_after is not None and give_up_after < 1:
            raise ConfigurationError(f"{self.name}: give_up_after must be at least 1")
        if self.policy.on_interrupted == "reconcile" and give_up_after is not None:
            raise ConfigurationError(
                f'{self.name}: on_interrupted="reconcile" never runs an interrupted task again, so '
                "there is nothing that give_up_after could count"
            )

    def _dead(self, limit: int) -> Outcome:
        message = f"{self.name}: {limit} executors vanished while running it"
        kind = f"{ExecutorsLost.__module__}.{ExecutorsLost.__qualname__}"
        return Outcome(
            status=Status.FAILED,
            headers={functions.FAILURE: kind},
            body=encoding.dumps(message).encode(),
        )


def _names(key: str | Sequence[str]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _only(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _refuse_models(arguments: dict[str, Any], name: str) -> None:
    for argument, value in arguments.items():
        for found in _models_in(value):
            raise TypeError(
                f"{name}: {argument} holds a {found._meta.label} instance, which is another one by the "
                "time the task runs. Pass its primary key and load it in the task."
            )


def _models_in(value: Any) -> Iterator[Model]:
    if isinstance(value, Model):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _models_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _models_in(item)
