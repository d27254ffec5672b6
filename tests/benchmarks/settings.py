"""The small project that is measured: one process per worker, one persistent connection each."""

import environ

env = environ.Env()

SECRET_KEY = "only-for-benchmarks"
ALLOWED_HOSTS = ["127.0.0.1"]
USE_TZ = True
ROOT_URLCONF = "tests.benchmarks.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

DATABASES = {"default": {**env.db_url("DATABASE_URL"), "CONN_MAX_AGE": None}}
if env.bool("PREPARED", default=False):
    DATABASES["default"]["OPTIONS"] = {"server_side_binding": True, "prepare_threshold": 5}

INSTALLED_APPS = ["rest_framework", "idempotency", "tests.app"]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.common.CommonMiddleware",
    "tests.benchmarks.views.caller_middleware",
]

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "UNAUTHENTICATED_USER": None,
}
