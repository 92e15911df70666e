"""Find out in which vLLM releases the hook works, and write it into the package.

Each release's sources are downloaded once and kept. They are compared with what kvplug relies on, and each patched
model runner is run up to its state update, with stand-ins for the rest (see `matrixlib`). The data file is what
`kvplug-hooks matrix` prints; a test compares it with what is found.

    python scripts/matrix.py [RELEASE ...]
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime, timezone
from pathlib import Path

from matrixlib import sources
from matrixlib.results import all_rows, known_releases

from kvplug_hooks import matrix

DATA = Path(__file__).resolve().parents[1] / "hooks" / "src" / "kvplug_hooks" / "data" / matrix.FILE_NAME


def main() -> int:
    """Check the releases named on the command line and print what is wrong; without any, check and record all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("release", nargs="*", help="default: all that the hook is declared for; only they are recorded")
    arguments = parser.parse_args()
    if unknown := set(arguments.release) - set(known_releases()):
        parser.error(f"the hook isn't declared for {', '.join(sorted(unknown))}: add it to the declarations first")
    releases = arguments.release or known_releases()
    try:
        sources.prefetch(releases)
        rows = all_rows(releases)
    except sources.SourcesError as error:
        print(error, file=sys.stderr)
        return 1
    for row in rows:
        print(f"{row.release} {row.runner}: {'supported' if row.supported else row.reason}")
    if not arguments.release:
        DATA.write_text(matrix.dump(datetime.now(tz=timezone.utc).date(), rows), "utf-8")
    return 0 if all(row.supported for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
