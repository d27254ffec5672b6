"""Who sent it: signatures over the exact bytes that arrived, compared in constant time.

A verifier is called with (body, headers) and raises BadSignature; nothing about the request may be
trusted, parsed or stored before. Several secrets may be active (rotation), and a header may carry
several signatures; any match is enough. Malformed secrets raise ConfigurationError when the verifier
is made, not when somebody's request arrives.

A verifier also knows its sender's habits, which a view takes over unless it says otherwise:
`delivery_id`, `event_type` and `varying_fields` (see `WebhookView`).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any, Literal

from ..exceptions import ConfigurationError, IdempotencyError

Secret = str | bytes
Secrets = Secret | Iterable[Secret]
Headers = Mapping[str, str]

_STANDARD = "whsec_"


class BadSignature(IdempotencyError):
    """The request is not from the sender, or too old, or too far in the future."""


class HmacVerifier:
    """HMAC of the body in one header: GitHub, Shopify and most others.

    `prefix` stands before the signature ("sha256="), `encoding` is how the digest is written: "hex" or
    "base64". Text secrets are used as UTF-8. Raises ConfigurationError for an unknown algorithm or
    encoding, or an unusable secret.
    """

    varying_fields: Collection[str] = ()

    def __init__(
        self,
        secrets: Secrets,
        *,
        header: str,
        algorithm: str = "sha256",
        prefix: str = "",
        encoding: Literal["hex", "base64"] = "hex",
        delivery_id: str | Callable[[Any], str] | None = None,
        event_type: str | None = None,
    ) -> None:
        self.secrets = [_text_secret(secret) for secret in _several(secrets)]
        try:
            hmac.digest(b"secret", b"", algorithm)
        except ValueError:
            raise ConfigurationError(f"no HMAC with the algorithm {algorithm!r}") from None
        if encoding not in ("hex", "base64"):
            raise ConfigurationError(f'encoding is "hex" or "base64", not {encoding!r}')
        self.header = header
        self.algorithm = algorithm
        self.prefix = prefix
        self.decode = _unhex if encoding == "hex" else _unbase64
        self.delivery_id = delivery_id
        self.event_type = event_type

    def __call__(self, body: bytes, headers: Headers) -> None:
        signature = _header(headers, self.header)
        if not signature.startswith(self.prefix):
            raise BadSignature(f"no {self.header} header of the expected form")
        given = self.decode(signature.removeprefix(self.prefix))
        _match([given], (hmac.digest(secret, body, self.algorithm) for secret in self.secrets))


def github(secrets: Secrets) -> HmacVerifier:
    """GitHub's X-Hub-Signature-256."""
    return HmacVerifier(
        secrets,
        header="X-Hub-Signature-256",
        prefix="sha256=",
        delivery_id="header:X-GitHub-Delivery",
        event_type="header:X-GitHub-Event",
    )


def shopify(secrets: Secrets) -> HmacVerifier:
    """Shopify's X-Shopify-Hmac-Sha256."""
    return HmacVerifier(
        secrets,
        header="X-Shopify-Hmac-Sha256",
        encoding="base64",
        delivery_id=_shopify_id,
        event_type="header:X-Shopify-Topic",
    )


def _shopify_id(delivery: Any) -> str:
    # What happened once may be told under several topics, with one event id and different bodies.
    event, topic = (delivery.headers.get(f"X-Shopify-{name}") for name in ("Event-Id", "Topic"))
    return f"{topic or ''}:{event}" if event else ""


class _Timestamped:
    """Signatures that cover a timestamp, so that a captured request cannot be sent for ever.

    `tolerance` is in seconds (or a timedelta), both ways, of clocks read in whole seconds: 0 accepts the
    same second only, None any age (the delivery id still deduplicates, as long as it is remembered).
    """

    delivery_id: str
    event_type = "json:type"
    varying_fields: Collection[str] = ()

    def __init__(self, tolerance: float | timedelta | None, clock: Callable[[], float]) -> None:
        seconds = tolerance.total_seconds() if isinstance(tolerance, timedelta) else tolerance
        if seconds is not None and not seconds >= 0:  # NaN is no limit either
            raise ConfigurationError("tolerance is in seconds, or None for no limit")
        self.tolerance = seconds
        self.clock = clock

    def check_time(self, timestamp: str) -> None:
        if not (timestamp.isascii() and timestamp.isdecimal() and len(timestamp) <= 12):
            raise BadSignature("the timestamp is not a number of seconds")
        age = math.floor(self.clock()) - int(timestamp)
        if self.tolerance is not None and abs(age) > self.tolerance:
            raise BadSignature("the timestamp is too old or in the future")


