"""Declarations: what a patch inserts, where, and how long it will be needed.

A declaration is data. How it gets into a source text is the business of `kvplug_hooks.edit`, and nothing here
imports `ast`, so that installing the finder stays cheap in processes that never import a model runner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvplug_hooks.anchors import Anchor, Before, FirstIn, FirstStatement

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Anchor", "Applied", "Before", "FirstIn", "FirstStatement", "Patch"]

Applied = Literal["finder", "replace"]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """An import and a call that one function of one vLLM module lacks."""

    #: Unique name, `topic` or `topic.variant`.
    id: str
    #: One line: what the patch is for.
    purpose: str
    #: When the patch can be deleted, with the upstream issue or pull request.
    removal_condition: str
    #: Dotted name of the module that has the function, as the newest known release calls it.
    module: str
    #: Where older releases have the function, the newest first.
    former_modules: tuple[str, ...] = ()
    #: Path of the function in that module, for example `Class.method`.
    function: str
    #: Where in the function the call goes. It must match exactly once.
    anchor: Anchor
    #: The module that has the call's other end, and its name there.
    import_from: str
    import_name: str
    #: The inserted statement. The names that it reads must be parameters of the function.
    call: str
    #: vLLM releases that were read and take the patch. Others are judged by their source alone.
    known_releases: tuple[str, ...]
    #: Why releases before the first known one can do without the patch, as a sentence. None: they are unsupported.
    older_releases: str | None = None
    #: How it is applied at import. `finder`: as the module is imported; a module that is loaded already is an error.
    #: `replace`: the same, and in a module that is loaded already the function's compiled code is replaced.
    applied: Applied = "finder"
    #: Model architectures that the patch concerns, as vLLM resolves them; None for all.
    architectures: frozenset[str] | None = None
    #: "No longer needed when": takes the module's source text, returns a sentence that says why not, or None.
    not_needed: Callable[[str], str | None] | None = None

    def __post_init__(self) -> None:
        if not self.known_releases:
            raise ValueError(f"The patch {self.id} knows no vLLM release: name those whose source was read.")
        if self.applied not in ("finder", "replace"):
            raise ValueError(f"The patch {self.id} is applied by {self.applied!r}: use `finder` or `replace`.")
        if strangers := [module for module in self.modules if not module.startswith("vllm.")]:
            raise ValueError(f"The patch {self.id} is for {', '.join(strangers)}: only modules of vllm can be patched.")

    @property
    def import_line(self) -> str:
        """The inserted import statement."""
        return f"from {self.import_from} import {self.import_name}"

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module that may have the function, in the order in which they are looked at."""
        return (self.module, *self.former_modules)

    @property
    def path(self) -> str:
        """The file of `module`, relative to the folder that contains the `vllm` package."""
        return path_of(self.module)

    @property
    def releases(self) -> str:
        """The known releases as a range, for messages."""
        return f"{self.known_releases[0]} to {self.known_releases[-1]}"


def path_of(module: str) -> str:
    """Return a module's file, relative to the folder that contains the `vllm` package."""
    return module.replace(".", "/") + ".py"
