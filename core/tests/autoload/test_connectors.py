"""A connector's class is loaded when it is asked for, and made one that vLLM can construct."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from types import SimpleNamespace

import pytest

import kvplug
from kvplug import connectors
from kvplug.discovery import ConnectorEntry, Discovery, SkippedEntry
from kvplug.errors import KvplugError, UnsupportedError

KV = "the KV-cache configuration"

TWO = """
        def __init__(self, vllm_config, role):
            super().__init__(vllm_config, role)
            self.arguments = (vllm_config, role)
"""


def _entry(value, name=None, **kwargs):
    module, _, attr = value.partition(":")
    fields = {"distribution": "a-dist", "version": "1.2", "location": "", **kwargs}
    return ConnectorEntry(name or attr, module, attr, **fields)


@pytest.fixture(autouse=True)
def _nothing_published(monkeypatch):
    """Let no test see what another one published."""
    monkeypatch.setattr(connectors, "_published", None)


@pytest.fixture
def module(tmp_path, monkeypatch, connector_source):
    """Make a module that can be imported: (name, source), or (name, class name, source of members…)."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, source, *members):
        text = connector_source(source, *members) if members else source
        (tmp_path / f"{name}.py").write_text(text)
        made.append(name)
        return name

    made = []
    yield make
    for name in made:
        sys.modules.pop(name, None)


def _config(**parallel):
    sizes = {"pipeline_parallel_size": 1, "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}, is_kv_producer=True),
        parallel_config=SimpleNamespace(**(sizes | parallel)),
    )


@pytest.fixture
def role():
    """Return vLLM's roles of a connector."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    return KVConnectorRole


def test_a_plain_connector_is_the_class_itself(module, role):
    """A class that vLLM can construct as it is isn't touched."""
    module("plain_conn", "Plain", "")
    cls = connectors.load(_entry("plain_conn:Plain"))
    assert cls is sys.modules["plain_conn"].Plain
    assert cls(_config(), role.WORKER, KV)._kv_cache_config == KV


def test_nothing_is_imported_before_it_is_asked_for(module):
    """Publishing and naming a connector import nothing of it."""
    module("lazy_conn", "Lazy", "")
    connectors.publish(Discovery((_entry("lazy_conn:Lazy"),)))
    attribute = connectors.attribute("Lazy")
    assert "lazy_conn" not in sys.modules
    assert getattr(connectors, attribute) is sys.modules["lazy_conn"].Lazy


def test_a_connector_may_have_any_name(module):
    """A connector that is called like something in our module is still a connector, and our module is still ours."""
    module("odd_conn", "Odd", "")
    names = ("Odd", "load", "KvplugError", "a b-c")
    connectors.publish(Discovery(tuple(_entry("odd_conn:Odd", name) for name in names)))
    assert {getattr(connectors, connectors.attribute(name)).__name__ for name in names} == {"Odd"}
    assert callable(connectors.load)
    with pytest.raises(AttributeError):
        _ = connectors.nothing_of_the_kind


