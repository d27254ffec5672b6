"""Requests per second of protected and unprotected views, in interleaved rounds."""

import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from secrets import token_hex
from statistics import median

from tests.benchmarks import load, project
from tests.benchmarks.report import ratio, table


@dataclass(frozen=True)
class Case:
    """One row of the table: what is requested, and what its rate is compared with."""

    label: str
    path: str
    base: str
    floor: str = ""
    #: Label of the case whose operations are asked for again, each key about once; "" for new keys.
    again: str = ""
    prepared: bool = False


def plain_cases(suffix: str, *, prepared: bool) -> tuple[Case, ...]:
    """A plain view: unprotected, by hand, protected."""
    base, floor, first = f"unprotected{suffix}", f"floor, by hand{suffix}", f"first request{suffix}"
    return (
        Case(base, "unprotected", base, floor, prepared=prepared),
        Case(f"unprotected, atomic{suffix}", "atomic", base, floor, prepared=prepared),
        Case(floor, "floor", base, floor, prepared=prepared),
        Case(first, "protected", base, floor, prepared=prepared),
        Case(f"replay{suffix}", "protected", base, floor, again=first, prepared=prepared),
    )


DRF, DRF_FIRST = "DRF, unprotected", "DRF, first request"

CASES = (
    *plain_cases("", prepared=False),
    *plain_cases(", prepared", prepared=True),
    Case(DRF, "drf", DRF),
    Case(DRF_FIRST, "drf-protected", DRF),
    Case("DRF, replay", "drf-protected", DRF, again=DRF_FIRST),
)


def main(rounds: int, seconds: float) -> None:
    """Measure and print. Raises LoadError when a request failed or did not do what its case says."""
    loads: dict[str, list[load.Load]] = defaultdict(list)
    flushes: list[float] = []
    if not load.has_wrk():
        sys.stderr.write(load.NO_WRK)
    with (
        project.database(),
        project.web_server() as plain,
        project.web_server(prepared=True) as prepared,
    ):
        for number in range(rounds + 1):
            seen: dict[str, tuple[str, load.Load]] = {}
            flushes.append(project.flush_ms())
            for case in CASES:
                url = f"{prepared if case.prepared else plain}/{case.path}"
                result = _measure(url, case, seen, seconds if number else 1)
                if number:  # the first round only warms everything up
                    loads[case.label].append(result)
            sys.stderr.write(f"round {number} of {rounds}\n")
    print_table(loads)
    sys.stdout.write(
        f"\n{os.cpu_count()} processors for client, server and database; "
        f"the disk takes {median(flushes):.2f} ms ({min(flushes):.2f}–{max(flushes):.2f}) to make a commit durable.\n"
    )


def _measure(
    url: str, case: Case, seen: dict[str, tuple[str, load.Load]], seconds: float
) -> load.Load:
    from tests.app.models import Effect

    prefix, distinct = token_hex(8) + "-", 0
    if case.again:
        prefix, first = seen[case.again]
        distinct = first.requests
    before = Effect.objects.count()
    result = load.drive(url, prefix=prefix, distinct=distinct, seconds=seconds)
    made = Effect.objects.count() - before
    expected = 0 if case.again else result.requests
    # wrk does not count what was on its way when its time was over.
    if not expected <= made <= expected + load.CONNECTIONS * bool(expected):
        raise load.LoadError(f"{case.label}: {result.requests} requests made {made} effects")
    seen[case.label] = prefix, result
    return result


def print_table(loads: dict[str, list[load.Load]]) -> None:
    rates = {label: [one.rate for one in many] for label, many in loads.items()}
    rows = []
    for case in CASES:
        to_floor = ratio(rates[case.label], rates[case.floor]) if case.floor else ""
        rows.append(
            [
                case.label,
                f"{median(rates[case.label]):.0f}",
                f"{median(one.median_ms for one in loads[case.label]):.1f}",
                ratio(rates[case.label], rates[case.base]),
                to_floor,
            ]
        )
    header = ["request", "per second", "median ms", "to unprotected", "to floor"]
    sys.stdout.write(table(header, rows) + "\n")
