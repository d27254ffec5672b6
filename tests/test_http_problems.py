"""Refusals over HTTP: the table of problem types, member by member."""

import json
import sqlite3
import uuid

import pytest
from django.db import OperationalError, connections
from django.http import HttpResponse, JsonResponse
from django.test import Client, override_settings
from django.urls import URLPattern
from django.utils import timezone
from django.utils.translation import override as language
from django.utils.translation import trans_real

from idempotency import exceptions
from idempotency.decorators import idempotent
from idempotency.http.problems import members, problem
from idempotency.http.requests import where_keys_belong
from idempotency.keys import MAX_LENGTH
from idempotency.models import Operation
from idempotency.policies import Policy
from tests.app.models import Effect
from tests.callers import age, effects, events, new_key, operation
from tests.clients import login, routes, send

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

urlpatterns: list[URLPattern] = []
route = routes(urlpatterns)


@route
@idempotent(required=True)
def order(request):
    return JsonResponse({"effect": leave_effect(request)}, status=201)


@route
@idempotent()
def optional(request):
    return JsonResponse({"effect": leave_effect(request)}, status=201)


@route
@idempotent(tombstone=3600)
def buried(request):
    return JsonResponse({"effect": leave_effect(request)}, status=201)


def leave_effect(request):
    return Effect.objects.create(label=request.headers.get("Idempotency-Key", "no key")).pk


#: (class, status, retryable, key_action, Retry-After)
TABLE = [
    (exceptions.MissingKey, 400, False, "new_key", False),
    (exceptions.InvalidKey, 400, False, "new_key", False),
    (exceptions.AnonymousKey, 400, False, "new_key", False),
    (exceptions.KeyTooOld, 400, False, "new_key", False),
    (exceptions.Mismatch, 422, False, "new_key", False),
    (exceptions.InProgress, 409, True, "wait", True),
    (exceptions.OutcomeUnknown, 409, False, "wait", True),
    (exceptions.ResponseNotRetained, 410, False, "same_key", False),
    (exceptions.KeyExpired, 410, False, "same_key", False),
    (exceptions.Unavailable, 503, True, "same_key", True),
]


@pytest.mark.parametrize(("refusal", "status", "retryable", "key_action", "waits"), TABLE)
def test_every_refusal_has_its_row_of_the_table(refusal, status, retryable, key_action, waits):
    """T06, F10, J06, J15, R95: clients branch on `type`, and only some may come back."""
    pk = uuid.uuid4()

    response = problem(refusal("What to do.", operation_id=pk, retry_after=3 if waits else None))

    assert response.status_code == status
    assert response["Content-Type"] == "application/problem+json"
    assert response["Cache-Control"] == "no-store"
    assert response.get("Retry-After") == ("3" if waits else None)
    assert json.loads(response.content) == {
        "type": f"urn:django-idempotency:problem:{refusal.code}",
        "title": str(refusal.title),
        "status": status,
        "detail": "What to do.",
        "retryable": retryable,
        "key_action": key_action,
        "operation_id": str(pk),
    }


def test_what_is_done_already_never_advises_a_new_key():
    """A client that follows `key_action` by itself must not repeat a finished operation."""
    for done in (exceptions.ResponseNotRetained, exceptions.KeyExpired, exceptions.OutcomeUnknown):
        assert members(done())["key_action"] != "new_key"


def test_the_table_is_complete():
    """A new refusal must not be forgotten here."""
    assert {row[0] for row in TABLE} == set(exceptions.Refusal.__subclasses__())
    assert len({refusal.code for refusal, *_ in TABLE}) == len(TABLE)


def test_members_without_a_value_are_left_out():
    assert set(members(exceptions.MissingKey())) == {
        "type",
        "title",
        "status",
        "retryable",
        "key_action",
    }


# Each one through the request cycle


