"""Starts child processes, tells when one dies, and leaves none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

GRACE = 10.0  # seconds between asking a child to stop and killing it with all its own children


class Supervisor:
    """A handful of child processes, each with a log file of its own in `logs`."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped_by: signal.Signals | None = None
        logs.mkdir(parents=True, exist_ok=True)

    def listen(self) -> None:
        """Remember Ctrl-C, SIGTERM and SIGHUP in `stopped_by` instead of dying of them."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.stopped_by = signal.Signals(signum)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start a child in a session of its own, so that a Ctrl-C reaches it only through us."""
        with self.log(name).open("wb") as log:
            self.children[name] = subprocess.Popen(
                command,
                env=env,
                pass_fds=pass_fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def dead(self) -> str | None:
        """The name of a child that ended by itself, if any did."""
        for name, child in self.children.items():
            if child.poll() is not None:
                return name
        return None

    def obituary(self, name: str, lines: int = 15) -> str:
        """What to tell about a dead child: how it ended, and its last words."""
        code = self.children[name].returncode
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        words = self.log(name).read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"The {name} process ended ({how}). Its log ends:", *words])

    def stop(self) -> None:
        """End every child: ask first, kill after `GRACE` seconds or at the next Ctrl-C."""
        self.stopped_by = None
        for child in self.children.values():
            if child.poll() is None:
                child.terminate()
        deadline = time.monotonic() + GRACE
        for child in self.children.values():
            while child.poll() is None and time.monotonic() < deadline and not self.stopped_by:
                time.sleep(0.05)
            # A child leads a process group; whoever it left behind is in there.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
