"""The benchmarks tell no time for a wrong output, fail in step, and read the goals from the right lines."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moonep
from moonep.bench import goals, results, side_by_side, suites
from moonep.bench.gate import Expected, row_factor
from moonep.bench.hosts import GateError, Hosts, RowFailed
from moonep.bench.measure import measure_setting
from moonep.bench.operations import OPERATIONS, Layer
from moonep.bench.peers import PEERS, AllToAll, World
from moonep.bench.routings import Routing, TraceSizes
from moonep.bench.settings import EAGER, GRAPH, STRICT, Case, Options, Setting
from moonep.bench.side_by_side import Comparison
from moonep.bench.timing import Stopwatch, quantiles
from moonep.testing.ranks import send
from moonep.testing.routing import rank_imbalance, uniform

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
OPTIONS = Options("cpu", samples=3, peer_timeout_s=5.0)
SMALL = Setting(S=24, H=16, K=2, E=8, P=8, F=8, cases=())


def load(name: str) -> ModuleType:
    """A program of the benchmarks as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# Measuring.


def measure(setting: Setting, spoil: str | None = None, number: int = 0) -> list[dict[str, Any]]:
    """The lines of a setting on rank 0; with `spoil`, one rank's operation of the Buffer gives a wrong output."""
    lines: list[dict[str, Any]] = []
    original = moonep.Buffer.combine
    if spoil == "combine" and dist.get_rank() == 1:
        moonep.Buffer.combine = lambda self, *args, **kwargs: (  # type: ignore[method-assign]
            original(self, *args, **kwargs)[0] + 1,
            None,
            None,
        )
    if spoil == "raise" and dist.get_rank() == 1:
        moonep.Buffer.combine = lambda self, *args, **kwargs: 1 / 0  # type: ignore[method-assign,assignment]
    try:
        measure_setting(setting, OPTIONS, number, report=lines.append)
    finally:
        moonep.Buffer.combine = original  # type: ignore[method-assign]
    return lines


def test_every_operation_is_gated_timed_and_has_its_bytes(ranks):
    case = Case(Routing("hot_rank", 1.5), OPERATIONS, (EAGER,))
    lines, others = ranks(2).run(measure, replace(SMALL, cases=(case,), ceilings=True), None, 101)
    assert others == []  # rank 0 reports
    by_operation = {line["operation"]: line for line in lines}
    assert list(by_operation) == [*OPERATIONS, "copy_push", "copy_pull", "hbm_copy"]
    assert "does not plan apart" in by_operation.pop("plan")["skipped"]
    for name, line in by_operation.items():
        assert line["samples"] == 3 and 0 < line["p10_us"] <= line["median_us"] <= line["p90_us"], name
    dispatch = by_operation["dispatch"]
    transfers = torch.tensor(dispatch["transfers"])
    assert dispatch["physical_bytes"] == int(transfers.fill_diagonal_(0).sum(1).max()) * 16 * 2
    assert dispatch["logical_bytes"] == 24 * 2 * 16 * 2
    assert dispatch["rank_imbalance"] == pytest.approx(1.5, rel=0.03)
    assert by_operation["prefetch"]["physical_bytes"] == max(dispatch["copies"]) * 3 * 16 * 8 * 2 > 0
    assert by_operation["hbm_copy"]["physical_bytes"] == 2 * by_operation["copy_push"]["physical_bytes"]


def test_a_wrong_output_of_one_rank_has_no_time_and_the_rest_goes_on(ranks):
    case = Case(Routing("uniform"), ("combine", "dispatch"), (EAGER,))
    combine, dispatch = ranks(2).run(measure, replace(SMALL, cases=(case,)), "combine", 102)[0]
    assert "combined tokens: 384 of 384 elements differ from the specification" in combine["gate"]
    assert "median_us" not in combine
    assert dispatch["median_us"] > 0


def test_a_row_that_raises_on_one_rank_is_an_error_of_all_and_the_rest_goes_on(ranks):
    start = time.monotonic()
    case = Case(Routing("uniform"), ("combine", "dispatch"), (EAGER,))
    combine, dispatch = ranks(2).run(measure, replace(SMALL, cases=(case,)), "raise", 103)[0]
    assert "ZeroDivisionError" in combine["error"] and "median_us" not in combine
    assert dispatch["median_us"] > 0
    assert time.monotonic() - start < 30


def test_a_routing_out_of_reach_is_an_error_of_its_rows_alone(ranks):
    cases = (
        Case(Routing("lognormal", 99.0), ("dispatch",), (EAGER,)),
        Case(Routing("uniform"), ("dispatch",), (EAGER,)),
    )
    wrong, right = ranks(2).run(measure, replace(SMALL, cases=cases), None, 104)[0]
    assert "maxvio must be between" in wrong["error"]
    assert right["median_us"] > 0


