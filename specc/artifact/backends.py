"""What is known of a backend without loading it: facts that compiler and runtime share.

What a backend does is said elsewhere: how it is compiled in `specc/compiler/backends/`, how it is
loaded and run in `runtime/backends/`. Both are found by the name that is written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specc.artifact.kv_rows import INT8, QUANTIZED_ROWS
from specc.close_name import advice
from specc.errors import ConfigError

# of the integers that rows become, where they are fewer than the type of the rows asks for
ACTIVATION_BITS = (8, 16)
Attention = Literal["native", "parts", "split", "whole"]
NATIVE: Attention = "native"
PARTS: Attention = "parts"
SPLIT: Attention = "split"
WHOLE: Attention = "whole"


@dataclass(frozen=True)
class BackendFacts:
    """What a backend can do.

    Args:
        name: as `--backend` and `specc.json` have it.
        dtypes: arithmetic and weight types that it is compiled for.
        device: `cpu` or `cuda`, where its caches and programs are.
        passes: `flat` programs take tokens [Nt] of any requests; `padded` ones take
            [batch, nodes] and need dense caches.
        is_captured: a step is replayed as a whole, so that steps are queued ahead.
        shares_pass: prompt chunks and the trees of all plans are one pass of the target.
        scores_prompts: a pass may give logits of every token, not only of as many as there are
            requests.
        is_data: its engines hold nothing that depends on a processor or on a version of torch.
        model_files: fields of `ModelEntry` that name the files of a model beside its program and
            weights.
        by_default: chosen where the user names none; others have to be asked for, or say of the
            machine whether they are (`CompilerBackend.is_default`).
        unrun_dtypes: those of `dtypes` that its runtime does not compute in: such an engine's files
            are for other readers.
        takes_views: self-drafts run: caches are in blocks, and programs take block tables of any
            width.
        fills_blocks: block drafters run: rows of a pass may see rows after them.
        attention: what it keeps of the scores of a pass: `native` tiles, one for each thread,
            `parts` sums of parts of long contexts, `split` the scores of as many rows as a limit
            allows, `whole` all.
        runs_all: it runs the graphs that every engine has, whichever backend the engine is for.
        takes_ranks: several processes may run an engine together, each with a part of the target.
        voting_dims: type → largest heads whose queries can vote on blocks in it, where there is a
            limit.
        kv_rows: as what its caches may hold K and V besides the type of the model, of `int8` and
            `fp8`.
        offloads_weights: what its programs may run without in memory: `segments` are read from
            files, pass by pass, and single `weights` copied from the host to a GPU.
        holds_weights: its programs read weights from memory of their own, or from mapped files,
            as `mmap` says.
        attention_extras: what its attention computes besides masked products of keys and values of
            one width: `sinks`, `softcap`, `slopes`, `chunks`, `value width`, and `latent`, where
            values are the first columns of keys, and caches hold them once; `quantized latent`,
            where values have rows of their own, each with a scale.
        quantized: kinds of quantized weights that its programs read, of `int8`, `int4`, `fp8`,
            `mxfp4`, `nvfp4` and `ggml`, blocks of GGUF files.
        quantized_extras: what such weights may have there: `zero points` of their own, and `short
            groups`, where columns are no multiple of what shares a scale.
        quantizes_experts: products of the experts of mixtures read quantized weights, too.
        looks_up_quantized: so do lookups of tokens; else embeddings are held in the engine's type.
        cuts_quantized: several ranks may have parts of a quantized weight.
        takes_activation_bits: rows become integers before quantized weights multiply them, of as
            many bits as an engine asks for.
        options: of `specc compile` that its compiler takes, and not that of every backend; see
            `specc.compile_request.BACKEND_OPTIONS`.
        overlaps: a captured step may draft for one half of its sequences while it verifies the
            other's.
        decoded_bytes: of a quantized weight, how much of it a pass of many tokens has as floats at
            a time; 0 where products read integers at any number of rows.
        most_latent: columns of a latent that its attention takes, and of what heads share beside
            it; None is any.
        keeps_states: layers may keep states (convolutions and recurrences over tokens).
        drafts_keep_states: those of a draft model, too.
        expands_prompts: a pass with many tokens of a sequence may attend to what latents expand to.
    """

    name: str
    dtypes: tuple[str, ...]
    device: Literal["cpu", "cuda"]
    passes: Literal["flat", "padded"]
    is_captured: bool = False
    shares_pass: bool = False
    scores_prompts: bool = True
    is_data: bool = False
    model_files: tuple[str, ...] = ()
    by_default: bool = False
    unrun_dtypes: tuple[str, ...] = ()
    takes_views: bool = False
    fills_blocks: bool = False
    attention: Attention = WHOLE
    runs_all: bool = False
    takes_ranks: bool = False
    voting_dims: tuple[tuple[str, int], ...] = ()
    kv_rows: tuple[str, ...] = ()
    offloads_weights: Literal["", "segments", "weights"] = ""
    holds_weights: bool = False
    attention_extras: tuple[str, ...] = ()
    quantized: tuple[str, ...] = ()
    quantized_extras: tuple[str, ...] = ()
    quantizes_experts: bool = False
    looks_up_quantized: bool = False
    cuts_quantized: bool = False
    takes_activation_bits: bool = False
    options: tuple[str, ...] = ()
    overlaps: bool = False
    decoded_bytes: int = 0
    most_latent: tuple[int, int] | None = None
    expands_prompts: bool = True
    keeps_states: bool = False
    drafts_keep_states: bool = False

    def most_voting_dim(self, dtype: str) -> int | None:
        """Largest heads whose queries can vote on blocks in this type; None is any."""
        return dict(self.voting_dims).get(dtype)

    @property
    def is_padded(self) -> bool:
        """Its programs take [batch, nodes] tokens."""
        return self.passes == "padded"

    @property
    def captures_live(self) -> bool:
        """How many nodes of each request a captured step verifies can be data."""
        return self.is_captured and not self.is_padded

    @property
    def has_files_of_ranks(self) -> bool:
        """Files of a model name places in its weights: each rank of a cut one has its own."""
        return self.is_padded

    @property
    def has_plan_files(self) -> bool:
        """Its models are TensorRT engines, which TensorRT calls plans."""
        return "plan_file" in self.model_files

    @property
    def is_on_gpu(self) -> bool:
        """Its caches and programs are in a GPU's memory."""
        return self.device == "cuda"


