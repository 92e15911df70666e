"""The demo's text: Python's own language reference, which ships with Python as `pydoc_data.topics`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_CONVERSATIONS", "MAX_TURNS", "Conversation", "conversations", "corpus"]

MAX_CONVERSATIONS = 8
MAX_TURNS = 8

# Characters. The demo's tokenizer makes about one token of four.
_SYSTEM_SIZE = 4000
_PASSAGE_SIZE = 700

_SYSTEM = "You answer questions about Python. Use this part of its language reference, and what the user quotes.\n\n"
_QUESTION = "The reference also says:\n\n{passage}\n\nWhat does this mean for my program?"


@dataclass(frozen=True)
class Conversation:
    """What one user says; the answers are the model's."""

    #: Long, and the same for all users.
    system: str
    #: One per turn.
    questions: tuple[str, ...]


def corpus() -> list[str]:
    """Return the reference's chapters, the longest first."""
    from pydoc_data.topics import topics

    return sorted(topics.values(), key=lambda text: (-len(text), text))


def conversations(count: int, turns: int) -> list[Conversation]:
    """Return conversations that share a long system prompt, each about a chapter of its own.

    Args:
        count: Conversations, up to `MAX_CONVERSATIONS`.
        turns: Questions in each, up to `MAX_TURNS`.

    """
    shared, *chapters = corpus()
    system = _SYSTEM + _passages(shared, _SYSTEM_SIZE, 1)[0]
    return [
        Conversation(
            system, tuple(_QUESTION.format(passage=passage) for passage in _passages(chapter, _PASSAGE_SIZE, turns))
        )
        for chapter in chapters[:count]
    ]


def _passages(text: str, size: int, count: int) -> list[str]:
    """Cut the beginning of a text into passages of whole paragraphs, each of at least `size` characters.

    Raises:
        ValueError: The text is too short.

    """
    passages: list[str] = []
    passage = ""
    for paragraph in text.split("\n\n"):
        passage += paragraph + "\n\n"
        if len(passage) >= size:
            passages.append(passage.strip())
            passage = ""
        if len(passages) == count:
            return passages
    raise ValueError(f"the text has no {count} passages of {size} characters, only {len(passages)}")
