"""Products of grouped rows with their experts' weights, on tensor cores, and weight gradients added up in fp32.

Rows of a group are cut into tiles of a fixed number of rows. Which group and rows a tile has is known on the device
only: `Tiles` lists them once a layer call, and every product walks the list. Operands come by tensor descriptors, which
the compiler turns into bulk copies where there are any.

A grid has as many programs as there can be tiles. Those without one end at once; those that end give room to kernels
that move weights meanwhile. Programs that stay would each have a fixed share of the tiles, and those that find no room
beside such a kernel would begin theirs when all others are through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moonep.dims import ROW_ALIGNMENT_BYTES, align_up, ceil_div, next_power_of_2
from moonep.environment import interpreting
from moonep.kernels.launch import launch, varying
from moonep.kernels.rounding import round_to

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Parts of `Tiles.bounds`, which are 0, where the tiles of the first groups end, and where all end.
FIRST_GROUPS, OTHER_GROUPS, ALL = (0, 1), (1, 2), (0, 2)
QUAD = tl.constexpr(4)  # fp32 numbers in 16 bytes: gradients of experts begin at multiples of them


@dataclass(frozen=True)
class Blocks:
    """Sizes of a program's tile, [rows, columns], of a step along the sum, and what it takes to run it."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@cache
def blocks_for(dtype: torch.dtype, major: int) -> Blocks:
    """What was fastest on sm_90; smaller where there is less shared memory, or no tensor core for the dtype.

    Args:
        dtype: of the operands.
        major: of the compute capability; 0: the interpreter.
    """
    if dtype == torch.float32 or not major:
        return Blocks(64, 64, 32, warps=4, stages=2)
    if major in (9, 10):
        return Blocks(128, 256, 64, warps=8, stages=4)
    return Blocks(128, 128, 32, warps=8, stages=3)


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of one layer call's groups.

    Attributes:
        offsets: [G] int32, end row of each group.
        tiles: [T, 2] int32: group and first row.
        bounds: [4] int32: 0, the tiles of the first groups, all tiles; how many groups have rows.
        live: [G] int32: those groups; what lies beyond is undefined.
        counters: [2] int32, 0 between launches: tiles that programs have drawn, and programs that are through.
        blocks: of all products.
    """

    offsets: Tensor
    tiles: Tensor
    bounds: Tensor
    live: Tensor
    counters: Tensor
    blocks: Blocks

    @staticmethod
    def lay(offsets: Tensor, capacity: int, split: int, blocks: Blocks) -> Tiles:
        """List the tiles of groups.

        Args:
            offsets: [G] int32.
            capacity: rows that the last offset can be at most.
            split: how many groups are the first ones.
            blocks: of the products.
        """
        G = len(offsets)
        most = capacity // blocks.rows + G
        tiles = torch.empty(most, 2, dtype=torch.int32, device=offsets.device)
        words = torch.empty(align_up(G, 4) + 8, dtype=torch.int32, device=offsets.device)
        bounds, counters, live = words[:4], words[4:6], words[8:]
        args = (offsets, tiles, bounds, live, counters, G, split)
        launch(_lay_tiles_kernel, (G,), args, varying(offsets), ROWS=blocks.rows, GP=next_power_of_2(G))
        return Tiles(offsets, tiles, bounds, live, counters, blocks)


@triton.jit(do_not_specialize=["G", "split"])
def _lay_tiles_kernel(
    offsets, tiles, bounds, live, counters, G, split, ROWS: tl.constexpr, GP: tl.constexpr
):  # fmt: skip
    """Program g lists the tiles of group g: ends 3, 3, 10 in tiles of 4 rows are (0, 0), (2, 3), (2, 7)."""
    g = tl.program_id(0)
    i = tl.arange(0, GP)
    end = tl.load(offsets + i, mask=i < G, other=0)
    begin = tl.load(offsets + i - 1, mask=(i > 0) & (i < G), other=0)
    count = (end - begin + (ROWS - 1)) // ROWS
    first = tl.sum(tl.where(i < g, count, 0), 0)
    mine = tl.sum(tl.where(i == g, count, 0), 0)
    row = tl.sum(tl.where(i == g, begin, 0), 0)
    if mine > 0:
        tl.store(live + tl.sum(tl.where((i < g) & (count > 0), 1, 0), 0), g)
    t = 0
    while t < mine:
        tl.store(tiles + 2 * (first + t), g)
        tl.store(tiles + 2 * (first + t) + 1, row + t * ROWS)
        t += 1
    if g == 0:
        tl.store(bounds, 0)
        tl.store(bounds + 1, tl.sum(tl.where(i < split, count, 0), 0))
        tl.store(bounds + 2, tl.sum(count, 0))
        tl.store(bounds + 3, tl.sum((count > 0).to(tl.int32), 0))
        tl.store(counters, 0)
        tl.store(counters + 1, 0)


@triton.jit
def _weight_block(weights, g, n, k, TRANSPOSED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """[BK, BN] of group g's weight, or of its transpose."""
    if TRANSPOSED:
        return weights.load([g, n, k]).reshape(BN, BK).T
    else:
        return weights.load([g, k, n]).reshape(BK, BN)


