"""`WebhookView`: what senders are answered, and what happens once for all they send."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.handlers.wsgi import WSGIRequest
from django.db import DatabaseError, IntegrityError, OperationalError, connection, transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.http.request import UnreadablePostError
from django.test import Client, RequestFactory
from django.urls import path
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from idempotency import engine, inbox, outbox, outbox_handlers
from idempotency.exceptions import (
    ConfigurationError,
    InProgress,
    KeyTooOld,
    Mismatch,
    OutcomeUnknown,
    Unavailable,
)
from idempotency.models import MessageStatus, Operation, OutboxMessage, Status
from idempotency.policies import Policy
from idempotency.webhooks import (
    Delivery,
    HmacVerifier,
    NotYet,
    StandardWebhooksVerifier,
    StripeVerifier,
    WebhookView,
    github,
    shopify,
)
from tests.app.models import Effect
from tests.callers import age, effects
from tests.outboxes import make_due
from tests.senders import KEY, Hook, deliver, event, signed

pytestmark = pytest.mark.django_db(transaction=True)


class Failed(Exception):
    """What a handler raises."""


def hook(**attributes: Any) -> type[WebhookView]:
    """A view of this test's own."""
    return type("TestHook", (Hook,), attributes)


def effect(
    view: type[WebhookView],
    label: str,
    *patterns: str,
    fault: Callable[[], Any] = lambda: None,
    using: str = "default",
) -> None:
    """Register a handler that leaves one effect and then meets its fault."""

    @view.handles(*patterns, name=label)
    def handle(delivery: Delivery) -> Any:
        Effect.objects.using(using).create(label=label, amount=delivery.attempt)
        return fault()


