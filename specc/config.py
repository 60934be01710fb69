"""Options of compilation, plans and sampling: frozen dataclasses, validated once."""

from __future__ import annotations

from dataclasses import dataclass, field

from specc.errors import ConfigError, RequestError
from specc.tree import TokenTree

DTYPES = ("float32", "bfloat16", "float16")
# the upper ends are those of the traced dimensions (passes/trace.py), or beyond any use
_RANGES = (("max_batch_size", 1, 4096), ("prefill_chunk", 1, 1 << 20), ("block_size", 0, 1 << 16))


@dataclass(frozen=True)
class SpecPlan:
    """What one step does: speculate with this tree, or decode plainly.

    Args:
        name: `off`, `chain-4`, `tree-3-2-1`.
        widths: children per frontier node and level; empty is off.
    """

    name: str
    widths: tuple[int, ...] = ()

    @classmethod
    def from_widths(cls, widths: tuple[int, ...] | list[int]) -> SpecPlan:
        """Name a plan after its widths; all ones is a chain, no level is off."""
        widths = tuple(widths)
        if not widths:
            return cls("off")
        TokenTree.from_widths(widths)
        if set(widths) == {1}:
            return cls(f"chain-{len(widths)}", widths)
        return cls("tree-" + "-".join(map(str, widths)), widths)

    @property
    def tree(self) -> TokenTree:
        return TokenTree.from_widths(self.widths) if self.widths else TokenTree.chain(0)

    @property
    def kind(self) -> str:
        return self.name.split("-")[0]


OFF = SpecPlan("off")


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


@dataclass(frozen=True)
class SamplingParams:
    """Options of one request, named as vLLM's users know them.

    Args:
        max_tokens: output tokens at most.
        temperature: 0 (greedy) in this version.
        stop: strings that end the output; the text is cut before the first of them.
        stop_token_ids: further token ids that end the output, next to the model's EOS ids.
        ignore_eos: go on after EOS.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        speculative: False decodes this request plainly.
    Raises:
        RequestError: a value is outside its range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculative: bool = True
    stop_strings: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or isinstance(self.stop, (int, float)):
            raise RequestError(
                f"max_tokens={self.max_tokens!r}, stop={self.stop!r}",
                "an integer, and a string or a list of strings",
                "correct the SamplingParams",
            )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens={self.max_tokens}", "1 or more", "raise max_tokens")
        if self.temperature != 0:
            raise RequestError(
                f"temperature={self.temperature}",
                "temperature=0: this version decodes greedily",
                "pass temperature=0",
            )
        if any(not text for text in stop):
            raise RequestError("an empty stop string", "non-empty stop strings", "remove it")
        object.__setattr__(self, "stop_strings", stop)
