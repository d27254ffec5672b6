"""Protected views behind a real, threaded WSGI server: twins, impatient clients, bytes on the wire."""

import http.client
import json
import socket
import threading
from urllib.parse import urlsplit

import pytest
from django.db import connections
from django.http import FileResponse, HttpResponse, JsonResponse
from django.urls import URLPattern, path
from django.views.decorators.csrf import csrf_exempt
from rest_framework.decorators import api_view

from idempotency import scopes
from idempotency.decorators import idempotent
from tests.app.models import Effect
from tests.callers import effects, events, new_key, operation
from tests.clients import routes
from tests.processes import PATIENCE_SECONDS, in_threads

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

urlpatterns: list[URLPattern] = []
route = routes(urlpatterns)

#: SQLite has one writer: a second request waits for the first instead of being refused.
needs_row_locks = pytest.mark.vendor("postgresql", "mysql")


class Gate:
    """Where the view stops until the test lets it go; open unless a test closes it."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()


gates: dict[str, Gate] = {}


def order(request):
    key = request.headers["Idempotency-Key"]
    pk = Effect.objects.create(label=key).pk
    gate = gates.get(key)
    if gate is not None:
        gate.reached.set()
        assert gate.open.wait(PATIENCE_SECONDS)
    return JsonResponse({"effect": pk}, status=201)


def public(**policy):
    return lambda view: csrf_exempt(idempotent(scope=scopes.anonymous, **policy)(view))


route(public()(order), "order")
route(public(wait=PATIENCE_SECONDS)(order), "patient")
route(public()(lambda request: HttpResponse(status=204)), "empty")
route(public()(lambda request: HttpResponse(b"%PDF\xff\x00\r\n", status=201)), "pdf")
route(public()(lambda request: FileResponse(open(__file__, "rb"))), "file")  # noqa: SIM115


@pytest.fixture
def port(live_server):
    yield urlsplit(live_server.url).port
    for gate in gates.values():
        gate.open.set()
    gates.clear()


class Answer:
    """What came over the wire."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()
        self.is_replay = response.headers["Idempotent-Replayed"] == "true"
        self.problem = ""
        if response.headers["Content-Type"] == "application/problem+json":
            self.problem = json.loads(self.body)["type"].rpartition(":")[2]