class Faults:
    """Raises the next of these errors, then nothing any more."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


def one_effect(**attributes: Any) -> type[WebhookView]:
    view = hook(**attributes)
    effect(view, "seen")
    return view


def nothing_is_kept() -> bool:
    return not (
        Operation.objects.exists() or OutboxMessage.objects.exists() or Effect.objects.exists()
    )


# Once --------------------------------------------------------------------------------------------


def test_a_duplicate_gets_the_success_answer_and_nothing_runs() -> None:
    """BUGS P07, RULES 114."""
    view = one_effect(success_body="[accepted]", success_status=202)
    for _ in range(3):
        response = deliver(view)
        assert (response.status_code, response.content) == (202, b"[accepted]")
        assert response["Content-Type"] == "text/plain"
    assert effects("seen") == 1


def test_every_attempt_has_a_new_timestamp_and_is_the_same_delivery() -> None:
    """RULES 112."""
    view = one_effect()
    now = time.time()
    for late in (0, 60, 120):
        headers = signed(event(), "m1", at=now + late)
        assert deliver(view, headers=headers).status_code == 200
    assert effects("seen") == 1


def test_a_failed_handler_is_a_500_and_the_redelivery_runs_it_again() -> None:
    """BUGS P04: an error never marks the delivery as processed."""
    view = hook()
    effect(view, "seen", fault=Faults(Failed()))
    assert deliver(view).status_code == 500
    assert effects("seen") == 0
    assert Operation.objects.get().status == Status.PROCESSING
    assert deliver(view).status_code == 200
    assert (effects("seen"), Effect.objects.get().amount) == (1, 2)  # attempt 2
    assert deliver(view).status_code == 200
    assert effects("seen") == 1


def test_a_handler_that_returns_false_has_failed() -> None:
    """BUGS P14."""
    view = hook()
    answers = [False, None]
    effect(view, "seen", fault=lambda: answers.pop(0))
    assert deliver(view).status_code == 500
    assert effects("seen") == 0
    assert deliver(view).status_code == 200
    assert effects("seen") == 1


def test_a_handler_that_swallows_a_database_error_has_not_handled_anything() -> None:
    """BUGS P14: logged, and yet marked as done."""
    view = hook()
    broken = [True]

    def swallow() -> None:
        if broken.pop() if broken else False:
            try:
                with transaction.atomic(savepoint=False):
                    raise DatabaseError
            except DatabaseError:
                logging.getLogger(__name__).debug("swallowed")

    effect(view, "seen", fault=swallow)
    assert deliver(view).status_code == 500
    assert effects("seen") == 0
    assert deliver(view).status_code == 200
    assert effects("seen") == 1


def test_a_retry_after_its_own_integrity_error_has_a_fresh_transaction() -> None:
    """BUGS P18."""
    view = hook()
    taken = Effect.objects.create(label="taken")

    def clash() -> None:
        if Effect.objects.filter(label="taken").exists():
            Effect.objects.create(pk=taken.pk, label="again")

    effect(view, "seen", fault=clash)
    assert deliver(view).status_code == 500
    assert effects("seen") == 0
    taken.delete()
    assert deliver(view).status_code == 200
    assert effects("seen") == 1


def test_each_handler_is_its_own_effect() -> None:
    """A later failure neither repeats nor loses an earlier one, nor stops those after it."""
    view = hook()
    effect(view, "first")
    effect(view, "second", fault=Faults(Failed("second"), Failed("second")))
    effect(view, "third")
    for answer, second in ((500, 0), (500, 0), (200, 1), (200, 1)):
        assert deliver(view).status_code == answer
        assert (effects("first"), effects("second"), effects("third")) == (1, second, 1)


def test_the_failure_people_must_see_is_raised_and_the_others_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    view = hook()
    effect(view, "early", fault=Faults(NotYet()))
    effect(view, "first", fault=Faults(Failed("one")))
    effect(view, "second", fault=Faults(ValueError("two")))
    request = RequestFactory().post(
        "/", event(), content_type="application/json", headers=signed(event(), "m1")
    )
    with pytest.raises(Failed):
        view.as_view()(request)
    logged = [
        record.exc_info[0]
        for record in caplog.records
        if record.name == "idempotency" and record.exc_info
    ]
    assert logged == [ValueError]  # Django logs what is raised


def test_handlers_get_the_event_types_they_ask_for() -> None:
    view = hook()
    effect(view, "paid", "payment.paid", "payment.settled")
    effect(view, "payment", "payment.*")
    effect(view, "all")
    for number, name in enumerate(
        ("payment.paid", "payment.settled", "order.paid", "PAYMENT.paid")
    ):
        assert deliver(view, str(number), event(name)).status_code == 200
    assert (effects("paid"), effects("payment"), effects("all")) == (2, 2, 4)


@pytest.mark.parametrize("acknowledge_first", [False, True])
def test_an_event_that_nobody_handles_is_a_success(acknowledge_first: bool) -> None:
    view = hook(acknowledge_first=acknowledge_first)
    effect(view, "seen", "payment.*")
    for body in (event("order.paid"), b"{}", b'{"type": 7}', b'{"type": ["payment.x"]}', b"[]"):
        assert deliver(view, body=body).status_code == 200
    assert nothing_is_kept()


def test_handlers_are_inherited_and_named_once() -> None:
    parent = one_effect()
    child = type("Child", (parent,), {})
    effect(child, "child")
    assert [handler.name for handler in child.handlers()] == ["seen", "child"]
    assert [handler.name for handler in parent.handlers()] == ["seen"]
    with pytest.raises(ConfigurationError, match="has a handler seen already"):
        effect(child, "seen")
    effect(parent, "late")
    assert [handler.name for handler in child.handlers()] == ["seen", "late", "child"]


def test_an_async_handler_is_refused_and_not_acknowledged_without_running() -> None:
    view = hook()

    async def handle(delivery: Delivery) -> None: ...

    with pytest.raises(ConfigurationError, match="is async"):
        view.handles()(handle)
    assert view.handlers() == []


def test_a_handlers_default_name_is_its_dotted_name() -> None:
    view = hook()

    @view.handles()
    def handle(delivery: Delivery) -> None: ...

    assert [handler.name for handler in view.handlers()] == [f"{__name__}.{handle.__qualname__}"]


def test_handlers_get_the_headers_the_bytes_and_the_attempt() -> None:
    """BUGS P11."""
    view = hook()
    got: list[Delivery] = []

    @view.handles()
    def handle(delivery: Delivery) -> None:
        got.append(delivery)
        if len(got) < 3:
            raise Failed

    body = event("paid", amount=5)
    for _ in range(3):
        deliver(view, "m7", body, headers=signed(body, "m7") | {"X-Other": "x"})
    first, _, last = got
    assert (first.attempt, last.attempt) == (1, 3)
    assert (last.source, last.id, last.event_type, last.body) == ("acme", "m7", "paid", body)
    assert (last.headers["x-other"], last.payload["amount"]) == ("x", 5)
    assert first == last


def test_what_a_handler_does_to_the_payload_is_not_seen_by_the_next() -> None:
    view = hook()
    got: list[Any] = []

    def handle(delivery: Delivery) -> None:
        got.append(delivery.payload.pop("amount"))

    view.handles(name="a")(handle)
    view.handles(name="b")(handle)
    assert deliver(view, body=event(amount=5)).status_code == 200
    assert got == [5, 5]


def test_handlers_run_inside_the_operation() -> None:
    view = hook()
    current: list[Any] = []
    view.handles(name="h")(lambda delivery: current.append(engine.current()))
    deliver(view)
    assert current == [Operation.objects.get()]


# Later -------------------------------------------------------------------------------------------


def test_an_event_that_comes_too_early_is_delivered_again() -> None:
    """BUGS P12: not a failure, for nobody is to be alarmed."""
    view = hook()
    effect(view, "seen", fault=Faults(NotYet()))
    response = deliver(view)
    assert (response.status_code, response["Retry-After"]) == (409, "1")
    assert effects("seen") == 0
    assert deliver(view).status_code == 200
    assert effects("seen") == 1


def test_not_yet_is_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    view = hook()
    effect(view, "seen", fault=Faults(NotYet()))
    with caplog.at_level(logging.INFO):
        deliver(view)
    levels = {record.levelno for record in caplog.records if record.name == "idempotency"}
    assert levels == {logging.INFO}


@pytest.mark.parametrize(
    ("refusal", "status", "comes_back"),
    [
        (InProgress, 409, True),
        (OutcomeUnknown, 409, True),
        (Unavailable, 503, True),
        (KeyTooOld, 400, False),
    ],
)
def test_a_delivery_that_cannot_begin_is_answered_and_not_a_fault(
    monkeypatch: pytest.MonkeyPatch, refusal: Any, status: int, comes_back: bool
) -> None:
    view = one_effect()

    def refuse(intent: engine.Intent) -> Any:
        raise refusal

    monkeypatch.setattr(engine, "begin", refuse)
    response = deliver(view)
    assert response.status_code == status
    assert ("Retry-After" in response) is comes_back
    assert effects("seen") == 0


@pytest.mark.parametrize(
    "error", [Http404(), PermissionDenied(), BadRequest(), SuspiciousOperation()]
)
def test_what_django_blames_on_visitors_is_a_failure_in_a_handler(error: Exception) -> None:
    """`get_object_or_404` in a handler: a 404 would tell the sender, and the log, that the URL is wrong."""
    view = hook()
    effect(view, "seen", fault=Faults(error))
    assert deliver(view).status_code == 500
    assert effects("seen") == 0
    assert deliver(view).status_code == 200


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(InProgress, 409), (Unavailable, 503), (Mismatch, 500), (KeyTooOld, 500)],
)
def test_a_refusal_that_a_handler_met_is_its_own(refusal: Any, status: int) -> None:
    """The payment that the handler settles is being settled: come back. A mismatch there is a failure."""
    view = hook()
    effect(view, "seen", fault=Faults(refusal()))
    response = deliver(view)
    assert response.status_code == status
    assert ("Retry-After" in response) is (status != 500)
    assert effects("seen") == 0
    assert deliver(view).status_code == 200


def test_a_deadlock_in_a_handler_is_unavailable() -> None:
    view = hook()
    message = "database is locked" if connection.vendor == "sqlite" else "deadlock"
    error = OperationalError(1213, message) if connection.vendor == "mysql" else None
    if error is None:
        error = OperationalError(message)
        error.__cause__ = _cause(connection.vendor)
    effect(view, "seen", fault=Faults(error))
    response = deliver(view)
    assert response.status_code == 503
    assert response["Retry-After"]
    assert deliver(view).status_code == 200


def _cause(vendor: str) -> Exception:
    if vendor == "postgresql":
        from psycopg import errors

        return errors.DeadlockDetected()
    import sqlite3

    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error


# Who sends ---------------------------------------------------------------------------------------


def unverified() -> Iterable[dict[str, str]]:
    good = signed(event(), "m1")
    yield {}
    yield signed(event(), "m1", key=b"another key")
    yield signed(event("refunded"), "m1")
    yield signed(event(), "m1", at=time.time() - 400)
    yield signed(event(), "m1", at=time.time() + 400)
    for name in good:
        yield {key: value for key, value in good.items() if key != name}
        yield good | {name: ""}
        yield good | {name: "gärbage"}
        yield good | {name: good[name] + "x"}


@pytest.mark.parametrize("acknowledge_first", [False, True])
def test_an_unverified_post_leaves_nothing_behind(acknowledge_first: bool) -> None:
    """BUGS Q05, Q11, RULES 113: nothing is reserved, so the real delivery is handled."""
    view = First if acknowledge_first else First.as_view(acknowledge_first=False)
    for headers in unverified():
        assert deliver(view, headers=headers).status_code == 401, headers
    assert nothing_is_kept()
    assert deliver(view).status_code == 202
    outbox.relay()
    assert effects("m1") == 1


def test_an_old_signature_is_refused_and_a_tolerated_one_still_is_one_delivery() -> None:
    """BUGS Q05: captured requests cannot be sent for ever, whatever the tolerance."""
    captured = signed(event(), "m1", at=time.time() - 3600)
    assert deliver(one_effect(), headers=captured).status_code == 401
    patient = one_effect(verify=StandardWebhooksVerifier(KEY, tolerance=None))
    for _ in range(3):
        assert deliver(patient, headers=captured).status_code == 200
    assert effects("seen") == 1


def test_two_secrets_are_active_while_they_are_rotated() -> None:
    """BUGS Q08."""
    view = one_effect(verify=StandardWebhooksVerifier([b"new", KEY]))
    assert deliver(view, "m1").status_code == 200
    assert deliver(view, "m2", headers=signed(event(), "m2", key=b"new")).status_code == 200
    assert deliver(view, "m3", headers=signed(event(), "m3", key=b"old")).status_code == 401


def test_nothing_secret_is_logged_or_kept(caplog: pytest.LogCaptureFixture) -> None:
    view = hook(acknowledge_first=True)
    effect(view, "seen")
    effect(view, "bad", fault=Faults(Failed()))
    body = event("paid", card="4242-4242")
    good = signed(body, "m-secret-id") | {"Authorization": "Bearer hidden", "Cookie": "hidden"}
    with caplog.at_level(logging.DEBUG, "idempotency"):
        deliver(view, body=body, headers=good | {"webhook-signature": "v1,hidden"})
        deliver(view, body=body, headers=good)
        deliver(view, body=body + b" ", headers=signed(body + b" ", "m-secret-id"))
        deliver(hook(), body=b"not json 4242", headers=signed(b"not json 4242", " "))
    written = caplog.text + "".join(
        str(row) for row in (*OutboxMessage.objects.values(), *Operation.objects.values("headers"))
    )
    for secret in ("hidden", good["webhook-signature"], "4242-4242", "Bearer", "signature'"):
        assert secret not in written
    for secret in ("m-secret-id", KEY.decode()):
        assert secret not in caplog.text


def test_a_verifier_may_be_any_callable_or_a_method() -> None:
    def verify(body: bytes, headers: Any, wanted: str = "right") -> None:
        if headers["X-Token"] != wanted:
            raise ValueError

    class Method(Hook):
        delivery_id = "header:webhook-id"

        def verify(self, body: bytes, headers: Any) -> None:  # type: ignore[override]
            assert self.request.headers is headers
            verify(body, headers)

    place = {"delivery_id": "header:webhook-id"}
    for view in (hook(verify=verify, **place), Method, Hook.as_view(verify=verify, **place)):
        headers = {"X-Token": "right", "webhook-id": "m"}
        assert deliver(view, headers=headers).status_code == 200
        assert deliver(view, headers=headers | {"X-Token": "wrong"}).status_code == 400
        assert deliver(view, headers={}).status_code == 400  # a KeyError in the verifier


async def not_awaited(body: bytes, headers: Any) -> bool:
    return False


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize(
    "verify",
    [
        lambda body, headers: False,
        lambda body, headers: headers.get("X-Sig", "") and hmac.compare_digest("a", "b"),
        lambda body, headers: 0,
        not_awaited,
    ],
)
def test_a_verifier_that_returns_anything_but_none_or_true_has_refused(verify: Any) -> None:
    """As a callable that only compares would: ignoring its answer would let everybody in."""
    assert deliver(one_effect(verify=verify, delivery_id="body")).status_code == 401
    assert nothing_is_kept()
    view = one_effect(verify=lambda body, headers: True, delivery_id="body")
    assert deliver(view).status_code == 200


def test_a_view_without_source_or_verifier_says_so() -> None:
    for attributes in ({"source": ""}, {"verify": None}):
        request = RequestFactory().post("/", event(), content_type="application/json")
        with pytest.raises(ConfigurationError, match="source and a verifier"):
            hook(**attributes).as_view()(request)


# Senders -----------------------------------------------------------------------------------------


def stripe(body: bytes, at: float | None = None) -> dict[str, str]:
    timestamp = int(time.time() if at is None else at)
    digest = hmac.new(b"s", f"{timestamp}.".encode() + body, hashlib.sha256).hexdigest()
    return {"Stripe-Signature": f"t={timestamp},v1={digest}"}


def test_stripe_needs_a_verifier_only() -> None:
    """Also when its body is not the same on every attempt: it counts the endpoints that wait."""
    view = hook(verify=StripeVerifier("s"), source="stripe")
    effect(view, "seen", "invoice.*", fault=Faults(Failed()))
    for waiting, status in ((2, 500), (1, 200), (1, 200), (0, 200)):
        body = event("invoice.paid", id="evt_1", pending_webhooks=waiting)
        assert deliver(view, body=body, headers=stripe(body)).status_code == status
    assert effects("seen") == 1
    body = event("invoice.paid", id="evt_1", pending_webhooks=0, amount=1)
    assert deliver(view, body=body, headers=stripe(body)).status_code == 422


def test_github_needs_a_verifier_only() -> None:
    view = hook(verify=github("s"), source="github")
    effect(view, "seen", "push")
    body = b'{"ref": "main"}'
    signature = "sha256=" + hmac.new(b"s", body, hashlib.sha256).hexdigest()
    for delivery in ("guid-1", "guid-1", "guid-2"):
        headers = {
            "x-hub-signature-256": signature,
            "x-github-delivery": delivery,
            "x-github-event": "push",
        }
        assert deliver(view, body=body, headers=headers).status_code == 200
        assert (
            deliver(view, body=body, headers=headers | {"x-github-event": "star"}).status_code
            == 200
        )
    assert effects("seen") == 2


def test_shopify_needs_a_verifier_only() -> None:
    view = hook(verify=shopify("s"), source="shopify")
    effect(view, "seen", "orders/*")
    body = b'{"id": 1}'
    digest = base64.b64encode(hmac.new(b"s", body, hashlib.sha256).digest()).decode()
    headers = {
        "X-Shopify-Hmac-Sha256": digest,
        "X-Shopify-Event-Id": "e1",
        "X-Shopify-Topic": "orders/create",
    }
    for _ in range(2):
        assert deliver(view, body=body, headers=headers).status_code == 200
    assert effects("seen") == 1
    del headers["X-Shopify-Event-Id"]
    assert deliver(view, body=body, headers=headers).status_code == 400


def test_one_event_of_shopify_may_come_under_several_topics() -> None:
    view = hook(verify=shopify("s"), source="shopify")
    effect(view, "seen", "orders/*")
    for topic in ("orders/create", "orders/paid", "orders/create"):
        body = json.dumps({"id": 1, "told_as": topic}).encode()
        digest = base64.b64encode(hmac.new(b"s", body, hashlib.sha256).digest()).decode()
        headers = {
            "X-Shopify-Hmac-Sha256": digest,
            "X-Shopify-Event-Id": "e1",
            "X-Shopify-Topic": topic,
        }
        assert deliver(view, body=body, headers=headers).status_code == 200
    assert effects("seen") == 2


def token(body: bytes) -> dict[str, str]:
    """Headers of a sender that signs the body alone, and sends no id."""
    return {"X-Sig": hmac.new(b"s", body, hashlib.sha256).hexdigest()}


GENERIC = HmacVerifier("s", header="X-Sig")


@pytest.mark.parametrize(
    ("delivery_id", "bodies"),
    [
        ("json:id", [b'{"id": "a"}', b'{"id": "b"}']),
        ("json:id", [b'{"id": 1}', b'{"id": 2}']),
        (
            "json:meta.event.id",
            [b'{"meta": {"event": {"id": "a"}}}', b'{"meta":{"event":{"id":"b"}}}'],
        ),
        ("form:id", [b"id=a&x=1", b"x=1&id=b"]),
        ("body", [b"anything", b"anything else"]),
        (
            lambda delivery: delivery.payload["a"] + delivery.payload["b"],
            [b'{"a":"1","b":"2"}', b'{"a":"1","b":"3"}'],
        ),
        (lambda delivery: delivery.payload["n"], [b'{"n": 1}', b'{"n": 2}']),
    ],
)
def test_the_id_is_found_where_the_sender_puts_it(delivery_id: Any, bodies: list[bytes]) -> None:
    """BUGS P09, Q09: header, body field, digest or a callable, and always the same for the same bytes."""
    view = one_effect(verify=GENERIC, delivery_id=delivery_id)
    for body in bodies * 2:
        assert deliver(view, body=body, headers=token(body)).status_code == 200
    assert effects("seen") == 2


@pytest.mark.parametrize(
    ("delivery_id", "body"),
    [
        ("json:id", b'{"id": ""}'),
        ("json:id", b'{"id": "  "}'),
        ("json:id", b'{"id": null}'),
        ("json:id", b'{"id": true}'),
        ("json:id", b'{"id": 1.5}'),
        ("json:id", b'{"id": ["a"]}'),
        ("json:id", b'{"id": "\\ud800"}'),
        ("json:id.x", b'{"id": "a"}'),
        ("json:id", b'"id"'),
        ("json:id", b"{"),
        ("json:id", b"\xff"),
        ("json:id", b'{"id": ' + b"9" * 5000 + b"}"),
        ("json:id", b'{"id":' + b"[" * 200_000),
        ("header:X-Id", b"{}"),
        ("form:id", b"i=1"),
        ("form:id", b"\xff"),
        (lambda delivery: delivery.payload["id"], b"{}"),
        (lambda delivery: delivery.payload["id"], b"[]"),
        (lambda delivery: None, b"{}"),
    ],
)
def test_a_delivery_without_a_usable_id_is_refused(delivery_id: Any, body: bytes) -> None:
    """BUGS Q09: no id is made up; what cannot be recognised again is the sender's to correct."""
    view = one_effect(verify=GENERIC, delivery_id=delivery_id)
    assert deliver(view, body=body, headers=token(body)).status_code == 400
    assert nothing_is_kept()


