"""The status URL: the owner reads what became of an operation, nobody else learns that there is one."""

import json
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory
from django.urls import path
from django.utils import timezone
from rest_framework.test import APIClient

from idempotency import engine
from idempotency.completion import complete_abandoned, submit
from idempotency.contrib.rest_framework import OperationStatusView as RestStatusView
from idempotency.decorators import idempotent
from idempotency.exceptions import (
    ConfigurationError,
    InProgress,
    Mismatch,
    OutcomeUnknown,
    StoredFailure,
)
from idempotency.functions import idempotent_function
from idempotency.http.status import MESSAGES, OperationStatusView, accepted
from idempotency.models import Operation, Outcome, Status
from idempotency.policies import Policy
from tests.callers import age, intent, new_key, post
from tests.processes import Signal, running
from tests.shops import find

pytestmark = pytest.mark.django_db(transaction=True)

urlpatterns = [
    path("operations/", OperationStatusView.as_view(show_result=True)),
    path(
        "operations/<str:operation>/", OperationStatusView.as_view(show_result=True), name="status"
    ),
    path("shy/<str:operation>/", OperationStatusView.as_view()),
    path("api/<str:operation>/", RestStatusView.as_view(), name="rest-status"),
]


@pytest.fixture(autouse=True)
def _urls(settings: Any) -> None:
    settings.ROOT_URLCONF = __name__
    settings.IDEMPOTENCY = {"STATUS_ROUTE": "status"}


@pytest.fixture
def owner() -> Client:
    return logged_in("owner")


def logged_in(name: str) -> Client:
    client = Client()
    client.force_login(User.objects.get_or_create(username=name)[0])
    return client


def user_id(client: Client) -> int:
    return int(client.session["_auth_user_id"])


def begin(client: Client, **policy: Any) -> Any:
    return engine.begin(intent(new_key(), user=user_id(client), **policy))


def state(client: Client, identifier: object, prefix: str = "operations") -> dict[str, Any]:
    response = client.get(f"/{prefix}/{identifier}/")
    assert response.status_code == 200, response.content
    assert response["Cache-Control"] == "no-store"
    return {**response.json(), "Retry-After": response.get("Retry-After")}


def outcome(status: str = Status.SUCCEEDED, **values: Any) -> Outcome:
    values.setdefault("code", 201)
    values.setdefault("headers", {"Content-Type": "application/json", "Location": "/orders/1/"})
    values.setdefault("body", b'{"order": 1}')
    return Outcome(status=status, **values)


# Who may read


def test_the_owner_reads_an_operation_by_id_by_key_and_by_header(owner: Client) -> None:
    begun = begin(owner)
    begun.complete(outcome())
    operation = begun.operation
    expected = state(owner, operation.pk)
    assert (expected["operation_id"], expected["status"]) == (str(operation.pk), "succeeded")
    assert state(owner, operation.key) == expected
    by_header = owner.get("/operations/", headers={"Idempotency-Key": f'"{operation.key}"'})
    assert by_header.json() == owner.get(f"/operations/{operation.pk}/").json()


@pytest.mark.parametrize("prefix", ["operations", "api"])
def test_everybody_else_gets_the_same_404(owner: Client, prefix: str) -> None:
    begun = begin(owner)
    begun.complete(outcome())
    stranger, nobody = logged_in("stranger"), Client()
    paths = [f"/{prefix}/{name}/" for name in (begun.operation.pk, begun.operation.key)]
    missing = stranger.get(f"/{prefix}/{new_key()}/")
    for response in (client.get(url) for client in (stranger, nobody) for url in paths):
        assert (response.status_code, response.content) == (404, missing.content)
        assert response["Content-Type"] == missing["Content-Type"]


@pytest.mark.parametrize("header", ["", '"half', "a,b"])
def test_without_a_usable_key_there_is_nothing_to_find(owner: Client, header: str) -> None:
    assert owner.get("/operations/", headers={"Idempotency-Key": header}).status_code == 404


