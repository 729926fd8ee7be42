"""The two ways to move rows on a GPU, with the same results bit for bit.

`BulkMovers` (Hopper and newer): bulk copies by few programs, and flags by which ranks tell each other what has arrived;
one launch an operation. `PortableMovers`: loads and stores, and a barrier between what crosses ranks and what follows.

Both say what is to be launched; what is `Given` with each call, the launchers say.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from moonep import environment
from moonep.dims import Dims
from moonep.kernels import combine, dispatch
from moonep.kernels.launch import Launch
from moonep.memory.regions import Region

if TYPE_CHECKING:
    from moonep.backends.gpu import GpuBackend
    from moonep.backends.regions import RowRegion

NAMES = ("bulk", "portable")
BULK_CAPABILITY = EARLY_CAPABILITY = 9
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
    return capability(device) >= BULK_CAPABILITY


def capability(device: torch.device) -> int:
    """The major compute capability; 0 where there is no GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def starts_early(device: torch.device) -> bool:
    """Whether kernels can be launched while those before them still run."""
    return capability(device) >= EARLY_CAPABILITY


def count_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    if device.type != "cuda":
        return MULTIPROCESSORS_OF_THE_HOST
    return torch.cuda.get_device_properties(device).multi_processor_count


class PortableMovers:
    """By loads and stores, on any GPU and in the interpreter."""

    def __init__(self, backend: GpuBackend, num_sms: int | None, num_local_sms: int | None):
        self.backend: GpuBackend = weakref.proxy(backend)  # which owns this
        available = count_multiprocessors(backend.device)
        self.programs = num_sms or available
        self.local_programs = num_local_sms or num_sms or available

    @staticmethod
    def regions(dims: Dims) -> list[Region]:
        """What it needs of each rank's memory."""
        return []

    def move(self, region: RowRegion, fresh: bool, has_weights: bool) -> list[Launch]:
        """Send rows and expand them.

        Args:
            region: where they go, on every rank.
            fresh: the plan's arrivals become what sources have written for this rank.
            has_weights: route weights have been written for this rank, too, and go to `region`.
        """
        b, d = self.backend, self.backend.dims
        words, stride = b.words_of(region)
        arriving, weights = b.arriving(fresh, has_weights)
        take = dispatch.take_arrivals(arriving, weights, region.weights, b.status, d)
        return [
            dispatch.send_rows(b.status, words, stride, region.weights, b.rank, d, self.programs),
            b.barrier.launch(),  # all rows and arrivals are there
            *([take] if fresh or has_weights else []),
            dispatch.expand_rows(region.rows.view(torch.int32), b.status, d, self.local_programs),
        ]

    def sum(self, has_weights: bool) -> list[Launch]:
        """Push partial sums and sum them.

        Args:
            has_weights: route weights are gathered from the gradient regions.
        """
        b, d = self.backend, self.backend.dims
        weights, stride = b.of_all("gradient_weights")
        programs = self.programs if has_weights else self.local_programs
        return [
            combine.push_partials(b.status, *b.of_all("staging"), b.rank, d, self.programs),
            b.barrier.launch(),  # all partial sums and route weights are there
            combine.sum_partials(b.mine("staging"), weights if has_weights else None, stride, b.status, d, programs),
        ]


class BulkMovers:
    """By bulk copies, on Hopper and newer."""

    def __init__(self, backend: GpuBackend, num_sms: int | None, num_local_sms: int | None):
        from moonep.kernels import bulk

        self.backend: GpuBackend = weakref.proxy(backend)  # which owns this
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

    def move(self, region: RowRegion, fresh: bool, has_weights: bool) -> list[Launch]:
        """Send rows and expand them: as `PortableMovers.move`."""
        from moonep.kernels import bulk_dispatch

        b = self.backend
        return [
            bulk_dispatch.move_rows(
                *b.words_of(region), region.weights, *b.arriving(fresh, has_weights), self.arrived, b.barrier.signals,
                b.rank, b.barrier.limit, b.dims, self.senders, self.copiers,
            )
        ]  # fmt: skip

    def sum(self, has_weights: bool) -> list[Launch]:
        """Push partial sums and sum them: as `PortableMovers.sum`."""
        from moonep.kernels import bulk_combine

        b = self.backend
        weights, stride = b.of_all("gradient_weights")
        return [
            bulk_combine.sum_rows(
                b.gradient.rows, *b.of_all("staging"), weights if has_weights else None, stride, self.arrived,
                b.barrier.signals, b.rank, b.barrier.limit, b.dims, self.senders, self.copiers,
            )
        ]  # fmt: skip
