"""The provider misbehaves, the shop does not: one charge, one e-mail, and an end for every order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from .conftest import Answer, Demo


def check_out(demo: Demo, key: str, *, product: int = 0, **faults: str) -> Answer:
    lines = [{"product": demo.products[product], "quantity": 1}]
    return demo.post("/api/checkout/", {"lines": lines, **faults}, key=key)


def asked(demo: Demo, **faults: str) -> dict[str, Any]:
    """A checkout that waits for the approval of the card's bank."""
    answer = check_out(demo, str(uuid4()), card="tok_3ds", **faults)
    assert answer.status == 202
    return answer.json


@pytest.mark.parametrize("webhooks", ["once", "never"])
@pytest.mark.parametrize("mode", ["ok", "slow", "charged", "lost"])
def test_whatever_the_provider_does_there_is_one_charge_and_one_mail(
    demo: Demo, key: str, mode: str, webhooks: str
) -> None:
    first = check_out(demo, key, mode=mode, webhooks=webhooks)
    if mode in ("charged", "lost"):
        assert first.status == 409
        assert first.json["type"].endswith("outcome-unknown")
        assert (first.json["retryable"], first.json["key_action"]) == (False, "wait")
        assert demo.settled(first.json["status_url"])["status"] == "succeeded"
        first = check_out(demo, key, mode=mode, webhooks=webhooks)
    again = check_out(demo, key, mode=mode, webhooks=webhooks)
    assert (first.status, again.status, again.replayed) == (201, 201, True)
    assert again.body == first.body
    assert first.json["status"] == "paid"
    demo.until(lambda: demo.evidence(first.json)["emails"])
    evidence = demo.evidence(first.json)
    assert (evidence["charges"], evidence["emails"]) == (1, 1)


@pytest.mark.parametrize("mode", ["charged", "lost"])
def test_an_order_whose_customer_has_left_is_paid_all_the_same(
    demo: Demo, key: str, mode: str
) -> None:
    """No retry and no webhook: the reconciler asks, and the completer goes on."""
    url = check_out(demo, key, mode=mode, webhooks="never").json["status_url"]
    state = demo.settled(url)
    assert (state["status"], state["safe_to_retry"]) == ("succeeded", False)
    order = {"id": {r["name"]: r["value"] for r in state["references"]}["order"]}
    assert demo.order(order)["status"] == "paid"
    assert demo.evidence(order)["charges"] == 1


def test_a_new_key_does_not_pay_while_the_outcome_is_unknown(demo: Demo, key: str) -> None:
    """The payment's claim on the order is a second line of defence, for clients that invent a key.


    BUGS T07.
    """
    lines = [{"product": demo.products[0], "quantity": 1}]
    order = demo.post("/api/orders/", {"lines": lines}, key=str(uuid4())).json
    pay = f"/api/orders/{order['id']}/pay/"
    assert demo.post(pay, {"mode": "charged", "webhooks": "never"}, key=key).status == 409
    assert demo.post(pay, {"webhooks": "never"}, key=str(uuid4())).status == 409
    demo.until(lambda: demo.order(order)["status"] == "paid")
    assert demo.evidence(order)["charges"] == 1


def test_a_declined_card_puts_the_goods_back(demo: Demo, key: str) -> None:
    product = f"/api/products/{demo.products[4]}/"
    before = demo.get(product)["stock"]
    answer = check_out(demo, key, product=4, card="tok_declined")
    assert (answer.status, answer.json["detail"]) == (402, "The card was declined.")
    assert demo.get(product)["stock"] == before
    assert demo.get("/api/orders/")["results"][0]["status"] == "cancelled"  # the latest one
    state = demo.get(f"/api/operations/{key}/")
    assert (state["status"], state["key_action"]) == ("failed", "new_key")


@pytest.mark.parametrize(
    ("says", "status", "ends"),
    [("approve", "paid", "succeeded"), ("refuse", "cancelled", "reversed")],
)
def test_the_bank_decides_and_the_order_follows(
    demo: Demo, says: str, status: str, ends: str
) -> None:
    order = asked(demo)
    state = demo.get(order["status_url"])
    assert (state["status"], state["safe_to_retry"]) == ("requires_action", False)
    assert demo.evidence(order)["charges"] == 0
    demo.answer_bank(order["action_url"], says)
    demo.until(lambda: demo.order(order)["status"] == status)
    demo.until(lambda: demo.get(order["status_url"])["status"] == ends)
    assert demo.evidence(order)["charges"] == (1 if says == "approve" else 0)


@pytest.mark.parametrize(("webhooks", "repeats"), [("twice", 2), ("shuffled", 0)])
def test_repeated_and_reordered_webhooks_change_nothing(
    demo: Demo, key: str, webhooks: str, repeats: int
) -> None:
    order = check_out(demo, key, webhooks=webhooks).json
    demo.until(lambda: demo.evidence(order)["webhooks"] == 2)
    demo.until(lambda: demo.evidence(order)["duplicates"] == repeats)
    demo.until(lambda: demo.evidence(order)["emails"])
    assert (demo.evidence(order)["charges"], demo.evidence(order)["emails"]) == (1, 1)
    assert demo.order(order)["status"] == "paid"


