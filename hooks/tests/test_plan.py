"""Plans: what patching the files of a vLLM would come to, and the patched texts."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from kvplug_hooks import Before, FirstStatement, Patch
from kvplug_hooks.errors import PatchError
from kvplug_hooks.installed import Tree
from kvplug_hooks.patches import all_patches
from kvplug_hooks.patches.before_update_states import V1, V2
from kvplug_hooks.patches.hybrid_page_size import HYBRID_PAGE_SIZE
from kvplug_hooks.plan import plan, rewrite

SOURCE = '''\
"""A module."""

import os


def first(number):
    """Add one."""
    number += 1
    return number


def second(number):
    return number
'''

PATCH = Patch(
    id="one",
    purpose="Test.",
    removal_condition="Never.",
    module="vllm.v1.thing",
    function="first",
    anchor=FirstStatement(),
    import_from="acme",
    import_name="touched",
    call="number = touched(number)",
    known_releases=("0.19.0", "0.20.0"),
)
SECOND = replace(PATCH, id="two", function="second")
OTHER = {"import_name": "other", "call": "number = other(number)"}


@pytest.fixture
def tree(tmp_path):
    """A vLLM with one module."""
    (tmp_path / "vllm/v1").mkdir(parents=True)
    (tmp_path / "vllm/_version.py").write_text("__version__ = version = '0.19.1+cpu'\n")
    (tmp_path / "vllm/v1/thing.py").write_text(SOURCE)
    return Tree(tmp_path)


def states(tree, *patches, **options):
    return [entry.state for entry in plan(Tree(tree.folder), patches, **options)]


def thing(tree):
    return tree.folder / "vllm/v1/thing.py"


def apply(tree, *patches):
    for path, text in rewrite(tree, plan(tree, patches)).items():
        path.write_bytes(text.data)


def test_two_patches_of_one_module(tree):
    """Both fit, and the text has both; an import that they share is there once. Nothing is written."""
    planned = plan(tree, [PATCH, SECOND])
    assert [(entry.patch.id, entry.module, entry.path, entry.state, entry.reason) for entry in planned] == [
        ("one", "vllm.v1.thing", thing(tree), "fits", "The call goes into first at line 8."),
        ("two", "vllm.v1.thing", thing(tree), "fits", "The call goes into second at line 13."),
    ]
    (text,) = rewrite(tree, planned).values()
    assert thing(tree).read_text() == SOURCE
    added = [line for line in text.lines if line not in SOURCE.splitlines(keepends=True)]
    assert added == ["from acme import touched\n", "    number = touched(number)\n", "    number = touched(number)\n"]
    assert text.text == SOURCE.replace("import os\n", "import os\nfrom acme import touched\n").replace(
        "    number += 1\n", "    number = touched(number)\n    number += 1\n"
    ).replace("def second(number):\n", "def second(number):\n    number = touched(number)\n")
    compile(text.data, "thing.py", "exec")


def test_what_is_there_already(tree):
    """A patched file is recognised, whichever of its patches one asks for, and another can be added."""
    other = replace(SECOND, **OTHER)
    apply(tree, PATCH)
    assert states(tree, PATCH, other) == ["already in source", "fits"]
    once = thing(tree).read_text()
    apply(tree, PATCH, other)
    assert states(tree, other, PATCH) == 2 * ["already in source"]
    assert thing(tree).read_text() == once.replace("touched\n", "touched\nfrom acme import other\n").replace(
        "def second(number):\n", "def second(number):\n    number = other(number)\n"
    )
    assert rewrite(tree, plan(tree, [PATCH, other])) == {}


@pytest.mark.parametrize("anchor", [FirstStatement(), Before("number += 1")])
def test_h4_two_patches_on_one_place_are_a_conflict(tree, anchor):
    """Both are named, neither is applied, and the third is; also if one of them is in the file already."""
    other = replace(PATCH, id="other", anchor=anchor, **OTHER)
    planned = plan(tree, [PATCH, other, replace(SECOND, import_name="third", call="number = third(number)")])
    assert [entry.state for entry in planned] == ["conflict", "conflict", "fits"]
    for entry in planned[:2]:
        assert "the patches one and other want the same place in first" in entry.reason
        assert entry.reason.endswith("leave one of them out.")
    (text,) = rewrite(tree, planned).values()
    assert ("touched" in text.text, "third" in text.text) == (False, True)
    apply(tree, PATCH)
    assert states(tree, PATCH, other) == ["already in source", "conflict"]
    apply(Tree(tree.folder), other)
    assert states(tree, other) == ["already in source"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"import_from": "umbrella", "function": "second"}, "both bring a touched"),
        ({"anchor": Before("return number"), "call": "return touched(number)"}, "both bring a touched"),
    ],
)
def test_names_can_conflict_too(tree, changes, problem):
    """One name can't stand for two things, and two calls of one function can't be told apart."""
    planned = plan(tree, [PATCH, replace(PATCH, id="two", **changes)])
    assert [entry.state for entry in planned] == ["conflict", "conflict"]
    assert problem in planned[0].reason


def test_architectures(tree):
    """A patch of other models is left out; one that concerns all models, or any of these, isn't."""
    mine = replace(SECOND, architectures=frozenset({"AForCausalLM", "BForCausalLM"}))
    assert states(tree, PATCH, mine) == ["fits", "fits"]
    assert states(tree, PATCH, mine, architectures=["BForCausalLM", "X"]) == ["fits", "fits"]
    planned = plan(tree, [PATCH, mine], architectures=["CForCausalLM"])
    assert [entry.state for entry in planned] == ["fits", "not concerned"]
    assert planned[1].reason == "The patch two doesn't concern CForCausalLM."
    assert states(tree, mine, architectures=[]) == ["not concerned"]
    apply(tree, mine)
    assert states(tree, mine, architectures=["CForCausalLM"]) == ["already in source"]


