"""What a process holds, and whether it has grown: memory, descriptors, threads, containers, objects."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CONTAINERS = (dict, list, set, frozenset, deque, tuple)


@dataclass(frozen=True)
class Limits:
    """How much more a process may hold after any number of requests. What is said is for one that is idle."""

    #: Bytes of memory that no file backs. With a connector and without, 2 MiB more are touched between the 750th
    #: request and the 2,000th, and none after that. Over 1,000 requests this notices 4 KiB each, a sixteenth of a
    #: block; what is smaller is an object or an item.
    memory: int = 4 << 20
    #: Items in any one container of kvplug. L1's, of at most 16 blocks, are as full as the traffic has left them.
    items: int = 20
    #: Objects of any one type, anywhere in the process. Without a leak not one comes and stays.
    objects: int = 20
    #: Items that a container of kvplug has room for, by the end of its path: as full as the traffic has left it.
    room: Mapping[str, int] = field(default_factory=dict)

    def allowed(self, name: str) -> int:
        """Return how many items a container may have, whatever it had before."""
        return max((room for end, room in self.room.items() if name.endswith(end)), default=0)


@dataclass(frozen=True)
class Snapshot:
    """What an idle process holds."""

    #: Bytes of anonymous and shared memory that is resident.
    memory: int
    descriptors: int
    #: Native ones included.
    threads: int
    #: Length of each container that kvplug holds on to, by where it is.
    items: Mapping[str, int]
    #: Objects that the garbage collector knows, by type.
    objects: Mapping[str, int]

    @classmethod
    def take(cls, roots: Mapping[str, Any]) -> Snapshot:
        """Collect garbage, give free memory back, and look.

        Args:
            roots: Where to look for containers, by name; besides kvplug's modules.

        """
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return cls(
            memory=sum(int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem")),
            descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()),
            threads=sum(1 for _ in Path("/proc/self/task").iterdir()),
            items=_items(roots),
            objects=Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects()),
        )

    def growth_since(self, earlier: Snapshot, limits: Limits) -> list[str]:
        """Name what has grown by more than it may, one line each; empty if nothing has."""
        problems = []
        if (grown := self.memory - earlier.memory) > limits.memory:
            problems.append(f"memory has grown by {grown / 2**20:.1f} MiB to {self.memory / 2**20:.1f} MiB")
        for name in ("descriptors", "threads"):
            before, now = getattr(earlier, name), getattr(self, name)
            if now > before:
                problems.append(f"{now} {name} instead of {before}")
        for what, limit in (("items", limits.items), ("objects", limits.objects)):
            before, now = getattr(earlier, what), getattr(self, what)
            problems += [
                f"{count} {what} instead of {before.get(name, 0)}: {name}"
                for name, count in sorted(now.items())
                if count > max(before.get(name, 0) + limit, limits.allowed(name) if what == "items" else 0)
            ]
        return problems


def _items(roots: Mapping[str, Any]) -> dict[str, int]:
    """Add up the lengths of containers by the path of attributes that leads to them."""
    totals: Counter[str] = Counter()
    seen: set[int] = set()
    todo = [*roots.items(), *_module_state()]
    while todo:
        path, value = todo.pop()
        if id(value) in seen:
            continue
        if isinstance(value, _CONTAINERS):
            seen.add(id(value))
            totals[path] += len(value)
            inner = value.values() if isinstance(value, dict) else value
            todo += [(f"{path}[]", item) for item in list(inner) if _is_ours(item) or isinstance(item, _CONTAINERS)]
        elif _is_ours(value):
            seen.add(id(value))
            todo += [(f"{path}.{name}", item) for name, item in _attributes(value)]
        elif callable(getattr(value, "cache_info", None)):
            totals[path] += value.cache_info().currsize
    return dict(totals)


def _module_state() -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if module is not None and name.partition(".")[0].startswith("kvplug"):
            yield from ((f"{name}.{attribute}", value) for attribute, value in list(vars(module).items()))


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("kvplug")


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, slot):
                yield slot, getattr(value, slot)
