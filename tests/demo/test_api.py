"""The shop's API over HTTP, against the real server with its two worker processes."""

from __future__ import annotations

import http.cookiejar
import re
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from .conftest import Demo, fetch

ADDRESS = {
    "recipient": "Carla Customer",
    "street": "1 Retry Lane",
    "city": "Onceford",
    "postcode": "20100",
    "country": "Utopia",
}


def basket(demo: Demo, quantity: int = 1) -> dict[str, Any]:
    return {"lines": [{"product": demo.products[0], "quantity": quantity}]}


def orders(demo: Demo) -> int:
    return demo.get("/api/orders/")["count"]


def test_a_retried_order_is_answered_with_the_first_order(demo: Demo, key: str) -> None:
    before = orders(demo)
    first = demo.post("/api/orders/", basket(demo), key=key)
    again = demo.post("/api/orders/", basket(demo), key=key)
    assert (first.status, first.replayed) == (201, False)
    assert (again.status, again.replayed) == (201, True)
    assert again.body == first.body
    assert orders(demo) == before + 1


def test_two_intents_with_the_same_payload_are_two_orders(demo: Demo) -> None:
    """BUGS L10."""
    before = orders(demo)
    for _ in range(2):
        assert demo.post("/api/orders/", basket(demo), key=str(uuid4())).status == 201
    assert orders(demo) == before + 2


def test_a_key_that_was_used_for_another_order_is_refused(demo: Demo, key: str) -> None:
    demo.post("/api/orders/", basket(demo), key=key)
    before = orders(demo)
    other = demo.post("/api/orders/", basket(demo, quantity=2), key=key)
    assert other.status == 422
    assert other.headers["Content-Type"].startswith("application/problem+json")
    assert other.json["type"].endswith("mismatch")
    assert orders(demo) == before


def test_an_order_without_a_key_is_refused(demo: Demo) -> None:
    """BUGS T04."""
    before = orders(demo)
    answer = demo.post("/api/orders/", basket(demo))
    assert answer.status == 400
    assert answer.json["type"].endswith("missing-key")
    assert orders(demo) == before


def test_a_caller_who_may_not_order_claims_no_key(demo: Demo, key: str) -> None:
    assert demo.post("/api/orders/", basket(demo), key=key, user=None).status == 401
    assert demo.post("/api/orders/", basket(demo), key=key).status == 201


def test_the_same_key_of_another_customer_is_another_operation(demo: Demo, key: str) -> None:
    first = demo.post("/api/orders/", basket(demo), key=key)
    other = demo.post("/api/orders/", basket(demo), key=key, user="admin")
    assert (other.status, other.replayed) == (201, False)
    assert other.json["id"] != first.json["id"]


def test_a_retried_payment_charges_once(demo: Demo, key: str) -> None:
    order = demo.post("/api/orders/", basket(demo), key=str(uuid4())).json
    before = demo.get("/api/counters/")["protected"]["charges"]
    first = demo.post(f"/api/orders/{order['id']}/pay/", {"card": "tok_visa"}, key=key)
    again = demo.post(f"/api/orders/{order['id']}/pay/", {"card": "tok_visa"}, key=key)
    assert (first.status, again.status, again.replayed) == (201, 201, True)
    assert again.body == first.body
    assert demo.get("/api/counters/")["protected"]["charges"] == before + 1
    assert demo.get(f"/api/orders/{order['id']}/")["status"] == "paid"


def test_a_paid_order_cannot_be_paid_with_a_new_key_either(demo: Demo) -> None:
    """BUGS A16."""
    order = demo.post("/api/orders/", basket(demo), key=str(uuid4())).json
    pay = f"/api/orders/{order['id']}/pay/"
    assert demo.post(pay, {}, key=str(uuid4())).status == 201
    before = demo.get("/api/counters/")["protected"]["charges"]
    assert demo.post(pay, {}, key=str(uuid4())).status == 409
    assert demo.get("/api/counters/")["protected"]["charges"] == before


def test_a_declined_checkout_leaves_nothing_and_stays_declined(demo: Demo, key: str) -> None:
    before = demo.get("/api/counters/")["protected"]
    declined = {**basket(demo), "card": "tok_declined"}
    first = demo.post("/api/checkout/", declined, key=key)
    again = demo.post("/api/checkout/", declined, key=key)
    assert (first.status, again.status, again.replayed) == (402, 402, True)
    after = demo.get("/api/counters/")["protected"]
    assert (after["orders"], after["charges"]) == (before["orders"], before["charges"])


def test_only_the_till_with_a_key_survives_a_retry(demo: Demo, key: str) -> None:
    before = demo.get("/api/counters/")
    for _ in range(2):
        assert demo.post("/api/checkout/", basket(demo), key=key).status == 201
        assert demo.post("/api/unprotected/checkout/", basket(demo)).status == 201
    after = demo.get("/api/counters/")
    for till, times in (("protected", 1), ("unprotected", 2)):
        assert after[till]["orders"] == before[till]["orders"] + times
        assert after[till]["charges"] == before[till]["charges"] + times


