"""vLLM's real scheduler and both halves of a connector, around workers without a model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from kvplug.testing.caches import Layer
from kvplug.testing.checks import CacheAudit, check_blocks, check_idle
from kvplug.testing.classes import kv_transfer
from kvplug.testing.configs import GroupSpec, make_vllm_config
from kvplug.testing.engine import Engine
from kvplug.testing.errors import StuckError
from kvplug.testing.ledger import Ledger
from kvplug.testing.model import VOCABULARY, identity
from kvplug.testing.records import Finished, Promise, Statistics

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Simulation"]


class Simulation:
    """An engine without a model: vLLM's scheduler, its block pool, a connector, and workers that hash.

    A context manager; leaving it shuts both halves of the connector down.

    Args:
        connector: A connector's name, its class, vLLM's `kv_transfer_config` as a dict, or None.
        extra_config: The connector's `kv_connector_extra_config`.
        groups: The model's layers.
        num_blocks: Blocks in the pool, vLLM's null block among them.
        max_num_batched_tokens: Tokens per step.
        max_num_seqs: Requests per step.
        max_model_len: Tokens of a request. vLLM wants a pool that holds one such request.
        tensor_parallel: Ranks per stage, each with a worker half of its own.
        pipeline_parallel: Stages.
        asynchronous: Whether a step is scheduled before the output of the one before is known.
        enable_prefix_caching: vLLM's own prefix cache.
        runner: Which of vLLM's two model runners to be like: order of calls, resumed requests, zeroing.
        num_speculative_tokens: Drafts per decode step.
        prefix_match_unit: vLLM's setting of this name: tokens per hash, where several groups have larger blocks.
        accept: Says of a request id and a position whether the draft there is right; all are by default.
        isolated: Whether scheduler and workers share no object, as if in processes of their own. Finds metadata that
            can't be pickled, and costs some time. Always so with several ranks.
    """

    def __init__(
        self,
        connector: str | type | dict[str, Any] | None = None,
        *,
        extra_config: dict[str, Any] | None = None,
        groups: Sequence[GroupSpec] = (GroupSpec(),),
        num_blocks: int = 64,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 8,
        max_model_len: int = 512,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        asynchronous: bool = False,
        enable_prefix_caching: bool = True,
        runner: Literal["v1", "v2"] = "v1",
        num_speculative_tokens: int = 0,
        prefix_match_unit: int | None = None,
        accept: Callable[[str, int], bool] | None = None,
        isolated: bool = False,
    ) -> None:
        from vllm.plugins import load_general_plugins

        if asynchronous and num_speculative_tokens:
            raise NotImplementedError("drafts with asynchronous scheduling aren't simulated")
        if num_speculative_tokens and any(group.kind == "mamba" for group in groups):
            raise NotImplementedError("drafts with state layers aren't simulated")
        load_general_plugins()
        #: vLLM's configuration.
        self.vllm_config = make_vllm_config(
            groups,
            kv_transfer(connector, extra_config),
            num_blocks=num_blocks,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            asynchronous=asynchronous,
            enable_prefix_caching=enable_prefix_caching,
            v2=runner == "v2",
            num_speculative_tokens=num_speculative_tokens,
            prefix_match_unit=prefix_match_unit,
        )
        self.statistics = Statistics()
        self._ledger = Ledger()
        #: What became of each request, by id; filled as tokens come.
        self.finished: dict[str, Finished] = self._ledger.finished
        self._accept, self._num_drafts = accept, num_speculative_tokens
        self._audit = CacheAudit()
        self._in_flight: deque[tuple[Any, Any, set[str]]] = deque()
        self._next_id = 0
        self._engine = Engine(
            self.vllm_config, groups, self._ledger.sequences, self._promised, isolated=isolated, v2=runner == "v2"
        )
        #: vLLM's scheduler.
        self.scheduler = self._engine.scheduler
        #: vLLM's `KVCacheConfig` of the scheduler: groups as vLLM made them.
        self.kv_cache_config = self._engine.kv_cache_config
        self._block_sizes = [group.kv_cache_spec.block_size for group in self.kv_cache_config.kv_cache_groups]

    def _promised(self, request_id: str, num_tokens: int, tables: Any) -> None:
        # vLLM caches them when an asynchronous load is done, which may be steps before the request is scheduled.
        self._audit.note(request_id, self._ledger.sequences[request_id], tables, 0)
        self.statistics.promises.append(Promise(request_id, num_tokens, self.statistics.steps + 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Shut both halves of the connector down, workers first, as vLLM does. Once; further calls do nothing."""
        self._engine.shutdown()

    @property
    def connector(self) -> Any:
        """The scheduler half of the connector, or None."""
        return self.scheduler.connector

    @property
    def worker_connectors(self) -> list[Any]:
        """The worker halves, by rank."""
        return [worker.connector for worker in self._engine.workers if worker.connector is not None]

    @property
    def layers(self) -> list[Layer]:
        """The layers of all ranks, with their caches, for tests that look into them or change them."""
        return [layer for worker in self._engine.workers for layer in worker.layers]

    # -- Operations ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        prompt_logprobs: int | None = None,
        lora_request: Any = None,
        kv_transfer_params: dict[str, Any] | None = None,
        priority: int = 0,
        **sampling: Any,
    ) -> str:
        """Add a request, and return its id.

        Args:
            prompt: Token ids, each below `kvplug.testing.VOCABULARY`.
            max_tokens: Tokens to generate.
            request_id: An id of one's own; a finished request's may be used again.
            cache_salt: Keeps its KV apart: the simulated model computes other values.
            lora_request: vLLM's `LoRARequest`; its name and path keep the request's KV apart likewise.
            prompt_logprobs: As a number, vLLM reads no prefix cache for the request.
            kv_transfer_params: For the connector.
            priority: For schedulers with that policy.
            **sampling: More of vLLM's `SamplingParams`.
        """
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        if request_id is None:
            request_id = f"r{self._next_id}"
            self._next_id += 1
        if not prompt or not all(0 <= token < VOCABULARY for token in prompt):
            raise ValueError(f"a prompt has at least one token id, and all are from 0 to {VOCABULARY - 1}")
        if kv_transfer_params is not None:
            sampling["extra_args"] = {**(sampling.get("extra_args") or {}), "kv_transfer_params": kv_transfer_params}
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, temperature=0, ignore_eos=True, prompt_logprobs=prompt_logprobs, **sampling
            ),
            pooling_params=None,
            cache_salt=cache_salt,
            lora_request=lora_request,
            priority=priority,
            block_hasher=self._engine.block_hasher,
        )
        self._ledger.add(request_id, prompt, identity(cache_salt, lora_request))
        self.scheduler.add_request(request)
        if request.num_prompt_tokens < len(prompt):
            # A connector that hands recurrent state over lets the prompt end one token earlier, as vLLM's own do.
            self._ledger.add(request_id, request.prompt_token_ids, identity(cache_salt, lora_request))
        return request_id

    def abort(self, request_id: str) -> None:
        """Abort a request; unknown and finished ones are ignored, as vLLM does."""
        from vllm.v1.request import RequestStatus

        if request_id in self.scheduler.requests and self.finished[request_id].reason is None:
            self.finished[request_id].reason = "abort"
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def reset_prefix_cache(self, *, running: bool = False, connector: bool = False) -> bool:
        """Reset vLLM's prefix cache, with running requests preempted, or the connector's cache too, if asked for."""
        before = self._count_preemptions()
        done = bool(self.scheduler.reset_prefix_cache(running, connector))
        self.statistics.preemptions += self._count_preemptions() - before
        return done

    def step(self) -> dict[str, list[int]]:
        """Schedule and execute one step, and return the new tokens by request.

        With steps in flight (asynchronous scheduling, pipeline stages) it returns those of an earlier one, as vLLM's
        `step_with_batch_queue` does. It never waits.

        Raises:
            SimulationError: The step shows that something went wrong.
        """
        if self.scheduler.has_requests():
            scheduler_output = self._schedule()
            tolerated = set().union(*(failed for _, _, failed in self._in_flight))
            output, failed = self._engine.execute(scheduler_output, tolerated)
            self._in_flight.append((scheduler_output, output, failed))
            for request_id in failed:
                blocks = self.scheduler.kv_cache_manager.get_blocks(request_id).blocks
                self._audit.not_loaded(request_id, zip(self._block_sizes, blocks, strict=True))
            if len(self._in_flight) < self._engine.max_in_flight and (
                scheduler_output.total_num_scheduled_tokens or self.scheduler.has_requests()
            ):
                return {}
        if not self._in_flight:
            return {}
        scheduler_output, output, _ = self._in_flight.popleft()
        outputs = self.scheduler.update_from_output(scheduler_output, output)
        tokens = self._ledger.take(outputs)
        if self._num_drafts and scheduler_output.total_num_scheduled_tokens:
            self.scheduler.update_draft_token_ids(
                self._ledger.drafts(output, self.scheduler.requests, self._num_drafts, self._accept)
            )
        return tokens

    @property
    def busy(self) -> bool:
        """Whether vLLM's engine core would go on stepping."""
        return bool(self._in_flight) or self.scheduler.has_requests()

    def drain(self, max_steps: int = 100_000, *, max_idle_steps: int = 1000, idle_sleep: float = 0.001) -> int:
        """Step until the engine would stop, and return how many steps had no tokens.

        Args:
            max_steps: Steps at most.
            max_idle_steps: Steps in a row at most in which nothing is scheduled, finishes or comes.
            idle_sleep: Seconds to sleep after such a step, as vLLM's core process does: connectors' threads need it.

        Raises:
            StuckError: There were so many.
        """
        idle = empty = 0
        for _ in range(max_steps):
            if not self.busy:
                return empty
            before = (self.statistics.scheduled_tokens, self._progress())
            tokens = self.step()
            if self.statistics.scheduled_tokens == before[0]:
                empty += 1
            if tokens or before != (self.statistics.scheduled_tokens, self._progress()):
                idle = 0
                continue
            idle += 1
            if idle >= max_idle_steps:
                break
            if idle_sleep:
                time.sleep(idle_sleep)
        if not self.busy:
            return empty
        waiting = {request_id: request.status.name for request_id, request in self.scheduler.requests.items()}
        raise StuckError(f"after {self.statistics.steps} steps, {idle} of them without progress, there are {waiting}")

    def check(self, *, contents: bool = True) -> None:
        """Check vLLM's bookkeeping of blocks, and what the blocks of its prefix cache hold.

        Args:
            contents: Whether to compare the contents too, which takes longer.

        Raises:
            SimulationError: Something is wrong.
        """
        check_blocks(self.scheduler)
        if not self.busy:
            check_idle(self.scheduler)
        if contents:
            for worker in self._engine.workers:
                self._audit.check(self.scheduler, worker.layers)

    # -- Parts of a step -------------------------------------------------------------------------------------------

    def _schedule(self) -> Any:
        before = self._count_preemptions()
        scheduler_output = self.scheduler.schedule()
        statistics = self.statistics
        statistics.steps += 1
        statistics.preemptions += self._count_preemptions() - before
        statistics.scheduled_tokens += scheduler_output.total_num_scheduled_tokens
        statistics.empty_steps += not scheduler_output.total_num_scheduled_tokens
        self._note_contents(scheduler_output)
        return scheduler_output

    def _count_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.scheduler.requests.values())

    def _note_contents(self, scheduler_output: Any) -> None:
        """Note which blocks the requests of a step have, before they can be freed."""
        manager = self.scheduler.kv_cache_manager
        self._audit.copy(getattr(scheduler_output, "kv_cache_block_copies", None) or ())
        for request_id in scheduler_output.num_scheduled_tokens:
            self._audit.note(
                request_id,
                self._ledger.sequences[request_id],
                manager.get_blocks(request_id).blocks,
                self.scheduler.requests[request_id].num_computed_tokens,
            )

    def _progress(self) -> tuple[Any, ...]:
        scheduler = self.scheduler
        return (
            {request_id: request.status for request_id, request in scheduler.requests.items()},
            scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            len(self._in_flight),
        )
