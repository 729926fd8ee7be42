"""The CUDA backend: the operations as Triton kernels over symmetric memory. Nothing here waits for the device.

An operation is a list of launches (`GpuBackend._dispatch_stages` and others), made once for each kind of call; a call
fills in what it brings. The same code runs in Triton's interpreter on memory of the host (`interpreter`), which is how
it is tested without a GPU. The caller (`Buffer`) has checked what can be checked without looking at data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from moonep.arguments import align
from moonep.backends import movers
from moonep.backends.cpu import CompletedEvent
from moonep.backends.regions import RowRegion, row_regions
from moonep.dims import Dims, ceil_div
from moonep.environment import interpreting
from moonep.errors import PeerError, PeerTimeout
from moonep.kernels import barrier as barriers
from moonep.kernels import dispatch, load, rows, solve
from moonep.kernels.launch import Launch, Launches
from moonep.memory import Memory
from moonep.memory.barrier import OPERATIONS, extend_range, pack_range
from moonep.memory.peers import Peers
from moonep.memory.regions import Layout, Region
from moonep.plan import Plan, PlanLayout

_INTERPRETER_SPINS_A_SECOND = 2000

Given = dict[str, Tensor | int | None]
"""What a call brings for its launches, by the names that the launchers say."""


# The stream of the last operation on a device, its address, and whether it was captured in a graph.
_last_operation: dict[torch.device, tuple[torch.cuda.Stream, int, bool]] = {}


class GpuBarrier:
    """Counts operations, lets ranks wait for each other on the device, and turns status words into exceptions.

    A status word has no room for a message: a rank that refuses or fails leaves a note, which its peers read only then.
    """

    def __init__(self, signals: barriers.Signals, peers: Peers, timeout_s: float, early: bool = False):
        self.rank, self.size, self.timeout_s = peers.rank, peers.size, timeout_s
        self.signals, self._peers = signals, peers
        self._reported = (ctypes.c_int32 * 2).from_address(signals.host_status.data_ptr())
        self._subject = f"barrier {peers.exchanges}"  # the same on all ranks, another for each Buffer
        self.operation = OPERATIONS[0]
        self.limit = int(timeout_s * (_INTERPRETER_SPINS_A_SECOND if interpreting() else 1e9))
        self._on_gpu = signals.status.is_cuda
        self._barrier = Launches(self._stages, signals.status.device, early)
        self._number = 0
        self._refused = (1, 0)
        self.entered = False  # whether this rank has waited in the current operation: peers count on it

    def begin(self, operation: str) -> None:
        """Enter the next operation."""
        self._number += 1
        self.entered = False
        self.operation = operation

    def refuse(self, message: str) -> None:
        """This rank does not take part in the current operation; nothing of it has been written."""
        self._refused = extend_range(self._refused, self._number)
        self._peers.leave_note(f"{self._subject} refused", message)
        self._announce(poison=False)

    def poison(self, message: str) -> None:
        """This rank failed in the middle of the current operation and takes part in nothing any more."""
        self._peers.leave_note(f"{self._subject} failed", message)
        self._announce(poison=True)

    def _announce(self, poison: bool) -> None:
        device = self.signals.status.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            barriers.announce(self.signals, self.rank, self.size, pack_range(self._refused), poison)

    def wait(self) -> None:
        """Enqueue a barrier: what every rank wrote before is visible to what is enqueued after it."""
        self._barrier.run((), self.waiting())

    def _stages(self) -> list[Launch]:
        return [self.launch()]

    def launch(self) -> Launch:
        """A barrier, as part of what is launched."""
        return barriers.barrier(self.signals, self.rank, self.size, self.limit)

    def waiting(self) -> Given:
        """What is given to a kernel that waits: `operation` and `number` of the current operation."""
        self.entered = True
        capturing = self._on_gpu and torch.cuda.is_current_stream_capturing()
        return {"operation": OPERATIONS.index(self.operation), "number": -1 if capturing else self._number}

    def check(self) -> None:
        """Raise what the device has reported so far.

        Raises:
            ValueError: expert ids or counts of an earlier dispatch were wrong; those ids counted as masked.
            PeerError, PeerTimeout: a barrier failed.
        """
        error = self.failure()
        if error is None:
            return
        if isinstance(error, ValueError):
            self._reported[1] = 0
        raise error

    def failure(self) -> ValueError | PeerError | None:
        """What the device has reported, read from host memory."""
        status = self._reported[0] or self._reported[1]
        if status == 0:
            return None
        kind, peer, mine, theirs = barriers.decode(status)
        if kind in (barriers.BAD_ID, barriers.BAD_COUNT):
            return ValueError(
                "topk_experts_sk: given ids out of range in an earlier dispatch (they counted as masked), "
                "expected -1 (no assignment) or an expert id"
                if kind == barriers.BAD_ID
                else "tokens_per_expert: given counts that differ from topk_experts_sk in an earlier dispatch, "
                "expected the number of assignments of each expert"
            )
        operation = OPERATIONS[mine]
        if kind == barriers.TIMEOUT:
            text = f"did not arrive within {self.timeout_s:g} s; rank {self.rank} waited"
            return PeerTimeout(peer, operation, text, self.rank, self.timeout_s)
        if kind == barriers.OTHER_OPERATION:
            called = OPERATIONS[theirs] if theirs < len(OPERATIONS) else "something else"
            return PeerError(peer, operation, f"called {called} instead")
        refused = kind == barriers.REFUSED
        note = self._peers.read_note(f"{self._subject} {'refused' if refused else 'failed'}", peer)
        text = "refused its arguments" if refused else "failed"
        return PeerError(peer, operation, f"{text}: {note}" if note else text)


class GpuBackend:
    """Memory and movers of one Buffer on a GPU, or in the interpreter on memory of the host."""

    def __init__(
        self,
        dims: Dims,
        dtype: torch.dtype,
        peers: Peers,
        timeout_s: float,
        memory: Memory,
        num_sms: int | None,
        num_local_sms: int | None,
        stream_priority: int,
        early: bool = False,
        kind_of_movers: str | None = None,
    ):
        d = self.dims = dims
        self.dtype, self.peers, self.rank = dtype, peers, peers.rank
        self.device = memory.device
        self.name = memory.device.type if memory.device.type == "cuda" else "interpreter"
        regions = [
            Region("signals", (d.R,), torch.int32),
            Region("faults", (d.R, barriers.NUM_FAULTS), torch.int64),
            Region("load", (d.R, d.E), torch.int32),
            Region("tokens", (d.R,), torch.int32),
            Region("arriving_weights", (d.R, d.S, d.K), torch.float32),
        ]
        kind_of_movers = kind_of_movers or movers.choose(self.device, d, dtype)
        make_movers = movers.BulkMovers if kind_of_movers == "bulk" else movers.PortableMovers
        self.layout = Layout([*regions, *make_movers.regions(d), *row_regions(d, dtype)])
        self._views = self._map(memory, timeout_s)
        mine = self._views[self.rank]
        for name in {"signals", "faults", "flags"} & mine.keys():
            mine[name].zero_()
        self.forward = RowRegion("forward", self._views, self.rank)
        self.gradient = RowRegion("gradient", self._views, self.rank)
        epoch, status, host_status = barriers.new_words(self.device)
        self.status, self.host_status = status, host_status
        signals = barriers.Signals(*self.of_all("signals"), *self.of_all("faults"), epoch, status, host_status)
        self.barrier = GpuBarrier(signals, peers, timeout_s, early)
        self.tables = rows.Tables.make(d, self.device)
        self.solution = solve.Solution.empty(d, self.device)
        self.plan_layout = PlanLayout(d)
        self._planning = Launches(self._plan_stages, self.device, early)
        self._dispatching = Launches(self._dispatch_stages, self.device, early)
        self._redispatching = Launches(self._redispatch_stages, self.device, early)
        self._combining = Launches(self._combine_stages, self.device, early)
        self._copying = Launches(self._copy_stages, self.device)
        self.stream: torch.cuda.Stream | None = None
        self.movers = make_movers(self, num_sms, num_local_sms)
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device, priority=stream_priority)
            torch.cuda.synchronize(self.device)
        peers.all_gather(b"", "Buffer", timeout_s, "ready")  # all signals are zero before any rank signals

    def _map(self, memory: Memory, timeout_s: float) -> list[dict[str, Tensor]]:
        (data,) = memory.share([self.layout.nbytes], self.peers, "Buffer", timeout_s)
        mapping = memory.map(data)
        names = self.layout.regions
        views = [{n: self.layout.view(n, mapping, r * data[0].nbytes) for n in names} for r in range(self.dims.R)]
        self._stride_bytes = data[0].nbytes
        for chunk in data:
            chunk.close()
        return views

    def arriving(self, fresh: bool, has_weights: bool) -> tuple[Tensor | None, Tensor | None]:
        """Where sources write arrivals and route weights for this rank; None where they do not."""
        return self.mine("arrivals") if fresh else None, self.mine("arriving_weights") if has_weights else None

    def mine(self, name: str) -> Tensor:
        """A region of this rank."""
        return self._views[self.rank][name]

    def words_of(self, region: RowRegion) -> tuple[Tensor, int]:
        """A region's rows as kernels that copy address them: 32-bit words of rank 0, words to the next rank's."""
        rows_0, stride = self.of_all(f"{region.name}_rows")
        words = rows_0.view(torch.int32)
        return words, stride * rows_0.itemsize // words.itemsize

    def of_all(self, name: str) -> tuple[Tensor, int]:
        """A region as kernels address it: the tensor of rank 0, and the elements to the next rank's."""
        first = self._views[0][name]
        return first, self._stride_bytes // first.itemsize

    def check_routing(self, topk_sK: Tensor, counts_E: Tensor | None) -> Tensor | None:
        """Nothing that could be checked without waiting for the device."""
        return counts_E

    def run(self, async_finish: bool, tensors: Sequence[Tensor | None]) -> AbstractContextManager[list[Tensor | None]]:
        """Run an operation on the right stream, after the previous one. Yields a list to put its results in.

        `async_finish`: on the communication stream, after what the current stream has been given so far.
        """
        if self.stream is None:
            return nullcontext([])
        if not async_finish and torch.cuda.current_device() == self.device.index:
            self._follow()
            return nullcontext([])
        return self._run_elsewhere(async_finish, tensors)

    @contextmanager
    def _run_elsewhere(self, async_finish: bool, tensors: Sequence[Tensor | None]) -> Iterator[list[Tensor | None]]:
        assert self.stream is not None
        current = torch.cuda.current_stream(self.device)
        stream = self.stream if async_finish else current
        if stream != current:
            stream.wait_stream(current)
        results: list[Tensor | None] = []
        with torch.cuda.stream(stream):
            self._follow()
            yield results
        if stream != current:
            for t in (t for t in tensors if t is not None):
                t.record_stream(stream)
            for t in (t for t in results if t is not None):
                t.record_stream(current)

    def _follow(self) -> None:
        """Let the current stream wait for the last operation of any Buffer on this device, if that went to another.

        Kernels wait for peers, and may fill a GPU meanwhile: two that ranks start in different order would wait for
        each other. So operations follow each other in the order of the host, which is the same on all ranks. In a graph
        they can only wait for those in the same graph, and nothing else for those.
        """
        address, capturing = self._current_stream(), torch.cuda.is_current_stream_capturing()
        last = _last_operation.get(self.device)
        if last is not None and last[1:] == (address, capturing):
            return
        stream = torch.cuda.current_stream(self.device)
        together = last is not None and last[2] == capturing and (not capturing or _is_capturing(last[0]))
        if last is not None and last[1] != address and together:
            stream.wait_stream(last[0])
        _last_operation[self.device] = (stream, address, capturing)

    def _current_stream(self) -> int:
        """The address of the current stream."""
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def synchronize(self) -> None:
        """Wait for all operations so far."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)

    def event(self, async_finish: bool) -> CompletedEvent | torch.cuda.Event | None:
        """An event of the operation that has just been enqueued."""
        if not async_finish:
            return None
        return CompletedEvent() if self.stream is None else self.stream.record_event()

    def plan(self, topk_sK: Tensor, counts_E: Tensor | None, owner: int, weights_sK: Tensor | None = None) -> Plan:
        """Plan. One cross-rank barrier. The plan's arrivals are filled by the movers, from what sources write now."""
        plan = self._new_plan(topk_sK, owner)
        options = (counts_E is not None, weights_sK is not None)
        self._planning.run(options, self._routing(topk_sK, counts_E, weights_sK), plan)
        return plan

    def dispatch(
        self, hidden_sH: Tensor, weights_sK: Tensor | None, topk_sK: Tensor, counts_E: Tensor | None, owner: int
    ) -> Plan:
        """Plan, and send rows into the forward region of every rank."""
        plan = self._new_plan(topk_sK, owner)
        given = self._routing(topk_sK, counts_E, weights_sK)
        given["hidden"] = align(hidden_sH)
        self.forward.touch()
        self._dispatching.run((counts_E is not None, weights_sK is not None), given, plan)
        return plan

    def dispatch_with_plan(self, plan: Plan, hidden_sH: Tensor, weights_sK: Tensor | None, sync: bool) -> None:
        """Send rows into the gradient region of every rank."""
        given = self.barrier.waiting()
        given["hidden"], given["num_tokens"], given["route_weights"] = align(hidden_sH), plan.num_tokens, weights_sK
        if weights_sK is not None:
            given["num_weights"] = weights_sK.numel()
            given["weight_blocks"] = ceil_div(weights_sK.numel(), dispatch.WEIGHTS_PER_PROGRAM)
        self.gradient.touch()
        self._redispatching.run((sync, weights_sK is not None), given, plan)

    def combine(
        self, plan: Plan, hidden_CH: Tensor, weights_C: Tensor | None, sync: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Push each token's partial sum to its rank, then sum the partial sums."""
        d, s = self.dims, plan.num_tokens
        if weights_C is not None and weights_C.data_ptr() != self.gradient.weights.data_ptr():
            if sync:
                self.barrier.wait()  # as in `_combine_stages`
            self.gradient.weights.copy_(weights_C)
            sync = False
        output = torch.empty(s, d.H, dtype=self.dtype, device=self.device)
        gathered = None if weights_C is None else torch.empty(s, d.K, device=self.device)
        given = self.barrier.waiting()
        given["hidden"], given["output"], given["gathered"] = align(hidden_CH), output, gathered
        given["num_tokens"] = s
        self._combining.run((sync, weights_C is not None), given, plan)
        return output, gathered

    def copy_rows(self, region: RowRegion, plan: Plan) -> Tensor:
        """The region's rows in a tensor of their own; those past the last offset are undefined."""
        copy = torch.empty_like(region.rows)
        self._copying.run((region,), {"target": copy}, plan)
        return copy

    def _new_plan(self, topk_sK: Tensor, owner: int) -> Plan:
        layout = self.plan_layout
        return Plan(layout, self.rank, owner, layout.empty(topk_sK.shape[0], self.device), self.status)

    def _routing(self, topk_sK: Tensor, counts_E: Tensor | None, weights_sK: Tensor | None) -> Given:
        """What is given to the stages of planning."""
        given, s = self.barrier.waiting(), topk_sK.shape[0]
        given["topk"], given["counts"], given["route_weights"] = topk_sK, counts_E, weights_sK
        given["num_tokens"], given["num_blocks"] = s, ceil_div(s, load.block_tokens(self.dims.K))
        return given

    # What is launched. Which barrier orders what: `docs/memory.md`.

    def _plan_stages(self, has_counts: bool, has_weights: bool) -> list[Launch]:
        d, rank, status, tables, signals = self.dims, self.rank, self.status, self.tables, self.barrier.signals
        loads, tokens = self.of_all("load"), self.of_all("tokens")
        arrivals, weights = self.of_all("arrivals"), self.of_all("arriving_weights")
        return [
            *load.count_load(tables.blocks, *loads, *tokens, signals, rank, d, has_counts),
            # From here on all loads are there, and nobody reads forward rows and arrivals any more.
            solve.solve_agreed(self.mine("load"), self.solution, d, signals, rank, self.barrier.limit),
            rows.lay_rows(self.mine("load"), self.mine("tokens"), self.solution, status, tables, rank, d),
            rows.assign_rows(*arrivals, *weights, status, tables, rank, d, has_weights),
        ]

    def _dispatch_stages(self, has_counts: bool, has_weights: bool) -> list[Launch]:
        return [
            *self._plan_stages(has_counts, has_weights),
            *self.movers.move(self.forward, fresh=True, has_weights=has_weights),
        ]

    def _redispatch_stages(self, sync: bool, has_weights: bool) -> list[Launch]:
        send = dispatch.send_weights(self.status, *self.of_all("arriving_weights"), self.rank)
        return [
            *([self.barrier.launch()] if sync else []),  # nobody reads the gradient region any more
            *([send] if has_weights else []),
            *self.movers.move(self.gradient, fresh=False, has_weights=has_weights),
        ]

    def _combine_stages(self, sync: bool, has_weights: bool) -> list[Launch]:
        return [
            # Everybody has read its staging, and gathered the route weights.
            *([self.barrier.launch()] if sync else []),
            *self.movers.sum(has_weights),
        ]

    def _copy_stages(self, region: RowRegion) -> list[Launch]:
        words = region.rows.view(torch.int32)
        return [dispatch.copy_used(words, self.status, self.dims, self.movers.local_programs)]

    def copy_weights(self, region: RowRegion, plan: Plan) -> Tensor:
        """The region's route weights in a tensor of their own; those past the last offset are undefined."""
        return region.weights.clone()


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    """Whether what a stream is given now is captured in a graph."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
