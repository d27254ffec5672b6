"""Signed webhooks out of the outbox, against a receiver that misbehaves in every known way."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook

from idempotency import outbox
from idempotency.contrib.webhook_outbox import Endpoint, WebhookPublisher, retry_after
from idempotency.exceptions import ConfigurationError
from idempotency.models import MessageStatus
from idempotency.outbox import posting
from tests.outboxes import make_due, row, send

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _long_backoff(settings: Any) -> None:
    """What has failed is not due again before the test says so, however slow the machine is."""
    settings.IDEMPOTENCY = {"OUTBOX_BACKOFF": 60}


SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OLD_SECRET = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"


class Receiver(ThreadingHTTPServer):
    """Keeps the requests it gets. `answer` writes the response."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.paths: list[str] = []
        self.answer: Callable[[Handler], Any] = status(204)
        self.url = f"http://127.0.0.1:{self.server_port}/hook?tenant=1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A sender that hangs up is what some tests are about."""


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((headers, body))
        self.server.paths.append(self.path)
        self.server.answer(self)

    def log_message(self, *args: Any) -> None:
        """Nothing on the terminal of a test."""


def status(code: int, **headers: str) -> Callable[[Handler], Any]:
    def answer(handler: Handler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def publisher(receiver: Receiver, *secrets: str, **options: Any) -> WebhookPublisher:
    endpoint = Endpoint(receiver.url, secrets or (SECRET,))
    return WebhookPublisher(
        endpoint, **{"allow_private": True, "allow_http": True, "timeout": 5, **options}
    )


def test_a_receiver_can_verify_the_request_with_the_reference_library(receiver: Receiver) -> None:
    """BUGS S21."""
    message = send("order.created", {"order_id": 1, "name": "Grüße"})
    assert outbox.relay(publisher=publisher(receiver)) == outbox.Summary(sent=1)
    [(headers, body)] = receiver.requests
    assert receiver.paths == ["/hook?tenant=1"]
    verified = Webhook(SECRET).verify(body, headers)
    assert verified["type"] == "order.created"
    assert verified["data"] == {"order_id": 1, "name": "Grüße"}
    assert datetime.fromisoformat(verified["timestamp"]) == row(message).created_at
    assert headers["webhook-id"] == str(message.message_id)
    assert headers["idempotency-key"] == f'"{message.message_id}"'
    assert headers["content-type"] == "application/json"
    assert headers["host"] == f"127.0.0.1:{receiver.server_port}"


def test_every_attempt_has_the_same_id_and_body_and_a_new_timestamp(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUGS S21."""
    from idempotency.contrib import webhook_outbox

    now = datetime.now(UTC)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            nonlocal now
            now += timedelta(seconds=2)
            return now

    monkeypatch.setattr(webhook_outbox, "datetime", Clock)
    message = send("t", 1)
    receiver.answer = status(503)
    outbox.relay(publisher=publisher(receiver))
    make_due()
    receiver.answer = status(200)
    outbox.relay(publisher=publisher(receiver))
    (first, first_body), (second, second_body) = receiver.requests
    assert first["webhook-id"] == second["webhook-id"] == str(message.message_id)
    assert first_body == second_body
    assert int(second["webhook-timestamp"]) - int(first["webhook-timestamp"]) == 2
    assert first["webhook-signature"] != second["webhook-signature"]
    for headers in (first, second):
        Webhook(SECRET).verify(first_body, headers)


def test_during_a_rotation_the_request_is_signed_with_every_secret(receiver: Receiver) -> None:
    send("t", 1)
    outbox.relay(publisher=publisher(receiver, SECRET, OLD_SECRET))
    [(headers, body)] = receiver.requests
    for secret in (SECRET, OLD_SECRET):
        assert Webhook(secret).verify(body, headers)
    with pytest.raises(ConfigurationError, match="at least one secret"):
        WebhookPublisher(Endpoint(receiver.url, ())).publish(stray())


def test_an_endpoint_never_shows_its_secrets_or_its_url(receiver: Receiver) -> None:
    shown = repr(publisher(receiver).endpoint)
    assert "whsec" not in shown
    assert "hook" not in shown


def stray() -> outbox.Message:
    from uuid import uuid4

    return outbox.Message(
        id=uuid4(),
        topic="t",
        body="1",
        ordering_key="",
        operation_id=None,
        attempt=1,
        created_at=datetime.now(UTC),
        using="default",
        pk=1,
    )


def test_gone_is_a_dead_letter_at_once(receiver: Receiver) -> None:
    message = send("t", 1)
    receiver.answer = status(410)
    assert outbox.relay(publisher=publisher(receiver)) == outbox.Summary(dead=1)
    assert row(message).status == MessageStatus.DEAD
    assert row(message).last_error == "PermanentFailure: HTTP 410: the receiver wants no more"


@pytest.mark.parametrize("code", [301, 307, 400, 401, 404, 409, 429, 500, 503])
def test_any_other_answer_is_tried_again(receiver: Receiver, code: int) -> None:
    message = send("t", 1)
    receiver.answer = status(code, Location=receiver.url)
    assert outbox.relay(publisher=publisher(receiver)) == outbox.Summary(retried=1)
    assert len(receiver.requests) == 1  # also redirects are not followed
    assert row(message).last_error == f"RetryAfter: HTTP {code}"


@pytest.mark.parametrize(("code", "name"), [(429, "Retry-After"), (503, "retry-after")])
def test_retry_after_is_honoured(receiver: Receiver, code: int, name: str) -> None:
    """Uvicorn and Node, among others, write the names of headers in lower case."""
    message = send("t", 1)
    receiver.answer = status(code, **{name: "1800"})
    outbox.relay(publisher=publisher(receiver))
    waits = row(message).available_at - row(message).created_at
    assert timedelta(seconds=1800) <= waits < timedelta(seconds=1860)


def test_retry_after_is_seconds_or_a_date_and_nonsense_is_nothing() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert retry_after("120", now) == 120
    assert retry_after(format_datetime(now + timedelta(minutes=5), usegmt=True), now) == 300
    assert retry_after(format_datetime(now - timedelta(minutes=5), usegmt=True), now) == 0
    assert retry_after("Thu, 01 Jan 2026 00:05:00 -0000", now) == 300  # without a zone: UTC
    assert retry_after("99999999999", now) == 24 * 3600
    assert retry_after("Sun, 01 Jan 2040 00:00:00 GMT", now) == 24 * 3600
    far_away = f"Thu, 01 Jan 2026 00:05:00 +{'9' * 20}"
    for nonsense in (None, "", "soon", "-1", "1.5", "²", "Thu, 99 Foo 2026", far_away):
        assert retry_after(nonsense, now) == 0


def hang_up(handler: Handler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def talk_nonsense(handler: Handler) -> None:
    handler.wfile.write(b"\x00\xff nonsense\r\n\r\n")


def answer_for_ever(handler: Handler) -> None:
    """A byte at a time, so that no single read ever times out."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.02)


def send_a_body_without_end(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        handler.wfile.write(bytes(65536))


def test_the_body_of_an_answer_is_not_read(receiver: Receiver) -> None:
    send("t", 1)
    receiver.answer = send_a_body_without_end
    assert outbox.relay(publisher=publisher(receiver)) == outbox.Summary(sent=1)


@pytest.mark.parametrize("fault", [hang_up, talk_nonsense, answer_for_ever])
def test_a_receiver_that_breaks_off_or_never_ends_costs_one_attempt(
    receiver: Receiver, fault: Callable[[Handler], Any]
) -> None:
    message = send("t", 1)
    receiver.answer = fault
    summary = outbox.relay(publisher=publisher(receiver, timeout=0.5))
    assert summary == outbox.Summary(retried=1)
    assert row(message).last_error.startswith("PublishFailed: no answer: ")


def test_a_receiver_that_is_not_there_costs_one_attempt(receiver: Receiver) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        receiver.url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        send("t", 1)
        assert outbox.relay(publisher=publisher(receiver)) == outbox.Summary(retried=1)


def test_an_address_that_is_not_public_is_refused_unless_allowed(receiver: Receiver) -> None:
    message = send("t", 1)
    refusing = publisher(receiver, allow_private=False)
    assert outbox.relay(publisher=refusing) == outbox.Summary(dead=1)
    assert receiver.requests == []
    assert row(message).last_error == (
        "AddressRefused: 127.0.0.1 resolves to an address that is not public"
    )


def test_plain_http_is_refused_unless_allowed(receiver: Receiver) -> None:
    send("t", 1)
    refusing = publisher(receiver, allow_http=False)
    assert outbox.relay(publisher=refusing) == outbox.Summary(dead=1)
    assert receiver.requests == []


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for `hooks.test`, signed by itself."""
    path = tmp_path / "hooks.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=hooks.test "
        f"-addext subjectAltName=DNS:hooks.test -keyout {path} -out {path}.crt"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    """Let `hooks.test` resolve to these addresses, one look-up after the other."""
    left, real = list(answers), socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        return real(left.pop(0) if host == "hooks.test" else host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return left


def test_the_certificate_must_be_trusted_and_name_the_host_although_the_address_is_pinned(
    receiver: Receiver, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    receiver.socket = context.wrap_socket(receiver.socket, server_side=True)
    send("t", 1)

    def attempt(host: str, address: str) -> outbox.Summary:
        resolving(monkeypatch, address)
        receiver.url = f"https://{host}:{receiver.server_port}/"
        make_due()
        return outbox.relay(publisher=publisher(receiver, allow_http=False))

    assert attempt("hooks.test", "127.0.0.1") == outbox.Summary(retried=1)  # not trusted
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert attempt("localhost", "127.0.0.1") == outbox.Summary(retried=1)  # another name
    assert receiver.requests == []
    assert attempt("hooks.test", "127.0.0.1") == outbox.Summary(sent=1)
    [(headers, _)] = receiver.requests
    assert headers["host"] == f"hooks.test:{receiver.server_port}"


class Clock:
    """The time that `posting` sees."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(posting, "time", clock)
    return clock


def test_a_connection_that_takes_all_the_time_leaves_none_for_the_answer(
    receiver: Receiver, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog has barked while there was nothing to bite: an answer would have no end."""
    connect = socket.create_connection

    def connect_late(*args: Any) -> socket.socket:
        connected = connect(*args)
        clock.now = 60
        return connected

    monkeypatch.setattr(socket, "create_connection", connect_late)
    send("t", 1)
    assert outbox.relay(publisher=publisher(receiver)) == outbox.Summary(retried=1)
    assert (clock.now, receiver.requests) == (60, [])


def test_a_handshake_that_takes_all_the_time_leaves_none_for_the_answer(
    receiver: Receiver, certificate: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    receiver.socket = context.wrap_socket(receiver.socket, server_side=True)
    receiver.url = f"https://hooks.test:{receiver.server_port}/"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    resolving(monkeypatch, "127.0.0.1")
    trusting = ssl.create_default_context

    class Late:
        @staticmethod
        def wrap_socket(*args: Any, **options: Any) -> Any:
            shaken = trusting().wrap_socket(*args, **options)
            clock.now = 60
            return shaken

    monkeypatch.setattr(ssl, "create_default_context", Late)
    send("t", 1)
    assert outbox.relay(publisher=publisher(receiver)) == outbox.Summary(retried=1)
    assert (clock.now, receiver.requests) == (60, [])
