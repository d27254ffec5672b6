"""`python -m tests.run [--on sqlite,postgresql,mariadb] [pytest arguments]`: the suite on each database.

SQLite and PostgreSQL always run. PostgreSQL is the server that DATABASE_URL names, else a private one.
MariaDB runs when DATABASE_URL or MARIADB_URL names one, or when it is installed. With
REQUIRE_ALL_DATABASES=1 a database that is missing, and every skipped test, is a failure.

Much of the suite waits: for processes, servers and timers. So each database's suite runs in parts, JOBS
of them at the same time (two for each processor unless told otherwise), each with a test database of its
own. Arguments that name files or directories run in one part.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO
from urllib.parse import urlsplit

from tests.servers import mariadb, postgresql
from tests.servers.base import REPOSITORY, ServerError, die_with_parent, process_is_alive

SCHEMES = {
    "postgresql": ("postgres", "postgresql", "psql", "pgsql", "postgis"),
    "mariadb": ("mysql", "mysql2", "mariadb", "mysqlgis"),
}
SERVERS: dict[str, ModuleType] = {"postgresql": postgresql, "mariadb": mariadb}
NO_TESTS_COLLECTED = 5  # pytest's exit code when a selection such as `-k` matches nothing
NAMES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "mariadb": "MariaDB"}


#: What runs apart from the rest of the suite, the longest first; the empty part is all that is not named.
PARTS: tuple[tuple[str, ...], ...] = (
    ("tests/concurrency", "tests/crashes"),
    ("tests/contrib", "tests/demo"),
    (),
)
STOP_SECONDS = 30


@dataclass
class Result:
    """What one run of pytest, or all of those on one database, came to."""

    database: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    started: float = field(default_factory=time.monotonic)
    ended: float = field(default_factory=time.monotonic)
    remark: str = ""  # instead of the counts
    failures: list[str] = field(default_factory=list)  # which tests

    def __str__(self) -> str:
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        seconds = self.ended - self.started
        line = f"  {NAMES[self.database]:<11} {self.remark or f'{counts} in {seconds:.0f} s'}"
        return "\n".join([line, *(f"    failed: {name}" for name in dict.fromkeys(self.failures))])


def total(results: Iterable[Result]) -> Result:
    """The results of all parts of one database in one."""
    first, *others = results
    for other in others:
        first.passed += other.passed
        first.failed += other.failed
        first.skipped += other.skipped
        first.failures += other.failures
        first.started = min(first.started, other.started)
        first.ended = max(first.ended, other.ended)
    return first


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


@dataclass(frozen=True)
class Part:
    """One run of pytest."""

    database: str
    url: str | None
    number: int
    paths: list[str]
    arguments: list[str]  # those of the command line
    output: Path

    @property
    def title(self) -> str:
        place = (
            "" if self.url is None else (" (given)" if given_url(self.database) else " (private)")
        )
        return " ".join([NAMES[self.database] + place, *self.paths])

    def own_url(self) -> str | None:
        """Each part has a test database of its own: the one of this name, with `test_` before it."""
        if self.url is None or self.number == 0:
            return self.url
        url = urlsplit(self.url)
        return url._replace(path=f"{url.path}_{self.number}").geturl()


def paths_of_parts(arguments: list[str]) -> list[list[str]]:
    """What each run of pytest collects, for these arguments of the command line."""
    if any(Path(REPOSITORY, argument.partition("::")[0]).exists() for argument in arguments):
        return [[]]  # they say it
    apart = [path for part in PARTS for path in part]
    return [[*part] or ["tests", *(f"--ignore={path}" for path in apart)] for part in PARTS]


class Runs:
    """The running pytest processes, so that they can be stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopped = False

    def run(self, command: list[str], environment: dict[str, str], output: IO[str]) -> int:
        with self._lock:
            if self._stopped:
                return 1
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C comes from here, once: the terminal's and ours would break off the tidying up.
                process_group=0,
                preexec_fn=die_with_parent,
            )
            self._processes.append(process)
        return process.wait()

    def stop(self) -> None:
        """Interrupt all of them and wait until they have tidied up; nothing starts any more."""
        with self._lock:
            self._stopped = True
            running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + STOP_SECONDS
        try:
            for process in running:
                process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:  # also when somebody presses Ctrl-C again
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def run_part(runs: Runs, part: Part) -> Result:
    """Run pytest once and count. Anything but a normal end with a report counts as one failure."""
    report = REPOSITORY / ".var" / f"report-{os.getpid()}-{part.database}-{part.number}.xml"
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"DATABASE_URL", "OTHER_DATABASE_URL", "DJANGO_SETTINGS_MODULE"}
    }
    if url := part.own_url():
        environment["DATABASE_URL"] = url
    # Development mode would also check how C code uses memory: slow, and none of it is ours.
    environment.setdefault("PYTHONMALLOC", "default")
    started = time.monotonic()
    measured = ["coverage", "run", "-m"] if os.environ.get("COVERAGE") else []
    command = [
        *(sys.executable, "-X", "dev", "-m", *measured, "pytest"),
        *(f"--junitxml={report}", *part.paths, *part.arguments),
    ]
    with part.output.open("w") as output:
        print(f"\n{'=' * 10} {part.title} {'=' * 10}", file=output, flush=True)
        returncode = runs.run(command, environment, output)
    result = read_report(part.database, report)
    result.started, result.ended = started, time.monotonic()
    selected_nothing = returncode == NO_TESTS_COLLECTED and bool(part.arguments)
    if returncode and not selected_nothing:
        result.failed = max(result.failed, 1)
    return result


