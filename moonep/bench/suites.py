"""Lists of settings: what the goals need, what the figures need, and a sweep of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moonep.bench.operations import OPERATIONS, WITH_WEIGHTS
from moonep.bench.routings import Routing, TraceSizes
from moonep.bench.settings import EAGER, GRAPH, LOCAL_ALL, STRICT, Case, Setting

IMBALANCES = (1.0, 1.25, 1.5, 1.9)
MAXVIOS = (0.2, 1.0, 10.0, 20.0)
FEW_SMS, MANY_SMS = 16, 32
DECODE_CAPACITY, DECODE_TOKENS = 128, (1, 8, 32, 128)
MOVERS = ("dispatch", "dispatch_with_plan", "combine")


@dataclass(frozen=True)
class Sweep:
    """Everything that the command line can choose. Letters: `moonep.dims`."""

    H: int
    K: int
    E: int
    F: int
    weight_experts: int
    tokens: Sequence[int]
    sms: Sequence[int | None]
    modes: Sequence[str]
    maxvio: Sequence[float] = ()
    imbalance: Sequence[float] = ()
    adverse: Sequence[float] = ()
    routings: Sequence[str] = ()
    traces: Sequence[str] = ()
    trace_layers: Sequence[int] = ()
    operations: Sequence[str] = OPERATIONS
    balance: str = "exact"
    token_padding: int = 128
    cold: bool = False
    seed: int = 1
    budgets: Sequence[str] = (LOCAL_ALL, STRICT)

    def synthetic(self) -> list[Routing]:
        """The routings that do not come from a file."""
        kinds = (("lognormal", self.maxvio), ("hot_rank", self.imbalance), ("adverse", self.adverse))
        swept = [Routing(kind, value, self.seed) for kind, values in kinds for value in values]
        return swept + [Routing(name, seed=self.seed) for name in self.routings]


def sweep(chosen: Sweep, R: int) -> list[Setting]:
    """A setting for each capacity, number of SMs and budget; and one with weights, which E = 384 has no room for.

    Rows are the routings times the operations times the modes.
    """
    c = chosen
    plain = tuple(name for name in c.operations if name not in WITH_WEIGHTS)
    weighty = tuple(name for name in c.operations if name in WITH_WEIGHTS)
    settings = []
    for tokens in c.tokens:
        for sms in c.sms:
            for budget in c.budgets if sms is not None else c.budgets[:1]:
                one = Setting(
                    S=tokens, H=c.H, K=c.K, E=c.E, P=c.token_padding, sms=sms, budget=budget, balance=c.balance,
                    cold=c.cold, cases=(),
                )  # fmt: skip
                cases = tuple(Case(r, plain, tuple(c.modes)) for r in c.synthetic())
                if plain and cases:
                    settings.append(replace(one, cases=cases, ceilings=True))
                cases = tuple(Case(r, weighty, tuple(c.modes)) for r in c.synthetic())
                if weighty and cases:
                    settings.append(replace(one, cases=cases, E=c.weight_experts, F=c.F))
                settings += [_trace(one, path, plain, c, R) for path in c.traces if plain]
    return settings


def _trace(one: Setting, path: str, operations: tuple[str, ...], chosen: Sweep, R: int) -> Setting:
    """The layers of a trace: sizes K and E are the trace's, and a rank gets an equal share of its tokens."""
    sizes, routings = trace_routings(path, chosen, R)
    tokens = min(one.S, sizes.tokens // R)
    cases = tuple(Case(r, operations, tuple(chosen.modes), tokens) for r in routings)
    return replace(one, K=sizes.K, E=sizes.E, cases=cases)


def trace_routings(path: str, chosen: Sweep, R: int) -> tuple[TraceSizes, tuple[Routing, ...]]:
    """What a trace holds, and the routings of its chosen layers: else the first, the middle and the last."""
    sizes = TraceSizes.of(path, R)
    layers = chosen.trace_layers or sorted({0, sizes.layers // 2, sizes.layers - 1})
    return sizes, tuple(Routing("trace", layer, path=path) for layer in layers)


def goals(seed: int = 1) -> list[Setting]:
    """All that `moonep.bench.goals` needs, in few minutes on two GPUs. The most important first."""
    headline = LOCAL_ALL
    balanced = Routing("hot_rank", 1.0, seed)
    hot = [Routing("hot_rank", value, seed) for value in IMBALANCES[1:]]
    popular = [Routing("lognormal", value, seed) for value in MAXVIOS]
    adverse = Routing("adverse", 1.5, seed)
    few = ("dispatch", "combine")
    large = Setting(S=8192, H=7168, K=8, E=384, sms=MANY_SMS, budget=headline, cases=())
    main = replace(
        large,
        ceilings=True,
        cases=(
            Case(balanced, ("dispatch", "dispatch_with_plan", "combine", "plan", "barrier")),
            Case(balanced, ("dispatch_host", "dispatch", "combine"), (EAGER,)),
            *(Case(r, few) for r in [*hot, *popular, adverse]),
        ),
    )
    few_sms = replace(large, sms=FEW_SMS, ceilings=True, cases=(Case(balanced, (*MOVERS, "send_only")),))
    strict = [replace(large, sms=sms, budget=STRICT, cases=(Case(balanced, MOVERS),)) for sms in (MANY_SMS, FEW_SMS)]
    decode = [
        Setting(
            S=DECODE_CAPACITY, H=7168, K=8, E=384, sms=MANY_SMS, budget=headline, balance=balance,
            cases=tuple(
                Case(Routing("uniform", seed=seed), ("dispatch_combine",), tokens=s) for s in DECODE_TOKENS
            ),
        )
        for balance in ("auto", "exact")
    ]  # fmt: skip
    weights = replace(large, E=96, F=2048)
    moved = tuple(Case(r, ("prefetch", "reduce_grad")) for r in (popular[2], hot[-1]))
    stack = tuple(Case(r, (*MOVERS, *WITH_WEIGHTS)) for r in [balanced, *hot, *popular])
    return [
        main,
        few_sms,
        *decode,
        replace(weights, sms=FEW_SMS, ceilings=True, cases=moved),
        *strict,
        replace(weights, cases=stack),
    ]


def figures(seed: int = 1) -> list[Setting]:
    """Bandwidth against SMs and time against tokens, for the plots."""
    headline = LOCAL_ALL
    balanced = Routing("hot_rank", 1.0, seed)
    large = Setting(S=8192, H=7168, K=8, E=384, sms=MANY_SMS, budget=headline, cases=())
    by_sms = [
        replace(large, sms=sms, ceilings=sms == 8, cases=(Case(balanced, (*MOVERS, "send_only")),))
        for sms in (8, 16, 24, 32, 64)
    ]
    by_tokens = [
        replace(large, S=s, cases=(Case(Routing("uniform", seed=seed), ("dispatch", "combine"), (GRAPH, EAGER)),))
        for s in (1, 8, 32, 128, 512, 2048, 8192, 16384)
    ]
    weights = [
        replace(large, sms=sms, E=96, F=2048, cases=(Case(Routing("lognormal", 10.0, seed), WITH_WEIGHTS[:2]),))
        for sms in (8, 16, 32, 64)
    ]
    return [*by_sms, *by_tokens, *weights]
