"""Handlers: each once per message, whatever is repeated around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import ProgrammingError

from idempotency import engine, outbox
from idempotency.conf import conf
from idempotency.exceptions import ConfigurationError, KeyExpired, ResponseNotRetained
from idempotency.models import MessageStatus, Operation, OutboxMessage
from idempotency.outbox import handlers
from idempotency.outbox.claims import Claims
from tests.app.models import Effect
from tests.callers import age
from tests.outboxes import make_due, row, send, statuses

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _long_backoff(settings: Any) -> None:
    """What has failed is not due again before the test says so, however slow the machine is."""
    settings.IDEMPOTENCY = {"OUTBOX_BACKOFF": 60}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, handlers.Handler]:
    """A registry of this test's own."""
    empty: dict[str, handlers.Handler] = {}
    monkeypatch.setattr(handlers, "_handlers", empty)
    return empty


def effect(
    label: str, *topics: str, fault: Callable[[], Any] = lambda: None, **options: Any
) -> None:
    """Register a handler that leaves one effect and then meets its fault."""

    @outbox.handler(*topics, name=label, **options)
    def handle(message: outbox.Message) -> None:
        using = options.get("using") or message.using
        Effect.objects.using(using).create(label=label, amount=message.payload)
        fault()


class Fault:
    """Raises the next of these errors, then nothing any more."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


def labels(using: str = "default") -> list[str]:
    return sorted(Effect.objects.using(using).values_list("label", flat=True))


def test_every_handler_of_a_matching_topic_gets_the_message() -> None:
    effect("mail", "order.*")
    effect("stock", "order.created", "order.cancelled")
    effect("audit", "*")
    effect("other", "invoice.*")
    send("order.created", 1)
    assert outbox.relay() == outbox.Summary(sent=1)
    assert labels() == ["audit", "mail", "stock"]
    send("order.paid", 2)
    outbox.relay()
    assert labels() == ["audit", "audit", "mail", "mail", "stock"]


def test_a_failing_handler_is_run_again_and_the_others_are_not() -> None:
    effect("first", "t")
    effect("second", "t", fault=Fault(ValueError("once"), ValueError("twice")))
    effect("third", "t")
    message = send("t", 1)
    assert outbox.relay() == outbox.Summary(retried=1)
    assert labels() == ["first", "third"]
    for _ in range(2):
        make_due()
        outbox.relay()
    assert labels() == ["first", "second", "third"]
    assert (row(message).status, row(message).attempts) == (MessageStatus.SENT, 3)


def test_a_message_that_is_published_twice_has_one_effect() -> None:
    effect("mail", "t")
    message = send("t", 1)
    outbox.relay()
    OutboxMessage.objects.update(status=MessageStatus.PENDING)  # as if the mark had been lost
    make_due()
    assert outbox.relay() == outbox.Summary(sent=1)
    assert labels() == ["mail"]
    operation = Operation.objects.get(key=str(message.message_id))
    assert (operation.scope, operation.name, operation.attempt) == ("outbox|mail", "mail", 1)


def test_the_effects_of_a_failed_handler_are_rolled_back_with_the_messages_it_wrote() -> None:
    fault = Fault(ValueError())

    @outbox.handler("order.paid")
    def ship(message: outbox.Message) -> None:
        Effect.objects.create(label="ship")
        outbox.enqueue("order.shipped", message.payload)
        fault()

    effect("shipped", "order.shipped")
    send("order.paid", 1)
    outbox.relay()
    assert labels() == []
    assert list(statuses()) == ["order.paid"]
    make_due()
    outbox.relay()
    assert labels() == ["ship", "shipped"]
    shipped = OutboxMessage.objects.get(topic="order.shipped")
    assert shipped.operation is not None
    assert shipped.operation.name == f"{ship.__module__}.{ship.__qualname__}"[:200]


def test_a_permanent_failure_waits_until_nothing_else_can_be_retried() -> None:
    closed = outbox.PermanentFailure("closed")
    effect("dead", "t", fault=Fault(closed, closed))
    effect("slow", "t", fault=Fault(outbox.RetryAfter(1)))
    message = send("t", 1)
    assert outbox.relay() == outbox.Summary(retried=1)
    make_due()
    assert outbox.relay() == outbox.Summary(dead=1)
    assert labels() == ["slow"]
    assert row(message).last_error == "PermanentFailure: closed"


def test_a_redriven_message_runs_only_the_handlers_that_had_failed_even_with_a_mended_payload() -> (
    None
):
    effect("fine", "t")
    effect("broken", "t", fault=Fault(outbox.PermanentFailure("no")))
    message = send("t", 1)
    outbox.relay()
    dead = OutboxMessage.objects.filter(status=MessageStatus.DEAD)
    dead.update(payload="2")
    outbox.redrive(dead)
    assert outbox.relay() == outbox.Summary(sent=1)
    assert list(Effect.objects.order_by("pk").values_list("label", "amount")) == [
        ("fine", 1),
        ("broken", 2),
    ]
    assert row(message).status == MessageStatus.SENT


def test_a_handler_that_has_run_is_known_by_its_tombstone(settings: Any) -> None:
    settings.IDEMPOTENCY |= {"TOMBSTONE": 3600}
    effect("mail", "t")
    message = send("t", 1)
    outbox.relay()
    age(str(message.message_id), tombstone=False)
    OutboxMessage.objects.update(status=MessageStatus.PENDING)
    make_due()
    assert outbox.relay() == outbox.Summary(sent=1)
    assert labels() == ["mail"]


@pytest.mark.parametrize("refusal", [KeyExpired, ResponseNotRetained])
def test_what_another_operation_no_longer_knows_is_a_failure_of_the_handler(refusal: Any) -> None:
    """Not a sign that the handler has run: its effects are rolled back."""
    effect("mail", "t", fault=Fault(refusal()))
    send("t", 1)
    assert outbox.relay() == outbox.Summary(retried=1)
    make_due()
    assert outbox.relay() == outbox.Summary(sent=1)
    assert labels() == ["mail"]


def test_what_is_async_would_never_run_and_is_refused() -> None:
    async def take(message: outbox.Message) -> None: ...

    with pytest.raises(ConfigurationError, match="is async"):
        outbox.handler("t")(take)
    with pytest.raises(ConfigurationError, match="is async"):
        outbox.relay(publisher=take)


def test_what_the_project_wants_of_requests_is_not_what_handlers_do(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One transaction, and no waiting for another relay; remembered as long as dead letters are re-driven."""
    settings.IDEMPOTENCY |= {"STEPWISE": True, "WAIT": 20, "RETENTION": 60}
    intents: list[engine.Intent] = []
    run = engine.run

    def spy(intent: engine.Intent, handler: Any) -> Any:
        intents.append(intent)
        return run(intent, handler)

    monkeypatch.setattr(engine, "run", spy)
    effect("default", "t")
    effect("longer", "t", retention=timedelta(days=90))
    send("t", 1)
    outbox.relay()
    assert [(i.policy.stepwise, i.policy.wait) for i in intents] == [(False, timedelta(0))] * 2
    default, longer = (intent.policy.retention for intent in intents)
    assert default.total_seconds() == conf.OUTBOX_HANDLER_RETENTION
    assert longer == timedelta(days=90)


