"""The outbox: what is written when, what the relay takes, and what becomes of failures."""

from __future__ import annotations

import dataclasses
import enum
import uuid
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connections, transaction
from django.utils import timezone

from idempotency import engine, outbox
from idempotency.exceptions import ConfigurationError
from idempotency.models import MessageStatus, Operation, OutboxMessage, Outcome, Status
from idempotency.outbox.claims import claim
from idempotency.outbox.relays import backoff
from idempotency.outbox.statements import statements
from tests.callers import intent, new_key
from tests.outboxes import PAST, Recorder, make_due, relayed, row, send, statuses

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _long_backoff(settings: Any) -> None:
    """What has failed is not due again before the test says so, however slow the machine is."""
    settings.IDEMPOTENCY = {"OUTBOX_BACKOFF": 60}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Line:
    sku: str
    price: Decimal


# Writing


@pytest.mark.django_db(transaction=True)
def test_enqueue_outside_a_transaction_is_refused_and_writes_nothing() -> None:
    with pytest.raises(ConfigurationError, match=r"transaction\.atomic\(using='default'\)"):
        outbox.enqueue("t", {})
    assert not OutboxMessage.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_rolled_back_transaction_leaves_no_message_and_a_rolled_back_savepoint_takes_only_its_own(
    recorder: Recorder,
) -> None:
    """BUGS S15."""
    with transaction.atomic():
        outbox.enqueue("kept", 1)
        with transaction.atomic():
            outbox.enqueue("lost", 2)
            transaction.set_rollback(True)
        outbox.enqueue("kept too", 3)
    with transaction.atomic():
        outbox.enqueue("lost too", 4)
        transaction.set_rollback(True)
    relayed(recorder)
    assert recorder.topics == ["kept", "kept too"]


def test_the_message_id_is_known_at_once_and_never_changes(recorder: Recorder) -> None:
    """BUGS S16."""
    message = send("order.created", {"order_id": 1})
    recorder.faults["order.created"] = ValueError
    relayed(recorder)
    make_due()
    relayed(recorder)
    assert [m.id for m in recorder.messages] == [message.message_id] * 2
    assert [m.attempt for m in recorder.messages] == [1, 2]
    assert message.created_at is not None  # read from the database when somebody asks


def test_the_same_key_in_the_same_topic_is_one_message(recorder: Recorder) -> None:
    """BUGS T02."""
    first = send("order.paid", {"by": "browser"}, key="order:1")
    second = send("order.paid", {"by": "webhook"}, key="order:1")
    other = send("order.shipped", {}, key="order:1")
    assert second.message_id == first.message_id != other.message_id
    assert (second.pk, second.payload) == (first.pk, first.payload)
    relayed(recorder)
    assert recorder.payloads == [{"by": "browser"}, {}]