def test_h15_what_is_not_needed(tree):
    """The source decides; a check that fails makes the patch unsupported, not vLLM unusable."""
    assert states(tree, replace(PATCH, not_needed=lambda source: "Fixed." if "number += 1" in source else None)) == [
        "not needed"
    ]
    assert states(tree, replace(PATCH, not_needed=lambda source: None if source == SOURCE else "Fixed.")) == ["fits"]
    (entry,) = plan(tree, [replace(PATCH, not_needed=lambda source: source[10**9])])
    assert entry.state == "unsupported"
    assert "its check of whether it is needed fails (IndexError(" in entry.reason


@pytest.mark.parametrize(
    ("version", "known", "older", "state"),
    [
        ("0.19.1", "0.19.0", None, "fits"),
        ("0.18.9", "0.19.0", None, "unsupported"),
        ("0.18.9", "0.19.0", "It isn't there.", "not needed"),
        ("0.19.0rc1", "0.19.0", None, "unsupported"),
        ("9.0", "0.19.0", None, "fits"),
        # A checkout without tags calls itself so, however new it is: the content decides.
        ("0.1.dev12345+g0123456", "0.19.0", None, "fits"),
        ("nonsense", "0.19.0", None, "fits"),
    ],
)
def test_h9_releases_are_judged_by_content_unless_they_are_too_old(tree, version, known, older, state):
    """Known releases are a record of what was read; only what comes before all of them is told by its number."""
    (tree.folder / "vllm/_version.py").write_text(f"__version__ = version = {version!r}\n")
    assert states(tree, replace(PATCH, known_releases=(known,), older_releases=older)) == [state]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (SOURCE.replace("def first", "def premier"), "defines first 0 times"),
        (SOURCE.replace("import os\n", ""), "doesn't begin with imports"),
        (SOURCE.replace("import os\n", "import os; X = 1\n"), "shares a line with other code"),
        (SOURCE.replace('"""Add one."""\n', '"""Add one."""; '), "doesn't begin its line"),
        (SOURCE + "def (", "isn't valid Python"),
        ("\x00", "isn't valid Python"),
        (b"\xff\xff", "can't be decoded"),
        (None, "can't be read"),
    ],
)
def test_what_can_not_be_patched(tree, source, problem):
    """Unknown content is refused with the reason, and the files' other patches aren't affected."""
    thing(tree).unlink()
    if source is not None:
        thing(tree).write_bytes(source if isinstance(source, bytes) else source.encode())
    (entry,) = plan(tree, [PATCH])
    assert entry.state == "unsupported"
    assert problem in entry.reason
    assert (entry.path is None) == (source is None)
    assert rewrite(tree, [entry]) == {}


