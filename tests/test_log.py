"""Every line logged inside a protected call names its operation."""

from __future__ import annotations

import logging
import logging.config
import re
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from idempotency import engine, log
from idempotency.decorators import idempotent
from idempotency.log import OperationFilter
from idempotency.models import Operation
from tests.test_testing import User


@pytest.fixture
def output() -> Iterator[StringIO]:
    """What the documented LOGGING setting writes."""
    assert log.__doc__ is not None
    snippet = re.search(r"LOGGING = (\{.*?^    \})", log.__doc__, re.DOTALL | re.MULTILINE)
    assert snippet is not None
    config: dict[str, Any] = eval(snippet[1])  # noqa: S307 (our own documentation)
    stream = StringIO()
    config["handlers"]["console"]["stream"] = stream
    config["loggers"] = {"shop": {"handlers": ["console"], "level": "INFO", "propagate": False}}
    del config["root"]
    logger = logging.getLogger("shop")
    yield_config = (logger.handlers[:], logger.level, logger.propagate)
    logging.config.dictConfig(config)
    yield stream
    logger.handlers, logger.level, logger.propagate = yield_config


@pytest.mark.django_db
def test_lines_inside_a_protected_view_carry_the_operations_id(output: StringIO) -> None:
    logger = logging.getLogger("shop.orders")

    @idempotent(name="order-create")
    def view(request: HttpRequest) -> HttpResponse:
        logger.info("placed")
        return HttpResponse()

    request = RequestFactory().post("/", headers={"Idempotency-Key": "k"})
    request.user = User()  # type: ignore[assignment]
    view(request)
    logger.info("after")

    operation = Operation.objects.get()
    assert output.getvalue().splitlines() == [
        f"INFO {operation.pk} shop.orders placed",
        "INFO - shop.orders after",
    ]


def record(**extra: Any) -> logging.LogRecord:
    made = logging.getLogger("shop").makeRecord(
        "shop", logging.INFO, __file__, 1, "x", (), None, extra=extra
    )
    assert OperationFilter().filter(made) is True
    return made


def test_the_name_is_there_too_and_a_dash_outside() -> None:
    operation = Operation(name="order-create")
    operation.execution = object()  # somebody executes it
    with engine.running(operation):
        assert record().operation_name == "order-create"  # type: ignore[attr-defined]
    assert record().operation_name == "-"  # type: ignore[attr-defined]


def test_what_the_caller_gave_is_kept() -> None:
    assert record(operation_id="mine").operation_id == "mine"  # type: ignore[attr-defined]
