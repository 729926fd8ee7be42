"""Weights of redundant experts into slots, and their gradients home. Several projections in one launch.

A table of int64 rows describes the projections; a program finds its projection and its piece of a row by division.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonep.dims import ceil_div, next_power_of_2
from moonep.environment import interpreting
from moonep.kernels.rounding import round_to

PIECE = 8192  # units of a row that a program moves at once: 32-bit words, elements, or bytes if not aligned
WARPS = 16  # much of a piece is on its way at once, so that few programs fill a link
# Columns of the table.
SOURCE, TARGET = tl.constexpr(0), tl.constexpr(1)
SOURCE_STRIDE, TARGET_STRIDE, RANK_STRIDE = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
SIZE, FIRST_PIECE = tl.constexpr(5), tl.constexpr(6)
NUM_COLUMNS = 7


@triton.jit
def _entry_of(table, piece, num_tables, NC: tl.constexpr):
    """The table row of the projection that a piece belongs to: the last whose first piece is not beyond it."""
    entry = table
    t = 1
    while t < num_tables:
        if piece >= tl.load(table + t * NC + FIRST_PIECE):
            entry = table + t * NC
        t += 1
    return entry


@triton.jit(do_not_specialize=["rank", "num_tables", "pieces", "num_programs"])
def _fill_slots_kernel(
    table, experts_to_copy, status, rank, num_tables, pieces, num_programs,
    R: tl.constexpr, B: tl.constexpr, RBP: tl.constexpr, L: tl.constexpr, PUSH: tl.constexpr, BW: tl.constexpr,
    NC: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Program p: every num_programs-th piece of each slot that is used here (or, if pushed, filled from here)."""
    if tl.load(status) != 0:
        return
    i = tl.arange(0, RBP)
    experts = tl.load(experts_to_copy + i, mask=i < R * B, other=-1)
    if PUSH:
        wanted = (experts >= 0) & (experts // L == rank)
    else:
        wanted = (experts >= 0) & (i // B == rank)
    slot = tl.min(tl.where(wanted, i, RBP), 0)
    while slot < RBP:
        expert = tl.sum(tl.where(i == slot, experts, 0), 0)
        r, b = slot // B, slot % B
        source_row = expert
        if PUSH:
            source_row = expert - rank * L
        piece = tl.program_id(0)
        while piece < pieces:
            entry = _entry_of(table, piece, num_tables, NC)
            source = tl.load(entry + SOURCE) + source_row.to(tl.int64) * tl.load(entry + SOURCE_STRIDE)
            target = tl.load(entry + TARGET) + b.to(tl.int64) * tl.load(entry + TARGET_STRIDE)
            if PUSH:
                target += r.to(tl.int64) * tl.load(entry + RANK_STRIDE)
            size = tl.load(entry + SIZE).to(tl.int32)
            o = (piece - tl.load(entry + FIRST_PIECE).to(tl.int32)) * BW + tl.arange(0, BW)
            if ALIGNED:
                size = tl.multiple_of(size, 4)
                source_words = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
                target_words = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
                tl.store(target_words + o, tl.load(source_words + o, mask=o < size), mask=o < size)
            else:
                source_bytes = source.to(tl.pointer_type(tl.int8))
                target_bytes = target.to(tl.pointer_type(tl.int8))
                tl.store(target_bytes + o, tl.load(source_bytes + o, mask=o < size), mask=o < size)
            piece += num_programs
        slot = tl.min(tl.where(wanted & (i > slot), i, RBP), 0)


@triton.jit(do_not_specialize=["rank", "num_tables", "pieces", "num_programs"])
def _add_slots_kernel(
    table, experts_to_copy, status, rank, num_tables, pieces, num_programs,
    R: tl.constexpr, B: tl.constexpr, RBP: tl.constexpr, L: tl.constexpr, BW: tl.constexpr, NC: tl.constexpr,
    BF16: tl.constexpr, ALIGNED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program p: every num_programs-th piece of each own expert with copies: add its slots, ascending (rank, slot)."""
    if tl.load(status) != 0:
        return
    i = tl.arange(0, RBP)
    experts = tl.load(experts_to_copy + i, mask=i < R * B, other=-1)
    own_experts = tl.where((experts >= 0) & (experts // L == rank), experts - rank * L, L)
    l = tl.min(own_experts, 0)
    while l < L:
        piece = tl.program_id(0)
        while piece < pieces:
            entry = _entry_of(table, piece, num_tables, NC)
            elements = tl.load(entry + SIZE).to(tl.int32)
            o = (piece - tl.load(entry + FIRST_PIECE).to(tl.int32)) * BW + tl.arange(0, BW)
            own = tl.load(entry + TARGET) + l.to(tl.int64) * tl.load(entry + TARGET_STRIDE)
            own = own.to(tl.pointer_type(tl.bfloat16)) if BF16 else own.to(tl.pointer_type(tl.float32))
            if ALIGNED:
                elements, own = tl.multiple_of(elements, 4), tl.multiple_of(own, 16)
            inside = o < elements
            total = tl.load(own + o, mask=inside, other=0.0).to(tl.float32)
            at = tl.min(tl.where(own_experts == l, i, RBP), 0)
            while at < RBP:
                address = tl.load(entry + SOURCE) + (at // B).to(tl.int64) * tl.load(entry + RANK_STRIDE)
                address += (at % B).to(tl.int64) * tl.load(entry + SOURCE_STRIDE)
                slot = address.to(tl.pointer_type(tl.float32))
                if ALIGNED:
                    slot = tl.multiple_of(slot, 16)
                total += tl.load(slot + o, mask=inside, other=0.0)
                at = tl.min(tl.where((own_experts == l) & (i > at), i, RBP), 0)
            if BF16:
                tl.store(own + o, round_to(total, tl.bfloat16, INTERPRET), mask=inside)
            else:
                tl.store(own + o, total, mask=inside)
            piece += num_programs
        l = tl.min(tl.where(own_experts > l, own_experts, L), 0)


@triton.jit(do_not_specialize=["rank", "num_tables", "pieces", "num_programs"])
def _clear_slots_kernel(
    table, experts_to_copy, status, rank, num_tables, pieces, num_programs,
    B: tl.constexpr, BP: tl.constexpr, BW: tl.constexpr, NC: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Program p: zero every num_programs-th piece of each slot of this rank that is used."""
    if tl.load(status) != 0:
        return
    i = tl.arange(0, BP)
    used = tl.load(experts_to_copy + rank * B + i, mask=i < B, other=-1) >= 0
    b = tl.min(tl.where(used, i, BP), 0)
    while b < BP:
        piece = tl.program_id(0)
        while piece < pieces:
            entry = _entry_of(table, piece, num_tables, NC)
            o = (piece - tl.load(entry + FIRST_PIECE).to(tl.int32)) * BW + tl.arange(0, BW)
            address = (
                tl.load(entry + SOURCE)
                + rank.to(tl.int64) * tl.load(entry + RANK_STRIDE)
                + b.to(tl.int64) * tl.load(entry + SOURCE_STRIDE)
            )
            slot = address.to(tl.pointer_type(tl.float32))
            size = tl.load(entry + SIZE).to(tl.int32)
            if ALIGNED:
                size, slot = tl.multiple_of(size, 4), tl.multiple_of(slot, 16)
            tl.store(slot + o, tl.zeros([BW], tl.float32), mask=o < size)
            piece += num_programs
        b = tl.min(tl.where(used & (i > b), i, BP), 0)


@dataclass(frozen=True, eq=False)
class Table:
    """Projections as a kernel sees them: [count] rows of int64, their pieces, whether all is 16-byte aligned."""

    tensor: Tensor
    count: int
    pieces: int
    aligned: bool


@functools.lru_cache(maxsize=1024)
def make_table(entries: tuple[tuple[int, ...], ...], aligned: bool, device: torch.device) -> Table:
    """The table of some projections. Kept: making one copies it to the device.

    Args:
        entries: (source, target, source row stride, target row stride, rank stride, size) of each projection:
            addresses and strides in bytes, size of a row in the kernel's unit.
        aligned: whether addresses, strides and row bytes are multiples of 16.
    """
    rows, pieces = [], 0
    for entry in entries:
        rows.append([*entry, pieces])
        pieces += ceil_div(entry[-1], PIECE)
    return Table(torch.tensor(rows, dtype=torch.int64, device=device), len(rows), pieces, aligned)


def fill_slots(
    table: Table, experts_to_copy: Tensor, status: Tensor, rank: int, L: int, push: bool, num_programs: int
) -> None:
    """Copy weights into slots (`weights_table`). Moves: an expert's bytes for each slot."""
    R, B = experts_to_copy.shape
    if B == 0:
        return
    programs = min(table.pieces, num_programs)
    _fill_slots_kernel[(programs,)](
        table.tensor, experts_to_copy, status, rank, table.count, table.pieces, programs,
        R=R, B=B, RBP=next_power_of_2(R * B), L=L, PUSH=push, BW=PIECE, NC=NUM_COLUMNS, ALIGNED=table.aligned,
        num_warps=WARPS,
    )  # fmt: skip


def add_slots(
    table: Table, experts_to_copy: Tensor, status: Tensor, rank: int, L: int, dtype: torch.dtype, num_programs: int
) -> None:
    """Add slots' gradients to own ones (`gradients_table`). Moves: an expert's fp32 bytes for each slot."""
    R, B = experts_to_copy.shape
    if B == 0:
        return
    programs = min(table.pieces, num_programs)
    _add_slots_kernel[(programs,)](
        table.tensor, experts_to_copy, status, rank, table.count, table.pieces, programs,
        R=R, B=B, RBP=next_power_of_2(R * B), L=L, BW=PIECE, NC=NUM_COLUMNS, BF16=dtype == torch.bfloat16,
        ALIGNED=table.aligned, INTERPRET=interpreting(), num_warps=WARPS,
    )  # fmt: skip


def clear_slots(table: Table, experts_to_copy: Tensor, status: Tensor, rank: int, num_programs: int) -> None:
    """Zero the used slots of this rank (`gradients_table`)."""
    B = experts_to_copy.shape[1]
    if B == 0:
        return
    programs = min(table.pieces, num_programs)
    _clear_slots_kernel[(programs,)](
        table.tensor, experts_to_copy, status, rank, table.count, table.pieces, programs,
        B=B, BP=next_power_of_2(B), BW=PIECE, NC=NUM_COLUMNS, ALIGNED=table.aligned, num_warps=WARPS,
    )  # fmt: skip


def weights_table(weights: Sequence[Tensor], slots: Sequence[Tensor], push: bool) -> Table:
    """weights: [E + B, ...] (or own [L, ...] if pushed) and slots: [B, ...] (or [R, B, ...]) of each projection."""
    entries = []
    for source, target in zip(weights, slots, strict=True):
        size = source.itemsize
        rank_stride, slot_stride = (target.stride(0), target.stride(1)) if push else (0, target.stride(0))
        strides = (source.stride(0) * size, slot_stride * size, rank_stride * size)
        entries.append((source.data_ptr(), target.data_ptr(), *strides, math.prod(source.shape[1:]) * size))
    if _all_divide(entries):
        return make_table(tuple((*entry[:-1], entry[-1] // 4) for entry in entries), True, weights[0].device)
    return make_table(tuple(entries), False, weights[0].device)


def gradients_table(own: Sequence[Tensor], slots: Sequence[Tensor]) -> Table:
    """own: [L, ...] and slots: [R, B, ...] fp32 of each projection."""
    entries = []
    for mine, every in zip(own, slots, strict=True):
        strides = (every.stride(1) * 4, mine.stride(0) * mine.itemsize, every.stride(0) * 4)
        entries.append((every.data_ptr(), mine.data_ptr(), *strides, math.prod(mine.shape[1:]) * mine.itemsize))
    aligned = _all_divide(entries)
    sizes = [math.prod(mine.shape[1:]) for mine in own]
    return make_table(tuple((*e[:-1], n) for e, n in zip(entries, sizes, strict=True)), aligned, own[0].device)


def _all_divide(entries: Sequence[tuple[int, ...]]) -> bool:
    return all(value % 16 == 0 for entry in entries for value in entry)
