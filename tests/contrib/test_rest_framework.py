"""Django REST framework: the same promises behind its authentication, exceptions and renderers."""

import functools
import sqlite3
from base64 import b64encode
from io import BytesIO

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied as DjangoPermissionDenied
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import OperationalError, connections, transaction
from django.http import Http404, HttpResponse, StreamingHttpResponse
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import include, path
from django.utils.decorators import method_decorator
from rest_framework import exceptions, generics, permissions, serializers, viewsets
from rest_framework.decorators import action, api_view, permission_classes, renderer_classes
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.parsers import FormParser, JSONParser, MultiPartParser
from rest_framework.renderers import BrowsableAPIRenderer, JSONRenderer, TemplateHTMLRenderer
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.throttling import BaseThrottle
from rest_framework.versioning import AcceptHeaderVersioning
from rest_framework.views import APIView, exception_handler

from idempotency import fingerprints
from idempotency.contrib.rest_framework import IdempotencyMixin
from idempotency.decorators import idempotent
from idempotency.exceptions import ConfigurationError
from idempotency.models import Event, Operation
from idempotency.policies import Policy
from tests.app.models import Effect
from tests.callers import effects, events, is_replay, new_key, operation, problem
from tests.clients import login, send

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.urls(__name__),
]


def leave_effect(request, amount=0):
    key = request.headers.get("Idempotency-Key", "no key")
    return Effect.objects.create(label=key, amount=amount)


def created(request):
    return Response({"effect": leave_effect(request).pk}, status=201)


class EffectSerializer(serializers.ModelSerializer):
    class Meta:
        model = Effect
        fields = ("id", "label", "amount")


class Gate(permissions.BasePermission):
    """Open unless a test closes it; reads the body as some permissions do."""

    open = True

    def has_permission(self, request, view):
        request.data  # noqa: B018
        return Gate.open

    def has_object_permission(self, request, view, obj):
        return not obj.label.startswith("hidden")


class Throttle(BaseThrottle):
    allow = True

    def allow_request(self, request, view):
        return Throttle.allow

    def wait(self):
        return 7


@pytest.fixture(autouse=True)
def _open():
    yield
    Gate.open = Throttle.allow = True
    handled.clear()


@pytest.fixture
def atomic_requests(monkeypatch):
    for alias in ("default", "other"):
        monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)


@pytest.fixture(params=[False, True], ids=["autocommit", "ATOMIC_REQUESTS"])
def both_ways(request):
    if request.param:
        request.getfixturevalue("atomic_requests")


# Views


class Plain(IdempotencyMixin, APIView):
    permission_classes = [permissions.IsAuthenticated, Gate]
    throttle_classes = [Throttle]

    def post(self, request):
        return created(request)


class Guarded(Plain):
    permission_classes = [permissions.IsAuthenticated]


class Create(IdempotencyMixin, generics.CreateAPIView):
    idempotency_policy = Policy(required=True)
    queryset = Effect.objects.all()
    serializer_class = EffectSerializer

    def get_success_headers(self, data):
        return {"Location": f"/effects/{data['id']}/", "ETag": f'"{data["id"]}"'}


class EffectViewSet(IdempotencyMixin, viewsets.ModelViewSet):
    idempotency_policy = Policy(methods={"POST", "PATCH", "DELETE"})
    queryset = Effect.objects.exclude(label__startswith="gone").order_by("pk")
    serializer_class = EffectSerializer
    permission_classes = [permissions.IsAuthenticated, Gate]

    @action(detail=True, methods=["post"])
    def pay(self, request, pk):
        effect = self.get_object()
        if request.data.get("later"):  # a branch that depends on the payload
            return Response({"scheduled": leave_effect(request).pk}, status=202)
        return Response({"effect": leave_effect(request).pk, "of": effect.pk}, status=201)

    @action(detail=False, methods=["post"], idempotency_policy=Policy(required=True))
    def bulk(self, request):
        return created(request)


class ByAction(IdempotencyMixin, viewsets.ViewSet):
    idempotency_policy = {
        "create": Policy(required=True),
        "put": Policy(),
        "list": Policy(required=True),
        "remove": Policy(methods={"POST"}),
    }

    def create(self, request):
        return created(request)

    def remove(self, request):
        return created(request)

    def list(self, request):
        return Response([])

    def other(self, request):
        return created(request)

    def put(self, request):
        return created(request)


class DecoratedMethods(viewsets.ViewSet):
    permission_classes = [permissions.IsAuthenticated]

    @idempotent()
    def create(self, request):
        return created(request)

    @idempotent()
    @action(detail=False, methods=["post"])
    def above(self, request):
        return created(request)

    @action(detail=False, methods=["post"])
    @idempotent()
    def below(self, request):
        return created(request)


@method_decorator(idempotent(), name="create")
class DecoratedFromOutside(generics.CreateAPIView):
    queryset = Effect.objects.all()
    serializer_class = EffectSerializer


@method_decorator(idempotent(), name="post")
class DecoratedPost(APIView):
    def post(self, request):
        return created(request)


@api_view(["POST", "GET"])
@permission_classes([permissions.IsAuthenticated])
@idempotent()
def function(request):
    return created(request)


@api_view(["POST"])
@idempotent()
@permission_classes([permissions.IsAuthenticated])
@renderer_classes([JSONRenderer])
def function_reversed(request):
    return created(request)


@transaction.non_atomic_requests
@api_view(["POST"])
@idempotent()
def function_non_atomic(request):
    return fail(request)


@api_view(["POST"])
@idempotent()
def function_fails(request):
    return fail(request)


