"""Patching in memory: as cheap as can be, and just as exact."""

from __future__ import annotations

import ast
import gc
from dataclasses import replace

import pytest

from kvplug_hooks import memory
from kvplug_hooks.edit import inline
from kvplug_hooks.memory import prepare
from kvplug_hooks.outline import mentions_function, outline
from kvplug_hooks.patch import Before, FirstStatement, path_of
from kvplug_hooks.patches import all_patches
from kvplug_hooks.patches.before_update_states import PATCHES, V1, V2
from kvplug_hooks.patches.hybrid_page_size import HYBRID_PAGE_SIZE
from kvplug_hooks.source import SourceText
from support.releases import source_tree

PLAIN = replace(
    V1,
    id="plain",
    function="GPUModelRunner.execute_model",
    anchor=FirstStatement(),
    call="scheduler_output = before_update_states(self, scheduler_output)",
)


def prepared(source, *patches):
    return prepare(SourceText(source), "runner.py", patches, filename="runner.py", version=None)


@pytest.fixture
def parsed(monkeypatch):
    """How many lines that aren't empty were parsed, each time that something was."""
    sizes = []
    real = ast.parse

    def parse(source, *args, **kwargs):
        sizes.append(sum(bool(line.strip()) for line in source.split("\n")))
        return real(source, *args, **kwargs)

    monkeypatch.setattr(ast, "parse", parse)
    return sizes


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_a_runner_is_not_parsed_as_a_whole(vllm_tree, parsed, patch):
    """Its import block and one method are, once; the result is the one that the whole would have given."""
    source = vllm_tree.source(patch)
    found = prepare(source, patch.path, [patch], filename="runner.py", version=vllm_tree.version)
    assert max(parsed) < len(source.lines) / 4
    assert sum(size > 10 for size in parsed) == 1
    whole = inline(source, patch, "runner.py")
    assert found.edit == whole
    assert found.edit.result.data == whole.result.data


@pytest.mark.install
@pytest.mark.parametrize("release", V1.known_releases)
def test_the_short_way_and_the_long_way_agree_on_every_release(monkeypatch, parsed, release):
    """The same for all modules of all patches, in every release that was read."""
    tree = source_tree(release)
    for patch in all_patches():
        for module in patch.modules:
            path = path_of(module)
            if not (tree.folder / path).exists():
                continue
            source = tree.read(path)
            if not mentions_function(source.text, patch):
                continue
            parsed.clear()
            found = prepare(source, path, [patch], filename="module.py", version=tree.version)
            assert max(parsed, default=0) < len(source.lines) / 4
            with monkeypatch.context() as context:
                context.setattr(memory, "_quickly", lambda *_: None)
                whole = prepare(source, path, [patch], filename="module.py", version=tree.version)
            assert found.edit == whole.edit
            assert [(site.state, site.reason) for site in found.sites] == [
                (site.state, site.reason) for site in whole.sites
            ]


def test_what_is_not_needed_is_not_parsed(parsed, vllm_tree):
    """Where upstream has its own fix, the text tells."""
    source = vllm_tree.read("vllm/v1/core/kv_cache_utils.py")
    found = prepare(source, "utils.py", [HYBRID_PAGE_SIZE], filename="utils.py", version=vllm_tree.version)
    assert (found.sites[0].state, found.edit, parsed) == ("not needed", None, [])


def test_the_collector_is_paused_and_comes_back(v1_source, monkeypatch):
    """A worker's heap is large, and isn't to be walked for syntax trees; whoever has turned it off finds it off."""
    states = []
    real = memory.outline
    monkeypatch.setattr(memory, "outline", lambda *args: states.append(gc.isenabled()) or real(*args))
    assert prepared(v1_source, V1).edit is not None
    assert (states, gc.isenabled()) == ([False], True)
    gc.disable()
    try:
        prepared(v1_source, V1)
        assert not gc.isenabled()
    finally:
        gc.enable()


DECOY = '"""\nclass GPUModelRunner:\n    def execute_model(self, scheduler_output):\n        pass\n"""\n'


METHOD = "    def execute_model(self, scheduler_output, intermediate_tensors=None):\n"


