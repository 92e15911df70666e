"""vLLM knows installed connectors by name in each of its processes, and nothing else changes.

Importing vLLM takes seconds, so one process each runs a script whose answers several tests look at.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest

HOOKED = """
import kvplug
@kvplug.hookimpl
def before_update_states(self, step): return None
"""
TWO = "def __init__(self, vllm_config, role): super().__init__(vllm_config, role)"


@pytest.fixture(scope="module")
def world(tmp_path_factory, make_distribution, connector_source):
    """A folder with distributions of each kind."""
    folder = tmp_path_factory.mktemp("world")
    make_distribution(
        folder, "good", {"good": "good_conn:GoodConnector"}, {"good_conn.py": connector_source("GoodConnector")}
    )
    make_distribution(
        folder, "two-arg", {"TwoArg": "two_conn:TwoArg"}, {"two_conn.py": connector_source("TwoArg", TWO)}
    )
    make_distribution(
        folder, "hooked", {"Hooked": "hooked_conn:Hooked"}, {"hooked_conn.py": connector_source("Hooked", HOOKED)}
    )
    renamed = connector_source("RealName") + "\nAlias = RealName\n"
    make_distribution(folder, "renamed", {"Alias": "renamed_conn:Alias"}, {"renamed_conn.py": renamed})
    make_distribution(
        folder, "needs", {"Needs": "needs_conn:Needs"}, {"needs_conn.py": "import no_such_client_library\n"}
    )
    make_distribution(folder, "exits", {"Exits": "exits_conn:Exits"}, {"exits_conn.py": "import sys\nsys.exit(3)\n"})
    make_distribution(folder, "one", {"both": "one_conn:One"}, version="1.5")
    make_distribution(folder, "two", {"both": "two_conn:Two"}, version="2.5")
    make_distribution(folder, "novalue", {"NoValue": "just_a_module"})
    make_distribution(folder, "off", {"Off": "off_conn:Off"})
    make_distribution(folder, "taken", {"NixlConnector": "taken_conn:TakenConnector"})
    make_distribution(folder, "unnamed", {"Unnamed": "unnamed_conn:U"}, metadata=None)
    return folder


MODULES = "good_conn two_conn hooked_conn renamed_conn needs_conn exits_conn one_conn taken_conn kvplug_type1.connector"

SCRIPT = """
import os, sys, time, torch

def no_cuda(*a, **k): raise AssertionError("CUDA was initialised")
torch.cuda._lazy_init = no_cuda

out = {}
from vllm.engine.arg_utils import EngineArgs                      # what a front end imports
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory
before = dict(factory._registry)
from vllm.plugins import load_general_plugins
load_general_plugins()
from kvplug import autoload, connectors

# G4: nothing of a connector is imported, and nothing touches CUDA
out["imported"] = [m for m in MODULES.split() if m in sys.modules]
# Not redis: torch imports it where it is installed, and the tier has no use for a client library.
out["stores"] = [m for m in sys.modules if m.split(".")[0] in ("valkey", "nixl", "mooncake", "lmcache")]
out["stores"] += [m for m in sys.modules if m.startswith("kvplug.store")]
out["runners"] = [m for m in sys.modules if m.startswith("vllm.v1.worker.gpu") and m.endswith("model_runner")]
out["cuda"] = torch.cuda.is_initialized()
out["before"] = sorted(before)
out["unchanged"] = all(factory._registry[name] is loader for name, loader in before.items())

# G6: again and again
times = []
first = dict(factory._registry)
for _ in range(3):
    start = time.process_time(); autoload.register(); times.append(time.process_time() - start)
out["milliseconds"] = min(times) * 1000
out["idempotent"] = first == dict(factory._registry)
report = autoload.report()
out["pid"] = report.pid == os.getpid()
out["errors"] = report.errors
out["hooks"] = report.hooks
out["registered"] = [e.name for e in report.registered]
out["skipped"] = {e.name: e.reason for e in report.skipped}
out["foreign"] = sorted(autoload.foreign_names())

def ask(name):
    import traceback
    from vllm.config import KVTransferConfig
    try:
        cls = factory.get_connector_class(KVTransferConfig(kv_connector=name, kv_role="kv_both"))
        return [cls.__name__, cls.__module__]
    except BaseException as error:
        return [type(error).__name__, "".join(traceback.format_exception(error))]

# fork before anything is loaded, so that the child has to do it
def forked(target):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        import json, signal
        signal.alarm(60)
        try: value = target()
        except BaseException as error: value = repr(error)
        os.write(write, json.dumps(value).encode()); os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream: text = stream.read()
    os.waitpid(pid, 0)
    import json
    return json.loads(text) if text else "nothing"

def child():
    inherited = autoload.report().pid == os.getpid()
    resolved = ask("good")
    autoload.register()
    return {"inherited": inherited, "resolved": resolved, "again": ask("GoodConnector"),
            "own": autoload.report().pid == os.getpid(), "same": sorted(factory._registry) == sorted(first)}
out["fork"] = forked(child)

