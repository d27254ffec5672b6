"""One HTTP POST to an address somebody else chose, from inside our network.

The address is resolved once, checked, and connected to: a name that answers differently the second
time (DNS rebinding) changes nothing. Redirects and proxies are not followed.
Source: OWASP Server-Side Request Forgery Prevention.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from email.message import Message as Headers
from urllib.parse import urlsplit

from .messages import PermanentFailure

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
#: All that IPv6 gives to the public; beside it lie local networks, reserved ones and ways into IPv4.
_UNICAST = ipaddress.ip_network("2000::/3")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressRefused(PermanentFailure):
    """The URL leads where outgoing requests must not go."""


@dataclass(frozen=True)
class Answer:
    """What is needed of a response; its body is not read."""

    status: int
    #: Found in any case: `headers.get("Retry-After")`.
    headers: Headers


def post(
    url: str,
    body: bytes,
    headers: dict[str, str],
    *,
    timeout: float = 15.0,
    allow_private: bool = False,
    allow_http: bool = False,
) -> Answer:
    """POST `body` and return status and headers.

    `timeout` is in seconds, for everything after the look-up of the name. `allow_private` admits
    addresses that are not public (loopback, private, link-local, ...), `allow_http` plain http URLs.
    Raises AddressRefused, or OSError or http.client.HTTPException when there was no answer.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise AddressRefused("the URL is malformed") from None
    if parts.scheme not in ("https", *(("http",) if allow_http else ())) or not host:
        raise AddressRefused("the URL must start with https:// and name a host")
    if parts.username or parts.password:
        raise AddressRefused("the URL contains credentials")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not (target.isascii() and target.isprintable()) or " " in target:
        raise AddressRefused("the URL has characters that must be percent-encoded")
    port = port or (443 if parts.scheme == "https" else 80)
    addresses = _resolve(host, port, allow_private=allow_private)
    connection = (
        _Pinned(addresses, host, port, timeout)
        if parts.scheme == "http"
        else _PinnedTLS(addresses, host, port, timeout)
    )
    # A socket's own timeout starts anew with every byte of a slow answer.
    watchdog = threading.Timer(timeout, connection.abort)
    watchdog.daemon = True
    watchdog.start()
    try:
        connection.request("POST", target, body, headers)
        response = connection.getresponse()
        if connection.aborted:  # headers that were cut short look complete
            raise TimeoutError
        return Answer(response.status, response.headers)
    finally:
        watchdog.cancel()
        connection.close()


def _resolve(host: str, port: int, *, allow_private: bool) -> list[str]:
    """The addresses of the host. One that is not allowed spoils all of them."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise AddressRefused("the URL names a host that cannot exist") from None
    addresses = [str(info[4][0]) for info in found]
    for address in addresses:
        if not allow_private and not is_public(ipaddress.ip_address(address.partition("%")[0])):
            raise AddressRefused(f"{host} resolves to an address that is not public")
    return addresses


def is_public(address: Address) -> bool:
    """Whether anybody on the internet could send to this address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address not in _UNICAST:
            return False
    return address.is_global and not address.is_multicast


class _Pinned(http.client.HTTPConnection):
    """A connection to one of `addresses`, whatever `host` resolves to by now."""

    def __init__(self, addresses: list[str], host: str, port: int, timeout: float) -> None:
        super().__init__(host, port)
        self._addresses = addresses
        self._deadline = time.monotonic() + timeout
        self.aborted = False

    def connect(self) -> None:
        for address in self._addresses:
            try:
                self.sock = socket.create_connection((address, self.port), self._left())
                break
            except OSError as error:
                failure = error
        else:
            raise failure
        self._use_what_is_left()

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _use_what_is_left(self) -> None:
        # After the assignment of `sock`: had the watchdog barked before, it would have missed it.
        self.sock.settimeout(self._left())

    def abort(self) -> None:
        self.aborted = True
        sock = self.sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it is closed already


class _PinnedTLS(_Pinned):
    def connect(self) -> None:
        super().connect()
        context = ssl.create_default_context()
        self.sock = context.wrap_socket(self.sock, server_hostname=self.host)
        self._use_what_is_left()

    default_port = http.client.HTTPS_PORT
