"""Prompts attend to what latents expand to; passes of few tokens stay as they are."""

from __future__ import annotations

import pytest
import torch

from specc.artifact.backends import NATIVE
from specc.artifact.kv_rows import AUTO as AS_MODEL
from specc.artifact.kv_rows import INT8
from specc.artifact.mla_cache import LATENT
from specc.kernels import ops
from specc.passes.memory import PassShape, peak_bytes
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program import bind_args
from specc.passes.proof.verify_tokenwise import verify_tokenwise
from specc.passes.rewrite.absorb_latent import AbsorbLatent
from specc.passes.rewrite.expand_prompts import ExpandPrompts
from specc.passes.rewrite.quantize_caches import QuantizeCaches
from specc.passes.rewrite.window_attention import WindowAttention
from specc.speculation.kv_window import KVWindow
from tests.passes.modules import (
    assert_same_numbers_flat,
    dense_logits,
    program_logits,
    random_tokens,
)
from tests.passes.rewrite.test_absorb_latent import (
    HEADS,
    FourDimensions,
    Latent,
    PlainQuery,
    SharedFirst,
    TwoWeights,
    ValuesFirst,
    WithSinks,
)
from tests.tiers import only
from tests.traces import trace_once

# 6 · (5 + 3) / (2 · 6 - 5 - 3)
MOST_ROWS = 12


class Narrow(Latent):
    """Expanded, a row has as many columns as two latents."""

    def __init__(self):
        super().__init__()
        self.down = torch.nn.Linear(self.width, 4 + 2, bias=False)
        self.norm = torch.nn.LayerNorm(4)
        self.up = torch.nn.Linear(4, self.num_heads * 8, bias=False)

    def latent(self, x):
        c, rope = self.down(x).split([4, 2], -1)
        return self.norm(c), rope[:, None].sin()

    def expand(self, c):
        return self.heads(self.up(c)).split([5, 3], -1)


def run(kind, *others):
    torch.manual_seed(0)
    model = kind().eval()
    program = trace_once(model, "target")
    Pipeline(PHASES[:3]).run(program)
    AbsorbLatent(LATENT, AS_MODEL).run(program)
    for item in others:
        item.run(program)
    result = ExpandPrompts().run(program)
    return model, program, result


@pytest.mark.parametrize(
    "kind",
    only(
        (Latent, TwoWeights),
        [Latent, ValuesFirst, SharedFirst, PlainQuery, TwoWeights, FourDimensions],
    ),
)
def test_long_prompts_expand_and_compute_the_same(kind):
    model, program, result = run(kind)
    assert (result.rewrites, result.declined) == (1, [])
    (attention,), (expanded,) = (
        program.calls(item) for item in (ops.tree_attention, ops.attend_expanded)
    )
    most = [bind_args(node)["most_rows"] for node in (attention, expanded)]
    assert most == [MOST_ROWS, MOST_ROWS]
    verify_tokenwise(program, "test")
    for count in (MOST_ROWS, MOST_ROWS + 1, 30):
        tokens = random_tokens(count)
        found = program_logits(program, model, tokens)
        torch.testing.assert_close(found, dense_logits(model, tokens), rtol=1e-4, atol=1e-5)
    # one of two sequences
    for node in (attention, expanded):
        node.kwargs = {**node.kwargs, "most_rows": 4}
    assert_same_numbers_flat(program, model)


@pytest.mark.parametrize(
    ("kind", "others", "why"),
    [
        pytest.param(Narrow, (), "its latent is no wider", marks=pytest.mark.slow),
        (WithSinks, (), "it has a window"),
        pytest.param(
            Latent, (WindowAttention(KVWindow(8, 2)),), "it has a window", marks=pytest.mark.slow
        ),
        (Latent, (QuantizeCaches(INT8),), "values in rows of their own"),
    ],
    ids=["narrow", "window", "draft-window", "int8"],
)
def test_what_stays_absorbed(kind, others, why):
    _, program, result = run(kind, *others)
    assert result.rewrites == 0
    assert why in result.declined[0].reason
    assert not program.calls(ops.attend_expanded)
    (attention,) = program.calls(ops.tree_attention)
    assert bind_args(attention)["most_rows"] == 0


def test_what_heads_expand_to_is_planned():
    """Of one sequence, in C++ as many heads as fit into 32 MiB, and one at least."""
    _, program, _ = run(Latent)
    found = []
    for context in (1000, 10_000_000, 524_288):
        shape = PassShape(num_tokens=20, num_rows=1, batch_size=1, longest=20, context=context)
        found.append(peak_bytes(program, shape, NATIVE))
    # keys of 5 + 2 columns and values of 3, then 1,024 latents of 6 + 2
    assert found[0] >= 4 * (HEADS * 1000 * 10 + 1000 * 8)
    assert 4 * (10_000_000 * 10 + 1024 * 8) <= found[1] < 8 * 10_000_000 * 10
    # a head of all rows takes 20 MiB, and of fewer, two take all that heads may
    assert found[2] >= 32 << 20
