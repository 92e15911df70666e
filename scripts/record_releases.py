"""Record what the patches come to in each vLLM release that one of them is known for, from the releases' sources.

Writes the data file that `kvplug-hooks export` uses for releases that aren't installed, and the table in
docs/patches.md. Sources are downloaded where they aren't there yet (`matrixlib.sources`). Releases that can't be had
keep what is recorded.

    python scripts/record_releases.py [RELEASE ...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import patch_table
from matrixlib.sources import SourcesError, fetch
from packaging.version import Version

from kvplug_hooks import releases
from kvplug_hooks.errors import PatchError
from kvplug_hooks.export import record_of
from kvplug_hooks.patches import all_patches

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "hooks" / "src" / "kvplug_hooks" / "data" / releases.FILE_NAME
PAGE = ROOT / "docs" / "patches.md"


def main() -> int:
    """Record the releases named on the command line, or all that a patch is known for."""
    known = sorted({release for patch in all_patches() for release in patch.known_releases}, key=Version)
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("release", nargs="*", help="default: all")
    arguments = parser.parse_args()
    unknown = set(arguments.release) - set(known)
    if unknown:
        parser.error(f"no patch is known for {', '.join(sorted(unknown))}: add it to the declarations first")

    record = releases.recorded() if DATA.exists() else {}
    failed = []
    for release in arguments.release or known:
        try:
            record[release] = record_of(fetch(release), all_patches())
        except (SourcesError, PatchError) as error:
            failed.append(release)
            print(f"{release}: {error}", file=sys.stderr)
            continue
        print(f"{release}: {', '.join(f'{patch} {entry.state}' for patch, entry in record[release].items())}")
    record = {release: record[release] for release in sorted(record, key=Version)}
    DATA.write_text(releases.dump(record), "utf-8")
    PAGE.write_text(patch_table.updated(PAGE.read_text("utf-8"), record), "utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
