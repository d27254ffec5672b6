"""factory-boy factories: the seed data and the tests are made with them."""

from __future__ import annotations

import uuid
from decimal import Decimal
from functools import partial
from typing import Any

import factory
from django.contrib.auth import get_user_model
from django.utils.text import slugify
from factory.django import DjangoModelFactory

from .models import Address, Cart, CartItem, Order, Product


def unique(word: str) -> str:
    """`word` with a random end; a counter would meet the rows of an earlier process."""
    return word + uuid.uuid4().hex[:8]


class CustomerFactory(DjangoModelFactory):
    class Meta:
        model = get_user_model()
        django_get_or_create = ["username"]

    username = factory.LazyFunction(partial(unique, "customer-"))
    first_name = factory.Faker("first_name")
    last_name = factory.Faker("last_name")
    email = factory.LazyAttribute(lambda user: f"{user.username}@shop.example")
    password = factory.django.Password(None)  # unusable until one is given


class AdminFactory(CustomerFactory):
    username = factory.LazyFunction(partial(unique, "admin-"))
    is_staff = True
    is_superuser = True


class ProductFactory(DjangoModelFactory):
    class Meta:
        model = Product
        django_get_or_create = ["slug"]

    name = factory.LazyFunction(partial(unique, "Product "))
    slug = factory.LazyAttribute(lambda product: slugify(product.name))
    description = factory.Faker("sentence")
    price = Decimal("10.00")
    stock = 10


class AddressFactory(DjangoModelFactory):
    class Meta:
        model = Address

    owner = factory.SubFactory(CustomerFactory)
    recipient = factory.Faker("name")
    street = factory.Faker("street_address")
    city = factory.Faker("city")
    postcode = factory.Faker("postcode")
    country = factory.Faker("country")


class CartFactory(DjangoModelFactory):
    class Meta:
        model = Cart
        django_get_or_create = ["owner"]

    owner = factory.SubFactory(CustomerFactory)


class CartItemFactory(DjangoModelFactory):
    class Meta:
        model = CartItem

    cart = factory.SubFactory(CartFactory)
    product = factory.SubFactory(ProductFactory)
    quantity = 1


class OrderFactory(DjangoModelFactory):
    """Places the order for real, so that stock and total are right. `quantity` of one `product`."""

    class Meta:
        model = Order

    class Params:
        product = factory.SubFactory(ProductFactory)
        quantity = 1

    customer = factory.SubFactory(CustomerFactory)
    lines = factory.LazyAttribute(lambda order: [(order.product, order.quantity)])

    @classmethod
    def _create(cls, model_class: type[Order], *args: Any, **kwargs: Any) -> Order:
        return model_class.objects.place(**kwargs)
