"""Something that kvplug relies on in vLLM's sources, and from which release on."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from matrixlib.checks import Check, Says
from matrixlib.reading import Missing, Sources

__all__ = ["Fact", "fields"]

_BOTH = ("v1", "v2")


@dataclass(frozen=True)
class Fact:
    """A fact, and the releases in which it holds. In the others it must not hold: somebody handles that side, too."""

    name: str
    check: Check
    #: What would go wrong without it.
    used_by: str
    #: The first release that was read in which it holds; None if it holds in all.
    since: str | None = None
    #: The first one in which it holds no more; None if it still does.
    until: str | None = None
    #: The model runners that it matters for.
    runners: tuple[str, ...] = _BOTH

    def problem(self, sources: Sources) -> str | None:
        """Return a sentence if it isn't with a release as it is declared here, else None."""
        release = sources.tree.version
        assert release is not None, "sources are of a release"
        try:
            self.check(sources)
        except Missing as missing:
            if not self._is_expected(release):
                return None
            return f"In vLLM {release} it isn't so that {self.name}: {missing}; {self.used_by} relies on it."
        if self._is_expected(release):
            return None
        span = f"from {self.since} on" if self.until is None else f"before {self.until}"
        return f"In vLLM {release} it is so that {self.name}, which is declared for releases {span} ({self.used_by})."

    def _is_expected(self, release: Version) -> bool:
        begun = self.since is None or release >= Version(self.since)
        return begun and (self.until is None or release < Version(self.until))


def fields(
    path: str, owner: str, used_by: str, *declarations: str | tuple[str, str] | tuple[str, str, str]
) -> list[Fact]:
    """Return a fact for each field of a dataclass.

    Args:
        path: The module's file.
        owner: The class.
        used_by: As for `Fact`.
        declarations: Each field as vLLM declares it, with its type; with the first release and the first one without,
            if it isn't in all.

    """
    spans = [(declaration,) if isinstance(declaration, str) else declaration for declaration in declarations]
    return [
        Fact(
            f"{owner} has {text}",
            Says(path, owner, text),
            used_by,
            since=span[0] if span else None,
            until=span[1] if len(span) > 1 else None,
        )
        for text, *span in spans
    ]
