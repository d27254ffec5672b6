"""Protected Django views through the whole request cycle: who shares a key, what is final, what rolls back."""

import uuid

import corsheaders.defaults
import pytest
from django.contrib.auth.decorators import login_required, permission_required
from django.contrib.auth.models import Permission, User
from django.core.cache import cache
from django.core.exceptions import PermissionDenied
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import IntegrityError, connections, transaction
from django.http import Http404, HttpResponse, JsonResponse, StreamingHttpResponse
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import URLPattern
from django.utils import translation

import idempotency.http
from idempotency import engine, fingerprints, policies, scopes
from idempotency.decorators import idempotent
from idempotency.models import Event, Operation, Outcome, Status
from tests.app.models import Effect
from tests.callers import effects, events, is_replay, new_key, operation, problem
from tests.clients import login, routes, send

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.urls(__name__),
]

urlpatterns: list[URLPattern] = []
route = routes(urlpatterns)


def leave_effect(request, using="default"):
    key = request.headers.get("Idempotency-Key", "no key")
    return Effect.objects.using(using).create(label=key).pk


@route
@idempotent()
def order(request):
    return JsonResponse({"effect": leave_effect(request), "user": str(request.user)}, status=201)


@pytest.fixture
def atomic_requests(monkeypatch):
    for alias in ("default", "other"):
        monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)


# Who shares a key


def test_two_users_with_one_key_have_two_operations():
    """D01, D02, D10, hard case 28: no shared body, no mismatch, no hint that the key exists."""
    key = new_key()

    alice = send(login("alice"), "/order/", key, {"amount": 1})
    bob = send(login("bob"), "/order/", key, {"amount": 2})
    bob_with_the_same_body = send(login("carol"), "/order/", key, {"amount": 1})

    assert [r.json()["user"] for r in (alice, bob, bob_with_the_same_body)] == [
        "alice",
        "bob",
        "carol",
    ]
    assert effects(key) == Operation.objects.filter(key=key).count() == 3


def test_a_new_session_of_the_same_user_finds_the_operation():
    """R25: a new login is the same principal."""
    key = new_key()

    assert not is_replay(send(login("alice"), "/order/", key))
    assert is_replay(send(login("alice"), "/order/", key))


route(
    idempotent(scope=scopes.tenant(lambda request: request.headers["X-Tenant"]))(
        lambda request: HttpResponse(f"{leave_effect(request)}")
    ),
    "by_tenant",
)
route(
    idempotent(scope=scopes.session)(lambda request: HttpResponse(f"{leave_effect(request)}")),
    "by_session",
)
route(
    idempotent(scope=scopes.anonymous)(lambda request: HttpResponse(f"{leave_effect(request)}")),
    "by_nobody",
)
for name in ("refunds", "charges"):
    route(
        idempotent(scope=scopes.endpoint())(lambda r: HttpResponse(f"{leave_effect(r)}")),
        name,
    )


def test_two_tenants_may_use_the_same_key():
    """D03, D11: one person in two tenants has two key spaces."""
    client, key = login(), new_key()
    a, b = {"X-Tenant": "a"}, {"X-Tenant": "b"}

    first = send(client, "/by_tenant/", key, headers=a)

    assert not is_replay(send(client, "/by_tenant/", key, headers=b))
    assert send(client, "/by_tenant/", key, headers=a).content == first.content
    assert effects(key) == 2


def test_visitors_are_told_apart_by_session():
    """D04, D05: two browsers behind one address, one key."""
    one, two, key = Client(), Client(), new_key()

    first = send(one, "/by_session/", key)
    assert not is_replay(send(two, "/by_session/", key))
    assert send(one, "/by_session/", key).content == first.content
    assert effects(key) == 2


def test_sharing_a_key_space_with_everybody_is_an_explicit_choice():
    """D12: widening the scope is possible, per view, and said in so many words."""
    key = new_key()

    assert not is_replay(send(Client(), "/by_nobody/", key))
    assert is_replay(send(login(), "/by_nobody/", key))


