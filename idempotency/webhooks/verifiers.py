"""Who sent it: signatures over the exact bytes that arrived, compared in constant time.

A verifier is called with (body, headers) and raises BadSignature; nothing about the request may be
trusted, parsed or stored before. Several secrets may be active (rotation), and a header may carry
several signatures; any match is enough.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from ..exceptions import ConfigurationError, IdempotencyError

Secret = str | bytes
Headers = Mapping[str, str]


class BadSignature(IdempotencyError):
    """The request is not from the sender, or too old, or too far in the future."""


class HmacVerifier:
    """HMAC of the body in one header: GitHub, Shopify and most others.

    `prefix` stands before the signature ("sha256="), `encoding` is how the digest is written.
    """

    def __init__(
        self,
        secrets: Secret | Sequence[Secret],
        *,
        header: str,
        algorithm: str = "sha256",
        prefix: str = "",
        encoding: Literal["hex", "base64"] = "hex",
    ) -> None:
        if algorithm not in hashlib.algorithms_available:
            raise ConfigurationError(f"no hash algorithm {algorithm!r}")
        self.secrets = [_bytes(secret) for secret in _several(secrets)]
        self.header = header
        self.algorithm = algorithm
        self.prefix = prefix
        self.decode = _unhex if encoding == "hex" else _unbase64

    def __call__(self, body: bytes, headers: Headers) -> None:
        signature = headers.get(self.header, "")
        if not signature.startswith(self.prefix):
            raise BadSignature(f"no {self.header} header of the expected form")
        given = self.decode(signature.removeprefix(self.prefix))
        _match([given], (hmac.digest(secret, body, self.algorithm) for secret in self.secrets))


def github(secrets: Secret | Sequence[Secret]) -> HmacVerifier:
    """GitHub's X-Hub-Signature-256."""
    return HmacVerifier(secrets, header="X-Hub-Signature-256", prefix="sha256=")


def shopify(secrets: Secret | Sequence[Secret]) -> HmacVerifier:
    """Shopify's X-Shopify-Hmac-Sha256."""
    return HmacVerifier(secrets, header="X-Shopify-Hmac-Sha256", encoding="base64")


class _Timestamped:
    """Signatures that cover a timestamp, so that a captured request cannot be sent for ever.

    `tolerance` is in seconds, both ways; None accepts any age (the delivery id still deduplicates,
    for as long as operations are kept).
    """

    def __init__(self, tolerance: float | None, clock: Callable[[], float]) -> None:
        if tolerance is not None and tolerance < 0:
            raise ConfigurationError("tolerance is in seconds, or None for no limit")
        self.tolerance = tolerance
        self.clock = clock

    def check_time(self, timestamp: str) -> None:
        if not re.fullmatch(r"[0-9]{1,12}", timestamp):
            raise BadSignature("the timestamp is not a number of seconds")
        if self.tolerance is not None and abs(self.clock() - int(timestamp)) > self.tolerance:
            raise BadSignature("the timestamp is too old or in the future")


class StandardWebhooksVerifier(_Timestamped):
    """Standard Webhooks (standardwebhooks.com): webhook-id, webhook-timestamp, webhook-signature.

    Secrets are `whsec_` and base64 text, or bytes. Raises ConfigurationError for a malformed secret.
    """

    def __init__(
        self,
        secrets: Secret | Sequence[Secret],
        *,
        tolerance: float | None = 300,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(tolerance, clock)
        self.secrets = [_standard_secret(secret) for secret in _several(secrets)]

    def __call__(self, body: bytes, headers: Headers) -> None:
        delivery = headers.get("webhook-id", "")
        timestamp = headers.get("webhook-timestamp", "")
        signatures = headers.get("webhook-signature", "")
        if not (delivery and timestamp and signatures):
            raise BadSignature("webhook-id, webhook-timestamp or webhook-signature is missing")
        self.check_time(timestamp)
        given = [
            _unbase64(token.removeprefix("v1,"))
            for token in signatures.split(" ")
            if token.startswith("v1,")
        ]
        # Header values reach WSGI decoded as Latin-1: encoded so, they are the bytes that were sent.
        signed = _header_bytes(f"{delivery}.{timestamp}.") + body
        _match(given, (hmac.digest(secret, signed, "sha256") for secret in self.secrets))


class StripeVerifier(_Timestamped):
    """Stripe's `Stripe-Signature: t=…,v1=…,v1=…`."""

    def __init__(
        self,
        secrets: Secret | Sequence[Secret],
        *,
        tolerance: float | None = 300,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(tolerance, clock)
        self.secrets = [_bytes(secret) for secret in _several(secrets)]

    def __call__(self, body: bytes, headers: Headers) -> None:
        items = [
            item.strip().partition("=") for item in headers.get("Stripe-Signature", "").split(",")
        ]
        timestamps = [value for name, _, value in items if name == "t"]
        if len(timestamps) != 1:
            raise BadSignature("Stripe-Signature has no single timestamp")
        self.check_time(timestamps[0])
        given = [_unhex(value) for name, _, value in items if name == "v1"]
        signed = timestamps[0].encode() + b"." + body
        _match(given, (hmac.digest(secret, signed, "sha256") for secret in self.secrets))


def _match(given: list[bytes], expected: object) -> None:
    """Compare every given signature with every expected one, whatever matches first."""
    matched = False
    for good in expected:  # type: ignore[attr-defined]
        for candidate in given:
            matched |= bool(candidate) and hmac.compare_digest(good, candidate)
    if not matched:
        raise BadSignature("no signature matches")


def _several(secrets: Secret | Sequence[Secret]) -> list[Secret]:
    several = [secrets] if isinstance(secrets, str | bytes) else list(secrets)
    if not several or not all(several):
        raise ConfigurationError("a webhook verifier needs a secret; an empty one verifies anybody")
    return several


def _bytes(secret: Secret) -> bytes:
    return secret.encode() if isinstance(secret, str) else secret


def _standard_secret(secret: Secret) -> bytes:
    if isinstance(secret, bytes):
        return secret
    if not secret.startswith("whsec_"):
        raise ConfigurationError(
            "a Standard Webhooks secret starts with 'whsec_'; pass raw secrets as bytes"
        )
    text = secret.removeprefix("whsec_")
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
        return binascii.unhexlify(text.encode("ascii"))
    except (ValueError, UnicodeEncodeError):
        return b""


def _unbase64(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (ValueError, UnicodeEncodeError):
        return b""
