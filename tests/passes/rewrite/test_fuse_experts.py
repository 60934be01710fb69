"""The experts of a mixture become one operator where their tokens surely come back in order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels import ops
from specc.passes.frontend.trace import trace
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.memory import PassShape, peak_bytes
from specc.passes.pipeline import Pipeline
from specc.passes.quantize.quantize_experts import QuantizeExperts
from specc.passes.rewrite.fuse_experts import FuseExperts
from specc.passes.rewrite.fuse_swiglu import FuseSwiGLU
from tests import models
from tests.models import build_model
from tests.passes.modules import (
    VOCAB,
    Runner,
    Tiny,
    assert_runs_alike,
    aten,
    compiled,
    reasons,
    rewrites,
)
from tests.passes.modules import lower_for_cuda as lower
from tests.tiers import every, only


@pytest.mark.default("qwen3_moe-dtype2")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mixtral", torch.float32),
        pytest.param("mixtral", torch.bfloat16, marks=pytest.mark.slow),
        ("qwen3_moe", torch.float32),
        pytest.param("qwen3_moe", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_experts_are_one_operator(name, dtype):
    model = build_model(name).to(dtype)
    before, after, program, pipeline = lower(model)
    assert rewrites(pipeline, "FuseExperts") == len(program.layers) == 2
    assert reasons(pipeline, "FuseExperts") == []
    calls = program.calls(ops.experts)
    assert len(calls) == 2
    left = (ops.grouped_mm, aten.sort.default, aten.cumsum.default, aten.index_put.default)
    assert not program.calls(*left, ops.act_and_mul)
    for layer, call in enumerate(calls):
        x, ids, weights, gate_up, down, activation = call.args
        # matrices are inputs as they are stored
        for item, part in ((gate_up, "gate_up_proj"), (down, "down_proj")):
            assert program.weights[item.target].parameters == (
                f"model.layers.{layer}.mlp.experts.{part}",
            )
        assert weights.meta["val"].dtype == torch.float32
        assert (ids.meta["val"].dtype, activation) == (torch.int64, "silu")
        assert call.meta["val"].dtype == x.meta["val"].dtype == dtype
    if dtype == torch.float32:
        assert_runs_alike(before, after, models.VOCAB)


def test_experts_of_gpt_oss():
    """Biases, matrices [inputs, outputs], and a gate of its own."""
    before, after, program, pipeline = lower(build_model("gpt_oss"))
    assert reasons(pipeline, "FuseExperts") == []
    for layer, call in enumerate(program.calls(ops.experts)):
        _, _, _, gate_up, down, activation, *biases = call.args
        parts = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
        given = [program.weights[node.target] for node in (gate_up, down, *biases)]
        assert [weight.parameters[0] for weight in given] == [
            f"model.layers.{layer}.mlp.experts.{part}" for part in parts
        ]
        assert [weight.is_turned for weight in given] == [True, True, False, False]
        assert activation == "clamped"
    assert len(program.calls(ops.experts)) == len(program.layers)
    assert not program.calls(ops.grouped_mm)
    assert_runs_alike(before, after, models.VOCAB)


def clamped(combine, limit=7.0, is_in_turn=True):
    """A gate like that of gpt-oss."""

    def gate_of(rows):
        gate, up = (rows[..., ::2], rows[..., 1::2]) if is_in_turn else rows.chunk(2, -1)
        return combine(gate.clamp(max=limit), up.clamp(min=-limit, max=limit))

    return gate_of


def own_gate(gate, up):
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


GATES = {
    "halves": clamped(own_gate, is_in_turn=False),
    "limits-of-6": clamped(own_gate, 6.0),
    "up-first": clamped(lambda gate, up: own_gate(up, gate)),
    "sharper": clamped(lambda gate, up: (up + 1) * (gate * torch.sigmoid(gate * 1.5))),
    "two-more": clamped(lambda gate, up: (up + 2) * (gate * torch.sigmoid(gate * 1.702))),
    "of-the-other": clamped(lambda gate, up: (up + 1) * (up * torch.sigmoid(gate * 1.702))),
}


@pytest.mark.parametrize("name", GATES)
def test_other_gates_stay(name):
    model = build_model("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.experts._apply_gate = GATES[name]
    before, after, _, pipeline = lower(model)
    assert rewrites(pipeline, "FuseExperts") == 0
    assert "no gate alone reads the first product" in reasons(pipeline, "FuseExperts")
    assert_runs_alike(before, after, models.VOCAB)


@pytest.mark.slow
def test_shared_experts_stay_products():
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    fields = models._COMMON | models._MOE | {"shared_expert_intermediate_size": 24}
    torch.manual_seed(3)
    config = Qwen2MoeConfig(**(models._IDS | fields))
    model = Qwen2MoeForCausalLM(config).eval()
    before, after, program, pipeline = lower(model)
    assert (rewrites(pipeline, "FuseExperts"), rewrites(pipeline, "FuseSwiGLU")) == (2, 4)
    assert len(program.calls(ops.act_and_mul)) == 2
    assert_runs_alike(before, after, models.VOCAB)


class Mixture(Tiny):
    """Two of four experts a token, in the steps of transformers; tests override single steps."""

    top_k, num_experts, size = 2, 4, 12

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, self.num_experts)
        self.gate_up = nn.Parameter(torch.randn(self.num_experts, 2 * self.size, 16))
        self.down = nn.Parameter(torch.randn(self.num_experts, 16, self.size))

    def route(self, x):
        return self.gate(x).softmax(-1).topk(self.top_k)

    def activate(self, x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def sort(self, choices):
        return choices.sort()

    def tokens_of(self, permutation):
        return permutation // self.top_k

    def count(self, ids):
        return (ids[:, None] == torch.arange(self.num_experts)).sum(0)

    def second(self, inner, ends):
        return ops.grouped_mm(inner, self.down.transpose(-2, -1), ends)

    def weigh(self, rows, weights, permutation):
        return rows * weights.reshape(-1)[permutation][:, None]

    def inverse(self, permutation):
        inverse = torch.empty_like(permutation)
        inverse[permutation] = torch.arange(permutation.shape[0])
        return inverse

    def total(self, rows):
        return rows.view(-1, self.top_k, 16).sum(1)

    def after(self, x, positions):
        x = x[0]
        weights, choices = self.route(x)
        ids, permutation = self.sort(choices.reshape(-1))
        ends = self.count(ids).cumsum(0, dtype=torch.int32)
        rows = x[self.tokens_of(permutation)]
        rows = ops.grouped_mm(rows, self.gate_up.transpose(-2, -1), ends)
        rows = self.second(self.activate(rows), ends)
        rows = self.weigh(rows, weights, permutation)[self.inverse(permutation)]
        return self.total(rows)[None]


class Gelu(Mixture):
    def activate(self, x):
        gate, up = x.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up


class Wide(Mixture):
    """A block of gates and of what they multiply, and half a block of outputs."""

    size = 16


def test_matrices_in_two_layouts():
    program, _ = compiled(Wide())
    assert QuantizeExperts(QuantizedLayout(8)).run(program).rewrites == 1
    Pipeline(cuda_phases(models.POSITIONS)).run(program)
    (call,) = program.calls(ops.experts)
    assert call.args[5:] == ("silu", None, None, 16, "int8", "")
    # the first matrix is rows of bytes
    assert [item.meta["val"].dtype for item in call.args[3:5]] == [torch.uint8, torch.float32]
    assert not program.calls(ops.grouped_mm, ops.grouped_mm_q)


class ThreeOfFour(Mixture):
    top_k = 3


class OneOfFour(Mixture):
    top_k = 1


class WeightsFirst(Mixture):
    def weigh(self, rows, weights, permutation):
        return weights.reshape(-1)[permutation].unsqueeze(-1) * rows


class NotTransposed(Mixture):
    """Matrices [E, in, out]: the engine's file has their transposes."""

    def __init__(self):
        super().__init__()
        self.down = nn.Parameter(self.down.detach().mT.contiguous())

    def second(self, inner, ends):
        return ops.grouped_mm(inner, self.down, ends)