def request(port, key, url="/order/"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    connection.request("POST", url, headers={"Idempotency-Key": key, "Connection": "close"})
    return connection


def post(port, key, url="/order/"):
    connection = request(port, key, url)
    try:
        return Answer(connection.getresponse())
    finally:
        connection.close()


def test_twins_behind_a_barrier_have_one_effect_and_no_5xx(port):
    """A01, A02, A03, A04, J05: every reply is the outcome, its replay, or in-progress."""
    key = new_key()

    answers = in_threads([lambda: post(port, key)] * 10)

    executed = [a for a in answers if a.status == 201 and not a.is_replay]
    assert len(executed) == 1
    for answer in answers:
        if answer.status == 201:
            assert answer.body == executed[0].body
        else:
            assert (answer.status, answer.problem) == (409, "in-progress")
            assert answer.headers["Retry-After"] == "1"
    assert effects(key) == 1
    assert post(port, key).is_replay


@needs_row_locks
def test_a_client_that_gives_up_early_and_retries_is_told_to_wait(port):
    """A05, B08, F10: while the first still runs the retry is 409; afterwards it is the outcome."""
    key = new_key()
    gate = gates[key] = Gate()
    first = request(port, key)
    assert gate.reached.wait(PATIENCE_SECONDS)

    early = post(port, key)
    assert (early.status, early.problem) == (409, "in-progress")
    assert json.loads(early.body)["key_action"] == "wait"
    gate.open.set()
    outcome = Answer(first.getresponse())
    first.close()

    assert outcome.status == 201
    assert post(port, key).body == outcome.body
    assert effects(key) == 1
    assert events(key)[0] == ("refused", "in-progress")


@needs_row_locks
def test_another_body_is_a_mismatch_while_the_first_is_running(port):
    """E07, hard case 23, R37: 422, not a 409 that tells a faulty client to go on."""
    key = new_key()
    gate = gates[key] = Gate()
    first = request(port, key)
    assert gate.reached.wait(PATIENCE_SECONDS)

    assert post(port, key, "/order/?other").problem == "mismatch"
    gate.open.set()
    assert Answer(first.getresponse()).status == 201
    first.close()


@needs_row_locks
def test_a_slow_request_does_not_hold_up_another_key(port):
    """A, peers (one lock for the whole site): different keys never wait for each other."""
    slow, quick = new_key(), new_key()
    gate = gates[slow] = Gate()
    first = request(port, slow)
    assert gate.reached.wait(PATIENCE_SECONDS)

    assert post(port, quick).status == 201
    gate.open.set()
    assert Answer(first.getresponse()).status == 201
    first.close()


def test_a_waiting_twin_gets_the_outcome_replayed(port):
    """R48: the policy lets it poll, without a transaction, instead of being refused."""
    key = new_key()
    gate = gates[key] = Gate()
    first = request(port, key, "/patient/")
    assert gate.reached.wait(PATIENCE_SECONDS)

    twin = request(port, key, "/patient/")
    gate.open.set()
    outcome, replayed = Answer(first.getresponse()), Answer(twin.getresponse())
    for connection in (first, twin):
        connection.close()

    assert (outcome.status, outcome.is_replay) == (201, False)
    assert (replayed.status, replayed.is_replay) == (201, True)
    assert replayed.body == outcome.body
    assert effects(key) == 1


def test_a_client_that_closes_the_socket_before_reading_finds_the_outcome(port):
    """B10, hard cases 1 and 24: under WSGI the view goes on; its outcome is stored and replayed."""
    key = new_key()
    gate = gates[key] = Gate()
    abandoned = request(port, key)
    assert gate.reached.wait(PATIENCE_SECONDS)
    abandoned.close()
    gate.open.set()

    answer = post(port, key)
    while answer.problem == "in-progress":
        answer = post(port, key)

    assert (answer.status, answer.is_replay) == (201, True)
    assert effects(key) == 1
    assert operation(key).attempt == 1


@api_view(["POST"])
@idempotent(scope=scopes.anonymous)
def in_the_requests_transaction(request):
    return order(request)


urlpatterns.append(path("function/", in_the_requests_transaction))


def test_twins_in_the_requests_own_transaction_have_one_effect(port, monkeypatch):
    """A07: below @api_view under ATOMIC_REQUESTS a twin waits or is refused; never two, never a 500."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    key = new_key()

    answers = in_threads([lambda: post(port, key, "/function/")] * 6)

    assert {answer.status for answer in answers} <= {201, 409, 503}
    assert len({answer.body for answer in answers if answer.status == 201}) == 1
    assert effects(key) == 1
    assert post(port, key, "/function/").is_replay


def raw(port, *lines):
    """Send a request line by line, and return all that comes back."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as connection:
        head = [
            "POST /order/ HTTP/1.1",
            "Host: localhost",
            "Connection: close",
            "Content-Length: 0",
        ]
        connection.sendall("\r\n".join([*head, *lines, "", ""]).encode("latin-1"))
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    "lines",
    [
        ("Idempotency-Key: one", "Idempotency-Key: two"),
        ("Idempotency-Key: one", "Idempotency-Key: one"),
        ('Idempotency-Key: "one"', 'Idempotency-Key: "two"'),
        ("Idempotency-Key:",),
        ("Idempotency-Key: k\u00e9y",),
        ("Idempotency-Key: a\tb",),
    ],
)
def test_a_header_sent_twice_or_badly_is_400_on_the_wire(port, lines):
    """J10, R13: two lines reach the application joined; no line is picked, nothing runs."""
    answer = raw(port, *lines)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"invalid-key" in answer
    assert not Effect.objects.exists()


@pytest.mark.parametrize(("url", "status"), [("/empty/", 204), ("/pdf/", 201)])
def test_the_bytes_on_the_wire_are_equal(port, url, status):
    """G05, G06, G13: length, body and type as a client sees them."""
    key = new_key()
    first, second = post(port, key, url), post(port, key, url)

    assert (first.status, second.status) == (status, status)
    assert second.body == first.body
    for header in ("Content-Length", "Content-Type", "Transfer-Encoding"):
        assert second.headers[header] == first.headers[header]
    assert second.is_replay


def test_a_file_is_sent_whole_and_its_retry_refused(port):
    """G04, hard case 25, B05: the stream is not touched by the protection."""
    key = new_key()
    first, second = post(port, key, "/file/"), post(port, key, "/file/")

    assert first.body.startswith(b'"""Protected views behind a real')
    assert (second.status, second.problem) == (410, "response-not-retained")
    assert not connections["default"].in_atomic_block
