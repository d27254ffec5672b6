"""The documentation keeps up with the code: settings, links, code that at least compiles."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from django.core.management import get_commands
from django.utils.module_loading import import_string

from idempotency import exceptions
from idempotency.conf import DEFAULTS

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def anchors(text: str) -> set[str]:
    """The fragments that headings of a page can be linked by."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_setting_is_in_the_reference_and_no_other():
    text = (ROOT / "docs/settings.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row.split("|")[1])}
    assert named == set(DEFAULTS)


def test_every_problem_is_in_the_table_with_its_status():
    text = (ROOT / "docs/http.md").read_text()
    refusals = [
        value
        for value in vars(exceptions).values()
        if isinstance(value, type)
        and issubclass(value, exceptions.Refusal)
        and hasattr(value, "code")
    ]
    assert len(refusals) >= 10
    for refusal in refusals:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{refusal.code}`"))
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[2].startswith(str(refusal.status)), row
        assert cells[3] == ("yes" if refusal.retryable else "no"), row
        assert cells[4] == f"`{refusal.key_action}`", row


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]*)(?:#[^)]*)?\)", page.read_text()):
        assert not target or (page.parent / target).exists(), target
    for target, fragment in re.findall(r"\]\(([^):]*)#([^)]*)\)", page.read_text()):
        text = (page.parent / target if target else page).read_text()
        assert fragment in anchors(text), f"{target}#{fragment}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_examples_compile(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        ast.parse(block.replace("[..., ", "[").replace("…", "x"))


#: The numbers of the public reports behind docs/proof.md: a kind, and who of it is on the list.
REPORTS = """
A 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16
B 01 02 03 04 05 07 08 09 10 11 12
C 01 02 04 05
D 01 02 03 04 05 07 08 09 10 11 12 14 15 17
E 01 02 03 04 05 07 08 09 10 11 12 13 14
F 01 02 03 04 05 06 07 08 09 10 12 13 14
G 01 02 04 05 06 08 09 10 11 13 14 15
H 01 02 03 04 05 07 08 09 10 11 12 14
I 01 02 03 04 05 06 07 08 09 11 12
J 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15
K 01 02 03 04 05 06 08 09
L 01 02 03 04 05 06 07 08 09 10
M 01 02 03 04
N 01 02 03 04 05 06 07 09 10 11 12 13
O 01 02 03 04 05 06 07 09 11 12
P 01 02 04 05 06 07 08 09 10 11 12 13 14 15 16 17 18
Q 01 02 03 04 05 06 07 08 09 10 11 12
R 01 02 03 04
S 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 18 20 21 22
T 01 02 03 04 05 06 07 08 09 10 11 12 13
U 02 03 04 05 06
"""


PROOF = ROOT / "docs/proof.md"


def test_every_report_and_every_hard_case_has_a_row_with_a_test_or_a_reason():
    rows = dict(re.findall(r"^\| (\w+) \|(.*)\|$", PROOF.read_text(), re.MULTILINE))
    reports = {
        kind + number
        for kind, *numbers in map(str.split, REPORTS.strip().splitlines())
        for number in numbers
    }
    assert len(reports) == 237
    assert set(rows) == reports | {str(number) for number in range(1, 33)}
    assert all("`test_" in row or "/test_" in row or len(row) > 40 for row in rows.values())


def test_every_test_that_the_proof_names_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PROOF.read_text())
    assert len(named) > 300
    assert len(named) == PROOF.read_text().count("::")
    defined = {
        (path, node.name)
        for path in {path for path, _ in named}
        for node in ast.parse((ROOT / "tests" / path).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert set(named) - defined == set()


def find(name: str) -> object:
    """The module, class, function or check of this dotted name."""
    if re.fullmatch(r"idempotency\.[EW]\d{3}", name):
        checks = (ROOT / "idempotency/checks").rglob("*.py")
        return next(path for path in checks if name[-4:] in path.read_text())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return import_string(name)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_what_the_examples_import_exists(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for module, names in re.findall(
            r"^ *from (idempotency[\w.]*) import ([\w, ]+)", block, re.MULTILINE
        ):
            for name in names.split(","):
                assert find(f"{module}.{name.strip()}")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_dotted_names_exist(page):
    for name in re.findall(r"\bidempotency(?:\.\w+)+\b(?![-/.\w…])", page.read_text()):
        assert find(name), name


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_exist(page):
    text = page.read_text()
    for target in re.findall(r"(?:\$ |`)make (\w+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    for command in re.findall(r"manage\.py (\w+)", text):
        assert command in get_commands(), command
