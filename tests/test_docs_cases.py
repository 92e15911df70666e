"""docs/cases.md and the tests that it speaks of."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core/tests", "hooks/tests", "plugins", "tests", "examples")


def functions():
    """Yield every test function of the workspace."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("test_*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    yield node


def test_every_case_is_tried_and_every_id_is_explained():
    """Each id of the page is in a test's name or docstring, and each id in a test's name is on the page."""
    listed = re.findall(r"^\| ([A-J]\d+) \| \[", (ROOT / "docs" / "cases.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed)) > 50
    named, mentioned = set(), set()
    for test in functions():
        named.update(re.match(r"test_((?:[a-j]\d+_)*)", test.name).group(1).upper().split("_"))
        mentioned.update(re.findall(r"\b[A-J]\d{1,2}\b", ast.get_docstring(test) or ""))
    named.discard("")
    assert named - set(listed) == set()
    assert set(listed) - named - mentioned == set()
