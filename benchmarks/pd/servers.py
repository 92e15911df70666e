"""Three of vLLM's servers: one that prefills and one that decodes, with the connector, and one that does it alone.

Each has a core of its own, or the one it is told to have. What a router does is done here, in this process, which
shares the core of the prefill engine: it waits while that computes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.type1.model import VOCABULARY, Shape, model_path

if TYPE_CHECKING:
    from support.servers import Server

__all__ = [
    "BLOCK_SIZE",
    "BUDGET",
    "CORES",
    "LITTLE",
    "Answer",
    "Engine",
    "Trio",
    "connector",
    "pin",
    "running",
    "store_folder",
    "tokens",
    "trio",
]

#: 12 million weights; 20 KiB of KV per token. A core prefills some 1,300 tokens per second.
LITTLE = Shape(hidden=256, intermediate=704, layers=10, heads=8, kv_heads=4, dtype="float32")

#: Tokens in a step of a server: chunks of this many are what the decodes of one engine have to bear.
BUDGET = 512

_cores = sorted(os.sched_getaffinity(0))
#: The cores of the prefill engine and of the decode engine.
CORES = (_cores[0], _cores[-1])

BLOCK_SIZE = 32

#: How a folder's name begins, before the id of the process that it is for.
_FOLDER = "kvplug-bench-pd-"

_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def tokens(seed: str, count: int) -> list[int]:
    """Return as many made-up tokens, others for each seed."""
    generator = random.Random(seed)  # noqa: S311
    return [generator.randrange(VOCABULARY) for _ in range(count)]


@contextlib.contextmanager
def store_folder() -> Iterator[Path]:
    """Give a folder in shared memory for a store, and remove it, with those that were left by runs that were killed."""
    shared = Path("/dev/shm")  # noqa: S108 - a folder of one's own in it
    for left in shared.glob(f"{_FOLDER}*"):
        if not (Path("/proc") / left.name.removeprefix(_FOLDER)).exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="store-", dir=_own(shared)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def _own(shared: Path) -> Path:
    """Return this process's own folder."""
    folder = shared / f"{_FOLDER}{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def connector(folder: Path, **settings: Any) -> dict[str, Any]:
    """Return the connector's configuration over a store in a folder."""
    extra = {
        "l2": "disk",
        "disk_path": str(folder),
        "disk_size": "6GiB",
        "l1_size_per_rank": "1GiB",
        "min_reuse_tokens": 1,
        # So that a busy machine shows longer times, and not prompts that are computed.
        "l2_load_timeout": 5,
        "l2_timeout": 20,
        "handover_timeout": 10,
    }
    return {
        "kv_connector": "PDReuseConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra | settings,
    }


def pin(pids: Sequence[int], core: int) -> None:
    """Let processes, with all their threads, run on one core only."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            for thread in (Path("/proc") / str(pid) / "task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), {core})


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    Attributes:
        times: When each token came, by `time.perf_counter`; tokens that came together are one.
        begin: When it was sent.

    """

    times: list[float]
    begin: float

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.begin


