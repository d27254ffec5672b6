"""The servers that crash tests lean on really crash, recover, and leave nothing behind."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.run import read_report
from tests.servers import postgresql
from tests.servers.base import REPOSITORY, Server, ServerError

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
        '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>'
    )
    result = read_report("sqlite", report)
    assert (result.passed, result.failed, result.skipped) == (3, 3, 3)
