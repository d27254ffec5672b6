"""django-cors-headers: a header that a browser hides cannot be sent or read by a web client."""

from __future__ import annotations

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage

from ..conf import Settings, conf

#: What a client must be able to read from a response.
EXPOSED = ("idempotent-replayed", "retry-after")


def key_header() -> str:
    """The header that carries keys by default; '' if keys come from somewhere else."""
    key = Settings.user_settings().get("KEY")
    if key is None:
        return str(conf.KEY_HEADER)
    return key.removeprefix("header:") if isinstance(key, str) and key[:7] == "header:" else ""


def check_cors(**kwargs: object) -> list[CheckMessage]:
    if not apps.is_installed("corsheaders"):
        return []
    messages: list[CheckMessage] = []
    header = key_header()
    if header and header.lower() not in _lower("CORS_ALLOW_HEADERS"):
        messages.append(
            checks.Warning(
                f"Browsers refuse to send {header} across origins: CORS_ALLOW_HEADERS lacks it.",
                hint="from corsheaders.defaults import default_headers; "
                f"CORS_ALLOW_HEADERS = (*default_headers, {header.lower()!r})",
                id="idempotency.W050",
            )
        )
    hidden = [name for name in EXPOSED if name not in _lower("CORS_EXPOSE_HEADERS")]
    if hidden:
        messages.append(
            checks.Warning(
                f"Scripts of other origins cannot read {', '.join(hidden)}: CORS_EXPOSE_HEADERS lacks it.",
                hint=f"Add {', '.join(map(repr, hidden))} to CORS_EXPOSE_HEADERS.",
                id="idempotency.W051",
            )
        )
    return messages


def _lower(setting: str) -> set[str]:
    """The names in a list of django-cors-headers; one that is not set has no name of ours in it."""
    return {str(name).lower() for name in getattr(settings, setting, ())}
