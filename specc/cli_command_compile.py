"""`specc compile`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli_app import Debug


def compile_(
    target: Annotated[
        str,
        typer.Option(
            "--target", help="Directory or cached hub id of the target.", show_default=False
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Engine directory to make.", show_default=False)
    ],
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            metavar="DRAFT",
            help="Draft model, lookup:N (what followed the last N tokens before, in the request),"
            " or suffix (in earlier outputs, too); repeatable. Without one, no speculation.",
        ),
    ] = None,
    combine: Annotated[
        str | None,
        typer.Option(
            "--combine",
            help="Of several drafts: merge (all proposals as one tree), vote (the chain of the"
            " majority), best (a model or a lookup, for each sequence); else merge.",
        ),
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            "--tree",
            metavar="W1,W2,…",
            help="Children per node and level, or dynamic:NODES,CHILDREN,LEVELS, chosen anew at"
            " every step; repeat it for several plans, the default first.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            help="Chain of this length instead of a tree; else 4, of lookups 8.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, bfloat16, or float16 (not for --backend cpu).")
    ] = "float32",
    draft_dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--draft-dtype",
            help="Of all draft models; or repeat it, once for each; else that of --dtype.",
        ),
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option("--max-batch-size", help="Sequences that decode together.")
    ] = 8,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            "--max-seq-len",
            help="Tokens of prompt and output; else what the models allow, at most 4096.",
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option("--block-size", help="Rows of a KV cache block; 0 is dense.")
    ] = 16,
    prefill_chunk: Annotated[
        int, typer.Option("--prefill-chunk", help="Prompt tokens of one pass.")
    ] = 512,
    max_logits_mb: Annotated[
        int,
        typer.Option(
            "--max-logits-mb",
            help="MiB of logits that a step may hold; trees that need more are verified in tiles,"
            " which the rules mss and swor do not allow.",
        ),
    ] = 512,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            help="cpu (compiled for this machine), eager, onnx (for onnxruntime), tensorrt, or cuda"
            " (both experimental); else cpu where there is a compiler. aot-inductor, cuda with"
            " compiled code, has run on no GPU yet: it needs one, and"
            " SPECC_EXPERIMENTAL=aot-inductor; torch-tensorrt, tensorrt built by torch-tensorrt,"
            " likewise, and SPECC_EXPERIMENTAL=torch-tensorrt.",
        ),
    ] = None,
    compute_capability: Annotated[
        str | None,
        typer.Option(
            "--compute-capability",
            metavar="X.Y",
            help="Of the GPU that TensorRT engines are for, such as 8.9; else all that TensorRT-RTX"
            " builds for, or the one that TensorRT finds.",
        ),
    ] = None,
    decomposable_attention: Annotated[
        bool,
        typer.Option(
            "--decomposable-attention",
            help="Let TensorRT take attention apart where it has no fused kernel, as of float32.",
        ),
    ] = False,
    allow_nonfinite_weights: Annotated[
        bool,
        typer.Option(
            "--allow-nonfinite-weights",
            help="Compile weights that are NaN or infinite, or too large for --dtype; without it"
            " they are refused.",
        ),
    ] = False,
    dump_graphs: Annotated[
        Path | None,
        typer.Option("--dump-graphs", help="Directory for the graphs after each phase."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Measure acceptance at the end.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing engine.")] = False,
    debug: Debug = False,
) -> None:
    """Compile a target and a draft into an engine directory.

    \b
    Examples:
      specc compile --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B -o engine/
      specc compile --target T/ --draft D/ --num-speculative-tokens 4 -o engine/
      specc compile --target T/ --draft D/ --tree 3,2,1 --tree 2,2,1,1 -o engine/
      specc compile --target T/ --draft D/ --dtype bfloat16 --max-seq-len 2048 -o engine/
      specc compile --target T/ --draft D/ --dtype float32 --draft-dtype bfloat16 -o engine/
      specc compile --target T/ --draft D1/ --draft D2/ --combine merge --tree 2,1,1 -o engine/
      specc compile --target T/ --draft D/ --draft suffix --combine best -o engine/
      specc compile --target T/ --draft lookup:3 -o engine/
      specc compile --target T/ --draft D/ --backend onnx -o engine/
      specc compile --target T/ --draft D/ --backend tensorrt --dtype float16 \
        --compute-capability 8.9 -o engine/
      specc compile --target T/ -o plain-engine/
    """  # noqa: D301
    from specc.cli_compile import run_compile
    from specc.config import CompileConfig

    run_compile(
        target,
        draft or [],
        output,
        lambda plans, policy: CompileConfig(
            plans=plans,
            policy=policy,
            dtype=dtype,
            draft_dtypes=tuple(draft_dtype or ()),
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            block_size=block_size,
            prefill_chunk=prefill_chunk,
            max_logits_mb=max_logits_mb,
            backend=backend,
            probe=probe,
            compute_capability=compute_capability,
            decomposable_attention=decomposable_attention,
            allow_nonfinite_weights=allow_nonfinite_weights,
        ),
        trees=tree or [],
        num_speculative_tokens=num_speculative_tokens,
        combine=combine,
        dump_graphs=dump_graphs,
        force=force,
    )
