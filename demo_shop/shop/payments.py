"""From an order to its money, and back: stepwise operations around a provider that may not answer.

    reserve ─ charge ─ (bank) ─ confirm         a checkout; a declined card undoes `reserve`
    claim   ─ charge ─ (bank) ─ confirm         paying for an order that was placed before

They are functions, not views: when nobody is left to retry, the completer goes on with them. Refunding
is `operation.reverse()`, which runs the `compensate=` of every step, the last one first.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from decimal import Decimal
from typing import Any

from django.contrib.auth import get_user_model
from django.db import transaction
from django.urls import reverse

from demo_shop.provider import gateway
from demo_shop.provider.models import Charge
from idempotency import engine, outbox
from idempotency.decorators import idempotent_function
from idempotency.exceptions import IllegalTransition
from idempotency.models import Operation, Status
from idempotency.reconciliation import Absent, Confirmed, StillUnknown, resolve

from .exceptions import AlreadyPaid, AlreadyPaying, NotPaid, PaymentRefused, ShopError
from .models import Address, CartItem, Order, Payment, Product

#: The shop's merchant account at the provider, for orders that are protected.
ACCOUNT = "shop-protected"


def owned_by(customer: int) -> tuple[str, ...]:
    """The scope of a customer's own operations: the one that their requests have, too."""
    return (f"user:{customer}",)


@idempotent_function(
    name="shop.checkout",
    key=lambda **given: given["key"],
    scope=lambda **given: owned_by(given["customer"]),
    failures=(ShopError,),
    stepwise=True,
    lease=30,
)
def check_out(
    *,
    key: str,
    customer: int,
    lines: list[list[int]],
    address: uuid.UUID | None,
    card: str,
    mode: str,
    webhooks: str,
) -> dict[str, Any]:
    """Place an order of [product, quantity] `lines` and pay for it; see `take_payment`.

    Raises StoredFailure of a ShopError when nothing was bought: the goods are back on the shelf.
    """
    order = engine.current().step(
        "reserve", reserve, customer=customer, lines=lines, address=address, compensate=close
    )
    return take_payment(order, card=card, mode=mode, webhooks=webhooks)


@idempotent_function(
    name="shop.pay",
    key=lambda **given: given["key"],
    scope=lambda **given: owned_by(given["customer"]),
    failures=(ShopError,),
    stepwise=True,
    lease=30,
)
def pay_for(
    *, key: str, customer: int, order: uuid.UUID, card: str, mode: str, webhooks: str
) -> dict[str, Any]:
    """Pay for an order that was placed before."""
    engine.current().step("claim", claim, order, compensate=close)
    return take_payment(order, card=card, mode=mode, webhooks=webhooks)


def take_payment(order_id: uuid.UUID, *, card: str, mode: str, webhooks: str) -> dict[str, Any]:
    """Charge the order and confirm it; or ask for the approval of the card's bank first.

    The provider's key follows from the operation, so it is the same however often this runs.
    """
    operation = engine.current()
    order = Order.objects.get(pk=order_id)
    try:
        charge = operation.call(
            "charge",
            charge_card,
            idempotency_key=operation.derive_key("charge"),
            amount=order.total,
            card=card,
            reference=str(order.pk),
            mode=mode,
            webhooks=webhooks,
            failures=(gateway.ProviderError,),
            reconcile=find_charge,
            compensate=give_back,
        )
    except gateway.ProviderError as error:
        raise PaymentRefused(str(error)) from error
    if charge["status"] == Charge.Status.PENDING:
        answer = operation.requires_action("bank")
        if answer is None:
            page = reverse("bank", args=[charge["id"]])
            return {"order": order.pk, "status": "requires_action", "action_url": page}
        if not answer["approved"]:
            raise PaymentRefused("Your bank did not get your approval.")
    operation.step(
        "confirm", confirm, order.pk, charge["id"], charge["amount"], compensate=begin_refund
    )
    return {"order": order.pk, "status": "paid"}


# Steps and what undoes them. A compensation is called with the step's result and a key of its own.


def reserve(*, customer: int, lines: list[list[int]], address: uuid.UUID | None) -> uuid.UUID:
    operation = engine.current()
    products = Product.objects.in_bulk([pk for pk, _ in lines])
    order = Order.objects.place(
        customer=get_user_model().objects.get(pk=customer),
        lines=[(products[pk], quantity) for pk, quantity in lines],
        address=Address.objects.filter(pk=address, owner_id=customer).first(),
        id=uuid.uuid5(operation.pk, "order"),
        operation=operation.pk,
    )
    refer(operation, order)
    return order.pk


def claim(order_id: uuid.UUID) -> uuid.UUID:
    """See to it that no other operation pays for the order meanwhile, whatever its key is."""
    operation = engine.current()
    order = Order.objects.select_for_update().get(pk=order_id)
    if order.status != Order.Status.PLACED:
        raise AlreadyPaid(f"This order is {order.get_status_display()} already.")
    if order.operation not in (None, operation.pk):
        raise AlreadyPaying("A payment for this order is under way.")
    order.operation = operation.pk
    order.save(update_fields=["operation"])
    refer(operation, order)
    return order.pk


