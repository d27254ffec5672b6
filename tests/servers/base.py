"""What all private servers have in common: a directory, a user, a port, a process, its end."""

import ctypes
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 60
STOP_SECONDS = 30
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)  # loaded here: little may be done between fork and exec


class ServerError(Exception):
    """A server did not start or stop; the message ends with the tail of its log."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def unprivileged_user(*names: str) -> pwd.struct_passwd | None:
    """The first of these users, else `nobody`, when this process is root; else None.

    Database servers refuse to run as root.
    """
    if os.geteuid() != 0:
        return None
    for name in (*names, "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None


def reachable_by_others(path: Path) -> bool:
    """Whether a user that owns nothing here may enter `path`."""
    return all(parent.stat().st_mode & 0o001 for parent in (path, *path.parents))


def die_with_parent() -> None:
    """In the child, before it becomes the server: end when the test process ends (Linux only)."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def process_is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def sweep(base: Path) -> None:
    """Remove what runs that were killed left behind."""
    for path in base.glob("server-*-*"):
        owner = path.name.split("-")[1]
        if owner.isdigit() and not process_is_alive(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


class Server:
    """One private server. `start()` and `stop()` may be called again and again; the data stay."""

    name: ClassVar[str]
    users: ClassVar[tuple[str, ...]] = ()
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    kill_signal: ClassVar[signal.Signals] = signal.SIGKILL

    def __init__(self, *, fsync: bool | None = None) -> None:
        """`fsync=None` reads the variable FSYNC; without it data need not survive a power cut."""
        self.fsync = os.environ.get("FSYNC") == "on" if fsync is None else fsync
        self.user = unprivileged_user(*self.users)
        self.password = secrets.token_hex(16)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.directory = self._make_directory()
        self.log = self.directory / "server.log"

    # What each kind of server defines

    def initialise(self) -> None:
        """Create the data directory; called once."""

    def command(self) -> list[str]:
        """The command line of the server in the foreground."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether the server accepts connections now."""
        return self.port_is_open()

    def port_is_open(self) -> bool:
        """Whether somebody listens on the port."""
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def url(self) -> str:
        """The URL to connect with."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """The environment of the server; nothing of the test process leaks into it."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.directory),
            "LC_ALL": "C",
            "TZ": "UTC",
        }

    # What all of them can do

    @property
    def pid(self) -> int:
        """The process id, for the signals of crash tests."""
        if self.process is None:
            raise ServerError(f"{self.name} is not running. Call start() first.")
        return self.process.pid

    def start(self) -> None:
        """Start, and return as soon as connections are accepted.

        Raises ServerError when the server ends early or is not ready within a minute.
        """
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env=self.environment(),
                preexec_fn=die_with_parent,
                start_new_session=True,
                **self._as_user(),
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.is_ready():
            if self.process.poll() is not None:
                raise ServerError(f"{self.name} ended while starting.\n{self._log_tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerError(f"{self.name} was not ready in time.\n{self._log_tail()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Shut down in order. Nothing happens when the server is not running."""
        self._end(self.stop_signal)

    def kill(self) -> None:
        """End at once, as in a crash; the next `start()` has to recover."""
        self._end(self.kill_signal)

    def restart(self) -> None:
        """Stop and start, on the same port and data."""
        self.stop()
        self.start()

    def remove(self) -> None:
        """Stop and delete all data."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.initialise()
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    # Helpers

    def run(self, command: Sequence[str | Path]) -> None:
        """Run a set-up command as the server's user. Raises ServerError with its output."""
        result = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.directory,
            env=self.environment(),
            check=False,
            **self._as_user(),
        )
        if result.returncode:
            output = result.stdout.decode(errors="replace")[-2000:]
            raise ServerError(f"{Path(command[0]).name} failed.\n{output}")

    def write(self, name: str, text: str) -> Path:
        """A file in the server's directory that only the server's user can read."""
        path = self.directory / name
        path.touch(mode=0o600)
        path.write_text(text)
        if self.user:
            os.chown(path, self.user.pw_uid, self.user.pw_gid)
        return path

    def _as_user(self) -> dict[str, Any]:
        if self.user is None:
            return {}
        return {"user": self.user.pw_uid, "group": self.user.pw_gid, "extra_groups": []}

    def _make_directory(self) -> Path:
        base = REPOSITORY / ".var"
        base.mkdir(exist_ok=True)
        if self.user and not reachable_by_others(base):
            base = Path(tempfile.gettempdir())
        sweep(base)
        path = Path(tempfile.mkdtemp(prefix=f"server-{os.getpid()}-{self.name}-", dir=base))
        if self.user:
            os.chown(path, self.user.pw_uid, self.user.pw_gid)
        return path

    def _end(self, signal_number: signal.Signals) -> None:
        if self.process is None:
            return
        # Its own session, so also its own group: a start script ends together with its server.
        group, signals = self.process.pid, (signal.SIGCONT, signal_number)  # it may be frozen
        for number in signals if signal_number is self.kill_signal else ():
            self._signal_group(group, number)
        for number in signals:
            self.process.send_signal(number)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal_group(group, signal.SIGKILL)
            self.process.wait()
        self.process = None
        deadline = time.monotonic() + STOP_SECONDS
        while self.port_is_open() and time.monotonic() < deadline:
            time.sleep(0.02)  # a killed grandchild lets go of the port a moment later

    @staticmethod
    def _signal_group(group: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(group, number)

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""
