"""The broker in a folder: nobody sees half a message."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from kombu import Connection

from .conftest import ROOT

pytestmark = pytest.mark.vendor("sqlite")  # no database at all

# By its path: importing `demo_shop` would make its Celery app the current one of all other tests.
spec = importlib.util.spec_from_file_location("demo_broker", ROOT / "demo_shop" / "broker.py")
broker: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(broker)


@pytest.fixture
def connect(tmp_path: Path) -> Any:
    folders = {name: str(tmp_path / "messages") for name in ("data_folder_in", "data_folder_out")}
    (tmp_path / "messages").mkdir()
    options = {**folders, "control_folder": str(tmp_path / "control")}
    return lambda: Connection(
        "filesystem://", transport=broker.Transport, transport_options=options
    )


def test_a_message_appears_when_it_is_complete(
    connect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(payload: Any) -> str:
        with pytest.raises(Empty), connect() as reader:
            reader.SimpleQueue("shop").get(block=False)
        return '"x"'

    with connect() as writer:
        channel = writer.channel()
        monkeypatch.setattr(broker, "dumps", look)
        channel._put("shop", {})  # a reader looks while the file is open
    assert [path.suffix for path in (tmp_path / "messages").iterdir()] == [".msg"]


WRITER = """
import importlib.util, json, sys
from kombu import Connection
path, options, first = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
spec = importlib.util.spec_from_file_location("demo_broker", path)
broker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(broker)
with Connection("filesystem://", transport=broker.Transport, transport_options=options) as connection:
    queue = connection.SimpleQueue("shop")
    for number in range(first, first + 10):
        queue.put(number)
"""


def test_many_writers_lose_nothing(connect: Any) -> None:
    """Writers are processes, as in the demo: Kombu's threads share what they know about queues."""
    with connect() as connection:
        connection.SimpleQueue("shop")
        options = json.dumps(connection.transport_options)
    command = [sys.executable, "-c", WRITER, str(ROOT / "demo_shop" / "broker.py"), options]
    writers = [subprocess.Popen([*command, str(first)]) for first in range(0, 40, 10)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    with connect() as connection:
        queue = connection.SimpleQueue("shop")
        found = set()
        for _ in range(40):
            message = queue.get(timeout=30)
            found.add(message.payload)
            message.ack()
    assert found == set(range(40))
