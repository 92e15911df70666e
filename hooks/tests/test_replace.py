"""Delivery into loaded modules: a function's code is replaced, in fresh interpreters with a made-up vLLM."""

from __future__ import annotations

import json

import pytest

#: vLLM's module first, with references to its functions, and then the plugin.
EARLY = """
from vllm.v1 import early
from vllm.v1.early import double, halve
kept = {"double": double, "halve": halve}
import kvplug_hooks
kvplug_hooks.install()
status = lambda: {name: [entry.state, entry.reason] for name, entry in kvplug_hooks.status().items() if "." not in name}
"""


def test_references_that_others_hold_are_patched(early):
    """The function object stays, and with it whoever imported it; name, globals, defaults and module stay too."""
    out = early('patch("double", "double")').run(
        EARLY,
        """
        print(kept["double"] is early.double, double(3), double(3, factor=5))
        print(double.__name__, double.__qualname__, double.__module__, double.__defaults__, double.__doc__)
        early.LIMIT = 1
        try:
            double(1)
        except ValueError as error:
            print(error)
        print(early.__kvplug_patches__, kvplug_hooks.patched_modules(), status()["double"])
        """,
    )
    assert out.split("\n") == [
        "True 8 20",
        "double double vllm.v1.early (2,) Multiply.",
        "too large",
        "('double',) ('vllm.v1.early',) ['applied', \"The function's code was replaced in the loaded module.\"]",
    ]


def test_tracebacks_and_getsource(early):
    """Line numbers are the file's, and the text beside them is the patched one."""
    sandbox = early('patch("double", "double")')
    out = sandbox.run(
        EARLY,
        """
        import inspect, linecache, traceback
        try:
            double(50)
        except ValueError as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
        linecache.checkcache()
        lines, first = inspect.getsourcelines(double)
        print(frame.filename, frame.lineno, frame.line, first, sep="\\n")
        print(*[number for number, line in enumerate(lines, first) if "plus_one(" in line])
        print("".join(lines).count("plus_one("), inspect.getsource(early).count("import plus_one"))
        """,
    )
    filename, raised, line, first, call, counts = out.split("\n")
    text = (sandbox.folder / "vllm/v1/early.py").read_text().split("\n")
    assert filename == str(sandbox.folder / "vllm/v1/early.py")
    assert line == 'raise ValueError("too large")' == text[int(raised) - 1].strip()
    assert text[int(first) - 1] == "def double(number, factor=2):"
    assert text[int(call) - 1].strip() == "result = number * factor"
    assert counts == "1 1"


@pytest.mark.parametrize(
    ("function", "call", "result"),
    [
        ("halve", "halve(3)", "2.0"),
        ("Table.lookup", "early.Table().lookup(3)", "4"),
        ("Table.fixed", "early.Table.fixed(3)", "4"),
    ],
)
def test_decorated_functions_and_methods(early, function, call, result):
    """The function below its decorators is the one that is patched."""
    out = early(f'patch("it", "{function}")').run(EARLY, f"print({call}, status()['it'][0])")
    assert out == f"{result} applied"


def test_several_patches_of_one_module(early):
    """All that fit are applied; one that doesn't isn't in their way, and two at one place are refused."""
    sandbox = early(
        'patch("double", "double")',
        'patch("late", "double", anchor=Before("return result"), import_name="plus_ten", '
        'call="result = plus_ten(number)")',
        'patch("halve", "halve")',
        'patch("absent", "triple")',
        'patch("one", "Table.lookup", import_name="plus_ten", call="number = plus_ten(number)")',
        'patch("two", "Table.lookup")',
        'patch("broken", "Table.fixed", import_name="missing", call="number = missing(number)")',
    )
    with (sandbox.folder / "other_end.py").open("a") as file:
        file.write("\ndef plus_ten(number):\n    return number + 10\n")
    out = sandbox.run(EARLY, "import json", "print(double(1), halve(1), early.Table().lookup(1), json.dumps(status()))")
    # `late` reads a number that is no parameter of its own making: double's number, plus one by `double`.
    numbers, states = out.split(" {")
    states = json.loads("{" + states)
    assert numbers == "12 1.0 1"
    assert {name for name, (state, _) in states.items() if state == "applied"} == {"double", "late", "halve"}
    assert "it defines triple 0 times instead of once" in states["absent"][1]
    for name in ("one", "two"):
        assert states[name][0] == "failed"
        assert "the patches one and two want the same place in Table.lookup" in states[name][1]
    assert "`from other_end import missing` fails (ImportError(" in states["broken"][1]
    assert states["broken"][1].endswith("reinstall other-end.")