def test_five_checkouts_at_once_with_one_key_are_one_purchase(demo: Demo, key: str) -> None:
    before = demo.get("/api/counters/")["protected"]
    with ThreadPoolExecutor(5) as threads:
        answers = list(
            threads.map(lambda _: demo.post("/api/checkout/", basket(demo), key=key), range(5))
        )
    assert {answer.status for answer in answers} <= {201, 409}
    assert [(a.status, a.replayed) for a in answers].count((201, False)) == 1
    after = demo.get("/api/counters/")["protected"]
    assert after["orders"] == before["orders"] + 1
    assert after["charges"] == before["charges"] + 1


def test_an_address_put_three_times_without_a_key_is_one_row(demo: Demo, key: str) -> None:
    """BUGS H10."""
    before = demo.get("/api/addresses/")["count"]
    answers = [demo.send("PUT", f"/api/addresses/{key}/", ADDRESS) for _ in range(3)]
    assert [answer.status for answer in answers] == [201, 200, 200]
    assert demo.get("/api/addresses/")["count"] == before + 1


def test_an_address_of_somebody_else_cannot_be_replaced(demo: Demo, key: str) -> None:
    demo.send("PUT", f"/api/addresses/{key}/", ADDRESS)
    stolen = demo.send("PUT", f"/api/addresses/{key}/", {**ADDRESS, "city": "X"}, user="admin")
    assert stolen.status == 404
    assert demo.get(f"/api/addresses/{key}/")["city"] == "Onceford"


def test_a_relative_stock_change_counts_once_per_key(demo: Demo, key: str) -> None:
    product = f"/api/products/{demo.products[1]}/"
    before = demo.get(product)["stock"]
    for _ in range(2):
        answer = demo.post(f"{product}adjust-stock/", {"delta": 5}, key=key, user="admin")
        assert answer.json["stock"] == before + 5
    assert demo.post(f"{product}adjust-stock/", {"delta": 5}, user="admin").status == 400
    assert demo.get(product)["stock"] == before + 5
    demo.post(f"{product}adjust-stock/", {"delta": 5}, key=str(uuid4()), user="admin")
    assert demo.get(product)["stock"] == before + 10


def test_an_absolute_stock_needs_no_key(demo: Demo) -> None:
    product = f"/api/products/{demo.products[2]}/"
    for _ in range(3):
        assert demo.send("PUT", f"{product}stock/", {"stock": 33}, user="admin").status == 200
    assert demo.get(product)["stock"] == 33


def test_a_customer_may_not_change_stocks(demo: Demo, key: str) -> None:
    product = f"/api/products/{demo.products[1]}/"
    assert demo.post(f"{product}adjust-stock/", {"delta": 5}, key=key).status == 403
    assert demo.send("PUT", f"{product}stock/", {"stock": 1}).status == 403


def test_an_order_beyond_the_stock_takes_nothing(demo: Demo, key: str) -> None:
    product = f"/api/products/{demo.products[3]}/"
    demo.send("PUT", f"{product}stock/", {"stock": 2}, user="admin")
    greedy = {"lines": [{"product": demo.products[3], "quantity": 3}]}
    assert demo.post("/api/orders/", greedy, key=key).status == 409
    assert demo.get(product)["stock"] == 2


def test_a_form_sent_twice_orders_once(demo: Demo) -> None:
    """`buy_now`, a plain Django view whose key is a hidden field, in a signed-in session."""
    browser = urllib.request.build_opener(
        urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
    )

    def page(path: str) -> str:
        return fetch(urllib.request.Request(demo.url + path), browser).body.decode()

    def submit(path: str, html: str, **fields: str) -> Any:
        hidden = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', html))
        body = urllib.parse.urlencode(hidden | fields).encode()
        try:
            with browser.open(demo.url + path, body, timeout=60) as response:
                return response.url
        except urllib.error.HTTPError as error:
            return error.read().decode()

    submit("/sign-in/", page("/sign-in/"), username="customer", password=demo.password("customer"))
    before = orders(demo)
    shown = page("/products/espresso-cup/")
    first = submit("/products/espresso-cup/buy/", shown, quantity="1")
    again = submit("/products/espresso-cup/buy/", shown, quantity="1")
    assert first == again
    assert "/orders/" in first
    assert orders(demo) == before + 1
    changed = submit("/products/espresso-cup/buy/", shown, quantity="2")
    assert "This form was sent before" in changed
    submit("/products/espresso-cup/buy/", page("/products/espresso-cup/"), quantity="1")
    assert orders(demo) == before + 2


def test_pages_answer_and_static_files_are_served(demo: Demo) -> None:
    for path in (
        "/",
        "/products/desk-lamp/",
        "/sign-in/",
        "/admin/login/",
        "/static/shop/shop.css",
    ):
        answer = demo.send("GET", path, user=None)
        assert answer.status == 200, path
    assert demo.send("GET", "/static/admin/css/base.css", user=None).status == 200
    assert demo.send("GET", "/no-such-page/", user=None).status == 404
