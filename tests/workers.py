"""Real Celery processes: workers and beats on a real broker, started and killed by tests."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from celery import Celery

from tests.processes import PATIENCE_SECONDS, eventually
from tests.servers.base import REPOSITORY, die_with_parent


class Broker:
    """A running broker, and how the processes that use it are told."""

    def __init__(self, url: str, results: str | None, visibility: float | None = None) -> None:
        self.url = url
        self.environment = {"CELERY_BROKER_URL": url}
        if results:
            self.environment["RESULT_BACKEND"] = results
        if visibility:
            self.environment["VISIBILITY_TIMEOUT"] = str(visibility)
        self.sender = Celery("sender", broker=url, backend=results, set_as_current=False)

    def send(self, name: str, *args: Any, **options: Any) -> Any:
        return self.sender.send_task(name, args=args, **options)

    def waiting(self, queue: str) -> int:
        """Messages nobody has taken yet."""
        with self.sender.connection_for_read() as connection:
            return int(connection.SimpleQueue(queue).qsize())

    def close(self) -> None:
        self.sender.close()


class Process:
    """One `celery` command, and everything it forks."""

    def __init__(self, arguments: list[str], broker: Broker, log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "tests.celery_app", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env=os.environ | broker.environment | {"C_FORCE_ROOT": "1"},
                preexec_fn=die_with_parent,
                start_new_session=True,
            )

    def says(self, text: str, times: int = 1) -> None:
        """Wait until the log holds `text`."""

        def found() -> bool:
            assert self.process.poll() is None, f"ended early\n{self.tail()}"
            return self.log.read_text(errors="replace").count(text) >= times

        eventually(found, f"{text!r} in the log\n{self.tail()}")

    def kill(self) -> None:
        """SIGKILL for all of its processes, as when the host dies."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE_SECONDS)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


@contextmanager
def worker(broker: Broker, directory: Path, queue: str, processes: int = 3) -> Iterator[Process]:
    """A prefork worker on `queue`, ready for tasks."""
    directory.mkdir(exist_ok=True, parents=True)
    arguments = ["worker", "--pool", "prefork", "--concurrency", str(processes), "--queues", queue]
    quiet = ["--without-gossip", "--without-mingle", "--loglevel", "INFO"]
    name = f"{queue}-{time.monotonic_ns()}"
    process = Process([*arguments, *quiet, "--hostname", name], broker, directory / f"{name}.log")
    try:
        process.says(" ready.")
        yield process
    finally:
        process.kill()


@contextmanager
def beat(broker: Broker, directory: Path, name: str) -> Iterator[Process]:
    """A beat with a schedule file of its own, as on another host."""
    directory.mkdir(exist_ok=True, parents=True)
    arguments = ["beat", "--scheduler", "idempotency.contrib.celery_beat:SlotScheduler"]
    files = [
        "--schedule",
        str(directory / f"{name}.db"),
        "--pidfile",
        str(directory / f"{name}.pid"),
    ]
    process = Process([*arguments, *files, "--loglevel", "INFO"], broker, directory / f"{name}.log")
    try:
        yield process
    finally:
        process.kill()


class Held:
    """A `tests.held` task: which processes run it, and when it may end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def pids(self) -> set[int]:
        """Processes that have started the task and still exist."""
        found = {int(path.name.split("-")[1]) for path in self.directory.glob("started-*")}
        return {pid for pid in found if psutil.pid_exists(pid)}

    def started(self, *, not_by: set[int] = frozenset()) -> int:  # type: ignore[assignment]
        """Wait until a process runs it; returns its pid."""
        return int(eventually(lambda: self.pids() - not_by, "the task starts").pop())

    def let_go(self) -> None:
        self.directory.joinpath("go").touch()
