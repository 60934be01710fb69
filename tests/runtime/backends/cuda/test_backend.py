"""Engines for CUDA without a GPU: a simulated device, and Triton's interpreter for the kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specc.api import probe_engine
from specc.artifact.directory import read_manifest
from specc.cli.render import stats_rows
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured import captured_step
from specc.runtime.backends.captured.backend import fit_device
from specc.runtime.backends.captured.engine_steps import capture_within
from specc.runtime.backends.captured.step_scores import UNFILTERED, StepKind
from specc.runtime.backends.cuda.graphs import cuda_device
from specc.runtime.backends.step_io import StepInputs
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines

PROMPTS = [[5, 6, 7, 8], [40, 41], [9] * 7]
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def cuda_engine(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair compiled for CUDA, which needs no GPU."""
    path = tmp_path_factory.mktemp("engines") / "cuda"
    plans = (SpecPlan.from_widths((2, 1)), SpecPlan.from_widths((1, 1, 1)))
    config = CompileConfig(plans=plans, max_seq_len=48, max_batch_size=2, backend="cuda")
    return engines.build(tiny_models.target, tiny_models.draft, path, config)


@pytest.fixture(scope="module")
def wanted(tiny_engine: Path) -> list[list[int]]:
    """What an engine of plain graphs says."""
    outputs = LLM(tiny_engine, plan="off").generate(PROMPTS, PARAMS)
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate(llm: LLM, params: SamplingParams = PARAMS) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


@pytest.mark.default("tree-2-1")
@pytest.mark.parametrize("plan", ["off", "chain-3", "tree-2-1"])
def test_fused_graphs_say_the_same(cuda_engine, wanted, plan) -> None:
    """The graphs with the oracles of the fused operators, operator by operator, on the CPU."""
    assert generate(LLM(cuda_engine, plan=plan, backend="eager")) == wanted


@pytest.mark.default("tree-2-1")
@pytest.mark.parametrize("plan", ["off", "chain-3", "tree-2-1"])
def test_replayed_steps_say_the_same(cuda_engine, wanted, plan, device) -> None:
    """Requests come and go; graphs are captured while the engine loads, and none later."""
    llm = LLM(cuda_engine, plan=plan)
    assert llm.engine.backend == "cuda"
    captured = len(device.tapes)
    assert captured == 3 * len((1, 2)) * 2, "each plan for each batch size, and without filters"
    assert generate(llm) == wanted
    assert len(device.tapes) == captured
    # one graph a step: its time is not lost, though no stage has one of its own
    stats = llm.get_metrics()
    assert stats.ms_per_step == pytest.approx(1000 * stats.whole_s / stats.num_step_passes)
    assert stats.whole_s > 0 == stats.verify_s
    assert "one graph" in dict(stats_rows(stats))["ms per step"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["off", "tree-2-1"])
def test_the_kernels_say_the_same(cuda_engine, wanted, plan, device, triton_kernels) -> None:
    """All of it: fused graphs, captured, with the Triton kernels, of two requests.

    No launch races, and none is of a binary that budgets do not know: of an integer that is 1, or
    of a pointer that is not aligned, but for that of a lone root's token.
    """
    from tests.kernels.cuda.races import watched

    # of the plan that runs, of two sequences, whatever ends first
    limits = CaptureLimits(sizes=(2,), max_seconds=-1)
    with watched(plan) as launches:
        llm = LLM(Engine.load(cuda_engine, capture=limits), plan=plan)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        outputs = llm.generate(PROMPTS[:2], params)
        assert [list(o.outputs[0].token_ids) for o in outputs] == [t[:4] for t in wanted[:2]]
    # one for all batches, and the one that these greedy requests need
    assert len(device.tapes) == 2
    assert "row_filters_kernel" in {launch.name for launch in launches}
    assert {launch.name for launch in launches} >= {"attend_kernel", "commit_rows_kernel"}
    assert {(launch.name, name) for launch in launches for name in launch.folded} == set()
    # a root is the last column of a step's tokens, and is loaded alone
    unaligned = {"tokens"} if plan == "off" else set()
    assert {name for launch in launches for name in launch.unaligned} == unaligned


HOST_READS = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__")


