"""Other ways to move rows, behind one interface: dispatch into rows grouped by expert, and combine them again.

A peer is called as its own documentation shows; what it needs around its calls to do what MoonEP's do (sort, permute,
exchange of counts) is part of the call that is timed. One that is not installed says so when it is opened.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import moonep
from moonep.bench.exchange import Exchange
from moonep.bench.hosts import Unavailable
from moonep.bench.measure import budget_arguments
from moonep.bench.settings import LOCAL_ALL, STRICT

ALIGNMENT = 128
_CHUNK = 8192


@dataclass(frozen=True)
class World:
    """What all peers are opened with. Letters: `moonep.dims`."""

    S: int
    H: int
    K: int
    E: int
    R: int
    rank: int
    sms: int | None
    device: torch.device
    timeout_s: float

    @property
    def L(self) -> int:
        """Home experts of a rank."""
        return self.E // self.R

    @property
    def dtype(self) -> torch.dtype:
        """Of the payload."""
        return torch.bfloat16


@dataclass(frozen=True)
class Batch:
    """One rank's input: x [S, H], weights [S, K] fp32, ids [S, K] int64, and the same in int32 for who takes it."""

    x: Tensor
    weights: Tensor
    ids: Tensor
    ids32: Tensor


class Peer(Protocol):
    """One way to move rows.

    Attributes:
        budget: how it counts SMs.
    """

    budget: str

    def dispatch(self, batch: Batch) -> Any:
        """Send rows; returns what `combine` and `rows` need."""

    def combine(self, sent: Any) -> Tensor:
        """Sum each token's rows back at its rank. -> [S, H]"""

    def rows(self, sent: Any) -> Tensor:
        """[n, H]: the rows that came here, one an assignment, and perhaps rows of zeros."""

    def close(self) -> None:
        """Give memory back."""


class MoonEP:
    """This library."""

    def __init__(self, world: World, budget: str):
        w, self.budget = world, budget
        sms = budget_arguments(w.sms, budget)
        self.buffer = moonep.Buffer(
            w.S,
            w.H,
            w.K,
            w.E,
            w.R,
            token_padding=ALIGNMENT,
            dtype=w.dtype,
            timeout_s=w.timeout_s,
            backend=w.device.type,
            **sms,
        )

    def dispatch(self, batch: Batch) -> Any:
        return self.buffer.dispatch(batch.x, batch.weights, batch.ids32, zero_copy=True, router_weights_zero_copy=True)

    def combine(self, sent: Any) -> Tensor:
        hidden, _, _, plan = sent
        return self.buffer.combine(plan, hidden, zero_copy=True)[0]

    def rows(self, sent: Any) -> Tensor:
        hidden, _, cu_seqlens, _ = sent
        return hidden[: int(cu_seqlens[-1])]

    def close(self) -> None:
        self.buffer.destroy()


