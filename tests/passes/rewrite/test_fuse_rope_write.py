"""Rotary embedding goes into the cache write where it is that of rotate_half, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specc.errors import UnsupportedGraphError
from specc.kernels import ops
from specc.passes.proof.verify_tokenwise import verify_tokenwise
from specc.passes.rewrite.classify_masks import ClassifyMasks
from specc.passes.rewrite.fuse_rms_norm import FuseRMSNorm
from specc.passes.rewrite.fuse_rope_write import (
    FuseRopeWrite,
    SplitTreeAttention,
    attention_reads_caches,
)
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.select_logits import SelectLogits
from specc.passes.rewrite.tree_attention import RewriteTreeAttention
from tests.passes.modules import Runner, Tiny, assert_runs_alike, aten, several_passes, traced
from tests.tiers import only

LAYOUT = (Normalize, ClassifyMasks, RewriteTreeAttention, SelectLogits, FuseRMSNorm)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Rotary(Tiny):
    """`Tiny` with rotary embedding of the first `size` columns, as in Llama."""

    head_dim, size = 8, 8

    def __init__(self):
        super().__init__()
        self.frequencies = nn.Buffer(torch.rand(self.size // 2) + 0.1)
        self.weight = nn.Parameter(torch.randn(self.head_dim))

    def operands(self, x):
        return tuple(self.split(item(x)) for item in (self.q, self.k, self.v))

    def attend(self, q, k, v, positions):
        cos, sin = self.tables(positions)
        q, k = self.rotate_both(q, k, cos, sin)
        return super().attend(q, self.repeat(k), self.repeat(v), positions)

    def rotate_both(self, q, k, cos, sin):
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)

    def tables(self, positions):
        """[1, T, size] each; different columns for both halves, which a model need not have."""
        angles = positions[:, :, None].float() * self.frequencies
        angles = torch.cat((angles, 1.5 * angles), dim=-1)
        return angles.cos().to(self.weight.dtype), angles.sin().to(self.weight.dtype)

    def rotate(self, x, cos, sin):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return x * cos + rotate_half(x) * sin


class Partial(Rotary):
    """GPT-NeoX and Phi."""

    size = 4

    def rotate(self, x, cos, sin):
        first, rest = x[..., : self.size], x[..., self.size :]
        return torch.cat((super().rotate(first, cos, sin), rest), dim=-1)


class NothingPassed(Partial):
    """Phi-3: the code of partial rotary embedding for all columns."""

    size = 8

    def rotate(self, x, cos, sin):
        return torch.cat((Rotary.rotate(self, x, cos, sin), x[..., self.size :]), dim=-1)


class PartialBySplit(Partial):
    def rotate(self, x, cos, sin):
        first, rest = x.split([4, 4], dim=-1)
        return torch.cat((Rotary.rotate(self, first, cos, sin), rest), dim=-1)


class Scaled(Rotary):
    """Yarn: a factor in the tables."""

    def tables(self, positions):
        cos, sin = super().tables(positions)
        return 1.3 * cos, 1.3 * sin


class Chunks(Rotary):
    def rotate(self, x, cos, sin):
        first, second = x.chunk(2, dim=-1)
        return (x * cos.unsqueeze(1)) + (torch.cat((-second, first), dim=-1) * sin.unsqueeze(1))


class OtherOrder(Rotary):
    def rotate(self, x, cos, sin):
        cos, sin = cos[:, None], sin[:, None]
        return sin * rotate_half(x) + cos * x


class TwoDimensions(Rotary):
    """Tables [T, size], broadcast over heads."""

    def tables(self, positions):
        return tuple(table[0] for table in super().tables(positions))

    def rotate(self, x, cos, sin):
        return x * cos + rotate_half(x) * sin


class TokensFirst(Rotary):
    """Rotated as [1, T, H, D], then transposed."""

    def split(self, x):
        return x.view(1, -1, x.shape[-1] // self.head_dim, self.head_dim)

    def rotate(self, x, cos, sin):
        return (x * cos.unsqueeze(2) + rotate_half(x) * sin.unsqueeze(2)).transpose(1, 2)

    def repeat(self, x):
        return super().repeat(x if x.shape[1] == self.num_kv_heads else x.transpose(1, 2))


class InFloat(Rotary):
    """Rotated in float32 whatever the dtype of the model is."""

    def rotate(self, x, cos, sin):
        return super().rotate(x.float(), cos.float(), sin.float()).to(x.dtype)


class Copied(Rotary):
    def rotate(self, x, cos, sin):
        return super().rotate(x, cos, sin).contiguous()


class Normalized(Rotary):
    """Qwen 3: a norm of q and k in front."""

    def rotate(self, x, cos, sin):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return super().rotate(self.weight * (x * scale), cos, sin)


class PairsMovedApart(Rotary):
    """DeepSeek: neighbors become halves before they are rotated as such."""

    def rotate(self, x, cos, sin):
        b, h, t, d = x.shape
        x = x.view(b, h, t, d // 2, 2).transpose(4, 3).reshape(b, h, t, d)
        return super().rotate(x, cos, sin)


def run(kind, dtype=torch.float32):
    """Runners around both passes, program, and their results."""
    torch.manual_seed(0)
    model = kind().eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    program, _ = traced(model, *(item() for item in LAYOUT))
    before = Runner(program, model)
    results = FuseRopeWrite().run(program), SplitTreeAttention().run(program)
    program.graph.lint()
    return before, Runner(program, model), program, results


SPELLINGS = (
    Rotary, Partial, NothingPassed, PartialBySplit, Scaled, Chunks, OtherOrder,
    TwoDimensions, TokensFirst, InFloat, Copied, Normalized, PairsMovedApart,
)  # fmt: skip
# one of those that convert, copy or move columns in the other type
QUICK = {
    torch.float32: (Rotary, Partial, Scaled, TwoDimensions, PairsMovedApart),
    torch.bfloat16: (InFloat,),
}


@pytest.mark.default("Rotary-torch.float32", "Scaled-torch.float32", "InFloat-torch.bfloat16")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(
            kind, dtype,
            id=f"{kind.__name__}-{dtype}",
            marks=() if kind in QUICK[dtype] else pytest.mark.slow,
        )
        for kind in SPELLINGS
        for dtype in (torch.float32, torch.bfloat16)
    ],
)  # fmt: skip
def test_fires_and_computes_the_same(kind, dtype):
    before, after, program, (fused, split) = run(kind, dtype)
    assert (fused.rewrites, fused.declined, split.rewrites) == (1, [], 0)
    assert attention_reads_caches(program)
    (write,), (attend,) = program.calls(ops.rope_write), program.calls(ops.attend)
    assert attend.args[0] is write
    assert not program.calls(ops.tree_attention, ops.write_kv, aten.neg.default)
    value = write.args[3].meta["val"]
    assert (value.dim(), value.shape[1]) == (2, kind.size)
    if kind is Normalized:
        assert len(program.calls(ops.rms_norm)) == 2
    if dtype == torch.float32:
        assert_runs_alike(before, after)
        return
    for inputs in several_passes():
        torch.testing.assert_close(after.run(inputs), before.run(inputs), rtol=0.03, atol=0.06)


class Without(Tiny):
    """GPT-2 and OPT."""


class Interleaved(Rotary):
    """Cohere: neighbors are pairs."""

    def rotate(self, x, cos, sin):
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


class PairsByView(Rotary):
    """Pairs are an own dimension."""

    def rotate(self, x, cos, sin):
        pairs = x.unflatten(-1, (4, 2))
        cos, sin = cos[:, None, :, :4], sin[:, None, :, :4]
        first, second = pairs[..., 0], pairs[..., 1]
        turned = first * cos - second * sin, second * cos + first * sin
        return torch.stack(turned, dim=-1).flatten(-2)


class SwappedHalves(Rotary):
    """(b, -a) turns the other way."""

    def rotate(self, x, cos, sin):
        turned = torch.cat((x[..., 4:], -x[..., :4]), dim=-1)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


class WrongHalfNegated(Rotary):
    def rotate(self, x, cos, sin):
        turned = torch.cat((-x[..., :4], x[..., 4:]), dim=-1)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


class NotNegated(Rotary):
    def rotate(self, x, cos, sin):
        turned = torch.cat((x[..., 4:].abs(), x[..., :4]), dim=-1)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


class UnequalHalves(Rotary):
    def rotate(self, x, cos, sin):
        turned = torch.cat((-x[..., 2:], x[..., :2]), dim=-1)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


class HalvesOfAnother(Rotary):
    def rotate(self, x, cos, sin):
        return x * cos.unsqueeze(1) + rotate_half(2 * x) * sin.unsqueeze(1)


class Difference(Rotary):
    def rotate(self, x, cos, sin):
        return x * cos.unsqueeze(1) - rotate_half(x) * sin.unsqueeze(1)


class WeightedSum(Rotary):
    def rotate(self, x, cos, sin):
        return torch.add(x * cos.unsqueeze(1), rotate_half(x) * sin.unsqueeze(1), alpha=2)


class QueriesOnly(Rotary):
    def rotate_both(self, q, k, cos, sin):
        return self.rotate(q, cos, sin), k


class TwoTables(Rotary):
    def rotate_both(self, q, k, cos, sin):
        return self.rotate(q, cos, sin), self.rotate(k, 2 * cos, sin)


class LastColumns(Partial):
    """DeepSeek: what is not rotated comes first."""

    def rotate(self, x, cos, sin):
        return torch.cat((x[..., :4], Rotary.rotate(self, x[..., 4:], cos, sin)), dim=-1)


class LastColumnsInFront(Partial):
    def rotate(self, x, cos, sin):
        return torch.cat((Rotary.rotate(self, x[..., 4:], cos, sin), x[..., :4]), dim=-1)


class PassedTwice(Partial):
    """Columns 0 … 3 are rotated and passed, 4 … 7 are lost."""

    def rotate(self, x, cos, sin):
        return torch.cat((Rotary.rotate(self, x[..., :4], cos, sin), x[..., :4]), dim=-1)


class PassedFromAnother(Partial):
    def rotate(self, x, cos, sin):
        return torch.cat((Rotary.rotate(self, x[..., :4], cos, sin), (2 * x)[..., 4:]), dim=-1)


class KeysElsewhere(Rotary):
    def attend(self, q, k, v, positions):
        q, k = self.rotate_both(q, k, *self.tables(positions))
        attended = Tiny.attend(self, q, self.repeat(k), self.repeat(v), positions)
        return attended + self.repeat(k)


class TablePerHead(Rotary):
    def rotate(self, x, cos, sin):
        factor = torch.arange(1, x.shape[1] + 1)[:, None, None] / 2
        cos, sin = cos.unsqueeze(1) * factor, sin.unsqueeze(1) * factor
        return x * cos + rotate_half(x) * sin


class TableForAllTokens(Rotary):
    def tables(self, positions):
        return self.weight.cos()[None, None], self.weight.sin()[None, None]


class Narrowed(Rotary):
    """Rotated in float64: the operator's float32 would lose."""

    def rotate(self, x, cos, sin):
        return super().rotate(x.double(), cos.double(), sin.double()).to(x.dtype)


