"""`manage.py seed_demo`: what the shop needs to be looked at. Safe to run any number of times."""

from __future__ import annotations

import uuid
from decimal import Decimal
from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand
from rest_framework.authtoken.models import Token

from demo_shop.keepsakes import keepsake
from demo_shop.shop.factories import AdminFactory, CartFactory, CustomerFactory, ProductFactory
from demo_shop.shop.models import Address

CATALOGUE = [
    ("Desk lamp", "74.00", "Warm light, one switch. Pressing it twice turns it off, by design."),
    ("Espresso cup", "14.50", "Thick glaze, small handle. Holds one intent's worth of coffee."),
    ("Field notebook", "9.90", "Ninety-six dotted pages for what you meant to do once."),
    (
        "Headphones",
        "129.00",
        "Closed, over the ear. For hearing each event exactly as often as sent.",
    ),
    ("House plant", "24.00", "Grows on its own schedule. Watering it again is not idempotent."),
    ("Mechanical keyboard", "149.00", "Quiet switches for people who double-click."),
    ("Rucksack", "89.00", "Twenty litres, one big pocket, survives a train through a tunnel."),
    ("Steel bottle", "27.00", "Keeps half a litre cold for 24 hours, as long as a replay window."),
]


class Command(BaseCommand):
    help = "Creates the demo shop's catalogue, an admin and a customer; keeps what is there."

    def handle(self, *args: Any, **options: Any) -> None:
        for name, price, description in CATALOGUE:
            ProductFactory(name=name, price=Decimal(price), description=description, stock=100)
        admin = AdminFactory(username="admin", first_name="Ada", last_name="Admin")
        customer = CustomerFactory(username="customer", first_name="Carla", last_name="Customer")
        CartFactory(owner=customer)
        for user in (admin, customer):
            self.set_password(user)
        Address.objects.get_or_create(
            id=uuid.uuid5(uuid.NAMESPACE_URL, "demo-shop:address"),
            defaults={
                "owner": customer,
                "recipient": customer.get_full_name(),
                "street": "1 Retry Lane",
                "city": "Onceford",
                "postcode": "20100",
                "country": "Utopia",
            },
        )
        Token.objects.get_or_create(user=customer)
        if options["verbosity"] > 0:
            self.stdout.write(f"{len(CATALOGUE)} products, logins: {admin}, {customer}")

    @staticmethod
    def set_password(user: User) -> None:
        password = keepsake(f"{user.username}-password")
        if not user.check_password(password):
            user.set_password(password)
            user.save(update_fields=["password"])