@pytest.mark.parametrize("where", ["id", "cookie:id", "header:", "json:", ""])
def test_a_place_that_does_not_exist_is_a_configuration_error(where: str) -> None:
    request = RequestFactory().post("/", b"{}", content_type="text/plain", headers=token(b"{}"))
    view = hook(verify=GENERIC, delivery_id=where)
    with pytest.raises(ConfigurationError):
        view.as_view()(request)
    with pytest.raises(ConfigurationError, match="needs a delivery_id"):
        hook(verify=GENERIC).as_view()(request)


def test_ids_are_the_senders_own_per_source_and_endpoint() -> None:
    """RULES 113. A colon in a name does not make two endpoints one."""
    long = "é|" * 100
    places = [("a", "b:c"), ("a:b", "c"), ("a", ""), ("b", ""), ("a", long), ("a", long + "x")]
    places += [("a", "x" * 235), ("a", "x" * 234 + "y")]  # a key of 250 characters, a scope of 256
    for source, endpoint in places * 2:
        view = one_effect(source=source, endpoint=endpoint)
        assert deliver(view).status_code == 200
    assert effects("seen") == len(places)


@pytest.mark.parametrize("acknowledge_first", [False, True])
def test_one_view_can_serve_many_endpoints(acknowledge_first: bool) -> None:
    view = Accounts.as_view(acknowledge_first=acknowledge_first)
    for account in ("one", "two", "one"):
        assert deliver(view, account=account).status_code == 200
        outbox.relay()
    assert effects("one") == effects("two") == 1


