"""docs/write-a-connector.md, followed to the letter: its blocks are built into a wheel, and the wheel serves.

Of kvplug the connector uses the hook marker only, no base class. On both model runners its outputs equal those of an
engine without a connector.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import random
import re
import runpy
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvplug
from kvplug import compat
from kvplug.hookspecs import HookSpecs
from kvplug.steps import StepPlan
from support import driver, engines
from support import llm as engine
from support.driver import Corrupt, Generate, OneByOne, ResetAll, ResetLocal, drive
from support.llm import compare

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "write-a-connector.md"
EXAMPLE = ROOT / "examples" / "hostcache"

BLOCK = 32
#: Where a hit changes how a prompt is split into steps, sums run in another order.
CLOSE = 1e-5

CONNECTOR = {"kv_connector": "HostCacheConnector", "kv_role": "kv_both"}


# -- The page --------------------------------------------------------------------------------------------------------


def page_files():
    """Return the files that the page's blocks make: a block says in its fence which file it is, or goes on with."""
    files = {}
    for path, text in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL):
        if path not in files:
            files[path] = text
        else:  # methods go on a class, all else stands apart
            files[path] += ("\n" if text.startswith(" ") else "\n\n") + text
    return files


def test_the_page_is_the_example():
    """The page's blocks, put together, are the files of the example, and the other way round."""
    example = {}
    for path in EXAMPLE.rglob("*"):
        name = path.relative_to(EXAMPLE)
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in name.parts):
            example[str(name)] = path.read_text()
    assert page_files() == example


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder with the distribution that the page builds, installed from a wheel and nothing else in it."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    for path, text in page_files().items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)
    # With hatchling at hand the build needs no index.
    offline = ["--no-build-isolation", "--no-index"] if importlib.util.find_spec("hatchling") else []
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", *offline, "--wheel-dir", wheels, source], check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, wheel], check=True)
    return str(target)


@pytest.mark.install
def test_the_command_shows_it(site):
    """`kvplug list` and `kvplug doctor` say of the installed distribution what the page says they do."""
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith("HostCacheConnector  ")]
    listed = {
        entry["name"]: entry for entry in json.loads(run_kvplug(site, "list", "--no-load", "--json"))["connectors"]
    }
    entry = listed["HostCacheConnector"]
    assert row.split()[:3] == [entry["name"], entry["distribution"], entry["version"]]
    assert entry["location"] == site
    findings = json.loads(run_kvplug(site, "doctor", "--json", "--kv-transfer-config", json.dumps(CONNECTOR)))[
        "findings"
    ]
    said = {(finding["topic"], finding["status"], finding["text"]) for finding in findings}
    shown = re.findall(r"^(Hook|Connectors|Config) +(ok) +(.+)$", PAGE.read_text(), re.MULTILINE)
    assert len(shown) == 3
    assert said.issuperset(shown)


def run_kvplug(site, *arguments):
    """Return what the command prints where the page's distribution is installed."""
    command = [sys.executable, "-m", "kvplug.cli", *arguments]
    environment = engines.base_environment("v1") | {"PYTHONPATH": site}
    return subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout


