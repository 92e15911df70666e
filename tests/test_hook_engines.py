"""The hook in real engines: where it is called, what tracebacks show, and that it does nothing without a connector."""

from __future__ import annotations

import random
import sys

import pytest

from support import engines
from support import llm as engine
from support.driver import TYPE1, type1

pytestmark = pytest.mark.engine


def prompt(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def without_connector(*, model):
    """Serve without a connector, and see what was imported and what the patched line does."""
    import timeit

    from kvplug import compat, dispatch

    llm = engine.make_llm(model)
    outputs = engine.generate(llm, [prompt(40)], 2)
    runner = engine.model_runner(llm)
    marker = object()
    same = dispatch.before_update_states(runner, marker) is marker
    seconds = min(timeit.repeat(lambda: dispatch.before_update_states(runner, marker), number=1000, repeat=5)) / 1000
    heavy = [
        name
        for name in sys.modules
        if name.startswith(("kvplug_type1", "kvplug.store", "kvplug.paged", "kvplug.keys", "kvplug.namespace"))
        or name in {"valkey", "mooncake", "lmcache", "nixl"}  # not redis: torch imports it where it is installed
    ]
    return outputs, compat.hook_delivery(type(runner)), same, heavy, dispatch.current_dispatcher(), seconds


def test_g11_nothing_happens_without_a_connector(runner, models):
    """G11: installed isn't active. The hook gives its argument back, and no connector or store module is imported."""
    _, delivery, same, heavy, dispatcher, seconds = engines.run(without_connector, runner=runner, model=models("llama"))
    assert delivery == "import"
    assert same
    assert heavy == []
    assert dispatcher is None
    # Not a benchmark (see benchmarks/): a bound that only an accident would break.
    assert seconds < 1e-3


def in_a_traceback(*, model):
    """Let the runner fail right behind the hook, and return what its traceback says, with the file on disk."""
    import inspect
    import traceback
    from pathlib import Path

    llm = engine.make_llm(model, connector=TYPE1)
    runner = engine.model_runner(llm)
    kind = engine.runner_kind(llm)
    failing = "_update_states" if kind == "v1" else "update_requests"

    def fail(*_args):
        raise ArithmeticError("here")

    setattr(runner, failing, fail)
    try:
        engine.generate(llm, [prompt(40)], 1)
    except ArithmeticError as error:
        frames = traceback.extract_tb(error.__traceback__)
    frame = next(
        f for f in frames if f.name == "execute_model" and f.filename.endswith("model_runner.py") and failing in f.line
    )
    on_disk = Path(frame.filename).read_text().splitlines()[frame.lineno - 1].strip()
    module = "vllm.v1.worker.gpu_model_runner" if kind == "v1" else "vllm.v1.worker.gpu.model_runner"
    source = inspect.getsource(inspect.unwrap(sys.modules[module].GPUModelRunner.execute_model))
    return frame.line, on_disk, source, Path(frame.filename).read_text()


def test_tracebacks_match_the_file_on_disk(runner, models):
    """Line numbers stay those of the file, `inspect.getsource` shows the hook, and the file doesn't have it."""
    line, on_disk, source, file = engines.run(in_a_traceback, runner=runner, model=models("llama"))
    assert line == on_disk
    assert "scheduler_output = before_update_states(self, scheduler_output)" in source
    assert "before_update_states" not in file


def order_of_calls(*, model, prompts):
    """Record what happens to the connector and the runner in each step, in order."""
    llm = engine.make_llm(model, connector=type1())
    connector, runner = engine.connector(llm), engine.model_runner(llm)
    calls = []

    def record(owner, name, label):
        inner = getattr(owner, name)

        def call(*args, **kwargs):
            calls.append(label)
            return inner(*args, **kwargs)

        setattr(owner, name, call)

    record(connector.worker, "load", "load")
    record(connector, "bind_connector_metadata", "bind")
    record(connector.worker, "save", "save")
    record(connector, "clear_connector_metadata", "clear")
    record(runner, "_update_states" if engine.runner_kind(llm) == "v1" else "add_requests", "state update")
    record(runner.model, "forward", "forward")
    engine.generate(llm, prompts, 2)
    return calls


def test_f6_the_order_of_calls(runner, models):
    """F6: on both runners the hook comes before the state update, and saves after the forward, once per step each."""
    calls = engines.run(order_of_calls, runner=runner, model=models("llama"), prompts=[prompt(70)])
    step = ["load", "state update", "bind", "forward", "save", "clear"]
    assert calls[:6] == step
    assert calls[6:12] == step
    # The step that tells of the finished request may still come, without a forward.
    assert calls[12:] in ([], ["load", "state update", "bind", "save", "clear"])


def counts_of_tokens(*, model, prompts, **engine_args):
    """After each step, compare the scheduler's counts of computed tokens to the runner's, request by request."""
    llm = engine.make_llm(model, connector=type1(), **engine_args)
    scheduler, runner = engine.scheduler(llm), engine.model_runner(llm)
    kind = engine.runner_kind(llm)
    seen = []

    def of_runner(request_id, scheduled):
        if kind == "v1":
            return runner.requests[request_id].num_computed_tokens + scheduled
        states = runner.req_states
        return int(states.num_computed_tokens.gpu[states.req_id_to_index[request_id]])

    inner = scheduler.update_from_output

    def update(scheduler_output, output):
        last = shortened[-1]
        for request_id, scheduled in last.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            seen.append((request.num_computed_tokens, of_runner(request_id, scheduled)))
        return inner(scheduler_output, output)

    shortened = []
    from kvplug import dispatch

    def hook(self, scheduler_output, inner=dispatch.before_update_states):
        shortened.append(inner(self, scheduler_output))
        return shortened[-1]

    sys.modules[f"vllm.v1.worker.gpu{'_' if kind == 'v1' else '.'}model_runner"].before_update_states = hook
    scheduler.update_from_output = update
    for _ in range(2):
        engine.reset_local_cache(llm)
        engine.generate(llm, prompts, 3)
    fewer = sum(1 for s in shortened if s.total_num_scheduled_tokens)
    return seen, fewer, dispatch.current_dispatcher().stats.get("tokens_skipped")


def test_b12_scheduler_and_runner_agree_after_every_step(runner, models):
    """B12: whatever was skipped, both sides count the same computed tokens at the end of each step, chunks included."""
    seen, steps, skipped = engines.run(
        counts_of_tokens,
        runner=runner,
        model=models("llama"),
        prompts=[prompt(250, 1), prompt(90, 2)],
        max_num_batched_tokens=100,
    )
    assert skipped > 250
    assert steps > 5
    assert len(seen) > 10
    assert [s for s in seen if s[0] != s[1]] == []
