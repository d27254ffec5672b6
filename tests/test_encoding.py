"""Stored results come back equal and of the same type, or are refused with the place named."""

import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import zoneinfo
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idempotency.encoding import dumps, loads


class Color(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    SMALL = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True)
class Money:
    amount: decimal.Decimal
    currency: str = "EUR"

    class Kind(enum.Enum):
        CASH = "cash"


@dataclasses.dataclass
class Basket:
    lines: list[Money]
    kind: Money.Kind
    total: int = dataclasses.field(init=False, default=7)


class Point(NamedTuple):
    x: int


@dataclasses.dataclass
class Grown:
    height: int

    def __post_init__(self) -> None:
        self.height += 1


@dataclasses.dataclass
class Doubled:
    single: dataclasses.InitVar[int]
    double: int = dataclasses.field(init=False, default=0)

    def __post_init__(self, single: int) -> None:
        self.double = 2 * single


Shadowed = enum.Enum("Shadowed", "A")
shadowed, Shadowed = Shadowed.A, enum.Enum("Shadowed", "A")  # type: ignore[misc]


offsets = st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)).map(
    lambda offset: dt.timezone(dt.timedelta(minutes=offset // dt.timedelta(minutes=1)))
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.dates()
    | st.times()
    | st.datetimes(timezones=st.none() | st.just(dt.UTC) | offsets | st.timezones())
    | st.timedeltas()
    | st.sampled_from([Color.RED, Size.SMALL, Money.Kind.CASH])
    | st.sampled_from([Right.READ, Right.READ | Right.WRITE, Right(0)])
    | st.builds(Money, st.decimals(allow_nan=False), st.text())
)
hashable = st.integers() | st.text() | st.uuids() | st.dates()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.just("$"), inner)
        | st.dictionaries(hashable, inner)
        | st.sets(hashable)
        | st.frozensets(hashable)
    ),
    max_leaves=12,
)


def types(value: Any) -> Any:
    """The value with the type of every part, so that 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return {(type(key), key): types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (type(value), [types(item) for item in value])
    if isinstance(value, set | frozenset):
        return (type(value), {(type(item), item) for item in value})
    offset = value.utcoffset() if isinstance(value, dt.datetime) else None
    return (type(value), value, offset, str(value))


@given(values)
def test_every_value_comes_back_equal_and_of_its_type(value: Any) -> None:
    text = dumps(value)
    json.loads(text)
    assert types(loads(text)) == types(value)
    assert types(loads(text.encode())) == types(value)


def test_what_equality_cannot_show() -> None:
    assert math.isnan(loads(dumps(math.nan)))
    assert loads(dumps(math.inf)) == math.inf
    assert str(loads(dumps(-0.0))) == "-0.0"
    assert str(loads(dumps(decimal.Decimal("1.10")))) == "1.10"
    basket = loads(dumps(Basket([Money(decimal.Decimal(1))], Money.Kind.CASH)))
    assert basket == Basket([Money(decimal.Decimal(1))], Money.Kind.CASH)
    assert type(basket.lines[0]) is Money


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (object(), "result is a builtins.object"),
        ({"order": [1, object()]}, "result['order'][1] is a"),
        (Money(object()), "result.amount is a"),  # type: ignore[arg-type]
        (Point(1), "result is a tests.test_encoding.Point"),
        ({1: lambda: None}, "result[…] is a"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_place(value: Any, place: str) -> None:
    with pytest.raises(TypeError) as error:
        dumps(value)
    assert place in str(error.value)
    assert "primary key" in str(error.value) or "local" in str(error.value)


@pytest.mark.parametrize("fold", [0, 1])
def test_the_hour_that_clocks_repeat_comes_back_equal(fold: int) -> None:
    """Between two zones, Python takes no time in that hour for equal."""
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    value = dt.datetime(2026, 10, 25, 2, 30, tzinfo=zone, fold=fold)
    found = loads(dumps(value))
    assert (found, found.utcoffset(), found.tzinfo) == (value, value.utcoffset(), zone)


@pytest.mark.parametrize("value", [Grown(1), Doubled(1), Basket([], Money.Kind.CASH)])
def test_a_dataclass_that_would_come_back_as_another_is_refused(value: Any) -> None:
    if isinstance(value, Basket):
        assert loads(dumps(value)) == value
        value.total = 8
    with pytest.raises(TypeError, match=r"result: made again .* is not the same"):
        dumps(value)


def test_a_class_that_could_not_be_found_again_is_refused() -> None:
    with pytest.raises(TypeError, match="does not name this class"):
        dumps(shadowed)

    class Local(enum.Enum):
        A = 1

    with pytest.raises(TypeError, match="local to a function"):
        dumps(Local.A)


@pytest.mark.parametrize("name", ["os:system", "builtins:dict", "tests.test_encoding:Point"])
@pytest.mark.parametrize("tag", ["enum", "flag", "dataclass"])
def test_reading_never_calls_anything_but_the_kind_of_class_that_was_written(
    name: str, tag: str
) -> None:
    text = json.dumps(
        {"$": tag, "of": name, "v": {"command": "true"} if tag == "dataclass" else "A"}
    )
    with pytest.raises(TypeError, match="not the class"):
        loads(text)
