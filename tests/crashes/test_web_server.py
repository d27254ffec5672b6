"""Worker processes of a real WSGI server, killed and hung up on over real sockets."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.core.servers.basehttp import WSGIRequestHandler, WSGIServer
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from idempotency import scopes
from idempotency.decorators import idempotent
from tests import callers
from tests.app.models import Effect
from tests.callers import effects, operation
from tests.processes import Child, Signal, eventually

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass
class Stage:
    """What the view of this test waits for. Workers are forked, so they see what was set before."""

    inside: Signal = field(default_factory=Signal)
    go_on: Signal = field(default_factory=Signal)


stage = Stage()


@csrf_exempt
@idempotent(required=True, name="effect", scope=scopes.anonymous)
def pay(request: HttpRequest) -> HttpResponse:
    effect = Effect.objects.create(label=request.headers["Idempotency-Key"])
    if "X-Wait" in request.headers:
        stage.inside.set()
        stage.go_on.wait()
    return JsonResponse({"effect": effect.pk}, status=201)


urlpatterns = [path("pay/", pay)]


class QuietHandler(WSGIRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Say nothing."""


class Site:
    """Worker processes that accept from one socket, like those of a preforking server."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.workers: list[Child] = []
        self.clients: list[http.client.HTTPConnection] = []

    def start(self, count: int) -> None:
        self.workers += [Child(self._serve) for _ in range(count)]

    def _serve(self) -> None:
        server = WSGIServer(("127.0.0.1", 0), QuietHandler, bind_and_activate=False)
        server.socket = self.listener
        server.server_name, server.server_port = "localhost", self.port
        server.setup_environ()
        server.set_app(get_wsgi_application())
        server.serve_forever()

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers.clear()

    def request(self, key: str, *, wait: bool = False) -> http.client.HTTPConnection:
        """Send a request; the answer is not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        self.clients.append(connection)
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        connection.request("POST", "/pay/", b"{}", headers | ({"X-Wait": "1"} if wait else {}))
        return connection

    def post(self, key: str) -> tuple[int, bool, Any]:
        """(status, is it a replay, body), after retries while the answer is 409 in-progress."""

        def answered() -> tuple[int, bool, Any] | None:
            response = self.request(key).getresponse()
            body = json.load(response)
            replayed = response.getheader("Idempotent-Replayed") == "true"
            return None if response.status == 409 else (response.status, replayed, body)

        answer: tuple[int, bool, Any] = eventually(answered, "an answer other than 409")
        return answer


@pytest.fixture
def site(settings: Any) -> Iterator[Site]:
    global stage
    stage = Stage()
    settings.ROOT_URLCONF = __name__
    site = Site()
    yield site
    stage.go_on.set()
    site.kill()
    for each in (site.listener, *site.clients):
        each.close()


def test_a_client_that_hangs_up_gets_its_answer_on_the_retry(site: Site) -> None:
    """BUGS.md B10: nobody reads the response, the operation is finished and stored all the same."""
    site.start(2)
    key = callers.new_key()
    connection = site.request(key, wait=True)
    stage.inside.wait()
    connection.close()
    stage.go_on.set()
    status, _, body = site.post(key)
    assert status == 201
    assert site.post(key) == (201, True, body)
    assert effects(key) == 1
    assert operation(key).attempt == 1


def test_the_other_worker_takes_over_from_one_that_was_killed(site: Site) -> None:
    """BUGS B01."""
    site.start(1)
    key = callers.new_key()
    connection = site.request(key, wait=True)
    stage.inside.wait()
    site.start(1)
    site.workers.pop(0).kill()
    with suppress(OSError, http.client.HTTPException):
        pytest.fail(f"answered {connection.getresponse().status}")
    status, replayed, body = site.post(key)
    assert (status, replayed, effects(key)) == (201, False, 1)
    assert site.post(key) == (201, True, body)


@pytest.mark.parametrize("wait", [True, False], ids=["in the handler", "after the answer"])
def test_nothing_is_lost_when_every_worker_is_killed(site: Site, wait: bool) -> None:
    """BUGS B03."""
    site.start(2)
    keys = [callers.new_key() for _ in range(4)]
    answers = {key: site.post(key) for key in keys}
    unanswered = callers.new_key()
    site.request(unanswered, wait=wait)
    if wait:
        stage.inside.wait()
    else:
        eventually(lambda: effects(unanswered), "the effect of the unread request")
    site.kill()
    site.start(2)
    for key in keys:
        assert site.post(key) == (201, True, answers[key][2])
    status, replayed, _ = site.post(unanswered)
    assert (status, replayed) == (201, not wait)
    assert {effects(key) for key in (*keys, unanswered)} == {1}


def test_many_clients_at_two_workers_get_one_answer_each_key(site: Site) -> None:
    site.start(2)
    keys = [callers.new_key() for _ in range(5)]
    pending = [(key, site.request(key)) for key in keys * 4]
    seen: dict[str, set[bytes]] = {key: set() for key in keys}
    for key, connection in pending:
        response = connection.getresponse()
        assert response.status in {201, 409}
        if response.status == 201:
            seen[key].add(response.read())
    assert [len(bodies) for bodies in seen.values()] == [1] * 5
    assert [effects(key) for key in keys] == [1] * 5