def test_a_key_that_looks_like_anothers_id_names_its_own_operation(owner: Client) -> None:
    first = begin(owner)
    first.complete(outcome())
    second = engine.begin(intent(str(first.operation.pk), user=user_id(owner)))
    assert not isinstance(second, engine.Replay)
    second.complete(outcome(code=200))
    assert state(owner, first.operation.pk)["operation_id"] == str(second.operation.pk)


def test_only_reading_is_allowed(owner: Client) -> None:
    assert owner.post("/operations/x/").status_code == 405
    assert owner.head("/operations/x/").status_code == 404


def test_the_rest_framework_view_uses_its_own_authentication(owner: Client) -> None:
    begun = begin(owner)
    begun.complete(outcome())
    client = APIClient()
    client.force_authenticate(User.objects.get(pk=user_id(owner)))
    response = client.get(f"/api/{begun.operation.pk}/")
    assert response.status_code == 200
    assert response.json()["status"] == "succeeded"
    assert (response["Cache-Control"], response.get("Retry-After")) == ("no-store", None)


# What it says


def put(client: Client, status: str) -> Operation:
    """An operation that is really in this state, by the words of the message table."""
    begun = begin(client, stepwise=True, lease=600)
    operation: Operation = begun.operation
    if status == "interrupted":
        begun.fail(ValueError())
    elif status == "reconciling":
        begun.fail(OutcomeUnknown(operation_id=operation.pk))
    elif status == "requires_action":
        operation.requires_action()
        begun.complete(outcome(code=202))
    elif status == "failed":
        begun.complete(outcome(Status.FAILED, code=402))
    elif status == "reversed":
        begun.complete(outcome())
        operation.reverse(reason="refund")
    elif status == "succeeded":
        begun.complete(outcome())
    return operation


@pytest.mark.parametrize(
    ("status", "safe_to_retry", "key_action", "waits"),
    [
        ("processing", False, "wait", True),
        ("interrupted", True, "same_key", False),
        ("succeeded", False, None, False),
        ("failed", True, "new_key", False),
        ("requires_action", False, None, False),
        ("reconciling", False, "wait", True),
        ("reversed", False, None, False),
    ],
)
def test_each_state_says_whether_a_retry_is_safe(
    owner: Client, status: str, safe_to_retry: bool, key_action: str | None, waits: bool
) -> None:
    found = state(owner, put(owner, status).pk)
    assert found["status"] == ("processing" if status == "interrupted" else status)
    assert found["message_key"] == f"operation.{status}"
    assert (found["title"], found["message"]) == tuple(map(str, MESSAGES[status]))
    assert (found["safe_to_retry"], found["key_action"]) == (safe_to_retry, key_action)
    assert (found["Retry-After"] is not None) == waits
    assert (found["finished_at"] is not None) == (status in Status.values and not waits)


def test_there_is_a_message_for_every_status() -> None:
    assert set(MESSAGES) == {*Status.values, "interrupted"}


def test_an_undone_failure_may_be_tried_again_with_a_new_key(owner: Client) -> None:
    begun = begin(owner, stepwise=True)
    begun.complete(outcome(Status.REVERSED, code=402))
    found = state(owner, begun.operation.pk)
    assert (found["safe_to_retry"], found["key_action"]) == (True, "new_key")


def test_a_lapsed_lease_is_an_interruption(owner: Client) -> None:
    operation = put(owner, "processing")
    past = timezone.now() - timedelta(hours=1)
    Operation.objects.filter(pk=operation.pk).update(lease_expires_at=past)
    assert state(owner, operation.pk)["message_key"] == "operation.interrupted"


def test_a_plain_operation_that_failed_is_an_interruption_and_a_running_one_is_not(
    owner: Client,
) -> None:
    begun = begin(owner)
    begun.abort(ValueError())
    assert state(owner, begun.operation.pk)["message_key"] == "operation.processing"
    begun.record(ValueError())
    assert state(owner, begun.operation.pk)["message_key"] == "operation.interrupted"


