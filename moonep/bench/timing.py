"""Samples: from a common start on all ranks to the slowest rank's end.

On a GPU a sample starts when the hosts have met: each enqueues a delay, long enough to enqueue everything else behind
it, then a barrier of the devices (hosts leave their meeting tens of microseconds apart), an event, the call and another
event. On a CPU it is the wall clock of the call after the hosts have met.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from moonep.bench.hosts import Hosts

Call = Callable[[], Any]

WARMUP = 3
FLUSH_BYTES = 256 << 20  # more than the L2 of any GPU
CYCLES_PER_US = 2000  # of the SM clock, at most
_DELAY_US, _MAX_DELAY_US = 300, 20_000


def quantiles(samples_us: list[float]) -> dict[str, Any]:
    """Median, p10 and p90, and how many samples there are."""
    p10, median, p90 = torch.tensor(samples_us, dtype=torch.float64).quantile(torch.tensor([0.1, 0.5, 0.9]).double())
    return {
        "median_us": round(float(median), 2),
        "p10_us": round(float(p10), 2),
        "p90_us": round(float(p90), 2),
        "samples": len(samples_us),
    }


class Stopwatch:
    """Takes samples. Every rank calls the same methods in the same order.

    Args:
        device: of this rank.
        hosts: of all ranks.
        align: enqueues a barrier of the devices of all ranks; None: the hosts' meeting is the start.
        cold: flush the L2 cache before each sample.
    """

    def __init__(self, device: torch.device, hosts: Hosts, align: Call | None = None, cold: bool = False):
        self.device, self.hosts, self.align = device, hosts, align
        self.cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if cold and self.cuda else None

    def measure(self, call: Call, samples: int) -> list[float]:
        """Microseconds of the slowest rank, a value a sample. Warms up first."""
        return self.alternate({"call": call}, samples)["call"]

    def alternate(self, calls: Mapping[str, Call], samples: int) -> dict[str, list[float]]:
        """The same for several calls, whose samples take turns."""
        delays = {name: self._warm_up(call) for name, call in calls.items()}
        mine: dict[str, list[float]] = {name: [] for name in calls}
        with _no_collection():
            for _ in range(samples):
                for name, call in calls.items():
                    mine[name].append(self._sample(call, delays[name]))
        return _slowest(self.hosts.exchange(mine))

    def host_time(self, call: Call, samples: int) -> list[float]:
        """Microseconds of this host until the call returns, with an idle device; of the slowest rank."""
        for _ in range(WARMUP):
            call()
        mine = []
        with _no_collection():
            for _ in range(samples):
                self.synchronize()
                self.hosts.meet()
                start = time.perf_counter()
                call()
                mine.append((time.perf_counter() - start) * 1e6)
        self.synchronize()
        return _slowest(self.hosts.exchange({"call": mine}))["call"]

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _warm_up(self, call: Call) -> int:
        """Call a few times. -> cycles of the delay that hides the launches of the slowest host"""
        host_us = 0.0
        for _ in range(WARMUP):
            self.synchronize()
            self.hosts.meet()
            start = time.perf_counter()
            call()
            host_us = (time.perf_counter() - start) * 1e6  # the last one counts: the first ones compile
        self.synchronize()
        slowest = max(self.hosts.exchange(host_us))
        return int(min(_DELAY_US + 1.5 * slowest, _MAX_DELAY_US) * CYCLES_PER_US)

    def _sample(self, call: Call, delay_cycles: int) -> float:
        self.synchronize()
        self.hosts.meet()
        if not self.cuda:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self._flush is not None:
            self._flush.zero_()
        torch.cuda._sleep(delay_cycles)
        if self.align is not None:
            self.align()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) * 1e3


def capture(call: Call, repeat: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture `repeat` calls in one graph. -> the graph, and what the last call returned, filled by each replay"""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    output = None
    # Other threads (a communication library's watchdog) may touch CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeat):
            output = call()
    return graph, output


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection in the middle of a sample."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _slowest(by_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: [max(sample) for sample in zip(*(r[name] for r in by_rank), strict=True)] for name in by_rank[0]}
