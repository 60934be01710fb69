"""Weights in the host's memory, copied around their use: the same tokens on two streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured import backend as captured_backend
from specc.runtime.backends.captured import weight_copies
from specc.runtime.backends.cuda import streamed_program
from specc.runtime.backends.cuda.streamed_program import StreamedProgram
from specc.runtime.backends.program_files import MappedWeights, read_json
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines
from tests.runtime.backends.captured.forked_device import ForkedDevice, ForkedTape
from tests.tiers import every

PROMPTS = [[5, 6, 7, 8], [40, 41]]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LIMITS = CaptureLimits(sizes=(2,), max_seconds=-1)


@pytest.fixture(scope="module")
def engine_dir(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "cuda"
    config = CompileConfig(
        plans=(SpecPlan.from_widths((2, 1)),), max_seq_len=48, max_batch_size=2, backend="cuda"
    )
    return engines.build(tiny_models.target, tiny_models.draft, path, config)


@pytest.fixture(params=[True, False], ids=["early", "late"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ForkedDevice:
    """Stands for the GPU of this machine; the tiny model's weights are large enough for it."""
    simulated = ForkedDevice(request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(captured_backend, "cuda_device", lambda: simulated)
    monkeypatch.setattr(weight_copies, "LEAST_BYTES", 1 << 10)
    return simulated


@pytest.fixture(scope="module")
def wanted(engine_dir: Path) -> dict[str, list[list[int]]]:
    """What the same graphs say without a device."""
    engine = Engine.load(engine_dir, backend="eager")
    return {plan: generate(engine, plan) for plan in ("off", "tree-2-1")}


def generate(engine: Engine, plan: str) -> list[list[int]]:
    outputs = LLM(engine, plan=plan).generate(PROMPTS, PARAMS)
    return [list(output.outputs[0].token_ids) for output in outputs]


def bounds(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The least that weights of the target take, and all of them."""
    monkeypatch.setattr(weight_copies, "LEAST_BYTES", 1 << 10)
    weights = MappedWeights(engine_dir / "target" / "weights.safetensors")
    program = read_json(engine_dir / "target" / "program.json")
    whole = sum(value.nbytes for value in weights.values())
    low, high = 1, whole
    while low < high:
        middle = (low + high) // 2
        try:
            streamed_program.plan_streams(program, weights, middle)
            high = middle
        except ConfigError:
            low = middle + 1
    return low, whole


@pytest.mark.parametrize("plan", every(2, ["off", "tree-2-1"]))
def test_copied_weights_give_the_same_tokens(
    engine_dir: Path, wanted: Any, device: ForkedDevice, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """None, some and all of the weights that can be copied, in captured steps and in prompts."""
    least, whole = bounds(engine_dir, monkeypatch)
    numbers = set()
    for budget in (least, (least + whole) // 2, 2 * whole):
        device.tapes.clear()
        engine = Engine.load(engine_dir, offload_weights=budget, capture=LIMITS)
        assert generate(engine, plan) == wanted[plan]
        model = engine.target._program  # type: ignore[attr-defined]
        assert isinstance(model, StreamedProgram)
        count = len(model.offload.streamed)
        numbers.add(count)
        # for any batch, and for one without filters
        assert len(device.tapes) == 2
        for tape in device.tapes:
            assert isinstance(tape, ForkedTape)
            assert len(tape.copies) == count, "each weight once a pass"
        assert model.is_resident == (count == 0)
    assert len(numbers) == 3


def test_a_budget_below_two_slots_is_refused(
    engine_dir: Path, device: ForkedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    least, _ = bounds(engine_dir, monkeypatch)
    with pytest.raises(ConfigError, match="that always stay, two buffers for weights of up to"):
        Engine.load(engine_dir, offload_weights=least - 1, capture=LIMITS)


def test_what_is_looked_up_or_small_stays(
    engine_dir: Path, device: ForkedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    least, _ = bounds(engine_dir, monkeypatch)
    weights = MappedWeights(engine_dir / "target" / "weights.safetensors")
    program = read_json(engine_dir / "target" / "program.json")
    plan = streamed_program.plan_streams(program, weights, least)
    copied = {key for piece in (*plan.streamed, *plan.kept) for key in piece.keys}
    assert copied | set(plan.rest) == set(weights)
    assert not any("embed" in key for key in copied)
    assert min(weights[key].nbytes for key in copied) >= weight_copies.LEAST_BYTES
    # in the order of use
    order = [piece.segment for piece in plan.streamed]
    assert order == sorted(order)


def test_auto_is_what_the_device_has_free(engine_dir: Path, device: ForkedDevice) -> None:
    device.memory_bytes = 1 << 34
    engine = Engine.load(engine_dir, offload_weights="auto", capture=LIMITS)
    assert engine.target._program.is_resident  # type: ignore[attr-defined]


def test_an_event_of_before_the_capture_is_an_error(device: ForkedDevice) -> None:
    copies, one = device.copy_stream(), torch.zeros(4)
    before = copies.point()
    with pytest.raises(AssertionError, match="cudaErrorStreamCaptureIsolation"):
        device.capture(lambda: copies.copy(one, torch.ones(4), before))


def test_a_copy_that_nothing_waits_for_is_an_error(device: ForkedDevice) -> None:
    copies, one = device.copy_stream(), torch.zeros(4)
    with pytest.raises(AssertionError, match="nothing waits for"):
        device.capture(lambda: copies.copy(one, torch.ones(4), copies.point()))
