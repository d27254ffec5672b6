"""Settings of the demo shop.

Everything a deployment changes comes from the environment or a `.env` file (`.env.example` lists the
names). Without any, the shop runs on SQLite files and a file-based broker below `.var/demo/`.
"""

import base64
import importlib.util
from pathlib import Path

import django
import environ
from kombu.transport import TRANSPORT_ALIASES

from idempotency.tasks import BEAT_SCHEDULE

from .keepsakes import DATA_DIR, keepsake

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env()
env.read_env(BASE_DIR / ".env")

DATA_DIR.mkdir(parents=True, exist_ok=True)

DEBUG = env.bool("DEBUG", default=False)
SECRET_KEY = env.str("SECRET_KEY", default="") or keepsake("secret-key", length=48)
SECRET_KEY_FALLBACKS = env.list("SECRET_KEY_FALLBACKS", default=[])
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]"])
CSRF_TRUSTED_ORIGINS = env.list("CSRF_TRUSTED_ORIGINS", default=[])

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "rest_framework",
    "rest_framework.authtoken",
    "idempotency",
    "demo_shop.provider",
    "demo_shop.shop",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

# Nothing is inline and nothing comes from elsewhere, so the strictest policy fits.
if django.VERSION >= (6, 0):
    MIDDLEWARE.insert(1, "django.middleware.csp.ContentSecurityPolicyMiddleware")
    SECURE_CSP = {
        "default-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "frame-ancestors": ["'none'"],
        "form-action": ["'self'"],
        "base-uri": ["'none'"],
    }

ROOT_URLCONF = "demo_shop.urls"
WSGI_APPLICATION = "demo_shop.wsgi.application"
ASGI_APPLICATION = "demo_shop.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "demo_shop.shop.context_processors.cart",
            ],
        },
    },
]

# Databases

# One writer at a time is SQLite's nature: writers queue for up to 20 s instead of failing, and take
# the write lock when the transaction begins, so that none has to be upgraded (and refused) later.
SQLITE_OPTIONS = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;",
}

DATABASES = {
    "default": env.db_url("DATABASE_URL", default=f"sqlite:///{DATA_DIR / 'shop.sqlite3'}"),
    # The payment provider is another company: its books survive whatever the shop rolls back.
    "provider": env.db_url(
        "PROVIDER_DATABASE_URL", default=f"sqlite:///{DATA_DIR / 'provider.sqlite3'}"
    ),
}
for database in DATABASES.values():
    if database["ENGINE"].endswith("sqlite3"):
        database["OPTIONS"] = SQLITE_OPTIONS | database.get("OPTIONS", {})
    else:
        database.setdefault("CONN_MAX_AGE", 60)
        database.setdefault("CONN_HEALTH_CHECKS", True)
    if database["ENGINE"].endswith("mysql") and not importlib.util.find_spec("MySQLdb"):
        import pymysql

        pymysql.version_info = (2, 2, 7, "final", 0)  # Django asks for mysqlclient's version
        pymysql.install_as_MySQLdb()

DATABASE_ROUTERS = ["demo_shop.provider.router.ProviderRouter"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# The fake provider thinks this long (seconds) about every new charge: time enough to lose a response.
PROVIDER_LATENCY = env.float("PROVIDER_LATENCY", default=0.5)
# Where it sends its webhooks (`python -m demo_shop` knows), and what both sides sign them with.
PROVIDER_WEBHOOK_URL = env.str(
    "PROVIDER_WEBHOOK_URL", default="http://127.0.0.1:8000/webhooks/payments/"
)
PROVIDER_WEBHOOK_SECRET = (
    "whsec_" + base64.b64encode(keepsake("webhook-secret", length=24).encode()).decode()
)

# E-mails are files, unless a mail server is named (smtp://user:password@host:25).

EMAIL_CONFIG = env.email_url("EMAIL_URL", default=f"filemail:///{DATA_DIR / 'mail'}")
vars().update(EMAIL_CONFIG)
DEFAULT_FROM_EMAIL = "The Once Shop <orders@shop.example>"

# Accounts

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "shop:sign-in"
LOGIN_REDIRECT_URL = "shop:catalogue"
LOGOUT_REDIRECT_URL = "shop:catalogue"

HTTPS = env.bool("HTTPS", default=False)
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if HTTPS else None
X_FRAME_OPTIONS = "DENY"

# API

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "rest_framework.authentication.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
        "rest_framework.authentication.BasicAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_PAGINATION_CLASS": "rest_framework.pagination.LimitOffsetPagination",
    "PAGE_SIZE": 20,
}

IDEMPOTENCY = {
    "RETENTION": env.int("IDEMPOTENCY_RETENTION", default=24 * 3600),
    "STATUS_ROUTE": "operation-status",
    "PROBLEM_RENDERER": "demo_shop.shop.views.refused",
    "OUTBOX_PUBLISHER": "demo_shop.shop.tasks.publisher",
}

# Celery: the broker is a folder unless CELERY_BROKER_URL names a server.

CELERY_BROKER_URL = env.str("CELERY_BROKER_URL", default="filesystem://localhost")
if CELERY_BROKER_URL.startswith("filesystem:"):
    TRANSPORT_ALIASES["filesystem"] = "demo_shop.broker:Transport"
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "data_folder_in": str(DATA_DIR / "broker" / "messages"),
        "data_folder_out": str(DATA_DIR / "broker" / "messages"),
        "control_folder": str(DATA_DIR / "broker" / "control"),
    }
    for folder in CELERY_BROKER_TRANSPORT_OPTIONS.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    CELERY_BROKER_TRANSPORT_OPTIONS["polling_interval"] = 0.2
    CELERY_WORKER_ENABLE_REMOTE_CONTROL = False  # one worker on one machine; it stops faster
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_TASK_DEFAULT_QUEUE = "shop"
CELERY_BEAT_SCHEDULE = {
    **BEAT_SCHEDULE,
    "provider-webhooks": {
        "task": "demo_shop.provider.tasks.deliver_webhooks",
        "schedule": 1.0,
        "options": {"expires": 5},
    },
}
# Faster than a deployment needs it: people watch. Seconds; the outbox has a process of its own.
MAINTENANCE_EVERY = env.float("MAINTENANCE_EVERY", default=2)
for entry in ("idempotency-reconcile", "idempotency-complete"):
    CELERY_BEAT_SCHEDULE[entry] = {**BEAT_SCHEDULE[entry], "schedule": MAINTENANCE_EVERY}

# Static files are served from where they lie; nothing has to be collected first.

STATIC_URL = "static/"
STATIC_ROOT = env.str("STATIC_ROOT", default=None)
WHITENOISE_USE_FINDERS = True

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{levelname:.1} {name}: {message}", "style": "{"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": env.str("LOG_LEVEL", default="WARNING")},
}
