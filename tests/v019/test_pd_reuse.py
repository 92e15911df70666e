"""pd_reuse on vLLM 0.19.1, an old release, on the first model runner. Run by ``make test-0.19``."""

from __future__ import annotations

import pytest

from support import engines
from support.driver import Corrupt, Generate, ResetLocal, decode, deliver, drive, pd_reuse, prefill
from support.llm import compare
from support.reuse import assert_differ, assert_nothing_left, prompt

pytestmark = pytest.mark.engine

#: See `test_type1`.
CLOSE = 5e-5


def test_handover(models, tmp_path):
    """Prompts around the ends of blocks: all but one token is loaded, and outputs equal a plain engine's."""
    texts = [prompt(length, length) for length in (2, 31, 32, 33, 64, 65, 200)]
    connector = pd_reuse(l2="disk", disk_path=str(tmp_path / "l2"), disk_size="256MiB")

    def run(script, **options):
        return engines.run(drive, timeout=300, model=models("llama"), script=script, **options)

    (plain,) = run([Generate(texts, 4)]).rounds
    (given,) = run([prefill(texts), deliver], connector=connector).rounds
    ask = decode(texts, given.params, 4)
    ours = run([ask, Corrupt(), ResetLocal(), ask], connector=connector)
    done, spoilt = ours.rounds
    compare(done.outputs, plain.outputs, atol=CLOSE)
    assert_differ(spoilt.outputs, plain.outputs, atol=CLOSE)
    assert done.counts["handovers"] == done.counts["handover_tokens_computed"] == len(texts)
    assert_nothing_left(ours)
