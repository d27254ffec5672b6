"""System checks: every mistake in the set-up that can be seen from here, with what to do about it.

Ids are stable: `idempotency.E0..` errors, `W0..` warnings. They run with `manage.py check`, those of
one database with `--database`, those about a running deployment with `--deploy`.
"""

from __future__ import annotations

from django.core.checks import Tags
from django.core.checks import register as _register

from .celery import check_celery, check_purge_schedule
from .cors import check_cors
from .databases import check_database_settings, check_deployed_database, check_server
from .relations import check_relations
from .settings import check_settings
from .urls import check_urls
from .webhooks import check_webhooks

#: Runs all checks of the package: `manage.py check --tag idempotency`.
TAG = "idempotency"


def register() -> None:
    """Called once, when the app is ready."""
    _register(check_settings, TAG)
    _register(check_database_settings, TAG)
    _register(check_relations, TAG, Tags.models)
    _register(check_urls, TAG, Tags.urls)
    _register(check_webhooks, TAG, Tags.urls)
    _register(check_cors, TAG, Tags.security)
    _register(check_celery, TAG)
    _register(check_purge_schedule, TAG, deploy=True)
    _register(check_server, TAG, Tags.database)
    _register(check_deployed_database, TAG, Tags.database, deploy=True)
