"""Programs from JSON: bound weights, caches, stages."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.errors import EngineError
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.eager.step import EagerStep
from specc.runtime.backends.program_files import MappedWeights, read_json
from specc.speculation.plan_json import plan_to_json
from specc.speculation.plans import SpecPlan


@pytest.fixture
def program(saved_engine) -> dict[str, Any]:
    return read_json(saved_engine.path / "target/program.json")


def make_caches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(4, 4, 1, 16), torch.zeros(4, 4, 1, 16))]


def run_causal(model: ModelProgram, tokens: list[int]) -> Tensor:
    """Logits of the last of these tokens, as the prompt of one sequence in blocks 2, 1, 0."""
    positions = torch.arange(len(tokens))
    starts = torch.tensor([0, len(tokens)], dtype=torch.int32)
    table = torch.tensor([[2, 1, 0]], dtype=torch.int32)
    length = torch.zeros(1, dtype=torch.int32)
    rows = positions[-1:]
    return model(torch.tensor(tokens), positions, starts, positions, length, None, table, rows)


def test_weights_and_caches_are_bound(program, saved_engine) -> None:
    caches = make_caches()
    model = ModelProgram(program, saved_engine.weights, caches)
    logits = run_causal(model, [3, 1, 4, 1, 5])
    assert logits.shape == (1, 61)
    assert logits.argmax().item() == saved_engine.greedy([3, 1, 4, 1, 5], 1)[0]
    # first row of the sequence: block 2, row 0
    torch.testing.assert_close(caches[0][0][2, 0, 0], saved_engine.weights["embed"][3])
    torch.testing.assert_close(caches[0][1][2, 0, 0], 2 * saved_engine.weights["embed"][3])
    assert not caches[0][0][3].any()


def test_no_logits_where_none_are_asked_for(program, saved_engine) -> None:
    model = ModelProgram(program, saved_engine.weights, make_caches())
    one = torch.zeros(1, dtype=torch.int64)
    starts, table = torch.tensor([0, 1]).int(), torch.zeros(1, 1).int()
    assert model(one, one, starts, one, one.int(), None, table, one[:0]).shape == (0, 61)


def test_loading_maps_weights_instead_of_copying_them(saved_engine) -> None:
    file = saved_engine.path / "target/weights.safetensors"
    weights = MappedWeights(file)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc/self/maps")
    ranges = []
    for line in maps.read_text().splitlines():
        if line.endswith(str(file.resolve())):
            begin, end = line.split()[0].split("-")
            ranges.append(range(int(begin, 16), int(end, 16)))
    model = ModelProgram(read_json(file.parent / "program.json"), weights, make_caches())
    assert weights
    for weight in weights.values():
        assert any(weight.data_ptr() in r for r in ranges)
    assert list(model.parameters()) == list(model.buffers()) == []
    assert {w.dtype for w in model._weights} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"head": None}, "target has no weight head", id="absent"),
        pytest.param({"head": torch.zeros(61, 8)}, r"head is float32\[61, 8\]", id="shape"),
        pytest.param(
            {"head": torch.zeros(61, 16).bfloat16()}, r"head is bfloat16\[61, 16\]", id="dtype"
        ),
    ],
)
def test_wrong_weights_are_named(program, saved_engine, change, message) -> None:
    weights = {k: v for k, v in (saved_engine.weights | change).items() if v is not None}
    with pytest.raises(EngineError, match=message):
        ModelProgram(program, weights, make_caches())


def test_other_schema_versions_are_refused(program, saved_engine) -> None:
    with pytest.raises(EngineError, match="schema 4"):
        ModelProgram(program | {"schema_version": 4}, saved_engine.weights, make_caches())
    with pytest.raises(EngineError, match="schema None"):
        EagerStep({}, {})
    # 1 knew one draft and greedy steps
    with pytest.raises(EngineError, match="a step program of schema 1"):
        EagerStep({"schema_version": 1}, {})
    with pytest.raises(EngineError, match="a plan"):
        EagerStep({"schema_version": 2}, {})


def test_unreadable_files_are_engine_errors(tmp_path: Path) -> None:
    for content in (None, b"", b"{"):
        if content is not None:
            (tmp_path / "weights.safetensors").write_bytes(content)
            (tmp_path / "program.json").write_bytes(content)
        with pytest.raises(EngineError, match=r"weights\.safetensors"):
            MappedWeights(tmp_path / "weights.safetensors")
        with pytest.raises(EngineError, match=r"program\.json"):
            read_json(tmp_path / "program.json")


def test_an_unknown_operator_is_refused(program, saved_engine) -> None:
    broken = copy.deepcopy(program)
    for node in broken["graph"]["nodes"]:
        if node.get("target") == "aten.add.Tensor":
            node["target"] = "os.system"
    with pytest.raises(EngineError, match=r"os\.system"):
        ModelProgram(broken, saved_engine.weights, make_caches())


def test_step_runs_its_stages_in_order() -> None:
    """Stage `draft` doubles x; stage `verify` adds the constant one."""
    node = {"name": "x", "op": "placeholder"}
    double = {
        "name": "y", "op": "call_function", "target": "aten.mul.Scalar", "args": [{"node": "x"}, 2]
    }  # fmt: skip
    add = {
        "name": "z", "op": "call_function", "target": "aten.add.Tensor",
        "args": [{"node": "doubled"}, {"node": "one"}],
    }  # fmt: skip
    inputs = [{"name": name, "op": "placeholder"} for name in ("one", "doubled")]
    program = {
        "schema_version": 2,
        "plan": plan_to_json(SpecPlan.from_widths((1,))),
        "constants": {"one": {"dtype": "int32", "values": [1]}},
        "stages": [
            {"name": "draft", "graph": {
                "nodes": [node, double], "output": {"dict": {"doubled": {"node": "y"}}}}},
            {"name": "verify", "graph": {
                "nodes": [*inputs, add], "output": {"dict": {"sum": {"node": "z"}}}}},
        ],
    }  # fmt: skip
    step = EagerStep(json.loads(json.dumps(program)), {})
    environment = {"x": torch.tensor([3], dtype=torch.int32)}
    stage_s = step.run(environment)
    assert environment["sum"].tolist() == [7]
    assert list(stage_s) == ["draft", "verify"]
    assert all(seconds > 0 for seconds in stage_s.values())
    assert step.plan == SpecPlan.from_widths((1,))