class Accounts(Hook):
    """Scoped by what the URL says, with a secret for each."""

    delivery_id = "header:webhook-id"

    def verify(self, body: bytes, headers: Any) -> None:  # type: ignore[override]
        assert self.kwargs["account"] in ("one", "two")
        StandardWebhooksVerifier(KEY)(body, headers)

    def get_endpoint(self) -> str:
        return str(self.kwargs["account"])


@Accounts.handles()
def of_account(delivery: Delivery) -> None:
    Effect.objects.create(label=delivery.endpoint)


def test_the_same_id_with_another_body_is_refused_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    view = one_effect()
    assert deliver(view, body=event(amount=1)).status_code == 200
    assert deliver(view, body=event(amount=2)).status_code == 422
    assert "exclude_fields" in caplog.text
    assert effects("seen") == 1


def test_a_sender_may_change_fields_between_attempts() -> None:
    view = one_effect(policy=Policy(exclude_fields=["sent_at", "meta.try"]))
    for attempt in (1, 2):
        body = event(sent_at=attempt, meta={"try": attempt, "x": 1}, amount=1)
        assert deliver(view, body=body).status_code == 200
    assert effects("seen") == 1
    assert deliver(view, body=event(amount=2)).status_code == 422


def test_the_comparison_of_bodies_can_be_left_out() -> None:
    view = one_effect(get_fingerprint=lambda self, delivery: None)
    for amount in (1, 2):
        assert deliver(view, body=event(amount=amount)).status_code == 200
    assert effects("seen") == 1


