"""A TCP proxy in front of the database that loses chosen messages, and aliases to connect with."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

from django.db import connections

from tests.processes import PATIENCE_SECONDS

#: What may happen to a message: it never arrives; it arrives, but its answer does not; it arrives when
#: `Proxy.deliver()` is called, long after the client has given the connection up.
REQUEST_LOST, ANSWER_LOST, REQUEST_LATE = "request lost", "answer lost", "request late"


@contextmanager
def database_alias(name: str, **changes: Any) -> Iterator[str]:
    """Another alias, set up like `default` but for `changes`."""
    connections.settings[name] = deepcopy(connections.settings["default"]) | changes
    wrapper = connections[name]

    def connect() -> None:
        if wrapper.connection is None:
            with wrapper.wrap_database_errors:
                wrapper.connect()

    # Django's own method lets a test connect to the aliases it declared before it began, only.
    wrapper.ensure_connection = connect
    try:
        yield name
    finally:
        with suppress(Exception):
            connections[name].close()
        del connections[name]
        del connections.settings[name]


class Proxy:
    """Forwards connections to the database of `default`.

    `lose(how, what)` drops the connection around the next message that contains the word `what`. With
    `refusing` set no new connection gets through.
    """

    def __init__(self) -> None:
        config = connections.settings["default"]
        self._host, self._port = str(config["HOST"]), int(config["PORT"] or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.refusing = False
        self._how: str | None = None
        self._what = b""
        self._delivery = threading.Event()
        self._sockets: list[socket.socket] = []

    def lose(self, how: str, what: bytes) -> None:
        self._how, self._what = how, what

    def deliver(self) -> None:
        """Let the late message arrive."""
        self._delivery.set()

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._delivery.set()
        for each in (self._listener, *self._sockets):
            _shut(each)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refusing:
                    _shut(client)
                    continue
                server = self._connect()
                self._sockets += (client, server)
                pair = _Pair(self, client, server)
                threading.Thread(target=pair.forward, daemon=True).start()
                threading.Thread(target=pair.backward, daemon=True).start()

    def _connect(self) -> socket.socket:
        if not self._host.startswith("/"):
            return socket.create_connection((self._host, self._port))
        server = socket.socket(socket.AF_UNIX)
        name = (
            f"/.s.PGSQL.{self._port or 5432}"
            if connections["default"].vendor == "postgresql"
            else ""
        )
        server.connect(self._host + name)
        return server

    def take(self, data: bytes) -> str | None:
        """How this message gets lost, if it does."""
        if self._how is None or not re.search(rb"\b%s\b" % self._what, data.upper()):
            return None
        how, self._how = self._how, None
        return how

    def wait_for_delivery(self) -> None:
        self._delivery.wait(PATIENCE_SECONDS)


class _Pair:
    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy, self.client, self.server = proxy, client, server
        self.answers_lost = False

    def forward(self) -> None:
        with suppress(OSError):
            while data := self.client.recv(65536):
                how = self.proxy.take(data)
                if how == REQUEST_LOST:
                    break
                if how == ANSWER_LOST:
                    self.answers_lost = True
                if how == REQUEST_LATE:
                    self.answers_lost = True
                    _shut(self.client)
                    self.proxy.wait_for_delivery()
                self.server.sendall(data)
        if not self.answers_lost:  # else the answer is the sign that the message has had its effect
            _shut(self.client)
            _shut(self.server)

    def backward(self) -> None:
        with suppress(OSError):
            while data := self.server.recv(65536):
                if self.answers_lost:
                    break
                self.client.sendall(data)
        _shut(self.client)
        _shut(self.server)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # shut down, not only closed: a forked child may have a copy
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
