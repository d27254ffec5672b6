"""Fingerprints: what is equal, what is not, and how digests survive rotation."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import Group, User
from django.db.models import TextChoices
from django.forms import modelform_factory
from django.utils.translation import gettext_lazy
from hypothesis import example, given
from hypothesis import strategies as st

from idempotency import fingerprints
from idempotency.exceptions import ConfigurationError
from idempotency.fingerprints import Fingerprint, canonical_json

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


# Digests


def test_digests_are_versioned_keyed_and_short_enough_to_store() -> None:
    """RULES 34, 35."""
    digest = fingerprints.of("a").digest()
    assert re.fullmatch(r"1:[0-9a-f]{8}:[0-9a-f]{64}", digest)
    assert len(digest) <= 80


def test_the_digest_depends_on_the_secret(settings: Any) -> None:
    """RULES 34: a stored digest must not be a dictionary of phone numbers."""
    settings.SECRET_KEY = "one"
    one = fingerprints.of("a").digest()
    settings.SECRET_KEY = "two"
    assert fingerprints.of("a").digest().rpartition(":")[2] != one.rpartition(":")[2]


@given(st.binary(), st.binary())
@example(b"", b"\x00")
def test_a_stored_digest_matches_the_same_bytes_only(data: bytes, other: bytes) -> None:
    stored = Fingerprint(data).digest()
    assert Fingerprint(other).matches(stored) is (data == other)


def test_digests_of_rotated_secrets_still_compare(settings: Any) -> None:
    """RULES 35: a deploy must not turn live retries into 422."""
    settings.SECRET_KEY = "old"
    stored = fingerprints.of("a").digest()
    settings.SECRET_KEY = "new"
    settings.SECRET_KEY_FALLBACKS = ["older", "old"]
    assert fingerprints.of("a").matches(stored)
    assert not fingerprints.of("b").matches(stored)
    assert fingerprints.of("a").digest() != stored
    settings.SECRET_KEY_FALLBACKS = []
    assert not fingerprints.of("a").matches(stored)


def test_own_secrets_replace_the_secret_key(settings: Any) -> None:
    settings.IDEMPOTENCY = {"FINGERPRINT_SECRETS": ["old"]}
    stored = fingerprints.of("a").digest()
    settings.IDEMPOTENCY = {"FINGERPRINT_SECRETS": [b"new", "old"]}
    settings.SECRET_KEY = "another"
    assert fingerprints.of("a").matches(stored)
    assert fingerprints.of("a").matches(fingerprints.of("a").digest())


def test_one_secret_instead_of_a_list_of_secrets_is_refused(settings: Any) -> None:
    """Otherwise each of its characters would be a secret."""
    settings.IDEMPOTENCY = {"FINGERPRINT_SECRETS": "secret"}
    with pytest.raises(ConfigurationError):
        fingerprints.of("a").digest()


@pytest.mark.parametrize(
    "change", ["2{}", "{}0", "{}\n", " {}", "x", "", "1:", "1:00000000:", ":::"]
)
def test_what_this_version_did_not_write_is_no_match(change: str) -> None:
    """RULES 35: an unknown version or key id is a difference, not an error."""
    digest = fingerprints.of("a").digest()
    assert not fingerprints.of("a").matches(change.format(digest))
    assert not fingerprints.of("a").matches(digest.replace("1:", "2:", 1))


def test_the_canonical_bytes_of_version_1_stay_what_they_are() -> None:
    """RULES 35: change VERSION together with any of these."""
    assert fingerprints.of("a", b"bc").canonical == b"1:a,2:bc,"
    assert (
        canonical_json(b'{"b": [1.0, "\xc3\xa9"], "a": null}') == b'{"a":null,"b":[1.0,"\\u00e9"]}'
    )
    pairs = [(b"b", b"1"), (b"a", b"2"), (b"b", b"0")]
    assert fingerprints.canonical_form(pairs) == b"8:1:a,1:2,,8:1:b,1:1,,8:1:b,1:0,,"
    value = {"d": Decimal("1.50"), "u": UUID(int=1), "t": (1, True)}
    assert fingerprints.canonical_value(value) == (
        b'{"d":decimal"1.50","t":[1,true],"u":uuid"00000000-0000-0000-0000-000000000001"}'
    )


parts = st.lists(st.binary(max_size=4) | st.text(st.sampled_from("1:,a"), max_size=4), max_size=4)


@given(parts, parts)
@example(["a", "b"], ["ab"])
@example(["1:a,"], ["a"])
@example([], [""])
def test_where_one_part_ends_counts(some: list[bytes | str], others: list[bytes | str]) -> None:
    def plain(items: list[bytes | str]) -> list[bytes]:
        return [item.encode() if isinstance(item, str) else item for item in items]

    same = plain(some) == plain(others)
    assert (fingerprints.of(*some) == fingerprints.of(*others)) is same


# JSON


@given(json_values, st.integers(0, 4), st.booleans(), st.randoms())
def test_member_order_whitespace_and_escapes_do_not_count(
    value: Any, indent: int, ascii_only: bool, random: Any
) -> None:
    """BUGS E01, RULES 30."""

    def shuffled(item: Any) -> Any:
        if isinstance(item, list):
            return [shuffled(i) for i in item]
        if isinstance(item, dict):
            members = [(k, shuffled(v)) for k, v in item.items()]
            random.shuffle(members)
            return OrderedDict(members)
        return item

    sent = json.dumps(value).encode()
    again = json.dumps(shuffled(value), indent=indent, ensure_ascii=ascii_only)
    assert canonical_json(sent) is not None
    assert canonical_json(sent) == canonical_json(again.encode())


@given(json_values, json_values)
@example(1, 1.0)
@example(1, True)
@example(0, False)
@example("1", 1)
@example(None, "null")
@example([], {})
@example([1, [2]], [[1], 2])
@example({"a": {"b": 1}}, {"a": {}, "b": 1})
@example("é", "e\u0301")
@example(-0.0, 0.0)
def test_different_values_have_different_canonical_json(value: Any, other: Any) -> None:
    """RULES 30, BUGS E02, E12."""
    same = json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)
    canonical = [canonical_json(json.dumps(v).encode()) for v in (value, other)]
    assert (canonical[0] == canonical[1]) is same


@given(json_values)
def test_canonical_json_is_still_the_same_json(value: Any) -> None:
    canonical = canonical_json(json.dumps(value).encode())
    assert canonical is not None
    assert json.dumps(json.loads(canonical), sort_keys=True) == json.dumps(value, sort_keys=True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "1.0"),
        ("1.1", "1.1000000000000000001"),
        ("9999999999999567.11", "9999999999999567.77"),
        ("1e2", "100"),
        ("0", "-0"),
        ("1" * 5000, "1" * 4999 + "2"),
        ('"1"', "1"),
    ],
)
def test_numbers_are_compared_as_written(one: str, other: str) -> None:
    """RULES 30, PEER_DEFECTS: two amounts must not become one float."""
    first, second = (canonical_json(b'{"amount": %s}' % n.encode()) for n in (one, other))
    assert first is not None
    assert second is not None
    assert first != second


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"{} {}",
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b'{"a": 1, "\\u0061": 2}',
        b"NaN",
        b"[Infinity]",
        b"[-Infinity]",
        b"\xff",
        b"\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
        b"[" * 101 + b"]" * 101,
        b"[" * 200_000,
        b'{"a":' * 200_000,
    ],
)
def test_what_parsers_disagree_about_is_left_to_a_comparison_of_bytes(raw: bytes) -> None:
    """RULES 30: Python keeps the last of duplicate members silently."""
    assert canonical_json(raw) is None


def test_the_depth_limit_does_not_depend_on_the_interpreters_stack() -> None:
    deepest = b"[" * 100 + b"]" * 100
    assert canonical_json(deepest) == deepest


def test_lone_surrogates_are_kept_apart() -> None:
    first, second = canonical_json(b'"\\ud800"'), canonical_json(b'"\\ud801"')
    assert first is not None
    assert first != second


def test_excluded_members_may_differ_everywhere_on_their_path() -> None:
    """BUGS E05, E10; RULES 29."""
    exclude = frozenset({"sent_at", "meta.trace_id", "items.note"})

    def canonical(sent_at: int, trace: str, note: str, amount: int) -> bytes | None:
        body = {
            "sent_at": sent_at,
            "meta": {"trace_id": trace, "sent_at": "kept"},
            "items": [{"note": note, "amount": amount}, [{"note": note}]],
        }
        return canonical_json(json.dumps(body).encode(), exclude)

    assert canonical(1, "a", "x", 5) == canonical(2, "b", "y", 5)
    assert canonical(1, "a", "x", 5) != canonical(1, "a", "x", 6)
    assert canonical(1, "a", "x", 5) == (b'{"items":[{"amount":5},[{}]],"meta":{"sent_at":"kept"}}')


def test_an_excluded_name_elsewhere_still_counts() -> None:
    exclude = frozenset({"sent_at"})
    assert canonical_json(b'{"a": {"sent_at": 1}}', exclude) == b'{"a":{"sent_at":1}}'


# Forms


def test_the_order_of_fields_does_not_count_and_the_order_of_values_does() -> None:
    """RULES 31."""
    form = fingerprints.canonical_form
    assert form([(b"a", b"1"), (b"b", b"2")]) == form([(b"b", b"2"), (b"a", b"1")])
    assert form([(b"a", b"1"), (b"a", b"2")]) != form([(b"a", b"2"), (b"a", b"1")])
    assert form([(b"a", b"1"), (b"b", b"2")], {"b"}) == form([(b"a", b"1")])


pairs = st.lists(st.tuples(st.binary(max_size=2), st.binary(max_size=2)), max_size=4)


@given(pairs, pairs)
@example([(b"a", b"b")], [(b"ab", b"")])
@example([(b"a", b"")], [])
def test_forms_are_equal_exactly_when_each_field_has_the_same_values(
    some: Any, others: Any
) -> None:
    def by_name(form: Any) -> dict[bytes, list[bytes]]:
        fields: dict[bytes, list[bytes]] = {}
        for name, value in form:
            fields.setdefault(name, []).append(value)
        return fields

    same = by_name(some) == by_name(others)
    assert (fingerprints.canonical_form(some) == fingerprints.canonical_form(others)) is same
    assert (fingerprints.canonical_query(some) == fingerprints.canonical_query(others)) is same


# Values


class Colour(TextChoices):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Odd(Enum):
    THING = object()


utc_noon = datetime(2026, 1, 2, 12, tzinfo=UTC)

DIFFERENT = [
    None,
    True,
    False,
    0,
    1,
    10**6000,
    10**6000 + 1,
    1.0,
    0.1,
    "1",
    "null",
    "1.0",
    b"1",
    "",
    b"",
    Decimal("1"),
    Decimal("1.0"),
    UUID(int=1),
    str(UUID(int=1)),
    date(2026, 1, 2),
    datetime(2026, 1, 2),  # noqa: DTZ001
    utc_noon,
    datetime(2026, 1, 2, 12),  # noqa: DTZ001
    "2026-01-02",
    time(12),
    timedelta(seconds=1),
    timedelta(days=1),
    [],
    {},
    set(),
    [1],
    {1},
    {1: None},
    {"1": None},
    [[1], 2],
    [1, [2]],
    User(pk=1),
    User(pk=2),
    Group(pk=1),
    "auth.user[1]",
    'decimal"1"',
]


def test_values_of_other_types_are_never_equal() -> None:
    """No two of the list have one fingerprint."""
    seen: dict[bytes, Any] = {}
    for value in DIFFERENT:
        canonical = fingerprints.of_value(value).canonical
        assert canonical not in seen, (value, seen.get(canonical))
        seen[canonical] = value


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ((1, 2), [1, 2]),
        ({"a": 1, "b": 2}, OrderedDict(b=2, a=1)),
        ({3, 1, 2}, frozenset({2, 3, 1})),
        (Colour.RED, "red"),
        (Level.LOW, 1),
        (b"x", bytearray(b"x")),
        (utc_noon, utc_noon.astimezone(timezone(timedelta(hours=5)))),
        (User(pk=1, username="a"), User(pk=1, username="b")),
    ],
)
def test_values_that_mean_the_same_are_equal(value: Any, other: Any) -> None:
    assert fingerprints.of_value(value) == fingerprints.of_value(other)


@given(st.lists(st.tuples(st.text(max_size=2), st.integers()), max_size=5))
def test_the_order_of_a_dict_does_not_count(items: list[tuple[str, int]]) -> None:
    value = dict(items)
    backwards = dict(reversed(value.items()))
    assert fingerprints.of_value(value) == fingerprints.of_value(backwards)


def test_excluded_arguments_may_differ() -> None:
    first = fingerprints.of_value({"args": {"at": 1, "id": 5}}, {"args.at"})
    second = fingerprints.of_value({"args": {"at": 2, "id": 5}}, {"args.at"})
    assert first == second


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Odd.THING,
        float("nan"),
        float("inf"),
        User(),
        User,
        modelform_factory(User, fields=["username"])(),
        lambda: 1,
        gettext_lazy("x"),
        1j,
    ],
)
def test_a_value_without_a_stable_form_is_an_error_that_says_what_to_do(value: Any) -> None:
    """An address in memory would make every retry a different request."""
    with pytest.raises(TypeError, match=r"has no fingerprint|have no fingerprint") as error:
        fingerprints.of_value({"argument": [value]})
    assert "fingerprint`" in str(error.value)


def test_a_value_that_contains_itself_is_an_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="nested"):
        fingerprints.of_value(value)
