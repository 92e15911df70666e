"""Which patches there are: our own, and those of other distributions, in fresh interpreters."""

from __future__ import annotations

import json

import pytest

from kvplug_hooks import Before, Patch
from kvplug_hooks.patches import all_patches
from kvplug_hooks.patches.before_update_states import V1, V2
from kvplug_hooks.patches.hybrid_page_size import HYBRID_PAGE_SIZE
from kvplug_hooks.registry import OWN, Entry, Registry, load, own_patches

DECLARE = """
import sys
sys.loaded = [*getattr(sys, "loaded", ()), __name__]
from kvplug_hooks import Before, Patch

def patch(id, module="vllm.v1.worker.gpu_model_runner", **changes):
    values = dict(
        id=id,
        purpose="Test.",
        removal_condition="Never.",
        module=module,
        function="GPUModelRunner._update_states",
        anchor=Before("return num_scheduled_tokens"),
        import_from="acme_end",
        import_name="touched",
        call="scheduler_output = touched(scheduler_output)",
        known_releases=("0.1.0",),
    )
    return Patch(**values | changes)

"""

END = """
def touched(value):
    print("touched", value.total_num_scheduled_tokens)
    return value
"""

REMEDY = "uninstall one, or have the id changed."

INSTALL = """
import sys
import kvplug_hooks
kvplug_hooks.install()
"""


@pytest.fixture
def shop(sandbox):
    """A made-up vLLM, and a way to install distributions with patches for it."""
    sandbox.write("acme_end", END)
    return sandbox


def test_our_own_patches_are_found_by_themselves():
    """Each module of the package has some; the hook's and the page size's are among them."""
    assert own_patches() == all_patches() == (V1, V2, HYBRID_PAGE_SIZE)
    registry = load()
    assert registry.patches[:3] == own_patches()
    assert registry.source_of(V1) == OWN


def test_a_patch_of_another_distribution_is_applied_beside_ours(shop):
    """An entry point is all that it takes. Two patches of one module, at different places, are both in it."""
    shop.ship("acme", DECLARE + 'PATCHES = patch("acme.touch")\n')
    out = shop.run(
        INSTALL,
        """
        from vllm.v1.worker import gpu_model_runner as v1
        runner = v1.GPUModelRunner()
        runner._update_states(Output(total_num_scheduled_tokens=3))
        runner.execute_model(Output(total_num_scheduled_tokens=4))
        print(len(dispatch.calls), v1.__kvplug_patches__, kvplug_hooks.status()["acme.touch"].state)
        """,
    )
    assert out.split("\n") == ["touched 3", "1 ('before_update_states.v1', 'acme.touch') applied"]


def test_sequences_and_several_entry_points(shop):
    """A value may be one patch or any sequence of them, and a distribution may have several."""
    shop.write("second", DECLARE + 'MORE = (patch("acme.three"),)\n')
    shop.ship("acme", DECLARE + 'PATCHES = [patch("acme.one"), patch("acme.two")]\n')
    with (shop.folder / "acme-1.0.dist-info/entry_points.txt").open("a") as file:
        file.write("more = second:MORE\n")
    out = shop.run(INSTALL, "print(*[name for name in kvplug_hooks.status() if 'acme' in name])")
    assert out == "acme.one acme.two acme.three"


def test_a_broken_entry_point_is_kept_with_its_reason_and_stops_no_other(shop):
    """Whatever is wrong with one, the others are there, and the reason names the distribution."""
    shop.ship("fine", DECLARE + 'PATCHES = patch("fine")\n')
    shop.ship("crashes", "raise RuntimeError('no luck')\n")
    shop.ship("exits", "import sys\nsys.exit(3)\n")
    shop.ship("lacks", "OTHER = 1\n")
    shop.ship("strange", "PATCHES = ['patch']\n")
    shop.ship("wrong", DECLARE + 'PATCHES = patch("wrong", module="torch.nn")\n')
    shop.ship("early", DECLARE + 'PATCHES = patch("early", known_releases=())\n')
    shop.ship("method", DECLARE + 'PATCHES = patch("method", applied="magic")\n')
    shop.ship("malformed", "", "point")
    (shop.folder / "malformed-1.0.dist-info/entry_points.txt").write_text("[kvplug.patches]\npoint = nothing\n")
    out = shop.run(
        INSTALL,
        """
        import json
        from kvplug_hooks.finder import FINDER
        print(json.dumps({entry.source: entry.reason for entry in FINDER.registry.rejected}))
        from vllm.v1.worker import gpu_model_runner as v1
        print(v1.__kvplug_patches__)
        """,
    )
    reasons, patches = out.split("\n")
    reasons = json.loads(reasons)
    assert patches == "('before_update_states.v1', 'fine')"
    assert reasons.pop("malformed 1.0") == (
        "Its value 'nothing' isn't of the form package.module:Class: tell its publisher."
    )
    said = {
        "crashes": "RuntimeError: no luck",
        "exits": "SystemExit: 3",
        "lacks": "AttributeError: module 'lacks' has no attribute 'PATCHES'",
        "strange": "TypeError: it is or contains a str, not a kvplug_hooks.Patch",
        "wrong": "ValueError: The patch wrong is for torch.nn: only modules of vllm can be patched.",
        "early": "ValueError: The patch early knows no vLLM release: name those whose source was read.",
        "method": "ValueError: The patch method is applied by 'magic': use `finder` or `replace`.",
    }
    assert reasons == {
        f"{name} 1.0": f"{name}:PATCHES of {name} 1.0 can't be loaded ({error}): tell its publisher."
        for name, error in said.items()
    }


