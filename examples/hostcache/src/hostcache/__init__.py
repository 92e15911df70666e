"""A KV-cache connector for vLLM that keeps full blocks in host memory."""
