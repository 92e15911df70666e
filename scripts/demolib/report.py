"""What the demo found: the result file, the table, and whether it is what it should be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from demolib.client import Pass, Reply

__all__ = ["TOLERANCE", "Passes", "compare", "faults", "result", "table", "warnings"]

#: Largest difference of log-probabilities that counts as equal: what a prompt is computed in other chunks can cost.
TOLERANCE = 1e-5

_LEAST_LOADED = 0.5
_LEAST_RATIO = 3.0

_DELIVERIES = {
    "import": "patched in memory as the worker imported its model runner",
    "file": "in the model runner's file",
    None: "not found",
}


@dataclass(frozen=True)
class Passes:
    """The workload's passes."""

    #: vLLM without a connector, nothing cached.
    alone: Pass
    #: With the connector, nothing cached and nothing stored.
    cold: Pass
    #: With the connector, as the conversations come: this is where the blocks are stored.
    visit: Pass
    #: With the connector, nothing in vLLM's own cache, all of it stored.
    warm: Pass
    #: With the connector on a server that was started again, over an L2 tier.
    restarted: Pass | None = None


def compare(expected: Sequence[Reply], found: Sequence[Reply]) -> tuple[bool, float]:
    """Compare two passes' answers.

    Returns:
        Whether all tokens are equal, and the largest difference of two tokens' log-probabilities.

    """
    tokens_equal = [reply.token_ids for reply in expected] == [reply.token_ids for reply in found]
    pairs = zip(_logprobs(expected), _logprobs(found), strict=True)
    return tokens_equal, max(abs(one - other) for one, other in pairs)


def _logprobs(replies: Iterable[Reply]) -> list[float]:
    return [logprob for reply in replies for logprob in reply.logprobs]


def result(
    passes: Passes,
    hook_mode: str | None,
    about: dict[str, Any],
    *,
    connector: str = "type1",
    wanted: str | None = "import",
) -> dict[str, Any]:
    """Return the content of `result.json`.

    Args:
        passes: The passes.
        hook_mode: How the hook was delivered to the running server, or None.
        about: What was run, and on what.
        connector: Which was shown.
        wanted: How it was to be delivered; None if the connector needs none.

    """
    with_ours = {"cold": passes.cold, "visit": passes.visit, "warm": passes.warm}
    again: dict[str, Any] = {}
    if passes.restarted is not None:
        with_ours["restarted"] = passes.restarted
        again = {
            "tokens_loaded_restarted": passes.restarted.tokens_loaded,
            "ttft_restarted_s": median(passes.restarted.ttfts_s),
        }
    compared = {name: compare(passes.alone.replies, each.replies) for name, each in with_ours.items()}
    differences = {name: largest for name, (_, largest) in compared.items()}
    timed = {"alone": passes.alone, "cold": passes.cold, "warm": passes.warm}
    return {
        "connector": connector,
        "requests": len(passes.warm.replies),
        "prompt_tokens": passes.warm.prompt_tokens,
        "tokens_loaded": passes.warm.tokens_loaded,
        "ttft_cold_s": median(passes.cold.ttfts_s),
        "ttft_warm_s": median(passes.warm.ttfts_s),
        "hook_mode": hook_mode,
        "hook_wanted": wanted,
        "tokens_equal": all(equal for equal, _ in compared.values()),
        "logprobs_equal": max(differences.values()) <= TOLERANCE,
        "logprobs_max_difference": differences,
        "ttft_alone_s": median(passes.alone.ttfts_s),
        "ttft_ratio": median(passes.cold.ttfts_s) / median(passes.warm.ttfts_s),
        "ttft_worst_s": {name: max(each.ttfts_s) for name, each in timed.items()},
        "distinct_answers": len({reply.token_ids for reply in passes.alone.replies}),
        # Both must be 0, or cold wasn't cold.
        "tokens_loaded_cold": passes.cold.tokens_loaded,
        "vllm_prefix_hits": sum(each.local_hits for each in timed.values()),
        "per_request": [
            {
                "conversation": reply.request.conversation,
                "turn": reply.request.turn,
                "prompt_tokens": reply.prompt_tokens,
                **{f"ttft_{name}_s": each.ttfts_s[index] for name, each in timed.items()},
            }
            for index, reply in enumerate(passes.alone.replies)
        ],
        **again,
        **about,
    }


