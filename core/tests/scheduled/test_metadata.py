"""What the halves tell each other, on its way between processes and over ranks."""

from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplug.scheduled.metadata import (
    Load,
    Part,
    Save,
    SlabHandshake,
    StepMetadata,
    WorkerReport,
    merge_slabs,
)
from kvplug.store.directed import Command

ended = st.dictionaries(st.integers(0, 3), st.tuples(st.just(1), st.booleans()), max_size=3)
answers = st.dictionaries(st.integers(0, 3), st.tuples(st.just(1), st.tuples(st.booleans(), st.booleans())), max_size=3)
slabs = st.none() | st.builds(SlabHandshake, st.integers(1, 9), st.integers(1, 9))


def report(rank):
    """Make any report of one rank."""
    down = st.just({}) | st.sets(st.sampled_from(["disk", "valkey"])).map(lambda names: {rank: frozenset(names)})
    return st.builds(WorkerReport, slabs, ended, ended, answers, down)


@settings(max_examples=100, deadline=None)
@given(st.tuples(report(0), report(1), report(2)))
def test_reports_merge_in_any_order(reports):
    """Executors merge ranks one by one, in the order in which they come, or in groups: the result is one."""
    one, two, three = reports
    merged = {
        pickle.dumps(_plain(a.aggregate(b).aggregate(c))) for a, b, c in itertools.permutations((one, two, three))
    }
    assert len(merged) == 1
    assert one.aggregate(two.aggregate(three)) == one.aggregate(two).aggregate(three)


def _plain(merged):
    return [
        merged.slab,
        sorted(merged.loads.items()),
        sorted(merged.saves.items()),
        sorted(merged.answers.items()),
        sorted((rank, sorted(names)) for rank, names in merged.down.items()),
    ]


def test_merging_counts_ranks_and_keeps_the_worst():
    """How many ranks have ended, whether any failed, what all have, the smallest slab."""
    one = WorkerReport(SlabHandshake(8, 64), {1: (1, False)}, {2: (1, True)}, {3: (1, (True, True))}, {})
    two = WorkerReport(None, {1: (1, True)}, {}, {3: (1, (True, False))}, {1: frozenset({"disk"})})
    merged = one.aggregate(two)
    assert merged.loads == {1: (2, True)}
    assert merged.saves == {2: (1, True)}
    assert merged.answers == {3: (2, (True, False))}
    assert merged.down == {1: frozenset({"disk"})}
    assert merge_slabs(SlabHandshake(8, 64), SlabHandshake(6, 70)) == SlabHandshake(6, 70)
    assert merge_slabs(None, None) is None


@pytest.mark.parametrize(
    "message",
    [
        StepMetadata(),
        StepMetadata(
            loads=(Load(1, "a", (Part(0, (3,), (4,)),), asynchronous=True, complete=False),),
            saves=(Save(2, (Part(1, (5, 6), (7, 8)),)),),
            overwritten=(1, 2),
            commands=(Command(1, 0, 0, "get", (b"k",), (4,), urgent=True),),
            epoch=3,
            idle=True,
        ),
        SlabHandshake(8, 64),
        WorkerReport(SlabHandshake(8, 64), {1: (1, False)}, {2: (1, True)}, {3: (2, (True,))}, {0: frozenset()}),
    ],
)
def test_messages_travel_between_processes(message):
    """They come out of a pipe as they went in."""
    assert pickle.loads(pickle.dumps(message)) == message
