"""Measures what split prefill and decode costs and gains, beside one engine: `python -m benchmarks.pd`."""
