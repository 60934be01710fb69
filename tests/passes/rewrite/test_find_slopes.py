"""What a mask adds to scores is slope · distance, or an error: it is in every output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specc.errors import UnsupportedAttentionError
from specc.kernels import ops
from specc.passes.rewrite.classify_masks import ClassifyMasks, meaning_of
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.recover_attention import RecoverAttention
from specc.passes.rewrite.tree_attention import RewriteTreeAttention
from tests.passes.modules import Tiny, compiled, dense_logits, program_logits, random_tokens, traced
from tests.passes.rewrite.test_classify_masks import Mask, as_float, attention_nodes, causal
from tests.tiers import only

NUM_HEADS = 2
# no powers of two, whose products bfloat16 would hold
VALUES = (0.3, 0.07)
HIDDEN = torch.finfo(torch.float32).min


def slopes() -> Tensor:
    """[H, 1, 1], made in the graph, as models make theirs."""
    return torch.stack([torch.full((1, 1), value) for value in VALUES])


def biased(bias: Callable[[Tensor, Tensor], Tensor], window: int = 0) -> Mask:
    def mask(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        allowed = causal(q, k)
        if window:
            allowed = allowed & (k > q - window)
        return torch.where(allowed, bias(q, k), HIDDEN)[None]

    return mask


def rounded(q: Tensor, k: Tensor) -> Tensor:
    return (slopes().bfloat16() * k).float() * 0.5 + 0.0 * q


# name → mask, its slopes over those above, whether products are rounded, its window
FOUND: dict[str, tuple[Mask, float, bool, int]] = {
    "distance": (biased(lambda q, k: slopes() * (k - q)), 1, False, 0),
    "position-of-the-key": (biased(lambda q, k: slopes() * k + 0.0 * q), 1, False, 0),
    "from-the-end": (biased(lambda q, k: slopes() * (k - 2048) + 0.0 * q), 1, False, 0),
    "added-to-a-mask": (lambda q, k, t: as_float(causal(q, k)) + slopes() * (k - q), 1, False, 0),
    "negative": (biased(lambda q, k: slopes() * (q - k)), -1, False, 0),
    "divided": (biased(lambda q, k: slopes() * (k - q) / 4), 0.25, False, 0),
    "rounded": (biased(rounded), 1, True, 0),
    "with-a-window": (biased(lambda q, k: slopes() * (k - q), 100), 1, False, 100),
    "with-a-small-window": (biased(lambda q, k: slopes() * (k - q), 20), 1, False, 20),
}
REFUSED: dict[str, tuple[Mask, str]] = {
    "square": (biased(lambda q, k: -0.001 * slopes() * (q - k) * (q - k)), "relative positions"),
    "logarithm": (biased(lambda q, k: -slopes() * (q - k + 1.0).abs().log()), "relative positions"),
    "bend": (biased(lambda q, k: slopes() * (k - q).clamp(min=-100)), "relative positions"),
    "late-bend": (
        biased(lambda q, k: slopes() * (k - q).clamp(min=-5000)),
        "numbers of tokens beyond 2048",
    ),
    "of-the-token": (biased(lambda q, k: slopes() * (k - q) * (1 + q)), "relative positions"),
    "large-window": (
        biased(lambda q, k: slopes() * (k - q), 5000),
        "numbers of tokens beyond 2048",
    ),
    "steep": (biased(lambda q, k: 100.0 * slopes() * (k - q)), "relative positions"),
    "hidden-by-little": (
        lambda q, k, t: torch.where(causal(q, k), slopes() * (k - q), -500.0)[None],
        "sees later ones",
    ),
    "not-from-places": (biased(lambda q, k: slopes() * (k - q) + (k == 7) * 0.5), ""),
}


@pytest.fixture(scope="module")
def nodes():
    masks = {name: row[0] for name, row in (FOUND | REFUSED).items()}
    return attention_nodes(masks)[1]


@pytest.mark.default("rounded", "with-a-window")
@pytest.mark.parametrize("name", only(("distance", "rounded", "with-a-window"), FOUND))
def test_slopes_are_found(nodes, name):
    _, factor, rounds, wanted = FOUND[name]
    window, found = meaning_of(nodes[name], nodes[name].args[3], NUM_HEADS, 0.5)
    assert window == wanted
    assert found.rounds == rounds
    expected = torch.tensor(VALUES)
    expected = (expected.bfloat16().float() if rounds else expected) * factor
    torch.testing.assert_close(found.values, expected, rtol=3e-7, atol=0)


@pytest.mark.default("square", "of-the-token")
@pytest.mark.parametrize("name", only(("square", "bend", "of-the-token", "steep"), REFUSED))
def test_other_biases_are_refused(nodes, name):
    with pytest.raises(UnsupportedAttentionError) as caught:
        meaning_of(nodes[name], nodes[name].args[3], NUM_HEADS, 0.5)
    assert REFUSED[name][1] in caught.value.found


def test_a_mask_that_only_hides_has_none():
    _, nodes = attention_nodes({"causal": lambda q, k, t: as_float(causal(q, k))})
    assert meaning_of(nodes["causal"], nodes["causal"].args[3], NUM_HEADS, 0.5) == (0, None)


class Slopes(Tiny):
    """What heads' scores get is on the keys of the pass, as models of transformers write it."""

    factor = 0.4

    def attend(self, q, k, v, positions):
        places = positions[0]
        slopes = self.factor ** torch.arange(1, self.num_heads + 1)[:, None, None]
        hidden = places[None] > places[:, None]
        mask = (slopes * places).masked_fill(hidden, HIDDEN)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None])


