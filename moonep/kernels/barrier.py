"""How ranks wait for each other on the GPU: a signal to every peer, then a bounded spin on one's own signals.

    rank 0: signals[1][0] += 1          rank 1: signals[0][1] += 1
            until signals[0][1] >= epoch        until signals[1][0] >= epoch

The epoch is counted on the device, so a captured graph can be replayed. Memory order: a rank's earlier kernels have
ended before its barrier kernel signals; the signal is a release, the spin an acquire, both at system scope. So what a
rank wrote before its barrier is visible to every peer after theirs.

A peer that does not come within the limit, that refused the operation, that is in another one, or that has failed,
becomes a status word: on the device (later kernels do nothing) and in pinned memory (the next host call raises). A rank
that fails tells its peers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonep.dims import next_power_of_2
from moonep.environment import interpreting
from moonep.kernels.early import admit_next, await_previous
from moonep.kernels.launch import Given, Launch

TIMEOUT, REFUSED, FAILED, OTHER_OPERATION, BAD_ID, BAD_COUNT = range(1, 7)
PEER_SHIFT, OPERATION_SHIFT, THEIRS_SHIFT = 4, 12, 20
# Words that peers write into this rank's `faults`, one row a peer.
REFUSED_RANGE, POISONED = tl.constexpr(0), tl.constexpr(1)
OPERATION = tl.constexpr(2)  # and 3: which operation a peer is in, by the parity of its epoch: it is one behind at most
NUM_FAULTS = 4


@triton.jit
def _now(TIMER: tl.constexpr):
    if TIMER:
        return tl.extra.cuda.globaltimer().to(tl.int64)
    else:
        return tl.full([], 0, tl.int64)


@triton.jit
def arrive(
    signals, signal_stride, faults, fault_stride, epoch, status, rank, operation,
    R: tl.constexpr, RP: tl.constexpr, NF: tl.constexpr,
):  # fmt: skip
    """First half of a barrier: tell every peer. Lane r of the vectors deals with rank r."""
    if tl.load(status) == 0:
        lane = tl.arange(0, RP)
        now = tl.load(epoch) + 1
        tl.store(
            faults + lane * fault_stride.to(tl.int64) + rank * NF + OPERATION + (now & 1),
            (operation + lane * 0).to(tl.int64),
            mask=lane < R,
        )
        tl.debug_barrier()
        to = signals + lane * signal_stride.to(tl.int64) + rank
        tl.atomic_add(to, 1, mask=lane < R, sem="release", scope="sys")
        tl.store(epoch, now)


@triton.jit
def wait(
    signals, signal_stride, faults, fault_stride, epoch, status, host_status, rank, operation, number, limit,
    R: tl.constexpr, RP: tl.constexpr, NF: tl.constexpr, TIMER: tl.constexpr,
):  # fmt: skip
    """Second half: wait for every peer. Returns 0, or what `status` holds then. Any number of programs may wait."""
    lane = tl.arange(0, RP)
    is_rank = lane < R
    failed = tl.load(status)
    now = tl.load(epoch)
    parity = now & 1
    mine = faults + rank * fault_stride.to(tl.int64)
    if failed == 0:
        start = _now(TIMER)
        spins = tl.full([], 0, tl.int64)
        waiting = 1
        missing = lane * 0
        while waiting == 1:
            count = tl.atomic_add(
                signals + rank * signal_stride.to(tl.int64) + lane, 0, mask=is_rank, sem="acquire", scope="sys"
            )
            missing = tl.where(is_rank & (count < now), 1, 0)
            # A peer says that it has refused before it fails because of it: so this is read last.
            poisoned = tl.load(mine + lane * NF + POISONED, mask=is_rank, other=0, volatile=True)
            range_word = tl.load(mine + lane * NF + REFUSED_RANGE, mask=is_rank, other=0, volatile=True)
            first, last = range_word >> 32, range_word & 0x7FFFFFFF
            refused = tl.where((first <= number) & (number <= last) & (number > 0), 1, 0)
            broken = tl.where((poisoned != 0) & (missing == 1), 1, 0)
            bad_peer = tl.min(tl.where((refused + broken > 0) & is_rank, lane, RP), 0)
            spins += 1
            elapsed = spins
            if TIMER:
                elapsed = _now(TIMER) - start
            if bad_peer < RP:
                was_refused = tl.sum(tl.where(lane == bad_peer, refused, 0), 0)
                failed = tl.where(was_refused > 0, 2, 3).to(tl.int32) | (bad_peer << 4)
                waiting = 0
            elif tl.max(missing, 0) == 0:
                waiting = 0
            elif elapsed > limit:
                failed = 1 | (tl.min(tl.where(missing == 1, lane, RP), 0) << 4)
                waiting = 0
        if failed == 0:
            theirs = tl.load(mine + lane * NF + OPERATION + parity, mask=is_rank, other=0, volatile=True).to(tl.int32)
            other = tl.min(tl.where(is_rank & (theirs != operation), lane, RP), 0)
            if other < RP:
                failed = 4 | (other << 4) | (tl.sum(tl.where(lane == other, theirs, 0), 0) << 20)
        if failed != 0:
            failed = failed | (operation << 12)
            tl.store(status, failed)
            tl.store(host_status, failed)
            tl.store(
                faults + lane * fault_stride.to(tl.int64) + rank * NF + POISONED,
                (lane * 0 + 1).to(tl.int64),
                mask=is_rank,
            )
    return failed


@triton.jit(do_not_specialize=["rank", "operation", "number", "limit"])
def _barrier_kernel(
    signals, signal_stride, faults, fault_stride, epoch, status, host_status, rank, operation, number, limit,
    R: tl.constexpr, RP: tl.constexpr, NF: tl.constexpr, TIMER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program."""
    await_previous(EARLY)
    arrive(signals, signal_stride, faults, fault_stride, epoch, status, rank, operation, R, RP, NF)
    tl.debug_barrier()
    wait(
        signals, signal_stride, faults, fault_stride, epoch, status, host_status, rank, operation, number, limit,
        R, RP, NF, TIMER,
    )  # fmt: skip
    admit_next(EARLY)


