"""Catalogue, cart, orders and payments. What can be done to a row is a method of its model."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from decimal import Decimal

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser
from django.db import models, transaction
from django.db.models import F
from django.urls import reverse

from idempotency import outbox

from .exceptions import AlreadyPlaced, OutOfStock

MONEY = {"max_digits": 10, "decimal_places": 2}


class Product(models.Model):
    name = models.CharField(max_length=80)
    slug = models.SlugField(unique=True)
    description = models.TextField(blank=True)
    price = models.DecimalField(**MONEY)
    stock = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def get_absolute_url(self) -> str:
        return reverse("shop:product", args=[self.slug])

    @property
    def picture(self) -> str:
        """Path of its drawing among the static files."""
        return f"shop/img/{self.slug}.svg"

    def adjust_stock(self, delta: int) -> None:
        """Add `delta` pieces (negative takes away). Every call counts: this is what a key protects.

        Raises OutOfStock when fewer than `-delta` are left.
        """
        changed = Product.objects.filter(pk=self.pk, stock__gte=-delta).update(
            stock=F("stock") + delta
        )
        if not changed:
            raise OutOfStock(f"Not enough of “{self.name}” in stock.")
        self.refresh_from_db(fields=["stock"])


class Address(models.Model):
    """Where an order goes. The client chooses the id, so saving it twice is saving it once."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="addresses"
    )
    recipient = models.CharField(max_length=80)
    street = models.CharField(max_length=120)
    city = models.CharField(max_length=80)
    postcode = models.CharField(max_length=20)
    country = models.CharField(max_length=60)

    class Meta:
        verbose_name_plural = "addresses"

    def __str__(self) -> str:
        return f"{self.recipient}, {self.street}, {self.postcode} {self.city}"


class Cart(models.Model):
    owner = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="cart"
    )

    def __str__(self) -> str:
        return f"Cart of {self.owner}"

    def lines(self) -> list[tuple[Product, int]]:
        """What is in the cart, as `Order.objects.place` takes it."""
        return [(item.product, item.quantity) for item in self.items.select_related("product")]

    def total(self) -> Decimal:
        return sum((product.price * quantity for product, quantity in self.lines()), Decimal(0))

    def put(self, product: Product, quantity: int) -> None:
        """Have exactly `quantity` of `product` in the cart; absolute, so repeating it is harmless."""
        if quantity < 1:
            self.items.filter(product=product).delete()
        else:
            self.items.update_or_create(product=product, defaults={"quantity": quantity})


class CartItem(models.Model):
    cart = models.ForeignKey(Cart, on_delete=models.CASCADE, related_name="items")
    product = models.ForeignKey(Product, on_delete=models.CASCADE)
    quantity = models.PositiveIntegerField(default=1)

    class Meta:
        ordering = ["pk"]
        constraints = [
            models.UniqueConstraint(fields=["cart", "product"], name="shop_one_line_per_product")
        ]

    def __str__(self) -> str:
        return f"{self.quantity} \N{MULTIPLICATION SIGN} {self.product}"

    @property
    def total(self) -> Decimal:
        return self.product.price * self.quantity


class OrderManager(models.Manager["Order"]):
    def place(
        self,
        *,
        customer: AbstractBaseUser,
        lines: Iterable[tuple[Product, int]],
        id: uuid.UUID | None = None,  # noqa: A002 - the field's own name
        address: Address | None = None,
        till: str = "",
        operation: uuid.UUID | None = None,
    ) -> Order:
        """Place an order, take its goods out of stock, and have the customer told, all or nothing.

        With `id` (derived from the operation) the order's own primary key is a second line of
        defence: it holds even when the idempotency record is long purged. `operation` is the one that
        pays for it. Raises AlreadyPlaced or OutOfStock.
        """
        lines = sorted(lines, key=lambda line: line[0].pk)  # one lock order for everybody
        with transaction.atomic(using=self.db):
            if id is not None and self.filter(pk=id).exists():
                raise AlreadyPlaced("This order was placed before.")
            order = self.create(
                id=id or uuid.uuid4(),
                customer=customer,
                address=address,
                till=till or Order.Till.PROTECTED,
                operation=operation,
                total=sum((product.price * quantity for product, quantity in lines), Decimal(0)),
            )
            for product, quantity in lines:
                product.adjust_stock(-quantity)
            OrderLine.objects.bulk_create(
                OrderLine(order=order, product=product, quantity=quantity, price=product.price)
                for product, quantity in lines
            )
            # To be paid later. One that is paid at once has one e-mail, about that.
            if operation is None and order.till == Order.Till.PROTECTED:
                outbox.enqueue("order.placed", {"order": order.pk}, key=f"placed:{order.pk}")
        return order