def test_a_custom_scope_is_the_same_on_write_and_read():
    """D14: what a retry, the admin and the purge look for is what was written."""
    client, key = login(), new_key()
    send(client, "/by_tenant/", key, headers={"X-Tenant": "a"})

    stored = Operation.objects.get(key=key)

    assert stored.scope.startswith("tenant:a|user:")
    assert is_replay(send(client, "/by_tenant/", key, headers={"X-Tenant": "a"}))


def test_one_key_on_two_endpoints_is_a_mismatch_by_default():
    """D08, D09: never the other endpoint's reply, never a silent skip."""
    client, key = login(), new_key()

    send(client, "/charges_default/", key)
    assert problem(send(client, "/order/", key)) == "mismatch"


route(
    idempotent(methods={"POST", "PUT", "DELETE"})(
        lambda r: HttpResponse(f"{leave_effect(r)}", status=201 if r.method == "POST" else 200)
    ),
    "charges_default",
)


def test_one_key_on_two_endpoints_can_be_two_operations():
    """R22: scopes.endpoint() makes the route part of the scope."""
    client, key = login(), new_key()

    assert not is_replay(send(client, "/refunds/", key))
    assert not is_replay(send(client, "/charges/", key))
    assert is_replay(send(client, "/refunds/", key))
    assert effects(key) == 2


# Methods


def test_put_and_delete_are_protected_where_the_policy_says_so():
    """R8: a DELETE that is retried answers as it did; elsewhere the key is ignored."""
    client = login()
    for method in ("put", "delete"):
        key = new_key()
        first = send(client, "/charges_default/", key, method=method)
        again = send(client, "/charges_default/", key, method=method)
        assert (again.content, is_replay(again)) == (first.content, True)
        assert effects(key) == 1

        key = new_key()
        send(client, "/order/", key, method=method)
        send(client, "/order/", key, method=method)
        assert effects(key) == 2
        assert not Operation.objects.filter(key=key).exists()


def test_one_key_for_two_methods_of_a_resource_is_a_mismatch():
    """D08: create, then DELETE with the key of the create: refused, and nothing claims to be gone."""
    client, key = login(), new_key()

    assert send(client, "/charges_default/", key).status_code == 201
    refused = send(client, "/charges_default/", key, method="delete")

    assert problem(refused) == "mismatch"
    assert effects(key) == 1


# What is final

attempts: dict[str, int] = {}


def first_try(request) -> bool:
    key = request.headers["Idempotency-Key"]
    attempts[key] = attempts.get(key, 0) + 1
    return attempts[key] == 1


def flaky(**policy):
    """Fails as the query string says on the first try, after its effect, and works on the second."""

    @idempotent(**policy)
    def view(request):
        pk = leave_effect(request)
        if first_try(request):
            failure = request.GET["as"]
            if failure.isdigit():
                return JsonResponse({"effect": pk}, status=int(failure))
            raise {
                "error": ZeroDivisionError,
                "not found": Http404,
                "denied": PermissionDenied,
            }[failure]
        return JsonResponse({"effect": pk}, status=201)

    return view


route(flaky(), "flaky")
route(flaky(store=policies.store_success), "flaky_success_only")
route(flaky(store=policies.store_everything), "flaky_everything")
route(flaky(store={201, 503}), "flaky_listed")


def twice(url, key=None):
    client, key = login(), key or new_key()
    first, second = (send(client, url, key) for _ in range(2))
    return first, second, effects(key)


@pytest.mark.parametrize(
    ("failure", "code"),
    [("error", 500), ("denied", 403)]
    + [(str(code), code) for code in (401, 403, 405, 408, 413, 415, 423, 425, 429, 500, 502, 503)],
)
def test_what_is_not_final_rolls_back_and_the_retry_runs(failure, code):
    """F01, F02, F07, F08, F14, R75: nothing is left of the first try, and the key is not used up."""
    first, second, count = twice(f"/flaky/?as={failure}")

    assert (first.status_code, second.status_code) == (code, 201)
    assert not is_replay(second)
    assert count == 1


