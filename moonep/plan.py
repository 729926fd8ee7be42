"""Plan: everything that one layer call needs to move rows, weights and gradients, and the invariants that it keeps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from moonep.dims import Dims, align_up

INT32_MIN = -(1 << 31)

# An arrival is one int32 an assignment that this rank computes: the row, and above it the ordinal of this rank among
# those that the token has assignments on, in rank order, which is the place of its partial sum in staging.
ARRIVAL_SHIFT = 24
ARRIVAL_ROW = (1 << ARRIVAL_SHIFT) - 1
NO_ARRIVAL = -1

_plan_ids = itertools.count(1)

_ALIGNMENT = 4  # in int32: each tensor of a plan begins at 16 bytes


class PlanLayout:
    """Where the tensors of a plan lie in its one allocation. All int32; what depends on s comes last.

    Attributes:
        dims: the sizes.
        names: of the tensors, in order.
    """

    def __init__(self, dims: Dims):
        d = self.dims = dims
        shapes = {
            "load": (d.R, d.E),
            "alloc": (d.E, d.R),
            "experts_to_copy": (d.R, d.B),
            "cu_seqlens": (d.G,),
            "zero_fill_ranges": (d.G, 2),
            "remote_stats": (2,),
            "tokens": (d.R,),
            "arrivals": (d.R, d.S, d.K),
        }
        self._parts: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._end = 0  # where `dst` begins
        for name, shape in shapes.items():
            self._parts[name] = (self._end, shape)
            self._end = align_up(self._end + math.prod(shape), _ALIGNMENT)
        self._a_token = d.K + d.W
        self._byte_offsets = {name: 4 * begin for name, (begin, _) in self._parts.items()}
        self._byte_offsets["dst"] = 4 * self._end
        self.names = (*self._byte_offsets, "sends")

    def length(self, num_tokens: int) -> int:
        """Of the allocation, in int32. `num_tokens` is its inverse."""
        return self._end + num_tokens * self._a_token + _ALIGNMENT - 1

    def num_tokens(self, length: int) -> int:
        """s, from the length."""
        return (length - self._end - _ALIGNMENT + 1) // self._a_token

    def empty(self, num_tokens: int, device: torch.device) -> Tensor:
        """The allocation, still to be written."""
        return torch.empty(self.length(num_tokens), dtype=torch.int32, device=device)

    def view(self, packed: Tensor, name: str) -> Tensor:
        """A tensor of a plan."""
        begin, shape = self._parts.get(name) or self._part_of_tokens(packed, name)
        if len(shape) == 1:
            return packed[begin : begin + shape[0]]
        return packed[begin : begin + math.prod(shape)].view(shape)

    def addresses(self, packed: Tensor) -> dict[str, int]:
        """Of all tensors of a plan."""
        base = packed.data_ptr()
        found = {name: base + offset for name, offset in self._byte_offsets.items()}
        found["sends"] = base + 4 * self._part_of_tokens(packed, "sends")[0]
        return found

    def _part_of_tokens(self, packed: Tensor, name: str) -> tuple[int, tuple[int]]:
        """Where `dst` or `sends` begins, and its shape."""
        s, d = self.num_tokens(packed.shape[0]), self.dims
        if name == "dst":
            return self._end, (s * d.K,)
        return align_up(self._end + s * d.K, _ALIGNMENT), (s * d.W,)


class _Part:
    """A tensor of a plan: a view that is made when it is first asked for, and kept."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, plan: Plan, owner: type) -> Tensor:
        view = vars(plan)[self._name] = plan.layout.view(plan.packed, self._name)
        return view


