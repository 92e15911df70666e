"""What `kvplug doctor` looks at: each check takes the facts and yields findings, and looks nothing up."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvplug.cli.environment import PLUGIN_GROUPS
from kvplug.cli.facts import Facts, Finding, Status
from kvplug.cli.listing import by_reason
from kvplug.compat import check_vllm_version
from kvplug.discovery import DISABLE
from kvplug.errors import UnsupportedError
from kvplug.variables import AIBRIX_PREFIXES

__all__ = ["examine"]

# Name of kvplug's plugin of vLLM.
_PLUGIN = "kvplug"
_GO_TOGETHER = "Reinstall kvplug and kvplug-hooks, in versions that go together."


def examine(facts: Facts) -> list[Finding]:
    """Return all findings, in the order in which things build on each other."""
    checks = [_python, _vllm]
    if facts.install is not None:
        checks += [_answer, _unknown_plugins, _plugins, _runner, _hook, _files, _patches]
    checks += [_connectors, _skipped, _config, _load_failures, _settings, _aibrix]
    return [finding for check in checks for finding in check(facts)]


def _python(facts: Facts) -> Iterator[Finding]:
    hooks = f", kvplug-hooks {facts.hooks_version}" if facts.hooks_version else ""
    path, version = facts.python
    yield Finding("Python", "ok", f"Python {version} ({path}), kvplug {facts.kvplug_version}{hooks}.")


def _vllm(facts: Facts) -> Iterator[Finding]:
    if facts.install is None:
        text = "vLLM isn't installed in this environment."
        yield Finding("vLLM", "problem", text, "Install vLLM 0.14 or newer in it.")
        return
    owners = " and ".join(f"{name} {version}" for name, version in facts.install.distributions)
    if len(facts.install.distributions) > 1:
        text = f"{owners} are installed over each other: they have the same files."
        yield Finding("vLLM", "problem", text, "Uninstall all of them, then install one.")
    if not facts.vllm:
        return
    what = f"vLLM {facts.vllm['version']} ({owners or 'no distribution'}) in {facts.install.folder}"
    try:
        note = check_vllm_version(facts.vllm["version"])
    except UnsupportedError as error:
        yield Finding("vLLM", "problem", f"{what} isn't supported.", str(error))
    else:
        yield Finding("vLLM", "note" if note else "ok", what + ("." if note else " is supported."), note or "")


def _answer(facts: Facts) -> Iterator[Finding]:
    """Report what kept vLLM from answering."""
    errors = {name: part["error"] for name, part in facts.answer.parts.items() if part.get("error")}
    model, files, patches = errors.pop("model", None), errors.pop("files", None), errors.pop("patches", None)
    for error in [*errors.values(), *filter(None, [facts.answer.error])]:
        yield Finding("vLLM", "problem", f"vLLM can't be asked: {error}", "See what `python -c 'import vllm'` says.")
    if model:
        text = f"vLLM can make no configuration for {facts.model}: {model}"
        yield Finding("Model runner", "problem", text, "Check the model's name, and that it can be had from here.")
    if files:
        yield Finding(
            "Files", "warning", f"kvplug-hooks can't tell whether vLLM's files are patched: {files}", _GO_TOGETHER
        )
    if patches:
        yield Finding("Patches", "warning", f"kvplug-hooks can't tell which patches there are: {patches}", _GO_TOGETHER)


# -- vLLM's plugins --------------------------------------------------------------------------------------------------


def _unknown_plugins(facts: Facts) -> Iterator[Finding]:
    known = sorted(frozenset().union(*facts.plugins.values()))
    for name in facts.environ.get("VLLM_PLUGINS", "").split(","):
        if name and name.strip() not in known:
            text = f"VLLM_PLUGINS names {name!r}, and no such plugin is installed (there are: {', '.join(known)})."
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"Did you mean {near[0]!r}?" if near else "Install it, or leave it out."
            yield Finding("Plugins", "warning", text, remedy)


def _plugins(facts: Facts) -> Iterator[Finding]:
    """See whether vLLM calls kvplug, and if not, why."""
    if error := facts.autoload.get("load_error"):
        text = f"A plugin of vLLM raises when it is called, which ends vLLM: {error}"
        yield Finding("Plugins", "problem", text, "Update or uninstall it, or name only others in VLLM_PLUGINS.")
    for error in facts.autoload.get("errors", ()):
        yield Finding("Plugins", "problem", error, _GO_TOGETHER)
    value = facts.environ.get("VLLM_PLUGINS")
    # What vLLM does with the variable: it splits at commas, and doesn't strip.
    if value is not None and _PLUGIN not in value.split(","):
        yield _left_out(value)
    elif _PLUGIN not in facts.plugins[PLUGIN_GROUPS[0]]:
        text = "kvplug has no entry point that vLLM could call: its metadata isn't where Python looks for it."
        yield Finding("Plugins", "problem", text, "Install kvplug with pip, rather than put its folder on the path.")
    elif facts.autoload.get("called"):
        yield Finding("Plugins", "ok", "vLLM calls kvplug in each of its processes.")
    elif facts.autoload:
        text = "vLLM doesn't call kvplug, although kvplug is installed."
        remedy = "Look for stale metadata of kvplug (`*.egg-info`) in the folders of the path, and remove it."
        yield Finding("Plugins", "problem", text, remedy)


def _left_out(value: str) -> Finding:
    names = [name.strip() for name in value.split(",")]
    if _PLUGIN in names:
        why, better = "has a blank beside kvplug, and vLLM doesn't strip blanks", ",".join(names)
    elif not any(names):
        why, better = "is set to nothing, so vLLM loads no plugin", _PLUGIN
    else:
        why, better = "doesn't name kvplug, so vLLM doesn't load it", ",".join([*filter(None, names), _PLUGIN])
    text = f"VLLM_PLUGINS={value!r} {why}: no connector of kvplug will be found."
    return Finding("Plugins", "problem", text, f"Unset VLLM_PLUGINS, or set VLLM_PLUGINS={better}.")


# -- The hook --------------------------------------------------------------------------------------------------------


def _runner(facts: Facts) -> Iterator[Finding]:
    runner = facts.runner
    if runner.kind == "v2" and not facts.vllm.get("has_triton"):
        text = f"vLLM would use model runner v2 ({runner.why}), which needs Triton, and vLLM can't use Triton here."
        yield Finding("Model runner", "problem", text, "Unset VLLM_USE_V2_MODEL_RUNNER, or install a Triton that fits.")
    elif runner.kind is not None:
        yield Finding("Model runner", "ok", f"vLLM will use model runner {runner.kind}: {runner.why}.")
    elif worker := facts.answer.parts.get("model", {}).get("worker"):
        status: Status = "problem" if facts.hooked else "note"
        text = f"The worker {worker} isn't vLLM's own, nor is its model runner: the hook can't be live there."
        yield Finding("Model runner", status, text, "Use connectors that need no hook.")
    elif facts.vllm:
        text = f"Which model runner vLLM will use isn't certain: {runner.why}."
        yield Finding("Model runner", "note", text, "Ask with --model.")


def _hook(facts: Facts) -> Iterator[Finding]:
    certain = facts.runner.kind
    for kind, row in facts.runners.items():
        if certain not in (None, kind):
            continue
        if row["delivery"] is not None:
            how = {"import": "patched in as the module is imported", "file": "in the module's file"}[row["delivery"]]
            yield Finding("Hook", "ok", f"The hook is live in model runner {kind}: {how}.")
            continue
        text = f"The hook isn't live in model runner {kind}."
        if row["error"]:
            text = f"Model runner {kind} can't be imported here ({row['error']}), so its hook can't be seen."
        if facts.hooked:
            status: Status = "warning" if row["error"] or not certain else "problem"
            text = f"{text} There, {', '.join(facts.hooked)} will refuse to start."
            yield Finding("Hook", status, text, _deliver(facts, row))
        else:
            yield Finding("Hook", "note", text, "No connector in question needs it.")


def _files(facts: Facts) -> Iterator[Finding]:
    """Report on patches in vLLM's files, where somebody put some; what that means for the hook is told by `_hook`."""
    files = facts.files
    if not files:
        return
    if files["state"] == "applied":
        text = f"vLLM's files have {', '.join(files['applied'])}, as `kvplug-hooks apply` wrote them."
        yield Finding("Files", "ok", text)
    elif files["state"] == "not needed":
        text = "`kvplug-hooks apply` patched this vLLM's files before, and it needs no patch now."
        yield Finding("Files", "note", text, "Run `kvplug-hooks revert` to have that forgotten.")
    else:
        text = f"The patches in vLLM's files are {files['state']}: {' '.join(files['reasons'])}"
        yield Finding(
            "Files", "warning", text, "See `kvplug-hooks verify`; `kvplug-hooks revert` does without patches."
        )


