"""What is stored of a response and how it comes back: the same bytes, or a documented refusal."""

import gzip
import io
import json

import pytest
from corsheaders.defaults import default_headers
from cryptography.fernet import Fernet
from django.http import (
    FileResponse,
    HttpResponse,
    HttpResponseNotModified,
    HttpResponseRedirect,
    JsonResponse,
    StreamingHttpResponse,
)
from django.template import TemplateSyntaxError, engines
from django.template.response import TemplateResponse
from django.test import override_settings
from django.urls import URLPattern
from django.views.decorators.gzip import gzip_page

import idempotency.http
from idempotency.decorators import idempotent
from idempotency.http.responses import capture, is_kept, rendered, replay
from idempotency.models import Operation, Outcome, Status
from tests.app.models import Effect
from tests.callers import effects, is_replay, new_key, operation, problem
from tests.clients import login, routes, send

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

urlpatterns: list[URLPattern] = []

PDF = b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n\x00\xff\xfe" + bytes(range(256))
LONG = "a line that compresses well\n" * 500
COMMON = "django.middleware.common.CommonMiddleware"


def leave_effect(request):
    return Effect.objects.create(label=request.headers["Idempotency-Key"]).pk


def view_of(name, make, decorate=lambda view: view, **policy):
    """A protected view /name/ that leaves an effect and answers make(request, effect id)."""

    def view(request):
        return make(request, leave_effect(request))

    routes(urlpatterns)(idempotent(**policy)(decorate(view)), name)


def post(name, key, **options):
    return send(login(), f"/{name}/", key, **options)


def template(source):
    return engines["django"].from_string(source)


class WithClosure(HttpResponse):
    """A response that no serializer of objects could store."""

    def __init__(self, content):
        super().__init__(content)
        self.hook = lambda: content


def with_post_render_callback(request, pk):
    response = TemplateResponse(request, template("effect {{ pk }}"), {"pk": pk})
    response.add_post_render_callback(lambda rendered: HttpResponse(b"<" + rendered.content + b">"))
    return response


def created(request, pk):
    response = JsonResponse({"id": pk, "name": "é"}, status=201)
    response["Location"] = f"/orders/{pk}/"
    response["ETag"] = f'"{pk}-1"'
    response["Last-Modified"] = "Tue, 01 Dec 2026 10:00:00 GMT"
    response["Content-Language"] = "fr"
    response["Link"] = '</orders/>; rel="collection"'
    return response


KINDS = {
    "created": created,
    "no_content": lambda request, pk: HttpResponse(status=204),
    "empty_accepted": lambda request, pk: HttpResponse(status=202),
    "plain": lambda request, pk: HttpResponse(f"effect {pk}", content_type="text/plain"),
    "csv": lambda request, pk: HttpResponse(
        f"id;név\n{pk};é\n".encode("iso-8859-2"), content_type="text/csv; charset=iso-8859-2"
    ),
    "pdf": lambda request, pk: HttpResponse(
        PDF,
        content_type="application/pdf",
        headers={"Content-Disposition": 'attachment; filename="order.pdf"'},
    ),
    "no_content_type": lambda request, pk: HttpResponse(b"\x00", content_type=""),
    "redirect": lambda request, pk: HttpResponseRedirect(f"/orders/{pk}/"),
    "see_other": lambda request, pk: HttpResponse(status=303, headers={"Location": f"/o/{pk}/"}),
    "not_modified": lambda request, pk: HttpResponseNotModified(),
    "template": lambda request, pk: TemplateResponse(request, template("<p>{{ pk }}"), {"pk": pk}),
    "callback": with_post_render_callback,
    "closure": lambda request, pk: WithClosure(f"effect {pk}"),
    "iterator": lambda request, pk: HttpResponse(str(i) for i in range(pk, pk + 3)),
    "bad_request": lambda request, pk: JsonResponse({"error": pk}, status=400),
    "conflict": lambda request, pk: JsonResponse({"error": "sold out", "id": pk}, status=409),
    "payment_required": lambda request, pk: HttpResponse("insufficient funds", status=402),
    "teapot": lambda request, pk: HttpResponse("short and stout", status=418),
    "long": lambda request, pk: HttpResponse(LONG),
    "gone": lambda request, pk: HttpResponse(status=410),
}
for kind, make in KINDS.items():
    view_of(kind, make)

