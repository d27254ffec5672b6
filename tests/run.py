"""`python -m tests.run [--on sqlite,postgresql,mariadb] [pytest arguments]`: the suite on each database.

SQLite and PostgreSQL always run. PostgreSQL is the server that DATABASE_URL names, else a private one.
MariaDB runs when DATABASE_URL or MARIADB_URL names one, or when it is installed. With
REQUIRE_ALL_DATABASES=1 a database that is missing, and every skipped test, is a failure. JOBS (2 on a
machine with two processors or more) says how many databases run at the same time; each has servers and
files of its own.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import IO

from tests.servers import mariadb, postgresql
from tests.servers.base import REPOSITORY, ServerError, process_is_alive

SCHEMES = {
    "postgresql": ("postgres", "postgresql", "psql", "pgsql", "postgis"),
    "mariadb": ("mysql", "mysql2", "mariadb", "mysqlgis"),
}
SERVERS: dict[str, ModuleType] = {"postgresql": postgresql, "mariadb": mariadb}
NO_TESTS_COLLECTED = 5  # pytest's exit code when a selection such as `-k` matches nothing
NAMES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "mariadb": "MariaDB"}


@dataclass
class Result:
    """What one run of the suite on one database came to."""

    database: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    remark: str = ""  # instead of the counts

    def __str__(self) -> str:
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        return f"  {NAMES[self.database]:<11} {self.remark or f'{counts} in {self.seconds:.0f} s'}"


def say(text: str = "") -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def given_url(database: str) -> str | None:
    """The URL of a running server that the environment names for this kind of database."""
    for variable in (f"{database.upper()}_URL", "DATABASE_URL"):
        url = os.environ.get(variable, "")
        if url.partition(":")[0] in SCHEMES.get(database, ()):
            return url.replace("mariadb:", "mysql:", 1)
    return None


@contextmanager
def database_url(database: str, *, fsync: bool) -> Iterator[str | None]:
    """The URL to run the tests on, if there is one; SQLite has none: the settings name the file."""
    url = given_url(database)
    if url or database not in SERVERS or not SERVERS[database].available():
        yield url
        return
    with SERVERS[database].server(fsync=fsync) as server:
        yield server.url()


def run_suite(database: str, url: str | None, arguments: list[str], output: IO[str]) -> Result:
    """Run pytest once and count. Anything but a normal end with a report counts as one failure."""
    report = REPOSITORY / ".var" / f"report-{os.getpid()}-{database}.xml"
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"DATABASE_URL", "OTHER_DATABASE_URL", "DJANGO_SETTINGS_MODULE"}
    }
    if url:
        environment["DATABASE_URL"] = url
    started = time.monotonic()
    measured = ["coverage", "run", "-m"] if os.environ.get("COVERAGE") else []
    process = subprocess.run(
        [
            *(sys.executable, "-X", "dev", "-m", *measured, "pytest"),
            *(f"--junitxml={report}", *arguments),
        ],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        check=False,
    )
    result = read_report(database, report)
    result.seconds = time.monotonic() - started
    selected_nothing = process.returncode == NO_TESTS_COLLECTED and bool(arguments)
    if process.returncode and not selected_nothing:
        result.failed = max(result.failed, 1)
    return result


def read_report(database: str, report: Path) -> Result:
    if not report.exists():
        return Result(database, failed=1)
    try:
        suites = ET.parse(report).getroot().iter("testsuite")  # noqa: S314 - written by our own run
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        for suite in suites:
            for name in counts:
                counts[name] += int(suite.get(name, 0))
    finally:
        report.unlink()
    failed = counts["failures"] + counts["errors"]
    return Result(
        database,
        passed=counts["tests"] - failed - counts["skipped"],
        failed=failed,
        skipped=counts["skipped"],
    )


def missing(database: str) -> Result:
    """PostgreSQL is part of every run; others may be absent, unless everything is required."""
    if database == "postgresql" or os.environ.get("REQUIRE_ALL_DATABASES") == "1":
        remark = "MISSING: install a server, or set DATABASE_URL to a running one"
        return Result(database, failed=1, remark=remark)
    return Result(
        database, remark="not installed: left out (MARIADB_URL may name a running server)"
    )


def run_on(database: str, arguments: list[str], output: IO[str]) -> Result:
    """Start what is needed, run the suite, stop it. All that there is to say goes to `output`."""
    try:
        with database_url(database, fsync=os.environ.get("FSYNC") == "on") as url:
            if url is None and database in SERVERS:
                return missing(database)
            place = "" if url is None else (" (given)" if given_url(database) else " (private)")
            print(f"\n{'=' * 30} {NAMES[database]}{place} {'=' * 30}", file=output, flush=True)
            return run_suite(database, url, arguments, output)
    except (ServerError, LookupError) as error:
        print(f"\n{NAMES[database]}: {error}", file=output)
        return Result(database, failed=1, remark="FAILED: the server did not start, see above")
    finally:
        output.close()


def run_all(databases: list[str], arguments: list[str], jobs: int) -> list[Result]:
    """Run on each database, `jobs` at a time, and show their output one after the other."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(jobs) as pool:
        outputs = [Path(directory) / database for database in databases]
        futures = [
            pool.submit(run_on, database, arguments, output.open("w"))
            for database, output in zip(databases, outputs, strict=True)
        ]
        for output, future in zip(outputs, futures, strict=True):
            show(output, future)
        return [future.result() for future in futures]


def show(output: Path, future: Future[Result]) -> None:
    """Copy what is written to `output` to the terminal until the run has ended."""
    with output.open(errors="replace") as reader:
        ended = False
        while not ended:
            ended = future.done()  # asked first: what is written before the end is read after it
            sys.stdout.write(reader.read())
            sys.stdout.flush()
            if not ended:
                time.sleep(0.2)


def parse(arguments: list[str]) -> tuple[list[str], list[str]]:
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__)
    parser.add_argument(
        "--on", default=os.environ.get("ON") or ",".join(NAMES), metavar="DATABASES"
    )
    known, rest = parser.parse_known_args(arguments)
    databases = known.on.split(",")
    if unknown := set(databases) - set(NAMES):
        parser.error(f"unknown database {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}")
    return databases, [argument for argument in rest if argument != "--"]


def sweep_files(directory: Path) -> None:
    """Remove the SQLite files of runs that were killed."""
    directory.mkdir(exist_ok=True)
    for path in directory.glob("test-*.sqlite3*"):
        owner = re.split(r"[-.]", path.name)[1]
        if owner.isdigit() and not process_is_alive(int(owner)):
            path.unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    databases, pytest_arguments = parse(arguments)
    sweep_files(REPOSITORY / ".var")
    python = ".".join(map(str, sys.version_info[:3]))
    say(f"Python {python}, Django {version('django')}, databases: {', '.join(databases)}")
    jobs = int(os.environ.get("JOBS") or min(2, os.cpu_count() or 1))
    results = run_all(databases, pytest_arguments, jobs)
    say("\nSummary")
    for result in results:
        say(str(result))
    passed, failed, skipped = (
        sum(getattr(result, name) for result in results) for name in ("passed", "failed", "skipped")
    )
    # `failed` also counts a database that is required and missing.
    say(f"\ntotal: {passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
