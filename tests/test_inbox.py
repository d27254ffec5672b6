"""`inbox.receive`: effects and the mark that the message came, in one transaction."""

from __future__ import annotations

import uuid
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.test import override_settings
from django.utils import timezone

from idempotency import engine, inbox, outbox, retention
from idempotency.exceptions import (
    ConfigurationError,
    InProgress,
    InvalidKey,
    Mismatch,
    RolledBack,
    Unavailable,
)
from idempotency.models import Operation, OutboxMessage, Status, Turn
from idempotency.policies import Policy
from tests.app.models import Effect
from tests.callers import age, effects
from tests.processes import Child

pytestmark = pytest.mark.django_db(transaction=True)


class Failed(Exception):
    """What a handler raises."""


def deliver(message_id: str = "m", consumer: str = "billing", **options: Any) -> bool:
    """One delivery with one effect; returns whether the message was new."""
    with inbox.receive(consumer=consumer, message_id=message_id, **options) as message:
        if message.is_new:
            Effect.objects.using(message.operation._state.db).create(label=message_id)
    return message.is_new


def fail(message_id: str = "m", **options: Any) -> None:
    with inbox.receive(consumer="billing", message_id=message_id, **options):
        Effect.objects.create(label=message_id)
        raise Failed


# Once --------------------------------------------------------------------------------------------


def test_a_message_is_new_once_per_consumer() -> None:
    """RULES 99."""
    assert [deliver(), deliver(), deliver(consumer="mail")] == [True, False, True]
    assert effects("m") == 2


def test_the_effects_and_the_mark_commit_together_or_not_at_all() -> None:
    with pytest.raises(Failed):
        fail()
    assert (effects("m"), Operation.objects.get().status) == (0, Status.PROCESSING)
    assert deliver() is True
    assert (effects("m"), Operation.objects.get().attempt) == (1, 2)
    assert deliver() is False


def test_a_process_that_ends_in_the_block_has_received_nothing() -> None:
    def die() -> None:
        with inbox.receive(consumer="billing", message_id="m"):
            Effect.objects.create(label="m")
            connection.close()  # as the kernel does
            raise SystemExit

    with suppress(AssertionError):
        Child(die).result()
    assert effects("m") == 0
    assert deliver() is True


def test_inside_the_callers_transaction_it_lasts_only_if_the_caller_commits() -> None:
    with transaction.atomic():
        assert deliver() is True
        assert deliver() is False
        transaction.set_rollback(True)
    assert Operation.objects.count() == effects("m") == 0
    with transaction.atomic():
        assert deliver() is True
    assert deliver() is False


def test_a_failing_block_leaves_the_callers_transaction_usable() -> None:
    with transaction.atomic():
        Effect.objects.create(label="caller")
        with pytest.raises(Failed):
            fail()
        assert deliver("other") is True
    assert (effects("caller"), effects("m"), effects("other")) == (1, 0, 1)


@pytest.mark.vendor("postgresql")
def test_it_does_not_pretend_that_a_broken_transaction_received_something() -> None:
    """PostgreSQL commits nothing after an error, even if the handler swallowed it."""

    def break_it() -> None:
        with inbox.receive(consumer="billing", message_id="m"):
            Effect.objects.create(label="m")
            with suppress(DatabaseError), connection.cursor() as cursor:
                cursor.execute("SELECT no_such_column FROM testapp_effect")

    with pytest.raises((RolledBack, DatabaseError)):
        break_it()
    assert effects("m") == 0
    assert deliver() is True


def swallow() -> None:
    with inbox.receive(consumer="billing", message_id="m"):
        Effect.objects.create(label="m")
        transaction.set_rollback(True)


def test_a_block_that_asks_for_a_rollback_has_received_nothing() -> None:
    with pytest.raises(RolledBack):
        swallow()
    assert effects("m") == 0
    assert deliver() is True


def test_a_stepwise_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="one transaction"):
        deliver(policy=Policy(stepwise=True))


def test_the_same_id_with_another_payload_is_refused() -> None:
    assert deliver(payload={"a": 1, "b": 2}) is True
    assert deliver(payload={"b": 2, "a": 1}) is False
    with pytest.raises(Mismatch):
        deliver(payload={"a": 1, "b": 3})
    assert deliver("bytes", payload=b"\x00\xff") is True
    with pytest.raises(Mismatch):
        deliver("bytes", payload=b"\x00\xfe")


def test_another_database_has_an_inbox_of_its_own() -> None:
    assert deliver() is True


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_inbox_is_on_the_database_of_the_effects() -> None:
    policy = Policy(using="other")
    assert [deliver(policy=policy), deliver(policy=policy), deliver()] == [True, False, True]
    assert (effects("m", "other"), effects("m")) == (1, 1)