def test_a_required_key_that_is_missing_is_400_and_nothing_runs():
    """A08, R18: not 428, not a key made by the server."""
    response = send(login(), "/order/")

    assert (response.status_code, response.json()["type"]) == (
        400,
        "urn:django-idempotency:problem:missing-key",
    )
    assert response.json()["detail"] == "Send one in the header Idempotency-Key."
    assert not Effect.objects.exists()
    assert not Operation.objects.exists()


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("header:X-Request-Key", "Send one in the header X-Request-Key."),
        ("json:request_id", "Send one in the json field request_id."),
        ("form:token", "Send one in the form field token."),
        (lambda request: None, ""),
    ],
)
def test_a_missing_key_says_where_it_belongs(key, told):
    assert where_keys_belong(Policy(key=key).resolved()) == told


@pytest.mark.parametrize(
    "key",
    ["", " ", '""', '"open', '"a\\x"', "a,b", '"a","b"', "tab\tinside", "é", "a b", "k" * (MAX_LENGTH + 1)],
)  # fmt: skip
@pytest.mark.parametrize("url", ["/order/", "/optional/"])
def test_a_malformed_key_is_400_even_where_keys_are_optional(url, key):
    """J08, J10, R12: ignoring it would run the request unprotected. Never a 500 (peers)."""
    response = send(login(), url, key)

    assert response.status_code == 400
    assert response.json()["type"].endswith(":invalid-key")
    assert not Effect.objects.exists()
    assert not Operation.objects.exists()


def test_the_key_is_never_echoed_in_a_problem():
    """Peers echo keys in error bodies; ours name the operation by its id."""
    key, client = "secret-key-" + new_key(), login()
    send(client, "/order/", key, {"a": 1})

    for response in (send(client, "/order/", key, {"a": 2}), send(client, "/order/", key + ",")):
        assert key not in response.content.decode()


def test_quoted_and_bare_keys_name_one_operation():
    """J08: one documented rule, never two runs by accident."""
    client, key = login(), new_key()

    assert send(client, "/order/", key).status_code == 201
    assert send(client, "/order/", f'"{key}"')["Idempotent-Replayed"] == "true"
    assert send(client, "/order/", f'"{key}";v=1')["Idempotent-Replayed"] == "true"


def test_an_anonymous_callers_key_is_refused_by_default():
    """D04, D05, R23: never one bucket for all visitors, and no guess by address."""
    for address in ("10.0.0.1", "10.0.0.2"):
        headers = {"X-Forwarded-For": address}
        response = send(Client(REMOTE_ADDR=address), "/order/", new_key(), headers=headers)
        assert response.json()["type"].endswith(":anonymous-key")
    assert not Operation.objects.exists()
    assert not Effect.objects.exists()


def test_a_mismatch_is_422_and_leaves_the_operation_alone():
    """F10, R38: another body under one key never runs, has no Retry-After and shows nothing stored.


    BUGS E08.
    """
    client, key = login(), new_key()
    first = send(client, "/order/", key, {"amount": 1})

    other = send(client, "/order/", key, {"amount": 2})

    assert (other.status_code, other.json()["key_action"]) == (422, "new_key")
    assert other.json()["operation_id"] == str(operation(key).pk)
    assert "Retry-After" not in other
    assert str(first.json()["effect"]) not in other.json().values()
    assert send(client, "/order/", key, {"amount": 1}).content == first.content
    assert effects(key) == 1
    assert ("refused", "mismatch") in events(key)


def test_a_late_retry_is_410_while_the_tombstone_stands_and_new_after_it():
    """Hard case 31, R90: after the window a retry is refused, not executed."""
    client, key = login(), new_key()
    send(client, "/buried/", key)

    age(key, tombstone=False)
    late = send(client, "/buried/", key)
    assert (late.status_code, late.json()["type"].rpartition(":")[2]) == (410, "key-expired")
    assert effects(key) == 1

    age(key)
    assert send(client, "/buried/", key).status_code == 201
    assert effects(key) == 2


