"""Options of compilation: a frozen dataclass, validated once."""

from __future__ import annotations

from dataclasses import dataclass

from specc.artifact.kv_rows import AUTO as AS_MODEL
from specc.artifact.kv_rows import KV_CACHE_DTYPES
from specc.artifact.mla_cache import AUTO as MLA_AUTO
from specc.artifact.mla_cache import MLA_CACHES
from specc.artifact.quantized_layout import ACTIVATION_BITS
from specc.close_name import advice, close_name
from specc.errors import ConfigError
from specc.speculation.kv_window import FULL, KVWindow
from specc.speculation.plans import SpecPlan

DTYPES = ("float32", "bfloat16", "float16")
# the type of the checkpoint
AUTO = "auto"
# as transformers, vLLM and people call them
_DTYPE_ALIASES = {
    **dict.fromkeys(("float", "fp32", "f32", "single"), "float32"),
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
}
# the upper ends are those of traced dimensions (passes/frontend/trace.py), or beyond any use
_RANGES = (
    ("max_batch_size", 1, 4096), ("prefill_chunk", 1, 1 << 20), ("block_size", 0, 1 << 16),
    ("max_logits_mb", 1, 1 << 20), ("tensor_parallel_size", 1, 256),
    ("pipeline_parallel_size", 1, 256),
    ("draft_tensor_parallel_size", 1, 256), ("rope_length", 2, 1 << 30),
    ("kv_cache_tokens", 1, 1 << 40), ("draft_ranks", 1, 256),
)  # fmt: skip
DEFAULT_MAX_LOGITS_MB = 512
_QUANTIZE_GROUPS = (32, 64, 128)
# options that not every backend takes, and what says that nobody gave them; the compiler's backends
# say which they take
BACKEND_OPTIONS = {
    "compute_capability": None, "decomposable_attention": False, "tensor_parallel_size": 1,
    "draft_tensor_parallel_size": 1, "draft_ranks": 1, "segments": False,
    "kv_cache_dtype": AS_MODEL, "pipeline_parallel_size": 1, "quantize": None,
    "activation_bits": None,
}  # fmt: skip


