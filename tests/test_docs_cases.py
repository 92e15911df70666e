"""docs/cases.md and the tests that it speaks of."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core/tests", "hooks/tests", "plugins", "tests", "examples")


tried, _, later = (ROOT / "docs" / "cases.md").read_text().partition("## Not here yet")

#: Of section I of the reports, those that concern the block store and type1, and those that only type2 has.
STORE = {f"I{number}" for number in (1, 2, 3, 4, 5, 7, 8, 14, 15, 16)}
TYPE2 = {f"I{number}" for number in (10, 11, 12)}


def ids(text):
    """Return the ids of the rows of a part of the page."""
    return re.findall(r"^\| ([A-J]\d+) \| \[", text, re.MULTILINE)


def functions():
    """Yield every test function of the workspace."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("test_*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    yield node


def test_every_case_is_tried_and_every_id_is_explained():
    """Each id of the page is in a test's name or docstring, and each id in a test's name is on the page."""
    listed = ids(tried)
    assert len(listed) == len(set(listed)) > 50
    named, mentioned = set(), set()
    for test in functions():
        named.update(re.match(r"test_((?:[a-j]\d+_)*)", test.name).group(1).upper().split("_"))
        mentioned.update(re.findall(r"\b[A-J]\d{1,2}\b", ast.get_docstring(test) or ""))
    named.discard("")
    assert named - set(listed) == set()
    assert set(listed) - named - mentioned == set()


def test_the_page_has_all_of_the_stores_cases():
    """Each case of memory, disk and remote stores is on the page: as one that is tried, or with why it comes later."""
    assert {case for case in ids(tried) if case.startswith("I")} == STORE
    assert {case for case in ids(later) if case.startswith("I")} == TYPE2
