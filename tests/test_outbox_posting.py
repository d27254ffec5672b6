"""Where outgoing requests may go."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import pytest

from idempotency.outbox import PermanentFailure, posting


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",  # noqa: S104 (an address to refuse)
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "64:ff9b:1::a9fe:a9fe",
        "::ffff:0:a9fe:a9fe",
        "fec0::1",
        "4000::1",
        "fe80::1",
        "fc00::1",
        "ff02::1",
    ],
)
def test_an_address_that_is_not_public_is_known_in_every_disguise(address: str) -> None:
    assert not posting.is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]
)
def test_a_public_address_is_allowed(address: str) -> None:
    assert posting.is_public(ipaddress.ip_address(address))


class Network:
    """A name server with prepared answers, and the addresses that were connected to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.connected: list[str] = []
        monkeypatch.setattr(socket, "getaddrinfo", self.getaddrinfo)
        monkeypatch.setattr(socket, "create_connection", self.create_connection)

    def getaddrinfo(self, host: str, port: int, **kwargs: Any) -> list[Any]:
        return [(None, None, None, "", (address, port)) for address in self.answers.pop(0)]

    def create_connection(self, address: tuple[str, int], timeout: float) -> Any:
        self.connected.append(address[0])
        raise ConnectionRefusedError


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "①②⑦.①",
    ],
)
def test_a_private_address_is_known_however_it_is_written(host: str) -> None:
    with pytest.raises(posting.AddressRefused, match="not public"):
        posting.post(f"https://{host}/", b"", {})


def test_the_address_that_was_checked_is_the_one_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name server that answers differently the second time gains nothing."""
    network = Network(monkeypatch, ["8.8.8.8"], ["127.0.0.1"])
    with pytest.raises(ConnectionRefusedError):
        posting.post("https://rebind.test/", b"", {})
    assert network.connected == ["8.8.8.8"]
    assert network.answers == [["127.0.0.1"]]  # it was asked once


def test_the_next_address_is_tried_when_one_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network(monkeypatch, ["2606:4700::1111", "8.8.8.8"])
    with pytest.raises(ConnectionRefusedError):
        posting.post("https://two.test/", b"", {})
    assert network.connected == ["2606:4700::1111", "8.8.8.8"]


def test_many_addresses_share_the_time_of_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a name server holds a relay beyond its lease, with a list of addresses that never answer."""
    network = Network(monkeypatch, [f"8.8.8.{number}" for number in range(50)])
    waits: list[float] = []

    class Clock:
        monotonic = staticmethod(lambda: 9.0 * len(waits))

    def create_connection(address: tuple[str, int], timeout: float) -> Any:
        waits.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(posting, "time", Clock)
    monkeypatch.setattr(socket, "create_connection", create_connection)
    with pytest.raises(TimeoutError):
        posting.post("https://many.test/", b"", {}, timeout=15)
    assert waits == [15, 6]
    assert network.answers == []


@pytest.mark.parametrize("answers", [["8.8.8.8", "10.0.0.1"], ["10.0.0.1", "8.8.8.8"]])
def test_one_private_address_spoils_the_name(
    monkeypatch: pytest.MonkeyPatch, answers: list[str]
) -> None:
    network = Network(monkeypatch, answers)
    with pytest.raises(posting.AddressRefused):
        posting.post("https://mixed.test/", b"", {})
    assert network.connected == []


@pytest.mark.parametrize(
    "url",
    [
        "http://example.test/",
        "ftp://example.test/",
        "file:///etc/passwd",
        "https://",
        "https://user:secret@example.test/",
        "example.test",
        "https://[::1",
        "https://example.test:99999/",
        "https://example.test/secret file",
        "https://example.test/secreté",
        "https://example.test/secret\x7f",
    ],
)
def test_a_url_of_another_kind_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    network = Network(monkeypatch)
    with pytest.raises(PermanentFailure) as refused:
        posting.post(url, b"", {})
    assert "secret" not in str(refused.value)
    assert network.connected == []


def test_a_host_that_no_name_server_can_be_asked_for_is_refused() -> None:
    with pytest.raises(posting.AddressRefused):
        posting.post(f"https://{'a' * 64}.test/", b"", {})
