"""Rows by `all_to_all_single`, as one writes it by hand: sort, exchange counts, send, place into groups; and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Exchange:
    """Where the rows of one routing go. The host knows the split sizes: it has waited for them.

    Attributes:
        order: [A] this rank's assignments, ordered by expert.
        place: [n] the row that each arriving row gets, n = sum(received).
        ends: [L] int32 end row of each home expert's group.
        rows: of all groups, with padding.
        sent, received: rows to and from each rank.
        padded: whether there are rows of padding; they are zero.
    """

    order: Tensor
    place: Tensor
    ends: Tensor
    rows: int
    sent: list[int]
    received: list[int]
    padded: bool
    group: dist.ProcessGroup | None = None

    @staticmethod
    def plan(ids: Tensor, E: int, R: int, padding: int = 1, group: dist.ProcessGroup | None = None) -> Exchange:
        """Collective; waits for the device once.

        Args:
            ids: [s, K] int64, without masked assignments.
            E, R: see `moonep.dims`.
            padding: groups are padded to multiples of it.
            group: process group; None: all ranks.
        """
        device, L = ids.device, E // R
        sorted_ids, order = ids.flatten().sort(stable=True)
        counts_E = torch.searchsorted(sorted_ids, torch.arange(E + 1, device=device)).diff()
        arriving_E = _all_to_all(counts_E, [L] * R, [L] * R, group)
        arriving_RL = arriving_E.view(R, L)
        sizes_L = (arriving_RL.sum(0) + padding - 1) // padding * padding
        ends_L = sizes_L.cumsum(0)
        sizes = torch.cat([counts_E.view(R, L).sum(1), arriving_RL.sum(1), ends_L[-1:]]).tolist()
        sent, received, rows = sizes[:R], sizes[R : 2 * R], sizes[-1]
        first_RL = (ends_L - sizes_L) + arriving_RL.cumsum(0) - arriving_RL  # where a source's rows of an expert begin
        arrive_RL = (arriving_E.cumsum(0) - arriving_E).view(R, L)  # and where they are as they arrive
        n = sum(received)
        shift = (first_RL - arrive_RL).flatten().repeat_interleave(arriving_E, output_size=n)
        place = shift + torch.arange(n, device=device)
        return Exchange(order, place, ends_L.int(), rows, sent, received, padding > 1, group)

    def send(self, values: Tensor) -> Tensor:
        """[A, ...] by `order` -> [rows, ...] in the groups of their experts. Collective."""
        arrived = _all_to_all(values, self.sent, self.received, self.group)
        shape = (self.rows, *values.shape[1:])
        grouped = arrived.new_zeros(shape) if self.padded else arrived.new_empty(shape)
        return grouped.index_copy_(0, self.place, arrived)

    def back(self, rows: Tensor) -> Tensor:
        """[rows, ...] -> [A, ...] in the order of the assignments. Collective."""
        values = _all_to_all(rows[self.place], self.received, self.sent, self.group)
        return torch.empty_like(values).index_copy_(0, self.order, values)


def _all_to_all(values: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None) -> Tensor:
    if not dist.is_initialized():
        return values
    arrived = values.new_empty(sum(received), *values.shape[1:])
    dist.all_to_all_single(arrived, values.contiguous(), received, sent, group=group)
    return arrived
