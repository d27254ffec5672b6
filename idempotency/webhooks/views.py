"""Receiving webhooks: verify, then deduplicate, then run each handler once."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

from django.core.exceptions import (
    BadRequest,
    PermissionDenied,
    RequestDataTooBig,
    SuspiciousOperation,
)
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.http.request import RawPostDataException, UnreadablePostError
from django.http.response import HttpResponseBase
from django.utils.decorators import classonlymethod
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from .. import fingerprints, inbox
from ..conf import conf
from ..exceptions import ConfigurationError, InvalidKey, Mismatch, Refusal
from ..policies import Policy
from . import stored
from .deliveries import Delivery, NotBegun, NotYet, look_up, read_body
from .handlers import Handler, NotHandled, is_later, run_all
from .verifiers import BadSignature

logger = logging.getLogger("idempotency")

#: What Django answers with a 4xx and hardly logs, as the visitor's mistake. A handler's is our own.
_NO_FAULTS = (Http404, PermissionDenied, BadRequest, SuspiciousOperation)


class WebhookView(View):
    """Answers a sender that repeats itself: each delivery's handlers take effect once.

    Set `source` and `verify` (a verifier of this package, or any callable(body, headers) that raises
    BadSignature or returns something else than None or True), and register handlers with
    `@MyView.handles("order.*")`. A duplicate gets the success answer at once; a delivery whose
    handlers are running gets 409 with Retry-After; a failed handler makes it 500, and the redelivery
    runs only the handlers that have not succeeded. Requests that cannot be verified are answered 401
    and leave nothing behind.
    """

    #: Who sends; with `endpoint` it scopes the delivery ids.
    source: str = ""
    endpoint: str = ""
    verify: Callable[[bytes, Mapping[str, str]], object] | None = None
    #: "header:NAME", "json:FIELD.FIELD", "form:FIELD", "body" (digest of the bytes), or a
    #: callable(delivery). None: what the verifier knows of its sender.
    delivery_id: str | Callable[[Delivery], str] | None = None
    #: "header:NAME", "json:FIELD" or "form:FIELD": what the patterns of `handles` are matched with.
    #: None: what the verifier knows, else "json:type".
    event_type: str | None = None
    #: True: store the delivery durably, acknowledge, let the outbox relay run the handlers.
    acknowledge_first: bool = False
    #: Headers that handlers need of a delivery that was acknowledged first. All others are forgotten.
    keep_headers: Collection[str] = ("Content-Type",)
    #: Retention (default: 7 days), `using`, and `exclude_fields`: parts of a JSON body that the sender
    #: changes between attempts.
    policy: Policy = Policy()
    #: The sender's longest retry schedule in seconds, which the retention is checked against.
    retry_horizon: float | None = 75 * 3600 + 35 * 60 + 5
    max_bytes: int = 1024 * 1024
    success_status: int = 200
    success_body: str = ""
    success_content_type: str = "text/plain"

    http_method_names: Sequence[str] = ("post", "options")
    _handlers: ClassVar[list[Handler]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._handlers = []
        for name, arguments in (("verify", 2), ("delivery_id", 1)):
            function = vars(cls).get(name)
            # A plain function, as any other callable, is called without the view.
            if inspect.isfunction(function) and _required(function) == arguments:
                setattr(cls, name, staticmethod(function))

    @classmethod
    def handlers(cls) -> list[Handler]:
        """The handlers of this view and of those it inherits from."""
        return [
            handler
            for base in reversed(cls.__mro__)
            if issubclass(base, WebhookView)
            for handler in base._handlers
        ]

    @classmethod
    def handles(cls, *patterns: str, name: str = "") -> Callable[[Any], Any]:
        """Register a handler for event types that match one of the patterns ("payment.*"; none: all).

        It is called with the Delivery, and fails by raising or by returning False. Each handler is an
        operation of its own, identified for ever by `name` (default: its dotted name): name it before
        you move or rename the function. Raises ConfigurationError when the name is taken.
        """

        def register(function: Callable[[Delivery], Any]) -> Callable[[Delivery], Any]:
            unique = name or f"{function.__module__}.{function.__qualname__}"
            if inspect.iscoroutinefunction(function):
                raise ConfigurationError(
                    f"{unique} is async: it would never run; use async_to_sync"
                )
            if any(known.name == unique for known in cls.handlers()):
                raise ConfigurationError(f"{cls.__name__} has a handler {unique} already")
            cls._handlers.append(Handler(unique, patterns or ("*",), function))
            return function

        return register

    @classonlymethod
    def as_view(cls, **initkwargs: Any) -> Any:  # noqa: N805 (Django's own class-only method)
        if "policy" in initkwargs:
            raise ConfigurationError(
                f"set {cls.__name__}.policy on the class: the relay, which has no URLs, reads it too"
            )
        policy = cls.get_policy()
        view: Any = super().as_view(**initkwargs)
        # Each handler commits on its own, and a failure must not undo the others.
        view = csrf_exempt(transaction.non_atomic_requests(using=policy.using)(view))
        view.idempotency_policy = policy
        return view

    @classmethod
    def get_policy(cls) -> Policy:
        """The policy with the defaults of webhooks, which are not those of other requests."""
        policy = cls.policy
        if policy.stepwise:
            raise ConfigurationError("a webhook handler is one transaction; it cannot be stepwise")
        return replace(
            policy,
            methods={"POST"},
            stepwise=False,
            retention=policy.retention or inbox.RETENTION,
            wait=policy.wait or timedelta(0),
            using=policy.using or conf.USING,
        )

    # Hooks. The relay calls them with a stored delivery, on a view without a request.

    def get_endpoint(self) -> str:
        """`endpoint`; override it when one view serves several accounts (`self.kwargs["account"]`)."""
        return self.endpoint

    def get_delivery_id(self, delivery: Delivery) -> str:
        """The sender's id of the delivery, whose own `id` is still empty.

        Raises InvalidKey or ValueError when there is none.
        """
        where = self.known("delivery_id")
        if where is None:
            raise ConfigurationError(f"{type(self).__name__} needs a delivery_id")
        if where == "body":
            return inbox.digest(delivery.body)
        found = where(delivery) if callable(where) else look_up(where, delivery)
        return "" if found is None else str(found)

    def get_event_type(self, delivery: Delivery) -> str:
        """What the patterns of `handles` are matched with. Raises ValueError for an unreadable body."""
        return look_up(self.known("event_type") or "json:type", delivery) or ""

    def get_fingerprint(self, delivery: Delivery) -> bytes | None:
        """What has to be the same when the id comes again, else it is refused. None: anything goes."""
        varying = frozenset(self.known("varying_fields") or ()) | frozenset(
            self.policy.exclude_fields or ()
        )
        canonical = fingerprints.canonical_json(delivery.body, varying) if varying else None
        return delivery.body if canonical is None else canonical

    def serialize_on(self, delivery: Delivery) -> str:
        """What the event is about, if its handlers must not run beside those of the same object.

        Such as f"order:{delivery.payload['order']}". The default "" lets all run side by side.
        """
        return ""

    def split(self, delivery: Delivery) -> Iterable[Delivery]:
        """The events of a batch, each with an id of its own (see Delivery.part). Default: one event."""
        return [delivery]

    def get_success_response(self, delivery: Delivery) -> HttpResponseBase:
        """What the sender wants to see, the first time and for every duplicate."""
        return HttpResponse(
            self.success_body, status=self.success_status, content_type=self.success_content_type
        )

    def known(self, name: str) -> Any:
        """The view's own setting, else what its verifier knows of the sender."""
        own = getattr(self, name, None)
        return getattr(self.verify, name, None) if own is None else own

    # The request.

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        try:
            delivery, events = self.read(request)
        except BadSignature as error:
            logger.warning("webhook from %s refused: %s", self.source, error)
            return _answer(401, "The signature is not valid.")
        except RequestDataTooBig:
            logger.warning("webhook from %s refused: more than max_bytes", self.source)
            return _answer(413, "The delivery is too large.")
        except RawPostDataException:
            logger.error(
                "webhook from %s refused: a middleware has read request.POST or the stream before the "
                "view, so that the signed bytes are gone; make it leave this URL alone",
                self.source,
            )
            return _answer(400, "The body could not be read.")
        except (UnreadablePostError, ValueError, LookupError, TypeError, AttributeError) as error:
            # Whatever a hook that reads strange headers or JSON raises is an answer, not a fault.
            unexpected = None if isinstance(error, InvalidKey | UnreadablePostError) else error
            logger.warning(
                "webhook from %s refused: it is incomplete or has no usable id",
                self.source,
                exc_info=unexpected,
            )
            return _answer(400, "The delivery is incomplete or has no usable id.")
        try:
            if self.acknowledge_first:
                stored.keep(self, events)
            else:
                run_all(self, events)
        except NotBegun as refused:
            return self._refuse(refused.refusal)
        except NotYet:
            logger.info("webhook from %s: not yet", self.source)
            return _answer(409, "Not yet: deliver again.", again=True)
        except Refusal as refusal:
            if not is_later(refusal):
                raise
            return _answer(refusal.status, str(refusal.title), again=True)
        except _NO_FAULTS as error:
            raise NotHandled(f"a handler raised {type(error).__name__}") from error
        return self.get_success_response(delivery)

    def read(self, request: HttpRequest) -> tuple[Delivery, list[Delivery]]:
        """The verified delivery, and its events with their ids and types."""
        if not self.source or self.verify is None:
            raise ConfigurationError(f"{type(self).__name__} needs a source and a verifier")
        body = read_body(request, self.max_bytes)
        # An "" from `header and compare(...)`, or a coroutine, is no confirmation either.
        if self.verify(body, request.headers) not in (None, True):
            raise BadSignature("the verifier returned something else than None or True")
        delivery = Delivery(
            source=self.source,
            endpoint=self.get_endpoint(),
            id="",
            body=body,
            headers=request.headers,
        )
        delivery = replace(delivery, id=self.get_delivery_id(delivery))
        return delivery, [self._identified(event) for event in self.split(delivery)]

    def _identified(self, event: Delivery) -> Delivery:
        event.id.encode()  # a lone surrogate from JSON is a ValueError
        if not event.id.strip():
            raise InvalidKey("the delivery has no id")
        try:
            return replace(event, event_type=self.get_event_type(event))
        except ValueError:
            if any(handler.patterns != ("*",) for handler in self.handlers()):
                raise  # nobody can tell whose it is: better told to the sender than lost
            return event

    def takers(self, delivery: Delivery) -> list[Handler]:
        """The handlers that take the delivery."""
        return [handler for handler in self.handlers() if handler.takes(delivery.event_type)]

    def _refuse(self, refusal: Refusal) -> HttpResponse:
        if isinstance(refusal, Mismatch):
            logger.error(
                "webhook from %s refused: the id of a delivery came again with another body. If the "
                "sender changes fields between attempts, name them in Policy.exclude_fields; if it "
                "reuses ids, choose another delivery_id",
                self.source,
            )
            return _answer(422, "Another body had this delivery id.")
        return _answer(refusal.status, str(refusal.title), again=is_later(refusal))


def _answer(status: int, text: str, *, again: bool = False) -> HttpResponse:
    response = HttpResponse(text, status=status, content_type="text/plain")
    if again:
        response["Retry-After"] = str(conf.RETRY_AFTER)
    return response


def _required(function: Any) -> int:
    parameters = inspect.signature(function).parameters.values()
    return sum(parameter.default is parameter.empty for parameter in parameters)
