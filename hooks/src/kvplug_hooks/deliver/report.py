"""What an operation found and did, as the command line prints it and as programs get it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvplug_hooks.deliver.states import Exit, overall
from kvplug_hooks.deliver.survey import Standing, Survey

__all__ = ["Report", "report"]


@dataclass(frozen=True)
class Report:
    """Where the patches stand in one vLLM's files."""

    #: The interpreter that was asked.
    python: str
    #: The folder that contains the package.
    folder: str
    #: Version of vLLM, and the distribution that it belongs to.
    vllm: str
    distribution: str
    #: As an exit status.
    code: Exit
    patches: tuple[Standing, ...]
    #: What is wrong beside the patched modules; each is a sentence.
    problems: tuple[str, ...] = ()
    #: Why declarations of patches aren't used; each is a sentence.
    rejected: tuple[str, ...] = ()
    #: Files that this operation changed, relative to `folder`.
    changed: tuple[str, ...] = ()
    #: Whether vLLM is outside of the interpreter's own environment, so that others may use it, too.
    shared: bool = False

    @property
    def applied(self) -> tuple[str, ...]:
        """Ids of the patches that are in the files."""
        return tuple(one.patch for one in self.patches if one.state == "applied")

    @property
    def state(self) -> str:
        """The whole in a word, which stands for `code`."""
        return self.code.word

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {"state": self.state, **asdict(self), "code": int(self.code)}


def report(
    survey: Survey, *, require: bool = False, problems: tuple[str, ...] = (), rejected: tuple[str, ...] = ()
) -> Report:
    """Sum a survey up."""
    target = survey.files.target
    code = overall([one.state for one in survey.standings], require=require)
    if code == Exit.APPLIED and problems:
        code = Exit.INCOMPLETE
    return Report(
        python=target.python,
        folder=str(target.tree.folder),
        vllm=target.version,
        distribution=str(target.owner),
        code=code,
        patches=survey.standings,
        problems=problems,
        rejected=rejected,
        shared=target.shared,
    )
