"""`specc compile` and `specc reshard`: progress while they run, a summary at the end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from specc.artifact.backends import facts_of
from specc.cli import render, render_plans, render_states
from specc.cli.progress import make_listener
from specc.speculation.choose_plans import parse_tree

if TYPE_CHECKING:
    from specc.artifact.manifest import Manifest
    from specc.cli.options.drafts import DraftOptions
    from specc.compiler.build import Compilation
    from specc.config import CompileConfig


def run_compile(
    target: str,
    drafts: DraftOptions,
    output: Path,
    config: CompileConfig,
    *,
    dump_graphs: Path | None,
    force: bool,
    verbose: bool = False,
) -> None:
    """Compile, with progress on standard error and a summary on standard output.

    Raises:
        SpeccError: found / needed / do; nothing is left behind.
    """
    trees = [parse_tree(text) for text in drafts.trees]
    with make_listener() as listen:
        from specc.api import compile_with, with_drafts

        models, config = with_drafts(
            config,
            drafts.drafts,
            trees,
            drafts.num_speculative_tokens,
            drafts.combine,
            drafts.speculative_config,
        )
        compilation = compile_with(
            target, models, output, config, force=force, dump_graphs=dump_graphs, listen=listen
        )
    print_summary(compilation, output, verbose)


def run_reshard(
    engine: Path,
    output: Path,
    num_ranks: int,
    num_stages: int | None,
    *,
    force: bool,
    probe: bool,
    verbose: bool,
) -> None:
    """Make an engine of another number of ranks, with progress and summary as of a compilation.

    Raises:
        SpeccError: found / needed / do; nothing is left behind.
    """
    with make_listener() as listen:
        from specc.api import reshard

        compilation = reshard(
            engine,
            output,
            num_ranks,
            pipeline_parallel_size=num_stages,
            force=force,
            probe=probe,
            listen=listen,
        )
    print_summary(compilation, output, verbose)


def print_summary(compilation: Compilation, output: Path, verbose: bool = False) -> None:
    """What was built, what it needs, what to be careful about, and how to go on.

    Args:
        verbose: one line for every pass and model, too.
    """
    manifest = compilation.manifest
    passes = [record.to_json() for record in compilation.records]
    console = render.make_console()
    console.print(render.heading(f"\n{output}"))
    console.print(render.models_table(manifest))
    for line in render.source_lines(manifest):
        console.print(line, soft_wrap=True)
    console.print()
    if verbose:
        console.print(render.passes_table(passes))
        console.print()
    for line in render.rewrite_lines(passes):
        console.print(line, soft_wrap=True)
    console.print()
    console.print(render.memory_table(manifest))
    limits = manifest.limits
    console.print(
        f"for {limits.max_batch_size} sequences of {limits.max_seq_len} tokens, {manifest.dtype}"
        f"{render.cache_room(manifest)}\n",
        soft_wrap=True,
    )
    for line in render_states.state_lines(manifest):
        console.print(line, soft_wrap=True)
    for plan in manifest.plans:
        default = ", the default" if plan.name == manifest.default_plan else ""
        console.print(f"plan {plan.name}{default}: {render_plans.describe_plan(plan.plan)}")
    if manifest.policy == "measured" and manifest.default_plan != "off":
        console.print("it runs where it is faster than off, unless --plan says otherwise")
    if manifest.policy == "best":
        console.print("every sequence takes the model or the lookup, whichever promises more")
    if manifest.probe:
        console.print(f"probe: {render.probe_line(manifest.probe)}")
    console.print(f"time: {sum(compilation.seconds.values()):.1f} s")
    for warning in compilation.warnings:
        render.make_console(stderr=True).print(
            f"warning: {warning}", style="yellow", soft_wrap=True
        )
    console.print(f"\nnext: {next_step(manifest, output, has_gpu())}", soft_wrap=True)


def next_step(manifest: Manifest, output: Path, has_gpu: bool) -> str:
    """A command that works on this machine, or on which machine it will.

    Args:
        has_gpu: torch sees a GPU here.
    """
    engine = shlex.quote(str(output))
    if not manifest.tokenizer.file:
        return f"specc inspect {engine}"
    run = f'specc run {engine} "def fibonacci(n):" --stats'
    if manifest.device == "cuda" and not has_gpu:
        return f"copy {engine} to a machine with an NVIDIA GPU, and there: {run}"
    unrun = facts_of(manifest.backend).unrun_dtypes
    if any(model.dtype in unrun for model in manifest.models):
        return f"{run} --backend eager"
    return run


def has_gpu() -> bool:
    """Whether torch can use a GPU here."""
    import torch

    return torch.cuda.is_available()
