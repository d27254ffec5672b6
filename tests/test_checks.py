"""System checks: each with a set-up that passes and one that does not. Ids are the contract."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from types import ModuleType
from typing import Any

import celery
import pytest
from django.apps import apps as project_apps
from django.core import checks as django_checks
from django.core.management import CommandError, call_command
from django.db import connection, connections, models
from django.http import HttpRequest, HttpResponse
from django.test.utils import isolate_apps
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.http import require_http_methods, require_safe
from rest_framework import permissions, routers, viewsets
from rest_framework.decorators import api_view, permission_classes
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency import checks, scopes
from idempotency.checks import databases, urls
from idempotency.checks.settings import RULES
from idempotency.conf import DEFAULTS
from idempotency.contrib.celery import idempotent_task
from idempotency.contrib.rest_framework import IdempotencyMixin
from idempotency.decorators import idempotent
from idempotency.models import Operation, Status
from idempotency.policies import Policy
from tests.test_retention import make


def ids(messages: list[django_checks.CheckMessage]) -> list[str]:
    """The ids, after making sure that every message says what is wrong and what to do."""
    for message in messages:
        assert message.msg.endswith(".")
        assert message.hint
    return [str(message.id).removeprefix("idempotency.") for message in messages]


def test_the_checks_run_with_manage_py_check() -> None:
    registered = django_checks.registry.registry.get_checks(include_deployment_checks=True)
    ours = {check for check in registered if "idempotency" in check.tags}
    assert {
        checks.check_settings,
        checks.check_database_settings,
        checks.check_relations,
        checks.check_urls,
        checks.check_webhooks,
        checks.check_cors,
        checks.check_celery,
        checks.check_purge_schedule,
        checks.check_server,
        checks.check_deployed_database,
    } <= ours


def test_a_project_that_sets_nothing_passes(settings: Any) -> None:
    del settings.IDEMPOTENCY
    assert not django_checks.run_checks(tags=["idempotency"])


# The setting ---------------------------------------------------------------------------------


def setting_ids(settings: Any, value: Any) -> list[str]:
    settings.IDEMPOTENCY = value
    return ids(checks.check_settings())


def test_every_setting_has_a_rule_and_its_default_keeps_it(settings: Any) -> None:
    assert set(RULES) == set(DEFAULTS)
    assert setting_ids(settings, dict(DEFAULTS)) == []


def test_the_setting_must_be_a_dict(settings: Any) -> None:
    assert setting_ids(settings, ["RETENTION"]) == ["E001"]


@pytest.mark.parametrize("name", ["RETENSION", "retention", "IDEMPOTENCY_RETENTION", "TTL"])
def test_an_unknown_name_is_an_error(settings: Any, name: str) -> None:
    """BUGS J11."""
    assert setting_ids(settings, {name: 60}) == ["E002"]


def test_a_misspelt_name_gets_the_right_one_as_a_hint(settings: Any) -> None:
    settings.IDEMPOTENCY = {"RETENSION": 60}
    assert "'RETENTION'" in str(checks.check_settings()[0].hint)


def test_a_setting_in_the_wrong_place_is_an_error(settings: Any) -> None:
    """BUGS J11: a setting that is documented elsewhere would be ignored silently."""
    settings.IDEMPOTENCY_RETENTION = 60
    settings.IDEMPOTENCY_DASHBOARD_OF_ANOTHER_APP = True
    assert setting_ids(settings, {}) == ["E003"]


WRONG = {
    "METHODS": "POST",
    "REQUIRED": "yes",
    "KEY": "cookie:key",
    "SCOPE": None,
    "FINGERPRINT": 1,
    "EXCLUDE_FIELDS": "sent_at",
    "RETENTION": 0,
    "TOMBSTONE": -1,
    "WAIT": True,
    "STORE": {"2xx"},
    "STEPWISE": 1,
    "LEASE": timedelta(0),
    "ON_INTERRUPTED": "ignore",
    "AUTHORIZE_REPLAY": True,
    "USING": "nowhere",
    "MAX_RESPONSE_BYTES": -1,
    "CODEC": object(),
    "KEY_HEADER": "Idempotency Key",
    "REPLAY_HEADERS": "X-Total",
    "FINGERPRINT_SECRETS": [""],
    "PROBLEM_TYPE": "",
    "PROBLEM_RENDERER": 5,
    "DOCUMENTATION_URL": "see <docs>",
    "STATUS_ROUTE": "no-such-route",
    "RETRY_AFTER": 0.5,
    "REFUSE_OLD_KEYS": 1,
    "EVENTS_PER_OPERATION": None,
    "RECONCILE_MAX_AGE": 0,
    "OUTBOX_PUBLISHER": None,
    "OUTBOX_BATCH_SIZE": 0,
    "OUTBOX_INTERVAL": 0,
    "OUTBOX_LEASE": "60",
    "OUTBOX_MAX_ATTEMPTS": 0,
    "OUTBOX_BACKOFF": -1,
    "OUTBOX_BACKOFF_MAX": None,
    "OUTBOX_DEAD_HEAD": "drop",
    "OUTBOX_RETENTION": -1,
    "OUTBOX_HANDLER_RETENTION": 0,
}


def test_there_is_a_wrong_value_to_try_for_every_setting() -> None:
    assert set(WRONG) == set(RULES)


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_value_is_an_error_that_names_the_setting(settings: Any, name: str) -> None:
    assert setting_ids(settings, {name: WRONG[name]}) == ["E004"]
    assert repr(name) in checks.check_settings()[0].msg


def test_a_secret_is_not_shown(settings: Any) -> None:
    settings.IDEMPOTENCY = {"FINGERPRINT_SECRETS": "hunter2"}
    (message,) = checks.check_settings()
    assert "hunter2" not in str(message)


@pytest.mark.parametrize(
    "value",
    [
        {"RETENTION": timedelta(days=7), "TOMBSTONE": 30 * 86400, "WAIT": 2.5},
        {"KEY": "json:request_id"},
        {"KEY": "tests.test_checks.get_key"},
        {"STORE": {200, 201}},
        {"SCOPE": scopes.session},
        {"CODEC": "tests.test_checks.codec"},
    ],
)
def test_right_values_pass(settings: Any, value: dict[str, Any]) -> None:
    assert setting_ids(settings, value) == []


class Codec:
    def encode(self, body: bytes) -> bytes:
        return body

    def decode(self, body: bytes) -> bytes:
        return body


codec = Codec()


def get_key(request: HttpRequest) -> None:
    return None


class PublisherObject:
    def publish(self, message: object) -> None:
        """Sends nothing; it only has to look like a publisher."""


publisher_object = PublisherObject()


def test_a_publisher_may_be_an_object(settings: Any) -> None:
    settings.IDEMPOTENCY = {"OUTBOX_PUBLISHER": "tests.test_checks.publisher_object"}
    assert checks.check_settings() == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"SCOPE": "idempotency.scopes.nobody"}, "E005"),
        ({"STORE": "no_such_module.store"}, "E005"),
        ({"PROBLEM_RENDERER": "not-a-path"}, "E005"),
        ({"OUTBOX_PUBLISHER": "idempotency.outbox.publish_nothing"}, "E005"),
        ({"SCOPE": "idempotency.scopes.MAX_LENGTH"}, "E006"),
        ({"CODEC": "tests.test_checks.Codec"}, "E006"),  # the class instead of an instance
    ],
)
def test_a_dotted_path_must_lead_to_the_right_thing(
    settings: Any, value: dict[str, Any], expected: str
) -> None:
    assert setting_ids(settings, value) == [expected]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"RETENTION": 599, "LEASE": 5}, "W010"),
        ({"WAIT": 26}, "W011"),
        ({"RETENTION": 700, "LEASE": 701}, "W012"),
        ({"SCOPE": "idempotency.scopes.anonymous"}, "W013"),
        ({"SCOPE": scopes.anonymous}, "W013"),
        ({"REPLAY_HEADERS": ["X-Total", "Set-Cookie"]}, "W014"),
        ({"RETRY_AFTER": 0}, "W015"),
    ],
)
def test_values_that_will_hurt_are_warned_about(
    settings: Any, value: dict[str, Any], expected: str
) -> None:
    assert setting_ids(settings, value) == [expected]


# Databases -----------------------------------------------------------------------------------


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Change the configuration of the default database."""

    def change(**values: Any) -> None:
        for name, value in values.items():
            monkeypatch.setitem(connections["default"].settings_dict, name, value)

    return change


