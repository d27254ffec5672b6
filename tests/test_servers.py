"""The servers that crash tests lean on really crash, recover, and leave nothing behind."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests import run
from tests.processes import eventually
from tests.run import PARTS, Part, Result, Runs, paths_of_parts, read_report, total
from tests.servers import postgresql
from tests.servers.base import REPOSITORY, Server, ServerError, process_is_alive

# One run is enough: these servers are not the database under test.
pytestmark = pytest.mark.vendor("sqlite")


@pytest.fixture
def server() -> Iterator[postgresql.PostgreSQL]:
    with postgresql.server(fsync=True) as private:
        yield private


def rows(server: postgresql.PostgreSQL) -> list[int]:
    with psycopg.connect(server.url()) as connection:
        return [row[0] for row in connection.execute("SELECT number FROM kept ORDER BY number")]


def test_a_killed_server_comes_back_with_what_was_committed(server: postgresql.PostgreSQL) -> None:
    before = server.pid
    with psycopg.connect(server.url()) as connection:
        connection.execute("CREATE TABLE kept (number int)")
        connection.execute("INSERT INTO kept VALUES (1)")
    uncommitted = psycopg.connect(server.url())
    uncommitted.execute("INSERT INTO kept VALUES (2)")
    server.kill()
    with pytest.raises(psycopg.OperationalError):
        uncommitted.commit()
    uncommitted.close()
    server.start()
    assert server.pid != before
    assert rows(server) == [1]


def test_only_who_knows_the_password_gets_in(server: postgresql.PostgreSQL) -> None:
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(server.url().replace(server.password, "guess"))


def test_a_server_ends_with_the_process_that_started_it() -> None:
    code = """
import sys, time
from tests.servers import postgresql
server = postgresql.server().__enter__()
print(server.pid, server.directory, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        # The file disappears when the server has shut down in order.
        pid_file = Path(directory) / "data" / "postmaster.pid"
        assert pid_file.exists()
        parent.send_signal(signal.SIGKILL)
    descriptor = pidfd(int(pid))
    if descriptor is not None:
        assert wait_for_end(descriptor, seconds=30)
    assert not pid_file.exists()


def pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def wait_for_end(descriptor: int, seconds: int) -> bool:
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def test_a_server_that_cannot_start_says_why() -> None:
    class Broken(Server):
        name = "broken"

        def command(self) -> list[str]:
            return ["/bin/sh", "-c", "echo no licence; exit 3"]

    with pytest.raises(ServerError, match="no licence"), Broken():
        pytest.fail("it must not start")


def test_a_run_without_a_report_counts_as_failed(tmp_path: Path) -> None:
    assert read_report("sqlite", tmp_path / "missing.xml").failed == 1


def test_a_report_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3">'
        '<testcase classname="tests.test_a" name="test_b"><failure/></testcase>'
        '<testcase classname="tests.test_a" name="test_c"/></testsuite></testsuites>'
    )
    result = read_report("sqlite", report)
    assert (result.passed, result.failed, result.skipped) == (3, 3, 3)
    assert result.failures == ["tests.test_a::test_b"]


def test_no_test_belongs_to_no_part_or_to_two() -> None:
    *apart, rest = paths_of_parts(["-q", "-k", "replay"])
    directories = [path for paths in apart for path in paths]
    assert all((REPOSITORY / path).is_dir() for path in directories)
    assert len(set(directories)) == len(directories)
    assert rest == ["tests", *(f"--ignore={path}" for path in directories)]


def test_arguments_that_name_tests_run_in_one_part() -> None:
    assert paths_of_parts(["-q", "tests/test_servers.py::test_a_report_is_counted"]) == [[]]


def test_each_part_has_a_test_database_of_its_own() -> None:
    def url(database: str, given: str | None, number: int) -> str | None:
        return Part(database, given, number, [], [], Path()).own_url()

    given = "postgres://me:secret@host:5433/shop?sslmode=require"
    urls = [url("postgresql", given, number) for number in range(len(PARTS))]
    assert urls[0] == given
    assert urls[1] == "postgres://me:secret@host:5433/shop_1?sslmode=require"
    assert len(set(urls)) == len(PARTS)
    assert url("sqlite", None, 1) is None  # files are named by process


def test_the_parts_of_a_database_are_counted_together() -> None:
    found = total(
        [
            Result("sqlite", passed=1, failed=2, skipped=3, started=10, ended=40),
            Result("sqlite", passed=9, failed=1, started=5, ended=20, failures=["a::b"] * 2),
        ]
    )
    assert str(found) == "  SQLite      10 passed, 3 failed, 3 skipped in 35 s\n    failed: a::b"


@pytest.mark.parametrize("handler", ["pass", "signal.signal(signal.SIGINT, signal.SIG_IGN)"])
def test_an_interrupted_run_leaves_no_process(
    handler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that do not end in order are killed."""
    monkeypatch.setattr(run, "STOP_SECONDS", 0.2 if "IGN" in handler else 60)
    code = f"import os, signal, time; {handler}; print(os.getpid(), flush=True); time.sleep(600)"
    output = tmp_path / "output"
    runs, codes = Runs(), []

    def start() -> None:
        with output.open("w") as writer:
            codes.append(runs.run([sys.executable, "-c", code], dict(os.environ), writer))

    thread = threading.Thread(target=start)
    thread.start()
    pid = int(eventually(lambda: output.exists() and output.read_text().strip(), "it starts"))
    runs.stop()
    thread.join()
    assert codes != [0]
    assert not process_is_alive(pid)
    start()
    assert codes[1] == 1  # nothing starts any more
    assert str(pid) not in output.read_text()