class Engine:
    """One of the servers.

    Args:
        server: It.

    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def pin(self, core: int) -> None:
        """Let all of its processes run on one core."""
        pin(_family(self._server.port), core)

    def forget(self) -> None:
        """Have vLLM forget its own prefix cache, when nothing is under way any more."""
        deadline = time.monotonic() + 20
        while not self._server.post("/reset_prefix_cache")["success"]:
            if time.monotonic() > deadline:
                raise self._server.error("vLLM didn't reset its prefix cache")
            time.sleep(0.02)

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        return self._server.metric(name)

    def loaded(self) -> float:
        """Return the tokens that the connector has loaded so far."""
        return self.metric("vllm:external_prefix_cache_hits_total")

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Prefill a prompt for another engine, as routers ask for it; return what is to be passed on."""
        body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0.0, "kv_transfer_params": _PREFILL}
        params: dict[str, Any] = self._server.post("/v1/completions", body, timeout=300)["kv_transfer_params"]
        return params

    def decode(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        params: Mapping[str, Any] | None = None,
        *,
        begin: float | None = None,
        each: Callable[[float], bool] | None = None,
    ) -> Answer:
        """Stream an answer, and note when each token comes.

        Args:
            prompt: The prompt.
            max_tokens: Tokens of the answer.
            params: What the prefill engine said, if one did.
            begin: When the request began, if that isn't now.
            each: Called with the time of each token; says whether to go on. If not, the request is aborted.

        """
        body = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if params is not None:
            body["kv_transfer_params"] = dict(params)
        begin = time.perf_counter() if begin is None else begin
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=300)
        times: list[float] = []
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise self._server.error(f"status {answer.status}: {answer.read().decode(errors='replace')}")
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if b'"error"' in line:
                    raise self._server.error(line.decode())
                times.append(now)
                if each is not None and not each(now):
                    return Answer(times, begin)
        finally:
            connection.close()
        if not times:
            raise self._server.error("an answer without tokens")
        return Answer(times, begin)


@dataclass(frozen=True)
class Trio:
    """The three of them.

    Attributes:
        prefill: Prefills for `decode`, on the first core.
        decode: Decodes, on the second core.
        alone: Has no connector; its core is chosen by whoever measures.
        connector: Configuration of the two.

    """

    prefill: Engine
    decode: Engine
    alone: Engine
    connector: dict[str, Any]

    def handed_over(
        self, prompt: Sequence[int], max_tokens: int = 1, each: Callable[[float], bool] | None = None
    ) -> tuple[Answer, float]:
        """Do what a router does. Returns the answer, and the seconds that the prefill request took of its time."""
        begin = time.perf_counter()
        params = self.prefill.prefill(prompt)
        prefilled = time.perf_counter() - begin
        return self.decode.decode(prompt, max_tokens, params, begin=begin, each=each), prefilled

    def settle(self) -> None:
        """Wait until what was computed is stored, and have vLLM's own caches forget it."""
        time.sleep(0.2)
        for engine in (self.prefill, self.decode, self.alone):
            engine.forget()


_stack = ExitStack()
_running: list[Trio] = []


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Keep servers that were started until the end of this."""
    with _stack:
        yield
    _running.clear()


def trio() -> Trio:
    """Return the three servers, which are started the first time."""
    if not _running:
        _running.append(_start())
    return _running[0]


def _start() -> Trio:
    from support.servers import serve

    model = str(model_path(LITTLE))
    pair = connector(_stack.enter_context(store_folder()))
    # A server ends with the thread that has started it, so these stay as long as the servers do.
    threads = _stack.enter_context(ThreadPoolExecutor(3))

    def start(configuration: dict[str, Any] | None) -> tuple[ExitStack, Engine]:
        arguments = ["--max-model-len", "8192", "--num-gpu-blocks-override", "1200", "--skip-tokenizer-init"]
        arguments += ["--max-num-batched-tokens", str(BUDGET)]
        own = ExitStack()
        return own, Engine(own.enter_context(serve(model, connector=configuration, args=arguments)))

    engines = []
    for own, engine in threads.map(start, (pair, pair, None)):
        _stack.push(own)
        engines.append(engine)
    for engine, core in zip(engines, (*CORES, CORES[0]), strict=True):
        engine.pin(core)
    os.sched_setaffinity(0, {CORES[0]})
    prefill, decode, alone = engines
    found = Trio(prefill, decode, alone, pair)
    for engine in engines:
        engine.decode(tokens("warm-up", 700), 8)
    found.handed_over(tokens("warm-up handed over", 700), 8)
    found.settle()
    return found


def _family(port: int) -> list[int]:
    """Return the ids of the processes of the server on a port."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if f"--port\0{port}\0".encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)
