"""A private RabbitMQ node, for the Celery tests."""

import os
from pathlib import Path

from tests.servers.base import Server, free_port

SCRIPT = "/usr/lib/rabbitmq/bin/rabbitmq-server"  # the one without a change of user


def available() -> bool:
    """Whether a server can be started here."""
    return Path(SCRIPT).exists()


class RabbitMQ(Server):
    name = "rabbitmq"
    users = ("rabbitmq",)

    def initialise(self) -> None:
        if not available():
            raise LookupError("No RabbitMQ server here. Install rabbitmq-server.")
        self.distribution_port, self.epmd_port = free_port(), free_port()
        self.write(
            "rabbitmq.conf",
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            f"default_user = idempotency\ndefault_pass = {self.password}\n"
            "loopback_users = none\nlog.file = false\nlog.console = true\n"
            "vm_memory_high_watermark.absolute = 512MB\ndisk_free_limit.absolute = 1MB\n",
        )
        self.write("enabled_plugins", "[].\n")

    def environment(self) -> dict[str, str]:
        return super().environment() | {
            "RABBITMQ_NODENAME": f"idempotency-{self.port}@localhost",
            "RABBITMQ_MNESIA_BASE": str(self.directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.directory),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_DIST_PORT": str(self.distribution_port),
            # A port mapper of its own, so that it neither finds nor outlives another node's.
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2",
        }

    def command(self) -> list[str]:
        return [SCRIPT]

    def remove(self) -> None:
        super().remove()
        self._stop_port_mapper()

    def _stop_port_mapper(self) -> None:
        """Erlang leaves its port mapper behind; this node's is known by its port."""
        if not hasattr(self, "epmd_port"):
            return
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if process.joinpath("comm").read_text().strip() != "epmd":
                    continue
                environment = process.joinpath("environ").read_bytes().split(b"\0")
                if f"ERL_EPMD_PORT={self.epmd_port}".encode() in environment:
                    os.kill(int(process.name), 15)
            except (OSError, ValueError):
                continue

    def url(self, virtual_host: str = "") -> str:
        return f"amqp://idempotency:{self.password}@127.0.0.1:{self.port}/{virtual_host}"


def server(*, fsync: bool | None = None) -> RabbitMQ:
    """A private RabbitMQ node, to be used with `with`."""
    return RabbitMQ(fsync=fsync)