class TestF5TwoArgumentConstructors:
    """F5: constructors from before `kv_cache_config` became an argument."""

    def test_f5_it_gets_what_it_takes_and_the_base_class_the_rest(self, module, role):
        """The constructor is called with two arguments, and the instance has the KV-cache configuration."""
        module("two_conn", "Two", TWO)
        config = _config()
        connector = connectors.load(_entry("two_conn:Two"))(config, role.WORKER, KV)
        assert connector.arguments == (config, role.WORKER)
        assert connector._kv_cache_config == KV
        assert connector.role is role.WORKER

    @pytest.mark.parametrize(
        "constructor",
        [
            "def __init__(self, vllm_config, role): super().__init__(vllm_config=vllm_config, role=role)",
            "def __init__(self, vllm_config, role): super().__init__(vllm_config, role=role)",
            "def __init__(self, vllm_config, role, **kwargs): super().__init__(vllm_config, role, **kwargs)",
            "def __init__(self, config, kind): super().__init__(config, kind)",
            "def __init__(self, a, b, *, kv_cache_config): super().__init__(a, b, kv_cache_config)",
            "def __init__(self, vllm_config, role, *, kv_cache_config=None): super().__init__(vllm_config, role)",
            "def __init__(self, *args): super().__init__(*args)",
            "def __init__(self, *args, **kwargs): super().__init__(*args, **kwargs)",
            "def __init__(self, a, b, kv_cache_config=None): super().__init__(a, b, kv_cache_config=kv_cache_config)",
            "def __init__(self, vllm_config, role, cache): super().__init__(vllm_config, role, cache)",
        ],
    )
    def test_f5_each_way_to_write_it(self, module, role, constructor):
        """Positional, by keyword, keyword-only, with other names or with stars: the instance is whole."""
        module("ways_conn", "Ways", constructor)
        connector = connectors.load(_entry("ways_conn:Ways"))(_config(), role.SCHEDULER, KV)
        assert connector._kv_cache_config == KV
        assert connector.role is role.SCHEDULER

    def test_f5_control_vllm_alone_can_not_construct_it(self, module, role):
        """Negative control: without the adapter the same class fails."""
        module("raw_conn", "Raw", TWO)
        raw = sys.modules["raw_conn"] if "raw_conn" in sys.modules else __import__("raw_conn")
        with pytest.raises(TypeError):
            raw.Raw(_config(), role.WORKER, KV)
        with pytest.raises(TypeError):
            raw.Raw(_config(), role.WORKER)

    def test_f5_chains_of_old_and_new_constructors(self, module, role, connector_source):
        """Each class of a chain gets what it takes, however old and new ones alternate, mixins included."""
        source = connector_source("Base", TWO) + (
            "class Mixin:\n"
            "    def __init__(self, vllm_config, role):\n"
            "        self.mixed = role\n"
            "        super().__init__(vllm_config, role)\n"
            "class New(Base):\n"
            "    def __init__(self, vllm_config, role, kv_cache_config):\n"
            "        super().__init__(vllm_config, role, kv_cache_config)\n"
            "        self.new = kv_cache_config\n"
            "class Old(Mixin, New):\n"
            "    def __init__(self, vllm_config, role):\n"
            "        super().__init__(vllm_config, role)\n"
            "class Heir(Old): pass\n"
            # Like vLLM's own base class up to 0.20: what isn't given is None.
            "class Lenient(Base):\n"
            "    def __init__(self, vllm_config, role, kv_cache_config=None):\n"
            "        super().__init__(vllm_config, role)\n"
            "        self.new = kv_cache_config\n"
            "class Child(Lenient):\n"
            "    def __init__(self, vllm_config, role):\n"
            "        super().__init__(vllm_config, role)\n"
        )
        module("chain_conn", source)
        for name in ("New", "Old", "Heir", "Lenient", "Child"):
            connector = connectors.load(_entry(f"chain_conn:{name}"))(_config(), role.WORKER, KV)
            assert (connector.new, connector._kv_cache_config) == (KV, KV)
            assert connector.role is role.WORKER

    def test_f5_a_two_argument_child_of_a_connector_of_vllm(self, module, role, tmp_path):
        """A class that derives from a connector of vLLM's, whose constructor takes three, is whole too."""
        module(
            "child_conn",
            "from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector\n"
            "class Child(DecodeBenchConnector):\n"
            "    def __init__(self, vllm_config, role):\n"
            "        super().__init__(vllm_config, role)\n",
        )
        config = _config()
        config.kv_transfer_config.get_from_extra_config = lambda _, default: default
        config.cache_config = SimpleNamespace(block_size=16)
        cls = connectors.load(_entry("child_conn:Child"))
        kv = SimpleNamespace(kv_cache_groups=[])
        assert cls(config, role.SCHEDULER, kv)._kv_cache_config is kv

    def test_f5_the_class_stays_what_it_was(self, module, role):
        """Name, module, documentation, pickling and relations are those of the original; it is one object."""
        module("same_conn", "Same", TWO)
        cls = connectors.load(_entry("same_conn:Same"))
        original = sys.modules["same_conn"].Same
        assert connectors.load(_entry("same_conn:Same", "alias")) is cls
        assert (cls.__name__, cls.__qualname__, cls.__module__) == ("Same", "Same", "same_conn")
        assert issubclass(cls, original)
        assert isinstance(cls(_config(), role.WORKER, KV), original)
        assert pickle.loads(pickle.dumps(cls)) is cls
        assert copy.deepcopy(cls) is cls
        again = pickle.loads(pickle.dumps(object.__new__(cls)))
        assert type(again) is cls

    def test_f5_vllm_sees_a_constructor_with_three_arguments(self, module):
        """The check of the signature in vLLM is content with the adapted class."""
        from vllm.utils.func_utils import supports_kw

        module("kw_conn", "Kw", TWO)
        assert supports_kw(connectors.load(_entry("kw_conn:Kw")), "kv_cache_config")

    def test_f5_threads_do_not_mix_configurations_up(self, module, role):
        """Instances that are constructed at the same time get each their own configuration."""
        module(
            "slow_conn",
            "Slow",
            """
        def __init__(self, vllm_config, role):
            vllm_config.meet.wait()
            super().__init__(vllm_config, role)
            """,
        )
        cls = connectors.load(_entry("slow_conn:Slow"))
        meet, made = threading.Barrier(8), {}

        def construct(kv):
            config = _config()
            config.meet = meet
            made[kv] = cls(config, role.WORKER, kv)

        threads = [threading.Thread(target=construct, args=(kv,)) for kv in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {kv: connector._kv_cache_config for kv, connector in made.items()} == {kv: kv for kv in range(8)}

    def test_f5_nothing_is_left_on_the_instance(self, module, role):
        """What the adapter keeps on an instance while it is constructed is gone afterwards."""
        module("tidy_conn", "Tidy", TWO)
        connector = connectors.load(_entry("tidy_conn:Tidy"))(_config(), role.WORKER, KV)
        assert not [name for name in vars(connector) if "kvplug" in name]

    def test_f5_under_multi_connector(self, module, role, monkeypatch):
        """A two-argument child of a `MultiConnector` is constructed through vLLM's factory."""
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
        module("multi_conn", "Multi", TWO)
        connectors.publish(Discovery((_entry("multi_conn:Multi", "two"), _entry("multi_conn:Multi"))))
        KVConnectorFactory.register_connector("two", "kvplug.connectors", connectors.attribute("two"))
        child = {"kv_connector": "two", "kv_role": "kv_both"}
        config = _config()
        config.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=True)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [child, child]}
        )
        multi = KVConnectorFactory.create_connector(config, role.SCHEDULER, KV)
        assert [type(child).__name__ for child in multi._connectors] == ["Multi", "Multi"]
        assert [child._kv_cache_config for child in multi._connectors] == [KV, KV]

    def test_f5_a_wrong_call_fails_as_python_says(self, module, role):
        """A constructor whose own call is wrong raises what it raised without us."""
        module(
            "wrong_conn",
            "Wrong",
            "def __init__(self, vllm_config, role): super().__init__(vllm_config, role, role, role)",
        )
        with pytest.raises(TypeError, match="positional arguments"):
            connectors.load(_entry("wrong_conn:Wrong"))(_config(), role.WORKER, KV)


