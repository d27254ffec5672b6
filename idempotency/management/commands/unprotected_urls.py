"""`manage.py unprotected_urls`: the URLs whose effects a retry may repeat."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from idempotency.checks import urls


class Command(BaseCommand):
    help = (
        "Lists every URL that takes POST or PATCH (the METHODS setting) without an idempotency "
        "policy, except Django's admin. A function view that does not say which methods it takes is "
        "listed with a question mark: add @require_http_methods or @require_safe. Run it in CI with --fail."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--ignore",
            action="append",
            default=[],
            metavar="REGEX",
            help="Leave out URLs that match, such as '^accounts/' (may be repeated).",
        )
        parser.add_argument(
            "--fail", action="store_true", help="Exit with status 1 if any URL is listed."
        )

    def handle(self, *args: object, **options: Any) -> None:
        try:
            ignored = [re.compile(pattern) for pattern in options["ignore"]]
        except re.error as error:
            raise CommandError(
                f"--ignore takes regular expressions: {error.pattern!r}: {error}"
            ) from error
        found = 0
        for endpoint, methods in urls.unprotected():
            if any(pattern.search(endpoint.path.lstrip("/")) for pattern in ignored):
                continue
            found += 1
            shown = "/".join(methods) + ("?" if endpoint.methods is None else "")
            self.stdout.write(f"{shown:<12} {endpoint.path}  {endpoint.name}")
        if not found:
            self.stdout.write(self.style.SUCCESS("Every unsafe URL has an idempotency policy."))
        elif options["fail"]:
            raise CommandError(
                f"{found} unsafe URLs have no idempotency policy. Protect them with @idempotent or "
                "IdempotencyMixin, or leave them out with --ignore."
            )