def test_a_topic_without_a_handler_fails_alone_until_one_is_deployed() -> None:
    """BUGS S18."""
    effect("known", "known")
    send("unknown", 1)
    send("known", 1)
    assert outbox.relay() == outbox.Summary(sent=1, retried=1)
    unknown = OutboxMessage.objects.get(topic="unknown")
    assert unknown.last_error == "UnknownTopic: no handler for topic 'unknown'"
    effect("late", "unknown")
    make_due()
    outbox.relay()
    assert labels() == ["known", "late"]


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_handler_commits_with_the_database_of_its_effects() -> None:
    effect("here", "t", using="other", fault=Fault(ValueError()))
    message = send("t", 1)
    outbox.relay()
    assert labels("other") == []
    make_due()
    outbox.relay()
    assert labels("other") == ["here"]
    assert Operation.objects.using("other").filter(key=str(message.message_id)).count() == 1
    assert not Operation.objects.using("default").exists()


def test_the_running_handler_is_the_current_operation() -> None:
    seen = []
    outbox.handler("t", name="look")(lambda message: seen.append(engine.current()))
    send("t", 1)
    outbox.relay()
    assert [operation and operation.name for operation in seen] == ["look"]


def test_handlers_are_found_in_the_outbox_handlers_module_of_an_app() -> None:
    sys.modules.pop("tests.app.outbox_handlers", None)
    handlers._discover.cache_clear()
    send("testapp.discovered", 1)
    assert outbox.relay() == outbox.Summary(sent=1)
    assert labels() == ["discovered"]


def test_two_handlers_cannot_share_a_name() -> None:
    def one(message: outbox.Message) -> None: ...
    def two(message: outbox.Message) -> None: ...

    outbox.handler("a", name="taken")(one)
    outbox.handler("b", name="taken")(one)  # a module imported again
    with pytest.raises(ConfigurationError, match="Two outbox handlers are named 'taken'"):
        outbox.handler("a", name="taken")(two)
    with pytest.raises(ConfigurationError, match="Name the topics"):
        outbox.handler()


def test_the_beat_task_relays_what_is_due() -> None:
    from idempotency.tasks import BEAT_SCHEDULE, relay_outbox

    effect("mail", "t")
    send("t", 1)
    entry = BEAT_SCHEDULE["idempotency-relay-outbox"]
    assert entry["task"] == relay_outbox.name
    assert relay_outbox(**entry["kwargs"]) == {"sent": 1, "retried": 0, "dead": 0}
    assert labels() == ["mail"]


def test_the_command_relays_once_and_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    effect("mail", "t")
    for number in range(3):
        send("t", number)
    send("unknown", 1)
    call_command("relay_outbox", once=True, batch_size=2)
    assert capsys.readouterr().out == "3 sent, 1 to be tried again, 0 dead letters.\n"
    assert labels() == ["mail"] * 3


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_command_relays_the_database_it_is_told() -> None:
    effect("mail", "t")
    send("t", 1, using="other")
    call_command("relay_outbox", once=True, database="other", verbosity=0)
    assert labels("other") == ["mail"]


def test_the_command_refuses_options_that_make_no_sense(settings: Any) -> None:
    with pytest.raises(CommandError, match=r"--batch-size must be more than 0\."):
        call_command("relay_outbox", once=True, batch_size=0)
    settings.IDEMPOTENCY |= {"OUTBOX_PUBLISHER": "shop.no_such_module.publisher"}
    with pytest.raises(CommandError, match="OUTBOX_PUBLISHER"):
        call_command("relay_outbox", once=True)


def test_the_command_says_when_the_database_cannot_be_relayed_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BUGS I11."""

    def take(self: Claims, finish: Any = None) -> None:
        raise ProgrammingError("no such table")

    monkeypatch.setattr(Claims, "take", take)
    with pytest.raises(CommandError, match="The relay of 'default' stopped: no such table"):
        call_command("relay_outbox")
