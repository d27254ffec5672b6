"""The page on which a bank asks the holder of a card (3-D Secure)."""

from __future__ import annotations

import uuid

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse

from . import gateway
from .models import Charge


def bank(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
    """Approve or refuse a pending charge, then go back to the shop. The last word counts once."""
    charge = get_object_or_404(Charge, pk=pk)
    if request.method == "POST":
        gateway.authenticate(charge.pk, approved=request.POST.get("answer") == "approve")
        return redirect(f"{reverse('shop:order', args=[charge.reference])}?back=bank")
    return render(request, "provider/bank.html", {"charge": charge})