FAILURES = {
    "validation": lambda: exceptions.ValidationError({"amount": ["too much"]}),
    "parse": lambda: exceptions.ParseError(),
    "not_found": lambda: exceptions.NotFound(),
    "django_404": lambda: Http404("no such order"),
    "conflict": lambda: Conflict(),
    "denied": lambda: exceptions.PermissionDenied("not yours"),
    "django_denied": lambda: DjangoPermissionDenied(),
    "anonymous": lambda: exceptions.NotAuthenticated(),
    "throttled": lambda: exceptions.Throttled(wait=3),
    "unavailable": lambda: Later(),
    "bug": lambda: ZeroDivisionError(),
}


class Conflict(exceptions.APIException):
    status_code = 409
    default_detail = "sold out"


class Later(exceptions.APIException):
    status_code = 503


def fail(request):
    """Leave an effect, then fail as the query string says."""
    leave_effect(request)
    raise FAILURES[request.query_params["as"]]()


class Unprotected(APIView):
    def post(self, request):
        return fail(request)

    get = post


class Failing(IdempotencyMixin, Unprotected):
    pass


handled = []


def counting_handler(exc, context):
    handled.append(exc)
    response = exception_handler(exc, context)
    if response is not None:
        response.data = {"error": response.data}
        response["X-Handled"] = str(len(handled))
    return response


class CustomHandler(Failing):
    def get_exception_handler(self):
        return counting_handler


class Finalizing(IdempotencyMixin, APIView):
    """Counts how often a response is finalized, with a header."""

    def post(self, request):
        return created(request)

    def finalize_response(self, request, response, *args, **kwargs):
        response = super().finalize_response(request, response, *args, **kwargs)
        response["ETag"] = response.get("ETag", "") + "x"
        return response


class Kinds(IdempotencyMixin, APIView):
    renderer_classes = [JSONRenderer, BrowsableAPIRenderer]

    def post(self, request):
        pk = leave_effect(request).pk
        return {
            "empty": lambda: Response(status=204),
            "plain": lambda: HttpResponse(f"effect {pk}", content_type="text/plain"),
            "pdf": lambda: HttpResponse(b"%PDF\xff\x00", content_type="application/pdf"),
            "stream": lambda: StreamingHttpResponse(iter([b"a"])),
            "unrenderable": lambda: Response({"object": object()}),
            "nothing": lambda: None,
            "bad": lambda: Response({"effect": pk}, status=400),
            "busy": lambda: Response({"effect": pk}, status=503),
            "too_many": lambda: Response({"effect": pk}, status=429),
        }[request.query_params["kind"]]()


class Page(IdempotencyMixin, APIView):
    renderer_classes = [TemplateHTMLRenderer]

    def post(self, request):
        leave_effect(request)
        return Response({"title": "ordered"}, template_name="ordered.html")


class Deadlocked(IdempotencyMixin, APIView):
    """Loses its transaction to a deadlock on the first try."""

    tries = 0

    def post(self, request):
        effect = leave_effect(request)
        Deadlocked.tries += 1
        if Deadlocked.tries == 1:
            raise passing_fault()
        return Response({"effect": effect.pk}, status=201)


def passing_fault():
    """What Django raises for a lost lock on this kind of database."""
    vendor = connections["default"].vendor
    if vendor == "mysql":
        return OperationalError(1213, "Deadlock found")
    if vendor == "postgresql":
        psycopg = pytest.importorskip("psycopg")
        error = OperationalError("deadlock detected")
        error.__cause__ = psycopg.errors.DeadlockDetected()
        return error
    error = OperationalError("database is locked")
    error.__cause__ = sqlite3.OperationalError("database is locked")
    return error


class ExtraCheck(Plain):
    """A project's own check in initial(), after the framework's."""

    def initial(self, request, *args, **kwargs):
        super().initial(request, *args, **kwargs)
        if "blocked" in request.query_params:
            raise exceptions.PermissionDenied


class Hooks(IdempotencyMixin, APIView):
    def get_idempotency_policy(self, request):
        return Policy(required=True) if "strict" in request.query_params else Policy()

    def get_idempotency_key(self, request, policy):
        return request.query_params.get("key")

    def get_idempotency_scope(self, request, policy):
        return ("hooks", str(request.user))

    def get_idempotency_fingerprint(self, request, policy):
        return fingerprints.of("always the same")

    def authorize_replay(self, request, operation):
        return "no" not in request.query_params

    def post(self, request):
        return created(request)


class Uploads(IdempotencyMixin, APIView):
    parser_classes = [MultiPartParser, FormParser, JSONParser]
    permission_classes = [Gate]

    def post(self, request):
        leave_effect(request)
        return Response({"size": request.data["file"].size}, status=201)


class Locked(IdempotencyMixin, generics.UpdateAPIView):
    """A queryset that locks; the handler's transaction is what it needs."""

    queryset = Effect.objects.select_for_update()
    serializer_class = EffectSerializer


class TwoDatabases(IdempotencyMixin, APIView):
    idempotency_policy = Policy(using="other")

    def post(self, request):
        Effect.objects.using("other").create(label=request.headers["Idempotency-Key"])
        raise FAILURES["validation"]()

    def get(self, request):
        states = [connections[alias].in_atomic_block for alias in ("default", "other")]
        return Response(states)


def swallow(view):
    """A decorator of the project's that answers exceptions by itself."""

    @functools.wraps(view)
    def wrapper(*args, **kwargs):
        try:
            return view(*args, **kwargs)
        except exceptions.ValidationError:
            return Response({"swallowed": True}, status=400)

    return wrapper


@api_view(["POST"])
@swallow
@idempotent()
def swallowing(request):
    return fail(request)


class Nothing(DefaultContentNegotiation):
    def select_renderer(self, request, renderers, format_suffix=None):
        raise exceptions.NotAcceptable


