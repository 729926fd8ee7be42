"""Checks of arguments: each raises a ValueError that names the argument, what was given and what was expected."""

from __future__ import annotations

import torch
from torch import Tensor

from moonep.dims import ROW_ALIGNMENT_BYTES

INTEGERS = (torch.int32, torch.int64)


def describe(tensor: object) -> str:
    """What was given, in a few words."""
    if not isinstance(tensor, Tensor):
        return " ".join(f"{type(tensor).__name__} {tensor!r}".split())[:80]
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}{layout}"


def check_count(name: str, value: object, least: int, optional: bool = False) -> None:
    """An integer >= least; None too if optional."""
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: given {value!r}, expected {'None or ' if optional else ''}an integer >= {least}")


def check_seconds(name: str, value: object) -> None:
    """A finite number above 0."""
    right = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
    if not right:
        raise ValueError(f"{name}: given {str(value)[:40]}, expected a number of seconds above 0")


def check_tensor(
    name: str,
    tensor: object,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    contiguous: bool = True,
) -> Tensor:
    """Check type, shape (a string stands for any size), dtype, device and layout."""
    if (
        isinstance(tensor, Tensor)
        and (tensor.shape == shape or _fits(tensor.shape, shape))
        and tensor.dtype in dtypes
        and (tensor.device == device or tensor.device.type == device.type)
        and (not contiguous or tensor.is_contiguous())
    ):
        return tensor
    wanted = " or ".join(str(t).removeprefix("torch.") for t in dtypes)
    expected = f"[{', '.join(map(str, shape))}] {wanted} on {device}{', contiguous' if contiguous else ''}"
    raise ValueError(f"{name}: given {describe(tensor)}, expected {expected}")


def _fits(shape: tuple[int, ...], wanted: tuple[int | str, ...]) -> bool:
    """Whether a shape is as wanted, where a string stands for any size."""
    if len(shape) != len(wanted):
        return False
    return all([isinstance(want, str) or got == want for got, want in zip(shape, wanted, strict=True)])


def align(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, at an address that 16 divides: kernels move 16 bytes at a time."""
    address = tensor.data_ptr()  # 0 if it is empty, wherever it begins
    return tensor if address and address % ROW_ALIGNMENT_BYTES == 0 else tensor.clone()


def check_topk(topk: object, num_tokens: int, K: int, device: torch.device) -> Tensor:
    """`topk_experts_sk` as [s, K]."""
    if isinstance(topk, Tensor) and topk.dim() == 1:
        topk = check_tensor("topk_experts_sk", topk, (num_tokens * K,), INTEGERS, device).view(num_tokens, K)
    return check_tensor("topk_experts_sk", topk, (num_tokens, K), INTEGERS, device)


def check_ids(ids: Tensor, E: int) -> None:
    """Every expert id is in [-1, E)."""
    if ids.numel() and (int(ids.min()) < -1 or int(ids.max()) >= E):
        raise ValueError(
            f"topk_experts_sk: given ids from {int(ids.min())} to {int(ids.max())}, "
            f"expected -1 (no assignment) or 0 to {E - 1}"
        )


def check_counts(given: Tensor, counted: Tensor) -> None:
    """`tokens_per_expert` agrees with the ids."""
    differs = (given != counted).nonzero()
    if len(differs):
        e = int(differs[0])
        raise ValueError(
            f"tokens_per_expert: given {int(given[e])} for expert {e}, expected {int(counted[e])}, "
            "the number of its assignments in topk_experts_sk"
        )


def check_slot_set(slot_set: object, slot_sets: int) -> None:
    """One of a pool's slot sets."""
    if not isinstance(slot_set, int) or isinstance(slot_set, bool) or not 0 <= slot_set < slot_sets:
        raise ValueError(f"slot_set: given {slot_set!r}, expected 0 to {slot_sets - 1}")
