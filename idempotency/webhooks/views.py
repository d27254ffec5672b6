"""Receiving webhooks: verify, then deduplicate, then run each handler once."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, ClassVar

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.datastructures import CaseInsensitiveMapping
from django.utils.decorators import classonlymethod
from django.utils.module_loading import import_string
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from .. import inbox, outbox
from ..conf import conf
from ..exceptions import ConfigurationError, InProgress, InvalidKey, Mismatch, Unavailable
from ..policies import Policy
from .verifiers import BadSignature

logger = logging.getLogger("idempotency")

#: Prefix of the outbox topics of deliveries that are acknowledged first and handled later.
TOPIC = "idempotency.webhook."


@dataclass(frozen=True)
class Delivery:
    """One verified delivery: the exact bytes, the headers, and what they say."""

    source: str
    id: str
    body: bytes
    headers: Mapping[str, str]
    #: Executions of this handler for this delivery so far, this one included.
    attempt: int = field(default=1, compare=False)

    @cached_property
    def payload(self) -> Any:
        """The body as JSON. Raises ValueError if it is none."""
        return json.loads(self.body)


class NotYet(Exception):
    """Raised by a handler for an event that comes too early: not a failure, deliver again."""


class WebhookView(View):
    """Answers a sender that repeats itself: each delivery's handlers take effect once.

    Set `source`, `verify` (a verifier from this package, or any callable(body, headers) that raises
    BadSignature) and `delivery_id`; register handlers with `@MyView.handles("order.*")`, or override
    `handle`. A duplicate gets the success answer at once; a delivery whose handlers are running gets
    409 with Retry-After; a failed handler makes it 500, and the redelivery runs only the handlers that
    have not succeeded. Unverified requests are answered 401 and leave nothing behind.
    """

    #: Who sends; with `endpoint` it scopes the delivery ids.
    source: str = ""
    endpoint: str = ""
    verify: Callable[[bytes, Mapping[str, str]], None] | None = None
    #: "header:NAME", "json:FIELD.FIELD", "body" (digest of the bytes), or a callable(body, headers).
    delivery_id: str | Callable[[bytes, Mapping[str, str]], str] = "header:webhook-id"
    #: "json:FIELD" or "header:NAME": what `handles` patterns are matched with.
    event_type: str = "json:type"
    #: True: store the delivery durably, acknowledge, let the outbox relay run the handlers.
    acknowledge_first: bool = False
    policy: Policy = Policy(retention=inbox.RETENTION)
    #: The sender's longest retry schedule in seconds; checked against the retention.
    retry_horizon: float = 75 * 3600 + 35 * 60 + 5
    max_bytes: int = 1024 * 1024
    success_status: int = 200
    success_body: str = ""
    success_content_type: str = "text/plain"

    http_method_names: Sequence[str] = ("post", "options")
    handlers: ClassVar[list[tuple[str, str, Callable[[Delivery], Any]]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.handlers = list(getattr(cls, "handlers", ()))

    @classmethod
    def handles(cls, pattern: str = "*", *, name: str = "") -> Callable[[Any], Any]:
        """Register a handler for event types that match the pattern ("payment.*").

        Each handler is an operation of its own, named by `name` (default: its dotted name).
        """

        def register(function: Callable[[Delivery], Any]) -> Callable[[Delivery], Any]:
            unique = name or f"{function.__module__}.{function.__qualname__}"
            if any(known == unique for known, _, _ in cls.handlers):
                raise ConfigurationError(f"{cls.__name__} has a handler {unique} already")
            cls.handlers.append((unique, pattern, function))
            return function

        return register

    @classonlymethod
    def as_view(cls, **initkwargs: Any) -> Any:  # noqa: N805 (Django's own class-only method)
        view = super().as_view(**initkwargs)
        # Each handler commits on its own, and a failure must not undo the others.
        view = transaction.non_atomic_requests(using=cls.policy.using or conf.USING)(view)
        return csrf_exempt(view)

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if not self.source or self.verify is None:
            raise ConfigurationError(f"{type(self).__name__} needs a source and a verifier")
        body = request.read(self.max_bytes + 1)
        if len(body) > self.max_bytes:
            return HttpResponse(status=413)
        try:
            type(self).verify(body, request.headers)  # type: ignore[misc]
            delivery = Delivery(
                self.source, self.get_delivery_id(body, request.headers), body, request.headers
            )
        except BadSignature as error:
            logger.warning("webhook from %s refused: %s", self.source, error)
            return HttpResponse(status=401)
        except (InvalidKey, ValueError):
            return HttpResponse(
                "The delivery has no usable id.", status=400, content_type="text/plain"
            )
        try:
            if self.acknowledge_first:
                self.store(delivery)
            else:
                self.run_handlers(delivery)
        except Mismatch:
            return HttpResponse(
                "Another body had this delivery id.", status=422, content_type="text/plain"
            )
        except (InProgress, Unavailable, NotYet) as refusal:
            response = HttpResponse(status=503 if isinstance(refusal, Unavailable) else 409)
            response["Retry-After"] = str(conf.RETRY_AFTER)
            return response
        return HttpResponse(
            self.success_body, status=self.success_status, content_type=self.success_content_type
        )

    def get_delivery_id(self, body: bytes, headers: Mapping[str, str]) -> str:
        """The sender's id of the delivery, the same each time it is sent.

        Raises InvalidKey or ValueError when there is none.
        """
        if callable(self.delivery_id):
            found: object = self.delivery_id(body, headers)
        elif self.delivery_id == "body":
            found = inbox.digest(body)
        else:
            found = _look_up(self.delivery_id, body, headers)
        if found is None or isinstance(found, bool | list | dict) or not str(found).strip():
            raise InvalidKey("the delivery has no id")
        return str(found)

    def get_event_type(self, delivery: Delivery) -> str:
        """What the patterns of `handles` are matched with; "" when the delivery does not say."""
        try:
            found = _look_up(self.event_type, delivery.body, delivery.headers)
        except ValueError:
            return ""
        return "" if found is None else str(found)

    def handlers_of(self, delivery: Delivery) -> list[str]:
        """Names of the handlers that take the delivery."""
        event_type = self.get_event_type(delivery)
        return [name for name, pattern, _ in self.handlers if fnmatchcase(event_type, pattern)]

    def run_handlers(self, delivery: Delivery) -> None:
        """Run every handler that has not succeeded for this delivery; one's failure stops no other.

        Raises the first failure when all had their turn.
        """
        failures: list[Exception] = []
        for name in self.handlers_of(delivery):
            try:
                self.run_handler(name, delivery)
            except Exception as error:
                logger.warning("handler %s failed for a delivery from %s", name, self.source)
                failures.append(error)
        if failures:
            # A failure of our own is what people must see; "come back later" only if it is all there is.
            later = (InProgress, Unavailable, NotYet)
            raise min(failures, key=lambda error: isinstance(error, later))

    def run_handler(self, name: str, delivery: Delivery) -> None:
        """Run one handler in one transaction with the record that it ran."""
        function = next(function for known, _, function in self.handlers if known == name)
        with inbox.receive(
            consumer=":".join(("webhook", self.source, self.endpoint, name)),
            message_id=delivery.id,
            payload=delivery.body,
            policy=self.policy,
        ) as received:
            if received.is_new:
                function(replace(delivery, attempt=received.operation.attempt))

    def store(self, delivery: Delivery) -> None:
        """Keep the delivery durably, one outbox message per handler; the relay runs them."""
        kept = {"content-type", _header_of(self.event_type), _header_of(self.delivery_id)}
        using = self.policy.using or conf.USING
        with transaction.atomic(using):
            for name in self.handlers_of(delivery):
                outbox.enqueue(
                    f"{TOPIC}{self.source}",
                    {
                        "view": f"{type(self).__module__}.{type(self).__qualname__}",
                        "handler": name,
                        "id": delivery.id,
                        "body": base64.b64encode(delivery.body).decode(),
                        # No other header: signatures and credentials are not kept.
                        "headers": {k: v for k, v in delivery.headers.items() if k.lower() in kept},
                    },
                    key=inbox.digest(self.endpoint, name, delivery.id),
                    using=using,
                )


def run_stored(message: outbox.Message) -> None:
    """Run the handler that a stored delivery waits for."""
    stored = message.payload
    view = import_string(stored["view"])()
    delivery = Delivery(
        source=view.source,
        id=stored["id"],
        body=base64.b64decode(stored["body"]),
        headers=CaseInsensitiveMapping(stored["headers"]),
    )
    try:
        view.run_handler(stored["handler"], delivery)
    except NotYet as error:
        raise outbox.RetryAfter(conf.RETRY_AFTER, "not yet") from error


def _look_up(where: str, body: bytes, headers: Mapping[str, str]) -> object:
    carrier, _, name = where.partition(":")
    if carrier == "header" and name:
        return headers.get(name)
    if carrier != "json" or not name:
        raise ConfigurationError(f'{where!r} is neither "header:NAME" nor "json:FIELD"')
    value: object = json.loads(body)
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _header_of(where: object) -> str:
    return where.removeprefix("header:").lower() if isinstance(where, str) else ""
