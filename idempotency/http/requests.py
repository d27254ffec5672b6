"""What a request says: its key, its fingerprint. Works on Django requests and on DRF's wrapper."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import IO, Any
from urllib.parse import parse_qsl

from django.conf import settings
from django.core.exceptions import BadRequest
from django.core.files.uploadedfile import UploadedFile
from django.core.files.uploadhandler import FileUploadHandler
from django.http import HttpRequest
from django.http.multipartparser import MultiPartParser, MultiPartParserError

from .. import fingerprints, keys
from ..conf import conf
from ..exceptions import ConfigurationError, InvalidKey
from ..fingerprints import Fingerprint
from ..policies import Resolved

#: Larger JSON and form bodies are compared byte for byte, in bytes.
CANONICAL_LIMIT = 1024 * 1024

_CHUNK = 64 * 1024
_MULTIPART = "multipart/form-data"
_FORM = "application/x-www-form-urlencoded"
#: A fresh one may come with every rendering of the same form.
_NEVER_COMPARED = frozenset({"csrfmiddlewaretoken"})
#: Headers that change what is asked for.
_COMPARED_HEADERS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")


def find_key(request: Any, policy: Resolved) -> str | None:
    """The request's idempotency key, or None if it has none.

    Raises InvalidKey for a key that is there but malformed or empty: running such a request
    unprotected is the one thing its sender did not ask for.
    """
    carrier = policy.key
    if carrier is None:
        return _header_key(request, conf.KEY_HEADER)
    if callable(carrier):
        key = carrier(request)
        if key is not None and not isinstance(key, str):
            raise ConfigurationError(
                f"Policy.key must return a string or None, not {type(key).__name__}."
            )
        return None if key is None else keys.validate(key)
    kind, _, name = carrier.partition(":")
    if kind == "header" and name:
        return _header_key(request, name)
    if kind in ("json", "form") and name:
        return _field_key(_fields(request, kind), name)
    raise ConfigurationError(
        f'Policy.key is a callable, "header:NAME", "json:FIELD" or "form:FIELD", not {carrier!r}.'
    )


def spool(request: Any) -> None:
    """Make the body readable more than once, whatever it is, in bounded memory.

    The body moves to a file (in memory while it is small) that becomes the request's stream, unread
    as before: `request.body`, `request.POST`, upload handlers and DRF's parsers work on it with their own
    limits. Nothing happens if the stream can be rewound already, as under ASGI, or is used up.
    """
    request = _django_request(request)
    stream = getattr(request, "_stream", None)
    if (
        stream is None
        or request._read_started
        or hasattr(request, "_body")
        or getattr(stream, "seekable", bool)()
    ):
        return
    buffer = tempfile.SpooledTemporaryFile(
        max_size=settings.FILE_UPLOAD_MAX_MEMORY_SIZE, dir=settings.FILE_UPLOAD_TEMP_DIR
    )
    try:
        while chunk := request.read(_CHUNK):
            buffer.write(chunk)
    except BaseException:
        buffer.close()
        raise
    buffer.seek(0)
    request._stream = buffer
    request._read_started = False
    close = request.close

    def close_with_buffer() -> None:
        close()
        buffer.close()

    request.close = close_with_buffer  # the handler calls it after the response


def request_fingerprint(request: Any, policy: Resolved) -> Fingerprint:
    """What the request asks for: method, path, query, media type, body, preconditions, API version.

    Equal for every honest retry: neither credentials, cookies, dates, trace ids and content
    negotiation nor JSON member order, whitespace and multipart boundaries count. A body with a
    Content-Encoding is compared as it was sent. A value returned by `policy.fingerprint` replaces all
    but method and path; a `Fingerprint` replaces everything.

    Raises what Django raises for a body it cannot parse or finds too big, and UnreadablePostError.
    """
    django_request = _django_request(request)
    if policy.fingerprint is not None:
        return _custom(policy.fingerprint(request), django_request)
    meta = django_request.META
    return fingerprints.of(
        django_request.method or "",
        django_request.path,
        fingerprints.canonical_query(_pairs(_wsgi_bytes(meta.get("QUERY_STRING", "")))),
        django_request.content_type or "",
        *(meta.get(header, "") for header in _COMPARED_HEADERS),
        _version(request),
        *_body(request, policy),
    )


def _custom(value: Any, request: HttpRequest) -> Fingerprint:
    if isinstance(value, Fingerprint):
        return value
    if value is None:
        raise ConfigurationError(
            "Policy.fingerprint returned None. Return what identifies the request, or b'' to compare "
            "nothing but method and path."
        )
    if isinstance(value, bytes | str):
        kind, data = type(value).__name__, value
    else:
        kind, data = "value", fingerprints.canonical_value(value)
    return fingerprints.of("custom", request.method or "", request.path, kind, data)


# Keys


def _header_key(request: Any, name: str) -> str | None:
    value = request.META.get("HTTP_" + name.upper().replace("-", "_"))
    return None if value is None else keys.parse(value)


def _field_key(fields: Any, name: str) -> str | None:
    if not isinstance(fields, Mapping) or name not in fields:
        return None
    values = fields.getlist(name) if hasattr(fields, "getlist") else [fields[name]]
    if len(values) != 1:
        raise InvalidKey("Send one key in one field.")
    return keys.validate(values[0])


def _fields(request: Any, kind: str) -> Any:
    if _is_drf(request):
        return request.data
    if kind == "form":
        return request.POST
    if not _is_json(request.content_type):
        return None
    try:
        return json.loads(request.body)
    except (ValueError, RecursionError):
        return None  # the view says what is wrong with it


# Bodies


def _body(request: Any, policy: Resolved) -> tuple[bytes | str, ...]:
    http = _django_request(request)
    media_type = http.content_type or ""
    exclude = policy.exclude_fields
    spool(http)
    stream = _rewindable(http)
    if stream is None:
        return _parsed_body(request, http, media_type, exclude)
    with _from_start(stream):
        if media_type == _MULTIPART:
            try:
                return "multipart", _multipart(http, stream, exclude)
            except MultiPartParserError:
                if not _is_drf(request):
                    raise
        elif media_type == _FORM or _is_json(media_type):
            raw = stream.read(CANONICAL_LIMIT + 1)
            if len(raw) <= CANONICAL_LIMIT:
                if media_type == _FORM:
                    return "form", _form(_pairs(raw), exclude)
                canonical = fingerprints.canonical_json(raw, exclude)
                if canonical is not None:
                    return "json", canonical
    if media_type == _MULTIPART:
        # DRF answers a malformed form in its own way; a parser of the project's own may accept it.
        request.data  # noqa: B018
    with _from_start(stream):
        return "bytes", _sha256(iter(lambda: stream.read(_CHUNK), b""))


def _parsed_body(
    request: Any, http: HttpRequest, media_type: str, exclude: frozenset[str]
) -> tuple[bytes | str, ...]:
    """The body as parsed by whoever used up the stream before: POST and FILES, else DRF's data."""
    form = http.__dict__.get("_post"), http.__dict__.get("_files")
    if media_type == _FORM and form[0]:
        return "form", _form(_encoded(form[0]), exclude)
    if media_type == _MULTIPART and any(form):
        return "multipart", _records(_encoded(form[0] or {}), _uploads(form[1] or {}), exclude)
    if _is_drf(request):
        data = fingerprints.canonical_value(request.data, exclude, _unknown)
        return "data", data
    if not _content_length(http):
        return "bytes", _sha256(iter(()))
    raise BadRequest(
        "The request body was used up before it could be compared. Call "
        "idempotency.http.requests.spool(request) before reading it, or set Policy.fingerprint."
    )