def test_a_sound_database_passes(settings: Any) -> None:
    assert ids(checks.check_database_settings()) == []


def test_local_times_are_warned_about(settings: Any) -> None:
    settings.USE_TZ = False
    assert ids(checks.check_database_settings()) == ["W020"]


@pytest.mark.vendor("sqlite", "mysql")
def test_a_database_with_its_own_time_zone_is_an_error(config: Callable[..., None]) -> None:
    config(TIME_ZONE="Europe/Berlin")
    assert ids(checks.check_database_settings()) == ["E021"]


@pytest.mark.vendor("postgresql")
def test_a_time_zone_is_fine_where_times_are_absolute(config: Callable[..., None]) -> None:
    config(TIME_ZONE="Europe/Berlin")
    assert ids(checks.check_database_settings()) == []


def test_a_database_without_autocommit_is_an_error(config: Callable[..., None]) -> None:
    config(AUTOCOMMIT=False)
    assert ids(checks.check_database_settings()) == ["E022"]


def test_an_unsupported_database_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "vendor", "oracle")
    assert ids(checks.check_database_settings()) == ["E023"]
    assert ids(checks.check_server(databases=["default"])) == []


class KeepsOut:
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return db != "default" if app_label == "idempotency" else None

    def db_for_write(self, model: type[models.Model], **hints: Any) -> str | None:
        return "other" if model is Operation else None


