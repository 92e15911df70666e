"""Measures the tiers of the block store, side by side with what they are compared to: `python -m benchmarks.store`."""
