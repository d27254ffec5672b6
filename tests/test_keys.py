"""Keys: the header grammar, the alphabet, and the identity derived from scope and key."""

from __future__ import annotations

import re
import uuid

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from idempotency import keys
from idempotency.exceptions import InvalidKey

visible = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=255)
bare = visible.filter(lambda key: not set(key) & set('",\\'))


def quote(key: str) -> str:
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


@given(visible)
def test_every_key_can_be_sent_as_a_quoted_string(key: str) -> None:
    """RULES 11."""
    assert keys.parse(quote(key)) == key


@given(bare)
def test_quoted_and_bare_form_name_the_same_key(key: str) -> None:
    """BUGS J08."""
    assert keys.parse(key) == keys.parse(quote(key)) == key


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("8e03978e-40d5-43e8-bc93-6894a57f9324", "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        (' "abc" ', "abc"),
        ('"a,b"', "a,b"),
        (r'"a\"b\\c"', r"a\"b\c".replace(r"\"", '"')),
        ("'foo'", "'foo'"),
        ("a;b=c", "a;b=c"),
        ('"k";a=1', "k"),
        ('"k";a', "k"),
        ('"k"; a; *b.c-d_e=?0', "k"),
        ('"k";a=1.5;b=-15;c=@1659578233;d=tok/en:x;e=:aGk=:;f=%"f%c3%bc";g="q\\"q"', "k"),
        ("x" * 255, "x" * 255),
        ('"' + '\\"' * 255 + '"', '"' * 255),
    ],
)
def test_well_formed_header_values(value: str, key: str) -> None:
    """RULES 11, RFC 9651 sections 3.1.2 and 3.3.3."""
    assert keys.parse(value) == key


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        '""',
        '"',
        '"abc',
        'abc"',
        r'"a\x"',
        r'"a\"',
        '"a\\',
        '"é"',
        "é",
        "Ã©",
        '"a","b"',
        '"a", "b"',
        "a,b",
        "a, b",
        ",",
        '"a b"',
        "a b",
        '"a\tb"',
        "a\tb",
        "a\r\nX-Injected: 1",
        '"a\n"',
        "a\n",
        "a\x00b",
        '"\x00"',
        "\x7f",
        "a\\b",
        'a"b',
        '"a"b',
        '"a" ;b',
        '"a";',
        '"a";B=1',
        '"a";1=2',
        '"a";b=',
        '"a";b=1.',
        '"a";b=1.2345',
        '"a";b=1234567890123456',
        '"a";b=1234567890123.1',
        '"a";b="c',
        '"a";b=?2',
        '"a";b=@1.5',
        '"a";b=%"%C3%BC"',
        '"a";b=:a b:',
        "x" * 256,
        '"' + "x" * 256 + '"',
        "\uff11\uff12",  # full-width digits are digits to str.isdigit, not to a header
    ],
)
def test_malformed_header_values_are_refused_and_not_repeated(value: str) -> None:
    """RULES 12-15, BUGS J10, J15: never an error of the server, never the key in the message."""
    with pytest.raises(InvalidKey) as refused:
        keys.parse(value)
    assert refused.value.detail
    assert len(value.strip()) < 4 or value not in refused.value.detail


def test_two_header_lines_are_named_as_the_likely_mistake() -> None:
    """BUGS J10: they arrive joined by a comma."""
    with pytest.raises(InvalidKey, match="one header line"):
        keys.parse("first,second")


def test_a_key_of_ten_thousand_characters_is_refused() -> None:
    """BUGS, likely faults: not left to the database."""
    for value in ("k" * 10_000, quote("k" * 10_000), '"' * 10_000, '"k"' + ";a=1" * 2_000 + "!"):
        with pytest.raises(InvalidKey):
            keys.parse(value)


