"""Buffer: the communication of one MoE layer shape. Owns its memory, checks arguments, orders the operations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moonep import arguments, backends
from moonep.backends.cpu import CompletedEvent
from moonep.backends.regions import RowRegion
from moonep.dims import ROW_ALIGNMENT_BYTES, Balance, Dims
from moonep.errors import NotCopied, PeerError
from moonep.memory.peers import Peers
from moonep.plan import Plan
from moonep.watchdog import watching
from moonep.weights import (
    SlotReduction,
    add_gradients,
    clear_gradients,
    gradient_forms,
    move_weights,
    weight_forms,
)

if TYPE_CHECKING:
    from moonep.pool import ExpertPool

Event = CompletedEvent | torch.cuda.Event

PAYLOAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

SMS_BESIDE = 16  # of kernels that move weights while others compute, unless `num_sms` says otherwise

_buffer_ids = itertools.count(1)


class Buffer(NotCopied):
    """Moves the rows of MoE layers of one shape between the ranks of a group, balanced.

    Collective: every rank of the group creates it, and calls the same operations in the same order.

    Args:
        S: most tokens that a rank brings in one call.
        H: hidden size; a row must be a multiple of 16 bytes.
        K: experts per token, at most 32.
        E: routed experts in the group, a multiple of the number of ranks.
        num_ep_ranks: ranks of the group, at most 128.
        num_sms: streaming multiprocessors that a kernel may use; None: all. Not used on CPU.
        token_padding: rows of an expert are padded with zeros to a multiple of this.
        B: slots for redundant experts on a rank; None: E // num_ep_ranks. Training needs B >= min(L, E - L).
        group: process group; None: all ranks, or no group at all if num_ep_ranks == 1.
        comm_stream_priority: of the stream of asynchronous operations. Not used on CPU.
        enable_pdl: launch kernels that follow each other in an operation early (programmatic dependent launch):
            planning takes a microsecond less. From capability 9.0 on.
        explicitly_destroy: the caller promises to call `destroy()`; else memory goes back with the last reference.
        dtype: payload dtype: bfloat16, float16 or float32.
        backend: "cuda", "cpu" or, for tests of kernels, "interpreter"; None: `MOONEP_BACKEND`, else by the machine.
        balance: "exact": every rank computes the same number of rows; a tolerance such as 0.01; or "auto": a surplus
            that costs less than one copy of an expert's weights is left alone.
        timeout_s: seconds to wait for a peer before `PeerTimeout`, at most; a finite number above 0.
        domains: groups of ranks that share fast links; not supported yet, must be None.
        num_local_sms: given, `num_sms` limits only what crosses to other ranks, and this many more (as far as there
            are) copy and sum within the GPU at the same time.

    Attributes:
        dims: the sizes, and those that follow (`moonep.dims`).
        rank: this rank within the process group.
        dtype: the payload dtype.
        backend: the name of the backend.
        explicitly_destroy: as given.
        serial: a number that the ranks' objects of one construction have in common.
        destroyed: whether `destroy()` was called.
        usable: whether operations are possible.

    Raises:
        ValueError: a bad argument, or one that differs between ranks.
        PeerError: another rank refused its arguments.
        PeerTimeout: another rank did not come. Also when its `group` was bad: it cannot tell its peers.

    Memory: `memory()` states it. Two row buffers of C = `dims.C` rows (arrivals of fresh dispatches; gradients and
    zero-copy expert outputs) and staging for S x min(R, K) partial sums.
    """

    def __init__(
        self,
        S: int,
        H: int,
        K: int,
        E: int,
        num_ep_ranks: int,
        num_sms: int | None = None,
        token_padding: int = 128,
        B: int | None = None,
        group: dist.ProcessGroup | None = None,
        comm_stream_priority: int = -1,
        enable_pdl: bool = True,
        explicitly_destroy: bool = False,
        *,
        dtype: torch.dtype = torch.bfloat16,
        backend: str | None = None,
        balance: str | float | Balance = "exact",
        timeout_s: float = 60.0,
        domains: Any = None,
        num_local_sms: int | None = None,
    ):
        peers = Peers.of(group, alone=num_ep_ranks == 1)
        sizes: list[Dims] = []

        def check() -> dict[str, Any]:
            if num_ep_ranks != peers.size:
                given = f"a group of {peers.size}" if peers.group else "no process group (see torch.distributed)"
                raise ValueError(f"num_ep_ranks: given {num_ep_ranks} with {given}, expected the size of the group")
            if dtype not in PAYLOAD_DTYPES:
                raise ValueError(f"dtype: given {dtype}, expected one of {', '.join(map(str, PAYLOAD_DTYPES))}")
            arguments.check_count("num_sms", num_sms, 1, optional=True)
            arguments.check_count("num_local_sms", num_local_sms, 1, optional=True)
            if not isinstance(comm_stream_priority, int):
                raise ValueError(f"comm_stream_priority: given {comm_stream_priority!r}, expected an integer")
            if domains is not None:
                raise ValueError(f"domains: given {domains!r}, expected None: domains are not supported yet")
            name, _ = backends.choose(backend)
            slots = E // num_ep_ranks if B is None and isinstance(E, int) else B
            d = Dims(S=S, K=K, E=E, R=num_ep_ranks, H=H, B=slots, P=token_padding, balance=Balance.parse(balance))
            d.validate()
            if d.H * dtype.itemsize % ROW_ALIGNMENT_BYTES:
                raise ValueError(
                    f"H: given {H}, a row of {H * dtype.itemsize} bytes; "
                    f"expected a multiple of {ROW_ALIGNMENT_BYTES} bytes"
                )
            sizes.append(d)
            same = {"S": S, "H": H, "K": K, "E": E, "token_padding": token_padding, "B": d.B, "dtype": str(dtype)}
            movers = backends.movers_must_agree(name, d, dtype)
            return {**same, "balance": repr(d.balance), **backends.must_agree(name), **movers}

        agreed = peers.agree("Buffer", timeout_s, check)[peers.rank]
        self.dims = sizes[0]
        self.rank = peers.rank
        self.dtype = dtype
        self.backend: str = agreed["backend"]
        self.explicitly_destroy = explicitly_destroy
        self._num_sms = num_sms
        self.destroyed = False
        self.serial = peers.exchanges
        self._id = next(_buffer_ids)
        self._peers = peers
        self._backend = backends.open_backend(
            self.backend,
            self.dims,
            dtype,
            peers,
            timeout_s,
            num_sms,
            num_local_sms,
            comm_stream_priority,
            enable_pdl,
        )
        self._broken: PeerError | None = None
        self._ctx = {"NvS": self.dims.C}

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None: this process alone. Held weakly: `destroy_process_group` ends it.

        Raises:
            ValueError: it has been ended.
        """
        return self._peers.group

    def dispatch(
        self,
        hidden_sh: Tensor,
        route_weights_sk: Tensor | None = None,
        topk_experts_sk: Tensor | None = None,
        tokens_per_expert: Tensor | None = None,
        plan: Plan | None = None,
        async_finish: bool = False,
        *,
        inter_rank_sync: bool = True,
        zero_copy: bool = False,
        router_weights_zero_copy: bool = False,
    ) -> tuple[Any, ...]:
        """Send each token to its experts' rows; without a plan, plan first.

        Args:
            hidden_sh: [s, H] payload dtype, s <= S; s may differ by rank and be 0.
            route_weights_sk: [s, K] float32, travels along; None: no weights.
            topk_experts_sk: [s, K] or [s * K] int32 or int64, required without a plan; -1 = no assignment; an expert
                may repeat in a token.
            tokens_per_expert: [E] int32 or int64, this rank's assignments of each expert; None: counted.
            plan: reuse this plan (the backward of combine): no planning; `topk_experts_sk` must be None.
            async_finish: also return an event.
            inter_rank_sync: False leaves out the barrier before rows are written when a plan is reused: the caller
                vouches that no rank is in an earlier dispatch or combine any more, or uses the rows of the last
                dispatch with a plan.
            zero_copy: return a view of the row buffer, valid until the next operation that writes it (a fresh dispatch;
                a dispatch with a plan writes another buffer). A later use in backward raises.
            router_weights_zero_copy: the same for the route weights.

        Returns:
            (hidden [C, H], route weights [C] float32 or None, cu_seqlens [E + B] int32 or None with a plan, plan), and
            an event if `async_finish`. Padding rows and their weights are zero; rows past the last offset undefined.

        Raises:
            ValueError: a bad argument; nothing has been written. If all ranks raise it, the Buffer can be used further;
                if only some do, their peers raise PeerError, and all must destroy it. On CUDA ids out of range and
                wrong counts are found by the device: such ids count as masked, and the next call or `check()` raises.
            PeerError, PeerTimeout: another rank failed or did not come.

        Visible when it returns: all rows that this rank computes.
        """
        with self._operation("dispatch" if plan is None else "dispatch with plan"):
            backend = self._backend
            if plan is None:
                counts, topk = self._check_fresh(hidden_sh, route_weights_sk, topk_experts_sk, tokens_per_expert)
            else:
                self._check_reuse(plan, hidden_sh, route_weights_sk, topk_experts_sk, tokens_per_expert)
            self._peers.updates += 1
            cu_seqlens = None
            given = [hidden_sh, route_weights_sk, topk_experts_sk, tokens_per_expert]
            if plan is not None:
                given.append(plan.packed)
            with backend.run(async_finish, given) as results:
                if plan is None:
                    region = backend.forward
                    plan = backend.dispatch(hidden_sh, route_weights_sk, topk, counts, self._id)
                    cu_seqlens = plan.cu_seqlens
                else:
                    region = backend.gradient
                    backend.dispatch_with_plan(plan, hidden_sh, route_weights_sk, inter_rank_sync)
                hidden = region.rows.view_as(region.rows) if zero_copy else backend.copy_rows(region, plan)
                weights = None
                if route_weights_sk is not None:
                    in_place = router_weights_zero_copy
                    weights = region.weights.view_as(region.weights) if in_place else backend.copy_weights(region, plan)
                results += [hidden, weights, plan.packed]
        result = (hidden, weights, cu_seqlens, plan)
        return (*result, backend.event(True)) if async_finish else result

    def combine(
        self,
        plan: Plan,
        hidden_nvsh: Tensor,
        route_weights_nvs: Tensor | None = None,
        async_finish: bool = False,
        inter_rank_sync: bool = True,
        *,
        zero_copy: bool = False,
        router_weights_zero_copy: bool = False,
    ) -> tuple[Tensor, Tensor | None, Event | None]:
        """Sum each token's rows back at its rank. An unweighted sum: route weights are applied by the experts.

        Args:
            plan: of this Buffer.
            hidden_nvsh: [C, H] payload dtype; only real rows are read.
            route_weights_nvs: [C] float32: gathered back by assignment, bit for bit.
            async_finish: return an event, not None.
            inter_rank_sync: False leaves out the barrier before partial sums are written: the caller vouches that all
                ranks have returned from the last combine.
            zero_copy: `hidden_nvsh` is a view of a row buffer (`hidden_nvsh_buffer_view`, or what dispatch returned);
                it is consumed: a later use in backward raises.
            router_weights_zero_copy: the same for the route weights (`router_weight_buffer_view`).

        Returns:
            (output [s, H], route weights [s, K] float32 or None, event or None). A rank sums a token's rows in fp32 in
            k order and rounds once; the token's rank sums these in fp32 in rank order and rounds once.

        Raises:
            ValueError: a bad argument; nothing has been written.
            PeerError, PeerTimeout: another rank failed or did not come.

        Visible when it returns: the output and the weights of this rank's tokens. Peers may still read the route
        weights that this rank gave; its rows have been read.
        """
        with self._operation("combine"):
            d, backend = self.dims, self._backend
            self._check_plan(plan)
            arguments.check_tensor("hidden_nvsh", hidden_nvsh, (d.C, d.H), (self.dtype,), backend.device)
            if zero_copy:
                self._check_view("hidden_nvsh", hidden_nvsh, [backend.forward.rows, backend.gradient.rows])
            if route_weights_nvs is not None:
                arguments.check_tensor("route_weights_nvs", route_weights_nvs, (d.C,), (torch.float32,), backend.device)
            if router_weights_zero_copy:
                views = [backend.forward.weights, backend.gradient.weights]
                self._check_view("route_weights_nvs", route_weights_nvs, views)
            with backend.run(async_finish, [hidden_nvsh, route_weights_nvs, plan.packed]) as results:
                output, weights = backend.combine(plan, hidden_nvsh, route_weights_nvs, inter_rank_sync)
                results += [output, weights]
            if zero_copy:
                self._region_of(hidden_nvsh).touch()
        return output, weights, backend.event(async_finish)

    @property
    def hidden_nvsh_buffer_view(self) -> Tensor:
        """[C, H] payload dtype: rows that experts may write their output to, for `combine(zero_copy=True)`.

        Also where a dispatch with a plan puts its rows.

        Raises:
            ValueError: the Buffer is destroyed.
        """
        self._check_live("hidden_nvsh_buffer_view")
        return self._backend.gradient.rows

    @property
    def router_weight_buffer_view(self) -> Tensor:
        """[C] float32: route weights (or their gradients), for `combine(router_weights_zero_copy=True)`.

        Peers gather from it until they have returned from combine: write it after the dispatch that comes next.

        Raises:
            ValueError: the Buffer is destroyed.
        """
        self._check_live("router_weight_buffer_view")
        return self._backend.gradient.weights

    def prefetch(
        self,
        plan: Plan,
        pool: ExpertPool,
        async_finish: bool = False,
        *,
        slot_set: int = 0,
        force: bool = False,
        projections: Sequence[str] | None = None,
    ) -> Event | None:
        """Copy the weights of this rank's redundant experts from their homes into the pool's slots.

        Skipped when the slots hold this plan's weights of this pool already and no dispatch, barrier, `sync()` or
        `load_local()` has happened since, after which a peer's weights may be new. In a graph only what a graph
        copied counts, and outside of graphs nothing once a graph copies into these slots.

        Args:
            plan: of this Buffer.
            pool: of the same group, E and B.
            async_finish: return an event, not None; take few multiprocessors, for what runs beside it. Wait for the
                event before the slots are used.
            slot_set: which of the pool's slots.
            force: copy in any case.
            projections: which ones; None: all.

        Raises:
            ValueError: a bad argument. Of this rank alone: peers do not wait here, and go on.
            PeerError, PeerTimeout: an earlier operation failed.

        Visible when it returns: this rank's slots, with weights as they were at the last dispatch or `barrier()`.

        Moves: redundant experts here x bytes of an expert, read from their homes. No barrier: the dispatch that made
        the plan came after the last update of the weights.
        """
        with self._operation("prefetch", collective=False):
            self._check_plan(plan)
            self._check_pool(pool, slot_set)
            if projections is not None:
                known = [p.name for p in pool.projections]
                if not isinstance(projections, list | tuple) or not set(projections) <= set(known):
                    raise ValueError(f"projections: given {projections!r}, expected None or some of {known}")
            with self._backend.run(async_finish, plan.tensors()):
                num_sms = self._sms_beside(async_finish)
                pool.fill_slots(plan, slot_set, force, num_sms=num_sms, projections=projections)
        return self._backend.event(async_finish)

    def prefetch_weight(self, plan: Plan, async_finish: bool = False, **weights: Tensor) -> Event | None:
        """`prefetch` on bare tensors. Any of gate, up and down.

        Args:
            plan: of this Buffer.
            async_finish: return an event, not None.
            weights: either `full_gate_weight` [E + B, ...], symmetric: row e is expert e, the last B rows are this
                rank's slots; or `local_gate_weight` [L, ...] with `gate_prefetch_buffer` [R, B, ...], symmetric: homes
                push their experts into the slots of all ranks, with a barrier before and after. Also up, down. Any
                dtype; a prefetch buffer has the dtype and trailing sizes of its weight.

        Raises:
            ValueError: a bad argument; nothing has been written.
            PeerError, PeerTimeout: another rank failed or did not come (first form: in an earlier operation).

        Visible when it returns: this rank's slots; first form: with weights as they were at the last dispatch or
        `barrier()`.
        """
        with self._operation("prefetch"):
            self._check_plan(plan)
            pulled, pushed = weight_forms(weights, self.dims, self._backend.device)
            barrier = self._backend.barrier
            with self._backend.run(async_finish, [*weights.values(), *plan.tensors()]):
                if pulled:
                    move_weights(pulled, plan, self._num_sms)
                if pushed:
                    barrier.wait()  # peers have used what their slots held
                    move_weights(pushed, plan, self._num_sms)
                    barrier.wait()  # all slots are written
        return self._backend.event(async_finish)

    def reduce(self, plan: Plan, pool: ExpertPool, async_finish: bool = False, *, slot_set: int = 0) -> Event | None:
        """Add the gradients of redundant experts to those of their homes, and zero the slots that were read.

        Before it, weight gradients are added to `pool.compact_grad` (own experts, then slots) or `pool.full_grad`.

        A home adds to its own gradient in ascending (rank, slot), in fp32, rounded once to the gradient's dtype. Of
        frozen master parameters, slots are zeroed and no more.

        Args:
            plan: of this Buffer.
            pool: with `grads=True`.
            async_finish: return an event, not None; take few multiprocessors, for what runs beside it. Wait for the
                event, or call another operation, before gradients are read or added to.
            slot_set: which of the pool's slots.

        Raises:
            ValueError: a bad argument.
            PeerError, PeerTimeout: another rank failed or did not come.

        Visible when it returns: `pool.local_grad` is complete; consumed slots are zero. Two barriers: peers have
        written before slots are read, and read before they are zeroed.
        """
        with self._operation("reduce"):
            self._check_plan(plan)
            self._check_pool(pool, slot_set)
            if not pool.grads:
                raise ValueError("pool: given one without gradients, expected ExpertPool(grads=True)")
            with self._backend.run(async_finish, plan.tensors()):
                self._reduce(plan, pool.slot_reductions(slot_set), self._sms_beside(async_finish))
            pool.release_gradients(slot_set)
        return self._backend.event(async_finish)

    def reduce_grad(self, plan: Plan, async_finish: bool = False, **grads: Tensor) -> Event | None:
        """`reduce` on bare tensors. Any of gate, up and down.

        Args:
            plan: of this Buffer.
            async_finish: return an event, not None.
            grads: `full_gate_grad` [E + B, ...], of which only the rows of own experts are used, or `local_gate_grad`
                [L, ...], of any floating dtype; with `gate_reduce_buffer` [R, B, ...] float32, symmetric, of the same
                trailing sizes. Also up, down.

        Raises:
            ValueError: a bad argument, or B < min(L, E - L): a redundant expert without a slot has no place for its
                gradient.
            PeerError, PeerTimeout: another rank failed or did not come.

        Visible when it returns: own experts' gradients are complete; this rank's used slots are zero. Two barriers, as
        in `reduce`.
        """
        with self._operation("reduce"):
            self._check_plan(plan)
            reductions = gradient_forms(grads, self.dims, self.rank, self._backend.device)
            with self._backend.run(async_finish, [*grads.values(), *plan.tensors()]):
                self._reduce(plan, reductions, self._num_sms)
        return self._backend.event(async_finish)

    def _sms_beside(self, async_finish: bool) -> int | None:
        """Multiprocessors of kernels that move weights; None: all."""
        return SMS_BESIDE if async_finish and self._num_sms is None else self._num_sms

    def _reduce(self, plan: Plan, reductions: list[SlotReduction], num_sms: int | None) -> None:
        if self.dims.spills:
            raise ValueError(
                f"B: given {self.dims.B}, expected B >= min(L, E - L) = {self.dims.max_redundant} for gradients: "
                "a redundant expert without a slot has no place for its gradient"
            )
        self._backend.barrier.wait()  # peers have written the gradients of their slots
        add_gradients(reductions, plan, num_sms)
        self._backend.barrier.wait()  # peers have read this rank's slots
        clear_gradients(reductions, plan, num_sms)

    def barrier(self) -> None:
        """Wait for all ranks (on CUDA: the stream waits).

        Raises:
            ValueError: the Buffer is destroyed.
            PeerError, PeerTimeout: another rank failed or did not come.

        Visible when it returns: what any rank wrote to symmetric memory before it.
        """
        with self._operation("barrier"):
            with self._backend.run(False, []):
                self._backend.barrier.wait()
            self._peers.updates += 1

    @property
    def usable(self) -> bool:
        """Whether operations are possible: neither destroyed nor broken by a failure."""
        return not self.destroyed and self._broken is None

    def check(self) -> None:
        """Raise what has gone wrong so far; on CUDA, wait for the operations so far.

        Raises:
            ValueError: on CUDA, expert ids or counts of an earlier dispatch were wrong.
            PeerError, PeerTimeout: an earlier operation failed; only `destroy()` is possible then.
        """
        if self._broken is not None:
            raise self._broken.again()
        self._check_live("check")
        self._backend.synchronize()
        self._raise_reported()

    @contextmanager
    def watch(self, interval_s: float = 0.1) -> Iterator[None]:
        """Inside, log what the device reports as soon as it does: for replays of a graph, which no call here checks.

        A daemon thread reads a word of host memory: it does not touch the device, nor keep the process alive. It logs
        to `logging.getLogger("moonep")`.

        Args:
            interval_s: seconds between looks.

        Raises:
            ValueError, PeerError, PeerTimeout: at the end of the block, what had been reported by then. What comes
                later, this Buffer's next call raises, as always.

        Example: with buffer.watch(): graph.replay()
        """
        self._check_live("watch")
        arguments.check_seconds("interval_s", interval_s)
        with watching(self._backend.barrier.failure, f"rank {self.rank}", interval_s):
            yield
        if self.usable:
            self._raise_reported()

    def _raise_reported(self) -> None:
        try:
            self._backend.barrier.check()
        except PeerError as error:
            self._broken = error.again()
            raise

    def refuse(self, operation: str, message: str) -> None:
        """Raise ValueError(message) in place of an operation: peers that are in it raise PeerError with the message."""
        with self._operation(operation):
            raise ValueError(message)

    def plan_of(self, packed: Tensor, key: int) -> Plan:
        """A plan of this Buffer from what it consists of: `plan.packed` and `plan.key`."""
        backend = self._backend
        return Plan(backend.plan_layout, self.rank, self._id, arguments.align(packed), backend.status, key)

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds, by region, and their sum. Symmetric: peers can reach all of them.

        Returns:
            `forward_rows`, `gradient_rows` [C, H], `forward_weights`, `gradient_weights` [C], `arrivals` [R, S, K],
            `staging` of partial sums, `load` and `tokens` of planning, what else the backend has (such as `signals`),
            and `total`.

        Raises:
            ValueError: the Buffer is destroyed.
        """
        self._check_live("memory")
        regions = {name: region.nbytes for name, region in self._backend.layout.regions.items()}
        return {**regions, "total": sum(regions.values())}

    def destroy(self) -> None:
        """Give the memory back. Collective, bounded; does nothing the second time.

        After a failure it does not wait for anybody. Tensors that are views of the buffer stay valid.

        Raises:
            ValueError: on CUDA, expert ids or counts of an earlier dispatch were wrong.
            PeerError, PeerTimeout: another rank failed or did not come. The Buffer is destroyed all the same.

        Visible when it returns: what any rank wrote to symmetric memory before it, unless it followed a failure.
        """
        if self.destroyed:
            return
        try:
            if self._broken is None:
                with self._operation("destroy"):
                    with self._backend.run(False, []):
                        self._backend.barrier.wait()
                    self._backend.synchronize()
                    self._backend.barrier.check()
        finally:
            self.destroyed = True
            del self._backend

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.destroy()

    def _operation(self, name: str, collective: bool = True) -> _Operation:
        """One operation, without gradients: a ValueError refuses it, anything else breaks the Buffer.

        Operations of one rank alone are not counted: a rank may leave them out.
        """
        return _Operation(self, name, collective)

    def _fail(self, name: str, collective: bool, error: BaseException) -> None:
        """An operation has raised `error`."""
        barrier = self._backend.barrier
        if isinstance(error, ValueError) and not (collective and barrier.entered):
            if collective:
                barrier.refuse(str(error))
            return
        self._broken = error.again() if isinstance(error, PeerError) else PeerError(self.rank, name, repr(error))
        barrier.poison(str(error) or repr(error))

    def _check_live(self, name: str) -> None:
        if self.destroyed:
            raise ValueError(f"buffer: given a destroyed Buffer to {name}, expected a live one")

    def _check_rows(self, hidden: Tensor, weights: Tensor | None, num_tokens: int | str) -> int:
        d, device = self.dims, self._backend.device
        s = arguments.check_tensor("hidden_sh", hidden, (num_tokens, d.H), (self.dtype,), device).shape[0]
        if weights is not None:
            arguments.check_tensor("route_weights_sk", weights, (s, d.K), (torch.float32,), device)
        return s

    def _check_fresh(
        self, hidden: Tensor, weights: Tensor | None, topk: Tensor | None, counts: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        d, device = self.dims, self._backend.device
        s = self._check_rows(hidden, weights, "s")
        if s > d.S:
            raise ValueError(f"hidden_sh: given s = {s} tokens, expected at most S = {d.S}")
        if topk is None:
            raise ValueError("topk_experts_sk: given None, expected expert ids [s, K], or a plan to reuse")
        ids = arguments.check_topk(topk, s, d.K, device)
        if counts is not None:
            arguments.check_tensor("tokens_per_expert", counts, (d.E,), arguments.INTEGERS, device)
        return self._backend.check_routing(ids, counts), ids

    def _check_reuse(
        self, plan: Plan, hidden: Tensor, weights: Tensor | None, topk: Tensor | None, counts: Tensor | None
    ) -> None:
        self._check_plan(plan)
        for name, value in (("topk_experts_sk", topk), ("tokens_per_expert", counts)):
            if value is not None:
                raise ValueError(f"{name}: given a tensor with a plan, expected None: the plan fixes the routing")
        self._check_rows(hidden, weights, plan.num_tokens)

    def _check_plan(self, plan: object) -> None:
        if not isinstance(plan, Plan):
            raise ValueError(f"plan: given {type(plan).__name__}, expected the Plan that dispatch returned")
        if plan.owner != self._id:
            raise ValueError("plan: given a plan of another Buffer, expected one that this Buffer's dispatch returned")

    def _check_pool(self, pool: ExpertPool, slot_set: int) -> None:
        from moonep.pool import ExpertPool

        if not isinstance(pool, ExpertPool):
            raise ValueError(f"pool: given {type(pool).__name__}, expected an ExpertPool")
        if (pool.E, pool.B, pool.R) != (self.dims.E, self.dims.B, self.dims.R) or pool.rank != self.rank:
            raise ValueError(
                f"pool: given E, B, ranks = {pool.E}, {pool.B}, {pool.R}, "
                f"expected those of the Buffer: {self.dims.E}, {self.dims.B}, {self.dims.R}"
            )
        pool.check_slot_set(slot_set)

    def _check_view(self, name: str, tensor: Tensor | None, views: list[Tensor]) -> None:
        if tensor is None or all(tensor.data_ptr() != v.data_ptr() for v in views):
            given = "None" if tensor is None else f"a tensor of its own, {arguments.describe(tensor)}"
            raise ValueError(f"{name}: given {given} with zero copy, expected a view of this Buffer's rows")

    def _region_of(self, hidden: Tensor) -> RowRegion:
        backend = self._backend
        return backend.forward if hidden.data_ptr() == backend.forward.rows.data_ptr() else backend.gradient


class _Operation:
    """See `Buffer._operation`. (Written out: a generator, and `torch.no_grad`, take longer than all else here.)"""

    __slots__ = ("_buffer", "_collective", "_had_gradients", "_name")

    def __init__(self, buffer: Buffer, name: str, collective: bool):
        self._buffer, self._name, self._collective = buffer, name, collective

    def __enter__(self) -> None:
        buffer = self._buffer
        buffer._check_live(self._name)
        if buffer._broken is not None:
            raise buffer._broken.again()
        barrier = buffer._backend.barrier
        if self._collective:
            barrier.begin(self._name)
        try:
            barrier.check()
        except BaseException as error:
            buffer._fail(self._name, self._collective, error)
            raise
        self._had_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        torch._C._set_grad_enabled(self._had_gradients)
        if error is not None:
            self._buffer._fail(self._name, self._collective, error)
