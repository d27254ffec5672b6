"""Found by the relay: runs the handlers of webhook deliveries that were acknowledged first."""

from __future__ import annotations

from . import outbox
from .exceptions import ConfigurationError
from .webhooks.deliveries import NotBegun, NotYet
from .webhooks.handlers import run
from .webhooks.stored import TOPIC, find, unpack
from .webhooks.views import WebhookView


@outbox.handler(f"{TOPIC}*", name="idempotency.webhooks")
def run_stored(message: outbox.Message) -> None:
    """Run the one handler that the stored delivery waits for."""
    view, name = _view(message.payload["view"]), message.payload["handler"]
    handler = next((found for found in view.handlers() if found.name == name), None)
    if handler is None:
        raise ConfigurationError(
            f"{type(view).__name__} has no handler {name!r} here: import its module in "
            "AppConfig.ready(), and name handlers before you rename their functions."
        )
    delivery = unpack(message.payload, attempt=message.attempt)
    try:
        run(view, handler, delivery)
    except NotYet as error:
        raise outbox.PublishFailed("not yet") from error
    except NotBegun as refused:
        raise refused.refusal from None


def _view(path: str) -> WebhookView:
    found = find(path)
    if not (isinstance(found, type) and issubclass(found, WebhookView)):
        raise ConfigurationError(f"{path} is no WebhookView.")
    return found()
