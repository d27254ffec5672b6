"""Async views: the same promises on an event loop, and clients that hang up in the middle."""

import asyncio
import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.contrib.auth.models import User
from django.core.asgi import get_asgi_application
from django.core.exceptions import PermissionDenied
from django.db import connections
from django.http import HttpResponse, JsonResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient
from django.urls import URLPattern
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from idempotency import db, engine, scopes
from idempotency.decorators import idempotent, idempotent_function
from idempotency.exceptions import ConfigurationError
from idempotency.models import Operation
from tests.app.models import Effect
from tests.callers import effects, events, is_replay, new_key, operation, problem
from tests.clients import routes

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

urlpatterns: list[URLPattern] = []
route = routes(urlpatterns)

#: Only a fault makes anything last as long.
PATIENCE = 30


async def leave_effect(request):
    label = request.headers.get("Idempotency-Key", "no key")
    return (await Effect.objects.acreate(label=label)).pk


async def effect(request, *args, **kwargs):
    return JsonResponse({"effect": await leave_effect(request)}, status=201)


class Handlers(View):
    async def post(self, request):
        return await effect(request)

    async def get(self, request):
        return HttpResponse("read")


class DirectPost(View):
    @idempotent()
    async def post(self, request):
        return await effect(request)


@method_decorator(idempotent(), name="dispatch")
class OnDispatch(Handlers):
    pass


@method_decorator(idempotent(), name="post")
class OnPost(Handlers):
    pass


class DirectDispatch(Handlers):
    @idempotent()
    def dispatch(self, *args, **kwargs):
        return super().dispatch(*args, **kwargs)


def sync_effect(request):
    row = Effect.objects.create(label=request.headers.get("Idempotency-Key", "no key"))
    return JsonResponse({"effect": row.pk}, status=201)


FORMS = {
    "function": idempotent()(effect),
    "csrf_exempt": csrf_exempt(idempotent()(effect)),
    "direct_post": DirectPost.as_view(),
    "on_dispatch": OnDispatch.as_view(),
    "on_post": OnPost.as_view(),
    "direct_dispatch": DirectDispatch.as_view(),
    "on_as_view": idempotent()(Handlers.as_view()),
    "sync_under_asgi": idempotent()(sync_effect),
}
for form, view in FORMS.items():
    route(view, form)


def login():
    user, _ = User.objects.get_or_create(username="alice")
    client = AsyncClient(raise_request_exception=False)
    client.force_login(user)
    return client


@async_to_sync
async def send(client, url, key=None, *, method="post", **options):
    headers = {} if key is None else {"Idempotency-Key": key}
    return await getattr(client, method)(url, headers=headers, **options)


def twice(url):
    client, key = login(), new_key()
    first, second = (send(client, url, key) for _ in range(2))
    return first, second, effects(key)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_async_view_runs_once_and_replays(form):
    """J01, J02: functions, class-based views decorated in each way, and sync views under ASGI."""
    first, second, count = twice(f"/{form}/")

    assert (first.status_code, is_replay(first)) == (201, False)
    assert (second.status_code, second.content, is_replay(second)) == (201, first.content, True)
    assert count == 1


@pytest.mark.parametrize("form", FORMS)
def test_requests_without_a_key_pass_through(form):
    client = login()
    assert [send(client, f"/{form}/").status_code for _ in range(2)] == [201, 201]
    assert effects("no key") == 2
    assert not Operation.objects.exists()


def test_a_decorated_async_view_is_an_async_view():
    """Otherwise Django would run it in a thread and send back a coroutine."""
    for form, view in FORMS.items():
        assert iscoroutinefunction(view) is (form != "sync_under_asgi")


