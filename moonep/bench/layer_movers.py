"""The layer of the peers: rows moved by another library or by hand, through the very same grouped products.

A mover sends tokens into rows grouped by expert and sums them back, both as often as backward needs it. What it needs
around that (sorting, exchange of counts, waiting for them) is its own and is timed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moonep.bench.exchange import Exchange
from moonep.bench.peers import ALIGNMENT, DeepEPV2, World
from moonep.nn import grouped

Weights = Mapping[str, Tensor]
Grads = tuple[Weights, Collection[str]]


@dataclass(frozen=True)
class Sent:
    """What arrived: rows [n, H], their route weights [n] fp32, ends [L] int32 of the groups; a handle for the rest."""

    rows: Tensor
    weights: Tensor
    ends: Tensor
    handle: Any


class Mover(Protocol):
    """One way to move rows. Collective.

    Attributes:
        padding: groups have multiples of so many rows.
    """

    padding: int

    def send(self, hidden: Tensor, route_weights: Tensor, ids: Tensor) -> Sent:
        """[s, H], [s, K] fp32 and [s, K] int64 -> the rows of this rank's home experts."""

    def send_again(self, hidden: Tensor, handle: Any) -> Tensor:
        """[s, H] along the same ways -> [n, H]. The backward of `back`."""

    def back(self, rows: Tensor, handle: Any) -> Tensor:
        """[n, H] -> [s, H]: each token's rows, summed."""

    def back_with_weights(self, rows: Tensor, weights: Tensor, handle: Any) -> tuple[Tensor, Tensor]:
        """`back`, and [n] fp32 -> [s, K] fp32 of each assignment. The backward of `send`."""


class AllToAllMover:
    """Sort, exchange of counts, `all_to_all_single`: see `Exchange`.

    Args:
        E, R: see `moonep.dims`.
        padding: groups are padded to multiples of it.
        group: process group; None: all ranks.
    """

    def __init__(self, E: int, R: int, padding: int = 1, group: dist.ProcessGroup | None = None):
        self.E, self.R, self.padding, self.group = E, R, padding, group

    def send(self, hidden: Tensor, route_weights: Tensor, ids: Tensor) -> Sent:
        exchange = Exchange.plan(ids, self.E, self.R, self.padding, self.group)
        rows = exchange.send(hidden.index_select(0, exchange.order // ids.shape[1]))
        weights = exchange.send(route_weights.flatten()[exchange.order])
        return Sent(rows, weights, exchange.ends, (exchange, ids.shape))

    def send_again(self, hidden: Tensor, handle: Any) -> Tensor:
        exchange, (_, K) = handle
        return exchange.send(hidden.index_select(0, exchange.order // K))

    def back(self, rows: Tensor, handle: Any) -> Tensor:
        exchange, shape = handle
        return exchange.back(rows).view(*shape, rows.shape[1]).sum(1)

    def back_with_weights(self, rows: Tensor, weights: Tensor, handle: Any) -> tuple[Tensor, Tensor]:
        exchange, shape = handle
        return self.back(rows, handle), exchange.back(weights).view(shape)


class DeepEPMover:
    """DeepEP's `ElasticBuffer`, expanded: rows grouped by expert and aligned, padding rows zero.

    Raises:
        Unavailable: `deep_ep` cannot be imported, or is older.
    """

    padding = ALIGNMENT

    def __init__(self, world: World):
        self.peer = DeepEPV2(world)
        self.buffer, self.sms = self.peer.buffer, self.peer._sms

    def send(self, hidden: Tensor, route_weights: Tensor, ids: Tensor) -> Sent:
        w = self.peer.world
        rows, _, weights, handle, _ = self.buffer.dispatch(
            hidden,
            topk_idx=ids,
            topk_weights=route_weights,
            expert_alignment=ALIGNMENT,
            do_expand=True,
            do_zero_padding=True,
            num_experts=w.E,
            num_max_tokens_per_rank=w.S,
            **self.sms,
        )
        return Sent(rows, weights.flatten(), _aligned_ends(handle, rows.device), handle)

    def send_again(self, hidden: Tensor, handle: Any) -> Tensor:
        return self.buffer.dispatch(hidden, handle=handle, do_expand=True, do_zero_padding=True, **self.sms)[0]

    def back(self, rows: Tensor, handle: Any) -> Tensor:
        return self.buffer.combine(rows, handle, **self.sms)[0]

    def back_with_weights(self, rows: Tensor, weights: Tensor, handle: Any) -> tuple[Tensor, Tensor]:
        hidden, route_weights = self.buffer.combine(rows, handle, topk_weights=weights, **self.sms)[:2]
        return hidden, route_weights

    def close(self) -> None:
        """Give memory back."""
        self.peer.close()


def _aligned_ends(handle: Any, device: torch.device) -> Tensor:
    """[L] int32: end rows of DeepEP's groups. Its own sums may end before the padding of a group; these do not."""
    ends = getattr(handle, "psum_num_recv_tokens_per_expert", None)
    if ends is None:
        counts = torch.tensor(handle.num_recv_tokens_per_expert_list, device=device)
        ends = ((counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).cumsum(0)
    return ((ends + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).int()


def routed_experts(
    mover: Mover,
    weights: Weights,
    grads: Callable[[], Grads],
    hidden: Tensor,
    route_weights: Tensor,
    ids: Tensor,
) -> Tensor:
    """What `moonep.nn.RoutedExperts` computes, with a rank's home experts only. Collective, like its backward.

    Args:
        mover: brings the rows.
        weights: gate [L, H, F], up [L, H, F], down [L, F, H] in the dtype of the rows.
        grads: called in backward: fp32 tensors like `weights`, which weight gradients are added to, and the names of
            those that start from zero, whatever they hold.
        hidden: [s, H].
        route_weights: [s, K] fp32.
        ids: [s, K] int64, without masked assignments.

    Returns:
        [s, H]
    """
    return _RoutedExperts.apply(mover, weights, grads, hidden, route_weights, ids)


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mover: Mover,
        weights: Weights,
        grads: Callable[[], Grads],
        hidden: Tensor,
        route_weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        sent = mover.send(hidden, route_weights, ids)
        out, gate, up = grouped.compute(weights, sent.ends, sent.rows, sent.weights, token_padding=mover.padding)
        ctx.mover, ctx.weights, ctx.grads, ctx.handle = mover, weights, grads, sent.handle
        ctx.save_for_backward(sent.rows, sent.weights, sent.ends, gate, up)
        return mover.back(out, sent.handle)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, row_weights, ends, *products = ctx.saved_tensors
        grad_out = ctx.mover.send_again(grad_output, ctx.handle)
        weight_grads, fresh = ctx.grads()
        grads = grouped.differentiate(
            ctx.weights,
            weight_grads,
            ends,
            grad_out,
            rows,
            row_weights,
            products,
            in_place=True,
            fresh=fresh,
            token_padding=ctx.mover.padding,
        )
        return None, None, None, *ctx.mover.back_with_weights(*grads, ctx.handle), None
