"""Outgoing webhooks: outbox messages as signed Standard Webhooks requests.

Needs the package `standardwebhooks` (extra `webhooks`).
Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

import email.utils
import http.client
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from standardwebhooks import Webhook

from ..exceptions import ConfigurationError
from ..outbox import Message, PermanentFailure, PublishFailed, RetryAfter
from ..outbox.posting import post
from ..outbox.relays import backoff

#: A receiver can ask for at most this many seconds of patience.
LONGEST_RETRY_AFTER = 24 * 3600.0


@dataclass(frozen=True)
class Endpoint:
    """A receiver: its URL and the secrets (`whsec_...`) that sign for it, the newest first.

    With several secrets, as during a rotation, the request carries a signature of each.
    """

    url: str
    secrets: Sequence[str]

    def __repr__(self) -> str:
        return "Endpoint(...)"  # URLs of webhooks are often secrets, too


class WebhookPublisher:
    """POSTs each message to one endpoint; every attempt has the same `webhook-id` and its own timestamp.

    `endpoint` is an Endpoint, or a callable that finds it for a message; to reach several receivers
    enqueue one message for each. The body is `{"type": topic, "timestamp": ..., "data": payload}`, the
    same bytes on every attempt. 2xx is delivered; 410 Gone is a PermanentFailure; anything else is
    sent again after the back-off, or after the receiver's `Retry-After` if that is longer.

    `timeout` bounds one attempt, in seconds, but for the look-up of the name; it must stay well below
    `OUTBOX_LEASE`. Addresses that are not public are refused unless `allow_private`, plain http unless
    `allow_http`. No redirects.
    """

    def __init__(
        self,
        endpoint: Endpoint | Callable[[Message], Endpoint],
        *,
        timeout: float = 15.0,
        allow_private: bool = False,
        allow_http: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self.allow_private = allow_private
        self.allow_http = allow_http

    def publish(self, message: Message) -> None:
        endpoint = self.endpoint if isinstance(self.endpoint, Endpoint) else self.endpoint(message)
        if not endpoint.secrets:
            raise ConfigurationError("An Endpoint needs at least one secret to sign with.")
        body = self.body(message)
        now = datetime.now(UTC)
        signatures = (
            Webhook(secret).sign(str(message.id), now, body) for secret in endpoint.secrets
        )
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "django-idempotency",
            "Idempotency-Key": f'"{message.id}"',
            "webhook-id": str(message.id),
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(signatures),
        }
        try:
            answer = post(
                endpoint.url,
                body.encode(),
                headers,
                timeout=self.timeout,
                allow_private=self.allow_private,
                allow_http=self.allow_http,
            )
        except (OSError, http.client.HTTPException) as error:
            raise PublishFailed(f"no answer: {type(error).__name__}") from error
        if 200 <= answer.status < 300:
            return
        if answer.status == 410:
            raise PermanentFailure("HTTP 410: the receiver wants no more")
        wanted = retry_after(answer.headers.get("Retry-After"), now)
        raise RetryAfter(max(wanted, backoff(message.attempt)), f"HTTP {answer.status}")

    def body(self, message: Message) -> str:
        """The request's body, as JSON text. Must be the same on every attempt."""
        envelope = {
            "type": message.topic,
            "timestamp": message.created_at.astimezone(UTC).isoformat(),
            "data": message.payload,
        }
        return json.dumps(envelope, separators=(",", ":"))


def retry_after(value: str | None, now: datetime) -> float:
    """Seconds that a Retry-After header asks for (RFC 9110 section 10.2.3); 0 if it asks for nothing."""
    if value is None:
        return 0.0
    value = value.strip()
    if value.isascii() and value.isdigit():
        return min(float(value), LONGEST_RETRY_AFTER)
    try:
        date = email.utils.parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return min(max(0.0, (date - now).total_seconds()), LONGEST_RETRY_AFTER)