# Bodies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b'{ "type":"paid", "a" : 1.0,"b":\t1, "c": "\\u00e9" }\r\n'),
        ("application/x-www-form-urlencoded", b"type=paid&a=1+2&b=%C3%A9"),
        ("text/plain; charset=latin-1", "Grüße".encode("latin-1")),
        ("application/octet-stream", b"\xff\xfe\x00"),
        ("application/json; charset=utf-16", "{}".encode("utf-16")),
        ("multipart/form-data; boundary=x", b"--x\r\ngarbage"),
        ("", b""),
    ],
)
def test_the_exact_bytes_are_verified_whatever_they_are(content_type: str, body: bytes) -> None:
    """BUGS Q01, Q07, Q10."""
    view = hook()
    got: list[bytes] = []
    view.handles(name="h")(lambda delivery: got.append(delivery.body))
    response = deliver(view, body=body, content_type=content_type)
    assert response.status_code == 200
    assert got == [body]
    forged = deliver(view, body=body + b" ", headers=signed(body, "m2"), content_type=content_type)
    assert forged.status_code == 401


def test_a_signed_form_has_its_type_and_fields() -> None:
    """BUGS Q10."""
    view = hook(event_type="form:event")
    got: list[Any] = []
    view.handles("sms.é*", name="h")(lambda delivery: got.append(delivery.form["text"]))
    body = b"event=sms.%C3%A9in&text=%C3%A9+%26"
    assert deliver(view, body=body, content_type=FORM).status_code == 200
    assert got == ["é &"]


FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n'


def after(reads: Callable[[HttpRequest], Any], view: type[WebhookView]) -> Any:
    """The view behind a middleware."""
    callback = view.as_view()

    def middleware(request: HttpRequest, **kwargs: Any) -> Any:
        reads(request)
        return callback(request, **kwargs)

    return middleware


@pytest.mark.parametrize(
    ("reads", "content_type", "body"),
    [
        (lambda request: request.POST, FORM, b"a=1"),
        (lambda request: request.POST, "application/json", event()),
        (lambda request: request.body, "application/json", event()),
        (lambda request: request.body and request.POST, MULTIPART, PART),
        (lambda request: request.body and request.read(), "application/json", event()),
    ],
    ids=["form", "JSON", "body", "multipart after body", "read after body"],
)
def test_a_middleware_may_have_read_the_request_before(
    reads: Any, content_type: str, body: bytes
) -> None:
    """BUGS Q02."""
    view = one_effect()
    assert deliver(after(reads, view), body=body, content_type=content_type).status_code == 200
    assert effects("seen") == 1


@pytest.mark.parametrize(
    ("reads", "content_type", "body"),
    [
        (lambda request: request.POST, MULTIPART, PART),
        (lambda request: request.read(), "application/json", event()),
    ],
    ids=["multipart", "stream"],
)
def test_bytes_that_a_middleware_used_up_are_missed_and_not_called_forged(
    reads: Any, content_type: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """BUGS Q02, Q03: the operator is told why, instead of hunting a wrong secret."""
    response = deliver(after(reads, one_effect()), body=body, content_type=content_type)
    assert response.status_code == 400
    assert "a middleware has read" in caplog.text
    assert nothing_is_kept()


def test_whoever_reads_the_request_afterwards_finds_its_body() -> None:
    view = one_effect().as_view()
    seen: list[bytes] = []

    def middleware(request: HttpRequest) -> HttpResponse:
        response = view(request)
        seen.append(request.body)
        return response

    assert deliver(middleware).status_code == 200
    assert seen == [event()]


@pytest.mark.parametrize("read_before", [False, True])
def test_a_body_may_not_be_larger_than_the_limit(read_before: bool) -> None:
    body = event()
    for most, status in ((len(body) - 1, 413), (len(body), 200)):
        view: Any = one_effect(max_bytes=most)
        if read_before:
            view = after(lambda request: request.body, view)
        assert deliver(view, body=body).status_code == status
    assert effects("seen") == 1


def test_a_body_is_not_read_beyond_the_limit_whatever_its_length_says() -> None:
    request = RequestFactory().post(
        "/", b"x" * 100, content_type="text/plain", headers=signed(b"x" * 100, "m1")
    )
    request.META["CONTENT_LENGTH"] = ""
    assert one_effect(max_bytes=10).as_view()(request).status_code == 413
    assert len(request.read()) == 100 - 11
    request = RequestFactory().post("/", b"x", content_type="text/plain")
    request.META["CONTENT_LENGTH"] = "many"
    assert one_effect().as_view()(request).status_code == 400
    assert nothing_is_kept()


def test_a_chunked_body_is_read_and_limited_too() -> None:
    """Under WSGI Django takes it for empty, and the sender would be called a forger."""
    request = RequestFactory().post(
        "/", event(), content_type="application/json", headers=signed(event(), "m1")
    )
    for most, status in ((10, 413), (len(event()), 200)):
        environ = request.environ | {
            "CONTENT_LENGTH": "",
            "wsgi.input": BytesIO(event()),
            "wsgi.input_terminated": True,
        }
        view = one_effect(max_bytes=most).as_view()
        assert view(WSGIRequest(environ)).status_code == status
    assert effects("seen") == 1


def test_a_body_that_is_not_made_of_chunks_is_no_fault() -> None:
    """A server may have exceptions of its own for that, which no middleware knows."""

    class Malformed(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise Failed

    environ = RequestFactory().post("/").environ | {
        "CONTENT_LENGTH": "",
        "wsgi.input": Malformed(),
        "wsgi.input_terminated": True,
    }
    assert one_effect().as_view()(WSGIRequest(environ)).status_code == 400
    assert nothing_is_kept()


def test_a_small_upload_limit_of_the_project_is_no_fault(settings: Any) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 5
    assert deliver(one_effect()).status_code == 200
    assert deliver(after(lambda request: request.body, one_effect())).status_code == 400


def test_a_sender_that_hangs_up_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang_up(self: HttpRequest, *args: Any) -> bytes:
        raise UnreadablePostError

    monkeypatch.setattr(HttpRequest, "read", hang_up)
    assert deliver(one_effect()).status_code == 400
    assert nothing_is_kept()


def test_a_truncated_first_delivery_does_not_block_the_complete_one() -> None:
    """BUGS P05: neither cut on the way nor signed as half a document by the sender."""
    view = hook()
    effect(view, "seen", "paid")
    body = event(amount=1)
    assert deliver(view, body=body[:-5], headers=signed(body, "m1")).status_code == 401
    assert deliver(view, body=body[:-5]).status_code == 400
    assert nothing_is_kept()
    assert deliver(view, body=body).status_code == 200
    assert effects("seen") == 1


def test_a_handler_that_cannot_read_the_body_is_not_done() -> None:
    """BUGS P05 for handlers of every type, which take bodies that are no JSON too."""
    view = hook()

    @view.handles(name="seen")
    def handle(delivery: Delivery) -> None:
        Effect.objects.create(label="seen", amount=delivery.payload["amount"])

    assert deliver(view, "m1", b'{"amount": ').status_code == 500
    assert deliver(view, "m2", b"[" * 200_000).status_code == 500
    assert Operation.objects.filter(status=Status.SUCCEEDED).count() == 0


HEADER = st.text(st.characters(max_codepoint=255, exclude_categories=["Cc"]), max_size=50)
SMALL_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "type", "x"]), children, max_size=3)
    ),
    max_leaves=6,
).map(lambda value: json.dumps(value).encode())


