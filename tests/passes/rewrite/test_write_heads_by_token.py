"""Products of heads write tokens first where a copy would follow, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specc.kernels import ops
from specc.kernels.cuda.bmm_by_token import bmm_by_token
from specc.kernels.reference.products import bmm_by_token_reference
from specc.passes.rewrite.write_heads_by_token import WriteHeadsByToken
from tests.passes.modules import Runner, Tiny, assert_runs_alike, aten, compiled


class Heads(Tiny):
    """Two heads of a product; tests change what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def moved(self, rows):
        return rows.unsqueeze(0).transpose(1, 2).contiguous()

    def after(self, x, positions):
        heads = x[0].view(-1, 2, 8).transpose(0, 1)
        return self.moved(torch.bmm(heads, self.weight)).reshape(1, -1, 16)


class Alone(Heads):
    """No copy follows: what reads heads first wants them so."""

    def moved(self, rows):
        return (rows + 1).transpose(0, 1).contiguous()


class HeadsFirst(Heads):
    def moved(self, rows):
        return rows.transpose(1, 2).contiguous().permute(2, 0, 1)


class Twice(Heads):
    def moved(self, rows):
        return rows.transpose(0, 1).contiguous() + rows.transpose(0, 1)


def rewritten(model: nn.Module):
    program, _ = compiled(model)
    before = Runner(program, model)
    result = WriteHeadsByToken().run(program)
    return before, Runner(program, model), program, result


def test_a_copy_is_one_of_nothing() -> None:
    before, after, program, result = rewritten(Heads())
    assert result.rewrites == 1
    (call,) = program.calls(ops.bmm_by_token)
    assert not program.calls(aten.bmm.default)
    value = call.meta["val"]
    assert value.transpose(0, 1).is_contiguous()
    assert_runs_alike(before, after)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Alone, "no copy alone reads it"),
        (HeadsFirst, "the copy has heads before tokens"),
        (Twice, "no copy alone reads it"),
    ],
)
def test_other_products_stay(kind, reason) -> None:
    _, _, program, result = rewritten(kind())
    assert result.rewrites == 0
    assert [item.reason for item in result.declined] == [reason]
    assert len(program.calls(aten.bmm.default)) == 1


def test_rows_of_a_token_lie_side_by_side() -> None:
    """Written so, not copied: the library's product is given the place."""
    x, weight = torch.randn(5, 3, 7).transpose(0, 1), torch.randn(3, 4, 7).transpose(1, 2)
    got = bmm_by_token(x, weight)
    assert got.stride() == (4, 12, 1)
    torch.testing.assert_close(got, bmm_by_token_reference(x, weight))
    with pytest.raises(ValueError, match="found x"):
        bmm_by_token(x, weight[:, :6])
