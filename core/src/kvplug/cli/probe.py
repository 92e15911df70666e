"""The part of the command line that imports vLLM and connectors, run as a process of its own.

`python -m kvplug.cli.probe REQUEST` answers on standard output, one line for each part of the answer as soon as it
is known: `kvplug-probe: {"part": …}`. What is being imported may print, hang or crash; the other side
(`kvplug.cli.ask`) then still has the lines before it, and the last of them says what was being done.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from kvplug.cli.ask import MARK
from kvplug.cli.patches import files, hook_status, patches
from kvplug.cli.tiers import tiers_of
from kvplug.errors import KvplugError

if TYPE_CHECKING:
    from kvplug.discovery import ConnectorEntry

__all__ = ["main"]

Say = Callable[[dict[str, Any]], None]


def main(request: Mapping[str, Any]) -> None:
    """Answer a request.

    Args:
        request: `parts` names what to answer, in this order: `vllm`, `autoload`, `runners`, `files`, `patches`,
            `model`, `connectors`, `config`. `model` is a model's name or path, `config` the value of
            `--kv-transfer-config`, `skip` lists connectors, by their entry points' values, that aren't to be loaded.

    """
    # Whatever is imported may write to standard output, also from C: what is written there goes to standard
    # error, and the answer to where standard output was.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        answer.write(f"{MARK}{json.dumps(line, default=str)}\n")
        answer.flush()

    for part in request["parts"]:
        say({"part": "doing", "what": part})
        if part == "connectors":
            _connectors(say, request["skip"])
        elif part == "model":
            say({"part": part, **_try(lambda: _model(request["model"]))})
        elif part == "config":
            say({"part": part, **_try(lambda: {"checks": list(_config(request["config"], "", request["skip"]))})})
        else:
            say({"part": part, **_try(_PARTS[part])})


def _try(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a part answers, or the error that kept it from answering."""
    try:
        return {"error": None, **part()}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - vLLM's, a plugin's or a connector's; it is the answer
        return {"error": _said(error)}


def _said(error: BaseException) -> str:
    # kvplug's own errors are sentences; another's message alone may be a mere word.
    return str(error) if isinstance(error, KvplugError) else f"{type(error).__name__}: {error}".rstrip(": ")


def _vllm() -> dict[str, Any]:
    import vllm
    import vllm.envs
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    return {
        "version": str(vllm.__version__),
        "file": vllm.__file__,
        "platform": type(current_platform).__name__,
        "has_triton": bool(HAS_TRITON),
        # None: not set, and vLLM decides. Releases up to 0.21 say False instead.
        "uses_v2_variable": getattr(vllm.envs, "VLLM_USE_V2_MODEL_RUNNER", None),
        "decides_by_model": hasattr(VllmConfig, "use_v2_model_runner"),
    }


def _autoload() -> dict[str, Any]:
    from kvplug import autoload

    load_error = _try(_load_plugins)["error"]
    report = autoload.report()
    return {
        "called": report.pid is not None,
        "load_error": load_error,
        "registered": [entry.name for entry in report.registered],
        "skipped": [asdict(entry) for entry in report.skipped],
        "hooks": report.hooks,
        "errors": report.errors,
        "vllm_names": sorted(autoload.foreign_names()),
    }


def _load_plugins() -> dict[str, Any]:
    """Load vLLM's plugins, kvplug among them, as vLLM's processes do; a second time nothing happens."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return {}


def _runners() -> dict[str, Any]:
    from kvplug.compat import RUNNER_MODULES

    _try(_load_plugins)
    return {kind: _runner(module) for kind, module in RUNNER_MODULES.items()}


def _runner(module: str) -> dict[str, Any]:
    """Say how the hook is delivered to a model runner, and if it isn't, why."""
    from kvplug.compat import RUNNER_CLASS, hook_delivery

    answer = {"module": module, "delivery": None, "reason": ""}
    imported = _try(lambda: {"delivery": hook_delivery(getattr(importlib.import_module(module), RUNNER_CLASS))})
    answer |= imported
    if answer["delivery"] is None and importlib.util.find_spec("kvplug_hooks") is not None:
        answer["reason"] = _try(lambda: {"said": hook_status(module, imported=not imported["error"])}).get("said", "")
    return answer


