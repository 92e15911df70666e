"""What is loaded is what would have been computed: run with MODEL set to a small model's name or folder."""

import os
import random


def test_reuse(monkeypatch):
    """Loaded blocks give the same tokens as computed ones, and exchanged blocks don't."""
    # The worker in this process, so that the test can look inside; float32, so that equal is equal.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvplug.dispatch import current_dispatcher

    config = {"kv_connector": "HostCacheConnector", "kv_role": "kv_both"}
    llm = LLM(os.environ["MODEL"], dtype="float32", enforce_eager=True, max_model_len=1024, kv_transfer_config=config)
    prompts = [{"prompt_token_ids": [random.Random(n).randrange(100) for _ in range(700 + n)]} for n in range(3)]

    def generate():
        assert llm.reset_prefix_cache()  # vLLM's own, not the connector's
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        return [output.outputs[0].token_ids for output in outputs], current_dispatcher().stats.get("tokens_skipped")

    cold, skipped = generate()
    assert skipped == 0
    warm, skipped = generate()
    assert skipped > 1500
    assert warm == cold

    stored = get_kv_transfer_group()._stored
    for key, block in zip(list(stored), list(stored.values())[::-1], strict=True):
        stored[key] = block
    wrong, _ = generate()
    assert wrong != cold
