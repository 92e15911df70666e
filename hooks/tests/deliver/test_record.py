"""RECORD: only hash and size of the files that change are touched."""

from __future__ import annotations

import base64
import hashlib

import pytest

from kvplug_hooks.deliver.record import Record


def row(name: str, data: bytes, algorithm: str = "sha256") -> str:
    digest = base64.urlsafe_b64encode(hashlib.new(algorithm, data).digest()).decode().rstrip("=")
    return f"{name},{algorithm}={digest},{len(data)}"


def record_of(tmp_path, *rows: str, ending: str = "\r\n") -> Record:
    path = tmp_path / "RECORD"
    path.write_bytes("".join(line + ending for line in rows).encode())
    return Record.read(path)


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_a_files_line_is_brought_up_to_date_and_the_rest_stays(tmp_path, ending, algorithm):
    """Hash and size follow the file, in the algorithm and with the line ending that the installer chose."""
    rows = [row("vllm/a.py", b"a"), row("vllm/b.py", b"old", algorithm), row("vllm/bb.py", b"b"), "x/RECORD,,"]
    record = record_of(tmp_path, *rows, ending=ending)
    assert record.vouches_for("vllm/b.py", b"old") is True
    assert record.vouches_for("vllm/b.py", b"new!") is False

    changed = record.with_file("vllm/b.py", b"new!")
    rows[1] = row("vllm/b.py", b"new!", algorithm)
    assert changed.data == "".join(line + ending for line in rows).encode()
    assert changed.vouches_for("vllm/b.py", b"new!") is True
    line = record.line("vllm/b.py")
    assert line is not None
    assert changed.with_line("vllm/b.py", line).data == record.data


def test_a_file_without_a_hash_stays_without(tmp_path):
    """Where RECORD says nothing about a file's bytes, nothing is vouched for and nothing is invented."""
    record = record_of(tmp_path, "vllm/a.py,,", row("vllm/b.py", b"b"))
    for name in ("vllm/a.py", "vllm/missing.py"):
        assert record.vouches_for(name, b"a") is None
        assert record.with_file(name, b"new").data == record.data
    assert record.line("vllm/missing.py") is None


def test_names_that_need_quotes_are_found(tmp_path):
    """A path with a comma is quoted, and is still one path; a path inside of another isn't mistaken for it."""
    quoted = '"vllm/a,b.py",sha256=xx,1'
    record = record_of(tmp_path, row("other/vllm/c.py", b"1"), quoted, row("vllm/c.py", b"2"))
    assert record.line("vllm/a,b.py") == quoted + "\r\n"
    assert record.vouches_for("vllm/c.py", b"2") is True
    assert '"vllm/a,b.py",sha256=' in record.with_file("vllm/a,b.py", b"x").data.decode()


def test_a_last_line_without_an_ending_is_kept_so(tmp_path):
    """A RECORD that somebody wrote by hand keeps its form, too."""
    path = tmp_path / "RECORD"
    path.write_text(row("vllm/a.py", b"a"))
    assert Record.read(path).with_file("vllm/a.py", b"b").data == row("vllm/a.py", b"b").encode()