FORM = "rotary embedding in a form other than"


@pytest.mark.default(
    "Interleaved-rotary embedding of interleaved pairs",
    "NotNegated-rotary embedding in a form other than",
    "UnequalHalves-rotary embedding in a form other than",
    "PassedTwice-q is not rotated in its first columns",
    "TableForAllTokens-q is multiplied with a table of [1, 1, 1, 8]",
)
@pytest.mark.parametrize(
    ("kind", "reason"),
    only(
        (
            Interleaved,
            SwappedHalves,
            NotNegated,
            UnequalHalves,
            QueriesOnly,
            PassedTwice,
            KeysElsewhere,
            TableForAllTokens,
        ),
        [
            (Without, "no rotary embedding before attention"),
            (Interleaved, "rotary embedding of interleaved pairs"),
            (PairsByView, "rotary embedding of interleaved pairs"),
            (SwappedHalves, FORM),
            (WrongHalfNegated, FORM),
            (NotNegated, FORM),
            (UnequalHalves, FORM),
            (HalvesOfAnother, FORM),
            (Difference, FORM),
            (WeightedSum, "q is rotated by a scaled sum"),
            (QueriesOnly, "no rotary embedding before attention"),
            (TwoTables, "q and k are rotated by different tables"),
            (LastColumns, FORM),
            (LastColumnsInFront, "q is not rotated in its first columns"),
            (PassedTwice, "q is not rotated in its first columns"),
            (PassedFromAnother, "q is not rotated in its first columns"),
            (KeysElsewhere, "the rotated k, is used elsewhere too"),
            (TablePerHead, "q is multiplied with a table of [1, 4, s"),
            (TableForAllTokens, "q is multiplied with a table of [1, 1, 1, 8]"),
            (Narrowed, "is torch.float64"),
        ],
    ),
)
def test_is_declined_with_reason_and_split(kind, reason):
    before, after, program, (fused, split) = run(kind)
    assert (fused.rewrites, split.rewrites) == (0, 1)
    (declined,) = fused.declined
    assert reason in declined.reason
    assert not program.calls(ops.rope_write)
    (write,), (attend,) = program.calls(ops.write_kv), program.calls(ops.attend)
    assert write < attend
    assert_runs_alike(before, after)


