"""The key and the fingerprint of an HTTP request, on WSGI, on ASGI, and under REST framework."""

from __future__ import annotations

import gzip
import hashlib
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import IO, Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import BadRequest, RequestDataTooBig, TooManyFilesSent
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import FileUploadHandler
from django.core.handlers.asgi import ASGIRequest
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest, HttpResponse, UnreadablePostError
from django.http.multipartparser import MultiPartParserError
from django.test import AsyncClient, Client
from django.test.client import encode_multipart
from django.urls import path
from rest_framework import parsers
from rest_framework.exceptions import ParseError, UnsupportedMediaType
from rest_framework.request import Request
from rest_framework.versioning import AcceptHeaderVersioning
from rest_framework.views import APIView

from idempotency import fingerprints
from idempotency.exceptions import ConfigurationError, InvalidKey
from idempotency.fingerprints import Fingerprint
from idempotency.http import bodies
from idempotency.http.requests import find_key, request_fingerprint, spool, spool_when_read
from idempotency.policies import Policy, Resolved

MB = 1024 * 1024
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"

Make = Callable[..., Any]

made: list[HttpRequest] = []


def wsgi(
    body: bytes | IO[bytes] = b"",
    content_type: str = JSON,
    *,
    method: str = "POST",
    path: str = "/orders/1/",
    query: str = "",
    size: int | None = None,
    **headers: str,
) -> WSGIRequest:
    stream = BytesIO(body) if isinstance(body, bytes) else body
    request = WSGIRequest(
        {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": content_type,
            "CONTENT_LENGTH": str(len(body) if isinstance(body, bytes) else size),
            "SERVER_NAME": "testserver",
            "SERVER_PORT": "80",
            "wsgi.url_scheme": "http",
            "wsgi.input": stream,
            **{f"HTTP_{name.upper()}": value for name, value in headers.items()},
        }
    )
    made.append(request)
    return request


def asgi(
    body: bytes = b"",
    content_type: str = JSON,
    *,
    method: str = "POST",
    path: str = "/orders/1/",
    query: str = "",
    chunked: bool = False,
    **headers: str,
) -> ASGIRequest:
    sent = {"content-type": content_type, **{n.replace("_", "-"): v for n, v in headers.items()}}
    if not chunked:
        sent["content-length"] = str(len(body))
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
    }
    stream = tempfile.SpooledTemporaryFile(int(2.5 * MB))  # noqa: SIM115 - as ASGIHandler does
    stream.write(body)
    stream.seek(0)
    request = ASGIRequest(scope, stream)
    made.append(request)
    return request


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the requests, as Django's handlers do."""
    yield
    while made:
        made.pop().close()


