"""Try, confirm and cancel in any order, twice, late, and at the same time."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from django.db import OperationalError, connections, transaction
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from idempotency import barrier, db
from idempotency.exceptions import BarrierRefused, ConfigurationError
from idempotency.models import Branch, BranchStatus
from tests.app.models import Effect
from tests.callers import new_key
from tests.processes import Signal, in_threads

pytestmark = pytest.mark.django_db(transaction=True)

Phase = Callable[..., bool]


def act(phase: Phase, place: str, branch: str = "b") -> str:
    """One call of a participant: the barrier, and the effect it decides about, in one transaction."""
    try:
        with transaction.atomic():
            if not phase(place, branch):
                return "nothing"
            Effect.objects.create(label=f"{place} {phase.__name__}")
            return "done"
    except BarrierRefused:
        return "refused"


def effects(place: str) -> dict[str, int]:
    return {
        phase: Effect.objects.filter(label=f"{place} {phase}").count()
        for phase in ("tried", "confirmed", "cancelled")
    }


TRIED, CONFIRMED, CANCELLED = barrier.tried, barrier.confirmed, barrier.cancelled


@pytest.mark.parametrize(
    ("phases", "answers"),
    [
        ((TRIED, TRIED), ("done", "nothing")),
        ((TRIED, CONFIRMED, CONFIRMED), ("done", "done", "nothing")),
        ((TRIED, CANCELLED, CANCELLED), ("done", "done", "nothing")),
        ((CONFIRMED, TRIED), ("refused", "done")),
        ((TRIED, CONFIRMED, TRIED), ("done", "done", "nothing")),
        ((TRIED, CONFIRMED, CANCELLED), ("done", "done", "refused")),
        ((TRIED, CANCELLED, CONFIRMED), ("done", "done", "refused")),
        ((TRIED, CANCELLED, TRIED, TRIED), ("done", "done", "refused", "refused")),
        # Empty rollback, and no try ever after: the marker stays.
        ((CANCELLED, CANCELLED), ("nothing", "nothing")),
        ((CANCELLED, TRIED, TRIED, TRIED), ("nothing", "refused", "refused", "refused")),
        ((CANCELLED, CONFIRMED), ("nothing", "refused")),
    ],
)
def test_each_order_has_one_answer(phases: tuple[Phase, ...], answers: tuple[str, ...]) -> None:
    place = new_key()
    assert tuple(act(phase, place) for phase in phases) == answers


def test_branches_and_transactions_are_apart() -> None:
    place = new_key()
    assert act(TRIED, place, "a") == "done"
    assert act(TRIED, place, "b") == "done"
    assert act(CANCELLED, place, "a") == "done"
    assert act(CONFIRMED, place, "b") == "done"
    assert act(TRIED, new_key(), "a") == "done"
    assert act(TRIED, "ab", "c") == act(TRIED, "a", "bc") == "done"


def test_what_the_participant_did_is_rolled_back_together_with_the_mark() -> None:
    place = new_key()
    with transaction.atomic():
        assert barrier.tried(place, "b")
        transaction.set_rollback(True)  # as an exception would
    assert not Branch.objects.exists()
    assert act(TRIED, place) == "done"


def test_the_barrier_needs_a_transaction() -> None:
    for phase in (TRIED, CONFIRMED, CANCELLED):
        with pytest.raises(ConfigurationError, match="inside transaction"):
            phase("t", "b")


@pytest.mark.parametrize(("place", "branch"), [("", "b"), ("t", ""), ("t" * 256, "b")])
def test_a_branch_needs_names_that_fit(place: str, branch: str) -> None:
    with pytest.raises(ConfigurationError, match="1 to 255"), transaction.atomic():
        barrier.tried(place, branch)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_branch_is_in_the_database_of_its_effects() -> None:
    with transaction.atomic("other"):
        assert barrier.tried("t", "b", using="other")
    assert Branch.objects.using("other").get().status == BranchStatus.TRIED
    assert not Branch.objects.exists()


def test_the_row_says_what_happened() -> None:
    place = new_key()
    for phase in (CANCELLED, TRIED, TRIED):
        act(phase, place)
    branch = Branch.objects.get()
    assert (branch.transaction, branch.name, branch.status) == (place, "b", BranchStatus.SUSPENDED)
    assert branch.calls == 1  # refused tries are rolled back with their transactions
    assert str(branch) == f"{place} b"


# At the same time


def patient(phase: Phase, place: str) -> str:
    """What a coordinator does: call again after a deadlock or a serialization failure."""
    while True:
        try:
            return act(phase, place)
        except OperationalError as error:
            if not db.is_transient(error):
                raise


def at_once(place: str, *phases: Phase) -> list[str]:
    return list(in_threads([partial(patient, phase, place) for phase in phases]))


@pytest.mark.parametrize("phase", [TRIED, CANCELLED])
def test_of_many_at_once_one_takes_effect(phase: Phase) -> None:
    place = new_key()
    if phase is CANCELLED:
        act(TRIED, place)
    answers = at_once(place, *[phase] * 8)
    assert sorted(answers) == ["done", *["nothing"] * 7]


def test_of_a_confirm_and_a_cancel_at_once_one_wins() -> None:
    for _ in range(5):
        place = new_key()
        act(TRIED, place)
        answers = at_once(place, CONFIRMED, CANCELLED)
        assert sorted(answers) == ["done", "refused"]
        done = effects(place)
        assert done["confirmed"] + done["cancelled"] == 1


def test_a_try_and_a_cancel_at_once_leave_no_reservation() -> None:
    for _ in range(5):
        place = new_key()
        tried, cancelled = at_once(place, TRIED, CANCELLED)
        assert (tried, cancelled) in {("done", "done"), ("refused", "nothing")}
        done = effects(place)
        assert done["tried"] == done["cancelled"]


@pytest.mark.parametrize(("first", "second"), [(TRIED, CANCELLED), (CANCELLED, TRIED)])
@pytest.mark.parametrize("commits", [True, False])
def test_whoever_comes_second_waits_for_the_first_to_end(
    first: Phase, second: Phase, commits: bool
) -> None:
    """Both orders, with the first transaction held open while the second arrives."""
    place, inside, go_on = new_key(), Signal(), Signal()
    answers: dict[str, str] = {}

    def hold() -> None:
        try:
            with transaction.atomic():
                taken = first(place, "b")
                if taken:
                    Effect.objects.create(label=f"{place} {first.__name__}")
                inside.set()
                go_on.wait()
                if not commits:
                    raise ValueError
                answers["first"] = "done" if taken else "nothing"
        except ValueError:
            answers["first"] = "rolled back"

    def follow() -> None:
        inside.wait()
        timer = threading.Timer(0.2, go_on.set)  # the second is waiting by then, or soon will be
        timer.start()
        answers["second"] = patient(second, place)
        timer.join()

    in_threads([hold, follow])
    expected = {
        (TRIED, True): ("done", "done"),
        (TRIED, False): ("rolled back", "nothing"),
        (CANCELLED, True): ("nothing", "refused"),
        (CANCELLED, False): ("rolled back", "done"),
    }[first, commits]
    assert (answers["first"], answers["second"]) == expected


# Against a model


class Reference:
    """One branch as it should behave, without a database."""

    def __init__(self) -> None:
        self.state = ""

    def tried(self) -> str:
        if not self.state:
            self.state = "tried"
            return "done"
        return "refused" if self.state in ("cancelled", "suspended") else "nothing"

    def confirmed(self) -> str:
        if self.state == "tried":
            self.state = "confirmed"
            return "done"
        return "nothing" if self.state == "confirmed" else "refused"

    def cancelled(self) -> str:
        if self.state == "tried":
            self.state = "cancelled"
            return "done"
        if self.state == "confirmed":
            return "refused"
        self.state = self.state or "suspended"
        return "nothing"


class Barrier(RuleBasedStateMachine):
    """Any sequence of calls, some of which are rolled back, against the reference."""

    @initialize()
    def start(self) -> None:
        self.place = new_key()
        self.reference = Reference()
        self.done: dict[str, int] = {"tried": 0, "confirmed": 0, "cancelled": 0}

    def _call(self, phase: Phase) -> None:
        expected = getattr(self.reference, phase.__name__)()
        assert act(phase, self.place) == expected
        self.done[phase.__name__] += expected == "done"
        assert effects(self.place) == self.done

    @rule()
    def try_(self) -> None:
        self._call(TRIED)

    @rule()
    def confirm(self) -> None:
        self._call(CONFIRMED)

    @rule()
    def cancel(self) -> None:
        self._call(CANCELLED)

    @rule()
    def roll_back(self) -> None:
        """A participant that fails after the barrier has let it through leaves no trace."""
        for phase in (TRIED, CONFIRMED, CANCELLED):
            with transaction.atomic():
                with suppress(BarrierRefused):
                    phase(self.place, "b")
                transaction.set_rollback(True)
        assert effects(self.place) == self.done


def test_any_sequence_of_calls_behaves_like_the_reference() -> None:
    run_state_machine_as_test(
        Barrier,
        settings=settings(
            max_examples=25,
            stateful_step_count=12,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert not connections["default"].in_atomic_block
