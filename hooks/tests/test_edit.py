"""Edits: exact, verified, or refused."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from kvplug.errors import UnsupportedError
from kvplug_hooks.edit import inline, lines
from kvplug_hooks.errors import PatchError
from kvplug_hooks.patch import Before
from kvplug_hooks.patches.before_update_states import PATCHES, V1, V2
from kvplug_hooks.source import SourceText

ANCHOR = "num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens"
STYLES = pytest.mark.parametrize("style", [inline, lines])


def positions(text, patch):
    """The kind and lines of every statement, but for those that the patch inserts."""
    inserted = {ast.dump(ast.parse(line).body[0]) for line in (patch.import_line, patch.call)}
    return [
        (type(node).__name__, node.lineno, node.end_lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and ast.dump(node) not in inserted
    ]


def without_insertions(edit):
    """The result's bytes without the inserted spans, taken out by position."""
    text, shift = edit.result.text, 0
    for insertion in edit.insertions:
        start = insertion.offset
        assert text[start : start + len(insertion.text)] == insertion.text, shift
        text = text[:start] + text[start + len(insertion.text) :]
    return SourceText(text, edit.result.encoding).data


def calls(edit, patch):
    """Pairs of statements: each inserted call, and what follows it."""
    call = ast.dump(ast.parse(patch.call).body[0])
    bodies = [
        getattr(node, field)
        for node in ast.walk(ast.parse(edit.result.text))
        for field in ("body", "orelse", "finalbody")
        if isinstance(getattr(node, field, None), list)
    ]
    return [
        tuple(ast.unparse(statement) for statement in body[index : index + 2])
        for body in bodies
        for index, statement in enumerate(body)
        if ast.dump(statement) == call
    ]


@pytest.fixture(scope="module")
def real_edits(vllm_tree):
    """The edits of vLLM's own runners, by style and patch."""
    return {
        (style, patch): style(vllm_tree.source(patch), patch, "runner.py")
        for style in (inline, lines)
        for patch in PATCHES
    }


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_inline_keeps_every_line_number_of_the_real_runner(real_edits, patch):
    """Patched in memory, every statement of vLLM's own source stays on its line; as two lines of a file it doesn't."""
    before = positions(real_edits[inline, patch].original.text, patch)
    assert positions(real_edits[inline, patch].result.text, patch) == before
    assert positions(real_edits[lines, patch].result.text, patch) != before


@STYLES
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_the_real_runner_gets_two_insertions_and_nothing_else(vllm_tree, real_edits, patch, style):
    """The call is once in the module, and the original comes back when the insertions are taken out."""
    edit = real_edits[style, patch]
    source = edit.original
    assert len(edit.insertions) == 2
    assert without_insertions(edit) == source.data == (vllm_tree.folder / patch.path).read_bytes()
    assert edit.result.data != source.data
    ((call, following),) = calls(edit, patch)
    assert call == patch.call
    assert following == {V1: ANCHOR, V2: "self.update_pp_decode_requests()"}[patch]
    assert len(edit.result.lines) - len(source.lines) == {inline: 0, lines: 2}[style]


@STYLES
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_a_patched_source_needs_no_patch(real_edits, patch, style):
    """An edit of a source that contains the hook is None, whichever way the hook got there."""
    patched = real_edits[style, patch].result
    assert inline(patched, patch, "runner.py") is None
    assert lines(patched, patch, "runner.py") is None


def test_lines_are_indented_like_their_neighbours(v1_source):
    """The import is a line at the end of the leading imports, the call a line right before its anchor."""
    result = lines(SourceText(v1_source), V1, "runner.py").result.text.split("\n")
    assert result[result.index(V1.import_line) - 1] == ")"
    call = result.index(f"            {V1.call}")
    assert result[call - 1 : call + 2 : 2] == ["            # Read the count.", f"            {ANCHOR}"]


def test_inline_goes_between_an_import_and_its_comment(v1_source):
    """A comment behind the last import stays one."""
    source = v1_source.replace("\n)\n", "\n)  # all; of them\n")
    result = inline(SourceText(source), V1, "runner.py").result.text
    assert f"\n); {V1.import_line}  # all; of them\n" in result


