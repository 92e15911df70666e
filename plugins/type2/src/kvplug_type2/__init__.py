"""KV-cache connector for vLLM that decides on the scheduler: hits are vLLM's own, and transfers run beside compute."""

__version__ = "0.1.0"
