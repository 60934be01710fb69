"""A mask gets the window that it has, or an error: a mask that is misread changes every output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from specc.errors import UnsupportedAttentionError
from specc.passes.facts import masks_are_classified
from specc.passes.program import Program
from specc.passes.rewrite.classify_masks import ClassifyMasks, classify
from specc.passes.rewrite.normalize import Normalize
from tests.passes.modules import Tiny, aten, traced
from tests.tiers import every, only

# (query positions [T, 1], key positions [1, T], token ids [1, T]) → mask
Mask = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def as_float(allowed: Tensor) -> Tensor:
    return torch.where(allowed, 0.0, torch.finfo(torch.float32).min)


def square(tokens: Tensor) -> Tensor:
    return torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)


def window_of(size: int) -> Mask:
    return lambda q, k, t: causal(q, k) & (k > q - size)


def chunk_of(size: int) -> Mask:
    return lambda q, k, t: causal(q, k) & (q // size == k // size)


WINDOWS: dict[str, tuple[Mask, int]] = {
    "causal": (lambda q, k, t: causal(q, k), 0),
    "causal-of-token-count": (lambda q, k, t: square(t).tril(), 0),
    "causal-float": (lambda q, k, t: as_float(causal(q, k)), 0),
    "causal-minus-infinity": (lambda q, k, t: (k > q).float().masked_fill(k > q, -torch.inf), 0),
    "causal-minus-20000": (lambda q, k, t: torch.where(causal(q, k), 0.0, -20000.0), 0),
    "causal-4d": (lambda q, k, t: causal(q, k)[None, None], 0),
    "causal-by-head": (lambda q, k, t: causal(q, k)[None, None].expand(1, 2, -1, -1), 0),
    **{f"window-{n}": (window_of(n), n) for n in (1, 5, 16, 47, 48, 49, 100)},
    **{f"window-{n}": (window_of(n), n) for n in (2047, 2048, 2049, 5000, 100000)},
    "window-5-float": (lambda q, k, t: as_float(window_of(5)(q, k, t)), 5),
    "window-5000-float": (lambda q, k, t: as_float(window_of(5000)(q, k, t)), 5000),
    "at-least-16-is-17": (lambda q, k, t: causal(q, k) & (k >= q - 16), 17),
    "at-least-100-is-101": (lambda q, k, t: causal(q, k) & (k >= q - 100), 101),
    "at-least-48-is-49": (lambda q, k, t: causal(q, k) & (k >= q - 48), 49),
    "at-least-2048-is-2049": (lambda q, k, t: causal(q, k) & (k >= q - 2048), 2049),
    "at-least-5000-is-5001": (lambda q, k, t: causal(q, k) & (k >= q - 5000), 5001),
    "negative-constant": (lambda q, k, t: causal(q, k) & (k - q > -5000), 5000),
    "diagonals": (lambda q, k, t: square(t).tril().triu(-4999), 5000),
    "clamped-distance": (lambda q, k, t: causal(q, k) & (q - k < q.clamp(max=60) + 1), 61),
    "filled-constant": (lambda q, k, t: causal(q, k) & (q - k < torch.full((), 5000)), 5000),
    "smaller-of-two": (lambda q, k, t: window_of(3000)(q, k, t) & window_of(5000)(q, k, t), 3000),
}

REFUSED: dict[str, tuple[Mask, str]] = {
    "bidirectional": (lambda q, k, t: (k >= 0) & (q >= 0), "bidirectional"),
    "bidirectional-window": (lambda q, k, t: (q - k).abs() < 5, "bidirectional"),
    "prefix-lm-3": (lambda q, k, t: causal(q, k) | (k < 3), "bidirectional"),
    "prefix-lm-100": (lambda q, k, t: causal(q, k) | (k < 100), "bidirectional"),
    "prefix-lm-5000": (lambda q, k, t: causal(q, k) | (k < 5000), "bidirectional"),
    "late-bidirectional": (lambda q, k, t: causal(q, k) | (k > 5000), "bidirectional"),
    "alibi": (lambda q, k, t: as_float(causal(q, k)) + 0.5 * (k - q), "bias"),
    "alibi-by-head": (
        lambda q, k, t: as_float(causal(q, k)) + (k - q) * torch.ones(2, 1, 1).cumsum(0),
        "bias",
    ),
    "far-alibi": (
        lambda q, k, t: as_float(causal(q, k)) - (q - k - 100).clamp(min=0).float(),
        "bias",
    ),
    "not-a-number": (lambda q, k, t: as_float(causal(q, k)) * torch.inf, "bias"),
    "heads-differ": (
        lambda q, k, t: torch.stack([causal(q, k), window_of(5)(q, k, t)])[None],
        "differs between heads",
    ),
    **{
        f"chunk-{n}": (chunk_of(n), "neither causal nor one sliding window")
        for n in (5, 40, 48, 49, 100, 2048, 3000, 8192)
    },
    "chunk-by-remainder": (lambda q, k, t: causal(q, k) & (q - q % 3000 <= k), "neither"),
    "dilated": (lambda q, k, t: causal(q, k) & ((q - k) % 2 == 0), "neither"),
    "dilated-in-window": (lambda q, k, t: window_of(20)(q, k, t) & ((q - k) % 4 == 0), "neither"),
    "no-self": (lambda q, k, t: k < q, "neither"),
    "sink": (lambda q, k, t: causal(q, k) & ((q - k < 16) | (k < 4)), "neither"),
    "sink-4096": (lambda q, k, t: causal(q, k) & ((q - k < 4096) | (k < 4)), "neither"),
    "late-rows": (lambda q, k, t: causal(q, k) & ((q < 3000) | (q - k < 10)), "neither"),
    "only-first-50": (lambda q, k, t: causal(q, k) & (k < 50), ""),
}

# Each was misread once, without an error. The number is its window (a refusal is right too);
# None is no window.
HARD: dict[str, tuple[Mask, int | None]] = {
    # the width of the evaluation hides the edge, and the constant is below that width
    "distance-at-most-47": (lambda q, k, t: causal(q, k) & (q - k <= 47), 48),
    "at-least-47": (lambda q, k, t: causal(q, k) & (k >= q - 47), 48),
    # a window that is found ends the search: what else the mask does farther out goes unseen
    "window-5-in-chunk-200": (lambda q, k, t: window_of(5)(q, k, t) & (q // 200 == k // 200), None),
    "window-100-in-chunk-3000": (
        lambda q, k, t: window_of(100)(q, k, t) & (q // 3000 == k // 3000),
        None,
    ),
    "window-3000-in-chunk-5000": (
        lambda q, k, t: window_of(3000)(q, k, t) & (q // 5000 == k // 5000),
        None,
    ),
    "window-16-and-end": (lambda q, k, t: window_of(16)(q, k, t) & (q < 9000), None),
    "window-5-and-dilated": (
        lambda q, k, t: causal(q, k) & ((q - k < 5) | ((q - k) % 512 == 0)),
        None,
    ),
    "window-5-and-late-sink": (
        lambda q, k, t: causal(q, k) & ((q - k < 5) | ((q > 200) & (k < 4))),
        None,
    ),
    "window-2000-and-one": (
        lambda q, k, t: causal(q, k) & ((q - k < 2000) | (q - k == 2060)),
        None,
    ),
    # the edge is a product, a sum or a power of constants
    "chunk-64-of-64": (lambda q, k, t: causal(q, k) & (q // 64 // 64 == k // 64 // 64), None),
    "chunk-16-of-16": (lambda q, k, t: causal(q, k) & (q // 16 // 16 == k // 16 // 16), None),
    "chunk-by-shift": (lambda q, k, t: causal(q, k) & ((q >> 12) == (k >> 12)), None),
    "blocks-of-16": (lambda q, k, t: causal(q, k) & ((q - k) // 16 < 16), 256),
    "halved-distance": (lambda q, k, t: causal(q, k) & ((q - k) // 2 < 2500), 5000),
    "quartered-distance": (lambda q, k, t: causal(q, k) & ((q - k) // 4 < 600), 2400),
    "doubled-distance": (lambda q, k, t: causal(q, k) & ((q - k) * 2 < 10000), 5000),
    "squared-distance": (lambda q, k, t: causal(q, k) & ((q - k) ** 2 < 10000), 100),
    "sum-of-two": (lambda q, k, t: causal(q, k) & (q - 40 - 40 < k), 80),
    "sum-of-two-large": (lambda q, k, t: causal(q, k) & (q - 2500 - 2500 < k), 5000),
    "larger-of-two": (lambda q, k, t: window_of(5000)(q, k, t) | window_of(3000)(q, k, t), 5000),
    # the constant is a float
    "float-100": (lambda q, k, t: causal(q, k) & ((q - k).float() < 100.0), 100),
    "float-5000": (lambda q, k, t: causal(q, k) & ((q - k).float() < 5000.0), 5000),
    "float-chunk": (
        lambda q, k, t: causal(q, k) & ((q / 3000.0).floor() == (k / 3000.0).floor()),
        None,
    ),
    "float-late-bidirectional": (lambda q, k, t: causal(q, k) | (k.float() > 5000.0), None),
    "float-far-alibi": (
        lambda q, k, t: as_float(causal(q, k)) - ((q - k).float() - 100.0).relu(),
        None,
    ),
    # the mask reads token ids, which are evaluated as ones, or the number of tokens of the pass
    "padding-is-0": (lambda q, k, t: causal(q, k) & (t != 0), None),
    "documents": (
        lambda q, k, t: causal(q, k) & ((t == 2).cumsum(-1) == (t == 2).cumsum(-1).mT),
        None,
    ),
    "window-of-pass": (lambda q, k, t: causal(q, k) & (q - k < t.shape[1] - 10), None),
}


# masks that are made from the number of tokens: only these need the slower symbolic trace
OF_TOKEN_COUNT = {"causal-of-token-count", "diagonals", "window-of-pass"}


def attention_nodes(
    masks: dict[str, Mask], mode: str = "real"
) -> tuple[Program, dict[str, fx.Node]]:
    """One program with an attention node for each mask, traced in one go."""

    def forward(tokens: Tensor, positions: Tensor) -> list[Tensor]:
        q = tokens[None, None, :, None].float().expand(1, 2, -1, 4)
        rows, columns = positions[:, None], positions[None]
        return [
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask(rows, columns, tokens[None]))
            for mask in masks.values()
        ]

    inputs = torch.zeros(8, dtype=torch.int64), torch.arange(8)
    module = make_fx(forward, tracing_mode=mode, pre_dispatch=True)(*inputs)
    for node in module.graph.find_nodes(op="placeholder"):
        node.target = node.target.removesuffix("_1")
    program = Program("target", module, {}, {})
    nodes = program.calls(aten.scaled_dot_product_attention.default)
    return program, dict(zip(masks, nodes, strict=True))


@pytest.fixture(scope="module")
def nodes() -> dict[str, fx.Node]:
    rows = WINDOWS | REFUSED | HARD
    symbolic = {name: rows[name][0] for name in OF_TOKEN_COUNT}
    fixed = {name: row[0] for name, row in rows.items() if name not in OF_TOKEN_COUNT}
    return attention_nodes(fixed)[1] | attention_nodes(symbolic, "symbolic")[1]


@pytest.mark.parametrize("name", every(4, WINDOWS))
def test_window_is_found(nodes, name):
    assert classify(nodes[name], nodes[name].args[3]) == WINDOWS[name][1]


@pytest.mark.parametrize("name", REFUSED)
def test_other_masks_are_refused(nodes, name):
    with pytest.raises(UnsupportedAttentionError) as caught:
        classify(nodes[name], nodes[name].args[3])
    assert caught.value.found.startswith(f"layer {nodes[name].name}: ")
    assert REFUSED[name][1] in caught.value.found


@pytest.mark.parametrize("name", every(2, HARD))
def test_hard_masks_get_their_window_or_an_error(nodes, name):
    try:
        window = classify(nodes[name], nodes[name].args[3])
    except UnsupportedAttentionError:
        return
    assert window == HARD[name][1]


def test_pass_gives_every_node_its_own_window():
    masks = {name: WINDOWS[name][0] for name in ("causal", "window-16", "window-100")}
    program, nodes = attention_nodes(masks)
    assert not masks_are_classified(program)
    assert ClassifyMasks().run(program).rewrites == 3
    assert program.windows == {nodes[name].name: WINDOWS[name][1] for name in masks}
    assert masks_are_classified(program)


class Masked(Tiny):
    """Attention under a mask computed from position_ids."""

    mask = staticmethod(window_of(5))

    def attend(self, q, k, v, positions):
        mask = self.mask(positions[0][:, None], positions[0][None], positions)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_exported_mask_is_read_through_its_bookkeeping_nodes():
    program, _ = traced(Masked(), Normalize(), ClassifyMasks())
    assert list(program.windows.values()) == [5]


def test_is_causal_without_mask():
    program, _ = traced(Tiny(), Normalize(), ClassifyMasks())
    assert list(program.windows.values()) == [0]


class NoMask(Tiny):
    def attend(self, q, k, v, positions):
        return F.scaled_dot_product_attention(q, k, v)


class Dropout(Tiny):
    def attend(self, q, k, v, positions):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)


class BufferMask(Masked):
    def __init__(self):
        super().__init__()
        self.register_buffer("allowed", torch.ones(64, 64, dtype=torch.bool).tril())

    def mask(self, q, k, positions):
        return self.allowed[q, k]


class WeightBias(Masked):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Embedding(64, 1)

    def mask(self, q, k, positions):
        return as_float(causal(q, k)) + self.bias((q - k).clamp(min=0))[..., 0]


class NoAttention(Tiny):
    def attend(self, q, k, v, positions):
        return v


class Eager(Tiny):
    def attend(self, q, k, v, positions):
        scores = (q @ k.mT).masked_fill(positions[0][None] > positions[0][:, None], -torch.inf)
        return self.scores(scores).softmax(-1) @ v

    def scores(self, scores):
        return scores


class Softcap(Eager):
    def attend(self, q, k, v, positions):
        scores = torch.tanh(q @ k.mT / 50) * 50
        return scores.masked_fill(positions[0][None] > positions[0][:, None], -1e9).softmax(-1) @ v


@pytest.mark.parametrize(
    ("kind", "reason"),
    only(
        (NoMask, BufferMask, Eager),
        [
            (NoMask, "bidirectional attention: no mask"),
            (Dropout, "dropout 0.1 in attention"),
            (BufferMask, "a mask computed from b_model_allowed"),
            (WeightBias, "a mask computed from p_model_bias_weight"),
            (NoAttention, "no attention layer"),
            (Eager, "softmax outside scaled_dot_product_attention"),
            (Softcap, "scores pass through tanh (softcap)"),
        ],
    ),
)
def test_models_are_refused_with_their_reason(kind, reason):
    with pytest.raises(UnsupportedAttentionError) as caught:
        traced(kind(), Normalize(), ClassifyMasks())
    assert reason in caught.value.found
    assert caught.value.needed
    assert caught.value.do


class MemoryKeys(Masked):
    """Keys that belong to no token: a mask of T rows and T + 2 columns."""

    def __init__(self):
        super().__init__()
        self.memory = torch.nn.Parameter(torch.randn(1, self.num_heads, 2, self.head_dim))

    def attend(self, q, k, v, positions):
        k, v = torch.cat([self.memory, k], 2), torch.cat([self.memory, v], 2)
        mask = torch.nn.functional.pad(causal(positions[0][:, None], positions[0][None]), (2, 0))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~mask)


class CausalMemoryKeys(MemoryKeys):
    def attend(self, q, k, v, positions):
        k, v = torch.cat([self.memory, k], 2), torch.cat([self.memory, v], 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("kind", [MemoryKeys, CausalMemoryKeys])
def test_keys_without_a_token_are_refused(kind):
    with pytest.raises(UnsupportedAttentionError):
        traced(kind(), Normalize(), ClassifyMasks())
