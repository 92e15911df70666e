"""Measures what kvplug adds to the start of a worker of vLLM's: `python -m benchmarks.start`."""