class SpelledOut(Slopes):
    """The same without `scaled_dot_product_attention`."""

    def attend(self, q, k, v, positions):
        places = positions[0]
        slopes = self.factor ** torch.arange(1, self.num_heads + 1)[:, None, None]
        scores = q @ k.transpose(-1, -2) * 0.5 + slopes * places
        scores = scores.masked_fill(places[None] > places[:, None], HIDDEN)
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


class InOneProduct(Slopes):
    """The same where the bias is what a product is added to."""

    def attend(self, q, k, v, positions):
        places = positions[0]
        slopes = self.factor ** torch.arange(1, self.num_heads + 1)[:, None, None]
        keys = k[0].transpose(1, 2)
        scores = (slopes * places[None]).baddbmm(q[0], keys, beta=1.0, alpha=0.5)
        hidden = places[None] > places[:, None]
        scores = scores.view(1, *scores.shape) + torch.where(hidden, HIDDEN, 0.0)
        weights = scores.softmax(-1).view(self.num_heads, *scores.shape[2:])
        return torch.bmm(weights, v[0])[None]


class ScaledWithItsScores(Slopes):
    """The same where what is added is multiplied with the scores."""

    def attend(self, q, k, v, positions):
        places = positions[0]
        slopes = self.factor ** torch.arange(1, self.num_heads + 1)[:, None, None]
        hidden = torch.where(places[None] > places[:, None], HIDDEN, 0.0)
        scores = (q @ k.transpose(-1, -2) + (2 * slopes * places + hidden)) / 2.0
        return scores.softmax(-1) @ v


@pytest.mark.default("ScaledWithItsScores")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(Slopes, marks=pytest.mark.slow),
        pytest.param(SpelledOut, marks=pytest.mark.slow),
        InOneProduct,
        ScaledWithItsScores,
    ],
)
def test_slopes_become_an_input_of_attention(kind):
    program, _ = traced(
        kind(), Normalize(), RecoverAttention(), ClassifyMasks(), RewriteTreeAttention()
    )
    (layer,) = program.layers
    assert layer.has_slopes
    # the last one takes heads out of the batch, and repeats of these are not folded back
    assert (layer.num_heads, layer.num_kv_heads) == (4, 4 if kind is InOneProduct else 2)
    wanted = 0.4 ** torch.arange(1, 5)
    torch.testing.assert_close(program.constants["slopes"], wanted, rtol=1e-6, atol=0)
    order = [node.target for node in program.graph.find_nodes(op="placeholder")]
    assert order.index("slopes") < order.index("tokens")


class Hidden(Tiny):
    """As CodeGen does: a mask is divided with its scores, which are of wider types."""

    def attend(self, q, k, v, positions):
        places = positions[0]
        hidden = torch.where(places[None] > places[:, None], HIDDEN, 0.0)
        scores = (q.float() @ k.float().transpose(-1, -2) + hidden) / 1.7
        return scores.softmax(-1).to(v.dtype) @ v


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(Slopes, marks=pytest.mark.slow),
        SpelledOut,
        pytest.param(InOneProduct, marks=pytest.mark.slow),
        pytest.param(ScaledWithItsScores, marks=pytest.mark.slow),
        Hidden,
    ],
)
def test_attention_that_is_spelled_out_is_the_same(kind):
    torch.manual_seed(0)
    model, tokens = kind(), random_tokens(12)
    program, _ = compiled(model)
    found = program_logits(program, model, tokens)
    torch.testing.assert_close(found, dense_logits(model, tokens), rtol=1e-5, atol=1e-5)


def test_operands_that_were_widened_have_the_type_of_values():
    """Attention computes in float32 whatever their type, and caches have one."""
    program, _ = traced(
        Hidden().bfloat16(),
        Normalize(),
        RecoverAttention(),
        ClassifyMasks(),
        RewriteTreeAttention(),
    )
    (node,) = program.calls(ops.tree_attention)
    assert {item.meta["val"].dtype for item in node.args[:5]} == {torch.bfloat16}


class NoMask(Slopes):
    def attend(self, q, k, v, positions):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class FilledBeforeItsScale(Slopes):
    def attend(self, q, k, v, positions):
        places = positions[0]
        scores = (q @ k.transpose(-1, -2)).masked_fill(places[None] > places[:, None], HIDDEN)
        return (scores * 0.5).softmax(-1) @ v


class TurnedAround(Slopes):
    def attend(self, q, k, v, positions):
        places = positions[0]
        hidden = torch.where(places[None] > places[:, None], HIDDEN, 0.0)
        return ((q @ k.transpose(-1, -2) + hidden) * -0.5).softmax(-1) @ v


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NoMask, "no mask"),
        (FilledBeforeItsScale, "scaled with its scores"),
        (TurnedAround, "turned around"),
    ],
)
def test_other_softmaxes_are_left_with_a_reason(kind, reason):
    _, results = traced(kind(), Normalize(), RecoverAttention())
    (declined,) = results[1].declined
    assert reason in declined.reason