SAME = ("Content-Type", "Location", "ETag", "Last-Modified", "Content-Language", "Link")
SAME += ("Content-Disposition", "Content-Length")


@pytest.mark.parametrize("kind", KINDS)
def test_the_replay_equals_the_first_response_byte_for_byte(kind):
    """G01, G02, G05, G06, G08, G10, G13, G15, B05, B08, F04, F06, J03: status, bytes and headers."""
    key = new_key()

    first, second = post(kind, key), post(kind, key)

    assert (second.status_code, second.content) == (first.status_code, first.content)
    assert {h: second.get(h) for h in SAME} == {h: first.get(h) for h in SAME}
    assert (is_replay(first), is_replay(second)) == (False, True)
    assert second["Cache-Control"] == "no-store"
    assert effects(key) == 1
    stored = operation(key)
    assert stored.status == ("succeeded" if first.status_code < 400 else "failed")
    assert stored.code == first.status_code


def test_a_render_callback_may_replace_the_response():
    """What Django would send is what is stored: the callback's response."""
    key = new_key()
    first = post("callback", key)
    assert first.content == f"<effect {Effect.objects.get().pk}>".encode()
    assert post("callback", key).content == first.content


def test_the_length_of_a_replay_is_its_own():
    """G13: Content-Length is not stored; the stack states the length of what it sends."""
    key = new_key()
    post("pdf", key)
    replayed = post("pdf", key)

    assert replayed["Content-Length"] == str(len(PDF)) == str(len(replayed.content))
    assert "content-length" not in operation(key).headers.lower()


def test_a_redirect_can_be_followed_from_the_replay():
    """What Django's test client and others read from a redirect, `url`, is there."""
    key = new_key()

    assert post("redirect", key).url == post("redirect", key).url


# Compressed

view_of("gzip_inside", KINDS["long"], gzip_page)
view_of(
    "gzip_by_hand",
    lambda request, pk: HttpResponse(
        gzip.compress(LONG.encode()), headers={"Content-Encoding": "gzip"}
    ),
)
view_of(
    "brotli",
    lambda request, pk: HttpResponse(b"\x0b\x02\x80", headers={"Content-Encoding": "br"}),
)
view_of(
    "broken_gzip",
    lambda request, pk: HttpResponse(b"\x1f\x8bnot", headers={"Content-Encoding": "gzip"}),
)


@pytest.mark.parametrize("kind", ["gzip_inside", "gzip_by_hand"])
def test_a_compressed_response_replays_its_content_uncompressed(kind):
    """R82: bytes are stored in identity coding, so a client without gzip can read the replay."""
    key = new_key()

    first = post(kind, key, headers={"Accept-Encoding": "gzip"})
    second = post(kind, key)

    assert first["Content-Encoding"] == "gzip"
    assert gzip.decompress(first.content) == second.content == LONG.encode()
    assert "Content-Encoding" not in second
    assert effects(key) == 1


@override_settings(MIDDLEWARE=["django.middleware.gzip.GZipMiddleware", COMMON])
def test_middleware_compresses_replays_again():
    """G14: a replay passes the rest of the stack like any response."""
    view_of("public_long", KINDS["long"], scope=lambda request: ("test",))
    key = new_key()

    answers = [post("public_long", key, headers={"Accept-Encoding": "gzip"}) for _ in range(2)]

    assert is_replay(answers[1])
    for answer in answers:
        assert answer["Content-Encoding"] == "gzip"
        assert answer["Content-Length"] == str(len(answer.content))
        assert gzip.decompress(answer.content) == LONG.encode()


# Not kept

