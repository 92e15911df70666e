"""What `kvplug doctor` knows, and what it concludes: the types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvplug.cli.ask import Answer
from kvplug.cli.environment import VllmInstall
from kvplug.discovery import Discovery

__all__ = ["Facts", "Finding", "Runner", "Status", "summary"]

Status = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    #: Only a problem makes `kvplug doctor` fail.
    status: Status
    #: What is the case, in one sentence.
    text: str
    #: What to do about it; empty if there is nothing to do.
    remedy: str = ""


@dataclass(frozen=True)
class Runner:
    """Which of vLLM's model runners will be used."""

    #: `v1` or `v2`; None if it can't be told, or is none of vLLM's.
    kind: str | None
    why: str


@dataclass(frozen=True)
class Facts:
    """What there is to conclude from."""

    #: Environment variables.
    environ: Mapping[str, str]
    #: The interpreter and its version.
    python: tuple[str, str]
    #: Versions of kvplug and kvplug-hooks; None for what isn't installed.
    kvplug_version: str | None
    hooks_version: str | None
    #: vLLM, as its files tell; None if there is none.
    install: VllmInstall | None
    #: Names of vLLM's plugins by entry-point group.
    plugins: Mapping[str, frozenset[str]]
    #: Connectors, as metadata tells.
    discovery: Discovery
    #: What vLLM and the connectors told when they were imported.
    answer: Answer
    #: The model that is asked about.
    model: str | None = None
    #: Value of `--kv-transfer-config`, and why it can't be read, if one is asked about.
    config: Mapping[str, Any] | None = None
    config_error: str | None = None

    @property
    def vllm(self) -> Mapping[str, Any]:
        """What vLLM told of itself; empty if it couldn't be asked."""
        return self._part("vllm")

    @property
    def autoload(self) -> Mapping[str, Any]:
        """What kvplug's plugin did when vLLM loaded its plugins; empty if that can't be told."""
        return self._part("autoload")

    @property
    def runners(self) -> Mapping[str, Mapping[str, Any]]:
        """By model runner, how the hook is delivered."""
        return {kind: row for kind, row in self._part("runners").items() if isinstance(row, dict)}

    @property
    def files(self) -> Mapping[str, Any]:
        """What became of patches that `kvplug-hooks apply` put into vLLM's files; empty if there are none."""
        part = self._part("files")
        return {key: part[key] for key in ("state", "applied", "reasons")} if part.get("state") else {}

    @property
    def patches(self) -> Mapping[str, Any]:
        """What becomes of patches of vLLM's source but the hook, and of declarations that can't be used."""
        return self._part("patches")

    @property
    def checks(self) -> list[Mapping[str, Any]]:
        """The connectors of `config`, each with what vLLM makes of it."""
        return list(self._part("config").get("checks", ()))

    @property
    def names(self) -> dict[str, str]:
        """By entry-point value, the name that messages use: best the one that is the class's own."""
        entries = sorted(
            self.discovery.entries,
            key=lambda entry: (entry.name != entry.attr.rpartition(".")[2], entry.implied, entry.name),
            reverse=True,
        )
        return {entry.value: entry.name for entry in entries}

    @property
    def in_question(self) -> list[str]:
        """Names of the connectors that this is about: those of `config` if there is one, else all."""
        if self.config is not None:
            return [str(check["name"]) for check in self.checks]
        return list(self._loaded())

    @property
    def hooked(self) -> list[str]:
        """Names of the connectors in question that need the hook."""
        if self.config is not None:
            return [str(check["name"]) for check in self.checks if check["hooks"]]
        return [name for name, row in self._loaded().items() if row["hooks"]]

    @property
    def runner(self) -> Runner:
        """The model runner that vLLM will use, as far as that is certain."""
        vllm, model = self.vllm, self._part("model")
        if model.get("runner"):
            ours = str(model["worker"]).startswith("vllm.")
            return Runner(model["runner"] if ours else None, f"that is what it says for {self.model}")
        if "has_triton" not in vllm:
            return Runner(None, "vLLM can't be asked")
        variable = self.environ.get("VLLM_USE_V2_MODEL_RUNNER")
        if variable is not None and vllm["uses_v2_variable"] is not None:
            return Runner("v2" if vllm["uses_v2_variable"] else "v1", f"VLLM_USE_V2_MODEL_RUNNER={variable} says so")
        if not vllm["decides_by_model"]:
            return Runner("v1", "this vLLM uses v2 only where VLLM_USE_V2_MODEL_RUNNER=1 asks for it")
        if not vllm["has_triton"]:
            return Runner("v1", "v2 needs Triton, which vLLM can't use here")
        return Runner(None, "that depends on the model")

    def _loaded(self) -> dict[str, Mapping[str, Any]]:
        names = self.names
        return {names.get(value, value): row for value, row in self.answer.connectors.items() if not row["error"]}

    def _part(self, name: str) -> Mapping[str, Any]:
        part = self.answer.parts.get(name, {})
        return {} if part.get("error") else part


def summary(facts: Facts, findings: Iterable[Finding]) -> str:
    """Say it in one line."""
    findings = list(findings)
    problems = [finding for finding in findings if finding.status == "problem"]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        text = problems[0].text
        line = f"PROBLEM{more}: {text}{'' if text.endswith('.') else '.'} {problems[0].remedy}"
    else:
        warnings = sum(finding.status == "warning" for finding in findings)
        but = f" ({warnings} warning{'s' if warnings > 1 else ''})" if warnings else ""
        line = f"OK{but}: vLLM calls kvplug, and no connector is installed."
        if facts.in_question:
            live = [facts.runner.kind] if facts.runner.kind else list(facts.runners)
            hook = f", and the hook is live in model runner {' and '.join(live)}" if facts.hooked else ""
            line = f"OK{but}: vLLM finds {', '.join(facts.in_question)}{hook}."
    return " ".join(line.split())