class Order(models.Model):
    class Till(models.TextChoices):
        """Which door the order came through; the lab page counts them apart."""

        PROTECTED = "protected", "protected"
        UNPROTECTED = "unprotected", "without a key"

    class Status(models.TextChoices):
        PLACED = "placed", "placed"
        PAID = "paid", "paid"
        CANCELLED = "cancelled", "cancelled"
        REFUNDING = "refunding", "being refunded"
        REFUNDED = "refunded", "refunded"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    customer = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="orders"
    )
    address = models.ForeignKey(Address, on_delete=models.SET_NULL, null=True, blank=True)
    till = models.CharField(max_length=12, choices=Till, default=Till.PROTECTED)
    status = models.CharField(max_length=10, choices=Status, default=Status.PLACED)
    total = models.DecimalField(**MONEY)
    #: The operation that pays for it, or has paid. Nothing else may try meanwhile.
    operation = models.UUIDField(null=True, blank=True, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = OrderManager()

    class Meta:
        ordering = ["-created_at"]
        indexes = [
            models.Index(fields=["customer", "-created_at"], name="shop_order_of_customer"),
        ]

    def __str__(self) -> str:
        return f"Order {self.number}"

    def get_absolute_url(self) -> str:
        return reverse("shop:order", args=[self.pk])

    @property
    def number(self) -> str:
        """The short name people use."""
        return self.pk.hex[:8].upper()

    def restock(self) -> None:
        """Put its goods back on the shelf."""
        for line in self.lines.select_related("product").order_by("product_id"):
            line.product.adjust_stock(line.quantity)

    def become(self, status: str) -> None:
        self.status = status
        self.save(update_fields=["status"])


class OrderLine(models.Model):
    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="lines")
    product = models.ForeignKey(Product, on_delete=models.PROTECT)
    quantity = models.PositiveIntegerField()
    price = models.DecimalField(**MONEY)

    class Meta:
        ordering = ["pk"]

    def __str__(self) -> str:
        return f"{self.quantity} \N{MULTIPLICATION SIGN} {self.product}"

    @property
    def total(self) -> Decimal:
        return self.price * self.quantity


class Payment(models.Model):
    """The shop's own record of a charge; an order has one at most."""

    order = models.OneToOneField(Order, on_delete=models.PROTECT, related_name="payment")
    amount = models.DecimalField(**MONEY)
    #: The provider's id of the charge; its row lives in the provider's database.
    charge_id = models.UUIDField(unique=True)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.amount} for {self.order}"


class SentMail(models.Model):
    """An e-mail that went out; each kind goes out once per order."""

    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="mails")
    kind = models.CharField(max_length=20)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["pk"]
        constraints = [
            models.UniqueConstraint(fields=["order", "kind"], name="shop_one_mail_of_a_kind")
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.order}"


class PaymentEvent(models.Model):
    """What the payment provider told us about an order, once however often it said so."""

    #: No foreign key: an event may be about an order that was rolled back.
    order_id = models.UUIDField(db_index=True)
    event_id = models.CharField(max_length=80, unique=True)
    type = models.CharField(max_length=40)
    received_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["pk"]

    def __str__(self) -> str:
        return self.type
