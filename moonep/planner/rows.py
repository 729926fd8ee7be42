"""From an allocation to rows: slots, groups, piece tables, and each assignment's destination. Vectorised torch.

Each step has a plain twin of the same name in `moonep.reference`, to which it is equal bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moonep.dims import Dims
from moonep.plan import ARRIVAL_SHIFT, INT32_MIN, NO_ARRIVAL


def count_load(topk_sK: Tensor, dims: Dims) -> Tensor:
    """[E] int32: this rank's assignments of each expert; masked ones (-1) do not count."""
    ids = topk_sK.reshape(-1).long()
    return torch.bincount(ids[ids >= 0], minlength=dims.E).int()


@dataclass(frozen=True, eq=False)
class Groups:
    """Where the rows of each expert lie on each rank.

    Attributes:
        experts_to_copy_RB: the expert in each slot, ascending; -1 unused.
        base_ER: first row of expert e's group on rank r.
        ends_RG: padded end row of each group.
        fill_RG2: (first padding row, count) of each group.
    """

    experts_to_copy_RB: Tensor
    base_ER: Tensor
    ends_RG: Tensor
    fill_RG2: Tensor


def lay_groups(alloc_ER: Tensor, dims: Dims) -> Groups:
    """Choose slots and lay the groups of every rank.

    The B redundant experts with most rows get slots (ties: lower id), in ascending id; the others spill: they keep
    their home row. Groups come in weight-row order, each padded to a multiple of P.
    """
    d, alloc = dims, alloc_ER.long()
    expert = torch.arange(d.E)
    redundant = (alloc > 0) & (expert[:, None] // d.L != torch.arange(d.R))
    order = torch.where(redundant, alloc, 0).argsort(dim=0, descending=True, stable=True)
    seat = torch.empty_like(order).scatter_(0, order, expert[:, None].expand(d.E, d.R).contiguous())
    slotted = redundant & (seat < d.B)
    slot = slotted.long().cumsum(0) - 1
    group_RE = torch.where(slotted, d.E + slot, expert[:, None]).t()

    experts_to_copy = torch.full((d.R, d.B), -1, dtype=torch.int32)
    at = slotted.t().nonzero()
    experts_to_copy[at[:, 0], slot.t()[slotted.t()]] = at[:, 1].int()

    sizes = torch.zeros(d.R, d.G, dtype=torch.long).scatter_(1, group_RE, alloc.t())
    padded = (sizes + d.P - 1) // d.P * d.P
    ends = padded.cumsum(1)
    begins = ends - padded
    padding = padded - sizes
    fill = torch.where((padding > 0)[..., None], torch.stack([begins + sizes, padding], -1), 0)
    return Groups(experts_to_copy, begins.gather(1, group_RE).t(), ends.int(), fill.int())


def split_sources(load_RE: Tensor, alloc_ER: Tensor, base_ER: Tensor, source: int, dims: Dims) -> tuple[Tensor, Tensor]:
    """The piece tables of one source rank.

    Of expert e, a source keeps what it can on itself (local first); the rest of the sources' assignments and the rest
    of the ranks' shares are laid along one line each, and a source gives a rank what overlaps. Its assignments, in
    token order, go to the ranks in ascending order.

    Returns:
        first_ER: the first of the source's assignments of e that goes to rank r (exclusive prefix sums).
        row_ER: add to this the assignment's number among the source's assignments of e: its row on rank r.
    """
    load, alloc = load_RE.t().long(), alloc_ER.long()
    kept = torch.minimum(load, alloc)
    give, take = load - kept, alloc - kept
    take_end = take.cumsum(1)
    take_begin = take_end - take
    give_end = give[:, : source + 1].sum(1, keepdim=True)
    give_begin = give_end - give[:, source : source + 1]

    # On rank r the pieces lie in source order, the one that r keeps of its own among them.
    earlier = (torch.minimum(give_begin, take_end) - take_begin).clamp(min=0)
    earlier[:, :source] += kept[:, :source]
    piece = (torch.minimum(give_end, take_end) - torch.maximum(give_begin, take_begin)).clamp(min=0)
    piece[:, source] += kept[:, source]
    first = piece.cumsum(1) - piece
    return first, base_ER + earlier - first


def assign_rows(topk_sK: Tensor, first_ER: Tensor, row_ER: Tensor, dims: Dims) -> Tensor:
    """`dst` of each assignment, [s * K] int32: see `Plan.dst`."""
    d = dims
    ids = topk_sK.reshape(-1).long()
    real = ids >= 0
    number = stable_rank(ids)
    safe = ids.clamp(min=0)
    rank = (first_ER[safe, 1:] <= number[:, None]).sum(1)
    place = rank * d.C + row_ER[safe, rank] + number
    rank_sK = rank.masked_fill(~real, -1).view(-1, d.K)
    same = rank_sK[:, :, None] == rank_sK[:, None, :]
    duplicate = (same & torch.ones(d.K, d.K, dtype=torch.bool).tril(-1)).any(2).view(-1)
    dst = torch.where(duplicate, -place - 1, place)
    return dst.masked_fill(~real, INT32_MIN).int()


def stable_rank(ids: Tensor) -> Tensor:
    """For each element, how many equal elements come before it. [n] int64 -> [n] int64."""
    order = ids.argsort(stable=True)
    ordered = ids[order]
    start = torch.searchsorted(ordered, ordered)
    return torch.empty_like(ids).scatter_(0, order, torch.arange(len(ids)) - start)


def mirror(rank_sK: Tensor, row_sK: Tensor, dims: Dims) -> Tensor:
    """[R, S, K] int32: what the tokens of one source add to the `arrivals` of each rank."""
    here = (ordinals(rank_sK, dims) << ARRIVAL_SHIFT) + row_sK
    arrivals = torch.full((dims.R, dims.S, dims.K), NO_ARRIVAL, dtype=torch.int32)
    for r in range(dims.R):
        arrivals[r, : len(rank_sK)] = torch.where(rank_sK == r, here, NO_ARRIVAL)
    return arrivals


def ordinals(rank_sK: Tensor, dims: Dims) -> Tensor:
    """[s, K]: how many lower ranks the same token goes to: the place of the rank's partial sum in staging."""
    present = ranks_used(rank_sK, dims)
    before = present.long().cumsum(1) - present.long()
    return before.gather(1, rank_sK.clamp(min=0))


def ranks_used(rank_sK: Tensor, dims: Dims) -> Tensor:
    """[s, R] bool: the ranks that a token has assignments on."""
    return (rank_sK[:, :, None] == torch.arange(dims.R)).any(1)