@triton.jit
def _add_product(a, b, sums, INTERPRET: tl.constexpr):
    """sums + a b. The interpreter cannot multiply bf16."""
    if INTERPRET:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def _multiply_kernel(
    x, weights, x_too, weights_too, y, offsets, tiles, bounds,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FROM: tl.constexpr, TO: tl.constexpr, TRANSPOSED: tl.constexpr, TWO: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program p: one tile, columns p % (N / BN). y = x W, or, if TWO, x W + x_too W_too."""
    columns = tl.cdiv(N, BN)
    t, n = tl.load(bounds + FROM) + tl.program_id(0) // columns, tl.program_id(0) % columns * BN
    if t >= tl.load(bounds + TO):
        return
    g = tl.load(tiles + 2 * t)
    row = tl.load(tiles + 2 * t + 1)
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        b = _weight_block(weights, g, n, k, TRANSPOSED, BN, BK)
        sums = _add_product(x.load([row, k]), b, sums, INTERPRET)
    if TWO:
        for k in range(0, K, BK):
            b = _weight_block(weights_too, g, n, k, TRANSPOSED, BN, BK)
            sums = _add_product(x_too.load([row, k]), b, sums, INTERPRET)
    rows, cols = row + tl.arange(0, BM), n + tl.arange(0, BN)
    keep = (rows < tl.load(offsets + g))[:, None] & (cols < N)[None, :]
    at = y + rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(at, round_to(sums, y.dtype.element_ty, INTERPRET), mask=keep)


@triton.jit(do_not_specialize=["quads", "fresh"])
def _add_weight_grad_kernel(
    x, grad_y, grad, offsets, quads, fresh,
    M: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (p, g): tile p of grad[g] += x^T grad_y over the rows of group g; WHOLE: they are multiples of BK.

    Groups below `fresh` are written, with or without rows.
    """
    g = tl.program_id(1)
    end = tl.load(offsets + g)
    begin = tl.load(offsets + g - 1, mask=g > 0, other=0)
    if (end <= begin) & (g >= fresh):
        return
    across: tl.constexpr = tl.cdiv(min(M, N), BN if N <= M else BM)  # the shorter side first: its operand stays in L2
    first, second = tl.program_id(0) % across, tl.program_id(0) // across
    if N <= M:
        m, n = second * BM, first * BN
    else:
        m, n = first * BM, second * BN
    sums = tl.zeros((BM, BN), tl.float32)
    whole = begin + (end - begin) // BK * BK
    for k in range(begin, whole, BK):
        sums = _add_product(x.load([k, m]).T, grad_y.load([k, n]), sums, INTERPRET)
    if not WHOLE:
        if whole < end:  # beyond the end are rows of others, or anything
            a, b = x.load([whole, m]), grad_y.load([whole, n])
            keep = (whole + tl.arange(0, BK) < end)[:, None]
            a, b = tl.where(keep, a, 0.0).to(a.dtype), tl.where(keep, b, 0.0).to(b.dtype)
            sums = _add_product(a.T, b, sums, INTERPRET)
    rows, cols = m + tl.arange(0, BM), n + tl.arange(0, BN)
    keep = (rows < M)[:, None] & (cols < N)[None, :]
    at = grad + g.to(tl.int64) * quads * QUAD + rows.to(tl.int64)[:, None] * N + cols[None, :]
    if g < fresh:
        tl.store(at, sums, mask=keep)
    else:
        # One program adds to an element: the sum does not depend on time. The L2 cache adds, and nobody waits for it.
        tl.atomic_add(at, sums, mask=keep, sem="relaxed")


def takes(operand: Tensor) -> bool:
    """Whether a tensor of rows or weights can be an operand: its dtype, dense rows, and addresses that 16 divides."""
    addresses = [operand.data_ptr(), *(n * operand.itemsize for n in operand.stride()[:-1])]
    dense = operand.stride(-1) == 1 and operand.stride(-2) == operand.shape[-1]
    return operand.dtype in DTYPES and dense and not any(n % ROW_ALIGNMENT_BYTES for n in addresses)


def multiply(
    tiles: Tiles,
    pairs: Sequence[tuple[Tensor, Tensor]],
    y: Tensor,
    *,
    transposed: bool = False,
    part: tuple[int, int] = ALL,
) -> None:
    """y = sum over pairs (x, W) of x W[g], for the rows of each group g. Sums in fp32, rounded once.

    Args:
        tiles: of the groups.
        pairs: one or two of x [C, K] and W [G, K, N], or, if `transposed`, [G, N, K].
        y: [C, N] dense. Rows past the last offset are not written.
        transposed: multiply with the transposes.
        part: FIRST_GROUPS, OTHER_GROUPS or ALL.
    """
    b = tiles.blocks
    x, weight = pairs[0]
    x_too, weight_too = pairs[-1]
    K, N = x.shape[1], y.shape[1]
    box = (b.columns, b.depth) if transposed else (b.depth, b.columns)
    programs = len(tiles.tiles) * ceil_div(N, b.columns)
    args = (
        _rows(x, b.rows, b.depth), _weights(weight, box), _rows(x_too, b.rows, b.depth), _weights(weight_too, box),
        y, tiles.offsets, tiles.tiles, tiles.bounds,
    )  # fmt: skip
    launch(
        _multiply_kernel,
        (programs,),
        args,
        varying(x, y, tiles.offsets),
        num_warps=b.warps,
        num_stages=b.stages,
        N=N,
        K=K,
        BM=b.rows,
        BN=b.columns,
        BK=b.depth,
        FROM=part[0],
        TO=part[1],
        TRANSPOSED=transposed,
        TWO=len(pairs) == 2,
        INTERPRET=interpreting(),
    )


def add_weight_grad(tiles: Tiles, x: Tensor, grad_y: Tensor, grad: Tensor, token_padding: int, fresh: int = 0) -> None:
    """grad[g] += x^T grad_y over the rows of each group g, in fp32. Groups without rows are not touched.

    Args:
        tiles: of the groups.
        x: [C, M]; grad_y: [C, N], the same dtype.
        grad: [G, M, N] fp32, each group's dense.
        token_padding: groups have multiples of so many rows.
        fresh: how many of the first groups start from zero, whatever `grad` holds.
    """
    assert takes(grad) and grad.dtype == torch.float32
    b = tiles.blocks
    G, M, N = grad.shape
    grid = (ceil_div(M, b.rows) * ceil_div(N, b.columns), G)
    quads = grad.stride(0) // QUAD.value
    args = (_rows(x, b.depth, b.rows), _rows(grad_y, b.depth, b.columns), grad, tiles.offsets, quads, fresh)
    launch(
        _add_weight_grad_kernel,
        grid,
        args,
        varying(x, tiles.offsets, quads),
        num_warps=b.warps,
        num_stages=b.stages,
        M=M,
        N=N,
        BM=b.rows,
        BN=b.columns,
        BK=b.depth,
        WHOLE=token_padding % b.depth == 0,
        INTERPRET=interpreting(),
    )


def _rows(rows: Tensor, height: int, width: int) -> TensorDescriptor:
    """Boxes of height x width of [C, n] rows."""
    return TensorDescriptor(rows, [max(len(rows), 1), rows.shape[1]], list(rows.stride()), [height, width])


def _weights(weight: Tensor, box: tuple[int, int]) -> TensorDescriptor:
    """Boxes of one group's weight [G, K, N], at any distance from the next."""
    return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [1, *box])
