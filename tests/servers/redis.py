"""A private Redis, for the Celery and cache tests."""

from tests.servers.base import Server
from tests.servers.mariadb import find


def available() -> bool:
    """Whether a server can be started here."""
    return find("redis-server", "valkey-server") is not None


class Redis(Server):
    name = "redis"
    users = ("redis",)

    def command(self) -> list[str]:
        binary = find("redis-server", "valkey-server")
        if binary is None:
            raise LookupError("No Redis server here. Install redis-server.")
        durability = ["--appendonly", "yes"] if self.fsync else ["--appendonly", "no"]
        return [
            *(binary, "--bind", "127.0.0.1", "--port", str(self.port), "--save", ""),
            *("--dir", str(self.directory), "--requirepass", self.password, *durability),
        ]

    def url(self, database: int = 0) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/{database}"


def server(*, fsync: bool | None = None) -> Redis:
    """A private Redis, to be used with `with`. With `fsync` it keeps its data over a restart."""
    return Redis(fsync=fsync)