def test_an_unknown_outcome_is_409_with_retry_after_and_never_runs():
    """F14, R68: maybe done is neither failed nor free to run again."""
    client, key = login(), new_key()
    send(client, "/order/", key)
    Operation.objects.filter(key=key).update(
        status="reconciling", expires_at=None, tombstone_until=None, due_at=timezone.now()
    )

    response = send(client, "/order/", key)

    assert (response.status_code, response["Retry-After"]) == (409, "1")
    assert response.json()["key_action"] == "wait"
    assert effects(key) == 1


def outage():
    """What Django raises when this kind of database cannot answer now."""
    vendor = connections["default"].vendor
    if vendor == "mysql":
        return OperationalError(2006, "Server has gone away")
    error = OperationalError("database is locked" if vendor == "sqlite" else "connection refused")
    error.__cause__ = sqlite3.OperationalError("database is locked") if vendor == "sqlite" else None
    return error


def test_a_store_that_cannot_answer_is_503_before_the_view_runs(monkeypatch):
    """K01, K02, K03: fail closed, with Retry-After; the same key works when the store is back."""
    client, key = login(), new_key()

    def unreachable(*args, **kwargs):
        raise outage()

    with monkeypatch.context() as patch:
        patch.setattr("idempotency.db.claim", unreachable)
        response = send(client, "/order/", key)

    assert (response.status_code, response["Retry-After"]) == (503, "1")
    assert response.json()["key_action"] == "same_key"
    assert effects(key) == 0
    assert send(client, "/order/", key).status_code == 201


# Configuration


@override_settings(
    IDEMPOTENCY={
        "DOCUMENTATION_URL": "https://docs.example.org/keys",
        "PROBLEM_TYPE": "https://docs.example.org/problems/",
        "RETRY_AFTER": 7,
    }
)
def test_the_project_names_its_documentation_and_types():
    """R18: a client developer finds the page from the answer."""
    response = problem(exceptions.MissingKey())

    assert response["Link"] == (
        '<https://docs.example.org/keys#missing-key>; rel="describedby"; type="text/html"'
    )
    assert members(exceptions.Mismatch())["type"] == "https://docs.example.org/problems/mismatch"


def render_page(request, refusal):
    if "text/html" not in request.headers.get("Accept", ""):
        return None
    return HttpResponse(f"<h1>{refusal.title}</h1>", status=refusal.status)


@override_settings(
    IDEMPOTENCY={"PROBLEM_RENDERER": render_page, "DOCUMENTATION_URL": "https://docs.example.org/"}
)
def test_a_project_renders_problems_as_pages_for_browsers():
    """R97: people get a page, programs get problem+json, and both get the headers."""
    client = login()

    page = send(client, "/order/", headers={"Accept": "text/html"})
    data = send(client, "/order/", headers={"Accept": "application/json"})

    assert page.content == b"<h1>This request needs an idempotency key.</h1>"
    assert page["Cache-Control"] == "no-store"
    assert "rel=" in page["Link"]
    assert data["Content-Type"] == "application/problem+json"


def test_titles_are_translated_lazily(monkeypatch):
    """A title is text for people; its language is the request's."""
    with language("de"):
        catalogue = trans_real.translation("de")
        monkeypatch.setitem(
            catalogue._catalog._catalogs[0],
            "This request needs an idempotency key.",
            "Diese Anfrage braucht einen Schlüssel.",
        )
        assert members(exceptions.MissingKey())["title"] == "Diese Anfrage braucht einen Schlüssel."
    assert members(exceptions.MissingKey())["title"] == "This request needs an idempotency key."


def page_not_found(request, exception=None):
    return HttpResponse("custom 404", status=404)


handler400 = handler403 = handler404 = page_not_found


def server_error(request):
    return HttpResponse("custom 500", status=500)


handler500 = server_error


def test_the_projects_error_handlers_do_not_change_a_refusal():
    """J04: a refusal is a response, not an exception that handler400 or handler500 may restyle."""
    client, key = login(), new_key()
    send(client, "/order/", key, {"a": 1})

    assert send(client, "/order/").json()["status"] == 400
    assert send(client, "/order/", key, {"a": 2}).json()["status"] == 422
