"""Refusals at start, and what is known of runners, with stand-ins for vLLM's objects."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

import kvplug
from kvplug import compat
from kvplug.errors import UnsupportedError


class Hooked:
    @kvplug.hookimpl
    def before_update_states(self, step):
        return None


class Watching:
    @kvplug.hookimpl
    def before_blocks_reused(self, step):
        return None


SCHEDULER, WORKER = SimpleNamespace(name="SCHEDULER"), SimpleNamespace(name="WORKER")


def config(**parallel):
    sizes = {"pipeline_parallel_size": 1, **parallel}
    return SimpleNamespace(parallel_config=SimpleNamespace(**sizes), use_v2_model_runner=False)


def runner_class(kind, body, module=None, base=object):
    """Make a class that passes for one of vLLM's runners, with `execute_model` from source."""
    name = module or compat.RUNNER_MODULES[kind]
    namespace = {"Base": base, "__name__": name}
    source = f"class {compat.RUNNER_CLASS}(Base):\n    def execute_model(self, scheduler_output):\n        {body}\n"
    exec(source, namespace)
    return namespace[compat.RUNNER_CLASS]


CALLS = "return before_update_states(self, scheduler_output)"


@pytest.fixture
def v1_module(monkeypatch):
    module = ModuleType(compat.RUNNER_MODULES["v1"])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return module


@pytest.mark.parametrize("role", [SCHEDULER, WORKER])
@pytest.mark.parametrize(
    "parallel",
    [{"pipeline_parallel_size": 2}, {"decode_context_parallel_size": 2}, {"prefill_context_parallel_size": 4}],
)
def test_e9_pipeline_and_context_parallelism_are_refused_at_start(parallel, role):
    """A connector that decides on the worker names what ranks can't agree on, and what to use instead."""
    with pytest.raises(
        UnsupportedError, match=r"Hooked decides on the worker .* parallelism \(\d\): use tensor .*type2"
    ):
        compat.require_hook_support(config(**parallel), role, Hooked)


@pytest.mark.parametrize("role", [SCHEDULER, WORKER])
def test_a_hook_that_does_not_exist_is_refused_at_start(role):
    """A misspelt hook, or one that wants what it isn't given, is refused when the connector is created."""

    class Misspelt:
        @kvplug.hookimpl
        def before_update_state(self, step):
            return None

    class Greedy:
        @kvplug.hookimpl
        def before_update_states(self, step, runner):
            return None

    for cls, named in ((Misspelt, "before_update_state"), (Greedy, "runner")):
        with pytest.raises(UnsupportedError, match=rf"{cls.__name__} .*{named}.*the hooks are before_blocks_reused"):
            compat.require_hook_support(config(), role, cls)


@pytest.mark.parametrize(
    "asked",
    [
        {"aux_output_config": SimpleNamespace(enabled=True)},
        {"model_config": SimpleNamespace(enable_return_routed_experts=True)},
    ],
)
def test_returned_routed_experts_are_refused(asked):
    """Routed experts of tokens that were never computed can't be returned, and the engine would end."""
    vllm_config = SimpleNamespace(**vars(config()), **asked)
    with pytest.raises(UnsupportedError, match="leave out --enable-return-routed-experts"):
        compat.require_hook_support(vllm_config, SCHEDULER, Hooked)
    compat.require_hook_support(vllm_config, SCHEDULER, Watching)


def test_other_connectors_are_not_checked():
    """Without `before_update_states` there is nothing for ranks to agree on; without hooks there is nothing at all."""
    compat.require_hook_support(config(pipeline_parallel_size=2), SCHEDULER, Watching)
    compat.require_hook_support(config(pipeline_parallel_size=2), WORKER, object)


def test_the_runner_in_use_is_asked_not_the_one_that_is_imported(v1_module, monkeypatch):
    """The connector is created from a method of vLLM's worker, whose runner decides."""
    v1_module.GPUModelRunner = runner_class("v1", CALLS)
    patched, stock = runner_class("v2", CALLS), runner_class("v2", "return None")

    class Worker:
        def __init__(self, runner):
            self.model_runner = runner

        def initialize_from_config(self):
            compat.require_hook_support(config(), WORKER, Hooked)

    Worker(patched()).initialize_from_config()
    with pytest.raises(UnsupportedError, match=r"Hooked needs kvplug's hook in vllm\.v1\.worker\.gpu\.model_runner"):
        Worker(stock()).initialize_from_config()