@pytest.mark.parametrize("code", [400, 402, 404, 409, 410, 412, 422])
def test_a_returned_client_error_is_final_with_its_effects(code):
    """F04, F06, B08: Django commits what a returned 4xx did; a state-dependent refusal stays."""
    first, second, count = twice(f"/flaky/?as={code}")

    assert first.status_code == code
    assert (second.status_code, second.content, is_replay(second)) == (code, first.content, True)
    assert count == 1


def test_a_corrected_request_needs_a_new_key_by_default_and_not_where_only_success_is_stored():
    """F03, F13, R77: both policies exist; the default is stated."""
    client, key = login(), new_key()
    send(client, "/flaky/?as=400", key, {"code": "wrong"})
    assert problem(send(client, "/flaky/?as=400", key, {"code": "right"})) == "mismatch"

    first, second, count = twice("/flaky_success_only/?as=400")
    assert (first.status_code, second.status_code, count) == (400, 201, 1)


def test_a_policy_may_store_server_errors_and_may_list_codes():
    """F04, F13: Stripe's first API version; and a plain list of codes."""
    first, second, count = twice("/flaky_everything/?as=500")
    assert (first.status_code, second.status_code, is_replay(second), count) == (500, 500, True, 1)

    first, second, count = twice("/flaky_listed/?as=503")
    assert (second.status_code, is_replay(second), count) == (503, True, 1)

    first, second, count = twice("/flaky_listed/?as=409")
    assert (first.status_code, second.status_code, count) == (409, 201, 1)


def test_a_raised_404_stays_a_404():
    """H05: rolling back outside ATOMIC_REQUESTS does not turn it into a 500. It is not stored."""
    first, second, count = twice("/flaky/?as=not found")
    assert (first.status_code, second.status_code, count) == (404, 201, 1)


def test_failed_attempts_are_remembered_without_their_message():
    """The support desk sees what happened; a message may carry personal data."""
    client, key = login(), new_key()
    send(client, "/flaky/?as=error", key)

    failed = operation(key)
    assert failed.status == "processing"
    assert failed.last_error.startswith("builtins.ZeroDivisionError in tests.test_http_doors")
    assert send(client, "/flaky/?as=error", key).status_code == 201
    assert operation(key).attempt == 2
    assert operation(key).last_error == ""


# Transactions


@route
@idempotent()
def half_done(request):
    leave_effect(request)
    raise ZeroDivisionError


@route
@idempotent()
def swallowed(request):
    """Answers 201 although a database error has doomed its transaction."""
    leave_effect(request)
    try:
        with transaction.atomic(durable=False, savepoint=False):
            Effect.objects.create(pk=Effect.objects.latest("pk").pk, label="duplicate")
    except IntegrityError:
        pass
    return HttpResponse("created", status=201)


@route
@idempotent()
def marked(request):
    leave_effect(request)
    transaction.set_rollback(True)
    return HttpResponse("created", status=201)


@route
@idempotent()
def hook(request):
    leave_effect(request)

    def fail():
        raise ZeroDivisionError

    transaction.on_commit(fail)
    return HttpResponse("created", status=201)


@route
@idempotent(using="other")
def elsewhere(request):
    leave_effect(request, "other")
    if "fail" in request.GET:
        raise ZeroDivisionError
    return HttpResponse("created", status=201)


@route
@idempotent()
def broken_at_commit(request):
    """Breaks a foreign key that PostgreSQL and SQLite check when the transaction commits."""
    leave_effect(request)
    if first_try(request):
        Permission.objects.create(codename="x", name="x", content_type_id=10**6)
    return HttpResponse("created", status=201)


@route
@idempotent()
def leaves(request):
    leave_effect(request)
    if first_try(request):
        raise SystemExit(3)
    return HttpResponse("created", status=201)


def test_a_failed_commit_is_a_500_and_never_replayed_as_a_success():
    """A07, H03, peers (a replayed 201 for an order that does not exist): one commit decides all."""
    first, second, count = twice("/broken_at_commit/")
    assert (first.status_code, second.status_code, is_replay(second)) == (500, 201, False)
    assert count == 1


