"""Checks that the layers share, and how a rank tells its peers that one failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from types import UnionType
from typing import Any

import torch

from moonep.arguments import INTEGERS, check_tensor, describe
from moonep.buffer import Buffer
from moonep.pool import ExpertPool


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of these words."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: given {value!r}, expected one of {', '.join(map(repr, choices))}")


def chosen(name: str, value: Any, choices: tuple[str, ...]) -> frozenset[str]:
    """True: all of these words; False: none; or some of them."""
    if isinstance(value, bool):
        return frozenset(choices if value else ())
    some = isinstance(value, Collection) and not isinstance(value, str | Mapping)
    if not some or not all(isinstance(word, str) and word in choices for word in value):
        words = ", ".join(map(repr, choices))
        raise ValueError(f"{name}: given {value!r}, expected True, False, or a collection of some of {words}")
    return frozenset(value)


def check_number(name: str, value: object, least: float | None = None) -> None:
    """A finite number; with `least`, that or more, and infinity too."""
    right = isinstance(value, int | float) and not isinstance(value, bool)
    right = right and (math.isfinite(value) if least is None else value >= least)  # type: ignore[arg-type,operator]
    if not right:
        expected = "a finite number" if least is None else f"a number >= {least:g}"
        raise ValueError(f"{name}: given {describe(value)}, expected {expected}")


def check_type(name: str, value: object, kind: type | UnionType, expected: str) -> None:
    """An object of this class, which `expected` describes."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}: given {type(value).__name__}, expected {expected}")


def check_live_pool(pool: object) -> None:
    """An ExpertPool that is not destroyed."""
    if not isinstance(pool, ExpertPool):
        raise ValueError(f"pool: given {type(pool).__name__}, expected an ExpertPool")
    pool._check_live()


def check_tokens(buffer: Buffer, hidden: object, route_weights: object, topk_experts: object) -> None:
    """What a dispatch of a live Buffer takes, in the words of `functional.dispatch`; ids are left to the Buffer."""
    d, device = buffer.dims, buffer._backend.device
    s = check_tensor("hidden", hidden, ("s", d.H), (buffer.dtype,), device, contiguous=False).shape[0]
    if s > d.S:
        raise ValueError(f"hidden: given {s} tokens, expected at most S = {d.S} of the Buffer")
    check_tensor("route_weights", route_weights, (s, d.K), (torch.float32,), device, contiguous=False)
    flat = isinstance(topk_experts, torch.Tensor) and topk_experts.dim() == 1
    check_tensor("topk_experts", topk_experts, (s * d.K,) if flat else (s, d.K), INTEGERS, device)


def check_or_refuse(buffer: Buffer, operation: str, check: Callable[..., None], *arguments: Any) -> None:
    """Check arguments of a Buffer's operation; peers that are in it raise PeerError when one is bad.

    Raises:
        ValueError: the Buffer is destroyed, or `check` raised it.
        PeerError, PeerTimeout: the Buffer was broken before.
    """
    try:
        buffer._check_live(operation)
        check(*arguments)
        return
    except ValueError as error:
        problem = str(error)
    buffer.refuse(operation, problem)