class NotAcceptable(Plain):
    content_negotiation_class = Nothing


router = SimpleRouter()
router.register("effects", EffectViewSet)
router.register("decorated", DecoratedMethods, basename="decorated")
urlpatterns = [
    path("", include(router.urls)),
    path("plain/", Plain.as_view()),
    path("guarded/", Guarded.as_view()),
    path("create/", Create.as_view()),
    path(
        "by-action/",
        ByAction.as_view({"post": "create", "get": "list", "put": "put", "delete": "remove"}),
    ),
    path("by-action/other/", ByAction.as_view({"post": "other"})),
    path("initkwargs/", Plain.as_view(idempotency_policy=Policy(required=True))),
    path("from-outside/", DecoratedFromOutside.as_view()),
    path("decorated-post/", DecoratedPost.as_view()),
    path("function/", function),
    path("function-reversed/", function_reversed),
    path("function-fails/", function_fails),
    path("function-non-atomic/", function_non_atomic),
    path("failing/", Failing.as_view()),
    path("unprotected/", Unprotected.as_view()),
    path("custom-handler/", CustomHandler.as_view()),
    path("finalizing/", Finalizing.as_view()),
    path("kinds/", Kinds.as_view()),
    path("page/", Page.as_view()),
    path("deadlocked/", Deadlocked.as_view()),
    path("extra-check/", ExtraCheck.as_view()),
    path("hooks/", Hooks.as_view()),
    path("uploads/", Uploads.as_view()),
    path("locked/<int:pk>/", Locked.as_view()),
    path("two/", TwoDatabases.as_view()),
    path("swallowing/", swallowing),
    path("not-acceptable/", NotAcceptable.as_view()),
]


def twice(url, **options):
    client, key = login(), new_key()
    first, second = (send(client, url, key, **options) for _ in range(2))
    return first, second, effects(key)


# Every kind of view

BODY = {"label": "order", "amount": 1}


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    "url",
    [
        "/plain/",
        "/create/",
        "/effects/",
        "/effects/bulk/",
        "/by-action/",
        "/initkwargs/",
        "/decorated/",
        "/decorated/above/",
        "/decorated/below/",
        "/from-outside/",
        "/decorated-post/",
        "/function/",
        "/function-reversed/",
    ],
)
def test_every_kind_of_view_runs_once_and_replays(url):
    """J01, J02, G01, G02, issue 2 §3: mixin, decorated methods, @action and @api_view."""
    client, key = login(), new_key()

    first, second = (send(client, url, key, BODY) for _ in range(2))

    assert (first.status_code, is_replay(first)) == (201, False)
    assert (second.status_code, second.content) == (201, first.content)
    assert is_replay(second)
    for header in ("Content-Type", "Location", "ETag", "Allow", "Vary", "Content-Length"):
        assert second.get(header) == first.get(header)
    assert Effect.objects.count() == 1
    assert operation(key).attempt == 1


