"""Libraries of the system are unpacked into the clone where the system has none: with an apt that only takes notes."""

from __future__ import annotations

import pytest
from envlib import system_libraries
from envlib.system_libraries import LibraryError, ensure_libraries

NAME, PACKAGE = "libkvplugtest.so.9", "libkvplugtest9"

APT = """#!/bin/sh
echo "$@" >> "$NOTES"
if {failing}; then echo "E: no such package" >&2; exit 100; fi
case "$*" in *download*) touch {package}_1.deb;; esac
"""

DPKG = """#!/bin/sh
mkdir -p "$3/usr/lib"
echo library > "$3/usr/lib/{name}.0.1"
ln -s {name}.0.1 "$3/usr/lib/{name}"
"""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Make a machine that lacks a library; return a function that gives it an apt, and the notes of that."""
    monkeypatch.setattr(system_libraries, "LIBRARIES", {NAME: (PACKAGE,)})
    notes = tmp_path / "notes"
    notes.touch()
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("NOTES", str(notes))
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def install(failing="false"):
        for name, text in (("apt-get", APT), ("dpkg-deb", DPKG)):
            program = programs / name
            program.write_text(text.format(failing=failing, package=PACKAGE, name=NAME))
            program.chmod(0o755)

    return install, notes


def test_what_is_missing_is_unpacked_once(machine, tmp_path):
    """The library and its link end up in the folder as files; a second time nothing is downloaded."""
    install, notes = machine
    install()
    folder = tmp_path / "libraries"
    assert ensure_libraries(folder) == [PACKAGE]
    assert sorted(file.name for file in folder.iterdir()) == [NAME, NAME + ".0.1"]
    assert (folder / NAME).read_text() == "library\n"
    assert not (folder / NAME).is_symlink()
    before = notes.read_text()
    assert PACKAGE in before
    assert ensure_libraries(folder) == []
    assert notes.read_text() == before


def test_what_the_system_has_is_left_alone(machine, monkeypatch, tmp_path):
    """A library that can be loaded already isn't downloaded."""
    install, notes = machine
    install()
    monkeypatch.setattr(system_libraries, "LIBRARIES", {"libc.so.6": ("libc6",)})
    assert ensure_libraries(tmp_path / "libraries") == []
    assert notes.read_text() == ""


def test_without_lists_of_packages_own_ones_are_fetched(machine, tmp_path):
    """Where the system's lists are missing, as in a fresh container, apt gets some in a scratch folder."""
    install, notes = machine
    install(failing='! echo "$*" | grep -q Dir::State::Lists=')
    assert ensure_libraries(tmp_path / "libraries") == [PACKAGE]
    first, update, second = notes.read_text().splitlines()
    assert "download" in first.split()
    assert "update" in update.split()
    assert "download" in second.split()


def test_a_failure_names_the_packages_and_says_what_apt_said(machine, tmp_path):
    """Who has no network learns what to install, and why it wasn't done."""
    install, _ = machine
    install(failing="true")
    with pytest.raises(LibraryError, match=rf"{NAME} missing: install {PACKAGE} .*E: no such package"):
        ensure_libraries(tmp_path / "libraries")
    assert not (tmp_path / "libraries").exists()


def test_without_apt_the_packages_are_named(machine, monkeypatch, tmp_path):
    """On other systems nothing is tried."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LibraryError, match=f"install {PACKAGE}"):
        ensure_libraries(tmp_path / "libraries")
