"""Parts of the demo; `scripts/demo.py` runs it."""
