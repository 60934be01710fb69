"""Options of compilation: a frozen dataclass, validated once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from specc.artifact.backends import ACTIVATION_BITS
from specc.artifact.kv_rows import AUTO as AS_MODEL
from specc.artifact.kv_rows import KV_CACHE_DTYPES, QUANTIZED_ROWS, SPELLINGS
from specc.artifact.mla_cache import AUTO as MLA_AUTO
from specc.artifact.mla_cache import MLA_CACHES
from specc.close_name import advice
from specc.compile_request import CompileRequest
from specc.dtypes import parse_dtype
from specc.errors import ConfigError
from specc.option import check_ranges, option
from specc.quantize_options import check_group, check_kind, layout_of
from specc.refusals import refuse

if TYPE_CHECKING:
    import torch

    from specc.speculation.kv_window import KVWindow
    from specc.speculation.plans import SpecPlan

DEFAULT_MAX_LOGITS_MB = 512


# upper ends of ranges are those of traced dimensions (passes/frontend/trace.py), or beyond any use
@dataclass(frozen=True)
class CompileConfig:
    """What `specc compile` and `specc.compile` take: each option once, with its help.

    Args:
        plans: speculation plans of the engine, the default first; off is always added.
        policy: what chooses plans where nobody says: `fixed` runs the default plan, `measured`
            runs it where it is faster than off, `best` chooses between a model's and a lookup's.
    Raises:
        ConfigError: a value is outside its range, or options exclude each other.
    """

    plans: tuple[SpecPlan, ...] = ()
    policy: str = "fixed"
    dtype: str = option(
        "float32",
        "Type of weights and arithmetic: float32, bfloat16 (bf16), float16 (fp16, half; not for the"
        " backends cpu and eager), or auto, the type of the checkpoint.",
    )
    draft_dtype: tuple[str, ...] = option(
        (),
        "The same for the draft models: once for all of them, or once for each. The default is the"
        " type of the target.",
    )
    draft_kv: tuple[str, ...] = option(
        (),
        "Rows of their caches that draft models attend to: window=W,sink=S, the last W and the"
        " first S (4 by default), or full. A draft with rotary positions then works past the length"
        " that it was trained for. Once for all of them, or once for each.",
        metavar="window=W",
    )
    draft_assume: tuple[str, ...] = option(
        (),
        "What to take for what files of EAGLE-3 heads, MTP modules and block drafters leave open,"
        " or say in a way that not all of their readers share: tap_convention=entering|after (what"
        " ids of the target's layers mean), is_last_normed=true|false (of a hidden state after the"
        " last layer, whether it has gone through the final norm), norm_before_residual=true|false"
        " (EAGLE-3), sample_from_anchor=true|false (block drafters: the newest token's row proposes"
        " the next one), candidates=K (DSpark: of each row the K best tokens alone); several with"
        " commas, or files. The default is what files or trainers say. Once for all, or for each.",
        metavar="NAME=VALUE",
    )
    quantize: str | None = option(
        None,
        "Store the weights of projections in 8 or 4 bits, which saves memory, and on CPUs time:"
        " int8 or fp8 (e4m3), with a scale for each output, or int4, with one for each group of"
        " columns; or formats of llama.cpp's blocks, by their names: q4_0, q4_k_m, q6_k, q8_0 (for"
        " the backends cpu and eager). Drafts that read hidden states (heads) stay as they are."
        " Outputs are those of the rounded weights. onnx has no fp8.",
        metavar="int8|int4|fp8|q4_k_m|…",
    )
    draft_quantize: tuple[str, ...] = option(
        (),
        "The same for draft models, heads included, or off: their weights stay in floating point."
        " Once for all of them, or once for each. The default is what --quantize says, and off for"
        " heads. Outputs are those of the target, whatever its drafts have.",
        metavar="int8|int4|fp8|q4_k_m|…|off",
    )
    quantize_group: int | None = option(
        None,
        "How many columns share a scale, with weights in int4 or int8: 32, 64 or 128. Smaller"
        " groups are more exact and larger. The default is 64 with int4, and with int8 all of an"
        " output.",
    )
    weight_fragments: bool = option(
        False,
        "Store quantized weights in the order in which tensor cores take them, and multiply up to"
        " 32 rows, of experts 16 tokens, by them as they lie: for the backend cuda, in bfloat16."
        " No GPU has run this yet.",
    )
    calibration: Path | None = option(
        None,
        "Texts that the target's projections are rounded for, with --quantize int4 or int8: what"
        " is lost at one weight is made up for by others, as the texts need it (GPTQ). UTF-8: one"
        ' text; or .jsonl: a text a line, {"prompt": "…"}. The target runs over up to 16,384'
        " tokens of them, which takes minutes for a billion weights.",
        metavar="FILE",
    )
    activation_bits: int | None = option(
        None,
        "How many bits the values have that weights in int8 or int4 multiply: 8, as llama.cpp and"
        " OpenVINO have it, faster where a pass has several tokens (trees, prompts) and less exact,"
        " or 16. The default is 24 in float32 and 16 in bfloat16, as good as no rounding."
        " For the backends cpu and eager.",
        metavar="8|16",
    )
    weight_only: bool = option(
        False,
        "Of checkpoints that quantize activations, too, take the weights and leave activations as"
        " they are; without it they are refused.",
    )
    lora: tuple[str, ...] = option(
        (),
        "A low-rank adapter of the target (LoRA), by a name that requests choose it with and the"
        " directory that PEFT has written. Repeat the option for several: requests of different"
        " adapters, and of none, run in one batch, with any draft (backends cpu and eager).",
        metavar="NAME=DIR",
    )
    max_batch_size: int = option(8, "How many sequences can decode together.", least=1, most=4096)
    max_seq_len: int | None = option(
        None,
        "How many tokens a prompt and its output can have together. The default is what the models"
        " allow, at most 4096.",
        least=2,
    )
    rope_length: int | None = option(
        None,
        "Rotate every position as transformers does in a pass of this many tokens: for models whose"
        " rotary scaling (dynamic, longrope) depends on length, beyond the length that they were"
        " trained for. Outputs differ from those of transformers where a pass is shorter.",
        least=2,
        most=1 << 30,
    )
    block_size: int = option(
        16,
        "How many tokens a block of the KV cache holds; 0 makes one block for each sequence.",
        least=0,
        most=1 << 16,
    )
    kv_cache_tokens: int | None = option(
        None,
        "How many tokens the KV cache holds, for all sequences together: where it is full, the"
        " newest gives way. The default is the worst case, --max-batch-size times --max-seq-len.",
        least=1,
        most=1 << 40,
    )
    kv_cache_dtype: str = option(
        AS_MODEL,
        "How the KV cache holds rows: auto, in the type of the model, or a fourth to a half of the"
        " bytes, rounded to 8 bits with a scale for each token and KV head: int8 (backends cpu,"
        " cuda and eager), or fp8, which is e4m3 (cuda and eager). Outputs differ a little from"
        " those of auto; speculation stays lossless.",
    )
    batch_invariant: bool = option(
        False,
        "Let the target's logits depend on a request's tokens alone, to the last bit: not on the"
        " plan, nor on other requests, chunks of prompts, preemption or threads. For the backends"
        " cpu, where that holds anyway but for long prompts of models with latent attention (MLA),"
        " and cuda, of targets without mixtures, states and latents, quantized weights only in the"
        " order of --weight-fragments, with slower kernels that no GPU has run.",
    )
    mla_cache: str = option(
        MLA_AUTO,
        "What the KV cache holds of models with multi-head latent attention (DeepSeek V2 and V3):"
        " latent, what keys and values are expanded from, once for all heads, which takes more"
        " arithmetic a token of context (backends cpu, cuda, eager and onnx); expanded, keys and"
        " values of each head; or auto, latent where that takes fewer bytes or, on cuda and onnx,"
        " keys and values have two widths. On cuda layers of one width stay expanded where a"
        " self-draft chooses blocks and latents are too wide to vote on them.",
    )
    state_checkpoints: int | None = option(
        None,
        "Of models whose layers keep states (hybrids): how many prefixes of prompts have theirs"
        " kept for later requests, each as large as that of a request; 0 shares no prefixes. The"
        " default is what a quarter of the KV cache's bytes hold, at least two for each sequence.",
        least=0,
        most=1 << 20,
    )
    state_grid: int | None = option(
        None,
        "At which multiples of tokens prefixes end whose states are kept: a multiple of"
        " --block-size. A pass over a prompt ends at each. The default is 256.",
        least=1,
        most=1 << 30,
    )
    prefill_chunk: int | None = option(
        None,
        "How many tokens of prompts one pass takes at most. The default is 2048 for cuda, where the"
        " memory of such a pass is no more than --max-logits-mb, and 512 for others.",
        least=1,
        most=1 << 20,
    )
    max_logits_mb: int = option(
        DEFAULT_MAX_LOGITS_MB,
        "How many MiB of logits a step may hold. Trees that need more are verified in tiles, which"
        " the rules mss and swor do not allow.",
        least=1,
        most=1 << 20,
    )
    backend: str | None = option(
        None,
        "What will run the engine: cpu (code compiled for this machine), eager (compiles in seconds"
        " and runs several times slower), cuda (a GPU, with Triton), onnx (onnxruntime) or tensorrt"
        " (experimental). The default is cuda where a GPU of compute capability 9.0 and Triton are,"
        " else cpu where there is a C++ compiler, else eager.",
    )
    compute_capability: str | None = option(
        None,
        "Compute capability of the GPU that a TensorRT engine is for, such as 8.9. The default is"
        " every GPU that TensorRT-RTX builds for, or the one that TensorRT finds.",
        metavar="X.Y",
    )
    decomposable_attention: bool = option(
        False,
        "Let TensorRT compute attention by several kernels where it has no fused one, as for"
        " float32.",
    )
    tensor_parallel_size: int = option(
        1,
        "How many ranks share the target: each holds a part of its heads, inner features and"
        " vocabulary, in a weight file of its own.",
        "--tensor-parallel-size",
        "-tp",
        least=1,
        most=256,
    )
    pipeline_parallel_size: int = option(
        1,
        "How many stages the target has: each holds some of its layers, on as many ranks as"
        " --tensor-parallel-size says, and hands on to the next what it has computed.",
        "--pipeline-parallel-size",
        "-pp",
        least=1,
        most=256,
    )
    draft_tensor_parallel_size: int = option(
        1,
        "How many ranks share each draft model: 1, which is rank 0, or as many as share the"
        " target.",
        least=1,
        most=256,
    )
    draft_ranks: int = option(
        1,
        "How many ranks the draft models are spread over, in turn: several then draft at the same"
        " time, each on its own rank. 1 is rank 0.",
        least=1,
        most=256,
    )
    segments: bool = option(
        False,
        "Compile the target as segments, layer by layer: equal layers are one program, so deep"
        " models compile in a fraction of the time and memory, and run a little slower. Such"
        " engines take --offload-weights.",
    )
    allow_nonfinite_weights: bool = option(
        False,
        "Compile weights that are NaN or infinite, or too large for --dtype; without it they are"
        " refused.",
    )
    probe: bool = option(
        True,
        "Generate a few dozen tokens at the end and report how many are accepted.",
        "--probe/--no-probe",
    )

    def __post_init__(self) -> None:
        if isinstance(self.lora, Mapping):
            pairs = tuple(f"{name}={path}" for name, path in self.lora.items())
            object.__setattr__(self, "lora", pairs)
        for name in ("draft_dtype", "draft_quantize", "draft_kv", "draft_assume", "lora"):
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, (given,))
        object.__setattr__(self, "dtype", parse_dtype(self.dtype, "--dtype"))
        drafts = tuple(parse_dtype(dtype, "--draft-dtype") for dtype in self.draft_dtype)
        object.__setattr__(self, "draft_dtype", drafts)
        found = SPELLINGS.get(self.kv_cache_dtype, self.kv_cache_dtype)
        object.__setattr__(self, "kv_cache_dtype", found)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"--kv-cache-dtype {self.kv_cache_dtype}",
                " or ".join(KV_CACHE_DTYPES),
                f"pass --kv-cache-dtype {' or '.join(QUANTIZED_ROWS)}, or leave it out: rows are"
                " then in the type of the model",
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
        self.kv_windows_of(len(self.draft_kv))
        check_ranges(self, as_flags=True)
        self._check_ranks()
        self._check_quantization()
        refuse(CompileRequest(self))

    @property
    def quantization(self) -> str | None:
        """How projections of the target are stored, see `layout_of`."""
        return layout_of(self.quantize, self.quantize_group)

    def _check_quantization(self) -> None:
        check_kind("--quantize", self.quantize)
        for kind in self.draft_quantize:
            check_kind("--draft-quantize", kind, is_draft=True)
        check_group(self.quantize_group)
        if self.activation_bits not in (None, *ACTIVATION_BITS):
            raise ConfigError(
                f"--activation-bits {self.activation_bits}",
                "8 or 16",
                "choose one of them, or leave it out: 24 bits in float32, 16 in bfloat16",
            )

    def _check_ranks(self) -> None:
        drafts, num_ranks = self.draft_tensor_parallel_size, self.tensor_parallel_size
        if self.draft_ranks > num_ranks:
            raise ConfigError(
                f"--draft-ranks {self.draft_ranks} and --tensor-parallel-size {num_ranks}",
                "as many ranks as draft, or more",
                f"pass --draft-ranks {num_ranks}, or a larger --tensor-parallel-size",
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
        return [self.dtype, *_for_each(self.draft_dtype, self.dtype, num_drafts, "dtype", "type")]

    def rounded_drafts(self, num_drafts: int) -> list[str | None]:
        """What each draft model is rounded to, as `draft_quantize` has it; None as `quantize` says.

        Raises:
            ConfigError: neither one format for all drafts nor one each.
        """
        if not self.draft_quantize:
            return [None] * num_drafts
        return [*_for_each(self.draft_quantize, "", num_drafts, "quantize", "format")]

    def kv_windows_of(self, num_drafts: int) -> list[KVWindow | None]:
        """Rows that the target and each draft model attend to; None is all of them.

        Raises:
            ConfigError: neither one window for all drafts nor one each.
        """
        # it needs torch, which a command's help does not wait for
        from specc.speculation.kv_window import FULL, KVWindow

        given = _for_each(self.draft_kv, FULL, num_drafts, "kv", "window")
        return [None, *map(KVWindow.parse, given)]

    def assumptions_of(self, num_drafts: int) -> tuple[str, ...]:
        """What is taken for each draft model, as `draft_assume` has it.

        Raises:
            ConfigError: neither one for all drafts nor one each.
        """
        return _for_each(self.draft_assume, "files", num_drafts, "assume", "assumption")


class CompileOptions(TypedDict, total=False):
    """Options of `CompileConfig` as `specc.compile` takes them."""

    dtype: str | torch.dtype
    draft_dtype: str | Sequence[str]
    draft_kv: str | Sequence[str]
    draft_assume: str | Sequence[str]
    quantize: str | None
    draft_quantize: str | Sequence[str]
    quantize_group: int | None
    weight_fragments: bool
    calibration: str | Path | None
    activation_bits: int | None
    weight_only: bool
    lora: Mapping[str, str | Path] | Sequence[str]
    max_batch_size: int
    max_seq_len: int | None
    rope_length: int | None
    block_size: int
    kv_cache_tokens: int | None
    kv_cache_dtype: str
    batch_invariant: bool
    mla_cache: str
    state_checkpoints: int | None
    state_grid: int | None
    prefill_chunk: int | None
    max_logits_mb: int
    backend: str | None
    compute_capability: str | None
    decomposable_attention: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    draft_tensor_parallel_size: int
    draft_ranks: int
    segments: bool
    allow_nonfinite_weights: bool
    probe: bool


def _for_each(
    given: tuple[str, ...], default: str, num_drafts: int, option: str, what: str
) -> tuple[str, ...]:
    """One for each draft model, of one for all, one each, or none."""
    if len(given) not in (0, 1, num_drafts) or (given and not num_drafts):
        raise ConfigError(
            f"{len(given)} times --draft-{option}, and {num_drafts} draft models",
            f"one {what} for all draft models, or one each in their order",
            f"repeat --draft-{option} as often as --draft with a model, or pass it once"
            if num_drafts
            else f"leave out --draft-{option}, or pass --draft with a model",
        )
    return given if len(given) > 1 else (given or (default,)) * num_drafts
