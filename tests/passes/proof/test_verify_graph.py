"""What a runtime cannot execute, or what would be wrong for tokens of a tree, is refused."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specc.errors import UnsupportedGraphError, UnsupportedRotaryError
from specc.passes.proof.verify_graph import verify_graph
from tests.passes.modules import Tiny, aten, compiled


class Nonzero(Tiny):
    def after(self, x, positions):
        rows = (positions[0] > 2).nonzero()[:, 0]
        return x.index_add(1, rows, x[:, rows])


class Cumsum(Tiny):
    def after(self, x, positions):
        return x + x.cumsum(1)


class CumsumFromBehind(Tiny):
    def after(self, x, positions):
        return x + x.cumsum(-2)


class Convolution(Tiny):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3, padding=2, groups=16)

    def after(self, x, positions):
        return x + self.conv(x.mT)[..., : x.shape[1]].mT


@pytest.mark.default(
    "Nonzero-nonzero-aten.nonzero.default reads values on the host",
    "CumsumFromBehind-cumsum-aten.cumsum.default mixes tokens outside attention",
)
@pytest.mark.parametrize(
    ("kind", "node", "reason"),
    [
        (Nonzero, "nonzero", "aten.nonzero.default reads values on the host"),
        (Cumsum, "cumsum", "aten.cumsum.default mixes tokens outside attention"),
        (CumsumFromBehind, "cumsum", "aten.cumsum.default mixes tokens outside attention"),
        (Convolution, "conv1d", "aten.conv1d.default is not known to keep tokens apart"),
    ],
)
def test_refused_with_node_and_reason(kind, node, reason):
    with pytest.raises(UnsupportedGraphError) as caught:
        compiled(kind())
    assert f"node {node} after fuse: {reason}" in caught.value.found


class LongestPosition(Tiny):
    def after(self, x, positions):
        return x * (positions.max() + 1)


class LongestOfDim(Tiny):
    def after(self, x, positions):
        return x * positions.max(-1, keepdim=True).values[..., None]


class LongestAmax(Tiny):
    def after(self, x, positions):
        return x * (positions.float() * 2).amax()


@pytest.mark.parametrize("kind", [LongestPosition, LongestOfDim, LongestAmax])
def test_frequencies_of_the_longest_position_are_refused(kind):
    with pytest.raises(UnsupportedRotaryError, match="over the positions of the pass"):
        compiled(kind())


class LastPosition(Tiny):
    def after(self, x, positions):
        return x * positions[:, -1:, None]


class FromFirstPosition(Tiny):
    def embed(self, ids, positions):
        return self.embedding(ids) + self.place(positions - positions[:, :1])


class Flip(Tiny):
    def after(self, x, positions):
        return x + x.flip(1)


class Roll(Tiny):
    def after(self, x, positions):
        return x + x.roll(1, 1)


class Mean(Tiny):
    def after(self, x, positions):
        return x + x.mean(1, keepdim=True)


class SoftmaxOverTokens(Tiny):
    def after(self, x, positions):
        return x + x.softmax(1)


class Sort(Tiny):
    def after(self, x, positions):
        return x + x.sort(1).values


class Shift(Tiny):
    def after(self, x, positions):
        return x + F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)


class WrittenOutAttention(Tiny):
    """A second attention that is not scaled_dot_product_attention."""

    def after(self, x, positions):
        mask = positions[0][None] > positions[0][:, None]
        return x + (x @ x.mT).masked_fill(mask, -1e9).softmax(-1) @ x


class GroupNorm(Tiny):
    def after(self, x, positions):
        return F.group_norm(x.mT, 2).mT


class NormOverAll(Tiny):
    def after(self, x, positions):
        return x / x.std()


@pytest.mark.parametrize(
    "kind",
    [
        LastPosition, FromFirstPosition, Flip, Roll, Mean, SoftmaxOverTokens, Sort, Shift,
        WrittenOutAttention, GroupNorm, NormOverAll,
    ],
)  # fmt: skip
def test_what_else_mixes_tokens_is_refused(kind):
    with pytest.raises((UnsupportedGraphError, UnsupportedRotaryError)):
        compiled(kind())


class WithinToken(Tiny):
    """The same operators inside one token are right."""

    def after(self, x, positions):
        x = x.cumsum(-1) + x.flip(-1) + x.roll(1, -1) + x.softmax(-1) + x.mean(-1, keepdim=True)
        return x + x.max(-1, keepdim=True).values


def test_maximum_over_features_is_accepted():
    compiled(WithinToken())


class WithoutMaximum(Tiny):
    def after(self, x, positions):
        return x.cumsum(-1) + x.flip(-1) + x.roll(1, -1) + x.softmax(-1) + x.mean(-1, keepdim=True)


@pytest.fixture(scope="module")
def finished():
    return compiled(WithoutMaximum())[0]


@pytest.fixture
def program(finished):
    """A program to break: its graph and its books are copies."""
    return dataclasses.replace(
        finished,
        graph_module=copy.deepcopy(finished.graph_module),
        weights=dict(finished.weights),
    )


def test_operators_within_a_token_are_accepted(program):
    verify_graph(program, "fuse", is_final=True)


def test_host_reads_are_allowed_before_the_last_phase(program):
    (output,) = program.graph.find_nodes(op="output")
    with program.graph.inserting_before(output):
        item = program.graph.call_function(aten.item.default, (output.args[0],))
    item.meta["val"] = 1
    verify_graph(program, "logits", is_final=False)
    with pytest.raises(UnsupportedGraphError, match=r"aten\.item\.default reads values"):
        verify_graph(program, "fuse", is_final=True)


def test_foreign_operator_is_refused(program):
    (output,) = program.graph.find_nodes(op="output")
    with program.graph.inserting_before(output):
        foreign = program.graph.call_function(torch.ops.quantized.linear, (output.args[0],))
    foreign.meta["val"] = output.args[0].meta["val"]
    with pytest.raises(UnsupportedGraphError, match="quantized"):
        verify_graph(program, "fuse", is_final=True)


def test_node_without_value_is_refused(program):
    node = program.calls(aten.linear.default)[0]
    del node.meta["val"]
    with pytest.raises(UnsupportedGraphError) as caught:
        verify_graph(program, "logits", is_final=False)
    assert f"node {node.name} after logits: no value is known" in caught.value.found


def test_weight_of_another_shape_is_refused(program):
    node = next(n for n in program.graph.nodes if n.target in program.weights)
    node.meta["val"] = node.meta["val"][:1]
    with pytest.raises(UnsupportedGraphError) as caught:
        verify_graph(program, "logits", is_final=False)
    assert program.weights[node.target].key in caught.value.found


def test_weight_without_input_is_refused(program):
    program.weights["ghost"] = next(iter(program.weights.values()))
    with pytest.raises(UnsupportedGraphError, match="no input for ghost"):
        verify_graph(program, "logits", is_final=False)
