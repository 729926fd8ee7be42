"""Expert weights and gradients of a layer of the benchmarks: each can be made again from its seed, to compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from moonep.bench.gate import check_equal
from moonep.pool import ExpertPool

_NUM_PROJECTIONS = 3


def shapes(H: int, F: int) -> dict[str, tuple[int, int]]:
    """The projections of a SwiGLU expert."""
    return {"gate": (H, F), "up": (H, F), "down": (F, H)}


def expert_bytes(H: int, F: int, itemsize: int) -> int:
    """Bytes of one expert's weights or gradients."""
    return _NUM_PROJECTIONS * H * F * itemsize


class Weights:
    """The weights and gradients of one pool.

    Args:
        pool: with gradients; its projections are `shapes(H, F)`.
    """

    def __init__(self, pool: ExpertPool):
        self.pool = pool
        for name, local in pool.local.items():
            for i in range(pool.L):
                local[i].copy_(self._weight(name, pool.rank * pool.L + i))

    def clear_slots(self) -> None:
        """Fill this rank's slots with NaN."""
        for compact in self.pool.compact.values():
            compact[self.pool.L :].fill_(torch.nan)

    def check_slots(self, experts_to_copy_RB: Tensor) -> None:
        """This rank's slots hold the weights of the experts that the plan wants there."""
        for slot, expert in enumerate(experts_to_copy_RB[self.pool.rank].tolist()):
            if expert >= 0:
                for name, compact in self.pool.compact.items():
                    want = self._weight(name, expert)
                    check_equal(f"{name} weight of expert {expert} in slot {slot}", compact[self.pool.L + slot], want)

    def fill_gradients(self, experts_to_copy_RB: Tensor) -> None:
        """Put gradients into this rank's used slots, and zeros into its own experts' gradients."""
        pool = self.pool
        for name, grad in pool.compact_grad.items():
            grad[: pool.L].zero_()
            for slot, expert in enumerate(experts_to_copy_RB[pool.rank].tolist()):
                if expert >= 0:
                    grad[pool.L + slot].copy_(self._gradient(name, pool.rank, slot))

    def check_reduced(self, experts_to_copy_RB: Tensor) -> None:
        """Own experts' gradients are the sums of their slots', ascending (rank, slot); used slots are zero."""
        pool = self.pool
        sums: dict[tuple[str, int], Tensor] = {}
        for r, experts in enumerate(experts_to_copy_RB.tolist()):
            for slot, expert in enumerate(experts):
                for name in pool.compact_grad if expert >= 0 else ():
                    if r == pool.rank:
                        left = pool.compact_grad[name][pool.L + slot]
                        check_equal(f"{name} gradient left in slot {slot}", left, torch.zeros_like(left))
                    if expert // pool.L == pool.rank:
                        gradient = self._gradient(name, r, slot)
                        key = (name, expert)
                        sums[key] = sums[key] + gradient if key in sums else gradient
        for (name, expert), want in sums.items():
            check_equal(f"{name} gradient of expert {expert}", pool.local_grad[name][expert % pool.L], want)

    def _weight(self, name: str, expert: int) -> Tensor:
        local = self.pool.local[name]
        return self._random(local[0], 2 * (expert * _NUM_PROJECTIONS + self._index(name))).to(local.dtype)

    def _gradient(self, name: str, rank: int, slot: int) -> Tensor:
        grad = self.pool.local_grad[name]
        return self._random(grad[0], 2 * ((rank * self.pool.B + slot) * _NUM_PROJECTIONS + self._index(name)) + 1)

    def _index(self, name: str) -> int:
        return list(self.pool.local).index(name)

    def _random(self, like: Tensor, seed: int) -> Tensor:
        return torch.randn(like.shape, device=like.device, generator=torch.Generator(like.device).manual_seed(seed))