def test_messages_that_a_handler_sends_name_the_operation() -> None:
    with inbox.receive(consumer="billing", message_id="m") as message:
        assert engine.current() is message.operation
        outbox.enqueue("paid", 1)
    assert OutboxMessage.objects.get().operation_id == message.operation.pk
    with inbox.receive(consumer="billing", message_id="m") as message:
        assert message.is_new is False
        assert engine.current() is None


# Ids ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message_id", ["orders 3:17", "grüße", "x" * 300, "a\nb", "\udcff"])
def test_any_text_can_be_an_id(message_id: str) -> None:
    with inbox.receive(consumer="billing", message_id=message_id) as message:
        assert message.is_new is True
    with inbox.receive(consumer="billing", message_id=message_id) as message:
        assert message.is_new is False
    with inbox.receive(consumer="billing", message_id=message_id + "2") as message:
        assert message.is_new is True


def test_a_message_without_an_id_is_refused() -> None:
    with pytest.raises(InvalidKey, match="without an id"):
        deliver("")
    assert Operation.objects.count() == 0


def test_content_can_be_the_id_and_parts_do_not_run_into_each_other() -> None:
    assert inbox.digest(b"ab", "c") == inbox.digest("ab", b"c")
    assert inbox.digest("ab", "c") != inbox.digest("a", "bc") != inbox.digest("abc")


# Retention ---------------------------------------------------------------------------------------


def test_messages_are_remembered_for_a_week() -> None:
    deliver()
    operation = Operation.objects.get()
    assert operation.expires_at is not None
    assert operation.finished_at is not None
    assert operation.expires_at - operation.finished_at == timedelta(days=7)
    age("m")
    assert deliver() is True


def test_a_duplicate_is_a_duplicate_even_if_only_the_tombstone_knows() -> None:
    policy = Policy(retention=60, tombstone=3600)
    deliver(policy=policy)
    age("m", tombstone=False)
    assert deliver(policy=policy) is False
    assert retention.purge().tombstoned == 1
    assert deliver(policy=policy) is False
    assert effects("m") == 1


def test_a_duplicate_is_a_duplicate_even_if_no_results_are_kept(settings: Any) -> None:
    settings.IDEMPOTENCY = {"MAX_RESPONSE_BYTES": 0}
    assert [deliver(), deliver()] == [True, False]


# Batches -----------------------------------------------------------------------------------------


def batch(ids: list[str], **options: Any) -> list[tuple[str, str]]:
    def handle(message: str) -> None:
        Effect.objects.create(label=message)
        if message.startswith("bad"):
            raise Failed(message)

    items = inbox.receive_batch(
        ids, handle, consumer="batch", message_id=lambda message: message, **options
    )
    assert [item.message for item in items] == ids
    assert all((item.error is not None) == (item.status == "failed") for item in items)
    return [(item.message_id, item.status) for item in items]


def test_every_item_of_a_batch_stands_for_itself() -> None:
    """RULES 106."""
    assert batch(["a", "bad", "b", "a"]) == [
        ("a", "received"),
        ("bad", "failed"),
        ("b", "received"),
        ("a", "duplicate"),
    ]
    assert (effects("a"), effects("bad"), effects("b")) == (1, 0, 1)
    assert batch(["a", "bad", "b", "c"])[3] == ("c", "received")


def test_an_item_without_an_id_fails_alone() -> None:
    assert batch(["", "a"]) == [("", "failed"), ("a", "received")]


def test_an_item_that_cannot_be_read_fails_alone_and_keeps_its_place() -> None:
    received = []
    messages = [{"id": "a", "order": "1"}, {"id": "b"}, {"order": "2"}, {"id": "c", "order": "2"}]
    items = inbox.receive_batch(
        [*messages, {"id": "d", "order": "1"}],
        received.append,
        consumer="batch",
        message_id=lambda message: message["id"],
        serialize_on=lambda message: message["order"],
    )
    assert [(item.message_id, item.status) for item in items] == [
        ("a", "received"),
        ("b", "failed"),
        ("", "failed"),
        ("c", "held"),  # after one of the same order that could not be received
        ("d", "received"),
    ]
    assert [message["id"] for message in received] == ["a", "d"]


def test_after_a_failure_later_items_of_the_same_object_are_held() -> None:
    """RULES 107: a blocked group does not block others."""
    ids = ["a1", "bad-b1", "b2", "a2", "b3"]

    def group(message: str) -> str:
        return message.removeprefix("bad-")[0]

    assert [status for _, status in batch(ids, serialize_on=group)] == [
        "received",
        "failed",
        "held",
        "received",
        "held",
    ]
    assert effects("b2") == 0
    assert batch(["b2", "b3"], serialize_on=group) == [("b2", "received"), ("b3", "received")]


