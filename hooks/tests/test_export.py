"""The patch as a diff: from the installed vLLM, from the record, from a folder."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner
from packaging.version import Version

from kvplug_hooks import cli, diff, export, releases
from kvplug_hooks.edit import Edit, Insertion, lines
from kvplug_hooks.errors import PatchError
from kvplug_hooks.installed import Tree, installed
from kvplug_hooks.patch import path_of
from kvplug_hooks.patches import all_patches
from kvplug_hooks.patches.before_update_states import BY_RUNNER, PATCHES, V1, V2
from kvplug_hooks.patches.hybrid_page_size import HYBRID_PAGE_SIZE
from kvplug_hooks.source import SourceText
from support.releases import source_tree

APPLY = {"patch": ["patch", "-p1", "-F0"], "git": ["git", "apply"]}
TOOLS = pytest.mark.parametrize("tool", APPLY)


def invoke(*arguments):
    return CliRunner().invoke(cli.main, arguments)


def exported(*arguments):
    result = invoke("export", *arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout_bytes


def apply(tool, text, folder, check=True):
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        APPLY[tool], input=text, cwd=folder, env=environment, check=False, capture_output=True, timeout=60
    )
    assert not check or (done.returncode == 0 and b"offset" not in done.stdout), done
    return done


def copy_of(tree, folder):
    """Copy the runners, the version, and nothing else."""
    for name in (*(patch.path for patch in PATCHES), "vllm/_version.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree.folder / name, folder / name)
    return Tree(folder)


def assert_patched(tree, original):
    """Each runner is exactly what the two-line edit makes of the original, compiles, and nothing else was left."""
    names = {path.name for path in tree.folder.rglob("*") if path.is_file()}
    assert names == {"gpu_model_runner.py", "model_runner.py", "_version.py"}
    for patch in PATCHES:
        source = original.source(patch)
        expected = lines(source, patch, patch.path).result
        assert tree.source(patch).data == expected.data != source.data
        compile(tree.source(patch).data, patch.path, "exec")


@pytest.mark.install
@TOOLS
def test_the_diff_of_the_installed_vllm_applies(vllm_tree, tmp_path, tool):
    """`patch` without fuzz and `git apply` both turn vLLM's files into the two-line edit, and refuse a second time."""
    text = exported("--vllm", str(vllm_tree.version))
    tree = copy_of(vllm_tree, tmp_path / "site")
    apply(tool, text, tree.folder)
    assert_patched(tree, vllm_tree)
    assert apply(tool, text, tree.folder, check=False).returncode != 0


@TOOLS
def test_a_diff_does_not_apply_to_a_file_that_drifted(vllm_tree, tmp_path, tool):
    """The context is there to be compared: a changed line beside the anchor makes the tools refuse."""
    tree = copy_of(vllm_tree, tmp_path / "site")
    path = tree.folder / V1.path
    drifted = path.read_text().replace("handle_preemptions(kv_connector_metadata)", "handle_preemptions(metadata)")
    assert drifted != path.read_text()
    path.write_text(drifted)
    assert apply(tool, exported(), tree.folder, check=False).returncode != 0


@pytest.mark.install
@TOOLS
def test_the_recorded_diff_of_0_19_0_applies_to_the_real_files(tmp_path, tool):
    """The release that the RFC asked for: 4 added lines, no fuzz, and the same as a diff of its files."""
    original = source_tree("0.19.0")
    text = exported("--vllm", "0.19.0")
    assert text == exported("--source", str(original.folder))
    assert text.count(b"\n+") - text.count(b"\n+++") == 4
    tree = copy_of(original, tmp_path / "site")
    apply(tool, text, tree.folder)
    assert_patched(tree, original)


def test_the_record_has_every_release_that_the_patches_know():
    """Declarations and record agree: which releases take a patch, and which lines are added to which of them."""
    record = releases.recorded()
    assert list(record) == sorted(record, key=Version)
    for patch in all_patches():
        fitting = [release for release in record if record[release][patch.id].state == "fits"]
        assert fitting == list(patch.known_releases)
        for release in fitting:
            entry = record[release][patch.id]
            added = [line[1:] for hunk in entry.hunks for line in hunk.lines if line.startswith("+")]
            assert [line.strip() for line in added] == [patch.import_line, patch.call], release
            assert [hunk.kept for hunk in entry.hunks] == [6, 6], release
            assert entry.path in {path_of(module) for module in patch.modules}
            assert entry.added_lines == 2
    assert {patch_id for entries in record.values() for patch_id in entries} == {patch.id for patch in all_patches()}


