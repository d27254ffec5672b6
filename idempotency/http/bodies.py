"""Request bodies: read without using them up, and reduced to what is compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from tempfile import TemporaryFile
from typing import IO, Any
from urllib.parse import parse_qsl

from django.conf import settings
from django.core.exceptions import BadRequest
from django.core.files.uploadedfile import UploadedFile
from django.core.files.uploadhandler import FileUploadHandler
from django.http import HttpRequest, UnreadablePostError
from django.http.multipartparser import MultiPartParser, MultiPartParserError

from idempotency import fingerprints
from idempotency.exceptions import ConfigurationError

#: Larger JSON and form bodies are compared byte for byte. Bytes.
CANONICAL_LIMIT = 1024 * 1024

_CHUNK = 64 * 1024
_MULTIPART = "multipart/form-data"
_FORM = "application/x-www-form-urlencoded"
#: A fresh one may come with every rendering of the same form.
_NEVER_COMPARED = frozenset({"csrfmiddlewaretoken"})

Parts = tuple[bytes | str, ...]
Record = tuple[bytes, ...]


def is_drf(request: Any) -> bool:
    """Whether this is Django REST framework's wrapper; known by its shape, never imported."""
    return hasattr(request, "_request") and hasattr(request, "parser_context")


def django_request(request: Any) -> HttpRequest:
    """The Django request in a DRF request, or the request itself."""
    http: HttpRequest = request._request if is_drf(request) else request
    return http


def is_json(media_type: str | None) -> bool:
    """Whether a media type without parameters is JSON (RFC 8259, RFC 6839)."""
    return media_type == "application/json" or (media_type or "").endswith("+json")


def url_pairs(raw: bytes) -> list[tuple[bytes, bytes]]:
    """Names and values of a query string or an urlencoded form, as bytes.

    Bytes, because decoding with replacement would make different invalid requests equal.
    """
    pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]


def spool(request: Any) -> None:
    """Make the body readable more than once, whatever it is, in bounded memory.

    The body moves to a temporary file (in memory while it is small) that becomes the request's
    stream, unread as before: `request.body`, `request.POST`, upload handlers and DRF's parsers work
    on it with their own limits. Nothing happens if the stream can be rewound already, as under
    ASGI, or is used up. Raises UnreadablePostError if the client went away.
    """
    http: Any = django_request(request)
    stream = _unread(http)
    if stream is not None and not _seekable(stream):
        http._stream = _spooled(http, stream)


def spool_when_read(request: Any) -> None:
    """`spool` when somebody reads the body; a request that is refused before costs no room."""
    http: Any = django_request(request)
    if _unread(http) is not None:
        http._stream = _Unread(http)


class _Unread:
    """A request's stream that is spooled, and replaced by its file, at the first touch."""

    def __init__(self, http: Any) -> None:
        self._http, self._stream = http, http._stream

    def __getattr__(self, name: str) -> Any:
        http = self._http
        if http._stream is self:
            seekable = _seekable(self._stream)
            http._stream = self._stream if seekable else _spooled(http, self._stream)
        return getattr(http._stream, name)


def _unread(http: Any) -> Any:
    """The request's stream if nobody has read it, else None."""
    is_read = hasattr(http, "_body") or getattr(http, "_read_started", False)
    return None if is_read else getattr(http, "_stream", None)


def _spooled(http: Any, stream: Any) -> IO[bytes]:
    buffer: IO[bytes] = BytesIO()
    try:
        while chunk := stream.read(_CHUNK):
            buffer.write(chunk)
            if isinstance(buffer, BytesIO) and buffer.tell() > settings.FILE_UPLOAD_MAX_MEMORY_SIZE:
                memory = buffer
                buffer = TemporaryFile(dir=settings.FILE_UPLOAD_TEMP_DIR)  # noqa: SIM115
                buffer.write(memory.getbuffer())
    except OSError as error:
        buffer.close()
        raise UnreadablePostError(*error.args) from error
    except BaseException:
        buffer.close()
        raise
    if not isinstance(buffer, BytesIO):
        _close_with(http, buffer)
    buffer.seek(0)
    return buffer


def canonical_body(request: Any, exclude: frozenset[str]) -> Parts:
    """The kind of the body and its canonical bytes or hash, read from a stream that is rewound.

    JSON and forms up to 1 MiB and multipart bodies of any size are compared by content without the
    fields of `exclude`; everything else byte for byte. A body that somebody parsed before it could
    be spooled is compared as parsed. Raises what Django raises for malformed or too big forms.
    """
    http: Any = django_request(request)
    media_type = http.content_type or ""
    spool(http)
    stream = _rewindable(http)
    if stream is None:
        return _parsed(request, http, media_type, exclude)
    if media_type == _MULTIPART:
        try:
            with _from_start(stream):
                return "multipart", _multipart(http, stream, exclude)
        except MultiPartParserError:
            if not is_drf(request):
                raise
            # DRF has its own answer to a malformed form; a parser of the project's may take it.
            request.data  # noqa: B018
    elif media_type == _FORM or is_json(media_type):
        with _from_start(stream):
            raw = stream.read(CANONICAL_LIMIT + 1)
        if len(raw) <= CANONICAL_LIMIT:
            if media_type == _FORM:
                return "form", _form(url_pairs(raw), exclude)
            canonical = fingerprints.canonical_json(raw, exclude)
            if canonical is not None:
                return "json", canonical
    with _from_start(stream):
        return "bytes", _sha256(iter(lambda: stream.read(_CHUNK), b""))