def _model(model: str) -> dict[str, Any]:
    """Ask vLLM's configuration for a model which runner it will use."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=model).create_engine_config()
    uses_v2 = getattr(config, "use_v2_model_runner", None)
    if uses_v2 is None:
        import vllm.envs

        uses_v2 = getattr(vllm.envs, "VLLM_USE_V2_MODEL_RUNNER", False)
    return {
        "model": model,
        "runner": "v2" if uses_v2 else "v1",
        "architectures": list(getattr(config.model_config, "architectures", None) or []),
        "worker": str(config.parallel_config.worker_cls),
    }


def _connectors(say: Say, skip: list[str]) -> None:
    """Load every connector, each announced before it is imported: an import may end the process."""
    from kvplug import autoload
    from kvplug.discovery import discover

    taken = autoload.foreign_names()
    entries = {entry.value: entry for entry in discover().entries if entry.name not in taken}
    loaded: dict[str, Any] = {}
    for value, entry in entries.items():
        if value in skip:
            continue
        say({"part": "doing", "what": "connector", "connector": value})
        answer = _try(partial(_load_into, loaded, entry))
        say({"part": "connector", "value": value, **answer, **_class(loaded.get(value))})
    # Settings only now: which variables are known depends on which connectors are there.
    for value, cls in loaded.items():
        if getattr(cls, "Settings", None) is not None:
            say({"part": "settings", "value": value, **_settings(cls, {})})


def _load_into(loaded: dict[str, Any], entry: ConnectorEntry) -> dict[str, Any]:
    from kvplug import connectors

    loaded[entry.value] = connectors.load(entry)
    return {}


def _class(cls: Any) -> dict[str, Any]:
    from kvplug.hookspecs import needed_hooks

    if cls is None:
        return {"hooks": None}
    hooks = {"hooks": sorted(needed_hooks(cls))}
    missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
    return hooks | (
        {"error": f"Connector {cls.__name__} doesn't implement {missing}, which this vLLM demands."} if missing else {}
    )


def _settings(cls: Any, extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a connector's settings in effect, each with where it comes from."""

    def load() -> dict[str, Any]:
        settings = cls.Settings.load(extra_config, environ=os.environ)
        values = {name: [value, settings.source_of(name)] for name, value in settings.describe().items()}
        tiers = tiers_of(settings)
        return {"values": values} | ({"tiers": tiers} if tiers else {})

    return _try(load)


def _config(config: Any, path: str, skip: list[str]) -> Iterator[dict[str, Any]]:
    """Check a `--kv-transfer-config`, and those of a `MultiConnector`'s children, as vLLM would read them."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvplug.discovery import discover

    _try(_load_plugins)
    answer: dict[str, Any] = {"path": path, "name": None, "class": None, "hooks": [], "settings": None}
    if not isinstance(config, Mapping):
        yield {**answer, "error": f"This is a {type(config).__name__}, not an object."}
        return
    answer["name"] = config.get("kv_connector")
    found: dict[str, Any] = {}
    if any(entry.name == answer["name"] and entry.value in skip for entry in discover().entries):
        answer["error"] = "Importing it ends the process."
    else:
        answer |= _try(lambda: found.update(config=_parse(KVTransferConfig, config)) or {})
        if "config" in found:
            answer |= _try(lambda: found.update(cls=_resolve(KVConnectorFactory, found["config"])) or {})
    if "cls" not in found:
        yield answer
        return
    extra_config = config.get("kv_connector_extra_config") or {}
    answer |= {"class": found["cls"].__name__, "load_failure_policy": _load_failure_policy(found["config"])}
    answer |= _class(found["cls"])
    if getattr(found["cls"], "Settings", None) is not None:
        answer["settings"] = _settings(found["cls"], extra_config)
    yield answer
    if found["cls"].__name__ == "MultiConnector":
        children = extra_config.get("connectors")
        if not isinstance(children, list) or not children:
            where = f"{path}.kv_connector_extra_config.connectors".lstrip(".")
            yield {
                **answer,
                "path": where,
                "settings": None,
                "error": "MultiConnector needs a list of connectors here.",
            }
        for index, child in enumerate(extra_config.get("connectors") or ()):
            yield from _config(child, f"{path}.connectors[{index}]".lstrip("."), skip)


def _parse(transfer_config: Any, config: Mapping[str, Any]) -> Any:
    """Read a configuration as vLLM does; what is wrong with it comes as one sentence."""
    from pydantic import ValidationError

    try:
        return transfer_config(**config)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, problem['loc'])) or 'it'}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors(include_url=False, include_context=False)
        ]
        raise ValueError("; ".join(wrong)) from None


def _load_failure_policy(config: Any) -> str | None:
    """Return what vLLM does with a request whose load failed; None where this vLLM has no choice of that."""
    return getattr(config, "kv_load_failure_policy", None)


def _resolve(factory: Any, config: Any) -> Any:
    if not config.kv_connector:
        raise ValueError("kv_connector names no connector")
    return factory.get_connector_class(config)


_PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "vllm": _vllm,
    "autoload": _autoload,
    "runners": _runners,
    "files": files,
    "patches": patches,
}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
