"""`manage.py relay_outbox`: publish the messages of the outbox, until it is told to stop."""

from __future__ import annotations

import signal
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, InterfaceError, connections

from idempotency import outbox
from idempotency.conf import conf
from idempotency.exceptions import ConfigurationError


class Command(BaseCommand):
    help = (
        "Publishes the messages that outbox.enqueue() has written. Runs until SIGTERM or SIGINT, then "
        "finishes the message in hand. Any number may run at the same time."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--database",
            choices=tuple(connections),
            help="Database alias to relay from. Default: IDEMPOTENCY['USING'].",
        )
        parser.add_argument(
            "--once",
            action="store_true",
            help="Stop as soon as nothing is due; for cron and tests.",
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            help="Messages claimed at once. Default: IDEMPOTENCY['OUTBOX_BATCH_SIZE'].",
        )
        parser.add_argument(
            "--interval",
            type=float,
            help="Seconds to wait when nothing is due. Default: IDEMPOTENCY['OUTBOX_INTERVAL'].",
        )

    def handle(self, *args: object, **options: Any) -> None:
        for option in ("batch_size", "interval"):
            if options[option] is not None and options[option] <= 0:
                raise CommandError(f"--{option.replace('_', '-')} must be more than 0.")
        try:
            relay = outbox.Relay(
                using=options["database"],
                batch_size=options["batch_size"],
                interval=options["interval"],
            )
        except (ConfigurationError, ImportError) as error:
            raise CommandError(f"IDEMPOTENCY['OUTBOX_PUBLISHER']: {error}") from error
        before = {
            number: signal.signal(number, lambda number, _: self._stop(relay, number))
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            relay.run(once=options["once"])
        except (DatabaseError, InterfaceError) as error:
            raise CommandError(
                f"The relay of {options['database'] or conf.USING!r} stopped: {error}. What it had claimed "
                "is published when the lease is over."
            ) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if options["verbosity"] > 0:
            done = relay.summary
            self.stdout.write(
                f"{done.sent} sent, {done.retried} to be tried again, {done.dead} dead letters."
            )

    def _stop(self, relay: outbox.Relay, number: int) -> None:
        relay.stop()
        # Whoever asks twice means it.
        signal.signal(
            number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler
        )