def test_an_async_view_works_under_wsgi_too(client):
    """Django runs it on a loop of its own; the transaction is in the request's thread."""
    client.force_login(User.objects.create(username="bob"))
    key = new_key()
    answers = [client.post("/function/", headers={"Idempotency-Key": key}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert is_replay(answers[1])
    assert effects(key) == 1


@route
@idempotent(required=True)
async def strict(request):
    return await effect(request)


@route
@idempotent()
async def fails(request):
    await leave_effect(request)
    raise {"bug": ZeroDivisionError, "denied": PermissionDenied}[request.GET["as"]]


@route
@idempotent()
async def busy(request):
    return JsonResponse({"effect": await leave_effect(request)}, status=503)


@route
@idempotent()
async def page(request):
    pk = await leave_effect(request)
    return TemplateResponse(request, engines["django"].from_string("<p>{{ pk }}"), {"pk": pk})


@route
@idempotent()
async def unrenderable(request):
    def boom():
        raise ZeroDivisionError

    await leave_effect(request)
    return TemplateResponse(request, engines["django"].from_string("{{ boom }}"), {"boom": boom})


@route
@idempotent()
async def nothing(request):
    await leave_effect(request)


@route
@idempotent(authorize_replay=lambda request, operation: False)
async def once(request):
    return await effect(request)


@route
@idempotent()
async def sees_its_operation(request):
    assert engine.current() is request.operation
    inside = await sync_to_async(engine.current)()
    assert inside is request.operation
    return JsonResponse({"id": str(request.operation.pk), "effect": await leave_effect(request)})


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("/fails/?as=bug", 500),
        ("/fails/?as=denied", 403),
        ("/busy/", 503),
        ("/unrenderable/", 500),
        ("/nothing/", 500),
    ],
)
def test_what_is_not_final_rolls_back(url, code):
    """F01, F02, F05, G15: as in sync views; nothing is left and the retry runs."""
    first, second, count = twice(url)
    assert (first.status_code, second.status_code, is_replay(second)) == (code, code, False)
    assert count == 0
    assert Operation.objects.get().attempt == 2


def test_a_template_response_is_rendered_inside_the_transaction():
    first, second, count = twice("/page/")
    assert (second.content, is_replay(second), count) == (first.content, True, 1)


def test_refusals_are_problems():
    client, key = login(), new_key()
    assert problem(send(client, "/strict/")) == "missing-key"
    assert problem(send(client, "/strict/", "a,b")) == "invalid-key"
    send(client, "/strict/", key)
    assert problem(send(client, "/strict/?other", key)) == "mismatch"
    assert effects(key) == 1


def test_the_policy_decides_who_may_see_a_replay():
    first, second, count = twice("/once/")
    assert (first.status_code, second.status_code, count) == (201, 403, 1)


def test_the_operation_is_known_in_the_view_and_in_its_threads():
    first, second, count = twice("/sees_its_operation/")
    assert (first.status_code, is_replay(second), count) == (200, True, 1)
    assert first.json()["id"] == str(Operation.objects.get().pk)


def test_a_task_that_outlives_its_operation_is_not_part_of_it():
    """What it does later must not be linked to an operation that has finished, nor be refused as its part."""
    key, seen = new_key(), []

    @idempotent_function(name="report", key=lambda: key)
    async def report():
        over = asyncio.Event()

        async def later():
            seen.append(engine.current().key)
            await over.wait()
            seen.append(engine.current())
            return await report()  # the same one once more: a replay, not "inside itself"

        task = asyncio.create_task(later())
        await asyncio.sleep(0)
        tasks.append((task, over))
        return "sent"

    tasks: list[Any] = []

    async def run():
        await report()
        [(task, over)] = tasks
        over.set()
        return await task

    assert async_to_sync(run)() == "sent"
    assert seen == [key, None]


@pytest.mark.parametrize("inner_fails", [False, True])
def test_an_answer_is_not_given_while_a_task_of_the_operation_has_a_transaction_open(inner_fails):
    """Both share one connection: Django would commit, or undo, the answer with the task's transaction."""
    outer_key, inner_key = new_key(), new_key()
    tasks: list[asyncio.Task[None]] = []
    inside, go_on = asyncio.Event(), asyncio.Event()

    @idempotent_function(name="inner", key=lambda: inner_key)
    async def inner():
        await Effect.objects.acreate(label=inner_key)
        inside.set()
        await go_on.wait()
        if inner_fails:
            raise LookupError

    @idempotent_function(name="outer", key=lambda wait: outer_key, fingerprint=lambda wait: "")
    async def outer(*, wait):
        await Effect.objects.acreate(label=outer_key)
        tasks.append(asyncio.create_task(inner()))
        await (tasks[0] if wait else inside.wait())

    async def run():
        with pytest.raises(ConfigurationError, match="Await the task"):
            await outer(wait=False)
        go_on.set()
        with pytest.raises(LookupError if inner_fails else ConfigurationError):
            await tasks.pop()

    async_to_sync(run)()
    assert (effects(outer_key), effects(inner_key)) == (0, 0)
    inner_fails = False
    async_to_sync(outer)(wait=True)
    assert (effects(outer_key), effects(inner_key)) == (1, 1)