@STYLES
def test_imports_under_a_condition_are_not_the_module_s_own(v1_source, style):
    """The import must not land under `if TYPE_CHECKING`, where it wouldn't run."""
    edit = style(SourceText(v1_source), V1, "runner.py")
    imports = [ast.unparse(node) for node in ast.parse(edit.result.text).body if isinstance(node, ast.ImportFrom)]
    assert imports == ["from typing import TYPE_CHECKING, Any", V1.import_line]


@STYLES
def test_imports_further_down_are_not_the_module_s_own(v1_source, style):
    """The import comes before any other statement of the module can run, also if there are late imports."""
    edit = style(SourceText(v1_source + "\n\nimport sys\n"), V1, "runner.py")
    names = [ast.unparse(node) for node in ast.parse(edit.result.text).body]
    assert names.index(V1.import_line) == names.index("from typing import TYPE_CHECKING, Any") + 1
    assert names[-1] == "import sys"


@STYLES
@pytest.mark.parametrize("ending", ["\r\n", "\r"])
def test_line_endings_stay(v1_source, style, ending):
    """Files with other line endings get theirs on added lines too."""
    source = SourceText.from_bytes(v1_source.replace("\n", ending).encode())
    edit = style(source, V1, "runner.py")
    assert without_insertions(edit) == source.data
    assert edit.result.text.replace(ending, "").isprintable()
    assert len(calls(edit, V1)) == 1


@STYLES
@pytest.mark.parametrize("text", ["ü€𝄞", "\x0c", "\u2028", "\x85"], ids=ascii)
def test_odd_characters_do_not_shift_the_place(v1_source, style, text):
    """The parser counts columns in bytes, and some characters end a line for `str.splitlines` only."""
    odd = v1_source.replace('"""A runner."""', f'"""A {text} runner."""').replace("# Read", f"# {text} Read")
    edit = style(SourceText.from_bytes(odd.encode()), V1, "runner.py")
    assert without_insertions(edit) == odd.encode()
    assert calls(edit, V1) == [(V1.call, ANCHOR)]


def test_characters_of_several_bytes_before_the_anchor_on_its_line(v1_source):
    """Inline, the call goes right before the anchor even behind other text; two-line style refuses there."""
    odd = SourceText(v1_source.replace(f"    {ANCHOR}\n            if", f'    "ü€𝄞"; {ANCHOR}\n            if'))
    edit = inline(odd, V1, "runner.py")
    assert f'"ü€𝄞"; {V1.call}; {ANCHOR}\n' in edit.result.text
    with pytest.raises(PatchError, match="doesn't begin its line"):
        lines(odd, V1, "runner.py")


@STYLES
@pytest.mark.parametrize(
    ("encoding", "cookie"), [("latin-1", "# coding: latin-1\n"), ("utf-8-sig", ""), ("utf-8-sig", "# coding: utf-8\n")]
)
def test_encodings_come_back_as_they_were(v1_source, style, encoding, cookie):
    """A declared encoding and a byte order mark survive, and don't shift anything."""
    data = (cookie + v1_source.replace("A runner", "Für Läufer")).encode(encoding)
    edit = style(SourceText.from_bytes(data), V1, "runner.py")
    assert without_insertions(edit) == data
    assert "Für Läufer" in compile(edit.result.data, "runner.py", "exec").co_consts[0]


@pytest.mark.parametrize("data", [b"x = '\xff'\n", b"# coding: no-such-encoding\n"])
def test_bytes_that_are_no_source_are_refused(data):
    """What Python can't decode is refused with the reason."""
    with pytest.raises(PatchError, match="can't be decoded"):
        SourceText.from_bytes(data)