@given(st.text(st.sampled_from('"\\a1 ;=.,:?@-*%\t'), max_size=12))
@example('"a";*=a')
@example('"a";a=%"%61"')
def test_quoted_values_are_accepted_exactly_when_the_rfc_algorithm_accepts_them(value: str) -> None:
    """RFC 9651 section 4.2, step by step, as the oracle."""
    value = '"' + value
    try:
        expected: str | None = rfc_string_item(value)
    except ValueError:
        expected = None
    if expected is None or not re.fullmatch(r"[\x21-\x7e]{1,255}", expected):
        with pytest.raises(InvalidKey):
            keys.parse(value)
    else:
        assert keys.parse(value) == expected


@given(st.text(max_size=300))
def test_any_text_is_a_key_or_a_refusal(value: str) -> None:
    """RULES 12: nothing else can come out, whatever the client sends."""
    try:
        key = keys.parse(value)
    except InvalidKey:
        return
    assert re.fullmatch(r"[\x21-\x7e]{1,255}", key)


@pytest.mark.parametrize("key", [None, 5, b"abc", ["abc"], "", " ", "a b", "é", "a\n", "x" * 256])
def test_keys_from_other_carriers_obey_the_same_alphabet(key: object) -> None:
    """RULES 14-15."""
    with pytest.raises(InvalidKey):
        keys.validate(key)


@pytest.mark.parametrize("key", ["a", 'with"quote', "a,b", "x" * 255])
def test_keys_from_other_carriers_need_no_quoting(key: str) -> None:
    assert keys.validate(key) == key


def test_keys_are_case_sensitive() -> None:
    """RULES 16."""
    assert keys.operation_id(("user:1",), "abc") != keys.operation_id(("user:1",), "ABC")


scopes = st.lists(st.text(max_size=4), min_size=1, max_size=3).map(tuple)


@given(scopes, visible, scopes, visible)
@example(("a",), "bc", ("ab",), "c")
@example(("a", "b"), "c", ("a",), "b,1:c")
@example(("a", ""), "b", ("a",), "b")
@example(("1:a",), "b", ("a",), "b")
def test_operations_are_the_same_only_for_the_same_scope_and_key(
    scope: tuple[str, ...], key: str, other_scope: tuple[str, ...], other_key: str
) -> None:
    """RULES 24, BUGS D01-D04."""
    same = (scope, key) == (other_scope, other_key)
    assert (keys.operation_id(scope, key) == keys.operation_id(other_scope, other_key)) is same


def test_operation_ids_are_stable_uuids_of_version_8() -> None:
    """The value is stored in databases: it must never change between releases."""
    operation_id = keys.operation_id(("tenant:acme", "user:42"), "order-1")
    assert operation_id == uuid.UUID("be8da128-2a98-826b-bcf9-dcae328b40f7")
    assert operation_id.version == 8
    assert operation_id.variant == uuid.RFC_4122


def test_operation_ids_are_values_that_every_uuid_column_accepts() -> None:
    """MariaDB's UUID type refuses version 8 with 0x80 in the variant's byte: one key in 64."""
    ids = [keys.operation_id(("user:1",), str(number)) for number in range(1000)]
    assert all(value.bytes[8] != 0x80 for value in ids)
    assert {value.variant for value in ids} == {uuid.RFC_4122}


def test_a_scope_with_lone_surrogates_still_names_an_operation() -> None:
    assert keys.operation_id(("\ud800",), "k") != keys.operation_id(("\ud801",), "k")


@given(st.text(max_size=20), st.text(max_size=20))
def test_downstream_keys_differ_by_name(name: str, other: str) -> None:
    """BUGS T09, T10."""
    operation_id = keys.operation_id(("user:1",), "k")
    assert (keys.derive(operation_id, name) == keys.derive(operation_id, other)) is (name == other)