HOOKED = """
        import kvplug
        @kvplug.hookimpl
        def before_update_states(self, step): return None
"""


class TestHooks:
    """A class with hooks is refused where these can't work, whoever wrote it."""

    def test_pipeline_parallelism_is_refused(self, module, role):
        """In either role, with what to do instead."""
        module("hooked_conn", "Hooked", HOOKED)
        cls = connectors.load(_entry("hooked_conn:Hooked"))
        for each in role:
            with pytest.raises(UnsupportedError, match="pipeline parallelism"):
                cls(_config(pipeline_parallel_size=2), each, KV)

    def test_a_worker_without_the_hook_is_refused(self, module, role):
        """The scheduler half is constructed; the worker half isn't, since no model runner here has the hook."""
        module("worker_conn", "Worker", HOOKED)
        cls = connectors.load(_entry("worker_conn:Worker"))
        assert cls(_config(), role.SCHEDULER, KV)._kv_cache_config == KV
        with pytest.raises(UnsupportedError, match="Worker needs"):
            cls(_config(), role.WORKER, KV)

    def test_a_two_argument_class_with_hooks(self, module, role):
        """Both adaptations go together, and the hooks are still the class's."""
        module("both_conn", "Both", TWO, HOOKED)
        cls = connectors.load(_entry("both_conn:Both"))
        assert kvplug.hookspecs.has_hooks(cls) == {"before_update_states"}
        assert cls(_config(), role.SCHEDULER, KV)._kv_cache_config == KV
        with pytest.raises(UnsupportedError):
            cls(_config(pipeline_parallel_size=2), role.SCHEDULER, KV)


