from __future__ import annotations

from typing import Any

from django.db.models import Sum
from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject

from .models import CartItem


def cart(request: HttpRequest) -> dict[str, Any]:
    """How many pieces the cart in the page's head shows; asked only by pages that have the head."""

    def pieces() -> int:
        if not request.user.is_authenticated:
            return 0
        return (
            CartItem.objects.filter(cart__owner=request.user).aggregate(n=Sum("quantity"))["n"] or 0
        )

    return {"cart_pieces": SimpleLazyObject(pieces)}
