"""From unknown to settled: reconcilers, resolution from outside, completer, hand-over."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from celery import shared_task
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection
from django.db.models import F
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils import timezone

from idempotency import engine, reconciliation, signals, tasks
from idempotency.completion import complete_abandoned
from idempotency.contrib.celery import idempotent_task
from idempotency.decorators import idempotent
from idempotency.exceptions import (
    ConfigurationError,
    IllegalTransition,
    InProgress,
    OutcomeUnknown,
    StoredFailure,
)
from idempotency.functions import idempotent_function
from idempotency.models import EventKind, Operation, Outcome, Status
from idempotency.policies import Policy
from idempotency.reconciliation import (
    Absent,
    Confirmed,
    Report,
    StillUnknown,
    reconcile_due,
    reconciler,
    resolve,
    resolve_by_reference,
)
from idempotency.retention import purge
from tests import shops
from tests.callers import effects, events, intent, is_replay, new_key, post, problem, succeed
from tests.processes import in_threads
from tests.shops import age, age_all, find

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconcilers of one test are unknown to the next."""
    monkeypatch.setattr(reconciliation, "_reconcilers", {})


@pytest.fixture(autouse=True)
def _provider(tmp_path: Path) -> None:
    shops.provider.open(tmp_path)


def in_doubt(**policy: Any) -> str:
    """The key of a plain operation that does not know what it did."""
    key = new_key()
    begun = engine.begin(intent(key, **policy))
    assert not isinstance(begun, engine.Replay)
    begun.fail(OutcomeUnknown(operation_id=begun.operation.pk, provider_ref=f"ch-{key}"))
    age(key=key)
    return key


def in_doubt_stepwise(style: str = "asked", behaviour: str = "charged") -> str:
    key = new_key()
    shops.provider.behaviour = behaviour
    assert shops.tried(key, style) == "OutcomeUnknown"
    age(key=key)
    return key


def answering(*answers: Any, name: str = "effect", **options: Any) -> list[Operation]:
    """Register a reconciler that gives these answers; returns the operations it was asked about."""
    asked: list[Operation] = []
    left = list(answers)

    @reconciler(name, **options)
    def ask(operation: Operation) -> Any:
        asked.append(operation)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return asked


# Asking


def test_a_confirmed_plain_operation_succeeds_with_the_result() -> None:
    key = in_doubt()
    asked = answering(Confirmed({"charge": "ch_1"}))
    assert reconcile_due() == Report(asked=1, settled=1)
    assert [operation.key for operation in asked] == [key]
    result = engine.run(intent(key), succeed)
    assert result.replayed
    assert json.loads(result.outcome.body or b"") == {"charge": "ch_1"}
    assert events(key)[:2] == [
        (EventKind.RECONCILING, "The outcome of this operation is being checked."),
        (EventKind.RESOLVED, "succeeded: reconciler"),
    ]


def test_an_absent_plain_operation_runs_again_with_the_same_downstream_key() -> None:
    key = in_doubt()
    before = find(key)
    answering(Absent())
    assert reconcile_due() == Report(asked=1, rerun=1)
    purge()  # it is not over, only free
    result = engine.run(intent(key), succeed)
    assert not result.replayed
    assert (effects(key), result.operation.attempt) == (1, before.attempt + 1)
    assert result.operation.derive_key("charge") == before.derive_key("charge")


def test_an_outcome_is_replayed_as_it_is() -> None:
    key = in_doubt()
    answering(Outcome(status=Status.FAILED, code=402, body=b"declined"))
    reconcile_due()
    assert engine.run(intent(key), succeed).outcome.code == 402
    assert effects(key) == 0


def test_the_policy_of_a_reconciler_gives_retention_and_codec() -> None:
    class Backwards:
        def encode(self, body: bytes) -> bytes:
            return body[::-1]

        decode = encode

    policy = Policy(retention=timedelta(days=30), codec=Backwards())
    key = in_doubt()
    answering(Confirmed("paid"), policy=policy)
    reconcile_due()
    operation = find(key)
    assert bytes(operation.body or b"") == b'"diap"'
    assert operation.expires_at is not None
    assert operation.expires_at - timezone.now() > timedelta(days=29)
    assert engine.run(intent(key, codec=Backwards()), succeed).outcome.body == b'"paid"'


