"""An operator of one file: all that anybody asks of it is in its table; nobody knows its name."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specc.artifact import graph_operators
from specc.artifact.graph_io import graph_from_json, graph_to_json
from specc.bench.step_bytes import model_bytes
from specc.compiler.build import build
from specc.errors import EngineError, UnsupportedGraphError
from specc.kernels import ops
from specc.kernels.operator import AlongLast, Cut, Operand, Operator, PassLimits, Reads, count
from specc.passes.memory import PassShape, peak_bytes
from specc.passes.program_json import program_to_json
from tests.passes.modules import Tiny, compiled, dense_logits, program_logits, random_tokens
from tests.passes.shard.lockstep import Both, assert_alike, prompt_inputs
from tests.specc.compiler.builds import PROMPTS, TREE, Custom, generate, greedy, options

# the file


def gated_scale_reference(x: Tensor, gain: Tensor) -> Tensor:
    """Positive parts of x [..., F], times gain [F]."""
    return x.clamp(min=0) * gain


def _fake(x: Tensor, gain: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _scratch(limits: PassLimits, x: Operand, gain: Operand) -> int:
    return 1000 * count(x.shape) + limits.context


GATED_SCALE = Operator(
    "toy_gated_scale(Tensor x, Tensor gain) -> Tensor",
    reference=gated_scale_reference,
    fake=_fake,
    tokens=AlongLast(),
    cut=Cut({"x": "... features", "gain": "features"}, "... features", "nothing stays whole"),
    scratch=_scratch,
    reads=Reads(whole="gain"),
)


# its tests


@pytest.fixture(autouse=True)
def gated_scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Registered until the test ends."""
    monkeypatch.setattr(ops, "OPERATORS", dict(ops.OPERATORS))
    monkeypatch.setattr(ops, "_by_overload", dict(ops._by_overload))
    monkeypatch.setattr(graph_operators, "_of_specc", dict(graph_operators._of_specc))
    library = torch.library.Library("specc", "FRAGMENT")
    yield ops.register(GATED_SCALE, library)
    library._destroy()
    del vars(ops)[GATED_SCALE.name]


class Scaled(Tiny):
    """A layer of 24 features between two products, which the operator scales."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)
        self.gain = nn.Parameter(torch.linspace(0.5, 2.0, 24))

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.down(ops.toy_gated_scale(self.up(x), self.gain))


class AcrossTokens(Scaled):
    """The same along the tokens of a pass, of which there are as many as features."""

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        scaled = ops.toy_gated_scale(self.up(x).transpose(1, 2), x[0, :, 0])
        return x + self.down(scaled.transpose(1, 2))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Scaled().eval()


def test_a_model_that_calls_it_is_traced_proven_and_run(model, gated_scale):
    program, _ = compiled(model)
    assert len(program.calls(gated_scale)) == 1
    tokens = random_tokens()
    wanted = dense_logits(model, tokens)
    torch.testing.assert_close(program_logits(program, model, tokens), wanted)


def test_the_proof_asks_its_table():
    """It goes along the last dimension, which is not that of tokens."""
    torch.manual_seed(0)
    with pytest.raises(UnsupportedGraphError) as caught:
        compiled(AcrossTokens().eval())
    assert "toy_gated_scale" in str(caught.value)
    assert "mixes tokens" in str(caught.value)


def test_the_memory_plan_asks_its_table(model, gated_scale, monkeypatch):
    program, _ = compiled(model)
    shape = PassShape(num_tokens=12, num_rows=5, batch_size=2, longest=6, context=32)
    planned = peak_bytes(program, shape)
    monkeypatch.setattr(ops, "_by_overload", {})
    # the call, where everything else that lives then is a few values of 12 tokens
    assert 0 < planned - (1000 * 12 * 24 + 32) <= peak_bytes(program, shape)


def test_bytes_of_a_step_ask_its_table(model, gated_scale):
    """A weight that two calls read counts twice."""
    program, _ = compiled(model)
    once = model_bytes(program_to_json(program)).weights
    (call,) = program.calls(gated_scale)
    with program.graph.inserting_after(call):
        again = program.graph.call_function(gated_scale, (call, call.args[1]))
    again.meta["val"] = call.meta["val"]
    call.replace_all_uses_with(again, lambda user: user is not again)
    assert model_bytes(program_to_json(program)).weights - once == 24 * 4


def test_ranks_cut_it_as_its_table_says(model):
    found = Both.of(model, 2)
    (gain,) = (cut for cut in found.plan.weights if cut.key == "gain")
    assert (gain.shape, gain.local_shape) == ((24,), (12,))
    inputs = prompt_inputs([random_tokens(9).tolist(), [3]])
    with torch.inference_mode():
        assert_alike(found.logits(inputs), found.whole(*inputs))


def test_graphs_of_engines_hold_it_while_its_table_says_so(model, monkeypatch):
    program, _ = compiled(model)
    data = graph_to_json(program.graph)
    assert "specc.toy_gated_scale.default" in {node.get("target") for node in data["nodes"]}
    graph_from_json(data)
    monkeypatch.setattr(graph_operators, "_of_specc", {})
    with pytest.raises(EngineError, match="specc"):
        graph_from_json(data)


class CustomScaled(Custom):
    """A whole language model."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.factors = nn.Parameter(torch.linspace(0.5, 3, 32))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(position_ids)
        return super().forward(input_ids, position_ids) + self.head(
            ops.toy_gated_scale(x, self.factors)
        )


def test_an_engine_runs_it(tmp_path):
    """Eager, by its reference: the tokens of the module, with a draft and without."""
    model = CustomScaled()
    build(model, Custom(), tmp_path / "engine", options(TREE, backend="eager"))
    wanted = [greedy(model, prompt) for prompt in PROMPTS]
    for plan in ("off", TREE.name):
        assert generate(tmp_path / "engine", plan)[0] == wanted


def test_nobody_knows_its_name():
    """All of the above is in this file."""
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(
        ["git", "grep", "-l", GATED_SCALE.name], cwd=root, capture_output=True, text=True
    )
    if found.returncode == 128:
        pytest.skip("this is no checkout")
    assert found.stdout.split() in ([], [str(Path(__file__).resolve().relative_to(root))])
