"""The goals: what must be reached, and which result lines measure it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moonep.bench import layer_goals
from moonep.bench.settings import EAGER, GRAPH, LOCAL_ALL, STRICT

Line = dict[str, Any]

# The machine of the goals, and the sizes: EP=2, S=8192, H=7168, K=8, bf16.
SIZES = {"R": 2, "S": 8192, "H": 7168, "K": 8, "backend": "cuda", "balance": "exact", "cold": False}
WIDE, WEIGHTS_E = 384, 96


@dataclass(frozen=True)
class Goal:
    """One figure.

    Attributes:
        key: its name in programs' output.
        what: for people.
        must, aim: at most these (or at least, if `higher`); None: no goal, shown for comparison.
        higher: whether more is better.
    """

    key: str
    what: str
    must: float | None
    aim: float | None
    higher: bool = False

    def met(self, value: float | None) -> bool | None:
        """Whether a value is as it must be; None: not measured, or no goal."""
        if value is None or self.must is None:
            return None
        return value >= self.must if self.higher else value <= self.must


OPERATION_GOALS = (
    Goal("dispatch_us_32", "dispatch incl. planning, 32 SMs across NVLink", 450, 400),
    Goal("combine_us_32", "combine, 32 SMs across NVLink", 520, 450),
    Goal("dispatch_us_16", "dispatch incl. planning, 16 SMs across NVLink", 600, 500),
    Goal("combine_us_16", "combine, 16 SMs across NVLink", 600, 550),
    Goal("growth_imbalance", "growth of dispatch + combine, imbalance 1.0 to 1.9", 1.05, 1.02),
    Goal("growth_maxvio", "growth of dispatch + combine, maxvio 0.2 to 20", 1.05, 1.02),
    Goal("nvlink_ratio_16", "dispatch's bandwidth / copy engine push, 16 SMs", 0.85, 0.92, higher=True),
    Goal("prefetch_ratio_16", "prefetch's bandwidth / copy engine pull, 16 SMs", 0.85, 0.90, higher=True),
    Goal("reduce_ratio_16", "reduce_grad's bandwidth / copy engine pull, 16 SMs", 0.85, 0.90, higher=True),
    Goal("plan_us", "planning alone (graph)", 30, 25),
    Goal("barrier_us", "barrier (graph)", 3, 2.5),
    Goal("decode8_us", "dispatch + combine of 8 tokens incl. planning (graph, auto)", 70, 60),
    Goal("host_us", "host time of a dispatch call, eager", 80, 60),
    Goal("deepep_v2_ratio_32", "dispatch + combine / DeepEP V2's, 32 SMs, same run", None, None),
)

# A layer is routed experts, forward and backward, E=96; balanced is imbalance 1.0.
LAYER_GOALS = (
    Goal("layer_ideal_ratio_min", "layer: balanced / longest, to imbalance 1.9 and maxvio 10", 0.93, 0.97, higher=True),
    Goal("layer_vs_a2a_125", "layer / on all_to_all, imbalance 1.25", 0.65, None),
    Goal("layer_vs_a2a_190", "layer / on all_to_all, imbalance 1.9", 0.48, None),
    Goal("layer_vs_deepep_125", "layer / on DeepEP V2, imbalance 1.25", 0.85, None),
    Goal("layer_vs_deepep_190", "layer / on DeepEP V2, imbalance 1.9", 0.60, None),
    Goal("exposed_prefetch_fraction", "share of prefetch and reduction in layer, imbalance 1.9", 0.05, None),
    Goal("gemm_ratio", "grouped product: torch's time / ours", 1.0, None, higher=True),
    Goal("wgrad_ratio", "weight gradients: torch's time / ours", 1.0, None, higher=True),
    Goal("peak_memory_growth", "peak memory of a layer over steps / in its first steps", 1.01, None),
)

GOALS = (*OPERATION_GOALS, *LAYER_GOALS)


def measured(lines: Iterable[Line]) -> dict[str, float | None]:
    """Each goal's value from the lines of one set, oldest first; None where it was not measured."""
    lines = list(lines)
    found = _Found([line for line in lines if "median_us" in line])
    return {
        "dispatch_us_32": found.us("dispatch", sms=32),
        "combine_us_32": found.us("combine", sms=32),
        "dispatch_us_16": found.us("dispatch", sms=16),
        "combine_us_16": found.us("combine", sms=16),
        # The worst of the sweep against its balanced end.
        "growth_imbalance": found.growth("hot_rank", 1.0),
        "growth_maxvio": found.growth("lognormal", 0.2),
        # Physical bytes: a token crosses once. The mover is dispatch with a plan (no planning), or its sending alone.
        "nvlink_ratio_16": _ratio(
            found.gbps("send_only", WIDE) or found.gbps("dispatch_with_plan", WIDE), found.ceiling("copy_push", WIDE)
        ),
        # The routing that moves most bytes: the least of its time is start-up.
        "prefetch_ratio_16": _ratio(found.gbps("prefetch", WEIGHTS_E), found.ceiling("copy_pull", WEIGHTS_E)),
        "reduce_ratio_16": _ratio(found.gbps("reduce_grad", WEIGHTS_E), found.ceiling("copy_pull", WEIGHTS_E)),
        "plan_us": found.us("plan", sms=32),
        "barrier_us": found.us("barrier", sms=32),
        "decode8_us": found.us("dispatch_combine", sms=32, S=None, tokens=8, balance="auto", kind="uniform", value=0),
        "host_us": found.us("dispatch_host", sms=32, mode=EAGER),
        "deepep_v2_ratio_32": found.against("deepep_v2"),
        **layer_goals.measured(lines),
    }


