"""A vLLM as it was before kvplug-hooks patched its files, and those files with other patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplug_hooks.deliver.manifest import added_lines, split_lines
from kvplug_hooks.deliver.states import DeliveryError, Exit
from kvplug_hooks.installed import Tree
from kvplug_hooks.plan import Planned, rewrite
from kvplug_hooks.source import SourceText

if TYPE_CHECKING:
    from kvplug_hooks.deliver.files import Files

__all__ = ["Originals", "patched_texts"]

# A traceback shows it where the import fails.
_COMMENT = b"  # put in by `kvplug-hooks apply`, and taken out by `kvplug-hooks revert`"


@dataclass(frozen=True)
class Originals(Tree):
    """A tree in which patched files read as they did before, so that every operation starts from the same text."""

    files: Files

    @classmethod
    def of(cls, files: Files) -> Originals:
        """Make the tree of what was read."""
        return cls(files.target.tree.folder, files)

    def read(self, path: str) -> SourceText:
        """Return the source of a file without patches; as it is, where the original isn't known."""
        file = self.files.file(path)
        if file is None:
            return super().read(path)
        return SourceText.from_bytes(file.data if file.original is None else file.original)


def patched_texts(tree: Originals, planned: Sequence[Planned]) -> dict[str, bytes]:
    """Return the files that `planned` changes, by name, with all of those that fit.

    Raises:
        PatchError: Something doesn't fit.
        DeliveryError: The result can't be undone.

    """
    texts = {}
    for path, source in rewrite(tree, planned).items():
        name = path.relative_to(tree.folder).as_posix()
        original = tree.read(name).data
        text = _with_comments(original, source, {one.patch.import_line for one in planned})
        try:
            added_lines(original, text)
        except ValueError as error:
            raise DeliveryError(
                f"{path} can't be patched so that it could be reverted: {error}.", Exit.FAILED
            ) from error
        texts[name] = text
    return texts


def _with_comments(original: bytes, source: SourceText, imports: set[str]) -> bytes:
    """Let each added import say where it comes from: if kvplug is removed, that is what fails, and what is shown."""
    added, ours = set(added_lines(original, source.data)), {line.encode() for line in imports}
    lines = []
    for number, line in enumerate(split_lines(source.data), start=1):
        text = line.rstrip(b"\r\n")
        commented = number in added and text in ours
        lines.append(text + _COMMENT + line[len(text) :] if commented else line)
    return b"".join(lines)