def test_without_a_worker_the_configuration_decides(v1_module):
    """A connector that is created by hand is checked against the runner that vLLM's configuration names."""
    v1_module.GPUModelRunner = runner_class("v1", CALLS)
    compat.require_hook_support(config(), WORKER, Hooked)
    v1_module.GPUModelRunner = runner_class("v1", "return None")
    with pytest.raises(UnsupportedError, match="where it isn't live"):
        compat.require_hook_support(config(), WORKER, Hooked)


def test_vllm_plugins_that_leaves_kvplug_out_is_named(v1_module, monkeypatch):
    """The usual reason for a missing hook is said first."""
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    v1_module.GPUModelRunner = runner_class("v1", "return None")
    with pytest.raises(UnsupportedError, match="VLLM_PLUGINS is set and doesn't name kvplug"):
        compat.require_hook_support(config(), WORKER, Hooked)


def test_runners_of_other_projects_are_refused(v1_module):
    """A runner that isn't vLLM's has no anchor: the connector says which one it met."""

    class Worker:
        model_runner = runner_class("v1", CALLS, module="other.runner")()

        def initialize_from_config(self):
            compat.require_hook_support(config(), WORKER, Hooked)

    with pytest.raises(UnsupportedError, match=r"this worker uses other\.runner\.GPUModelRunner: use a connector"):
        Worker().initialize_from_config()


def test_how_the_hook_was_delivered(v1_module):
    """`import` where the source was patched in memory, `file` where the call is in the file, else None."""
    cls = runner_class("v1", CALLS)
    assert compat.hook_delivery(cls) == "file"
    v1_module.__kvplug_patches__ = ("somebody.else",)
    assert compat.hook_delivery(cls) == "file"
    v1_module.__kvplug_patches__ = ("before_update_states.v1",)
    assert compat.hook_delivery(cls) == "import"
    assert compat.hook_delivery(runner_class("v1", "return None")) is None


def test_subclasses_inherit_the_hook_unless_they_replace_the_method(v1_module):
    """A platform's subclass may extend `execute_model`; one that replaces it has no hook."""
    base = runner_class("v1", CALLS)
    assert compat.hook_delivery(type("CPUModelRunner", (base,), {})) == "file"
    extended = runner_class("v1", "return super().execute_model(scheduler_output)", "cpu", base)
    replaced = runner_class("v1", "return None", "cpu", base)
    assert compat.hook_delivery(extended) == "file"
    assert compat.hook_delivery(replaced) is None
    assert compat.runner_kind(extended) == "v1"


def test_counts_of_computed_tokens_are_the_second_runners():
    """Only the second runner counts by itself: on the device, and, up to 0.21, in mirrors on the host."""
    states = SimpleNamespace(
        num_computed_tokens=SimpleNamespace(gpu=[0, 0, 0]),
        num_computed_prefill_tokens=[0, 0, 0],
        prefill_len=SimpleNamespace(np=[9, 9, 5]),
        req_id_to_index={"a": 2, "b": 0},
    )
    second = runner_class("v2", CALLS)()
    second.req_states = states
    compat.set_device_computed_tokens(second, {"a": 7, "b": 3})
    assert states.num_computed_tokens.gpu == [3, 0, 7]
    assert states.num_computed_prefill_tokens == [3, 0, 5]
    states.num_computed_tokens_np = [0, 0, 0]
    compat.set_device_computed_tokens(second, {"a": 8})
    assert states.num_computed_tokens_np == [0, 0, 8]
    compat.set_device_computed_tokens(runner_class("v1", CALLS)(), {"a": 7})


def test_releases_that_do_not_tell_about_scheduler_side_loads():
    """Before 0.29 nothing says whether a step has them: certain and possible are two questions."""
    old, no, yes = SimpleNamespace(), SimpleNamespace(has_sync_kv_loads=False), SimpleNamespace(has_sync_kv_loads=True)
    assert [compat.has_scheduler_side_loads(o) for o in (old, no, yes)] == [False, False, True]
    assert [compat.may_have_scheduler_side_loads(o) for o in (old, no, yes)] == [True, False, True]


@pytest.fixture
def active_connector(monkeypatch):
    """Return a function that puts a module with the second runner's way of calling connectors in vLLM's place."""

    def put(body):
        namespace = {}
        exec(f"class ActiveKVConnector:\n    def post_forward(self):\n        {body}\n", namespace)
        module = ModuleType("vllm.v1.worker.gpu.kv_connector")
        module.ActiveKVConnector = namespace["ActiveKVConnector"]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return put