@pytest.mark.default("OneOfFour", "NotTransposed")
@pytest.mark.parametrize(
    "kind",
    only(
        (Mixture, OneOfFour, NotTransposed),
        [Mixture, Gelu, ThreeOfFour, OneOfFour, WeightsFirst, NotTransposed],
    ),
)
def test_spellings_are_fused(kind):
    torch.manual_seed(5)
    before, after, program, pipeline = lower(kind())
    assert reasons(pipeline, "FuseExperts") == []
    (call,) = program.calls(ops.experts)
    assert call.args[5] == ("gelu_tanh" if kind is Gelu else "silu")
    assert not program.calls(ops.grouped_mm)
    assert_runs_alike(before, after, VOCAB)


def test_memory_of_pairs_is_planned():
    """Of each pair a row of both products and a place; nothing of a size that the graph shows."""
    _, _, program, _ = lower(Mixture())
    pairs = 2 * 20_000
    shape = PassShape(num_tokens=20_000, num_rows=1, batch_size=1, longest=1, context=8)
    scratch = pairs * (4 * 12 + 4 * 16 + 4) + 4 * 4
    # what comes in, goes out, and is added to what goes out
    live = pairs * (4 + 8) + 20_000 * 4 * 16 * 2
    assert scratch < peak_bytes(program, shape) <= scratch + 1.5 * live


class NoGate(Mixture):
    def activate(self, x):
        return F.silu(x[:, : self.size])


class ReadTwice(Mixture):
    """The second product is read beside the weights, too."""

    def weigh(self, rows, weights, permutation):
        return super().weigh(rows, weights, permutation) + rows


class Computed(Mixture):
    def second(self, inner, ends):
        return ops.grouped_mm(inner, (2 * self.down).transpose(-2, -1), ends)


