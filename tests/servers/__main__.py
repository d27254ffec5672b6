"""`python -m tests.servers postgresql`: start one, print its URL, stop it on Ctrl-C."""

import importlib
import signal
import sys
import threading

KINDS = ("postgresql", "mariadb", "redis", "rabbitmq")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in KINDS:
        sys.stderr.write(f"Usage: python -m tests.servers {{{','.join(KINDS)}}}\n")
        return 2
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with importlib.import_module(f"tests.servers.{arguments[0]}").server() as server:
        sys.stdout.write(f"{server.url()}\n")
        sys.stdout.flush()
        ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