def test_graphs_need_a_gpu(ranks):
    case = Case(Routing("uniform"), ("dispatch",), (GRAPH,))
    (line,) = ranks(2).run(measure, replace(SMALL, cases=(case,)), None, 105)[0]
    assert "only CUDA has graphs" in line["error"]


def spoil_each_output() -> list[str]:
    """What the gate says of outputs of one rank alone that have one wrong element each."""
    buffer = moonep.Buffer(16, 16, 2, 4, 1, token_padding=8, backend="cpu")
    topks = uniform(15, 4, 2, 1)
    expected = Expected(topks, buffer.dims, 0, torch.device("cpu"), torch.bfloat16, 1)
    layer = Layer(buffer, expected, None, lambda: None)
    messages = []
    for name in ("rows", "weights", "arrivals", "dst"):
        hidden, weights, _, plan = layer._dispatch()
        target = {
            "rows": hidden[1],
            "weights": weights[1:2],
            "arrivals": plan.arrivals[0, 0, :1],
            "dst": plan.dst[1:2],
        }[name]
        target += 1
        try:
            layer._check_dispatched((hidden, weights, None, plan))
            messages.append("")
        except GateError as error:
            messages.append(str(error))
    hidden, _, _, plan = layer._dispatch()
    first, count = plan.zero_fill_ranges[plan.zero_fill_ranges[:, 1] > 0][0].tolist()
    hidden[first + count - 1] = 1
    try:
        layer._check_dispatched((hidden, None, None, plan))
    except GateError as error:
        messages.append(str(error))
    return messages


def test_the_gate_sees_every_kind_of_wrong_output():
    rows, weights, arrivals, dst, padding = spoil_each_output()
    assert rows.startswith("rows from rank 0")
    assert weights.startswith("route weights from rank 0")
    assert arrivals.startswith("arrivals from rank 0")
    assert dst.startswith("plan.dst")
    assert padding.startswith("padding rows")


def test_row_factors_are_exact_in_bfloat16():
    row = torch.arange(200)
    assert torch.equal(row_factor(3, torch.bfloat16)(1, row).float(), row_factor(3, torch.float32)(1, row))


# Hosts.


def fail_in_turn() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts = Hosts(rank, size, 10.0, "fail in turn")
    said = []
    for failing in (0, 1, None):

        def row(failing: int | None = failing) -> list[int]:
            hosts.meet()
            if rank == failing:
                raise ValueError(f"no luck on {rank}")
            for _ in range(3):
                hosts.meet()
            return hosts.exchange(rank)

        try:
            said.append(str(hosts.attempt(row)))
        except RowFailed as failure:
            said.append(f"{failure.kind} {failure}")
    return said


def test_ranks_stay_in_step_after_a_failure(ranks):
    first, second = ranks(2).run(fail_in_turn)
    assert first == second
    assert first == ["error rank 0: ValueError: no luck on 0", "error rank 1: ValueError: no luck on 1", "[0, 1]"]


