"""Requests as fast as the server answers them, from wrk or, without it, from Python threads."""

import http.client
import json
import shutil
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

CONNECTIONS = 4
BODY = json.dumps({"label": "a parcel", "amount": 5})
NO_WRK = (
    "wrk is not installed: measuring with a Python client. It takes its processor time from the server, "
    "so all ratios come out nearer to 1 than they are. Install it: apt-get install wrk\n"
)
SCRIPT = Path(__file__).with_name("wrk.lua")


class LoadError(Exception):
    """Requests failed, so their rate says nothing."""


@dataclass(frozen=True)
class Load:
    requests: int
    seconds: float
    median_ms: float
    errors: int

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds


def has_wrk() -> bool:
    return shutil.which("wrk") is not None


def drive(url: str, *, prefix: str, distinct: int = 0, seconds: float) -> Load:
    """POST to `url` for about `seconds`; keys are `prefix` and a number up to `distinct` (0: no end).

    Raises LoadError if a request failed or was answered with a 4xx or 5xx.
    """
    run = _wrk if has_wrk() else _threads
    load = run(url, prefix, distinct, seconds)
    time.sleep(0.1)  # wrk leaves the requests on their way alone when its time is over
    if load.errors or not load.requests:
        raise LoadError(f"{url}: {load.errors} of {load.requests} requests failed")
    return load


def _wrk(url: str, prefix: str, distinct: int, seconds: float) -> Load:
    # wrk takes whole seconds only.
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s", "-s", str(SCRIPT)]
    result = subprocess.run(
        [*command, url, "--", prefix, str(distinct), BODY],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + 60,
    )
    try:
        return Load(**json.loads(result.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        raise LoadError(f"wrk failed: {result.stdout[-500:]} {result.stderr[-500:]}") from None


def _threads(url: str, prefix: str, distinct: int, seconds: float) -> Load:
    where = urlsplit(url)
    numbers = count(1)
    times: list[float] = []
    errors: list[object] = []
    start = time.perf_counter()

    def client() -> None:
        while time.perf_counter() - start < seconds:
            number = next(numbers)
            key = f"{prefix}{number % distinct + 1 if distinct else number}"
            headers = {"Content-Type": "application/json", "Idempotency-Key": key}
            began = time.perf_counter()
            connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
            try:
                connection.request("POST", where.path, BODY, headers)
                response = connection.getresponse()
                response.read()
                if response.status >= 400:
                    errors.append(response.status)
            except OSError as error:
                errors.append(error)
            finally:
                connection.close()
            times.append(time.perf_counter() - began)

    clients = [threading.Thread(target=client) for _ in range(CONNECTIONS)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    elapsed = time.perf_counter() - start
    return Load(len(times), elapsed, statistics.median(times) * 1000, len(errors))