@triton.jit(do_not_specialize=["rank", "refused", "poison"])
def _announce_kernel(
    faults, fault_stride, status, rank, refused, poison, R: tl.constexpr, RP: tl.constexpr, NF: tl.constexpr
):  # fmt: skip
    """Tell every peer which operations this rank refused, or that it has failed."""
    lane = tl.arange(0, RP)
    row = faults + lane * fault_stride.to(tl.int64) + rank * NF
    tl.store(row + REFUSED_RANGE, refused + (lane * 0).to(tl.int64), mask=lane < R)
    if poison != 0:
        tl.store(row + POISONED, (lane * 0 + 1).to(tl.int64), mask=lane < R)
        tl.store(status, 3 | (rank << 4))


@dataclass(frozen=True, eq=False)
class Signals:
    """What barriers work on.

    Attributes:
        signals: [R] int32 of rank 0; `signal_stride` elements to the next rank's. Arrivals of each peer.
        faults: [R, NUM_FAULTS] int64 of rank 0; `fault_stride` elements to the next rank's. What peers announce.
        epoch: [1] int32, barriers so far.
        status: [1] int32 on the device; 0: all is well.
        host_status: [2] int32 in pinned memory: a copy of status; BAD_ID or BAD_COUNT, which break nothing.
    """

    signals: Tensor
    signal_stride: int
    faults: Tensor
    fault_stride: int
    epoch: Tensor
    status: Tensor
    host_status: Tensor


def barrier(s: Signals, rank: int, R: int, limit: int) -> Launch:
    """A barrier. Given: `operation`, a code that must be equal on all ranks; `number` of the operation among this
    rank's, -1 if unknown (inside a captured graph).

    Args:
        s: signals and status words.
        rank, R: this rank and how many there are.
        limit: nanoseconds to wait; in the interpreter, spins.
    """
    return Launch(
        _barrier_kernel, (1,),
        (
            s.signals, s.signal_stride, s.faults, s.fault_stride, s.epoch, s.status, s.host_status, rank,
            Given("operation"), Given("number"), limit,
        ),
        R=R, RP=next_power_of_2(R), NF=NUM_FAULTS, TIMER=not interpreting(), EARLY=False,
        num_warps=1,
    )  # fmt: skip


def announce(s: Signals, rank: int, R: int, refused: int, poison: bool) -> None:
    """Enqueue: tell every peer which range of operations (`pack_range`) was refused here, or that this rank failed."""
    _announce_kernel[(1,)](
        s.faults, s.fault_stride, s.status, rank, refused, int(poison),
        R=R, RP=next_power_of_2(R), NF=NUM_FAULTS, num_warps=1,
    )  # fmt: skip


def decode(status: int) -> tuple[int, int, int, int]:
    """(kind, peer, this rank's operation, the peer's operation) of a status word."""
    byte = 0xFF
    return status & 0xF, status >> PEER_SHIFT & byte, status >> OPERATION_SHIFT & byte, status >> THEIRS_SHIFT & byte


def new_words(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(epoch, status, host status), zero."""
    host = torch.zeros(2, dtype=torch.int32, pin_memory=device.type == "cuda")
    return torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device), host
