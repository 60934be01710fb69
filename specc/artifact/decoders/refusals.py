"""What of quantized checkpoints is refused, and what to do then."""

from __future__ import annotations

from specc.errors import WeightError

SUPPORTED = (
    "compressed-tensors (pack-quantized, int-quantized, float-quantized, mxfp4, nvfp4), gptq, awq"
    " (gemm), auto-round, fp8, fbgemm_fp8, modelopt (FP8, NVFP4), bitsandbytes, quark"
    " (fp8, mxfp4) or mxfp4"
)
_FLOAT = "pass the unquantized checkpoint of this model, with --quantize int8 or int4"


def unknown_scheme(scheme: str, where: str) -> WeightError:
    """The error of a scheme that specc does not read."""
    return WeightError(
        f"{where} is quantized ({scheme})",
        f"weights of 4 or 8 bits as of {SUPPORTED}; docs/guide/quantization.md says which",
        _FLOAT,
    )


def check_activations(what: str, scheme: str, where: str, is_weight_only: bool) -> None:
    """Raises WeightError: more than weights is quantized, and nobody said to leave that out."""
    if is_weight_only:
        return
    raise WeightError(
        f"{where} is quantized ({scheme}), and its {what}, too",
        "a checkpoint of which the weights alone are quantized: specc rounds no activations",
        "pass --weight-only to take its weights and leave activations as they are, which is not"
        " exactly the model that was measured; or " + _FLOAT,
    )
