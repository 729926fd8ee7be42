"""The cases of the contract: sizes and routings that every backend must get right, as data.

    for case in CASES:
        for R in case.ranks:
            topk_sK = case.route(R)           # R tensors [s, K]: what each rank's router chose
            plans = reference.make_plans(topk_sK, case.dims(R))

A case fixes what a rank has (S, K, L, H, P, B, dtype, balance); the number of ranks is left open, and E is R * L.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moonep.dims import Balance, Dims
from moonep.testing import routing

Routing = Callable[[int, int, int, int], list[Tensor]]


@dataclass(frozen=True)
class Case:
    """One case for any of the given numbers of ranks.

    Attributes:
        name: short, unique.
        S, K, L, H, P: see `moonep.dims`; E = R * L. Rows of multiples of 128 bytes go by bulk copies on GPUs that have
            them, others by loads and stores.
        routing: called with (S, E, K, R); gives R tensors [s, K] int32, s <= S; -1 = no assignment.
        B: slots; None: L.
        dtype: of the payload.
        balance: as for `Buffer`.
        ranks: the numbers of ranks to run it with.
    """

    name: str
    S: int
    K: int
    L: int
    H: int
    P: int
    routing: Routing
    B: int | None = None
    dtype: torch.dtype = torch.bfloat16
    balance: str | float = "exact"
    ranks: tuple[int, ...] = (2, 4)

    def dims(self, R: int) -> Dims:
        """The sizes with R ranks."""
        slots = self.L if self.B is None else self.B
        balance = Balance.parse(self.balance)
        return Dims(S=self.S, K=self.K, E=R * self.L, R=R, H=self.H, B=slots, P=self.P, balance=balance)

    def route(self, R: int) -> list[Tensor]:
        """The expert ids [s, K] of each of R ranks. The same at every call."""
        return self.routing(self.S, R * self.L, self.K, R)


def popular(S: int, E: int, K: int, R: int, spread: float, seed: int = 0, hot_home: float = 0.0) -> list[Tensor]:
    """Lognormal popularity of experts, the same on all ranks; ids repeat within a token only if K > E.

    Args:
        spread: standard deviation of the log popularity; 0: all alike.
        hot_home: added to the log popularity of all experts of rank 0.
    """
    generator = torch.Generator().manual_seed(seed)
    log_popularity_E = spread * torch.randn(E, generator=generator) + hot_home * (torch.arange(E) < E // R)
    ids = []
    for _ in range(R):
        gumbel_SE = torch.full((S, E), 0.0).exponential_(generator=generator).log_().neg_()
        ranked_SE = (log_popularity_E + gumbel_SE).argsort(dim=1, descending=True, stable=True)
        ids.append(ranked_SE[:, torch.arange(K) % E].int())
    return ids


def with_replacement(S: int, E: int, K: int, R: int, seed: int = 0) -> list[Tensor]:
    """All experts alike, each drawn anew: ids repeat within a token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(E, (S, K), generator=generator, dtype=torch.int32) for _ in range(R)]


def one_rank_a_token(S: int, E: int, K: int, R: int) -> list[Tensor]:
    """All experts of a token differ but live on one rank, another one for the next token. Needs K <= L."""
    L = E // R
    home_RS = (torch.arange(R)[:, None] + torch.arange(S)) % R
    member_SK = (torch.arange(S)[:, None] + torch.arange(K)) % L
    return [(home_S[:, None] * L + member_SK).int() for home_S in home_RS]


def one_remote_expert_a_token(S: int, E: int, K: int, R: int) -> list[Tensor]:
    """Every k of a token is the same expert, of the next rank."""
    L = E // R
    return [((r + 1) % R * L + torch.arange(S) % L).int()[:, None].repeat(1, K) for r in range(R)]


def deal(T_E: Sequence[int], S: int, K: int, R: int) -> list[Tensor]:
    """Given loads of the experts, dealt out to the ranks in turn; what is left of the ranks' R * S * K is masked."""
    cards = torch.full((R * S * K,), -1, dtype=torch.int32)
    dealt = torch.repeat_interleave(torch.arange(len(T_E)), torch.tensor(T_E)).int()
    cards[: len(dealt)] = dealt
    return list(cards.view(S * K, R).t().reshape(R, S, K))