class ColumnsApart(Tiny):
    """Heads are the inner dimension of a projection."""

    num_kv_heads = 4

    def split(self, x):
        return x.view(1, -1, self.head_dim, x.shape[-1] // self.head_dim).permute(0, 3, 1, 2)

    def repeat(self, x):
        return x


def test_kernels_get_columns_side_by_side():
    before, after, program, _ = run(ColumnsApart)
    (write,), (attend,) = program.calls(ops.write_kv), program.calls(ops.attend)
    for operand in (attend.args[0], *write.args[:2]):
        assert operand.target is aten.contiguous.default
    assert_runs_alike(before, after)


def test_attention_needs_a_write_before_it():
    _, _, program, _ = run(Without)
    assert attention_reads_caches(program)
    (write,), (attend,) = program.calls(ops.write_kv), program.calls(ops.attend)
    attend.append(write)
    assert not attention_reads_caches(program)
    program.graph.erase_node(write)
    assert not attention_reads_caches(program)


@pytest.mark.parametrize(
    ("kind", "target", "place", "message"),
    [
        (Rotary, ops.rope_write, 0, r"is not \[heads, tokens, head_dim\]"),
        pytest.param(
            Rotary, ops.rope_write, 2, r"is not \[heads, tokens, head_dim\]", marks=pytest.mark.slow
        ),
        pytest.param(
            Rotary, ops.rope_write, 4, r"is not \[tokens, columns\]", marks=pytest.mark.slow
        ),
        (Without, ops.write_kv, 1, r"is not \[heads, tokens, head_dim\]"),
        pytest.param(
            Without, ops.attend, 0, r"is not \[heads, tokens, head_dim\]", marks=pytest.mark.slow
        ),
    ],
)
def test_operands_with_tokens_elsewhere_are_refused(kind, target, place, message):
    """The proof that tokens meet in attention only knows the new operators."""
    _, _, program, _ = run(kind)
    verify_tokenwise(program, "test")
    (node,) = program.calls(target)
    with program.graph.inserting_before(node):
        moved = program.graph.call_function(aten.transpose.int, (node.args[place], 0, 1))
    moved.meta["val"] = node.args[place].meta["val"].transpose(0, 1)
    node.update_arg(place, moved)
    with pytest.raises(UnsupportedGraphError, match=message):
        verify_tokenwise(program, "test")
