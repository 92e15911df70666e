"""A Python source text whose bytes can be had back unchanged."""

from __future__ import annotations

import io
import tokenize
from dataclasses import dataclass
from functools import cached_property

from kvplug_hooks.errors import PatchError

__all__ = ["SourceText"]


@dataclass(frozen=True)
class SourceText:
    """A module's text with its encoding and its own line endings."""

    text: str
    #: As the tokenizer names it; `utf-8-sig` stands for UTF-8 with a byte order mark, which `text` lacks.
    encoding: str = "utf-8"

    @classmethod
    def from_bytes(cls, data: bytes) -> SourceText:
        """Decode a source file the way Python does.

        Raises:
            PatchError: The bytes can't be decoded, or would come out differently when encoded again.

        """
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            source = cls(data.decode(encoding), encoding)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise PatchError(f"The source can't be decoded ({error}); reinstall vLLM.") from error
        if source.data != data:
            raise PatchError(f"The source changes when it is read and written as {encoding}; use UTF-8.")
        return source

    @cached_property
    def data(self) -> bytes:
        """The file's bytes."""
        return self.text.encode(self.encoding)

    @cached_property
    def lines(self) -> list[str]:
        """The lines with their endings, split where Python's parser splits (unlike `str.splitlines`)."""
        return io.StringIO(self.text, newline="").readlines()

    def offset(self, line: int, column: int) -> int:
        """Return the index in `text` of a position as `ast` gives it: 1-based line, column in UTF-8 bytes."""
        before = sum(map(len, self.lines[: line - 1]))
        return before + len(self.lines[line - 1].encode()[:column].decode())
