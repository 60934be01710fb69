"""Caches hold the latent that keys and values are expanded from; numbers stay what they were."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specc.artifact.kv_rows import AUTO as AS_MODEL
from specc.artifact.kv_rows import INT8
from specc.artifact.mla_cache import AUTO, LATENT
from specc.errors import ConfigError
from specc.kernels import ops
from specc.passes.frontend.read_program import read_program
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program import constant_key
from specc.passes.program_json import program_to_json
from specc.passes.rewrite.absorb_latent import AbsorbLatent, values_in_keys
from tests import models
from tests.passes.modules import (
    Tiny,
    assert_same_numbers_flat,
    aten,
    compiled,
    dense_logits,
    program_logits,
    random_tokens,
)
from tests.tiers import only
from tests.traces import trace_once

# no two widths are the same, so that no weight fits in the place of another
HEADS, NOPE, ROPE, VALUE, RANK = 4, 5, 2, 3, 6


class Latent(Tiny):
    """Keys and values of four heads, expanded from one latent, and a part that heads share."""

    num_heads = num_kv_heads = HEADS
    head_dim = 4

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(self.width, HEADS * (NOPE + ROPE), bias=False)
        self.down = nn.Linear(self.width, RANK + ROPE, bias=False)
        self.norm = nn.LayerNorm(RANK)
        self.up = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        self.o = nn.Linear(HEADS * VALUE, self.width)

    def heads(self, x):
        return x.view(1, -1, HEADS, x.shape[-1] // HEADS).transpose(1, 2)

    def latent(self, x):
        c, rope = self.down(x).split([RANK, ROPE], -1)
        # as a stand-in for positions: what no head has of its own
        return self.norm(c), rope[:, None].sin()

    def query(self, x):
        own, rope = self.heads(self.q(x)).split([NOPE, ROPE], -1)
        return torch.cat([own, rope.cos()], -1)

    def expand(self, c):
        return self.heads(self.up(c)).split([NOPE, VALUE], -1)

    def key(self, own, shared):
        return torch.cat([own, shared.expand(-1, HEADS, -1, -1)], -1)

    def operands(self, x):
        c, shared = self.latent(x)
        own, value = self.expand(c)
        return self.query(x), self.key(own, shared), value

    def attend(self, q, k, v, positions):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.37)


class ValuesFirst(Latent):
    def expand(self, c):
        value, own = self.heads(self.up(c)).split([VALUE, NOPE], -1)
        return own, value


class SharedFirst(Latent):
    def query(self, x):
        return super().query(x).roll(ROPE, -1)

    def key(self, own, shared):
        return torch.cat([shared.expand(-1, HEADS, -1, -1), own], -1)


class PlainQuery(Latent):
    """Queries that are no concatenation, so columns of them are taken."""

    def query(self, x):
        return self.heads(self.q(x))


class TwoWeights(Latent):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(RANK, HEADS * NOPE, bias=False)
        self.up_value = nn.Linear(RANK, HEADS * VALUE, bias=False)

    def expand(self, c):
        return self.heads(self.up(c)), self.heads(self.up_value(c))


class FourDimensions(Latent):
    """As DeepSeek writes it: the latent is a head of its own before it is expanded."""

    def expand(self, c):
        expanded = self.up(c.view(1, 1, -1, RANK)).view(1, c.shape[1], HEADS, NOPE + VALUE)
        return expanded.transpose(1, 2).split([NOPE, VALUE], -1)


class WithSinks(Latent):
    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.tensor([1.0, -2.0, 9.0, 0.0]))

    def attend(self, q, k, v, positions):
        distance = positions[:, :, None] - positions[:, None, :]
        mask = (distance >= 0) & (distance < 3)
        return ops.dense_attention(q, k, v, mask[:, None], self.sinks, scale=0.3, softcap=0.7)


def run(kind, choice=AUTO, rows=AS_MODEL, ranks=1, **limits):
    torch.manual_seed(0)
    model = kind().eval()
    program, pipeline = trace_once(model, "target"), Pipeline(PHASES[:3])
    pipeline.run(program)
    result = AbsorbLatent(choice, rows, ranks, **limits).run(program)
    return model, program, result


@pytest.mark.parametrize(
    "kind",
    only(
        (Latent, SharedFirst, WithSinks),
        [Latent, ValuesFirst, SharedFirst, PlainQuery, TwoWeights, FourDimensions, WithSinks],
    ),
)
def test_fires_and_computes_the_same(kind):
    model, program, result = run(kind)
    assert (result.rewrites, result.declined) == (1, [])
    (layer,), (node,) = program.layers, program.calls(ops.tree_attention)
    assert (layer.num_heads, layer.num_kv_heads) == (HEADS, 1)
    assert (layer.head_dim, layer.value_dim) == (RANK + ROPE, RANK)
    assert layer.values_in_keys
    assert layer.cached_columns == (RANK + ROPE,)
    widths = [list(program.placeholder(x).meta["val"].shape[2:]) for x in program.caches]
    assert widths == [[1, RANK + ROPE], [1, RANK]]
    assert values_in_keys(node)
    assert node.kwargs["scale"] == (0.3 if kind is WithSinks else 0.37)
    # nothing is expanded any more
    expanded = {model.up.weight.shape[0]}
    assert not expanded & {int(x.meta["val"].shape[-1]) for x in program.calls(aten.linear.default)}
    assert_same_numbers_flat(program, model)


def test_halves_are_laid_side_by_side():
    torch.manual_seed(0)
    model = Latent().eval()
    exact = dense_logits(model, random_tokens())
    program = trace_once(model.bfloat16(), "target")
    Pipeline(PHASES[:3]).run(program)
    before = len(program.calls(aten.contiguous.default))
    assert AbsorbLatent(AUTO, AS_MODEL).run(program).rewrites == 1
    assert len(program.calls(aten.contiguous.default)) == before + 1
    found = program_logits(program, model, random_tokens())
    assert (found.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_weights_are_views_of_what_the_checkpoint_has():
    _, program, _ = run(Latent)
    assert {w.key: w.shape for w in program.weights.values() if "up" in w.key} == {
        "up.weight": (HEADS * (NOPE + VALUE), RANK)
    }


class WithBias(Latent):
    def __init__(self):
        super().__init__()
        self.up.bias = nn.Parameter(torch.randn(HEADS * (NOPE + VALUE)))


class OtherLatents(TwoWeights):
    def expand(self, c):
        return self.heads(self.up(c)), self.heads(self.up_value(c * 2))


class OtherHeads(Latent):
    """Values of a head are those of the next one."""

    def expand(self, c):
        own, value = super().expand(c)
        return own, value.roll(1, 1)


class Computed(Latent):
    def expand(self, c):
        expanded = F.linear(c, self.up.weight * 2)
        return self.heads(expanded).split([NOPE, VALUE], -1)


class GroupedQueries(Latent):
    """Two heads of keys for four of queries."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(RANK, 2 * (NOPE + VALUE), bias=False)

    def heads(self, x):
        num = 2 if x.shape[-1] == 2 * (NOPE + VALUE) else HEADS
        return x.view(1, -1, num, x.shape[-1] // num).transpose(1, 2)

    def key(self, own, shared):
        return torch.cat([own, shared.expand(-1, 2, -1, -1)], -1)

    def attend(self, q, k, v, positions):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(
    ("kind", "reason"),
    only(
        (WithBias, OtherLatents),
        [
            (WithBias, "has a bias"),
            (OtherLatents, "not expanded from one latent"),
            (OtherHeads, "not columns of a projection to heads"),
            (Computed, "is computed"),
            (GroupedQueries, "4 heads of queries read 2 of keys"),
        ],
    ),
)
def test_declines_with_the_reason(kind, reason):
    model, program, result = run(kind)
    assert result.rewrites == 0
    assert [reason in item.reason for item in result.declined] == [True]
    assert not program.layers[0].values_in_keys
    assert_same_numbers_flat(program, model)


class SharedOfAll(Latent):
    """The shared part has columns of its own for each head: heads differ in it."""

    def key(self, own, shared):
        return torch.cat([own, shared.expand(-1, HEADS, -1, -1) * self.o.weight[0, 0]], -1)


class SpreadColumns(Latent):
    """One column that is spread over columns, too."""

    def key(self, own, shared):
        return torch.cat([own, shared[..., :1].expand(-1, HEADS, -1, ROPE)], -1)


@pytest.mark.parametrize("kind", only((SpreadColumns,), [Tiny, SharedOfAll, SpreadColumns]))
def test_other_attention_is_not_its_matter(kind):
    model, program, result = run(kind)
    assert (result.rewrites, result.declined) == (0, [])
    assert_same_numbers_flat(program, model)


def test_auto_takes_what_is_fewer_bytes():
    """Heads are cut for ranks, and the latent is whole on each; rows of int8 have scales."""
    for ranks in (1, 4):
        _, _, result = run(Latent, ranks=ranks)
        # 8 columns of float32 against 40, or 10
        assert result.rewrites == 1
    _, program, result = run(Latent, rows=INT8, ranks=2)
    assert result.rewrites == 1
    # a value has a row of its own there: its scale is not that of its key
    assert program.layers[0].cached_columns == (RANK + ROPE, RANK)
    assert not program.layers[0].values_in_keys
    _, _, result = run(Latent, rows=INT8, ranks=4)
    assert result.rewrites == 0
    # (8 + 4) + (6 + 4) bytes against (7 + 4) + (3 + 4), of one of four heads
    assert "22 bytes of cache on each rank, and takes 18" in result.declined[0].reason
    # four heads are not cut for three ranks
    _, _, result = run(Latent, rows=INT8, ranks=3)
    assert result.rewrites == 1


def test_latent_is_taken_at_any_size():
    _, _, result = run(Latent, LATENT, INT8, ranks=4)
    assert result.rewrites == 1


def test_rows_that_are_too_wide_for_a_backend():
    for most, is_taken in (((RANK, ROPE), True), ((RANK - 1, ROPE), False), ((RANK, 1), False)):
        _, program, result = run(Latent, most=most)
        assert (result.rewrites == 1) == is_taken == program.layers[0].values_in_keys
    assert "6 columns and 2 that heads share: its backend takes 6 and 1" in (
        result.declined[0].reason
    )


def test_where_two_widths_are_not_known_latents_are_taken_at_any_size():
    """Keys have 7 columns and values 3; in the last rows of `test_auto_…` nothing is saved."""
    for takes_two_widths in (True, False):
        _, _, result = run(Latent, rows=INT8, ranks=4, takes_two_widths=takes_two_widths)
        assert result.rewrites == (not takes_two_widths)


def test_queries_that_vote_on_blocks_keep_rows_that_they_can_vote_over():
    """Keys have 7 columns and a latent with what heads share 8."""
    asked = []

    def most(columns):
        return lambda dtype: asked.append(dtype) or columns

    for columns, is_taken in ((6, True), (7, False), (8, True)):
        _, program, result = run(Latent, most_voting=most(columns))
        assert (result.rewrites == 1) == is_taken == program.layers[0].values_in_keys, columns
        assert ["a row of 8 columns" in item.reason for item in result.declined] == (
            [] if is_taken else [True]
        )
    assert set(asked) == {"float32"}
    # keys and values of two widths, which its backend does not know
    _, _, result = run(Latent, most_voting=most(7), takes_two_widths=False)
    assert result.rewrites == 1
    with pytest.raises(ConfigError) as caught:
        run(Latent, LATENT, most_voting=most(7))
    assert caught.value.needed.startswith("rows of 7 columns or less")
    assert caught.value.do.startswith("leave out --mla-cache")


def test_a_draft_does_not_vote():
    program = trace_once(Latent().eval(), "draft")
    Pipeline(PHASES[:3]).run(program)
    program.name = "draft"
    assert AbsorbLatent(AUTO, AS_MODEL, most_voting=lambda dtype: 7).run(program).rewrites == 1


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Tiny, "latent"), pytest.param(WithBias, "has a bias", marks=pytest.mark.slow)],
)
def test_latent_needs_a_layer(kind, why):
    with pytest.raises(ConfigError) as caught:
        run(kind, LATENT)
    assert "--mla-cache latent" in caught.value.found
    assert why in caught.value.found


