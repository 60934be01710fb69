"""Steps by themselves: what clocks and counters say, against clocks and counts by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specc.artifact.in_memory import BenchPrograms
from specc.bench import device as bench_device
from specc.bench import steps
from specc.bench.device import (
    Kernels,
    KernelTime,
    OperatorCounter,
    RepeatingDevice,
    TimedGraphs,
    kernels_among,
    measure_copy_bandwidth,
)
from specc.bench.steps import StepBench
from specc.bench.synthetic.engine import make_engine
from specc.bench.synthetic.weights import make_weights
from specc.compiler.in_memory import ShapeOptions, compile_shapes
from specc.passes.step.draw_acceptance import STAGE
from specc.progress import PhaseTimer
from specc.sampling.rows import Value
from specc.speculation.plans import SpecPlan
from tests.models import tiny_config
from tests.runtime.backends.captured.simulated_device import SimulatedDevice

PLANS = (SpecPlan.from_widths((2, 1)),)
CONTEXT, TOKENS = 20, 13
CPU = torch.device("cpu")
STAGES = {"off": ["verify", "accept_commit"]}
STAGES["tree-2-1"] = ["draft", "verify", STAGE, "accept_commit"]


@functools.cache
def programs(acceptance: tuple[float, ...] | None = (0.5, 0.2)) -> BenchPrograms:
    configs = [tiny_config("llama"), tiny_config("llama", num_hidden_layers=1)]
    options = ShapeOptions(
        PLANS, "float32", 2, CONTEXT, TOKENS, backend="cuda", acceptance=acceptance
    )
    return compile_shapes(["T", "D"], configs, options, PhaseTimer())


class FakeClock:
    """Marks say 0, 1, 3, 6, … seconds: every interval has a length of its own."""

    def __init__(self) -> None:
        self.now, self.step, self.waits = 0, 0, 0

    def mark(self) -> int:
        self.step += 1
        self.now += self.step
        return self.now

    def wait(self) -> None:
        self.waits += 1

    def ms(self, begin: int, end: int) -> float:
        return float(end - begin)


def make_bench(device: Any, acceptance: Any = (0.5, 0.2)) -> tuple[Any, TimedGraphs, StepBench]:
    found = programs(acceptance)
    graphs = TimedGraphs(device)
    weights = {m.entry.name: make_weights(m, CPU) for m in found.models}
    engine = make_engine(found, weights, graphs, "cuda")
    return engine, graphs, StepBench(engine, graphs, CONTEXT, TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RepeatingDevice, SimulatedDevice])
@pytest.mark.parametrize("plan", [pytest.param("off", marks=pytest.mark.slow), "tree-2-1"])
def test_figures_of_a_step(kind, plan):
    engine, _, bench = make_bench(kind())
    found = bench.measure(plan, STAGES[plan], rounds=2)
    # as many as fit if everything is accepted: 13 tokens in steps of 1 and of 3
    count = {"off": 13, "tree-2-1": 4}[plan]
    assert found.num_steps == 2 * count
    assert 0 < found.step_ms.min <= found.step_ms.median <= found.step_ms.max
    assert found.gap_share > 0
    assert list(found.stage_ms) == STAGES[plan]
    assert all(ms > 0 for ms in found.stage_ms.values())
    assert found.is_captured
    assert found.context == pytest.approx(CONTEXT + found.acceptance_length * (count - 1) / 2)
    assert engine.steps[plan].before_accept is None
    assert found.kernels > 0


@pytest.mark.slow
def test_certain_acceptance_counts_as_such():
    _, _, bench = make_bench(SimulatedDevice(), (1.0,))
    assert bench.measure("tree-2-1", STAGES["tree-2-1"], rounds=1).acceptance_length == 3.0
    assert bench.measure("off", STAGES["off"], rounds=1).acceptance_length == 1.0


def test_drawn_tokens_give_the_lengths_of_greedy_ones(monkeypatch):
    """Dice decide at any temperature, so drawn tokens give the lengths that greedy ones do."""
    device = SimulatedDevice()
    engine, _, bench = make_bench(device)
    bench.capture("tree-2-1")
    assert len(device.tapes) == 1
    step, rows = engine.steps["tree-2-1"], []
    submit = step.submit

    def spy(inputs: Any) -> Any:
        rows.append(inputs.sampling_values)
        return submit(inputs)

    monkeypatch.setattr(step, "submit", spy)
    greedy = bench._rounds(step, 4, 2, bench._inputs)
    sampled = bench._rounds(step, 4, 2, bench._sampled)
    # a queue that warms up, and two that count
    found = [{tuple(row) for row in values.tolist()} for values in rows]
    assert found[:3] == [found[0]] * 3
    assert found[3:] == [found[3]] * 3
    ((temperature, top_p),) = {(row[Value.TEMPERATURE], row[Value.TOP_P]) for row in found[3]}
    assert (round(temperature, 4), round(top_p, 4)) == (0.6, 0.9)
    assert {row[Value.TEMPERATURE] for row in found[0]} == {0.0}
    # one for any batch; a batch of greedy rows, which needs no filters, has its own
    assert len(device.tapes) == 2
    assert greedy[2] == sampled[2] > 1
    assert len(sampled[0]) == 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_certain_draws_are_certain_for_drawn_tokens_too(share):
    _, _, bench = make_bench(RepeatingDevice(), (share,))
    found = bench.measure("tree-2-1", STAGES["tree-2-1"], rounds=1)
    assert found.sampled_length == found.acceptance_length == 1 + 2 * share
    assert found.sampled_ms.median > 0


@pytest.mark.slow
def test_rounds_begin_at_the_same_place():
    """Every queue starts at the given context again: draws by position, so all rounds agree."""
    _, _, bench = make_bench(RepeatingDevice())
    few, many = (bench.measure("tree-2-1", STAGES["tree-2-1"], rounds=n) for n in (1, 4))
    assert few.acceptance_length == many.acceptance_length
    assert 1.0 < few.acceptance_length < 3.0


def test_times_come_from_marks_around_each_replay():
    """Marks at 1, 3, 6, 10, …: the queue's own, then a pair a step, by the fake clock."""
    _, graphs, bench = make_bench(RepeatingDevice())
    bench.capture("tree-2-1")
    graphs.clock = clock = FakeClock()  # type: ignore[assignment]
    step = bench._step("tree-2-1")
    results, replays, whole = bench._time(step, 3)
    assert [tuple(r) for r in replays] == [(3, 6), (10, 15), (21, 28)]
    assert tuple(whole) == (1, 36)
    assert clock.waits == 2
    assert len(results) == 3
    own, gap = bench._times(replays)
    assert own == [3.0, 5.0, 7.0]
    # gaps of 4 and 6 between steps of 5 on average
    assert gap == pytest.approx(5 / 5)
    assert bench._times(replays[:1]) == ([3.0], None)


