"""Checked by mypy, never run: decorated functions keep their signatures.

A line that must be an error carries the `type: ignore` for it; mypy reports one that is not needed.
"""

import uuid
from decimal import Decimal
from typing import assert_type

from idempotency.completion import submit
from idempotency.decorators import idempotent_function
from idempotency.models import Operation


@idempotent_function(name="settle", key=lambda invoice_id: str(invoice_id))
def settle(invoice_id: int, *, amount: Decimal = Decimal(0)) -> list[str]:
    return [str(invoice_id), str(amount)]


@idempotent_function(key=lambda name: name, stepwise=True)
async def greet(name: str) -> bytes:
    return name.encode()


assert_type(settle(1), list[str])
assert_type(settle(invoice_id=1, amount=Decimal(2)), list[str])
settle("1")  # type: ignore[arg-type]
settle()  # type: ignore[call-arg]
settle(1, Decimal(2))  # type: ignore[call-arg]

assert_type(submit(settle, 1, amount=Decimal(2)), uuid.UUID)
submit(settle, "1")  # type: ignore[arg-type]


async def main(operation: Operation) -> None:
    assert_type(await greet("you"), bytes)
    await greet(1)  # type: ignore[arg-type]
    assert_type(operation.step("a", len, "abc"), int)
    assert_type(operation.call("b", len, "abc", repeatable=True), int)
    assert_type(await operation.astep("c", len, "abc"), int)
    assert_type(await operation.acall("d", greet, "you"), bytes)
