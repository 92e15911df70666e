"""`kvplug doctor`: will connectors work here, and if not, why."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, replace
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from kvplug.cli.ask import TIMEOUT, Answer, ask
from kvplug.cli.checks import examine
from kvplug.cli.console import console, working
from kvplug.cli.environment import plugin_names, version_of, vllm_install
from kvplug.cli.facts import Facts, Finding, summary
from kvplug.discovery import discover

__all__ = ["doctor"]

_STYLES = {"ok": "green", "note": "blue", "warning": "yellow", "problem": "bold red"}


@click.command(short_help="Say whether connectors will work here.")
@click.option("--model", metavar="M", help="Name or path of a model, to tell also what depends on it.")
@click.option(
    "--kv-transfer-config", "config", metavar="JSON", help="A value for vLLM's option of that name, to check it."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=TIMEOUT, show_default=True, help="Seconds to wait for vLLM."
)
def doctor(*, model: str | None, config: str | None, as_json: bool, timeout: float) -> None:
    """Say whether connectors will work in this environment, and what to do if not.

    Looks at vLLM, at how it is told of connectors, at the model runner and its hook, at each connector and its
    settings. The last line says it all in one line. The exit status is 0 if all is well and 1 if there is a
    problem.

    vLLM and the connectors are imported in a subprocess, which takes some seconds.
    """
    facts = _gather(model, config, timeout)
    findings = examine(facts)
    line = summary(facts, findings)
    ok = all(finding.status != "problem" for finding in findings)
    if as_json:
        click.echo(json.dumps(_as_json(facts, findings, line, ok=ok), indent=2))
    else:
        _print(findings, line, ok=ok)
    sys.exit(0 if ok else 1)


def _gather(model: str | None, config: str | None, timeout: float) -> Facts:
    facts = Facts(
        environ=os.environ,
        python=(sys.executable, platform.python_version()),
        kvplug_version=version_of("kvplug"),
        hooks_version=version_of("kvplug-hooks"),
        install=vllm_install(),
        plugins=plugin_names(),
        discovery=discover(),
        answer=Answer(),
        model=model,
    )
    if config is not None:
        facts = replace(facts, **_read(config))
    if facts.install is None:
        return facts
    parts = ["vllm", "autoload", "connectors", "runners", "files", "patches"]
    parts += ["config"] if facts.config is not None and not facts.config_error else []
    parts += ["model"] if model is not None else []
    with working("Asking vLLM and the connectors…"):
        return replace(facts, answer=ask(*parts, model=model, config=facts.config, timeout=timeout))


def _read(config: str) -> dict[str, Any]:
    try:
        value = json.loads(config)
    except ValueError as error:
        return {"config": {}, "config_error": str(error)}
    if not isinstance(value, dict):
        return {"config": {}, "config_error": f"it is a {type(value).__name__}, not a JSON object"}
    return {"config": value}


def _as_json(facts: Facts, findings: list[Finding], line: str, *, ok: bool) -> dict[str, Any]:
    return {
        "ok": ok,
        "summary": line,
        "findings": [asdict(finding) for finding in findings],
        "python": {"executable": facts.python[0], "version": facts.python[1]},
        "kvplug": facts.kvplug_version,
        "kvplug_hooks": facts.hooks_version,
        "vllm": {
            "version": facts.vllm.get("version"),
            "distributions": [list(owner) for owner in facts.install.distributions] if facts.install else [],
        },
        "runner": facts.runner.kind,
        "hook": {kind: row["delivery"] for kind, row in facts.runners.items()},
        "files": facts.files or None,
        "patches": list(facts.patches.get("others", ())),
        "connectors": facts.answer.connectors,
        "settings": facts.answer.settings,
        "config": facts.checks if facts.config is not None else None,
    }


def _print(findings: list[Finding], line: str, *, ok: bool) -> None:
    out = console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    topic = ""
    for finding in findings:
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style=_STYLES[finding.status])
        same = finding.topic == topic
        table.add_row("" if same else finding.topic, Text(finding.status, style=_STYLES[finding.status]), text)
        topic = finding.topic
    out.print(table)
    out.print()
    # One line also where it is longer than the console is wide.
    out.print(Text(line, style=_STYLES["ok" if ok else "problem"]), soft_wrap=True)