def _patches(facts: Facts) -> Iterator[Finding]:
    """Report on patches but the hook, by what vLLM's files allow, and on declarations that nobody can use."""
    others = facts.patches.get("others", ())
    fine = [f"{one['patch']} {_STANDS[one['state']]}" for one in others if one["ok"]]
    if fine:
        yield Finding("Patches", "ok", f"Beside the hook, {' and '.join(fine)}.")
    for one in others:
        if not one["ok"]:
            remedy = "See `kvplug-hooks status`; vLLM runs without this patch."
            yield Finding("Patches", "warning", f"{one['patch']} is {one['state']}: {one['reason']}", remedy)
    for reason in facts.patches.get("rejected", ()):
        yield Finding("Patches", "warning", reason)


#: How a sentence about a patch that is fine goes on.
_STANDS = {
    "fits": "is put in where its module is imported",
    "already in source": "is in vLLM's files",
    "not needed": "isn't needed",
    "not concerned": "doesn't concern the model",
}


def _deliver(facts: Facts, row: Mapping[str, Any]) -> str:
    if facts.hooks_version is None:
        return "Install kvplug-hooks."
    if not facts.autoload.get("called"):
        return "Have vLLM call kvplug: see Plugins."
    return str(row["reason"] or _GO_TOGETHER)


