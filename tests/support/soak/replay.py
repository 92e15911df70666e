"""The job that asks a plain engine what a soak's samples should be."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support import llm as engine
from support.llm import Output, to_output
from support.soak.traffic import Ask


def replay(*, model: str, samples: Sequence[str], **engine_args: Any) -> tuple[list[Output], list[Output]]:
    """Ask an engine without a connector for all samples of some soaks.

    Args:
        model: Folder of the soaks' model.
        samples: The soaks' files.
        **engine_args: See `support.llm.make_llm`.

    Returns:
        What the soaks' engines answered, and what this one does, in the same order.

    """
    pairs = [pair for path in samples for pair in _read(Path(path))]
    llm = engine.make_llm(model, **{"max_model_len": 256} | engine_args)
    answers: dict[str, Output] = {}
    ids = [ask.add_to(llm, f"sample-{number}") for number, (ask, _) in enumerate(pairs)]
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                answers[output.request_id] = to_output(output.outputs[0])
    return [output for _, output in pairs], [answers[request_id] for request_id in ids]


def _read(path: Path) -> Iterator[tuple[Ask, Output]]:
    with path.open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)
