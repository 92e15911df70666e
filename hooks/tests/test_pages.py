"""The patch `hybrid_page_size`, on the functions and spec classes of the releases themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.releases import cache, source_tree

pytestmark = [pytest.mark.engine, pytest.mark.install]

CHILD = Path(__file__).with_name("pages") / "child.py"
#: Each body that the function had since the models exist, the runners' and backends' steps in between, and two
#: releases that don't need the patch.
PATCHED = ("0.19.1", "0.20.2", "0.21.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.28.0")
RELEASES = (*PATCHED, "0.29.0", "0.33.0")
UPSTREAM = "0.29.0"

STATE, ALIGNED = 131 * 8192, 132 * 8192
ALWAYS = {"equal pages", "window divides"}
MAMBA = {"Mamba smaller", "Mamba smaller, divides", "Mamba and attention smaller"}
BLOCKS_FIRST = {f"{kind} smaller, {name}" for kind, name in (("attention", "Triton"), ("attention", "FlashInfer"))} | {
    "window smaller, Triton"
}
#: What the patch makes possible, beyond what the release's own function does.
GAIN = {
    "0.19.1": MAMBA,
    **{release: MAMBA | BLOCKS_FIRST | {"TurboQuant smaller"} for release in ("0.20.2", "0.21.0", "0.22.1")},
    "0.23.0": MAMBA | BLOCKS_FIRST | {"TurboQuant smaller", "attention smaller, FlashAttention"},
    **{release: MAMBA | {"TurboQuant smaller"} for release in ("0.24.0", "0.25.1")},
    **{release: {"TurboQuant smaller"} for release in ("0.26.0", "0.28.0")},
}


@pytest.fixture(scope="module")
def outcomes():
    """What the cases come to, by release."""
    for release in RELEASES:
        source_tree(release)
    done = subprocess.run(
        [sys.executable, str(CHILD), str(cache()), *RELEASES],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return {found["release"]: found for found in map(json.loads, done.stdout.splitlines())}


def fine(cases):
    return {name for name, outcome in cases.items() if "layers" in outcome}


@pytest.mark.parametrize("release", PATCHED)
def test_what_the_patch_makes_possible(outcomes, release):
    """Specs that the release's function fails for can be had, if the release can read them; the others still fail."""
    found = outcomes[release]
    assert fine(found["patched"]) - fine(found["plain"]) == GAIN[release]
    assert fine(found["plain"]) <= fine(found["patched"])
    assert fine(found["plain"]) >= ALWAYS
    for name in found["plain"].keys() - fine(found["patched"]):
        assert found["patched"][name]["error"] == found["plain"][name]["error"], name


@pytest.mark.parametrize("release", PATCHED)
def test_the_result_is_upstream_s(outcomes, release):
    """What is padded has the block and page sizes that vLLM 0.29 gives it: the largest page, and no more."""
    for name in fine(outcomes[release]["patched"]):
        layers = outcomes[release]["patched"][name]["layers"]
        assert layers == outcomes[UPSTREAM]["plain"][name]["layers"], name
        if name not in ALWAYS:
            largest = ALIGNED if name.startswith("Mamba") else STATE
            assert {page for _, page, _ in layers.values()} == {largest}, name


@pytest.mark.parametrize("release", PATCHED)
def test_where_the_function_copes_it_is_left_to_it(outcomes, release):
    """The same objects come back, and nothing is logged: also for models that the patch doesn't concern."""
    found = outcomes[release]
    assert found["patched"]["equal pages"]["same"] is True
    for name in fine(found["plain"]) | {"Mamba smaller, another model"}:
        assert found["patched"][name] == found["plain"][name], name
        assert found["patched"][name]["log"] == []


@pytest.mark.parametrize("release", PATCHED)
def test_the_log_says_from_what_to_what(outcomes, release):
    """One line per kind of layer and size; where a page can't be padded, a warning says why and what can be done."""
    found = outcomes[release]["patched"]
    kind = {"M": ("MambaSpec", STATE, ALIGNED), "T": ("TQFullAttentionSpec", 32768, STATE)}
    if release == "0.28.0":
        kind["T"] = ("FullAttentionSpec", 32768, STATE)
    for name in {"Mamba smaller", "TurboQuant smaller"} & GAIN[release]:
        layer, smaller, largest = kind[name[0]]
        assert found[name]["log"] == [
            f"INFO Hybrid KV cache: padding the pages of 1 layers ({layer}) from {smaller} to {largest} bytes."
        ]
    for name, outcome in found.items():
        if "error" in outcome and name != "Mamba smaller, another model":
            (line,) = outcome["log"]
            assert line.startswith("WARNING The KV-cache page of layer a, of ") or "layer b" in line
            assert "; use " in line, name


def test_a_backend_that_would_mix_blocks_up_is_refused(outcomes):
    """Up to 0.22 FlashAttention has all keys before all values: strided blocks would silently overlap."""
    for release in ("0.20.2", "0.21.0", "0.22.1"):
        (line,) = outcomes[release]["patched"]["attention smaller, FlashAttention"]["log"]
        assert "the attention backend FLASH_ATTN isn't known to read padded pages in this release" in line
        assert "--attention-backend TRITON_ATTN" in line
    (line,) = outcomes["0.21.0"]["patched"]["attention smaller, FlashInfer splits"]["log"]
    assert "the attention backend FLASHINFER splits blocks of 48 tokens" in line


def test_status_says_whether_the_model_is_concerned(outcomes):
    """It is known once the function has run, and where upstream has its own fix there is nothing to know."""
    for release in PATCHED:
        state, _, module = outcomes[release]["notes"]["Mamba smaller"]
        assert (state, module) == ("applied", "vllm.v1.core.kv_cache_utils")
    state, reason, _ = outcomes["0.23.0"]["notes"]["Mamba smaller, another model"]
    assert (state, "LlamaForCausalLM" in reason) == ("not concerned", True)
    for release, module in (("0.29.0", "kv_cache_utils"), ("0.33.0", "kv_cache_planning")):
        state, reason, name = outcomes[release]["notes"]["Mamba smaller"]
        assert (state, name) == ("not needed", f"vllm.v1.core.{module}")
        assert "unify_kv_cache_spec_page_size pads pages that don't divide itself" in reason
        assert outcomes[release]["patched"] == outcomes[release]["plain"]
