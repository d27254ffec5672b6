"""The shop's API: what needs a key, beside what is idempotent by nature."""

from __future__ import annotations

import uuid
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.http import Http404
from django.http.response import HttpResponseBase
from rest_framework import mixins, status, viewsets
from rest_framework import serializers as drf
from rest_framework.decorators import action
from rest_framework.generics import GenericAPIView
from rest_framework.permissions import AllowAny, IsAdminUser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from demo_shop.provider import gateway
from demo_shop.provider.models import Charge
from demo_shop.shop import payments, webhooks
from demo_shop.shop.exceptions import PaymentRefused
from demo_shop.shop.models import Address, Order, Product, SentMail
from idempotency import keys
from idempotency.contrib.rest_framework import IdempotencyMixin
from idempotency.exceptions import Refusal
from idempotency.http.problems import problem, status_url
from idempotency.policies import Policy

from . import serializers
from .errors import NoAnswer, refusals


class ProductViewSet(IdempotencyMixin, viewsets.ReadOnlyModelViewSet):
    """The catalogue, and two ways to correct a stock: relative (keyed) and absolute (natural)."""

    queryset = Product.objects.all()
    serializer_class = serializers.ProductSerializer
    idempotency_policy = {"adjust_stock": Policy(required=True)}

    def get_permissions(self) -> list[Any]:
        reading = self.action in {"list", "retrieve"}
        return [AllowAny() if reading else IsAdminUser()]

    @action(
        detail=True,
        methods=["post"],
        url_path="adjust-stock",
        serializer_class=serializers.StockDeltaSerializer,
    )
    def adjust_stock(self, request: Request, pk: str) -> Response:
        """Add `delta` pieces. A lost response and a retry would add them twice, but for the key."""
        serializer = self.get_serializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        product = self.get_object()
        with refusals():
            product.adjust_stock(serializer.validated_data["delta"])
        return Response(serializers.StockSerializer(product).data)

    @action(detail=True, methods=["put"], serializer_class=serializers.StockSerializer)
    def stock(self, request: Request, pk: str) -> Response:
        """Say how many pieces there are. Needs no key: saying it again changes nothing."""
        serializer = self.get_serializer(self.get_object(), data=request.data)
        serializer.is_valid(raise_exception=True)
        serializer.save()
        return Response(serializer.data)


class AddressViewSet(
    mixins.ListModelMixin,
    mixins.RetrieveModelMixin,
    mixins.DestroyModelMixin,
    viewsets.GenericViewSet,
):
    """Addresses, saved with PUT under an id the client chose: no key needed."""

    serializer_class = serializers.AddressSerializer
    lookup_value_converter = "uuid"

    def get_queryset(self) -> QuerySet[Address]:
        return Address.objects.filter(owner_id=self.request.user.pk).order_by("pk")

    def update(self, request: Request, pk: uuid.UUID) -> Response:
        """Create or replace the address `pk`: 201 when new, 200 otherwise, one row either way."""
        serializer = self.get_serializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        try:
            with transaction.atomic():
                address, created = self.get_queryset().update_or_create(
                    pk=pk,
                    defaults=serializer.validated_data,
                    create_defaults={**serializer.validated_data, "owner": request.user},
                )
        except IntegrityError as error:  # the id is somebody else's
            raise Http404 from error
        return Response(
            self.get_serializer(address).data,
            status=status.HTTP_201_CREATED if created else status.HTTP_200_OK,
        )


class OrderViewSet(
    IdempotencyMixin,
    mixins.ListModelMixin,
    mixins.RetrieveModelMixin,
    mixins.CreateModelMixin,
    viewsets.GenericViewSet,
):
    """Orders of the signed-in customer. Placing and paying need an `Idempotency-Key`.

    Paying is stepwise: no transaction may stay open while the provider thinks. Refunding and confirming
    need no key: both can be said only once about an order, and saying it again changes nothing.
    """

    serializer_class = serializers.OrderSerializer
    lookup_value_converter = "uuid"
    idempotency_policy = {
        "create": Policy(required=True),
        "pay": Policy(required=True, stepwise=True),
    }

    def get_queryset(self) -> QuerySet[Order]:
        orders = Order.objects.filter(customer_id=self.request.user.pk)
        return orders.prefetch_related("lines")

    def perform_create(self, serializer: Any) -> None:
        serializer.instance = place(self.request, serializer.validated_data)

    @action(detail=True, methods=["post"], serializer_class=serializers.CardSerializer)
    def pay(self, request: Request, pk: uuid.UUID) -> Response:
        """Charge the order's total to a card."""
        serializer = self.get_serializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        order = self.get_object()
        with refusals():
            paid = payments.pay_for(
                key=request.operation.derive_key("pay"),
                customer=request.user.pk,
                order=order.pk,
                **serializer.validated_data,
            )
        return answer(self, paid)

    @action(detail=True, methods=["post"], serializer_class=drf.Serializer)
    def confirm(self, request: Request, pk: uuid.UUID) -> Response:
        """The customer is back from the bank: ask the provider what became of it, before its webhook."""
        order = self.get_object()
        key = keys.derive(order.operation, "charge") if order.operation else ""
        charge = Charge.objects.filter(account=payments.ACCOUNT, idempotency_key=key).first()
        if charge is not None and charge.status != Charge.Status.PENDING:
            payments.learn(order, charge)
        return Response(serializers.OrderSerializer(self.get_object()).data)

    @action(detail=True, methods=["post"], serializer_class=drf.Serializer)
    def refund(self, request: Request, pk: uuid.UUID) -> HttpResponseBase:
        """Give the money back and take the goods back."""
        try:
            with refusals():
                payments.refund(self.get_object())
        except Refusal as refusal:  # it is being refunded right now
            return problem(refusal, request)
        return Response(serializers.OrderSerializer(self.get_object()).data)

    @action(detail=True)
    def evidence(self, request: Request, pk: uuid.UUID) -> Response:
        """How often things happened that should happen once."""
        order = self.get_object()
        charges = Charge.objects.filter(reference=str(order.pk))
        received, duplicates = webhooks.counts(order.pk)
        return Response(
            {
                "charges": charges.that_moved_money().count(),
                "emails": order.mails.count(),
                "webhooks": received,
                "duplicates": duplicates,
            }
        )


