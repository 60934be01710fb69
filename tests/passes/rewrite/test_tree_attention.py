"""Dense attention becomes tree attention over caches of as few heads as the model computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specc.artifact.backends import facts_of
from specc.errors import UnsupportedAttentionError, UnsupportedGraphError
from specc.kernels import ops
from specc.passes.rewrite.classify_masks import ClassifyMasks
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.require_supported import RequireAttention
from specc.passes.rewrite.select_logits import SelectLogits
from specc.passes.rewrite.tree_attention import RewriteTreeAttention
from tests.passes.modules import Tiny, assert_same_numbers_flat, aten, compiled, traced
from tests.tiers import only


def run(kind):
    """Up to the selection of logits, so that the program can run on numbers."""
    torch.manual_seed(0)
    model = kind().eval()
    passes = Normalize(), ClassifyMasks(), RewriteTreeAttention(), SelectLogits()
    program, results = traced(model, *passes)
    return model, program, results[2]


class WithMask(Tiny):
    def attend(self, q, k, v, positions):
        mask = positions[0][None] <= positions[0][:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])


class Windowed(Tiny):
    def attend(self, q, k, v, positions):
        distance = positions[0][:, None] - positions[0][None]
        mask = (distance >= 0) & (distance < 3)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])


class Scaled(Tiny):
    def attend(self, q, k, v, positions):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


class NativeGrouped(Tiny):
    def repeat(self, x):
        return x

    def attend(self, q, k, v, positions):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class RepeatedTwice(NativeGrouped):
    """Half of the repetition is written out, half is left to the operator."""

    num_heads = 8

    def repeat(self, x):
        return x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, -1, self.head_dim)


class MultiQuery(Tiny):
    num_kv_heads = 1


class ThreeFold(Tiny):
    num_heads = 6


class NotGrouped(Tiny):
    num_kv_heads = 4

    def repeat(self, x):
        return x


class Tiled(Tiny):
    """Heads in the order 0 1 0 1: not repeat_kv's 0 0 1 1."""

    def repeat(self, x):
        return x.repeat(1, 2, 1, 1)


class TiledByExpand(Tiny):
    def repeat(self, x):
        return x[:, None].expand(-1, 2, -1, -1, -1).reshape(1, 4, -1, self.head_dim)


class Interleaved(Tiny):
    def repeat(self, x):
        return x.repeat_interleave(2, dim=1)


class KeysAlone(Tiny):
    """Keys fold to two heads, values to one: a cache needs one number for both."""

    def __init__(self):
        super().__init__()
        self.v = nn.Linear(self.width, self.head_dim, bias=False)

    def operands(self, x):
        v = self.split(self.v(x))[:, :, None].expand(-1, -1, 4, -1, -1)
        k = self.repeat(self.split(self.k(x)))
        return self.split(self.q(x)), k, v.reshape(1, 4, -1, self.head_dim)


FOLDED = [
    # class, query heads, cached heads, window
    (Tiny, 4, 2, 0),
    (WithMask, 4, 2, 0),
    (Windowed, 4, 2, 3),
    (Scaled, 4, 2, 0),
    (NativeGrouped, 4, 2, 0),
    (RepeatedTwice, 8, 2, 0),
    (MultiQuery, 4, 1, 0),
    (ThreeFold, 6, 2, 0),
    (NotGrouped, 4, 4, 0),
]


@pytest.mark.default("Tiny-4-2-0", "MultiQuery-4-1-0")
@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "window"), only((Tiny, Windowed, MultiQuery, NotGrouped), FOLDED)
)
def test_fires_and_computes_the_same(kind, heads, kv_heads, window):
    model, program, result = run(kind)
    assert (result.rewrites, result.declined) == (1, [])
    (node,) = program.calls(ops.tree_attention)
    assert not program.calls(aten.scaled_dot_product_attention.default)
    (layer,) = program.layers
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (heads, kv_heads, 4)
    assert layer.window == node.kwargs["window"] == window
    assert node.kwargs["scale"] == (0.3 if kind is Scaled else 4**-0.5)
    assert program.caches == {"k_cache_0": (0, "k"), "v_cache_0": (0, "v")}
    for name in program.caches:
        assert list(program.placeholder(name).meta["val"].shape[2:]) == [kv_heads, 4]
    names = [arg.target for arg in node.args[3:]]
    assert names == [
        "k_cache_0", "v_cache_0", "q_start", "positions", "slot", "cache_len",
        "ancestors", "block_table",
    ]  # fmt: skip
    assert_same_numbers_flat(program, model)


@pytest.mark.parametrize(
    "kind",
    only(
        (Interleaved, KeysAlone),
        [Tiled, TiledByExpand, Interleaved, KeysAlone],
    ),
)
def test_other_repetitions_are_not_folded(kind):
    model, program, result = run(kind)
    assert result.rewrites == 1
    assert "repeated heads are not a plain repeat_kv" in result.declined[0].reason
    assert program.layers[0].num_kv_heads == 4
    assert_same_numbers_flat(program, model)


class TwoLayers(Tiny):
    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids, position_ids)
        for attend in (Windowed.attend, Tiny.attend):
            attended = attend(self, *self.operands(x), position_ids)
            x = x + self.o(attended.transpose(1, 2).flatten(2))
        return self.project(x)