class SendsElsewhere(KeepsOut):
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return None


@pytest.mark.parametrize(("router", "expected"), [(KeepsOut, "E024"), (SendsElsewhere, "W025")])
def test_a_router_that_disagrees_with_using_is_found(
    settings: Any, router: type, expected: str
) -> None:
    settings.DATABASE_ROUTERS = [router()]
    assert ids(checks.check_database_settings()) == [expected]
    settings.IDEMPOTENCY = {"USING": "other"}
    assert ids(checks.check_database_settings()) == []


def test_a_using_that_is_wrong_is_left_to_the_check_of_the_setting(settings: Any) -> None:
    settings.IDEMPOTENCY = {"USING": "nowhere"}
    assert ids(checks.check_database_settings()) == []


@pytest.mark.django_db
def test_the_server_of_this_run_is_able_to_do_everything() -> None:
    assert ids(checks.check_server(databases=["default"])) == []
    assert ids(checks.check_server(databases=None)) == []


@pytest.mark.django_db
def test_a_server_that_is_too_old_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """BUGS I06."""
    name = (
        "can_return_columns_from_insert"
        if connection.vendor == "sqlite"
        else "has_select_for_update_skip_locked"
    )
    monkeypatch.setattr(connection.features, name, False)
    assert ids(checks.check_server(databases=["default"])) == ["E030"]


