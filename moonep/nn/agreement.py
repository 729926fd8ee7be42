"""What all ranks agree on before they make a `MoE`: its arguments, and the Buffer that it uses."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from moonep import backends
from moonep.arguments import check_count, check_slot_set
from moonep.buffer import PAYLOAD_DTYPES, Buffer
from moonep.dims import ROW_ALIGNMENT_BYTES, Balance, Dims
from moonep.memory.peers import Peers
from moonep.nn.checks import check_choice, check_number, check_type, chosen
from moonep.nn.layer import OVERLAP, SAVE
from moonep.nn.router import SCORES, check_choices

_NAMES = {"S": "max_tokens", "H": "hidden", "K": "top_k", "E": "num_experts", "num_ep_ranks": "group"}
_DEFAULTS = {"token_padding": 128, "balance": Balance(), "B": None, "backend": None}


def agree_on_buffer(peers: Peers, buffer: Buffer | None, timeout_s: float, given: dict[str, Any]) -> Buffer:
    """Check the arguments of a `MoE` on every rank and compare them. Collective.

    Args:
        peers: of the group.
        buffer, timeout_s: of `MoE`.
        given: its other arguments but `group`, by name.

    Returns:
        The Buffer; if none was given, the one that layers of these sizes share in the group, made when there is none.

    Raises:
        ValueError: a bad argument, or one that differs between ranks.
        PeerError, PeerTimeout: another rank refused its arguments or did not come.
    """
    sizes = ("max_tokens", "hidden", "top_k", "num_experts")
    settings = {name: given[name] for name in ("token_padding", "B", "dtype", "balance", "backend")}
    found: list[Buffer | None] = []  # held, so that it does not go away between asking and using it
    key = ("buffer", *(given[name] for name in sizes), *settings.items(), timeout_s)

    def check() -> dict[str, Any]:
        same = _check(peers, buffer, **given)
        shared = peers.shared.get(key)
        found.append(shared if shared is not None and shared.usable else None)
        named = None if buffer is None else f"Buffer {buffer.serial}"
        return {"buffer": named, **same, "_serial": 0 if found[0] is None else found[0].serial}

    serials = {reply["_serial"] for reply in peers.agree("MoE", timeout_s, check)}
    if buffer is not None:
        return buffer
    shared = found[0]
    if shared is None or len(serials) > 1:
        S, H, K, E = (given[name] for name in sizes)
        shared = Buffer(S, H, K, E, peers.size, group=peers.group, timeout_s=timeout_s, **settings)
        peers.shared[key] = shared
    return shared


def _check(
    peers: Peers,
    buffer: Buffer | None,
    *,
    hidden: int,
    ffn: int,
    num_experts: int,
    top_k: int,
    max_tokens: int,
    dtype: torch.dtype,
    router: str,
    normalize_topk: bool,
    route_scale: float,
    shared_ffn: int,
    save: str,
    B: int | None,
    token_padding: int,
    balance: str | float | Balance,
    slot_set: int,
    slot_sets: int,
    backend: str | None,
    seed: int,
    overlap: bool | Collection[str],
) -> dict[str, Any]:
    """Arguments of `MoE`. -> what must be equal on all ranks"""
    same: dict[str, Any] = {"hidden": hidden, "num_experts": num_experts, "top_k": top_k}
    check_choices(**same)
    for name, value in (("ffn", ffn), ("max_tokens", max_tokens), ("slot_sets", slot_sets)):
        check_count(name, value, 1)
    check_count("shared_ffn", shared_ffn, 0)
    check_slot_set(slot_set, slot_sets)
    check_choice("router", router, SCORES)
    check_choice("save", save, SAVE)
    chosen("overlap", overlap, OVERLAP)  # may differ by rank
    check_number("route_scale", route_scale)
    if not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed: given {seed!r}, expected an integer of 64 bits")
    settings: dict[str, Any] = {"token_padding": token_padding}
    settings |= {"balance": Balance.parse(balance), "B": B, "backend": backend}
    if buffer is None:
        d = _check_sizes(peers, hidden, num_experts, top_k, max_tokens, dtype, **settings)
    else:
        check_type("buffer", buffer, Buffer, "None or a Buffer")
        d = buffer.dims
        _compare(peers, buffer, {**same, "max_tokens": max_tokens, "dtype": dtype}, settings)
    if d.spills:
        raise ValueError(f"B: given {d.B}, expected at least {d.max_redundant}: every redundant expert has a gradient")
    same |= {"ffn": ffn, "max_tokens": max_tokens, "dtype": str(dtype), "token_padding": d.P, "B": d.B}
    same |= {"balance": repr(d.balance), "router": router, "normalize_topk": bool(normalize_topk)}
    same |= {"route_scale": float(route_scale), "shared_ffn": shared_ffn, "save": save, "seed": seed}
    return {**same, "slot_set": slot_set, "slot_sets": slot_sets}


def _check_sizes(
    peers: Peers,
    hidden: int,
    num_experts: int,
    top_k: int,
    max_tokens: int,
    dtype: torch.dtype,
    *,
    token_padding: int,
    balance: Balance,
    B: int | None,
    backend: str | None,
) -> Dims:
    """Sizes that a Buffer can be made of; its messages in the words of `MoE`."""
    backends.choose(backend)
    R = peers.size
    if num_experts % R:
        raise ValueError(f"num_experts: given {num_experts}, expected a multiple of the {R} ranks of the group")
    check_count("B", B, 0, optional=True)
    slots = num_experts // R if B is None else B
    d = Dims(S=max_tokens, K=top_k, E=num_experts, R=R, H=hidden, B=slots, P=token_padding, balance=balance)
    try:
        d.validate()
    except ValueError as error:
        name, said = str(error).split(": ", 1)
        raise ValueError(f"{_NAMES.get(name, name)}: {said}") from None
    if dtype not in PAYLOAD_DTYPES:
        raise ValueError(f"dtype: given {dtype}, expected one of {', '.join(map(str, PAYLOAD_DTYPES))}")
    row_bytes = hidden * dtype.itemsize
    if row_bytes % ROW_ALIGNMENT_BYTES:
        raise ValueError(
            f"hidden: given {hidden}, a row of {row_bytes} bytes; expected a multiple of {ROW_ALIGNMENT_BYTES} bytes"
        )
    return d


def _compare(peers: Peers, buffer: Buffer, sizes: dict[str, Any], settings: dict[str, Any]) -> None:
    """A layer's sizes, and settings that it does not leave at their defaults, are those of its Buffer."""
    d = buffer.dims
    if not buffer.usable:
        raise ValueError("buffer: given one that is destroyed or broken, expected a live one")
    if (peers.rank, peers.size) != (buffer.rank, d.R):
        raise ValueError(
            f"group: given one where this is rank {peers.rank} of {peers.size}, "
            f"expected rank {buffer.rank} of {d.R}, as in the Buffer's"
        )
    its = {"hidden": d.H, "num_experts": d.E, "top_k": d.K, "max_tokens": d.S, "dtype": buffer.dtype}
    its |= {"token_padding": d.P, "balance": d.balance, "B": d.B, "backend": buffer.backend}
    said = {name: value for name, value in settings.items() if value != _DEFAULTS[name]}
    for name, value in {**sizes, **said}.items():
        if value != its[name]:
            raise ValueError(f"{name}: given {value}, expected {its[name]}, as the Buffer")
