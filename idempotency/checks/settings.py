"""The IDEMPOTENCY setting: names, values, and values that do not fit each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage
from django.db import connections
from django.urls import NoReverseMatch, reverse
from django.utils.module_loading import import_string

from .. import scopes
from ..conf import DEFAULTS, IMPORTED
from ..http.responses import NEVER_KEPT

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110 section 5.6.2
_CARRIER = re.compile(r"(header|json|form):.+")
_PREFIX = "IDEMPOTENCY_"

#: A hint for a value: (accepts it, what it should be).
Rule = tuple[Callable[[Any], bool], str]


def _is_seconds(least: float) -> Callable[[Any], bool]:
    def accepts(value: Any) -> bool:
        if isinstance(value, timedelta):
            return value >= timedelta(seconds=least)
        return isinstance(value, int | float) and not isinstance(value, bool) and value >= least

    return accepts


def _is_route(value: str) -> bool:
    try:
        reverse(value, args=["00000000-0000-8000-8000-000000000000"])
    except NoReverseMatch:
        return False
    return True


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _are_strings(value: Any) -> bool:
    return (
        isinstance(value, Collection)
        and not isinstance(value, str | bytes)
        and all(isinstance(item, str) and item for item in value)
    )


def _are_secrets(value: Any) -> bool:
    return (
        isinstance(value, Collection)
        and not isinstance(value, str | bytes)
        and all(isinstance(item, str | bytes) and item for item in value)
    )


def _is_carrier(value: Any) -> bool:
    if value is None or callable(value):
        return True
    return isinstance(value, str) and (":" not in value or _CARRIER.fullmatch(value) is not None)


def _is_imported(value: Any) -> bool:
    return value is None or callable(value) or isinstance(value, str)


def _is_store(value: Any) -> bool:
    if callable(value) or isinstance(value, str):
        return True
    return isinstance(value, Collection) and all(_is_count(code) for code in value)


def _is_codec(value: Any) -> bool:
    return value is None or isinstance(value, str) or _has_codec_methods(value)


def _has_codec_methods(value: Any) -> bool:
    return callable(getattr(value, "encode", None)) and callable(getattr(value, "decode", None))


def _is_header(value: Any) -> bool:
    return isinstance(value, str) and _TOKEN.fullmatch(value) is not None


_DURATION = "seconds or a timedelta of at least {} s"
_CALLABLE = "a callable or its dotted path, or None"

RULES: dict[str, Rule] = {
    "METHODS": (_are_strings, "a collection of HTTP methods, such as ('POST', 'PATCH')"),
    "REQUIRED": (_is_bool, "True or False"),
    "KEY": (
        _is_carrier,
        "None, a callable or its dotted path, or 'header:NAME', 'json:FIELD' or 'form:FIELD'",
    ),
    "SCOPE": (
        lambda value: value is not None and _is_imported(value),
        "a callable or its dotted path",
    ),
    "FINGERPRINT": (_is_imported, _CALLABLE),
    "EXCLUDE_FIELDS": (_are_strings, "a collection of field names, such as ('sent_at',)"),
    "RETENTION": (_is_seconds(1), _DURATION.format(1)),
    "TOMBSTONE": (_is_seconds(0), _DURATION.format(0)),
    "WAIT": (_is_seconds(0), _DURATION.format(0)),
    "STORE": (_is_store, "a callable, its dotted path, or a collection of status codes"),
    "STEPWISE": (_is_bool, "True or False"),
    "LEASE": (_is_seconds(1), _DURATION.format(1)),
    "ON_INTERRUPTED": (lambda value: value in ("rerun", "reconcile"), "'rerun' or 'reconcile'"),
    "AUTHORIZE_REPLAY": (_is_imported, _CALLABLE),
    "USING": (
        lambda value: isinstance(value, str) and value in connections,
        "an alias of DATABASES",
    ),
    "MAX_RESPONSE_BYTES": (_is_count, "a number of bytes"),
    "CODEC": (_is_codec, "an object with encode() and decode(), its dotted path, or None"),
    "KEY_HEADER": (_is_header, "the name of a header, such as 'Idempotency-Key'"),
    "REPLAY_HEADERS": (_are_strings, "a collection of header names"),
    "FINGERPRINT_SECRETS": (_are_secrets, "a collection of non-empty strings, the newest first"),
    "PROBLEM_TYPE": (
        lambda value: isinstance(value, str) and value != "",
        "the start of a URI, to which the code of a problem is appended",
    ),
    "PROBLEM_RENDERER": (_is_imported, _CALLABLE),
    "DOCUMENTATION_URL": (
        lambda value: isinstance(value, str) and re.search(r"[\s<>\"]", value) is None,
        "a URL, or '' for none",
    ),
    "STATUS_ROUTE": (
        lambda value: value == "" or (isinstance(value, str) and _is_route(value)),
        "the name of a URL pattern that takes an operation's id, or '' for none",
    ),
    "RETRY_AFTER": (_is_count, "a whole number of seconds"),
    "REFUSE_OLD_KEYS": (_is_bool, "True or False"),
    "EVENTS_PER_OPERATION": (_is_count, "a number of events; 0 writes none"),
    "RECONCILE_MAX_AGE": (_is_seconds(1), _DURATION.format(1)),
    "OUTBOX_PUBLISHER": (
        lambda value: value is not None and _is_imported(value),
        "a callable or its dotted path",
    ),
    "OUTBOX_BATCH_SIZE": (lambda value: _is_count(value) and value > 0, "1 or more messages"),
    "OUTBOX_INTERVAL": (_is_seconds(0.01), _DURATION.format(0.01)),
    "OUTBOX_LEASE": (_is_seconds(1), _DURATION.format(1)),
    "OUTBOX_MAX_ATTEMPTS": (lambda value: _is_count(value) and value > 0, "1 or more attempts"),
    "OUTBOX_BACKOFF": (_is_seconds(0), _DURATION.format(0)),
    "OUTBOX_BACKOFF_MAX": (_is_seconds(0), _DURATION.format(0)),
    "OUTBOX_DEAD_HEAD": (lambda value: value in ("block", "skip"), "'block' or 'skip'"),
    "OUTBOX_RETENTION": (_is_seconds(0), _DURATION.format(0)),
    "OUTBOX_HANDLER_RETENTION": (_is_seconds(1), _DURATION.format(1)),
}


def check_settings(**kwargs: object) -> list[CheckMessage]:
    value = getattr(settings, "IDEMPOTENCY", None)
    messages = [*_misplaced()]
    if value is None:
        return messages
    if not isinstance(value, dict):
        return [
            *messages,
            checks.Error(
                f"IDEMPOTENCY is a {type(value).__name__}.",
                hint="Make it a dict, such as IDEMPOTENCY = {'RETENTION': 24 * 3600}.",
                id="idempotency.E001",
            ),
        ]
    valid = {name for name in value if name in DEFAULTS}
    messages += _unknown(value)
    for name in sorted(valid):
        problem = _wrong_value(name, value[name]) or _wrong_import(name, value[name])
        if problem is not None:
            messages.append(problem)
            valid.discard(name)
    return [*messages, *_unwise({name: value[name] for name in valid})]


def _misplaced() -> Iterator[CheckMessage]:
    for name in sorted(dir(settings)):
        if not name.startswith(_PREFIX):
            continue
        known = _close(name.removeprefix(_PREFIX))
        if known:
            yield checks.Error(
                f"The setting {name} is never read.",
                hint=f"Write IDEMPOTENCY = {{{known!r}: ...}} and remove {name}.",
                id="idempotency.E003",
            )


def _unknown(value: dict[Any, Any]) -> Iterator[CheckMessage]:
    for name in value:
        if name in DEFAULTS:
            continue
        known = _close(str(name).upper().removeprefix(_PREFIX))
        hint = f"Did you mean {known!r}?" if known else f"Known are {', '.join(sorted(DEFAULTS))}."
        yield checks.Error(
            f"IDEMPOTENCY has no setting {name!r}.",
            hint=f"{hint} Rename or remove it: it has no effect.",
            id="idempotency.E002",
        )


def _close(name: str) -> str:
    found = get_close_matches(name, DEFAULTS, n=1, cutoff=0.8)
    return found[0] if found else ""


def _wrong_value(name: str, value: Any) -> CheckMessage | None:
    rule = RULES.get(name)
    if rule is None or rule[0](value):
        return None
    shown = "a value" if "SECRET" in name else f"{value!r}"
    return checks.Error(
        f"IDEMPOTENCY[{name!r}] is {shown}, which is not valid.",
        hint=f"Set it to {rule[1]}.",
        id="idempotency.E004",
    )


def _wrong_import(name: str, path: Any) -> CheckMessage | None:
    if name not in {*IMPORTED, "OUTBOX_PUBLISHER"} or not isinstance(path, str) or ":" in path:
        return None
    try:
        found = import_string(path)
    except Exception as error:  # whatever the module raises when it is imported
        return checks.Error(
            f"IDEMPOTENCY[{name!r}] names {path!r}, which cannot be imported "
            f"({type(error).__name__}: {error}).",
            hint="Correct the dotted path, or the module it leads to.",
            id="idempotency.E005",
        )
    is_right = _has_codec_methods(found) if name == "CODEC" else callable(found)
    if name == "OUTBOX_PUBLISHER":
        is_right = is_right or callable(getattr(found, "publish", None))
    if is_right and not (name == "CODEC" and isinstance(found, type)):
        return None
    wanted = "an object with encode() and decode()" if name == "CODEC" else "a callable"
    return checks.Error(
        f"IDEMPOTENCY[{name!r}] names {path!r}, which is not {wanted}.",
        hint=f"Name {wanted}.",
        id="idempotency.E006",
    )


def _unwise(value: dict[str, Any]) -> Iterator[CheckMessage]:
    def seconds(name: str) -> float:
        found = value.get(name, DEFAULTS[name])
        return float(found.total_seconds() if isinstance(found, timedelta) else found)

    if seconds("RETENTION") < 600:
        yield checks.Warning(
            f"Outcomes are replayed for {seconds('RETENTION'):g} s only; "
            "a client that retries later does the work twice.",
            hint="Set IDEMPOTENCY['RETENTION'] to more than your clients' longest retry schedule; "
            "24 h is usual.",
            id="idempotency.W010",
        )
    if seconds("WAIT") > 25:
        yield checks.Warning(
            f"A duplicate may occupy a worker for {seconds('WAIT'):g} s while it waits.",
            hint="Keep IDEMPOTENCY['WAIT'] below the timeouts of your server, proxy and clients "
            "(25 s or less), and let clients come back after Retry-After.",
            id="idempotency.W011",
        )
    if seconds("LEASE") > seconds("RETENTION"):
        yield checks.Warning(
            "IDEMPOTENCY['LEASE'] is longer than IDEMPOTENCY['RETENTION']: a crashed stepwise "
            "operation blocks its key longer than a finished one.",
            hint="Make the lease a little longer than the longest step, such as 60 s.",
            id="idempotency.W012",
        )
    if value.get("SCOPE") in ("idempotency.scopes.anonymous", scopes.anonymous):
        yield checks.Warning(
            "By default everybody shares one key space: whoever guesses a key reads the response "
            "stored for it.",
            hint="Set scope=scopes.anonymous on single policies whose responses are public, and "
            "leave IDEMPOTENCY['SCOPE'] to the caller's identity.",
            id="idempotency.W013",
        )
    never = sorted({name.lower() for name in value.get("REPLAY_HEADERS", ())} & NEVER_KEPT)
    if never:
        yield checks.Warning(
            f"IDEMPOTENCY['REPLAY_HEADERS'] lists headers that are never stored: {', '.join(never)}.",
            hint="Remove them: on a replay they would be wrong or somebody else's.",
            id="idempotency.W014",
        )
    if "RETRY_AFTER" in value and value["RETRY_AFTER"] == 0:
        yield checks.Warning(
            "IDEMPOTENCY['RETRY_AFTER'] is 0: clients that obey it retry in a tight loop.",
            hint="Set it to 1 or more.",
            id="idempotency.W015",
        )