def marked_paid(demo: Demo, order: dict[str, Any]) -> str:
    """Attempts of the one operation that both paths to "paid" share, and whether a path found it done."""
    code = f"""
from idempotency.models import Event, Operation
from demo_shop.shop.models import Payment
charge = Payment.objects.get(order={order["id"]!r}).charge_id
operation = Operation.objects.get(name="shop.mark_paid", key=str(charge))
print(operation.attempt, Event.objects.filter(operation=operation, kind="replayed").exists())
"""
    return demo.run(code)


@pytest.mark.parametrize("is_webhook_first", [True, False])
def test_browser_and_webhook_pay_once_in_either_order(demo: Demo, is_webhook_first: bool) -> None:
    """BUGS T05."""
    order = asked(demo, webhooks="never")
    demo.answer_bank(order["action_url"], "approve")
    paths = [
        lambda: demo.send_webhook(f"evt_{order['number']}", "payment.succeeded", order),
        lambda: demo.post(f"/api/orders/{order['id']}/confirm/", {}).status,
    ]
    for path in paths if is_webhook_first else reversed(paths):
        assert path() == 200
        assert demo.order(order)["status"] == "paid"
    assert demo.settled(order["status_url"])["status"] == "succeeded"
    demo.until(lambda: demo.evidence(order)["emails"])
    assert (demo.evidence(order)["charges"], demo.evidence(order)["emails"]) == (1, 1)
    assert marked_paid(demo, order) == "1 True"


def test_browser_and_webhook_at_once_pay_once(demo: Demo) -> None:
    """Ten requests of both kinds, in the server's two processes; the losers wait or come back.


    BUGS T01, T03.
    """
    order = asked(demo, webhooks="never")
    demo.answer_bank(order["action_url"], "approve")

    def tell(number: int) -> int:
        if number % 2:
            return demo.post(f"/api/orders/{order['id']}/confirm/", {}).status
        event = f"evt_{order['number']}_{number // 4}"  # some of them twice
        return demo.send_webhook(event, "payment.succeeded", order)

    with ThreadPoolExecutor(10) as threads:
        statuses = list(threads.map(tell, range(10)))
    assert set(statuses) <= {200, 409}
    assert 200 in statuses
    assert demo.order(order)["status"] == "paid"
    assert demo.settled(order["status_url"])["status"] == "succeeded"
    demo.until(lambda: demo.evidence(order)["emails"])
    assert (demo.evidence(order)["charges"], demo.evidence(order)["emails"]) == (1, 1)
    assert marked_paid(demo, order) == "1 True"


def test_an_unsigned_webhook_pays_nothing(demo: Demo) -> None:
    order = asked(demo, webhooks="never")
    body = {"type": "payment.succeeded", "data": {"reference": order["id"]}}
    assert demo.send("POST", "/webhooks/payments/", body, user=None).status == 401
    assert demo.order(order)["status"] == "placed"


def test_a_refund_that_is_asked_for_five_times_is_one(demo: Demo, key: str) -> None:
    product = f"/api/products/{demo.products[5]}/"
    before = demo.get(product)["stock"]
    order = check_out(demo, key, product=5).json
    assert demo.get(product)["stock"] == before - 1
    refund = f"/api/orders/{order['id']}/refund/"
    with ThreadPoolExecutor(4) as threads:
        statuses = list(threads.map(lambda _: demo.post(refund, {}).status, range(4)))
    assert set(statuses) <= {200, 409}
    demo.until(lambda: demo.post(refund, {}).status == 200)
    assert demo.order(order)["status"] == "refunded"
    assert demo.get(product)["stock"] == before
    demo.until(lambda: demo.evidence(order)["emails"] == 2)  # paid, refunded
    assert demo.evidence(order)["charges"] == 1


def test_an_order_that_is_not_paid_is_not_refunded(demo: Demo) -> None:
    order = asked(demo, webhooks="never")
    assert demo.post(f"/api/orders/{order['id']}/refund/", {}).status == 409
    assert demo.order(order)["status"] == "placed"


def test_a_replayed_order_and_a_task_delivered_twice_mail_once(demo: Demo, key: str) -> None:
    """BUGS T08."""
    body = {"lines": [{"product": demo.products[0], "quantity": 1}]}
    order = demo.post("/api/orders/", body, key=key).json
    assert demo.post("/api/orders/", body, key=key).replayed
    code = f"""
from unittest import mock
from idempotency.models import OutboxMessage
from demo_shop.shop.models import SentMail
from demo_shop.shop.tasks import mail_placed
(message,) = [m for m in OutboxMessage.objects.filter(topic="order.placed") if {order["id"]!r} in m.payload]
with mock.patch("django.core.mail.EmailMessage.send") as send:
    for delivery in range(2):
        mail_placed.apply(args=[{{"order": {order["id"]!r}}}], task_id=str(message.message_id), throw=True)
    print(SentMail.objects.filter(order={order["id"]!r}).count(), send.call_count)
"""
    demo.until(lambda: demo.evidence(order)["emails"])
    assert demo.run(code) == "1 0"  # the worker was first, with the same task id
    mails = [path.read_text() for path in (demo.data / "mail").iterdir()]
    assert sum(f"Your order {order['number']}" in text for text in mails) == 1
