"""`manage.py purge_operations`: remove operations and sent messages that are no longer needed."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, InterfaceError, connections

from idempotency import outbox, retention
from idempotency.conf import conf
from idempotency.models import Operation

#: Seconds between two lines of progress.
PROGRESS_EVERY = 5.0


class Command(BaseCommand):
    help = (
        "Removes operations whose replay window and tombstone are over, and messages that were sent "
        "longer ago than IDEMPOTENCY['OUTBOX_RETENTION'], in small batches, next to live traffic. "
        "May be interrupted, repeated and run more than once at the same time."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--database",
            choices=tuple(connections),
            help="Database alias to purge. Default: IDEMPOTENCY['USING'].",
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            default=retention.BATCH_SIZE,
            help=f"Rows per transaction, 1 to {retention.LARGEST_BATCH}. Default: %(default)s.",
        )
        parser.add_argument(
            "--max-seconds",
            type=float,
            help="Stop after the batch in which this time is over. Default: run until nothing is due.",
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="Count what is due and change nothing."
        )

    def handle(self, *args: object, **options: Any) -> None:
        using = options["database"] or conf.USING
        if not 1 <= options["batch_size"] <= retention.LARGEST_BATCH:
            raise CommandError(f"--batch-size must be between 1 and {retention.LARGEST_BATCH}.")
        if options["max_seconds"] is not None and options["max_seconds"] <= 0:
            raise CommandError("--max-seconds must be more than 0.")
        self._check_table(using)
        self.next_line = time.monotonic() + PROGRESS_EVERY
        self.verbosity = options["verbosity"]
        try:
            purged = retention.purge(
                using,
                batch_size=options["batch_size"],
                max_seconds=options["max_seconds"],
                dry_run=options["dry_run"],
                on_progress=self._progress,
            )
            messages = 0
            if purged.complete and not options["dry_run"]:
                messages = outbox.purge_sent(
                    using, batch_size=options["batch_size"], max_seconds=options["max_seconds"]
                )
        except (DatabaseError, InterfaceError) as error:
            raise CommandError(
                f"The purge of {using!r} stopped: {error}. Finished batches are kept; "
                "run the command again when the database answers."
            ) from error
        if self.verbosity < 1:
            return
        if options["dry_run"]:
            self.stdout.write(f"Due in {using!r}, nothing was changed: {_line(purged)}.")
        else:
            done = f"{_line(purged)}, {messages} sent messages deleted"
            self.stdout.write(self.style.SUCCESS(f"Purged {using!r}: {done}."))
            if not purged.complete:
                self.stdout.write("The time is over and more is due; run the command again.")

    def _check_table(self, using: str) -> None:
        try:
            tables = connections[using].introspection.table_names()
        except (DatabaseError, InterfaceError) as error:
            raise CommandError(f"Database {using!r} does not answer: {error}") from error
        if Operation._meta.db_table not in tables:
            raise CommandError(
                f"Database {using!r} holds no operations. Run `manage.py migrate --database {using}`, "
                "or name the right database with --database."
            )

    def _progress(self, purged: retention.Purged) -> None:
        if self.verbosity > 1 or (self.verbosity == 1 and time.monotonic() >= self.next_line):
            self.next_line = time.monotonic() + PROGRESS_EVERY
            self.stdout.write(f"{_line(purged)} …")


def _line(purged: retention.Purged) -> str:
    return (
        f"{purged.deleted} finished deleted, {purged.tombstoned} reduced to tombstones, "
        f"{purged.interrupted} interrupted deleted"
    )