# -- Connectors ------------------------------------------------------------------------------------------------------


def _connectors(facts: Facts) -> Iterator[Finding]:
    for value, row in facts.answer.connectors.items():
        name = facts.names.get(value, value)
        if row["error"]:
            remedy = f"While you don't need {name}, {DISABLE}={name} turns it off."
            yield Finding("Connectors", _unless_asked(facts), row["error"], remedy)
        else:
            needs = f"needs the hook ({', '.join(row['hooks'])})" if row["hooks"] else "needs no hook"
            yield Finding("Connectors", "ok", f"{name} can be loaded, and {needs}.")


def _skipped(facts: Facts) -> Iterator[Finding]:
    live = {entry.name for entry in facts.discovery.entries}
    for entry, who in by_reason(facts.discovery.skipped):
        text = f"{entry.name or 'An entry'} of {who} is skipped."
        harmless = DISABLE in entry.reason or entry.name in live
        yield Finding("Connectors", "note" if harmless else _unless_asked(facts), text, entry.reason)
    for row in facts.autoload.get("skipped", ()):
        if row["name"] in facts.autoload["vllm_names"]:
            text = f"{row['name']} of {row['distribution']} {row['version']} is skipped."
            yield Finding("Connectors", "warning", text, row["reason"])


def _unless_asked(facts: Facts) -> Status:
    """With a config, only that config's connectors decide whether all is well."""
    return "problem" if facts.config is None else "warning"


