"""Empties the tables after a test that commits."""

from typing import Any

from django.core.management.commands import flush
from django.db import connections, transaction

#: What migrating has put there, and nothing changes.
KEPT = {"django_content_type", "auth_permission"}


class Command(flush.Command):
    """Django's own truncates, and makes content types and permissions anew: slower than most tests."""

    def handle(self, **options: Any) -> None:
        connection = connections[options["database"]]
        tables = connection.introspection.django_table_names(
            only_existing=True, include_views=False
        )
        with (
            transaction.atomic(using=connection.alias),
            connection.constraint_checks_disabled(),
            connection.cursor() as cursor,
        ):
            for table in set(tables) - KEPT:
                cursor.execute(f"DELETE FROM {connection.ops.quote_name(table)}")  # noqa: S608