class Launches:
    """Records launches of kernels; outside of them, nothing may read a tensor on the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        self.made: list[tuple[str, Any]] = []
        self._is_inside = False
        run = InterpretedFunction.run

        def recorded(kernel: Any, *args: Any, grid: Any, **options: Any) -> Any:
            numbers = tuple(x for x in args if isinstance(x, int | float))
            switches = tuple((k, v) for k, v in options.items() if k != "warmup")
            self.made.append((kernel.fn.__name__, (tuple(grid), numbers, switches)))
            self._is_inside = True
            try:
                return run(kernel, *args, grid=grid, **options)
            finally:
                self._is_inside = False

        monkeypatch.setattr(InterpretedFunction, "run", recorded)
        for name in HOST_READS:
            monkeypatch.setattr(torch.Tensor, name, self._guard(name))

    def _guard(self, name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def guarded(tensor: Any, *args: Any, **options: Any) -> Any:
            assert self._is_inside, f"{name} of a tensor between launches"
            return method(tensor, *args, **options)

        return guarded


@pytest.mark.slow
def test_launches_do_not_depend_on_the_data(cuda_engine, device, triton_kernels) -> None:
    """The same kernels with the same numbers, whatever lengths and tokens are, and no host read."""
    loaded = Engine.load(cuda_engine, capture=CaptureLimits.lazy())
    step = loaded.steps["tree-2-1"]
    table = torch.arange(loaded.cache.shape.num_blocks, dtype=torch.int32).view(2, -1)
    found = []
    for rows in ([(5, 6, 1), (7, 8, 30)], [(50, 60, 22), (70, 80, 3)]):
        values = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]] * 2)
        words = torch.zeros(2, 4, dtype=torch.int64)
        step._buffers.copy_from(StepInputs(rows, table, values, words), 2)
        bound = step._bind(2)
        with pytest.MonkeyPatch.context() as patch:
            launches = Launches(patch)
            bound.run()
        found.append(launches.made)
    assert found[0] == found[1]
    names = [name for name, _ in found[0]]
    # the draft twice, then the target with its two layers
    assert names.count("attend_kernel") == 1 + 1 + 2
    assert names.count("_rope_write_kernel") == names.count("attend_kernel")
    assert {"commit_kv_kernel", "accept_walk_kernel"} <= set(names)


def test_the_guard_sees_host_reads(monkeypatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Launches(patch)
        for read in (lambda x: x.tolist(), lambda x: bool(x), lambda x: x.item(), range):
            with pytest.raises(AssertionError, match="between launches"):
                read(torch.ones((), dtype=torch.int64))


def test_no_gpu_is_an_error_that_says_what_to_do(cuda_engine) -> None:
    with pytest.raises(EngineError) as caught:
        LLM(cuda_engine)
    assert "cuda" in caught.value.found
    assert "--backend eager" in caught.value.do
    with pytest.raises(EngineError, match="no GPU"):
        cuda_device()


def test_capturing_stops_at_the_limits() -> None:
    """Large sizes first, the default plan's before others; what is left is captured when used."""

    class Memory:
        taken = 0

        def free_bytes(self) -> int:
            return 10_000 - self.taken

    class Step:
        def __init__(self, name: str) -> None:
            self.name = name
            self.buckets = (1, 2, 4)
            self.skips_filters = name == "tree"

        def capture(self, bucket: int, kind: StepKind | None = None) -> float:
            assert kind in (None, UNFILTERED)
            done.append((self.name, bucket) if kind is None else (self.name, bucket, "unfiltered"))
            memory.taken += 100
            return 1.0

    for limits, count in (
        (CaptureLimits(), 9),
        (CaptureLimits(max_seconds=6.5), 7),
        (CaptureLimits(max_seconds=2.5), 3),
        (CaptureLimits(max_bytes=150), 2),
        (CaptureLimits.lazy(), 0),
    ):
        done: list[tuple[Any, ...]] = []
        memory = Memory()
        steps: list[Any] = [Step("tree"), Step("off")]
        assert capture_within(limits, steps, memory) == count  # type: ignore[arg-type]
        every = [("tree", 4), ("off", 4), ("tree", 2), ("off", 2), ("tree", 1), ("off", 1)]
        fewer = [("tree", size, "unfiltered") for size in (4, 2, 1)]
        assert done == [*every, *fewer][:count]


