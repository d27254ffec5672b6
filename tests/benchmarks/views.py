"""One effect, five ways: unprotected, atomic, protected, and the protocol written out by hand."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from rest_framework import authentication, mixins, serializers, viewsets

from idempotency.contrib.rest_framework import IdempotencyMixin
from idempotency.decorators import idempotent
from tests.app.models import Effect

#: Known without a query, as from a signed token: a lookup would make every view slower alike.
CALLER = SimpleNamespace(pk=1, is_authenticated=True)


def caller_middleware(
    get_response: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HttpResponse]:
    def middleware(request: Any) -> HttpResponse:
        request.user = CALLER
        return get_response(request)

    return middleware


def ready(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


def create(request: HttpRequest) -> HttpResponse:
    """The unprotected view: reads JSON, inserts one row, answers 201 with JSON."""
    data = json.loads(request.body)
    effect = Effect.objects.create(label=data["label"], amount=data["amount"])
    return JsonResponse({"id": effect.pk, "label": effect.label}, status=201)


create_atomic = transaction.atomic(create)
create_protected = idempotent(required=True)(create)


class CallerAuthentication(authentication.BaseAuthentication):
    def authenticate(self, request: Any) -> tuple[Any, None]:
        return CALLER, None


class EffectSerializer(serializers.ModelSerializer[Effect]):
    class Meta:
        model = Effect
        fields = ("id", "label", "amount")


class EffectViewSet(mixins.CreateModelMixin, viewsets.GenericViewSet[Effect]):
    queryset = Effect.objects.all()
    serializer_class = EffectSerializer
    authentication_classes = (CallerAuthentication,)


class ProtectedEffectViewSet(IdempotencyMixin, EffectViewSet):
    pass