def test_the_record_says_why_a_release_has_no_use_for_a_patch():
    """What doesn't fit has a reason, and no hunks: upstream's own fix, another line of releases, or too old."""
    record = releases.recorded()
    reasons = {
        (release, patch_id): (entry.state, entry.reason)
        for release, entries in record.items()
        for patch_id, entry in entries.items()
        if entry.state != "fits"
    }
    assert all(reason and not record[release][patch_id].hunks for (release, patch_id), (_, reason) in reasons.items())
    assert {state for state, _ in reasons.values()} == {"not needed"}
    before_the_models = ("0.14.0", "0.14.1", "0.15.1", "0.16.0", "0.17.1", "0.18.1")
    with_upstream_s_fix = ("0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
    assert reasons.keys() == {
        ("0.14.0", V2.id),
        ("0.14.1", V2.id),
        *((release, HYBRID_PAGE_SIZE.id) for release in (*before_the_models, *with_upstream_s_fix)),
    }
    for release in before_the_models:
        assert "none of the models" in reasons[release, HYBRID_PAGE_SIZE.id][1]
    for release in with_upstream_s_fix:
        assert "pads pages that don't divide itself" in reasons[release, HYBRID_PAGE_SIZE.id][1]
    assert record["0.33.0"][HYBRID_PAGE_SIZE.id].path == "vllm/v1/core/kv_cache_planning.py"


def test_the_record_equals_the_installed_files(vllm_tree):
    """What was recorded from a wheel is what its installation gives."""
    record = releases.recorded()[str(vllm_tree.version)]
    assert record == export.record_of(vllm_tree, all_patches())
    (content,) = json.loads(releases.dump({"0.32.0": record})).values()
    assert content[V1.id]["hunks"][0]["line"] == record[V1.id].hunks[0].line


def test_a_patch_that_moved_is_exported_for_the_file_that_has_it():
    """The page-size function's module was another in the releases that need the patch; later ones are left out."""
    result = export.export([HYBRID_PAGE_SIZE], Version("0.23.0"), None)
    assert result.text.startswith("--- a/vllm/v1/core/kv_cache_utils.py\n")
    assert (result.added_lines, result.left_out) == (2, ())
    both = export.export([V1, HYBRID_PAGE_SIZE], Version("0.31.0"), None)
    assert (both.added_lines, both.left_out) == (2, (HYBRID_PAGE_SIZE,))
    with pytest.raises(PatchError, match=r"is for vLLM 0\.19\.0 to 0\.28\.0, not 0\.31\.0: This vLLM's unify"):
        export.export([HYBRID_PAGE_SIZE], Version("0.31.0"), None)


@pytest.mark.install
def test_every_recorded_release_is_exported_with_the_fewest_lines():
    """Two added lines for each runner that takes connectors, and no line removed."""
    for release in releases.recorded():
        text = exported("--vllm", release).decode()
        runners = 1 if release.startswith("0.14.") else 2
        assert len(re.findall(r"^\+(?!\+\+ )", text, re.MULTILINE)) == 2 * runners
        assert not re.findall(r"^-(?!-- )", text, re.MULTILINE)
        assert re.findall(r"^--- a/(.*)$", text, re.MULTILINE) == [patch.path for patch in PATCHES][:runners]


@pytest.mark.parametrize("runner", BY_RUNNER)
def test_one_runner_alone(runner):
    """A diff can be had for one runner; both are the two together."""
    text = exported("--vllm", "0.31.0", "--runner", runner)
    assert text.count(b"+++ b/") == 1
    assert text in exported("--vllm", "0.31.0")


@pytest.mark.parametrize("spelling", ["0.19", "v0.19.0", "0.19.0+cpu", "0.19.0"])
def test_spellings_of_a_release(spelling):
    """A version is compared as a version, and how it was built doesn't matter."""
    assert exported("--vllm", spelling) == exported("--vllm", "0.19.0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vllm", "0.19.2"], r"nearest: 0\.19\.1 and 0\.20\.2\); pass --source"),
        (["--vllm", "0.19.0.post1"], r"nearest: 0\.19\.0 and 0\.19\.1"),
        (["--vllm", "0.20.0rc1"], r"nearest: 0\.19\.1 and 0\.20\.2"),
        (["--vllm", "1.0"], r"nearest: 0\.33\.0\)"),
        (["--vllm", "0.9.2"], r"nearest: 0\.14\.0\)"),
        (["--vllm", "latest"], "isn't a vLLM version"),
        (["--vllm", "0.14.0", "--runner", "v2"], r"is for vLLM 0\.15\.1 to 0\.33\.0, not 0\.14\.0"),
    ],
)
def test_releases_that_there_is_no_diff_for(arguments, message):
    """What can't be exported is refused with a way out, and nothing is printed that `patch` could take."""
    result = invoke("export", *arguments)
    assert result.exit_code != 0
    assert result.stdout == ""
    assert re.search(message, result.stderr)