def test_whether_reports_reach_the_scheduler(active_connector, monkeypatch):
    """Not before 0.18.1, where vLLM has no such metadata; with the second runner where it asks, from 0.20.2 on."""
    first, second = runner_class("v1", "pass"), runner_class("v2", "pass")
    active_connector("self.kv_connector.get_kv_connector_stats()")
    assert compat.reports_to_scheduler(first)
    assert not compat.reports_to_scheduler(second)
    active_connector("self.kv_connector.build_connector_worker_meta()")
    assert compat.reports_to_scheduler(second)
    monkeypatch.setattr(compat, "worker_metadata_class", lambda: None)
    assert not compat.reports_to_scheduler(first)


def test_the_installed_vllm_passes_reports_on():
    """The control: with vLLM's own second runner, the one that is installed."""
    assert compat.reports_to_scheduler(runner_class("v2", "pass"))


# -- Requests that go from engine to engine ----------------------------------------------------------------------------


def vllm_request(tokens=(5, 6, 7, 8), *, features=(), embeds=None, max_tokens=1, pooling=None, **sampling):
    """Make vLLM's own Request."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    items = [
        SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length), identifier="x")
        for offset, length in features
    ]
    return Request(
        "a",
        None if tokens is None else list(tokens),
        None if pooling else SamplingParams(max_tokens=max_tokens, **sampling),
        pooling,
        mm_features=items or None,
        prompt_embeds=embeds,
    )


@pytest.mark.parametrize(
    ("status", "ended"),
    [
        ("FINISHED_STOPPED", True),
        ("FINISHED_LENGTH_CAPPED", True),
        ("FINISHED_ABORTED", False),
        ("FINISHED_IGNORED", False),
        ("FINISHED_ERROR", False),
        ("RUNNING", False),
        ("WAITING", False),
        ("PREEMPTED", False),
    ],
)
def test_which_requests_have_an_answer(status, ended):
    """Those that ended by their length or a stop; not ones that were aborted, refused, or failed."""
    from vllm.v1.request import RequestStatus

    one = vllm_request()
    one.status = getattr(RequestStatus, status)
    assert compat.has_answer(one) is ended


def test_a_prompts_last_token_is_dropped():
    """VLLM's own request ends a token earlier in all that it says of itself, and goes on from there."""
    one = vllm_request()
    assert compat.drop_last_prompt_token(one)
    assert (one.prompt_token_ids, list(one.all_token_ids), one.num_prompt_tokens) == ([5, 6, 7], [5, 6, 7], 3)
    assert (one.num_tokens, one.num_output_tokens) == (3, 0)
    one.append_output_token_ids(9)
    assert (list(one.all_token_ids), one.num_tokens, one.num_output_tokens) == ([5, 6, 7, 9], 4, 1)


def test_of_two_tokens_one_is_left():
    """And of that one nothing can be dropped."""
    one = vllm_request([5, 6])
    assert compat.drop_last_prompt_token(one)
    assert not compat.drop_last_prompt_token(one)
    assert (one.prompt_token_ids, list(one.all_token_ids), one.num_prompt_tokens) == ([5], [5], 1)


def embeds(length):
    import torch

    return torch.zeros(length, 8)


def pooling_params():
    from vllm import PoolingParams

    return PoolingParams()


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": [5]},
        {"max_tokens": 2},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 1},
        {"features": [(3, 1)]},
        {"features": [(0, 2), (1, 3)]},
        {"features": [(0, 4), (1, 1)]},  # the longer one ends last
        {"tokens": None, "embeds": 4},
        {"tokens": [5, 6, 7, 8], "embeds": 4},
        {"pooling": True},
    ],
)
def test_a_prompt_whose_last_token_somebody_sees_is_left_alone(fields):
    """One token, more to generate, log-probabilities, an image at the end, embeddings, pooling: nothing is changed."""
    if fields.get("pooling"):
        fields = {"pooling": pooling_params()}
    if fields.get("embeds"):
        fields = fields | {"embeds": embeds(fields["embeds"])}
    one = vllm_request(**fields)
    before = (one.prompt_token_ids and list(one.prompt_token_ids), list(one.all_token_ids), one.num_prompt_tokens)
    assert not compat.drop_last_prompt_token(one)
    assert (one.prompt_token_ids, list(one.all_token_ids), one.num_prompt_tokens) == before


def test_an_image_before_the_last_token_doesnt_matter():
    """It stays whole."""
    one = vllm_request(features=[(0, 3)])
    assert compat.drop_last_prompt_token(one)
    assert one.num_prompt_tokens == 3
