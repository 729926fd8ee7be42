"""Router outputs for tests and benchmarks: what every rank's router chose, from balanced to as bad as it gets.

Each function returns a list of R tensors [S, K] int32 of expert ids, one per rank, on the CPU. Experts
[r * L, (r + 1) * L), with L = E / R, live on rank r. The same arguments give the same ids (of the same torch version),
so every rank of a benchmark can make all of them and keep its own. Ids are distinct within a token unless the function
says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

_Ids = TypeVar("_Ids", torch.Tensor, list[torch.Tensor])

TOLERANCE = 0.01
"""How close `lognormal` and `hot_rank` come to their target: 1% of it, or one assignment where that is coarser."""

_MAX_STEPS = 60
_LIMIT = 64.0  # of a parameter in units of the noise: by then it alone decides


def maxvio(ids: Sequence[torch.Tensor], E: int) -> float:
    """Returns max_e(T_e / mean T) - 1, with T_e the assignments of expert e on all ranks. Ids of -1 do not count."""
    load_E = expert_load(ids, E)
    return (load_E.max() / load_E.double().mean()).item() - 1


def rank_imbalance(ids: Sequence[torch.Tensor], E: int) -> float:
    """Returns max / mean over ranks of the assignments to a rank's own experts. There are as many ranks as `ids`."""
    load_R = expert_load(ids, E).view(len(ids), -1).sum(dim=1)
    return (load_R.max() / load_R.double().mean()).item()


def expert_load(ids: Sequence[torch.Tensor], E: int) -> torch.Tensor:
    """Returns [E] int64: the assignments of each expert on all ranks. Ids of -1 do not count."""
    return torch.bincount(torch.cat([ids_SK[ids_SK >= 0] for ids_SK in ids]), minlength=E)


def uniform(S: int, E: int, K: int, R: int, seed: int = 0) -> list[torch.Tensor]:
    """All experts are equally popular: balanced up to the noise of sampling."""
    _check(S, E, K, R)
    return _top_k(_gumbel(S, E, R, seed), torch.zeros(E), K)


def balanced(S: int, E: int, K: int, R: int) -> list[torch.Tensor]:
    """Round robin over experts: loads differ by at most one (maxvio 0 when E divides R * S * K)."""
    _check(S, E, K, R)
    return list((torch.arange(R * S * K) % E).int().view(R, S, K))


def lognormal(
    S: int, E: int, K: int, R: int, maxvio: float, seed: int, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Expert popularity is lognormal and the same on all ranks, as in a trained router; its spread is set by `maxvio`.

    A token's score for expert e is sigma * z_e plus Gumbel noise, and its experts are the K best; sigma is searched
    for. Needs R * S * E floats of memory.

    Args:
        S: tokens per rank.
        E: experts.
        K: experts per token.
        R: ranks.
        maxvio: target of `maxvio(ids, E)`, reached within `TOLERANCE`; at most E / K - 1: an expert in every token.
        seed: of popularity and noise.
        device: where to search; large searches take a second on a CPU. The noise is the same everywhere.

    Raises:
        ValueError: if the target is out of reach: above E / K - 1, or below the noise of sampling (use `balanced`).

    Source: Gumbel top-k, which samples K experts without replacement: Kool, van Hoof, Welling, "Stochastic Beams and
    Where to Find Them", ICML 2019.
    """
    _check(S, E, K, R, S_min=1)
    if not 0 <= maxvio <= E / K - 1:
        raise ValueError(f"maxvio must be between 0 and E / K - 1 = {E / K - 1:.4g}, got {maxvio}")
    noise = _gumbel(S, E, R, seed, device)
    z_E = torch.randn(E, generator=_generator(seed, R)).to(device)
    return _search(
        sample=lambda sigma: _top_k(noise, sigma * z_E, K),
        measure=lambda ids: _maxvio(ids, E),
        target=maxvio,
        what="maxvio",
        limits=(0.0, _LIMIT),
        step=E / (R * S * K),
    )


def hot_rank(
    S: int,
    E: int,
    K: int,
    R: int,
    imbalance: float,
    hot_experts: int = 8,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[torch.Tensor]:
    """A few experts of rank 0 are hot, all others equal: rank 0 gets `imbalance` times the mean.

    The case of `hot_experts` = L is the adverse one: no plan with few copies exists.

    Args:
        S: tokens per rank.
        E: experts.
        K: experts per token.
        R: ranks.
        imbalance: target of rank 0's assignments over the mean of all ranks, reached within `TOLERANCE`. At most R,
            less if there are fewer hot experts than K; below 1 they are cold.
        hot_experts: the first ones of rank 0 share a bias; at most all L of them.
        seed: of the noise.
        device: as `lognormal`.

    Raises:
        ValueError: if the target is out of reach; the message says what is within.

    Source: Gumbel top-k, as `lognormal`.
    """
    _check(S, E, K, R, S_min=1)
    L = E // R
    if hot_experts < 1:
        raise ValueError(f"hot_experts must be at least 1, got {hot_experts}")
    noise = _gumbel(S, E, R, seed, device)
    hot_E = (torch.arange(E, device=device) < min(hot_experts, L)).float()
    return _search(
        sample=lambda bias: _top_k(noise, bias * hot_E, K),
        measure=lambda ids: expert_load(ids, E)[:L].sum().item() / (S * K),
        target=imbalance,
        what="imbalance",
        limits=(-_LIMIT, _LIMIT),
        step=1 / (S * K),
    )


def all_to_one_expert(S: int, E: int, K: int, R: int, expert: int = 0) -> list[torch.Tensor]:
    """Every assignment of every rank goes to one expert: the largest load there is. Ids repeat in a token if K > 1."""
    _check(S, E, K, R)
    return [torch.full((S, K), expert, dtype=torch.int32) for _ in range(R)]


def all_local(S: int, E: int, K: int, R: int, seed: int = 0) -> list[torch.Tensor]:
    """Every rank chooses among its own experts: nothing needs to move. Needs K <= L."""
    return _one_home(S, E, K, R, seed, distance=0)


def all_remote(S: int, E: int, K: int, R: int, seed: int = 0) -> list[torch.Tensor]:
    """Every rank chooses among the experts of the next rank, (rank + 1) % R: everything moves. Needs K <= L."""
    return _one_home(S, E, K, R, seed, distance=1)


def repeated(S: int, E: int, K: int, R: int, seed: int = 0) -> list[torch.Tensor]:
    """Ids are drawn with replacement, and the first two of a token are the same expert (K >= 2)."""
    _check(S, E, K, R)
    ids = []
    for r in range(R):
        ids_SK = torch.randint(E, (S, K), generator=_generator(seed, r), dtype=torch.int32)
        ids_SK[:, 1:2] = ids_SK[:, 0:1]
        ids.append(ids_SK)
    return ids


def with_mask(ids: _Ids, fraction: float, seed: int = 0) -> _Ids:
    """Returns a copy in which `fraction` of the entries (rounded, of each tensor) are -1: no assignment.

    Args:
        ids: [S, K] int32, or a list of them.
        fraction: 0 to 1.
        seed: chooses the entries.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be between 0 and 1, got {fraction}")
    if isinstance(ids, list):
        return [_mask(ids_SK, fraction, _generator(seed, r)) for r, ids_SK in enumerate(ids)]
    return _mask(ids, fraction, _generator(seed, 0))


_maxvio = maxvio  # `lognormal` has an argument of that name


def _mask(ids_SK: torch.Tensor, fraction: float, generator: torch.Generator) -> torch.Tensor:
    chosen = torch.randperm(ids_SK.numel(), generator=generator)[: round(fraction * ids_SK.numel())]
    return ids_SK.flatten().index_fill(0, chosen, -1).view_as(ids_SK)


def _one_home(S: int, E: int, K: int, R: int, seed: int, distance: int) -> list[torch.Tensor]:
    _check(S, E, K, R)
    L = E // R
    if K > L:
        raise ValueError(f"K distinct experts of one rank need K <= E / R, got K={K}, E / R={L}")
    ids = _top_k(_gumbel(S, L, R, seed), torch.zeros(L), K)
    return [ids_SK + (r + distance) % R * L for r, ids_SK in enumerate(ids)]


def _check(S: int, E: int, K: int, R: int, S_min: int = 0) -> None:
    if S < S_min or R < 1 or K < 1 or E < K or E % R:
        raise ValueError(
            f"expected S >= {S_min}, R >= 1, 1 <= K <= E and E a multiple of R, got S={S} E={E} K={K} R={R}"
        )


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + stream)


