"""MoE: a complete mixture-of-experts layer. Replaces a dense feed-forward block on every rank of an EP group."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moonep.buffer import Buffer
from moonep.errors import NotCopied
from moonep.memory.peers import Peers
from moonep.nn.agreement import agree_on_buffer
from moonep.nn.beside import start
from moonep.nn.layer import SHARED
from moonep.nn.routed import RoutedExperts
from moonep.nn.router import Router
from moonep.nn.training import exclude_experts_from_ddp
from moonep.plan import Plan
from moonep.pool import ExpertPool

_OWN_PARAMETERS = (
    "the parameter that the layer was made with: give fully_shard "
    "ignored_params=set(moonep.nn.expert_parameters(model)), and load_state_dict no assign=True"
)


class MoE(NotCopied, nn.Module):
    """Router, experts spread over the ranks of a group, and optional shared experts. Collective, like its backward.

    Every rank computes the same number of rows whatever the router does; output and gradients equal those of the
    unbalanced layer up to rounding. `torch.compile` takes it without a graph break.

    Args:
        hidden, ffn: H and F. Experts are SwiGLU: down(silu(x gate) * (x up)).
        num_experts, top_k: E and K.
        group: process group; None: all ranks, or this process alone.
        max_tokens: S, the most tokens that a rank brings in one forward.
        buffer: use this Buffer, of these sizes (`B`, `token_padding`, `balance` and `backend` may then be left out);
            None: layers with equal sizes in a group share one.
        dtype: of rows and compute weights. Parameters are fp32.
        router: "softmax" or "sigmoid" scores.
        normalize_topk, route_scale: see `Router`.
        shared_ffn: width of a shared expert that sees every token; 0: none. Replicated, like the router: the caller
            sums both's gradients over ranks (an all-reduce). It computes in fp32, unlike the others; under
            `torch.autocast` in autocast's dtype, which is what GPUs are fast at.
        save: what backward needs: "rows" keeps the rows that arrived and the activations; "inputs" keeps the rows, and
            computes activations again; "tokens" keeps only the tokens, and dispatches them again, too.
        overlap: what runs beside other work: see `RoutedExperts`; "shared": on GPUs, the shared expert beside routed
            ones.
        B, token_padding, balance, timeout_s, backend: see `Buffer`.
        slot_set, slot_sets: which of how many slot sets this layer uses.
        seed: of the initial weights: equal for any number of ranks.

    All but `overlap`, `backend` and `timeout_s` must be equal on all ranks.

    Attributes:
        router: `Router`; replicated.
        shared: the shared expert, an nn.Module with fp32 weights gate [F', H], up [F', H], down [H, F'] (F' =
            `shared_ffn`); None: there is none. Replicated.
        buffer: the `Buffer` that it uses, which other layers may share: `destroy()` ends it for all of them.
        pool: the `ExpertPool` that its experts live in: compute weights [L, ...] `dtype` in `pool.local`.
        routed: the `RoutedExperts` between router and output.
        experts: nn.ParameterDict gate [L, H, F], up [L, H, F], down [L, F, H]: fp32 parameters of this rank's own
            experts. Gradients are sums over the tokens of all ranks after backward: do not reduce them over the group.
            DistributedDataParallel must leave them out: see `exclude_experts_from_ddp`.
        plan: the last forward's plan: `moe.plan.stats()`.
        aux_loss: [] the last forward's auxiliary loss, to be added to the loss with a coefficient.
        load: [E] int64, assignments of all ranks since `update_bias`.

    Raises:
        ValueError: a bad argument, one that differs between ranks, or a Buffer of other sizes.
        PeerError: another rank refused its arguments.
        PeerTimeout: another rank did not come.

    Visible when it returns: all ranks have made the layer; initial weights of experts reach peers with its first
    forward.
    """

    load: Tensor

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        top_k: int,
        group: dist.ProcessGroup | None = None,
        *,
        max_tokens: int,
        buffer: Buffer | None = None,
        dtype: torch.dtype = torch.bfloat16,
        router: str = "softmax",
        normalize_topk: bool = True,
        route_scale: float = 1.0,
        shared_ffn: int = 0,
        save: str = "rows",
        overlap: bool | Collection[str] = True,
        B: int | None = None,
        token_padding: int = 128,
        balance: str | float = "exact",
        slot_set: int = 0,
        slot_sets: int = 1,
        backend: str | None = None,
        timeout_s: float = 60.0,
        seed: int = 0,
    ):
        super().__init__()
        peers = Peers.of(group)
        given: dict[str, Any] = {"hidden": hidden, "ffn": ffn}
        given |= {"num_experts": num_experts, "top_k": top_k, "max_tokens": max_tokens}
        given |= {"dtype": dtype, "router": router, "normalize_topk": normalize_topk, "route_scale": route_scale}
        given |= {"shared_ffn": shared_ffn, "save": save, "B": B, "token_padding": token_padding, "balance": balance}
        given |= {"slot_set": slot_set, "slot_sets": slot_sets, "backend": backend, "seed": seed, "overlap": overlap}
        self.buffer = buffer = agree_on_buffer(peers, buffer, timeout_s, given)
        self.save, self.slot_set = save, slot_set
        self.router = Router(hidden, num_experts, top_k, score=router, normalize=normalize_topk, scale=route_scale)
        self.pool = ExpertPool(
            {"gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)},
            E=num_experts,
            B=buffer.dims.B,
            dtype=dtype,
            group=peers.group,
            grads=True,
            slot_sets=slot_sets,
            master=True,
            backend=buffer.backend,
            timeout_s=timeout_s,
        )
        self.routed = RoutedExperts(buffer, self.pool, overlap=overlap)
        self._beside = SHARED in self.routed.overlap  # a bool: compilers look at it
        self.experts = nn.ParameterDict(self.pool.master)
        device = self.pool.local["gate"].device
        self.router.to(device)
        self.shared = SharedExpert(hidden, shared_ffn).to(device) if shared_ffn else None
        self.register_buffer("load", torch.zeros(num_experts, dtype=torch.int64, device=device), persistent=False)
        self.aux_loss: Tensor | None = None
        exclude_experts_from_ddp(self)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Normal weights of variance 1 / fan-in (router: 0.02 standard deviation), the same for any number of ranks.

        Args:
            seed: an integer of 64 bits, equal on all ranks.

        Visible when it returns: to this rank; peers see them in the next forward.
        """
        generator = torch.Generator().manual_seed(seed)
        self.router.weight.copy_(torch.empty(self.router.weight.shape).normal_(0, 0.02, generator=generator))
        for parameter in self.experts.values():
            one = torch.empty(parameter.shape[1:])
            for e in range(self.pool.E):
                one.normal_(0, 1 / math.sqrt(one.shape[0]), generator=generator)
                if e // self.pool.L == self.pool.rank:
                    parameter[e % self.pool.L].copy_(one)
        if self.shared is not None:
            for linear in (self.shared.gate, self.shared.up, self.shared.down):
                scale = 1 / math.sqrt(linear.in_features)
                linear.weight.copy_(torch.empty(linear.weight.shape).normal_(0, scale, generator=generator))
        self.pool.sync()

    def forward(self, x: Tensor) -> Tensor:
        """Send tokens through router and experts. Collective, like its backward.

        Args:
            x: [..., H] any floating dtype, at most S tokens; their number may differ by rank and be 0.

        Returns:
            [..., H] in x's dtype.

        Raises:
            ValueError: a bad x, or `experts` are no longer the pool's parameters. Peers raise PeerError.
            PeerError, PeerTimeout: another rank failed or did not come; in backward, too.

        Visible when it returns: the output of this rank's tokens, `plan`, `aux_loss` and, in training, `load`. When
        backward returns, `experts[...].grad` are complete.
        """
        if not torch.compiler.is_compiling():
            for name, parameter in self.pool.master.items():
                if self.experts[name] is not parameter:
                    return self.routed.refuse(f"experts.{name}", self.experts[name], _OWN_PARAMETERS)
        H, S, device = self.buffer.dims.H, self.buffer.dims.S, self.load.device
        tensor = isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0
        if not tensor or x.shape[-1] != H or x.device.type != device.type:
            return self.routed.refuse("x", x, f"[..., {H}] of a floating dtype on {device}")
        tokens = x.reshape(-1, H)
        if not torch.compiler.is_compiling() and len(tokens) > S:
            return self.routed.refuse("x", x, f"at most max_tokens = {S} tokens")
        ids, weights, self.aux_loss = self.router(tokens)
        shared = None if self.shared is None else start(self.shared, tokens, beside=self._beside)
        payload = tokens.to(self.buffer.dtype)
        output, load = self.routed(payload, weights, ids, slot_set=self.slot_set, save=self.save)
        output = output.to(x.dtype)
        if shared is not None:
            output = output + shared()
        if self.training:
            self.load += load.sum(0)
        return output.view(x.shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        """What `to`, `half`, `to_empty` and the like call. Experts stay where they are, or it is an error."""
        probe = torch.empty(1, dtype=torch.float32, device=self.load.device)
        changed = fn(probe)
        if changed.data_ptr() != probe.data_ptr():
            raise ValueError(
                f"to: given {str(changed.dtype).removeprefix('torch.')} on {changed.device}, expected the float32 on "
                f"{probe.device} that parameters of experts are, in memory of the layer: choose `dtype` (of compute "
                "weights) and `backend` when making it, and convert other modules one by one"
            )
        return super()._apply(fn, recurse)

    @property
    def plan(self) -> Plan | None:
        """The last forward's plan, on this rank; None before the first."""
        return self.routed.plan

    def update_bias(self, rate: float = 1e-3) -> None:
        """Move the router's bias towards equal loads, by what all ranks routed since the last call; `load` is then 0.

        Every rank calls it and comes to the same bias; nothing is sent.

        Args:
            rate: how far an expert's bias moves.
        """
        self.router.update_bias(self.load, rate)
        self.load.zero_()


class SharedExpert(nn.Module):
    """A SwiGLU feed-forward that every token goes through."""

    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False, dtype=torch.float)
        self.up = nn.Linear(hidden, ffn, bias=False, dtype=torch.float)
        self.down = nn.Linear(ffn, hidden, bias=False, dtype=torch.float)

    def forward(self, x: Tensor) -> Tensor:
        """[s, H] -> [s, H], computed in the parameters' dtype or autocast's, returned in x's."""
        h = x.to(self.gate.weight.dtype)
        return self.down(nn.functional.silu(self.gate(h)) * self.up(h)).to(x.dtype)