def _config(facts: Facts) -> Iterator[Finding]:
    if facts.config_error:
        text = f"The value of --kv-transfer-config can't be read: {facts.config_error}"
        yield Finding(
            "Config", "problem", text, "Put the JSON object into single quotes, keys and names into double ones."
        )
    for check in facts.checks:
        where = f"--kv-transfer-config {check['path']}".strip()
        if not check["error"]:
            yield Finding("Config", "ok", f"{where} names {check['name']}, and vLLM finds it.")
            continue
        known = [*facts.autoload.get("vllm_names", ()), *facts.autoload.get("registered", ())]
        near = difflib.get_close_matches(str(check["name"]), known, n=1)
        remedy = "Correct it."
        if check["name"] not in known:
            remedy = "See `kvplug list` for the connectors that there are."
            if near:
                remedy = f"Did you mean {near[0]!r}? {remedy}"
        yield Finding("Config", "problem", f"{where}: {check['error']}", remedy)


def _load_failures(facts: Facts) -> Iterator[Finding]:
    """Say what becomes of a request whose load fails, where connectors may promise loads to the scheduler.

    What decides on the worker promises nothing. Of a `MultiConnector`'s children, vLLM takes the outermost's policy.
    """
    policy = facts.checks[0].get("load_failure_policy") if facts.checks else None
    promising = [check for check in facts.checks if not check["error"] and _may_promise(check)]
    if policy != "fail" or not promising:
        return
    names = ", ".join(dict.fromkeys(str(check["name"]) for check in promising))
    default = "" if "kv_load_failure_policy" in (facts.config or {}) else ", which is vLLM's default"
    text = f'vLLM fails a request if a load of {names} fails ("kv_load_failure_policy": "fail"{default}).'
    safe = [str(check["name"]) for check in promising if check.get("class") in _PROMISE_MEMORY]
    but = f" {safe[0]} promises only what is in host memory, so that its loads hardly ever fail." if safe else ""
    remedy = f'Set "kv_load_failure_policy": "recompute" to have such a request computed instead.{but}'
    yield Finding("Config", "note", text, remedy)


#: Classes of connectors whose promises only a fault of memory can break.
_PROMISE_MEMORY = ("Type2Connector",)


def _may_promise(check: Mapping[str, Any]) -> bool:
    return "before_update_states" not in check["hooks"] and check.get("class") != "MultiConnector"


# -- Settings --------------------------------------------------------------------------------------------------------


def _settings(facts: Facts) -> Iterator[Finding]:
    for name, row in _setting_rows(facts):
        if row["error"]:
            yield Finding("Settings", "problem", f"The settings of {name} are wrong.", row["error"])
        else:
            values = ", ".join(f"{key}={value} ({source})" for key, (value, source) in row["values"].items())
            yield Finding("Settings", "ok", f"{name}: {values}.")
            yield from _tiers(row.get("tiers", ()))
    if facts.environ.get(DISABLE):
        yield Finding("Settings", "note", f"{DISABLE}={facts.environ[DISABLE]} turns connectors off.")


def _tiers(rows: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Report on the L2 tiers that settings name, which aren't opened for that."""
    for row in rows:
        if row["error"]:
            yield Finding("L2", "problem", f"L2 tier {row['name']} can't be used.", row["error"])
        else:
            yield Finding("L2", "ok", f"L2 tier {row['name']}: {row['place']} (not tried).")


def _aibrix(facts: Facts) -> Iterator[Finding]:
    rows = [row for _, row in _setting_rows(facts) if not row["error"]]
    used = {source for row in rows for _, source in row["values"].values()}
    given = {name for name in facts.environ if name.startswith(AIBRIX_PREFIXES) and facts.environ[name]}
    if taken := sorted(given & used):
        yield Finding("Settings", "ok", f"Taken over from AIBrix's variables: {', '.join(taken)}.")
    if rows and (ignored := sorted(given - used)):
        text = f"These variables of AIBrix have no effect: {', '.join(ignored)}."
        yield Finding("Settings", "note", text, "Unset them, or use kvplug's settings.")


def _setting_rows(facts: Facts) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (connector, its settings or what is wrong with them) for the connectors in question."""
    if facts.config is not None:
        return [(str(check["name"]), check["settings"]) for check in facts.checks if check["settings"]]
    return [(facts.names.get(value, value), row) for value, row in facts.answer.settings.items()]
