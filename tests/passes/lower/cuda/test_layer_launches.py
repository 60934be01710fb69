"""What a layer of a mixture launches on CUDA, by name: who adds a launch sees it here."""

from __future__ import annotations

from typing import Any

import pytest

from specc.kernels import ops
from specc.kernels.cuda import experts, experts_fragments, route
from specc.passes.lower.cuda.phases import launches
from specc.passes.program import Program
from tests.kernels.cuda.launches import record
from tests.models import build_model
from tests.passes.lower.cuda.test_phases import in_bfloat16
from tests.passes.modules import lower_for_cuda
from tests.passes.rewrite.test_fuse_latent_write import lower as lower_latents
from tests.passes.rewrite.test_pair_fragments import lowered

# what stands after the attention of one layer, up to that of the next
_OUT, _ROUTED = ("skinny_linear", "add_rms_norm"), ("route", "experts")
_HEADS = ("add_norm_linear", "norm_rope_write", "attend")
_SHARED = ("skinny_linear", "act_and_mul", "skinny_linear")
_GATE = ("skinny_linear", "sigmoid", "mul", "add")
LAYERS = {
    "mixtral": ({}, (*_OUT, *_ROUTED, "add_norm_rope_write", "attend")),
    "qwen3_moe": ({"norm_topk_prob": True}, (*_OUT, *_ROUTED, *_HEADS)),
    "gpt_oss": ({}, (*_OUT, *_ROUTED, "add_norm_rope_write", "attend")),
    # whose shared expert is one of the mixture's, with its gate, or is not for its size
    "qwen2_moe": ({}, (*_OUT, *_ROUTED, "add_norm_rope_write", "attend")),
    "qwen2_moe of 40": (
        {"shared_expert_intermediate_size": 40},
        (*_OUT, *_SHARED, *_ROUTED, *_GATE, "add_norm_rope_write", "attend"),
    ),
}


# with queries of one weight, as of V2 Lite, and of two; MiniCPM3 has no mixture
_LATENT = ("skinny_linear", "rms_norm", "bmm", "rope_write_latent", "attend")
_UP = ("bmm_by_token", *_OUT)
LATENT_LAYERS = {
    "deepseek_v2": (
        {"q_lora_rank": None},
        (*_UP, *_ROUTED, "add_norm_linear", *_LATENT[1:]),
    ),
    "deepseek_v3": (
        {},
        (*_UP, *_ROUTED, "add_norm_linear", "rms_norm", *_LATENT),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_launches_of_a_layer(name: str) -> None:
    changes, wanted = LAYERS[name]
    _, _, program, _ = lower_for_cuda(build_model(name.split()[0], **changes))
    assert of_layer(program) == wanted


# of int4, in blocks and in fragments
_PRODUCT = ("linear_q",)
QUANTIZED_LAYERS = {
    False: (
        *_PRODUCT, "add_rms_norm", *_PRODUCT, "act_and_mul", *_PRODUCT, "add_rms_norm", *_PRODUCT,
        "rope_write", "attend",
    ),
    True: (*_PRODUCT, "add_norm_gate_up", *_PRODUCT, "add_norm_rope_write", "attend"),
}  # fmt: skip


@pytest.mark.parametrize("fragments", QUANTIZED_LAYERS)
def test_launches_of_a_quantized_layer(fragments: bool) -> None:
    _, _, program, _ = lowered("llama", "int4-g64", fragments=fragments)
    assert of_layer(program) == QUANTIZED_LAYERS[fragments]


@pytest.mark.parametrize("name", LATENT_LAYERS)
def test_launches_of_a_layer_over_latents(name: str) -> None:
    """In bfloat16, where conversions count."""
    changes, wanted = LATENT_LAYERS[name]
    model = in_bfloat16(build_model(name, first_k_dense_replace=0, **changes))
    _, _, program, _ = lower_latents(model)
    assert of_layer(program) == wanted


def of_layer(program: Program) -> tuple[str, ...]:
    """Operators that the last layer of a program launches, from after the attention before it."""
    names = [node.target.overloadpacket.__name__ for node in launches(program)]  # type: ignore[union-attr]
    ends = [i for i, node in enumerate(launches(program)) if node.target is ops.attend]
    return tuple(names[ends[-2] + 1 : ends[-1] + 1])


@pytest.mark.parametrize(
    ("module", "kernels"), [(route, 1), (experts, 2), (experts_fragments, 2)],
    ids=["route", "experts", "experts_fragments"],
)  # fmt: skip
def test_kernels_of_an_operator(module: Any, kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows; what the operator runs is recorded, not counted by hand."""
    from tests.kernels.cuda import launches_products

    calls = launches_products.CALLS[module.__name__.rpartition(".")[2]]
    one = lambda: iter([next(calls())])  # noqa: E731
    assert len(record(module, 80, monkeypatch, one)) == kernels
