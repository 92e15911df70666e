"""The job of a soak: drives one in-process engine, and looks at what it holds whenever it is idle."""

from __future__ import annotations

import os
import pickle
import random
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from kvplug.store.l2.disk import space
from kvplug.store.l2.disk.layout import Value
from support import llm as engine
from support.driver import count_preemptions, counts, keep_asynchronous_scheduling, leftovers, type1
from support.l2_steps import drain
from support.llm import Output, to_output
from support.soak.flat import Limits, Snapshot
from support.soak.leaks import BLOCK_BYTES, Leak, put_in
from support.soak.traffic import Ask, Traffic

#: Blocks in L1, and in vLLM's own cache. What is asked at a time needs more.
_L1_BLOCKS, _GPU_BLOCKS = 16, 25

#: Bytes that L2 may have: room for fewer blocks than what is asked for in a round.
_DISK_SIZE = 6 << 20

#: Values that L2 can have, and of these the ones that it notes at once, to go next.
_DISK_VALUES = _DISK_SIZE // BLOCK_BYTES
_DISK_NOTED = _DISK_VALUES // space._NOTED_SHARE

#: What is noted is a list of pairs of a value, which has four fields, and its shard: a new one each time it is used up.
_DISK_ROOM = {
    "._space._oldest": _DISK_NOTED,
    "._space._oldest[]": 2 * _DISK_NOTED,
    "._space._oldest[][]": len(Value._fields) * _DISK_NOTED,
}

_LIMITS = Limits()

#: Shares of the steps before which vLLM's cache, or that and L1, is reset.
_LOCAL_RESETS, _ALL_RESETS = 1 / 40, 1 / 300


