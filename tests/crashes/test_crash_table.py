"""SIGKILL at every point of the protocol, then an immediate retry: one effect, the right answer."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import pytest
from django.db import transaction
from django.http import HttpResponse
from django.utils import timezone
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency import engine
from idempotency.contrib.rest_framework import IdempotencyMixin
from idempotency.models import Operation, Outcome, Status
from idempotency.policies import Policy
from tests import callers
from tests.app.models import Effect
from tests.callers import age, effect_view, effects, is_replay, operation, post, problem, retry
from tests.crashes.points import Crash, crash, crashes, die, passed_by
from tests.processes import Child, Died

pytestmark = pytest.mark.django_db(transaction=True)

view = effect_view()


def refuse() -> HttpResponse:
    return HttpResponse("sold out", status=409)


def overload() -> HttpResponse:
    return HttpResponse("later", status=503)


def stumble() -> HttpResponse:
    raise ValueError("the first attempts fail")


def interrupt() -> HttpResponse:
    raise SystemExit


def unused() -> str:
    return callers.new_key()


@cache
def number_of(label: str) -> int:
    return passed_by(lambda: post(view, unused())).index(label) + 1


def crashed() -> str:
    """A key whose first request died in its handler."""
    key = unused()
    crash(lambda: post(view, key), number_of("after INSERT testapp_effect"))
    return key


def expired() -> str:
    """A key whose window is over: the next request starts its second life."""
    key = unused()
    assert post(view, key).status_code == 201
    age(key)
    return key


def answered() -> str:
    key = unused()
    assert post(view, key).status_code == 201
    return key


def check(crash: Crash, *, before: int = 0, status: int = 201) -> None:
    """The retry executes if nothing was committed, else replays; either way there is one effect."""
    committed = effects(crash.key) - before
    assert committed in (0, 1), f"{crash}: {committed} effects committed"
    response = retry(lambda: post(view, crash.key))
    assert response.status_code == status, f"{crash}: {response.status_code} {response.content!r}"
    assert is_replay(response) == bool(committed), f"{crash}: replayed is {is_replay(response)}"
    assert effects(crash.key) == before + 1, f"{crash}: {effects(crash.key)} effects"
    again = post(view, crash.key)
    assert is_replay(again), f"{crash}: not stored"
    assert again.content == response.content, f"{crash}: another answer"
    assert operation(crash.key).status in (Status.SUCCEEDED, Status.FAILED)


def labels_of(found: Iterator[Crash]) -> set[str]:
    """Check every crash; returns where they were."""
    labels = set()
    for each in found:
        check(each)
        labels.add(each.label)
    return labels


def test_a_first_request_may_die_anywhere(vendor: str) -> None:
    """BUGS B07."""
    labels = labels_of(crashes(unused, lambda key: post(view, key)))
    assert labels >= {  # the enumeration itself must not go blind
        "before INSERT idempotency_operation",
        "after INSERT idempotency_operation",
        "before INSERT testapp_effect",
        "after INSERT testapp_effect",
        "before UPDATE idempotency_operation",
        "after UPDATE idempotency_operation",
        "before COMMIT",
        "after COMMIT",
        "before the response",
    }
    if vendor != "sqlite":
        assert labels >= {
            "before SELECT idempotency_operation",
            "after SELECT idempotency_operation",
        }


def test_a_takeover_may_die_anywhere() -> None:
    labels = labels_of(crashes(crashed, lambda key: post(view, key)))
    assert "after INSERT idempotency_event" in labels  # the takeover is noted


def test_takeovers_of_takeovers_may_die_one_after_the_other() -> None:
    """One key, killed at every point in turn; only the death after the commit has an effect.


    BUGS B04.
    """
    key = unused()
    number = 1
    while not effects(key):
        crash(lambda: post(view, key), number)
        number += 1
    assert number > 8
    response = retry(lambda: post(view, key))
    assert (response.status_code, is_replay(response), effects(key)) == (201, True, 1)


@pytest.mark.parametrize("after", [stumble, interrupt, overload])
def test_a_failing_attempt_may_die_anywhere(after: Callable[[], HttpResponse]) -> None:
    """An exception, a SystemExit and a returned 503: rolled back and recorded, never stored."""
    failing = effect_view(after=after)

    def act(key: str) -> None:
        with suppress(SystemExit):
            post(failing, key)

    labels = set()
    for each in crashes(unused, act):
        assert effects(each.key) == 0, f"{each}: the failed attempt left its effect"
        check(each)
        labels.add(each.label)
    assert labels >= {"after ROLLBACK", "after INSERT idempotency_event"}  # recorded, too


def test_a_returned_refusal_may_die_anywhere() -> None:
    """A returned 409 is Django's convention for "answered": its effects stay, and it is stored."""
    refusing = effect_view(after=refuse)
    for each in crashes(unused, lambda key: post(refusing, key)):
        committed = effects(each.key)
        response = retry(lambda key=each.key: post(refusing, key))
        assert (response.status_code, problem(response)) == (409, ""), str(each)
        assert response.content == b"sold out", str(each)
        assert is_replay(response) == bool(committed), str(each)
        assert effects(each.key) == 1, str(each)