class TestRefusals:
    """What can't be loaded is an error that says whose it is and what happened."""

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
            ("import sys; sys.exit(3)", "SystemExit: 3"),
            ("class Weird(BaseException): pass\nraise Weird('boo')", "Weird: boo"),
            ("this is no Python", "SyntaxError"),
            ("", "AttributeError"),
        ],
    )
    def test_g5_a_module_that_can_not_be_imported(self, module, source, said):
        """The error names distribution, version and value, and the module's own error is its cause."""
        module("broken_conn", source)
        with pytest.raises(KvplugError) as caught:
            connectors.load(_entry("broken_conn:Broken"))
        for part in ("'Broken' of a-dist 1.2", "broken_conn:Broken", said, "Update a-dist"):
            assert part in str(caught.value)
        assert type(caught.value.__cause__).__name__ == said.partition(":")[0]
        assert caught.value.__cause__.__traceback__ is not None

    def test_ctrl_c_is_not_turned_into_an_error(self, module):
        """Who interrupts an import wants the process to end."""
        module("ctrl_conn", "raise KeyboardInterrupt")
        with pytest.raises(KeyboardInterrupt):
            connectors.load(_entry("ctrl_conn:C"))

    @pytest.mark.parametrize("source", ["C = 3", "class C: pass", "def C(config, role, kv): pass"])
    def test_what_is_no_connector_class(self, module, source):
        """The error says what it is instead."""
        module("other_conn", source)
        with pytest.raises(KvplugError, match="not a subclass of vLLM's KVConnectorBase_V1"):
            connectors.load(_entry("other_conn:C"))

    def test_a_skipped_name_says_why(self):
        """A name that was skipped raises its reason when it is asked for."""
        skipped = SkippedEntry("fast", "one", "1.0", "It is claimed twice: uninstall one.")
        connectors.publish(Discovery((), (skipped,)))
        with pytest.raises(KvplugError, match=r"'fast' of one 1.0 isn't used\. It is claimed twice: uninstall one\."):
            getattr(connectors, connectors.attribute("fast"))

    def test_an_unknown_name_says_which_there_are(self):
        """The error lists the names that are declared."""
        connectors.publish(Discovery((_entry("m:Known"),)))
        with pytest.raises(KvplugError, match=r"'nope'.*declared: Known"):
            connectors.load("nope")

    def test_a_class_that_can_not_be_subclassed(self, module, connector_source):
        """If the constructor can't be adapted, that is said with the reason."""
        source = connector_source("Final", TWO, "def __init_subclass__(cls): raise TypeError('it is final')")
        module("final_conn", source)
        with pytest.raises(KvplugError, match="it is final"):
            connectors.load(_entry("final_conn:Final"))
