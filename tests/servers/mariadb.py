"""A private MariaDB from the machine's own binaries."""

import os
import shutil
import tempfile
from pathlib import Path

from tests.servers.base import Server


def find(*names: str) -> str | None:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def available() -> bool:
    """Whether a server can be started here."""
    return bool(find("mariadbd") and find("mariadb-install-db"))


class MariaDB(Server):
    name = "mariadb"
    users = ("mysql",)

    def initialise(self) -> None:
        server, installer = find("mariadbd"), find("mariadb-install-db")
        if server is None or installer is None:
            raise LookupError(
                "No MariaDB server here. Install mariadb-server, or set MARIADB_URL to a running one."
            )
        self.server = server
        self.data = self.directory / "data"
        # A socket path has to be shorter than a repository path may be.
        self.sockets = Path(tempfile.mkdtemp(prefix="mdb-"))
        if self.user:
            os.chown(self.sockets, self.user.pw_uid, self.user.pw_gid)
        self.run(
            [
                *(installer, "--no-defaults", f"--datadir={self.data}", "--skip-test-db"),
                *("--auth-root-authentication-method=normal", "--skip-name-resolve"),
                *("--innodb-flush-log-at-trx-commit=0", "--skip-log-bin"),
            ]
        )
        self.write(
            "users.sql",
            f"CREATE USER IF NOT EXISTS idempotency@'127.0.0.1' IDENTIFIED BY '{self.password}';\n"
            "GRANT ALL ON *.* TO idempotency@'127.0.0.1';\n"
            "CREATE DATABASE IF NOT EXISTS idempotency CHARACTER SET utf8mb4;\n",
        )

    def command(self) -> list[str]:
        return [
            *(self.server, "--no-defaults", f"--datadir={self.data}"),
            *("--bind-address=127.0.0.1", f"--port={self.port}", "--skip-name-resolve"),
            *(f"--socket={self.sockets}/s", f"--pid-file={self.directory}/pid"),
            *(f"--init-file={self.directory}/users.sql", "--skip-log-bin"),
            *("--character-set-server=utf8mb4", "--max-connections=300"),
            "--innodb-buffer-pool-size=128M",
            f"--innodb-flush-log-at-trx-commit={1 if self.fsync else 0}",
        ]

    def remove(self) -> None:
        super().remove()
        if hasattr(self, "sockets"):
            shutil.rmtree(self.sockets, ignore_errors=True)

    def url(self, database: str = "idempotency") -> str:
        return f"mysql://idempotency:{self.password}@127.0.0.1:{self.port}/{database}"


def server(*, fsync: bool | None = None) -> MariaDB:
    """A private MariaDB, to be used with `with`; its user may create databases."""
    return MariaDB(fsync=fsync)
