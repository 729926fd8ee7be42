"""Weight gradients on Hopper, by programs that do several tiles: one is added to memory while the next is multiplied.

    loader      1 warp: draws a tile, tells the others, and keeps STAGES steps of its operands on their way
    adders      TEAMS x 4 warps: multiply, each team its rows of the tile, put them into shared memory in parts, and let
                the copy engine add those to memory. While one team does that, the other can multiply

What decides is how many steps are on their way: additions make the loads late, so shared memory goes to operands.

Tiles are drawn from a counter, not shared out beforehand: other kernels may hold some multiprocessors for a while. They
get them, too: a program ends after TURNS tiles. Those that are drawn one after the other are neighbours, so what one
program loads the others find in the L2 cache.

`grouped._add_weight_grad_kernel` does the same with one program a tile, on any GPU: same results bit for bit.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton._C.libtriton import gluon_ir, ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moonep.dims import ceil_div, next_power_of_2
from moonep.kernels import grouped
from moonep.kernels.grouped import Tiles
from moonep.kernels.launch import launch, varying

STAGES, DEPTH = 8, 32  # steps along the sum whose operands are on their way, and the rows of one
TEAMS = gl.constexpr(2)
TILE = (64 * TEAMS.value, 256)  # an instruction multiplies 64 rows, of a team
PARTS, BUFFERS = gl.constexpr(8), gl.constexpr(2)  # of a tile's columns, and a team's parts that are on their way
TOLD = gl.constexpr(2)  # tiles that the loader can be ahead
TURNS = gl.constexpr(32)
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_CAN_ADD = hasattr(gluon_ir.GluonOpBuilder, "create_async_tma_reduce") and hasattr(ir, "DESCRIPTOR_REDUCE_KIND")


@builtin
def _add_shared_to_global(target, coord, source, _semantic=None):
    """As `tma.async_copy_shared_to_global`, but what is there is added to. Gluon has no name for it yet."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, coord, source.handle)