@pytest.mark.usefixtures("both_ways")
def test_detail_actions_and_their_branches_are_covered():
    """F12, D07: @action, the branch that depends on the payload, and the object in the path."""
    client = login()
    one, two = Effect.objects.create(label="one"), Effect.objects.create(label="two")

    for body, code in (({}, 201), ({"later": True}, 202)):
        key = new_key()
        answers = [send(client, f"/effects/{one.pk}/pay/", key, body) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [code, code]
        assert effects(key) == 1
        assert problem(send(client, f"/effects/{two.pk}/pay/", key, body)) == "mismatch"


def test_a_patch_replays_the_original_even_if_the_resource_changed_since():
    """Hard case 26: what the caller's PATCH did, not what others did later."""
    client, key = login(), new_key()
    effect = Effect.objects.create(label="order", amount=1)
    url = f"/effects/{effect.pk}/"

    first = send(client, url, key, {"amount": 2}, method="patch")
    Effect.objects.update(amount=9)
    again = send(client, url, key, {"amount": 2}, method="patch")

    assert again.json() == first.json() == {"id": effect.pk, "label": "order", "amount": 2}
    assert Effect.objects.get().amount == 9


def test_a_delete_that_is_retried_answers_204_again():
    """R8, G06: the object is gone, and that does not turn the replay into a 404."""
    client, key = login(), new_key()
    url = f"/effects/{Effect.objects.create(label='order').pk}/"

    first, second = (send(client, url, key, method="delete") for _ in range(2))

    assert (first.status_code, second.status_code) == (204, 204)
    assert second.content == b""
    assert is_replay(second)
    assert send(client, url, new_key(), method="delete").status_code == 404


def test_policies_by_action_and_by_method():
    """D17: what is not named is not protected; what is named is, each with its own policy."""
    client = login()

    assert problem(send(client, "/by-action/")) == "missing-key"
    assert send(client, "/by-action/", new_key(), method="get").status_code == 200
    first, second, count = twice("/by-action/other/")
    assert (first.status_code, is_replay(second), count) == (201, False, 2)
    first, second, count = twice("/by-action/", method="put")  # named, so protected for its method
    assert (second.status_code, is_replay(second), count) == (201, True, 1)
    first, second, count = twice("/by-action/", method="delete")  # but not where it names others
    assert (second.status_code, is_replay(second), count) == (201, False, 2)
    assert problem(send(client, "/effects/bulk/")) == "missing-key"
    assert problem(send(client, "/initkwargs/")) == "missing-key"
    assert send(client, "/plain/").status_code == 201


def test_the_view_shows_its_policy():
    """Checks, audits and API descriptions read it from the route."""
    assert Create.as_view().idempotency_policy == Policy(required=True)
    assert Plain.as_view(idempotency_policy=Policy(wait=1)).idempotency_policy == Policy(wait=1)
    assert TwoDatabases.as_view()._non_atomic_requests == {"other"}


def test_a_mixin_that_could_do_nothing_is_refused_at_import():
    """J01: behind APIView none of its methods would ever be called."""
    with pytest.raises(ConfigurationError, match="before"):

        class Wrong(APIView, IdempotencyMixin):
            pass


def test_a_policy_for_an_action_that_does_not_exist_is_refused_at_import():
    """J11: a misspelt name would leave the real action unprotected without a word."""

    class Misspelt(IdempotencyMixin, viewsets.ViewSet):
        idempotency_policy = {"crate": Policy()}

    with pytest.raises(ConfigurationError, match="crate"):
        Misspelt.as_view({"get": "list"})


def test_every_hook_can_be_overridden():
    client = login()
    assert problem(send(client, "/hooks/?strict")) == "missing-key"
    first = send(client, "/hooks/?key=k1")
    assert is_replay(send(client, "/hooks/?key=k1", data={"other": "body"}))
    stored = operation("k1")
    assert (stored.scope, stored.status) == ("hooks|alice", "succeeded")

    refused = send(client, "/hooks/?key=k1&no")
    assert refused.status_code == 403
    assert str(first.json()["effect"]) not in refused.content.decode()


@pytest.mark.parametrize("method", ["get", "head", "options"])
def test_safe_methods_ignore_the_key(method):
    """J07: on the same viewset that requires keys for others; preflights are never a 500 (peers)."""
    client, key = login(), new_key()

    for url in ("/effects/", "/effects/bulk/", "/by-action/"):
        assert send(client, url, key, method=method).status_code < 406

    with CaptureQueriesContext(connections["default"]) as captured:
        send(client, "/effects/", key, method=method)
    assert not [q for q in captured if "idempotency" in q["sql"]]
    assert not Operation.objects.exists()


def test_methods_a_viewset_does_not_route_are_405():
    """Peers: KeyError, 500, for OPTIONS and DELETE on a router URL."""
    client, key = login(), new_key()

    assert send(client, "/effects/", key, method="delete").status_code == 405
    assert send(client, "/function-reversed/", key, method="put").status_code == 405
    assert not Operation.objects.exists()


# Before the claim


def closed_gate(client):
    Gate.open = False


def full(client):
    Throttle.allow = False


def signed_out(client):
    client.logout()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("close", "code"), [(closed_gate, 403), (full, 429), (signed_out, 403)], ids=lambda v: str(v)
)  # fmt: skip
def test_a_caller_who_may_not_call_never_makes_a_row(close, code):
    """F07, R40, R75, peers: 401, 403 and 429 use up no key; afterwards the same key runs."""
    client, key = login(), new_key()
    close(client)

    refused = send(client, "/plain/", key)
    assert refused.status_code == code
    assert not Operation.objects.exists()

    Gate.open = Throttle.allow = True
    assert send(login(), "/plain/", key).status_code == 201
    assert effects(key) == 1


class Upload(BytesIO):
    """A body that says whether the server has taken it."""

    taken = False

    def read(self, *args):
        self.taken = True
        return super().read(*args)

    def seekable(self):
        return False


@pytest.mark.parametrize("close", [signed_out, full])
def test_a_caller_who_is_turned_away_does_not_make_the_server_keep_the_body(close):
    """R40: who may call is decided before a byte is read or spooled."""
    client, key = login(), new_key()
    close(client)

    def upload():
        body = Upload(b'{"amount": 1}')
        options = {"wsgi.input": body, "CONTENT_LENGTH": 13}
        return send(client, "/guarded/", key, **options), body.taken

    response, taken = upload()
    assert response.status_code in (403, 429)
    assert not taken

    Throttle.allow, client = True, login()
    assert upload()[0].status_code == 201
    replay, taken = upload()
    assert is_replay(replay)
    assert taken  # it is compared


def test_401_is_not_stored_either():
    """A client that signs in after a 401 gets through with the same key and body (peers: 24 h 401)."""
    key = new_key()
    User.objects.create_user("bob", password="right")

    def call(password):
        credentials = b64encode(f"bob:{password}".encode()).decode()
        headers = {"Authorization": f"Basic {credentials}"}
        return send(Client(), "/create/", key, BODY, headers=headers)

    assert call("wrong").status_code in (401, 403)
    assert not Operation.objects.exists()
    assert call("right").status_code == 201
    assert is_replay(call("right"))


@pytest.mark.parametrize(
    ("url", "options", "code"),
    [
        ("/extra-check/?blocked", {}, 403),
        ("/not-acceptable/", {}, 406),
        ("/create/", {"data": "{broken", "content_type": "application/json"}, 400),
        ("/create/", {"data": "x", "content_type": "application/x-unknown"}, 415),
    ],
)
def test_what_fails_before_the_handler_or_its_parser(url, options, code):
    """R40, R75: the project's own checks and negotiation make no row; parser errors are not a 500."""
    response = send(login(), url, new_key(), **options)

    assert response.status_code == code
    assert not Operation.objects.filter(status="succeeded").exists()
    assert not Effect.objects.exists()


def test_throttled_replays_say_nothing_about_the_first_request():
    """R42: a 429 on a replay leaves the outcome where it is; the same key gets it later."""
    client, key = login(), new_key()
    first = send(client, "/plain/", key)
    Throttle.allow = False

    refused = send(client, "/plain/", key)
    assert (refused.status_code, refused["Retry-After"]) == (429, "7")
    Throttle.allow = True
    assert send(client, "/plain/", key).content == first.content


