"""The functions that models of transformers call for convolutions and recurrences, while traced."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.jamba import modeling_jamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from specc.errors import UnsupportedAttentionError
from specc.kernels import ops
from specc.passes.frontend.recurrence_functions import registered_recurrences
from specc.passes.frontend.trace import trace
from tests import models

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
# more than a chunk of transformers
TOKENS = 70


def replaced(file: ModuleType, name: str) -> Any:
    module = type("Layer", (nn.Module,), {"__module__": file.__name__})()
    before = getattr(file, name)
    with registered_recurrences(module):
        own = getattr(file, name)
    assert getattr(file, name) is before is not own
    return own


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def delta_operands(key_heads: int, heads: int, by_row: bool) -> dict[str, Tensor]:
    q, k = (drawn(1, TOKENS, key_heads, 8, seed=i) for i in range(2))
    decay = -drawn(1, TOKENS, heads, *((8,) if by_row else ())).abs() / 4
    beta = drawn(1, TOKENS, heads, seed=5).sigmoid()
    return {
        "query": q, "key": k, "value": drawn(1, TOKENS, heads, 12), "g": decay, "beta": beta,
    }  # fmt: skip


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_the_gated_delta_rule(key_heads, is_normalized):
    """Also `torch_recurrent_gated_delta_rule`, which goes token by token."""
    operands = delta_operands(key_heads, 4, by_row=False)
    if not is_normalized:  # keys of length 1 and more diverge
        operands["key"] = operands["key"] / 8
    options = {"use_qk_l2norm_in_kernel": is_normalized}
    found, state = replaced(modeling_qwen3_next, "torch_chunk_gated_delta_rule")(
        **operands, **options, initial_state=None, output_final_state=False, cu_seqlens=None
    )
    assert state is None
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        wanted, _ = getattr(modeling_qwen3_next, name)(**operands, **options)
        torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_kimi_delta_attention():
    operands = delta_operands(4, 4, by_row=True)
    name = "chunk_kimi_delta_attention"
    found, _ = replaced(modeling_kimi_linear, name)(**operands, use_qk_l2norm_in_kernel=True)
    wanted, _ = getattr(modeling_kimi_linear, name)(**operands, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(found, wanted, **TOLERANCE)


def scan_operands(heads: int = 4) -> dict[str, Any]:
    return {
        "hidden_states": drawn(1, TOKENS, heads, 8), "dt": drawn(1, TOKENS, heads),
        "A": -drawn(heads).abs() / 4, "B": drawn(1, TOKENS, 2, 12),
        "C": drawn(1, TOKENS, 2, 12, seed=3), "chunk_size": 16,
    }  # fmt: skip


@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.6, 0.9)], ids=["", "clamped"])
@pytest.mark.parametrize("has_rest", [True, False], ids=["", "bare"])
def test_the_scan_of_mamba2(has_rest, limit):
    rest = {"D": drawn(4), "dt_bias": drawn(4, seed=1), "dt_softplus": True} if has_rest else {}
    operands = scan_operands() | rest | {"dt_limit": limit}
    if not has_rest:
        operands["dt"] = operands["dt"].abs()
    found = replaced(modeling_mamba2, "mamba2_chunk_scan")(**operands, z=None)
    wanted = modeling_mamba2.mamba2_chunk_scan(**operands)
    torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_a_time_step_that_is_negative_is_clamped():
    """Where nothing makes it positive, transformers takes it as 0."""
    operands = scan_operands()
    found = replaced(modeling_mamba2, "mamba2_chunk_scan")(**operands)
    torch.testing.assert_close(found, modeling_mamba2.mamba2_chunk_scan(**operands), **TOLERANCE)


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize(("width", "has_bias"), [(4, False), (3, True)])
def test_convolutions(width, has_bias, activation):
    x, weight = drawn(1, 6, TOKENS), drawn(6, width)
    bias = drawn(6) if has_bias else None
    found = replaced(modeling_mamba2, "causal_conv1d_fn")(x, weight, bias, activation=activation)
    wanted = modeling_mamba2.causal_conv1d_fn(x, weight, bias, activation=activation)
    torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_of_few_tokens_a_convolution_sees_zeros_before_them():
    x, weight = drawn(1, 6, 2), drawn(6, 4)
    wanted = modeling_mamba2.causal_conv1d_fn(x, weight)
    found = replaced(modeling_mamba2, "causal_conv1d_fn")(x, weight)
    torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_dtypes_are_those_of_transformers():
    operands = {key: x.bfloat16() for key, x in delta_operands(2, 4, by_row=False).items()}
    name = "torch_chunk_gated_delta_rule"
    found, _ = replaced(modeling_qwen3_next, name)(**operands, use_qk_l2norm_in_kernel=True)
    wanted, _ = getattr(modeling_qwen3_next, name)(**operands, use_qk_l2norm_in_kernel=True)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    scan = {k: x.bfloat16() if isinstance(x, Tensor) else x for k, x in scan_operands().items()}
    y = replaced(modeling_mamba2, "mamba2_chunk_scan")(**scan)
    assert y.dtype == modeling_mamba2.mamba2_chunk_scan(**scan).dtype == torch.float32


@pytest.mark.parametrize(
    ("file", "name", "given", "found"),
    [
        (modeling_qwen3_next, "torch_chunk_gated_delta_rule",
         {"initial_state": torch.zeros(1)}, "initial_state"),
        (modeling_qwen3_next, "torch_chunk_gated_delta_rule",
         {"output_final_state": True}, "output_final_state"),
        (modeling_qwen3_next, "torch_chunk_gated_delta_rule",
         {"cu_seqlens": torch.zeros(2)}, "cu_seqlens"),
        (modeling_mamba2, "mamba2_chunk_scan", {"z": torch.zeros(1)}, "z"),
        (modeling_mamba2, "mamba2_chunk_scan", {"return_final_states": True}, "return_final"),
        (modeling_mamba2, "causal_conv1d_fn", {"seq_idx": torch.zeros(1)}, "seq_idx"),
    ],
)  # fmt: skip
def test_unknown_arguments_are_refused(file, name, given, found):
    operands: dict[str, Any] = {
        "torch_chunk_gated_delta_rule": delta_operands(2, 4, by_row=False),
        "mamba2_chunk_scan": scan_operands(),
        "causal_conv1d_fn": {"hidden_states": drawn(1, 6, 5), "weight": drawn(6, 4)},
    }[name]
    with pytest.raises(UnsupportedAttentionError, match=f"takes an argument {found}"):
        replaced(file, name)(**operands, **given)


def test_the_scan_of_mamba1_is_refused_by_name():
    with pytest.raises(UnsupportedAttentionError, match=r"modeling_jamba: the selective scan of"):
        replaced(modeling_jamba, "mamba_selective_scan")(torch.zeros(1))


def test_what_a_layer_has_kept_is_replaced_and_put_back():
    original = modeling_qwen3_next.torch_chunk_gated_delta_rule
    module: Any = type("Layer", (nn.Module,), {"__module__": modeling_qwen3_next.__name__})()
    module.rule, module.other = original, math.sqrt
    with registered_recurrences(module):
        assert module.rule is modeling_qwen3_next.torch_chunk_gated_delta_rule is not original
        assert module.other is math.sqrt
    assert module.rule is modeling_qwen3_next.torch_chunk_gated_delta_rule is original


def test_other_modules_are_left_alone():
    original = modeling_mamba2.causal_conv1d_fn
    with registered_recurrences(nn.Linear(2, 2)):
        assert modeling_mamba2.causal_conv1d_fn is original
    with pytest.raises(ZeroDivisionError), registered_recurrences(models.build_model("mamba2")):
        1 / (modeling_mamba2.causal_conv1d_fn is original)
    assert modeling_mamba2.causal_conv1d_fn is original


def test_a_model_is_traced_by_them():
    program = trace(models.build_model("mamba2"), "target")
    assert len(program.calls(ops.dense_conv)) == len(program.calls(ops.dense_recurrence)) == 2
    (first, _) = program.calls(ops.dense_conv)
    assert first.kwargs == {"activation": "silu"}