@pytest.mark.vendor("mysql")
@pytest.mark.django_db
def test_a_table_without_transactions_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """BUGS H12."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE without_transactions (id int) ENGINE=MyISAM")
        try:
            monkeypatch.setattr(Operation._meta, "db_table", "without_transactions")
            assert ids(checks.check_server(databases=["default"])) == ["E031"]
            monkeypatch.setattr(Operation._meta, "db_table", "not_there_yet")
            assert ids(checks.check_server(databases=["default"])) == []
            cursor.execute("SET SESSION default_storage_engine = MyISAM")
            assert ids(checks.check_server(databases=["default"])) == ["E031"]
        finally:
            cursor.execute("SET SESSION default_storage_engine = InnoDB")
            cursor.execute("DROP TABLE without_transactions")


def state_ids() -> list[str]:
    found = ids(checks.check_deployed_database(databases=["default"]))
    return [found_id for found_id in found if found_id not in {"W040", "W041", "W042"}]


@pytest.mark.django_db
def test_a_missing_table_is_an_error_when_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_ids() == []
    monkeypatch.setattr(Operation._meta, "db_table", "not_there_yet")
    assert state_ids() == ["E032"]
    # `migrate` runs the plain database checks first: they must not ask for its result.
    assert ids(checks.check_server(databases=["default"])) == []


@pytest.mark.django_db
def test_a_purge_that_never_runs_is_noticed() -> None:
    """BUGS L09."""
    make("unknown", status=Status.RECONCILING)
    assert state_ids() == []
    make()
    assert state_ids() == ["W033"]


@pytest.mark.vendor("postgresql")
@pytest.mark.django_db
def test_a_frozen_worker_must_lose_its_lock_on_postgresql() -> None:
    def timeouts() -> list[str]:
        return ids(checks.check_deployed_database(databases=["default"]))

    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        assert timeouts() == ["W040"]
        cursor.execute("SET LOCAL idle_in_transaction_session_timeout = '60s'")
        assert timeouts() == []


def test_a_lost_host_must_be_noticed_on_postgresql(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(keepalive: int, user: int, *, local: bool = False) -> list[str]:
        answer = [60_000, keepalive, user, local]
        monkeypatch.setattr(databases, "_variables", lambda connection, sql: answer)
        return ids(list(databases._postgresql_timeouts(connection)))

    assert found(7200, 0) == ["W041"]
    assert found(0, 0) == ["W041"]
    assert found(60, 0) == []
    assert found(7200, 90_000) == []
    assert found(0, 0, local=True) == []


@pytest.mark.vendor("mysql")
@pytest.mark.django_db
def test_a_frozen_worker_must_lose_its_lock_on_mysql() -> None:
    def timeouts() -> list[str]:
        return ids(checks.check_deployed_database(databases=["default"]))

    with connection.cursor() as cursor:
        cursor.execute("SET SESSION wait_timeout = 28800, SESSION idle_transaction_timeout = 0")
        assert timeouts() == ["W042"]
        cursor.execute("SET SESSION idle_transaction_timeout = 60")
        assert timeouts() == []
        cursor.execute("SET SESSION wait_timeout = 300, SESSION idle_transaction_timeout = 0")
        assert timeouts() == []
        cursor.execute("SET SESSION wait_timeout = 28800")


# Relations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_delete", "expected"),
    [(models.CASCADE, ["E060"]), (models.PROTECT, ["W061"]), (models.SET_NULL, [])],
)
def test_a_purge_must_not_delete_or_be_stopped_by_business_rows(
    monkeypatch: pytest.MonkeyPatch, on_delete: Any, expected: list[str]
) -> None:
    with isolate_apps("tests.app"):

        class Order(models.Model):
            operation = models.ForeignKey(Operation, null=True, on_delete=on_delete)

            class Meta:
                app_label = "app"

        relation = Order._meta.get_field("operation").remote_field
        monkeypatch.setattr(Operation._meta, "related_objects", (relation,))
        assert ids(checks.check_relations()) == expected


def test_the_packages_own_relations_pass() -> None:
    assert ids(checks.check_relations()) == []


# URLs ----------------------------------------------------------------------------------------


@pytest.fixture
def urlconf(settings: Any) -> Callable[..., list[str]]:
    """Check a URLconf with these patterns."""

    def check(*patterns: Any) -> list[str]:
        module = ModuleType("urlconf")
        module.urlpatterns = list(patterns)  # type: ignore[attr-defined]
        settings.ROOT_URLCONF = module
        return ids(checks.check_urls())

    return check


def plain(request: HttpRequest, **kwargs: Any) -> HttpResponse:
    return HttpResponse()


class OneMethod(View):
    @method_decorator(idempotent)
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


@method_decorator(idempotent, name="dispatch")
class Dispatch(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


def loses_attributes(view: Any) -> Any:
    def wrapper(request: HttpRequest) -> HttpResponse:
        return view(request)

    wrapper.idempotency_policy = view.idempotency_policy  # type: ignore[attr-defined]
    return wrapper


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (idempotent(plain), []),
        (Dispatch.as_view(), []),
        (OneMethod.as_view(), ["W081"]),
        (loses_attributes(idempotent(plain)), ["W081"]),
    ],
)
def test_a_policy_inside_atomic_requests_is_found(
    urlconf: Callable[..., list[str]],
    config: Callable[..., None],
    view: Any,
    expected: list[str],
) -> None:
    assert urlconf(path("pay/", view)) == []
    config(ATOMIC_REQUESTS=True)
    assert urlconf(path("pay/", view)) == expected


def test_a_policy_for_an_unknown_database_is_an_error(urlconf: Callable[..., list[str]]) -> None:
    assert urlconf(path("", idempotent(using="other")(plain))) == []
    assert urlconf(path("", idempotent(using="nowhere")(plain))) == ["E080"]


class ReadOnly(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (idempotent(methods=["GET"])(plain), ["W082"]),
        (idempotent(methods=["GET", "PUT"])(plain), []),
        (idempotent(ReadOnly.as_view()), ["W082"]),
        (idempotent(require_safe(plain)), ["W082"]),
        (idempotent(require_http_methods(["POST"])(plain)), []),
    ],
)
def test_a_policy_that_protects_nothing_is_found(
    urlconf: Callable[..., list[str]], view: Any, expected: list[str]
) -> None:
    assert urlconf(path("", view)) == expected


class Open(IdempotencyMixin, APIView):
    permission_classes = (permissions.AllowAny,)

    def post(self, request: Any) -> Response:
        return Response()


class Closed(Open):
    permission_classes = (permissions.IsAuthenticated,)


class OpenWithSession(Open):
    idempotency_policy = Policy(scope=scopes.session)


class OpenWithHook(Open):
    def get_idempotency_scope(self, request: Any, policy: Any) -> tuple[str, ...]:
        return ("device:1",)


@api_view(["POST"])
@permission_classes([])
@idempotent
def open_function(request: Any) -> Response:
    return Response()


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (Open, ["W083"]),
        (Closed, []),
        (OpenWithSession, []),
        (OpenWithHook, []),
        (open_function, ["W083"]),
    ],
)
def test_anonymous_callers_need_a_scope_of_their_own(
    urlconf: Callable[..., list[str]], view: Any, expected: list[str]
) -> None:
    callback = view.as_view() if isinstance(view, type) else view
    assert urlconf(path("", callback), path("again/", callback)) == expected


class Orders(IdempotencyMixin, viewsets.ViewSet):
    permission_classes = (permissions.IsAuthenticated,)
    idempotency_policy = Policy()

    def list(self, request: Any) -> Response:
        return Response()

    def create(self, request: Any) -> Response:
        return Response()

    def retrieve(self, request: Any, pk: str) -> Response:
        return Response()


class Carts(Orders):
    idempotency_policy = {"create": Policy()}

    def partial_update(self, request: Any, pk: str) -> Response:
        return Response()


def router_urls() -> Any:
    router = routers.DefaultRouter()
    router.register("orders", Orders, basename="order")
    router.register("carts", Carts, basename="cart")
    return router.urls


def test_a_viewset_is_judged_as_a_whole(urlconf: Callable[..., list[str]]) -> None:
    assert urlconf(path("api/", include(router_urls()))) == []


def test_broken_settings_do_not_break_the_check_of_urls(
    settings: Any, urlconf: Callable[..., list[str]]
) -> None:
    settings.IDEMPOTENCY = {"SCOPE": "nowhere.scope"}
    assert urlconf(path("", idempotent(plain))) == []


def test_a_project_without_urls_passes(settings: Any) -> None:
    settings.ROOT_URLCONF = None
    assert ids(checks.check_urls()) == []


def listed(*args: str) -> list[list[str]]:
    out = StringIO()
    call_command("unprotected_urls", *args, stdout=out)
    return [line.split() for line in out.getvalue().splitlines()]


def test_every_unsafe_url_without_a_policy_is_listed(urlconf: Callable[..., list[str]]) -> None:
    """BUGS D17: one endpoint honours the key, its sibling ignores it."""
    urlconf(
        path("admin/", include(("tests.urls", "admin"))),
        path("api/", include(router_urls())),
        path("pay/", idempotent(plain)),
        re_path(r"^old/(?P<pk>[0-9]+(?:-[a-z]+)?)/$", plain),
        path("read/", require_safe(plain)),
        path("write/", require_http_methods(["PUT", "POST"])(plain)),
    )
    assert [line[:2] for line in listed()] == [
        ["PATCH", "/api/carts/<pk>/"],
        ["PATCH/POST?", "/old/<pk>/"],
        ["POST", "/write/"],
    ]
    assert [line[1] for line in listed("--ignore=^old/", "--ignore=carts")] == ["/write/"]
    with pytest.raises(CommandError, match="3 unsafe URLs"):
        listed("--fail")
    assert listed("--fail", "--ignore=.")[0][0] == "Every"
    with pytest.raises(CommandError, match="regular expressions"):
        listed("--ignore=(")


def test_the_methods_setting_says_what_unsafe_means(
    settings: Any, urlconf: Callable[..., list[str]]
) -> None:
    settings.IDEMPOTENCY = {"METHODS": ["PUT"]}
    urlconf(path("", require_http_methods(["PUT", "POST"])(plain)))
    assert [line[0] for line in listed()] == ["PUT"]
    assert next(iter(urls.endpoints())).name == "tests.test_checks.plain"


# CORS ----------------------------------------------------------------------------------------


@pytest.fixture
def cors(settings: Any) -> Callable[..., list[str]]:
    def check(**values: Any) -> list[str]:
        if "corsheaders" not in settings.INSTALLED_APPS:
            settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "corsheaders"]
        for name, value in values.items():
            setattr(settings, name, value)
        return ids(checks.check_cors())

    return check


def test_cross_origin_clients_need_the_headers(cors: Callable[..., list[str]]) -> None:
    assert ids(checks.check_cors()) == []  # django-cors-headers is not installed
    assert cors() == ["W050", "W051"]
    assert cors(CORS_ALLOW_HEADERS=["Idempotency-Key"]) == ["W051"]
    assert cors(CORS_EXPOSE_HEADERS=["Idempotent-Replayed", "Retry-After"]) == []


def test_the_header_that_carries_the_keys_counts(
    settings: Any, cors: Callable[..., list[str]]
) -> None:
    exposed = ["idempotent-replayed", "retry-after"]
    allowed = {"CORS_ALLOW_HEADERS": ["x-request-key"], "CORS_EXPOSE_HEADERS": exposed}
    assert cors(**allowed) == ["W050"]
    settings.IDEMPOTENCY = {"KEY_HEADER": "X-Request-Key"}
    assert cors(**allowed) == []
    settings.IDEMPOTENCY = {"KEY": "header:X-Other-Key"}
    assert cors(**allowed) == ["W050"]
    settings.IDEMPOTENCY = {"KEY": "json:key"}
    assert cors(**allowed) == []


# Celery --------------------------------------------------------------------------------------


@pytest.fixture
def app() -> Iterator[Callable[..., None]]:
    """Make a Celery app with this configuration the project's."""
    before = celery.current_app._get_current_object()

    def configure(**values: Any) -> None:
        celery.Celery("shop", set_as_current=True).conf.update(values)

    yield configure
    before.set_current()


