"""What is emitted is what the runtime binds: inputs in order, by kind and key."""

from __future__ import annotations

import json

import pytest
import torch

from specc.passes.program import RUNTIME_INPUTS, constant_key
from specc.passes.program_json import program_to_json
from specc.runtime.backends.eager.program import ModelProgram
from tests.passes.modules import TOLERANCE, Tiny, compiled, dense_logits, random_tokens


class WithConstant(Tiny):
    has_bias = True

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2, 16), persistent=False)

    def after(self, x, positions):
        return x * self.scale


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return WithConstant().eval()


@pytest.fixture(scope="module")
def program(model):
    return compiled(model)[0]


@pytest.fixture(scope="module")
def data(program):
    return json.loads(json.dumps(program_to_json(program)))


def test_inputs_are_the_placeholders_in_order(program, data):
    assert [entry["name"] for entry in data["inputs"]] == [
        node.target for node in program.graph.find_nodes(op="placeholder")
    ]
    kinds = [entry["kind"] for entry in data["inputs"]]
    count = len(program.weights) + len(program.constants)
    assert set(kinds[:count]) == {"weight", "constant"}
    assert kinds[count:] == ["input"] * len(RUNTIME_INPUTS) + ["cache"] * 2
    assert (data["schema_version"], data["name"]) == (1, "target")


def test_entries(data):
    entries = {entry.get("key", entry["name"]): entry for entry in data["inputs"]}
    fused = entries["q.bias+k.bias+v.bias"]
    assert (fused["kind"], fused["dtype"], fused["shape"]) == ("weight", "float32", [32])
    (constant,) = (e for e in data["inputs"] if e["kind"] == "constant")
    assert constant["key"] == constant_key(constant["name"])
    assert (constant["dtype"], constant["shape"]) == ("float32", [16])
    assert entries["v_cache_0"] == {
        "name": "v_cache_0",
        "kind": "cache",
        "layer": 0,
        "part": "v",
        "dtype": "float32",
        "shape": [2, 4],
    }


def test_runtime_computes_the_same(program, data, model):
    parameters = dict(model.named_parameters())
    weights = {
        weight.key: torch.cat([parameters[key] for key in weight.parameters])
        for weight in program.weights.values()
    }
    weights |= {constant_key(name): value for name, value in program.constants.items()}
    caches = [(torch.zeros(9, 1, 2, 4), torch.zeros(9, 1, 2, 4))]
    tokens = random_tokens()
    with torch.no_grad():
        got = ModelProgram(data, weights, caches)(
            tokens,
            torch.arange(9),
            torch.tensor([0, 9], dtype=torch.int32),
            torch.arange(9, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            None,
            torch.arange(9, dtype=torch.int32)[None],
            torch.tensor([8, 1]),
        )
    torch.testing.assert_close(got, dense_logits(model, tokens)[[8, 1]], **TOLERANCE)
    assert all(cache.any() for cache in caches[0])


def test_unknown_input_is_a_bug(program):
    import copy

    broken = copy.copy(program)
    broken.constants = {}
    with pytest.raises(AssertionError):
        program_to_json(broken)