def test_a_process_that_is_told_to_exit_leaves_nothing():
    """B05, R53: SystemExit is no Exception; it rolls back all the same, and the retry runs at once."""
    client, key = login(), new_key()

    with pytest.raises(SystemExit):
        send(client, "/leaves/", key)

    assert not connections["default"].in_atomic_block
    assert operation(key).last_error.startswith("builtins.SystemExit")
    assert (send(client, "/leaves/", key).status_code, effects(key)) == (201, 1)


@pytest.mark.usefixtures("atomic_requests")
def test_keyless_requests_keep_the_projects_transaction():
    """H03: with ATOMIC_REQUESTS an unprotected request of a protected view rolls back as before."""
    assert send(login(), "/half_done/").status_code == 500
    assert effects("no key") == 0


def test_keyless_requests_get_no_transaction_where_the_project_has_none():
    """Django's autocommit: the view is left exactly as it was."""
    assert send(login(), "/half_done/").status_code == 500
    assert effects("no key") == 1


@pytest.mark.parametrize("atomic", [False, True])
def test_a_failing_view_leaves_nothing(atomic, request):
    """F01, F08, H03: with and without ATOMIC_REQUESTS."""
    if atomic:
        request.getfixturevalue("atomic_requests")
    first, second, count = twice("/half_done/")
    assert (first.status_code, second.status_code, count) == (500, 500, 0)


@pytest.mark.parametrize("url", ["/swallowed/", "/marked/"])
def test_an_answer_whose_transaction_is_doomed_is_a_500_and_not_stored(url):
    """Hard case 11, R61: storing the 201 would make the lie permanent."""
    first, second, count = twice(url)
    assert (first.status_code, second.status_code, count) == (500, 500, 0)
    assert not Operation.objects.filter(status="succeeded").exists()


def test_a_failing_commit_hook_does_not_run_the_view_again():
    """Hard case 12, R63: the effects are committed, so the retry is a replay of the 201."""
    first, second, count = twice("/hook/")
    assert (first.status_code, second.status_code, is_replay(second), count) == (500, 201, True, 1)


def test_effects_on_another_database_share_its_transaction():
    """H04, hard case 17: the operation lives beside its effects, on success and on error."""
    client, key = login(), new_key()

    assert send(client, "/elsewhere/?fail", key).status_code == 500
    assert effects(key, "other") == 0

    key = new_key()
    assert send(client, "/elsewhere/", key).status_code == 201
    assert is_replay(send(client, "/elsewhere/", key))
    assert effects(key, "other") == 1
    assert operation(key, "other").status == "succeeded"
    assert not Operation.objects.using("default").exists()


@route
@idempotent()
def nested(request):
    """Runs an operation of its own inside, and again under the same inner key."""
    intent = engine.Intent(
        name="inner",
        scope=("test",),
        key=request.operation.derive_key("inner"),
        fingerprint=fingerprints.of_value(request.GET.get("inner", "")),
        policy=policies.Policy().resolved(),
    )

    def handler(inner):
        leave_effect(request)
        return Outcome(status=Status.SUCCEEDED, body=b"inner")

    results = [engine.run(intent, handler) for _ in range(2)]
    assert engine.current() is request.operation
    if "fail" in request.GET:
        raise ZeroDivisionError
    return HttpResponse(f"{[result.replayed for result in results]}")


def test_an_inner_operation_joins_the_outer_one():
    """Hard case 16, R57: the inner completion rolls back with the outer, and replays inside it."""
    first, second, count = twice("/nested/")
    assert (first.content, is_replay(second), count) == (b"[False, True]", True, 1)

    first, second, count = twice("/nested/?fail")
    assert (first.status_code, second.status_code, count) == (500, 500, 0)


@route
@idempotent()
def reentrant(request):
    return order_again(request)


order_again = idempotent()(lambda request: HttpResponse("never"))


def test_an_operation_inside_itself_is_a_clear_error(caplog):
    """Hard case 16: neither a self-made 409 nor a deadlock."""
    response = send(login(), "/reentrant/", new_key())

    assert response.status_code == 500
    assert "derive_key" in caplog.text


