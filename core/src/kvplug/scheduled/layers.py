"""Transfers layer by layer, so that a layer's blocks travel while others are computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplug.paged import PagedCache, Transfer
    from kvplug.paged.background import Background
    from kvplug.paged.groups import PagedGroups
    from kvplug.scheduled.metadata import Part, Save
    from kvplug.store import Slab

__all__ = ["Layers"]


class Layers:
    """Transfers of one step, layer by layer, of a model with one KV-cache group.

    Args:
        paged: The paged cache.
        to_load: The same, for loads.
        slab: The memory.

    """

    def __init__(self, paged: PagedGroups, to_load: PagedGroups, slab: Slab) -> None:
        self._caches = _by_layer(paged)
        self._to_load = _by_layer(to_load)
        self._slab = slab
        self._loading: dict[str, list[Transfer]] = {}
        self._saved: dict[int, list[Transfer]] = {}
        self._saved_layers: set[str] = set()

    def start_loads(self, background: Background, parts: Sequence[Part], started: list[Transfer]) -> None:
        """Start loading, first layer first, and append the transfers to those that were started."""
        for name, cache in self._to_load.items():
            for part in parts:
                copy = partial(cache.scatter, self._slab, part.slots, part.block_ids, hold=False)
                transfer = background.start(copy)
                self._loading.setdefault(name, []).append(transfer)
                started.append(transfer)

    def wait_for(self, name: str) -> None:
        """Let what is computed next wait for a layer's blocks."""
        for transfer in self._loading.pop(name, ()):
            transfer.hold_compute()

    def start_saves(self, background: Background, name: str, saves: Sequence[Save]) -> None:
        """Start saving one layer's blocks. A layer that isn't stored, or comes again, is left out."""
        if name not in self._caches or name in self._saved_layers:
            return
        self._saved_layers.add(name)
        for save in saves:
            self._saved.setdefault(save.number, []).extend(self._gather(background, name, save))

    def finish_save(self, background: Background, save: Save, started: list[Transfer]) -> None:
        """Start saving the layers that haven't been, and append the transfers of all layers."""
        started.extend(self._saved.pop(save.number, ()))
        for name in self._caches:
            if name not in self._saved_layers:
                started.extend(self._gather(background, name, save))

    def _gather(self, background: Background, name: str, save: Save) -> list[Transfer]:
        cache = self._caches[name]
        return [
            background.start(partial(cache.gather, part.block_ids, self._slab, part.slots, hold=False))
            for part in save.parts
        ]

    def end_step(self) -> None:
        """Let what is computed next wait for loads of layers that nobody asked for."""
        for name in list(self._loading):
            self.wait_for(name)
        self._saved_layers.clear()
        self._saved.clear()


def _by_layer(paged: PagedGroups) -> dict[str, PagedCache]:
    (cache,) = paged.caches
    return {layer.name: cache.of_layers([layer.name]) for layer in cache.layers}
