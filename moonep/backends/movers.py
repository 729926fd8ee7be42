"""The two ways to move rows on a GPU, with the same results bit for bit.

`BulkMovers` (Hopper and newer): bulk copies by few programs, and flags by which ranks tell each other what has arrived;
one launch an operation. `PortableMovers`: loads and stores, and a barrier between what crosses ranks and what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moonep import environment
from moonep.dims import Dims
from moonep.kernels import combine, dispatch
from moonep.memory.regions import Region
from moonep.plan import Plan

if TYPE_CHECKING:
    from moonep.backends.gpu import GpuBackend
    from moonep.backends.regions import RowRegion

NAMES = ("bulk", "portable")
BULK_CAPABILITY = 9
DEFAULT_SENDERS = 32  # enough for the links; the other multiprocessors copy within the GPU
MULTIPROCESSORS_OF_THE_HOST = 3  # programs, in the interpreter


def choose(device: torch.device, dims: Dims, dtype: torch.dtype) -> str:
    """ "bulk" where the device and the rows allow it; `MOONEP_MOVERS` overrides.

    Raises:
        ValueError: `MOONEP_MOVERS` is unknown, or asks for what cannot work.
    """
    asked = environment.movers()
    if asked is not None and asked not in NAMES:
        raise ValueError(f"MOONEP_MOVERS: given {asked!r}, expected one of {', '.join(map(repr, NAMES))}")
    possible = _has_bulk_copies(device)
    if possible:
        from moonep.kernels.bulk_dispatch import row_shape

        possible = row_shape(dims.H, dtype.itemsize).supported
    if asked == "bulk" and not possible:
        raise ValueError(
            f"MOONEP_MOVERS: given 'bulk' on {device} with rows of {dims.H * dtype.itemsize} bytes, expected a GPU of "
            "capability 9.0 or higher and rows of a multiple of 128 bytes, at most 16384"
        )
    return asked or ("bulk" if possible else "portable")


def copies_in_bulk(device: torch.device) -> bool:
    """Whether weights of large experts move by bulk copies."""
    return _has_bulk_copies(device) and environment.movers() != "portable"


def _has_bulk_copies(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= BULK_CAPABILITY


def count_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    if device.type != "cuda":
        return MULTIPROCESSORS_OF_THE_HOST
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Arriving:
    """What sources have written for this rank.

    Attributes:
        arrivals: [R, S, K] int32; None: the plan has them.
        weights: [R, S, K] fp32 route weights; None: none come along.
    """

    arrivals: Tensor | None
    weights: Tensor | None


class PortableMovers:
    """By loads and stores, on any GPU and in the interpreter."""

    def __init__(self, backend: GpuBackend, num_sms: int | None, num_local_sms: int | None):
        self.backend = backend
        available = count_multiprocessors(backend.device)
        self.programs = num_sms or available
        self.local_programs = num_local_sms or num_sms or available

    @staticmethod
    def regions(dims: Dims) -> list[Region]:
        """What it needs of each rank's memory."""
        return []

    def move(self, region: RowRegion, hidden_sH: Tensor, plan: Plan, arriving: Arriving) -> None:
        """Send rows and expand them."""
        b = self.backend
        rows, stride = b.words_of(region)
        dispatch.send_rows(
            hidden_sH,
            plan.dst,
            plan.zero_fill_ranges,
            b.status,
            rows,
            stride,
            region.weights,
            b.rank,
            b.dims.K,
            b.dims.C,
            self.programs,
        )
        b.barrier.wait()  # all rows and arrivals are there
        fresh = arriving.arrivals is not None
        if fresh or arriving.weights is not None:
            dispatch.take_arrivals(
                plan.arrivals if arriving.arrivals is None else arriving.arrivals, plan.arrivals if fresh else None,
                plan.tokens, arriving.weights, region.weights, b.status,
            )  # fmt: skip
        dispatch.expand_rows(region.rows.view(torch.int32), plan.arrivals, plan.tokens, b.status, self.local_programs)

    def sum(
        self, plan: Plan, hidden_CH: Tensor, output: Tensor, weights: Tensor, stride: int, gathered: Tensor | None
    ) -> None:
        """Push partial sums and sum them. weights: [C] of rank 0."""
        b, d = self.backend, self.backend.dims
        staging, staging_stride = b.of_all("staging")
        combine.push_partials(
            hidden_CH, plan.arrivals, plan.tokens, b.status, staging, staging_stride, b.rank, d.W, self.programs
        )
        b.barrier.wait()  # all partial sums and route weights are there
        combine.sum_partials(
            b.mine("staging"), plan.dst, None if gathered is None else weights, stride, b.status, output, gathered,
            d.K, d.W, d.C, self.programs if gathered is not None else self.local_programs,
        )  # fmt: skip


class BulkMovers:
    """By bulk copies, on Hopper and newer."""

    def __init__(self, backend: GpuBackend, num_sms: int | None, num_local_sms: int | None):
        from moonep.kernels import bulk

        self.backend = backend
        available = count_multiprocessors(backend.device)
        if num_sms is None:
            senders = min(DEFAULT_SENDERS, available // 2)
            copiers = available - senders if num_local_sms is None else num_local_sms
        elif num_local_sms is None:
            senders = max(1, num_sms // 2)
            copiers = num_sms - senders
        else:
            senders, copiers = num_sms, num_local_sms
        self.senders = max(1, min(senders, available - 1))
        self.copiers = max(1, min(copiers, available - self.senders))
        self.local_programs = available if num_sms is None else self.senders + self.copiers
        self.arrived = bulk.Arrivals.make(*backend.of_all("flags"))

    @staticmethod
    def regions(dims: Dims) -> list[Region]:
        """What it needs of each rank's memory: flags."""
        from moonep.kernels.bulk import MAX_CHUNKS

        return [Region("flags", (dims.R, MAX_CHUNKS), torch.int32)]

    def move(self, region: RowRegion, hidden_sH: Tensor, plan: Plan, arriving: Arriving) -> None:
        """Send rows and expand them."""
        from moonep.kernels import bulk_dispatch

        b = self.backend
        rows, stride = b.words_of(region)
        fresh = arriving.arrivals is not None
        bulk_dispatch.move_rows(
            hidden_sH, rows, stride, region.weights, plan.sends, plan.zero_fill_ranges,
            plan.arrivals if arriving.arrivals is None else arriving.arrivals, plan.arrivals if fresh else None,
            arriving.weights, plan.tokens, self.arrived, b.barrier.signals, b.rank, b.barrier.waiting(), b.dims.P,
            self.senders, self.copiers,
        )  # fmt: skip

    def sum(
        self, plan: Plan, hidden_CH: Tensor, output: Tensor, weights: Tensor, stride: int, gathered: Tensor | None
    ) -> None:
        """Push partial sums and sum them. weights: [C] of rank 0."""
        from moonep.kernels import bulk_combine

        b = self.backend
        bulk_combine.sum_rows(
            hidden_CH, plan.arrivals, plan.tokens, plan.dst, plan.sends, *b.of_all("staging"), b.dims.W, output,
            None if gathered is None else weights, stride, gathered, self.arrived, b.barrier.signals, b.rank,
            b.barrier.waiting(), self.senders, self.copiers,
        )  # fmt: skip