def home_loads(S: int, E: int, K: int, R: int, halves: Sequence[int]) -> list[Tensor]:
    """Given loads of the ranks, in halves of S * K; on each, the first expert has half of it and the others the rest.

    The last of `halves` is repeated for further ranks.
    """
    L = E // R
    T_E: list[int] = []
    for r in range(R):
        load = S * K * halves[min(r, len(halves) - 1)] // 2
        rest = load // 2
        T_E += [load - rest if L > 1 else load] + [rest // (L - 1) + (i < rest % (L - 1)) for i in range(L - 1)]
    return deal(T_E, S, K, R)


def given_loads(S: int, E: int, K: int, R: int, T_E: Sequence[int]) -> list[Tensor]:
    """The loads T_E, whatever the number of ranks."""
    return deal(T_E, S, K, R)


def ragged(S: int, E: int, K: int, R: int) -> list[Tensor]:
    """S - 1 tokens on one rank, none on another, one on a third and S on a fourth where there are as many."""
    tokens = [S - 1, 0] if R == 2 else [S - 1, 1, 0, *[S] * (R - 3)]
    return [ids[:s] for ids, s in zip(popular(S, E, K, R, spread=1.0), tokens, strict=True)]


def few_tokens(S: int, E: int, K: int, R: int) -> list[Tensor]:
    """Half of S on each rank, skewed so that rank 0 has more than a receive buffer holds where that is possible."""
    return [ids[: S // 2] for ids in popular(S, E, K, R, spread=1.0, hot_home=2.0)]


def rank_masked(S: int, E: int, K: int, R: int) -> list[Tensor]:
    """All assignments of rank 0 are masked."""
    first, *others = popular(S, E, K, R, spread=1.0)
    return [torch.full_like(first, -1), *others]


def some_masked(S: int, E: int, K: int, R: int) -> list[Tensor]:
    """Three in ten assignments are masked, so that some tokens have none."""
    return routing.with_mask(popular(S, E, K, R, spread=1.0), 0.3)


_uniform = partial(routing.uniform, seed=0)
_skewed = partial(popular, spread=1.0)
_hot_home = partial(popular, spread=0.3, hot_home=2.0)
_small = (1, 2, 3, 4, 8)

CASES: tuple[Case, ...] = (
    Case("balanced", 256, 8, 16, 128, 128, routing.balanced),
    Case("one-token", 1, 1, 1, 64, 8, _uniform, ranks=_small),
    Case("odd-sizes", 3, 5, 3, 16, 32, _skewed, ranks=_small),
    Case("no-padding", 33, 2, 2, 64, 1, _uniform, ranks=_small),
    Case("mild-skew", 17, 3, 3, 16, 16, partial(popular, spread=0.5), ranks=_small),
    Case("extreme-skew", 64, 2, 5, 64, 128, partial(popular, spread=6.0), ranks=_small),
    Case("few-slots", 96, 3, 7, 192, 128, partial(popular, spread=2.0), B=4),
    Case("hot-home", 96, 3, 7, 64, 16, _hot_home, ranks=(2, 3, 4, 8)),
    Case("hot-home-spills", 96, 3, 7, 48, 16, _hot_home, B=1, ranks=(2, 3, 4)),
    Case("hot-home-no-slots", 33, 3, 7, 64, 16, _hot_home, B=0),
    Case("many-experts", 1024, 1, 256, 64, 8, _uniform),
    Case("more-experts-than-assignments", 16, 1, 1025, 16, 8, _uniform, ranks=(2,)),
    Case("all-local", 32, 4, 8, 64, 16, routing.all_local, ranks=_small),
    Case("all-remote", 32, 4, 8, 64, 16, routing.all_remote, ranks=_small),
    Case("one-rank-a-token", 16, 4, 4, 64, 8, one_rank_a_token, ranks=_small),
    Case("one-expert-even", 8, 2, 4, 16, 8, routing.all_to_one_expert, B=1, ranks=_small),
    Case("one-expert-odd", 9, 2, 4, 64, 8, routing.all_to_one_expert, B=1, ranks=_small),
    Case("top-32", 8, 32, 4, 64, 16, with_replacement, ranks=_small),
    Case("one-remote-expert-a-token", 16, 4, 4, 32, 8, one_remote_expert_a_token, ranks=_small),
    Case("remainders", 4, 1, 1, 16, 4, partial(given_loads, T_E=(8, 3, 5, 6, 2, 2, 1, 2, 1)), ranks=(9,)),
    Case("a-rank-balanced", 16, 2, 4, 16, 8, partial(home_loads, halves=(4, 2, 0, 2)), ranks=(3, 4, 8)),
    Case("all-ranks-balanced", 16, 2, 4, 16, 8, partial(home_loads, halves=(2,))),
    Case("a-prefix-zero", 16, 2, 4, 16, 8, partial(home_loads, halves=(3, 1, 3, 1, 3, 1, 3, 1)), ranks=(2, 4, 8)),
    Case("ragged", 24, 3, 4, 64, 16, ragged),
    Case("a-rank-masked", 24, 3, 4, 64, 16, rank_masked),
    Case("some-masked", 24, 3, 4, 32, 16, some_masked, ranks=_small),
    Case("wide-rows-2", 8, 8, 192, 2880, 8, partial(popular, spread=2.0), ranks=(2,)),
    Case("wide-rows-4", 8, 8, 96, 2880, 8, partial(popular, spread=2.0), ranks=(4,)),
    Case("twelve-experts-on-three-ranks", 24, 3, 4, 32, 16, _skewed, ranks=(3,)),
    Case("tolerance-1%", 128, 2, 4, 64, 8, _skewed, balance=0.01),
    Case("tolerance-5%", 128, 2, 4, 16, 8, _skewed, balance=0.05, ranks=(2, 3, 4, 8)),
    Case("auto", 128, 2, 4, 64, 8, few_tokens, balance="auto", ranks=(2, 3, 4, 8)),
    Case("float32", 40, 4, 4, 20, 8, _skewed, dtype=torch.float32),
    Case("float32-wide", 40, 4, 4, 96, 8, _skewed, dtype=torch.float32),
    Case("float16", 40, 4, 4, 64, 8, _skewed, dtype=torch.float16),
    Case("bfloat16", 40, 4, 4, 24, 8, _skewed),
)
"""All cases. E = 384 needs L to depend on R: `wide-rows-2` and `wide-rows-4`."""

BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
