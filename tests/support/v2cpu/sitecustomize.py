"""Python imports this at start-up where the folder is on ``PYTHONPATH``: see ``shim.py`` beside it."""

import os

if os.environ.get("TESTS_V2CPU") == "1":
    import shim  # type: ignore[import-not-found]  # top-level only where this folder is on the path

    shim.install()