def test_a_keyless_or_malformed_request_is_refused_after_authentication():
    """J08: problem+json in REST framework views too, whatever renderer is asked for."""
    for key, code in ((None, "missing-key"), ("a,b", "invalid-key")):
        response = send(login(), "/create/", key, BODY, headers={"Accept": "text/html"})
        assert (response.status_code, problem(response)) == (400, code)
    assert send(Client(), "/initkwargs/").status_code == 403


# Exceptions

FINAL = ["validation", "parse", "not_found", "django_404", "conflict"]
PASSING = ["denied", "django_denied", "anonymous", "throttled", "unavailable", "bug"]
COMPARED = ("Content-Type", "Allow", "Vary", "Retry-After", "WWW-Authenticate", "Content-Length")


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("failure", [*FINAL, *PASSING])
def test_exceptions_are_answered_exactly_as_without_protection(failure):
    """J04, H03, hard case 10: 400 stays 400, also under ATOMIC_REQUESTS (a peer makes it a 500)."""
    client = login()

    plain = send(client, f"/unprotected/?as={failure}")
    ours = send(client, f"/failing/?as={failure}", new_key())

    assert (ours.status_code, ours.content) == (plain.status_code, plain.content)
    assert {h: ours.get(h) for h in COMPARED} == {h: plain.get(h) for h in COMPARED}


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("failure", FINAL)
def test_a_deterministic_exception_rolls_back_and_is_stored(failure):
    """H03, hard case 10, R60: no partial write, and the retry is a replay of the same refusal."""
    first, second, count = twice(f"/failing/?as={failure}")

    assert 400 <= first.status_code < 500
    assert (second.status_code, second.content) == (first.status_code, first.content)
    assert is_replay(second)
    assert count == 0
    assert Operation.objects.get().status == "failed"


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("failure", PASSING)
def test_a_passing_exception_rolls_back_and_is_not_stored(failure):
    """F01, F02, F07, F08, R75, R76: the key stays free, the error is remembered, the retry runs."""
    first, second, count = twice(f"/failing/?as={failure}")

    assert second.status_code == first.status_code
    assert not is_replay(second)
    assert count == 0
    stored = Operation.objects.get()
    assert (stored.status, stored.attempt) == ("processing", 2)
    assert stored.last_error


@pytest.mark.parametrize("failure", ["validation", "throttled", "bug"])
def test_the_exception_handler_is_called_once(failure):
    """J04: the project's handler makes the response, once per execution and never on a replay."""
    client, key = login(), new_key()

    first = send(client, f"/custom-handler/?as={failure}", key)

    assert len(handled) == 1
    if failure == "bug":
        assert first.status_code == 500
        return
    assert first["X-Handled"] == "1"
    assert "error" in first.json()
    if failure == "validation":
        replayed = send(client, f"/custom-handler/?as={failure}", key)
        assert replayed.content == first.content
        assert len(handled) == 1


@override_settings(REST_FRAMEWORK={"EXCEPTION_HANDLER": f"{__name__}.counting_handler"})
def test_refusals_do_not_pass_the_projects_exception_handler():
    """J04: it could turn a 409 into something else."""
    client, key = login(), new_key()
    send(client, "/create/", key, BODY)

    assert problem(send(client, "/create/", key, {**BODY, "amount": 2})) == "mismatch"
    assert handled == []


def test_a_validation_error_of_the_serializer_is_stored_and_replayed():
    """R77: and the corrected body needs a new key, unless the policy stores successes only."""
    client, key = login(), new_key()

    first, second = (send(client, "/create/", key, {"amount": "many"}) for _ in range(2))

    assert (first.status_code, second.status_code, is_replay(second)) == (400, 400, True)
    assert second.json() == first.json()
    assert problem(send(client, "/create/", key, BODY)) == "mismatch"


@pytest.mark.usefixtures("atomic_requests")
def test_unprotected_requests_of_a_protected_viewset_keep_their_transaction():
    """Issue 2 §3: under ATOMIC_REQUESTS, GET and keyless POST roll back as without the mixin."""
    client = login()

    for method in ("get", "post"):
        assert send(client, "/failing/?as=validation", method=method).status_code == 400
        assert send(client, "/failing/?as=bug", method=method).status_code == 500
    assert send(client, "/unprotected/?as=validation").status_code == 400
    assert effects("no key") == 0


def test_unprotected_requests_get_no_transaction_where_the_project_has_none():
    client = login()
    for url in ("/failing/?as=validation", "/unprotected/?as=validation"):
        assert send(client, url).status_code == 400
    assert effects("no key") == 2


@pytest.mark.usefixtures("atomic_requests")
def test_only_the_operations_database_opts_out_of_atomic_requests():
    """H04: the other database keeps Django's transaction, the operation's gets its own."""
    client, key = login(), new_key()

    assert send(client, "/two/", method="get").json() == [True, True]
    first, second = (send(client, "/two/", key) for _ in range(2))
    assert (first.status_code, second.status_code, is_replay(second)) == (400, 400, True)
    assert effects(key, "other") == 0
    assert operation(key, "other").status == "failed"


class TwoPolicies(IdempotencyMixin, viewsets.ViewSet):
    """Actions with operations on different databases."""

    idempotency_policy = {"create": Policy(), "elsewhere": Policy(using="other")}

    def create(self, request):
        return Response([connections[alias].in_atomic_block for alias in ("default", "other")])

    elsewhere = list = create


urlpatterns += [
    path("two-policies/", TwoPolicies.as_view({"post": "create", "get": "list"})),
    path("two-policies/elsewhere/", TwoPolicies.as_view({"post": "elsewhere"})),
]


