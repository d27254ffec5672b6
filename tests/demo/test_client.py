"""`idempotent-fetch.js`, the browser's half, run by Node.js against a server that follows a script."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from .conftest import ROOT

MODULE = ROOT / "idempotency" / "static" / "idempotency" / "idempotent-fetch.js"

pytestmark = [
    pytest.mark.vendor("sqlite"),  # no database at all
    pytest.mark.skipif(not shutil.which("node"), reason="needs Node.js to run the browser's code"),
]

LOST = None  # the server hangs up instead of answering


@dataclass
class Script:
    """What the server answers, try by try, and the keys that it was sent."""

    answers: list[tuple[int, dict[str, str], Any] | None] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Script]:
    script = Script()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            script.keys.append(self.headers["Idempotency-Key"])
            answer = script.answers[len(script.keys) - 1]
            if answer is LOST:
                self.close_connection = True
                return
            status, headers, data = answer
            body = json.dumps(data).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Tests do not chat."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        script.url = f"http://127.0.0.1:{http.server_port}/"
        yield script
        http.shutdown()
        thread.join()


@pytest.fixture
def send(server: Script) -> Callable[..., tuple[Any, list[Any]]]:
    """Calls `send(url, options)` in Node; the final status (or "lost") and the reported events."""

    def call(**options: Any) -> tuple[Any, list[Any]]:
        options = {"body": {}, "key": "k-1", **options}
        code = f"""
            import {{ send }} from {json.dumps(MODULE.as_uri())};
            const events = [];
            const done = await send({json.dumps(server.url)}, {{
              ...{json.dumps(options)}, report: (event) => events.push(event),
            }}).then(({{ response }}) => response.status, () => "lost");
            console.log(JSON.stringify([done, events]));
        """
        return tuple(json.loads(node(code)))

    return call


def node(code: str) -> str:
    done = subprocess.run(
        ["node", "--input-type=module", "--eval", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("status", "problem", "is_final"),
    [
        (201, {}, True),
        (402, None, True),
        (422, {"key_action": "new_key"}, True),
        (409, {"detail": "sold out"}, True),
        (409, {"retryable": True, "key_action": "wait"}, False),
        (409, {"retryable": False, "key_action": "wait"}, False),
        (429, None, False),
        (503, None, False),
    ],
)
def test_a_key_is_forgotten_only_when_its_outcome_is_known(
    status: int, problem: Any, is_final: bool
) -> None:
    answer = f"{{ status: {status} }}, {json.dumps(problem)}"
    code = (
        f"import {{ isFinal }} from {json.dumps(MODULE.as_uri())}; console.log(isFinal({answer}))"
    )
    assert json.loads(node(code)) is is_final


def test_every_try_of_an_intent_carries_its_key(server: Script, send: Any) -> None:
    server.answers = [LOST, (503, {}, None), (409, {}, {"retryable": True}), (201, {}, {})]
    status, _ = send()
    assert status == 201
    assert server.keys == ['"k-1"'] * 4


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (422, {"type": "…:mismatch", "retryable": False}),
        (409, {"type": "…:outcome-unknown", "retryable": False}),
        (409, {"detail": "This order is paid already."}),
        (400, {}),
        (402, {}),
    ],
)
def test_a_final_answer_is_not_asked_for_again(
    server: Script, send: Any, status: int, problem: dict[str, Any]
) -> None:
    server.answers = [(status, {}, problem), (201, {}, {})]
    assert send()[0] == status
    assert len(server.keys) == 1


def test_it_waits_as_long_as_the_server_asks(server: Script, send: Any) -> None:
    server.answers = [(503, {"Retry-After": "2"}, None), (201, {}, {})]
    _, events = send()
    assert [event["wait"] for event in events if event["type"] == "waiting"] == [2000]


def test_it_gives_up_after_its_tries(server: Script, send: Any) -> None:
    server.answers = [LOST, LOST, (201, {}, {})]
    assert send(tries=2)[0] == "lost"
    server.keys.clear()
    server.answers = [(500, {}, None), (500, {}, None), (201, {}, {})]
    assert send(tries=2)[0] == 500


def test_a_status_is_asked_for_until_nothing_changes_by_itself(server: Script) -> None:
    states = [{"key_action": "wait", "status": "reconciling"}, {"key_action": None}]
    server.answers = [
        (200, {"Retry-After": "0"}, states[0]),
        LOST,
        (503, {}, None),
        (200, {}, states[1]),
    ]
    code = f"""
        import {{ follow }} from {json.dumps(MODULE.as_uri())};
        const seen = [];
        const last = await follow({json.dumps(server.url)}, {{ report: (state) => seen.push(state) }});
        console.log(JSON.stringify([last, seen]));
    """
    assert json.loads(node(code)) == [states[1], states]


def test_a_status_that_is_not_ours_ends_the_asking(server: Script) -> None:
    server.answers = [(404, {}, {})]
    code = f"""
        import {{ follow }} from {json.dumps(MODULE.as_uri())};
        console.log(JSON.stringify(await follow({json.dumps(server.url)})));
    """
    assert json.loads(node(code)) is None


def test_an_intent_keeps_its_key_until_it_changes_or_is_done() -> None:
    code = f"""
        const kept = new Map();
        globalThis.sessionStorage = {{
          getItem: (name) => kept.get(name) ?? null,
          setItem: (name, value) => kept.set(name, value),
          removeItem: (name) => kept.delete(name),
        }};
        const {{ keyFor, forget }} = await import({json.dumps(MODULE.as_uri())});
        const first = keyFor("pay", {{ cart: [1] }});
        const again = keyFor("pay", {{ cart: [1] }});
        const other = keyFor("pay", {{ cart: [1, 2] }});
        forget("pay");
        const later = keyFor("pay", {{ cart: [1, 2] }});
        console.log(JSON.stringify([first === again, first !== other, other !== later]));
    """
    assert json.loads(node(code)) == [True, True, True]