def test_items_are_done_if_they_may_be_acknowledged() -> None:
    done = {
        status: inbox.Item(None, "", status).is_done
        for status in ("received", "duplicate", "failed", "held")
    }
    assert done == {"received": True, "duplicate": True, "failed": False, "held": False}


@pytest.mark.parametrize("refusal", [InProgress, Unavailable])
def test_a_refused_item_is_delivered_again(
    refusal: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(intent: engine.Intent) -> None:
        raise refusal

    monkeypatch.setattr(engine, "begin", refuse)
    assert batch(["a"]) == [("a", "failed")]


# Order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("current", "incoming", "stale"),
    [
        (None, 1, False),
        (1, 2, False),
        (2, 1, True),
        (2, 2, False),
        (datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC), True),
        ((5, 1), (5, 2), False),
        ((5, 2), (5, 1), True),
    ],
)
def test_an_older_event_is_stale_and_a_tie_is_not(current: Any, incoming: Any, stale: bool) -> None:
    """BUGS R04: the documented tie rule."""
    assert inbox.is_stale(current, incoming) is stale


def test_events_that_arrive_in_the_wrong_order_leave_the_newest_state() -> None:
    """BUGS R01, R02: "updated" (version 2) comes before "created" (version 1)."""

    def handle(event: tuple[str, str, int]) -> None:
        event_id, name, version = event
        with inbox.receive(consumer="customers", message_id=event_id) as message:
            if message.is_new:
                row, _ = Effect.objects.get_or_create(label="customer", defaults={"amount": 0})
                rows = Effect.objects.filter(pk=row.pk)
                inbox.apply_if_newer(rows, "amount", version, created_at=WHEN[name])

    for event in (("e2", "updated", 2), ("e1", "created", 1), ("e2", "updated", 2)):
        handle(event)
    row = Effect.objects.get()
    assert (row.amount, row.created_at) == (2, WHEN["updated"])


WHEN = {
    "created": datetime(2026, 1, 1, tzinfo=UTC),
    "updated": datetime(2026, 1, 2, tzinfo=UTC),
}


def test_applying_says_whether_it_was_stale_and_the_later_of_equals_wins() -> None:
    """BUGS R04."""
    row = Effect.objects.create(label="first", amount=5)
    rows = Effect.objects.filter(pk=row.pk)
    assert inbox.apply_if_newer(rows, "amount", 4, label="older") is False
    assert rows.get().label == "first"
    assert inbox.apply_if_newer(rows, "amount", 5, label="equal") is True
    assert rows.get().label == "equal"
    assert inbox.apply_if_newer(rows.none(), "amount", 6) is False


# Turns -------------------------------------------------------------------------------------------


def test_a_turn_is_one_row_per_consumer_and_object() -> None:
    for message_id, consumer, order in (
        ("1", "a", "order:1"),
        ("2", "a", "order:1"),
        ("3", "a", "order:2"),
        ("4", "b", "order:1"),
        ("5", "b", ""),
    ):
        deliver(message_id, consumer, serialize_on=order)
    assert Turn.objects.count() == 3


def test_the_purge_deletes_turns_that_nobody_took_for_a_day() -> None:
    old, recent = Turn(id=uuid.uuid4()), Turn(id=uuid.uuid4())
    old.used_at = timezone.now() - timedelta(hours=25)
    recent.used_at = timezone.now() - timedelta(hours=23)
    Turn.objects.bulk_create([old, recent])
    retention.purge()
    assert list(Turn.objects.values_list("pk", flat=True)) == [recent.pk]


def test_the_purge_deletes_many_turns_in_batches() -> None:
    past = timezone.now() - timedelta(days=2)
    Turn.objects.bulk_create([Turn(id=uuid.uuid4(), used_at=past) for _ in range(7)])
    retention.purge(batch_size=3)
    assert not Turn.objects.exists()


@pytest.mark.vendor("postgresql", "mysql")
def test_the_purge_leaves_a_turn_alone_that_somebody_holds() -> None:
    deliver(serialize_on="order:1")
    Turn.objects.update(used_at=timezone.now() - timedelta(days=2))
    with inbox.receive(consumer="billing", message_id="m2", serialize_on="order:1"):
        purged = Child(lambda: retention.purge() and Turn.objects.count())
        assert purged.result() == 1
    assert Turn.objects.count() == 1


@pytest.mark.django_db(transaction=True)
@override_settings(IDEMPOTENCY={"STEPWISE": True, "RETENTION": 60})
def test_the_projects_defaults_for_views_change_nothing_for_consumers():
    with inbox.receive(consumer="billing", message_id="m-1", policy=Policy(wait=0)) as message:
        assert message.is_new
    found = Operation.objects.get(pk=message.operation.pk)
    assert found.finished_at is not None
    assert found.expires_at is not None
    assert found.expires_at - found.finished_at == inbox.RETENTION
