"""What `python -m demo_shop` does: prepare the data, run the shop's processes, stop them all."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

import environ

from .keepsakes import DATA_DIR, keepsake
from .supervisor import Supervisor

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT = 60.0  # seconds until the web server must answer


class CannotStart(Exception):
    """The demo cannot run; the message says what to do about it."""


def main() -> int:
    """Run the demo until it is told to stop. Returns the exit status."""
    environ.Env.read_env(ROOT / ".env")  # the settings do so too, but PORT is needed before them
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "demo_shop.settings")
    os.environ.setdefault("DEMO_DATA_DIR", str(DATA_DIR))
    host = os.environ.get("HOST", "127.0.0.1")
    supervisor = Supervisor(DATA_DIR / "logs")
    supervisor.listen()
    try:
        with claim_data(), open_port(host) as listener:
            prepare_data()
            port = listener.getsockname()[1]
            url = f"http://{reachable(host)}:{port}"
            os.environ["PROVIDER_WEBHOOK_URL"] = f"{url}/webhooks/payments/"
            start(supervisor, listener)
            # The web server has its own copy; with ours open, a dead server would look like a slow one.
            listener.close()
            try:
                if wait_until_up(supervisor, url):
                    print(welcome(url), flush=True)
                watch(supervisor)
                print("\nStopping.", flush=True)
            finally:
                supervisor.stop()
    except CannotStart as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def claim_data() -> IO[str]:
    """Make sure that no other demo runs on the same files; the claim ends with the file's closing."""
    DATA_DIR.mkdir(parents=True, exist_ok=True)
    lock = (DATA_DIR / "demo.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise CannotStart(
            f"Another demo is running on the data in {DATA_DIR}.\n"
            "Stop it first, or give this one another folder: DEMO_DATA_DIR=… "
        ) from None
    return lock


def open_port(host: str) -> socket.socket:
    """Listen before anything else starts, so that a busy port is found out at once."""
    port = os.environ.get("PORT", "8000")
    try:
        return socket.create_server((host, int(port)), backlog=128)
    except ValueError:
        raise CannotStart(f"PORT must be a number, not {port!r}.") from None
    except (OSError, OverflowError) as error:
        raise CannotStart(
            f"Cannot listen on {host}:{port} ({error.args[-1]}).\n"
            "Choose another port with the PORT variable: PORT=8001 make demo"
        ) from None


def reachable(host: str) -> str:
    """The name under which a browser on this machine reaches a server listening on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)  # noqa: S104


def prepare_data() -> None:
    """Migrate and seed; both do nothing the second time."""
    import django
    from django.core.management import call_command
    from django.db import connections

    django.setup()
    print(f"Preparing the shop's data in {DATA_DIR} …", flush=True)
    for alias in connections:
        call_command("migrate", database=alias, verbosity=0, interactive=False)
    call_command("seed_demo", verbosity=0)
    connections.close_all()


def start(supervisor: Supervisor, listener: socket.socket) -> None:
    python = [sys.executable, "-m"]
    workers = max(2, int(os.environ.get("WEB_CONCURRENCY") or 2))
    web = f"gunicorn demo_shop.wsgi --bind fd://{listener.fileno()} --workers {workers} --threads 4"
    web += " --graceful-timeout 5 --no-control-socket --access-logfile -"
    beat = ["celery", "-A", "demo_shop", "beat", "--pidfile=", "-s", str(DATA_DIR / "beat")]
    worker = "celery -A demo_shop worker --concurrency 1 --loglevel INFO --without-mingle --without-gossip"
    supervisor.start("web", python + web.split(), pass_fds=[listener.fileno()])
    supervisor.start("worker", python + worker.split())
    supervisor.start("relay", [*python, "django", "relay_outbox"])
    supervisor.start("beat", python + beat)


def wait_until_up(supervisor: Supervisor, url: str) -> bool:
    """True once the shop answers, False when told to stop meanwhile."""
    deadline = time.monotonic() + START_TIMEOUT
    while not supervisor.stopped_by:
        report_death(supervisor)
        try:
            with urllib.request.urlopen(f"{url}/health/", timeout=5):  # noqa: S310 - http, our own
                return True
        except urllib.error.HTTPError:
            return True  # it answers; what it thinks of the host name is another matter
        except OSError:
            if time.monotonic() > deadline:
                raise CannotStart(
                    f"The web server does not answer. See {supervisor.log('web')}."
                ) from None
            time.sleep(0.1)
    return False


def watch(supervisor: Supervisor) -> None:
    """Return when told to stop; raise CannotStart when a child dies before."""
    while not supervisor.stopped_by:
        report_death(supervisor)
        time.sleep(0.2)


def report_death(supervisor: Supervisor) -> None:
    if name := supervisor.dead():
        raise CannotStart(supervisor.obituary(name))


def welcome(url: str) -> str:
    """Where to look, how to sign in, and two requests to try."""
    from django.db import connections
    from rest_framework.authtoken.models import Token

    from .shop.models import Product

    token = Token.objects.get(user__username="customer").key
    product = Product.objects.order_by("price").values_list("pk", flat=True)[0]
    connections.close_all()
    order = shlex.join(
        [
            *["curl", "-i", "-X", "POST", f"{url}/api/orders/"],
            *["-H", f"Authorization: Token {token}"],
            *["-H", "Content-Type: application/json"],
            *["-H", f"Idempotency-Key: demo-{secrets.token_hex(4)}"],
            *["-d", json.dumps({"lines": [{"product": product, "quantity": 1}]})],
        ]
    )
    return f"""
The shop is open.

  Shop   {url}/          customer / {keepsake("customer-password")}
  Admin  {url}/admin/    admin / {keepsake("admin-password")}
  API    {url}/api/      token {token}
  Logs   {DATA_DIR / "logs"}
  Mail   {DATA_DIR / "mail"}

Place an order:
  {order}

Send it again, as a client does that lost the answer. Same key, same order:
  {order}

Ctrl-C stops everything; the data stays."""