def take_samples() -> dict[str, list[float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    watch = Stopwatch(torch.device("cpu"), Hosts(rank, size, 10.0, "samples"))
    naps = {"slow": lambda: time.sleep(0.02 * rank), "fast": lambda: None}
    return watch.alternate(naps, 3)


def test_a_sample_is_the_slowest_rank(ranks):
    first, second = ranks(2).run(take_samples)
    assert first == second
    assert min(first["slow"]) > 15_000 > 5_000 > min(first["fast"])


class Recorder:
    """Stands for a GPU: notes what is enqueued, in order."""

    def __init__(self) -> None:
        self.enqueued: list[str] = []

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        recorder = self

        class Event:
            def record(self) -> None:
                recorder.enqueued.append("event")

            def elapsed_time(self, end: Any) -> float:
                return 0.5  # ms

        return Event()


def test_on_a_gpu_delay_and_barrier_come_before_the_first_event(monkeypatch):
    gpu = Recorder()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: gpu.enqueued.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.enqueued.append(f"delay {cycles >= 600_000}"))
    watch = Stopwatch(torch.device("cpu"), Hosts(0, 1, 1.0, "gpu"), lambda: gpu.enqueued.append("barrier"))
    watch.cuda = True
    assert watch.measure(lambda: gpu.enqueued.append("call"), 2) == [500.0, 500.0]
    sample = ["wait", "delay True", "barrier", "event", "call", "event", "wait"]
    assert gpu.enqueued[-14:] == sample * 2


def test_quantiles_are_of_the_samples():
    found = quantiles([float(i) for i in range(11)])
    assert found == {"median_us": 5.0, "p10_us": 1.0, "p90_us": 9.0, "samples": 11}


# Routings.


def test_a_trace_is_read_without_numpy_and_split_among_ranks(tmp_path):
    numpy = pytest.importorskip("numpy")
    ids = torch.arange(2 * 9 * 3).remainder(7).view(2, 9, 3)
    path = tmp_path / "router.npz"
    numpy.savez_compressed(path, topk_ids=numpy.array(ids.tolist(), dtype="u1"))
    assert TraceSizes.of(str(path), R=4) == TraceSizes(layers=2, tokens=9, K=3, E=8)
    routing = Routing("trace", 1, path=str(path))
    first, second = routing.make(4, 8, 3, 2)
    assert torch.equal(torch.cat([first, second]), ids[1, :8].int())
    assert routing.record() == {"kind": "trace", "value": 1, "seed": 1, "trace": "router.npz"}
    with pytest.raises(ValueError, match="expected 10 with 3"):
        routing.make(5, 8, 3, 2)


def test_adverse_routing_heats_all_experts_of_a_rank():
    topks = Routing("adverse", 1.5).make(512, 16, 2, 2)
    assert rank_imbalance(topks, 16) == pytest.approx(1.5, rel=0.01)
    load = torch.bincount(torch.cat(topks).flatten(), minlength=16)
    assert load[:8].min() > load[8:].max()


# Suites and goals.


def test_the_goals_suite_measures_every_goal():
    settings = suites.goals()
    lines = []
    for setting in settings:
        for row in setting.rows():
            line = {"R": 2, "backend": "cuda", **setting.record(), **row.record()}
            us = 100.0 if row.operation != "dispatch" or row.routing.value != 1.9 else 110.0
            us += 50.0 if setting.budget == STRICT else 0.0
            lines.append({**line, "median_us": us, "physical_bytes": 1000, "physical_gbps": 1000 / us})
    values = goals.measured(lines)
    missing = {key for key, value in values.items() if value is None}
    assert missing == {"deepep_v2_ratio_32", *(goal.key for goal in goals.LAYER_GOALS)}
    assert values["dispatch_us_32"] == values["host_us"] == 100.0  # not the strict rows
    assert values["growth_imbalance"] == 1.05
    assert values["growth_maxvio"] == 1.0
    assert values["nvlink_ratio_16"] == 1.0
    assert set(goals.measured_with_weights(lines).values()) == {1.0}
    operations = {row.operation for setting in settings for row in setting.rows() if setting.F}
    assert {"forward", "backward", "prefetch", "reduce_grad"} <= operations
    assert 60 < sum(len(list(setting.rows())) for setting in settings) < 160


def peer_line(peer: str, operation: str, us: float, budget: str = STRICT) -> dict[str, Any]:
    routing = Routing("hot_rank", 1.0).record()
    sizes = {**goals.SIZES, "E": 384, "sms": 32, "tokens": 8192, "mode": EAGER, "budget": budget}
    return {**sizes, "peer": peer, "operation": operation, "routing": routing, "median_us": us}


def test_the_ratio_to_a_peer_is_of_the_same_run_and_null_when_the_peer_failed():
    ours = [peer_line("moonep", "dispatch", 400.0), peer_line("moonep", "combine", 400.0)]
    theirs = [peer_line("deepep_v2", "dispatch", 800.0), peer_line("deepep_v2", "combine", 800.0)]
    assert goals.measured([*ours, *theirs])["deepep_v2_ratio_32"] == 0.5
    failed = [{**line, "error": "no module"} for line in theirs]
    for line in failed:
        del line["median_us"]
    values = goals.measured([*ours, *failed])
    assert values["deepep_v2_ratio_32"] is None
    assert values["dispatch_us_32"] is None  # a row beside a peer is eager: it is not the goal's row


def test_a_goal_is_met_on_its_own_side():
    by_key = {goal.key: goal for goal in goals.GOALS}
    assert by_key["dispatch_us_32"].met(450) is True and by_key["dispatch_us_32"].met(451) is False
    assert by_key["nvlink_ratio_16"].met(0.9) is True and by_key["nvlink_ratio_16"].met(0.8) is False
    assert by_key["deepep_v2_ratio_32"].met(0.5) is None and by_key["plan_us"].met(None) is None


def test_summary_prints_all_keys_from_the_newest_set(tmp_path, capsys, monkeypatch):
    about = {"commit": "abc", "hardware": {}, "suite": "goals"}
    routing = Routing("hot_rank", 1.0).record()
    sizes = {**goals.SIZES, "E": 384, "sms": 32, "tokens": 8192, "mode": GRAPH, "budget": STRICT, "routing": routing}
    row = {**about, **sizes, "operation": "dispatch"}
    lines = [
        {**row, "set": "abc 2026-01-02", "date": "2026-01-02T00:00:01Z", "median_us": 700.0},
        {**row, "set": "abc 2026-01-02", "date": "2026-01-02T00:00:02Z", "median_us": 440.0},
        {**row, "set": "old 2026-01-01", "date": "2026-01-01T00:00:00Z", "median_us": 300.0},
        {**row, "set": "own 2026-01-03", "date": "2026-01-03T00:00:00Z", "median_us": 200.0, "suite": "sweep"},
    ]
    results.append(tmp_path / "gpu" / "goals.jsonl", lines)
    results.append(tmp_path / "gpu" / "older.jsonl", [{"benchmark": "operations", "dispatch_us": 1.0}])
    summary = load("summary")
    monkeypatch.setattr(sys, "argv", ["summary.py", "--json", "--results", str(tmp_path)])
    summary.main()
    values = json.loads(capsys.readouterr().out)
    assert list(values) == [goal.key for goal in goals.GOALS]
    assert values["dispatch_us_32"] == 440.0 and values["combine_us_32"] is None
    monkeypatch.setattr(sys, "argv", ["summary.py", "--results", str(tmp_path)])
    summary.main()
    table = capsys.readouterr().out
    assert "set abc 2026-01-02: 2 lines" in table and "440  yes" in table


def test_results_say_where_they_come_from(monkeypatch):
    monkeypatch.setenv("MOONEP_COMMIT", "0123abc")
    about = results.describe_run("moonep bench")
    assert about["commit"] == "0123abc" and about["set"].startswith("0123abc 20")
    assert {"python", "torch", "triton", "moonep"} <= set(about["versions"])
    assert about["hardware"]["cpus"] >= 1


# Figures.


def made_up_lines() -> list[dict[str, Any]]:
    """Lines of the suites and of peers, with times that are not measured."""
    about = {"set": "made-up 2026-01-01", "date": "2026-01-01T00:00:00Z", "commit": "made-up", "hardware": {}}
    lines = []
    for setting in [*suites.goals(), *suites.figures()]:
        for i, row in enumerate(setting.rows()):
            line = {"R": 2, "backend": "cuda", **setting.record(), **row.record(), "median_us": 100.0 + i}
            lines.append({**line, "physical_bytes": 1000, "physical_gbps": 300.0, **about})
    for peer in ("moonep", "all_to_all"):
        for value in (1.0, 1.9):
            for operation in ("dispatch", "combine"):
                line = peer_line(peer, operation, 400.0 * value)
                line = {**line, "routing": Routing("hot_rank", value).record(), "F": None, **about}
                lines.append(line)
    return lines


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_figures_are_drawn_from_results_only(tmp_path, monkeypatch, capsys, suffix):
    pytest.importorskip("matplotlib")
    results.append(tmp_path / "results.jsonl", made_up_lines())
    plot = load("plot")
    figures = tmp_path / "figures"
    options = ["--results", str(tmp_path), "--output", str(figures), "--format", suffix]
    monkeypatch.setattr(sys, "argv", ["plot.py", *options])
    plot.main()
    names = [f"{name}.{suffix}" for name in ("growth", "bandwidth", "tokens", "peers")]
    assert capsys.readouterr().out.split() == [str(figures / name) for name in names]
    assert all((figures / name).stat().st_size > 1000 for name in names)


def test_a_figure_whose_lines_are_missing_is_not_drawn(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    plot = load("plot")
    dispatch = [line for line in made_up_lines() if line["operation"] == "dispatch" and not line.get("peer")]
    assert [path.stem for path in plot.draw_all(dispatch, tmp_path, "png")] == ["bandwidth", "tokens"]
    assert plot.draw_all([], tmp_path, "png") == []
    monkeypatch.setattr(sys, "argv", ["plot.py", "--results", str(tmp_path), "--output", str(tmp_path)])
    plot.main()
    said = capsys.readouterr()
    assert said.out == "" and "nothing is drawn" in said.err


# Peers.


COMPARISON = Comparison(32, 16, 2, 8, (Routing("hot_rank", 1.5),), sms=None, device="cpu", samples=2)


def compare_with(peers: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The lines of a comparison on rank 0, with other peers if given: name -> what its combine is multiplied with."""

    class Scaled(AllToAll):
        def __init__(self, world: World, factor: float):
            super().__init__(world)
            self.factor = factor

        def combine(self, sent: Any) -> torch.Tensor:
            return super().combine(sent) * self.factor

    lines: list[dict[str, Any]] = []
    names = tuple(PEERS if peers is None else peers)
    originals = dict(PEERS)
    for name, factor in (peers or {}).items():
        PEERS[name] = lambda world, factor=factor: Scaled(world, factor)
    try:
        number = len(names)  # different for each call in a world
        side_by_side.compare(replace(COMPARISON, peers=names), number, report=lines.append)
    finally:
        PEERS.clear()
        PEERS.update(originals)
    return [line for line in lines if "busy" not in line]


def test_moonep_and_all_to_all_are_compared_and_missing_peers_are_named(ranks):
    lines, others = ranks(2).run(compare_with)
    assert others == []
    timed = {(line["peer"], line["operation"]) for line in lines if "median_us" in line}
    assert timed >= {(peer, op) for peer in ("moonep", "all_to_all") for op in ("dispatch", "combine")}
    missing = {line["peer"]: line["unavailable"] for line in lines if "unavailable" in line}
    assert "No module named 'deep_ep'" in missing["deepep_v1"] and "No module named 'deep_ep'" in missing["deepep_v2"]
    assert "needs CUDA and NVSHMEM" in missing["all_to_all_vdev_2d"]
    rows = {line["peer"]: line["rows"] for line in lines if "rows" in line}
    assert rows["all_to_all"] == pytest.approx(1.5 * 32 * 2, rel=0.03)


def test_a_peer_whose_output_is_wrong_has_no_time(ranks):
    lines = ranks(2).run(compare_with, {"right": 1.0, "wrong": 1.1})[0]
    assert [line["peer"] for line in lines if "median_us" in line] == ["right", "right"]
    wrong = [line for line in lines if line["peer"] == "wrong"]
    assert len(wrong) == 2 and all("combine: differs from K times the token" in line["gate"] for line in wrong)


def die_with_all_to_all(comparison: Comparison, number: int) -> None:
    """Stands for a peer that crashes."""
    if dist.get_rank() == 0:
        for name in comparison.peers:
            send({"busy": name})
            if name == "all_to_all":
                os.kill(os.getpid(), signal.SIGKILL)
        for name in comparison.peers:
            send({**comparison.line(2, name, "dispatch", comparison.routings[0]), "median_us": 1.0})


def test_a_peer_that_kills_its_ranks_is_named_and_the_others_are_measured(monkeypatch):
    monkeypatch.setattr(side_by_side, "compare", die_with_all_to_all)
    lines: list[dict[str, Any]] = []
    side_by_side.run_comparisons([replace(COMPARISON, peers=("moonep", "all_to_all"))], 2, 60.0, lines.append)
    failed = [line for line in lines if "error" in line]
    assert [line["peer"] for line in failed] == ["all_to_all", "all_to_all"]
    assert all("SIGKILL" in line["error"] for line in failed)
    assert [line["peer"] for line in lines if "median_us" in line] == ["moonep"]


def test_bench_vs_deepep_runs_on_cpu_and_its_last_line_is_one_json_document(tmp_path):
    output = tmp_path / "peers.jsonl"
    options = ["--tokens", "16", "--hidden", "16", "--samples", "2", "--imbalance", "1.5", "--maxvio", "--json"]
    peers = ["--peers", "moonep", "all_to_all", "deepep_v2", "--output", str(output)]
    command = [sys.executable, str(BENCHMARKS / "bench_vs_deepep.py"), *options, *peers]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert {row["peer"] for row in rows if "median_us" in row} == {"moonep", "all_to_all"}
    assert [json.loads(line) for line in output.read_text().splitlines()] == rows
    assert "deepep_v2 (strict), dispatch, hot_rank 1.5: unavailable: deep_ep cannot be imported" in done.stderr


@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        ("summary", ["--results", "/nowhere"], "--results: given /nowhere, expected"),
        ("plot", ["--results", "/nowhere"], "--results: given /nowhere, expected"),
        ("plot", ["--set", "nope"], "--set: given 'nope', expected one of"),
        ("bench_vs_deepep", ["--experts", "7"], "--experts: given 7, expected a multiple of 2 ranks"),
    ],
)
def test_programs_say_what_is_wrong_with_an_option(monkeypatch, capsys, program, arguments, says):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as error:
        load(program).main()
    assert error.value.code == 2 and says in capsys.readouterr().err
