"""Structured outputs of the demo pair, on every backend that runs here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from specc.api import compile_with
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.sampling.params import SamplingParams
from specc.speculation.plans import DynamicTree, SpecPlan

PAIR = Path(__file__).parents[3] / "examples" / "pair"
SCRIPT = Path(__file__).parents[2] / "measure" / "structured.py"
PLANS = (
    SpecPlan.from_widths((1, 1, 1, 1)),
    SpecPlan.from_widths((3, 2, 1)),
    SpecPlan.from_dynamic(DynamicTree(8, 3, 3)),
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules[SCRIPT.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "num_prompts", "plans", "temperatures"),
    [
        pytest.param("cpu", 200, PLANS[1:2], (0.0,), id="cpu-many"),
        pytest.param("cpu", 16, PLANS, (0.0, 1.0), id="cpu"),
        pytest.param("onnx", 16, PLANS, (0.0, 1.0), id="onnx"),
        pytest.param("eager", 8, PLANS, (0.0, 1.0), id="eager"),
    ],
)
def test_all_outputs_of_the_demo_pair_are_valid(
    script, tmp_path, backend, num_prompts, plans, temperatures
) -> None:
    """Many prompts under five schemas where the runtime is fast, and a few elsewhere."""
    path = tmp_path / "engine"
    config = CompileConfig(plans=PLANS, backend=backend, probe=False, max_seq_len=768)
    compile_with(str(PAIR / "target"), str(PAIR / "draft"), path, config)
    engine = Engine.load(path)
    files = [PAIR / file.name for file in script.FILES]
    prompts = script.read_prompts(files, num_prompts)
    for temperature in temperatures:
        wanted: dict[str, list[list[int]]] = {}
        for plan in ("off", *(plan.name for plan in plans)):
            params = SamplingParams(max_tokens=400, temperature=temperature)
            row = script.measure_plan(engine, plan, prompts, params, wanted)
            assert row["num_valid"] == num_prompts * len(script.SCHEMAS)
            assert row["num_as_off"] >= 0.99 * row["num_valid"]
            for schema in row["schemas"].values():
                assert plan == "off" or schema["tokens_per_step"] > 2
