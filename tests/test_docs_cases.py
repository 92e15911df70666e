"""docs/cases.md and the tests that it speaks of."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core/tests", "hooks/tests", "plugins", "tests", "examples")


tried = (ROOT / "docs" / "cases.md").read_text()

#: By section of the reports, the numbers that concern connectors.
SECTIONS = {
    "A": {1, 2, 3, 4, 5, 6, 7, 8, 9, 10},
    "B": {1, 3, 4, 5, 6, 8, 9, 10, 12, 13, 14},
    "C": {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 14, 15},
    "D": {1, 3, 4, 6, 7, 9, 10, 12},
    "E": {1, 2, 3, 4, 5, 7, 8, 9},
    "F": {1, 3, 4, 5, 6, 7},
    "I": {1, 2, 3, 4, 5, 7, 8, 10, 11, 12, 14, 15, 16},
    "J": {1, 2, 3, 5, 6, 7, 10, 12},
}


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


def test_the_page_has_all_cases_of_connectors():
    """Each case of connectors and their stores is on the page, as one that is tried."""
    for section, numbers in SECTIONS.items():
        listed = {case for case in ids(tried) if case.startswith(section)}
        assert listed == {f"{section}{number}" for number in numbers}
