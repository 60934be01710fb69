"""Types of weights and arithmetic, by the names that users give them."""

from __future__ import annotations

from specc.close_name import close_name
from specc.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
# the type of the checkpoint
AUTO = "auto"
# as transformers, vLLM and people call them
_DTYPE_ALIASES = {
    **dict.fromkeys(("float", "fp32", "f32", "single"), "float32"),
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
}


def parse_dtype(text: str, option: str) -> str:
    """The full name of a type: `bfloat16` for `bf16` or `torch.bfloat16`.

    Args:
        text: as the user wrote it.
        option: that it was given with, for the error.
    Raises:
        ConfigError: no type that specc computes in.
    """
    name = str(text).strip().lower().removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name in (*DTYPES, AUTO):
        return name
    close = close_name(name, (*DTYPES, *_DTYPE_ALIASES, AUTO))
    meant = _DTYPE_ALIASES.get(close, close) if close else None
    raise ConfigError(
        f"{option} {text}",
        f"one of {', '.join((*DTYPES, AUTO))}",
        f"pass {option} {meant}"
        if meant
        else "choose one of them; weights of 8 or 4 bits are --quantize int8, int4 or fp8",
    )
