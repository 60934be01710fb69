"""The function that models of transformers call for attention while they are traced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specc.errors import UnsupportedAttentionError
from specc.kernels import ops
from specc.passes.frontend.attention_function import NAME, attention_forward, registered_attention
from specc.passes.frontend.trace import trace
from tests import models


class Layer(nn.Module):
    layer_idx = 3
    num_key_value_groups = 2


def operands(value_dim: int = 8) -> list[torch.Tensor]:
    return [torch.randn(1, heads, 5, dim) for heads, dim in ((4, 8), (2, 8), (2, value_dim))]


def causal() -> torch.Tensor:
    return torch.ones(5, 5, dtype=torch.bool).tril()[None, None]


@pytest.mark.parametrize("value_dim", [8, 6])
def test_plain_attention_is_that_of_torch(value_dim):
    q, k, v = operands(value_dim)
    found, _ = attention_forward(Layer(), q, k, v, causal(), scaling=0.4, sliding_window=9)
    wanted = ops.dense_attention(q, k, v, causal(), None, scale=0.4)
    torch.testing.assert_close(found, wanted.transpose(1, 2))


@pytest.mark.parametrize("mask", [causal(), None], ids=["mask", "none"])
@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -1.0, 20.0, 0.0])], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_sinks_and_softcap_equal_those_of_transformers(softcap, sinks, mask):
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as beside

    layer, (q, k, v) = Layer(), operands()
    found, _ = attention_forward(layer, q, k, v, mask, scaling=1.4, softcap=softcap, s_aux=sinks)
    added = torch.where(causal(), 0.0, -1e30)
    if sinks is None:
        wanted, _ = capped(layer, q, k, v, added, scaling=1.4, softcap=softcap)
    elif softcap is None:
        layer.sinks = sinks
        wanted, _ = beside(layer, q, k, v, added, scaling=1.4)
    else:
        return  # no model has both
    torch.testing.assert_close(found, wanted)


def test_unknown_arguments_are_refused():
    for name in ("position_bias", "alibi", "indices"):
        with pytest.raises(UnsupportedAttentionError, match=f"of layer 3: .* argument {name}"):
            attention_forward(Layer(), *operands(), causal(), **{name: torch.ones(1)})
        attention_forward(Layer(), *operands(), causal(), **{name: None})


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"softcap": 2.0, "dropout": 0.1}, "dropout"),
        ({"softcap": -2.0}, "softcap of -2.0"),
        ({"s_aux": torch.zeros(2)}, "sinks of shape"),
        ({"softcap": 2.0, "is_causal": False}, "bidirectional"),
    ],
)
def test_what_is_no_such_attention_is_refused(options, found):
    with pytest.raises(UnsupportedAttentionError, match=found):
        attention_forward(Layer(), *operands(), None, **options)


def test_a_model_is_as_it_was_afterwards():
    model = models.build_model("gemma2")
    before = model.config._attn_implementation
    with registered_attention(model):
        assert model.config._attn_implementation == NAME
        assert model.model.layers[0].self_attn.config._attn_implementation == NAME
    assert model.config._attn_implementation == before != NAME


def test_a_given_module_is_traced_by_it_whatever_it_uses():
    program = trace(models.build_model("gemma2"), "target")
    calls = program.calls(ops.dense_attention)
    assert [node.kwargs["softcap"] for node in calls] == [3.0, 3.0]
    # unrepeated
    assert {node.args[1].meta["val"].shape[1] for node in calls} == {2}
