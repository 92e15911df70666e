"""`python -m kvplug.cli` is `kvplug`."""

from kvplug.cli import main

main(prog_name="kvplug")
