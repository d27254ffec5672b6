"""Stepwise operations per second, compared with the same three transactions written by hand.

Each does one insert and one commit per step. By hand, nothing says which of them were done: a crash
in between leaves a half that nobody finds. `claimed by hand` also inserts a row for the key first and
marks it done at the end, as much as anybody would write. One thread, PostgreSQL with fsync on.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from secrets import token_hex
from statistics import median

from tests.benchmarks import project
from tests.benchmarks.report import ratio, table

STEPS = 3
HAND, CLAIMED, STEPWISE, REPLAY = (
    "three transactions by hand",
    "claimed by hand",
    "three local steps",
    "replay",
)


def main(rounds: int, seconds: float) -> None:
    """Measure in a process of its own: Django connects to one private database per process."""
    command = [sys.executable, "-m", "tests.benchmarks.steps", str(rounds), str(seconds)]
    subprocess.run(command, check=True)


def measure(rounds: int, seconds: float) -> None:
    rates: dict[str, list[float]] = defaultdict(list)
    with project.database():
        cases = subjects()
        for number in range(rounds + 1):
            for label, call in cases.items():
                rate = per_second(call, seconds if number else 0.5)
                if number:  # the first round only warms everything up
                    rates[label].append(rate)
            sys.stderr.write(f"round {number} of {rounds}\n")
    rows = [
        [
            label,
            f"{median(rates[label]):.0f}",
            f"{1000 / median(rates[label]):.2f}",
            ratio(rates[label], rates[HAND]),
        ]
        for label in cases
    ]
    header = ["operation", "per second", "median ms", f"to {HAND}"]
    sys.stdout.write(table(header, rows) + "\n")


def subjects() -> dict[str, Callable[[], None]]:
    """What is measured; imported late, when the database is there."""
    from django.db import connection, transaction

    from idempotency import engine
    from idempotency.functions import idempotent_function
    from tests.app.models import Effect

    def effect(label: str) -> int:
        return Effect.objects.create(label=label).pk

    def by_hand() -> None:
        key = token_hex(8)
        for _ in range(STEPS):
            with transaction.atomic():
                effect(key)

    def claimed_by_hand() -> None:
        with connection.cursor() as cursor:
            key = token_hex(8)
            cursor.execute("INSERT INTO benchmark_claim (key) VALUES (%s)", (key,))
            for _ in range(STEPS):
                with transaction.atomic():
                    effect(key)
            cursor.execute("UPDATE benchmark_claim SET done = true WHERE key = %s", (key,))

    @idempotent_function(name="benchmark", key=lambda key: key, stepwise=True)
    def stepwise(key: str) -> None:
        operation = engine.current()
        assert operation is not None
        for number in range(STEPS):
            operation.step(f"step {number}", effect, key)

    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE benchmark_claim (key text PRIMARY KEY, done boolean DEFAULT false)"
        )
    stepwise("again")
    return {
        HAND: by_hand,
        CLAIMED: claimed_by_hand,
        STEPWISE: lambda: stepwise(token_hex(8)),
        REPLAY: lambda: stepwise("again"),
    }


def per_second(call: Callable[[], None], seconds: float) -> float:
    count, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        call()
        count += 1
    return count / passed


if __name__ == "__main__":
    measure(int(sys.argv[1]), float(sys.argv[2]))