@dataclass(frozen=True, eq=False)
class Plan:
    """What one rank needs to move the rows, weights and gradients of one layer call. Owns its tensors.

    They lie in one allocation, and are views of it.

    Attributes:
        layout: where each tensor lies.
        rank: the rank whose plan this is.
        owner: id of the Buffer that made it.
        packed: [n] int32, all tensors, one after the other.
        status: [1] int32 of the GPU Buffer that made it: what kernels do with the plan, they do only while it is 0,
            for else the plan may not have been made. None: torch does it.
        key: identity of the planned routing; a clone has the same.
        load: [R, E] int32, assignments of each expert by source rank. Equal on all ranks.
        alloc: [E, R] int32, how many assignments of each expert each rank computes. Equal on all ranks.
        experts_to_copy: [R, B] int32, the expert whose weights each slot of each rank holds; -1 unused. Ascending.
        cu_seqlens: [E + B] int32, padded end row of each group of this rank, in weight-row order.
        zero_fill_ranges: [E + B, 2] int32, (first padding row, count) of each group; (0, 0) without padding.
        remote_stats: [2] int32, (redundant experts here, slots anywhere that hold experts of this rank).
        dst: [s * K] int32, `rank * C + row` for the first assignment of a token on a rank, `-(that) - 1` for its
            duplicates there, INT32_MIN if masked.
        sends: [s * W] int32, the transfers of each token: `rank * C + row` of its primaries, in rank order; -1 beyond.
        tokens: [R] int32, how many tokens each rank brought.
        arrivals: [R, S, K] int32, the assignments of all ranks' tokens that are computed here: 2^24 x the ordinal of
            this rank among the token's ranks + the row here; NO_ARRIVAL elsewhere. A token's first is its primary.
    """

    layout: PlanLayout
    rank: int
    owner: int
    packed: Tensor
    status: Tensor | None = None
    key: int = field(default_factory=lambda: next(_plan_ids))

    @staticmethod
    def of(dims: Dims, rank: int, owner: int, **tensors: Tensor) -> Plan:
        """A plan with copies of these tensors: `load` to `arrivals`."""
        layout, dst = PlanLayout(dims), tensors["dst"]
        plan = Plan(layout, rank, owner, layout.empty(len(dst) // dims.K, dst.device).zero_())
        plan._write(tensors)
        return plan

    def changed(self, **tensors: Tensor) -> Plan:
        """A copy in which some tensors are replaced by copies of these, of equal shape."""
        plan = self.clone()
        plan._write(tensors)
        return plan

    def _write(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            getattr(self, name).copy_(tensor)

    @property
    def dims(self) -> Dims:
        """The sizes (`moonep.dims`)."""
        return self.layout.dims

    @property
    def num_tokens(self) -> int:
        """s, the tokens that this rank brought."""
        return self.layout.num_tokens(self.packed.shape[0])

    load = _Part()
    alloc = _Part()
    experts_to_copy = _Part()
    cu_seqlens = _Part()
    zero_fill_ranges = _Part()
    remote_stats = _Part()
    dst = _Part()
    sends = _Part()
    tokens = _Part()
    arrivals = _Part()

    @property
    def views(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        return {name: getattr(self, name) for name in self.layout.names}

    @property
    def addresses(self) -> dict[str, int]:
        """Of all tensors, by name."""
        return self.layout.addresses(self.packed)

    @property
    def compact_cu_seqlens(self) -> Tensor:
        """[L + B] int32: `cu_seqlens` of own experts, then slots: the offsets of the compact weight view.

        Raises:
            ValueError: B < min(L, E - L): rows of an expert without a slot would be missing.
        """
        d = self.dims
        if d.spills:
            raise ValueError(
                f"compact_cu_seqlens: given B = {d.B}, expected B >= {d.max_redundant}: with fewer slots an expert may "
                "be computed from its home row, which the compact view does not have; use cu_seqlens and the full view"
            )
        return torch.cat([self.cu_seqlens[self.rank * d.L : (self.rank + 1) * d.L], self.cu_seqlens[d.E :]])

    def clone(self) -> Plan:
        """A plan with tensors of its own, equal in value."""
        return replace(self, packed=self.packed.clone())

    def tensors(self) -> list[Tensor]:
        """The memory that the plan owns."""
        return [self.packed]

    def destinations(self) -> tuple[Tensor, Tensor, Tensor]:
        """Decode `dst`.

        Returns:
            rank: [s, K] int64, the rank that computes the assignment; -1 if masked.
            row: [s, K] int64, its row there; 0 if masked.
            primary: [s, K] bool, whether it is the token's first on that rank.
        """
        return decode_dst(self.dst, self.dims)

    def stats(self) -> PlanStats:
        """Statistics as device tensors, without a host sync."""
        return PlanStats.of(self)


def decode_dst(dst: Tensor, dims: Dims) -> tuple[Tensor, Tensor, Tensor]:
    """(rank, row, primary) of each assignment, each [s, K]: see `Plan.destinations`."""
    dst = dst.view(-1, dims.K).long()
    masked = dst == INT32_MIN
    place = torch.where(dst < 0, -dst - 1, dst).masked_fill(masked, 0)
    return (place // dims.C).masked_fill(masked, -1), place % dims.C, dst >= 0


@dataclass(frozen=True, eq=False)
class PlanStats:
    """Statistics of a plan: tensors on the plan's device; `host()` synchronises and gives numbers.

    Attributes:
        rows_before: [R] int64, assignments each rank would compute without redundant experts.
        rows_after: [R] int64, assignments each rank computes.
        maxvio: [] fp32, max over experts of load / mean load, minus 1.
        imbalance_before, imbalance_after: [] fp32, max / mean of the rows of the ranks.
        redundant_experts: [R] int64, experts that each rank computes away from their home.
        copies_in, copies_out: [R] int64, weight copies each rank receives into slots and serves to others' slots.
        rows_crossing: [] int64, assignments of all ranks that are computed on another rank than their source.
        transfers_sent: [] int64, rows this rank sends to others (one a token and destination rank).
    """

    rows_before: Tensor
    rows_after: Tensor
    maxvio: Tensor
    imbalance_before: Tensor
    imbalance_after: Tensor
    redundant_experts: Tensor
    copies_in: Tensor
    copies_out: Tensor
    rows_crossing: Tensor
    transfers_sent: Tensor

    @staticmethod
    def of(plan: Plan) -> PlanStats:
        d = plan.dims
        load, alloc = plan.load.long(), plan.alloc.long()
        total = load.sum(0)
        before, after = total.view(d.R, d.L).sum(1), alloc.sum(0)
        redundant = _redundant(alloc, d)
        holders = plan.experts_to_copy.long()
        homes = torch.where(holders >= 0, holders // d.L, d.R)
        rank, _, primary = plan.destinations()
        return PlanStats(
            rows_before=before,
            rows_after=after,
            maxvio=_peak(total) - 1,
            imbalance_before=_peak(before),
            imbalance_after=_peak(after),
            redundant_experts=redundant.sum(0),
            copies_in=(holders >= 0).sum(1),
            copies_out=(homes.view(-1, 1) == torch.arange(d.R, device=homes.device)).sum(0),
            rows_crossing=total.sum() - torch.minimum(load, alloc.t()).sum(),
            transfers_sent=(primary & (rank != plan.rank)).sum(),
        )

    def host(self) -> dict[str, int | float | list[int]]:
        """The same as Python numbers. Synchronises with the device."""
        return {f.name: getattr(self, f.name).tolist() for f in fields(self)}


def _peak(values: Tensor) -> Tensor:
    """max / mean; 1 when there is nothing."""
    total = values.sum()
    return torch.where(total > 0, values.max() * values.numel() / total.clamp(min=1), 1.0).float()


def _redundant(alloc: Tensor, d: Dims) -> Tensor:
    """[E, R] bool: expert e is computed on rank r, which is not its home."""
    home = torch.arange(d.E, device=alloc.device) // d.L
    return (alloc > 0) & (home[:, None] != torch.arange(d.R, device=alloc.device))


def check_plan(plan: Plan | Sequence[Plan]) -> list[str]:
    """Names of the invariants (I1 ... I9) that a plan violates; empty when it is right.

    Args:
        plan: the plans of all ranks in rank order, or one rank's plan: then what only all ranks together can show
            (that no two sources use a row, and the arrivals) is not checked.

    I1 conservation, I2 balance (exact, or within the tolerance), I3 one foreign home a rank, I4 at most L redundant
    experts (and the right ones in the slots), I5 capacity, I6 bijection of assignments and rows, I7 row order
    (source rank, token, k) within a group, I8 groups (monotone, multiples of P, empty groups without rows, zero fill
    exactly on the padding), I9 the first of a token's assignments on a rank is its primary, sends and arrivals follow
    `dst`.
    """
    plans = [plan] if isinstance(plan, Plan) else list(plan)
    whole = len(plans) == plans[0].dims.R
    found: set[str] = set()
    for p in plans:
        found |= _check_allocation(p) | _check_groups(p) | _check_rows(p)
    if any((p.destinations()[0] >= p.dims.R).any() for p in plans):
        return sorted(found | {"I6"})  # rows that no buffer has: nothing further can be said of them
    if whole:
        found |= _check_bijection(plans) | _check_order(plans) | _check_arrivals(plans)
    return sorted(found)


def _check_allocation(p: Plan) -> set[str]:
    from moonep.planner.policy import limits

    d, found = p.dims, set()
    load, alloc = p.load.long(), p.alloc.long()
    if (alloc < 0).any() or not torch.equal(alloc.sum(1), load.sum(0)):
        found.add("I1")
    total = int(load.sum())
    share = torch.tensor([total // d.R + (r < total % d.R) for r in range(d.R)])
    rows, homes = alloc.sum(0).cpu(), load.sum(0).view(d.R, d.L).sum(1).cpu()
    if not torch.equal(rows, share):
        upper = torch.tensor(limits(total, d))
        relieved = homes > upper
        if d.balance.exact or (rows > upper).any() or (rows != upper)[relieved].any():
            found.add("I2")
    redundant = _redundant(alloc, d)
    for r in range(d.R):
        experts = redundant[:, r].nonzero().flatten().tolist()
        if len({d.home(e) for e in experts}) > 1:
            found.add("I3")
        by_rows = sorted(experts, key=lambda e: (-int(alloc[e, r]), e))
        slots = sorted(by_rows[: d.B])
        if len(experts) > d.L or p.experts_to_copy[r].tolist() != slots + [-1] * (d.B - len(slots)):
            found.add("I4")
    return found


def _group_sizes(p: Plan) -> Tensor:
    """[G] rows of each group of this rank, as allocation and slots demand."""
    d = p.dims
    sizes = torch.zeros(d.G, dtype=torch.long)
    sizes[: d.E] = p.alloc[:, p.rank].cpu()
    for slot, e in enumerate(p.experts_to_copy[p.rank].tolist()):
        if e >= 0:
            sizes[d.E + slot], sizes[e] = sizes[e].clone(), 0
    return sizes


def _check_groups(p: Plan) -> set[str]:
    d, found = p.dims, set()
    ends = p.cu_seqlens.long().cpu()
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    sizes = _group_sizes(p)
    padding = (ends - begins) - sizes
    if (ends < begins).any() or (ends % d.P).any() or (padding < 0).any() or (padding >= d.P).any():
        found.add("I8")
    fill = torch.where((padding > 0)[:, None], torch.stack([begins + sizes, padding], 1), 0)
    if ((sizes == 0) & (ends != begins)).any() or not torch.equal(fill, p.zero_fill_ranges.long().cpu()):
        found.add("I8")
    if int(ends[-1]) > d.C:
        found.add("I5")
    return found


def _check_rows(p: Plan) -> set[str]:
    """What one rank's `dst` shows alone: distinct rows, and a primary before its duplicates."""
    rank, row, primary = p.destinations()
    real = rank >= 0
    found = set()
    if int(real.sum()) != int(p.load[p.rank].sum()):
        found.add("I6")
    place = (rank * p.dims.C + row)[real]
    if place.unique().numel() != place.numel():
        found.add("I6")
    first = torch.zeros_like(primary)
    for r in range(p.dims.R):
        hit = rank == r
        first |= hit & (hit.long().cumsum(1) == 1)
    if not torch.equal(first, primary & real):
        found.add("I9")
    beyond = p.dims.R * p.dims.C
    places = torch.where(primary, p.dst.view(-1, p.dims.K).long(), beyond).sort(1).values[:, : p.dims.W]
    if not torch.equal(p.sends.view(-1, p.dims.W).long(), places.masked_fill(places == beyond, -1)):
        found.add("I9")
    return found


def _check_bijection(plans: Sequence[Plan]) -> set[str]:
    d = plans[0].dims
    used = torch.zeros(d.R, d.C, dtype=torch.long)
    for p in plans:
        rank, row, _ = p.destinations()
        real = rank >= 0
        used.view(-1).index_add_(0, (rank * d.C + row)[real].cpu(), torch.ones(int(real.sum()), dtype=torch.long))
    for p in plans:
        want = torch.zeros(d.C, dtype=torch.long)
        ends, sizes = p.cu_seqlens.tolist(), _group_sizes(p).tolist()
        begin = 0
        for end, size in zip(ends, sizes, strict=True):
            want[begin : begin + size] = 1
            begin = end
        if not torch.equal(used[p.rank], want):
            return {"I6"}
    return set()


def _check_order(plans: Sequence[Plan]) -> set[str]:
    """Rows of a group, read upwards, come from ascending (source rank, token, k)."""
    d = plans[0].dims
    origin = torch.full((d.R, d.C), -1, dtype=torch.long)
    for p in plans:
        rank, row, _ = p.destinations()
        real = (rank >= 0).view(-1)
        code = p.rank * d.A + torch.arange(p.dst.numel())
        origin.view(-1)[(rank * d.C + row).view(-1)[real].cpu()] = code[real.cpu()]
    for p in plans:
        group = torch.bucketize(torch.arange(d.C), p.cu_seqlens.long().cpu(), right=True)
        rows = (origin[p.rank] >= 0).nonzero().flatten()
        codes, groups = origin[p.rank][rows], group[rows]
        if ((groups[1:] == groups[:-1]) & (codes[1:] <= codes[:-1])).any():
            return {"I7"}
    return set()


def _check_arrivals(plans: Sequence[Plan]) -> set[str]:
    """What every rank expects is what the others send."""
    d = plans[0].dims
    want = torch.full((d.R, d.R, d.S, d.K), NO_ARRIVAL, dtype=torch.int32)
    for p in plans:
        rank, row, _ = (t.cpu() for t in p.destinations())
        for r in range(d.R):
            earlier = sum(
                ((rank == lower).any(1).int() for lower in range(r)), torch.zeros(len(rank), dtype=torch.int32)
            )
            here = (earlier[:, None] << ARRIVAL_SHIFT) + row.int()
            want[r, p.rank, : p.num_tokens] = torch.where(rank == r, here, NO_ARRIVAL)
    tokens = torch.tensor([p.num_tokens for p in plans], dtype=torch.int32)
    right = all(torch.equal(p.arrivals.cpu(), want[p.rank]) and torch.equal(p.tokens.cpu(), tokens) for p in plans)
    return set() if right else {"I9"}