def read_report(database: str, report: Path) -> Result:
    if not report.exists():
        return Result(database, failed=1)
    try:
        root = ET.parse(report).getroot()  # noqa: S314 - written by our own run
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        for suite in root.iter("testsuite"):
            for name in counts:
                counts[name] += int(suite.get(name, 0))
        failures = [
            f"{case.get('classname')}::{case.get('name')}"
            for case in root.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
    finally:
        report.unlink()
    failed = counts["failures"] + counts["errors"]
    return Result(
        database,
        passed=counts["tests"] - failed - counts["skipped"],
        failed=failed,
        skipped=counts["skipped"],
        failures=failures,
    )


def missing(database: str) -> Result:
    """PostgreSQL is part of every run; others may be absent, unless everything is required."""
    if database == "postgresql" or os.environ.get("REQUIRE_ALL_DATABASES") == "1":
        remark = "MISSING: install a server, or set DATABASE_URL to a running one"
        return Result(database, failed=1, remark=remark)
    return Result(
        database, remark="not installed: left out (MARIADB_URL may name a running server)"
    )


def start(stack: ExitStack, database: str) -> tuple[str | None, Result | None]:
    """The URL to run on, or the result when there is none."""
    try:
        url = stack.enter_context(database_url(database, fsync=os.environ.get("FSYNC") == "on"))
    except (ServerError, LookupError) as error:
        say(f"\n{NAMES[database]}: {error}")
        return None, Result(
            database, failed=1, remark="FAILED: the server did not start, see above"
        )
    return url, missing(database) if url is None and database in SERVERS else None


def run_all(databases: list[str], arguments: list[str], jobs: int) -> list[Result]:
    """Run each part on each database, `jobs` at a time, and show their output one after the other."""
    runs = Runs()
    with (
        tempfile.TemporaryDirectory() as directory,
        ExitStack() as servers,
        ThreadPoolExecutor(jobs) as pool,
    ):
        found = {database: start(servers, database) for database in databases}
        running: list[tuple[Part, Future[Result]]] = []
        try:
            for number, paths in enumerate(paths_of_parts(arguments)):
                for database, (url, result) in found.items():
                    if result is None:
                        output = Path(directory, f"{database}-{number}")
                        output.touch()
                        part = Part(database, url, number, paths, arguments, output)
                        running.append((part, pool.submit(run_part, runs, part)))
            for part, future in running:
                show(part.output, future)
        except BaseException:  # Ctrl-C, or an end from outside
            pool.shutdown(wait=False, cancel_futures=True)
            runs.stop()
            raise
        return [
            result
            or total(future.result() for part, future in running if part.database == database)
            for database, (_, result) in found.items()
        ]


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


def end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main(arguments: list[str]) -> int:
    databases, pytest_arguments = parse(arguments)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    sweep_files(REPOSITORY / ".var")
    python = ".".join(map(str, sys.version_info[:3]))
    say(f"Python {python}, Django {version('django')}, databases: {', '.join(databases)}")
    jobs = int(os.environ.get("JOBS") or 2 * (os.cpu_count() or 1))
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
