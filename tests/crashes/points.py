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


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Points:
    """The points a process passes. At number `at` (the first is 1) it calls `action`."""

    def __init__(self, at: int | None = None, action: Callable[[], Any] = die) -> None:
        self.passed: list[str] = []
        self.at = at
        self.action = action

    def reach(self, label: str) -> None:
        self.passed.append(label)
        if len(self.passed) == self.at:
            self.action()

    @contextmanager
    def watched(self, using: str = "default") -> Iterator[None]:
        """Count what happens on this thread's connection."""
        global _watching
        connection = connections[using]
        connection.ensure_connection()
        _watching = self
        # Private to Django, but the only place where a commit can be seen from outside.
        for name, label in (("_commit", "COMMIT"), ("_rollback", "ROLLBACK")):
            setattr(connection, name, self._around(label, getattr(connection, name)))
        try:
            with connection.execute_wrapper(self._statement):
                yield
        finally:
            del connection._commit, connection._rollback
            _watching = None
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


_watching: Points | None = None


def reach(label: str) -> None:
    """A point outside the database: code that tests call says where it is."""
    if _watching is not None:
        _watching.reach(label)


def shorten(sql: str) -> str:
    """The verb and the table of a statement: those of the insert in a longer one."""
    match = re.search(r"(INSERT) (?:IGNORE )?INTO [\"`]?(\w+)", sql) or re.search(
        r"(UPDATE|DELETE|SELECT)\b.*?(?:\bFROM\s+|(?<=UPDATE )|(?<=DELETE ))[\"`]?(\w+)",
        sql,
        re.DOTALL,
    )
    return " ".join(match.groups()) if match else sql.split(maxsplit=1)[0]


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
        with Points(at=number).watched():
            act()

    with pytest.raises(Died) as end:  # else the point was never reached
        Child(run).result()
    assert end.value.signal == signal.SIGKILL


def crashes(
    new_key: Callable[[], str], act: Callable[[str], Any], *, between: bool = False
) -> Iterator[Crash]:
    """Crash `act(key)` at one point after the other, each time with a key that `new_key()` prepared.

    With `between` only before each of the things that happen: for the rest of the world, after one is
    before the next.
    """
    key = new_key()
    labels = passed_by(lambda: act(key))
    for number, label in enumerate(labels, start=1):
        if between and label.startswith("after "):
            continue
        key = new_key()
        crash(lambda key=key: act(key), number)  # type: ignore[misc]
        yield Crash(number, label, key)
