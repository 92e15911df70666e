"""Throw-away distributions, and processes of their own to find them in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest


def _distribution(
    folder,
    name,
    entry_points=None,
    modules=None,
    *,
    version="1.0",
    group="vllm.kv_connectors",
    metadata=True,
    text=None,
    direct_url=None,
    kind="dist-info",
):
    """Put a distribution into a folder.

    `entry_points`: {name: value} of `group`; `modules`: {file: source}; `text`: entry_points.txt word for word
    (str or bytes); `metadata`: True, or the METADATA file word for word, or None for none.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.{kind}"
    info.mkdir(parents=True, exist_ok=True)
    if metadata is True:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if metadata is not None:
        (info / ("METADATA" if kind == "dist-info" else "PKG-INFO")).write_text(metadata)
    if text is None:
        text = f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in (entry_points or {}).items())
    (info / "entry_points.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    if direct_url is not None:
        (info / "direct_url.json").write_text(json.dumps(direct_url))
    for file, source in (modules or {}).items():
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(source))
    return folder


@pytest.fixture
def distribution():
    """Make a distribution: (folder, name, {entry point: value}, {file: source}, …)."""
    return _distribution


@pytest.fixture(scope="session")
def make_distribution():
    """Make a distribution, for fixtures that outlive a test."""
    return _distribution


def _environ(path, environ):
    base = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_PLUGINS", "KVPLUG_"))}
    paths = [*map(str, path), *filter(None, [base.get("PYTHONPATH")])]
    return {**base, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **environ}


def _run(arguments, *, path=(), environ=None, timeout=300):
    """Run Python with folders on its path; return the finished process."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=_environ(path, environ or {}),
        check=False,
    )


@pytest.fixture(scope="session")
def run_python():
    """Run Python: (arguments, path=folders, environ=variables) -> CompletedProcess."""
    return _run


@pytest.fixture(scope="session")
def run_script():
    """Run a script that calls `answer(value)` once; return that value."""

    def run(script, *, path=(), environ=None, timeout=300):
        prelude = "import json\ndef answer(value): print('ANSWER ' + json.dumps(value), flush=True)\n"
        done = _run(["-c", prelude + textwrap.dedent(script)], path=path, environ=environ, timeout=timeout)
        lines = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        assert lines, f"no answer, exit status {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return json.loads(lines[-1])

    return run


#: A connector that does nothing, written against vLLM's interface alone.
PLAIN = """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    class {name}(KVConnectorBase_V1):
        def start_load_kv(self, forward_context, **kwargs): pass
        def wait_for_layer_load(self, layer_name): pass
        def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): pass
        def wait_for_save(self): pass
        def get_num_new_matched_tokens(self, request, num_computed_tokens): return 0, False
        def update_state_after_alloc(self, request, blocks, num_external_tokens): pass
        def build_connector_meta(self, scheduler_output): return None
"""


@pytest.fixture(scope="session")
def connector_source():
    """Write a module with a connector: (class name, source of further members or "") -> source."""

    def source(name, *members):
        body = "".join(textwrap.indent(textwrap.dedent(member), "    ") for member in members)
        return textwrap.dedent(PLAIN).format(name=name) + body + "\n"

    return source
