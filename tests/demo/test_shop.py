"""The shop's models with its factories, run inside the shop."""

from __future__ import annotations

import json

from .conftest import Demo


def test_seeding_again_adds_nothing_and_keeps_changed_stock(demo: Demo) -> None:
    code = """
import json
from django.core.management import call_command
from demo_shop.provider.models import Charge
from demo_shop.shop.models import *
from django.contrib.auth.models import User
from rest_framework.authtoken.models import Token
def rows():
    counts = [model.objects.count() for model in (Product, Address, Cart, User, Token, Order, Charge)]
    return counts, [p.stock for p in Product.objects.all()], [u.password for u in User.objects.all()]
Product.objects.filter(slug="rucksack").update(stock=7)
before = rows()
call_command("seed_demo", verbosity=0)
print(json.dumps(before == rows()))
"""
    assert json.loads(demo.run(code)) is True


def test_the_same_order_id_cannot_be_placed_twice(demo: Demo) -> None:
    """BUGS T12: The order's own key holds where an idempotency record is gone already."""
    code = """
import uuid
from demo_shop.shop.exceptions import AlreadyPlaced
product = ProductFactory(stock=5)
order = OrderFactory(product=product, quantity=2, id=uuid.uuid4())
try:
    OrderFactory(customer=order.customer, product=product, id=order.pk)
except AlreadyPlaced:
    product.refresh_from_db()
    print(product.stock, order.total, order.lines.count())
"""
    assert demo.run(code) == "3 20.00 1"


def test_an_order_takes_all_of_its_goods_or_none(demo: Demo) -> None:
    code = """
from demo_shop.shop.exceptions import OutOfStock
from demo_shop.shop.models import Order
some, few = ProductFactory(stock=5), ProductFactory(stock=1)
orders = Order.objects.count()
try:
    Order.objects.place(customer=CustomerFactory(), lines=[(some, 2), (few, 2)])
except OutOfStock:
    some.refresh_from_db()
    print(some.stock, Order.objects.count() - orders)
"""
    assert demo.run(code) == "5 0"


def test_the_provider_charges_a_key_once_and_refuses_it_for_another_amount(demo: Demo) -> None:
    code = """
from decimal import Decimal
from demo_shop.provider import gateway
from demo_shop.provider.models import Charge
def charge(amount):
    return gateway.charge(account="test", idempotency_key="k", amount=Decimal(amount), card="c", reference="r")
first, again = charge("5.00"), charge("5.00")
try:
    charge("6.00")
except gateway.KeyReused:
    print(first == again, Charge.objects.filter(account="test").count())
"""
    assert demo.run(code) == "True 1"


def test_a_crash_after_charging_does_not_charge_again(demo: Demo) -> None:
    """The retry goes on after the recorded charge, instead of running the checkout again."""
    code = """
from unittest import mock
from django.test import Client
from demo_shop.provider.models import Charge
from demo_shop.shop.models import Order, Payment
customer, product = CustomerFactory(), ProductFactory()
CartFactory(owner=customer)
client = Client(SERVER_NAME="localhost", raise_request_exception=False)
client.force_login(customer)
def check_out():
    return client.post(
        "/api/checkout/", {"lines": [{"product": product.pk, "quantity": 1}], "webhooks": "never"},
        "application/json", headers={"Idempotency-Key": f"crash-{customer.pk}"},
    )
def charges():
    order = customer.orders.get()
    return Charge.objects.filter(reference=str(order.pk)).count(), order.status
with mock.patch.object(Payment.objects, "create", side_effect=RuntimeError("lights out")):
    print(check_out().status_code, *charges())
print(check_out().status_code, *charges())
"""
    assert demo.run(code).splitlines() == ["500 1 placed", "201 1 paid"]