@dataclass
class Report:
    """What came of a soak."""

    #: Requests that were asked, and of these the ones that were aborted.
    requests: int = 0
    aborted: int = 0
    steps: int = 0
    preemptions: int = 0
    local_resets: int = 0
    all_resets: int = 0
    samples: int = 0
    #: Since the start, of the connector's worker half and the dispatcher.
    counts: Counter[str] = field(default_factory=Counter)
    #: The process when it was warm, and at the end.
    first: Snapshot | None = None
    last: Snapshot | None = None
    #: What wasn't flat, or was held when it shouldn't have been.
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Sum up in one line."""
        assert self.last is not None
        return (
            f"{self.requests} requests ({self.aborted} aborted), {self.steps} steps, {self.preemptions} preemptions, "
            f"{self.local_resets}+{self.all_resets} resets, {self.counts['blocks_hit']} blocks hit, "
            f"{self.counts['blocks_evicted']} evicted, {self._l2()}{self.last.memory / 2**20:.1f} MiB, "
            f"{self.last.descriptors} descriptors, {self.last.threads} threads"
        )

    def _l2(self) -> str:
        names = {"read": "l2_blocks_read:disk", "written": "l2_blocks_written:disk"}
        return "".join(f"{self.counts[name]} {verb}, " for verb, name in names.items() if name in self.counts)


def soak(
    *,
    model: str,
    samples: str,
    requests: int,
    seed: int,
    asynchronous: bool = False,
    round_size: int = 250,
    warm_rounds: int = 3,
    outstanding: int = 24,
    burst: int = 16,
    limits: Limits = _LIMITS,
    minutes: float | None = None,
    progress: str | None = None,
    leaks: Collection[Leak] = (),
    disk: str | None = None,
    **engine_args: Any,
) -> Report:
    """Serve traffic, and check when the engine is idle, after every round of requests, that nothing has grown.

    Ends at the first round with a problem; with `leaks` it goes on, and reports all of them.

    Args:
        model: Folder of the test model `llama`.
        samples: File to write samples to, for `replay`.
        requests: Requests to serve, at most.
        seed: Decides all that happens.
        asynchronous: Force asynchronous scheduling.
        round_size: Requests between two looks.
        warm_rounds: Rounds before the look that later ones are compared to.
        outstanding: Requests that clients keep waiting or running.
        burst: Requests in a row that grow long; see `Traffic`.
        limits: By how much the process may grow after the first look.
        minutes: Ends at the first look after this time.
        progress: File to write a line a minute to.
        leaks: Faults to put in.
        disk: Folder for an L2 tier, which evicts all the time, too; None for a store without L2.
        **engine_args: See `support.llm.make_llm`.

    """
    # oneDNN keeps up to 1,024 compiled matrix products, one per number of tokens: vLLM alone grows by 100 MiB for that.
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "1"
    if asynchronous:
        keep_asynchronous_scheduling()
    args = {"num_gpu_blocks": _GPU_BLOCKS, "max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 16}
    l2 = {} if disk is None else {"l2": "disk", "disk_path": disk, "disk_size": _DISK_SIZE, "l2_load_timeout": 30}
    limits = limits if disk is None else replace(limits, room=_DISK_ROOM)
    headers = 0 if disk is None else 1  # blocks that L2's headers take the room of
    connector = type1(l1_size_per_rank=(_L1_BLOCKS + headers) * BLOCK_BYTES, **l2)
    llm = engine.make_llm(model, connector=connector, disable_log_stats=False, **args | engine_args)
    assert asynchronous == (type(engine.scheduler(llm)).__name__ == "AsyncScheduler")
    leak_now = [put_in(leak, llm) for leak in leaks]
    report = Report()
    start = said = time.monotonic()
    with open(samples, "wb") as file, open(progress or os.devnull, "w", buffering=1) as told:  # noqa: PTH123 - may be a pipe
        clients = _Clients(llm, Traffic(seed, burst), report, file, outstanding=outstanding)
        while report.requests < requests and not (report.problems and not leaks):
            clients.serve(min(round_size, requests - report.requests), leak_now)
            if disk is not None:
                report.problems += _look_at_disk(llm, disk)
            _look(llm, report, limits, is_warm=report.requests >= warm_rounds * round_size)
            now = time.monotonic()
            if now - said >= 60 or report.problems:
                said = now
                print(f"{(now - start) / 60:.1f} min: {report.line()}", *report.problems, sep="\n", file=told)
            if minutes is not None and now - start >= 60 * minutes:
                break
    return report


class _Clients:
    """Clients that keep an engine busy, now and then go away, and now and then reset its caches."""

    def __init__(self, llm: Any, traffic: Traffic, report: Report, samples: BinaryIO, *, outstanding: int) -> None:
        self._llm = llm
        self._report = report
        self._samples = samples
        self._outstanding = outstanding
        self._traffic = traffic
        self._rng = random.Random(f"steps of {traffic.seed}")
        self._preemptions = count_preemptions(llm)
        self._asynchronous = type(engine.scheduler(llm)).__name__ == "AsyncScheduler"
        #: Whether nobody asks any more until all is answered, for a reset.
        self._draining = False
        # By id: the request and the step in which its client goes away.
        self._running: dict[str, tuple[Ask, int | None]] = {}

    def serve(self, count: int, leak_now: Collection[Callable[[], None]]) -> None:
        """Ask `count` requests, and stay until all have been answered or were aborted."""
        report, llm = self._report, self._llm
        asked = 0
        while asked < count or self._running:
            while asked < count and len(self._running) < self._outstanding and not self._draining:
                ask = self._traffic.next()
                leaves = None if ask.abort_after is None else report.steps + ask.abort_after
                self._running[ask.add_to(llm)] = (ask, leaves)
                asked += 1
                for leak in leak_now:
                    leak()
            self._reset()
            for output in llm.llm_engine.step():
                if output.finished:
                    self._take(output)
            report.steps += 1
            self._hang_up()
            if not report.problems:
                report.problems += [f"in step {report.steps}: {problem}" for problem in _held_between_steps(llm)]
        report.requests += asked
        while _is_busy(llm):
            llm.llm_engine.step()
        report.preemptions += len(self._preemptions)
        self._preemptions.clear()

    def _take(self, output: Any) -> None:
        ask, _ = self._running.pop(output.request_id)
        completion = output.outputs[0]
        self._traffic.answered(ask, list(completion.token_ids))
        if ask.sampled:
            sample: tuple[Ask, Output] = ask, to_output(completion)
            pickle.dump(sample, self._samples)
            self._report.samples += 1

    def _hang_up(self) -> None:
        leaving = [
            request_id
            for request_id, (_, leaves) in self._running.items()
            if leaves is not None and leaves <= self._report.steps
        ]
        if leaving:
            self._llm.llm_engine.abort_request(leaving)
            self._report.aborted += len(leaving)
            for request_id in leaving:
                del self._running[request_id]

    def _reset(self) -> None:
        chance = self._rng.random()
        if chance < _ALL_RESETS:
            # Asynchronous scheduling still has a step on its way, whose blocks vLLM can't take back: it resets what the
            # connector has, and says that its own cache stays.
            running = not self._asynchronous
            done = self._llm.llm_engine.reset_prefix_cache(reset_running_requests=running, reset_connector=True)
            assert done or self._asynchronous
            self._report.all_resets += 1
        elif chance < _ALL_RESETS + _LOCAL_RESETS or self._draining:
            self._draining = self._asynchronous and _is_busy(self._llm)
            if not self._draining:
                assert self._llm.llm_engine.reset_prefix_cache(reset_running_requests=not self._asynchronous)
                self._report.local_resets += 1


def _is_busy(llm: Any) -> bool:
    """Say whether a request is unfinished, or a step's result isn't in (asynchronous scheduling)."""
    return llm.llm_engine.has_unfinished_requests() or bool(llm.llm_engine.engine_core.engine_core.batch_queue)


def _held_between_steps(llm: Any) -> list[str]:
    """Say what is held although copies on a CPU end within their step."""
    worker = engine.connector(llm).worker
    held = {"copies under way": len(worker._pending)}
    if not worker.store.clients:  # what is on its way to L2 is pinned until it is there
        held["pins"] = sum(worker.tier.allocator._pins)
    return [f"{count} {what}" for what, count in held.items() if count]


def _look_at_disk(llm: Any, folder: str) -> list[str]:
    """Wait until nothing is on its way to L2, and say what its folder has too much of."""
    drain(llm)
    files = [path.lstat() for path in Path(folder).rglob("*")]
    used = sum(file.st_blocks * 512 for file in files if stat.S_ISREG(file.st_mode))
    return [f"{used} bytes on disk instead of at most {_DISK_SIZE}"] if used > _DISK_SIZE else []


def _look(llm: Any, report: Report, limits: Limits, *, is_warm: bool) -> None:
    """Look at an idle engine, and note what is wrong."""
    from kvplug import dispatch

    problems = [f"{count} {what} when idle" for what, count in leftovers(llm).items() if count]
    pool = engine.scheduler(llm).kv_cache_manager.block_pool
    if used := pool.num_gpu_blocks - 1 - pool.get_num_free_blocks():
        problems.append(f"{used} of vLLM's blocks in use when idle")
    roots = {
        "scheduler half": engine.scheduler(llm).connector,
        "worker half": engine.connector(llm),
        "dispatcher": dispatch.current_dispatcher(),
    }
    report.last = Snapshot.take(roots)
    report.counts = counts(llm)
    if report.first is not None:
        problems += report.last.growth_since(report.first, limits)
    elif is_warm:
        report.first = report.last
    report.problems += [f"after {report.requests} requests: {problem}" for problem in problems]
