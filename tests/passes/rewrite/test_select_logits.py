"""Only the rows that are asked for reach the vocabulary projection."""

from __future__ import annotations

import pytest
import torch

from specc.errors import NotCausalLMError
from specc.passes.facts import logits_are_selected
from specc.passes.rewrite.classify_masks import ClassifyMasks
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.select_logits import SelectLogits
from specc.passes.rewrite.tree_attention import RewriteTreeAttention
from tests.passes.modules import (
    TOLERANCE,
    Tiny,
    aten,
    dense_logits,
    program_logits,
    random_tokens,
    traced,
)
from tests.tiers import only

ROWS = {"all": range(9), "none": [], "one": [3], "some": [8, 0, 5], "twice": [2, 2, 8, 2]}


class Softcap(Tiny):
    def project(self, x):
        return torch.tanh(self.head(x) / 0.5) * 0.5


class Tied(Tiny):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight


class Biased(Tiny):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(self.width, 13)


class Kept(Tiny):
    """`logits_to_keep=0` of transformers: a slice of everything."""

    def project(self, x):
        return self.head(x[:, slice(0, None), :])


class Converted(Tiny):
    def project(self, x):
        return self.head(x).double()


class Squared(Tiny):
    def project(self, x):
        logits = self.head(x)
        return logits * logits


SELECTED = (Tiny, Softcap, Tied, Biased, Kept, Converted, Squared)


class Product(Tiny):
    def project(self, x):
        return torch.matmul(x, self.head.weight.t())


class TwoHeads(Tiny):
    def project(self, x):
        return self.head(x) + self.head(2 * x)


class Masked(Tiny):
    def project(self, x):
        is_known = torch.arange(13, device=x.device) < 11
        return torch.where(is_known, self.head(x), -100.0)


class SoftmaxOfLogits(Tiny):
    def project(self, x):
        return self.head(x).log_softmax(-1)


DECLINED = {
    Product: "aten.matmul.default",
    TwoHeads: "aten.add.Tensor",
    Masked: "aten.where.ScalarOther",
    SoftmaxOfLogits: "aten.log_softmax.int",
}


@pytest.fixture(scope="module")
def run():
    """Kind of module → (module, program, result); each is traced once."""
    known = {}

    def of(kind):
        if kind not in known:
            torch.manual_seed(0)
            model = kind().eval()
            passes = Normalize(), ClassifyMasks(), RewriteTreeAttention()
            program, _ = traced(model, *passes)
            was_selected = logits_are_selected(program)
            known[kind] = model, program, SelectLogits().run(program), was_selected
        return known[kind]

    return of


@pytest.mark.default("Softcap", "Converted")
@pytest.mark.parametrize("kind", only((Tiny, Softcap, Biased, Converted), SELECTED))
def test_fires(run, kind):
    _, program, result, was_selected = run(kind)
    assert (result.rewrites, result.declined, was_selected) == (1, [], False)
    assert logits_are_selected(program)
    (select,) = program.calls(aten.index_select.default)
    (linear,) = (n for n in program.calls(aten.linear.default) if n.args[0] is select)
    assert select.args[2] is program.placeholder("logit_rows")
    assert linear.meta["val"].shape[-1] == 13
    (output,) = program.graph.find_nodes(op="output")
    value = output.args[0].meta["val"]
    assert str(value.shape[0]) == str(program.placeholder("logit_rows").meta["val"].shape[0])
    assert value.shape[1:] == (13,)


@pytest.mark.parametrize("rows", ROWS.values(), ids=list(ROWS))
@pytest.mark.parametrize(
    "kind", only((Tiny, Softcap, Biased, Converted, Product, Masked), [*SELECTED, *DECLINED])
)
def test_same_numbers(run, kind, rows):
    model, program = run(kind)[:2]
    tokens = random_tokens()
    got = program_logits(program, model, tokens, rows)
    torch.testing.assert_close(got, dense_logits(model, tokens)[list(rows)], **TOLERANCE)
    assert got.shape == (len(rows), 13)


@pytest.mark.parametrize("kind", only((Product, Masked), DECLINED))
def test_other_outputs_are_declined_with_reason(run, kind):
    _, program, result, _ = run(kind)
    assert result.rewrites == 0
    (declined,) = result.declined
    assert f"the output comes from {DECLINED[kind]}, not from a linear" in declined.reason
    assert logits_are_selected(program)


def test_flat_logits_are_refused():
    program, _ = traced(Tiny(), Normalize())
    (output,) = program.graph.find_nodes(op="output")
    with program.graph.inserting_before(output):
        flat = program.graph.call_function(aten.squeeze.dim, (output.args[0], 0))
    flat.meta["val"] = output.args[0].meta["val"][0]
    output.args = (flat,)
    with pytest.raises(NotCausalLMError, match="an output of shape"):
        SelectLogits().run(program)
