"""The demo as a person starts it: `python -m demo_shop`, with data of its own."""

from __future__ import annotations

import base64
import http.cookiejar
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db import connections
from standardwebhooks import Webhook

from tests.conftest import database_url

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def replayed(self) -> bool:
        return self.headers.get("Idempotent-Replayed") == "true"


@dataclass
class Demo:
    """A running demo, known by what it printed."""

    process: subprocess.Popen[str]
    data: Path
    environment: dict[str, str]
    said: str = ""
    #: Product ids in the catalogue's order.
    products: list[int] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)
    shell: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return re.search(r"Shop\s+(http://\S+?)/\s", self.said)[1]

    @property
    def curls(self) -> list[list[str]]:
        return [
            shlex.split(line) for line in self.said.splitlines() if line.strip().startswith("curl ")
        ]

    def password(self, user: str) -> str:
        return re.search(rf"{user} / (\S+)", self.said)[1]

    def token_of(self, user: str) -> str:
        """A token: a password is hashed on every request, which is slow on purpose."""
        if user not in self.tokens:
            code = f"""
from django.contrib.auth.models import User
from rest_framework.authtoken.models import Token
print(Token.objects.get_or_create(user=User.objects.get(username={user!r}))[0].key)
"""
            self.tokens[user] = self.run(code)
        return self.tokens[user]

    @property
    def token(self) -> str:
        return re.search(r"token (\w+)", self.said)[1]

    def send(
        self,
        method: str,
        path: str,
        data: Any = None,
        *,
        key: str | None = None,
        user: str | None = "customer",
    ) -> Answer:
        """One API request as `user`, whatever its status is."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if user == "customer":
            headers["Authorization"] = f"Token {self.token}"
        elif user:
            headers["Authorization"] = f"Token {self.token_of(user)}"
        if key:
            headers["Idempotency-Key"] = key
        body = None if data is None else json.dumps(data).encode()
        return fetch(urllib.request.Request(self.url + path, body, headers, method=method))

    def post(self, path: str, data: Any, **kwargs: Any) -> Answer:
        return self.send("POST", path, data, **kwargs)

    def get(self, path: str, **kwargs: Any) -> Any:
        return self.send("GET", path, **kwargs).json

    def order(self, order: dict[str, Any]) -> Any:
        return self.get(f"/api/orders/{order['id']}/")

    def evidence(self, order: dict[str, Any]) -> Any:
        """How often what should happen once has happened for this order, by now."""
        return self.get(f"/api/orders/{order['id']}/evidence/")

    def until(self, is_so: Callable[[], Any], seconds: float = 60) -> None:
        """Wait until it is so; what works in the background decides when."""
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, "it did not come to be"
            time.sleep(0.2)

    def settled(self, url: str) -> Any:
        """The operation's state once nothing changes by itself any more."""
        self.until(lambda: self.get(url)["key_action"] != "wait")
        return self.get(url)

    def answer_bank(self, path: str, answer: str) -> None:
        """What a person does on the bank's page."""
        jar = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        browser = urllib.request.build_opener(jar, StayThere)
        page = fetch(urllib.request.Request(self.url + path), browser).body.decode()
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page)[1]
        form = urllib.parse.urlencode({"csrfmiddlewaretoken": token, "answer": answer}).encode()
        assert fetch(urllib.request.Request(self.url + path, form), browser).status == 302

    def send_webhook(self, event_id: str, event: str, order: dict[str, Any]) -> int:
        """A webhook as the provider signs it, about the order's charge; the shop's status."""
        charge = order["action_url"].split("/")[2]
        data = {"charge": charge, "reference": order["id"], "amount": order["total"]}
        body = json.dumps({"type": event, "data": data})
        secret = base64.b64encode((self.data / "secrets" / "webhook-secret").read_bytes()).decode()
        now = datetime.now(UTC)
        headers = {
            "Content-Type": "application/json",
            "webhook-id": event_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": Webhook(f"whsec_{secret}").sign(event_id, now, body),
        }
        url = f"{self.url}/webhooks/payments/"
        return fetch(urllib.request.Request(url, body.encode(), headers)).status

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> int:
        if self.shell is not None:
            self.shell.communicate(timeout=60)
        self.process.send_signal(signum)
        self.process.communicate(timeout=60)
        return self.process.returncode

    def run(self, code: str) -> str:
        """What Python `code` prints that is run inside the shop, with its settings and its data."""
        if self.shell is None:
            self.shell = subprocess.Popen(
                [sys.executable, "-c", SHELL],
                env={**self.environment, "DJANGO_SETTINGS_MODULE": "demo_shop.settings"},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self.shell.stdin.write(json.dumps(code) + "\n")
        self.shell.stdin.flush()
        is_right, said = json.loads(self.shell.stdout.readline())
        assert is_right, said
        return said.strip()


#: One process for all code, because starting Django takes longer than the tests.
SHELL = """
import contextlib, django, io, json, sys, traceback
django.setup()
from django.db import connections
for line in sys.stdin:
    out, is_right = io.StringIO(), True
    with contextlib.redirect_stdout(out):
        try:
            exec("from demo_shop.shop.factories import *\\n" + json.loads(line), {})
        except BaseException:
            is_right = False
            traceback.print_exc(file=out)
    connections.close_all()
    print(json.dumps([is_right, out.getvalue()]), flush=True)
"""


class StayThere(urllib.request.HTTPRedirectHandler):
    """Does not follow: the page behind a redirect may want a login."""

    def redirect_request(self, *args: Any) -> None:
        return None


def fetch(request: urllib.request.Request, opener: Any = None) -> Answer:
    try:
        with (opener.open if opener else urllib.request.urlopen)(request, timeout=60) as response:
            return Answer(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers, error.read())


def environment(data: Path, **changes: str) -> dict[str, str]:
    """A clean environment, so that nothing of the developer's own settings matters."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(data),
        "PYTHONPATH": str(ROOT),
        "DEMO_DATA_DIR": str(data),
        "DATABASE_URL": f"sqlite:///{data / 'shop.sqlite3'}",
        "PROVIDER_DATABASE_URL": f"sqlite:///{data / 'provider.sqlite3'}",
        "CELERY_BROKER_URL": "filesystem://localhost",
        "SECRET_KEY": "",
        "HOST": "127.0.0.1",
        "PORT": "0",
        "PROVIDER_LATENCY": "0.1",
        "MAINTENANCE_EVERY": "0.5",
        **changes,
    }


def spawn(data: Path, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "demo_shop"],
        env=environment(data, **changes),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start(data: Path, **changes: str) -> Demo:
    """Start a demo and wait until it says that it is open."""
    demo = Demo(spawn(data, **changes), data, environment(data, **changes))
    for line in demo.process.stdout:
        demo.said += line
        if "Ctrl-C stops everything" in line:
            return demo
    raise AssertionError(f"The demo did not start:\n{demo.said}")


@pytest.fixture(scope="session")
def empty_database(
    tmp_path_factory: pytest.TempPathFactory, django_db_blocker: Any
) -> Iterator[str]:
    """URL of a database of its own, of the kind that this run tests."""
    connection = connections["default"]
    if connection.vendor == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('database') / 'shop.sqlite3'}"
        return
    name = f"demo_{os.getpid()}"
    charset = " CHARACTER SET utf8mb4" if connection.vendor == "mysql" else ""
    with django_db_blocker.unblock(), connection._nodb_cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}{charset}")
    yield f"{database_url().rsplit('/', 1)[0]}/{name}"
    with django_db_blocker.unblock(), connection._nodb_cursor() as cursor:
        cursor.execute(f"DROP DATABASE {name}")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory, empty_database: str) -> Iterator[Demo]:
    """One running shop for all API tests; each brings keys and ids of its own."""
    demo = start(tmp_path_factory.mktemp("demo"), DATABASE_URL=empty_database)
    try:
        demo.products = [each["id"] for each in demo.get("/api/products/")["results"]]
        yield demo
    finally:
        demo.stop()


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    """Start demos on this test's own data; whatever still runs at the end is stopped."""
    started: list[Demo] = []

    def start_one(**changes: str) -> Demo:
        started.append(start(tmp_path, **changes))
        return started[-1]

    yield start_one
    for each in started:
        if each.process.poll() is None:
            each.stop()


@pytest.fixture
def key() -> str:
    return str(uuid4())
