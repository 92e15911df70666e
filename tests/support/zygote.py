"""A process that imports vLLM once and forks a child for each job.

Importing vLLM takes 10 to 20 seconds, starting an engine in a process that has it takes 1 to 3. The zygote stops
short of what a job must see happen: it never loads vLLM's plugins, and never imports a model runner, which kvplug
patches while it is imported. `_check_pristine` makes sure.

The zygote talks over one connection and does one job at a time. It ends, with the child it may have, when the other
end closes the connection: so no engine outlives the tests, however they end.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import tempfile
import traceback
import types
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from support.jobs import Answer, Job

#: Imported before the first fork: what an engine needs and takes long, and doesn't lead to a model runner.
_PRELOADED = (
    "pytest",
    "transformers.models.llama.configuration_llama",
    "transformers.models.mistral.configuration_mistral",
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.lora.layers",
    "vllm.models.deepseek_v4",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.mistral",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.sample.ops.penalties",
    "vllm.v1.spec_decode.draft_model",
    "vllm.v1.spec_decode.eagle",
    "vllm.v1.watermarking.gpu_sampler",
    "vllm.v1.worker.gpu.model_states",
    "vllm.v1.worker.gpu.pool.pooling_runner",
    "vllm.v1.worker.lora_model_runner_mixin",
)

#: Of these, what older releases don't have (see tests/v019).
_OPTIONAL = frozenset(
    {
        "vllm.entrypoints.launchers.cli_args",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.models.deepseek_v4",
        "vllm.v1.watermarking.gpu_sampler",
        "vllm.v1.worker.gpu.model_states",
        "vllm.v1.worker.gpu.pool.pooling_runner",
    }
)

_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")

_PR_SET_PDEATHSIG = 1


def main(descriptor: int) -> None:
    """Serve jobs until the other end of the connection closes.

    Args:
        descriptor: File descriptor of this end of a socket pair.
    """
    connection = Connection(descriptor)
    _preload()
    _check_pristine()
    gc.collect()
    gc.freeze()  # else every engine spends a second on collecting what was imported here
    connection.send("ready")
    with suppress(EOFError):
        while True:
            connection.send(_run(connection.recv(), connection))


def _preload() -> None:
    release = os.environ.get("TESTS_VLLM_RELEASE")  # another one than the list is for
    for name in _PRELOADED:
        optional = name in _OPTIONAL or release is not None
        with suppress(ModuleNotFoundError) if optional else nullcontext():
            importlib.import_module(name)
    import vllm

    if release is not None and vllm.__version__.partition("+")[0] != release:
        raise RuntimeError(f"this should be vLLM {release}, and is {vllm.__version__}")
    from vllm.model_executor.models import registry

    # Saves a process of 20 seconds for each new architecture, whose purpose is to keep CUDA out of this one.
    registry._run_in_subprocess = lambda function: function()


def _check_pristine() -> None:
    """Refuse to serve where a job could no longer see kvplug being loaded and a runner being imported."""
    from vllm import plugins

    loaded = [name for name in sys.modules if name in _RUNNERS or name.partition(".")[0].startswith("kvplug")]
    if plugins.plugins_loaded:
        loaded.append("vLLM's plugins")
    if loaded:
        raise RuntimeError(f"the zygote must leave these to its jobs, but has loaded: {', '.join(loaded)}")


def _run(job: Job, connection: Connection) -> Answer:
    """Fork a child for the job, wait for it, and leave nothing of its process group behind."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "answer"
        child = os.fork()
        if child == 0:
            _be_child(job, result, connection)
        exited = os.pidfd_open(child)
        try:
            ready = wait([exited, connection], job.timeout)
        finally:
            os.close(exited)
            # The child is a zombie or alive here, so its id, and its group's, can't be another's.
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            with suppress(ProcessLookupError):  # it was killed before it had made its group
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        if connection in ready:  # nothing is sent while a job runs: the other end is gone
            raise EOFError
        if not ready:
            return Answer(None, f"killed after {job.timeout:.0f} s")
        if not result.exists():
            return Answer(None, f"the process ended without an answer: {_describe(status)}")
        answer: Answer = pickle.loads(result.read_bytes())
        return answer


def _describe(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _be_child(job: Job, result: Path, connection: Connection) -> None:
    """Run the job in this fresh fork, write its answer, and end the process."""
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        connection.close()
        _redirect_output(job.log)
        answer = _do(job)
        sys.stdout.flush()
        sys.stderr.flush()
        unfinished = result.with_suffix(".part")
        unfinished.write_bytes(pickle.dumps(answer))
        unfinished.rename(result)
    finally:
        os._exit(0)  # the zygote's stack and exit handlers are not this process's


def _do(job: Job) -> Answer:
    for name, value in job.env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        function = getattr(_load_module(job.module, job.file), job.function)
        return Answer(pickle.dumps(function(**pickle.loads(job.kwargs))))
    except BaseException:  # noqa: BLE001 - pytest.fail and sys.exit, too, are answers
        return Answer(None, traceback.format_exc())


def _redirect_output(log: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)


def _load_module(name: str, file: str) -> Any:
    """Import a module by name, or as pytest's importlib mode does: from its file, under the name it has there."""
    if name in sys.modules:
        return sys.modules[name]
    if name.partition(".")[0] == "support":
        return importlib.import_module(name)
    parent = name.rpartition(".")[0]
    while parent:  # pickle imports a class's module by its dotted name, so parents have to exist
        sys.modules.setdefault(parent, types.ModuleType(parent))
        parent = parent.rpartition(".")[0]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
