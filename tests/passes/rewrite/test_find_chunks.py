"""Chunks of positions are read off masks by running them; what is not that is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from specc.errors import UnsupportedAttentionError
from specc.kernels import ops
from specc.passes.program import bind_args
from specc.passes.rewrite.classify_masks import ClassifyMasks
from specc.passes.rewrite.find_chunks import find_chunk
from specc.passes.rewrite.mask_evaluator import MaskEvaluator
from specc.passes.rewrite.normalize import Normalize
from tests.passes.modules import Tiny, assert_same_numbers, compiled, traced
from tests.passes.rewrite.test_classify_masks import (
    Mask,
    as_float,
    attention_nodes,
    causal,
    chunk_of,
    window_of,
)

FOUND: dict[str, tuple[Mask, int]] = {
    "none": (lambda q, k, t: causal(q, k), 0),
    "none-of-a-window": (window_of(16), 0),
    **{f"chunk-{n}": (chunk_of(n), n) for n in (1, 2, 5, 16, 48, 49, 255, 256, 257, 2048, 8192)},
    "float": (lambda q, k, t: as_float(chunk_of(16)(q, k, t)), 16),
    "float-8192": (lambda q, k, t: as_float(chunk_of(8192)(q, k, t)), 8192),
}
REFUSED: dict[str, Mask] = {
    # right, but a product of a quotient could put an edge anywhere
    "from-the-beginning": lambda q, k, t: causal(q, k) & (k >= q // 16 * 16),
    "two-sizes": lambda q, k, t: chunk_of(16)(q, k, t) & chunk_of(40)(q, k, t),
    "two-large-sizes": lambda q, k, t: causal(q, k) & (q // 8192 == k // 4096),
    "of-chunks": lambda q, k, t: causal(q, k) & (q // 16 // 16 == k // 16 // 16),
    "of-large-chunks": lambda q, k, t: causal(q, k) & (q // 8192 // 8192 == k // 8192 // 8192),
    "and-a-window": lambda q, k, t: chunk_of(16)(q, k, t) & (q - k < 5),
    "and-a-far-window": lambda q, k, t: chunk_of(8192)(q, k, t) & (q - k < 5000),
    "and-an-end": lambda q, k, t: chunk_of(16)(q, k, t) & (q < 9000),
    "and-a-far-chunk": lambda q, k, t: chunk_of(16)(q, k, t) & (q // 16 < 500),
    "or-first-keys": lambda q, k, t: chunk_of(16)(q, k, t) | (causal(q, k) & (k < 4)),
    "shifted": lambda q, k, t: causal(q, k) & ((q + 1) // 16 == (k + 1) // 16),
    "shifted-by-a-large-one": lambda q, k, t: (
        causal(q, k) & ((q + 8192 - 1) // 8192 == (k + 8192 - 1) // 8192)
    ),
    "neighbours-too": lambda q, k, t: causal(q, k) & (q // 16 - k // 16 <= 1),
    "bidirectional": lambda q, k, t: q // 16 == k // 16,
    "of-distances": lambda q, k, t: causal(q, k) & ((q - k) // 16 < 1),
    "by-float": lambda q, k, t: causal(q, k) & (q // 16.5 == k // 16.5),
    "of-the-pass": lambda q, k, t: causal(q, k) & (q // t.shape[1] == k // t.shape[1]),
    "with-a-remainder": lambda q, k, t: chunk_of(16)(q, k, t) & ((q - k) % 2 == 0),
    "far-products": lambda q, k, t: chunk_of(16)(q, k, t) & (q * q < 90000),
    "bias": lambda q, k, t: as_float(chunk_of(16)(q, k, t)) + 0.5 * (k - q),
}


@pytest.fixture(scope="module")
def nodes() -> dict[str, fx.Node]:
    masks = {name: mask for name, (mask, _) in FOUND.items()} | REFUSED
    symbolic = {"of-the-pass": masks.pop("of-the-pass")}
    return attention_nodes(masks)[1] | attention_nodes(symbolic, "symbolic")[1]


def chunk_in(nodes: dict[str, fx.Node], name: str) -> int:
    return find_chunk(MaskEvaluator(nodes[name], nodes[name].args[3]))


@pytest.mark.parametrize("name", FOUND)
def test_chunk_is_found(nodes, name):
    assert chunk_in(nodes, name) == FOUND[name][1]


@pytest.mark.parametrize("name", REFUSED)
def test_other_masks_of_quotients_are_refused(nodes, name):
    with pytest.raises(UnsupportedAttentionError) as caught:
        chunk_in(nodes, name)
    assert caught.value.found.startswith(f"layer {nodes[name].name}: ")


class Chunked(Tiny):
    """A mask of chunks, of positions or of places in the pass."""

    chunk, is_of_places = 3, False

    def attend(self, q, k, v, positions):
        place = torch.arange(q.shape[2]) if self.is_of_places else positions[0]
        mask = chunk_of(self.chunk)(place[:, None], place[None], positions)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class OfPlaces(Chunked):
    is_of_places = True


@pytest.mark.parametrize("kind", [Chunked, OfPlaces])
def test_attention_sees_its_own_chunk(kind):
    """Nine tokens are three chunks."""
    model = kind()
    program, _ = compiled(model)
    (node,) = program.calls(ops.tree_attention)
    bound = bind_args(node)
    assert (bound["chunk"], bound["window"], program.layers[0].chunk) == (3, 0, 3)
    assert_same_numbers(program, model)


@pytest.mark.parametrize(("most", "chunk"), [(None, 3), (4, 3), (3, 0), (2, 0)])
def test_chunks_that_no_sequence_leaves_are_causal(most, chunk):
    program, _ = traced(Chunked(), Normalize())
    program.most_positions = most
    ClassifyMasks().run(program)
    assert list(program.windows.values()) == [0]
    assert list(program.chunks.values()) == ([chunk] if chunk else [])
