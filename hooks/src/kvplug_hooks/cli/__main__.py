"""`python -m kvplug_hooks.cli` is `kvplug-hooks`."""

from kvplug_hooks.cli import main

main(prog_name="kvplug-hooks")