view_of("stream", lambda request, pk: StreamingHttpResponse(iter([b"a", b"b"])))
view_of("file", lambda request, pk: FileResponse(io.BytesIO(PDF), filename="order.pdf"))
view_of("six_megabytes", lambda request, pk: HttpResponse(b"x" * 6_000_000))
view_of("just_fits", lambda request, pk: HttpResponse(b"x" * 100), max_response_bytes=100)
view_of("one_too_many", lambda request, pk: HttpResponse(b"x" * 101), max_response_bytes=100)
view_of("secret_once", lambda request, pk: JsonResponse({"token": "s3cret"}), max_response_bytes=0)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("stream", b"ab"),
        ("file", PDF),
        ("six_megabytes", b"x" * 6_000_000),
        ("one_too_many", b"x" * 101),
        ("secret_once", b'{"token": "s3cret"}'),
        ("brotli", b"\x0b\x02\x80"),
        ("broken_gzip", b"\x1f\x8bnot"),
    ],
)
def test_a_response_that_is_not_kept_is_delivered_once_then_410(kind, content):
    """G04, G09, B05, M04, hard case 25: never an empty 200, never a second effect, never a 500."""
    key = new_key()

    first = post(kind, key)
    body = b"".join(first.streaming_content) if first.streaming else first.content
    retries = [post(kind, key) for _ in range(2)]

    assert (first.status_code, body) == (200, content)
    assert [problem(retry) for retry in retries] == ["response-not-retained"] * 2
    assert [retry.status_code for retry in retries] == [410, 410]
    assert retries[0].json()["operation_id"] == str(operation(key).pk)
    assert retries[0].json()["retryable"] is False
    assert effects(key) == 1
    assert operation(key).status == "succeeded"
    assert operation(key).body is None


def test_the_limit_is_inclusive():
    key = new_key()
    assert post("just_fits", key).content == post("just_fits", key).content


# Rendering

view_of(
    "unrenderable",
    lambda request, pk: TemplateResponse(request, template("{{ pk.boom|add:boom }}{% broken %}")),
)


def explode(request, pk):
    def boom():
        raise TemplateSyntaxError("cannot render")

    return TemplateResponse(request, template("{{ boom }}"), {"boom": boom})


view_of("render_error", explode)
view_of("nothing", lambda request, pk: None)
view_of("a_dict", lambda request, pk: {"id": pk})


@pytest.mark.parametrize("kind", ["unrenderable", "render_error", "nothing", "a_dict"])
def test_what_cannot_be_rendered_rolls_back_and_runs_again(kind):
    """F05, hard case 13: a failure after the view's return is still inside the transaction."""
    key = new_key()

    assert [post(kind, key).status_code for _ in range(2)] == [500, 500]

    assert effects(key) == 0
    stored = operation(key)
    assert (stored.status, stored.attempt) == ("processing", 2)


# Headers

view_of(
    "loaded",
    lambda request, pk: loaded(pk),
)

DENIED = [
    "Access-Control-Allow-Origin",
    "Access-Control-Expose-Headers",
    "Age",
    "Authorization",
    "Content-Security-Policy",
    "Date",
    "Proxy-Authenticate",
    "RateLimit-Remaining",
    "Retry-After",
    "Server-Timing",
    "Set-Cookie",
    "Strict-Transport-Security",
    "Vary",
    "WWW-Authenticate",
    "X-CSRFToken",
    "X-RateLimit-Limit",
    "X-Request-ID",
    "traceparent",
]


def loaded(pk):
    response = HttpResponse(f"effect {pk}")
    response.set_cookie("sessionid", "stolen-session")
    for header in DENIED:
        response[header] = "stolen-header"
    response["X-Order-Version"] = "7"
    response["X-Other"] = "not asked for"
    return response


@override_settings(IDEMPOTENCY={"REPLAY_HEADERS": ["X-Order-Version", *DENIED]})
def test_denied_headers_are_never_stored_even_if_asked_for():
    """Hard case 30, M01, R81: cookies, CORS, dates, nonces belong to one exchange or one person."""
    key = new_key()

    first, second = post("loaded", key), post("loaded", key)

    stored = json.loads(operation(key).headers)
    assert set(stored) == {"Content-Type", "X-Order-Version"}
    assert "stolen" not in json.dumps(stored)
    assert first.cookies
    assert not second.cookies
    assert second["X-Order-Version"] == "7"
    assert "X-Other" not in second
    assert not [h for h in DENIED if second.get(h) == "stolen-header"]