def test_storing_a_deterministic_failure_may_die_anywhere() -> None:
    def attempt(key: str) -> engine.Replay | None:
        begun = engine.begin(callers.intent(key))
        if isinstance(begun, engine.Replay):
            return begun
        with engine.running(begun.operation):
            callers.succeed(begun.operation)
            begun.abort(ValueError("sold out"))
            begun.store_failure(Outcome(status=Status.FAILED, code=400, body=b"sold out"))
        return None

    for each in crashes(unused, attempt):
        stored = operation_is_final(each.key)
        assert effects(each.key) == 0, str(each)
        attempts = [attempt(each.key)]
        attempts.append(attempt(each.key))
        assert [replay is not None for replay in attempts] == [stored, True], str(each)
        assert attempts[-1] is not None
        assert attempts[-1].outcome.code == 400, str(each)
        assert effects(each.key) == 0, str(each)


class Refusing(IdempotencyMixin, APIView):
    idempotency_policy = Policy(required=True, name="effect")

    def post(self, request: Request) -> Response:
        Effect.objects.create(label=request.headers["Idempotency-Key"])
        raise ValidationError({"quantity": ["sold out"]})


def test_a_rest_framework_exception_may_die_anywhere() -> None:
    """The effects are undone first, and the 400 is stored after that: two transactions."""
    api = Refusing.as_view()
    labels = set()
    for each in crashes(unused, lambda key: post(api, key)):
        stored = operation_is_final(each.key)
        assert effects(each.key) == 0, str(each)
        responses = [retry(lambda key=each.key: post(api, key)) for _ in range(2)]
        assert [response.status_code for response in responses] == [400, 400], str(each)
        assert [is_replay(response) for response in responses] == [stored, True], str(each)
        assert responses[0].content == responses[1].content, str(each)
        assert effects(each.key) == 0, str(each)
        labels.add(each.label)
    assert labels >= {"after ROLLBACK", "after UPDATE idempotency_operation"}


def operation_is_final(key: str) -> bool:
    return Operation.objects.filter(key=key, status=Status.FAILED).exists()


def test_the_first_request_of_a_second_life_may_die_anywhere() -> None:
    labels = set()
    for each in crashes(expired, lambda key: post(view, key)):
        check(each, before=1)
        labels.add(each.label)
    assert "after INSERT idempotency_event" in labels  # the new life is noted


def test_a_replay_may_die_anywhere() -> None:
    for each in crashes(answered, lambda key: post(view, key)):
        check(each)


def test_a_refused_mismatch_may_die_anywhere() -> None:
    for each in crashes(answered, lambda key: post(view, key, body="another body")):
        check(each)


def test_an_operation_inside_a_callers_transaction_may_die_anywhere() -> None:
    """Claim, effect and outcome are part of the caller's transaction: all of it, or nothing."""

    def act(key: str) -> Any:
        with transaction.atomic():
            engine.run(callers.intent(key), callers.succeed)

    for each in crashes(unused, act):
        committed = effects(each.key)
        assert committed == Operation.objects.filter(key=each.key).count(), str(each)
        result = engine.run(callers.intent(each.key), callers.succeed)
        assert result.replayed == bool(committed), str(each)
        assert effects(each.key) == 1, str(each)


GIVEN_UP = Outcome(status=Status.FAILED, code=500, body=b"given up")


def run_giving_up(key: str, after: int) -> engine.Result:
    intent = replace(callers.intent(key), give_up=(after, GIVEN_UP))
    return engine.run(intent, callers.succeed)


def test_an_operation_that_counts_its_interruptions_may_die_anywhere() -> None:
    """Attempts are committed before they run; that adds points, and takes nothing away."""
    first = crashes(unused, lambda key: run_giving_up(key, 100))
    takeover = crashes(interrupted, lambda key: run_giving_up(key, 100))
    for each in chain(first, takeover):
        committed = effects(each.key)
        result = run_giving_up(each.key, 100)
        assert result.replayed == bool(committed), str(each)
        assert effects(each.key) == 1, str(each)


def interrupted() -> str:
    key = unused()
    interrupt(key)
    return key


def interrupt(key: str) -> None:
    """One more executor dies in its handler."""
    child = Child(lambda: engine.run(replace(callers.intent(key), give_up=(3, GIVEN_UP)), kill))
    with pytest.raises(Died):
        child.result()


def kill(operation: Any) -> Outcome:
    callers.succeed(operation)
    die()
    raise AssertionError("unreachable")


def test_an_operation_that_kills_every_executor_is_given_up() -> None:
    key = unused()
    for _ in range(3):
        interrupt(key)
    result = run_giving_up(key, 3)
    assert (result.replayed, result.outcome.code, result.outcome.body) == (True, 500, b"given up")
    assert effects(key) == 0


def test_an_interrupted_operation_that_may_not_be_rerun_is_never_rerun() -> None:
    """on_interrupted="reconcile": whoever died before the commit leaves an unknown outcome."""
    cautious = effect_view(on_interrupted="reconcile")
    long_ago = timezone.now() - timezone.timedelta(minutes=1)
    for each in crashes(unused, lambda key: post(cautious, key)):
        committed = effects(each.key)
        claimed = Operation.objects.filter(key=each.key)
        claimed.filter(lease_expires_at__isnull=False).update(lease_expires_at=long_ago)
        was_claimed = claimed.exists()
        response = post(cautious, each.key)
        if committed:
            assert is_replay(response), str(each)
        elif was_claimed:
            assert problem(response) == "outcome-unknown", str(each)
            assert effects(each.key) == 0, str(each)
        else:
            assert (response.status_code, effects(each.key)) == (201, 1), str(each)