def refer(operation: Operation, order: Order) -> None:
    """Let support find the operation by what the customer quotes, and by what the provider knows."""
    operation.refer("order", order.pk)
    operation.refer("number", order.number)


def close(order_id: uuid.UUID, *, key: str) -> None:
    """The end of a payment that did not come to be, or of a refund."""
    order = Order.objects.select_for_update().get(pk=order_id)
    if order.status == Order.Status.REFUNDING:
        order.restock()
        order.become(Order.Status.REFUNDED)
        outbox.enqueue("order.refunded", {"order": order.pk}, key=f"refunded:{order.pk}")
    elif order.pk == uuid.uuid5(order.operation or order.pk, "order"):  # made by the checkout
        order.restock()
        order.become(Order.Status.CANCELLED)
    else:
        Order.objects.filter(pk=order.pk).update(operation=None)


def charge_card(**given: Any) -> dict[str, Any]:
    return described(gateway.charge(account=ACCOUNT, **given))


def find_charge(*, key: str) -> Confirmed | Absent | StillUnknown:
    """Ask the provider what became of the call with this key."""
    try:
        found = gateway.find(account=ACCOUNT, idempotency_key=key)
    except gateway.StillRunning:
        return StillUnknown()
    return Absent() if found is None else Confirmed(described(found))


def give_back(charge: dict[str, Any], *, key: str) -> None:
    gateway.refund(charge["id"])


def described(charge: Charge) -> dict[str, Any]:
    return {"id": charge.pk, "status": str(charge.status), "amount": charge.amount}


def confirm(order_id: uuid.UUID, charge_id: uuid.UUID, amount: Decimal) -> uuid.UUID:
    """Where the checkout and the provider's webhook meet: whoever is second waits, and finds it done."""
    with transaction.atomic():
        order = Order.objects.select_for_update().get(pk=order_id)
        operation = engine.current()
        if operation is not None and operation.name == "shop.checkout":
            products = order.lines.values("product")
            CartItem.objects.filter(cart__owner=order.customer_id, product__in=products).delete()
        mark_paid(order=order_id, charge=charge_id, amount=amount)
    return order_id


@idempotent_function(name="shop.mark_paid", key=lambda *, charge, **_: str(charge))
def mark_paid(*, order: uuid.UUID, charge: uuid.UUID, amount: Decimal) -> str:
    """The order is paid, and its customer will be told: once per charge. Returns the order's status."""
    found = Order.objects.select_for_update().get(pk=order)
    if found.status == Order.Status.PLACED:
        Payment.objects.create(order=found, amount=amount, charge_id=charge)
        found.become(Order.Status.PAID)
        outbox.enqueue("order.paid", {"order": found.pk}, key=f"paid:{found.pk}")
    return found.status


def begin_refund(order_id: uuid.UUID, *, key: str) -> None:
    Order.objects.select_for_update().get(pk=order_id).become(Order.Status.REFUNDING)


# What is learned later, from a webhook or a browser that comes back.


def learn(order: Order, charge: Charge) -> None:
    """The provider says what became of the order's charge: settle whatever waits for that."""
    is_paid = charge.status == Charge.Status.CAPTURED
    with transaction.atomic():
        settle(order, charge, is_paid=is_paid)
        if is_paid:
            confirm(order.pk, charge.pk, charge.amount)


def settle(order: Order, charge: Charge, *, is_paid: bool) -> None:
    """Let the order's operation go on, if it waits. It may be settled by somebody else already."""
    waiting = Operation.objects.filter(
        pk=order.operation, status__in=[Status.RECONCILING, Status.REQUIRES_ACTION]
    ).first()
    if waiting is None or waiting.derive_key("charge") != charge.idempotency_key:
        return
    if waiting.status == Status.REQUIRES_ACTION:
        answer = {"approved": is_paid}
    elif is_paid:
        answer = described(charge)
    else:
        return  # its reconciler asks
    with suppress(IllegalTransition):
        resolve(waiting, Confirmed(answer), evidence="the provider says so")


def refund(order: Order) -> None:
    """Undo the operation that paid for the order: money, goods, and an e-mail about it; once.

    Raises NotPaid, and InProgress while it is being refunded.
    """
    operation = Operation.objects.filter(pk=order.operation).first()
    if operation is None or order.status not in (
        Order.Status.PAID,
        Order.Status.REFUNDING,
        Order.Status.REFUNDED,
    ):
        raise NotPaid("Only a paid order can be refunded.")
    try:
        operation.reverse(reason="the customer asked for it")
    except IllegalTransition as error:  # paid by a webhook, while its checkout has not ended yet
        raise NotPaid("The payment has not finished yet. Try again in a moment.") from error
