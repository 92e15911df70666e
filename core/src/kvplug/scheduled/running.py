"""A load or save that is under way in a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplug.paged import Transfer

__all__ = ["Running"]


@dataclass
class Running:
    """A load or save under way. What goes wrong is kept until it has ended."""

    #: Ids of the blocks of the paged cache that are read or written.
    block_ids: frozenset[int]
    #: Of a load: the request.
    request_id: str = ""
    asynchronous: bool = False
    transfers: list[Transfer] = field(default_factory=list)
    error: Exception | None = None

    def ended(self) -> bool:
        """Return whether nothing of it is under way any more, for better or worse (`error`)."""
        self.transfers = [transfer for transfer in self.transfers if self._is_running(transfer)]
        return not self.transfers

    def _is_running(self, transfer: Transfer) -> bool:
        try:
            return not transfer.done()
        except Exception as error:  # noqa: BLE001 - the device, or memory, may report anything
            self.error = error
            return False

    def hold_compute(self) -> None:
        """Let what is computed next wait for it."""
        for transfer in list(self.transfers):
            self._try(transfer.hold_compute)

    def wait(self) -> None:
        """Wait until nothing of it is under way."""
        for transfer in list(self.transfers):
            self._try(transfer.wait)

    def _try(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        except Exception as error:  # noqa: BLE001 - the device, or memory, may report anything
            self.error = error