def test_a_project_without_celery_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "celery")
    assert ids(checks.check_celery()) == []
    assert ids(checks.check_purge_schedule()) == []
    assert "celery" not in sys.modules


def test_an_app_that_celery_made_up_is_not_the_projects(app: Callable[..., None]) -> None:
    celery.Celery("default", set_as_current=True)
    assert ids(checks.check_purge_schedule()) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, []),
        ({"task_acks_late": True}, ["W070"]),
        ({"task_acks_late": True, "task_reject_on_worker_lost": True}, []),
    ],
)
def test_durable_tasks_need_two_settings(
    app: Callable[..., None], values: dict[str, Any], expected: list[str]
) -> None:
    """BUGS N12."""
    app(**values)
    assert ids(checks.check_celery()) == expected


@pytest.mark.parametrize(("limit", "expected"), [(3600, ["W071"]), (3599, []), (None, [])])
def test_a_task_must_end_before_the_broker_delivers_it_again(
    app: Callable[..., None], limit: int | None, expected: list[str]
) -> None:
    """BUGS N04."""
    app(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_time_limit=limit,
        broker_transport_options={"visibility_timeout": 3600},
    )
    assert ids(checks.check_celery()) == expected


@pytest.mark.parametrize(
    ("broker", "expected"),
    [("redis://host", ["W071"]), ("sqs://", ["W071"]), ("amqp://host", []), (None, [])],
)
def test_brokers_that_redeliver_by_themselves_are_known(
    app: Callable[..., None], broker: str | None, expected: list[str]
) -> None:
    """BUGS N04: nobody sets a visibility timeout, and Redis has one all the same."""
    app(
        broker_url=broker,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_time_limit=7200,
    )
    assert ids(checks.check_celery()) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"acks_late": True}, ["W073"]),
        ({"acks_late": True, "reject_on_worker_lost": True}, []),
        ({"acks_late": True, "reject_on_worker_lost": True, "time_limit": 3600}, ["W074"]),
        ({"acks_late": True, "reject_on_worker_lost": True, "time_limit": 3599}, []),
        ({"time_limit": 3600}, []),
    ],
)
def test_an_idempotent_task_with_options_of_its_own_is_looked_at(
    app: Callable[..., None], options: dict[str, Any], expected: list[str]
) -> None:
    """BUGS N04, N12: the same mistakes, made on one task."""
    app(broker_url="redis://host")

    task = celery.current_app.task(shared=False, **options)

    @task
    @idempotent_task()
    def pay() -> None: ...

    @task
    def plain() -> None: ...  # no business of ours

    assert ids(checks.check_celery()) == expected


def test_a_purge_that_nothing_schedules_is_noticed(app: Callable[..., None]) -> None:
    from idempotency.tasks import BEAT_SCHEDULE

    app()
    assert ids(checks.check_purge_schedule()) == ["I072"]
    app(beat_schedule=BEAT_SCHEDULE)
    assert ids(checks.check_purge_schedule()) == []


def test_ids_are_used_for_one_mistake_each() -> None:
    """Users silence checks by id: one id, one meaning."""
    package = project_apps.get_app_config("idempotency").path
    found: list[str] = []
    for name in ("settings", "databases", "relations", "urls", "webhooks", "cors", "celery"):
        with open(f"{package}/checks/{name}.py", encoding="utf-8") as source:
            found += re.findall(r'id="idempotency\.(\w+)"', source.read())
    assert len(found) == len(set(found)) > 20
