"""`specc compile`: options to a configuration, progress while it runs, a summary at the end."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specc import cli_render as render
from specc.cli_progress import make_listener
from specc.config import CompileConfig, SpecPlan
from specc.errors import ConfigError, TreeError

if TYPE_CHECKING:
    from specc.compiler import Compilation


def run_compile(
    target: str,
    draft: str | None,
    output: Path,
    make_config: Callable[[tuple[SpecPlan, ...]], CompileConfig],
    *,
    trees: Sequence[str],
    num_speculative_tokens: int | None,
    dump_graphs: Path | None,
    force: bool,
) -> None:
    """Compile, with progress on standard error and a summary on standard output.

    Raises:
        SpeccError: found / needed / do; nothing is left behind.
    """
    config = make_config(parse_plans(trees, num_speculative_tokens))
    with make_listener() as listen:
        from specc.api import compile_with

        compilation = compile_with(
            target, draft, output, config, force=force, dump_graphs=dump_graphs, listen=listen
        )
    print_summary(compilation, output)


def parse_plans(trees: Sequence[str], num_speculative_tokens: int | None) -> tuple[SpecPlan, ...]:
    """Plans that the options name; empty where they name none.

    Args:
        trees: such as `3,2,1`.
        num_speculative_tokens: length of a chain, instead of trees.
    Raises:
        TreeError: no list of positive widths.
        ConfigError: both kinds of options.
    """
    from specc.api import plans_of

    if not trees:
        return plans_of(None, num_speculative_tokens)
    if num_speculative_tokens is not None:
        raise ConfigError(
            f"both --tree {trees[0]} and --num-speculative-tokens {num_speculative_tokens}",
            "one of them",
            "write the chain as a tree, too: --tree 1,1,1,1 is a chain of 4",
        )
    return tuple(plan for text in trees for plan in plans_of(_parse_widths(text), None))


def _parse_widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError as error:
        raise TreeError(
            f"--tree {text}", "widths separated by commas", "for example --tree 3,2,1"
        ) from error


def print_summary(compilation: Compilation, output: Path) -> None:
    """What was built, what it needs, what to be careful about, and how to go on."""
    manifest = compilation.manifest
    console = render.make_console()
    console.print(render.heading(f"\n{output}"))
    console.print(render.models_table(manifest))
    for line in render.source_lines(manifest):
        console.print(line, soft_wrap=True)
    console.print()
    console.print(render.passes_table([record.to_json() for record in compilation.records]))
    console.print()
    console.print(render.memory_table(manifest))
    limits = manifest.limits
    console.print(
        f"for {limits.max_batch_size} sequences of {limits.max_seq_len} tokens, {manifest.dtype}\n"
    )
    for plan in manifest.plans:
        default = ", the default" if plan.name == manifest.default_plan else ""
        console.print(f"plan {plan.name}{default}: {render.describe_plan(plan.widths)}")
    if manifest.probe:
        console.print(f"probe: {render.probe_line(manifest.probe)}")
    console.print(f"time: {sum(compilation.seconds.values()):.1f} s")
    for warning in compilation.warnings:
        render.make_console(stderr=True).print(f"warning: {warning}", style="yellow")
    prompt = '"def fibonacci(n):" ' if manifest.tokenizer.file else ""
    command = f"specc run {shlex.quote(str(output))} {prompt}--stats"
    if not prompt:
        command = f"specc inspect {shlex.quote(str(output))}"
    console.print(f"\nnext: {command}", soft_wrap=True)