_TWO_DTYPES = ("float32", "bfloat16")
VALUE_WIDTH, LATENT_ROWS, QUANTIZED_LATENT = "value width", "latent", "quantized latent"
_EXTRAS = ("sinks", "softcap", "slopes", "chunks", VALUE_WIDTH, LATENT_ROWS)
GGML = "ggml"
_QUANTIZED = ("int8", "int4", "fp8", "mxfp4", "nvfp4")
ZERO_POINTS, SHORT_GROUPS = "zero points", "short groups"
_QUANTIZED_EXTRAS = (ZERO_POINTS, SHORT_GROUPS)
_DTYPES = (*_TWO_DTYPES, "float16")
_RANKS = ("tensor_parallel_size", "draft_tensor_parallel_size")
_ROUNDS = ("quantize", "draft_quantize")
_ON_CPU = (
    *_RANKS, *_ROUNDS, "draft_ranks", "segments", "kv_cache_dtype", "pipeline_parallel_size",
    "activation_bits", "lora",
)  # fmt: skip
_known: dict[str, BackendFacts] = {}


def register(facts: BackendFacts) -> BackendFacts:
    """Make a backend known by its name.

    Raises:
        ConfigError: the name is taken.
    """
    if facts.name in _known:
        raise ConfigError(f"a second backend {facts.name}", "a name of its own", "rename it")
    _known[facts.name] = facts
    return facts


def facts_of(name: str) -> BackendFacts:
    """Facts of a known backend.

    Raises:
        ConfigError: no backend has this name.
    """
    if name not in _known:
        do = advice(name, _known, "choose one of them")
        raise ConfigError(f"backend {name!r}", f"one of {', '.join(_known)}", do)
    return _known[name]


def backend_names() -> tuple[str, ...]:
    """Names of all known backends, in the order in which messages list them."""
    return tuple(sorted(_known))


register(
    BackendFacts(
        "cpu", _TWO_DTYPES, "cpu", "flat", shares_pass=True, is_data=True,
        by_default=True, takes_views=True, fills_blocks=True,
        takes_ranks=True,
        attention=NATIVE, kv_rows=(INT8,),
        offloads_weights="segments", holds_weights=True,
        attention_extras=(*_EXTRAS, QUANTIZED_LATENT), quantized=(*_QUANTIZED, GGML),
        quantized_extras=_QUANTIZED_EXTRAS, quantizes_experts=True, looks_up_quantized=True,
        cuts_quantized=True, takes_activation_bits=True, options=(*_ON_CPU, "batch_invariant"),
        keeps_states=True, drafts_keep_states=True,
    )
)  # fmt: skip
register(
    BackendFacts(
        "cuda", _DTYPES, "cuda", "flat", is_captured=True, takes_views=True, fills_blocks=True,
        takes_ranks=True, attention=PARTS,
        voting_dims=(("float32", 128), ("bfloat16", 256), ("float16", 256)),
        offloads_weights="weights", quantized=_QUANTIZED, quantized_extras=_QUANTIZED_EXTRAS,
        quantizes_experts=True, overlaps=True, decoded_bytes=64 << 20, keeps_states=True,
        kv_rows=QUANTIZED_ROWS, attention_extras=_EXTRAS, most_latent=(512, 64),
        expands_prompts=False,
        options=(
            *_RANKS, *_ROUNDS, "draft_ranks", "kv_cache_dtype", "pipeline_parallel_size",
            "weight_fragments", "batch_invariant",
        ),
    )
)  # fmt: skip
register(
    BackendFacts(
        "eager", _TWO_DTYPES, "cpu", "flat", shares_pass=True, is_data=True,
        by_default=True, takes_views=True, fills_blocks=True, runs_all=True, takes_ranks=True,
        attention=SPLIT, kv_rows=QUANTIZED_ROWS, attention_extras=(*_EXTRAS, QUANTIZED_LATENT),
        quantized=(*_QUANTIZED, GGML),
        quantized_extras=_QUANTIZED_EXTRAS, quantizes_experts=True, looks_up_quantized=True,
        cuts_quantized=True, takes_activation_bits=True, options=_ON_CPU, keeps_states=True,
        drafts_keep_states=True,
    )
)  # fmt: skip
register(
    BackendFacts(
        "onnx", _DTYPES, "cpu", "padded", model_files=("onnx_file",),
        unrun_dtypes=("bfloat16",), quantized=("int8", "int4"), quantized_extras=_QUANTIZED_EXTRAS,
        attention_extras=("softcap", "slopes", "chunks", LATENT_ROWS), options=(*_RANKS, *_ROUNDS),
    )
)  # fmt: skip
register(
    BackendFacts(
        "tensorrt", _DTYPES, "cuda", "padded", is_captured=True, scores_prompts=False,
        model_files=("onnx_file", "plan_file", "build_file"), quantized=("int8", "int4", "fp8"),
        attention_extras=("chunks",),
        options=("compute_capability", "decomposable_attention", *_RANKS, *_ROUNDS),
    )
)  # fmt: skip
