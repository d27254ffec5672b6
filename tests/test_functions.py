"""`@idempotent_function`: one effect per key, equal results, declared failures, joined transactions."""

import asyncio
import copy
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, transaction

from idempotency import engine
from idempotency.decorators import idempotent_function
from idempotency.exceptions import (
    ConfigurationError,
    InvalidKey,
    Mismatch,
    OutcomeUnknown,
    ReentrantOperation,
    ResponseNotRetained,
    StoredFailure,
)
from idempotency.models import EventKind, Operation, Status
from tests.app.models import Effect
from tests.callers import age, effects, events, new_key, operation
from tests.processes import in_threads

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parent.parent


class OutOfStock(Exception):
    """A declared failure."""


@idempotent_function(
    name="billing.settle", key=lambda invoice, *args, **kwargs: invoice, failures=(OutOfStock,)
)
def settle(invoice: str, amount: Decimal = Decimal("1.10"), *, error: str = "") -> dict[str, Any]:
    """Settle an invoice."""
    Effect.objects.create(label=invoice)
    if error == "declared":
        raise OutOfStock("no stock")
    if error:
        raise ValueError(error)
    return {"invoice": invoice, "amount": amount}


def test_the_second_call_returns_an_equal_result_and_has_no_effect() -> None:
    key = new_key()
    first = settle(key)
    assert settle(key) == first == {"invoice": key, "amount": Decimal("1.10")}
    assert effects(key) == 1
    assert events(key) == [(EventKind.REPLAYED, "")]
    assert operation(key).name == "billing.settle"


def test_a_declared_failure_is_stored_and_raised_again_with_its_message() -> None:
    key = new_key()
    for number in range(2):
        with pytest.raises(StoredFailure, match=r"^no stock$") as error:
            settle(key, error="declared")
        assert error.value.error_type == "tests.test_functions.OutOfStock"
        assert isinstance(error.value.__cause__, OutOfStock) == (number == 0)
    assert effects(key) == 0
    assert operation(key).status == Status.FAILED


def test_a_stored_failure_can_be_copied_as_process_pools_do() -> None:
    made = copy.copy(StoredFailure("no stock", "shop.OutOfStock"))  # by the protocol of pickle
    assert (str(made), made.error_type) == ("no stock", "shop.OutOfStock")


def test_any_other_exception_rolls_back_and_the_next_call_runs() -> None:
    key = new_key()
    with pytest.raises(ValueError, match="down"):
        get_error(key, "down")
    assert effects(key) == 0
    assert settle(key, error="")["invoice"] == key
    assert (effects(key), operation(key).attempt) == (1, 2)


def get_error(key: str, error: str) -> None:
    @idempotent_function(
        name="billing.settle", key=lambda invoice: invoice, fingerprint=same_as_settle
    )
    def failing(invoice: str) -> None:
        Effect.objects.create(label=invoice)
        raise ValueError(error)

    failing(key)


def same_as_settle(invoice: str) -> dict[str, Any]:
    return {"invoice": invoice, "amount": Decimal("1.10"), "error": ""}


def test_a_result_that_cannot_be_stored_is_an_error_before_anything_commits() -> None:
    key = new_key()

    @idempotent_function(key=lambda: key)
    def broken() -> object:
        return Effect.objects.create(label=key)

    with pytest.raises(TypeError, match="primary key"):
        broken()
    assert effects(key) == 0
    assert operation(key).status == Status.PROCESSING


def test_other_arguments_under_the_same_key_are_a_mismatch() -> None:
    key = new_key()
    settle(key, Decimal("1.10"))
    settle(key, amount=Decimal("1.10"))  # the same call, spelled differently
    with pytest.raises(Mismatch):
        settle(key, Decimal("1.1"))
    assert effects(key) == 1


def test_a_fingerprint_may_leave_arguments_out() -> None:
    key, runs = new_key(), []

    @idempotent_function(key=lambda order, sent_at: order, fingerprint=lambda order, sent_at: order)
    def receive(order: str, sent_at: int) -> int:
        runs.append(sent_at)
        return sent_at

    assert [receive(key, 1), receive(key, 2), runs] == [1, 1, [1]]