def test_only_capturing_counts_as_capturing(cuda_engine, device, monkeypatch) -> None:
    """Every operator takes a second, and the run before a capture does so, too, uncounted."""
    clock = 0.0

    class Slow(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal clock
            clock += 1.0
            return func(*args, **(kwargs or {}))

    # a run of the device's own is part of its capture
    device.runs_first = False
    loaded = Engine.load(cuda_engine, capture=CaptureLimits.lazy())
    monkeypatch.setattr(captured_step, "time", SimpleNamespace(perf_counter=lambda: clock))
    step = loaded.steps["off"]
    with Slow():
        seconds = step.capture(1)
    # the tape lists what the capture did
    (tape,) = device.tapes
    assert 0 < seconds <= 1.2 * len(tape.operators) < 0.7 * clock
    assert step.capture(1) == 0.0


def test_launches_go_to_the_device_of_the_engine(cuda_engine, device) -> None:
    """Of a thread whose current device is another one: prefill, warm-up, capture, steps, hooks."""
    seen: dict[str, int] = {}

    class Guard(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "specc":
                assert device.is_active, func
                seen[func._opname] = seen.get(func._opname, 0) + 1
            return func(*args, **(kwargs or {}))

    with Guard():
        loaded = Engine.load(cuda_engine, capture=CaptureLimits.lazy())
        step = loaded.steps["chain-3"]
        step.before_accept = lambda values: values["logits"].argmax(-1)
        generate(LLM(loaded, plan="chain-3"))
        step.before_accept = None
        generate(LLM(loaded, plan="chain-3"))
    assert {"attend", "embed_norm_rope_write", "commit_rows"} <= seen.keys()
    assert not device.is_active


@pytest.mark.default("1")
@pytest.mark.parametrize("max_num_seqs", [None, 1])
def test_memory_is_checked_before_it_is_taken(cuda_engine, device, max_num_seqs) -> None:
    """One byte less than weights, caches and passes need is an error that says what they are."""
    manifest = read_manifest(cuda_engine)
    plan = manifest.memory_plan.values()
    share = (max_num_seqs or 2) / manifest.limits.max_batch_size
    needed = sum(e.weights + int(share * e.cache) + e.logits + e.workspace for e in plan)
    device.memory_bytes = needed - 1
    with pytest.raises(EngineError) as caught:
        Engine.load(cuda_engine, max_num_seqs=max_num_seqs)
    assert "free on cpu" in caught.value.found
    assert f"for {max_num_seqs or 2} sequences of 48 tokens" in caught.value.needed
    assert "max_num_seqs" in caught.value.do
    assert not device.tapes
    # graphs get what is left, here next to nothing: one, whose size nobody could know before
    device.memory_bytes = needed + 1
    loaded = Engine.load(cuda_engine, max_num_seqs=max_num_seqs)
    assert len(device.tapes) == 1
    assert len(generate(LLM(loaded))) == len(PROMPTS)


def test_a_smaller_cache_needs_less_memory(cuda_engine, device) -> None:
    """Half of the blocks that two sequences of 48 tokens and their trees can have."""
    manifest = read_manifest(cuda_engine)
    cache = sum(entry.cache for entry in manifest.memory_plan.values())
    rows = manifest.limits.cache_rows()
    assert manifest.limits.max_batch_size == 2
    assert rows % (2 * manifest.limits.block_size) == cache % 2 == 0
    needed = manifest.total_memory - cache + cache // 2
    device.memory_bytes = needed - 1
    with pytest.raises(EngineError):
        fit_device(manifest, device, CaptureLimits(), kv_cache_tokens=rows // 2)
    device.memory_bytes = needed + 9
    limits = fit_device(manifest, device, CaptureLimits(), kv_cache_tokens=rows // 2)
    assert limits.max_bytes == 9


def test_graphs_get_no_more_than_their_limit(cuda_engine, device) -> None:
    manifest = read_manifest(cuda_engine)
    limits = CaptureLimits(max_bytes=77)
    assert fit_device(manifest, device, limits) == limits
    device.memory_bytes = manifest.total_memory + 50
    assert fit_device(manifest, device, limits) == CaptureLimits(max_bytes=50)


def test_batch_sizes() -> None:
    assert CaptureLimits().buckets(1) == (1,)
    assert CaptureLimits().buckets(6) == (1, 2, 4, 6)
    assert CaptureLimits().buckets(8) == (1, 2, 4, 8)
    assert CaptureLimits(sizes=(3, 20)).buckets(8) == (3, 8)
    for sizes in ((), (2, 1), (0, 1), (2, 2)):
        with pytest.raises(ConfigError, match="ascend"):
            CaptureLimits(sizes=sizes)


def test_weights_are_checked_and_moved(cuda_engine, device) -> None:
    """No mapped file stands behind a GPU's weights, so none is watched."""
    loaded = Engine.load(cuda_engine, capture=CaptureLimits.lazy())
    assert loaded.mapped_weights == ()
    assert not device.tapes


@pytest.mark.slow
def test_a_probe_captures_what_it_runs(cuda_engine, device) -> None:
    """Off and plans that are tried, of two batch sizes; graphs serve until the engine goes.

    Two for each size and plan: with filters and without.
    """
    found = probe_engine(cuda_engine)
    assert found["num_spec_steps"] > 0
    assert 1 <= len(device.tapes) <= 4 * (2 + len(found["speed_ups"]))