@route
@idempotent()
def refuses_inside(request):
    intent = engine.Intent(
        name="inner",
        scope=("shared",),
        key=request.GET["inner"],
        fingerprint=fingerprints.of_value(request.headers["Idempotency-Key"]),
        policy=policies.Policy().resolved(),
    )
    engine.run(intent, lambda inner: Outcome(status=Status.SUCCEEDED))
    leave_effect(request)
    return HttpResponse("done")


def test_a_refusal_inside_the_view_is_answered_as_what_it_is():
    """J05: an inner mismatch or in-progress is its problem, not a 500, and rolls the outer back."""
    client, inner, key = login(), new_key(), new_key()
    assert send(client, f"/refuses_inside/?inner={inner}", new_key()).status_code == 200

    response = send(client, f"/refuses_inside/?inner={inner}", key)

    assert problem(response) == "mismatch"
    assert response.json()["operation_id"] == str(operation(inner).pk)
    assert effects(key) == 0


# Replays ask again who may see them


@route
@login_required
@permission_required("auth.add_user", raise_exception=True)
@idempotent()
def guarded(request):
    return HttpResponse(f"secret {leave_effect(request)}", status=201)


@route
@idempotent(authorize_replay=lambda request, operation: request.user.first_name != "demoted")
def authorized(request):
    return HttpResponse(f"secret {leave_effect(request)}", status=201)


def test_a_withdrawn_permission_closes_the_replay():
    """D10, hard case 27, R41: the stored body is not shown, and the operation is not touched."""
    client, key = login(), new_key()
    user = User.objects.get(username="alice")
    user.user_permissions.add(Permission.objects.get(codename="add_user"))
    assert send(client, "/guarded/", key).status_code == 201
    assert send(client, "/guarded/", key).status_code == 201
    before = Operation.objects.filter(key=key).values().get()

    user.user_permissions.clear()
    refused = send(client, "/guarded/", key)

    assert refused.status_code == 403
    assert b"secret" not in refused.content
    assert Operation.objects.filter(key=key).values().get() == before


def test_a_deactivated_user_gets_nothing_replayed():
    """Hard case 27: the session ends with the account."""
    client, key = login(), new_key()
    send(client, "/order/", key)
    User.objects.update(is_active=False)

    assert problem(send(client, "/order/", key)) == "anonymous-key"


def test_the_policy_decides_who_may_see_a_replay():
    """R41: plain views have no object permissions; `authorize_replay` is their place."""
    client, key = login(), new_key()
    assert send(client, "/authorized/", key).status_code == 201
    assert is_replay(send(client, "/authorized/", key))

    User.objects.update(first_name="demoted")
    refused = send(client, "/authorized/", key)

    assert refused.status_code == 403
    assert b"secret" not in refused.content
    assert [kind for kind, _ in events(key)] == ["replayed"]
    assert effects(key) == 1


async def never_awaited(request, operation):
    return False


for name, answer in {
    "forgot_return": lambda request, operation: None,
    "a_number": lambda request, operation: 1,
    "coroutine": never_awaited,
}.items():
    route(
        idempotent(authorize_replay=answer)(
            lambda request: HttpResponse(f"secret {leave_effect(request)}", status=201)
        ),
        name,
    )


@pytest.mark.parametrize("url", ["/forgot_return/", "/a_number/", "/coroutine/"])
def test_an_authorization_that_is_no_plain_yes_or_no_shows_nothing(url, caplog):
    """R41: a coroutine is "true" in Python; it must not open the stored body."""
    first, second, count = twice(url)

    assert (first.status_code, second.status_code, count) == (201, 500, 1)
    assert b"secret" not in second.content
    assert "authorize_replay must return True or False" in caplog.text


# Middleware


class Recorder:
    """Middleware that looks at the operation and adds a secret to the answer."""

    seen: list[tuple[uuid.UUID, bool]] = []

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        response = self.get_response(request)
        if hasattr(request, "operation"):
            self.seen.append((request.operation.pk, is_replay(response)))
        response["Location"] = "/?token=added-later"
        response["X-Fresh-Token"] = "added-later"
        response.content = response.content + b" added-later"
        response.set_cookie("token", "added-later")
        return response


