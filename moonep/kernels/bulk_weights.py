"""Weights into slots, and gradients home, by bulk copies: Hopper and newer, large experts. A projection at a time.

A program moves boxes of 16 KB through shared memory; the compiler keeps several loads on their way. A few programs fill
a link that way, which leaves the others to the experts that work meanwhile. What the portable kernels of
`moonep.kernels.weights` give, these give bit for bit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moonep.dims import ROW_ALIGNMENT_BYTES, ceil_div, next_power_of_2
from moonep.kernels.launch import launch
from moonep.memory.strides import dense_strides

WIDTH = 256  # 32-bit numbers in a line of a box
LINES = 16  # of a box
STAGES, ADD_STAGES = 8, 6  # turns of a program that are on their way or being written: of one box, or of two
_WARPS = 4
_MIN_BOXES = 64  # of an expert: smaller ones are moved as fast by loads and stores


@triton.jit(do_not_specialize=["rank", "programs"])
def _fill_slots_bulk_kernel(
    weights, slots, experts_to_copy, status, rank, programs,
    R: tl.constexpr, B: tl.constexpr, RBP: tl.constexpr, BOXES: tl.constexpr, LINES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program p: every programs-th box of all slots that this rank uses."""
    if tl.load(status) != 0:
        return
    i = tl.arange(0, RBP)
    experts = tl.load(experts_to_copy + i, mask=i < R * B, other=-1)
    used = (experts >= 0) & (i // B == rank)
    number = tl.cumsum(used.to(tl.int32), 0) - 1
    for item in tl.range(tl.program_id(0), tl.sum(used.to(tl.int32), 0) * BOXES, programs, num_stages=STAGES):
        chosen = used & (number == item // BOXES)
        expert, slot = tl.sum(tl.where(chosen, experts, 0), 0), tl.sum(tl.where(chosen, i % B, 0), 0)
        line = item % BOXES * LINES
        slots.store([slot, line, 0], weights.load([expert, line, 0]))


@triton.jit(do_not_specialize=["rank", "programs"])
def _add_slots_bulk_kernel(
    own, slots, experts_to_copy, status, rank, programs,
    R: tl.constexpr, B: tl.constexpr, RBP: tl.constexpr, L: tl.constexpr, BOXES: tl.constexpr, LINES: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p: every programs-th box of each own expert with copies. Own + first copy + second, by (rank, slot)."""
    if tl.load(status) != 0:
        return
    i = tl.arange(0, RBP)
    experts = tl.load(experts_to_copy + i, mask=i < R * B, other=-1)
    own_experts = tl.where((experts >= 0) & (experts // L == rank), experts - rank * L, L)
    boxes = (BOXES - tl.program_id(0) + programs - 1) // programs
    l = tl.min(own_experts, 0)
    while l < L:
        chosen = own_experts == l
        number = tl.cumsum(chosen.to(tl.int32), 0) - 1
        copies = tl.sum(chosen.to(tl.int32), 0)
        total = tl.zeros((1, LINES, WIDTH), tl.float32)
        for item in tl.range(0, boxes * copies, num_stages=STAGES):
            copy = item % copies
            at = tl.sum(tl.where(chosen & (number == copy), i, 0), 0)
            line = (tl.program_id(0) + item // copies * programs) * LINES
            before = own.load([l, line, 0])
            arrived = slots.load([at // B, at % B, line, 0]).reshape(1, LINES, WIDTH)
            total = tl.where(copy == 0, before, total) + arrived
            if copy == copies - 1:
                own.store([l, line, 0], total)
        l = tl.min(tl.where(own_experts > l, own_experts, L), 0)


def takes(rows: Tensor, slots: Tensor) -> bool:
    """Whether these kernels move such weights or gradients: whole lines, and enough of them.

    Args:
        rows: [n, *row], each dense: all experts' weights, or own gradients (then fp32).
        slots: [..., *row].
    """
    row = rows.shape[1:]
    size, odd = divmod(math.prod(row) * rows.itemsize, 4 * WIDTH)
    if odd or size < _MIN_BOXES * LINES or (slots.dtype == torch.float32 and rows.dtype != torch.float32):
        return False
    for tensor in (rows, slots):
        leading = tensor.dim() - len(row)
        steps = [stride * tensor.itemsize for stride in tensor.stride()[:leading]]
        if tensor.stride()[leading:] != dense_strides(row, tensor.dtype, None) or not tensor.numel():
            return False
        if any(n % ROW_ALIGNMENT_BYTES for n in (tensor.data_ptr(), *steps)):
            return False
    return True


def fill_slots(
    weights: Tensor, slots: Tensor, experts_to_copy: Tensor, status: Tensor, rank: int, num_programs: int
) -> None:
    """Copy weights of this rank's redundant experts from their homes.

    Args:
        weights: [E + B, *row] seen by all; slots: [B, *row] of this rank.
        experts_to_copy: [R, B] int32.
        status: [1] int32; nothing is done unless it is 0.
        rank: this rank.
        num_programs: most programs, one a multiprocessor.

    Moves: a row's bytes for each slot in use.
    """
    R, B = experts_to_copy.shape
    words, box = _words(weights, 1, torch.int32), [1, LINES, WIDTH]
    boxes = ceil_div(words.shape[1], LINES)
    programs = min(boxes, num_programs)
    target = _descriptor(_words(slots, 1, torch.int32), box)
    launch(
        _fill_slots_bulk_kernel, (programs,),
        (_descriptor(words, box), target, experts_to_copy, status, rank, programs),
        num_warps=_WARPS, R=R, B=B, RBP=next_power_of_2(R * B), BOXES=boxes, LINES=LINES, STAGES=STAGES,
    )  # fmt: skip


def add_slots(
    own: Tensor, slots: Tensor, experts_to_copy: Tensor, status: Tensor, rank: int, num_programs: int
) -> None:
    """Add slots' gradients to own ones, ascending (rank, slot), in fp32.

    Args:
        own: [L, *row] fp32; slots: [R, B, *row] fp32 of all ranks.
        experts_to_copy, status, rank, num_programs: of `fill_slots`.

    Moves: a row's bytes for each slot that has an own expert, over a link; the row here once more, and back.
    """
    R, B = experts_to_copy.shape
    words = _words(own, 1, torch.float32)
    boxes = ceil_div(words.shape[1], LINES)
    programs = min(boxes, num_programs)
    every = _descriptor(_words(slots, 2, torch.float32), [1, 1, LINES, WIDTH])
    launch(
        _add_slots_bulk_kernel, (programs,),
        (_descriptor(words, [1, LINES, WIDTH]), every, experts_to_copy, status, rank, programs),
        num_warps=_WARPS, R=R, B=B, RBP=next_power_of_2(R * B), L=len(own), BOXES=boxes, LINES=LINES, WIDTH=WIDTH,
        STAGES=ADD_STAGES,
    )  # fmt: skip


def _words(rows: Tensor, leading: int, dtype: torch.dtype) -> Tensor:
    """Rows as lines of 32-bit numbers: [leading dimensions, lines, WIDTH]."""
    size = rows.itemsize
    lines = math.prod(rows.shape[leading:]) * size // (4 * WIDTH)
    flat = rows.as_strided((rows.storage_offset() + _extent(rows),), (1,), 0).view(dtype)
    strides = [stride * size // 4 for stride in rows.stride()[:leading]]
    return flat.as_strided(
        (*rows.shape[:leading], lines, WIDTH), (*strides, WIDTH, 1), rows.storage_offset() * size // 4
    )


def _extent(rows: Tensor) -> int:
    """Elements from the first to the end of the last."""
    return 1 + sum((n - 1) * stride for n, stride in zip(rows.shape, rows.stride(), strict=True))


def _descriptor(words: Tensor, box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(words, list(words.shape), list(words.stride()), box)