@pytest.mark.parametrize("header", ["content-type", "LOCATION", "ETag", "Content-Disposition"])
def test_built_in_headers_are_kept_whatever_their_case(header):
    assert is_kept(header)


@override_settings(IDEMPOTENCY={"REPLAY_HEADERS": ["X-Order"]})
def test_the_project_adds_headers_without_regard_to_case():
    assert is_kept("x-ORDER")
    assert not is_kept("X-Orders")


# At rest


class FernetCodec:
    """Encrypts stored bodies; the example of the documentation."""

    def __init__(self, key: bytes) -> None:
        self.fernet = Fernet(key)

    def encode(self, body: bytes) -> bytes:
        return self.fernet.encrypt(body)

    def decode(self, stored: bytes) -> bytes:
        return self.fernet.decrypt(stored)


class Masked:
    """Stores the body without its token; the first answer is not touched."""

    def encode(self, body: bytes) -> bytes:
        return json.dumps(json.loads(body) | {"token": "***"}).encode()

    def decode(self, stored: bytes) -> bytes:
        return stored


class Failing:
    def encode(self, body: bytes) -> bytes:
        raise ValueError("no key loaded")


token = lambda request, pk: JsonResponse({"id": pk, "token": "s3cret"})  # noqa: E731
codec = FernetCodec(Fernet.generate_key())
view_of("encrypted", token, codec=codec)
view_of("masked", token, codec=Masked())
view_of("failing_codec", token, codec=Failing())


def test_a_codec_keeps_bodies_unreadable_at_rest():
    """M01: nobody reads the token from a dump of the database; the owner still gets it replayed."""
    key = new_key()

    first, second = post("encrypted", key), post("encrypted", key)

    assert b"s3cret" not in bytes(operation(key).body)
    assert second.content == first.content
    assert b"s3cret" in second.content
    assert second["Content-Type"] == "application/json"


def test_a_lost_encryption_key_means_410_and_never_a_second_run():
    """R132: undecodable is "not retained", not "unknown key"."""
    key = new_key()
    post("encrypted", key)
    Operation.objects.filter(key=key).update(body=FernetCodec(Fernet.generate_key()).encode(b"x"))

    assert problem(post("encrypted", key)) == "response-not-retained"
    assert effects(key) == 1


def test_a_codec_can_mask_what_is_stored():
    """M03: the first answer is whole, the stored value and every replay are masked."""
    key = new_key()

    first, second = post("masked", key), post("masked", key)

    assert first.json()["token"] == "s3cret"
    assert b"s3cret" not in bytes(operation(key).body)
    assert second.json() == {"id": first.json()["id"], "token": "***"}


def test_a_codec_that_cannot_encode_rolls_the_effects_back():
    """A response that cannot be protected as asked is not stored in clear, and nothing is half done."""
    key = new_key()

    assert post("failing_codec", key).status_code == 500
    assert effects(key) == 0
    assert operation(key).body is None


# The functions themselves


def test_capture_and_replay_are_inverse():
    """Without a database: an outcome holds all that a replay needs."""
    first = rendered(created(None, 5))
    outcome = capture(first)
    again = replay(outcome)

    assert outcome.status == Status.SUCCEEDED
    assert (again.status_code, again.content) == (201, first.content)
    assert capture(again) == outcome


def test_a_replay_without_a_stored_content_type_has_none():
    assert "Content-Type" not in replay(Outcome(status=Status.SUCCEEDED, code=204))


def test_a_response_that_is_rendered_already_is_left_alone():
    response = TemplateResponse(None, template("x")).render()
    calls = []
    response.add_post_render_callback(calls.append)
    assert rendered(response) is response
    assert calls == [response]


def test_the_cors_lists_extend_those_of_django_cors_headers():
    """J09: the names are lower case there, and the replay marker is readable by scripts."""
    assert not set(idempotency.http.CORS_ALLOW_HEADERS) & set(default_headers)
    assert all(name == name.lower() for name in idempotency.http.CORS_ALLOW_HEADERS)
    assert "Idempotent-Replayed" in idempotency.http.CORS_EXPOSE_HEADERS
