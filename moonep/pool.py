"""ExpertPool: the weights of one layer's experts, on all ranks, and the slots for redundant experts.

Per projection there is one address range over the memory of all ranks:

    full    [E + B, ...]   row e is expert e, wherever it lives; the last B rows are this rank's slots
    compact [L + B, ...]   own experts, then slots: the same memory mapped a second time; what training uses
    local   [L, ...]       own experts alone

and the same three for gradients (fp32). Slots and reduce buffers are shared by all pools with the same shapes in a
group: the extra memory is B experts per projection, not per layer. So a pool records whose weights its slots hold.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from moonep import backends
from moonep.arguments import check_slot_set, describe
from moonep.dims import MAX_RANKS, ROW_ALIGNMENT_BYTES, align_up
from moonep.errors import NotCopied, StaleSlotsError
from moonep.memory import Chunk, Memory
from moonep.memory.peers import Peers
from moonep.memory.strides import dense_strides
from moonep.plan import Plan
from moonep.weights import SlotReduction, SlotWeights, move_weights

_SCRATCH_BYTES = 64 << 20

_pool_ids = itertools.count(1)


def row_stride(row_bytes: int, L: int, granule: int) -> int:
    """Bytes from one expert to the next, so that L of them fill whole granules and a row is 16-byte aligned."""
    return align_up(row_bytes, math.lcm(granule // math.gcd(L, granule), ROW_ALIGNMENT_BYTES))


@dataclass(frozen=True)
class Projection:
    """One weight of every expert: its name, shape and dtype, and the bytes from one expert to the next."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: int

    @staticmethod
    def of(name: str, shape: tuple[int, ...], dtype: torch.dtype, L: int, granule: int) -> Projection:
        return Projection(name, shape, dtype, row_stride(math.prod(shape) * dtype.itemsize, L, granule))

    def grad(self, L: int, granule: int) -> Projection:
        """The gradient of the projection: fp32."""
        return Projection.of(self.name, self.shape, torch.float32, L, granule)