def test_an_unknown_outcome_says_when_it_is_asked_about_next(owner: Client) -> None:
    operation = put(owner, "reconciling")
    for seconds, expected in ((30, 30), (3600, 60)):
        later = timezone.now() + timedelta(seconds=seconds)
        Operation.objects.filter(pk=operation.pk).update(due_at=later)
        assert abs(int(state(owner, operation.pk)["Retry-After"]) - expected) <= 10


def test_the_result_is_shown_only_where_the_project_wants_it(owner: Client) -> None:
    operation = put(owner, "succeeded")
    assert state(owner, operation.pk)["result"] == {"order": 1}
    shy = state(owner, operation.pk, "shy")
    assert "result" not in shy
    assert (shy["response_code"], shy["resource"]) == (201, "/orders/1/")


def test_references_are_shown_but_not_the_providers(owner: Client) -> None:
    begun = begin(owner)
    begun.operation.refer("order", 42)
    begun.operation.refer("provider", "ch_1")
    begun.complete(outcome())
    assert state(owner, begun.operation.pk)["references"] == [{"name": "order", "value": "42"}]


@pytest.mark.parametrize("body", [b"\xff", b"plain text", None])
def test_a_body_that_is_no_json_is_no_result(owner: Client, body: bytes | None) -> None:
    begun = begin(owner)
    begun.complete(outcome(body=body))
    assert state(owner, begun.operation.pk)["result"] is None


def test_an_encrypted_body_is_decoded_with_the_codec_of_the_policy(owner: Client) -> None:
    class Backwards:
        def encode(self, body: bytes) -> bytes:
            return body[::-1]

        decode = encode

    codec = Backwards()
    begun = begin(owner, codec=codec)
    begun.complete(outcome())
    request = RequestFactory().get("/")
    request.user = User.objects.get(pk=user_id(owner))
    view = OperationStatusView.as_view(policy=Policy(codec=codec), show_result=True)
    members = json.loads(view(request, str(begun.operation.pk)).content)
    assert members["result"] == {"order": 1}
    assert state(owner, begun.operation.pk)["result"] is None


def test_the_scope_is_the_one_of_the_policy() -> None:
    begun = engine.begin(
        engine.Intent(
            name="report",
            scope=("tenant:7",),
            key=new_key(),
            fingerprint=intent("k").fingerprint,
            policy=Policy().resolved(),
        )
    )
    assert not isinstance(begun, engine.Replay)
    begun.complete(outcome())
    request = RequestFactory().get("/")
    request.user = AnonymousUser()
    for tenant, status in (("tenant:7", 200), ("tenant:8", 404)):
        view = OperationStatusView.as_view(policy=Policy(scope=lambda request, t=tenant: (t,)))
        assert view(request, str(begun.operation.pk)).status_code == status


# Refusals name it


def test_a_refusal_names_the_status_url(owner: Client) -> None:
    @idempotent(required=True, name="pay")
    def view(request: HttpRequest) -> HttpResponse:
        request.operation.unknown()
        return HttpResponse()

    response = post(view, new_key(), user=user_id(owner))
    members = json.loads(response.content)
    assert response.status_code == 409
    assert members["status_url"] == f"/operations/{members['operation_id']}/"
    assert owner.get(members["status_url"]).json()["status"] == "reconciling"


def test_without_a_route_there_is_no_status_url(owner: Client, settings: Any) -> None:
    settings.IDEMPOTENCY = {}
    key = new_key()
    view = idempotent(required=True, name="pay")(lambda request: HttpResponse())
    post(view, key, user=user_id(owner))
    response = post(view, key, body="another", user=user_id(owner))
    assert "status_url" not in json.loads(response.content)
    accepted_ = accepted(find(key).pk)
    assert (accepted_.status_code, accepted_.has_header("Location")) == (202, False)


# 202: the work goes on elsewhere

report_failures: list[Exception] = []


@idempotent_function(
    name="report",
    key=lambda user, number: number,
    scope=lambda user, number: (f"user:{user}",),
    stepwise=True,
    failures=(ValueError,),
)
def make_report(user: int, number: str) -> dict[str, str]:
    operation = engine.current()
    assert operation is not None
    if report_failures:
        raise report_failures.pop()
    return {"report": operation.step("write", lambda: number)}


