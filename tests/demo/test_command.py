"""`python -m demo_shop`: what it prints, what it leaves behind, what it says when it cannot."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import Answer, Demo, fetch, spawn

StartDemo = Callable[..., Demo]


def run_curl(command: list[str]) -> Answer:
    """Run a printed curl line; without curl, send the same request."""
    if shutil.which("curl"):
        output = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
        head, _, body = output.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        return Answer(int(status.split()[1]), headers, body)
    values = iter(command)
    url = next(value for value in command if value.startswith("http"))
    options: dict[str, list[str]] = {}
    for value in values:
        if value in {"-H", "-d", "-X"}:
            options.setdefault(value, []).append(next(values))
    headers = dict(header.split(": ", 1) for header in options["-H"])
    body = options["-d"][0].encode()
    return fetch(urllib.request.Request(url, body, headers, method=options["-X"][0]))


def processes_of(data: Path) -> list[psutil.Process]:
    """Every process that runs on `data`, whoever its parent is by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone meanwhile, or not ours
            if process.environ().get("DEMO_DATA_DIR") == str(data):
                found.append(process)
    return found


def gone(data: Path, timeout: float = 10) -> bool:
    deadline = time.monotonic() + timeout
    while processes_of(data):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


#: These start demos of their own, on SQLite: once is enough.
on_sqlite = pytest.mark.vendor("sqlite")


def test_the_printed_requests_show_an_order_and_its_replay(demo: Demo) -> None:
    first, again = demo.curls
    before = demo.get("/api/orders/")["count"]
    order = run_curl(first)
    assert order.status == 201
    assert "Idempotent-Replayed" not in order.headers
    replay = run_curl(again)
    assert (replay.status, replay.body) == (201, order.body)
    assert replay.headers["Idempotent-Replayed"] == "true"
    assert demo.get("/api/orders/")["count"] == before + 1


def test_web_workers_celery_worker_beat_and_relay_run(demo: Demo) -> None:
    commands = [" ".join(process.cmdline()) for process in processes_of(demo.data)]
    assert sum("gunicorn" in command for command in commands) >= 3  # the master and two workers
    assert any("celery" in command and " worker " in command for command in commands)
    assert any("celery" in command and " beat " in command for command in commands)
    assert any(" relay_outbox" in command for command in commands)


@on_sqlite
def test_nothing_survives_and_a_second_run_keeps_the_data(start_demo: StartDemo) -> None:
    """And a child that dies is reported, and nothing survives that either."""
    demo = start_demo()
    run_curl(demo.curls[0])
    assert len(processes_of(demo.data)) >= 7
    assert demo.stop(signal.SIGINT) == 0
    assert gone(demo.data)

    second = start_demo()
    assert second.password("customer") == demo.password("customer")
    assert second.token == demo.token
    assert second.get("/api/orders/")["count"] == 1
    assert second.get("/api/products/")["count"] == 8

    next(each for each in processes_of(second.data) if "beat" in each.cmdline()).kill()
    said, _ = second.process.communicate(timeout=60)
    assert second.process.returncode == 1
    assert "beat process ended (SIGKILL)" in said
    assert gone(second.data)


def test_an_order_is_paid_and_mailed_by_relay_worker_and_beat(demo: Demo, key: str) -> None:
    """Order, outbox, task, e-mail file; beat, the provider's webhook, order paid: all real processes."""
    body = {"lines": [{"product": demo.products[0], "quantity": 1}]}
    order = demo.post("/api/checkout/", {**body, "card": "tok_3ds"}, key=key).json
    demo.answer_bank(order["action_url"], "approve")
    demo.until(lambda: demo.order(order)["status"] == "paid")
    demo.until(lambda: demo.evidence(order)["emails"])
    mails = [path.read_text() for path in (demo.data / "mail").iterdir()]
    (mail,) = [text for text in mails if f"Order {order['number']} is paid" in text]
    assert "To: customer@shop.example" in mail
    assert demo.evidence(order)["webhooks"] >= 2
    state = demo.get(order["status_url"])
    demo.until(lambda: demo.get(order["status_url"])["status"] == "succeeded")
    assert state["references"] == [
        {"name": "order", "value": order["id"]},
        {"name": "number", "value": order["number"]},  # what a customer quotes
    ]


@on_sqlite
def test_a_busy_port_names_the_variable(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        process = spawn(tmp_path, PORT=port)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert port in said
    assert "PORT" in said
    assert "Traceback" not in said


def test_two_demos_do_not_share_their_data(demo: Demo) -> None:
    process = spawn(demo.data)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "DEMO_DATA_DIR" in said


def test_passwords_are_readable_by_their_owner_only(demo: Demo) -> None:
    kept: list[Any] = list((demo.data / "secrets").iterdir())
    assert {path.name for path in kept} == {
        "secret-key",
        "webhook-secret",
        "admin-password",
        "customer-password",
    }
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
