"""Found by the relay: runs webhook deliveries that were acknowledged first."""

from . import outbox
from .webhooks.views import TOPIC, run_stored

outbox.handler(f"{TOPIC}*", name="idempotency.webhooks")(run_stored)