@pytest.fixture(params=[wsgi, asgi], ids=["wsgi", "asgi"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


def drf(http: HttpRequest, *parser_classes: type, **attributes: Any) -> Request:
    classes = parser_classes or (
        parsers.JSONParser,
        parsers.FormParser,
        parsers.MultiPartParser,
    )
    return APIView(parser_classes=classes, **attributes).initialize_request(http)


def resolved(**fields: Any) -> Resolved:
    return Policy(**fields).resolved()


def fingerprint(request: Any, **fields: Any) -> Fingerprint:
    return request_fingerprint(request, resolved(**fields))


def multipart(
    data: dict[str, Any], boundary: str = "boundary", files: Any = ()
) -> tuple[bytes, str]:
    fields = dict(data)
    for name, (filename, content) in dict(files).items():
        fields[name] = SimpleUploadedFile(filename, content, "application/octet-stream")
    return encode_multipart(boundary, fields), f"multipart/form-data; boundary={boundary}"


# Keys


@pytest.mark.parametrize("wrap", [lambda http: http, drf], ids=["django", "drf"])
@pytest.mark.parametrize(
    ("headers", "key"),
    [({}, None), ({"idempotency_key": '"k1"'}, "k1"), ({"idempotency_key": "k1"}, "k1")],
)
def test_the_key_is_read_from_the_header(
    make: Make, wrap: Any, headers: dict[str, str], key: str | None
) -> None:
    """BUGS J08: both forms."""
    assert find_key(wrap(make(b"{}", **headers)), resolved()) == key


@pytest.mark.parametrize("value", ["", " ", '""', "a,b", "a b", '"a', "x" * 10_000, "\xe9"])
def test_a_malformed_key_is_refused_and_not_taken_as_absent(make: Make, value: str) -> None:
    """RULES 12-14: ignoring it would execute unprotected."""
    with pytest.raises(InvalidKey):
        find_key(make(b"{}", idempotency_key=value), resolved())


def test_two_header_lines_are_refused() -> None:
    """BUGS J10: ASGI servers hand over both lines, and Django joins them."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [(b"idempotency-key", b"one"), (b"idempotency-key", b"two")],
    }
    with pytest.raises(InvalidKey, match="one header line"):
        find_key(ASGIRequest(scope, BytesIO()), resolved())


def test_the_header_name_is_a_setting_and_a_policy_field(make: Make, settings: Any) -> None:
    """RULES 10."""
    request = make(b"{}", paypal_request_id="p", x_key="x", idempotency_key="i")
    assert find_key(request, resolved(key="header:PayPal-Request-Id")) == "p"
    settings.IDEMPOTENCY = {"KEY_HEADER": "X-Key"}
    assert find_key(request, resolved()) == "x"


def test_a_callable_names_the_key(make: Make) -> None:
    request = make(b"{}", x_event="evt_1")
    assert find_key(request, resolved(key=lambda r: r.headers.get("X-Event"))) == "evt_1"
    assert find_key(request, resolved(key=lambda r: r.headers.get("X-Other"))) is None


def test_what_a_callable_returns_is_checked(make: Make) -> None:
    with pytest.raises(InvalidKey):
        find_key(make(), resolved(key=lambda r: ""))
    with pytest.raises(ConfigurationError, match="string or None"):
        find_key(make(), resolved(key=lambda r: 5))


@pytest.mark.parametrize("carrier", ["cookie:k", "json", "json:", "header:", "Idempotency-Key"])
def test_an_unknown_carrier_is_a_configuration_error(make: Make, carrier: str) -> None:
    with pytest.raises(ConfigurationError):
        find_key(make(b"{}", idempotency_key="k"), resolved(key=carrier))


@pytest.mark.parametrize("wrap", [lambda http: http, drf], ids=["django", "drf"])
def test_the_key_may_be_a_member_of_the_json_body(make: Make, wrap: Any) -> None:
    """RULES 10: Square, AIP-155. The body is still there for the view."""
    body = b'{"request_id": "k1", "amount": 5}'
    request = wrap(make(body))
    assert find_key(request, resolved(key="json:request_id")) == "k1"
    assert find_key(request, resolved(key="json:other")) is None
    assert fingerprint(request, key="json:request_id") == fingerprint(make(body))
    assert make(body).body == body
    assert request.body == body


@pytest.mark.parametrize("member", [b'""', b"5", b"null", b'["a"]', b'"a b"', b"{}"])
@pytest.mark.parametrize("wrap", [lambda http: http, drf], ids=["django", "drf"])
def test_a_malformed_key_in_the_body_is_refused(make: Make, wrap: Any, member: bytes) -> None:
    """RULES 12."""
    with pytest.raises(InvalidKey):
        find_key(wrap(make(b'{"request_id": %s}' % member)), resolved(key="json:request_id"))


@pytest.mark.parametrize("body", [b"", b"[1]", b'"request_id"', b"{", b"[" * 100_000])
def test_a_body_that_is_no_json_object_has_no_key(make: Make, body: bytes) -> None:
    """The view answers for the malformed body."""
    assert find_key(make(body), resolved(key="json:request_id")) is None


def test_a_malformed_json_body_gets_drfs_own_answer(make: Make) -> None:
    with pytest.raises(ParseError):
        find_key(drf(make(b"{")), resolved(key="json:request_id"))


@pytest.mark.parametrize("wrap", [lambda http: http, drf], ids=["django", "drf"])
def test_the_key_may_be_a_form_field(make: Make, wrap: Any) -> None:
    """BUGS E13: a hidden field, urlencoded or multipart."""
    policy = resolved(key="form:request_id")
    assert find_key(wrap(make(b"request_id=k1&a=1", FORM)), policy) == "k1"
    assert find_key(wrap(make(*multipart({"request_id": "k1"}))), policy) == "k1"
    assert find_key(wrap(make(b"a=1", FORM)), policy) is None
    for malformed in (b"request_id=", b"request_id=a&request_id=b", b"request_id=a+b"):
        with pytest.raises(InvalidKey):
            find_key(wrap(make(malformed, FORM)), policy)


# What is equal, what is not


def test_an_identical_request_has_the_same_fingerprint_on_every_server() -> None:
    body = b'{"a": 1}'
    assert fingerprint(wsgi(body, query="b=1")) == fingerprint(asgi(body, query="b=1"))
    assert fingerprint(drf(wsgi(body))) == fingerprint(wsgi(body))


def test_reordered_json_is_the_same_request(make: Make) -> None:
    """BUGS E01."""
    first = fingerprint(make(b'{"a":1,"b":{"c":[1,2]}}'))
    assert first == fingerprint(make(b'{"b": {"c": [1, 2]},\r\n "a": 1}'))
    assert first != fingerprint(make(b'{"a":1,"b":{"c":[2,1]}}'))


@pytest.mark.parametrize(
    "change",
    [
        {"body": b'{"a":2}'},
        {"body": b"{}"},
        {"body": b""},
        {"method": "PATCH"},
        {"path": "/orders/2/"},
        {"path": "/orders/1"},
        {"path": "/orders//1/"},
        {"query": "dry_run=1"},
        {"query": "%7B%22a%22%3A1%7D"},
        {"content_type": "application/merge-patch+json"},
        {"content_type": "text/plain"},
        {"content_type": ""},
        {"if_match": '"v1"'},
        {"if_none_match": '"v1"'},
    ],
    ids=str,
)
def test_another_request_has_another_fingerprint(make: Make, change: dict[str, Any]) -> None:
    """RULES 28; BUGS D07, D08, D09, E02, E09, E12."""
    first = {"body": b'{"a":1}', "content_type": JSON}
    assert fingerprint(make(**first)) != fingerprint(make(**first | change))


def test_preconditions_are_not_mixed_up(make: Make) -> None:
    assert fingerprint(make(if_match="x")) != fingerprint(make(if_none_match="x"))


@pytest.mark.parametrize(
    "header",
    [
        "authorization",
        "cookie",
        "x_csrftoken",
        "date",
        "accept",
        "accept_encoding",
        "accept_language",
        "user_agent",
        "traceparent",
        "x_request_id",
        "idempotency_key",
        "origin",
    ],
)
def test_headers_that_differ_between_retries_do_not_count(make: Make, header: str) -> None:
    """BUGS E11, RULES 29: a token renewed between two tries."""
    assert fingerprint(make(b"{}", **{header: "a=1"})) == fingerprint(
        make(b"{}", **{header: "b=2"})
    )


def test_media_type_parameters_do_not_count(make: Make) -> None:
    assert fingerprint(make(b"{}", "application/json")) == fingerprint(
        make(b"{}", "Application/JSON; charset=utf-8")
    )


def test_the_query_is_compared_by_name(make: Make) -> None:
    """PEER_DEFECTS: the query string is part of the request."""
    first = fingerprint(make(query="a=1&b=2&b=3"))
    assert first == fingerprint(make(query="b=2&b=3&a=1"))
    assert first != fingerprint(make(query="a=1&b=3&b=2"))
    assert fingerprint(make(query="a=%FF")) != fingerprint(make(query="a=%FE"))


def test_json_numbers_keep_every_digit(make: Make) -> None:
    """RULES 30, PEER_DEFECTS."""
    bodies_ = [b'{"a":1}', b'{"a":1.0}', b'{"a":1.1}', b'{"a":1.1000000000000000001}', b'{"a":"1"}']
    assert len({fingerprint(make(body)) for body in bodies_}) == len(bodies_)


def test_duplicate_json_members_are_compared_byte_for_byte(make: Make) -> None:
    """RULES 30."""
    first = fingerprint(make(b'{"a":1,"a":2}'))
    assert first == fingerprint(make(b'{"a":1,"a":2}'))
    assert first != fingerprint(make(b'{"a":3,"a":2}'))


def test_raw_bytes_never_pass_for_canonical_json(make: Make) -> None:
    canonical = fingerprints.canonical_json(b'{"a":1}')
    assert canonical is not None
    assert fingerprint(make(canonical, "text/plain")) != fingerprint(make(canonical, JSON))
    digest = hashlib.sha256(b"{").digest()
    assert fingerprint(make(b"{", "text/plain")) != fingerprint(make(digest, "text/plain"))


def test_json_above_the_limit_is_compared_byte_for_byte(make: Make) -> None:
    large = b'{"a": "%s"}' % (b"x" * bodies.CANONICAL_LIMIT)
    assert fingerprint(make(large)) == fingerprint(make(large))
    assert fingerprint(make(large)) != fingerprint(make(large.replace(b": ", b":")))


def test_forms_above_the_limit_are_compared_to_their_end(make: Make) -> None:
    large = b"a=%s&b=1" % (b"x" * bodies.CANONICAL_LIMIT)
    assert fingerprint(make(large, FORM)) == fingerprint(make(large, FORM))
    assert fingerprint(make(large, FORM)) != fingerprint(make(large[:-1] + b"2", FORM))


@pytest.mark.parametrize("kind", ["application/merge-patch+json", "application/vnd.api+json"])
def test_json_is_known_by_its_suffix(make: Make, kind: str) -> None:
    """PEER_DEFECTS; RFC 6839."""
    assert fingerprint(make(b'{"a":1,"b":2}', kind)) == fingerprint(make(b'{"b":2,"a":1}', kind))


def test_compressed_bodies_are_compared_as_sent(make: Make) -> None:
    """RULES 33: documented."""
    packed = gzip.compress(b'{"a":1}', mtime=0)
    first = fingerprint(make(packed, content_encoding="gzip"))
    assert first == fingerprint(make(packed, content_encoding="gzip"))
    assert first != fingerprint(make(gzip.compress(b'{"a":2}', mtime=0), content_encoding="gzip"))


def test_excluded_fields_may_differ_in_every_kind_of_body(make: Make) -> None:
    """BUGS E05, E10."""
    for first, second, third in (
        ((b'{"at":1,"a":1}', JSON), (b'{"at":2,"a":1}', JSON), (b'{"at":1,"a":2}', JSON)),
        ((b"at=1&a=1", FORM), (b"a=1&at=2", FORM), (b"at=1&a=2", FORM)),
        (multipart({"at": 1, "a": 1}), multipart({"at": 2, "a": 1}), multipart({"at": 1, "a": 2})),
        (
            multipart({"a": 1}, files={"at": ("f", b"1")}),
            multipart({"a": 1}, files={"at": ("f", b"2")}),
            multipart({"a": 1}, files={"a": ("f", b"2")}),
        ),
    ):
        one, two, three = (
            fingerprint(make(*b), exclude_fields={"at"}) for b in (first, second, third)
        )
        assert one == two
        assert one != three
        assert fingerprint(make(*first)) != fingerprint(make(*second))


def test_forms_are_compared_by_field(make: Make) -> None:
    """RULES 31."""
    first = fingerprint(make(b"a=1&b=2&b=3", FORM))
    assert first == fingerprint(make(b"b=2&a=1&b=3", FORM))
    assert first != fingerprint(make(b"b=3&a=1&b=2", FORM))
    assert first != fingerprint(make(b"a=1&b=2", FORM))
    assert fingerprint(make(b"a=%FF", FORM)) != fingerprint(make(b"a=%FE", FORM))


def test_a_rotated_csrf_token_does_not_count(make: Make) -> None:
    """BUGS E11."""
    for one, other in (
        ((b"a=1&csrfmiddlewaretoken=x", FORM), (b"a=1&csrfmiddlewaretoken=y", FORM)),
        (multipart({"csrfmiddlewaretoken": "x"}), multipart({"csrfmiddlewaretoken": "y"})),
    ):
        assert fingerprint(make(*one)) == fingerprint(make(*other))


def test_multipart_is_compared_without_its_boundary(make: Make) -> None:
    """RULES 31, BUGS likely faults: a retry may encode the same form anew."""
    data, files = {"a": "1", "b": ["x", "y"]}, {"f": ("f.txt", b"content")}
    first = fingerprint(make(*multipart(data, "one", files)))
    assert first == fingerprint(make(*multipart(data, "two", files)))
    assert first == fingerprint(make(*multipart(data, "two", files), method="POST"))
    for other in (
        multipart(data | {"a": "2"}, "one", files),
        multipart(data | {"b": ["y", "x"]}, "one", files),
        multipart(data, "one", {"f": ("g.txt", b"content")}),
        multipart(data, "one", {"g": ("f.txt", b"content")}),
        multipart(data, "one", {"f": ("f.txt", b"Content")}),
        multipart(data, "one"),
        multipart(data | {"f": "content"}, "one"),
    ):
        assert first != fingerprint(make(*other))


def test_an_empty_upload_is_not_the_absence_of_one(make: Make) -> None:
    assert fingerprint(make(*multipart({}, files={"f": ("f", b"")}))) != fingerprint(
        make(*multipart({}))
    )


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_multipart_is_understood_for_methods_whose_forms_django_does_not_parse(
    make: Make, method: str
) -> None:
    one, two = multipart({"a": "1"}, "one"), multipart({"a": "1"}, "two")
    other = multipart({"a": "2"}, "one")
    assert fingerprint(make(*one, method=method)) == fingerprint(make(*two, method=method))
    assert fingerprint(make(*one, method=method)) != fingerprint(make(*other, method=method))


def test_a_chunked_upload_is_not_an_empty_body() -> None:
    """PEER_DEFECTS: an empty fingerprint replays one upload's response to another."""
    (one, kind), (two, _) = multipart({"a": "1"}), multipart({"a": "2"})
    first = fingerprint(asgi(one, kind, chunked=True))
    assert first == fingerprint(asgi(one, kind))
    assert first != fingerprint(asgi(two, kind, chunked=True))


def test_the_version_the_client_asks_for_counts_and_the_default_does_not(make: Make) -> None:
    """RULES 28, 87: a new server default must not turn live retries into mismatches."""

    def of_version(accept: str, default: str) -> Fingerprint:
        scheme = AcceptHeaderVersioning()
        scheme.default_version = default
        request = drf(make(b"{}", accept=accept))
        request.accepted_media_type = accept
        request.version = scheme.determine_version(request)
        request.versioning_scheme = scheme
        return fingerprint(request)

    assert of_version("application/json; version=1", "0") != of_version(
        "application/json; version=2", "0"
    )
    assert of_version("application/json", "1") == of_version("application/json", "2")


@pytest.mark.parametrize("value", [b"x", "x", {"a": [1, None]}, 5])
def test_a_custom_fingerprint_replaces_all_but_method_and_path(make: Make, value: Any) -> None:
    """BUGS E05, D09."""

    def custom(**request: Any) -> Fingerprint:
        return fingerprint(make(**request), fingerprint=lambda r: value)

    first = custom(body=b"1", query="a=1")
    assert first == custom(body=b"2", query="a=2")
    assert first != custom(body=b"1", path="/refunds/1/")
    assert first != custom(body=b"1", method="PATCH")
    assert first != fingerprint(make(), fingerprint=lambda r: "something else")


def test_a_custom_fingerprint_object_replaces_everything(make: Make) -> None:
    own = fingerprints.of("own")
    assert fingerprint(make(), fingerprint=lambda r: own) == own


def test_a_custom_fingerprint_gets_the_drf_request(make: Make) -> None:
    request = drf(make(b'{"order": 1, "note": "x"}'))
    again = drf(make(b'{"order": 1, "note": "y"}'))
    policy = {"fingerprint": lambda r: {"order": r.data["order"]}}
    assert fingerprint(request, **policy) == fingerprint(again, **policy)


def test_a_custom_fingerprint_without_a_result_is_a_configuration_error(make: Make) -> None:
    """A forgotten `return` would make all requests equal."""
    with pytest.raises(ConfigurationError, match="None"):
        fingerprint(make(), fingerprint=lambda r: None)


def test_a_header_key_does_not_count_and_may_be_re_quoted(make: Make) -> None:
    """BUGS J08."""
    assert fingerprint(make(idempotency_key="k")) == fingerprint(make(idempotency_key='"k"'))


# The body is still there


BODIES = [
    (b'{"a": 1}', JSON),
    (b"{", JSON),
    (b"a=1&b=2", FORM),
    (b"\x00\xff", "application/octet-stream"),
    (b"", JSON),
    (b'{"a": "%s"}' % (b"x" * (3 * MB)), JSON),
]


@pytest.mark.parametrize(("body", "kind"), BODIES)
@pytest.mark.parametrize("prepare", [spool, spool_when_read])
def test_the_view_reads_the_body_as_if_nothing_had_read_it(
    make: Make, settings: Any, body: bytes, kind: str, prepare: Any
) -> None:
    """BUGS J12."""
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = None
    for read in (
        lambda r: r.body,
        lambda r: r.read(),
        lambda r: b"".join(iter(lambda: r.read(1000), b"")),
        lambda r: b"".join(r),
    ):
        request = make(body, kind)
        prepare(request)
        fingerprint(request)
        fingerprint(request)
        assert read(request) == body


def test_the_fingerprint_is_the_same_before_and_after_the_view_read_the_body(make: Make) -> None:
    """BUGS J12."""
    for use in (lambda r: r.body, lambda r: r.read(3), lambda r: r.read(), lambda r: r.POST):
        for body, kind in [*BODIES[:5], multipart({"a": 1}, files={"f": ("f", b"x")})]:
            request = make(body, kind)
            before = fingerprint(request)
            use(request)
            assert fingerprint(request) == before


def test_reading_on_after_the_fingerprint_continues_where_the_reader_was(make: Make) -> None:
    request = make(b"abcdef", "text/plain")
    spool(request)
    assert request.read(3) == b"abc"
    fingerprint(request)
    assert request.read() == b"def"


def test_forms_and_uploads_are_parsed_after_the_fingerprint(make: Make) -> None:
    """BUGS J12."""
    request = make(*multipart({"a": "1"}, files={"f": ("f.txt", b"content")}))
    fingerprint(request)
    assert request.POST["a"] == "1"
    assert request.FILES["f"].read() == b"content"
    request = make(b"a=1", FORM)
    fingerprint(request)
    assert request.POST["a"] == "1"


def test_the_view_may_still_choose_its_upload_handlers(make: Make) -> None:
    class Shouting(FileUploadHandler):
        def receive_data_chunk(self, raw_data: bytes, start: int) -> bytes:
            return raw_data.upper()

        def file_complete(self, file_size: int) -> None:
            return None

    request = make(*multipart({}, files={"f": ("f.txt", b"content")}))
    fingerprint(request)
    request.upload_handlers.insert(0, Shouting(request))
    assert request.FILES["f"].read() == b"CONTENT"


@pytest.mark.parametrize(
    ("body", "kind", "data"),
    [
        (b'{"a": "1"}', JSON, {"a": "1"}),
        (b"a=1", FORM, {"a": "1"}),
        (*multipart({"a": "1"}, files={"f": ("f.txt", b"content")}), {"a": "1"}),
    ],
)
def test_drf_parses_after_the_fingerprint(make: Make, body: bytes, kind: str, data: Any) -> None:
    """BUGS J12."""
    request = drf(make(body, kind))
    spool(request)
    fingerprint(request)
    assert {name: request.data[name] for name in data} == data
    if request.FILES:
        assert request.FILES["f"].read() == b"content"


@pytest.mark.parametrize(("body", "kind"), [BODIES[0], BODIES[2], multipart({"a": "1"})])
def test_a_permission_that_reads_the_data_changes_nothing(
    make: Make, body: bytes, kind: str
) -> None:
    """PEER_DEFECTS: `request.data` in a permission must not make the body look empty."""
    untouched = fingerprint(drf(make(body, kind)))
    for prepare in (spool, spool_when_read, lambda request: None):
        request = drf(make(body, kind))
        prepare(request)
        data = request.data
        assert fingerprint(request) == untouched
        assert request.data is data


def test_a_permission_that_used_up_an_unspooled_stream_leaves_the_data(make: Make) -> None:
    """The weaker form: what DRF parsed is compared, never nothing."""

    class Reading(parsers.JSONParser):
        media_type = "text/plain"

        def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
            return {"text": stream.read().decode(), "raw": object}

    def of_text(text: bytes) -> Fingerprint:
        request = drf(make(text, "text/plain"), Reading)
        assert request.data["text"]
        return fingerprint(request)

    assert of_text(b"one") == of_text(b"one")
    assert of_text(b"one") != of_text(b"two")


def test_a_raw_upload_used_up_by_a_permission_is_compared_by_content() -> None:
    def of_upload(content: bytes) -> Fingerprint:
        http = wsgi(content, "image/png", content_disposition="attachment; filename=a.png")
        request = drf(http, parsers.FileUploadParser)
        assert request.data["file"].size == len(content)
        result = fingerprint(request)
        assert request.data["file"].read() == content
        return result

    assert of_upload(b"one") == of_upload(b"one")
    assert of_upload(b"one") != of_upload(b"two")


def test_drfs_file_upload_parser_works_after_the_fingerprint(make: Make) -> None:
    http = make(b"content", "image/png", content_disposition="attachment; filename=a.png")
    request = drf(http, parsers.FileUploadParser)
    spool(request)
    fingerprint(request)
    assert request.data["file"].read() == b"content"


def test_middleware_that_read_the_form_first_changes_nothing(make: Make) -> None:
    """BUGS J12: CSRF protection reads request.POST when the token is a form field."""
    body, kind = multipart({"a": "1"}, files={"f": ("x/../f&amp;.txt", b"content")})
    untouched = fingerprint(make(body, kind))
    for wrap in (lambda http: http, drf):
        http = make(body, kind)
        assert http.POST["a"] == "1"
        request = wrap(http)
        assert fingerprint(request) == untouched
        assert request.FILES["f"].read() == b"content"
        assert fingerprint(request) == untouched
        other = make(*multipart({"a": "1"}, files={"f": ("f", b"other")}))
        assert other.POST
        assert fingerprint(wrap(other)) != untouched


def upload(request: HttpRequest) -> HttpResponse:
    compared = fingerprint(request).canonical
    return HttpResponse(compared + b"|" + request.FILES["f"].read() + request.POST["a"].encode())


urlpatterns = [path("upload/", upload)]


@pytest.mark.urls(__name__)
@pytest.mark.parametrize("client_class", [Client, AsyncClient])
def test_a_csrf_token_in_the_form_or_in_a_header_is_the_same_request(client_class: Any) -> None:
    """BUGS J12, E11: in the form it makes CSRF protection parse the upload before the view."""
    client = client_class(enforce_csrf_checks=True)
    post = async_to_sync(client.post) if client_class is AsyncClient else client.post
    token = "t" * 32
    client.cookies["csrftoken"] = token
    answers = []
    for field, header in ((token, "wrong"), ("", token)):
        data = {"a": "1", "f": BytesIO(b"content"), "csrfmiddlewaretoken": field}
        answers.append(post("/upload/", data, headers={"X-CSRFToken": header}))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].content.endswith(b"|content1")
    assert answers[0].content == answers[1].content


def test_a_very_long_file_name_is_the_same_before_and_after_parsing(make: Make) -> None:
    body, kind = multipart({}, files={"f": ("f.txt", b"x")})
    body = body.replace(b'"f.txt"', b'"' + b"n" * 300 + b'.txt"')
    untouched = fingerprint(make(body, kind))
    parsed = make(body, kind)
    assert parsed.FILES["f"].name.endswith(".txt")
    assert fingerprint(parsed) == untouched


def test_an_upload_that_a_handler_sent_elsewhere_is_compared_by_what_is_left() -> None:
    class Elsewhere:
        name, content_type, charset = "f", "text/plain", None

        def __init__(self, size: int) -> None:
            self.size = size

        def seek(self, position: int) -> None:
            raise OSError("a socket")

        def chunks(self) -> list[bytes]:
            raise AssertionError("can be read once, by the view")

        def close(self) -> None:
            pass

    class Handler(FileUploadHandler):
        def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
            return None

        def file_complete(self, file_size: int) -> Any:
            return Elsewhere(file_size)

    def of_upload(content: bytes) -> Fingerprint:
        request = wsgi(*multipart({}, files={"f": ("f", content)}))
        request.upload_handlers = [Handler(request)]
        assert request.FILES
        return fingerprint(request)

    assert of_upload(b"one") == of_upload(b"two")
    assert of_upload(b"one") != of_upload(b"three")


def test_an_unspooled_body_that_somebody_used_up_is_an_error_and_not_empty() -> None:
    """PEER_DEFECTS: two uploads with an empty fingerprint would share one response."""
    request = wsgi(b"content", "text/plain")
    request.read()
    with pytest.raises(ConfigurationError, match="spool"):
        fingerprint(request)
    request = wsgi(*multipart({"a": "1"}))
    request.read()
    assert not request.POST
    with pytest.raises(BadRequest, match="spool"):
        fingerprint(request)


# Limits and failures


class Endless:
    """A request body of `size` bytes that is never in memory: head, filler, tail."""

    def __init__(self, size: int, head: bytes = b"", tail: bytes = b"") -> None:
        self.size, self.head, self.tail, self.position = size, head, tail, 0
        self.total = len(head) + size + len(tail)

    def read(self, size: int = -1) -> bytes:
        left = self.total - self.position
        size = left if size < 0 else min(size, left)
        start, end = self.position, self.position + size
        self.position = end
        middle = max(0, min(end, len(self.head) + self.size) - max(start, len(self.head)))
        tail_at = len(self.head) + self.size
        return (
            self.head[start:end]
            + b"x" * middle
            + self.tail[max(0, start - tail_at) : max(0, end - tail_at)]
        )

    def readline(self, size: int = -1) -> bytes:
        return self.read(size)


def peak_of(function: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_raw_upload_of_fifty_megabytes_needs_bounded_memory() -> None:
    """BUGS J13."""
    request = wsgi(Endless(50 * MB), "application/octet-stream", size=50 * MB)  # type: ignore[arg-type]
    assert peak_of(lambda: fingerprint(request)) < 8 * MB
    length = 0
    while chunk := request.read(MB):
        length += len(chunk)
    assert length == 50 * MB


def test_a_form_with_a_file_of_fifty_megabytes_needs_bounded_memory() -> None:
    """BUGS J13, RULES 32: DRF and Django still get the whole file."""
    empty, kind = multipart({"a": "1"}, files={"f": ("f.bin", b"@")})
    head, tail = empty.split(b"@")
    body = Endless(50 * MB, head, tail)
    http = wsgi(body, kind, size=body.total)  # type: ignore[arg-type]
    request = drf(http)
    assert peak_of(lambda: [spool(request), fingerprint(request)]) < 8 * MB
    assert peak_of(lambda: request.data) < 8 * MB
    assert request.FILES["f"].size == 50 * MB


@pytest.mark.parametrize("size", [0, 1])
def test_no_memory_for_uploads_is_no_unbounded_memory(settings: Any, size: int) -> None:
    """FILE_UPLOAD_MAX_MEMORY_SIZE = 0 sends every upload to disk."""
    settings.FILE_UPLOAD_MAX_MEMORY_SIZE = size
    request = wsgi(Endless(9 * MB), "application/octet-stream", size=9 * MB)  # type: ignore[arg-type]
    assert peak_of(lambda: spool(request)) < 4 * MB


def test_the_spooled_file_is_closed_with_the_request() -> None:
    request = wsgi(b"x" * (3 * MB), "text/plain")
    spool(request)
    stream = request._stream
    assert not stream.closed
    request.close()
    assert stream.closed


def test_uploads_above_two_and_a_half_megabytes_pass(make: Make) -> None:
    """PEER_DEFECTS: request.body would answer 400 to every larger upload."""
    body, kind = multipart({"a": "1"}, files={"f": ("f.bin", b"x" * (3 * MB))})
    request = make(body, kind)
    fingerprint(request)
    assert request.FILES["f"].size == 3 * MB


@pytest.mark.parametrize("kind", [JSON, FORM, "text/plain"])
def test_djangos_limit_for_bodies_in_memory_still_holds(make: Make, kind: str) -> None:
    request = make(b"a" * (3 * MB), kind)
    fingerprint(request)
    with pytest.raises(RequestDataTooBig):
        request.body  # noqa: B018


def test_too_big_and_too_many_form_fields_are_refused_as_django_refuses_them(
    make: Make, settings: Any
) -> None:
    """The 4xx is Django's, and nothing was claimed yet."""
    with pytest.raises(RequestDataTooBig):
        fingerprint(make(*multipart({"a": "x" * (3 * MB)})))
    settings.DATA_UPLOAD_MAX_NUMBER_FILES = 1
    with pytest.raises(TooManyFilesSent):
        fingerprint(make(*multipart({}, files={"a": ("a", b""), "b": ("b", b"")})))


@pytest.mark.parametrize("kind", ["multipart/form-data", "multipart/form-data; boundary=\xe9"])
def test_a_malformed_multipart_body_is_refused_as_django_refuses_it(make: Make, kind: str) -> None:
    with pytest.raises(MultiPartParserError):
        fingerprint(make(b"--x\r\n", kind))


def test_a_malformed_multipart_body_is_refused_as_drf_refuses_it(make: Make) -> None:
    with pytest.raises(ParseError):
        fingerprint(drf(make(b"--x\r\n", "multipart/form-data")))
    with pytest.raises(UnsupportedMediaType):
        fingerprint(drf(make(b"--x\r\n", "multipart/form-data"), parsers.JSONParser))


def test_a_project_parser_may_accept_what_django_calls_malformed(make: Make) -> None:
    class Own(parsers.BaseParser):
        media_type = "multipart/form-data"

        def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
            return {"raw": stream.read()}

    one = drf(make(b"one", "multipart/form-data"), Own)
    other = drf(make(b"two", "multipart/form-data"), Own)
    assert fingerprint(one) != fingerprint(other)
    assert one.data == {"raw": b"one"}


def test_a_client_that_goes_away_while_sending_is_not_a_request() -> None:
    class Broken(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise ConnectionResetError

    with pytest.raises(UnreadablePostError):
        spool(wsgi(Broken(), "text/plain", size=5))
    request = wsgi(Broken(), "text/plain", size=5)
    spool_when_read(request)
    with pytest.raises(UnreadablePostError):
        fingerprint(request)


def test_a_request_without_a_stream_has_an_empty_body() -> None:
    request = HttpRequest()
    request.method, request.path = "POST", "/"
    spool(request)
    assert fingerprint(request) == fingerprint(wsgi(path="/", content_type=""))