def test_an_anchor_that_fails_is_a_refusal(tree):
    """Anchors come from whoever declares a patch."""

    class Crooked(FirstStatement):
        def find(self, function):
            raise KeyError("crooked")

    (entry,) = plan(tree, [replace(PATCH, anchor=Crooked())])
    assert (entry.state, "fails (KeyError('crooked'))" in entry.reason) == ("unsupported", True)


def test_a_function_that_moved(tree):
    """The first of the modules that defines the function counts, wherever the release has it."""
    moved = replace(PATCH, module="vllm.v1.elsewhere", former_modules=("vllm.v1.thing",))
    (entry,) = plan(tree, [moved])
    assert (entry.module, entry.path, entry.state) == ("vllm.v1.thing", thing(tree), "fits")
    elsewhere = tree.folder / "vllm/v1/elsewhere.py"
    elsewhere.write_text("import os\n")
    assert plan(tree, [moved])[0].module == "vllm.v1.thing"
    elsewhere.write_text(SOURCE)
    thing(tree).write_text("from vllm.v1.elsewhere import first\n")
    (entry,) = plan(tree, [moved])
    assert (entry.module, entry.path, entry.state) == ("vllm.v1.elsewhere", elsewhere, "fits")
    assert list(rewrite(tree, [entry])) == [elsewhere]
    elsewhere.write_text("def (")
    assert plan(tree, [moved])[0].reason.startswith("vllm/v1/elsewhere.py can't take the patch one")


def test_a_file_that_changed_since_the_plan(tree):
    """The texts are made from what is there; if that doesn't take the patch any more, nothing is made."""
    planned = plan(tree, [PATCH])
    thing(tree).write_text(SOURCE + "\n\nX = 1\n")
    (text,) = rewrite(tree, planned).values()
    assert text.text.endswith("X = 1\n")
    apply(tree, PATCH)
    with pytest.raises(PatchError, match="contains the patch"):
        rewrite(tree, planned)


def test_first_statement():
    """After the docstring if there is one; a function of nothing else has no place."""
    import ast

    def found(source):
        return [ast.unparse(node) for node in FirstStatement().find(ast.parse(source).body[0])]

    assert found("def f():\n    '''Doc.'''\n    x = 1\n    y = 2") == ["x = 1"]
    assert found("def f():\n    x = 1") == ["x = 1"]
    assert found("async def f():\n    b'no docstring'\n    x = 1") == ["b'no docstring'"]
    assert found("def f():\n    '''Doc.'''") == []


def runners(vllm_tree, folder):
    """Copy the two runners, and the version."""
    for name in (V1.path, V2.path, "vllm/_version.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(vllm_tree.folder / name, folder / name)
    return Tree(folder)


def test_the_installed_vllm(vllm_tree):
    """Both runners of the installed vLLM take the hook, and it has its own fix for page sizes."""
    planned = {entry.patch.id: entry for entry in plan(vllm_tree, all_patches())}
    assert {name: entry.state for name, entry in planned.items()} == {
        V1.id: "fits",
        V2.id: "fits",
        HYBRID_PAGE_SIZE.id: "not needed",
    }
    for patch in (V1, V2):
        assert planned[patch.id].path == vllm_tree.folder / patch.path
        assert planned[patch.id].reason.startswith("The call goes into GPUModelRunner.execute_model at line ")


def test_other_vllms(vllm_tree, tmp_path):
    """Patched files are recognised, half patched ones refused, and old releases need no hook in the second runner."""
    tree = runners(vllm_tree, tmp_path)
    apply(tree, V1, V2)
    assert states(tree, V1, V2) == ["already in source", "already in source"]
    path = tree.folder / V2.path
    path.write_text(path.read_text().replace(V2.call, "pass"))
    assert states(tree, V1, V2) == ["already in source", "unsupported"]
    (tree.folder / "vllm/_version.py").write_text("__version__ = version = '0.14.1+cpu'\n")
    assert states(tree, V1, V2) == ["already in source", "not needed"]
    path.unlink()
    assert states(tree, V1, V2) == ["already in source", "not needed"]
    (tree.folder / "vllm/_version.py").write_text("__version__ = version = '0.99.0'\n")
    assert states(tree, V1, V2) == ["already in source", "unsupported"]
