"""One rank's part: open the Buffer of a setting, then gate and time row after row. Rank 0 reports each line at once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import moonep
from moonep.bench.ceilings import ceiling
from moonep.bench.gate import Expected
from moonep.bench.hosts import ERROR, GATE, SKIPPED, Hosts, RowFailed
from moonep.bench.operations import Layer, Operation
from moonep.bench.settings import GRAPH, LOCAL_ALL, Case, Options, Row, Setting
from moonep.bench.timing import Stopwatch, capture, quantiles
from moonep.bench.weights import Weights, shapes
from moonep.testing import routing as routings
from moonep.testing.ranks import send

Line = dict[str, Any]
Report = Callable[[Line], None]

DTYPE = torch.bfloat16
PAYLOAD_SEED = 7


def measure_setting(setting: Setting, options: Options, number: int, report: Report | None = None) -> None:
    """Measure all rows of a setting. Collective: every rank of the world calls it.

    Args:
        setting: what to measure.
        options: how.
        number: different for each call in a world.
        report: takes the lines, on rank 0; None: they go to the parent process.
    """
    alone = not dist.is_initialized()
    rank, size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    device = choose_device(options.backend, rank)
    hosts = Hosts(rank, size, 3 * options.peer_timeout_s, f"setting {number}")
    tell = (report or send) if rank == 0 else _say_nothing
    bench = _Bench(setting, options, hosts, device, tell)
    try:
        bench.run()
    finally:
        bench.close()


def choose_device(backend: str, rank: int) -> torch.device:
    """This rank's device, made the current one."""
    if backend != "cuda":
        return torch.device("cpu")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


ALL_OTHERS = 1 << 16  # more SMs than there are


def budget_arguments(sms: int | None, budget: str) -> dict[str, Any]:
    """How a Buffer is told what keeps to `sms` SMs: everything, or what crosses to other ranks."""
    return {"num_sms": sms, "num_local_sms": ALL_OTHERS if budget == LOCAL_ALL else None}


def _say_nothing(line: Line) -> None:
    pass