def test_stages_are_told_apart():
    """Four replays a step, in the order of the stages; medians over steps and rounds."""
    _, graphs, bench = make_bench(RepeatingDevice())
    step = bench._step("tree-2-1")
    graphs.clock = FakeClock()  # type: ignore[assignment]
    found = bench._stages(step, STAGES["tree-2-1"], count=2, rounds=1)
    # marks 1; replays from 3 on: lengths 3, 5, 7, 9 of the first step and 11, 13, 15, 17
    assert found == {"draft": 7.0, "verify": 9.0, STAGE: 11.0, "accept_commit": 13.0}
    assert step.before_accept is None
    with pytest.raises(AssertionError, match="one replay a stage"):
        bench._stages(step, ["draft", "verify"], count=2, rounds=1)
    assert step.before_accept is None


class RefusingDevice(RepeatingDevice):
    """Cannot capture any operator."""

    def capture(self, run: Any) -> Any:
        class Refuse(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                raise RuntimeError("not under capture")

        with Refuse():
            run()
        raise AssertionError("a part without operators")


def test_what_cannot_be_captured_is_said():
    """Steps run operator by operator: the time of a step is that of the queue over its steps."""
    _, graphs, bench = make_bench(RefusingDevice())
    reason = bench.capture("tree-2-1")
    assert "not under capture" in reason
    assert "tree-2-1" in reason
    graphs.clock = FakeClock()  # type: ignore[assignment]
    found = bench.measure("tree-2-1", STAGES["tree-2-1"], rounds=1)
    # marks around the queue alone: 1 and 3
    assert found.step_ms.median == (3 - 1) / 4
    assert (found.is_captured, found.gap_share, found.stage_ms) == (False, None, {})
    assert bench.capture("tree-2-1") is None, "said once"


def test_captured_steps_need_no_words():
    _, _, bench = make_bench(SimulatedDevice())
    assert bench.capture("tree-2-1") is None


@pytest.mark.slow
def test_operators_of_a_step_are_counted():
    """Against the tape of the simulated device: what it recorded, without views."""
    device = SimulatedDevice()
    _, _, bench = make_bench(device)
    found = bench.measure("tree-2-1", STAGES["tree-2-1"], rounds=1)
    whole = device.tapes[0]
    held = whole.hold()
    writes = 0
    for function, args, kwargs, outputs in (whole.live(call, held) for call in whole.calls):
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        given = {x.untyped_storage().data_ptr() for x in leaves if isinstance(x, torch.Tensor)}
        new = [o for o in outputs if o.numel() and o.untyped_storage().data_ptr() not in given]
        writes += bool(new) or function._schema.is_mutable
    assert found.kernels == writes
    drawn = device.tapes[0].operators
    assert drawn.count("aten.index_put_.default") == 1
    _, _, plain = make_bench(SimulatedDevice(), None)
    without = plain.measure("tree-2-1", ["draft", "verify", "accept_commit"], rounds=1)
    assert found.kernels - without.kernels == 4, "what the dice cost: four small operators"


def test_views_are_no_kernels():
    with OperatorCounter() as counter:
        x = torch.zeros(4, 4)
        y = x.view(16)[2:].unsqueeze(0)
        y.add_(1)
        x @ x
    assert counter.count == 3


def test_copies_are_no_kernels():
    events = [("gemm", True, 2.0), ("Memcpy DtoH", True, 1.0), ("Memset (Device)", True, 1.0)]
    events += [("aten::mm", False, 9.0), ("norm", True, 1.0), ("gemm", True, 3.0)]
    assert kernels_among(events) == (3, {"gemm": (2, 5.0), "norm": (1, 1.0)})
    assert kernels_among([]) == (0, {})


def test_kernels_of_a_step_by_their_time(monkeypatch):
    """Of two steps that were profiled; the longest first."""
    _, _, bench = make_bench(SimulatedDevice())
    figures = bench.time("off", rounds=1)
    times = {"norm": KernelTime(4, 6.0), "gemm": KernelTime(2, 9.0)}
    monkeypatch.setattr(bench._graphs, "count_kernels", lambda work: Kernels(6, times))
    monkeypatch.setattr(steps, "_COUNTED_STEPS", 2)
    found = bench.add_parts("off", figures, STAGES["off"], rounds=1)
    assert found.kernels == 3
    assert list(found.kernel_us.items()) == [("gemm", (1, 4.5)), ("norm", (2, 3.0))]


def test_copy_bandwidth_counts_both_directions(monkeypatch):
    """A copy of 4000 bytes in 2 ms moves 8000 bytes: 4 MB a second."""

    class Steady(FakeClock):
        def ms(self, begin: int, end: int) -> float:
            return 2.0

    monkeypatch.setattr(bench_device, "make_clock", lambda device: Steady())
    found = measure_copy_bandwidth(CPU, 4000)
    assert found["gb_s"] == pytest.approx(8000 / 2e-3 / 1e9)
    assert found["buffer_bytes"] == 4000


def test_copy_bandwidth_is_measured():
    assert measure_copy_bandwidth(CPU, 4_000_000)["gb_s"] > 0.1
