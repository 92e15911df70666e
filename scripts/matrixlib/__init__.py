"""What vLLM's releases contain, and whether the hook runs in them: sources, contract and harness."""