def refusals():
    """Changes to the sources, each with the reason for which they are refused."""
    v1, v2 = V1, V2
    nested = f"            def inner():\n                {ANCHOR}\n            return"
    other = "            return num_scheduled_tokens\n"
    return {
        "anchor absent": (v1, f"            {ANCHOR}\n", "            num_scheduled_tokens = 1\n", "0 times"),
        "anchor twice": (v1, other, f"            {ANCHOR}\n{other}", "2 times"),
        "anchor in a nested function only": (v1, f"            {ANCHOR}\n", nested + " 0\n", "0 times"),
        "block absent": (
            v2,
            "finish_requests(scheduler_output)\n        if",
            "other(scheduler_output)\n        if",
            "0 t",
        ),
        "block twice": (v2, "os.getpid()", "self.finish_requests(scheduler_output)", "2 times"),
        "no such method": (v1, "def execute_model", "def execute", "defines GPUModelRunner.execute_model 0 times"),
        "method twice": (v1, "def _update_states", "def execute_model", "defines GPUModelRunner.execute_model 2 times"),
        "no such class": (v1, "class GPUModelRunner", "class Runner", "defines GPUModelRunner 0 times"),
        "parameter renamed": (v2, "scheduler_output, dummy_run", "output, dummy_run", "no parameter scheduler_output"),
        "half patched": (v1, "import os\n", f"import os\n{v1.import_line}\n", "is taken"),
        "name taken": (v1, "class GPU", "def before_update_states():\n    pass\n\n\nclass GPU", "is taken"),
        "another hook of that name": (
            v1,
            f"            {ANCHOR}\n",
            f"            {v1.call}\n            {ANCHOR}\n",
            "isn't kvplug.dispatch's",
        ),
        "text in a comment": (v2, "# Update", f"# {v2.call}; Update", "has the text"),
        "no imports": (v2, "import os\n", "", "doesn't begin with imports"),
        "not Python": (v1, "class GPU", "class class GPU", "isn't valid Python"),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_has_no_exact_place_is_refused(v1_source, v2_source, case):
    """Anything but one exact place is an error that names the file, the patch, the problem and the way out."""
    patch, old, new, problem = refusals()[case]
    source = v1_source if patch is V1 else v2_source
    assert inline(SourceText(source), patch, "runner.py") is not None
    assert old in source
    head, found, tail = source.rpartition(old)
    assert found
    with pytest.raises(PatchError, match=problem) as caught:
        inline(SourceText(head + new + tail), patch, "runner.py")
    message = str(caught.value)
    assert isinstance(caught.value, UnsupportedError)
    assert message.startswith(f"{patch.path} can't take the patch {patch.id}: ")
    assert message.endswith(f"use a vLLM from {patch.releases}, or a newer kvplug-hooks.")


def test_an_import_that_shares_its_line_gets_no_line_after_it(v1_source):
    """Behind `import a; x = ...` a line of its own could land in the middle of something."""
    source = SourceText(v1_source.replace("\n)\n", '\n); TEXT = """\n"""\n'))
    assert f"); {V1.import_line}; TEXT" in inline(source, V1, "runner.py").result.text
    with pytest.raises(PatchError, match="shares a line"):
        lines(source, V1, "runner.py")


def test_nothing_goes_inline_before_a_compound_statement(v2_source):
    """`call; with x:` isn't Python: such a place can be patched in a file only."""
    source = SourceText(v2_source.replace("self.finish", "with self.lock:\n                self.finish", 1))
    with pytest.raises(PatchError, match="doesn't compile"):
        inline(source, V2, "runner.py")
    assert lines(source, V2, "runner.py") is not None


def test_a_call_that_is_not_in_the_compiled_function_is_noticed(v1_source):
    """The check of the result looks at the compiled function, not at the text that was inserted."""
    silent = replace(V1, call="scheduler_output = (scheduler_output)")
    with pytest.raises(PatchError, match=r"doesn't call before_update_states in GPUModelRunner\.execute_model"):
        inline(SourceText(v1_source), silent, "runner.py")


def test_a_call_that_adds_a_line_is_noticed_inline(v1_source):
    """Line numbers must not move in memory."""
    long = replace(V1, call="scheduler_output = before_update_states(self,\n scheduler_output)")
    with pytest.raises(PatchError, match="adds 1 lines instead of 0"):
        inline(SourceText(v1_source), long, "runner.py")


def test_anchors_compare_code_and_not_text(v1_source):
    """Spaces, comments and line breaks don't matter; another name does."""
    spaced = v1_source.replace(f"{ANCHOR}\n            if", ANCHOR.replace(" = ", "  =  ") + "  # note\n            if")
    assert spaced != v1_source
    assert inline(SourceText(spaced), V1, "runner.py") is not None
    with pytest.raises(PatchError, match="0 times"):
        inline(SourceText(spaced), replace(V1, anchor=Before(ANCHOR.replace("num_", "n_"))), "runner.py")
