"""The specification: the planner and every operation, for all ranks at once, in plain torch.

No processes, no device, no cleverness: each function says what the result is, element by element. Backends and
kernels must equal it, integers bit for bit, sums bit for bit too because the order of every sum is stated here.
Arguments and results that differ by rank are lists in rank order. Letters: `moonep.dims`.

A worked example, R = 2 ranks, E = 4 experts, S = 4 tokens, K = 1 (so each rank shall compute 4 rows):

    load[0] = [4, 0, 0, 0]     load[1] = [2, 1, 1, 0]       experts 0 and 1 live on rank 0, 2 and 3 on rank 1
    T = [6, 1, 1, 0]           rank 0 would compute 7 rows, rank 1 one: rank 0 gives 3
    alloc = [[3, 3], [1, 0], [0, 1], [0, 0]]                the smallest expert of rank 0 that covers 3 is expert 0
    experts_to_copy = [[-1, -1], [0, -1]]                   rank 1 computes expert 0 in its first slot

Rank 1 keeps its own 2 assignments of expert 0 (local first); rank 0 keeps 3 and sends its last one:

    >>> topk = [torch.tensor([[0], [0], [0], [0]]), torch.tensor([[0], [1], [0], [2]])]
    >>> plans = make_plans(topk, Dims(S=4, K=1, E=4, R=2, H=8, B=2, P=1))
    >>> plans[0].alloc.tolist()
    [[3, 3], [1, 0], [0, 1], [0, 0]]
    >>> plans[1].experts_to_copy.tolist()
    [[-1, -1], [0, -1]]
    >>> [place // plans[0].dims.C for place in plans[0].dst.tolist()]  # ranks: three stay, the last one goes
    [0, 0, 0, 1]
    >>> [place % plans[0].dims.C for place in plans[0].dst.tolist()]  # rank 1: row 0 is expert 2, then the slot
    [0, 1, 2, 1]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonep.dims import Dims, align_up
from moonep.plan import ARRIVAL_SHIFT, INT32_MIN, NO_ARRIVAL, Plan
from moonep.planner import policy

Pieces = list[list[tuple[int, int]]]


def make_plans(topk_sK: Sequence[Tensor], dims: Dims) -> list[Plan]:
    """Plan one layer call from every rank's router output ([s, K] expert ids, -1 = no assignment)."""
    load = count_load(topk_sK, dims)
    alloc = policy.allocate(load.sum(0).tolist(), dims).counts_ER
    slots = [choose_slots(alloc, r, dims) for r in range(dims.R)]
    groups = [lay_groups(alloc, slots[r], r, dims) for r in range(dims.R)]
    dst = assign_rows(topk_sK, load, alloc, groups, dims)
    arrivals = mirror(dst, dims)
    tokens = torch.tensor([topk.shape[0] for topk in topk_sK], dtype=torch.int32)
    return [
        Plan.of(
            dims,
            r,
            0,
            load=load,
            alloc=torch.tensor(alloc, dtype=torch.int32),
            experts_to_copy=torch.tensor(slots, dtype=torch.int32).view(dims.R, dims.B),
            cu_seqlens=torch.tensor([g.end for g in groups[r]], dtype=torch.int32),
            zero_fill_ranges=torch.tensor([g.padding for g in groups[r]], dtype=torch.int32),
            remote_stats=torch.tensor(count_redundant(alloc, slots, r, dims), dtype=torch.int32),
            dst=dst[r],
            sends=primaries(dst[r], dims),
            tokens=tokens,
            arrivals=arrivals[r],
        )
        for r in range(dims.R)
    ]


def count_load(topk_sK: Sequence[Tensor], dims: Dims) -> Tensor:
    """[R, E] int32: assignments of each expert by source rank."""
    load = torch.zeros(dims.R, dims.E, dtype=torch.int32)
    for source, topk in enumerate(topk_sK):
        for e in topk.flatten().tolist():
            if e >= 0:
                load[source, e] += 1
    return load


def redundant_experts(alloc: Sequence[Sequence[int]], rank: int, dims: Dims) -> list[int]:
    """The experts that `rank` computes away from their home, ascending."""
    return [e for e in range(dims.E) if alloc[e][rank] > 0 and dims.home(e) != rank]


def choose_slots(alloc: Sequence[Sequence[int]], rank: int, dims: Dims) -> list[int]:
    """[B]: the redundant experts with most rows get slots (ties: lower id), in ascending id; -1 unused."""
    by_rows = sorted(redundant_experts(alloc, rank, dims), key=lambda e: (-alloc[e][rank], e))
    chosen = sorted(by_rows[: dims.B])
    return chosen + [-1] * (dims.B - len(chosen))