# Growth of everything on the critical path, weights included: shown beside the goals.
WITH_WEIGHTS = (
    Goal("growth_forward_imbalance", "growth of forward incl. prefetch, E=96, imbalance 1.0 to 1.9", 1.6, None),
    Goal("growth_forward_maxvio", "growth of forward incl. prefetch, E=96, maxvio 0.2 to 20", 1.6, None),
    Goal("growth_backward_imbalance", "growth of backward incl. reduce_grad, E=96, 1.0 to 1.9", None, None),
    Goal("growth_backward_maxvio", "growth of backward incl. reduce_grad, E=96, 0.2 to 20", None, None),
)


def measured_with_weights(lines: Iterable[Line]) -> dict[str, float | None]:
    """The values of WITH_WEIGHTS."""
    found = _Found([line for line in lines if "median_us" in line])
    return {
        f"growth_{direction}_{name}": found.growth(kind, base, (direction,), WEIGHTS_E)
        for direction in ("forward", "backward")
        for name, kind, base in (("imbalance", "hot_rank", 1.0), ("maxvio", "lognormal", 0.2))
    }


class _Found:
    """The lines that were measured, by what they say."""

    def __init__(self, lines: list[Line]):
        self.lines = lines

    def us(
        self,
        operation: str,
        sms: int,
        mode: str = GRAPH,
        kind: str = "hot_rank",
        value: float = 1.0,
        peer: str | None = None,
        **sizes: Any,
    ) -> float | None:
        """The last measured time of a row. Without other sizes: those of the goals, E = 384, all tokens, balanced."""
        wanted = {"operation": operation, "sms": sms, "mode": mode, "E": WIDE, "tokens": 8192, **SIZES, **sizes}
        rows = [line for line in self._where(wanted, peer) if _routing(line) == (kind, value)]
        line = _headline(rows)
        return None if line is None else float(line["median_us"])

    def growth(
        self, kind: str, base: float, operations: tuple[str, ...] = ("dispatch", "combine"), E: int = WIDE
    ) -> float | None:
        """max / balanced of the operations' sum over the values of a kind of routing; needs more than one."""
        rows = self._where({"operation": operations[0], "sms": 32, "E": E, **SIZES})
        values = {_routing(line)[1] for line in rows if _routing(line)[0] == kind}
        times = {value: self._sum(operations, kind, value, GRAPH, E=E) for value in values}
        known = {value: us for value, us in times.items() if us is not None}
        if base not in known or len(known) < 2:
            return None
        return round(max(known.values()) / known[base], 4)

    def _sum(
        self, operations: tuple[str, ...], kind: str, value: float, mode: str, peer: str | None = None, E: int = WIDE
    ) -> float | None:
        parts = [self.us(operation, 32, mode, kind, value, peer, E=E) for operation in operations]
        return None if None in parts else sum(us for us in parts if us is not None)

    def gbps(self, operation: str, E: int) -> float | None:
        """Physical bandwidth with 16 SMs, of the routing with most bytes."""
        wanted = {"operation": operation, "sms": 16, "mode": GRAPH, "E": E, **SIZES}
        rows = self._where(wanted)
        most = max((line.get("physical_bytes", 0) for line in rows), default=0)
        line = _headline([line for line in rows if most and line.get("physical_bytes") == most])
        return None if line is None else float(line["physical_gbps"])

    def ceiling(self, operation: str, E: int) -> float | None:
        """Bandwidth of the copy engines, measured with the same Buffer; else with any of the set."""
        for wanted in ({"sms": 16, "E": E}, {}):
            rows = self._where({"operation": operation, "R": 2, "backend": "cuda", **wanted})
            if rows:
                return float(rows[-1]["physical_gbps"])
        return None

    def against(self, peer: str) -> float | None:
        """Time of dispatch + combine over a peer's: 32 SMs, eager, side by side, balanced."""
        both = ("dispatch", "combine")
        theirs = self._sum(both, "hot_rank", 1.0, EAGER, peer)
        ours = self._sum(both, "hot_rank", 1.0, EAGER, "moonep")
        return None if ours is None or theirs is None else round(ours / theirs, 4)

    def _where(self, wanted: Line, peer: str | None = None) -> list[Line]:
        wanted = {key: value for key, value in wanted.items() if value is not None}
        same_peer = [line for line in self.lines if line.get("peer") == peer]
        return [line for line in same_peer if all(line.get(key) == value for key, value in wanted.items())]


def _routing(line: Line) -> tuple[str, float]:
    routing = line.get("routing") or {}
    return routing.get("kind", ""), routing.get("value", 0.0)


def _headline(rows: list[Line]) -> Line | None:
    """The newest of the rows whose local kernels use all SMs; where there are none, of the strict ones."""
    for budget in (LOCAL_ALL, STRICT):
        chosen = [line for line in rows if line.get("budget") == budget]
        if chosen:
            return chosen[-1]
    return None


def _ratio(value: float | None, ceiling: float | None) -> float | None:
    return None if value is None or not ceiling else round(value / ceiling, 4)
