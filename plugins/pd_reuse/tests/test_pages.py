"""docs/pd_reuse.md and docs/pd_reuse-limits.md say of parameters, metrics and names what the code has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomllib

from kvplug_pd_reuse import params

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [DOCS / "pd_reuse.md", DOCS / "pd_reuse-limits.md"]
NAMESPACE = bytes(range(32))


def samples():
    """Return the two JSON objects of the page: what a router asks with, and what the answer has."""
    asked, answered = re.findall(r"^```json\n(.*?)^```", PAGES[0].read_text(), re.MULTILINE | re.DOTALL)
    return json.loads(asked), json.loads(answered)


def test_the_requests_parameters_ask_for_a_prefill():
    """What the page shows is read as that, by two of its keys alone."""
    asked, _ = samples()
    assert params.read(asked, NAMESPACE) == params.Handover("prefill")
    two = {name: asked[name] for name in ("do_remote_decode", "do_remote_prefill")}
    assert params.read(two, NAMESPACE) == params.Handover("prefill")
    assert params.read({"do_remote_decode": True}, NAMESPACE) == params.Handover("prefill")
    assert params.read(dict.fromkeys(two, True), NAMESPACE) == params.read({}, NAMESPACE) == params.Handover()


def test_the_answers_parameters():
    """The page has every key that an answer has, and one that vLLM adds; values that don't depend on anything, too."""
    _, shown = samples()
    request = SimpleNamespace(request_id="cmpl-1", num_prompt_tokens=1000)
    made = params.answer(request, NAMESPACE, engine_id="e", layout=(1, 1), num_stored_tokens=1000)
    assert shown.keys() - {"remote_prefill_cached_tokens"} == made.keys()
    assert shown["kvplug"].keys() == made["kvplug"].keys()
    fixed = ("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_host", "remote_port", "tp_size")
    assert {name: shown[name] for name in fixed} == {name: made[name] for name in fixed}
    del shown["kvplug"]["namespace"], made["kvplug"]["namespace"]
    assert shown["kvplug"] == made["kvplug"]


def test_what_is_read_of_an_answer():
    """The decode engine reads what the page says, and takes other models and versions as it says."""
    request = SimpleNamespace(request_id="cmpl-1", num_prompt_tokens=10)
    made = params.answer(request, NAMESPACE, engine_id="e", layout=(1, 1), num_stored_tokens=10)
    read = {name: made[name] for name in ("do_remote_prefill", "do_remote_decode", "tp_size", "kvplug")}
    assert params.read(read, NAMESPACE) == params.read(made, NAMESPACE, [(1, 1)]) == params.Handover("decode", 10)
    assert params.read(read, NAMESPACE, [(2, 1)]).problem
    reasons = {
        params.read(made, bytes(32)).problem,
        params.read(made | {"kvplug": {**made["kvplug"], "version": params.VERSION + 1}}, NAMESPACE).problem,
        params.read(made, NAMESPACE, [(2, 1)]).problem,
    }
    assert reasons == set(re.findall(r'`reason="(\w+)"`', PAGES[0].read_text()))
    (row,) = re.findall(r"handovers_refused_total` .*", (DOCS / "metrics.md").read_text())
    assert all(f"`{reason}`" in row for reason in reasons)


def test_metrics_have_these_names():
    """Every metric that the page names is one."""
    pytest.importorskip("vllm")
    from kvplug.metrics import METRICS

    page = PAGES[0].read_text()
    table = page.split("## When something goes wrong", 1)[1].split("\n## ", 1)[0]
    counted = [line.rsplit("|", 2)[1] for line in table.splitlines() if line.startswith("| ")]
    named = {name for cell in counted for name in re.findall(r"`(\w+)`", cell)}
    named |= {name.removesuffix("_total") for name in re.findall(r"vllm:kvplug_(\w+)", page)} - {""}
    assert named >= {"handovers", "handover_timeouts", "handover_tokens_computed", "handovers_refused"}
    assert named - METRICS.keys() == set()


def test_both_names_are_of_one_class():
    """AIBrix's name is an entry point of the same class."""
    declared = tomllib.loads((ROOT / "plugins" / "pd_reuse" / "pyproject.toml").read_text())["project"]["entry-points"]
    connectors = declared["vllm.kv_connectors"]
    assert connectors.keys() == {"PDReuseConnector", "AIBrixPDReuseConnector"}
    assert len(set(connectors.values())) == 1
    text = PAGES[0].read_text()
    assert all(f"`{name}`" in text for name in connectors)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Files, and headings in them."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        path = page if not name else (page.parent / name)
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert anchor in anchors, target
