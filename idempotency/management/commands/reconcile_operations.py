"""`manage.py reconcile_operations`: what Celery beat does with unfinished operations, without Celery."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, InterfaceError, connections

from idempotency.completion import complete_abandoned
from idempotency.conf import conf
from idempotency.reconciliation import Report, reconcile_due


class Command(BaseCommand):
    help = (
        "Asks the reconcilers about operations whose outcome is unknown, then goes on with stepwise "
        "operations that nobody executes. Only what is due; schedule it every few seconds to minutes. "
        "May be interrupted, repeated and run more than once at the same time."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--database",
            choices=tuple(connections),
            help="Database alias. Default: IDEMPOTENCY['USING'].",
        )
        parser.add_argument(
            "--limit",
            type=int,
            default=100,
            help="Operations of each kind, the longest overdue first. Default: %(default)s.",
        )

    def handle(self, *args: object, **options: Any) -> None:
        if options["limit"] < 1:
            raise CommandError("--limit must be at least 1.")
        using = options["database"] or conf.USING
        try:
            reconciled = reconcile_due(using, limit=options["limit"])
            completed = complete_abandoned(using, limit=options["limit"])
        except (DatabaseError, InterfaceError) as error:
            raise CommandError(
                f"Database {using!r}: {error}. What is due stays due; run the command again."
            ) from error
        if options["verbosity"] >= 1:
            self.stdout.write(f"Outcome unknown: {_line(reconciled)}.")
            self.stdout.write(f"Without executor: {_line(completed)}.")
        if reconciled.handed_over or completed.handed_over:
            self.stderr.write(
                "Operations that nobody could settle are waiting for a person: see the admin, events "
                "of the kind 'Handed over to people'."
            )


def _line(report: Report) -> str:
    return (
        f"{report.asked} due, {report.settled} settled, {report.rerun} to run again, "
        f"{report.waiting} waiting, {report.handed_over} handed over to people"
    )
