"""Dispatch by bulk copies, in one launch: send, make the copies that stay here, expand what arrives.

Programs [0, N) read this rank's tokens once and store each to its primary on every peer. The others zero the padding,
copy this rank's tokens to their rows here, and the peers' primaries to their duplicates, chunk by chunk as they arrive.
A row is a box of 32-bit words in shared memory: one bulk load, and a bulk store for each row that it goes to. A warp
issues a few hundred instructions a token; each of the four of a program that move rows works on tokens and stages of
its own.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moonep.dims import Dims, next_power_of_2
from moonep.kernels import bulk
from moonep.kernels.barrier import Signals
from moonep.kernels.bulk import (
    PHASE,
    RowShape,
    await_flag,
    commit_nothing,
    complete_stores,
    complete_stores_but,
    count_sender,
    end_launch,
    fence_bulk_loads,
    has_arrived,
    raise_flag,
    read_status,
)  # fmt: skip
from moonep.kernels.launch import Given, Launch
from moonep.plan import ARRIVAL_ROW, NO_ARRIVAL

TEAMS = gl.constexpr(4)  # warps of a program
REGISTERS = gl.constexpr(128)
SPLIT = gl.constexpr(4)
ROW = gl.constexpr(ARRIVAL_ROW)
NONE = gl.constexpr(NO_ARRIVAL)


@gluon.jit
def _load_row(source, rank, row, bar, stage, wanted, BYTES: gl.constexpr):
    """Start the load of a row into a stage; if it is not wanted, the stage's barrier turns all the same."""
    mbarrier.expect(bar, BYTES, pred=wanted)
    mbarrier.arrive(bar, count=1, pred=wanted == 0)
    tma.async_copy_global_to_shared(source, [rank, row, 0, 0], bar, stage, pred=wanted)


@gluon.jit
def _load_entries(at, wanted, K: gl.constexpr):
    """The K integers of a token, as a tuple of scalars; NONE if it is not wanted."""
    entries = ()
    for k in gl.static_range(K):
        entries = entries + (gl.load(at + k, mask=wanted, other=NONE),)  # type: ignore[assignment]  # noqa: RUF005
    return entries


@gluon.jit
def _finish_chunk(sent, flags, flags_stride, counters, phase, rank, N: gl.constexpr, R: gl.constexpr):
    """This warp is through with a chunk; its stores are complete."""
    if count_sender(counters + sent, N * TEAMS):
        for i in gl.static_range(R - 1):
            raise_flag(flags, flags_stride, (rank + 1 + i) % R, rank, sent, phase)