class StandardWebhooksVerifier(_Timestamped):
    """Standard Webhooks: webhook-id, webhook-timestamp, webhook-signature.

    Secrets are `whsec_` and base64 text, or the raw key as bytes. `prefix` begins the names of the three
    headers; Svix and many of its customers send "svix-". Asymmetric signatures (`v1a`) are ignored.
    Raises ConfigurationError for a malformed secret.

    Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
    """

    def __init__(
        self,
        secrets: Secrets,
        *,
        tolerance: float | timedelta | None = 300,
        prefix: str = "webhook-",
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(tolerance, clock)
        self.secrets = [_standard_secret(secret) for secret in _several(secrets)]
        self.prefix = prefix
        self.delivery_id = f"header:{prefix}id"

    def __call__(self, body: bytes, headers: Headers) -> None:
        delivery, timestamp, signatures = (
            _header(headers, self.prefix + name) for name in ("id", "timestamp", "signature")
        )
        if not (delivery and timestamp and signatures):
            raise BadSignature(f"{self.prefix}id, -timestamp or -signature is missing")
        self.check_time(timestamp)
        given = [
            _unbase64(token.removeprefix("v1,"))
            for token in signatures.split(" ")
            if token.startswith("v1,")
        ]
        # Header values reach Django decoded as Latin-1: encoded so, they are the bytes that were sent.
        signed = _header_bytes(f"{delivery}.{timestamp}.") + body
        _match(given, (hmac.digest(secret, signed, "sha256") for secret in self.secrets))


class StripeVerifier(_Timestamped):
    """Stripe's `Stripe-Signature: t=…,v1=…,v1=…`. Secrets are used as Stripe shows them.

    Source: https://docs.stripe.com/webhooks#verify-manually
    """

    delivery_id = "json:id"
    #: Counts the endpoints that have not answered yet, so it may differ from attempt to attempt.
    varying_fields = ("pending_webhooks",)

    def __init__(
        self,
        secrets: Secrets,
        *,
        tolerance: float | timedelta | None = 300,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(tolerance, clock)
        self.secrets = [_text_secret(secret) for secret in _several(secrets)]

    def __call__(self, body: bytes, headers: Headers) -> None:
        items = [
            item.strip().partition("=") for item in _header(headers, "Stripe-Signature").split(",")
        ]
        timestamps = [value for name, _, value in items if name == "t"]
        if len(timestamps) != 1:
            raise BadSignature("Stripe-Signature has no single timestamp")
        self.check_time(timestamps[0])
        given = [_unhex(value) for name, _, value in items if name == "v1"]
        signed = timestamps[0].encode() + b"." + body
        _match(given, (hmac.digest(secret, signed, "sha256") for secret in self.secrets))


def _match(given: list[bytes], expected: Iterable[bytes]) -> None:
    """Compare every given signature with every expected one, whatever matches first."""
    matched = False
    for good in expected:
        for candidate in given:
            matched |= hmac.compare_digest(good, candidate)
    if not matched:
        raise BadSignature("no signature matches")


def _header(headers: Headers, name: str) -> str:
    """A header's value whatever its case, also from a plain dict; "" if there is none."""
    found = headers.get(name)
    if found is None:
        wanted = name.lower()
        found = next((value for key, value in headers.items() if key.lower() == wanted), "")
    return found


def _several(secrets: Secrets) -> list[Any]:
    try:
        several = [secrets] if isinstance(secrets, str | bytes) else list(secrets)
    except TypeError:
        several = []
    if not several or not all(secret and isinstance(secret, str | bytes) for secret in several):
        raise ConfigurationError(
            "a webhook verifier needs its secret, or a list of them; an empty one verifies anybody"
        )
    return several


def _text_secret(secret: Secret) -> bytes:
    if isinstance(secret, bytes):
        return secret
    if secret != secret.strip():
        raise ConfigurationError(
            "a webhook secret begins or ends with white space, such as the line end of a file; "
            "strip it, or pass bytes if it is meant"
        )
    return secret.encode()


def _standard_secret(secret: Secret) -> bytes:
    if isinstance(secret, bytes):
        if secret.startswith(_STANDARD.encode()):
            raise ConfigurationError(
                "pass a secret that starts with 'whsec_' as str; bytes are raw keys"
            )
        return secret
    if not secret.startswith(_STANDARD):
        raise ConfigurationError(
            "a Standard Webhooks secret starts with 'whsec_'; pass raw keys as bytes"
        )
    text = secret.removeprefix(_STANDARD)
    decoded = _unbase64(text + "=" * (-len(text) % 4))
    if not decoded:
        raise ConfigurationError("the Standard Webhooks secret after 'whsec_' is not base64")
    return decoded


def _header_bytes(text: str) -> bytes:
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise BadSignature("a header has characters that no sender can send") from None


def _unhex(text: str) -> bytes:
    """The bytes, or b"" (which matches nothing) for anything that is not hexadecimal."""
    try:
        return binascii.unhexlify(text)
    except ValueError:
        return b""


def _unbase64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""
