"""A mixture's steps capture: nothing in them reads on the host how many tokens an expert has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specc.config import CompileConfig
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured.captures import CaptureWarning
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.runtime.backends.captured.captured_engine import greedy_tokens
from tests.runtime.backends.captured.simulated_device import SimulatedDevice

# one after the other's first tokens; padding rows choose experts, too
PROMPTS = [[5, 6, 7, 8], [40, 41], [9] * 7]
NUM_TOKENS = 4

pytestmark = pytest.mark.filterwarnings(f"error::{CaptureWarning.__module__}.CaptureWarning")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "target"
    return models.save_tiny("qwen3_moe", path, num_hidden_layers=1)


@pytest.fixture(scope="module")
def alone(target: Path) -> Path:
    """An engine for CUDA without a draft."""
    return compiled(target, [], ())


@pytest.fixture(scope="module")
def pair(target: Path) -> Path:
    """The same with a draft, which is the target disturbed."""
    draft = models.save_tiny("qwen3_moe", target.parent / "draft", noise=0.05, num_hidden_layers=1)
    return compiled(target, [draft], (SpecPlan.from_widths((2, 1)),))


def compiled(target: Path, drafts: Sequence[Path], plans: tuple[SpecPlan, ...]) -> Path:
    path = target.parent / f"engine-{len(drafts)}"
    config = CompileConfig(plans=plans, max_seq_len=32, max_batch_size=2, backend="cuda")
    return engines.build(target, drafts, path, config)


@pytest.fixture(scope="module")
def wanted(target: Path) -> list[list[int]]:
    return greedy_tokens(target, PROMPTS, NUM_TOKENS)


def generate(llm: LLM, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


def check_captured(path: Path, plan: str, wanted: list[list[int]], device: SimulatedDevice) -> int:
    """Replay with the interpreted kernels; returns how often a step calls the operator.

    No launch races, and none is of a binary that budgets do not know.
    """
    from tests.kernels.cuda.races import watched

    limits = CaptureLimits(sizes=(2,), max_seconds=0)
    with watched(plan) as launches:
        llm = LLM(Engine.load(path, capture=limits), plan=plan)
        num_captured = len(device.tapes)
        assert generate(llm, 3) == [tokens[:3] for tokens in wanted]
    assert len(device.tapes) <= num_captured + 1
    found = {launch.name for launch in launches if launch.name.startswith("experts_")}
    assert found == {f"experts_{name}_kernel" for name in ("gate_up", "down")}
    assert {(x.name, name) for x in launches for name in x.folded} == set()
    # a root is the last column of a step's tokens, and is loaded alone
    assert {name for x in launches for name in x.unaligned} <= {"tokens"}
    return device.tapes[-1].operators.count("specc.experts.default")


@pytest.mark.slow
def test_captured_steps_say_the_same(alone, wanted, device, triton_kernels) -> None:
    assert check_captured(alone, "off", wanted, device) == 1
    # for any batch, and for those without filters
    assert len(device.tapes) == 2


def test_graphs_say_the_same(alone, wanted) -> None:
    """Operator by operator, with the oracle."""
    assert generate(LLM(alone, backend="eager")) == wanted


@pytest.mark.slow
def test_captured_trees_say_the_same(pair, wanted, device, triton_kernels) -> None:
    """Two passes of the draft and one of the target, both mixtures."""
    assert check_captured(pair, "tree-2-1", wanted, device) == 3


@pytest.mark.slow
def test_trees_say_the_same(pair, wanted) -> None:
    assert generate(LLM(pair, plan="tree-2-1", backend="eager")) == wanted


def test_matrices_are_stored_as_they_are(alone) -> None:
    """Once, as the operator reads them, and no other input has a part of them."""
    program: dict[str, Any] = json.loads((alone / "target/program.json").read_text())
    stacks = {x["key"]: x["shape"] for x in program["inputs"] if ".experts." in x.get("key", "")}
    prefix = "model.layers.0.mlp.experts"
    assert stacks == {f"{prefix}.gate_up_proj": [4, 96, 64], f"{prefix}.down_proj": [4, 64, 48]}
