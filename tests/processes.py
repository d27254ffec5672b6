"""Real processes and threads for tests of races and crashes, each with connections of its own."""

import json
import os
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from django.db import connections

from tests.servers.base import die_with_parent

#: Only a fault makes anything here last as long; then the test fails instead of hanging.
PATIENCE_SECONDS = 60


class Died(Exception):
    """The child ended without a result; `signal` is what killed it, if anything did."""

    def __init__(self, status: int) -> None:
        self.signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        super().__init__(f"the child ended with status {status}")


class Child:
    """A forked process that runs `function` once. It shares nothing with its parent but the database."""

    def __init__(self, function: Callable[[], Any]) -> None:
        for connection in connections.all(initialized_only=True):
            if connection.vendor == "sqlite":  # its locks are kept in memory that a fork copies
                connection.close()
        self._result, write_end = os.pipe()
        with warnings.catch_warnings():
            # Threads of earlier tests are idle; the child uses none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _run_in_child(function, write_end)
        os.close(write_end)
        self._status: int | None = None

    def result(self) -> Any:
        """What the function returned, as JSON. Raises Died, or AssertionError with the child's traceback."""
        received = b""
        deadline = time.monotonic() + PATIENCE_SECONDS
        with os.fdopen(self._result, "rb", buffering=0) as pipe:
            while select.select([pipe], [], [], max(0, deadline - time.monotonic()))[0]:
                chunk = pipe.read(65536)
                if not chunk:
                    break
                received += chunk
            else:
                self.kill()
                raise AssertionError("the child did not end")
        status = self._reap()
        if not received:
            raise Died(status)
        value, failure = json.loads(received)
        if failure:
            raise AssertionError(f"in the child: {failure}")
        return value

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone and its sockets are closed."""
        os.kill(self.pid, signal.SIGKILL)
        self._reap()

    def stop(self) -> None:
        """Freeze the process (SIGSTOP), and wait until it is frozen."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _reap(self) -> int:
        if self._status is None:
            _, self._status = os.waitpid(self.pid, 0)
        return self._status


def _run_in_child(function: Callable[[], Any], write_end: int) -> None:
    value: Any = None
    failure = ""
    try:
        _let_go_of_connections()
        die_with_parent()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        try:
            value = function()
        except BaseException:
            failure = traceback.format_exc()
        os.write(write_end, json.dumps((value, failure)).encode())
    finally:
        os._exit(0)  # nothing of the parent's may be run or flushed twice


#: The parent's connections. Closing them here would end the parent's sessions.
_not_ours: list[Any] = []


def _let_go_of_connections() -> None:
    for connection in connections.all(initialized_only=True):
        _not_ours.append(connection.connection)
        connection.connection = None
        del connections[connection.alias]


def in_processes(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run every function in a process of its own, all let go at the same moment."""
    wait_end, go_end = os.pipe()

    def released(function: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            os.close(go_end)
            connections["default"].ensure_connection()
            os.read(wait_end, 1)  # the end of the file: the parent has closed the other side
            return function()

        return call

    children = [Child(released(function)) for function in functions]
    os.close(go_end)
    os.close(wait_end)
    return [child.result() for child in children]


def in_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run every function in a thread of its own, all let go at the same moment.

    Returns their results in order; the first exception of any of them is raised.
    """
    barrier = threading.Barrier(len(functions))
    results: list[Any] = [None] * len(functions)
    failures: list[BaseException] = []

    def call(number: int) -> None:
        try:
            barrier.wait(PATIENCE_SECONDS)
            results[number] = functions[number]()
        except BaseException as error:
            failures.append(error)
            barrier.abort()
        finally:
            connections.close_all()

    threads = [
        threading.Thread(target=call, args=(number,), daemon=True)
        for number in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread did not end"
    if failures:
        raise failures[0]
    return results


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`, asked again and again; a failure when it never comes."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)
    return value


class Signal:
    """One bit between processes and threads: `wait()` returns once `set()` was called anywhere."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def set(self) -> None:
        os.write(self._write, b"1")

    def wait(self) -> None:
        """Wait. The bit stays set for everybody else."""
        assert select.select([self._read], [], [], PATIENCE_SECONDS)[0], "the signal never came"

    def is_set(self) -> bool:
        return bool(select.select([self._read], [], [], 0)[0])

    def __del__(self) -> None:
        for descriptor in (self._read, self._write):
            with suppress(OSError):
                os.close(descriptor)


@contextmanager
def running(function: Callable[[], Any], inside: Signal, go_on: Signal) -> Iterator[Child]:
    """Run `function` in a child; the block starts when it sets `inside`, and it waits for `go_on`."""
    child = Child(function)
    try:
        inside.wait()
        yield child
    finally:
        go_on.set()  # also when the block has failed: a child that waits holds its locks