def faults(found: dict[str, Any]) -> list[str]:
    """Return what is wrong with a result, one sentence each; empty if it shows what it should."""
    checks = {
        "The answers' tokens differ from those of vLLM without a connector.": found["tokens_equal"],
        f"Log-probabilities differ from those of vLLM without a connector by "
        f"{max(found['logprobs_max_difference'].values()):.1e}, more than {TOLERANCE:.0e}.": found["logprobs_equal"],
        "All answers are the same, so that they are equal shows nothing.": found["distinct_answers"] > 1,
        f"Only {found['tokens_loaded']:,} of {found['prompt_tokens']:,} prompt tokens were loaded in the warm pass.": (
            found["tokens_loaded"] >= _LEAST_LOADED * found["prompt_tokens"]
        ),
        f"{found['tokens_loaded_cold']:,} tokens were loaded in the cold pass, where none should be stored.": (
            found["tokens_loaded_cold"] == 0
        ),
        f"{found['vllm_prefix_hits']:,} tokens were in vLLM's own prefix cache, which should be empty.": (
            found["vllm_prefix_hits"] == 0
        ),
    }
    if found["hook_wanted"]:
        checks |= {
            "The hook isn't live in the server's worker, or how it got there can't be told.": bool(found["hook_mode"]),
            f"The hook was to be delivered by {found['hook_wanted']}, and was by {found['hook_mode']}.": (
                found["hook_mode"] in (found["hook_wanted"], None)
            ),
        }
    if (loaded := found.get("tokens_loaded_restarted")) is not None:
        sentence = f"Only {loaded:,} of {found['prompt_tokens']:,} prompt tokens were loaded after the restart."
        checks[sentence] = loaded >= _LEAST_LOADED * found["prompt_tokens"]
    return [sentence for sentence, is_right in checks.items() if not is_right]


def warnings(found: dict[str, Any]) -> list[str]:
    """Return what is unexpected but may be the machine's fault: times depend on what else it does."""
    if found["ttft_ratio"] >= _LEAST_RATIO:
        return []
    sentence = (
        f"The cold median is only {found['ttft_ratio']:.1f} times the warm one, less than {_LEAST_RATIO:g}: was the "
        "machine busy with something else?"
    )
    return [sentence]


def table(found: dict[str, Any]) -> RenderableType:
    """Return the table that the demo ends with."""
    columns = Table(box=SIMPLE_HEAD, pad_edge=False)
    columns.add_column("")
    for heading in ("vLLM alone", f"{found['connector']}, cold", f"{found['connector']}, warm"):
        columns.add_column(heading, justify="right")
    worst = found["ttft_worst_s"]
    requests, prompt_tokens = f"{found['requests']}", f"{found['prompt_tokens']:,}"
    loaded, loaded_cold = f"{found['tokens_loaded']:,}", f"{found['tokens_loaded_cold']:,}"
    columns.add_row("requests", requests, requests, requests)
    columns.add_row("prompt tokens", prompt_tokens, prompt_tokens, prompt_tokens)
    columns.add_row("tokens loaded", "-", loaded_cold, loaded)
    columns.add_row(
        "time to first token, median", *(_seconds(found[f"ttft_{name}_s"]) for name in ("alone", "cold", "warm"))
    )
    columns.add_row("time to first token, worst", *(_seconds(worst[name]) for name in ("alone", "cold", "warm")))

    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_row("cold : warm", f"{found['ttft_ratio']:.1f}, medians")
    if "ttft_restarted_s" in found:
        restarted = (
            f"{_seconds(found['ttft_restarted_s'])} to the first token, {found['tokens_loaded_restarted']:,} tokens"
        )
        facts.add_row("after a restart", f"{restarted} loaded")
    hook_mode = found["hook_mode"]
    if found["hook_wanted"]:
        facts.add_row("hook", f"{hook_mode or 'none'}: {_DELIVERIES[hook_mode]}")
    facts.add_row("equal tokens", _yes_no(found["tokens_equal"]))
    difference = f" (largest difference {max(found['logprobs_max_difference'].values()):.1e})"
    facts.add_row("equal log-probabilities", Text.assemble(_yes_no(found["logprobs_equal"]), difference))
    return Group(columns, facts)


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 1 else f"{value:.2f} s"


def _yes_no(value: object) -> Text:
    return Text("yes", style="green") if value else Text("no", style="bold red")
