"""Options of compilation: a frozen dataclass, validated once."""

from __future__ import annotations

from dataclasses import dataclass

from specc.errors import ConfigError
from specc.plans import SpecPlan

DTYPES = ("float32", "bfloat16", "float16")
# the upper ends are those of the traced dimensions (passes/trace.py), or beyond any use
_RANGES = (("max_batch_size", 1, 4096), ("prefill_chunk", 1, 1 << 20), ("block_size", 0, 1 << 16))


@dataclass(frozen=True)
class CompileConfig:
    """Options of `specc compile`.

    Args:
        plans: speculation plans of the engine; off is always added. The first is the default.
        dtype: arithmetic and weight type of both models, `float32` or `bfloat16`, on a GPU also
            `float16`.
        max_batch_size: sequences that decode together.
        max_seq_len: tokens of prompt and output together; None takes the target's own maximum,
            at most 4096.
        block_size: rows of a KV cache block; 0 means dense: one block a sequence.
        prefill_chunk: tokens of one prefill pass.
        backend: `cpu`, `eager` or `cuda` (experimental); None is cpu where there is a C++
            compiler. `aot-inductor` is `cuda` with compiled code, which no GPU has shown yet.
        probe: generate a few dozen tokens at the end and report the acceptance.
        policy: `fixed` runs the default plan, `best` chooses between a model's and a lookup's.
    Raises:
        ConfigError: a value is outside its range.
    """

    plans: tuple[SpecPlan, ...] = ()
    dtype: str = "float32"
    max_batch_size: int = 8
    max_seq_len: int | None = None
    block_size: int = 16
    prefill_chunk: int = 512
    backend: str | None = None
    probe: bool = True
    policy: str = "fixed"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype}", f"one of {', '.join(DTYPES)}", "pass --dtype")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            option = "--" + name.replace("_", "-")
            if value < low:
                raise ConfigError(f"{option} {value}", f"{low} or more", f"raise {option}")
            if value > high:
                raise ConfigError(f"{option} {value}", f"{high} or less", f"lower {option}")
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise ConfigError(
                f"--max-seq-len {self.max_seq_len}", "2 or more", "raise --max-seq-len"
            )