class Slots:
    """The slots of one projection on this rank, and every rank's reduce buffer. Shared by pools.

    Attributes:
        serial: equal on all ranks that created it together.
        holder: (pool, plan, (count of weight updates, whether it was captured)) of what the slots hold; None: nothing.
        captured: a graph has a copy into them: a replay may have written them, which nobody here hears of.
        gradients_of: (pool, plan) whose gradients are in the reduce buffer and not yet reduced; None: it is zero.
    """

    def __init__(self, weights: Chunk, reduce_chunks: list[Chunk] | None, serial: int):
        self.serial = serial
        self.holder: tuple[int, int, tuple[int, bool]] | None = None
        self.captured = False
        self.gradients_of: tuple[int, int] | None = None
        self.weights, self.reduce_chunks = weights, reduce_chunks
        self.reduce_buffer: Tensor | None = None

    def map_reduce_buffer(self, memory: Memory, grad: Projection, B: int, rank: int) -> None:
        """Make `reduce_buffer` [R, B, ...] over the chunks of all ranks; zero this rank's part."""
        if self.reduce_chunks is None:
            return
        R, chunk = len(self.reduce_chunks), self.reduce_chunks[0].nbytes
        whole = memory.map(self.reduce_chunks).tensor((R * chunk // 4,), torch.float32)
        dense = dense_strides(grad.shape, grad.dtype, None)
        self.reduce_buffer = whole.as_strided((R, B, *grad.shape), (chunk // 4, grad.stride // 4, *dense))
        if not memory.zeroed:
            self.reduce_buffer[rank].zero_()


@dataclass(frozen=True)
class Views:
    """One projection as tensors, for one slot set."""

    full: Tensor
    compact: Tensor
    compact_grad: Tensor | None


class ExpertPool(NotCopied):
    """Makes and owns the weights of one layer's experts. Collective: every rank of the group creates it.

    Args:
        shapes: {projection: shape of one expert's weight}, any number of projections, any shape.
        E: experts in the group, a multiple of its size.
        B: slots for redundant experts on a rank; None: E // ranks. With `grads`, B >= min(L, E - L).
        dtype: of all projections, or {projection: dtype}. Weights are moved as bytes: any dtype.
        group: process group; None: all ranks, or this process alone.
        grads: also make fp32 gradients and reduce buffers.
        slot_sets: sets of slots; more than one lets microbatches interleave without prefetching again.
        shared: share the slots with other pools of the same shapes (one a group); False: slots of its own.
        master: keep fp32 parameters in `.master`, whose `.grad` is `local_grad`; `sync()` after the optimizer's step
            copies them into the compute weights. In fp32 the compute weights themselves are the parameters.
        backend: as for `Buffer`.
        timeout_s: seconds to wait for a peer, at most; a finite number above 0.

    Attributes:
        E, B, L, R: experts in the group, slots of a rank, own experts of a rank, ranks.
        rank: this rank within the process group.
        grads, slot_sets: as given.
        projections: [Projection], in the order of `shapes`.
        destroyed: whether `destroy()` was called.
        full, compact, local: {projection: tensor}: [E + B, ...], [L + B, ...], [L, ...] (see the module).
        compact_grad, local_grad: {projection: fp32 tensor}; empty without `grads`.
        full_grad: {projection: [E + B, ...] fp32}; rows of other homes alias private scratch: never read them. Mapped
            on first use.
        reduce_buffer: {projection: [R, B, ...] fp32}: the slots' gradients of all ranks.
        master: {projection: nn.Parameter [L, ...] fp32}; empty without `master`.

    Raises:
        ValueError: a bad argument, or one that differs between ranks.
        PeerError: another rank refused its arguments.
        PeerTimeout: another rank did not come. Also when its `group` was bad: it cannot tell its peers.
    """

    def __init__(
        self,
        shapes: MappingOf[str, tuple[int, ...]],
        E: int,
        B: int | None = None,
        dtype: torch.dtype | MappingOf[str, torch.dtype] = torch.bfloat16,
        group: dist.ProcessGroup | None = None,
        grads: bool = False,
        slot_sets: int = 1,
        shared: bool = True,
        *,
        master: bool = False,
        backend: str | None = None,
        timeout_s: float = 60.0,
    ):
        peers = self._peers = Peers.of(group)
        self._timeout_s = timeout_s
        self._id = next(_pool_ids)
        self.E, self.R, self.rank = E, peers.size, peers.rank
        self.grads, self.slot_sets = grads, slot_sets
        self.destroyed = False
        self._scratch_chunks: dict[int, Chunk] = {}

        def check() -> dict[str, Any]:
            name, _ = backends.choose(backend)
            self._memory = backends.open_memory(name)
            self._set_sizes(E, B, shapes, dtype, master)
            names = {p.name: [list(p.shape), str(p.dtype)] for p in self.projections}
            flags = {"grads": bool(grads), "shared": bool(shared)}
            same = {"E": E, "B": self.B, "shapes": names, "slot_sets": slot_sets, **flags}
            found.extend(peers.shared.get(self._slots_key(p, i, shared)) for p, i in self._all_slots())
            serials = [0 if slots is None else slots.serial for slots in found]
            return {**same, **backends.must_agree(name), "_slots": serials}

        found: list[Slots | None] = []
        serials = [reply["_slots"] for reply in peers.agree("ExpertPool", timeout_s, check)]
        for i in range(len(found)):
            if any(theirs[i] != serials[0][i] for theirs in serials):
                found[i] = None  # one rank has let go of it: all make a new one
        self._make_memory(shared, found)
        self.master = {p.name: self._make_master(p.name) for p in self.projections} if master else {}
        self._synced = self._versions()
        self._stepped = False
        if master:
            self._watch_optimizers()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None: this process alone. Held weakly: `destroy_process_group` ends it.

        Raises:
            ValueError: it has been ended.
        """
        return self._peers.group

    def _set_sizes(
        self,
        E: int,
        B: int | None,
        shapes: MappingOf[str, tuple[int, ...]],
        dtype: torch.dtype | MappingOf[str, torch.dtype],
        master: bool,
    ) -> None:
        if not isinstance(E, int) or E < 1 or E % self.R:
            raise ValueError(f"E: given {E!r}, expected a multiple of the {self.R} ranks of the group")
        if self.R > MAX_RANKS:
            raise ValueError(f"group: given {self.R} ranks, expected at most {MAX_RANKS}")
        self.L = E // self.R
        self.B = self.L if B is None else B
        needed = min(self.L, E - self.L) if self.grads else 0
        if not isinstance(self.B, int) or self.B < needed:
            why = ", as grads=True needs: every redundant expert has a gradient" if self.grads else ""
            raise ValueError(f"B: given {B!r}, expected an integer >= {needed}{why}")
        if master and not self.grads:
            raise ValueError("master: given True with grads=False, expected grads=True: parameters need gradients")
        if not isinstance(self.slot_sets, int) or self.slot_sets < 1:
            raise ValueError(f"slot_sets: given {self.slot_sets!r}, expected an integer >= 1")
        if not isinstance(shapes, MappingOf) or not shapes:
            given = "none" if isinstance(shapes, MappingOf) else describe(shapes)
            raise ValueError(f"shapes: given {given}, expected at least one projection, such as {{'up': (H, F)}}")
        if not isinstance(dtype, torch.dtype | MappingOf):
            raise ValueError(f"dtype: given {describe(dtype)}, expected a torch.dtype or {{projection: torch.dtype}}")
        dtypes = {name: dtype for name in shapes} if isinstance(dtype, torch.dtype) else dict(dtype)
        for name, shape in shapes.items():
            if not isinstance(name, str):
                raise ValueError(f"shapes: given the name {describe(name)}, expected a string")
            if not isinstance(shape, (tuple, list)) or any(not isinstance(n, int) or n < 1 for n in shape):
                raise ValueError(f"shapes[{name!r}]: given {shape!r}, expected a tuple of positive integers")
            if not isinstance(dtypes.get(name), torch.dtype):
                raise ValueError(f"dtype[{name!r}]: given {dtypes.get(name)!r}, expected a torch.dtype")
            if (master or self.grads) and not dtypes[name].is_floating_point:
                raise ValueError(
                    f"dtype[{name!r}]: given {dtypes[name]} with grads=True, expected a floating point dtype"
                )
        granule = self._memory.granule
        self.projections = [Projection.of(n, tuple(s), dtypes[n], self.L, granule) for n, s in shapes.items()]
        self._grad_of = {p.name: p.grad(self.L, granule) for p in self.projections}

    def _all_slots(self) -> list[tuple[Projection, int]]:
        return [(p, i) for i in range(self.slot_sets) for p in self.projections]

    def _slots_key(self, p: Projection, slot_set: int, shared: bool) -> tuple[Any, ...]:
        return (p, self.B, self.L, self.grads, slot_set, None if shared else self._id)

    def _make_memory(self, shared: bool, found: list[Slots | None]) -> None:
        """Create what is not there yet, exchange it in one go, and map it."""
        peers, memory, L, B = self._peers, self._memory, self.L, self.B
        new_slots = [p for (p, _), slots in zip(self._all_slots(), found, strict=True) if slots is None]
        sizes = [L * p.stride for p in self.projections]
        if self.grads:
            sizes += [B * self._grad_of[p.name].stride for p in new_slots]
        chunks = iter(memory.share(sizes, peers, "ExpertPool", self._timeout_s))
        weights = [next(chunks) for _ in self.projections]
        self._slots: list[dict[str, Slots]] = [{} for _ in range(self.slot_sets)]
        for (p, i), slots in zip(self._all_slots(), found, strict=True):
            if slots is None:
                reduce_chunks = next(chunks) if self.grads else None
                slots = Slots(memory.allocate(B * p.stride), reduce_chunks, peers.exchanges)
                slots.map_reduce_buffer(memory, self._grad_of[p.name], B, self.rank)
                peers.shared[self._slots_key(p, i, shared)] = slots
            self._slots[i][p.name] = slots

        self.local: dict[str, Tensor] = {}
        self.local_grad: dict[str, Tensor] = {}
        self._grad_chunks: dict[str, Chunk] = {}
        self._views: list[dict[str, Views]] = [{} for _ in range(self.slot_sets)]
        self._full_grads: dict[int, dict[str, Tensor]] = {}
        for p, every in zip(self.projections, weights, strict=True):
            self._map(p, every)
            for chunk in every:
                chunk.close()
        peers.all_gather(b"", "ExpertPool", self._timeout_s, "ready")  # every rank's reduce buffer is zero

    def _map(self, p: Projection, every: list[Chunk]) -> None:
        memory, L, own, grad = self._memory, self.L, every[self.rank], self._grad_of[p.name]
        self.local[p.name] = memory.map([own]).tensor((L, *p.shape), p.dtype, 0, p.stride)
        if self.grads:
            grad_own = self._grad_chunks[p.name] = memory.allocate(L * grad.stride)
            self.local_grad[p.name] = memory.map([grad_own]).tensor((L, *p.shape), grad.dtype, 0, grad.stride)
            if not memory.zeroed:
                self.local_grad[p.name].zero_()
        for views, slots in zip(self._views, (group[p.name] for group in self._slots), strict=True):
            compact_grad = None
            if slots.reduce_chunks is not None:
                mapping = memory.map([grad_own, slots.reduce_chunks[self.rank]])
                compact_grad = mapping.tensor((L + self.B, *p.shape), grad.dtype, 0, grad.stride)
            views[p.name] = Views(
                full=memory.map([*every, slots.weights]).tensor((self.E + self.B, *p.shape), p.dtype, 0, p.stride),
                compact=memory.map([own, slots.weights]).tensor((L + self.B, *p.shape), p.dtype, 0, p.stride),
                compact_grad=compact_grad,
            )

    def _map_full_grad(self, p: Projection, slot_set: int) -> Tensor:
        own, slots, grad = self._grad_chunks[p.name], self._slots[slot_set][p.name], self._grad_of[p.name]
        assert slots.reduce_chunks is not None
        elsewhere = self._scratch(own.nbytes)
        chunks = [c for r in range(self.R) for c in ([own] if r == self.rank else elsewhere)]
        mapping = self._memory.map([*chunks, slots.reduce_chunks[self.rank]])
        return mapping.tensor((self.E + self.B, *p.shape), grad.dtype, 0, grad.stride)

    def _scratch(self, nbytes: int) -> list[Chunk]:
        """Chunks that make up `nbytes` but take little memory: one piece many times, and a rest. One a process."""
        whole, rest = divmod(nbytes, _SCRATCH_BYTES)
        sizes = ([_SCRATCH_BYTES] if whole else []) + ([rest] if rest else [])
        for size in sizes:
            key = ("scratch", self._memory.device, size)
            chunk = self._peers.shared.get(key)
            if chunk is None:
                chunk = self._peers.shared[key] = self._memory.allocate(size)
            self._scratch_chunks[size] = chunk
        pieces = [_SCRATCH_BYTES] * whole + ([rest] if rest else [])
        return [self._scratch_chunks[size] for size in pieces]

    def _make_master(self, name: str) -> nn.Parameter:
        local = self.local[name]
        parameter = nn.Parameter(local if local.dtype == torch.float32 else local.float())
        parameter.grad = self.local_grad[name]
        return parameter

    @property
    def full(self) -> dict[str, Tensor]:
        """[E + B, ...]: row e is expert e, wherever it lives; the last B rows are this rank's slots."""
        return self.full_of(0)

    @property
    def compact(self) -> dict[str, Tensor]:
        """[L + B, ...]: own experts, then slots. The same memory as `full`."""
        return self.compact_of(0)

    @property
    def compact_grad(self) -> dict[str, Tensor]:
        """[L + B, ...] fp32: add weight gradients here, then call `buffer.reduce`."""
        return self.compact_grad_of(0)

    @property
    def full_grad(self) -> dict[str, Tensor]:
        """[E + B, ...] fp32: `compact_grad` for kernels that index all experts; rows of other homes go nowhere."""
        return self.full_grad_of(0)

    @property
    def reduce_buffer(self) -> dict[str, Tensor]:
        """[R, B, ...] fp32: the gradients in all ranks' slots."""
        return self.reduce_buffer_of(0)

    def check_slot_set(self, slot_set: int) -> int:
        """A slot set that this pool has.

        Raises:
            ValueError: it has no such one, or is destroyed.
        """
        self._check_live()
        check_slot_set(slot_set, self.slot_sets)
        return slot_set

    def _check_live(self) -> None:
        if self.destroyed:
            raise ValueError("pool: given a destroyed ExpertPool, expected a live one")

    def _views_of(self, slot_set: int) -> dict[str, Views]:
        return self._views[self.check_slot_set(slot_set)]

    def _slots_of(self, slot_set: int) -> dict[str, Slots]:
        return self._slots[self.check_slot_set(slot_set)]

    def full_of(self, slot_set: int) -> dict[str, Tensor]:
        """`full` with the slots of a set."""
        return {name: v.full for name, v in self._views_of(slot_set).items()}

    def compact_of(self, slot_set: int) -> dict[str, Tensor]:
        """`compact` with the slots of a set."""
        return {name: v.compact for name, v in self._views_of(slot_set).items()}

    def compact_grad_of(self, slot_set: int) -> dict[str, Tensor]:
        """`compact_grad` with the slots of a set."""
        return {name: v.compact_grad for name, v in self._views_of(slot_set).items() if v.compact_grad is not None}

    def full_grad_of(self, slot_set: int) -> dict[str, Tensor]:
        """`full_grad` with the slots of a set."""
        self.check_slot_set(slot_set)
        if not self.grads:
            return {}
        if slot_set not in self._full_grads:
            self._full_grads[slot_set] = {p.name: self._map_full_grad(p, slot_set) for p in self.projections}
        return self._full_grads[slot_set]

    def reduce_buffer_of(self, slot_set: int) -> dict[str, Tensor]:
        """`reduce_buffer` of a slot set."""
        buffers = {name: slots.reduce_buffer for name, slots in self._slots_of(slot_set).items()}
        return {name: buffer for name, buffer in buffers.items() if buffer is not None}

    def fill_slots(
        self,
        plan: Plan,
        slot_set: int,
        force: bool = False,
        check_updates: bool = True,
        num_sms: int | None = None,
        projections: Sequence[str] | None = None,
    ) -> None:
        """Copy the weights that `plan` wants into the slots, unless they are there.

        Args:
            plan: whose redundant experts are wanted.
            slot_set: which slots.
            force: copy in any case.
            check_updates: also copy when peers may have changed their weights since.
            num_sms: multiprocessors that a kernel may use; None: all.
            projections: which ones; None: all.

        Raises:
            ValueError: the pool has no such slot set, or is destroyed.

        Visible when it returns: this rank's slots, with weights as they were at the last dispatch or
        `buffer.barrier()`. No barrier.
        """
        every = self._slots_of(slot_set)
        names = every if projections is None else projections
        stale = [name for name in names if force or not self._holds(name, plan, slot_set, check_updates)]
        if stale:
            for name in stale:
                every[name].holder = None
            full = [self._views[slot_set][name].full for name in stale]
            move_weights([SlotWeights(f, f[self.E :]) for f in full], plan, num_sms)
            self.mark_filled(plan, slot_set, stale)

    def mark_filled(self, plan: Plan, slot_set: int, projections: Sequence[str]) -> None:
        """Note that the slots hold what `plan` wants."""
        capturing = _capturing(plan.experts_to_copy)
        for slots in (self._slots_of(slot_set)[name] for name in projections):
            slots.holder = (self._id, plan.key, (self._peers.updates, capturing))
            slots.captured |= capturing

    def holds(self, plan: Plan, slot_set: int) -> bool:
        """Whether the slots hold what `plan` wants, and no peer can have changed its weights since.

        What was copied eagerly does not count in a graph, nor anything beside graphs: replays are not seen here.
        """
        return all(self._holds(name, plan, slot_set, check_updates=True) for name in self._slots_of(slot_set))

    def _holds(self, name: str, plan: Plan, slot_set: int, check_updates: bool) -> bool:
        slots = self._slots_of(slot_set)[name]
        if slots.holder is None or slots.holder[:2] != (self._id, plan.key):
            return False
        if not check_updates:
            return True
        capturing = _capturing(plan.experts_to_copy)
        return slots.holder[2] == (self._peers.updates, capturing) and (capturing or not slots.captured)

    def check_slots(self, plan: Plan, slot_set: int = 0) -> None:
        """Raise unless the slots hold what the experts need to run with `plan`.

        Raises:
            StaleSlotsError: they hold another plan's or another pool's weights.
            ValueError: the pool has no such slot set, or is destroyed.
        """
        every = self._slots_of(slot_set)
        if not (plan.experts_to_copy[self.rank] >= 0).any():
            return
        for name, slots in every.items():
            if slots.holder is None or slots.holder[:2] != (self._id, plan.key):
                raise StaleSlotsError(
                    f"{name}: the slots hold the weights of another plan or layer, expected those of this plan; "
                    "call buffer.prefetch(plan, pool) after the last prefetch for another plan"
                )

    def claim_gradients(self, plan: Plan, slot_set: int) -> None:
        """Say that weight gradients of `plan` are about to be added to `compact_grad`.

        Raises:
            StaleSlotsError: the slots hold gradients of another plan that were not reduced: they would be mixed up.
        """
        claim = (self._id, plan.key)
        for name, slots in self._slots_of(slot_set).items():
            if slots.gradients_of not in (None, claim):
                raise StaleSlotsError(
                    f"{name}: the slots hold gradients of another plan or layer that were not reduced yet; call "
                    "buffer.reduce for it first (with frozen inputs: give functional.dispatch an anchor), or give "
                    "layers whose backward passes overlap different slot sets"
                )
        for slots in self._slots_of(slot_set).values():
            slots.gradients_of = claim

    def release_gradients(self, slot_set: int) -> None:
        """The slots' gradients have been reduced. Called by `Buffer.reduce`."""
        for slots in self._slots_of(slot_set).values():
            slots.gradients_of = None

    def slot_reductions(self, slot_set: int) -> list[SlotReduction]:
        """What `Buffer.reduce` clears, and, where `SlotReduction.wanted`, adds up before."""
        buffers = self.reduce_buffer_of(slot_set)
        names = [p.name for p in self.projections]
        return [SlotReduction(self.local_grad[name], buffers[name], self.trains(name)) for name in names]

    @torch.no_grad()
    def load_local(self, tensors: MappingOf[str, Tensor]) -> None:
        """Copy this rank's own experts in.

        Of this rank alone: peers do not know of it. When it refuses, they go on to the next collective call, and wait
        there for this rank, until `PeerTimeout` if it does not come.

        Args:
            tensors: {projection: [L, ...]}, any floating dtype for floating projections, the projection's dtype for
                others; on any device; some or all projections.

        Raises:
            ValueError: a bad argument, or the pool is destroyed; nothing has been written.

        Visible when it returns: to this rank alone. To peers after the next dispatch or `buffer.barrier()`.
        """
        self._check_live()
        if not isinstance(tensors, MappingOf):
            raise ValueError(f"tensors: given {describe(tensors)}, expected {{projection: tensor}}")
        wanted = {p.name: p for p in self.projections}
        for name, tensor in tensors.items():
            if name not in wanted:
                raise ValueError(f"tensors: given {name!r}, expected one of {', '.join(map(repr, wanted))}")
            shape, dtype = (self.L, *wanted[name].shape), wanted[name].dtype
            floating = dtype.is_floating_point
            if (
                not isinstance(tensor, Tensor)
                or tuple(tensor.shape) != shape
                or (tensor.dtype != dtype and not (floating and tensor.dtype.is_floating_point))
            ):
                kind = "of a floating point dtype" if floating else str(dtype).removeprefix("torch.")
                raise ValueError(f"tensors[{name!r}]: given {describe(tensor)}, expected {list(shape)} {kind}")
        for name, tensor in tensors.items():
            self.local[name].copy_(tensor)
            if name in self.master and self.master[name].data_ptr() != self.local[name].data_ptr():
                self.master[name].copy_(tensor)
        self._peers.updates += 1

    @torch.no_grad()
    def sync(self) -> None:
        """Make the compute weights equal to the master parameters: call it after the optimizer's step.

        Visible when it returns: to this rank alone. To peers after the next dispatch or `buffer.barrier()`.
        """
        self._copy_masters()
        self._synced, self._stepped = self._versions(), False
        self._peers.updates += 1

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for name, parameter in self.master.items():
            if parameter.data_ptr() != self.local[name].data_ptr():
                self.local[name].copy_(parameter)

    def sync_if_updated(self, training: bool = True) -> None:
        """`sync()` when a master parameter may have been written since the last one.

        Its autograd version tells, except after a fused optimizer; so any optimizer's step counts too. A graph cannot
        look: in one for training, compute weights are copied in each replay.

        Raises:
            ValueError: the pool is destroyed.
        """
        self._check_live()
        updated = self._stepped or self._versions() != self._synced
        if _capturing(next(iter(self.local.values()))):
            if updated or training:
                self._copy_masters()
        elif updated:
            self.sync()

    def _watch_optimizers(self) -> None:
        pool = weakref.ref(self)

        def stepped(*_: object) -> None:
            if (alive := pool()) is not None:
                alive._stepped = True

        handles = [register_optimizer_step_post_hook(stepped)]
        dense = {name: p.is_contiguous() and self.local_grad[name].is_contiguous() for name, p in self.master.items()}
        padded = {id(self.master[name]) for name, right in dense.items() if not right}
        if padded:

            def refuse_fused(optimizer: Optimizer, *_: object) -> None:
                fused = [p for group in optimizer.param_groups if group.get("fused") for p in group["params"]]
                if any(id(p) in padded for p in fused):
                    raise ValueError(
                        "optimizer: given fused=True, expected foreach=True or neither for experts of these sizes: "
                        "there is padding between them in memory, which fused kernels of torch do not respect"
                    )

            handles.append(register_optimizer_step_pre_hook(refuse_fused))
        for handle in handles:
            weakref.finalize(self, handle.remove).atexit = False

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self.master.values()]

    def trains(self, name: str) -> bool:
        """Whether the projection's weight gradients are wanted: not when its master parameter is frozen."""
        return self.grads and (name not in self.master or self.master[name].requires_grad)

    @torch.no_grad()
    def ready_gradients(self, zero: bool = True) -> list[str]:
        """Prepare `local_grad` for accumulation: honour what the optimizer did to `master[...].grad` since.

        `zero_grad(set_to_none=True)` means that gradients start from zero; a gradient that was replaced is taken over.
        A frozen parameter has none: an optimizer with weight decay would change it for one of zeros.

        Args:
            zero: False: those that start from zero are left as they are: the caller writes all of them.

        Returns:
            The projections whose gradients start from zero.
        """
        fresh = []
        for name, parameter in self.master.items():
            if not parameter.requires_grad:
                parameter.grad = None
                continue
            own = self.local_grad[name]
            if parameter.grad is None:
                fresh.append(name)
                if zero:
                    own.zero_()
            elif parameter.grad.data_ptr() != own.data_ptr():
                own.copy_(parameter.grad)
            parameter.grad = own
        return fresh

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds.

        Returns:
            `weights` and `gradients` of own experts, `masters` (where they are not the weights themselves), `slots`,
            `reduce_buffers`, and their sum `total`. Slots and reduce buffers are counted in full although other pools
            may share them.
        """
        weights = sum(self.L * p.stride for p in self.projections)
        reduce_chunks = [s.reduce_chunks[self.rank] for g in self._slots for s in g.values() if s.reduce_chunks]
        held = {
            "weights": weights,
            "gradients": sum(c.nbytes for c in self._grad_chunks.values()),
            "masters": sum(m.numel() * 4 for n, m in self.master.items() if m.data_ptr() != self.local[n].data_ptr()),
            "slots": sum(s.weights.nbytes for group in self._slots for s in group.values()),
            "reduce_buffers": sum(c.nbytes for c in reduce_chunks),
        }
        return {**held, "total": sum(held.values())}

    def destroy(self) -> None:
        """Give the memory back. Collective, bounded; does nothing the second time. Tensors in use stay valid.

        Raises:
            PeerTimeout: another rank did not come. The pool is destroyed; its memory goes back with the last reference.

        Visible when it returns: that all ranks have called it. Not what their streams still do.
        """
        if self.destroyed:
            return
        self.destroyed = True
        self._peers.all_gather(b"", "ExpertPool.destroy", self._timeout_s, "ready")
        self._views, self._slots = [], []
        self.local, self.local_grad, self.master, self._grad_chunks = {}, {}, {}, {}


def _capturing(tensor: Tensor) -> bool:
    """Whether what is done with a tensor now is captured in a graph, not done."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