def test_a_running_function_is_not_disturbed(early):
    """H14: a call that is under way ends as it began; the next one is patched."""
    more = "\n\ndef count(number):\n    yield number\n    yield number + 1\n"
    out = early('patch("count", "count")', more=more).run(
        """
        from vllm.v1 import early
        running = early.count(1)
        print(next(running))
        import kvplug_hooks
        kvplug_hooks.install()
        print(next(running), list(early.count(1)))
        """
    )
    assert out.split("\n") == ["1", "2 [2, 3]"]


def test_an_executed_function_is_recognised(early):
    """What the interpreter keeps in a function's code as it runs it doesn't make it another function."""
    out = early('patch("double", "double")').run(
        "from vllm.v1.early import double",
        "for number in range(2000): double(number % 20)",
        "import kvplug_hooks",
        "kvplug_hooks.install()",
        "print(double(3), kvplug_hooks.status()['double'].state)",
    )
    assert out == "8 applied"


def test_a_module_that_is_not_loaded_yet_is_patched_as_it_is_imported(early):
    """Then the finder does it, and no code is replaced."""
    out = early('patch("double", "double")').run(
        """
        import kvplug_hooks
        kvplug_hooks.install()
        before = kvplug_hooks.status()["double"].state
        from vllm.v1.early import double
        print(before, double(3), kvplug_hooks.status()["double"].reason)
        """
    )
    assert out == "pending 8 It was patched in as the module was imported."


def test_installing_again_changes_nothing(early):
    """The finder can go and come back; a patched function is patched once."""
    out = early('patch("double", "double")').run(
        EARLY,
        """
        code = double.__code__
        kvplug_hooks.install()
        kvplug_hooks.uninstall()
        kvplug_hooks.install()
        print(double.__code__ is code, double(3), early.__kvplug_patches__, status()["double"])
        import importlib
        importlib.reload(early)
        print(early.double(3), double is early.double, status()["double"][0])
        """,
    )
    assert out.split("\n") == [
        "True 8 ('double',) ['applied', 'It was patched in memory before.']",
        "8 False applied",
    ]


def test_spawned_and_forked_children(early):
    """A forked process has the replaced function; a spawned one imports the module and replaces it itself."""
    sandbox = early('patch("double", "double")')
    sandbox.write(
        "child",
        """
        from vllm.v1.early import double

        def work(queue):
            before = double(3)
            import kvplug_hooks
            kvplug_hooks.install()
            queue.put((before, double(3), kvplug_hooks.status()["double"].state))
        """,
    )
    out = sandbox.run(
        """
        import multiprocessing
        import child, kvplug_hooks
        if __name__ == "__main__":
            kvplug_hooks.install()
            for method in ("fork", "spawn"):
                context = multiprocessing.get_context(method)
                queue = context.SimpleQueue()
                process = context.Process(target=child.work, args=(queue,))
                process.start()
                print(method, *queue.get())
                process.join()
        """
    )
    assert out.split("\n") == ["fork 8 8 applied", "spawn 6 8 applied"]


def test_h15_a_patch_that_is_not_needed_replaces_nothing(early):
    """The check looks at the source of the loaded module."""
    out = early(
        'patch("double", "double", not_needed=lambda source: "Fixed." if "LIMIT" in source else None)',
        'patch("halve", "halve", not_needed=lambda source: 1 / 0)',
    ).run(EARLY, "print(double(3), halve(3), *status()['double'], *status()['halve'])")
    assert out.startswith("6 1.5 not needed Fixed. failed vllm/v1/early.py can't take the patch halve: its check of ")


def test_a_function_that_moved(early):
    """Of several modules the one that has the function counts, whichever of them is loaded."""
    moved = 'patch("double", "double", module="vllm.v1.later", former_modules=("vllm.v1.early",))'
    sandbox = early(moved)
    assert sandbox.run(EARLY, "print(double(3), *status()['double'])").startswith("8 applied")
    source = (sandbox.folder / "vllm/v1/early.py").read_text()
    sandbox.write("vllm.v1.later", source)
    sandbox.write("vllm.v1.early", source.replace("def double", "def triple") + "\n\ndouble = triple\n")
    out = sandbox.run(
        EARLY, "print(*status()['double'])", "from vllm.v1 import later", "print(later.double(3), *status()['double'])"
    )
    assert out.split("\n") == [
        "pending The module will be patched when it is imported.",
        "8 applied It was patched in as the module was imported.",
    ]
    (sandbox.folder / "vllm/v1/later.py").unlink()
    out = sandbox.run(EARLY, "print(*status()['double'])")
    nowhere = "vllm.v1.early has no double. This vLLM doesn't have it elsewhere either"
    assert out == f"failed {nowhere}: use a vLLM from 0.1.0 to 0.1.0."
