"""type1 with L2 on real engines: warm after a restart, right when a tier hangs or damages what it keeps."""

from __future__ import annotations

import random

import pytest

from support import engines
from support.driver import Generate, OneByOne, ResetAll, ResetLocal, drive, type1
from support.faulty_tier import FaultyTier, flip_a_bit_of_each_value, use
from support.llm import compare

pytestmark = pytest.mark.engine

BLOCK = 32
CLOSE = 1e-5
LENGTHS = [330, 200, 97]


def prompt(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


PROMPTS = [prompt(length, seed=length) for length in LENGTHS]
WHOLE = sum(length // BLOCK * BLOCK for length in LENGTHS)
ASK = OneByOne(PROMPTS, 4)


def run(script, runner="v1", function=drive, **kwargs):
    return engines.run(function, runner=runner, script=script, timeout=300, **kwargs)


@pytest.fixture(scope="module")
def plain(models):
    return run([ASK], model=models("llama")).rounds[0].outputs


def test_a_restart_is_warm_with_disk(runner, models, plain, tmp_path):
    """A new engine on the same directory loads what the first one saved, and answers as one without a connector."""
    connector = type1(l2="disk", disk_path=str(tmp_path / "l2"), disk_size="256MiB", l2_load_timeout=30, l2_timeout=60)
    cold = run([ASK], runner, model=models("llama"), connector=connector).rounds[0]
    warm = run([ASK], runner, model=models("llama"), connector=connector).rounds[0]
    compare(cold.outputs, plain, atol=CLOSE)
    compare(warm.outputs, plain, atol=CLOSE)
    assert cold.counts["tokens_loaded"] == 0
    assert warm.counts["tokens_loaded"] == WHOLE
    assert warm.counts["l2_blocks_read:disk"] == WHOLE // BLOCK
    assert warm.counts["l2_damaged:disk"] == 0


def test_d9_a_reset_leaves_l2_behind(models, plain, tmp_path):
    """D9: after a reset nothing that was stored before is loaded, from L2 neither, and what comes then is reused."""
    connector = type1(l2="disk", disk_path=str(tmp_path / "l2"), disk_size="256MiB", l2_load_timeout=30, l2_timeout=60)
    script = [ASK, ResetAll(), ASK, ResetLocal(), ASK]
    first, reset, again = run(script, model=models("llama"), connector=connector).rounds
    for each in (first, reset, again):
        compare(each.outputs, plain, atol=CLOSE)
    assert reset.counts["tokens_loaded"] == 0
    assert again.counts["tokens_loaded"] == WHOLE


def test_i14_what_fits_locally_costs_nothing(models, plain, tmp_path):
    """I14: L2 is asked once for each new block, not at all for what vLLM has itself, and nothing is copied for that."""
    connector = type1(l2="disk", disk_path=str(tmp_path / "l2"), disk_size="256MiB", l2_load_timeout=30, l2_timeout=60)
    longer = [old + prompt(2 * BLOCK, seed=-len(old)) for old in PROMPTS]
    script = [ASK, ASK, OneByOne(longer, 4)]
    cold, local, grown = run(script, model=models("llama"), connector=connector).rounds
    compare(cold.outputs, plain, atol=CLOSE)
    compare(local.outputs, plain, atol=CLOSE)
    looked_up = "blocks_looked_up"
    assert 0 < cold.counts[looked_up] <= WHOLE // BLOCK
    new = sum(len(prompt) // BLOCK for prompt in longer) - WHOLE // BLOCK
    assert 0 < grown.counts[looked_up] <= new
    for each in (cold, local, grown):
        assert each.counts["l2_lookups:disk"] <= each.counts[looked_up]
        assert each.counts["l2_blocks_read:disk"] == each.counts["blocks_loaded"] == 0
    assert local.counts[looked_up] == local.counts["blocks_saved"] == local.counts["l2_blocks_written:disk"] == 0
    assert grown.counts["blocks_saved"] == new


def _with_faulty_tier(*, script, **kwargs):
    """Job: an engine over a tier that does what the script says."""
    use()
    return drive(script=[_Do(step) if isinstance(step, str) else step for step in script], **kwargs)


class _Do:
    """A step that isn't the engine's, done when the script comes to it."""

    def __init__(self, what):
        self.what = what

    def __call__(self, llm):
        from support import llm as engine

        store = engine.connector(llm).worker.store
        if self.what == "hang":
            FaultyTier.going.clear()
        elif self.what == "flip":
            store.clients[0]._calls.drain(float("inf"))
            flip_a_bit_of_each_value()
        elif self.what == "don't check":
            store.clients[0].blocks.accept = lambda *_args: None
        if self.what in ("flip", "forget"):
            store.clients[0]._calls.drain(float("inf"))
            store.memory.allocator.clear()


def test_a_hung_tier_costs_hits_only(models, plain):
    """A tier that stops answering: requests are computed as without a connector, and L1 goes on."""
    connector = type1(l2="faulty", l2_load_timeout=0.1, l2_timeout=0.2)
    script = [ASK, ResetLocal(), "forget", "hang", ASK, ResetLocal(), ASK]
    cold, hung, after = run(script, function=_with_faulty_tier, model=models("llama"), connector=connector).rounds
    for each in (cold, hung, after):
        compare(each.outputs, plain, atol=CLOSE)
    assert hung.counts["tokens_loaded"] == 0
    assert hung.counts["l2_timeouts:faulty"] > 0
    assert hung.counts["load_errors"] == 0
    assert after.counts["tokens_loaded"] == WHOLE


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_a_flipped_bit_is_a_miss(models, plain, checked):
    """A bit flipped in each stored value: the check makes them misses; the control, without it, answers differently."""
    connector = type1(l2="faulty", l2_load_timeout=30, l2_timeout=60)
    script = [ASK, ResetLocal(), "flip", *([] if checked else ["don't check"]), ASK]
    _, found = run(script, function=_with_faulty_tier, model=models("llama"), connector=connector).rounds
    if checked:
        compare(found.outputs, plain, atol=CLOSE)
        assert found.counts["l2_damaged:faulty"] == WHOLE // BLOCK
        assert found.counts["tokens_loaded"] == 0
    else:
        assert found.counts["tokens_loaded"] == WHOLE
        with pytest.raises(AssertionError, match="request"):
            compare(found.outputs, plain, atol=CLOSE)


def _start(**kwargs):
    """Job: start an engine; return what it says if it doesn't start."""
    use()
    FaultyTier.open = _refuse
    try:
        return drive(script=[Generate([PROMPTS[2]], 4)], **kwargs).rounds[0]
    except Exception as error:  # noqa: BLE001 - what it says is the result
        causes = []
        while error is not None:
            causes.append(str(error))
            error = error.__cause__ or error.__context__
        return "\n".join(causes)


def _refuse(self, **_arguments):
    from kvplug.store.l2.tier import TierError

    raise TierError(f"{self.place} refuses connections")


def test_i16_a_tier_that_is_down_at_start(models, plain):
    """I16: by setting, the engine doesn't start, and names host and port; or starts without, and answers as ever."""
    kwargs = {"model": models("llama"), "timeout": 300}
    required = engines.run(_start, connector=type1(l2="faulty", l2_required=True), **kwargs)
    assert "10.0.0.1:6379 refuses connections" in required
    assert "set l2_required to false" in required
    degraded = engines.run(_start, connector=type1(l2="faulty"), **kwargs)
    compare(degraded.outputs, plain[2:], atol=CLOSE)
    assert degraded.counts["blocks_saved"] > 0