DEFAULT = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]


@override_settings(
    MIDDLEWARE=["tests.test_http_doors.Recorder", *DEFAULT],
    IDEMPOTENCY={"REPLAY_HEADERS": ["X-Fresh-Token"]},
)
def test_what_outer_middleware_adds_is_not_stored_and_replays_pass_it():
    """M02, R44: a refreshed token is not kept; middleware can tell a replay from a first request."""
    Recorder.seen.clear()
    client, key = login(), new_key()

    first, second = (send(client, "/order/", key) for _ in range(2))

    stored = operation(key)
    assert "added-later" not in stored.headers
    assert b"added-later" not in bytes(stored.body)
    assert first.content.endswith(b" added-later")
    assert second.content == first.content
    assert second["X-Fresh-Token"] == "added-later"
    assert Recorder.seen == [(stored.pk, False), (stored.pk, True)]


@override_settings(
    MIDDLEWARE=[
        "django.middleware.gzip.GZipMiddleware",
        "django.middleware.http.ConditionalGetMiddleware",
        "django.middleware.locale.LocaleMiddleware",
        "django.middleware.security.SecurityMiddleware",
        "django.middleware.clickjacking.XFrameOptionsMiddleware",
        *DEFAULT,
        "django.contrib.messages.middleware.MessageMiddleware",
    ]
)
def test_replays_pass_all_of_djangos_middleware():
    """G14: session, CSRF, locale, conditional GET, gzip work on a replay as on any response."""
    client, key = login(), new_key()
    headers = {"Accept-Encoding": "gzip", "Accept-Language": "de"}

    first, second = (send(client, "/order/", key, headers=headers) for _ in range(2))

    assert (second.status_code, second.content) == (201, first.content)
    ours = {"Idempotent-Replayed": "true", "Cache-Control": "no-store"}
    assert dict(second.items()) == {**dict(first.items()), **ours}
    assert second["Content-Language"] == "de"
    translation.activate("en")


def test_csrf_is_checked_on_replays():
    """R130: a replay is a request like any other."""
    client, key = login(enforce_csrf_checks=True), new_key()
    token = {"X-CSRFToken": "t" * 32}
    client.cookies["csrftoken"] = "t" * 32
    assert send(client, "/order/", key, headers=token).status_code == 201
    assert is_replay(send(client, "/order/", key, headers=token))

    assert send(client, "/order/", key).status_code == 403
    assert effects(key) == 1


class ReadsTheForm:
    """Middleware that parses the form before the view does."""

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        request.POST  # noqa: B018
        return self.get_response(request)


@override_settings(MIDDLEWARE=["tests.test_http_doors.ReadsTheForm", *DEFAULT])
def test_a_form_that_middleware_has_read_is_still_compared():
    """J12: uploads too; another file under the same key is a mismatch."""
    client, key = login(), new_key()

    def upload(content):
        form = {"name": "order", "file": SimpleUploadedFile("a.bin", content)}
        return client.post("/order/", form, headers={"Idempotency-Key": key})

    assert upload(b"one").status_code == 201
    assert is_replay(upload(b"one"))
    assert problem(upload(b"two")) == "mismatch"
    assert effects(key) == 1


CORS = {
    "MIDDLEWARE": ["corsheaders.middleware.CorsMiddleware", *DEFAULT],
    "CORS_ALLOWED_ORIGINS": ["https://shop.example.org"],
    "CORS_ALLOW_HEADERS": (
        *corsheaders.defaults.default_headers,
        *idempotency.http.CORS_ALLOW_HEADERS,
    ),
    "CORS_EXPOSE_HEADERS": idempotency.http.CORS_EXPOSE_HEADERS,
}


