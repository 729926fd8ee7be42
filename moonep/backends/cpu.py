"""The CPU backend: rows move by vectorised torch through shared memory that all ranks of one host map.

Each operation is the CPU form of a step in the reference, to which it is equal bit for bit. The caller (`Buffer`)
has checked all arguments. Which barrier orders what: `docs/memory.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moonep import arguments
from moonep.backends.regions import RowRegion, row_regions
from moonep.dims import Dims
from moonep.memory.barrier import Barrier
from moonep.memory.host import HostMemory
from moonep.memory.peers import Peers
from moonep.memory.regions import Layout, Region
from moonep.plan import ARRIVAL_ROW, ARRIVAL_SHIFT, Plan, PlanLayout, decode_dst
from moonep.planner import policy, rows


class CompletedEvent:
    """An event of the CPU: what it stands for has happened when the call that made it returns."""

    def wait(self, stream: object = None) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""


class CpuBackend:
    """Memory and movers of one Buffer on the CPU."""

    name = "cpu"
    device = torch.device("cpu")
    status: Tensor | None = None  # of plans

    def __init__(self, dims: Dims, dtype: torch.dtype, peers: Peers, timeout_s: float):
        d = self.dims = dims
        self.dtype, self.peers, self.rank = dtype, peers, peers.rank
        self.plan_layout = PlanLayout(d)
        self.layout = Layout(
            [Region("load", (d.E,), torch.int32), Region("tokens", (1,), torch.int32), *row_regions(d, dtype)]
        )
        memory = HostMemory()
        pages, data = memory.share([memory.granule, self.layout.nbytes], peers, "Buffer", timeout_s)
        self.barrier = Barrier(pages, peers.rank, timeout_s)
        mapping = memory.map(data)
        views = [
            {name: self.layout.view(name, mapping, r * data[0].nbytes) for name in self.layout.regions}
            for r in range(d.R)
        ]
        for chunk in [*pages, *data]:
            chunk.close()
        self.load_of = [v["load"] for v in views]
        self.tokens_of = [v["tokens"] for v in views]
        self.arrivals_of = [v["arrivals"] for v in views]
        self.staging_of = [v["staging"] for v in views]
        self.forward = RowRegion("forward", views, self.rank)
        self.gradient = RowRegion("gradient", views, self.rank)

    def check_routing(self, topk_sK: Tensor, counts_E: Tensor | None) -> Tensor:
        """Check expert ids and counts. -> [E] int32, this rank's load"""
        arguments.check_ids(topk_sK, self.dims.E)
        counted = rows.count_load(topk_sK, self.dims)
        if counts_E is not None:
            arguments.check_counts(counts_E, counted)
        return counted

    @contextmanager
    def run(self, async_finish: bool, tensors: Sequence[Tensor | None]) -> Iterator[list[Tensor | None]]:
        """Operations run at once."""
        yield []

    def synchronize(self) -> None:
        """All operations have been done when they return."""

    def event(self, async_finish: bool) -> CompletedEvent | None:
        """An event of the operation that has just run."""
        return CompletedEvent() if async_finish else None

    def copy_rows(self, region: RowRegion, plan: Plan) -> Tensor:
        """The region's rows in a tensor of their own; those past the last offset are undefined."""
        return _copy_head(region.rows, int(plan.cu_seqlens[-1]))

    def copy_weights(self, region: RowRegion, plan: Plan) -> Tensor:
        """The region's route weights in a tensor of their own; those past the last offset are undefined."""
        return _copy_head(region.weights, int(plan.cu_seqlens[-1]))

    def dispatch(
        self, hidden_sH: Tensor, weights_sK: Tensor | None, topk_sK: Tensor, counts_E: Tensor | None, owner: int
    ) -> Plan:
        """Plan, and send rows into the forward region of every rank.

        Visible when it returns: all rows, weights and arrivals of this rank.
        Moves: s x min(R, K) rows at most to others.
        """
        d = self.dims
        assert counts_E is not None
        self.load_of[self.rank].copy_(counts_E)
        self.tokens_of[self.rank].fill_(len(topk_sK))
        self.barrier.wait()  # all loads are there; nobody reads the forward region any more
        load_RE, tokens_R = torch.stack(self.load_of), torch.cat(self.tokens_of)
        counts = policy.allocate(load_RE.sum(0).tolist(), d).counts_ER
        alloc_ER = torch.tensor(counts, dtype=torch.int32).view(d.E, d.R)
        groups = rows.lay_groups(alloc_ER, d)
        first_ER, row_ER = rows.split_sources(load_RE, alloc_ER, groups.base_ER, self.rank, d)
        dst = rows.assign_rows(topk_sK, first_ER, row_ER, d)
        rank_sK, row_sK, _ = decode_dst(dst, d)
        padding = padding_rows(groups.fill_RG2[self.rank])
        self._send(self.forward, hidden_sH, weights_sK, rank_sK, row_sK, padding)
        for r, arrivals in enumerate(rows.mirror(rank_sK, row_sK, d)):
            self.arrivals_of[r][self.rank] = arrivals
        self.barrier.wait()  # all rows are there
        slots = groups.experts_to_copy_RB
        computed = alloc_ER[:, self.rank] > 0
        redundant = computed.sum() - computed[self.rank * d.L : (self.rank + 1) * d.L].sum()
        return Plan.of(
            d,
            self.rank,
            owner,
            load=load_RE,
            alloc=alloc_ER,
            experts_to_copy=slots,
            cu_seqlens=groups.ends_RG[self.rank],
            zero_fill_ranges=groups.fill_RG2[self.rank],
            remote_stats=torch.stack([redundant, ((slots >= 0) & (slots // d.L == self.rank)).sum()]).int(),
            dst=dst,
            sends=rows.primaries(dst, d),
            tokens=tokens_R,
            arrivals=self.arrivals_of[self.rank],
        )

    def dispatch_with_plan(self, plan: Plan, hidden_sH: Tensor, weights_sK: Tensor | None, sync: bool) -> None:
        """Send rows into the gradient region of every rank. Visible when it returns: all rows of this rank."""
        if sync:
            self.barrier.wait()  # nobody reads the gradient region any more
        rank_sK, row_sK, _ = plan.destinations()
        self._send(self.gradient, hidden_sH, weights_sK, rank_sK, row_sK, padding_rows(plan.zero_fill_ranges))
        self.barrier.wait()  # all rows are there

    def combine(
        self, plan: Plan, hidden_CH: Tensor, weights_C: Tensor | None, sync: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Push each token's partial sum to its rank, then sum the partial sums. See `reference.combine`."""
        d = self.dims
        if sync:
            self.barrier.wait()  # everybody has read its staging, and gathered the route weights
        for r, arrivals_SK in enumerate(plan.arrivals):
            token, ordinal, partial = sum_arrivals(arrivals_SK, hidden_CH)
            self.staging_of[r][token * d.W + ordinal] = partial
        if weights_C is not None and weights_C.data_ptr() != self.gradient.weights.data_ptr():
            self.gradient.weights.copy_(weights_C)
        self.barrier.wait()  # all partial sums and route weights are there
        rank_sK, row_sK, _ = plan.destinations()
        staging = self.staging_of[self.rank].view(d.S, d.W, d.H)[: plan.num_tokens]
        output = sum_partials(staging, rows.ranks_used(rank_sK, d).sum(1))
        return output, None if weights_C is None else self._gather(self.gradient.weights_of, rank_sK, row_sK)

    def _send(
        self,
        region: RowRegion,
        hidden_sH: Tensor,
        weights_sK: Tensor | None,
        rank_sK: Tensor,
        row_sK: Tensor,
        padding: Tensor,
    ) -> None:
        """Write each token's row to all its rows, and zero this rank's padding rows."""
        region.touch()
        region.rows[padding] = 0
        region.weights[padding] = 0
        for r in range(self.dims.R):
            token, k = (rank_sK == r).nonzero(as_tuple=True)
            region.rows_of[r].index_copy_(0, row_sK[token, k], hidden_sH[token])
        if weights_sK is not None:
            self._scatter(region.weights_of, weights_sK, rank_sK, row_sK)

    def _scatter(self, targets: list[Tensor], values_sK: Tensor, rank_sK: Tensor, row_sK: Tensor) -> None:
        for r, target in enumerate(targets):
            here = rank_sK == r
            target[row_sK[here]] = values_sK[here]

    def _gather(self, sources: list[Tensor], rank_sK: Tensor, row_sK: Tensor) -> Tensor:
        gathered = torch.zeros(rank_sK.shape)
        for r, source in enumerate(sources):
            here = rank_sK == r
            gathered[here] = source[row_sK[here]]
        return gathered


def _copy_head(source: Tensor, count: int) -> Tensor:
    copy = torch.empty_like(source)
    copy[:count] = source[:count]
    return copy


def padding_rows(fill_G2: Tensor) -> Tensor:
    """All padding rows of a rank, from (first, count) of each group. [G, 2] -> [n] int64."""
    first, count = fill_G2.long().unbind(1)
    inside = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
    return first.repeat_interleave(count) + inside


def sum_arrivals(arrivals_SK: Tensor, hidden_CH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the rows of each token of one source in k order, in fp32, rounded once.

    Returns:
        the tokens that have rows here [n] int64; this rank's ordinal in each [n]; the sums [n, H] in the payload dtype.
    """
    token = (arrivals_SK >= 0).any(1).nonzero().flatten()
    arrivals_nK = arrivals_SK[token]
    partial = torch.zeros(len(token), hidden_CH.shape[1], device=hidden_CH.device)
    for arrival in arrivals_nK.unbind(1):
        here = (arrival >= 0).nonzero().flatten()
        partial[here] += hidden_CH[(arrival[here] & ARRIVAL_ROW).long()].float()
    ordinal = arrivals_nK.amax(1).long() >> ARRIVAL_SHIFT if len(token) else token
    return token, ordinal, partial.to(hidden_CH.dtype)


def sum_partials(staging_sWH: Tensor, count_s: Tensor) -> Tensor:
    """Sum the first `count` partial sums of each token in rank order, in fp32, rounded once. -> [s, H]"""
    output = torch.zeros(staging_sWH.shape[0], staging_sWH.shape[2], device=staging_sWH.device)
    for ordinal in range(staging_sWH.shape[1]):
        token = (count_s > ordinal).nonzero().flatten()
        output[token] += staging_sWH[token, ordinal].float()
    return output.to(staging_sWH.dtype)
