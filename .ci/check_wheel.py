"""Run by `.ci/run` in an environment with nothing but the wheel: is everything in it, and Django enough?"""

import importlib
import pkgutil
import sys
from importlib.metadata import distributions, requires
from pathlib import Path

import django
from django.conf import settings

NOT_CODE = {".html", ".txt", ".css", ".js", ".svg", ".png", ".po", ".mo", ".json", ".sql", ".typed"}
NEEDS_MORE = ("idempotency.contrib.", "idempotency.tasks")  # integrations import their library


def main(repository: Path) -> None:
    settings.configure(
        SECRET_KEY="only-for-this-check",  # noqa: S106 - nothing is signed
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "idempotency",
        ],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    )
    django.setup()
    import idempotency

    package = Path(idempotency.__file__).parent
    if repository in package.parents and "site-packages" not in package.parts:
        sys.exit(f"the wheel is not what was imported: {package}")
    core = [
        requirement
        for requirement in requires("django-idempotency") or []
        if ";" not in requirement
    ]
    if [requirement.lower()[:6] for requirement in core] != ["django"]:
        sys.exit(f"the core must require Django only, not {core}")
    names = [
        module.name
        for module in pkgutil.walk_packages(
            [str(package)], "idempotency.", onerror=lambda name: None
        )
        if not f"{module.name}.".startswith(tuple(f"{name.rstrip('.')}." for name in NEEDS_MORE))
    ]
    for name in names:
        importlib.import_module(name)
    source = repository / "idempotency"
    expected = {
        path.relative_to(source)
        for path in source.rglob("*")
        if path.suffix in NOT_CODE and "__pycache__" not in path.parts
    }
    if missing := sorted(str(path) for path in expected if not (package / path).is_file()):
        sys.exit(f"not in the wheel: {missing}")
    if Path("py.typed") not in expected:
        sys.exit("idempotency/py.typed is missing")
    installed = sorted(distribution.metadata["Name"] for distribution in distributions())
    sys.stdout.write(
        f"{len(names)} modules import, {len(expected)} data files are there; installed: {', '.join(installed)}\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
