"""Where the relay looks for the handlers of an app."""

from idempotency import outbox
from tests.app.models import Effect


@outbox.handler("testapp.discovered", name="testapp.discovered")
def discovered(message: outbox.Message) -> None:
    Effect.objects.create(label="discovered")
