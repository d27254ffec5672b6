"""The shop's API: what needs a key, beside what is idempotent by nature."""

from __future__ import annotations

import uuid
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.http import Http404
from rest_framework import mixins, status, viewsets
from rest_framework.decorators import action
from rest_framework.generics import GenericAPIView
from rest_framework.permissions import AllowAny, IsAdminUser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from demo_shop.provider.models import Charge
from demo_shop.shop.models import Address, Order, Payment, Product
from idempotency.contrib.rest_framework import IdempotencyMixin
from idempotency.policies import Policy

from . import serializers
from .errors import refusals


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
    """Orders of the signed-in customer. Placing and paying need an `Idempotency-Key`."""

    serializer_class = serializers.OrderSerializer
    lookup_value_converter = "uuid"
    idempotency_policy = Policy(required=True)

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
        payment = pay(request, self.get_object(), serializer.validated_data["card"])
        return Response(serializers.PaymentSerializer(payment).data, status=status.HTTP_201_CREATED)


class CheckoutView(IdempotencyMixin, GenericAPIView):
    """Place an order and pay for it, in one intent."""

    serializer_class = serializers.CheckoutSerializer
    idempotency_policy = Policy(required=True)

    def post(self, request: Request) -> Response:
        return Response(check_out(self, request), status=status.HTTP_201_CREATED)


class UnprotectedCheckoutView(GenericAPIView):
    """The same checkout as most shops have it: no key, so a retry is a second purchase."""

    serializer_class = serializers.CheckoutSerializer

    @transaction.atomic
    def post(self, request: Request) -> Response:
        return Response(check_out(self, request), status=status.HTTP_201_CREATED)


class CountersView(APIView):
    """What the whole shop sold, and what the provider took for it, by till."""

    def get(self, request: Request) -> Response:
        return Response(
            {
                till: {
                    "orders": Order.objects.filter(till=till).count(),
                    "charges": Charge.objects.filter(account=f"shop-{till}").count(),
                }
                for till in Order.Till.values
            }
            | {"addresses": Address.objects.filter(owner_id=request.user.pk).count()}
        )


def check_out(view: GenericAPIView, request: Request) -> Any:
    """Place and pay; both tills run exactly this, the protected one inside an operation."""
    serializer = view.get_serializer(data=request.data)
    serializer.is_valid(raise_exception=True)
    order = place(request, serializer.validated_data)
    pay(request, order, serializer.validated_data["card"])
    bought = [product.pk for product, _ in serializer.validated_data["lines"]]
    request.user.cart.items.filter(product__in=bought).delete()
    return view.get_serializer(order).data


def place(request: Request, data: dict[str, Any]) -> Order:
    """Place the order; inside an operation its id follows from the operation's."""
    operation = getattr(request, "operation", None)
    with refusals():
        return Order.objects.place(
            customer=request.user,
            lines=data["lines"],
            address=data.get("address"),
            id=uuid.uuid5(operation.id, "order") if operation else None,
            till=Order.Till.PROTECTED if operation else Order.Till.UNPROTECTED,
        )


def pay(request: Request, order: Order, card: str) -> Payment:
    """Charge the order; inside an operation the provider's key follows from the operation's."""
    operation = getattr(request, "operation", None)
    with refusals():
        return order.pay(
            card=card, key=operation.derive_key("charge") if operation else str(uuid.uuid4())
        )