@hypothesis_settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    body=st.binary(max_size=40) | SMALL_JSON,
    delivery=HEADER,
    timestamp=HEADER | st.integers(-(10**14), 10**14).map(str),
    signature=HEADER | st.sampled_from(["v1,", "garbage", "v1,AAAA v1", "t=1,v1=00"]),
    content_type=st.sampled_from(["application/json", FORM, MULTIPART, "", "x; charset=no-such"]),
    is_signed=st.booleans(),
    which=st.sampled_from(["standard", "stripe", "generic", "stored"]),
)
def test_no_request_is_a_server_error(
    body: bytes,
    delivery: str,
    timestamp: str,
    signature: str,
    content_type: str,
    is_signed: bool,
    which: str,
) -> None:
    """BUGS Q11: strangers, and senders that sign strange things, get 2xx or 4xx."""
    headers = {
        "webhook-id": delivery,
        "webhook-timestamp": timestamp,
        "webhook-signature": signature,
        "Stripe-Signature": signature,
        "X-Sig": signature,
    }
    if is_signed:
        now = str(int(time.time()))
        content = delivery.encode("latin-1") + f".{now}.".encode() + body
        digest = base64.b64encode(hmac.new(KEY, content, hashlib.sha256).digest()).decode()
        headers |= {"webhook-timestamp": now, "webhook-signature": f"v1,{digest}"}
        headers |= stripe(body) | token(body)
    response = deliver(STRANGE[which], body=body, headers=headers, content_type=content_type)
    assert response.status_code in (200, 400, 401, 422)
    assert is_signed or response.status_code == 401


class Strange(Hook):
    """Every way to find an id."""


@Strange.handles("a*", name="some")
@Strange.handles(name="all")
def ignore(delivery: Delivery) -> None: ...


STRANGE = {
    "standard": Strange.as_view(),
    "stripe": Strange.as_view(verify=StripeVerifier("s")),
    "generic": Strange.as_view(verify=GENERIC, delivery_id="form:id", event_type="form:type"),
    "stored": Strange.as_view(acknowledge_first=True, event_type="header:webhook-id"),
}


# Django ------------------------------------------------------------------------------------------


def url(view: Any, settings: Any) -> str:
    module = ModuleType("urlconf")
    module.urlpatterns = [path("hook/", view)]  # type: ignore[attr-defined]
    settings.ROOT_URLCONF = module
    return "/hook/"


def test_the_whole_request_cycle_without_a_csrf_token(settings: Any) -> None:
    view = one_effect()
    client = Client(enforce_csrf_checks=True)
    place = url(view.as_view(), settings)
    for _ in range(2):
        response = client.post(
            place, event(), content_type="application/json", headers=signed(event(), "m1")
        )
        assert response.status_code == 200
    assert effects("seen") == 1
    assert client.get(place).status_code == 405
    assert client.options(place)["Allow"] == "POST, OPTIONS"


def test_handlers_commit_on_their_own_under_atomic_requests(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    view = hook()
    effect(view, "first")
    effect(view, "second", fault=Faults(Failed()))
    place = url(view.as_view(), settings)
    client = Client(raise_request_exception=False)
    for answer in (500, 200):
        response = client.post(
            place, event(), content_type="application/json", headers=signed(event(), "m1")
        )
        assert response.status_code == answer
        assert effects("first") == 1
    assert effects("second") == 1


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize("acknowledge_first", [False, True])
def test_everything_is_on_the_database_of_the_effects(acknowledge_first: bool) -> None:
    view = ElsewhereFirst if acknowledge_first else Elsewhere
    assert "other" in view.as_view()._non_atomic_requests
    for _ in range(2):
        assert deliver(view).status_code == 200
        outbox.relay(using="other")
    assert effects("other", "other") == 1
    assert Operation.objects.using("other").exists()
    assert nothing_is_kept()


class Elsewhere(Hook):
    policy = Policy(using="other")


class ElsewhereFirst(Elsewhere):
    acknowledge_first = True


effect(Elsewhere, "other", using="other")


def test_a_policy_that_cannot_work_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="stepwise"):
        hook(policy=Policy(stepwise=True)).as_view()
    with pytest.raises(ConfigurationError, match="on the class"):
        Hook.as_view(policy=Policy())


# Retention ---------------------------------------------------------------------------------------


def test_deliveries_are_remembered_for_a_week_whatever_other_requests_are(settings: Any) -> None:
    """BUGS P16, RULES 115: longer than any sender retries; also with a policy about something else."""
    settings.IDEMPOTENCY = {"RETENTION": 3600, "STEPWISE": True, "WAIT": 20}
    for view in (one_effect(), one_effect(source="b", policy=Policy(exclude_fields=["x"]))):
        assert deliver(view).status_code == 200
        operation = Operation.objects.latest("created_at")
        assert operation.expires_at - operation.finished_at == timedelta(days=7)  # type: ignore[operator]
        policy = view.get_policy().resolved()
        assert (policy.wait, policy.stepwise) == (timedelta(0), False)
    assert WebhookView.retry_horizon == 272_105  # 75 h 35 m 5 s of Standard Webhooks


def test_after_the_retention_an_id_is_new() -> None:
    view = one_effect(policy=Policy(retention=60))
    deliver(view)
    age("m1")
    deliver(view)
    assert effects("seen") == 2


def test_an_event_of_last_month_can_still_be_sent_for_the_first_time() -> None:
    """After a long outage: the age of an id, a UUIDv7 say, tells nothing about a sender that signs anew."""
    milliseconds = int((time.time() - 30 * 86400) * 1000)
    old = str(uuid.UUID(int=milliseconds << 80 | 7 << 76 | 2 << 62 | 1))
    view = one_effect()
    for _ in range(2):
        assert deliver(view, old).status_code == 200
    assert effects("seen") == 1


