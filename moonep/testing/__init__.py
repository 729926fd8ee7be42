"""For tests of code that uses MoonEP: ranks as processes, cases, asserts, routings, and layers to compare with.

from moonep.testing import run_ranks

results = run_ranks(function, 4)        # function() on 4 ranks, inside an initialised torch.distributed world
"""

from moonep.testing.asserts import assert_close, assert_equal, poisoned_allocators, ulp_distance
from moonep.testing.cases import CASES, Case
from moonep.testing.dense import dense_moe
from moonep.testing.ranks import PerRank, RankDied, RankFailure, Ranks, RankTimeout, run_ranks, send

__all__ = [
    "CASES",
    "Case",
    "PerRank",
    "RankDied",
    "RankFailure",
    "RankTimeout",
    "Ranks",
    "assert_close",
    "assert_equal",
    "dense_moe",
    "poisoned_allocators",
    "run_ranks",
    "send",
    "ulp_distance",
]
