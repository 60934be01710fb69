"""Layers of a draft attend to their last rows and the first ones, whatever pass they are in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specc.kernels import ops
from specc.passes.rewrite.classify_masks import ClassifyMasks
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.select_logits import SelectLogits
from specc.passes.rewrite.tree_attention import RewriteTreeAttention
from specc.passes.rewrite.window_attention import WindowAttention
from specc.speculation.kv_window import KVWindow
from tests.passes.modules import Tiny, dense_logits, program_logits, random_tokens, traced

OWN = 6


class Masked(Tiny):
    """What the rewritten program has to compute: `rows` of distance, or of the beginning."""

    window, sink, chunk = 0, 0, 0

    def attend(self, q, k, v, positions):
        places = positions[0]
        distance = places[:, None] - places[None]
        mask = distance >= 0
        if self.window:
            mask = mask & ((distance < self.window) | (places[None] < self.sink))
        if self.chunk:
            mask = mask & (places[:, None] // self.chunk == places[None] // self.chunk)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])


class Windowed(Masked):
    window = OWN


class Chunked(Masked):
    chunk = OWN


def rewritten(kind, rows):
    torch.manual_seed(0)
    model = kind().eval()
    passes = (Normalize(), ClassifyMasks(), RewriteTreeAttention(), SelectLogits())
    program, results = traced(model, *passes, WindowAttention(rows))
    return model, program, results[-1]


def oracle(model, window, sink):
    wanted = Masked().eval()
    wanted.load_state_dict(model.state_dict())
    wanted.window, wanted.sink = window, sink
    return wanted


@pytest.mark.parametrize(("window", "is_declined"), [(4, False), (OWN, True), (9, True)])
def test_a_layer_with_chunks_keeps_them(window, is_declined):
    """Rows of the sink are seen in the first chunk alone."""
    model, program, result = rewritten(Chunked, KVWindow(window, 2))
    wanted = Chunked().eval()
    wanted.load_state_dict(model.state_dict())
    if not is_declined:
        wanted.window, wanted.sink = window, 2
    tokens = random_tokens(23)
    found = program_logits(program, model, tokens)
    torch.testing.assert_close(found, dense_logits(wanted, tokens), rtol=1e-5, atol=1e-5)
    assert program.layers[0].chunk == OWN
    assert [bool(item) for item in (result.rewrites, result.declined)] == [
        not is_declined,
        is_declined,
    ]


CASES = [
    # class, asked for, then what its layer sees
    (Masked, KVWindow(5, 0), 5, 0),
    (Masked, KVWindow(5, 2), 5, 2),
    (Masked, KVWindow(1, 1), 1, 1),
    (Masked, KVWindow(5, 7), 5, 7),
    (Windowed, KVWindow(4, 2), 4, 0),
    (Windowed, KVWindow(OWN, 2), OWN, 0),
    (Windowed, KVWindow(9, 2), OWN, 0),
]


@pytest.mark.default(
    "Masked-rows0-5-0",
    "Masked-rows1-5-2",
    "Masked-rows3-5-7",
    "Windowed-rows4-4-0",
    "Windowed-rows6-6-0",
)
@pytest.mark.parametrize(("kind", "rows", "window", "sink"), CASES)
def test_what_a_layer_sees(kind, rows, window, sink):
    model, program, result = rewritten(kind, rows)
    tokens = random_tokens(23)
    found = program_logits(program, model, tokens)
    wanted = dense_logits(oracle(model, window, sink), tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    # a row more or less would show
    other = dense_logits(oracle(model, window + 1, sink), tokens)
    assert not torch.allclose(found, other, rtol=1e-3, atol=1e-3)
    (node,) = program.calls(ops.tree_attention)
    assert program.layers[0].window == node.kwargs["window"] == window
    assert result.rewrites + len(result.declined) == 1
    assert bool(result.declined) == (kind is Windowed and rows.window >= OWN)


def test_a_short_text_is_seen_whole():
    model, program, _ = rewritten(Masked, KVWindow(9, 0))
    tokens = random_tokens(9)
    found = program_logits(program, model, tokens)
    torch.testing.assert_close(found, dense_logits(model, tokens), rtol=1e-5, atol=1e-5)
