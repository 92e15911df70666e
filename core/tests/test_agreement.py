"""Agreement of ranks, between real processes."""

from __future__ import annotations

import multiprocessing
import tempfile

import pytest

from kvplug.agreement import Agreement


def _rank(rank, path, members, counts, results):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
    if rank in members:
        agreement = Agreement(members)
        results.put((rank, [agreement.minimum(c) for c in counts[rank]]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.engine
def test_b3_ranks_take_the_minimum_without_the_rest_of_the_world():
    """Members agree on the minimum in each place; ranks of another engine in the same world take no part."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    counts = {0: [[8, 0, 5], [1]], 2: [[4, 9, 5], [2]]}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, f"{folder}/store", (0, 2), counts, results)) for rank in range(3)
        ]
        for process in ranks:
            process.start()
        answers = dict(results.get(timeout=240) for _ in range(2))
        for process in ranks:
            process.join(60)
    assert answers == {0: [[4, 0, 5], [1]], 2: [[4, 0, 5], [1]]}


def test_one_rank_agrees_with_itself():
    """Without tensor parallelism there is no group and no collective."""
    assert Agreement((0,)).minimum([3, 0]) == [3, 0]
