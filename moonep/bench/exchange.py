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
        rank_of: [A] the place of each assignment in `order`.
        place: [n] the row that each arriving row gets, n = sum(received).
        source: [rows] the arriving row that each row takes; n for padding, which is zero.
        ends: [L] int32 end row of each home expert's group.
        sent, received: rows to and from each rank.
    """

    order: Tensor
    rank_of: Tensor
    place: Tensor
    source: Tensor
    ends: Tensor
    sent: list[int]
    received: list[int]
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
        arriving_E = torch.empty_like(counts_E)
        _all_to_all(arriving_E, counts_E, [L] * R, [L] * R, group)
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
        source = _invert(place, torch.full((rows,), n, device=device))
        return Exchange(
            order, _invert(order, torch.empty_like(order)), place, source, ends_L.int(), sent, received, group
        )

    def send(self, values: Tensor) -> Tensor:
        """[A, ...] by `order` -> [rows, ...] in the groups of their experts. Collective."""
        n = len(self.place)
        arrived = values.new_empty(n + 1, *values.shape[1:])
        _all_to_all(arrived[:n], values, self.sent, self.received, self.group)
        arrived[n] = 0
        return arrived.index_select(0, self.source)

    def back(self, rows: Tensor) -> Tensor:
        """[rows, ...] -> [A, ...] in the order of the assignments. Collective."""
        values = rows.new_empty(len(self.order), *rows.shape[1:])
        _all_to_all(values, rows.index_select(0, self.place), self.received, self.sent, self.group)
        return values.index_select(0, self.rank_of)


def _invert(places: Tensor, result: Tensor) -> Tensor:
    """result[places[i]] = i."""
    return result.index_copy_(0, places, torch.arange(len(places), device=places.device))


def _all_to_all(
    arrived: Tensor, values: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> None:
    if dist.is_initialized():
        dist.all_to_all_single(arrived, values, received, sent, group=group)
    else:
        arrived.copy_(values)
