"""Messages per second of the relay and of a loop written by hand, in interleaved rounds.

The loop is the tightest that is still right for plain messages: one transaction per batch, `SKIP
LOCKED`, one UPDATE. It publishes inside the transaction, and has no attempts, back-off, dead letters,
order, fence or stop. The publisher is the same for both: a private Redis (XADD), the fastest broker
there is, or nothing at all, which shows the bare cost.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

from tests.benchmarks import project
from tests.benchmarks.report import ratio, table
from tests.servers import redis

BATCH = 100
HAND, RELAY, KEYED = "loop by hand", "relay", "relay, 100 ordering keys"
REDIS, NOTHING = "Redis stream", "nothing"
CASES = ((HAND, REDIS), (RELAY, REDIS), (KEYED, REDIS), (HAND, NOTHING), (RELAY, NOTHING))


def main(rounds: int, seconds: float) -> None:
    """Measure in a process of its own: Django connects to one private database per process."""
    command = [sys.executable, "-m", "tests.benchmarks.outbox", str(rounds), str(seconds)]
    subprocess.run(command, check=True)


def measure(rounds: int, seconds: float) -> None:
    """Print the table. A round relays as many messages as take about `seconds` by hand."""
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    with project.database(), broker() as xadd:
        publishers = {REDIS: xadd, NOTHING: lambda body: None}
        count = 2000
        for number in range(rounds + 1):
            turn = number % len(CASES)  # nobody always comes first, when the machine has rested
            for label, publisher in CASES[turn:] + CASES[:turn]:
                run, publish = by_hand if label == HAND else by_relay, publishers[publisher]
                fill(count, keys=100 if label == KEYED else 0)
                rate = count / timed(partial(run, publish))
                if number:  # the first round only warms everything up
                    rates[label, publisher].append(rate)
                elif (label, publisher) == CASES[0]:
                    count = min(5000, max(1000, int(rate * seconds)))
            sys.stderr.write(f"round {number} of {rounds}\n")
    rows = [
        [
            label,
            publisher,
            f"{median(rates[label, publisher]):.0f}",
            ratio(rates[HAND, publisher], rates[label, publisher]),
        ]
        for label, publisher in CASES
    ]
    header = ["outbox", "publisher", "messages per second", "times slower than by hand"]
    sys.stdout.write(table(header, rows) + "\n")


def by_hand(publish: Callable[[str], Any]) -> None:
    from django.db import connection, transaction

    select = (
        "SELECT id, message_id, topic, payload FROM idempotency_outboxmessage "
        "WHERE status = 'pending' AND available_at <= STATEMENT_TIMESTAMP() "
        "ORDER BY available_at LIMIT %s FOR UPDATE SKIP LOCKED"
    )
    mark = (
        "UPDATE idempotency_outboxmessage SET status = 'sent', sent_at = now() WHERE id = ANY(%s)"
    )
    with connection.cursor() as cursor:
        while True:
            with transaction.atomic():
                cursor.execute(select, [BATCH])
                rows = cursor.fetchall()
                for row in rows:
                    publish(row[3])
                cursor.execute(mark, [[row[0] for row in rows]])
            if not rows:
                return


def by_relay(publish: Callable[[str], Any]) -> None:
    from idempotency import outbox

    outbox.relay(publisher=lambda message: publish(message.body), batch_size=BATCH)


def timed(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    duration = time.perf_counter() - started
    from idempotency.models import OutboxMessage

    unsent = OutboxMessage.objects.exclude(status="sent").count()
    if unsent:
        raise RuntimeError(f"{unsent} messages were not sent")
    return duration


def fill(count: int, keys: int) -> None:
    from django.db import connection

    from tests import outboxes

    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE idempotency_outboxmessage")
    payload = {"order_id": 1, "lines": ["lamp", "cup", "notebook"]}
    outboxes.fill([("t", payload, f"key {n % keys}" if keys else "") for n in range(count)])
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE idempotency_outboxmessage")


@contextmanager
def broker() -> Iterator[Callable[[str], Any]]:
    """A private Redis; yields what appends a message to a stream and waits for the answer."""
    import redis as client

    with redis.server() as server, client.Redis.from_url(server.url()) as connection:
        yield lambda body: connection.xadd("outbox", {"body": body}, maxlen=1000)


if __name__ == "__main__":
    measure(int(sys.argv[1]) if sys.argv[1:] else 5, float(sys.argv[2]) if sys.argv[2:] else 1.0)