class CheckoutView(IdempotencyMixin, GenericAPIView):
    """Place an order and pay for it, in one intent: 201 when paid, 202 when the card's bank asks first.

    409 `outcome-unknown` while nobody knows whether the card was charged; its `status_url` tells.
    """

    serializer_class = serializers.CheckoutSerializer
    idempotency_policy = Policy(required=True, stepwise=True)

    def post(self, request: Request) -> Response:
        serializer = self.get_serializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        data = serializer.validated_data
        address = data.get("address")
        with refusals():
            paid = payments.check_out(
                key=request.operation.derive_key("checkout"),
                customer=request.user.pk,
                lines=[[product.pk, quantity] for product, quantity in data["lines"]],
                address=address.pk if address else None,
                **{name: data[name] for name in ("card", "mode", "webhooks")},
            )
        return answer(self, paid)


class UnprotectedCheckoutView(GenericAPIView):
    """The same checkout as many shops have it: no key, so a retry is a second purchase."""

    serializer_class = serializers.CheckoutSerializer

    def post(self, request: Request) -> Response:
        serializer = self.get_serializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        data = serializer.validated_data
        with refusals():
            order = Order.objects.place(
                customer=request.user,
                lines=data["lines"],
                address=data.get("address"),
                till=Order.Till.UNPROTECTED,
            )
            try:
                charge = gateway.charge(
                    account="shop-unprotected",
                    idempotency_key=str(uuid.uuid4()),
                    amount=order.total,
                    reference=str(order.pk),
                    **{name: data[name] for name in ("card", "mode", "webhooks")},
                )
            except gateway.ProviderError as error:
                raise PaymentRefused(str(error)) from error
            except gateway.ProviderTimeout as error:
                raise NoAnswer from error
        payments.confirm(order.pk, charge.pk, charge.amount)
        return answer(self, {"order": order.pk, "status": "paid"})


class CountersView(APIView):
    """What the whole shop sold, and what the provider took for it, by till."""

    def get(self, request: Request) -> Response:
        received, duplicates = webhooks.counts()
        return Response(
            {
                till: {
                    "orders": Order.objects.filter(till=till)
                    .exclude(status=Order.Status.CANCELLED)
                    .count(),
                    "charges": Charge.objects.that_moved_money()
                    .filter(account=f"shop-{till}")
                    .count(),
                    "emails": SentMail.objects.filter(order__till=till).count(),
                }
                for till in Order.Till.values
            }
            | {
                "addresses": Address.objects.filter(owner_id=request.user.pk).count(),
                "webhooks": {"received": received, "duplicates": duplicates},
            }
        )


def place(request: Request, data: dict[str, Any]) -> Order:
    """Place an order that is paid for later. Its id follows from the operation's."""
    with refusals():
        order = Order.objects.place(
            customer=request.user,
            lines=data["lines"],
            address=data.get("address"),
            id=uuid.uuid5(request.operation.id, "order"),
        )
    payments.refer(request.operation, order)
    return order


def answer(view: GenericAPIView, paid: dict[str, Any]) -> Response:
    """The order as it is after `take_payment`."""
    order = Order.objects.prefetch_related("lines").get(pk=paid["order"])
    data = {**serializers.OrderSerializer(order, context=view.get_serializer_context()).data}
    if paid["status"] != "requires_action":
        return Response(data, status=status.HTTP_201_CREATED)
    data |= {"action_url": paid["action_url"], "status_url": status_url(order.operation)}
    return Response(data, status=status.HTTP_202_ACCEPTED)