def count_redundant(alloc: Sequence[Sequence[int]], slots: Sequence[Sequence[int]], rank: int, dims: Dims) -> list[int]:
    """[redundant experts here, slots anywhere that hold experts of this rank]."""
    mine = [e for row in slots for e in row if e >= 0 and dims.home(e) == rank]
    return [len(redundant_experts(alloc, rank, dims)), len(mine)]


class Group:
    """The rows of one expert on one rank: [begin, begin + size), padded up to `end`."""

    def __init__(self, expert: int, begin: int, size: int, P: int):
        self.expert, self.begin, self.size = expert, begin, size
        self.end = begin + align_up(size, P)
        self.padding = (begin + size, self.end - begin - size) if self.end > begin + size else (0, 0)


def lay_groups(alloc: Sequence[Sequence[int]], slots: Sequence[int], rank: int, dims: Dims) -> list[Group]:
    """The E + B groups of a rank in weight-row order: experts 0 .. E-1 read from their home row, then the slots."""
    in_home_row = [(e, 0 if e in slots else alloc[e][rank]) for e in range(dims.E)]
    in_slot = [(e, alloc[e][rank] if e >= 0 else 0) for e in slots]
    groups: list[Group] = []
    for expert, size in in_home_row + in_slot:
        groups.append(Group(expert, groups[-1].end if groups else 0, size, dims.P))
    return groups


def split_sources(load: Tensor, alloc: Sequence[Sequence[int]], e: int, dims: Dims) -> Pieces:
    """For each source rank, how its assignments of expert e are split: [(rank, count)], ranks ascending.

    Local first; what is left of the sources, in rank order, fills what is left of the ranks, in rank order.
    """
    have, want = load[:, e].tolist(), list(alloc[e])
    kept = [min(h, w) for h, w in zip(have, want, strict=True)]
    have = [h - k for h, k in zip(have, kept, strict=True)]
    want = [w - k for w, k in zip(want, kept, strict=True)]
    pieces: Pieces = []
    rank = 0
    for source in range(dims.R):
        given = {source: kept[source]}
        while have[source] > 0:
            count = min(have[source], want[rank])
            if count:
                given[rank] = given.get(rank, 0) + count
                have[source] -= count
                want[rank] -= count
            if want[rank] == 0:
                rank += 1
        pieces.append([(r, given[r]) for r in sorted(given) if given[r]])
    return pieces


def assign_rows(
    topk_sK: Sequence[Tensor],
    load: Tensor,
    alloc: Sequence[Sequence[int]],
    groups: Sequence[Sequence[Group]],
    dims: Dims,
) -> list[Tensor]:
    """`dst` of each rank: the rows of a group are dealt out in the order (source rank, token, k)."""
    next_row = [{g.expert: g.begin for g in groups[r] if g.size} for r in range(dims.R)]
    pieces = [split_sources(load, alloc, e, dims) for e in range(dims.E)]
    dst = []
    for source, topk in enumerate(topk_sK):
        queue = [[r for r, count in pieces[e][source] for _ in range(count)][::-1] for e in range(dims.E)]
        places = []
        for experts in topk.view(-1, dims.K).tolist():
            visited = set()
            for e in experts:
                if e < 0:
                    places.append(INT32_MIN)
                    continue
                rank = queue[e].pop()
                place = rank * dims.C + next_row[rank][e]
                next_row[rank][e] += 1
                places.append(-place - 1 if rank in visited else place)
                visited.add(rank)
        dst.append(torch.tensor(places, dtype=torch.int32))
    return dst


def rows_by_rank(dst: Tensor, dims: Dims) -> list[dict[int, list[tuple[int, int]]]]:
    """For each token, {rank: [(k, row)] in k order}, ranks ascending."""
    tokens = []
    for places in dst.view(-1, dims.K).tolist():
        found: dict[int, list[tuple[int, int]]] = {}
        for k, place in enumerate(places):
            if place != INT32_MIN:
                rank, row = divmod(-place - 1 if place < 0 else place, dims.C)
                found.setdefault(rank, []).append((k, row))
        tokens.append(dict(sorted(found.items())))
    return tokens