class Desk:
    @staticmethod
    @idempotent_function(key=lambda order: order, stepwise=True)
    def static(order: str) -> int:
        return Effect.objects.create(label=order).pk

    @idempotent_function(
        key=lambda self, order: order, fingerprint=lambda self, order: order, stepwise=True
    )
    def method(self, order: str) -> int:
        return Effect.objects.create(label=order).pk


@pytest.mark.parametrize("function", [Desk.static, Desk().method])
def test_a_stepwise_function_of_a_class_is_left_to_its_callers(function: Any) -> None:
    """The completer could not find it by its name, nor make the object again."""
    key = new_key()
    assert function(key) == function(key)
    assert (effects(key), operation(key).arguments) == (1, None)


def test_a_method_needs_a_fingerprint_without_its_self() -> None:
    class Till:
        @idempotent_function(key=lambda self, order: order)
        def strict(self, order: str) -> int: ...  # type: ignore[empty-body]

        @idempotent_function(key=lambda self, order: order, fingerprint=lambda self, order: order)
        def pay(self, order: str) -> int:
            return Effect.objects.create(label=order).pk

    key = new_key()
    with pytest.raises(TypeError, match="has no fingerprint"):
        Till().strict(key)
    assert Till().pay(key) == Till().pay(order=key)
    assert effects(key) == 1


def test_functions_do_not_share_keys_unless_their_scope_says_so() -> None:
    key, runs = new_key(), []

    def run(name: str, **options: Any) -> Any:
        return idempotent_function(
            name=name, key=lambda tenant: key, fingerprint=lambda tenant: 1, **options
        )(lambda tenant: runs.append(f"{name} {tenant}"))

    for name in ("a", "b"):
        run(name)("x")
    assert runs == ["a x", "b x"]
    for tenant in ("x", "y", "x"):
        run("c", scope=lambda tenant: (f"tenant:{tenant}",))(tenant)
    run("d", scope=("tenant:x",))("z")
    assert runs[2:] == ["c x", "c y"]


def test_the_key_is_validated() -> None:
    with pytest.raises(InvalidKey):
        settle("")
    with pytest.raises(InvalidKey):
        settle("with blanks")


def test_a_key_that_cannot_be_called_is_refused_where_it_is_written() -> None:
    key: Any = "order_id"
    with pytest.raises(ConfigurationError, match="'order_id' is no function"):
        idempotent_function(name="f", key=key)


def test_what_only_views_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="methods, required"):
        idempotent_function(key=str, required=True, methods=("POST",))
    with pytest.raises(ConfigurationError, match="exclude_fields, store"):
        idempotent_function(key=str, exclude_fields=["sent_at"], store=[200])


@pytest.mark.parametrize("failures", [[OutOfStock], OutOfStock, ("OutOfStock",), (OutOfStock(),)])
def test_failures_that_are_no_exception_classes_are_refused(failures: Any) -> None:
    """Noticed in the middle of a failing call they would leave its transaction open."""
    with pytest.raises(ConfigurationError, match="tuple of exception classes"):
        idempotent_function(key=str, failures=failures)


def test_the_current_operation_is_at_hand_and_cannot_be_entered_again() -> None:
    key = new_key()

    @idempotent_function(name="outer", key=lambda: key)
    def outer() -> str:
        current = engine.current()
        assert current is not None
        with pytest.raises(ReentrantOperation):
            outer()
        inner = idempotent_function(name="inner", key=lambda: current.derive_key("inner"))(
            lambda: "in"
        )
        return inner()

    assert outer() == outer() == "in"
    assert engine.current() is None
    assert Operation.objects.count() == 2


def test_inside_a_transaction_the_operation_joins_it() -> None:
    key = new_key()
    with transaction.atomic():
        settle(key)
        transaction.set_rollback(True)
    assert (effects(key), Operation.objects.count()) == (0, 0)
    with transaction.atomic():
        settle(key)
        assert settle(key)["invoice"] == key
    assert effects(key) == 1


def test_a_failure_inside_a_transaction_leaves_the_callers_work_alone() -> None:
    key = new_key()
    with transaction.atomic():
        Effect.objects.create(label="caller")
        with pytest.raises(StoredFailure):
            settle(key, error="declared")
    assert (effects("caller"), effects(key)) == (1, 0)
    assert operation(key).status == Status.FAILED