def run_page_test(*, site, model):
    """Run the page's own test as its reader would, less pytest."""
    _use(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL", model)
        runpy.run_path(str(EXAMPLE / "tests" / "test_reuse.py"))["test_reuse"](patch)


@pytest.mark.engine
def test_the_pages_test_passes(models, site):
    """The test that the page shows passes."""
    engines.run(run_page_test, site=site, model=models("llama"), timeout=600)


# -- The reference ---------------------------------------------------------------------------------------------------


def test_the_reference_is_complete():
    """docs/hooks.md has each hook, each field of what a hook sees, each reason to leave one alone, and no others."""
    page = (ROOT / "docs" / "hooks.md").read_text()
    hooks = {name for name, method in vars(HookSpecs).items() if hasattr(method, "kvplug_spec")}
    assert hooks
    assert set(re.findall(r"^## `(\w+)\(", page, re.MULTILINE)) == hooks
    step = {name for name in vars(kvplug.Step) if not name.startswith("_")}
    request = {name for name in vars(kvplug.StepRequest) if not name.startswith("_")}
    assert table_of(page, "## `Step`") == step
    assert table_of(page, "## `StepRequest`") == request
    reasons = reasons_in(compat.static_vetoes) | reasons_in(StepPlan._left_alone)
    assert table_of(page, "### Requests that are left alone") == reasons
    assert f"`kvplug.HOOK_API` is {kvplug.HOOK_API}." in page


def table_of(page, heading):
    """Return the names in the first column of a section's table."""
    section = re.split(r"^##+ ", page.split(f"{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def reasons_in(function):
    """Return the string constants that a function returns or gives a name to."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    values = [node.value for node in ast.walk(tree) if isinstance(node, (ast.Return, ast.Assign))]
    return {value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)}


# -- On real engines -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """What the connector did over a script."""

    rounds: list[driver.Round]
    preemptions: int
    leftovers: dict[str, int]


def serve(*, site, model, script, connector=CONNECTOR, **engine_args):
    """Take an engine with the page's connector through a script of `support.driver`."""
    _use(site)
    llm = engine.make_llm(model, connector=connector, **engine_args)
    from kvplug.dispatch import current_dispatcher

    worker, scheduler = engine.connector(llm), engine.scheduler(llm).connector
    preemptions = driver.count_preemptions(llm)
    saved = _count_saves_at_preemptions(worker)
    rounds = []
    for operation in script:
        before = _counts(saved, current_dispatcher())
        if isinstance(operation, Corrupt):
            _exchange(worker._stored)
        elif (outputs := driver.perform(llm, operation)) is not None:
            rounds.append(driver.Round(outputs, _counts(saved, current_dispatcher()) - before))
    engine.generate(llm, [[1]], 1)  # one more step tells everyone of the last request's end
    leftovers = {
        "requests": len(scheduler._requests),
        "running": len(worker._full_blocks),
        "saves": len(worker._to_save),
    }
    return Served(rounds, len(preemptions), leftovers)


def _use(site):
    sys.path.insert(0, site)
    # For processes that this one spawns.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))


def _counts(saved, dispatcher):
    counts = Counter(dict(saved))
    if dispatcher is not None:
        counts.update({name: int(count) for name, count in dispatcher.stats.totals().items()})
    return counts


def _count_saves_at_preemptions(worker):
    """Count the blocks that `before_blocks_reused` stores."""
    saved = Counter()
    inner = worker._save

    def save(blocks):
        before = len(worker._stored)
        inner(blocks)
        if sys._getframe(1).f_code.co_name == "before_blocks_reused":
            saved["blocks_saved_at_preemption"] += len(worker._stored) - before

    worker._save = save
    return saved


def _exchange(stored):
    """Exchange the contents of all stored blocks: each key finds another block's KV."""
    contents = list(stored.values())
    assert len(contents) > 1, "nothing to exchange"
    for key, content in zip(list(stored), contents[1:] + contents[:1], strict=True):
        stored[key] = content


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def assert_differ(one, other):
    """The negative control: the comparison that passed must fail here."""
    with pytest.raises(AssertionError, match="request"):
        compare(one, other, atol=CLOSE)


def assert_equal(one, other):
    compare(one, other, atol=CLOSE)


@pytest.mark.engine
def test_reuse(runner, models, site):
    """Prompts of lengths around block boundaries, each alone: warm outputs equal those of a plain engine.

    With the stored blocks exchanged they don't: what was loaded is what was computed with.
    """
    prompts = [prompt(n, seed=n) for n in (320, 319, 33, 32, 31, 1)]
    ask = OneByOne(prompts, 4)
    plain = engines.run(drive, model=models("llama"), script=[ask])
    script = [ask, ResetLocal(), ask, ResetAll(), ask, Corrupt(), ResetLocal(), ask]
    ours = engines.run(serve, runner=runner, site=site, model=models("llama"), script=script)
    cold, warm, forgotten, corrupted = ours.rounds
    for round_ in (cold, warm, forgotten):
        assert_equal(round_.outputs, plain.rounds[0].outputs)
    assert cold.counts["tokens_skipped"] == forgotten.counts["tokens_skipped"] == 0
    assert warm.counts["tokens_skipped"] == 319 + 288 + 32 + 31
    assert_differ(corrupted.outputs, plain.rounds[0].outputs)
    assert not any(ours.leftovers.values()), ours.leftovers


@pytest.mark.engine
def test_many_requests_in_chunks(runner, models, site):
    """Requests with shared prefixes at once, prefilled in chunks that end inside blocks, over a store of few blocks."""
    stems = [prompt(n, seed=n) for n in (64, 150)]
    prompts = [stems[i % 2] + prompt(20 + 31 * i, seed=i) for i in range(6)]
    args = {"model": models("llama"), "max_num_batched_tokens": 100, "max_num_seqs": 4}
    there, back = Generate(prompts, 4), Generate(prompts[::-1], 4)
    plain = engines.run(drive, script=[there], **args).rounds[0].outputs
    few = CONNECTOR | {"kv_connector_extra_config": {"max_stored_blocks": 20}}
    script = [there, ResetLocal(), back, Corrupt(), ResetLocal(), there]
    ours = engines.run(serve, runner=runner, site=site, script=script, connector=few, **args)
    assert_equal(ours.rounds[0].outputs, plain)
    assert_equal(ours.rounds[1].outputs[::-1], plain)
    assert ours.rounds[1].counts["tokens_skipped"] > 0
    assert_differ(ours.rounds[2].outputs, plain)
    assert not any(ours.leftovers.values()), ours.leftovers


@pytest.mark.engine
def test_preempted_requests_go_on_where_they_were(runner, models, site):
    """What a preempted request had computed, its answer included, is loaded when it is resumed."""
    # Three full blocks of prompt each, and three more for the answer, in a cache of 15 blocks.
    prompts = [prompt(100 + i, seed=20 + i) for i in range(3)]
    plain = engines.run(drive, model=models("llama"), script=[OneByOne(prompts, 70)])
    args = {"num_gpu_blocks": 16, "max_model_len": 256, "enable_prefix_caching": False}
    script = [Generate(prompts, 70), Generate(prompts, 70), Corrupt(), Generate(prompts, 8)]
    ours = engines.run(serve, runner=runner, site=site, model=models("llama"), script=script, **args)
    cold, warm, corrupted = ours.rounds
    assert ours.preemptions >= 2
    # The prompts' blocks were saved in time; a preemption adds those that decoding has filled.
    assert cold.counts["blocks_saved_at_preemption"] >= 2
    assert cold.counts["tokens_skipped"] >= 5 * BLOCK
    for round_ in (cold, warm):
        assert_equal(round_.outputs, plain.rounds[0].outputs)
    assert_differ(corrupted.outputs, [output.first(8) for output in plain.rounds[0].outputs])
    assert not any(ours.leftovers.values()), ours.leftovers


@pytest.mark.engine
def test_requests_with_more_than_tokens_are_left_alone(models, site):
    """Salted requests and those with an adapter are neither stored nor loaded."""
    text = prompt(100, seed=30)
    kinds = [{"salt": "x"}, {"lora": (1, models("lora1"))}]
    args = {"model": models("llama"), "enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": False}
    script = [Generate([text], 4, **kind) for kind in [*kinds, {}, {}, *kinds]]
    plain = engines.run(drive, script=script[:3], **args)
    ours = engines.run(serve, site=site, script=script, **args)
    assert [round_.counts["tokens_skipped"] for round_ in ours.rounds] == [0, 0, 0, 96, 0, 0]
    expected = [plain.rounds[i] for i in (0, 1, 2, 2, 0, 1)]
    for one, other in zip(ours.rounds, expected, strict=True):
        assert_equal(one.outputs, other.outputs)


def serve_two_ranks(*, site, model, prompts):
    """Serve twice on two ranks; the second rank loses a block in between."""
    import cloudpickle

    _use(site)
    # Workers can't import this file: what they are asked to run travels as code.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    llm = engine.make_llm(model, connector=CONNECTOR, tensor_parallel_size=2)
    outputs = []
    for lose in (False, True):
        outputs.append(engine.generate(llm, prompts, 4))
        engine.reset_local_cache(llm)
        if lose:
            llm.collective_rpc(_lose_the_third_block)
        outputs.append(engine.generate(llm, prompts, 4))
        engine.reset_local_cache(llm)
    return outputs, llm.collective_rpc(_skipped)


def _lose_the_third_block(worker):
    from vllm.distributed.kv_transfer import kv_transfer_state

    stored = kv_transfer_state.get_kv_transfer_group()._stored
    if worker.rank == 1:
        del stored[list(stored)[2]]


def _skipped(worker):
    from kvplug.dispatch import current_dispatcher

    return current_dispatcher().stats.totals()["tokens_skipped"]


@pytest.mark.engine
def test_two_ranks_agree(models, site):
    """Tensor-parallel ranks that have stored different blocks skip the same tokens, the fewest of any rank."""
    prompts = [prompt(200, seed=40)]
    outputs, skipped = engines.run(serve_two_ranks, site=site, model=models("llama"), prompts=prompts, timeout=600)
    for warm in outputs[1:]:
        compare(warm, outputs[0], atol=1e-4)
    # Six full blocks, twice; then the two before the one that a rank has lost.
    assert skipped == [192 + 192 + 64] * 2
