"""Overlapped steps of an engine for CUDA: every byte that kernels of both branches touch."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from specc.cli.main import app
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured import backend as captured_backend
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.overlapped_step import OverlappedStep
from specc.runtime.backends.step_io import StepInputs
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from tests import engines
from tests.gpu import replay
from tests.mixed_sampling import mixed_sampling
from tests.runtime.backends.captured.branched_device import (
    BETWEEN,
    MAIN,
    SIDE,
    BranchedDevice,
    BranchedTape,
    conflicts,
)

BATCH = 8
LENGTHS = [5, 9, 14, 3, 20, 8, 11, 2]


@pytest.fixture(scope="module")
def engine_dir(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "cuda"
    config = CompileConfig(
        plans=(SpecPlan.from_widths((2, 1)),), max_seq_len=48, max_batch_size=BATCH, backend="cuda"
    )
    return engines.build(tiny_models.target, tiny_models.draft, path, config)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> BranchedDevice:
    """Stands for the GPU of this machine."""
    simulated = BranchedDevice(BETWEEN)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(captured_backend, "cuda_device", lambda: simulated)
    return simulated


def load(engine_dir: Path, *, overlaps: bool = True) -> Engine:
    limits = CaptureLimits(sizes=(BATCH,), max_seconds=-1)
    return Engine.load(engine_dir, capture=limits, overlaps=overlaps)


def step_of(engine: Engine) -> CapturedStep:
    step = engine.steps["tree-2-1"]
    assert isinstance(step, CapturedStep)
    return step


def inputs_of(engine: Engine) -> StepInputs:
    """Sequences of different lengths, and caches of other rows than a step writes."""
    shape = engine.cache.shape
    generator = torch.Generator().manual_seed(7)
    for name, slab in engine.cache.environment.items():
        if name == "history":
            slab.random_(0, 3, generator=generator)
        else:
            slab.normal_(generator=generator)
    table = torch.arange(shape.num_blocks, dtype=torch.int32).view(shape.max_num_seqs, -1)
    rows = [(b, 7 + b, length) for b, length in enumerate(LENGTHS)]
    return StepInputs(rows, table.flip(0, 1).contiguous(), *mixed_sampling(BATCH, is_greedy=True))


def test_it_is_off_unless_asked_for(engine_dir, device) -> None:
    bound = [step_of(load(engine_dir, overlaps=on))._bind(BATCH) for on in (False, True)]
    assert [isinstance(one, OverlappedStep) for one in bound] == [False, True]


def test_inspect_says_which_plans_are_in_halves(engine_dir) -> None:
    result = CliRunner().invoke(app, ["inspect", str(engine_dir)])
    line = "--overlap: tree-2-1 in halves from 8 sequences on; whole: off (drafts nothing)"
    assert line in result.stdout.splitlines()


def test_what_cannot_be_is_refused_before_anything_is_loaded(engine_dir, device) -> None:
    with pytest.raises(ConfigError, match="--overlap of 4 sequences that run together"):
        Engine.load(engine_dir, max_num_seqs=4, overlaps=True)
    with pytest.raises(ConfigError, match="--overlap with backend eager"):
        Engine.load(engine_dir, backend="eager", overlaps=True)
    assert device.tapes == []


def test_kernels_are_launched_in_the_ordinary_way(engine_dir, device, monkeypatch) -> None:
    """One that starts early would have to know of both branches where they are joined."""
    asked = []
    monkeypatch.setattr(
        "specc.runtime.backends.cuda.choose_launches.can_launch_dependent",
        lambda device: asked.append(device),
    )
    for overlaps in (False, True):
        Engine.load(engine_dir, capture=CaptureLimits(max_seconds=0.0), overlaps=overlaps)
    assert len(asked) == 1


@pytest.mark.slow
def test_the_check_with_a_gpu_compares_and_times_both_ways(engine_dir, device, monkeypatch) -> None:
    for name, value in (("REPLAYS", 2), ("QUEUED", 2), ("ROUNDS", 1)):
        monkeypatch.setattr(replay, name, value)
    whole, halves = (load(engine_dir, overlaps=on) for on in (False, True))
    inputs = tuple(inputs_of(whole))[:4]
    fake: Any = SimpleNamespace(synchronize=lambda: None)
    found = replay.compare_halves(whole, halves, "tree-2-1", inputs, fake)
    assert (found["replays"], found["sequences"]) == (2, BATCH)
    assert min(found["whole_ms"], found["halves_ms"]) > 0
    with pytest.raises(AssertionError, match="tree-2-1 for 8 sequences is not in halves"):
        replay.compare_halves(halves, whole, "tree-2-1", inputs, fake)


def test_branches_share_no_operands_that_one_writes(engine_dir, device) -> None:
    engine = load(engine_dir)
    step_of(engine).capture(BATCH)
    (tape,) = device.tapes
    assert isinstance(tape, BranchedTape)
    assert len(tape.branches) == 1
    assert conflicts(tape, engine.cache.environment.values()) == []


def test_counters_of_both_branches_are_others(engine_dir, device) -> None:
    """They lie beside a cache or a weight, and no memory is of the draft and of the target."""
    engine = load(engine_dir)
    found = []
    for model, name in ((engine.target, "target"), (engine.drafts[0], "draft_0")):
        tensors = [*model.weights.values(), *engine.cache.slabs[name]]
        found.append({tensor.untyped_storage().data_ptr() for tensor in tensors})
    assert found[0].isdisjoint(found[1])
    assert all(found)


@pytest.mark.slow
def test_no_byte_that_kernels_touch_is_of_both_branches(
    engine_dir, device, monkeypatch, triton_kernels
) -> None:
    """Caches, history, inputs and results.

    Of each launch of a replay, the interpreter says which bytes it reads, writes and updates
    atomically. No launch is of another binary than a whole step's are. Caches are too small here
    for splits, which count those that are done: see the test above.
    """
    from specc.kernels.cuda import arrivals
    from tests.kernels.cuda import races

    touched: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
    check = races._check

    def noted(launch: Any, *rest: Any) -> None:
        check(launch, *rest)
        if device.branch is not None:
            for kind in KINDS:
                touched[device.branch, kind].append(launch.ranges(kind).bounds)

    monkeypatch.setattr(races, "_check", noted)
    engine = load(engine_dir)
    step, slabs = step_of(engine), engine.cache.environment
    step.capture(BATCH)
    inputs = inputs_of(engine)
    with races.watched("overlap") as launches:
        step.advance(inputs, slabs)
    assert {(launch.name, name) for launch in launches for name in launch.unaligned} == set()
    assert {(launch.name, name) for launch in launches for name in launch.folded} == set()

    buffers = step.buffers
    kept = {f"counters {i}": own for i, own in enumerate(arrivals._kept.values())}
    known = {**slabs, **buffers.inputs, "results": buffers.results, **kept}
    assert shared_bytes(touched, known) == []
    # which is no wonder where nothing was looked at
    assert used(touched, SIDE, slabs) == {"draft_0_slab_0"}
    assert used(touched, MAIN, slabs) >= {"target_slab_0", "history"}


KINDS = ("reads", "writes", "updates atomically")
Touched = dict[tuple[str, str], list[np.ndarray]]


def shared_bytes(touched: Touched, known: dict[str, Tensor]) -> list[str]:
    """Tensors of which one branch changes bytes that the other one touches.

    Memory that lasts alone: other results of a step are the tape's, and those of a launch are let
    go of as soon as they are copied there.
    """
    marks = {name: marks_of(touched, tensor) for name, tensor in known.items()}
    return [
        f"{name}: {one} {kind} what {other} {other_kind}"
        for name, own in marks.items()
        for one, other in ((MAIN, SIDE), (SIDE, MAIN))
        for kind in KINDS[1:]
        for other_kind in KINDS
        if (own[one, kind] & own[other, other_kind]).any()
    ]


def marks_of(touched: Touched, tensor: Tensor) -> dict[tuple[str, str], np.ndarray]:
    """(branch, what it does) → [bytes of a tensor] whether it does so."""
    first, size = tensor.data_ptr(), tensor.nbytes
    found = {}
    for branch in (MAIN, SIDE):
        for kind in KINDS:
            marks = found[branch, kind] = np.zeros(size, dtype=bool)
            for bounds in touched.get((branch, kind), ()):
                for begin, end in bounds.astype(np.int64).tolist():
                    if begin < first + size and end > first:
                        marks[max(0, begin - first) : end - first] = True
    return found


def used(touched: Touched, branch: str, known: dict[str, Tensor]) -> set[str]:
    """Names of the tensors that a branch writes to."""
    found = {name: marks_of(touched, tensor)[branch, "writes"] for name, tensor in known.items()}
    return {name for name, marks in found.items() if marks.any()}