@pytest.mark.parametrize("url", ["/two-policies/", "/two-policies/elsewhere/"])
def test_every_other_database_keeps_its_request_transaction(url, request):
    """H04: an action opts out for its own operation's database, the rest is as the project set it."""
    client = login()
    states = send(client, url, new_key()).json()
    assert states.count(True) == 1  # only the operation's

    request.getfixturevalue("atomic_requests")
    assert send(client, url, new_key()).json() == [True, True]
    assert send(client, "/two-policies/", method="get").json() == [True, True]


@pytest.mark.django_db(transaction=False, databases=["default", "other"])
@pytest.mark.usefixtures("both_ways")
def test_a_projects_testcases_go_on_after_an_exception():
    """Inside TestCase the framework must not mark the test's own transaction for rollback."""
    client, key = login(), new_key()
    for failure, code in (("validation", 400), ("throttled", 429), ("bug", 500)):
        url = f"/failing/?as={failure}"
        answers = [send(client, url, new_key()), send(client, url), send(client, url, method="get")]
        assert [answer.status_code for answer in answers] == [code] * 3
    Gate.open = False
    assert send(client, "/plain/", key).status_code == 403
    Gate.open = True

    first, second = (send(client, "/plain/", key) for _ in range(2))

    assert (first.status_code, is_replay(second)) == (201, True)
    assert effects(key) == 1


# Under ATOMIC_REQUESTS, below @api_view


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("failure", ["validation", "throttled", "bug"])
def test_a_function_view_in_the_requests_transaction_forgets_everything_on_an_exception(failure):
    """Documented: the claim goes with the rest, the answer is the framework's, a retry runs again."""
    plain = send(login(), f"/unprotected/?as={failure}")
    first, second, count = twice(f"/function-fails/?as={failure}")

    assert [first.status_code, second.status_code] == [plain.status_code] * 2
    assert first.content == plain.content
    assert count == 0
    assert not Operation.objects.exists()


@pytest.mark.usefixtures("atomic_requests")
def test_a_function_view_outside_the_requests_transaction_stores_its_failure():
    """The documented way to get it: non_atomic_requests above @api_view."""
    first, second, count = twice("/function-non-atomic/?as=validation")
    assert (first.status_code, is_replay(second), count) == (400, True, 0)


def test_an_exception_answered_by_a_decorator_in_between_leaves_the_key_free():
    """Whoever swallows the exception answers; nothing is stored, nothing stays open."""
    first, second, count = twice("/swallowing/?as=validation")
    assert (first.json(), second.json(), count) == ({"swallowed": True}, {"swallowed": True}, 0)
    assert not connections["default"].in_atomic_block


# Faults of the database


def test_a_passing_database_fault_in_the_handler_is_503_and_the_retry_runs():
    """Hard case 15: a deadlock is not replayed and not a 500; nothing is run twice behind the scenes."""
    Deadlocked.tries = 0
    client, key = login(), new_key()

    first = send(client, "/deadlocked/", key)
    assert (first.status_code, problem(first), first["Retry-After"]) == (503, "unavailable", "1")
    assert (effects(key), Deadlocked.tries) == (0, 1)
    assert send(client, "/deadlocked/", key).status_code == 201
    assert effects(key) == 1


def test_a_store_that_cannot_answer_is_503_before_the_handler(monkeypatch):
    """K01, K03: also behind REST framework."""
    client, key = login(), new_key()

    def unreachable(*args, **kwargs):
        raise passing_fault()

    monkeypatch.setattr("idempotency.db.claim", unreachable)
    response = send(client, "/plain/", key)

    assert (response.status_code, problem(response)) == (503, "unavailable")
    assert response["Retry-After"] == "1"
    assert effects(key) == 0


class Stepwise(IdempotencyMixin, APIView):
    """Takes a step, then refuses."""

    idempotency_policy = Policy(stepwise=True)

    def post(self, request):
        request.operation.step("reserve", reserve, request, compensate=release)
        raise FAILURES[request.query_params["as"]]()


def reserve(request):
    return leave_effect(request).pk


def release(pk, *, key):
    Effect.objects.filter(pk=pk).delete()


urlpatterns.append(path("stepwise/", Stepwise.as_view()))


def no_answer():
    raise TimeoutError


class SwallowsDoubt(IdempotencyMixin, APIView):
    idempotency_policy = Policy(stepwise=True)

    def post(self, request):
        try:
            request.operation.call("charge", no_answer)
        except Exception as error:
            raise exceptions.ValidationError("no answer") from error


urlpatterns.append(path("swallows-doubt/", SwallowsDoubt.as_view()))


def test_a_view_that_turns_an_unknown_outcome_into_a_refusal_says_unknown_all_the_same():
    client, key = login(), new_key()
    for _ in range(2):
        response = send(client, "/swallows-doubt/", key)
        assert (response.status_code, problem(response)) == (409, "outcome-unknown")
    assert operation(key).status == "reconciling"


def test_a_stepwise_view_that_refuses_undoes_its_steps_and_stores_the_refusal():
    """F14: the exception becomes the framework's 400, the step is compensated, the retry replays."""
    first, second, count = twice("/stepwise/?as=validation")

    assert (first.status_code, second.status_code, is_replay(second)) == (400, 400, True)
    assert count == 0
    assert Operation.objects.get().status == "reversed"


# Responses


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("kind", ["empty", "plain", "pdf", "bad"])
def test_other_responses_replay_too(kind):
    """G05, G06, G15, peers: HttpResponse and empty bodies from REST framework views."""
    first, second, count = twice(f"/kinds/?kind={kind}")

    assert (second.status_code, second.content) == (first.status_code, first.content)
    assert second.get("Content-Type") == first.get("Content-Type")
    assert (is_replay(second), count) == (True, 1)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(("kind", "code"), [("busy", 503), ("too_many", 429)])
