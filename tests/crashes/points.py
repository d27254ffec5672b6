"""Every point at which a process can die, numbered by running the protocol once.

A point lies before and after each statement, commit and rollback, whoever issues it. A statement that
is added to the protocol is therefore a new point without anybody listing it.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import connections

from tests.processes import Child, Died


class Points:
    """The points a process passes. At number `kill_at` (the first is 1) it kills itself."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.passed: list[str] = []
        self.kill_at = kill_at

    def reach(self, label: str) -> None:
        self.passed.append(label)
        if len(self.passed) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def watched(self, using: str = "default") -> Iterator[None]:
        """Count what happens on the connection. For a child process: nothing is restored."""
        connection = connections[using]
        connection.ensure_connection()
        # Private to Django, but the only place where a commit can be seen from outside.
        for name, label in (("_commit", "COMMIT"), ("_rollback", "ROLLBACK")):
            setattr(connection, name, self._around(label, getattr(connection, name)))
        with connection.execute_wrapper(self._statement):
            yield
        self.reach("before the response")

    def _around(self, label: str, function: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            self.reach(f"before {label}")
            result = function()
            self.reach(f"after {label}")
            return result

        return call

    def _statement(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        label = shorten(sql)
        self.reach(f"before {label}")
        result = execute(sql, params, many, context)
        self.reach(f"after {label}")
        return result


def shorten(sql: str) -> str:
    """The verb and the first table of a statement."""
    verb = next(
        word
        for word in re.findall(r"[A-Z]+", sql)
        if word not in {"WITH", "SET", "STATEMENT", "FOR", "AS"}
    )
    table = re.search(r"(?:INTO|FROM|UPDATE)\s+[\"`]?(\w+)", sql)
    return f"{verb} {table[1]}" if table else verb


@dataclass(frozen=True)
class Crash:
    """A child that killed itself at point `number` of `label`s, working on `key`."""

    number: int
    label: str
    key: str

    def __str__(self) -> str:
        return f"{self.number} {self.label}"


def passed_by(act: Callable[[], Any]) -> list[str]:
    """The points a process passes that runs `act` undisturbed."""

    def run() -> list[str]:
        points = Points()
        with points.watched():
            act()
        return points.passed

    return list(Child(run).result())


def crash(act: Callable[[], Any], number: int) -> None:
    """Run `act` in a process that kills itself at this point."""

    def run() -> None:
        with Points(kill_at=number).watched():
            act()

    with pytest.raises(Died) as end:  # else the point was never reached
        Child(run).result()
    assert end.value.signal == signal.SIGKILL


def crashes(new_key: Callable[[], str], act: Callable[[str], Any]) -> Iterator[Crash]:
    """Crash `act(key)` at one point after the other, each time with a key that `new_key()` prepared."""
    key = new_key()
    labels = passed_by(lambda: act(key))
    for number, label in enumerate(labels, start=1):
        key = new_key()
        crash(lambda key=key: act(key), number)  # type: ignore[misc]
        yield Crash(number, label, key)