def test_a_runner_that_takes_no_connectors_yet_is_left_out_and_named():
    """0.14 has a second runner, but no connector runs in it."""
    result = invoke("export", "--vllm", "0.14.1")
    assert "Left out: before_update_states.v2, which is for vLLM 0.15.1 to 0.33.0." in result.stderr
    assert "2 added lines, for vLLM 0.14.1 as recorded." in result.stderr
    assert V2.path not in result.stdout


@pytest.mark.install
def test_a_folder_as_source(vllm_tree, tmp_path):
    """Any tree will do, whatever its version; a version that contradicts it, or a tree that lacks vLLM, is refused."""
    tree = copy_of(vllm_tree, tmp_path / "site")
    expected = exported("--vllm", str(vllm_tree.version))
    assert exported("--source", str(tree.folder)) == expected
    contradiction = invoke("export", "--source", str(tree.folder), "--vllm", "0.19.0")
    assert f"contains vLLM {vllm_tree.version}, not 0.19.0" in contradiction.stderr
    (tree.folder / "vllm/_version.py").unlink()
    assert exported("--source", str(tree.folder), "--vllm", "99") == expected
    apply("patch", expected, tree.folder)
    assert "contains the patch before_update_states.v1 already" in invoke("export", "--source", str(tree.folder)).stderr
    (tmp_path / "empty").mkdir()
    assert "can't be read" in invoke("export", "--source", str(tmp_path / "empty")).stderr


@pytest.mark.install
def test_an_installed_vllm_that_has_the_hook_is_exported_from_the_record(vllm_tree, tmp_path, monkeypatch):
    """Files that were patched no longer show what the release contains; the record does."""
    tree = copy_of(vllm_tree, tmp_path / "site")
    version = str(vllm_tree.version)
    monkeypatch.setattr(export, "installed", lambda: tree)
    before = invoke("export", "--vllm", version)
    apply("patch", before.stdout_bytes, tree.folder)
    after = invoke("export", "--vllm", version)
    assert (before.stderr, after.stderr) == tuple(
        f"4 added lines, for vLLM {version} as {basis}.\n" for basis in ("installed", "recorded")
    )
    assert after.stdout == before.stdout
    assert invoke("export").exit_code != 0


def test_export_without_vllm(monkeypatch):
    """Recorded releases need no vLLM; the default, whatever is installed, does."""
    monkeypatch.setattr(export, "installed", lambda: None)
    assert exported("--vllm", "0.32.0")
    assert "No vLLM is installed here" in invoke("export").stderr


def test_the_installed_vllm_is_found_without_importing_it(vllm_tree):
    """Looking for vLLM costs no import of it."""
    code = (
        "import sys; from kvplug_hooks.installed import installed; t = installed();"
        "print(t.version, t.folder, 'vllm' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{vllm_tree.version} {vllm_tree.folder} False False\n"
    assert installed() == vllm_tree


def two_insertions(text, first, second):
    source = SourceText(text)
    place = lambda line: sum(map(len, source.lines[: line - 1]))
    insertions = tuple(Insertion(place(line), line, f"new {line}\n") for line in (first, second))
    result = text
    for insertion in reversed(insertions):
        result = result[: insertion.offset] + insertion.text + result[insertion.offset :]
    return Edit(source, insertions, SourceText(result), compile("", "", "exec"))


@TOOLS
@pytest.mark.parametrize("ending", ["\n", ""])
@pytest.mark.parametrize("second", [3, 7, 8, 9, 10, 20])
@pytest.mark.parametrize("first", [1, 2])
def test_hunks_close_together_and_at_the_ends_of_a_file(tmp_path, first, second, ending, tool):
    """Whatever the distance of two insertions, and without a final newline, the tools take the diff."""
    text = "".join(f"old {number}\n" for number in range(1, 20)) + "old 20" + ending
    edit = two_insertions(text, first, second)
    (tmp_path / "file.txt").write_text(text)
    rendered = diff.render("file.txt", diff.hunks(edit))
    apply(tool, rendered.encode(), tmp_path)
    assert (tmp_path / "file.txt").read_text() == edit.result.text
    reference = difflib.unified_diff(text.splitlines(), edit.result.text.splitlines(), lineterm="")
    assert [line for line in rendered.splitlines()[2:] if not line.startswith("\\")] == list(reference)[2:]


@pytest.mark.parametrize("head", [b"# coding: latin-1\n# \xe9\n", b"\xef\xbb\xbf# text\n", b"# text\r# more\n"])
def test_text_that_a_diff_cannot_hold_is_refused(v1_source, head):
    """A diff is UTF-8 here, and its lines end in newlines; anything else would apply wrongly."""
    edit = lines(SourceText.from_bytes(head + v1_source.encode("latin-1")), V1, "runner.py")
    with pytest.raises(PatchError, match="Only UTF-8 sources"):
        diff.hunks(edit)