@override_settings(**CORS)
def test_scripts_of_another_origin_can_send_the_key_and_read_the_marker():
    """J09: the documented header lists are what django-cors-headers needs; CORS is never replayed."""
    client, key = login(), new_key()
    origin = {"Origin": "https://shop.example.org"}

    preflight = client.options(
        "/order/",
        headers={
            **origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "idempotency-key",
        },
    )
    send(client, "/order/", key, headers=origin)
    replayed = send(client, "/order/", key, headers=origin)
    elsewhere = send(client, "/order/", key)

    assert "idempotency-key" in preflight["Access-Control-Allow-Headers"].split(", ")
    assert "Idempotent-Replayed" in replayed["Access-Control-Expose-Headers"]
    assert replayed["Access-Control-Allow-Origin"] == "https://shop.example.org"
    assert is_replay(elsewhere)
    assert "Access-Control-Allow-Origin" not in elsewhere


# The rest


class ReadsFromTheReplica:
    """A router that sends reads to a replica that lags behind."""

    def db_for_read(self, model, **hints):
        return "other"

    def db_for_write(self, model, **hints):
        return "default"


def test_a_lagging_replica_is_never_asked(settings):
    """K09, hard case 20: claims and replays go to the database that is written to."""
    key = new_key()
    settings.DATABASE_ROUTERS = [ReadsFromTheReplica()]

    first, second = (send(Client(), "/by_nobody/", key) for _ in range(2))

    assert (second.content, is_replay(second)) == (first.content, True)
    assert Effect.objects.using("default").filter(label=key).count() == 1


@route
@transaction.atomic
def inside_a_transaction(request):
    """A view of the project's whose own transaction contains the protected one."""
    response = order(request)
    rows = effects(request.headers["Idempotency-Key"])  # fails in a poisoned transaction
    return JsonResponse({"rows": rows, "inner": response.status_code})


def test_a_duplicate_inside_a_transaction_does_not_poison_it():
    """H01: neither a replay nor a refusal breaks the queries that follow."""
    client, key = login(), new_key()
    url = "/inside_a_transaction/"

    answers = [send(client, url, key, {"a": n}).json() for n in (1, 1, 2)]

    assert answers == [{"rows": 1, "inner": code} for code in (201, 201, 422)]


def test_a_one_time_code_is_used_once_and_its_retry_replays():
    """D15: retry recognition comes before the single-use check of the view."""
    client, key = login(), new_key()
    cache.set("code", "123456")

    first = send(client, "/redeem/", key, {"code": "123456"})
    again = send(client, "/redeem/", key, {"code": "123456"})
    other = send(client, "/redeem/", new_key(), {"code": "123456"})

    assert (first.status_code, again.status_code, other.status_code) == (200, 200, 409)
    assert is_replay(again)


@route
@idempotent()
def redeem(request):
    if cache.get("code") is None:
        return HttpResponse("used", status=409)
    cache.delete("code")
    return HttpResponse("welcome")


def test_clearing_the_cache_forgets_nothing():
    """E04, K04, K05, K06, K08: outcomes live in the database and nowhere else."""
    client, key = login(), new_key()
    send(client, "/order/", key)
    cache.clear()
    assert is_replay(send(client, "/order/", key))


def test_a_response_that_is_not_final_may_be_a_stream():
    """A returned 503 stream is passed on; nothing is read from it, nothing is stored."""
    client, key = login(), new_key()

    response = send(client, "/busy_stream/", key)

    assert (response.status_code, b"".join(response.streaming_content)) == (503, b"later")
    assert effects(key) == 0


@route
@idempotent()
def busy_stream(request):
    leave_effect(request)
    return StreamingHttpResponse(iter([b"later"]), status=503)


@route
@idempotent(key="json:request_id")
def json_field(request):
    return HttpResponse(f"{Effect.objects.create(label='by field').pk}", status=201)


@route
@idempotent(key="form:token")
def form_field(request):
    return HttpResponse(f"{Effect.objects.create(label='by field').pk}", status=201)


@route
@idempotent(key="header:PayPal-Request-Id")
def own_header(request):
    return HttpResponse(f"{Effect.objects.create(label='by field').pk}", status=201)