class _Bench:
    def __init__(self, setting: Setting, options: Options, hosts: Hosts, device: torch.device, report: Report):
        self.setting, self.options, self.hosts, self.device, self.report = setting, options, hosts, device, report
        self.buffer: moonep.Buffer | None = None
        self.weights: Weights | None = None
        self.stopwatch = Stopwatch(device, hosts, self._align, setting.cold)

    def run(self) -> None:
        """All rows of the setting; a row that fails is reported, and the rest goes on."""
        for case in self.setting.cases:
            self._run_case(case)
        if self.setting.ceilings:
            for row in self.setting.rows():
                if row.routing is None:
                    self._run_ceiling(row)

    def _run_ceiling(self, row: Row) -> None:
        self._run_row(row, {}, lambda: ceiling(row.operation, self._open(), self._meet))

    def _run_case(self, case: Case) -> None:
        s = self.setting.S if case.tokens is None else case.tokens
        rows = [Row(operation, mode, case.routing, s) for operation in case.operations for mode in case.modes]
        try:
            expected, about = self.hosts.attempt(lambda: self._expect(case, s))
        except RowFailed as failure:
            self._fail(rows, failure)
            return
        layer: Layer | None = None
        for row in rows:

            def operation(row: Row = row) -> Operation:
                nonlocal layer
                if layer is None or layer.buffer is not self.buffer:
                    layer = Layer(self._open(), expected, self._open_weights(), self._meet)
                return layer.operation(row.operation)

            self._run_row(row, about, operation)

    def _run_row(self, row: Row, about: Line, make: Callable[[], Operation]) -> None:
        try:
            measured = self.hosts.attempt(lambda: self._gate_and_time(make(), row.mode))
        except RowFailed as failure:
            self._fail([row], failure)
            return
        self.report({**self._record(row), **about, **measured})

    def _fail(self, rows: list[Row], failure: RowFailed) -> None:
        if failure.kind not in (GATE, SKIPPED):
            self._close_buffer()
        key = {GATE: "gate", ERROR: "error", SKIPPED: "skipped"}[failure.kind]
        for row in rows:
            self.report({**self._record(row), key: str(failure)})

    def _record(self, row: Row) -> Line:
        return {"R": self.hosts.size, "backend": self.options.backend, **self.setting.record(), **row.record()}

    def _expect(self, case: Case, s: int) -> tuple[Expected, Line]:
        """Rank 0 makes the routing for all, so that there is one."""
        d, R = self.setting, self.hosts.size
        made = case.routing.make(s, d.E, d.K, R, self.device) if self.hosts.rank == 0 else None
        topks = self.hosts.exchange(made)[0]
        expected = Expected(topks, self._open().dims, self.hosts.rank, self.device, DTYPE, PAYLOAD_SEED)
        about = {
            "maxvio": round(routings.maxvio(topks, d.E), 4),
            "rank_imbalance": round(routings.rank_imbalance(topks, d.E), 4),
            "copies": expected.copies_R,
            "transfers": expected.transfers_RR.tolist(),
        }
        return expected, about

    def _gate_and_time(self, operation: Operation, mode: str) -> Line:
        """Compare what one call gives with the specification; only then take times."""
        if mode == GRAPH and self.device.type != "cuda":
            raise ValueError(f"mode: given 'graph' on {self.device.type}, expected 'eager': only CUDA has graphs")
        repeat, call = 1, operation.call
        self._meet()
        if mode == GRAPH:
            repeat = operation.repeat
            graph, output = capture(call, repeat)
            operation.prepare()
            self._meet()
            graph.replay()
            call = graph.replay
        else:
            operation.prepare()
            self._meet()
            output = call()
        self.stopwatch.synchronize()
        self._open().check()
        operation.check(output)
        self._meet()
        del output
        watch = self.stopwatch.host_time if operation.host_only else self.stopwatch.measure
        samples_us = [us / repeat for us in watch(call, self.options.samples)]
        self._open().check()
        line = {**quantiles(samples_us), "repeat": repeat, "clock": self._clock(operation)}
        for kind, nbytes in (("logical", operation.logical_bytes), ("physical", operation.physical_bytes)):
            if nbytes and not operation.host_only:
                line |= {f"{kind}_bytes": nbytes, f"{kind}_gbps": round(nbytes / line["median_us"] / 1000, 3)}
        return line

    def _clock(self, operation: Operation) -> str:
        if operation.host_only:
            return "host, until the call returns"
        return "device events" if self.device.type == "cuda" else "wall clock"

    def _align(self) -> None:
        self._open().barrier()

    def _meet(self) -> None:
        self.stopwatch.synchronize()
        self.hosts.meet()

    def _open(self) -> moonep.Buffer:
        if self.buffer is None:
            d = self.setting
            self.buffer = moonep.Buffer(
                d.S,
                d.H,
                d.K,
                d.E,
                self.hosts.size,
                token_padding=d.P,
                dtype=DTYPE,
                backend=self.options.backend,
                balance=d.balance,
                timeout_s=self.options.peer_timeout_s,
                **budget_arguments(d.sms, d.budget),
            )
        return self.buffer

    def _open_weights(self) -> Weights | None:
        d = self.setting
        if self.weights is None and d.F is not None:
            pool = moonep.ExpertPool(
                shapes(d.H, d.F),
                d.E,
                dtype=DTYPE,
                grads=True,
                shared=False,
                backend=self.options.backend,
                timeout_s=self.options.peer_timeout_s,
            )
            self.weights = Weights(pool)
            self._open().barrier()  # peers may read the weights
        return self.weights

    def _close_buffer(self) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            with contextlib.suppress(Exception):  # what broke it has been reported
                buffer.destroy()

    def close(self) -> None:
        """Give all memory back."""
        self._close_buffer()
        weights, self.weights = self.weights, None
        if weights is not None:
            weights.pool.destroy()
        del weights
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