import threading
held, done = threading.Event(), threading.Event()
def hold():
    with autoload._lock:
        held.set(); done.wait()
holder = threading.Thread(target=hold); holder.start(); held.wait()
out["fork_locked"] = forked(child)
done.set(); holder.join()

# G5: good, broken and skipped ones, asked for as vLLM does
out["asked"] = {name: ask(name) for name in
    ("good", "GoodConnector", "TwoArg", "Hooked", "Needs", "Exits", "both", "NoValue", "Off", "Unnamed",
     "NixlConnector", "nowhere")}
out["alive"] = True

# G2: by class name, as statistics of a MultiConnector are looked up
out["renamed"] = ask("Alias")
out["by_name"] = {}
for name in ("good", "TwoArg", "Hooked", "Alias"):
    cls = factory.get_connector_class_by_name(name)
    own = factory.get_connector_class_by_name(cls.__name__)
    out["by_name"][name] = cls is own

# G6: by module path
from vllm.config import KVTransferConfig
by_path = KVTransferConfig(kv_connector="GoodConnector", kv_role="kv_both", kv_connector_module_path="good_conn")
out["by_path"] = factory.get_connector_class(by_path) is factory.get_connector_class_by_name("good")
answer(out)
""".replace("MODULES", repr(MODULES))


@pytest.fixture(scope="module")
def front_end(world, run_script):
    """What a process like vLLM's front end finds, with all of the distributions installed."""
    return run_script(SCRIPT, path=[world], environ={"KVPLUG_DISABLE": "Off"})


@pytest.mark.engine
def test_g4_nothing_of_a_connector_is_imported(front_end):
    """Once vLLM's plugins are loaded no connector, store client or model runner is imported, and CUDA is untouched."""
    assert front_end["imported"] == []
    assert front_end["stores"] == []
    assert front_end["runners"] == []
    assert front_end["cuda"] is False


@pytest.mark.engine
def test_all_usable_names_are_registered(front_end):
    """Declared names and the classes' own names are known to vLLM."""
    names = {"good", "GoodConnector", "TwoArg", "Hooked", "Alias", "Needs", "Exits", "One", "Two", "TakenConnector"}
    assert names <= set(front_end["registered"])
    assert not front_end["errors"]
    assert front_end["pid"] is True


@pytest.mark.engine
def test_registering_again_takes_milliseconds(front_end):
    """Discovery and registration are cheap enough for every process (in CPU time: it is the same on a busy machine)."""
    assert front_end["milliseconds"] < 250


@pytest.mark.engine
def test_g6_registering_again_changes_nothing(front_end):
    """Three more calls leave vLLM's registry as it was."""
    assert front_end["idempotent"] is True


@pytest.mark.engine
def test_g6_vllm_s_own_connectors_are_never_touched(front_end):
    """A distribution that claims one of vLLM's names is skipped, with its own class name still usable."""
    assert front_end["unchanged"] is True
    assert set(front_end["foreign"]) == set(front_end["before"])
    reason = front_end["skipped"]["NixlConnector"]
    assert "vLLM already has a connector 'NixlConnector'" in reason
    assert "taken_conn:TakenConnector" in reason
    assert front_end["asked"]["NixlConnector"] != ["TakenConnector", "taken_conn"]


@pytest.mark.engine
def test_g6_by_module_path_it_is_the_same_class(front_end):
    """`kv_connector_module_path` beside registration is no conflict."""
    assert front_end["by_path"] is True


@pytest.mark.engine
def test_g5_a_good_connector_is_usable_beside_broken_ones(front_end):
    """Neither an ImportError nor a SystemExit in another distribution touches it."""
    assert front_end["asked"]["good"] == ["GoodConnector", "good_conn"]
    assert front_end["asked"]["TwoArg"] == ["TwoArg", "two_conn"]
    assert front_end["asked"]["Hooked"] == ["Hooked", "hooked_conn"]
    assert front_end["alive"] is True


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "Needs",
            ["needs 1.0", "needs_conn:Needs", "needs_conn.py", "import no_such_client_library", "ModuleNotFoundError"],
        ),
        ("Exits", ["exits 1.0", "exits_conn.py", "sys.exit(3)", "SystemExit: 3"]),
        ("both", ["one 1.5 (one_conn:One)", "two 2.5 (two_conn:Two)"]),
        ("NoValue", ["'just_a_module'", "package.module:Class"]),
        ("Off", ["KVPLUG_DISABLE=Off"]),
        ("Unnamed", ["metadata", "reinstall"]),
    ],
)
@pytest.mark.engine
def test_g5_asking_for_a_bad_one_says_why(front_end, name, parts):
    """What vLLM raises is kvplug's error, with the original traceback or the reason for which it was skipped."""
    kind, text = front_end["asked"][name]
    assert kind == "KvplugError"
    for part in parts:
        assert part in text


@pytest.mark.engine
def test_a_name_that_nobody_declares_is_vllm_s_own_error(front_end):
    """We stay out of what it knows nothing of."""
    kind, text = front_end["asked"]["nowhere"]
    assert kind == "ValueError"
    assert "Unsupported connector type: nowhere" in text