def test_safe_methods_ignore_the_key_and_do_no_query(django_assert_num_queries):
    """J07."""
    client = AsyncClient()
    with django_assert_num_queries(0):
        response = send(client, "/on_dispatch/", "k", method="get")
    assert response.content == b"read"


# Several requests at once, as an ASGI server runs them: each in a thread context of its own


class Exchange:
    """One HTTP exchange with the ASGI application, whose client can hang up."""

    def __init__(self, url: str, key: str) -> None:
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": url,
            "query_string": b"",
            "headers": [(b"idempotency-key", key.encode()), (b"host", b"testserver")],
        }
        self.messages = [{"type": "http.request", "body": b"", "more_body": False}]
        self.gone = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    async def receive(self):
        if self.messages:
            return self.messages.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {n.decode().lower(): v.decode() for n, v in message["headers"]}
        else:
            self.body += message.get("body", b"")

    async def run(self) -> "Exchange":
        await get_asgi_application()(self.scope, self.receive, self.send)
        return self

    @property
    def problem(self) -> str:
        return json.loads(self.body)["type"].rpartition(":")[2] if self.status >= 400 else ""


class Gate:
    """Where a view of these tests stops until it is let go."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await until(self.open)


async def until(event: threading.Event) -> None:
    async with asyncio.timeout(PATIENCE):
        while not event.is_set():
            await asyncio.sleep(0.005)


gates: dict[str, Gate] = {}


@pytest.fixture
def gate():
    gates["view"] = Gate()
    yield gates["view"]
    gates.clear()


async def stopping(request):
    pk = await leave_effect(request)
    if "view" in gates:
        await gates["view"]()
    return JsonResponse({"effect": pk}, status=201)


route(csrf_exempt(idempotent(scope=scopes.anonymous)(stopping)), "stopping")
route(csrf_exempt(idempotent(scope=scopes.anonymous, wait=PATIENCE)(stopping)), "waiting")


@pytest.mark.vendor("postgresql", "mysql")  # SQLite has one writer: the twin waits, or is told so
def test_a_duplicate_in_flight_is_409_and_the_retry_replays(gate):
    """A01, A04, J05, on one event loop: the twin is refused while the first is awaited."""
    key = new_key()

    async def main():
        first = asyncio.create_task(Exchange("/stopping/", key).run())
        await until(gate.reached)
        twin = await Exchange("/stopping/", key).run()
        gate.open.set()
        return await first, twin, await Exchange("/stopping/", key).run()

    first, twin, retry = asyncio.run(main())

    assert (twin.status, twin.problem, twin.headers["retry-after"]) == (409, "in-progress", "1")
    assert (first.status, retry.status, retry.body) == (201, 201, first.body)
    assert retry.headers["idempotent-replayed"] == "true"
    assert effects(key) == 1


@pytest.mark.vendor("postgresql", "mysql")
def test_a_waiting_duplicate_does_not_block_the_event_loop(gate):
    """R48: the twin waits for the outcome without a transaction, and other requests are served."""
    key, other = new_key(), new_key()

    async def main():
        first = asyncio.create_task(Exchange("/waiting/", key).run())
        await until(gate.reached)
        twin = asyncio.create_task(Exchange("/waiting/", key).run())
        await asyncio.sleep(0.2)
        gate.open.set()  # this runs on the loop that the twin waits on
        unrelated = await Exchange("/stopping/", other).run()
        return await first, await twin, unrelated

    first, twin, unrelated = asyncio.run(main())

    assert (first.status, twin.status, unrelated.status) == (201, 201, 201)
    assert twin.body == first.body
    assert twin.headers["idempotent-replayed"] == "true"
    assert effects(key) == 1


# Clients that hang up


def hang_up(url, key, when):
    """Run one request whose client goes away when `when` is set; returns the exchange."""

    async def main():
        exchange = Exchange(url, key)
        task = asyncio.create_task(exchange.run())
        await until(when)
        exchange.gone.set()
        await task
        return exchange

    return asyncio.run(main())


def retry(url, key):
    return asyncio.run(Exchange(url, key).run())


def test_a_client_that_hangs_up_in_the_view_leaves_nothing(gate):
    """B09, hard case 24: the cancelled view rolls back, and the retry runs at once, not after a lease."""
    key = new_key()

    abandoned = hang_up("/stopping/", key, gate.reached)

    assert abandoned.status == 0
    assert effects(key) == 0
    assert operation(key).status == "processing"
    assert operation(key).last_error.startswith("asyncio.exceptions.CancelledError")
    gate.open.set()
    assert retry("/stopping/", key).status == 201
    assert effects(key) == 1


#: Connections of the requests below, kept so that no garbage collection tidies them up.
used: list[Any] = []


def slowly(monkeypatch, name):
    """Make a statement of the protocol slow; returns the event that it has begun."""
    begun = threading.Event()
    original = getattr(db, name)

    def slow(*args, **kwargs):
        wanted = name != "execute" or args[1] == "complete"
        if wanted:
            used.append(connections["default"])
            begun.set()
            time.sleep(0.2)  # long enough for the cancellation to arrive while the thread is busy
        return original(*args, **kwargs)

    monkeypatch.setattr(db, name, slow)
    return begun


@pytest.mark.parametrize("statement", ["claim", "lock"])
def test_a_client_that_hangs_up_during_the_claim_leaves_no_open_transaction(statement, monkeypatch):
    """B09, B10: the thread goes on with its statement; the lock that it takes is given back."""
    key = new_key()
    with monkeypatch.context() as patch:
        hang_up("/stopping/", key, slowly(patch, statement))

    assert not used.pop().in_atomic_block
    assert effects(key) == 0
    again = retry("/stopping/", key)
    assert (again.status, effects(key)) == (201, 1)


def test_a_client_that_hangs_up_during_the_commit_finds_it_done(monkeypatch):
    """B10, hard case 24: completion and commit are not cut in half; the retry is a replay."""
    key = new_key()
    with monkeypatch.context() as patch:
        hang_up("/stopping/", key, slowly(patch, "execute"))

    assert not used.pop().in_atomic_block
    assert (operation(key).status, effects(key)) == ("succeeded", 1)
    again = retry("/stopping/", key)
    assert (again.status, again.headers["idempotent-replayed"]) == (201, "true")
    assert effects(key) == 1


@pytest.mark.vendor("postgresql", "mysql")
def test_a_client_that_hangs_up_while_waiting_leaves_the_first_alone(gate):
    """The waiter holds nothing: neither the operation nor a transaction."""
    key = new_key()

    async def main():
        first = asyncio.create_task(Exchange("/waiting/", key).run())
        await until(gate.reached)
        twin = Exchange("/waiting/", key)
        task = asyncio.create_task(twin.run())
        await asyncio.sleep(0.2)
        twin.gone.set()
        await task
        gate.open.set()
        return await first, twin

    first, twin = asyncio.run(main())

    assert (first.status, twin.status) == (201, 0)
    assert effects(key) == 1
    assert events(key) == []


@contextmanager
def server():
    """The application behind a real ASGI server; yields its port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # connections wait until the server is ready
    config = uvicorn.Config(
        get_asgi_application(), lifespan="off", log_level="critical", interface="asgi3"
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        running.should_exit = True
        thread.join(PATIENCE)
        listener.close()


def post(port, key):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", "/stopping/", headers={"Idempotency-Key": key})
    return connection


def test_hanging_up_on_a_real_server_never_doubles_the_effect(gate):
    """B09, hard case 24, with uvicorn: the socket is closed after the write; the retry runs once."""
    key = new_key()
    with server() as port:
        abandoned = post(port, key)
        assert gate.reached.wait(PATIENCE)
        abandoned.close()
        deadline = time.monotonic() + PATIENCE
        while not operation(key).last_error and time.monotonic() < deadline:
            time.sleep(0.01)
        gate.open.set()

        answers = []
        for _ in range(2):
            connection = post(port, key)
            response = connection.getresponse()
            answers.append((response.status, response.headers["Idempotent-Replayed"]))
            response.read()
            connection.close()

    assert answers == [(201, None), (201, "true")]
    assert effects(key) == 1