@pytest.mark.parametrize("carrier", ["json", "form", "header"])
def test_the_policy_names_the_carrier_of_the_key(carrier):
    """R10: a JSON member, a hidden form field, or another header."""
    client, key = login(), new_key()
    calls = {
        "json": lambda: send(client, "/json_field/", data={"request_id": key, "amount": 1}),
        "form": lambda: client.post("/form_field/", {"token": key, "amount": 1}),
        "header": lambda: send(client, "/own_header/", headers={"PayPal-Request-Id": key}),
    }

    first, second = calls[carrier](), calls[carrier]()

    assert (second.status_code, second.content) == (201, first.content)
    assert is_replay(second)
    assert operation(key)


# Statements


def statements(client, url, key=None):
    with CaptureQueriesContext(connections["default"]) as captured:
        send(client, url, key)
    return [query["sql"] for query in captured if not query["sql"].startswith(("BEGIN", "COMMIT"))]


@route
@transaction.atomic
def unprotected(request):
    return JsonResponse({"effect": leave_effect(request), "user": str(request.user)}, status=201)


def test_a_first_request_costs_three_statements_more_and_a_replay_two():
    """Issue 2 §8: claim, lock, completion; then claim and event. Authentication comes on top."""
    client, key = login(), new_key()
    send(client, "/order/", new_key())  # what is cached once is not counted
    plain = statements(client, "/unprotected/")

    first = statements(client, "/order/", key)
    replay = statements(client, "/order/", key)

    # MySQL reads before it inserts; MariaDB and the others need one statement for both.
    reads_first = connections["default"].vendor == "mysql" and not getattr(
        connections["default"], "mysql_is_mariadb", False
    )
    authentication = len(plain) - 1
    assert len(first) == len(plain) + 3 + reads_first
    assert len(replay) == authentication + 2
    assert Event.objects.count() == 1


# Stepwise operations over HTTP

outages: list[str] = []


def charge(key):
    if outages:
        raise ConnectionError(outages.pop())
    return {"charge": key}


@route
@idempotent(stepwise=True)
def checkout(request):
    """Reserves, charges a provider, and then fails or loses its lease if asked to."""
    operation = request.operation
    reserved = operation.step("reserve", leave_effect, request)
    key = operation.derive_key("charge")
    paid = operation.call("charge", charge, key, repeatable="repeatable" in request.GET)
    if "overtaken" in request.GET:
        Operation.objects.filter(pk=operation.pk).update(owner="somebody else")
    if "fail" in request.GET and first_try(request):
        raise ZeroDivisionError
    return JsonResponse({"reserved": reserved, **paid}, status=201)


def test_a_stepwise_view_continues_after_its_last_step():
    """F14, F09: the retry after a failure repeats neither the step nor the charge."""
    first, second, count = twice("/checkout/?fail")

    assert (first.status_code, second.status_code, count) == (500, 201, 1)
    assert second.json() == {
        "reserved": Effect.objects.get().pk,
        "charge": Operation.objects.get().derive_key("charge"),
    }


def test_a_charge_that_may_have_happened_is_409_outcome_unknown():
    """Hard case 7, R67, R68: neither failed nor run again; the client waits with the same key."""
    outages.append("timed out")
    first, second, count = twice("/checkout/")

    for answer in (first, second):
        assert (answer.status_code, problem(answer)) == (409, "outcome-unknown")
        assert answer.json()["key_action"] == "wait"
    assert count == 1
    assert Operation.objects.get().status == "reconciling"


def test_a_repeatable_charge_is_repeated_by_the_retry():
    """Hard case 8: the provider recognizes the derived key."""
    outages.append("timed out")
    first, second, count = twice("/checkout/?repeatable")
    assert (first.status_code, second.status_code, count) == (500, 201, 1)


def test_an_overtaken_executor_answers_in_progress():
    """Hard case 3: its end is not recorded; whoever owns the operation now has the outcome."""
    response = send(login(), "/checkout/?overtaken", new_key())

    assert (response.status_code, problem(response)) == (409, "in-progress")
    assert Operation.objects.get().status == "processing"
