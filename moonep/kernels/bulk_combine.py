"""Combine by bulk copies, in one launch: push the partial sums of the peers' tokens, finish this rank's tokens.

Programs [0, N) sum the rows that peers' tokens have here, chunk by chunk, and write each sum into its rank's staging.
The others sum the rows that this rank's tokens have here, wait for the chunk's partial sums from the peers, and add all
up in rank order. In each program one warp loads rows into slots of shared memory, and two teams of warps sum half a row
each: while one waits or stores, the other adds.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from moonep.dims import Dims, next_power_of_2
from moonep.kernels import bulk
from moonep.kernels.barrier import Signals
from moonep.kernels.bulk import (
    MAX_CHUNKS_,
    PHASE,
    RowShape,
    await_flag,
    count_sender,
    end_launch,
    raise_flag,
    read_status,
)
from moonep.kernels.bulk_dispatch import ROW, _load_entries
from moonep.kernels.launch import Given, Launch
from moonep.plan import ARRIVAL_SHIFT, INT32_MIN

TEAMS = gl.constexpr(2)
TEAM_REGISTERS, LOADER_REGISTERS = gl.constexpr(168), gl.constexpr(40)
SHIFT = gl.constexpr(ARRIVAL_SHIFT)
MASKED = gl.constexpr(INT32_MIN)


@gluon.jit
def _columns(LAYOUT: gl.constexpr, OUTER: gl.constexpr, INNER: gl.constexpr):
    """[1, 1, OUTER, INNER]: the position of each element within half a row."""
    outer = gl.arange(0, OUTER, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    inner = gl.arange(0, INNER, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    outer = gl.expand_dims(gl.expand_dims(gl.expand_dims(outer, 0), 1), 3)
    inner = gl.expand_dims(gl.expand_dims(gl.expand_dims(inner, 0), 1), 2)
    return outer * INNER + inner


@gluon.jit
def _load_token(
    rows, entries, smem, full, empty, slot, parity, K: gl.constexpr, BYTES: gl.constexpr
):  # fmt: skip
    """Load a token's rows into the next slots, in k order. `parity` turns with each round of the slots."""
    for k in gl.static_range(K):
        if entries[k] >= 0:
            mbarrier.wait(empty.index(slot), parity ^ 1)
            mbarrier.expect(full.index(slot), BYTES)
            tma.async_copy_global_to_shared(rows, [0, entries[k] & ROW, 0, 0], full.index(slot), smem.index(slot))
            slot += 1
            if slot == smem.shape[0]:
                slot = gl.to_tensor(0)
                parity ^= 1
    return slot, parity


@gluon.jit
def _sum_rows(
    entries, smem, full, empty, slot, parity, TEAM: gl.constexpr, LAYOUT: gl.constexpr, K: gl.constexpr,
    HALF: gl.constexpr, INNER: gl.constexpr,
):  # fmt: skip
    """The sum of this team's half of a token's rows, fp32, k order; then the next slot and its parity."""
    total = gl.zeros([1, 1, HALF, INNER], gl.float32, LAYOUT)
    for k in gl.static_range(K):
        if entries[k] >= 0:
            mbarrier.wait(full.index(slot), parity)
            total += smem.index(slot).slice(TEAM * HALF, HALF, dim=2).load(LAYOUT).to(gl.float32)
            mbarrier.arrive(empty.index(slot), count=1)
            slot += 1
            if slot == smem.shape[0]:
                slot = gl.to_tensor(0)
                parity ^= 1
    return total, slot, parity


@gluon.jit
def _largest(entries, K: gl.constexpr):
    largest = entries[0]
    for k in gl.static_range(1, K):
        largest = gl.maximum(largest, entries[k])
    return largest


