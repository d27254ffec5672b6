"""Webhooks in: verified over the exact bytes, then each handler once per delivery."""

from .deliveries import Delivery, NotYet
from .verifiers import (
    BadSignature,
    HmacVerifier,
    StandardWebhooksVerifier,
    StripeVerifier,
    github,
    shopify,
)
from .views import WebhookView

__all__ = [
    "BadSignature",
    "Delivery",
    "HmacVerifier",
    "NotYet",
    "StandardWebhooksVerifier",
    "StripeVerifier",
    "WebhookView",
    "github",
    "shopify",
]
