"""The command `specc`. What a subcommand needs is imported inside it, so that --help is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from specc.cli.app import Debug, EngineArgument, Json, add_command, app, print_version
from specc.cli.commands.bench import bench, bench_serve
from specc.cli.commands.chat import chat
from specc.cli.commands.compare import compare
from specc.cli.commands.compile import compile_
from specc.cli.commands.draft_weights import draft_weights
from specc.cli.commands.fit_draft import fit_draft
from specc.cli.commands.reshard import reshard
from specc.cli.commands.run import run
from specc.cli.commands.serve import serve
from specc.cli.commands.triton import triton
from specc.cli.commands.tune import tune


@app.callback()
def _specc(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version of specc."
        ),
    ] = False,
) -> None:
    pass


def inspect(
    engine: EngineArgument,
    only: Annotated[
        str | None,
        typer.Option(
            "--pass", help="Show one pass alone: its rewrites, and the nodes that it declined."
        ),
    ] = None,
    why: Annotated[
        bool,
        typer.Option(
            "--why",
            help="Name every node that a pass declined, with the reason, instead of counts.",
        ),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read all files and compare them with their hashes."),
    ] = False,
    tree: Annotated[
        Path | None,
        typer.Option("--tree", metavar="OUT.svg", help="Draw the tree of a plan into this file."),
    ] = None,
    step: Annotated[
        Path | None,
        typer.Option(
            "--step",
            metavar="OUT.svg",
            help="Draw a step, its programs and buffers, into this file.",
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            help="The plan that --tree and --step draw; the default is the engine's default plan.",
        ),
    ] = None,
    sharding: Annotated[
        bool,
        typer.Option(
            "--sharding",
            help="Show what each rank holds of every weight, and where sums over ranks stand.",
        ),
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg", metavar="OUT.svg", help="With --sharding: draw it into this file instead."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE.jsonl",
            help="Show how many tokens of these texts drafts of other tokens can propose.",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what is in an engine: models, plans, passes, memory, files.

    Weights are not opened. Missing files and files of another size are always reported; altered
    bytes only with --verify, which reads everything.

    \b
    Examples:
      specc inspect engine/
      specc inspect engine/ --pass FuseQKV --why
      specc inspect engine/ --verify
      specc inspect engine/ --tree tree.svg --plan tree-3-2-1
      specc inspect engine/ --step step.svg
      specc inspect engine/ --sharding
      specc inspect engine/ --sharding --svg sharding.svg
      specc inspect engine/ --prompts prompts.jsonl
      specc inspect engine/ --json | jq .manifest.plans
    """  # noqa: D301
    from specc.cli.inspect_engine import run_inspect
    from specc.cli.pictures import draw_pictures
    from specc.cli.show_coverage import show_coverage
    from specc.cli.show_sharding import show_sharding
    from specc.errors import ConfigError

    if svg is not None and not sharding:
        raise ConfigError(
            f"--svg {svg} without --sharding", "what is to be drawn", "pass --sharding, too"
        )
    if prompts is not None:
        others = {"--tree": tree, "--step": step, "--sharding": sharding, "--pass": only}
        others |= {"--why": why, "--verify": verify}
        if given := next((name for name, value in others.items() if value), None):
            raise ConfigError(
                f"--prompts {prompts} with {given}",
                "one thing to show",
                f"run specc inspect twice, once with --prompts and once with {given}",
            )
    if tree is not None or step is not None:
        draw_pictures(engine, plan, tree=tree, step=step)
    elif prompts is not None:
        show_coverage(engine, prompts, as_json)
    elif sharding:
        show_sharding(engine, as_json, svg)
    else:
        run_inspect(engine, only=only, why=why, verify=verify, as_json=as_json)


def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Show what this machine can do and what it lacks.

    \b
    Examples:
      specc doctor
      specc doctor --json | jq .cpu
    """  # noqa: D301
    from specc.cli.doctor import run_doctor

    run_doctor(as_json=as_json)


# in the order of the help
add_command("compile", compile_)
add_command("run", run)
add_command("chat", chat)
add_command("serve", serve)
add_command("bench", bench)
add_command("bench serve", bench_serve)
add_command("compare", compare)
add_command("tune", tune)
add_command("fit-draft", fit_draft)
add_command("draft-weights", draft_weights)
add_command("reshard", reshard)
add_command("triton", triton)
add_command("inspect", inspect)
add_command("doctor", doctor)


def main() -> NoReturn:
    """Entry point of the command `specc`."""
    # text of a model may hold characters that a terminal's encoding lacks
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()
    raise SystemExit(0)