@gluon.jit
def _count_blocks(tokens, rank, R: gl.constexpr, CHUNK: gl.constexpr):
    """Blocks of what goes to peers: chunks of the peer with most tokens (one at least) x peers."""
    most = 0
    for r in gl.static_range(R):
        most = gl.maximum(most, gl.where(rank == r, 0, gl.load(tokens + r)))
    return gl.maximum((most + CHUNK - 1) // CHUNK, 1) * (R - 1)


@gluon.jit
def _pushed_entries(
    arrivals, u, units, rank, N: gl.constexpr, R: gl.constexpr, S: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr
):  # fmt: skip
    """The arrivals of unit u of this program: a token of one block; and its source, token and chunk."""
    UNITS: gl.constexpr = (CHUNK + N - 1) // N  # of a block
    block = u // UNITS
    within = u % UNITS * N + gl.program_id(0)
    chunk = block // (R - 1)
    source = (rank + 1 + block % (R - 1)) % R
    token = chunk * CHUNK + within
    wanted = (u < units) & (within < CHUNK) & (token < S)
    return _load_entries(arrivals + (source * S + token).to(gl.int64) * K, wanted, K), source, token, chunk


@gluon.jit
def _load_rows(
    rows, arrivals, tokens, rank, smem, full, empty,
    N: gl.constexpr, M: gl.constexpr, R: gl.constexpr, S: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """The loading warp of every program."""
    slot = gl.to_tensor(0)
    parity = gl.to_tensor(0)
    u = gl.to_tensor(0)
    if gl.program_id(0) < N:
        if R > 1:
            units = _count_blocks(tokens, rank, R, CHUNK) * ((CHUNK + N - 1) // N)
            entries, _, _, _ = _pushed_entries(arrivals, u, units, rank, N, R, S, K, CHUNK)
            while u < units:
                following, _, _, _ = _pushed_entries(arrivals, u + 1, units, rank, N, R, S, K, CHUNK)
                slot, parity = _load_token(rows, entries, smem, full, empty, slot, parity, K, BYTES)
                entries = following
                u += 1
    elif gl.program_id(0) < N + M:
        num_tokens = gl.load(tokens + rank)
        own = arrivals + (rank * S).to(gl.int64) * K
        token = gl.program_id(0) - N
        entries = _load_entries(own + token * K, token < num_tokens, K)
        while token < num_tokens:
            token += M
            following = _load_entries(own + token * K, token < num_tokens, K)
            slot, parity = _load_token(rows, entries, smem, full, empty, slot, parity, K, BYTES)
            entries = following


@gluon.jit
def _push(
    arrivals, tokens, staging, staging_stride, flags, flags_stride, counters, phase, rank, smem, full, empty,
    TEAM: gl.constexpr, N: gl.constexpr, R: gl.constexpr, S: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
    H: gl.constexpr, CHUNK: gl.constexpr, OUTER: gl.constexpr, INNER: gl.constexpr,
    LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """One program's part of what goes to peers. A block is its part of one chunk of one peer."""
    UNITS: gl.constexpr = (CHUNK + N - 1) // N
    units = _count_blocks(tokens, rank, R, CHUNK) * UNITS
    o = _columns(LAYOUT, OUTER // TEAMS, INNER) + TEAM * (OUTER // TEAMS * INNER)
    slot = gl.to_tensor(0)
    parity = gl.to_tensor(0)
    u = gl.to_tensor(0)
    entries, source, token, chunk = _pushed_entries(arrivals, u, units, rank, N, R, S, K, CHUNK)
    while u < units:
        following, next_source, next_token, next_chunk = _pushed_entries(
            arrivals, u + 1, units, rank, N, R, S, K, CHUNK
        )
        largest = _largest(entries, K)
        if largest >= 0:
            to = staging + source.to(gl.int64) * staging_stride + (token * W + (largest >> SHIFT)).to(gl.int64) * H
            total, slot, parity = _sum_rows(
                entries, smem, full, empty, slot, parity, TEAM, LAYOUT, K, OUTER // TEAMS, INNER
            )
            gl.store(to + o, total.to(DTYPE), mask=o < H)
        if u % UNITS == UNITS - 1:
            if count_sender(counters + source * MAX_CHUNKS_ + chunk, N * TEAMS):
                raise_flag(flags, flags_stride, source, rank, chunk, phase)
        entries = following
        source = next_source
        token = next_token
        chunk = next_chunk
        u += 1


@gluon.jit
def _finish(
    arrivals, sends, staging, output, flags, flags_stride, faults, fault_stride, status, host_status, phase, rank,
    num_tokens, operation, number, limit, smem, full, empty, TEAM: gl.constexpr,
    N: gl.constexpr, M: gl.constexpr, R: gl.constexpr, S: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
    H: gl.constexpr, CHUNK: gl.constexpr, OUTER: gl.constexpr, INNER: gl.constexpr,
    LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """One program's part of this rank's tokens: lid, lid + M, ..."""
    o = _columns(LAYOUT, OUTER // TEAMS, INNER) + TEAM * (OUTER // TEAMS * INNER)
    failed = gl.to_tensor(0)
    awaited = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    parity = gl.to_tensor(0)
    own = arrivals + (rank * S).to(gl.int64) * K
    token = gl.program_id(0) - N
    entries = _load_entries(own + token * K, token < num_tokens, K)
    places = _load_entries(sends + token * W, token < num_tokens, W)
    while token < num_tokens:
        following = token + M
        next_entries = _load_entries(own + following * K, following < num_tokens, K)
        next_places = _load_entries(sends + following * W, following < num_tokens, W)
        while awaited <= token // CHUNK:
            for hop in range(1, R):
                failed |= await_flag(
                    flags, flags_stride, faults, fault_stride, status, host_status, rank, (rank + hop) % R, awaited,
                    phase, operation, number, limit, R,
                )  # fmt: skip
            awaited += 1
        count = 0
        for w in gl.static_range(W):
            count += (places[w] >= 0).to(gl.int32)
        largest = _largest(entries, K)
        ordinal = gl.where(largest >= 0, largest >> SHIFT, -1)
        inside = (o < H) & (failed == 0)
        mine, slot, parity = _sum_rows(
            entries, smem, full, empty, slot, parity, TEAM, LAYOUT, K, OUTER // TEAMS, INNER
        )  # fmt: skip
        mine = mine.to(DTYPE).to(gl.float32)
        total = gl.zeros([1, 1, OUTER // TEAMS, INNER], gl.float32, LAYOUT)
        for part in range(count):
            if part == ordinal:
                total += mine
            else:
                partial = staging + (token * W + part).to(gl.int64) * H
                total += gl.load(partial + o, mask=inside, other=0.0).to(gl.float32)
        gl.store(output + token.to(gl.int64) * H + o, total.to(DTYPE), mask=inside)
        entries = next_entries
        places = next_places
        token = following
    if num_tokens == 0:  # nobody may go on before every peer is here
        for hop in range(1, R):
            await_flag(
                flags, flags_stride, faults, fault_stride, status, host_status, rank, (rank + hop) % R, 0, phase,
                operation, number, limit, R,
            )  # fmt: skip


@gluon.jit
def _gather_weights(
    dst, weights, weights_stride, route_weights, flags, flags_stride, faults, fault_stride, status, host_status, phase,
    rank, num_tokens, operation, number, limit,
    R: gl.constexpr, K: gl.constexpr, C: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Each assignment's route weight, read from its rank once that has put them there."""
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    BLOCK: gl.constexpr = 128 * WARPS
    lanes = gl.arange(0, BLOCK, LANES)
    failed = gl.to_tensor(0)
    for hop in range(1, R):
        failed |= await_flag(
            flags, flags_stride, faults, fault_stride, status, host_status, rank, (rank + hop) % R, 0, phase, operation,
            number, limit, R,
        )  # fmt: skip
    at = gl.to_tensor(0)
    while at < num_tokens * K:
        inside = (at + lanes < num_tokens * K) & (failed == 0)
        place = gl.load(dst + at + lanes, mask=inside, other=MASKED)
        real = place != MASKED
        row = gl.where(real, gl.where(place < 0, -place - 1, place), 0)
        value = gl.load(weights + (row // C).to(gl.int64) * weights_stride + row % C, mask=real, other=0.0)
        gl.store(route_weights + at + lanes, value, mask=inside)
        at += BLOCK


@gluon.jit
def _sum_tokens(
    arrivals, tokens, dst, sends, staging, staging_stride, output, weights, weights_stride, route_weights, flags,
    flags_stride, counters, words, faults, fault_stride, status, host_status, rank, operation, number, limit, smem,
    full, empty, TEAM: gl.constexpr, HAS_WEIGHTS: gl.constexpr, N: gl.constexpr, M: gl.constexpr, R: gl.constexpr,
    S: gl.constexpr, K: gl.constexpr, W: gl.constexpr, C: gl.constexpr, H: gl.constexpr, CHUNK: gl.constexpr,
    OUTER: gl.constexpr, INNER: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A team of summing warps of every program."""
    phase = gl.load(words + PHASE) + 1
    own_tokens = gl.load(tokens + rank)
    if gl.program_id(0) < N:
        if R > 1:
            _push(
                arrivals, tokens, staging, staging_stride, flags, flags_stride, counters, phase, rank, smem, full,
                empty, TEAM, N, R, S, K, W, H, CHUNK, OUTER, INNER, LAYOUT, DTYPE,
            )  # fmt: skip
    elif gl.program_id(0) < N + M:
        _finish(
            arrivals, sends, staging + rank.to(gl.int64) * staging_stride, output, flags, flags_stride, faults,
            fault_stride, status, host_status, phase, rank, own_tokens, operation, number, limit, smem, full, empty,
            TEAM, N, M, R, S, K, W, H, CHUNK, OUTER, INNER, LAYOUT, DTYPE,
        )  # fmt: skip
    elif HAS_WEIGHTS and TEAM == 0:
        _gather_weights(
            dst, weights, weights_stride, route_weights, flags, flags_stride, faults, fault_stride, status, host_status,
            phase, rank, own_tokens, operation, number, limit, R, K, C, WARPS,
        )  # fmt: skip
    end_launch(words, phase, (N + M + HAS_WEIGHTS) * TEAMS)


@gluon.jit(do_not_specialize=["rank", "operation", "number", "limit"])
def _combine_kernel(
    rows, arrivals, tokens, dst, sends, staging, staging_stride, output, weights, weights_stride, route_weights, flags,
    flags_stride, counters, words, faults, fault_stride, status, host_status, rank, operation, number, limit,
    HAS_WEIGHTS: gl.constexpr, N: gl.constexpr, M: gl.constexpr, R: gl.constexpr, S: gl.constexpr, K: gl.constexpr,
    W: gl.constexpr, C: gl.constexpr, H: gl.constexpr, CHUNK: gl.constexpr, SLOTS: gl.constexpr,
    OUTER: gl.constexpr, INNER: gl.constexpr, VECTOR: gl.constexpr, LANES: gl.constexpr, WARPS: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Programs [0, N) push, the next M finish, one more gathers route weights. Each team has WARPS warps."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if read_status(status) != 0:
        return
    DTYPE: gl.constexpr = rows.dtype
    BYTES: gl.constexpr = OUTER * INNER * (DTYPE.primitive_bitwidth // 8)
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, VECTOR], [1, 1, 32 // LANES, LANES], [1, 1, WARPS, 1], [3, 2, 1, 0]
    )
    smem = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, OUTER, INNER], rows.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=TEAMS)
    gl.warp_specialize(
        [
            (
                _sum_tokens,
                (
                    arrivals, tokens, dst, sends, staging, staging_stride, output, weights, weights_stride,
                    route_weights, flags, flags_stride, counters, words, faults, fault_stride, status, host_status,
                    rank, operation, number, limit, smem, full, empty, 0, HAS_WEIGHTS, N, M, R, S, K, W, C, H, CHUNK,
                    OUTER, INNER, LAYOUT, DTYPE, WARPS,
                ),
            ),
            (
                _sum_tokens,
                (
                    arrivals, tokens, dst, sends, staging, staging_stride, output, weights, weights_stride,
                    route_weights, flags, flags_stride, counters, words, faults, fault_stride, status, host_status,
                    rank, operation, number, limit, smem, full, empty, 1, HAS_WEIGHTS, N, M, R, S, K, W, C, H, CHUNK,
                    OUTER, INNER, LAYOUT, DTYPE, WARPS,
                ),
            ),
            (
                _load_rows,
                (
                    rows, arrivals, tokens, rank, smem, full, empty, N, M, R, S, K, CHUNK, BYTES,
                ),
            ),
        ],
        [WARPS, 1],
        [TEAM_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


MAX_SLOTS = 32
TEAM_WARPS = 4


def halved(row: RowShape) -> tuple[int, int]:
    """(outer, inner) of a row's box, with two inner rows at least: one for each team."""
    inner = row.inner if row.outer >= TEAMS.value else row.inner // TEAMS.value
    return next_power_of_2(row.width // inner), inner


def sum_rows(
    rows: Tensor, staging: Tensor, staging_stride: int, weights: Tensor | None, weights_stride: int,
    arrived: bulk.Arrivals, signals: Signals, rank: int, limit: int, dims: Dims, senders: int, finishers: int,
) -> Launch:  # fmt: skip
    """Sum each token's rows, on the ranks that have them and then on the token's: see `reference.combine`.

    Given: `hidden` [C, H] payload dtype, at an address that 16 divides; `output` [s, H]; `operation` and `number` as in
    `barrier.barrier`; `arrivals`, `tokens`, `dst` and `sends` of the plan; with weights, `gathered` [s, K] fp32.

    Args:
        rows: any that are like those given.
        staging: [S * W, H] of rank 0; `staging_stride` elements to the next rank's.
        weights: [C] fp32 of rank 0, `weights_stride` elements to the next rank's, gathered into `gathered`; None: not.
            What ranks have written to it in stream order before their own call is gathered.
        arrived, limit: as in `bulk_dispatch.move_rows`.
        senders, finishers: programs; each takes a multiprocessor.

    Moves: a row for each token and peer that has some of it. Visible when it ends: the output.
    """
    d = dims
    outer, inner = halved(bulk.row_shape(d.H, rows.itemsize))
    slots = min(MAX_SLOTS, bulk.SHARED_BYTES // (outer * inner * rows.itemsize))
    vector = 16 // rows.itemsize
    return Launch(
        _combine_kernel, (senders + finishers + (weights is not None),),
        (
            bulk.GivenRows("hidden", rows, d.C, inner, outer), Given("arrivals"), Given("tokens"), Given("dst"),
            Given("sends"), staging, staging_stride, Given("output"), arrived.words if weights is None else weights,
            weights_stride, arrived.words if weights is None else Given("gathered"), arrived.flags,
            arrived.flags_stride, arrived.counters, arrived.words, signals.faults, signals.fault_stride,
            signals.status, signals.host_status, rank, Given("operation"), Given("number"), limit,
        ),
        HAS_WEIGHTS=int(weights is not None), N=senders, M=finishers, R=d.R, S=d.S, K=d.K, W=d.W, C=d.C, H=d.H,
        CHUNK=bulk.chunk_tokens(d.S), SLOTS=slots, OUTER=outer,
        INNER=inner, VECTOR=vector, LANES=min(32, inner // vector), WARPS=TEAM_WARPS,
        EARLY=False, num_warps=TEAM_WARPS,
    )  # fmt: skip
