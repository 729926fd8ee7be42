"""The gate: outputs equal the specification, bit for bit, on the inputs that are timed.

Everything is made from seeds, so a rank knows what its peers send, and from the vectorised twins of the specification
(`moonep.planner`), which the tests hold equal to `moonep.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from moonep.backends.cpu import padding_rows
from moonep.bench.hosts import GateError
from moonep.dims import Dims
from moonep.plan import Plan, decode_dst
from moonep.planner import policy, rows

Factor = Callable[[int, Tensor], Tensor]


class Expected:
    """What one routing must give on one rank.

    Args:
        topks: [s, K] int32 of every rank, on the CPU.
        dims: of the Buffer.
        rank: this rank.
        device, dtype: of the payload.
        seed: of the payloads.
    """

    def __init__(
        self, topks: Sequence[Tensor], dims: Dims, rank: int, device: torch.device, dtype: torch.dtype, seed: int
    ):
        d = self.dims = dims
        self.rank, self.device, self.dtype, self.seed = rank, device, dtype, seed
        self.topks = topks
        self.load_RE = torch.stack([rows.count_load(topk, d) for topk in topks])
        counts = policy.allocate(self.load_RE.sum(0).tolist(), d).counts_ER
        self.alloc_ER = torch.tensor(counts, dtype=torch.int32).view(d.E, d.R)
        self.groups = rows.lay_groups(self.alloc_ER, d)
        pieces = [rows.split_sources(self.load_RE, self.alloc_ER, self.groups.base_ER, r, d) for r in range(d.R)]
        self.dst = [rows.assign_rows(topk, *piece, d) for topk, piece in zip(topks, pieces, strict=True)]

    @property
    def experts_to_copy_RB(self) -> Tensor:
        """The expert in each slot of each rank; -1 unused."""
        return self.groups.experts_to_copy_RB

    @cached_property
    def copies_R(self) -> list[int]:
        """Weight copies that each rank receives."""
        return (self.experts_to_copy_RB >= 0).sum(1).tolist()

    @cached_property
    def transfers_RR(self) -> Tensor:
        """[source, destination] rows that travel: one a token and destination rank. The diagonal stays at home."""
        transfers = torch.zeros(self.dims.R, self.dims.R, dtype=torch.long)
        for source, dst in enumerate(self.dst):
            rank_sK, _, primary_sK = decode_dst(dst, self.dims)
            transfers[source] = torch.bincount(rank_sK[primary_sK & (rank_sK >= 0)], minlength=self.dims.R)
        return transfers

    @property
    def most_rows(self) -> int:
        """Assignments of the rank with most."""
        return int(self.alloc_ER.sum(0).max())

    def tokens(self, source: int, variant: int) -> Tensor:
        """[s, H]: the payload of a rank. Other variants are other payloads."""
        s = len(self.topks[source])
        values = torch.randn(s, self.dims.H, device=self.device, generator=self._generator(source, variant))
        return values.to(self.dtype)

    def route_weights(self, source: int) -> Tensor:
        """[s, K] fp32 of a rank."""
        s = len(self.topks[source])
        return torch.rand(s, self.dims.K, device=self.device, generator=self._generator(source, 99))

    def _generator(self, source: int, variant: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + 1009 * variant + source)

    def check_plan(self, plan: Plan) -> None:
        """Every planned integer, but the arrivals, which travel with the rows."""
        want = {
            "load": self.load_RE,
            "alloc": self.alloc_ER,
            "experts_to_copy": self.experts_to_copy_RB,
            "cu_seqlens": self.groups.ends_RG[self.rank],
            "zero_fill_ranges": self.groups.fill_RG2[self.rank],
            "dst": self.dst[self.rank],
            "sends": rows.primaries(self.dst[self.rank], self.dims),
        }
        for name, tensor in want.items():
            check_equal(f"plan.{name}", getattr(plan, name), tensor)

    def check_rows(self, rows_CH: Tensor, weights_C: Tensor | None, arrivals_RSK: Tensor | None, variant: int) -> None:
        """Every row that arrives here, its route weight and arrival, and the zeros of the padding rows."""
        d = self.dims
        for source in range(d.R):
            rank_sK, row_sK, _ = decode_dst(self.dst[source], d)
            token, k = (rank_sK == self.rank).nonzero(as_tuple=True)
            row = row_sK[token, k]
            payload = self.tokens(source, variant)
            for at in range(0, len(row), 8192):
                part = slice(at, at + 8192)
                got, want = rows_CH[row[part].to(self.device)], payload[token[part].to(self.device)]
                check_equal(f"rows from rank {source}", got, want)
            if weights_C is not None:
                sent = self.route_weights(source)
                got, want = weights_C[row.to(self.device)], sent[token.to(self.device), k.to(self.device)]
                check_equal(f"route weights from rank {source}", got, want)
            if arrivals_RSK is not None:
                check_equal(
                    f"arrivals from rank {source}", arrivals_RSK[source], rows.mirror(rank_sK, row_sK, d)[self.rank]
                )
        padding = padding_rows(self.groups.fill_RG2[self.rank]).to(self.device)
        for at in range(0, len(padding), 8192):
            zeros = rows_CH[padding[at : at + 8192]]
            check_equal("padding rows", zeros, torch.zeros_like(zeros))
        if weights_C is not None:
            check_equal("padding rows' weights", weights_C[padding], torch.zeros(len(padding)))

    def check_primaries(self, rows_CH: Tensor, variant: int) -> None:
        """The row of each peer's token that travelled."""
        for source in range(self.dims.R):
            rank_sK, row_sK, primary_sK = decode_dst(self.dst[source], self.dims)
            token, k = ((rank_sK == self.rank) & primary_sK & (source != self.rank)).nonzero(as_tuple=True)
            payload = self.tokens(source, variant)
            for at in range(0, len(token), 8192):
                row, of = row_sK[token, k][at : at + 8192].to(self.device), token[at : at + 8192].to(self.device)
                check_equal(f"primaries from rank {source}", rows_CH[row], payload[of])

    def combined(self, factor: Factor | None, variant: int) -> Tensor:
        """[s, H]: the sum of a token's rows when each row is the token times `factor(rank, row)`.

        In fp32 in k order on each rank, rounded; these in rank order, rounded: as `moonep.reference` says.
        """
        d = self.dims
        x = self.tokens(self.rank, variant)
        rank_sK, row_sK, _ = (t.to(self.device) for t in decode_dst(self.dst[self.rank], d))
        total = torch.zeros(x.shape, device=self.device)
        for r in range(d.R):
            partial = torch.zeros(x.shape, device=self.device)
            for k in range(d.K):
                value = x if factor is None else x * factor(r, row_sK[:, k])[:, None]
                partial = torch.where((rank_sK[:, k] == r)[:, None], partial + value.float(), partial)
            total += partial.to(self.dtype).float()
        return total.to(self.dtype)

    def check_combined(self, output: Tensor, factor: Factor | None, variant: int) -> None:
        """The output of combine."""
        check_equal("combined tokens", output, self.combined(factor, variant))


def row_factor(shift: int, dtype: torch.dtype) -> Factor:
    """A factor for each row of each rank, exact in any dtype: what stands for the experts."""

    def factor(rank: int, row: Tensor) -> Tensor:
        return (((row * 7 + rank * 3 + shift) % 13 - 6) / 4).to(dtype)

    return factor


def check_equal(name: str, got: Tensor, want: Tensor) -> None:
    """Raise a GateError that counts the differences."""
    want = want.to(got.device)
    if got.shape != want.shape or got.dtype != want.dtype:
        raise GateError(f"{name}: got {list(got.shape)} {got.dtype}, want {list(want.shape)} {want.dtype}")
    if not torch.equal(got, want):
        differ = (got != want) if got.dim() else (got != want)[None]
        first = int(differ.flatten().nonzero()[0])
        raise GateError(
            f"{name}: {int(differ.sum())} of {got.numel()} elements differ from the specification, "
            f"first {first}: got {got.flatten()[first].item()}, want {want.flatten()[first].item()}"
        )
