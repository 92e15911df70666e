"""``build/libraries``: libraries of the system that wheels need and this machine lacks, without installing them.

Mooncake's wheel is linked with the library of InfiniBand devices, also for those who use TCP. Where the system has
none, Debian's or Ubuntu's packages are downloaded and unpacked here, which needs no root. Who wants to use them puts
the folder into ``LD_LIBRARY_PATH``, or loads them first (`support.mooncake` does both). On other systems nothing is
done but to say what is missing.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

from envlib.environment import say

#: What must be loadable, and the packages that make it so.
LIBRARIES = {
    "libibverbs.so.1": ("libibverbs1", "libnl-3-200", "libnl-route-3-200"),
    "libnuma.so.1": ("libnuma1",),
}

#: Relative to the root.
FOLDER = Path("build") / "libraries"


class LibraryError(Exception):
    """A library can't be had; the message says why and what to install."""


def provide_libraries(root: Path) -> None:
    """Have the libraries in a clone's folder, or say why not: without them tests of Mooncake skip, or fail on CI."""
    try:
        packages = ensure_libraries(root / FOLDER)
    except LibraryError as error:
        say(f"the tier mooncake can't be tested: {error}")
    else:
        if packages:
            say(f"unpacked {', '.join(packages)} into {FOLDER}")


def ensure_libraries(folder: Path) -> list[str]:
    """Unpack what the system lacks into a folder, unless it is there.

    Args:
        folder: Where the libraries go, with nothing around them.

    Returns:
        Names of the packages that were unpacked.

    Raises:
        LibraryError: Something is missing, and can't be downloaded.
    """
    missing = [name for name in LIBRARIES if not is_there(name, folder)]
    packages = [package for name in missing for package in LIBRARIES[name]]
    if packages:
        remedy = f"{', '.join(missing)} missing: install {' '.join(packages)} (Debian, Ubuntu) or the like"
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise LibraryError(remedy)
        with tempfile.TemporaryDirectory(prefix="kvplug-libraries-") as scratch:
            _download(packages, Path(scratch), remedy)
            _unpack(Path(scratch), folder)
        still = [name for name in missing if not is_there(name, folder)]
        if still:
            raise LibraryError(f"{', '.join(still)} can't be loaded from {folder}; {remedy}")
    return packages


def is_there(name: str, folder: Path) -> bool:
    """Whether a library is in a folder, or else can be loaded from the system."""
    if (folder / name).exists():
        return True
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _download(packages: list[str], scratch: Path, remedy: str) -> None:
    """Download packages; with lists of packages of our own, where the system's are missing or old."""
    lists, cache = scratch / "lists", scratch / "cache"
    for place in (lists / "partial", cache / "archives" / "partial"):
        place.mkdir(parents=True)
    own = ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
    # As root, apt would download as a user that can't write here.
    apt = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "-o", f"Dir::Cache={cache}"]
    attempts = [
        [[*apt, "download", *packages]],
        [[*apt, *own, "update"], [*apt, *own, "download", *packages]],
    ]
    problem = ""
    for commands in attempts:
        for command in commands:
            done = subprocess.run(
                command, cwd=scratch, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
            )
            if done.returncode != 0:
                problem = done.stderr.strip()[-500:]
                break
        else:
            return
    raise LibraryError(f"{remedy} (apt-get: {problem})")


def _unpack(scratch: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for package in scratch.glob("*.deb"):
        tree = scratch / "trees" / package.stem
        tree.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "-x", str(package), str(tree)], check=True)
        for file in tree.rglob("*.so.*"):
            # Links as files: one name each is all that the loader asks for.
            shutil.copy2(file.resolve(), folder / file.name)