@dataclass(frozen=True)
class CompileConfig:
    """Options of `specc compile`.

    Args:
        plans: speculation plans of the engine; off is always added. The first is the default.
        dtype: arithmetic and weight type of the target, `float32`, `bfloat16`, for other backends
            than cpu and eager `float16`, or `auto`, that of the checkpoint; bf16, fp16, half and
            their like are understood, too.
        draft_dtypes: of the draft models: one each, or one for all; none is the target's.
        draft_kv: rows of their caches that draft models attend to, `window=512,sink=4` or `full`:
            one each, or one for all; none is full.
        draft_assume: what to take for what files of heads leave open,
            `tap_convention=entering,is_last_normed=true`, or `files`: one each, or one for all
            heads; none is what files and their trainers say. See `specc.compiler.assumptions`.
        max_batch_size: sequences that decode together.
        max_seq_len: tokens of prompt and output together; None takes the target's own maximum,
            at most 4096.
        block_size: rows of a KV cache block; 0 means dense: one block a sequence.
        prefill_chunk: tokens of one prefill pass; None is 2048 for cuda and 512 for others, and no
            more than all sequences can have.
        max_logits_mb: MiB of logits that a step may hold at a time, the drafts' included; trees
            that need more are verified in tiles.
        backend: `cpu`, `eager`, `cuda`, `onnx` or `tensorrt`; None is cuda where Triton
            is and a GPU like one that has run it, else cpu where there is a C++ compiler.
        probe: generate a few dozen tokens at the end and report the acceptance.
        compute_capability: of the GPU that TensorRT engines are for, `8.9`; None is every GPU that
            the builder supports, or the one that it finds.
        decomposable_attention: let TensorRT take attention apart where it has no fused kernel.
        allow_nonfinite_weights: compile weights that are NaN or infinite, or become so in `dtype`.
        tensor_parallel_size: ranks that share the target, each with a part of its weights.
        pipeline_parallel_size: stages of the target, each with some of its layers, and
            `tensor_parallel_size` ranks.
        draft_tensor_parallel_size: ranks that share each draft model: those of the target, or 1,
            rank 0 alone.
        draft_ranks: ranks that draft models which are not cut are spread over, in turn.
        rope_length: rotary frequencies of this length at every position, where those of a model
            depend on length and it is longer than the model's own; None serves that at most.
        kv_cache_tokens: rows of the cache, for all sequences together; None is the worst case of
            `max_batch_size` sequences.
        quantize: how weights of projections are rounded, `int8`, `int4` or `fp8`, of all models but
            drafts that read hidden states; None keeps them in `dtype`.
        quantize_group: columns that share a scale, with int4 and int8: 32, 64 or 128; None is 64,
            with int8 all of an output.
        activation_bits: of the integers that rows become before weights of int8 or int4 multiply
            them: 8, 16, or None, 24 in float32 and 16 in bfloat16.
        weight_only: of checkpoints whose activations are quantized, too, take the weights and leave
            activations as they are.
        segments: compile the target as segments, one program for each kind of layer; such engines
            can run with weights in files, see `--offload-weights`.
        kv_cache_dtype: how caches hold K and V of all models: `auto`, in the type of the model, or
            `int8`, with a scale for each token and KV head.
        mla_cache: what caches hold of layers whose keys and values are expanded from one latent:
            `latent`, `expanded`, or `auto`, see `specc.artifact.mla_cache`.
        policy: `fixed` runs the default plan, `best` chooses between a model's and a lookup's.
    Raises:
        ConfigError: a value is outside its range.
    """

    plans: tuple[SpecPlan, ...] = ()
    dtype: str = "float32"
    max_batch_size: int = 8
    max_seq_len: int | None = None
    block_size: int = 16
    prefill_chunk: int | None = None
    backend: str | None = None
    probe: bool = True
    policy: str = "fixed"
    draft_dtypes: tuple[str, ...] = ()
    draft_kv: tuple[str, ...] = ()
    draft_assume: tuple[str, ...] = ()
    max_logits_mb: int = DEFAULT_MAX_LOGITS_MB
    compute_capability: str | None = None
    decomposable_attention: bool = False
    allow_nonfinite_weights: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    draft_tensor_parallel_size: int = 1
    draft_ranks: int = 1
    rope_length: int | None = None
    kv_cache_tokens: int | None = None
    quantize: str | None = None
    quantize_group: int | None = None
    activation_bits: int | None = None
    weight_only: bool = False
    segments: bool = False
    kv_cache_dtype: str = AS_MODEL
    mla_cache: str = MLA_AUTO

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", parse_dtype(self.dtype, "--dtype"))
        drafts = tuple(parse_dtype(dtype, "--draft-dtype") for dtype in self.draft_dtypes)
        object.__setattr__(self, "draft_dtypes", drafts)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"--kv-cache-dtype {self.kv_cache_dtype}",
                " or ".join(KV_CACHE_DTYPES),
                f"pass --kv-cache-dtype {KV_CACHE_DTYPES[-1]}, or leave it out: rows are then in"
                " the type of the model",
            )
        if self.mla_cache not in MLA_CACHES:
            raise ConfigError(
                f"--mla-cache {self.mla_cache}",
                " or ".join(MLA_CACHES),
                advice(
                    self.mla_cache,
                    MLA_CACHES,
                    f"choose one of them, or leave out --mla-cache for {MLA_AUTO}",
                ),
            )
        for text in self.draft_kv:
            KVWindow.parse(text)
        for name, low, high in _RANGES:
            value = getattr(self, name)
            option = "--" + name.replace("_", "-")
            if value is None:
                continue
            if value < low:
                raise ConfigError(f"{option} {value}", f"{low} or more", f"raise {option}")
            if value > high:
                raise ConfigError(f"{option} {value}", f"{high} or less", f"lower {option}")
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise ConfigError(
                f"--max-seq-len {self.max_seq_len}", "2 or more", "raise --max-seq-len"
            )

        self._check_ranks()
        self._check_quantization()

    @property
    def quantization(self) -> str | None:
        """How projections are stored, `int8-g32`, `int4-g64`, …; None in the engine's dtype."""
        group = self.quantize_group
        if self.quantize == "int4":
            group = group or _QUANTIZE_GROUPS[1]
        return self.quantize if group is None else f"{self.quantize}-g{group}"

    def _check_quantization(self) -> None:
        if self.quantize not in (None, "int8", "int4", "fp8"):
            raise ConfigError(
                f"--quantize {self.quantize}",
                "int8, int4 or fp8",
                advice(
                    str(self.quantize),
                    ("int8", "int4", "fp8"),
                    "choose one of them, or leave out --quantize",
                ),
            )
        if self.quantize_group is not None and self.quantize not in ("int8", "int4"):
            raise ConfigError(
                f"--quantize-group {self.quantize_group}"
                + (f" and --quantize {self.quantize}" if self.quantize else ""),
                "--quantize int8 or int4: fp8 has one scale for each output",
                "leave out --quantize-group",
            )
        if self.quantize_group not in (None, *_QUANTIZE_GROUPS):
            raise ConfigError(
                f"--quantize-group {self.quantize_group}",
                "32, 64 or 128",
                "choose one of them, or leave it out: 64 with int4, one scale an output with int8",
            )
        if self.activation_bits not in (None, *ACTIVATION_BITS):
            raise ConfigError(
                f"--activation-bits {self.activation_bits}",
                "8 or 16",
                "choose one of them, or leave it out: 24 bits in float32, 16 in bfloat16",
            )
        own = [own for plan in self.plans for own in plan.self_drafts if own.weights]
        if own and self.segments:
            raise ConfigError(
                f"--draft {own[0].option} and --segments",
                "whole programs: segments have one copy of their weights",
                "leave out one of the two",
            )

    def _check_stages(self) -> None:
        """Raises ConfigError: what a target in stages does not go with."""
        stages = self.pipeline_parallel_size
        if stages == 1:
            return
        others = {
            "--draft-tensor-parallel-size": (self.draft_tensor_parallel_size, 1),
            "--draft-ranks": (self.draft_ranks, 1),
            "--kv-cache-dtype": (self.kv_cache_dtype, AS_MODEL),
        }
        given = [f"{name} {value}" for name, (value, none) in others.items() if value != none]
        if self.segments:
            raise ConfigError(
                f"--segments and --pipeline-parallel-size {stages}",
                "one of the two: a stage is one program, whose weights stay in memory",
                "leave out --segments, or --pipeline-parallel-size",
            )
        given += [f"--draft {own.option}" for plan in self.plans for own in plan.self_drafts]
        if given:
            raise ConfigError(
                f"{given[0]} and --pipeline-parallel-size {stages}",
                "a target in stages, with models or lookups that draft on rank 0",
                f"leave out {given[0].split()[0]}, or --pipeline-parallel-size",
            )

    def _check_ranks(self) -> None:
        drafts, num_ranks = self.draft_tensor_parallel_size, self.tensor_parallel_size
        self._check_stages()
        if self.draft_ranks > num_ranks:
            raise ConfigError(
                f"--draft-ranks {self.draft_ranks} and --tensor-parallel-size {num_ranks}",
                "as many ranks as draft, or more",
                f"pass --draft-ranks {num_ranks}, or a larger --tensor-parallel-size",
            )
        if self.draft_ranks > 1 and drafts > 1:
            raise ConfigError(
                f"--draft-ranks {self.draft_ranks} and --draft-tensor-parallel-size {drafts}",
                "drafts that are one rank's each, or cut for all ranks",
                "leave out one of the two",
            )
        if drafts in (1, num_ranks):
            return
        raise ConfigError(
            f"--draft-tensor-parallel-size {drafts} and --tensor-parallel-size {num_ranks}",
            "drafts on rank 0 alone (1), or cut for as many ranks as the target",
            f"pass --draft-tensor-parallel-size {num_ranks}"
            if num_ranks > 1
            else f"add --tensor-parallel-size {drafts}",
        )

    def check_draft_ranks(self, num_drafts: int) -> None:
        """Raises ConfigError: more ranks are to draft than there are draft models."""
        if self.draft_ranks > max(1, num_drafts):
            raise ConfigError(
                f"--draft-ranks {self.draft_ranks}, and {num_drafts} draft models",
                "a draft model for each of these ranks: one alone is on rank 0",
                f"pass --draft-ranks {max(1, num_drafts)}, or cut a draft model:"
                " --draft-tensor-parallel-size",
            )

    def dtypes_of(self, num_drafts: int) -> list[str]:
        """Types of the target and of each draft model.

        Raises:
            ConfigError: neither one type for all drafts nor one each.
        """
        return [self.dtype, *_for_each(self.draft_dtypes, self.dtype, num_drafts, "dtype", "type")]

    def kv_windows_of(self, num_drafts: int) -> list[KVWindow | None]:
        """Rows that the target and each draft model attend to; None is all of them.

        Raises:
            ConfigError: neither one window for all drafts nor one each.
        """
        given = _for_each(self.draft_kv, FULL, num_drafts, "kv", "window")
        return [None, *map(KVWindow.parse, given)]

    def assumptions_of(self, num_drafts: int) -> tuple[str, ...]:
        """What is taken for each draft model, as `draft_assume` has it.

        Raises:
            ConfigError: neither one for all drafts nor one each.
        """
        return _for_each(self.draft_assume, "files", num_drafts, "assume", "assumption")


def _for_each(
    given: tuple[str, ...], default: str, num_drafts: int, option: str, what: str
) -> tuple[str, ...]:
    """One for each draft model, of one for all, one each, or none."""
    if len(given) not in (0, 1, num_drafts) or (given and not num_drafts):
        raise ConfigError(
            f"{len(given)} times --draft-{option}, and {num_drafts} draft models",
            f"one {what} for all draft models, or one each in their order",
            f"repeat --draft-{option} as often as --draft with a model, or pass it once",
        )
    return given if len(given) > 1 else (given or (default,)) * num_drafts


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