def test_a_payload_reaches_the_publisher_as_plain_json(recorder: Recorder) -> None:
    identity = uuid.uuid4()
    payload = {
        "line": Line("lamp", Decimal("74.00")),
        "colour": Colour.RED,
        "id": identity,
        "day": date(2026, 1, 2),
        "at": datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        "text": "Grüße \x00 🙂",
    }
    send("t", payload)
    relayed(recorder)
    assert recorder.payloads == [
        {
            "line": {"sku": "lamp", "price": "74.00"},
            "colour": "red",
            "id": str(identity),
            "day": "2026-01-02",
            "at": "2026-01-02T03:04:00Z",
            "text": "Grüße \x00 🙂",
        }
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"payload": object()}, TypeError),
        ({"payload": {"ratio": float("nan")}}, ValueError),
        ({"topic": ""}, ValueError),
        ({"topic": "t" * 201}, ValueError),
        ({"topic": "a\x00b"}, ValueError),
        ({"topic": None}, TypeError),
        ({"ordering_key": "k" * 256}, ValueError),
        ({"key": ""}, ValueError),
        ({"not_before": datetime(2026, 1, 1)}, ValueError),  # noqa: DTZ001 (naive on purpose)
        ({"not_before": 5}, ValueError),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(
    arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        send(**arguments)
    assert not OutboxMessage.objects.exists()


def test_a_message_waits_until_its_time_on_the_databases_clock(recorder: Recorder) -> None:
    send("early", not_before=timedelta(hours=-1))
    send("late", not_before=timedelta(hours=1))
    send("fixed", not_before=timezone.now() + timedelta(hours=1))
    relayed(recorder)
    assert recorder.topics == ["early"]
    make_due()
    relayed(recorder)
    assert recorder.topics == ["early", "late", "fixed"]


def test_a_fixed_time_means_the_same_without_time_zones(settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, "America/New_York"
    now = datetime.now(UTC)
    send("early", not_before=now - timedelta(minutes=1))
    send("late", not_before=now + timedelta(minutes=1))
    recorder = Recorder()
    relayed(recorder)
    assert recorder.topics == ["early"]


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_message_lives_in_the_database_of_the_running_operation(recorder: Recorder) -> None:
    def handler(operation: Operation) -> Outcome:
        outbox.enqueue("inside", None)
        return Outcome(status=Status.SUCCEEDED)

    result = engine.run(intent(new_key(), using="other"), handler)
    assert not OutboxMessage.objects.using("default").exists()
    message = OutboxMessage.objects.using("other").get()
    assert message.operation_id == result.operation.pk
    relayed(recorder, using="other")
    assert recorder.messages[0].operation_id == result.operation.pk


@pytest.mark.django_db(transaction=True)
def test_a_replayed_operation_adds_no_messages_and_a_failed_one_leaves_none() -> None:
    outcomes: list[Exception | None] = [ValueError("first"), None]

    def handler(operation: Operation) -> Outcome:
        outbox.enqueue("order.created", {"key": operation.key})
        if (error := outcomes.pop(0)) is not None:
            raise error
        return Outcome(status=Status.SUCCEEDED)

    key = new_key()
    with pytest.raises(ValueError, match="first"):
        engine.run(intent(key), handler)
    assert not OutboxMessage.objects.exists()
    assert not engine.run(intent(key), handler).replayed
    assert engine.run(intent(key), handler).replayed
    assert OutboxMessage.objects.count() == 1


# Relaying


@pytest.mark.django_db(transaction=True)
def test_nothing_is_published_inside_a_transaction_neither_the_callers_nor_the_relays(
    recorder: Recorder,
) -> None:
    """BUGS S14."""
    send()
    with pytest.raises(RuntimeError), transaction.atomic():
        relayed(recorder)
    transaction.set_autocommit(False)
    try:
        with pytest.raises(RuntimeError, match="autocommit"):
            relayed(recorder)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert recorder.messages == []
    open_transactions = []
    recorder.before = lambda message: open_transactions.append(
        connections["default"].in_atomic_block
    )
    relayed(recorder)
    assert open_transactions == [False]


def test_a_sent_message_is_marked_and_not_sent_again(recorder: Recorder) -> None:
    message = send()
    assert relayed(recorder) == outbox.Summary(sent=1)
    assert relayed(recorder) == outbox.Summary()
    assert len(recorder.messages) == 1
    message = row(message)
    assert (message.status, message.attempts) == (MessageStatus.SENT, 1)
    assert message.sent_at is not None


def test_the_attempt_is_counted_before_the_try(recorder: Recorder) -> None:
    """BUGS S13."""
    message = send()
    seen = []
    recorder.before = lambda _: seen.append(row(message).attempts)
    relayed(recorder)
    assert seen == [1]


def test_a_hundred_failing_messages_do_not_hold_up_the_next_one(
    recorder: Recorder, settings: Any
) -> None:
    """BUGS S08."""
    settings.IDEMPOTENCY |= {"OUTBOX_BATCH_SIZE": 10}
    recorder.faults["poison"] = ValueError("no")
    for _ in range(100):
        send("poison")
    send("good")
    assert relayed(recorder) == outbox.Summary(sent=1, retried=100)
    assert recorder.topics.count("good") == 1


def test_a_failed_message_backs_off_doubling_up_to_the_cap_with_jitter(
    recorder: Recorder, settings: Any
) -> None:
    """BUGS S11, S12."""
    settings.IDEMPOTENCY |= {"OUTBOX_BACKOFF": 10, "OUTBOX_BACKOFF_MAX": timedelta(seconds=60)}
    for attempt, most in enumerate((10, 20, 40, 60, 60), 1):
        delays = [backoff(attempt) for _ in range(50)]
        assert min(delays) >= most / 2
        assert max(delays) <= most
        assert len(set(delays)) > 1
    assert backoff(10_000) <= 60
    recorder.faults["t"] = ValueError("no")
    message = send()
    relayed(recorder)
    message = row(message)
    assert 3 <= (message.available_at - message.created_at).total_seconds() <= 60
    assert message.last_error.startswith("builtins.ValueError in tests.outboxes.publish")
    assert relayed(recorder) == outbox.Summary()


def test_a_publisher_decides_when_to_try_again(recorder: Recorder) -> None:
    recorder.faults["t"] = outbox.RetryAfter(3600, "HTTP 429")
    message = send()
    assert relayed(recorder) == outbox.Summary(retried=1)
    message = row(message)
    assert message.available_at - message.created_at >= timedelta(seconds=3600)
    assert message.last_error == "RetryAfter: HTTP 429"


def test_a_permanent_failure_is_a_dead_letter_at_once(recorder: Recorder) -> None:
    recorder.faults["t"] = outbox.PermanentFailure("the account is closed")
    message = send()
    assert relayed(recorder) == outbox.Summary(dead=1)
    message = row(message)
    assert (message.status, message.attempts) == (MessageStatus.DEAD, 1)
    assert message.last_error == "PermanentFailure: the account is closed"


def test_the_last_attempt_makes_a_dead_letter(recorder: Recorder, settings: Any) -> None:
    """BUGS S09."""
    settings.IDEMPOTENCY |= {"OUTBOX_MAX_ATTEMPTS": 3}
    recorder.faults["t"] = ValueError
    message = send()
    for _ in range(5):
        relayed(recorder)
        make_due()
    assert len(recorder.messages) == 3
    assert (row(message).status, row(message).attempts) == (MessageStatus.DEAD, 3)


def test_a_payload_that_cannot_be_read_fails_alone(recorder: Recorder) -> None:
    broken, good = send("broken"), send("good")
    OutboxMessage.objects.filter(pk=broken.pk).update(payload="{")
    recorder.before = lambda message: message.payload
    relayed(recorder)
    assert recorder.topics == ["good"]
    assert row(good).status == MessageStatus.SENT
    assert row(broken).last_error.startswith("json.decoder.JSONDecodeError")


def test_a_topic_that_nobody_takes_fails_alone_and_is_tried_again() -> None:
    """BUGS S18."""
    good = Recorder()
    publish = outbox.by_topic({"good.*": good})
    renamed, message = send("renamed.topic"), send("good.topic")
    assert outbox.relay(publisher=publish) == outbox.Summary(sent=1, retried=1)
    assert row(message).status == MessageStatus.SENT
    assert row(renamed).last_error == "UnknownTopic: no publisher for topic 'renamed.topic'"


def test_the_first_matching_route_takes_the_message() -> None:
    first, second = Recorder(), Recorder()
    publish = outbox.by_topic({"order.*": first, "*": second})
    for topic in ("order.paid", "Order.paid", "stock.low"):
        send(topic)
    outbox.relay(publisher=publish)
    assert first.topics == ["order.paid"]
    assert second.topics == ["Order.paid", "stock.low"]


def test_what_is_no_publisher_is_refused_when_the_relay_is_made(settings: Any) -> None:
    settings.IDEMPOTENCY |= {"OUTBOX_PUBLISHER": "tests.outboxes.PAST"}
    with pytest.raises(ConfigurationError, match="neither callable"):
        outbox.Relay()
    settings.IDEMPOTENCY |= {"OUTBOX_PUBLISHER": "tests.outboxes.Recorder"}
    assert isinstance(getattr(outbox.Relay().publish, "__self__", None), Recorder)


# Order


def test_messages_of_one_key_leave_in_the_order_they_were_written(recorder: Recorder) -> None:
    """BUGS S20."""
    for number in range(5):
        for key in ("a", "b"):
            send(key, number, ordering_key=key)
    relayed(recorder, batch_size=3)
    for key in ("a", "b"):
        assert [m.payload for m in recorder.messages if m.topic == key] == [0, 1, 2, 3, 4]


def test_a_failing_head_holds_up_only_its_own_key(recorder: Recorder) -> None:
    recorder.faults["bad"] = ValueError
    for topic, key in (("bad", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a"), ("b2", "b"), ("-", "")):
        send(topic, ordering_key=key)
    assert relayed(recorder) == outbox.Summary(sent=3, retried=1)
    assert [t for t in recorder.topics if t.startswith("b")] == ["bad", "b1", "b2"]
    assert OutboxMessage.objects.get(topic="a2").attempts == 0
    del recorder.faults["bad"]
    make_due()
    relayed(recorder)
    assert recorder.topics[-3:] == ["bad", "a2", "a3"]


def test_a_delayed_message_holds_up_the_later_ones_of_its_key(recorder: Recorder) -> None:
    send("first", ordering_key="a")
    send("delayed", ordering_key="a", not_before=timedelta(hours=1))
    send("last", ordering_key="a")
    relayed(recorder)
    assert recorder.topics == ["first"]
    make_due()
    relayed(recorder)
    assert recorder.topics == ["first", "delayed", "last"]


@pytest.mark.parametrize(("rule", "topics"), [("block", ["dead"]), ("skip", ["dead", "next"])])
def test_a_dead_head_blocks_its_key_or_is_skipped_as_the_setting_says(
    recorder: Recorder, settings: Any, rule: str, topics: list[str]
) -> None:
    settings.IDEMPOTENCY |= {"OUTBOX_DEAD_HEAD": rule}
    recorder.faults["dead"] = outbox.PermanentFailure("no")
    send("dead", ordering_key="a")
    send("next", ordering_key="a")
    relayed(recorder)
    assert recorder.topics == topics
    recorder.faults.clear()
    outbox.redrive(OutboxMessage.objects.filter(status=MessageStatus.DEAD))
    relayed(recorder)
    assert set(statuses().values()) == {MessageStatus.SENT}


def test_a_long_queue_behind_a_dead_head_does_not_hold_up_the_others(recorder: Recorder) -> None:
    """The oldest due messages are more than a batch, and none of them can be taken."""
    recorder.faults["dead"] = outbox.PermanentFailure("no")
    send("dead", ordering_key="a")
    for number in range(25):
        send("behind", number, ordering_key="a")
    relayed(recorder, batch_size=10)
    assert recorder.topics == ["dead"]
    for number in range(12):
        send("other", number, ordering_key=f"b{number % 2}")
    send("free")
    relayed(recorder, batch_size=10)
    others = [m for m in recorder.messages if m.topic == "other"]
    assert {"other", "free"} == set(recorder.topics[1:])
    assert [m.payload for m in others if m.ordering_key == "b0"] == [0, 2, 4, 6, 8, 10]
    assert [m.payload for m in others if m.ordering_key == "b1"] == [1, 3, 5, 7, 9, 11]
    recorder.faults.clear()
    outbox.redrive(OutboxMessage.objects.filter(status=MessageStatus.DEAD))
    relayed(recorder, batch_size=10)
    assert [m.payload for m in recorder.messages if m.topic == "behind"] == list(range(25))


def test_what_a_relay_left_behind_waits_for_a_redriven_head(recorder: Recorder) -> None:
    head, follower = send("head", ordering_key="a"), send("follower", ordering_key="a")
    vanished = claim("default", 10, 60)
    assert vanished is not None
    assert vanished.dead(head.pk, "") == 1
    send("last", ordering_key="a")
    outbox.redrive(OutboxMessage.objects.filter(pk=head.pk))
    make_due()
    assert row(follower).owner == vanished.owner
    relayed(recorder)
    assert recorder.topics == ["head", "follower", "last"]


@pytest.mark.django_db(transaction=True)
def test_keys_that_differ_in_case_hold_up_each_their_own() -> None:
    """For MariaDB's usual collations they are equal."""
    for topic, key in (("first", "A"), ("second", "a"), ("third", "a")):
        send(topic, ordering_key=key)
    held = claim("default", 2, 60)
    assert held is not None
    assert claim("default", 2, 60) is None
    assert held.sent([message.pk for message in held.messages]) == 2
    left = claim("default", 2, 60)
    assert left is not None
    assert [message.topic for message in left.messages] == ["third"]


def test_the_order_is_that_of_writing_not_of_what_became_due_first(recorder: Recorder) -> None:
    first, second = send("first", ordering_key="a"), send("second", ordering_key="a")
    for message, hours in ((first, 2), (second, 1)):
        rows = OutboxMessage.objects.filter(pk=message.pk)
        rows.update(available_at=PAST + timedelta(hours=hours))
    relayed(recorder)
    assert recorder.topics == ["first", "second"]


def test_a_head_is_found_through_the_partial_index() -> None:
    """The query has to say the index's condition in the words the database knows it by."""
    connection = connections["default"]
    sql = statements("default")
    explain = "EXPLAIN QUERY PLAN" if connection.vendor == "sqlite" else "EXPLAIN"
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(f"{explain} {sql.heads}", [10])
        assert "idempotency_msg_order" in str(cursor.fetchall())


def test_an_unknown_rule_for_dead_heads_is_an_error(settings: Any, recorder: Recorder) -> None:
    settings.IDEMPOTENCY |= {"OUTBOX_DEAD_HEAD": "ignore"}
    send()
    with pytest.raises(ConfigurationError, match="OUTBOX_DEAD_HEAD"):
        relayed(recorder)


# Stopping


def test_a_stopped_relay_finishes_the_message_in_hand_and_gives_the_others_back(
    recorder: Recorder,
) -> None:
    for number in range(3):
        send(str(number))
    worker = outbox.Relay(publisher=recorder)
    recorder.before = lambda message: worker.stop()
    worker.run()
    assert recorder.topics == ["0"]
    assert worker.summary == outbox.Summary(sent=1)
    assert list(OutboxMessage.objects.order_by("pk").values_list("attempts", "owner")[1:]) == [
        (0, ""),
        (0, ""),
    ]
    recorder.before = lambda message: None
    assert relayed(recorder) == outbox.Summary(sent=2)


def test_an_exit_in_the_middle_of_a_batch_loses_nothing(recorder: Recorder) -> None:
    for topic in ("done", "exit", "later"):
        send(topic)

    def leave(message: outbox.Message) -> None:
        if message.topic == "exit":
            raise KeyboardInterrupt

    recorder.before = leave
    with pytest.raises(KeyboardInterrupt):
        relayed(recorder)
    assert statuses() == {"done": "sent", "exit": "pending", "later": "pending"}
    recorder.before = lambda message: None
    relayed(recorder)
    assert recorder.topics == [
        "done",
        "later",
    ]  # how `exit` ended is unknown until its lease is over
    make_due()
    relayed(recorder)
    assert recorder.topics == ["done", "later", "exit"]