def odd_sources(source):
    """Sources that are not what they look like line by line."""
    method = METHOD
    assert method in source
    return {
        "a class in a string": source.replace("class GPUModelRunner", f"TEXT = {DECOY}\n\nclass GPUModelRunner"),
        "a class in the docstring": source.replace('"""A runner."""\n', DECOY),
        "a method in a docstring": source.replace(
            "class GPUModelRunner:\n", f'class GPUModelRunner:\n    """\n{method}    """\n\n'
        ),
        "a method of another class": source + f"\n\nclass Other:\n{method}        return 1\n",
        "a nested function of that name": source.replace(
            "        return num_scheduled_tokens\n\n",
            "        def execute_model():\n            return 0\n\n        return num_scheduled_tokens\n\n",
        ),
        "a string that reaches the margin": source.replace(
            "            # Read the count.\n", '            text = """\ndef outside():\n"""\n'
        ),
        "brackets that reach the margin": source.replace(
            "            # Read the count.\n", "            pair = (\n1,\n2,\n)\n"
        ),
        "a comment at the margin": source.replace("            # Read the count.\n", "# Read the count.\n"),
        "a line that goes on": source.replace(
            "            # Read the count.\n", "            text = 1 + \\\n2\n            del text\n"
        ),
        "relative imports": source.replace("import os\n", "from . import a\nfrom .b import c\nimport os\n").replace(
            "\n)\n", "\n)\nfrom .. import d\nfrom .e import (\n    f,\n)\n", 1
        ),
        "a decorator": source.replace(method, f"    @staticmethod\n{method}"),
        "arguments on lines of their own": source.replace(
            method, "    def execute_model(\n        self,\n        scheduler_output,\n    ):\n"
        ),
        "bases on lines of their own": source.replace(
            "class GPUModelRunner:", "class GPUModelRunner(\n    object,\n    metaclass=type,\n):"
        ),
        "imports behind a docstring of code": source.replace('"""A runner."""', '"""\nimport sys\nx = 1\n"""'),
        "a class in a branch": source.replace(
            "class GPUModelRunner:",
            "if TYPE_CHECKING:\n    class GPUModelRunner:\n        pass\n\n\nclass GPUModelRunner:",
        ),
        "an async method": source.replace("    def execute_model", "    async def execute_model"),
        "no newline at the end": source.rstrip("\n"),
        "tabs": source.replace("    ", "\t"),
        "form feeds": source.replace("class GPUModelRunner", "\x0cclass GPUModelRunner"),
        "a second class of that name": source + "\n\nclass GPUModelRunner:\n    pass\n",
        "a second method of that name": source + f"\n{method}        return 1\n",
        "no method": source.replace("def execute_model", "def execute"),
        "no class": source.replace("class GPUModelRunner", "class Runner"),
        "no imports": source.replace("import os\nfrom typing import (\n    TYPE_CHECKING,\n    Any,\n)\n", ""),
        "not Python": source + "def (\n",
        "null bytes": source + "\x00",
        "the name in a comment": source + "# before_update_states\n",
    }


@pytest.mark.parametrize("patch", [V1, PLAIN], ids=lambda patch: patch.id)
@pytest.mark.parametrize(
    "case", odd_sources("    def execute_model(self, scheduler_output, intermediate_tensors=None):\n")
)
def test_the_short_way_and_the_long_way_agree(v1_source, monkeypatch, case, patch):
    """Whatever a source looks like line by line, the result or the refusal is that of its syntax tree."""
    source = odd_sources(v1_source)[case]
    assert source != v1_source
    found = prepared(source, patch)
    monkeypatch.setattr(memory, "_quickly", lambda *_: None)
    whole = prepared(source, patch)
    assert [(site.state, site.reason) for site in found.sites] == [(site.state, site.reason) for site in whole.sites]
    assert (found.edit and found.edit.result.text) == (whole.edit and whole.edit.result.text)
    assert (found.edit and found.edit.code) == (whole.edit and whole.edit.code)


def test_the_short_way_is_taken(v1_source, v2_source):
    """The control for the test above: ordinary sources are outlined, with lines and columns as they are."""
    for source, patch in ((v1_source, V1), (v2_source, V2)):
        parsed = outline(SourceText(source), "runner.py", [patch])
        kept = {ast.dump(node, include_attributes=True) for node in ast.walk(parsed.tree)}
        everything = {ast.dump(node, include_attributes=True) for node in ast.walk(ast.parse(source))}
        (method,) = [node for node in ast.walk(parsed.tree) if isinstance(node, ast.FunctionDef)]
        assert method.name == "execute_model"
        assert ast.dump(method, include_attributes=True) in everything
        assert len(kept) < len(everything)


def test_a_patch_that_can_not_be_inserted_is_not_in_the_way(v1_source):
    """Before a compound statement there is no place on the line: the other patch is still applied."""
    other = replace(V1, id="other", anchor=FirstStatement(), import_name="other", call="other(scheduler_output)")
    source = v1_source.replace("            if num_scheduled_tokens < 0:", "            if num_scheduled_tokens < 0 :")
    found = prepared(source, V1, other)
    assert [site.state for site in found.sites] == ["fits", "unsupported"]
    assert "doesn't compile" in found.sites[1].reason
    assert found.edit.result.text == prepared(source, V1).edit.result.text


def test_two_patches_in_one_edit(v1_source):
    """Each is at its own anchor, no line moves, and an import that they share is there once."""
    other = replace(
        V1, id="other", function="GPUModelRunner._update_states", anchor=Before("return num_scheduled_tokens")
    )
    found = prepared(v1_source, V1, other)
    assert [site.state for site in found.sites] == ["fits", "fits"]
    text = found.edit.result.text
    assert (text.count(V1.import_line), text.count(V1.call)) == (1, 2)
    assert text.count("\n") == v1_source.count("\n")
