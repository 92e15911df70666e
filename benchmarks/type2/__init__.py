"""Measures what type2 costs and saves, side by side with what it is compared to: `python -m benchmarks.type2`."""
