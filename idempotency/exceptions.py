"""Every exception the package raises.

A `Refusal` is an answer, not a fault: the operation was not executed by this call, and the
attributes say what the caller may do next. HTTP doors turn it into RFC 9457 problem+json.
"""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext_lazy as _


class IdempotencyError(Exception):
    """Base class of everything raised here."""


class ConfigurationError(ImproperlyConfigured, IdempotencyError):
    """The package is used in a way that cannot protect anything."""


class ReentrantOperation(IdempotencyError):
    """An operation was started again inside itself; waiting for it would never end."""


class LeaseLost(IdempotencyError):
    """Another executor owns the operation now; whatever was about to be written is rolled back."""


class IllegalTransition(IdempotencyError):
    """An operation cannot go from the status it has to the one that was asked for."""


class BarrierRefused(IdempotencyError):
    """A try, confirm or cancel that must not happen any more (or not yet)."""


class RolledBack(IdempotencyError):
    """The handler answered, but its transaction is marked for rollback: there is no effect to record."""


class StoredFailure(IdempotencyError):
    """A declared, deterministic failure of a function; every retry raises it with the same message.

    `error_type` is the dotted name of the original exception, which is also the first one's `__cause__`.
    """

    def __init__(self, message: str, error_type: str = "") -> None:
        # Both are arguments: pickle and Celery's result backends make an exception again of those.
        super().__init__(message, error_type)
        self.error_type = error_type

    def __str__(self) -> str:
        return str(self.args[0])


class NotFinal(IdempotencyError):
    """The handler returned an answer that must not be kept (a 503, say); its effects are rolled back."""


class Refusal(IdempotencyError):
    """The operation was not executed by this call.

    `code` ends the problem type URI, `status` is the HTTP status, `retryable` says whether the same
    request may succeed later, `key_action` is `same_key`, `new_key` or `wait`, `retry_after` is
    in seconds.
    """

    code: ClassVar[str]
    status: ClassVar[int]
    title: ClassVar[Any]  # a lazily translated string
    retryable: ClassVar[bool] = False
    key_action: ClassVar[str] = "new_key"

    def __init__(
        self,
        detail: str = "",
        *,
        operation_id: uuid.UUID | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(detail or str(self.title))
        self.detail = detail
        self.operation_id = operation_id
        self.retry_after = retry_after


class MissingKey(Refusal):
    code = "missing-key"
    status = 400
    title = _("This request needs an idempotency key.")


class InvalidKey(Refusal, ValueError):
    code = "invalid-key"
    status = 400
    title = _("The idempotency key is not valid.")


class AnonymousKey(Refusal):
    code = "anonymous-key"
    status = 400
    title = _("An idempotency key needs an identified caller.")


class KeyTooOld(Refusal):
    code = "key-too-old"
    status = 400
    title = _("The idempotency key is older than the time outcomes are remembered.")


class Mismatch(Refusal):
    code = "mismatch"
    status = 422
    title = _("The idempotency key was used for a different request.")


class InProgress(Refusal):
    code = "in-progress"
    status = 409
    title = _("The first request with this idempotency key is still being processed.")
    retryable = True
    key_action = "wait"


class OutcomeUnknown(Refusal):
    code = "outcome-unknown"
    status = 409
    title = _("The outcome of this operation is being checked.")
    key_action = "wait"

    def __init__(self, detail: str = "", *, provider_ref: str = "", **kwargs: Any) -> None:
        super().__init__(detail, **kwargs)
        self.provider_ref = provider_ref


class ResponseNotRetained(Refusal):
    code = "response-not-retained"
    status = 410
    title = _("The operation has finished, and its response was not kept.")
    key_action = "same_key"  # with a new one it would be done again


class KeyExpired(Refusal):
    code = "key-expired"
    status = 410
    title = _("The operation finished earlier, and its response is no longer kept.")
    key_action = "same_key"  # with a new one it would be done again


class Unavailable(Refusal):
    code = "unavailable"
    status = 503
    title = _("The operation could not be protected or completed right now.")
    retryable = True
    key_action = "same_key"