class Largest(Mixture):
    """The best of a token's experts instead of their sum."""

    def total(self, rows):
        return rows.view(-1, self.top_k, 16).amax(1)


class Mean(Mixture):
    def total(self, rows):
        return rows.view(-1, self.top_k, 16).mean(1)


class OwnInverse(Mixture):
    """The same, by another sort."""

    def inverse(self, permutation):
        return permutation.argsort()


class Weightless(Mixture):
    def weigh(self, rows, weights, permutation):
        return rows


class WeightsOfExperts(Mixture):
    """Each row weighs what its first column says."""

    def weigh(self, rows, weights, permutation):
        return rows * rows[:, :1]


class Fewer(Mixture):
    """An expert more has matrices than tokens can choose."""

    def route(self, x):
        return self.gate(x)[:, :3].softmax(-1).topk(self.top_k)

    def count(self, ids):
        return (ids[:, None] == torch.arange(3)).sum(0)


class Turned(Mixture):
    """As many experts as columns, and a matrix of each column."""

    num_experts = size = 16

    def second(self, inner, ends):
        return ops.grouped_mm(inner, self.down.transpose(0, 1), ends)


DECLINED = {
    NoGate: "no gate alone reads the first product",
    ReadTwice: "nothing but a product with the router's weights reads the second product",
    Computed: "matrices of experts are not parameters of rows of their inputs",
    Largest: "the rows of a token's experts are not added up",
    Mean: "the rows of a token's experts are not added up",
    OwnInverse: "weighted rows do not go back to the order of tokens",
    Weightless: "nothing but a product with the router's weights reads the second product",
    WeightsOfExperts: "nothing but a product with the router's weights reads the second product",
    Fewer: "matrices are not one of each expert",
    Turned: "matrices of experts are not parameters of rows of their inputs",
}


@pytest.mark.default("OwnInverse", "Fewer")
@pytest.mark.parametrize("kind", every(3, DECLINED), ids=lambda kind: kind.__name__)
def test_others_stay(kind):
    """With the same numbers, and a reason."""
    torch.manual_seed(5)
    model = kind()
    program, _ = compiled(model)
    before = Runner(program, model)
    FuseSwiGLU().run(program)
    result = FuseExperts().run(program)
    assert result.rewrites == 0
    assert result.declined[0].reason == DECLINED[kind]
    assert not program.calls(ops.experts)
    assert len(program.calls(ops.grouped_mm)) == 2
    assert_runs_alike(before, Runner(program, model), VOCAB)


class Descending(Mixture):
    def sort(self, choices):
        return choices.sort(descending=True)


class NextTokens(Mixture):
    def tokens_of(self, permutation):
        return (permutation + 1) // self.top_k


class OtherTokens(Mixture):
    def tokens_of(self, permutation):
        return permutation // 4


class OtherCounts(Mixture):
    def count(self, ids):
        return super().count((3 - ids).sort().values)


class RunningEnds(Mixture):
    """The second product has one row more of each expert."""

    def second(self, inner, ends):
        return super().second(inner, ends + 1)


class OtherWeights(Mixture):
    def weigh(self, rows, weights, permutation):
        return super().weigh(rows, weights, permutation.sort().indices)


class OtherPlaces(Mixture):
    def inverse(self, permutation):
        return super().inverse(permutation.sort().indices)


class FromOne(Mixture):
    """Each row comes from the place after its own."""

    def inverse(self, permutation):
        inverse = torch.empty_like(permutation)
        inverse[permutation] = torch.arange(1, permutation.shape[0] + 1)
        return inverse % permutation.shape[0]


class Rows(Mixture):
    """A row of the result has other columns than a token's."""

    def total(self, rows):
        return rows.view(-1, 16, self.top_k).sum(2)


OUT_OF_ORDER = {
    Descending: "rows are in the order of another sort",
    NextTokens: "rows are not in the order of a sort",
    OtherTokens: "expert ids are not one for each of a token's 4 experts",
    OtherCounts: "groups are not the running count of each expert's tokens",
    RunningEnds: "the products have groups of their own",
    OtherWeights: "weights are in the order of another sort",
    OtherPlaces: "weighted rows do not go back to the order of tokens",
    FromOne: "weighted rows do not go back to the order of tokens",
    Rows: "weighted rows are not those of each token's experts",
}


@pytest.mark.default("OtherCounts")
@pytest.mark.parametrize("kind", every(3, OUT_OF_ORDER), ids=lambda kind: kind.__name__)
def test_what_is_out_of_order_stays(kind):
    """Most are refused before, as they mix tokens: the pass does not rely on that."""
    program = trace(kind().eval(), "target")
    Pipeline(verifies=False).run(program)
    FuseSwiGLU().run(program)
    result = FuseExperts().run(program)
    assert result.rewrites == 0
    assert [item.reason for item in result.declined] == [OUT_OF_ORDER[kind]]