def test_a_stored_graph_says_it_by_itself():
    """Engines are cut anew from their graphs."""
    _, program, _ = run(Latent)
    keys = [weight.key for weight in program.weights.values()]
    constants = {constant_key(name): value for name, value in program.constants.items()}
    layers = [(layer.name, layer.window) for layer in program.layers]
    found = read_program(program_to_json(program), constants, layers, [*keys, *constants])
    assert found.layers == program.layers
    expanded, _ = compiled(Latent())
    assert not values_in_keys(expanded.calls(ops.tree_attention)[0])


# widths of which no two are the same
WIDTHS = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("deepseek_v2", "minicpm3", "glm4_moe_lite")
        ),
    ],
)
def test_logits_of_models(name):
    model = models.build_model(name, **WIDTHS)
    tokens = torch.tensor(models.prompts()[-1])
    found = []
    for choice in (None, LATENT):
        program = trace_once(model, "target")
        Pipeline(PHASES[:3]).run(program)
        if choice is not None:
            assert AbsorbLatent(choice, AS_MODEL).run(program).rewrites == 2
        widths = {layer.cached_columns for layer in program.layers}
        assert widths == ({(28,)} if choice else {(20, 16)})
        found.append(program_logits(program, model, tokens))
    expanded, latent = found
    torch.testing.assert_close(expanded, dense_logits(model, tokens), rtol=1e-4, atol=1e-4)
    assert (latent - expanded).abs().max() < 1e-4 * expanded.abs().max()