def test_questions_are_asked_with_growing_pauses() -> None:
    key = in_doubt()
    asked = answering(*[StillUnknown()] * 5)
    pauses = []
    for _ in range(4):
        assert reconcile_due() == Report(asked=1, waiting=1)
        assert reconcile_due() == Report()
        pauses.append((find(key).due_at - timezone.now()).total_seconds())
        age(key=key)
    assert len(asked) == 4
    assert [round(pause, -1) for pause in pauses] == sorted(round(pause, -1) for pause in pauses)
    assert pauses[3] > 6 * pauses[0] > 0


def test_nobody_asks_twice_at_the_same_time() -> None:
    key = in_doubt()
    nested: list[Report] = []

    @reconciler("effect")
    def ask(operation: Operation) -> StillUnknown:
        nested.append(reconcile_due())
        return StillUnknown()

    reconcile_due()
    assert nested == [Report()]
    assert find(key).checks == 1


@pytest.mark.parametrize(
    "answer",
    [
        ConnectionError("secret"),
        None,
        "confirmed",
        Outcome(status="processing"),
        Confirmed(object()),
    ],
)
def test_a_reconciler_that_fails_or_answers_nonsense_settles_nothing(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    key = in_doubt()
    answering(answer)
    assert reconcile_due() == Report(asked=1, waiting=1)
    assert find(key).status == Status.RECONCILING
    kind, detail = events(key)[-1]
    assert kind == EventKind.ATTEMPT_FAILED
    assert "secret" not in detail + caplog.text


@pytest.mark.parametrize("answer", [StillUnknown(), ConnectionError()])
def test_an_operation_that_nobody_can_settle_is_handed_over_once(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    key = in_doubt()
    asked = answering(answer, answer)
    age_all(days=2)
    with caplog.at_level("ERROR", "idempotency"):
        assert reconcile_due() == Report(asked=1, handed_over=1)
    assert str(find(key).pk) in caplog.text
    assert events(key)[-1] == (EventKind.HANDED_OVER, "")
    Operation.objects.filter(key=key).update(due_at=F("due_at") - timedelta(days=365))
    assert reconcile_due() == Report()
    assert len(asked) == 1
    purge()
    resolve(find(key), Confirmed("a person has looked"), evidence="support")
    assert find(key).status == Status.SUCCEEDED


def test_without_a_reconciler_it_waits_and_is_handed_over() -> None:
    key = in_doubt()
    assert reconcile_due() == Report(asked=1, waiting=1)
    age(key=key)
    age_all(days=2)
    assert reconcile_due() == Report(asked=1, handed_over=1)


def test_the_age_of_an_open_step_counts_not_that_of_its_operation() -> None:
    key = in_doubt_stepwise("nobody knows")
    Operation.objects.filter(key=key).update(created_at=F("created_at") - timedelta(days=2))
    assert reconcile_due() == Report(asked=1, waiting=1)


def test_one_name_has_one_reconciler() -> None:
    answering()
    with pytest.raises(ConfigurationError, match="two reconcilers"):
        answering()


def test_the_calls_own_reconciler_is_asked_first() -> None:
    key = in_doubt_stepwise("asked")
    asked = answering(name="shop.pay")
    assert reconcile_due() == Report(asked=1, rerun=1)
    assert asked == []
    assert complete_abandoned().settled == 1
    shops.assert_consistent(key)


def test_a_named_reconciler_answers_for_calls_without_one() -> None:
    key = in_doubt_stepwise("unprotected")
    answering(Confirmed("ch_found"), name="shop.pay")
    assert reconcile_due() == Report(asked=1, rerun=1)
    complete_abandoned()
    assert (find(key).status, shops.orders(key)) == (Status.SUCCEEDED, 1)
    assert shops.pay(key, "unprotected") == "ch_found"


def test_confirming_a_stepwise_operation_without_an_open_call_ends_it() -> None:
    key = new_key()
    begun = engine.begin(intent(key, stepwise=True))
    assert not isinstance(begun, engine.Replay)
    begun.fail(OutcomeUnknown(operation_id=begun.operation.pk))
    resolve(find(key), Confirmed("paid"), evidence="support")
    assert find(key).status == Status.SUCCEEDED


def test_only_what_is_due_is_asked_about_the_longest_overdue_first() -> None:
    keys = [in_doubt() for _ in range(3)]
    now = timezone.now()
    for key, minutes in zip(keys, (10, 30, -10), strict=True):
        Operation.objects.filter(key=key).update(due_at=now - timedelta(minutes=minutes))
    asked = answering(*[StillUnknown()] * 3)
    reconcile_due(limit=1)
    reconcile_due()
    assert [operation.key for operation in asked] == [keys[1], keys[0]]


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_operations_of_another_database_are_asked_about_there() -> None:
    key = in_doubt(using="default")
    other = new_key()
    begun = engine.begin(intent(other, using="other"))
    assert not isinstance(begun, engine.Replay)
    begun.fail(OutcomeUnknown(operation_id=begun.operation.pk))
    past = timezone.now() - timedelta(hours=1)
    Operation.objects.using("other").filter(key=other).update(due_at=past)
    answering(Confirmed("paid"))
    assert reconcile_due("other").settled == 1
    assert Operation.objects.using("other").get(key=other).status == Status.SUCCEEDED
    assert find(key).status == Status.RECONCILING


# Settling from outside


def test_a_webhook_settles_by_the_providers_reference_and_may_come_twice() -> None:
    key = in_doubt()
    [resolved] = resolve_by_reference(f"ch-{key}", Confirmed("paid"), evidence="webhook")
    assert (resolved.key, find(key).status) == (key, Status.SUCCEEDED)
    assert resolve_by_reference(f"ch-{key}", Absent(), evidence="webhook") == []
    assert find(key).status == Status.SUCCEEDED


def test_an_answer_that_is_none_is_an_error_not_a_late_webhook() -> None:
    key = in_doubt()
    for answer, error in ((None, TypeError), (Outcome(status="processing"), IllegalTransition)):
        with pytest.raises(error):
            resolve_by_reference(f"ch-{key}", answer, evidence="webhook")  # type: ignore[arg-type]
    assert find(key).status == Status.RECONCILING


def test_webhooks_at_once_settle_once() -> None:
    key = in_doubt()

    def webhook() -> int:
        return len(resolve_by_reference(f"ch-{key}", Confirmed(), evidence="webhook"))

    assert sum(in_threads([webhook] * 6)) == 1


def test_a_reference_of_another_kind_is_not_the_providers() -> None:
    key = in_doubt()
    find(key).refer("order", 42)
    assert resolve_by_reference("42", Confirmed(), evidence="webhook") == []
    assert resolve_by_reference("42", Confirmed(), evidence="w", name="order") == [find(key)]


def test_a_long_reference_is_found() -> None:
    key = in_doubt()
    find(key).refer("provider", "x" * 400)
    assert resolve_by_reference("x" * 399 + "y", Confirmed(), evidence="webhook") == []
    assert len(resolve_by_reference("x" * 400, Confirmed(), evidence="webhook")) == 1


def test_an_answer_about_the_past_settles_nothing() -> None:
    """A slow reconciler: the operation was settled, ran again, and is in doubt about something else."""
    key = in_doubt()
    stale = find(key)
    resolve(find(key), Absent(), evidence="webhook")
    begun = engine.begin(intent(key))
    assert not isinstance(begun, engine.Replay)
    begun.fail(OutcomeUnknown(operation_id=begun.operation.pk))
    with pytest.raises(IllegalTransition, match="gone on"):
        resolve(stale, Absent(), evidence="slow")
    assert find(key).status == Status.RECONCILING


def test_a_webhook_that_is_faster_than_the_reconciler_wins() -> None:
    key = in_doubt()

    @reconciler("effect")
    def ask(operation: Operation) -> Absent:
        resolve_by_reference(f"ch-{key}", Confirmed("paid"), evidence="webhook")
        return Absent()

    assert reconcile_due() == Report(asked=1, settled=1)
    assert find(key).status == Status.SUCCEEDED
    assert [kind for kind, _ in events(key)] == [EventKind.RECONCILING, EventKind.RESOLVED]


@pytest.mark.parametrize("answer", [None, StillUnknown(), "paid", True])
def test_only_an_answer_settles(answer: Any) -> None:
    key = in_doubt()
    with pytest.raises(TypeError, match="settles nothing"):
        resolve(find(key), answer, evidence="oops")
    assert find(key).status == Status.RECONCILING


def test_what_is_gone_cannot_be_settled() -> None:
    operation = find(in_doubt())
    Operation.objects.all().delete()
    with pytest.raises(IllegalTransition, match="gone"):
        resolve(operation, Absent(), evidence="late")


def test_settling_is_announced() -> None:
    key, seen = in_doubt(), []

    def receiver(operation: Operation, **kwargs: Any) -> None:
        seen.append((operation.key, operation.status))

    signals.operation_finished.connect(receiver)
    try:
        resolve(find(key), Confirmed(), evidence="webhook")
    finally:
        signals.operation_finished.disconnect(receiver)
    assert seen == [(key, Status.SUCCEEDED)]


@pytest.mark.parametrize("stepwise", [True, False])
def test_an_operation_that_was_given_up_gets_new_tries_when_it_is_settled(stepwise: bool) -> None:
    """BUGS T06: It took down its executors; a person has found out why, and lets it run again."""
    key = new_key()
    dead = Outcome(status=Status.FAILED, body=b'"dead"')
    found = replace(intent(key, stepwise=stepwise, on_interrupted="rerun"), give_up=(1, dead))
    begun = engine.begin(found)
    assert not isinstance(begun, engine.Replay)
    begun.fail(OutcomeUnknown(operation_id=begun.operation.pk))
    Operation.objects.filter(key=key).update(interruptions=1)
    resolve(find(key), Absent(), evidence="support")
    again = engine.begin(found)
    assert not isinstance(again, engine.Replay)
    again.complete(Outcome(status=Status.SUCCEEDED))
    assert find(key).status == Status.SUCCEEDED


# The completer


@shared_task(name="tests.reconciliation.task")
@idempotent_task(key=lambda key: key, stepwise=True, lease=600)
def task(key: str) -> str:
    return job.__wrapped__(key)  # type: ignore[attr-defined, no-any-return]


def test_an_abandoned_task_is_run_again_with_its_arguments() -> None:
    key = abandon(task)
    assert complete_abandoned() == Report(asked=1, settled=1)
    assert (find(key).status, shops.stock(key)) == (Status.SUCCEEDED, -1)


body_of_call: list[Any] = []


@idempotent_function(name="job", key=lambda key, **kwargs: key, stepwise=True, lease=600)
def job(key: str, *, amount: Any = None) -> Any:
    operation = engine.current()
    assert operation is not None
    body_of_call.append((key, amount))
    operation.step("one", shops.reserve, key)
    if failures_of_job:
        raise failures_of_job.pop()
    return amount


@idempotent_function(name="async-job", key=lambda key: key, stepwise=True, lease=600)
async def async_job(key: str) -> str:
    operation = engine.current()
    assert operation is not None
    await operation.astep("one", shops.reserve, key)
    if failures_of_job:
        raise failures_of_job.pop()
    return "async"


failures_of_job: list[BaseException] = []


@pytest.fixture(autouse=True)
def _jobs() -> Iterator[None]:
    yield
    body_of_call.clear()
    failures_of_job.clear()


def abandon(call: Any, *args: Any, **kwargs: Any) -> str:
    """The key of a call that was interrupted after its first step."""
    key = new_key()
    failures_of_job.append(SystemExit())
    with pytest.raises(SystemExit):
        call(key, *args, **kwargs)
    age(key=key)
    return key


def test_an_abandoned_function_is_run_again_with_its_arguments() -> None:
    key = abandon(job, amount=Decimal("1.10"))
    assert complete_abandoned() == Report(asked=1, settled=1)
    assert body_of_call == [(key, Decimal("1.10"))] * 2
    assert shops.stock(key) == -1
    assert job(key, amount=Decimal("1.10")) == Decimal("1.10")


def test_an_abandoned_async_function_is_run_again() -> None:
    key = new_key()
    failures_of_job.append(ConnectionError())
    with pytest.raises(ConnectionError):
        async_to_sync(async_job)(key)
    age(key=key)
    assert complete_abandoned() == Report(asked=1, settled=1)
    assert (find(key).status, shops.stock(key)) == (Status.SUCCEEDED, -1)


def test_a_deadlock_over_who_looks_does_not_end_the_completer() -> None:
    key = abandon(job)
    deadlocks = [OperationalError(1213, "Deadlock found when trying to get lock")]

    def deadlock(execute: Any, sql: str, *args: Any) -> Any:
        if deadlocks and sql.startswith("UPDATE") and "due_at" in sql:
            raise deadlocks.pop()
        return execute(sql, *args)

    with connection.execute_wrapper(deadlock):
        assert complete_abandoned() == Report(asked=1, settled=1)
    assert (deadlocks, shops.stock(key)) == ([], -1)


def test_a_function_whose_lease_is_alive_is_left_alone() -> None:
    key = abandon(job)
    Operation.objects.filter(key=key).update(lease_expires_at=timezone.now() + timedelta(hours=1))
    for _ in range(3):
        assert complete_abandoned() == Report()
    assert len(body_of_call) == 1
    # However long it took: when its executor vanishes, it is looked at as soon as the lease is over.
    Operation.objects.filter(key=key).update(lease_expires_at=timezone.now())
    assert complete_abandoned().asked == 1


def test_a_function_that_keeps_failing_is_tried_with_growing_pauses_then_handed_over() -> None:
    key = abandon(job)
    pauses = []
    for _ in range(4):
        failures_of_job.append(ConnectionError())
        assert complete_abandoned() == Report(asked=1, waiting=1)
        assert complete_abandoned() == Report()
        pauses.append((find(key).due_at - timezone.now()).total_seconds())
        age(key=key)
    assert pauses[3] > 6 * pauses[0] > 0
    age_all(days=2)
    failures_of_job.append(ConnectionError())
    assert complete_abandoned() == Report(asked=1, handed_over=1)
    assert complete_abandoned() == Report()
    assert events(key)[-1] == (EventKind.HANDED_OVER, "")
    assert job(key) is None  # a person, or the caller, may still go on with it


def test_a_function_that_ends_with_a_stored_failure_is_settled() -> None:
    key = new_key()
    shops.provider.behaviour = "decline"
    begun = engine.begin(shops.pay.idempotency_intent((key, "asked"), {}))  # type: ignore[attr-defined]
    assert not isinstance(begun, engine.Replay)
    age(key=key)
    assert complete_abandoned() == Report(asked=1, settled=1)
    with pytest.raises(StoredFailure):
        shops.pay(key, "asked")
    assert find(key).status == Status.REVERSED


def test_a_function_that_does_not_know_either_waits_for_the_reconciler() -> None:
    key = new_key()
    begun = engine.begin(shops.pay.idempotency_intent((key, "unprotected"), {}))  # type: ignore[attr-defined]
    assert not isinstance(begun, engine.Replay)
    shops.provider.behaviour = "charged"
    age(key=key)
    assert complete_abandoned() == Report(asked=1, waiting=1)
    assert find(key).status == Status.RECONCILING


def test_a_function_that_is_gone_is_tried_later_and_handed_over_in_the_end() -> None:
    key = abandon(job)
    Operation.objects.filter(key=key).update(
        arguments='{"function":"tests.gone.job","args":[],"kwargs":{}}'
    )
    assert complete_abandoned() == Report(asked=1, waiting=1)
    age(key=key)
    age_all(days=2)
    assert complete_abandoned() == Report(asked=1, handed_over=1)


@idempotent(required=True, name="view", stepwise=True, lease=600)
def view(request: HttpRequest) -> HttpResponse:
    key = request.operation.key
    request.operation.step("reserve", shops.reserve, key, compensate=shops.unreserve)
    request.operation.call(
        "charge",
        shops.provider.charge,
        request.operation.derive_key("charge"),
        5,
        reconcile=shops.look_up,
    )
    if failures_of_job:
        error = failures_of_job.pop()
        if isinstance(error, ValueError):
            return HttpResponse("sold out", status=409)
        raise error
    return JsonResponse({}, status=201)


def test_a_view_is_not_run_without_its_client_but_shown_to_people() -> None:
    key = new_key()
    failures_of_job.append(KeyError())
    assert post(view, key).status_code == 500
    age(key=key)
    assert complete_abandoned() == Report(asked=1, waiting=1)
    age(key=key)
    age_all(days=2)
    assert complete_abandoned() == Report(asked=1, handed_over=1)
    assert find(key).status == Status.PROCESSING
    assert post(view, key).status_code == 201  # its client may still come back
    assert shops.provider.charges(shops.downstream(key)) == 1


@pytest.mark.parametrize("behaviour", ["charged", "timeout"])
def test_a_view_that_vanished_in_a_call_is_asked_about(
    behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    shops.provider.behaviour = behaviour

    def vanish(*args: Any) -> None:
        raise SystemExit

    monkeypatch.setattr("idempotency.steps.StepwiseExecution._broke", vanish)
    with pytest.raises(SystemExit):
        post(view, key)
    monkeypatch.undo()
    age(key=key)
    assert complete_abandoned() == Report(asked=1, waiting=1)
    assert find(key).status == Status.RECONCILING
    assert problem(post(view, key)) == "outcome-unknown"
    assert reconcile_due() == Report(asked=1, rerun=1)
    assert post(view, key).status_code == 201
    assert shops.provider.charges(shops.downstream(key)) == 1


def test_a_compensation_of_a_view_is_finished_without_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = new_key()
    failures_of_job.append(ValueError())

    def fail(result: Any, key: str) -> None:
        raise ConnectionError

    monkeypatch.setattr(shops.unreserve, "__code__", fail.__code__)
    assert post(view, key).status_code == 500
    age(key=key)
    assert complete_abandoned() == Report(asked=1, waiting=1)
    monkeypatch.undo()
    age(key=key)
    assert complete_abandoned() == Report(asked=1, settled=1)
    assert (find(key).status, shops.stock(key)) == (Status.REVERSED, 0)
    response = post(view, key)
    assert (response.status_code, response.content, is_replay(response)) == (409, b"sold out", True)


def test_two_completers_do_not_run_the_same_operation() -> None:
    key = abandon(job)
    stale = list(Operation.objects.filter(key=key))
    assert reconciliation.postpone(stale[0], 60)
    assert not reconciliation.postpone(stale[0], 60)
    assert complete_abandoned() == Report()


def test_an_action_that_nobody_takes_is_asked_about_after_its_window() -> None:
    key = new_key()
    begun = engine.begin(intent(key, stepwise=True))
    assert not isinstance(begun, engine.Replay)
    begun.operation.requires_action("3-d-secure")
    begun.complete(Outcome(status=Status.SUCCEEDED, code=202))
    assert reconcile_due() == Report()
    past = timezone.now() - timedelta(hours=1)
    Operation.objects.filter(key=key).update(due_at=past, expires_at=past, tombstone_until=past)
    answering(Confirmed({"paid": True}))
    assert reconcile_due() == Report(asked=1, rerun=1)
    again = engine.begin(intent(key, stepwise=True))
    assert not isinstance(again, engine.Replay)
    assert again.operation.requires_action("3-d-secure") == {"paid": True}


# Doors


def test_the_tasks_report_what_they_did() -> None:
    in_doubt()
    answering(Confirmed())
    abandon(job)
    done: Any = tasks.reconcile.apply().get()
    assert (done["asked"], done["settled"]) == (1, 1)
    done = tasks.complete.apply(kwargs={"limit": 10}).get()
    assert (done["asked"], done["settled"]) == (1, 1)


def test_the_command_does_both_and_says_what_is_left_to_people() -> None:
    in_doubt()
    abandon(job)
    age_all(days=2)
    out, err = StringIO(), StringIO()
    call_command("reconcile_operations", stdout=out, stderr=err)
    assert out.getvalue().splitlines() == [
        "Outcome unknown: 1 due, 0 settled, 0 to run again, 0 waiting, 1 handed over to people.",
        "Without executor: 1 due, 1 settled, 0 to run again, 0 waiting, 0 handed over to people.",
    ]
    assert "waiting for a person" in err.getvalue()


def test_the_command_can_be_quiet_and_checks_its_arguments() -> None:
    out, err = StringIO(), StringIO()
    call_command(
        "reconcile_operations", "--database", "default", verbosity=0, stdout=out, stderr=err
    )
    assert out.getvalue() == err.getvalue() == ""
    with pytest.raises(CommandError, match="at least 1"):
        call_command("reconcile_operations", "--limit", "0")


def test_a_running_operation_cannot_be_settled() -> None:
    key = new_key()
    begun = engine.begin(intent(key, stepwise=True))
    with pytest.raises(IllegalTransition, match="processing"):
        resolve(find(key), Confirmed(), evidence="too early")
    with pytest.raises(InProgress):
        engine.begin(intent(key, stepwise=True))
    assert not isinstance(begun, engine.Replay)
    begun.complete(Outcome(status=Status.SUCCEEDED))