def test_outside_a_transaction_the_call_has_one_of_its_own() -> None:
    key, inside = new_key(), []

    @idempotent_function(key=lambda: key)
    def look() -> None:
        inside.append(connection.in_atomic_block)

    look()
    assert (inside, connection.in_atomic_block) == ([True], False)


def test_of_many_calls_at_once_one_runs_and_the_others_wait_for_its_result() -> None:
    key = new_key()

    @idempotent_function(name="waiting", key=lambda: key, wait=30)
    def pay() -> int:
        return Effect.objects.create(label=key).pk

    assert len(set(in_threads([pay] * 6))) == 1
    assert effects(key) == 1


def test_a_result_that_was_not_kept_is_not_made_up() -> None:
    key = new_key()

    @idempotent_function(key=lambda: key, max_response_bytes=5)
    def report() -> str:
        Effect.objects.create(label=key)
        return "much too long"

    assert report() == "much too long"
    with pytest.raises(ResponseNotRetained):
        report()
    assert effects(key) == 1


def test_after_the_window_the_key_is_free_again() -> None:
    key = new_key()
    settle(key)
    age(key)
    settle(key)
    assert effects(key) == 2


# Async


def test_async_functions_behave_alike() -> None:
    key = new_key()

    @idempotent_function(
        name="async",
        key=lambda error=None: key,
        failures=(OutOfStock,),
        fingerprint=lambda error=None: 1,
    )
    async def pay(error: Exception | None = None) -> Decimal:
        await sync_to_async(Effect.objects.create)(label=key)
        if error is not None:
            raise error
        return Decimal("1.10")

    with pytest.raises(ConnectionError):
        async_to_sync(pay)(ConnectionError())
    assert effects(key) == 0
    assert async_to_sync(pay)() == async_to_sync(pay)() == Decimal("1.10")
    assert (effects(key), operation(key).attempt) == (1, 2)


def test_async_failures_are_stored_too() -> None:
    key = new_key()

    @idempotent_function(key=lambda: key, failures=(OutOfStock,))
    async def pay() -> None:
        await sync_to_async(Effect.objects.create)(label=key)
        raise OutOfStock("no stock")

    for _ in range(2):
        with pytest.raises(StoredFailure, match="no stock"):
            async_to_sync(pay)()
    assert effects(key) == 0


# Typing: `make lint` checks tests/typing/api.py, right calls and wrong ones that must be reported


def test_the_decorated_function_keeps_its_name_and_signature() -> None:
    assert (settle.__name__, settle.__doc__) == ("settle", "Settle an invoice.")


@pytest.mark.parametrize("stepwise", [False, True])
def test_an_unknown_outcome_is_no_failure_whatever_is_declared(stepwise: bool) -> None:
    """ "Failed" would tell the caller to try again with another key."""
    key = new_key()

    @idempotent_function(name="doubtful", key=lambda: key, failures=(Exception,), stepwise=stepwise)
    def pay() -> None:
        current = engine.current()
        assert current is not None
        current.unknown(provider_ref="ch_1")

    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            pay()
    assert operation(key).status == Status.RECONCILING


def test_calls_gathered_on_one_connection_do_not_share_a_transaction() -> None:
    """Each would commit or roll back what the other has done."""
    first, second = new_key(), new_key()

    @idempotent_function(name="gathered", key=lambda key: key)
    async def pay(key: str) -> str:
        await sync_to_async(Effect.objects.create)(label=key)
        await asyncio.sleep(0.05)
        return key

    async def both() -> list[Any]:
        return await asyncio.gather(pay(first), pay(second), return_exceptions=True)

    results = async_to_sync(both)()
    assert {first, second} & set(results)
    assert [type(result) for result in results if result not in (first, second)] == [
        ConfigurationError
    ]
    for key, result in zip((first, second), results, strict=True):
        assert effects(key) == (result == key)
        assert Operation.objects.filter(key=key).exists() == (result == key)
    assert async_to_sync(pay)(first) == first
    assert async_to_sync(pay)(second) == second
    assert (effects(first), effects(second)) == (1, 1)
