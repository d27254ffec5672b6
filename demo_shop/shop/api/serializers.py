from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from rest_framework import serializers

from demo_shop.provider import gateway
from demo_shop.shop.models import Address, Order, OrderLine, Product


class ProductSerializer(serializers.ModelSerializer[Product]):
    class Meta:
        model = Product
        fields = ["id", "slug", "name", "description", "price", "stock"]


class StockSerializer(serializers.ModelSerializer[Product]):
    """The number of pieces there are: absolute, so sending it again changes nothing."""

    stock = serializers.IntegerField(min_value=0, max_value=1_000_000)

    class Meta:
        model = Product
        fields = ["id", "stock"]


class StockDeltaSerializer(serializers.Serializer[Any]):
    """How many pieces came (or went, if negative): every call counts, so it needs a key."""

    delta = serializers.IntegerField(min_value=-1_000_000, max_value=1_000_000)


class AddressSerializer(serializers.ModelSerializer[Address]):
    class Meta:
        model = Address
        fields = ["id", "recipient", "street", "city", "postcode", "country"]
        read_only_fields = ["id"]


class OrderLineSerializer(serializers.ModelSerializer[OrderLine]):
    product = serializers.PrimaryKeyRelatedField(queryset=Product.objects.all())
    quantity = serializers.IntegerField(min_value=1, max_value=1000)

    class Meta:
        model = OrderLine
        fields = ["product", "quantity", "price"]
        read_only_fields = ["price"]


class OwnAddressField(serializers.PrimaryKeyRelatedField):
    """An address of whoever asks; those of others do not exist, in the choices either."""

    def get_queryset(self) -> QuerySet[Address]:
        return Address.objects.filter(owner_id=self.context["request"].user.pk)


class OrderSerializer(serializers.ModelSerializer[Order]):
    lines = OrderLineSerializer(many=True, allow_empty=False)
    address = OwnAddressField(required=False, allow_null=True)

    class Meta:
        model = Order
        fields = ["id", "number", "status", "total", "address", "lines", "created_at"]
        read_only_fields = ["status", "total", "created_at"]

    def validate_lines(self, lines: list[dict[str, Any]]) -> list[tuple[Product, int]]:
        pairs = [(line["product"], line["quantity"]) for line in lines]
        if len({product.pk for product, _ in pairs}) < len(pairs):
            raise serializers.ValidationError("Give each product one line.")
        return pairs


class CardSerializer(serializers.Serializer[Any]):
    """What pays, and what goes wrong meanwhile: the provider is a fake, and does as it is told."""

    card = serializers.CharField(
        max_length=40,
        default="tok_visa",
        write_only=True,
        help_text="A card token. `tok_declined` is declined, the bank of `tok_3ds` asks first.",
    )
    mode = serializers.ChoiceField(
        list(gateway.MODES.items()), default="ok", write_only=True, help_text="The provider …"
    )
    webhooks = serializers.ChoiceField(
        list(gateway.WEBHOOKS.items()),
        default="once",
        write_only=True,
        help_text="The provider sends its webhooks …",
    )


class CheckoutSerializer(CardSerializer, OrderSerializer):
    """An order and the card that pays for it."""

    class Meta(OrderSerializer.Meta):
        fields = [*OrderSerializer.Meta.fields, "card", "mode", "webhooks"]