def _multipart(http: HttpRequest, stream: IO[bytes], exclude: frozenset[str]) -> bytes:
    # Parsed apart from request.POST: the view may still want to set its own upload handlers.
    size = stream.seek(0, 2)
    stream.seek(0)
    hasher = _UploadHasher()
    meta = {"CONTENT_TYPE": http.META.get("CONTENT_TYPE", ""), "CONTENT_LENGTH": size}
    post, _ = MultiPartParser(meta, stream, [hasher], http.encoding).parse()
    return _records(_encoded(post), hasher.uploads, exclude)


def _form(pairs: Any, exclude: frozenset[str]) -> bytes:
    return fingerprints.canonical_form(pairs, exclude | _NEVER_COMPARED)


def _records(fields: Any, uploads: Any, exclude: frozenset[str]) -> bytes:
    exclude = exclude | _NEVER_COMPARED
    return fingerprints.of(
        fingerprints.canonical_form(fields, exclude),
        fingerprints.canonical_records(uploads, exclude),
    ).canonical


class _UploadHasher(FileUploadHandler):
    """Keeps the records of the uploads and none of their content."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[tuple[bytes, ...]] = []

    def new_file(self, *args: Any, **kwargs: Any) -> None:
        super().new_file(*args, **kwargs)
        self.hash = hashlib.sha256()

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        self.hash.update(raw_data)

    def file_complete(self, file_size: int) -> None:
        # UploadedFile shortens the name as it does for request.FILES.
        file = UploadedFile(name=self.file_name, content_type=self.content_type)
        self.uploads.append(_upload(self.field_name or "", file, self.hash.digest()))


def _uploads(files: Any) -> Iterator[tuple[bytes, ...]]:
    for field, values in files.lists():
        for file in values:
            yield _upload(field, file, _file_hash(file))


def _upload(field: str, file: Any, content: bytes) -> tuple[bytes, ...]:
    return (*map(_utf8, (field, file.name or "", file.content_type or "")), content)


def _file_hash(file: Any) -> bytes:
    try:
        if not file.seekable():
            raise OSError
        digest = _sha256(file.chunks())
        file.seek(0)
    except (AttributeError, OSError, ValueError):
        # An upload handler sent it elsewhere: what is left is its size.
        return b"size:%d" % (file.size or 0)
    return digest


def _unknown(value: Any) -> bytes | str:
    return _file_hash(value) if hasattr(value, "chunks") else repr(value)


def _encoded(data: Any) -> Iterator[tuple[bytes, bytes]]:
    for name, values in data.lists() if data else ():
        for value in values:
            yield _utf8(name), _utf8(value)


def _pairs(raw: bytes) -> list[tuple[bytes, bytes]]:
    # latin-1 keeps every byte apart; utf-8 with replacement would make different bodies equal.
    pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]


def _sha256(chunks: Iterator[bytes]) -> bytes:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


# Requests


def _is_drf(request: Any) -> bool:
    return hasattr(request, "_request") and hasattr(request, "parser_context")


def _django_request(request: Any) -> Any:
    return request._request if _is_drf(request) else request


def _is_json(media_type: str | None) -> bool:
    return media_type == "application/json" or (media_type or "").endswith("+json")


def _version(request: Any) -> str:
    """The API version the client asked for; the server's default may change between two retries."""
    version = getattr(request, "version", None) if _is_drf(request) else None
    default = getattr(getattr(request, "versioning_scheme", None), "default_version", None)
    return "" if version is None or version == default else str(version)


def _content_length(http: HttpRequest) -> int:
    try:
        return int(http.META.get("CONTENT_LENGTH") or 0)
    except ValueError:
        return 0


def _rewindable(http: Any) -> IO[bytes] | None:
    if hasattr(http, "_body"):
        return BytesIO(http._body)
    stream = getattr(http, "_stream", None)
    if stream is None:
        return BytesIO()
    if getattr(stream, "closed", False) or not getattr(stream, "seekable", bool)():
        return None
    return stream


@contextmanager
def _from_start(stream: IO[bytes]) -> Iterator[None]:
    position = stream.tell()
    stream.seek(0)
    try:
        yield
    finally:
        stream.seek(position)


def _wsgi_bytes(text: str) -> bytes:
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:  # ASGI decodes as UTF-8
        return text.encode()


def _utf8(text: str) -> bytes:
    return str(text).encode("utf-8", "surrogatepass")