def test_a_tombstone_is_enough_to_recognise_a_duplicate() -> None:
    view = one_effect(policy=Policy(retention=60, tombstone=3600))
    deliver(view)
    age("m1", tombstone=False)
    assert deliver(view).status_code == 200
    assert effects("seen") == 1


# Batches -----------------------------------------------------------------------------------------


class Batch(Hook):
    """The recipe of the documentation."""

    delivery_id = "body"

    def split(self, delivery: Delivery) -> Iterator[Delivery]:
        for entry in delivery.payload:
            yield delivery.part(entry["event_id"], entry)


class BatchFirst(Batch):
    acknowledge_first = True


bad: list[str] = []


@Batch.handles("sent", name="sent")
def sent(delivery: Delivery) -> None:
    Effect.objects.create(label=delivery.id)
    if delivery.id in bad:
        raise Failed


def batch(*ids: str) -> bytes:
    return json.dumps([{"event_id": one, "type": "sent"} for one in ids]).encode()


def test_every_event_of_a_batch_stands_for_itself() -> None:
    """BUGS P16: one of three is a duplicate, and one that fails takes no other with it."""
    assert deliver(Batch, body=batch("a")).status_code == 200
    bad.append("b")
    assert deliver(Batch, "m2", batch("a", "b", "c")).status_code == 500
    assert (effects("a"), effects("b"), effects("c")) == (1, 0, 1)
    bad.clear()
    assert deliver(Batch, "m2", batch("a", "b", "c")).status_code == 200
    assert deliver(Batch, "m3", batch("c", "b")).status_code == 200
    assert (effects("a"), effects("b"), effects("c")) == (1, 1, 1)


def test_a_batch_can_be_acknowledged_first() -> None:
    for ids in (("a", "b"), ("b", "c")):
        assert deliver(BatchFirst, body=batch(*ids)).status_code == 200
    assert OutboxMessage.objects.count() == 3
    outbox.relay()
    assert (effects("a"), effects("b"), effects("c")) == (1, 1, 1)


def test_an_event_of_a_batch_that_was_another_before_takes_no_other_with_it() -> None:
    def changed(one: str) -> dict[str, Any]:
        return {"event_id": one, "type": "sent", "changed": True}

    for view, pair in ((Batch, "ab"), (BatchFirst, "cd")):
        first, second = pair
        assert deliver(view, body=batch(first)).status_code == 200
        body = json.dumps([changed(first), changed(second)]).encode()
        assert deliver(view, "m2", body).status_code == 422
        outbox.relay()
        assert (effects(first), effects(second)) == (1, 1)


@pytest.mark.parametrize(
    "body", [b"{}x", b"7", b'[{"type": "sent"}]', b'["a"]', batch("a", ""), b'[{"event_id": {}}]']
)
def test_a_batch_with_a_broken_event_is_refused_as_a_whole(body: bytes) -> None:
    assert deliver(Batch, body=body).status_code == 400
    assert nothing_is_kept()


# Acknowledged first ------------------------------------------------------------------------------


class First(Hook):
    """Acknowledged first."""

    acknowledge_first = True
    success_status = 202
    keep_headers = ("content-type", "X-Shop")


faults = Faults()
got: list[Delivery] = []


@First.handles("paid", name="first")
def first(delivery: Delivery) -> None:
    got.append(delivery)
    Effect.objects.create(label=delivery.id, amount=delivery.attempt)
    faults()


@First.handles("*", name="audit")
def audit(delivery: Delivery) -> None:
    Effect.objects.create(label=f"audit {delivery.id}")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for kept in (faults.errors, got, bad):
        kept.clear()


def test_a_delivery_is_durable_before_it_is_acknowledged_and_handled_by_the_relay() -> None:
    """BUGS P17."""
    assert deliver(First).status_code == 202
    assert effects("m1") == 0
    assert OutboxMessage.objects.filter(status=MessageStatus.PENDING).count() == 2
    assert outbox.relay().sent == 2
    assert (effects("m1"), effects("audit m1")) == (1, 1)


def test_a_redelivery_adds_nothing_before_or_after_the_relay() -> None:
    """The first answer was lost: the sender repeats itself, and every time it is a success."""
    assert [deliver(First).status_code, deliver(First).status_code] == [202, 202]
    assert OutboxMessage.objects.count() == 2
    outbox.relay()
    assert deliver(First).status_code == 202
    outbox.relay()
    OutboxMessage.objects.all().delete()  # what the purge does in a week
    assert deliver(First).status_code == 202
    outbox.relay()
    assert (effects("m1"), effects("audit m1")) == (1, 1)


def test_nothing_is_acknowledged_that_could_not_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """All handlers' messages, or none and no success."""
    real = outbox.enqueue
    calls: list[str] = []

    def enqueue(topic: str, payload: Any, **options: Any) -> Any:
        calls.append(topic)
        if len(calls) == 2:
            raise IntegrityError
        return real(topic, payload, **options)

    monkeypatch.setattr(outbox, "enqueue", enqueue)
    assert deliver(First).status_code == 500
    assert nothing_is_kept()
    assert deliver(First).status_code == 202
    assert OutboxMessage.objects.count() == 2


def test_a_stored_delivery_that_fails_is_tried_again_alone() -> None:
    """BUGS P13, P17: the other handler is done and not repeated."""
    faults.errors = [Failed("1"), Failed("2")]
    deliver(First)
    for sent, first_effects in ((1, 0), (0, 0), (1, 1)):
        make_due()
        assert outbox.relay().sent == sent
        assert (effects("m1"), effects("audit m1")) == (first_effects, 1)
    assert [delivery.attempt for delivery in got] == [1, 2, 3]


def test_a_stored_delivery_that_comes_too_early_waits_with_a_growing_pause() -> None:
    """BUGS P12: tries a second apart would be used up before the order is finished."""
    faults.errors = [NotYet()] * 3
    deliver(First)
    pauses = []
    for _ in range(3):
        make_due()
        outbox.relay()
        row = OutboxMessage.objects.get(status=MessageStatus.PENDING)
        assert row.last_error == "PublishFailed: not yet"
        pauses.append((row.available_at - row.created_at).total_seconds())
    assert pauses[0] >= 0.5
    assert pauses[2] >= 2
    make_due()
    outbox.relay()
    assert effects("m1") == 1


def test_dead_deliveries_do_not_starve_new_ones(settings: Any) -> None:
    """BUGS P15: 50 that fail for ever, then one that does not; it is handled in the next round."""
    settings.IDEMPOTENCY = {"OUTBOX_MAX_ATTEMPTS": 1, "OUTBOX_BATCH_SIZE": 20}
    faults.errors = [Failed()] * 50
    for number in range(50):
        deliver(First, f"old{number}")
    assert outbox.relay().dead == 50
    deliver(First, "new")
    assert outbox.relay().sent == 2
    assert effects("new") == 1