class AllToAll:
    """What one writes by hand: sort by expert, exchange counts, `all_to_all_single`, sort. A row an assignment."""

    budget = STRICT

    def __init__(self, world: World):
        self.world = world

    def dispatch(self, batch: Batch) -> Any:
        exchange = Exchange.plan(batch.ids, self.world.E, self.world.R)
        rows = exchange.send(batch.x.index_select(0, exchange.order // self.world.K))
        return rows, exchange.send(batch.weights.flatten()[exchange.order]), exchange

    def combine(self, sent: Any) -> Tensor:
        rows, _, exchange = sent
        return exchange.back(rows).view(-1, self.world.K, self.world.H).sum(1)

    def rows(self, sent: Any) -> Tensor:
        return sent[0]

    def close(self) -> None:
        pass


class SymmetricAllToAll:
    """torch's symmetric memory: `all_to_all_vdev_2d` into rows grouped by expert and aligned, and its reverse."""

    budget = STRICT

    def __init__(self, world: World):
        import torch.distributed._symmetric_memory as symmetric

        w = self.world = world
        if w.device.type != "cuda" or not symmetric.is_nvshmem_available():
            raise Unavailable("all_to_all_vdev_2d needs CUDA and NVSHMEM, and torch finds none")
        symmetric.set_backend("NVSHMEM")
        self.group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        most = w.R * w.S * w.K + w.L * ALIGNMENT

        def make(*shape: int, dtype: torch.dtype) -> Tensor:
            tensor = symmetric.empty(*shape, dtype=dtype, device=w.device)
            symmetric.rendezvous(tensor, group=self.group)
            return tensor

        self.input, self.back = (make(w.S * w.K, w.H, dtype=w.dtype) for _ in range(2))
        self.received = make(most, w.H, dtype=w.dtype)
        self.splits = make(w.E, dtype=torch.int64)
        self.placed, self.returned = (make(2, w.E, dtype=torch.int64) for _ in range(2))

    def dispatch(self, batch: Batch) -> Any:
        w, flat = self.world, batch.ids.flatten()
        order = flat.argsort(stable=True)
        self.splits.copy_(torch.bincount(flat, minlength=w.E))
        torch.index_select(batch.x, 0, order // w.K, out=self.input)
        torch.ops.symm_mem.all_to_all_vdev_2d(
            self.input, self.received, self.splits, self.placed, self.group, major_align=ALIGNMENT
        )
        return order

    def combine(self, sent: Any) -> Tensor:
        w = self.world
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(self.received, self.back, self.placed, self.returned, self.group)
        by_assignment = torch.empty_like(self.back)
        by_assignment[sent] = self.back
        return by_assignment.view(-1, w.K, w.H).sum(1)

    def rows(self, sent: Any) -> Tensor:
        splits, offsets = self.placed.tolist()
        parts = [self.received[at : at + n] for n, at in zip(splits, offsets, strict=True)]
        return torch.cat(parts)

    def close(self) -> None:
        del self.input, self.back, self.received, self.splits, self.placed, self.returned


class DeepEPV1:
    """DeepEP's `Buffer`: a row a token and rank, then permuted to experts in torch."""

    budget = STRICT

    def __init__(self, world: World):
        deep_ep, self.world = _import("deep_ep"), world
        if world.sms is not None:
            deep_ep.Buffer.set_num_sms(world.sms)
        self.buffer = deep_ep.Buffer(dist.group.WORLD, int(2e9), 0)

    def dispatch(self, batch: Batch) -> Any:
        per_rank, per_rdma_rank, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(batch.ids, self.world.E)
        arrived, ids, weights, _, handle, _ = self.buffer.dispatch(
            batch.x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=batch.ids,
            topk_weights=batch.weights,
        )
        token, k = (ids >= 0).nonzero(as_tuple=True)
        order = ids[token, k].argsort(stable=True)
        token = token[order]
        return arrived[token], weights[token, k[order]], token, len(arrived), handle

    def combine(self, sent: Any) -> Tensor:
        rows, _, token, count, handle = sent
        partial = torch.zeros(count, self.world.H, dtype=rows.dtype, device=rows.device).index_add_(0, token, rows)
        return self.buffer.combine(partial, handle)[0]

    def rows(self, sent: Any) -> Tensor:
        return sent[0]

    def close(self) -> None:
        del self.buffer


class DeepEPV2:
    """DeepEP's `ElasticBuffer`, expanded: a row an assignment, grouped by expert, aligned, padded with zeros."""

    budget = STRICT

    def __init__(self, world: World):
        deep_ep, w = _import("deep_ep"), world
        self.world = w
        if not hasattr(deep_ep, "ElasticBuffer"):
            raise Unavailable("this deep_ep has no ElasticBuffer: it is a version before V2")
        self.buffer = deep_ep.ElasticBuffer(
            dist.group.WORLD,
            num_max_tokens_per_rank=w.S,
            hidden=w.H,
            num_topk=w.K,
            allow_hybrid_mode=False,
            explicitly_destroy=True,
            prefer_overlap_with_compute=False,
        )

    def dispatch(self, batch: Batch) -> Any:
        w = self.world
        rows, _, _, handle, _ = self.buffer.dispatch(
            batch.x,
            topk_idx=batch.ids,
            topk_weights=batch.weights,
            expert_alignment=ALIGNMENT,
            do_expand=True,
            do_zero_padding=True,
            num_experts=w.E,
            num_max_tokens_per_rank=w.S,
            **self._sms,
        )
        return rows, handle

    def combine(self, sent: Any) -> Tensor:
        rows, handle = sent
        return self.buffer.combine(rows, handle, **self._sms)[0]

    def rows(self, sent: Any) -> Tensor:
        return sent[0]

    def close(self) -> None:
        self.buffer.destroy()

    @property
    def _sms(self) -> dict[str, int]:
        return {} if self.world.sms is None else {"num_sms": self.world.sms}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} cannot be imported: {error}") from None


PEERS: dict[str, Callable[[World], Peer]] = {
    "moonep": lambda world: MoonEP(world, STRICT),
    "moonep_local_all": lambda world: MoonEP(world, LOCAL_ALL),
    "deepep_v2": DeepEPV2,
    "deepep_v1": DeepEPV1,
    "all_to_all": AllToAll,
    "all_to_all_vdev_2d": SymmetricAllToAll,
}
"""How each is opened. Collective; raises Unavailable where it does not exist."""


def column_sums(rows: Tensor) -> Tensor:
    """[H] float64 on the CPU: the sums of all rows, which are copies: exact but for the last bits."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for at in range(0, len(rows), _CHUNK):
        total += rows[at : at + _CHUNK].double().sum(0)
    return total.cpu()