def _gumbel(S: int, E: int, R: int, seed: int, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Returns [S, E] float32 for each rank: -log(Exp(1)). Drawn on the CPU, so that it is the same on all devices."""
    return [torch.empty(S, E).exponential_(generator=_generator(seed, r)).log_().neg_().to(device) for r in range(R)]


def _top_k(noise: list[torch.Tensor], logits_E: torch.Tensor, K: int) -> list[torch.Tensor]:
    return [torch.topk(noise_SE + logits_E, K, dim=1).indices.int() for noise_SE in noise]


def _search(
    sample: Callable[[float], list[torch.Tensor]],
    measure: Callable[[list[torch.Tensor]], float],
    target: float,
    what: str,
    limits: tuple[float, float],
    step: float,
) -> list[torch.Tensor]:
    """Returns the sample whose measure is `target` within tolerance, by bracketing from 0 outwards and regula falsi.

    With the noise fixed, the measure grows with the parameter in steps of one assignment, `step`.

    Source: the Illinois variant, Dowell and Jarratt, BIT 11 (1971). Bisection needs twice the samples, and they are
    all the cost.
    """
    tolerance = max(TOLERANCE * abs(target), step)
    low = high = None  # (parameter, error) on either side of the target
    x, last = 0.0, 0.0
    for _ in range(_MAX_STEPS):
        ids = sample(x)
        error = measure(ids) - target
        if abs(error) <= tolerance:
            return [ids_SK.cpu() for ids_SK in ids]
        if error < 0:
            low, high = (x, error), high and (high[0], high[1] / 2 if last < 0 else high[1])
        else:
            low, high = low and (low[0], low[1] / 2 if last > 0 else low[1]), (x, error)
        last = error
        x = _next_parameter(low, high)
        if not limits[0] <= x <= limits[1]:
            raise ValueError(f"{what}={target} is out of reach: the nearest that was found is {error + target:.4g}")
    raise ValueError(
        f"{what}={target} is not within {tolerance:.4g} of any sample: with so few tokens it jumps past it"
    )


def _next_parameter(low: tuple[float, float] | None, high: tuple[float, float] | None) -> float:
    if high is None:
        assert low is not None
        return max(1.0, 2 * low[0])
    if low is None:
        return min(-1.0, 2 * high[0])
    return low[0] - low[1] * (high[0] - low[0]) / (high[1] - low[1])
