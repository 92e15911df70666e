"""Delivery at import, in fresh interpreters with a made-up vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import textwrap
import zipfile

import pytest

from kvplug_hooks import PatchStatus
from kvplug_hooks.edit import lines
from kvplug_hooks.patches.before_update_states import V1, V2
from kvplug_hooks.source import SourceText

RUN = """
import kvplug_hooks
kvplug_hooks.install()
from vllm.v1.worker import gpu_model_runner as v1
from vllm.v1.worker.gpu import model_runner as v2
"""

STATES = """
import json
hook = {name[-2:]: entry for name, entry in kvplug_hooks.status().items() if name.startswith("before_update_states")}
print(json.dumps({runner: [entry.state, entry.reason] for runner, entry in hook.items()}))
"""


def test_both_runners_call_the_hook_and_use_its_result(sandbox):
    """What the hook returns is what the rest of the step works with."""
    out = sandbox.run(
        RUN,
        """
        def before(runner, output):
            dispatch.calls.append(runner)
            return Output(total_num_scheduled_tokens=output.total_num_scheduled_tokens - 1)
        v1.before_update_states = v2.before_update_states = before
        runner = v1.GPUModelRunner()
        print(runner.execute_model(Output(total_num_scheduled_tokens=8)), dispatch.calls == [runner])
        runner = v2.GPUModelRunner()
        print(runner.execute_model(Output(total_num_scheduled_tokens=5)).total_num_scheduled_tokens)
        print(runner.execute_model(Output(total_num_scheduled_tokens=5), dummy_run=True).total_num_scheduled_tokens)
        print(kvplug_hooks.patched_modules() == (v1.__name__, v2.__name__), v1.__kvplug_patches__)
        """,
    )
    assert out.split("\n") == ["7 True", "4", "5", "True ('before_update_states.v1',)"]


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_nothing_is_collected_while_a_module_is_patched(sandbox, before):
    """The garbage collector, which would go over all of vLLM, waits; afterwards it is as it was."""
    out = sandbox.run(
        f"""
        import gc, sys
        import kvplug_hooks.edit
        gc.{before}()
        gc.set_threshold(1)
        collected_in = set()
        def note(phase, info):
            frame = sys._getframe()
            while frame is not None:
                collected_in.add(frame.f_globals["__name__"])
                frame = frame.f_back
        gc.callbacks.append(note)
        """,
        RUN,
        """
        print("kvplug_hooks.edit" in collected_in, "kvplug_hooks.finder" in collected_in, gc.isenabled())
        print(kvplug_hooks.patched_modules() == (v1.__name__, v2.__name__))
        """,
    )
    # The finder does more than patching, so elsewhere in it the collector runs, if it may at all.
    assert out.split("\n") == [f"False {before == 'enable'} {before == 'enable'}", "True"]


def test_without_the_finder_there_is_no_hook(sandbox):
    """The control for the tests here: the made-up vLLM has no hook of its own, and status says so."""
    out = sandbox.run(
        """
        import kvplug_hooks
        from vllm.v1.worker import gpu_model_runner as v1
        v1.GPUModelRunner().execute_model(Output(total_num_scheduled_tokens=8))
        print(dispatch.calls, hasattr(v1, "__kvplug_patches__"), kvplug_hooks.patched_modules())
        """,
        STATES,
    )
    first, states = out.split("\n")
    assert first == "[] False ()"
    assert json.loads(states)["v2"][0] == "not installed"


def test_tracebacks_match_the_file_and_getsource_shows_the_hook(sandbox):
    """A line number in a traceback is one of the file's; the text beside it, and `inspect`'s, is the patched one."""
    out = sandbox.run(
        RUN,
        """
        import inspect, linecache, traceback
        try:
            v1.GPUModelRunner().execute_model(Output(total_num_scheduled_tokens=-1))
        except ValueError as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
        linecache.checkcache()
        source, first = inspect.getsourcelines(v1.GPUModelRunner.execute_model)
        call = next(number for number, line in enumerate(source, first) if "before_update_states(" in line)
        print(frame.filename, frame.lineno, call, first, sep="\\n")
        print(inspect.getsource(v1).count("before_update_states("), v1.__loader__.get_source(v1.__name__).count("; "))
        """,
    )
    filename, raised, call, first, counts = out.split("\n")
    assert filename == str(sandbox.v1)
    text = sandbox.v1.read_text().split("\n")
    assert text[int(raised) - 1].strip() == 'raise ValueError("boom")'
    assert text[int(call) - 1].strip() == "num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens"
    assert text[int(first) - 1].strip().startswith("def execute_model")
    assert counts == "1 2"


def test_the_bytecode_cache_is_not_read(sandbox):
    """A cached module that pretends to be current is ignored for targets; stock imports fall for it."""
    poison = sandbox.folder / "poison.py"
    poison.write_text("POISONED = True".ljust(sandbox.v1.stat().st_size))
    stat = sandbox.v1.stat()
    os.utime(poison, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    py_compile.compile(str(poison), cfile=importlib.util.cache_from_source(str(sandbox.v1)), doraise=True)
    stock = "from vllm.v1.worker import gpu_model_runner as v1\nprint(hasattr(v1, 'POISONED'))"
    assert sandbox.run(stock) == "True"
    assert sandbox.run(RUN, "print(hasattr(v1, 'POISONED'), kvplug_hooks.patched_modules() != ())") == "False True"


def test_the_bytecode_cache_is_not_written(sandbox):
    """Patched code never gets where a stock import would find it; other modules are cached as ever."""
    sandbox.run(RUN)
    cached = {path.name.split(".")[0] for path in sandbox.folder.rglob("*.pyc")}
    assert cached == {"__init__"}
    sandbox.run("from vllm.v1.worker import gpu_model_runner")
    cached = {path.name.split(".")[0] for path in sandbox.folder.rglob("*.pyc")}
    assert cached == {"__init__", "gpu_model_runner"}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes_are_patched(sandbox, method):
    """A forked process has the finder from its parent; a spawned one installs its own."""
    (sandbox.folder / "child.py").write_text(
        textwrap.dedent(
            """
            import sys
            def work(queue, spawned):
                import kvplug_hooks
                from kvplug_hooks.finder import HookFinder
                inherited = any(isinstance(finder, HookFinder) for finder in sys.meta_path)
                if spawned:
                    kvplug_hooks.install()
                sys.modules["kvplug.dispatch"] = type(sys)("kvplug.dispatch")
                sys.modules["kvplug.dispatch"].before_update_states = lambda runner, output: output
                from vllm.v1.worker import gpu_model_runner
                kvplug_hooks.install()
                queue.put((inherited, kvplug_hooks.patched_modules()))
            """
        )
    )
    out = sandbox.run(
        f"""
        import multiprocessing
        import child, kvplug_hooks
        if __name__ == "__main__":
            kvplug_hooks.install()
            context = multiprocessing.get_context("{method}")
            queue = context.SimpleQueue()
            process = context.Process(target=child.work, args=(queue, {method == "spawn"}))
            process.start()
            print(*queue.get(), *{{entry.state for entry in kvplug_hooks.status().values()}})
            process.join()
        """
    )
    assert out == f"{method == 'fork'} ('{V1.module}',) pending"


def test_a_fork_while_another_thread_installs_does_not_hang(sandbox):
    """A lock that another thread held when the process was forked doesn't block the child."""
    out = sandbox.run(
        """
        import os, kvplug_hooks
        from kvplug_hooks import finder
        with finder._lock:
            child = os.fork()
            if child == 0:
                kvplug_hooks.install()
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert out == "7"


def test_install_is_idempotent_also_from_many_threads(sandbox):
    """However often and from wherever it is called, there is one finder, in front; uninstalling removes it."""
    out = sandbox.run(
        """
        import sys, threading, kvplug_hooks
        import kvplug.autoload  # brings a finder of importlib_metadata's
        from kvplug_hooks.finder import HookFinder
        before = list(sys.meta_path)
        barrier = threading.Barrier(4)
        class Slow(list):
            # Gives every thread that may look at the same time the same answer.
            def __contains__(self, item):
                answer = super().__contains__(item)
                try:
                    barrier.wait(timeout=0.2)
                except threading.BrokenBarrierError:
                    pass
                return answer
        sys.meta_path = Slow(before)
        threads = [threading.Thread(target=kvplug_hooks.install) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        kvplug_hooks.install()
        print(isinstance(sys.meta_path[0], HookFinder), len(sys.meta_path) - len(before))
        kvplug_hooks.uninstall()
        kvplug_hooks.uninstall()
        print(sys.meta_path == before)
        """
    )
    assert out.split("\n") == ["True 1", "True"]


def test_installing_imports_neither_vllm_nor_the_parser(sandbox):
    """A process that never imports a runner pays for a list entry only."""
    out = sandbox.run(
        """
        import dataclasses, threading  # whoever imports vLLM has these
        import kvplug.autoload  # which calls install()
        before = set(sys.modules)
        import kvplug_hooks
        kvplug_hooks.install()
        kvplug_hooks.status()
        print(sorted(name for name in set(sys.modules) - before if not name.startswith("kvplug_hooks")
              and name in ("vllm", "torch", "tokenize", "linecache", "logging", "json", "kvplug.errors")))
        print(sorted(name for name in set(sys.modules) - before if name.startswith("kvplug_hooks.")))
        """
    )
    foreign, own = out.split("\n")
    assert foreign == "[]"
    assert own == str(
        [
            f"kvplug_hooks.{name}"
            for name in (
                "anchors",
                "finder",
                "loader",
                "patch",
                "patches",
                "patches.before_update_states",
                "patches.hybrid_page_size",
                "registry",
                "report",
                "status",
            )
        ]
    )


def test_other_modules_are_found_as_ever(sandbox):
    """The finder answers for the target modules only."""
    out = sandbox.run(
        RUN,
        """
        import vllm.v1.worker, sys
        print([type(sys.modules[name].__loader__).__name__ for name in ("vllm.v1.worker", v1.__name__)])
        print(sys.meta_path[0].find_spec("json"), sys.meta_path[0].find_spec("vllm.v1"))
        """,
    )
    assert out.split("\n") == ["['SourceFileLoader', 'PatchingLoader']", "None None"]


def test_vllm_in_a_zip_file(sandbox, tmp_path):
    """The source is read by whatever loader the other finders give: here, from an archive."""
    archive = tmp_path / "vllm.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(sandbox.folder.rglob("*.py")):
            file.write(path, path.relative_to(sandbox.folder))
    out = sandbox.run(
        RUN,
        """
        import inspect
        v1.GPUModelRunner().execute_model(Output(total_num_scheduled_tokens=8))
        print(v1.__file__, len(dispatch.calls), "before_update_states(" in inspect.getsource(v1.GPUModelRunner))
        """,
        path=str(archive),
    )
    assert out == f"{archive}/{V1.path} 1 True"


def test_vllm_from_a_pth_file(sandbox, tmp_path):
    """Folders that come onto the path through a `.pth` file are like any other."""
    late = tmp_path / "late"
    late.mkdir()
    # At the front, so that this vLLM is found and not the installed one.
    (late / "vllm.pth").write_text(f"import sys; sys.path.insert(0, {str(sandbox.folder)!r})")
    out = sandbox.run(
        f"import site\nsite.addsitedir({str(late)!r})", RUN, "print(v1.__file__, v1.__kvplug_patches__)", path=""
    )
    assert out == f"{sandbox.v1} ('before_update_states.v1',)"


@pytest.mark.parametrize("order", ["before", "after"])
def test_vllm_from_an_editable_install(sandbox, order):
    """Finders that know where a package is keep finding it, whether they come before or after ours."""
    editable = f"""
    import importlib.util, os, sys
    import kvplug_hooks
    class Editable:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] != "vllm":
                return None
            file = os.path.join({str(sandbox.folder)!r}, *name.split("."))
            if os.path.isdir(file):
                return importlib.util.spec_from_file_location(
                    name, file + "/__init__.py", submodule_search_locations=[file]
                )
            return importlib.util.spec_from_file_location(name, file + ".py")
    if {order == "after"}:
        kvplug_hooks.install()
    sys.meta_path.insert({order == "after":d}, Editable)
    """
    out = sandbox.run(editable, RUN, "print(v1.__file__, v1.__kvplug_patches__)", path="")
    assert out == f"{sandbox.v1} ('before_update_states.v1',)"


def test_two_finders_that_delegate_do_not_recurse(sandbox):
    """Another tool's finder that asks all others, ours included, gets an answer."""
    out = sandbox.run(
        """
        import sys, kvplug_hooks
        class Other:
            def find_spec(self, name, path=None, target=None):
                found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
                return next((spec for spec in found if spec), None)
        kvplug_hooks.install()
        sys.meta_path.insert(0, Other())
        """,
        RUN,
        "print(kvplug_hooks.patched_modules() == (v1.__name__, v2.__name__))",
    )
    assert out == "True"


def test_a_reloaded_module_is_patched_again(sandbox):
    """`importlib.reload` goes through the finder too."""
    out = sandbox.run(
        RUN,
        """
        import importlib
        importlib.reload(v1)
        v1.GPUModelRunner().execute_model(Output(total_num_scheduled_tokens=8))
        print(len(dispatch.calls), v1.__kvplug_patches__)
        """,
    )
    assert out == "1 ('before_update_states.v1',)"


def test_an_unmatched_anchor_leaves_vllm_alone_and_the_reason_is_kept(sandbox):
    """People who use no connector must not notice; the others read why, in the log once and in the status."""
    sandbox.v1.write_text(
        sandbox.v1.read_text().replace("total_num_scheduled_tokens\n            if", "total\n            if")
    )
    out = sandbox.run(
        """
        import logging
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append((record.levelname, record.getMessage()))
        logging.getLogger("vllm").addHandler(handler)
        """,
        RUN,
        """
        print(v1.GPUModelRunner().execute_model(Output(total=8)), type(v1.__loader__).__name__)
        print(type(v1.__spec__.loader).__name__, hasattr(v1, "__kvplug_patches__"), kvplug_hooks.patched_modules())
        import json
        print(json.dumps(messages))
        """,
        STATES,
    )
    first, second, messages, states = out.split("\n")
    assert first == "8 SourceFileLoader"
    assert second == f"SourceFileLoader False ('{V2.module}',)"
    state, reason = json.loads(states)["v1"]
    assert state == "failed"
    assert "num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens` 0 times instead of once" in reason
    ((level, message),) = json.loads(messages)
    assert level == "WARNING"
    assert message.startswith(f"{V1.module} is loaded without the patch {V1.id} ({V1.purpose})")
    assert message.endswith(reason)
    assert json.loads(states)["v2"][0] == "applied"


def test_a_hook_without_its_other_end_leaves_vllm_alone(sandbox):
    """If kvplug can't be imported, vLLM still loads, and the status says what failed."""
    out = sandbox.run("del dispatch.before_update_states\n" + RUN, "print(v1.GPUModelRunner is not None)", STATES)
    loaded, states = out.split("\n")
    assert loaded == "True"
    state, reason = json.loads(states)["v1"]
    assert state == "failed"
    assert reason.startswith(f"`{V1.import_line}` fails (ImportError(")
    assert reason.endswith("reinstall kvplug.")


def test_a_runner_without_source_leaves_vllm_alone(sandbox):
    """A vLLM of bytecode only can't be patched, and still loads."""
    py_compile.compile(str(sandbox.v1), cfile=str(sandbox.v1.with_suffix(".pyc")), doraise=True)
    sandbox.v1.unlink()
    states = json.loads(sandbox.run(RUN, STATES))
    assert states["v1"][0] == "failed"
    assert "has no Python source" in states["v1"][1]
    assert states["v2"][0] == "applied"


def test_an_error_while_the_patched_module_loads_is_its_own(sandbox):
    """A module that fails as it is imported fails with its own error, at its own line, and isn't called applied."""
    with sandbox.v1.open("a") as file:
        file.write("\n1 / 0\n")
    out = sandbox.run(
        """
        import kvplug_hooks, traceback
        kvplug_hooks.install()
        try:
            from vllm.v1.worker import gpu_model_runner
        except ZeroDivisionError as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            print(frame.filename, frame.lineno, frame.line)
        """,
        STATES,
    )
    first, states = out.split("\n")
    assert first == f"{sandbox.v1} {len(sandbox.v1.read_text().splitlines())} 1 / 0"
    assert json.loads(states)["v1"][0] == "pending"


def test_a_file_that_has_the_hook_is_left_alone(sandbox):
    """A vLLM that was patched as a file is loaded as it is, from its bytecode cache if it has one."""
    for patch, path in ((V1, sandbox.v1), (V2, sandbox.v2)):
        path.write_bytes(lines(SourceText.from_bytes(path.read_bytes()), patch, path.name).result.data)
    check = """
    v1.GPUModelRunner().execute_model(Output(total_num_scheduled_tokens=8))
    patched = kvplug_hooks.patched_modules() == (v1.__name__, v2.__name__)
    print(len(dispatch.calls), type(v1.__loader__).__name__, patched)
    """
    out = sandbox.run(RUN, check, STATES)
    first, states = out.split("\n")
    assert first == "1 SourceFileLoader True"
    assert {state for state, _ in json.loads(states).values()} == {"already in source"}
    assert any(path.name.startswith("gpu_model_runner.") for path in sandbox.folder.rglob("*.pyc"))
    # The same holds for a module that was imported before the finder was there.
    out = sandbox.run("from vllm.v1.worker import gpu_model_runner\n", RUN, check, STATES)
    assert out == f"{first}\n" + states.replace(
        f"{V1.path} contains the patch.", "The module was loaded from a file that contains the patch."
    )


def test_a_runner_imported_too_early_is_noticed_with_who_imported_it(sandbox):
    """The finder can't help a module that is loaded; the status names the importers."""
    (sandbox.folder / "early.py").write_text("import helper\n")
    (sandbox.folder / "helper.py").write_text("from vllm.v1.worker.gpu_model_runner import GPUModelRunner\n")
    # One that came later doesn't count.
    (sandbox.folder / "late.py").write_text("import vllm.v1.worker.gpu_model_runner as runner\n")
    out = sandbox.run("import early, late", RUN, "print(kvplug_hooks.patched_modules())", STATES)
    patched, states = out.split("\n")
    state, reason = json.loads(states)["v1"]
    assert patched == f"('{V2.module}',)"
    assert state == "too late"
    assert (
        "was imported before kvplug's finder was installed, by helper, imported by early, imported by __main__;"
        in reason
    )
    # An import inside a function leaves no trace, and nobody is accused.
    (sandbox.folder / "helper.py").write_text(
        "__import__('importlib').import_module('vllm.v1.worker.gpu_model_runner')\n"
    )
    out = sandbox.run("import early", "import kvplug_hooks\nkvplug_hooks.install()", STATES)
    assert "by whom can't be told" in json.loads(out)["v1"][1]


def test_a_runner_loaded_past_the_finder_is_noticed(sandbox):
    """If another import hook gets in front and loads the module itself, the status says so."""
    out = sandbox.run(
        """
        import sys, importlib.machinery, kvplug_hooks
        kvplug_hooks.install()
        sys.meta_path.insert(0, importlib.machinery.PathFinder)
        """,
        RUN,
        STATES,
    )
    state, reason = json.loads(out)["v1"]
    assert state == "failed"
    assert "loaded past kvplug's finder, by SourceFileLoader" in reason


def test_uninstalling_leaves_later_imports_alone(sandbox):
    """Without the finder, modules load unpatched; those that are patched stay so."""
    out = sandbox.run(
        """
        import kvplug_hooks
        kvplug_hooks.install()
        from vllm.v1.worker import gpu_model_runner as v1
        kvplug_hooks.uninstall()
        from vllm.v1.worker.gpu import model_runner as v2
        """,
        STATES,
    )
    states = json.loads(out)
    assert [states[runner][0] for runner in ("v1", "v2")] == ["applied", "too late"]


@pytest.mark.parametrize(
    ("state", "live"),
    [
        ("not installed", False),
        ("pending", False),
        ("applied", True),
        ("already in source", True),
        ("not needed", False),
        ("not concerned", False),
        ("failed", False),
        ("too late", False),
    ],
)
def test_live_means_that_the_hook_is_called(state, live):
    """Only a module that was loaded with the hook is live."""
    assert PatchStatus("patch", "module", state, "Reason.").live is live
