"""vLLM's own preemption call and kvplug's preemption hook, as one call a step."""

from __future__ import annotations

from typing import Any

from kvplug.hookspecs import hookimpl
from kvplug.step import Step

__all__ = ["PreemptionMixin"]


class PreemptionMixin:
    """For connectors that must be told before blocks are reused, whether the patch is live or not.

    Put it before vLLM's base class, and implement `blocks_reused`. Where the patch is live, the hook
    `before_blocks_reused` calls it, before the model runner zeroes or copies any block. vLLM's own `handle_preemptions`
    calls it, too: with ids before 0.19 and only if something was preempted; with the step's metadata on every step
    from then on; and on the second model runner only when blocks may have been overwritten already. Whoever comes first
    in a step is the one that counts.
    """

    _kvplug_last_metadata: Any = None

    def blocks_reused(self, metadata: Any) -> None:
        """Finish reading blocks that this step may overwrite. At most once a step.

        Args:
            metadata: The connector's own metadata of the step; None where vLLM doesn't pass it (before 0.19).

        """
        raise NotImplementedError

    @hookimpl(optionalhook=True)
    def before_blocks_reused(self, step: Step) -> None:
        """Take the hook's call."""
        self._kvplug_blocks_reused(step.metadata)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Take vLLM's call."""
        is_ids = isinstance(kv_connector_metadata, (set, frozenset))
        self._kvplug_blocks_reused(None if is_ids else kv_connector_metadata)

    def _kvplug_blocks_reused(self, metadata: Any) -> None:
        if metadata is None:
            self.blocks_reused(None)
        elif metadata is not self._kvplug_last_metadata:
            self._kvplug_last_metadata = metadata
            self.blocks_reused(metadata)
