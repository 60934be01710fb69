"""`specc.compile` and `specc.reshard`, with the probe that the command line runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.compiler.build import Compilation, build
from specc.compiler.candidate import ModelLike
from specc.compiler.reshard import reshard_engine
from specc.config import DEFAULT_MAX_LOGITS_MB, CompileConfig
from specc.progress import ProgressEvent
from specc.speculation.choose_plans import Tree, choose_plans, policy_of, split_drafts
from specc.speculation.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

_PROBE_PROMPTS = (
    "def read_file(path):\n    ",
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "import os\nimport sys\n\n\nclass ",
)
_PROBE_TOKENS = 16
# below this share of accepted first draft tokens, a pair hardly belongs together
_LOW_ACCEPTANCE = 0.05


def compile(
    target: str | Path | nn.Module,
    draft: ModelLike | Sequence[ModelLike] | None = None,
    output: str | Path = "engine",
    *,
    tree: Tree | None = None,
    num_speculative_tokens: int | None = None,
    combine: str | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype = "float32",
    draft_dtype: str | Sequence[str] = (),
    max_batch_size: int = 8,
    max_seq_len: int | None = None,
    rope_length: int | None = None,
    block_size: int = 16,
    kv_cache_tokens: int | None = None,
    prefill_chunk: int | None = None,
    max_logits_mb: int = DEFAULT_MAX_LOGITS_MB,
    tokenizer: str | Path | None = None,
    force: bool = False,
    dump_graphs: str | Path | None = None,
    backend: str | None = None,
    compute_capability: str | None = None,
    decomposable_attention: bool = False,
    probe: bool = True,
    allow_nonfinite_weights: bool = False,
    tensor_parallel_size: int = 1,
    draft_tensor_parallel_size: int = 1,
    draft_ranks: int = 1,
    pipeline_parallel_size: int = 1,
    segments: bool = False,
    draft_kv: str | Sequence[str] = (),
    draft_assume: str | Sequence[str] = (),
    quantize: str | None = None,
    quantize_group: int | None = None,
    activation_bits: int | None = None,
    weight_only: bool = False,
    kv_cache_dtype: str = "auto",
    mla_cache: str = "auto",
    listen: Callable[[ProgressEvent], None] = lambda event: None,
) -> Compilation:
    """Compile a target and a draft into an engine directory.

        specc.compile("target/", "draft/", "engine/", num_speculative_tokens=4)

    Args:
        target: Hugging Face directory or id, or a module (input_ids, position_ids) → logits.
        draft: likewise, best of the target's tokens; or `self:window=W,sink=S`, the target over
            the last W and the first S rows of its own cache, with `blocks=B` also over the blocks
            of B rows that it attended to most; or `lookup:N`, which proposes what followed the last
            tokens (at most N of them are compared) when they came before in the request; or
            `suffix`, which looks in earlier outputs, too; or `mtp`, the MTP module in the target's
            own checkpoint; or a list of these. None
            decodes plainly.
        output: engine directory to make.
        tree: children per frontier node and level, e.g. (3, 2, 1); a `TokenTree`; or a
            `DynamicTree`, whose nodes the draft chooses anew at every step.
        num_speculative_tokens: length of a chain; instead of `tree`. Where neither is given, 4,
            and 8 where tokens are looked up.
        combine: of several drafts: `merge` verifies all that they propose as one tree, `vote` the
            chain that most of them agree on, `best` asks for every sequence the model or the
            lookup, whichever promises more. None is merge.
        speculative_config: all of this as vLLM has it, {"method": …, "model": …,
            "num_speculative_tokens": …}; instead of draft, tree, num_speculative_tokens, combine.
        dtype: of the target: float32, bfloat16, for other backends than cpu and eager float16, or
            `auto`, that of the checkpoint.
        draft_dtype: of the draft models: one for all or one for each; none is the target's.
        max_batch_size: sequences that decode together.
        max_seq_len: tokens of prompt and output together.
        rope_length: rotary frequencies of this length at every position, for models whose scaling
            (dynamic, longrope) depends on length and an engine that is longer than they allow.
        block_size: rows of a KV cache block; 0 is dense.
        kv_cache_tokens: rows of the cache, for all sequences together; None is the worst case.
        prefill_chunk: tokens of one prefill pass; None is 2048 for cuda and 512 for others.
        max_logits_mb: MiB of logits that a step may hold at a time; trees that need more are
            verified in tiles.
        tokenizer: directory or tokenizer.json, where the target is a module.
        force: replace an existing engine.
        dump_graphs: directory that gets each program's graph after each phase.
        backend: `cpu`, code compiled for this machine; `eager`, torch operator by operator; `cuda`,
            `onnx` or `tensorrt`; None is cuda where a GPU of compute capability 9.0 and Triton
            are, else cpu where there is a C++ compiler, else eager.
        compute_capability: of the GPU that TensorRT engines are for, `8.9`; None is every GPU that
            the builder supports, or the one that it finds.
        decomposable_attention: let TensorRT take attention apart where it has no fused kernel.
        probe: generate a few dozen tokens at the end and report acceptance.
        allow_nonfinite_weights: compile weights that are NaN or infinite, or become so in `dtype`;
            otherwise they are refused.
        tensor_parallel_size: ranks that share the target, each with a weight file of its own.
        draft_tensor_parallel_size: ranks that share each draft model: as many as the target has, or
            1, rank 0 alone.
        draft_ranks: ranks that the draft models are spread over, in turn; several draft at once.
        pipeline_parallel_size: stages of the target, each with some of its layers and
            `tensor_parallel_size` ranks of its own.
        segments: compile the target layer by layer, one program for each kind of layer: what
            offloading its weights takes.
        draft_kv: rows of their caches that draft models attend to, `window=512,sink=4` or `full`,
            once for all of them or once for each; a draft with a window may have fewer positions
            than max_seq_len.
        draft_assume: what to take for what files of heads and block drafters leave open,
            `tap_convention=entering,is_last_normed=true`, or `files`, once for all of them or once
            for each draft; see `specc compile --help`.
        quantize: `int8`, `int4` or `fp8`: how weights of projections are rounded, of all models but
            drafts that read hidden states; None keeps them in `dtype`.
        quantize_group: columns that share a scale, with int4 and int8: 32, 64 or 128; None is 64,
            with int8 all of an output.
        activation_bits: of the integers that rows become before weights in int8 or int4 multiply
            them, 8 or 16; None is 24 in float32 and 16 in bfloat16. Of the backends cpu and eager.
        weight_only: of checkpoints whose activations are quantized, too, take the weights and leave
            activations as they are; otherwise they are refused.
        kv_cache_dtype: `auto`, rows of K and V in the type of the model, or `int8`, with a scale
            for each token and KV head; of the backends cpu and eager.
        mla_cache: of layers with multi-head latent attention: `latent`, the latent and the shared
            part of keys, once for all heads; `expanded`, keys and values of each head; `auto`, the
            latent where the backend computes it (cpu, cuda, eager, onnx) and that takes fewer bytes
            or, on cuda and onnx, keys and values have two widths. On cuda layers of one width stay
            expanded where a self-draft chooses blocks and latents are too wide to vote on them.
        listen: called as phases begin, advance and end.
    Returns:
        the manifest, what each pass did, and warnings.
    Raises:
        SpeccError: found / needed / do; nothing is left behind.
    """
    trees = [tree] if tree is not None else []
    if speculative_config is not None:
        wanted = SpeculativeConfig.read(speculative_config)
        wanted.check_alone(
            draft=draft, tree=trees, num_speculative_tokens=num_speculative_tokens, combine=combine
        )
        draft, trees = wanted.draft, [*wanted.trees]
        num_speculative_tokens = wanted.num_speculative_tokens
        draft_tensor_parallel_size = wanted.num_draft_ranks(draft_tensor_parallel_size)
    models, sources = split_drafts(draft)
    chosen = choose_plans(trees, num_speculative_tokens, sources, combine)
    config = CompileConfig(
        plans=chosen,
        policy=policy_of(combine),
        dtype=str(dtype).removeprefix("torch."),
        draft_dtypes=(draft_dtype,) if isinstance(draft_dtype, str) else tuple(draft_dtype),
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        rope_length=rope_length,
        block_size=block_size,
        kv_cache_tokens=kv_cache_tokens,
        prefill_chunk=prefill_chunk,
        max_logits_mb=max_logits_mb,
        backend=backend,
        compute_capability=compute_capability,
        decomposable_attention=decomposable_attention,
        probe=probe,
        allow_nonfinite_weights=allow_nonfinite_weights,
        tensor_parallel_size=tensor_parallel_size,
        draft_tensor_parallel_size=draft_tensor_parallel_size,
        draft_ranks=draft_ranks,
        pipeline_parallel_size=pipeline_parallel_size,
        segments=segments,
        kv_cache_dtype=kv_cache_dtype,
        mla_cache=mla_cache,
        draft_kv=(draft_kv,) if isinstance(draft_kv, str) else tuple(draft_kv),
        draft_assume=(draft_assume,) if isinstance(draft_assume, str) else tuple(draft_assume),
        quantize=quantize,
        quantize_group=quantize_group,
        activation_bits=activation_bits,
        weight_only=weight_only,
    )
    return compile_with(
        target,
        models,
        output,
        config,
        tokenizer=tokenizer,
        force=force,
        dump_graphs=Path(dump_graphs) if dump_graphs else None,
        listen=listen,
    )


def reshard(
    engine: str | Path,
    output: str | Path,
    tensor_parallel_size: int,
    *,
    pipeline_parallel_size: int | None = None,
    force: bool = False,
    probe: bool = True,
    listen: Callable[[ProgressEvent], None] = lambda event: None,
) -> Compilation:
    """Make an engine for another number of ranks out of an engine, without its checkpoint.

        specc.reshard("engine/", "engine-4/", 4)

    Args:
        engine: directory of the engine that there is, with the files of all of its ranks.
        output: engine directory to make.
        tensor_parallel_size: ranks that share the target of the new engine; 1 makes it whole.
        pipeline_parallel_size: its stages; None is as many as the engine has.
        force: replace an existing engine.
        probe: generate a few dozen tokens at the end and report acceptance.
        listen: called as phases begin, advance and end.
    Returns:
        the manifest, what each pass did, and warnings.
    Raises:
        SpeccError: found / needed / do; nothing is left behind.
    """
    return reshard_engine(
        engine,
        output,
        tensor_parallel_size,
        num_stages=pipeline_parallel_size,
        force=force,
        probe=probe_engine if probe else None,
        listen=listen,
    )


def compile_with(
    target: str | Path | nn.Module,
    drafts: Sequence[ModelLike],
    output: str | Path,
    config: CompileConfig,
    **options: Any,
) -> Compilation:
    """`build` with the probe; adds a warning where the pair hardly accepts anything."""
    compilation = build(target, drafts, output, config, probe=probe_engine, **options)
    result = compilation.manifest.probe
    if drafts and result and result["num_spec_steps"]:
        first = (result["accepted_per_depth"] or [0.0])[0]
        if first < _LOW_ACCEPTANCE:
            compilation.warnings.append(
                f"the target accepted {first:.0%} of the draft's first tokens in the probe: is"
                " this the right pair? Output stays correct, but speculation only costs time"
            )
    return compilation


def probe_engine(directory: Path) -> dict[str, Any]:
    """Generate a few dozen tokens on built-in prompts; returns acceptance figures."""
    from specc.runtime.backends.capture_limits import CaptureLimits
    from specc.runtime.engine import Engine
    from specc.runtime.llm import LLM
    from specc.sampling.generation_config import NONE
    from specc.sampling.params import SamplingParams

    # a GPU captures only what these prompts run; who compiles for ranks may have few cores
    engine = Engine.load(directory, verify=False, capture=CaptureLimits.lazy(), oversubscribes=True)
    llm = LLM(engine, generation_config=NONE)
    room = llm.engine.max_seq_len // 2
    tokenizer = llm.tokenizer
    assert tokenizer is not None, "build probes engines with a tokenizer only"
    prompts = [ids for text in _PROBE_PROMPTS if (ids := tokenizer.encode(text).ids[:room])]
    params = SamplingParams(temperature=0, max_tokens=min(_PROBE_TOKENS, room), ignore_eos=True)
    outputs = llm.generate(prompts, params)
    stats = llm.get_metrics()
    return {
        "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "num_spec_steps": stats.num_spec_steps,
        "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "accepted_per_depth": [round(share, 4) for share in stats.accepted_per_depth],
    }