@gluon.jit
def _place(
    item, live, num_live, fresh, M: gl.constexpr, N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    GP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Group, first row and column of a tile. First come the fresh groups, then the others that have rows."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    ACROSS: gl.constexpr = (N + BN - 1) // BN
    DOWN: gl.constexpr = (M + BM - 1) // BM
    g = item // (ACROSS * DOWN)
    tile = item % (ACROSS * DOWN)
    if g >= fresh:
        i = gl.arange(0, GP, LANES)
        early = (i < num_live) & (gl.load(live + i, mask=i < num_live, other=0) < fresh)
        g = gl.load(live + g - fresh + gl.sum(early.to(gl.int32), 0))
    # The shorter side runs first.
    if N <= M:
        return g, tile // ACROSS * BM, tile % ACROSS * BN
    else:
        return g, tile % DOWN * BM, tile // DOWN * BN


@gluon.jit
def _rows_of(offsets, g):
    """Where the rows of a group begin and end."""
    return gl.load(offsets + g - 1, mask=g > 0, other=0), gl.load(offsets + g)


@gluon.jit
def _load(
    x, grad_y, offsets, live, num_live, counters, items, fresh, xs, ys, full, empty, told, said, heard,
    M: gl.constexpr, N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GP: gl.constexpr,
):  # fmt: skip
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    BYTES: gl.constexpr = BK * (BM + BN) * 2
    stage, parity = gl.to_tensor(0), gl.to_tensor(1)
    slot, slot_parity = gl.to_tensor(0), gl.to_tensor(1)
    item = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    while item < items:
        item = items
        if turn < TURNS:
            item = gl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
        turn += 1
        mbarrier.wait(heard.index(slot), slot_parity)
        told.index(slot).store(gl.full([32], item, gl.int32, LANES))
        mbarrier.arrive(said.index(slot), count=1)
        slot += 1
        if slot == TOLD:
            slot = gl.to_tensor(0)
            slot_parity ^= 1
        if item < items:
            g, m, n = _place(item, live, num_live, fresh, M, N, BM, BN, GP, 1)
            begin, end = _rows_of(offsets, g)
            k = begin
            while k < end:
                mbarrier.wait(empty.index(stage), parity)
                mbarrier.expect(full.index(stage), BYTES)
                for team in gl.static_range(TEAMS):
                    rows = xs.index(stage * TEAMS + team)
                    tma.async_copy_global_to_shared(x, [k, m + team * (BM // TEAMS)], full.index(stage), rows)
                tma.async_copy_global_to_shared(grad_y, [k, n], full.index(stage), ys.index(stage))
                stage += 1
                if stage == STAGES:
                    stage = gl.to_tensor(0)
                    parity ^= 1
                k += BK
    if gl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu") == gl.num_programs(0) - 1:  # all are through
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit
def _put(grad, g, m, n, part, buffer, fresh):
    """Write or add a part of a tile, in the background."""
    tma.store_wait(BUFFERS - 1)
    gl.thread_barrier()
    buffer.store(part.reshape([1, part.shape[0], part.shape[1]]))
    fence_async_shared()
    gl.thread_barrier()
    if g < fresh:
        tma.async_copy_shared_to_global(grad, [g, m, n], buffer)
    else:
        _add_shared_to_global(grad, [g, m, n], buffer)


@gluon.jit
def _halves(part):
    return part.reshape([part.shape[0], 2, part.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _put_quarters(grad, g, m, n, part, buffers, fresh):
    WIDTH: gl.constexpr = part.shape[1] // 4
    left, right = _halves(part)
    first, second = _halves(left)
    third, fourth = _halves(right)
    _put(grad, g, m, n, first, buffers.index(0), fresh)
    _put(grad, g, m, n + WIDTH, second, buffers.index(1), fresh)
    _put(grad, g, m, n + 2 * WIDTH, third, buffers.index(0), fresh)
    _put(grad, g, m, n + 3 * WIDTH, fourth, buffers.index(1), fresh)


@gluon.jit
def _add(
    grad, offsets, live, num_live, items, fresh, xs, ys, full, empty, told, said, heard, buffers,
    M: gl.constexpr, N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GP: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ROWS: gl.constexpr = BM // TEAMS
    stage, parity = gl.to_tensor(0), gl.to_tensor(0)
    slot, slot_parity = gl.to_tensor(0), gl.to_tensor(0)
    before = gl.to_tensor(0)
    item = gl.to_tensor(0)
    while item < items:
        mbarrier.wait(said.index(slot), slot_parity)
        item = gl.max(told.index(slot).load(LANES), 0)
        mbarrier.arrive(heard.index(slot), count=1)
        slot += 1
        if slot == TOLD:
            slot = gl.to_tensor(0)
            slot_parity ^= 1
        if item < items:
            g, m, n = _place(item, live, num_live, fresh, M, N, BM, BN, GP, 4)
            begin, end = _rows_of(offsets, g)
            sums = gl.zeros([ROWS, BN], gl.float32, SUMS)
            k = begin
            while k < end:
                mbarrier.wait(full.index(stage), parity)
                rows = xs.index(stage * TEAMS + TEAM).permute((1, 0))
                token = warpgroup_mma(rows, ys.index(stage), sums, is_async=True)
                sums = warpgroup_mma_wait(1, deps=[token])
                mbarrier.arrive(empty.index(before), count=1, pred=k > begin)
                before = stage
                stage += 1
                if stage == STAGES:
                    stage = gl.to_tensor(0)
                    parity ^= 1
                k += BK
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(empty.index(before), count=1, pred=begin < end)
            left, right = _halves(sums)
            _put_quarters(grad, g, m + TEAM * ROWS, n, left, buffers, fresh)
            _put_quarters(grad, g, m + TEAM * ROWS, n + BN // 2, right, buffers, fresh)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["fresh"])
def _add_weight_grads_kernel(
    x, grad_y, grad, offsets, live, bounds, counters, fresh,
    M: gl.constexpr, N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GP: gl.constexpr,
):  # fmt: skip
    """grad[g] += x^T grad_y over the rows of group g; groups below `fresh` are written, with or without rows."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, GP, LANES)
    num_live = gl.load(bounds + 3)
    later = (i < num_live) & (gl.load(live + i, mask=i < num_live, other=0) >= fresh)
    TILES: gl.constexpr = ((N + BN - 1) // BN) * ((M + BM - 1) // BM)
    items = (fresh + gl.sum(later.to(gl.int32), 0)) * TILES
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * TEAMS, BK, BM // TEAMS], x.layout)
    ys = gl.allocate_shared_memory(x.dtype, [STAGES, BK, BN], grad_y.layout)
    buffers = gl.allocate_shared_memory(gl.float32, [BUFFERS, 1, BM // TEAMS, BN // PARTS], grad.layout)
    buffers_too = gl.allocate_shared_memory(gl.float32, [BUFFERS, 1, BM // TEAMS, BN // PARTS], grad.layout)
    told = gl.allocate_shared_memory(gl.int32, [TOLD, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    said = gl.allocate_shared_memory(gl.int64, [TOLD, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [TOLD, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=TEAMS)
    for s in gl.static_range(TOLD):
        mbarrier.init(said.index(s), count=1)
        mbarrier.init(heard.index(s), count=TEAMS)
    gl.warp_specialize(
        [
            (
                _add,
                (
                    grad, offsets, live, num_live, items, fresh, xs, ys, full, empty, told, said, heard, buffers,
                    M, N, BM, BN, BK, STAGES, GP, 0,
                ),
            ),
            (
                _add,
                (
                    grad, offsets, live, num_live, items, fresh, xs, ys, full, empty, told, said, heard, buffers_too,
                    M, N, BM, BN, BK, STAGES, GP, 1,
                ),
            ),
            (
                _load,
                (
                    x, grad_y, offsets, live, num_live, counters, items, fresh, xs, ys, full, empty, told, said, heard,
                    M, N, BM, BN, BK, STAGES, GP,
                ),
            ),
        ],
        [4, 1],
        [216, 40],
    )  # fmt: skip


def takes(tiles: Tiles, x: Tensor, token_padding: int) -> bool:
    """Whether rows can be multiplied by this kernel, on Hopper: two bytes a value, its tile, groups of whole steps."""
    b = tiles.blocks
    return x.dtype in DTYPES and (b.rows, b.columns) == TILE and not token_padding % b.depth and _CAN_ADD


def add_weight_grad(tiles: Tiles, x: Tensor, grad_y: Tensor, grad: Tensor, token_padding: int, fresh: int = 0) -> None:
    """`grouped.add_weight_grad`, for what `takes` takes."""
    assert takes(tiles, x, token_padding) and grouped.takes(grad) and grad.dtype == torch.float32
    b, (G, M, N) = tiles.blocks, grad.shape
    rows = b.rows // TEAMS.value
    args = (
        _boxes(x, [DEPTH, rows]), _boxes(grad_y, [DEPTH, b.columns]), _boxes(grad, [1, rows, b.columns // PARTS.value]),
        tiles.offsets, tiles.live, tiles.bounds, tiles.counters, fresh,
    )  # fmt: skip
    launch(
        _add_weight_grads_kernel,
        (ceil_div(G * ceil_div(M, b.rows) * ceil_div(N, b.columns), TURNS.value),),
        args,
        varying(x, tiles.offsets),
        num_warps=4,
        M=M,
        N=N,
        BM=b.rows,
        BN=b.columns,
        BK=DEPTH,
        STAGES=STAGES,
        GP=max(32, next_power_of_2(G)),
    )


def _boxes(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    shape = [max(tensor.shape[0], 1), *tensor.shape[1:]]
    return TensorDescriptor(tensor, shape, list(tensor.stride()), box, _layout(tensor.dtype, tuple(box)))


@cache
def _layout(dtype: torch.dtype, box: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), DTYPES.get(dtype, gl.float32))