def _parsed(request: Any, http: Any, media_type: str, exclude: frozenset[str]) -> Parts:
    """The body as left by whoever used up the stream: POST and FILES, else DRF's data."""
    post, files = http.__dict__.get("_post"), http.__dict__.get("_files")
    if media_type == _FORM and post:
        return "form", _form(_pairs(post), exclude)
    if media_type == _MULTIPART and (post or files):
        return "multipart", _records(_pairs(post), _uploads(files), exclude)
    if is_drf(request):
        return "data", fingerprints.canonical_value(request.data, exclude, _describe)
    # Django leaves POST and FILES empty after somebody else read the stream. Comparing "empty"
    # would replay one upload's response to another.
    advice = (
        "The request body was used up before it could be compared. Call "
        "idempotency.http.requests.spool(request) before reading it, or set Policy.fingerprint."
    )
    if media_type in (_FORM, _MULTIPART):
        raise BadRequest(advice)
    raise ConfigurationError(advice)


def _multipart(http: HttpRequest, stream: Any, exclude: frozenset[str]) -> bytes:
    # Not through request.POST: the view may still want to set its own upload handlers.
    size = stream.seek(0, 2)
    stream.seek(0)
    hasher = _UploadHasher()
    meta = {"CONTENT_TYPE": http.META.get("CONTENT_TYPE", ""), "CONTENT_LENGTH": size}
    post, _ = MultiPartParser(meta, stream, [hasher], http.encoding).parse()
    return _records(_pairs(post), hasher.uploads, exclude)


class _UploadHasher(FileUploadHandler):
    """Keeps the records of the uploads and none of their content."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[Record] = []

    def new_file(self, *args: Any, **kwargs: Any) -> None:
        super().new_file(*args, **kwargs)
        self.sha256 = hashlib.sha256()

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        self.sha256.update(raw_data)

    def file_complete(self, file_size: int) -> None:
        # UploadedFile shortens the name as it does in request.FILES.
        file = UploadedFile(name=self.file_name, content_type=self.content_type)
        self.uploads.append(_upload(self.field_name, file, self.sha256.digest()))


def _form(pairs: Iterable[tuple[bytes, bytes]], exclude: frozenset[str]) -> bytes:
    return fingerprints.canonical_form(pairs, exclude | _NEVER_COMPARED)


def _records(
    pairs: Iterable[tuple[bytes, bytes]], uploads: Iterable[Record], exclude: frozenset[str]
) -> bytes:
    return fingerprints.of(
        _form(pairs, exclude), fingerprints.canonical_records(uploads, exclude)
    ).canonical


def _pairs(data: Any) -> Iterator[tuple[bytes, bytes]]:
    for name, values in data.lists() if data else ():
        for value in values:
            yield _utf8(name), _utf8(value)


def _uploads(files: Any) -> Iterator[Record]:
    for field, values in files.lists() if files else ():
        for file in values:
            yield _upload(field, file, _file_hash(file))


def _upload(field: str | None, file: Any, content: bytes) -> Record:
    return (*map(_utf8, (field or "", file.name or "", file.content_type or "")), content)


def _file_hash(file: Any) -> bytes:
    """The hash of an upload, which is rewound; its size if its upload handler sent it elsewhere."""
    try:
        file.seek(0)
        digest = _sha256(file.chunks())
        file.seek(0)
    except (AttributeError, OSError, ValueError):
        return b"size:%d" % (file.size or 0)
    return digest


def _describe(value: Any) -> str:
    return _file_hash(value).hex() if hasattr(value, "chunks") else repr(value)


def _sha256(chunks: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


def _utf8(text: object) -> bytes:
    return str(text).encode("utf-8", "surrogatepass")


def _seekable(stream: Any) -> bool:
    return not getattr(stream, "closed", False) and getattr(stream, "seekable", bool)()


def _rewindable(http: Any) -> IO[bytes] | None:
    if hasattr(http, "_body"):
        return BytesIO(http._body)
    stream = getattr(http, "_stream", None)
    if stream is None:
        return BytesIO()
    return stream if _seekable(stream) else None


@contextmanager
def _from_start(stream: IO[bytes]) -> Iterator[None]:
    position = stream.tell()
    stream.seek(0)
    try:
        yield
    finally:
        stream.seek(position)


def _close_with(http: Any, buffer: IO[bytes]) -> None:
    """Delete the file with the response, not at some later garbage collection."""
    close = http.close

    def close_both() -> None:
        close()
        buffer.close()

    http.close = close_both
