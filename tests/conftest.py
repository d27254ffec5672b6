"""Fixtures that every test may use, and the rule that nothing is skipped silently in CI."""

import os
from collections.abc import Generator, Iterator
from urllib.parse import quote

import pytest
from django.conf import settings
from django.db import connections
from django.test import SimpleTestCase


def database_url(alias: str = "default") -> str:
    """The URL of the database that `alias` is connected to now: the test database during a test."""
    config = connections[alias].settings_dict
    name = str(config["NAME"])
    if config["ENGINE"] == "django.db.backends.sqlite3":
        return f"sqlite:///{name}"
    scheme = {"django.db.backends.postgresql": "postgres", "django.db.backends.mysql": "mysql"}
    user, password = quote(config["USER"], safe=""), quote(config["PASSWORD"], safe="")
    host, port = quote(config["HOST"], safe=""), config["PORT"]
    where = f"{host}:{port}" if port else host
    return f"{scheme[config['ENGINE']]}://{user}:{password}@{where}/{name}"


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None) -> Iterator[None]:
    """Point the processes that tests start at the test databases."""
    variables = {"DATABASE_URL": "default", "OTHER_DATABASE_URL": "other"}
    before = {name: os.environ.get(name) for name in variables}
    for name, alias in variables.items():
        os.environ[name] = database_url(alias)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture
def vendor() -> str:
    """The database of this run: `sqlite`, `postgresql` or `mysql`."""
    return connections["default"].vendor


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vendor(*names): runs only on these databases")


def _touches_no_database(item: pytest.Item) -> bool:
    if item.path.parent.name in {"demo", "crashes", "concurrency"}:  # their processes may
        return False
    cls = getattr(item, "cls", None)
    if cls is not None and issubclass(cls, SimpleTestCase):
        return False
    fixtures = {"db", "transactional_db", "django_db_setup", "live_server"}
    return item.get_closest_marker("django_db") is None and fixtures.isdisjoint(
        getattr(item, "fixturenames", ())
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests of another database: they are not skipped, there is a run of their own.

    What touches no database runs with SQLite only, wherever the others have no database to differ by.
    """
    engine = settings.DATABASES["default"]["ENGINE"].rsplit(".", 1)[-1].removesuffix("3")
    other = [
        item
        for item in items
        if ((marker := item.get_closest_marker("vendor")) and engine not in marker.args)
        or (engine != "sqlite" and _touches_no_database(item))
    ]
    if other:
        items[0].config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in other]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With REQUIRE_ALL_DATABASES=1 a test that is skipped because something is missing fails."""
    report = yield
    required = os.environ.get("REQUIRE_ALL_DATABASES") == "1"
    if required and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but REQUIRE_ALL_DATABASES=1: {report.longrepr}"
    return report
