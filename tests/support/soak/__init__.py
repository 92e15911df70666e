"""A long run of one real engine with type1: what must stay flat does, and samples of what it answers are right.

`make soak` runs it for as long as one likes, `tests/test_type1_soak.py` for a fixed number of requests. All that
happens follows from a seed: a run is repeated by its seed and number of requests.
"""

from __future__ import annotations

from typing import Any

from support.soak.flat import Limits
from support.soak.leaks import Leak
from support.soak.replay import replay
from support.soak.run import Report, soak

__all__ = ["RUNNER_SETTINGS", "Leak", "Limits", "Report", "replay", "soak"]

#: What `soak` is called with on each model runner. On the second one a step takes 70 ms or more here, so everything is
#: smaller; and Triton's interpreter makes its kernels when they are first used, some of them late.
RUNNER_SETTINGS: dict[str, dict[str, Any]] = {
    "v1": {},
    "v2": {
        "round_size": 20,
        "outstanding": 8,
        "burst": 3,
        "max_num_seqs": 6,
        "num_gpu_blocks": 15,
        "limits": Limits(memory=32 << 20, objects=200),
    },
}
