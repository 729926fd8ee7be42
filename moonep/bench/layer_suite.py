"""What `moonep bench --suite layers` compares, the most important first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moonep.bench.comparison import Comparison
from moonep.bench.layer_memory import PeakMemory
from moonep.bench.layer_peers import OVERLAPS, OVERLAPS_OF_ONE_RANK
from moonep.bench.layers import Layers
from moonep.bench.loading import Loading
from moonep.bench.products import Products
from moonep.bench.routings import Routing
from moonep.bench.suites import Sweep, trace_routings
from moonep.bench.transformer import Transformer
from moonep.dims import align_up

PRODUCTS_IMBALANCE = 1.25
DENSE_TOKENS, DENSE_PEERS = 512, ("moonep", "all_to_all", "moonep_tokens")
"""Of all ranks together: few enough for a dense layer in fp32, with which these are compared."""
BIASES = {"cuda": (0.0, 0.015, 0.018), "cpu": (0.0, 0.01)}
"""Of routers of H=2048, E=128, K=8 with their initial weights: rank imbalance of about 1, 1.4 and 1.8 on two ranks."""


def products_routing(R: int, seed: int) -> Routing:
    """Skewed as far as there are ranks for it."""
    return Routing("hot_rank", PRODUCTS_IMBALANCE, seed) if R > 1 else Routing("lognormal", 1.0, seed)


def _most_skewed(routings: Sequence[Routing]) -> Routing:
    """A hot rank before popular experts, but any of these before a hot rank that is not hot."""
    return max(routings, key=lambda routing: (routing.kind == "hot_rank" and routing.value > 1, routing.value))


def compare_layers(chosen: Sweep, R: int, device: str, samples: int, steps: int) -> list[Comparison]:
    """What a layer is compared in: itself with all routings and with traces, its parts, memory, training steps.

    Args:
        chosen: sizes (E is its `weight_experts`; the first of tokens and SMs count), routings and traces.
        R: ranks.
        device: "cuda" or "cpu".
        samples: of each row.
        steps: of the rows about memory.
    """
    c = chosen
    routings = tuple(sorted(c.synthetic(), key=lambda routing: routing.kind != "hot_rank"))
    layers = Layers(
        c.tokens[0], c.H, c.K, c.weight_experts, routings, sms=c.sms[0], device=device, samples=samples,
        F=c.F, P=c.token_padding,
    )  # fmt: skip
    same = {field: getattr(layers, field) for field in ("S", "H", "K", "E", "sms", "device", "samples", "F", "P")}
    skewed = products_routing(R, c.seed)
    comparisons: list[Comparison] = [layers] if routings else []
    if routings:
        few = max(DENSE_TOKENS // R, 1)
        overlaps = tuple(OVERLAPS) if R > 1 else OVERLAPS_OF_ONE_RANK
        comparisons += [
            Products(**same, routings=(skewed,)),
            Loading(**same, routings=(skewed,)),
            *([replace(layers, S=few, routings=(skewed,), peers=DENSE_PEERS)] if few < layers.S else []),
            replace(layers, routings=(_most_skewed(routings),), peers=overlaps),
            PeakMemory(**same, routings=(Routing("hot_rank", 1.0, c.seed),), steps=steps),
            small_transformer(device, c, R, samples),
        ]
    for path in c.traces:
        sizes, of_trace = trace_routings(path, c, R)
        tokens = min(layers.S, sizes.tokens // R)
        comparisons.append(replace(layers, S=tokens, K=sizes.K, E=sizes.E, routings=of_trace))
    return comparisons


def small_transformer(device: str, c: Sweep, R: int, samples: int) -> Transformer:
    """The training steps: on GPUs of a model with 4 layers and 2.4 billion parameters in experts."""
    routings = tuple(Routing("router_bias", bias, c.seed) for bias in BIASES[device])
    S, H, K, E, F, layers = (8192, 2048, 8, 128, 768, 4) if device == "cuda" else (64, 32, 2, 16, 16, 2)
    return Transformer(
        S, H, K, align_up(E, R), routings, device=device, samples=samples, F=F, P=c.token_padding, layers=layers
    )  # fmt: skip
