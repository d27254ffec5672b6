"""One request, stopped at every point of the protocol while another one runs from end to end.

Races find an interleaving by luck; this finds every one that two requests can have when the second
is not interrupted itself.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial

import pytest
from django.db import connection
from django.http import HttpResponse

from idempotency import retention
from idempotency.models import Status
from tests import callers
from tests.callers import age, effect_view, effects, is_replay, operation, post, problem, retry
from tests.crashes.points import Points, crash, passed_by
from tests.processes import in_threads

pytestmark = pytest.mark.django_db(transaction=True)

view = effect_view()


def stumble() -> HttpResponse:
    raise ValueError


failing_view = effect_view(after=stumble)

Request = Callable[[str], HttpResponse]


def request(key: str) -> HttpResponse:
    return post(view, key)


def failing_request(key: str) -> HttpResponse:
    return post(failing_view, key)


def other_request(key: str) -> HttpResponse:
    return post(view, key, body="another body")


def unused() -> str:
    return callers.new_key()


def failed() -> str:
    key = unused()
    failing_request(key)
    return key


@cache
def number_of(label: str) -> int:
    return passed_by(lambda: request(unused())).index(label) + 1


def crashed() -> str:
    key = unused()
    crash(lambda: request(key), number_of("after INSERT testapp_effect"))
    return key


def expired() -> str:
    key = unused()
    assert request(key).status_code == 201
    age(key)
    return key


def interleaved(
    prepare: Callable[[], str], first: Request, second: Request
) -> Iterator[tuple[str, str, list[HttpResponse]]]:
    """For every point of `first`: where, the key, and both answers when `second` runs just there."""
    dry = Points()
    key = prepare()
    with dry.watched():
        first(key)
    for number, label in enumerate(dry.passed, start=1):
        key = prepare()
        answers: list[HttpResponse] = []

        def interrupt(key: str = key, answers: list[HttpResponse] = answers) -> None:
            def run() -> None:
                if connection.vendor == "sqlite":  # one writer: who must wait is refused instead
                    with connection.cursor() as cursor:
                        cursor.execute("PRAGMA busy_timeout = 1")
                answers.append(second(key))

            in_threads([run])

        with Points(number, interrupt).watched():
            interrupted = first(key)
        answers.append(interrupted)
        yield f"{number} {label}", key, answers


def executed(answers: list[HttpResponse]) -> int:
    return sum(each.status_code == 201 and not is_replay(each) for each in answers)


def allowed(answers: list[HttpResponse], *also: str) -> bool:
    kinds = {problem(each) or str(each.status_code) for each in answers}
    return kinds <= {"201", "in-progress", "unavailable", *also}


@pytest.mark.parametrize("prepare", [unused, failed, crashed, expired])
def test_a_twin_at_any_point_changes_nothing(prepare: Callable[[], str]) -> None:
    """BUGS A06."""
    before = int(prepare is expired)
    seen = set()
    for where, key, answers in interleaved(prepare, request, request):
        assert allowed(answers), f"{where}: {[each.status_code for each in answers]}"
        assert executed(answers) == effects(key) - before == 1, where
        final = request(key)
        assert is_replay(final), where
        assert {each.content for each in answers if each.status_code == 201} == {final.content}
        seen.add(problem(answers[0]) or f"201 {is_replay(answers[0])}")
    assert "201 False" in seen  # there were points where the twin was first, and where it was not
    assert seen - {"201 False"}


@pytest.mark.parametrize("prepare", [unused, expired])
def test_a_failing_twin_at_any_point_changes_nothing(prepare: Callable[[], str]) -> None:
    """BUGS L06."""
    before = int(prepare is expired)
    for where, key, answers in interleaved(prepare, request, failing_request):
        assert allowed(answers, "500"), where
        assert executed(answers) == effects(key) - before, where
        assert retry(partial(request, key)).status_code == 201, where
        assert effects(key) - before == 1, where


@pytest.mark.parametrize("prepare", [unused, expired])
def test_a_twin_at_any_point_of_a_failing_request_runs_or_is_refused(
    prepare: Callable[[], str],
) -> None:
    before = int(prepare is expired)
    for where, key, answers in interleaved(prepare, failing_request, request):
        assert allowed(answers, "500"), where
        assert executed(answers) == effects(key) - before, where
        assert retry(partial(request, key)).status_code == 201, where
        assert effects(key) - before == 1, where
        assert operation(key).status == Status.SUCCEEDED, where


def assert_one_of_both(key: str, answers: list[HttpResponse], where: str) -> None:
    """The life belongs to one of the two bodies; who got an answer gets the same one again."""
    finals = [retry(partial(call, key)) for call in (other_request, request)]
    assert sorted(problem(each) for each in finals) == ["", "mismatch"], where
    for answer, final in zip(answers, finals, strict=True):  # the interrupting one answers first
        assert answer.status_code != 201 or answer.content == final.content, where


def test_two_requests_for_the_next_life_of_a_key_do_not_both_get_it() -> None:
    """Whoever is first names the request; the other is a mismatch, or told to wait."""
    for where, key, answers in interleaved(expired, request, other_request):
        assert allowed(answers, "mismatch"), where
        assert executed(answers) == effects(key) - 1 == 1, where
        assert_one_of_both(key, answers, where)


def test_the_next_life_may_begin_fail_and_change_hands_at_any_point() -> None:
    """What was judged before the lock is not what is executed under it: the owner tells."""

    def another_life_that_fails(key: str) -> HttpResponse:
        return post(failing_view, key, body="another body")

    for where, key, answers in interleaved(expired, request, another_life_that_fails):
        assert allowed(answers, "mismatch", "500"), where
        assert executed(answers) == effects(key) - 1, where
        assert_one_of_both(key, answers, where)
        assert effects(key) == 2, where


def test_a_purge_at_any_point_is_not_noticed() -> None:
    """BUGS L05."""

    def purge(key: str) -> HttpResponse:
        with suppress(Exception):  # SQLite: the database is locked
            retention.purge()
        return HttpResponse(status=201, headers={"Idempotent-Replayed": "true"})

    for where, key, answers in interleaved(expired, request, purge):
        response = retry(partial(request, key))
        assert allowed(answers), where
        assert response.status_code == 201, where
        assert effects(key) == 2, where