@idempotent(required=True, name="request-report")
def request_report(request: HttpRequest) -> HttpResponse:
    number = request.operation.derive_key("report")
    response = accepted(submit(make_report, request.user.pk, number))
    if json.loads(request.body) == "fail":
        raise ConnectionError
    return response


def test_a_long_operation_answers_202_and_its_status_url_tells_the_rest(owner: Client) -> None:
    key = new_key()
    response = post(request_report, key, user=user_id(owner))
    assert (response.status_code, response["Retry-After"]) == (202, "1")
    url = response["Location"]
    waiting = owner.get(url)
    assert (waiting.json()["status"], waiting["Retry-After"]) == ("processing", "1")
    assert waiting.json()["safe_to_retry"] is False  # nobody needs to
    again = post(request_report, key, user=user_id(owner))
    assert (again.status_code, again.content) == (202, response.content)
    complete_abandoned()
    done = owner.get(url).json()
    assert (done["status"], set(done["result"])) == ("succeeded", {"report"})
    assert Operation.objects.count() == 2


def test_what_was_submitted_is_as_durable_as_the_answer(owner: Client) -> None:
    key = new_key()
    assert post(request_report, key, body="fail", user=user_id(owner)).status_code == 500
    assert list(Operation.objects.values_list("name", flat=True)) == ["request-report"]


def test_a_submitted_failure_is_told_as_one(owner: Client) -> None:
    report_failures.append(ValueError("no data"))
    pk = submit(make_report, user_id(owner), "r-1")
    assert complete_abandoned().settled == 1
    found = state(owner, pk)
    assert (found["status"], found["safe_to_retry"], found["result"]) == ("failed", True, "no data")
    with pytest.raises(StoredFailure):
        make_report(user_id(owner), "r-1")


def test_submitting_again_changes_nothing_and_a_finished_one_stays_finished(owner: Client) -> None:
    """BUGS T13."""
    user = user_id(owner)
    pk = submit(make_report, user, "r-1")
    assert submit(make_report, user, "r-1") == pk
    complete_abandoned()
    with transaction.atomic():
        assert submit(make_report, user, "r-1") == pk
    assert complete_abandoned().asked == 0
    assert find("r-1").status == Status.SUCCEEDED


def test_a_key_that_is_over_may_be_submitted_again(owner: Client) -> None:
    user = user_id(owner)
    submit(make_report, user, "r-1")
    complete_abandoned()
    before = find("r-1").attempt
    age("r-1")
    submit(make_report, user, "r-1")
    assert complete_abandoned().settled == 1
    assert find("r-1").attempt > before


@pytest.mark.vendor("postgresql", "mysql")
@pytest.mark.parametrize("life", ["first", "next"])
def test_a_submission_that_may_still_be_undone_does_not_swallow_another(
    owner: Client, life: str
) -> None:
    """Whoever is told that it was submitted can rely on it."""
    user = user_id(owner)
    if life == "next":
        submit(make_report, user, "r-1")
        complete_abandoned()
        age("r-1")
    inside, go_on = Signal(), Signal()

    def undone() -> str:
        with transaction.atomic():
            submit(make_report, user, "r-1")
            inside.set()
            go_on.wait()
            transaction.set_rollback(True)
        return "undone"

    with running(undone, inside, go_on) as child, pytest.raises(InProgress):
        submit(make_report, user, "r-1")
    assert child.result() == "undone"
    submit(make_report, user, "r-1")
    assert complete_abandoned().settled == 1


def test_submitting_something_else_under_the_same_key_is_a_mismatch() -> None:
    @idempotent_function(key=lambda number: "k", stepwise=True)
    def local(number: int) -> None:
        """Not at module level: it could not be found again."""

    with pytest.raises(ConfigurationError, match="module level"):
        submit(local, 1)
    with pytest.raises(ConfigurationError):
        submit(len, [])
    submit(make_number, 1)
    with pytest.raises(Mismatch):
        submit(make_number, 2)


@idempotent_function(key=lambda number: "k", stepwise=True)
def make_number(number: int) -> int:
    return number
