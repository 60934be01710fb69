"""Engines of more programs' checkpoints, beside plain transformers on the same numbers."""

from __future__ import annotations

import pytest

from specc.artifact.backends import facts_of
from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.quantized_layout import QuantizedLayout
from tests import branded_checkpoints as branded
from tests import quantized_checkpoints as made
from tests.runtime.test_quantized import TOLERANCE, check_logits, check_plans
from tests.runtime.test_quantized_checkpoints import (
    check_integers,
    make,  # noqa: F401 - a fixture
    reference,
    stored_layouts,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form", "layout"),
    [
        ("llama", branded.auto_round(made.gptq(4, 32), "auto_gptq"), "int4-g32"),
        ("qwen3", branded.auto_round(made.awq(32), "auto_awq"), "int4-g32-zeros"),
        ("llama", branded.fbgemm(), "fp8"),
        ("qwen3", branded.modelopt_fp8(), "fp8"),
        ("llama", branded.modelopt_nvfp4(), "nvfp4"),
        ("llama", branded.packed_nvfp4(), "nvfp4"),
        ("llama", branded.quark_mxfp4(), "mxfp4"),
        ("qwen2", branded.bitsandbytes("nf4", 64, 8), None),
        ("llama", branded.bitsandbytes("fp4"), None),
        ("llama", branded.bitsandbytes_int8(), "int8"),
    ],
)
def test_plans_and_logits(make, name, form, layout) -> None:  # noqa: F811
    written, engine = make(name, form, weight_only=True)
    kept = set() if layout is None else {f"blocks-{layout}"}
    assert set(stored_layouts(engine).values()) == kept
    if layout is not None:
        check_integers(written, engine)
    check_logits(engine, reference(written), "float32", TOLERANCE)
    check_plans(engine)


def test_who_holds_nvfp4_as_numbers() -> None:
    """What no kernel reads is decoded, where mxfp4 is refused."""
    kept = KeptIntegers(QuantizedLayout.named("nvfp4"))
    for backend in ("cpu", "eager", "cuda"):
        assert kept.held_as(facts_of(backend).quantized) == kept
    for backend in ("onnx", "tensorrt"):
        assert kept.held_as(facts_of(backend).quantized) is None