def test_downstream_keys_are_stable_and_fit_every_provider() -> None:
    """36 characters: PayPal allows 38, Adyen 64. Stored by providers, so pinned."""
    operation_id = keys.operation_id(("tenant:acme", "user:42"), "order-1")
    derived = keys.derive(operation_id, "charge")
    assert derived == "fde370e7-ebb9-86bc-b21a-43fae9c9a078"
    assert str(uuid.UUID(derived)) == derived
    assert derived != keys.derive(keys.operation_id(("user:42",), "order-1"), "charge")
    assert derived != str(operation_id)


# The parsing algorithm of RFC 9651 section 4.2, for an Item that is a String.


def rfc_string_item(text: str) -> str:
    text = text.lstrip(" ")
    result, text = rfc_string(text)
    text = rfc_parameters(text).lstrip(" ")
    if text:
        raise ValueError("trailing characters")
    return result


def rfc_string(text: str) -> tuple[str, str]:
    if not text.startswith('"'):
        raise ValueError("not a string")
    out, text = "", text[1:]
    while text:
        character, text = text[0], text[1:]
        if character == "\\":
            if not text or text[0] not in '"\\':
                raise ValueError("escape")
            out, text = out + text[0], text[1:]
        elif character == '"':
            return out, text
        elif not " " <= character <= "~":
            raise ValueError("character")
        else:
            out += character
    raise ValueError("no closing quote")


def rfc_parameters(text: str) -> str:
    while text.startswith(";"):
        text = text[1:].lstrip(" ")
        text = take(text, "abcdefghijklmnopqrstuvwxyz*", one=True)
        text = take(text, "abcdefghijklmnopqrstuvwxyz0123456789_-.*")
        if text.startswith("="):
            text = rfc_bare_item(text[1:])
    return text


def rfc_bare_item(text: str) -> str:
    first = text[:1]
    if first == '"':
        return rfc_string(text)[1]
    if first == "?" and text[1:2] in ("0", "1"):
        return text[2:]
    if first == ":":
        inside, closed, rest = text[1:].partition(":")
        if closed and re.fullmatch(r"[A-Za-z0-9+/=]*", inside):
            return rest
    elif first == "%":
        inside, closed, rest = text[1:].removeprefix('"').partition('"')
        is_display = re.fullmatch(r"(?:[ -$&-~]|%[0-9a-f]{2})*", inside)
        if text[1:2] == '"' and closed and is_display:
            return rest
    elif first == "@":
        return rfc_number(text[1:], integer=True)
    elif first == "-" or first.isdigit():
        return rfc_number(text)
    elif first == "*" or first.isalpha():
        token = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+-.^_`|~:/"
        return take(text, token)
    raise ValueError("bare item")


def rfc_number(text: str, integer: bool = False) -> str:
    text = text.removeprefix("-")
    rest = take(text, "0123456789")
    whole = len(text) - len(rest)
    if rest.startswith("."):
        after = take(rest[1:], "0123456789")
        if integer or whole > 12 or not 1 <= len(rest) - 1 - len(after) <= 3:
            raise ValueError("decimal")
        rest = after
    if not 1 <= whole <= 15:
        raise ValueError("number")
    return rest


def take(text: str, allowed: str, one: bool = False) -> str:
    rest = text[1:] if one and text[:1] in allowed else text.lstrip(allowed) if not one else text
    if one and (not text or rest == text):
        raise ValueError("expected one of " + allowed)
    return rest


@pytest.mark.parametrize(
    ("key", "seconds"),
    [
        ("017f22e2-79b0-7cc3-98c4-dc0c0c07398f", 1645557742.0),  # RFC 9562, appendix A.6
        ("017F22E2-79B0-7CC3-98C4-DC0C0C07398F", 1645557742.0),
        ("919108f7-52d1-4320-9bac-f847db4148a8", None),  # version 4
        ("017f22e279b07cc398c4dc0c0c07398f", None),  # not in the usual form: some other key
        ("order-17", None),
    ],
)
def test_a_uuidv7_key_says_when_it_was_made_and_no_other_key_does(key, seconds):
    assert keys.issued_at(key) == seconds
