"""Webhooks killed at every point: the sender comes again, and each handler has had one effect."""

from __future__ import annotations

from typing import Any

import pytest

from idempotency import outbox, outbox_handlers
from idempotency.models import MessageStatus, OutboxMessage
from idempotency.outbox import relays
from idempotency.webhooks import Delivery
from tests.app.models import Effect
from tests.callers import effects, new_key
from tests.crashes.points import crashes, reach
from tests.outboxes import make_due
from tests.processes import eventually
from tests.senders import Hook, deliver

pytestmark = pytest.mark.django_db(transaction=True)

assert outbox_handlers  # the relay's


class Now(Hook):
    """Handled while the sender waits."""


class First(Hook):
    """Acknowledged first."""

    acknowledge_first = True


for view in (Now, First):
    for name in ("ship", "mail"):

        @view.handles("paid", name=name)
        def handle(delivery: Delivery, name: str = name) -> None:
            Effect.objects.create(label=f"{name} {delivery.id}")
            reach(f"in {name}")


def is_delivered(view: Any, delivery: str) -> bool:
    return deliver(view, delivery).status_code == 200


def is_relayed() -> bool:
    make_due()
    outbox.relay()
    return not OutboxMessage.objects.filter(status=MessageStatus.PENDING).exists()


def both(delivery: str) -> tuple[int, int]:
    return effects(f"ship {delivery}"), effects(f"mail {delivery}")


def test_a_request_killed_at_any_point_is_made_good_by_the_redelivery() -> None:
    """BUGS P13, and the answer that never arrives."""
    killed = 0
    for crash in crashes(new_key, lambda key: deliver(Now, key)):
        eventually(lambda key=crash.key: is_delivered(Now, key), f"success after {crash}")
        assert both(crash.key) == (1, 1), crash
        killed += 1
    assert killed > 15


def test_an_acknowledgement_killed_at_any_point_is_made_good_by_the_redelivery() -> None:
    """Durable or not, the next attempt finds out."""
    killed = 0
    for crash in crashes(new_key, lambda key: deliver(First, key)):
        eventually(lambda key=crash.key: is_delivered(First, key), f"success after {crash}")
        eventually(is_relayed, f"everything relayed after {crash}")
        assert both(crash.key) == (1, 1), crash
        killed += 1
    assert killed > 5


def test_a_relay_killed_at_any_point_is_made_good_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BUGS P13: what was acknowledged is handled, and once, without the sender's help."""
    # A mark after every message, however fast the machine is: each run passes the same points.
    monkeypatch.setattr(relays, "FLUSH_SECONDS", 0)

    def acknowledged() -> str:
        assert is_relayed()  # so that the relay finds nothing of an earlier delivery
        key = new_key()
        assert is_delivered(First, key)
        return key

    killed = 0
    for crash in crashes(acknowledged, lambda key: outbox.relay(), between=True):
        eventually(is_relayed, f"everything relayed after {crash}")
        assert both(crash.key) == (1, 1), crash
        killed += 1
    assert killed > 10
