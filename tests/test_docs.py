"""The documentation keeps up with the code: settings, links, code that at least compiles."""

import ast
import re
from pathlib import Path

import pytest

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