def test_a_stored_delivery_is_what_was_sent_without_the_rest_of_its_headers() -> None:
    body = event("paid", text="é")
    headers = signed(body, "m1") | {"X-Shop": "one", "Authorization": "hidden"}
    deliver(First, body=body, headers=headers)
    outbox.relay()
    (delivery,) = got
    assert (delivery.id, delivery.body, delivery.event_type) == ("m1", body, "paid")
    assert delivery.payload["text"] == "é"
    assert dict(delivery.headers) == {"Content-Type": "application/json", "X-Shop": "one"}
    assert delivery.headers["x-shop"] == "one"


def test_the_same_id_with_another_body_is_refused_when_acknowledged_first_too() -> None:
    assert deliver(First).status_code == 202
    assert deliver(First, body=event(amount=2)).status_code == 422
    assert deliver(First).status_code == 202
    assert OutboxMessage.objects.count() == 2


def test_a_change_of_the_mode_repeats_nothing() -> None:
    """Deployed between two attempts, in both directions."""
    later = First.as_view(acknowledge_first=True)
    at_once = First.as_view(acknowledge_first=False)
    for views in ((later, at_once, later), (at_once, later, at_once)):
        for view in views:
            assert deliver(view, "m1").status_code == 202
            outbox.relay()
    assert effects("m1") == 1


def test_a_stored_delivery_that_is_refused_says_why() -> None:
    assert deliver(First.as_view(acknowledge_first=False)).status_code == 202
    assert deliver(First, body=event(amount=2)).status_code == 202  # nothing is kept of the first
    assert outbox.relay().retried == 2
    for row in OutboxMessage.objects.all():
        assert row.last_error.startswith("idempotency.exceptions.Mismatch")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"handler": "renamed"}, "has no handler 'renamed'"),
        ({"view": "tests.test_webhooks:Effect"}, "is no WebhookView"),
        ({"view": "tests.test_webhooks:Renamed"}, "Renamed"),
        ({"view": "os:system"}, "is no WebhookView"),
    ],
)
def test_a_stored_delivery_whose_handler_is_gone_is_kept(
    change: dict[str, str], message: str
) -> None:
    """Put the name back, and the relay goes on; nothing is lost, and nothing else is called."""
    deliver(First, body=event("other"))
    row = OutboxMessage.objects.get()
    original = row.payload
    OutboxMessage.objects.update(payload=json.dumps(json.loads(original) | change))
    assert outbox.relay().retried == 1
    request = outbox.Message(
        id=row.message_id,
        topic=row.topic,
        body=json.dumps(json.loads(original) | change),
        ordering_key="",
        operation_id=None,
        attempt=1,
        created_at=row.created_at,
        using="default",
        pk=row.pk,
    )
    with pytest.raises((ConfigurationError, AttributeError), match=message):
        outbox_handlers.run_stored(request)
    OutboxMessage.objects.update(payload=original)
    make_due()
    assert outbox.relay().sent == 1
    assert effects("audit m1") == 1


# Order -------------------------------------------------------------------------------------------


def test_an_older_event_that_comes_later_changes_nothing() -> None:
    """BUGS R01, R02, R04, RULES 116: "updated", then "created"; of two equal ones the later wins."""
    view = hook()
    state = Effect.objects.create(label="nothing", amount=0)

    @view.handles("customer.*", name="customer")
    def handle(delivery: Delivery) -> None:
        rows = Effect.objects.filter(pk=state.pk)
        version = delivery.payload["version"]
        inbox.apply_if_newer(rows, "amount", version, label=delivery.event_type)

    for number, (name, version) in enumerate(
        [("customer.updated", 2), ("customer.created", 1), ("customer.renamed", 2)]
    ):
        assert deliver(view, str(number), event(name, version=version)).status_code == 200
        state.refresh_from_db()
        assert state.label == ("customer.updated" if number < 2 else "customer.renamed")


# The documentation -------------------------------------------------------------------------------

PAGE = (Path(__file__).parent.parent / "docs" / "webhooks.md").read_text()


def test_the_first_example_of_the_documentation_works(settings: Any) -> None:
    """BUGS Q03."""
    settings.ACME_WEBHOOK_SECRETS = ["whsec_" + base64.b64encode(KEY).decode()]
    block = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    names: dict[str, Any] = {"settings": settings, "path": path, "Order": Order, "__name__": "docs"}
    exec(block, names)  # noqa: S102
    Effect.objects.create(label="ch_1")
    place = names["urlpatterns"][0].callback
    body = event("payment.paid", data={"id": "ch_1"})
    for _ in range(2):
        assert deliver(place, body=body).status_code == 200
    assert Effect.objects.get(label="ch_1").amount == 1
    assert Operation.objects.get().status == Status.SUCCEEDED


def test_the_recipes_of_the_documentation_work() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {
        "WebhookView": WebhookView,
        "HmacVerifier": HmacVerifier,
        "secret": "s",
        "Account": Account,
        "__name__": "docs",
    }
    for block in blocks[1:]:
        exec(block, names)  # noqa: S102
    effect(names["MailWebhook"], "mail", "sent")
    body = b'[{"event_id": "1", "event": "sent"}, {"event_id": "2", "event": "opened"}]'
    headers = {"X-Signature": hmac.new(b"s", body, hashlib.sha256).hexdigest()}
    effect(names["AccountWebhook"], "account")
    for _ in range(2):
        assert deliver(names["MailWebhook"], body=body, headers=headers).status_code == 200
        for account, status in (("a", 200), ("b", 200), ("c", 401)):
            view = names["AccountWebhook"]
            assert deliver(view, account=account).status_code == status
    assert (effects("mail"), effects("account")) == (1, 2)
    assert (
        names["PaymentWebhook"]().serialize_on(
            Delivery(source="", id="", body=b'{"data": {"id": 5}}', headers={})
        )
        == "payment:5"
    )


class Account:
    """Stands for the reader's accounts "a" and "b"."""

    class objects:  # noqa: N801
        @staticmethod
        def values_list(field: str, flat: bool) -> Any:
            class Rows:
                def filter(self, pk: str) -> list[str]:
                    secret = "whsec_" + base64.b64encode(KEY).decode()
                    return [secret] if pk in ("a", "b") else []

            return Rows()


class Order:
    """Stands for the reader's model."""

    class objects:  # noqa: N801
        @staticmethod
        def filter(charge: str) -> Any:
            class Rows:
                def update(self, paid: bool) -> None:
                    Effect.objects.filter(label=charge).update(amount=int(paid))

            return Rows()