def test_an_id_that_two_distributions_declare_belongs_to_neither(shop):
    """The reason names both. Ours can't be taken away."""
    shop.ship("first", DECLARE + 'PATCHES = [patch("same"), patch("before_update_states.v1")]\n')
    shop.ship("second", DECLARE + 'PATCHES = [patch("same"), patch("other")]\n')
    out = shop.run(
        INSTALL,
        """
        import json
        from kvplug_hooks.finder import FINDER
        print(json.dumps([[entry.name, entry.source, entry.reason] for entry in FINDER.registry.rejected]))
        from vllm.v1.worker import gpu_model_runner as v1
        v1.GPUModelRunner().execute_model(Output(total_num_scheduled_tokens=4))
        print(len(dispatch.calls), v1.__kvplug_patches__)
        """,
    )
    rejected, live = out.split("\n")
    assert live == "1 ('before_update_states.v1', 'other')"
    assert sorted(json.loads(rejected)) == [
        [
            "before_update_states.v1",
            "first 1.0",
            f"kvplug-hooks and first 1.0 both declare a patch {V1.id}, so kvplug-hooks's is used: {REMEDY}",
        ],
        *(
            [
                "same",
                f"{name} 1.0",
                f"first 1.0 and second 1.0 both declare a patch same, so none of them is used: {REMEDY}",
            ]
            for name in ("first", "second")
        ),
    ]


def test_h4_two_patches_at_one_place_are_refused_and_named(shop):
    """Neither is applied, the rest of the module is."""
    shop.ship("first", DECLARE + 'PATCHES = patch("first")\n')
    shop.ship(
        "second",
        DECLARE + 'PATCHES = patch("second", import_name="other", call="scheduler_output = other(scheduler_output)")\n',
    )
    out = shop.run(
        INSTALL,
        """
        from vllm.v1.worker import gpu_model_runner as v1
        print(v1.__kvplug_patches__)
        for name in ("first", "second"):
            print(kvplug_hooks.status()[name].state, kvplug_hooks.status()[name].reason)
        """,
    )
    applied, *conflicts = out.split("\n")
    assert applied == "('before_update_states.v1',)"
    place = "GPUModelRunner._update_states, `return num_scheduled_tokens`"
    said = f"failed In {V1.path}, the patches first and second want the same place in {place}; leave one of them out."
    assert conflicts == [said, said]


def test_a_name_that_says_the_target_defers_loading(shop):
    """Processes that never import the target never load the declaration, and `status` still knows the patch."""
    target = "vllm.v1.worker.gpu_model_runner"
    shop.ship("acme", DECLARE + 'PATCHES = patch("acme.touch")\n', f"touch@{target}")
    out = shop.run(
        INSTALL,
        """
        loaded = lambda: getattr(sys, "loaded", [])
        print(loaded())
        import vllm.v1.worker.gpu.model_runner
        print(loaded())
        from vllm.v1.worker import gpu_model_runner as v1
        print(loaded(), v1.__kvplug_patches__)
        """,
    )
    assert out.split("\n") == ["[]", "[]", "['acme'] ('before_update_states.v1', 'acme.touch')"]
    out = shop.run(INSTALL, "print(kvplug_hooks.status()['acme.touch'].state, sys.loaded)")
    assert out == "pending ['acme']"
    # A target that is loaded already is no reason to wait.
    out = shop.run("import vllm.v1.worker.gpu_model_runner", INSTALL, "print(sys.loaded)")
    assert out == "['acme']"


def test_a_target_that_the_name_does_not_say_is_refused(shop):
    """Else the patch would be silently inert where its real target comes first."""
    shop.ship("acme", DECLARE + 'PATCHES = patch("acme.touch")\n', "touch@vllm.v1.core.kv_cache_utils")
    out = shop.run(
        INSTALL,
        """
        from kvplug_hooks.finder import FINDER
        kvplug_hooks.status()
        print(*[entry.reason for entry in FINDER.registry.rejected])
        """,
    )
    assert "it patches vllm.v1.worker.gpu_model_runner, which the entry point's name doesn't say" in out


def test_a_declaration_that_imports_its_own_target(shop):
    """The finder is there before other distributions' code runs, but can't help a target it doesn't know yet."""
    shop.ship(
        "acme",
        "from vllm.v1.worker import gpu_model_runner\n" + DECLARE + 'PATCHES = patch("acme.touch")\n',
    )
    out = shop.run(
        INSTALL,
        """
        from vllm.v1.worker import gpu_model_runner as v1
        entry = kvplug_hooks.status()["acme.touch"]
        print(v1.__kvplug_patches__, entry.state, "imported before kvplug's finder" in entry.reason, entry.reason)
        """,
    )
    assert out.startswith("('before_update_states.v1',) too late True")
    assert "was installed, by acme;" in out


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("fix", None),
        ("fix@", None),
        ("fix@vllm.a.b", {"vllm.a.b"}),
        ("fix@vllm.a, vllm.b", {"vllm.a", "vllm.b"}),
    ],
)
def test_what_an_entry_point_s_name_says(name, targets):
    """Everything behind the @ is module names, separated by commas."""
    assert Entry(name, "module", "attr", "source").targets == targets


def test_conflicts_are_the_same_in_any_order():
    """What is found last doesn't win, and what was found first doesn't either."""
    one, two = (
        Patch(
            id="same",
            purpose=purpose,
            removal_condition="Never.",
            module="vllm.m",
            function="f",
            anchor=Before("pass"),
            import_from="m",
            import_name="n",
            call="n()",
            known_releases=("1",),
        )
        for purpose in ("one", "two")
    )
    registry = Registry()
    registry.add([one], "first 1")
    assert registry.patches == (one,)
    registry.add([two], "second 2")
    assert registry.patches == ()
    assert {entry.source for entry in registry.rejected} == {"first 1", "second 2"}