def test_a_returned_answer_that_is_not_final_rolls_back(kind, code):
    """F02, F07: as for exceptions, nothing is left and nothing is stored."""
    first, second, count = twice(f"/kinds/?kind={kind}")
    assert (first.status_code, second.status_code, is_replay(second), count) == (
        code,
        code,
        False,
        0,
    )


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("kind", ["unrenderable", "nothing"])
def test_a_response_that_cannot_be_rendered_rolls_back(kind):
    """F05, G15, hard case 13: REST framework renders late; here it happens inside the transaction."""
    first, second, count = twice(f"/kinds/?kind={kind}")
    assert (first.status_code, second.status_code, count) == (500, 500, 0)


def wrapping(view):
    """A decorator of the project's that answers with a response of its own."""

    @functools.wraps(view)
    def wrapper(*args, **kwargs):
        return Response({"status": view(*args, **kwargs).status_code})

    return wrapper


urlpatterns.append(path("wrapped/", api_view(["POST"])(wrapping(idempotent()(created)))))


def test_a_decorator_above_may_answer_with_another_response():
    """J02: it is finalized like any response; the protected one is stored as it was."""
    first, second, count = twice("/wrapped/")
    assert (first.json(), second.json(), count) == ({"status": 201}, {"status": 201}, 1)


def test_a_stream_is_delivered_once():
    """G04, hard case 25."""
    first, second, count = twice("/kinds/?kind=stream")
    assert b"".join(first.streaming_content) == b"a"
    assert (problem(second), count) == ("response-not-retained", 1)


def test_the_browsable_api_is_stored_as_the_page_it_was():
    """G10, G11: forms and serializers in the context are never stored, only bytes."""
    client, key = login(), new_key()
    client.user = User.objects.get()
    html = {"Accept": "text/html"}
    url = "/effects/"

    first, second = (send(client, url, key, BODY, headers=html) for _ in range(2))

    assert first["Content-Type"].startswith("text/html")
    assert b"<!DOCTYPE html>" in first.content
    assert (second.status_code, second.content) == (201, first.content)


@override_settings(
    TEMPLATES=[
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "OPTIONS": {
                "loaders": [
                    ("django.template.loaders.locmem.Loader", {"ordered.html": "<h1>{{ title }}"})
                ]
            },
        }
    ]
)
def test_a_template_renderer_replays():
    """G11, G15."""
    first, second, count = twice("/page/")
    assert first.content == b"<h1>ordered"
    assert (second.content, is_replay(second), count) == (first.content, True, 1)


def test_a_replay_keeps_its_media_type():
    """R87: stored bytes come with their own type, whatever the retry accepts."""
    client, key = login(), new_key()
    first = send(client, "/effects/", key, BODY)
    again = send(client, "/effects/", key, BODY, headers={"Accept": "text/html"})
    assert (again["Content-Type"], again.content) == ("application/json", first.content)


class Versioning(AcceptHeaderVersioning):
    default_version = "1"


class Versioned(IdempotencyMixin, APIView):
    versioning_class = Versioning

    def post(self, request):
        pk = leave_effect(request).pk
        return Response({"id": pk} if request.version == "1" else {"order_id": pk}, status=201)


urlpatterns.append(path("versioned/", Versioned.as_view()))


def test_a_deploy_that_changes_the_representation_does_not_change_replays(monkeypatch):
    """Hard case 29, R87: stored bytes win over a new default version; another asked-for one is 422."""
    client, key = login(), new_key()
    first = send(client, "/versioned/", key)

    monkeypatch.setattr(Versioning, "default_version", "2")
    assert "order_id" in send(client, "/versioned/", new_key()).json()
    assert send(client, "/versioned/", key).content == first.content

    newer = {"Accept": "application/json; version=3"}
    assert problem(send(client, "/versioned/", key, headers=newer)) == "mismatch"


def test_a_response_is_finalized_once():
    """What a project adds in finalize_response is there once, and stored with the outcome."""
    first, second, count = twice("/finalizing/")
    assert (first["ETag"], count) == ("x", 1)
    assert is_replay(second)
    assert second["ETag"] == "xx"  # the stored header, finalized again like every response


@pytest.mark.parametrize("order", ["same", "other"])
def test_uploads_that_a_permission_has_read_are_compared(order):
    """J12, peers: another file under one key is never answered with the first one's response."""
    client, key = login(), new_key()

    def upload(content):
        file = SimpleUploadedFile("scan.bin", content)
        headers = {"Idempotency-Key": key}
        return client.post("/uploads/", {"file": file, "a": "1"}, headers=headers)

    big = b"\x00\xff" * 1_600_000  # more than DATA_UPLOAD_MAX_MEMORY_SIZE
    first = upload(big)
    assert first.json() == {"size": len(big)}
    again = upload(big if order == "same" else big[:-1] + b"\x01")
    assert is_replay(again) if order == "same" else problem(again) == "mismatch"
    assert effects(key) == 1


def test_json_that_a_permission_has_read_is_compared_digit_by_digit():
    """Hard case 22: behind `request.data` both amounts are the same float."""
    client, key = login(), new_key()
    send(client, "/plain/", key, '{"amount": 1.1000000000000000001}')

    assert problem(send(client, "/plain/", key, '{"amount": 1.1}')) == "mismatch"
    assert is_replay(send(client, "/plain/", key, '{ "amount":1.1000000000000000001 }'))


# Who may see a replay


def detail(label="order"):
    return Effect.objects.create(label=label, amount=1)


