"""KV-cache connector for vLLM that decides on the worker: it loads what is there and shortens the step by that much."""

__version__ = "0.1.0"
