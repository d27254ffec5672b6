"""The helpers for users' tests must fail when the thing under test is wrong."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import RequestFactory
from django.utils import timezone

from idempotency import testing
from idempotency.decorators import idempotent
from idempotency.models import Operation, Status
from tests.app.models import Effect
from tests.test_retention import FUTURE, PAST, make

pytestmark = pytest.mark.django_db

Send = Callable[[dict[str, str]], HttpResponse]


class User:
    pk = 1
    is_authenticated = True


def sender(view: Any, **options: Any) -> Send:
    def send(headers: dict[str, str]) -> HttpResponse:
        request = RequestFactory().post("/orders/", {"sku": "cup"}, headers=headers)
        request.user = User()  # type: ignore[assignment]
        response: HttpResponse = view(request)
        return response

    return send


def order(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"order": Effect.objects.create(label="order").pk}, status=201)


def check(view: Any, **options: Any) -> tuple[Any, Any]:
    return testing.assert_idempotent(sender(view), effects=Effect.objects.count, **options)


def test_a_protected_view_passes() -> None:
    first, second = check(idempotent(order))
    assert first.status_code == second.status_code == 201
    assert first.content == second.content


def test_the_key_may_be_chosen_and_found_again() -> None:
    check(idempotent(order), key='say "hi"\\'.replace(" ", "_"))
    assert testing.operation('say_"hi"\\').status == Status.SUCCEEDED
    with pytest.raises(Operation.DoesNotExist):
        testing.operation("another")


def test_the_configured_header_is_used(settings: Any) -> None:
    settings.IDEMPOTENCY = {"KEY_HEADER": "X-Request-Key"}
    assert testing.headers("k") == {"X-Request-Key": '"k"'}
    check(idempotent(order))


def test_an_unprotected_view_fails() -> None:
    with pytest.raises(AssertionError, match="an effect of its own"):
        check(order)


def test_a_view_that_only_looks_idempotent_fails() -> None:
    def get_or_create(request: HttpRequest) -> HttpResponse:
        effect, created = Effect.objects.get_or_create(label="order")
        return JsonResponse({"order": effect.pk}, status=201 if created else 409)

    with pytest.raises(AssertionError, match="not answered from the stored outcome"):
        check(get_or_create)


def test_a_first_request_that_fails_proves_nothing() -> None:
    def refuse(request: HttpRequest) -> HttpResponse:
        return JsonResponse({"detail": "no such sku"}, status=404)

    with pytest.raises(AssertionError, match=r"The first request failed: 404 .*no such sku"):
        check(idempotent(refuse))


def test_a_first_request_without_an_effect_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="had no effect"):
        check(idempotent(lambda request: HttpResponse("ok")))


def test_a_key_that_was_used_before_proves_nothing() -> None:
    check(idempotent(order), key="used")
    with pytest.raises(AssertionError, match="use a new key"):
        check(idempotent(order), key="used")


def test_a_different_answer_fails() -> None:
    def changes(request: HttpRequest) -> HttpResponse:
        response: HttpResponse = idempotent(order)(request)
        if response.has_header("Idempotent-Replayed"):
            response["Location"] = "/elsewhere/"
        return response

    with pytest.raises(AssertionError, match="answered differently"):
        check(changes)


def test_time_passes_for_one_operation() -> None:
    operation = make(expires_at=FUTURE, tombstone_until=None)
    other = make("other")

    testing.age(operation, 3600)

    assert operation.expires_at == FUTURE - timedelta(hours=1)
    assert operation.created_at == PAST - timedelta(hours=1)
    assert operation.tombstone_until is None
    other.refresh_from_db()
    assert other.created_at == PAST


def test_an_expired_operation_is_refused_and_then_forgotten() -> None:
    send = sender(idempotent(tombstone=3600)(order))
    headers = testing.headers("k")
    assert send(headers).status_code == 201
    operation = testing.operation("k")

    testing.expire(operation)
    assert send(headers).status_code == 410

    testing.expire(operation, tombstone=True)
    assert operation.tombstone_until is not None
    assert operation.tombstone_until < timezone.now()
    assert send(headers).status_code == 201
    assert Effect.objects.count() == 2


def test_what_has_not_finished_cannot_expire() -> None:
    with pytest.raises(ValueError, match="use age"):
        testing.expire(make(status=Status.PROCESSING))
