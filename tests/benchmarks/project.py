"""What a measurement runs on: a private PostgreSQL that does flush to disk, tables, a WSGI server."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from urllib.request import urlopen

import django
from django.core.management import call_command

from tests.servers import postgresql
from tests.servers.base import REPOSITORY, die_with_parent, free_port

SETTINGS = "tests.benchmarks.settings"
WORKERS = 2
FLUSHES = os.environ.get("FSYNC") != "off"
VAR_DIR = REPOSITORY / ".var"


def flush_ms() -> float:
    """Median time in which this disk makes 8 KiB durable: what every commit waits for."""
    if not FLUSHES:
        return 0
    times = []
    with tempfile.TemporaryFile(dir=VAR_DIR) as file:
        for _ in range(50):
            file.write(bytes(8192))
            file.flush()
            start = time.perf_counter()
            getattr(os, "fdatasync", os.fsync)(file.fileno())  # macOS has only fsync
            times.append(time.perf_counter() - start)
    return median(times) * 1000


@contextmanager
def database() -> Iterator[None]:
    """Django on a private, empty PostgreSQL; commits wait for the disk unless FSYNC=off."""
    with postgresql.server(fsync=FLUSHES) as server:
        os.environ["DATABASE_URL"] = server.url()
        os.environ["DJANGO_SETTINGS_MODULE"] = SETTINGS
        django.setup()
        call_command("migrate", run_syncdb=True, verbosity=0)
        try:
            yield
        finally:
            from django.db import connections

            connections.close_all()


@contextmanager
def web_server(*, prepared: bool = False) -> Iterator[str]:
    """The project under gunicorn with two sync workers; yields its base URL.

    `prepared`: the database connections use prepared statements, which Django leaves to the project.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "gunicorn", "django.core.wsgi:get_wsgi_application()"]
    command += ["--bind", f"127.0.0.1:{port}", "--workers", str(WORKERS), "--no-control-socket"]
    environment = {**os.environ, "PREPARED": str(int(prepared))}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment,
            preexec_fn=die_with_parent,
        )
        try:
            if not _answers(url, process):
                log.seek(0)
                output = log.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"gunicorn did not start.\n{output}")
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urlopen(f"{url}/ready", timeout=5).close()
            return True
        except OSError:  # URLError is one
            time.sleep(0.1)
    return False
