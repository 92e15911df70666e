"""What all benchmarks share: figures, timing, fresh processes."""