@gluon.jit
def _send(
    hidden, rows, sends, flags, flags_stride, counters, phase, num_tokens, rank, smem, bars, TEAM: gl.constexpr,
    N: gl.constexpr, R: gl.constexpr, W: gl.constexpr, C: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    BYTES: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """One warp's part of what goes to peers: every (N * TEAMS)-th token. All but one of its stages are being loaded.

    Each token has W groups of stores, so that all but the last token's can be waited for.
    """
    STEP: gl.constexpr = N * TEAMS
    AHEAD: gl.constexpr = STAGES - 1
    first = gl.program_id(0) + TEAM * N
    for i in gl.static_range(AHEAD):
        begun = first + i * STEP
        bar = bars.index(TEAM * STAGES + i)
        mbarrier.expect(bar, BYTES, pred=begun < num_tokens)
        tma.async_copy_global_to_shared(
            hidden, [0, begun, 0, 0], bar, smem.index(TEAM * STAGES + i), pred=begun < num_tokens
        )
    places = _load_entries(sends + first * W, first < num_tokens, W)
    sent = gl.to_tensor(0)
    token = first
    stage = gl.to_tensor(TEAM * STAGES)
    parity = gl.to_tensor(0)
    free = gl.to_tensor(TEAM * STAGES + AHEAD)
    while token < num_tokens:
        if (token != first) & (sent < (token - STEP) // CHUNK):
            complete_stores_but(WAIT)
            while sent < (token - STEP) // CHUNK:
                _finish_chunk(sent, flags, flags_stride, counters, phase, rank, N, R)
                sent += 1
        following = _load_entries(sends + (token + STEP).to(gl.int64) * W, token + STEP < num_tokens, W)
        ahead = token + AHEAD * STEP
        tma.store_wait(0)
        mbarrier.expect(bars.index(free), BYTES, pred=ahead < num_tokens)
        tma.async_copy_global_to_shared(
            hidden, [0, ahead, 0, 0], bars.index(free), smem.index(free), pred=ahead < num_tokens
        )
        mbarrier.wait(bars.index(stage), parity)
        for w in gl.static_range(W):
            place = places[w]
            if (place >= 0) & (place // C != rank):
                tma.async_copy_shared_to_global(rows, [place // C, place % C, 0, 0], smem.index(stage))
            else:
                commit_nothing()
        places = following
        token += STEP
        free = stage
        stage += 1
        if stage == (TEAM + 1) * STAGES:
            stage = gl.to_tensor(TEAM * STAGES)
            parity ^= 1
    num_chunks = gl.maximum((num_tokens + CHUNK - 1) // CHUNK, 1)
    complete_stores()
    while sent < num_chunks:
        _finish_chunk(sent, flags, flags_stride, counters, phase, rank, N, R)
        sent += 1


@gluon.jit
def _zero_padding(
    rows, weights, fill, rank, zeros, N: gl.constexpr, M: gl.constexpr, G: gl.constexpr, PP: gl.constexpr
):  # fmt: skip
    """Zero the padding rows of this rank's groups, and their weights. SPLIT programs share a group."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lanes = gl.arange(0, PP, LANES)
    item = gl.program_id(0) - N
    while item < G * SPLIT:
        g = item // SPLIT
        first = gl.load(fill + 2 * g, mask=g < G, other=0)
        count = gl.load(fill + 2 * g + 1, mask=g < G, other=0)
        row = item % SPLIT
        if row == 0:
            gl.store(weights + first + lanes, gl.zeros([PP], gl.float32, LANES), mask=lanes < count)
        while row < count:
            tma.async_copy_shared_to_global(rows, [rank, first + row, 0, 0], zeros)
            row += SPLIT
        item += M


@gluon.jit
def _await_chunk(
    tokens, flags, flags_stride, faults, fault_stride, status, host_status, phase, rank, chunk, operation, number,
    limit, R: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Wait for a chunk of all peers that have it; every peer has the first."""
    failed = gl.to_tensor(0)
    for peer_hop in range(1, R):
        peer = (rank + peer_hop) % R
        if (chunk == 0) | (chunk * CHUNK < gl.load(tokens + peer)):
            failed |= await_flag(
                flags, flags_stride, faults, fault_stride, status, host_status, rank, peer, chunk, phase, operation,
                number, limit, R,
            )  # fmt: skip
    return failed


@gluon.jit
def _keep_arrivals(
    arriving, arrivals, arriving_weights, weights, tokens, chunk, failed,
    FRESH: gl.constexpr, HAS_WEIGHTS: gl.constexpr, N: gl.constexpr, M: gl.constexpr, R: gl.constexpr, S: gl.constexpr,
    K: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """A chunk of what sources have written, into the plan's own copy, and route weights to their rows.

    Beyond a rank's tokens there are no arrivals.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lanes = gl.arange(0, 128, LANES)
    for r in range(R):
        there = gl.load(tokens + r) * K
        at = chunk * CHUNK * K + (gl.program_id(0) - N) * 128
        end = gl.minimum((chunk + 1) * CHUNK, S) * K
        while at < end:
            where = (r * S).to(gl.int64) * K + at + lanes
            entry = gl.load(arriving + where, mask=(at + lanes < there) & (at + lanes < end), other=NONE)
            if FRESH:
                gl.store(arrivals + where, entry, mask=(at + lanes < end) & (failed == 0))
            if HAS_WEIGHTS:
                here = (entry >= 0) & (failed == 0)
                gl.store(weights + (entry & ROW), gl.load(arriving_weights + where, mask=here), mask=here)
            at += M * 128


@gluon.jit
def _chunk_is_there(
    tokens, flags, flags_stride, phase, rank, chunk, R: gl.constexpr, CHUNK: gl.constexpr
):  # fmt: skip
    """Whether a chunk of all peers that have it is there."""
    there = gl.to_tensor(1)
    for peer_hop in range(1, R):
        peer = (rank + peer_hop) % R
        if (chunk == 0) | (chunk * CHUNK < gl.load(tokens + peer)):
            there &= has_arrived(flags, flags_stride, rank, peer, chunk, phase).to(gl.int32)
    if there != 0:
        fence_bulk_loads()
    return there != 0


@gluon.jit
def _copy(
    hidden, rows, arriving, tokens, flags, flags_stride, faults, fault_stride, status, host_status, phase, rank,
    operation, number, limit, smem, bars, TEAM: gl.constexpr, N: gl.constexpr, M: gl.constexpr, R: gl.constexpr,
    S: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Copy rows to their rows here: own tokens from `hidden`, those of peers from the primaries that arrived.

    A unit is a token of one source. What has arrived comes first, as long as it is in the L2 cache; while nothing has,
    own tokens are copied. Only when these are done, this waits: the memory never idles. A unit's load runs while the
    two units before it are copied.
    """
    lid = gl.program_id(0) - N + TEAM * M
    STEP: gl.constexpr = M * TEAMS
    own_tokens = gl.load(tokens + rank)
    most = 0  # tokens of a peer
    for r in gl.static_range(R):
        most = gl.maximum(most, gl.where(rank == r, 0, gl.load(tokens + r)))
    own_units = gl.maximum((own_tokens - lid + STEP - 1) // STEP, 0)
    units = own_units + gl.maximum((most - lid + STEP - 1) // STEP, 0) * (R - 1)
    failed = gl.to_tensor(0)
    if units == own_units:  # nobody may go on before every peer is here
        failed |= _await_chunk(
            tokens, flags, flags_stride, faults, fault_stride, status, host_status, phase, rank, 0, operation, number,
            limit, R, CHUNK,
        )  # fmt: skip
    own = lid  # the next own token
    token = lid  # the next token of the peer `hop` away
    hop = gl.to_tensor(1)
    there = gl.to_tensor(0)  # chunks that are known to have arrived
    entries = _load_entries(arriving, False, K)  # of the unit whose load starts next
    first = _load_entries(arriving, False, K)  # of the one before it
    second = _load_entries(arriving, False, K)  # of the one before that, whose copies start next
    is_own = gl.to_tensor(1)
    first_is_own = gl.to_tensor(1)
    second_is_own = gl.to_tensor(1)
    of_token = gl.to_tensor(0)
    fill_stage = gl.to_tensor(TEAM * STAGES)
    stage = gl.to_tensor(TEAM * STAGES)
    parity = gl.to_tensor(0)
    gl.static_assert(STAGES == 3 or STAGES == 2)
    AHEAD: gl.constexpr = STAGES - 1
    u = gl.to_tensor(-1)  # the first turn chooses unit 0
    while u < units + AHEAD:
        # The next unit, and its entries, so that they are here when its turn comes.
        next_is_own = gl.to_tensor(1)
        next_token = own
        if u + 1 < units:
            if token < most:
                chunk = token // CHUNK
                if chunk >= there:
                    if own < own_tokens:
                        if _chunk_is_there(tokens, flags, flags_stride, phase, rank, chunk, R, CHUNK):
                            there = chunk + 1
                    else:
                        failed |= _await_chunk(
                            tokens, flags, flags_stride, faults, fault_stride, status, host_status, phase, rank, chunk,
                            operation, number, limit, R, CHUNK,
                        )  # fmt: skip
                        there = chunk + 1
                if chunk < there:
                    next_is_own = gl.to_tensor(0)
                    next_token = token
        source = rank
        if next_is_own != 0:
            own += STEP
        else:
            source = (rank + hop) % R
            hop += 1
            if hop == R:
                hop = gl.to_tensor(1)
                token += STEP
        wanted = (u + 1 < units) & (next_token < gl.load(tokens + source)) & (failed == 0)
        next_entries = _load_entries(arriving + ((source * S).to(gl.int64) + next_token) * K, wanted, K)
        if (u >= 0) & (u < units):
            head = entries[K - 1]
            count = (head >= 0).to(gl.int32)
            for i in gl.static_range(K - 1):
                entry = entries[K - 2 - i]
                head = gl.where(entry >= 0, entry, head)
                count += (entry >= 0).to(gl.int32)
            tma.store_wait(0)
            if is_own != 0:
                _load_row(hidden, 0, of_token, bars.index(fill_stage), smem.index(fill_stage), count > 0, BYTES)
            else:
                _load_row(rows, rank, head & ROW, bars.index(fill_stage), smem.index(fill_stage), count > 1, BYTES)
            fill_stage += 1
            if fill_stage == (TEAM + 1) * STAGES:
                fill_stage = gl.to_tensor(TEAM * STAGES)
        if u >= AHEAD:
            mbarrier.wait(bars.index(stage), parity)
            if STAGES == 2:
                second = first
                second_is_own = first_is_own
            arrived = 1 - second_is_own  # then the first row is there already
            seen = 0
            for k in gl.static_range(K):
                entry = second[k]
                if entry >= 0:
                    if seen >= arrived:
                        tma.async_copy_shared_to_global(rows, [rank, entry & ROW, 0, 0], smem.index(stage))
                    seen += 1
            stage += 1
            if stage == (TEAM + 1) * STAGES:
                stage = gl.to_tensor(TEAM * STAGES)
                parity ^= 1
        second = first
        second_is_own = first_is_own
        first = entries
        first_is_own = is_own
        entries = next_entries
        is_own = next_is_own
        of_token = next_token
        u += 1


@gluon.jit
def _move(
    hidden, rows, sends, arriving, tokens, flags, flags_stride, counters, words, faults, fault_stride, status,
    host_status, rank, operation, number, limit, smem, bars, TEAM: gl.constexpr,
    N: gl.constexpr, M: gl.constexpr, R: gl.constexpr, S: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
    C: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr,
    WAIT: gl.constexpr,
):  # fmt: skip
    """What a warp that moves rows does."""
    phase = gl.load(words + PHASE) + 1
    if gl.program_id(0) < N:
        _send(
            hidden, rows, sends, flags, flags_stride, counters, phase, gl.load(tokens + rank), rank, smem, bars, TEAM,
            N, R, W, C, CHUNK, STAGES, BYTES, WAIT,
        )  # fmt: skip
    else:
        _copy(
            hidden, rows, arriving, tokens, flags, flags_stride, faults, fault_stride, status, host_status, phase, rank,
            operation, number, limit, smem, bars, TEAM, N, M, R, S, K, CHUNK, STAGES, BYTES,
        )  # fmt: skip
    complete_stores()
    end_launch(words, phase, (N + M) * (TEAMS + 1))


@gluon.jit
def _attend(
    rows, weights, fill, arriving, arrivals, arriving_weights, tokens, flags, flags_stride, words, faults,
    fault_stride, status, host_status, rank, operation, number, limit, zeros,
    FRESH: gl.constexpr, HAS_WEIGHTS: gl.constexpr, N: gl.constexpr, M: gl.constexpr, R: gl.constexpr, S: gl.constexpr,
    K: gl.constexpr, G: gl.constexpr, PP: gl.constexpr, CHUNK: gl.constexpr, BLOCK: gl.constexpr, INNER: gl.constexpr,
):  # fmt: skip
    """What the other warps of a program do: all but rows of tokens."""
    phase = gl.load(words + PHASE) + 1
    if gl.program_id(0) >= N:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 1, 32], [1, 1, 4, 1], [3, 2, 1, 0])
        zeros.store(gl.zeros([1, 1, BLOCK, INNER], gl.int32, LAYOUT))
        fence_async_shared()
        gl.thread_barrier()
        _zero_padding(rows, weights, fill, rank, zeros, N, M, G, PP)
        if FRESH or HAS_WEIGHTS:
            failed = gl.to_tensor(0)
            for chunk in range((S + CHUNK - 1) // CHUNK):
                failed |= _await_chunk(
                    tokens, flags, flags_stride, faults, fault_stride, status, host_status, phase, rank, chunk,
                    operation, number, limit, R, CHUNK,
                )  # fmt: skip
                _keep_arrivals(
                    arriving, arrivals, arriving_weights, weights, tokens, chunk, failed,
                    FRESH, HAS_WEIGHTS, N, M, R, S, K, CHUNK,
                )  # fmt: skip
    complete_stores()
    end_launch(words, phase, (N + M) * (TEAMS + 1))


@gluon.jit(do_not_specialize=["rank", "operation", "number", "limit"])
def _dispatch_kernel(
    hidden, rows, sends, weights, fill, arriving, arrivals, arriving_weights, tokens, flags, flags_stride, counters,
    words, faults, fault_stride, status, host_status, rank, operation, number, limit,
    FRESH: gl.constexpr, HAS_WEIGHTS: gl.constexpr, N: gl.constexpr, M: gl.constexpr, R: gl.constexpr, S: gl.constexpr,
    K: gl.constexpr, W: gl.constexpr, C: gl.constexpr, G: gl.constexpr, PP: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, BLOCK: gl.constexpr, INNER: gl.constexpr, WAIT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Programs [0, N) send, the M others copy: four warps each, which share nothing, and four that attend."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if read_status(status) != 0:
        return
    BYTES: gl.constexpr = BLOCK * INNER * 4
    smem = gl.allocate_shared_memory(hidden.dtype, [TEAMS * STAGES + 1, 1, 1, BLOCK, INNER], hidden.layout)
    bars = gl.allocate_shared_memory(gl.int64, [TEAMS * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(TEAMS * STAGES):
        mbarrier.init(bars.index(i), count=1)
    zeros = smem.index(TEAMS * STAGES)
    # Written out for each warp: tuples that are put together lose what is known at compile time.
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    rows, weights, fill, arriving, arrivals, arriving_weights, tokens, flags, flags_stride, words,
                    faults, fault_stride, status, host_status, rank, operation, number, limit, zeros, FRESH,
                    HAS_WEIGHTS, N, M, R, S, K, G, PP, CHUNK,
                    BLOCK, INNER,
                ),
            ),
            (
                _move,
                (
                    hidden, rows, sends, arriving, tokens, flags, flags_stride, counters, words, faults, fault_stride,
                    status, host_status, rank, operation, number, limit, smem, bars, 0, N, M, R, S, K, W, C, CHUNK,
                    STAGES, BYTES, WAIT,
                ),
            ),
            (
                _move,
                (
                    hidden, rows, sends, arriving, tokens, flags, flags_stride, counters, words, faults, fault_stride,
                    status, host_status, rank, operation, number, limit, smem, bars, 1, N, M, R, S, K, W, C, CHUNK,
                    STAGES, BYTES, WAIT,
                ),
            ),
            (
                _move,
                (
                    hidden, rows, sends, arriving, tokens, flags, flags_stride, counters, words, faults, fault_stride,
                    status, host_status, rank, operation, number, limit, smem, bars, 2, N, M, R, S, K, W, C, CHUNK,
                    STAGES, BYTES, WAIT,
                ),
            ),
            (
                _move,
                (
                    hidden, rows, sends, arriving, tokens, flags, flags_stride, counters, words, faults, fault_stride,
                    status, host_status, rank, operation, number, limit, smem, bars, 3, N, M, R, S, K, W, C, CHUNK,
                    STAGES, BYTES, WAIT,
                ),
            ),
        ],
        [1, 1, 1, 1],
        [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip


MAX_STAGES = 3  # of a warp


def row_shape(H: int, itemsize: int) -> RowShape:
    """Of a row as this mover sees it: 32-bit words."""
    return bulk.row_shape(H * itemsize // 4, 4)


def move_rows(
    rows: Tensor, rows_stride: int, weights: Tensor, arriving: Tensor | None, arriving_weights: Tensor | None,
    arrived: bulk.Arrivals, signals: Signals, rank: int, limit: int, dims: Dims, senders: int, copiers: int,
) -> Launch:  # fmt: skip
    """Send each token's row to its ranks, copy it to all its rows there, and zero this rank's padding.

    Given: `hidden` [s, H] payload, at an address that 16 divides; `num_tokens`, s; `operation` and `number` as in
    `barrier.barrier`; `sends`, `zero_fill_ranges`, `tokens` and `arrivals` of the plan.

    Args:
        rows: [C, words of a row] int32 of rank 0; `rows_stride` elements to the next rank's.
        weights: [C] fp32 of this rank: those of padding rows are zeroed.
        arriving: [R, S, K] int32, the arrivals of this rank as sources have written them: the plan's become a copy;
            None: the plan has them.
        arriving_weights: [R, S, K] fp32, route weights as sources have written them; None: none come along.
        arrived: flags between ranks.
        limit: as in `barrier.barrier`.
        senders, copiers: programs; each takes a multiprocessor.

    Moves: s x (ranks of a token) rows. Visible when it ends: all rows of this rank, whoever sent them.
    """
    d = dims
    shape = bulk.row_shape(rows.shape[1], 4)
    stages = min(MAX_STAGES, (bulk.SHARED_BYTES // shape.block_bytes - 1) // TEAMS.value)
    arrivals = Given("arrivals")
    return Launch(
        _dispatch_kernel, (senders + copiers,),
        (
            bulk.GivenRows("hidden", rows, "num_tokens", shape.inner, shape.block),
            bulk.describe_rows(rows, d.R, rows_stride, d.C, shape.inner, shape.block),
            Given("sends"), weights, Given("zero_fill_ranges"), arrivals if arriving is None else arriving, arrivals,
            weights if arriving_weights is None else arriving_weights, Given("tokens"), arrived.flags,
            arrived.flags_stride, arrived.counters, arrived.words, signals.faults, signals.fault_stride,
            signals.status, signals.host_status, rank, Given("operation"), Given("number"), limit,
        ),
        FRESH=arriving is not None, HAS_WEIGHTS=arriving_weights is not None, N=senders, M=copiers, R=d.R, S=d.S,
        K=d.K, W=d.W, C=d.C, G=d.G, PP=max(128, next_power_of_2(d.P)),
        CHUNK=bulk.chunk_tokens(d.S), STAGES=stages, BLOCK=shape.block, INNER=shape.inner,
        WAIT=bulk.waiting_for(d.W), EARLY=False, num_warps=4,
    )  # fmt: skip
