"""Settings of the test project.

Read from the environment: `DATABASE_URL` and `OTHER_DATABASE_URL` (default: SQLite files below `.var/`),
`CELERY_BROKER_URL` and `CACHE_URL`. A process that a test starts inherits `DATABASE_URL` and
`OTHER_DATABASE_URL` naming the *test* databases (see `tests/conftest.py`), so it sees the same rows.
"""

import atexit
import os
from pathlib import Path
from typing import Any

import environ

from tests import mysql_driver

env = environ.Env()

BASE_DIR = Path(__file__).resolve().parent.parent
VAR_DIR = BASE_DIR / ".var"
VAR_DIR.mkdir(exist_ok=True)

mysql_driver.install()


def database(url: str, *, name: str | None = None) -> dict[str, Any]:
    """Database settings for a URL; threads and processes of a test share what it names."""
    config: dict[str, Any] = env.db_url_config(url)
    if name is not None:
        config["NAME"] = name
    options = config.setdefault("OPTIONS", {})
    if config["ENGINE"] == "django.db.backends.sqlite3":
        # A file: every thread and process has its own connection to it, as in production.
        config["TEST"] = {"NAME": config["NAME"]}
        options |= {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        }
    elif config["ENGINE"] == "django.db.backends.mysql":
        config["TEST"] = {"CHARSET": "utf8mb4"}
        options |= {"charset": "utf8mb4"} | mysql_driver.OPTIONS
    return config


# The process id keeps runs apart that share one work tree.
PROCESS_ID = os.getpid()
DEFAULT_URL = env.str("DATABASE_URL", default=f"sqlite:///{VAR_DIR}/test-{PROCESS_ID}.sqlite3")
DEFAULT = database(DEFAULT_URL)


def other_name() -> str:
    """Name of the second database of the same kind."""
    name = str(DEFAULT["NAME"])
    return name.replace(".sqlite3", "-other.sqlite3") if ".sqlite3" in name else f"{name}_other"


DATABASES = {
    "default": DEFAULT,
    "other": (
        database(env.str("OTHER_DATABASE_URL"))
        if "OTHER_DATABASE_URL" in os.environ
        else database(DEFAULT_URL, name=other_name())
    ),
}


@atexit.register
def remove_files() -> None:
    """Remove this process's own SQLite files, with their write-ahead logs."""
    if os.getpid() == PROCESS_ID:  # a fork inherits this function, but not the files
        for path in VAR_DIR.glob(f"test-{PROCESS_ID}[.-]*"):
            path.unlink(missing_ok=True)


SECRET_KEY = "only-for-tests"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
TIME_ZONE = "UTC"
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # fast, and protects nothing
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "idempotency",
    "tests.app",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

CACHES = {"default": env.cache_url("CACHE_URL", default="locmemcache://")}
CELERY_BROKER_URL = env.str("CELERY_BROKER_URL", default="memory://")

IDEMPOTENCY: dict[str, Any] = {}
