"""`specc compile`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli.app import Debug


def compile_(
    target: Annotated[
        str,
        typer.Option(
            "--target",
            help="Directory of the target model, or its hub id once it is downloaded.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The engine directory to make.", show_default=False),
    ],
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            metavar="DRAFT",
            help="What proposes tokens: a draft model; lookup:N, which repeats what followed the"
            " last N tokens earlier in the request; or suffix, which searches earlier outputs, too."
            " Repeat the option for several. Without it, the engine does not speculate.",
        ),
    ] = None,
    combine: Annotated[
        str | None,
        typer.Option(
            "--combine",
            help="How several drafts work together: merge verifies all proposals as one tree (the"
            " default), vote verifies the chain that most drafts agree on, best asks for each"
            " sequence the model or the lookup, whichever promises more.",
        ),
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            "--tree",
            metavar="W1,W2,…",
            help="Shape of the proposals: how many children each node of a level gets, or"
            " dynamic:NODES,CHILDREN,LEVELS for a tree that the draft chooses anew at every step."
            " Repeat the option for several plans; the first is the default.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            help="Propose a chain of this many tokens instead of a tree. The default is 4, and 8"
            " for lookups.",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="Type of weights and arithmetic: float32, bfloat16 (bf16), float16 (fp16, half;"
            " not for the backends cpu and eager), or auto, the type of the checkpoint.",
        ),
    ] = "float32",
    draft_dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--draft-dtype",
            help="The same for the draft models: once for all of them, or once for each. The"
            " default is the type of the target.",
        ),
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option("--max-batch-size", help="How many sequences can decode together.")
    ] = 8,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            "--max-seq-len",
            help="How many tokens a prompt and its output can have together. The default is what"
            " the models allow, at most 4096.",
        ),
    ] = None,
    block_size: Annotated[
        int,
        typer.Option(
            "--block-size",
            help="How many tokens a block of the KV cache holds; 0 makes one block for each"
            " sequence.",
        ),
    ] = 16,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            "--prefill-chunk",
            help="How many tokens of prompts one pass takes at most. The default is 2048 for cuda,"
            " where the memory of such a pass is no more than --max-logits-mb, and 512 for others.",
        ),
    ] = None,
    max_logits_mb: Annotated[
        int,
        typer.Option(
            "--max-logits-mb",
            help="How many MiB of logits a step may hold. Trees that need more are verified in"
            " tiles, which the rules mss and swor do not allow.",
        ),
    ] = 512,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            help="What will run the engine: cpu (code compiled for this machine), eager (compiles"
            " in seconds and runs several times slower), onnx (onnxruntime), tensorrt or cuda (both"
            " experimental). The default is cpu where there is a C++ compiler, else eager. Two"
            " more need a GPU and have run on none yet: aot-inductor, which is cuda with compiled"
            " code, after setting SPECC_EXPERIMENTAL=aot-inductor; and torch-tensorrt, which is"
            " tensorrt built by torch-tensorrt, after setting SPECC_EXPERIMENTAL=torch-tensorrt.",
        ),
    ] = None,
    compute_capability: Annotated[
        str | None,
        typer.Option(
            "--compute-capability",
            metavar="X.Y",
            help="Compute capability of the GPU that a TensorRT engine is for, such as 8.9. The"
            " default is every GPU that TensorRT-RTX builds for, or the one that TensorRT finds.",
        ),
    ] = None,
    decomposable_attention: Annotated[
        bool,
        typer.Option(
            "--decomposable-attention",
            help="Let TensorRT compute attention by several kernels where it has no fused one, as"
            " for float32.",
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
        typer.Option(
            "--dump-graphs",
            help="Write the graph of each model after each phase into this directory.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="Generate a few dozen tokens at the end and report how many are accepted.",
        ),
    ] = True,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the engine at --output, if there is one.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="List what every pass did; specc inspect does, too."),
    ] = False,
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
    from specc.cli.compile import run_compile
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
        verbose=verbose,
    )