@pytest.mark.engine
def test_g2_classes_are_found_by_their_own_names(front_end):
    """Also a class whose own name only an import tells, as vLLM's metrics look connectors up."""
    assert front_end["renamed"] == ["RealName", "renamed_conn"]
    assert front_end["by_name"] == dict.fromkeys(("good", "TwoArg", "Hooked", "Alias"), True)


@pytest.mark.parametrize("case", ["fork", "fork_locked"])
@pytest.mark.engine
def test_g1_a_forked_child_resolves_names(front_end, case):
    """A child finds the names at once, and can register again, also if a thread held the lock as it was forked."""
    assert front_end[case] == {
        "inherited": False,
        "resolved": ["GoodConnector", "good_conn"],
        "again": ["GoodConnector", "good_conn"],
        "own": True,
        "same": True,
    }


SPAWN = """
import multiprocessing, sys

def child(connection):
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory
    from kvplug import autoload
    import os
    connection.send([autoload.report().pid == os.getpid(), factory.get_connector_class_by_name("good").__name__])

if __name__ == "__main__":
    from kvplug import autoload
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(theirs,))
    process.start(); theirs.close()
    print("ANSWER", ours.recv() == [True, "GoodConnector"])
    process.join()
"""


@pytest.mark.engine
def test_g1_a_spawned_child_resolves_names(world, run_python, tmp_path):
    """A child that starts from nothing registers for itself."""
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    done = run_python([str(script)], path=[world])
    assert "ANSWER True" in done.stdout, done.stderr


def test_import_is_light(run_script):
    """The plugin's module, and what it imports to discover, leave torch, vLLM and the rest of kvplug alone."""
    heavy = run_script(
        """
        import sys
        import kvplug.autoload, kvplug.connectors, kvplug.discovery
        heavy = {"torch", "vllm", "numpy", "pydantic", "click", "rich"}
        answer(sorted({name.split(".")[0] for name in sys.modules} & heavy)
               + [name for name in sys.modules if name.startswith("kvplug.") and name.count(".") > 1])
        """
    )
    assert heavy == []


def test_a_broken_hooks_package_is_said(monkeypatch):
    """A kvplug-hooks that can't be imported is an error in the report, and none that isn't installed."""
    from kvplug import autoload

    monkeypatch.setitem(sys.modules, "kvplug_hooks", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    errors = []
    assert autoload._install_hooks(errors) == "failed"
    assert "finder can't be installed" in errors[0]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert autoload._install_hooks(errors) == "absent"
    assert len(errors) == 1


class TestNeverRaises:
    """Whatever goes wrong, `register` returns, logs one warning, and keeps the error for the report."""

    @pytest.fixture(autouse=True)
    def warnings(self, monkeypatch):
        """Keep this process's state as it is; collect what is logged."""
        from types import SimpleNamespace

        from kvplug import autoload

        warnings = []
        monkeypatch.setattr(autoload, "_report", autoload.AutoloadReport())
        monkeypatch.setattr(autoload, "_install_hooks", lambda _: "absent")
        monkeypatch.setattr(
            autoload, "logger", SimpleNamespace(warning=lambda text, *args: warnings.append(text % args))
        )
        return warnings

    @pytest.fixture
    def registry(self, monkeypatch):
        """A registry of vLLM's of our own."""
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        from kvplug import autoload, connectors

        monkeypatch.setattr(KVConnectorFactory, "_registry", {})
        monkeypatch.setattr(autoload, "_loaders", {})
        monkeypatch.setattr(connectors, "_published", None)
        return KVConnectorFactory._registry

    def test_without_a_usable_vllm(self, monkeypatch, warnings):
        """No vLLM, or one whose connector registry is elsewhere, is an error in the report only."""
        from kvplug import autoload

        monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
        autoload.register()
        assert "ModuleNotFoundError" in autoload.report().errors[0]
        assert len(warnings) == 1
        assert "kvplug doctor" in warnings[0]

    def test_when_discovery_fails(self, monkeypatch, registry):
        """An error nobody thought of is remembered."""
        from kvplug import autoload

        def fails():
            raise RuntimeError("boo")

        monkeypatch.setattr(autoload, "discover", fails)
        autoload.register()
        assert "RuntimeError: boo" in autoload.report().errors[0]
        assert registry == {}

    def test_a_registry_that_was_reset_is_filled_again(self, monkeypatch, registry, tmp_path, distribution):
        """What counts is what is in vLLM's registry, not that this ran before."""
        from kvplug import autoload, discovery

        folder = distribution(tmp_path, "good", {"good": "good_conn:GoodConnector"})
        monkeypatch.setattr(autoload, "discover", lambda: discovery.discover(path=[str(folder)], environ={}))
        autoload.register()
        registry.clear()
        autoload.register()
        assert set(registry) == {"good", "GoodConnector"}
        assert not autoload.report().skipped
