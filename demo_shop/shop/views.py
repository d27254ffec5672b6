"""The shop's pages. `buy_now` is the plain Django view with a key: a form that may be sent twice."""

from __future__ import annotations

import uuid

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST

from demo_shop.provider import gateway
from demo_shop.provider.models import Charge
from idempotency.decorators import idempotent
from idempotency.exceptions import Refusal

from . import payments
from .exceptions import ShopError
from .forms import BuyForm, CartForm
from .models import Address, Cart, Order, Product


def catalogue(request: HttpRequest) -> HttpResponse:
    return render(request, "shop/catalogue.html", {"products": Product.objects.all()})


def product(request: HttpRequest, slug: str) -> HttpResponse:
    """One product; every time the page is shown, its buy button stands for a new intent."""
    context = {
        "product": get_object_or_404(Product, slug=slug),
        "form": BuyForm(),
        "key": uuid.uuid4(),
    }
    return render(request, "shop/product.html", context)


@login_required
@require_POST
@idempotent(required=True, key="form:idempotency_key", exclude_fields=["csrfmiddlewaretoken"])
def buy_now(request: HttpRequest, slug: str) -> HttpResponse:
    """Order one product at once. A double click, a refresh or the back button orders once."""
    form = BuyForm(request.POST)
    if not form.is_valid():
        return render(request, "shop/refused.html", {"reason": "How many?"}, status=400)
    try:
        order = Order.objects.place(
            customer=request.user,
            lines=[(get_object_or_404(Product, slug=slug), form.cleaned_data["quantity"])],
            id=uuid.uuid5(request.operation.id, "order"),
        )
    except ShopError as error:
        return render(request, "shop/refused.html", {"reason": str(error)}, status=409)
    payments.refer(request.operation, order)
    return redirect(order)


def refused(request: HttpRequest, refusal: Refusal) -> HttpResponse | None:
    """A page for people whose form was refused; the API answers with problem documents."""
    if request.path.startswith("/api/") or not request.accepts("text/html"):
        return None
    return render(request, "shop/refused.html", {"refusal": refusal}, status=refusal.status)


@login_required
def cart(request: HttpRequest) -> HttpResponse:
    return render(request, "shop/cart.html", {"cart": cart_of(request)})


@login_required
@require_POST
def put_in_cart(request: HttpRequest, slug: str) -> HttpResponse:
    """Have so many of a product in the cart. Absolute, so no key: repeating it is harmless."""
    form = CartForm(request.POST)
    if form.is_valid():
        cart_of(request).put(get_object_or_404(Product, slug=slug), form.cleaned_data["quantity"])
    return redirect("shop:cart")


@login_required
def checkout(request: HttpRequest) -> HttpResponse:
    """The order before it is paid. `checkout.js` sends it, with one key however often it tries."""
    cart = cart_of(request)
    context = {
        "cart": cart,
        "lines": [{"product": product.pk, "quantity": n} for product, n in cart.lines()],
        "address": request.user.addresses.order_by("pk").first() or Address(),
        "modes": gateway.MODES,
        "webhooks": gateway.WEBHOOKS,
    }
    return render(request, "shop/checkout.html", context)


@login_required
def orders(request: HttpRequest) -> HttpResponse:
    orders = request.user.orders.prefetch_related("lines__product")[:50]
    return render(request, "shop/orders.html", {"orders": orders})


@login_required
def order(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
    order = get_object_or_404(
        Order.objects.select_related("address", "payment"), pk=pk, customer=request.user
    )
    context = {
        "order": order,
        "charges": Charge.objects.filter(reference=str(order.pk)),
        "mails": order.mails.all(),
        "modes": gateway.MODES,
        "webhooks": gateway.WEBHOOKS,
    }
    return render(request, "shop/order.html", context)


@login_required
def tills(request: HttpRequest) -> HttpResponse:
    """Two tills side by side: the same purchase with and without a key."""
    context = {
        "product": Product.objects.order_by("price").first(),
        "modes": gateway.MODES,
        "webhooks": gateway.WEBHOOKS,
    }
    return render(request, "shop/tills.html", context)


def cart_of(request: HttpRequest) -> Cart:
    return Cart.objects.get_or_create(owner=request.user)[0]
