"""The one `IDEMPOTENCY` setting, read lazily so that `override_settings` works."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.signals import setting_changed
from django.dispatch import receiver
from django.utils.module_loading import import_string

#: Every setting with its default. Durations are seconds or `timedelta`.
DEFAULTS: dict[str, Any] = {
    # Defaults of the Policy fields of the same name.
    "METHODS": ("POST", "PATCH"),
    "REQUIRED": False,
    "KEY": None,
    "SCOPE": "idempotency.scopes.principal",
    "FINGERPRINT": None,
    "EXCLUDE_FIELDS": (),
    "RETENTION": 24 * 3600,
    "TOMBSTONE": 0,
    "WAIT": 0,
    "STORE": "idempotency.policies.store_final",
    "STEPWISE": False,
    "LEASE": 60,
    "ON_INTERRUPTED": "rerun",
    "AUTHORIZE_REPLAY": None,
    "USING": "default",
    "MAX_RESPONSE_BYTES": 1024 * 1024,
    "CODEC": None,
    # The rest of the package.
    "KEY_HEADER": "Idempotency-Key",
    "REPLAY_HEADERS": (),  # response headers kept beside the built-in allow-list
    "FINGERPRINT_SECRETS": (),  # empty: SECRET_KEY and SECRET_KEY_FALLBACKS
    "PROBLEM_TYPE": "urn:django-idempotency:problem:",
    "PROBLEM_RENDERER": None,
    "DOCUMENTATION_URL": "",
    "STATUS_ROUTE": "",  # name of the URL of an OperationStatusView; refusals then name it
    "RETRY_AFTER": 1,  # seconds, the hint of in-progress and unavailable
    "REFUSE_OLD_KEYS": True,  # UUIDv7 keys made before anything could still be remembered
    "EVENTS_PER_OPERATION": 50,
    "RECONCILE_MAX_AGE": 86400,  # seconds after which an unknown outcome is a person's to decide
    # The outbox. Durations are seconds or `timedelta`.
    "OUTBOX_PUBLISHER": "idempotency.outbox.handlers.dispatch",
    "OUTBOX_BATCH_SIZE": 100,
    "OUTBOX_INTERVAL": 1,  # pause of a relay when nothing is due
    "OUTBOX_LEASE": 60,  # how long a relay may publish what it claimed
    "OUTBOX_MAX_ATTEMPTS": 40,  # then dead letter; some six hours with the back-off below
    "OUTBOX_BACKOFF": 1,  # after the first failed attempt, doubled by each
    "OUTBOX_BACKOFF_MAX": 900,
    "OUTBOX_DEAD_HEAD": "block",  # or "skip": what a dead letter does to its ordering key
    "OUTBOX_RETENTION": 7 * 86400,  # of sent messages
    "OUTBOX_HANDLER_RETENTION": 14 * 86400,  # how long handlers know what they have done
}

#: Settings that name something to import.
IMPORTED = {"KEY", "SCOPE", "FINGERPRINT", "STORE", "AUTHORIZE_REPLAY", "CODEC", "PROBLEM_RENDERER"}


class Settings:
    """Attribute access to `IDEMPOTENCY` with defaults; values are cached until settings change."""

    def __getattr__(self, name: str) -> Any:
        if name not in DEFAULTS:
            raise AttributeError(f"IDEMPOTENCY has no setting {name!r}")
        value = self.user_settings().get(name, DEFAULTS[name])
        if name in IMPORTED and isinstance(value, str) and ":" not in value:
            value = import_string(value)
        self.__dict__[name] = value
        return value

    @staticmethod
    def user_settings() -> dict[str, Any]:
        """What the project set, unchecked (`checks.py` reports unknown names)."""
        return getattr(settings, "IDEMPOTENCY", None) or {}


conf = Settings()


@receiver(setting_changed)
def forget(*, setting: str, **kwargs: object) -> None:
    if setting in {"IDEMPOTENCY", "SECRET_KEY", "SECRET_KEY_FALLBACKS"}:
        conf.__dict__.clear()
