"""KV-cache connector for vLLM that splits prefill and decode over a shared store, with reuse on both sides."""

__version__ = "0.1.0"
