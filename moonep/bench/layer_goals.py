"""Which result lines measure the goals of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonep.bench.layer_memory import PEAK_MEMORY
from moonep.bench.layer_peers import LAYER, NO_PREFETCH
from moonep.bench.products import GEMM, WEIGHT_GRAD

Line = dict[str, Any]

# The machine of the goals, and the sizes: EP=2, bf16, 48 home experts as at EP=8 with E=384.
SIZES = {
    "R": 2, "S": 8192, "H": 7168, "K": 8, "E": 96, "F": 2048, "tokens": 8192,
    "backend": "cuda", "balance": "exact", "cold": False,
}  # fmt: skip
BALANCED = ("hot_rank", 1.0)
SKEWED = [("hot_rank", value) for value in (1.25, 1.5, 1.9)] + [("lognormal", value) for value in (0.2, 1.0, 10.0)]


def measured(lines: Sequence[Line]) -> dict[str, float | None]:
    """Each goal's value from the lines of one set, oldest first; None where it was not measured."""
    lines = [line for line in lines if all(line.get(key) == value for key, value in SIZES.items())]
    most_skewed = ("hot_rank", 1.9)
    whole, without = _us(lines, LAYER, most_skewed), _us(lines, NO_PREFETCH, most_skewed)
    return {
        "layer_ideal_ratio_min": _ideal_ratio(lines),
        "layer_vs_a2a_125": _against(lines, "all_to_all", 1.25),
        "layer_vs_a2a_190": _against(lines, "all_to_all", 1.9),
        "layer_vs_deepep_125": _against(lines, "deepep_v2", 1.25),
        "layer_vs_deepep_190": _against(lines, "deepep_v2", 1.9),
        "exposed_prefetch_fraction": None if whole is None or without is None else round(1 - without / whole, 4),
        "gemm_ratio": _product_ratio(lines, GEMM),
        "wgrad_ratio": _product_ratio(lines, WEIGHT_GRAD),
        "peak_memory_growth": _growth(lines),
    }


def _ideal_ratio(lines: list[Line]) -> float | None:
    """Balanced time over the longest of all skewed ones; needs all of them."""
    balanced, skewed = _us(lines, LAYER, BALANCED), [_us(lines, LAYER, routing) for routing in SKEWED]
    known = [us for us in skewed if us is not None]
    return None if balanced is None or len(known) < len(SKEWED) else round(balanced / max(known), 4)


def _against(lines: list[Line], peer: str, imbalance: float) -> float | None:
    """Our time over the peer's, with its faster variant where there are several."""
    ours = _us(lines, LAYER, ("hot_rank", imbalance))
    variants = {line["variant"] for line in lines if line.get("peer") == peer}
    times = [_us(lines, LAYER, ("hot_rank", imbalance), peer, variant) for variant in variants]
    theirs = min((us for us in times if us is not None), default=None)
    return None if ours is None or theirs is None else round(ours / theirs, 4)


def _product_ratio(lines: list[Line], operation: str) -> float | None:
    """torch's time over ours: the last of each, which one run has timed in turn."""
    times = {peer: [line for line in lines if _is(line, operation, peer, None)] for peer in ("moonep", "torch")}
    if not all(times.values()):
        return None
    return round(float(times["torch"][-1]["median_us"] / times["moonep"][-1]["median_us"]), 4)


def _growth(lines: list[Line]) -> float | None:
    ours = [line for line in lines if line.get("operation") == PEAK_MEMORY and line.get("peer") == "moonep"]
    grown: list[float] = [line["growth"] for line in ours if line.get("growth") is not None]
    return grown[-1] if grown else None  # without a GPU, or with an error, there is none


def _us(
    lines: list[Line], operation: str, routing: tuple[str, float], peer: str = "moonep", variant: str = "rows"
) -> float | None:
    """The last measured time of a row."""
    times = [
        float(line["median_us"])
        for line in lines
        if _is(line, operation, peer, variant) and (line["routing"]["kind"], line["routing"]["value"]) == routing
    ]
    return times[-1] if times else None


def _is(line: Line, operation: str, peer: str, variant: str | None) -> bool:
    named = (line.get("operation"), line.get("peer"), line.get("variant")) == (operation, peer, variant)
    return named and "median_us" in line