def test_a_replay_asks_the_object_permissions_again():
    """D10, hard case 27, R41: shared away since: 403, and the stored body stays closed."""
    client, key, effect = login(), new_key(), detail()
    url = f"/effects/{effect.pk}/pay/"
    assert send(client, url, key).status_code == 201
    assert is_replay(send(client, url, key))

    Effect.objects.filter(pk=effect.pk).update(label="hidden")
    refused = send(client, url, key)

    assert refused.status_code == 403
    assert b"effect" not in refused.content
    assert effects(key) == 1
    assert operation(key).status == "succeeded"


def test_a_replay_of_an_object_that_left_the_callers_queryset_is_404():
    """Hard case 27: what the caller could not fetch any more is not shown through a key."""
    client, key, effect = login(), new_key(), detail()
    url = f"/effects/{effect.pk}/pay/"
    send(client, url, key)
    Effect.objects.filter(pk=effect.pk).update(label="gone")

    assert send(client, url, key).status_code == 404
    assert operation(key).status == "succeeded"


def test_a_replay_goes_on_when_the_object_was_deleted():
    """Hard case 26, R84: the outcome stands although its subject is gone."""
    client, key, effect = login(), new_key(), detail()
    url = f"/effects/{effect.pk}/pay/"
    first = send(client, url, key)
    effect.delete()

    again = send(client, url, key)
    assert (again.status_code, again.content, is_replay(again)) == (201, first.content, True)


class CustomObject(IdempotencyMixin, generics.UpdateAPIView):
    """Finds its object by another argument of the path than `lookup_field`."""

    queryset = Effect.objects.all()
    serializer_class = EffectSerializer
    permission_classes = [Gate]

    def get_object(self):
        effect = generics.get_object_or_404(self.get_queryset(), pk=self.kwargs["number"])
        self.check_object_permissions(self.request, effect)
        return effect


urlpatterns.append(path("custom/<int:number>/", CustomObject.as_view()))


def test_a_replay_asks_for_an_object_that_is_found_in_the_views_own_way():
    """Hard case 27: a get_object() of the project's is not overlooked; unsure means closed."""
    client, key, effect = login(), new_key(), detail()
    call = functools.partial(
        send, client, f"/custom/{effect.pk}/", key, {"amount": 5}, method="patch"
    )
    assert call().status_code == 200
    assert is_replay(call())

    Effect.objects.update(label="hidden")
    assert call().status_code == 403
    effect.delete()
    assert call().status_code == 404


def test_a_replay_on_a_view_whose_queryset_locks():
    """The object is fetched inside a transaction, so select_for_update() is no 500."""
    client, key, effect = login(), new_key(), detail()
    url = f"/locked/{effect.pk}/"
    first, second = (send(client, url, key, {"amount": 5}, method="patch") for _ in range(2))
    assert (first.status_code, second.content, is_replay(second)) == (200, first.content, True)


def test_an_object_that_cannot_exist_is_a_404_each_time():
    client, key = login(), new_key()
    answers = [send(client, "/effects/not-a-number/pay/", key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [404, 404]


def test_a_withdrawn_permission_closes_the_replay():
    """D10: has_permission runs before the operation is looked at (peers answer first)."""
    client, key = login(), new_key()
    send(client, "/plain/", key)
    Gate.open = False

    refused = send(client, "/plain/", key)

    assert refused.status_code == 403
    assert b"effect" not in refused.content
    assert events(key) == []


def test_another_user_or_none_gets_nothing():
    """D01, D10, peers (alice's 201 to bob and to anonymous)."""
    key = new_key()
    alice = send(login("alice"), "/plain/", key)
    bob = send(login("bob"), "/plain/", key)
    nobody = send(Client(), "/plain/", key)

    assert bob.json() != alice.json()
    assert (nobody.status_code, effects(key)) == (403, 2)


def test_csrf_is_checked_on_replays_too():
    """R130: SessionAuthentication enforces it before the claim."""
    client, key = login(enforce_csrf_checks=True), new_key()
    client.cookies["csrftoken"] = "t" * 32
    headers = {"X-CSRFToken": "t" * 32}
    assert send(client, "/plain/", key, headers=headers).status_code == 201
    assert is_replay(send(client, "/plain/", key, headers=headers))
    assert send(client, "/plain/", key).status_code == 403


# Statements


class Unguarded(generics.CreateAPIView):
    queryset = Effect.objects.all()
    serializer_class = EffectSerializer

    def post(self, request, *args, **kwargs):
        with transaction.atomic():
            return super().post(request, *args, **kwargs)


urlpatterns.append(path("unguarded/", Unguarded.as_view()))


def captured(client, url, key=None):
    with CaptureQueriesContext(connections["default"]) as queries:
        assert send(client, url, key, BODY).status_code == 201
    counted = [q["sql"] for q in queries]
    statements = [sql for sql in counted if not sql.startswith(("BEGIN", "COMMIT"))]
    return statements, sum(sql == "COMMIT" for sql in counted)


def test_a_protected_create_costs_three_statements_and_a_replay_two():
    """Issue 2 §8: claim, lock, completion beside the unprotected create inside atomic()."""
    client, key = login(), new_key()
    send(client, "/create/", new_key(), BODY)  # what is cached once is not counted
    plain, plain_commits = captured(client, "/unguarded/")

    first, first_commits = captured(client, "/create/", key)
    replay, replay_commits = captured(client, "/create/", key)

    extra = connections["default"].vendor == "mysql" and not getattr(
        connections["default"], "mysql_is_mariadb", False
    )
    assert len(first) <= len(plain) + 3 + extra
    assert first_commits == plain_commits == 1
    assert len(replay) <= len(plain) - 1 + 2
    assert replay_commits == 0
    assert Event.objects.count() == 1