def primaries(dst: Tensor, dims: Dims) -> Tensor:
    """`sends` of one rank: the primary of each rank that a token goes to, in rank order."""
    sends = []
    for ranks in rows_by_rank(dst, dims):
        places = [rank * dims.C + chain[0][1] for rank, chain in ranks.items()]
        sends += places + [-1] * (dims.W - len(places))
    return torch.tensor(sends, dtype=torch.int32)


def mirror(dst: Sequence[Tensor], dims: Dims) -> list[Tensor]:
    """`arrivals` of each rank: the assignments of all ranks' tokens that it computes."""
    arrivals = torch.full((dims.R, dims.R, dims.S, dims.K), NO_ARRIVAL, dtype=torch.int32)
    for source in range(dims.R):
        for token, ranks in enumerate(rows_by_rank(dst[source], dims)):
            for ordinal, (rank, chain) in enumerate(ranks.items()):
                for k, row in chain:
                    arrivals[rank, source, token, k] = (ordinal << ARRIVAL_SHIFT) + row
    return list(arrivals)


def dispatch(
    plans: Sequence[Plan], hidden_sH: Sequence[Tensor], route_weights_sK: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Each token's row goes to each of its assignments' rows, its route weights too; padding rows are zero.

    Rows past the last offset are undefined; here they are zero.

    Returns:
        hidden: R times [C, H]; route weights: R times [C] fp32, or None.
    """
    d = plans[0].dims
    hidden = [torch.zeros(d.C, d.H, dtype=hidden_sH[0].dtype) for _ in plans]
    weights = [torch.zeros(d.C) for _ in plans]
    for plan in plans:
        for token, ranks in enumerate(rows_by_rank(plan.dst, d)):
            for rank, chain in ranks.items():
                for k, row in chain:
                    hidden[rank][row] = hidden_sH[plan.rank][token]
                    if route_weights_sK is not None:
                        weights[rank][row] = route_weights_sK[plan.rank][token, k]
    return hidden, weights if route_weights_sK is not None else None


def combine(
    plans: Sequence[Plan], hidden_CH: Sequence[Tensor], route_weights_C: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Each token is the unweighted sum of its assignments' rows, in two hops, each rounded once to the payload dtype.

    Hop 1: a rank sums its rows of the token in fp32, k order. Hop 2: the token's rank sums these partial sums in fp32,
    rank order. Both sums start at +0. A token without assignments is zero.

    Returns:
        hidden: R times [s, H]; route weights: R times [s, K] fp32 gathered back (0 if masked), or None.
    """
    d = plans[0].dims
    hidden, weights = [], []
    for plan in plans:
        out = torch.zeros(plan.num_tokens, d.H)
        gathered = torch.zeros(plan.num_tokens, d.K)
        for token, ranks in enumerate(rows_by_rank(plan.dst, d)):
            for rank, chain in ranks.items():
                partial = torch.zeros(d.H)
                for k, row in chain:
                    partial += hidden_CH[rank][row].float()
                    if route_weights_C is not None:
                        gathered[token, k] = route_weights_C[rank][row]
                out[token] += partial.to(hidden_CH[0].dtype).float()
        hidden.append(out.to(hidden_CH[0].dtype))
        weights.append(gathered)
    return hidden, weights if route_weights_C is not None else None


def prefetch(plans: Sequence[Plan], local_weights: Sequence[Tensor]) -> list[dict[int, Tensor]]:
    """For each rank, {slot: weights of the expert that it holds}, copied from the expert's home ([L, ...] a rank)."""
    d = plans[0].dims
    slots = []
    for plan in plans:
        experts = plan.experts_to_copy[plan.rank].tolist()
        slots.append({b: local_weights[d.home(e)][e % d.L].clone() for b, e in enumerate(experts) if e >= 0})
    return slots


def reduce_grad(
    plans: Sequence[Plan], local_grads: Sequence[Tensor], slot_grads: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Add the gradients of slots ([B, ...] fp32 a rank) to their experts' own ([L, ...]), and zero what was added.

    The sum starts from the own gradient and goes in ascending (rank, slot), in fp32, rounded once to its dtype.

    Returns:
        local gradients and slot gradients afterwards.
    """
    d = plans[0].dims
    grads = [g.float().clone() for g in local_grads]
    rest = [g.clone() for g in slot_grads]
    for rank, experts in enumerate(plans[0].experts_to_copy.tolist()):
        for b, e in enumerate(experts):
            if e >= 0:
                grads[d.home(e)][e % d.L] += slot_grads[rank][b]
                rest[rank][b] = 0
    return [g.to(own.dtype) for g, own in zip(grads, local_grads, strict=True)], rest