def test_layers_are_numbered_in_order_of_execution():
    model, program, result = run(TwoLayers)
    assert result.rewrites == 2
    assert [layer.window for layer in program.layers] == [3, 0]
    assert list(program.caches.values()) == [(0, "k"), (0, "v"), (1, "k"), (1, "v")]
    placeholders = [node.target for node in program.graph.find_nodes(op="placeholder")]
    assert placeholders[-5:] == ["logit_rows", *program.caches]
    assert_same_numbers_flat(program, model)


def test_mask_dies_with_the_node():
    _, program, _ = run(WithMask)
    assert not program.calls(aten.le.Tensor)
    assert "geometry" not in {node.target for node in program.graph.find_nodes(op="placeholder")}


class NoPositions(Tiny):
    def embed(self, ids, positions):
        return self.embedding(ids)


class PositionsInMaskOnly(WithMask):
    def embed(self, ids, positions):
        return self.embedding(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))


class WideValues(NotGrouped):
    def __init__(self):
        super().__init__()
        self.v = nn.Linear(self.width, 2 * self.width)
        self.o = nn.Linear(2 * self.width, self.width)

    def operands(self, x):
        v = self.v(x).view(1, -1, self.num_heads, 2 * self.head_dim).transpose(1, 2)
        return self.split(self.q(x)), self.split(self.k(x)), v


def test_values_of_another_width():
    model, program, _ = run(WideValues)
    (layer,) = program.layers
    assert (layer.head_dim, layer.columns_of_values) == (4, 8)
    widths = [program.placeholder(name).meta["val"].shape[3] for name in program.caches]
    assert widths == [4, 8]
    assert_same_numbers_flat(program, model)


class SinksAndCap(NativeGrouped):
    """As the registered function writes it, see passes/frontend/attention_function.py."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.tensor([1.0, -2.0, 9.0, 0.0]))

    def attend(self, q, k, v, positions):
        mask = positions[:, None, :] <= positions[:, :, None]
        return ops.dense_attention(q, k, v, mask[:, None], self.sinks, scale=0.3, softcap=0.7)


def test_sinks_and_softcap_are_handed_on():
    model, program, _ = run(SinksAndCap)
    (layer,) = program.layers
    assert (layer.has_sinks, layer.softcap, layer.num_kv_heads) == (True, 0.7, 2)
    assert_same_numbers_flat(program, model)


@pytest.mark.default(
    "SinksAndCap-attention sinks-tensorrt", "WideValues-keys of 4 columns and values of 8-tensorrt"
)
@pytest.mark.parametrize("name", [pytest.param("onnx", marks=pytest.mark.slow), "tensorrt"])
@pytest.mark.parametrize(
    ("kind", "found"),
    [(SinksAndCap, "attention sinks"), (WideValues, "keys of 4 columns and values of 8")],
)
def test_backends_without_them_refuse(kind, found, name):
    _, program, _ = run(kind)
    with pytest.raises(UnsupportedAttentionError) as caught:
        RequireAttention(facts_of(name)).run(program)
    assert found in caught.value.found
    assert f"backend {name}" in caught.value.found
    assert "--backend cpu" in caught.value.do
    for able in ("cpu", "cuda", "eager"):
        RequireAttention(facts_of(able)).run(program)


class ThreeDimensions(Tiny):
    def attend(self, q, k, v, positions):
        return F.scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True)[None]


class FewerKeys(NativeGrouped):
    """Two value heads, one key head: torch repeats each, one cache cannot hold both."""

    def operands(self, x):
        q, k, v = super().operands(x)
        return q, k[:, :1], v


class FewerValues(NativeGrouped):
    def operands(self, x):
        q, k, v = super().operands(x)
        return q, k, v[:, :1]


class Memory(NotGrouped):
    """Keys and values that every token sees besides those of the pass."""

    def operands(self, x):
        q, k, v = super().operands(x)
        memory = self.place.weight[:5].view(1, 5, 4, 4).transpose(1, 2)
        return q, torch.cat([memory, k], 2), torch.cat([memory, v], 2)


class TwoRows(NotGrouped):
    def operands(self, x):
        return tuple(torch.cat([item, item]) for item in super().operands(x))

    def attend(self, q, k, v, positions):
        return super().attend(q, k, v, positions)[:1]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ThreeDimensions, "queries, keys and values of shapes [4, "),
        pytest.param(FewerKeys, "1 key heads and 2 value heads", marks=pytest.mark.slow),
        pytest.param(FewerValues, "2 key heads and 1 value heads", marks=pytest.mark.slow),
        (Memory, " + 5"),  # the classification of masks may find it first
        pytest.param(TwoRows, "queries, keys and values of shapes [2, 4, ", marks=pytest.mark.slow),
    ],
)
def test_operands_of_other_shapes_are_refused(kind, reason):
    with pytest.raises(UnsupportedAttentionError) as caught:
        run(kind)
    assert caught.value.found.startswith("layer ")
    assert reason in caught.value.found


def test_a_model_without_positions_has_the_order_of_its_slots():
    model, program, _ = run(NoPositions)
    assert_same_numbers_flat(program, model)


class PlacesInThePass(Tiny):
    """Reads position_ids, and counts tokens besides."""

    def embed(self, ids, positions):
        return super().embed(ids, positions) + self.place(torch.arange(ids.shape[1]))


@pytest.mark.parametrize("kind", [PlacesInThePass, PositionsInMaskOnly])
def test_places_in_the_pass_are_refused(kind):
    with pytest.raises(UnsupportedGraphError, match="places of tokens in the pass"):
        compiled(kind())
