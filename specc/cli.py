"""The command `specc`. What a subcommand needs is imported inside it, so that --help is instant."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from specc.errors import SpeccError

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_PIPE_CLOSED = 141  # 128 + SIGPIPE


class _Commands(TyperGroup):
    """Ends every command the same way: three lines for a user's error, one for Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a pipe that was closed is noticed here, not at exit
            return result
        except SpeccError as error:
            if ctx.meta.get("debug"):
                import traceback

                traceback.print_exc()
            else:
                typer.echo(str(error), err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(_INTERRUPTED) from None
        except BrokenPipeError:
            # whoever read the output has enough; keep Python from flushing into the pipe at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_PIPE_CLOSED) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            typer.echo("found:  no space left for the output", err=True)
            typer.echo("needed: room for the text", err=True)
            typer.echo("do:     write it elsewhere, or free space", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Compile a target model and its draft into one engine, and generate with it: the same"
    " text as the target alone, in fewer passes.",
)


def _set_debug(ctx: typer.Context, value: bool) -> bool:
    ctx.meta["debug"] = value  # shared by a context and its parents
    return value


def _print_version(value: bool) -> None:
    if value:
        from specc import __version__

        typer.echo(f"specc {__version__}")
        raise typer.Exit


Debug = Annotated[
    bool, typer.Option("--debug", callback=_set_debug, help="Show the traceback of an error.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
EngineArgument = Annotated[Path, typer.Argument(help="Engine directory.", show_default=False)]


@app.callback()
def _specc(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


@app.command("compile")
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
        str | None, typer.Option("--draft", help="Draft model; without one, no speculation.")
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            "--tree",
            metavar="W1,W2,…",
            help="Children per node and level; repeat it for several plans, the default first.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            help="Chain of this length instead of a tree; 4 where neither is given.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, bfloat16, or float16 on a GPU.")
    ] = "float32",
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
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            help="cpu (compiled for this machine), eager, or cuda (experimental); else cpu where"
            " there is a compiler. aot-inductor, cuda with compiled code, has run on no GPU yet:"
            " it needs one, and SPECC_EXPERIMENTAL=aot-inductor.",
        ),
    ] = None,
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
      specc compile --target T/ -o plain-engine/
    """  # noqa: D301
    from specc.cli_compile import run_compile
    from specc.config import CompileConfig

    run_compile(
        target,
        draft,
        output,
        lambda plans: CompileConfig(
            plans=plans,
            dtype=dtype,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            block_size=block_size,
            prefill_chunk=prefill_chunk,
            backend=backend,
            probe=probe,
        ),
        trees=tree or [],
        num_speculative_tokens=num_speculative_tokens,
        dump_graphs=dump_graphs,
        force=force,
    )


@app.command("run")
def run(
    engine: EngineArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue; else --file, --prompts or standard input.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="UTF-8 file: all of it is one prompt.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help='File of JSON lines, each {"prompt": "…"}; a batch.'),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Output tokens at most, for each prompt.")
    ] = 128,
    plan: Annotated[
        str | None, typer.Option("--plan", help="A plan of the engine, e.g. off or chain-4.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text that ends the output; repeatable.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.")
    ] = False,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Compare all files with their hashes, or none; else all but the weights.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads of torch; else as it is set.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="eager runs the graphs of any engine; else as compiled."),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print acceptance and times to standard error.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Generate text with an engine, token by token as it comes.

    Greedy decoding: the output is the target model's own. A line break follows the text;
    --json gives it exactly.

    \b
    Examples:
      specc run engine/ "def fibonacci(n):" --max-tokens 64 --stats
      specc run engine/ --file prompt.txt --stop "class " --stop "def "
      cat prompt.txt | specc run engine/ --plan off
      specc run engine/ --prompts prompts.jsonl --json > outputs.json
    """  # noqa: D301
    from specc.cli_run import Loading, Request, run_request

    request = Request(
        prompt=prompt,
        file=file,
        prompts=prompts,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    loading = Loading(plan=plan, verify=verify, threads=threads, backend=backend)
    run_request(engine, request, loading, stats=stats, as_json=as_json)


@app.command("bench")
def bench(
    engine: Annotated[
        Path | None,
        typer.Argument(help="Engine directory; none with --synthetic.", show_default=False),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            "--synthetic",
            metavar="TARGET[/DRAFT]",
            help="Shapes of published models with random weights, instead of an engine.",
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Of --synthetic: tokens of a prompt; else 1024.")
    ] = None,
    tree: Annotated[
        list[str] | None, typer.Option("--tree", help="Of --synthetic: as specc compile takes it.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--num-speculative-tokens", help="Of --synthetic: likewise.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of --synthetic; else what suits the device.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help='File of JSON lines, each {"prompt": "…"}; else built-in.'),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", help="Only the first ones of the file.")
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", help="Output tokens of each prompt; EOS does not end it.")
    ] = 128,
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Prompts that are decoded together.")
    ] = 1,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads of torch; else as it is set.")
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option("--plan", help="Instead of the engine's default plan; repeatable."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="transformers: its plain and assisted generation, too."),
    ] = None,
    target_checkpoint: Annotated[
        str | None,
        typer.Option("--target-checkpoint", help="For transformers; else what was compiled."),
    ] = None,
    draft_checkpoint: Annotated[
        str | None,
        typer.Option("--draft-checkpoint", help="For transformers; else what was compiled."),
    ] = None,
    synthetic_acceptance: Annotated[
        str | None,
        typer.Option(
            "--synthetic-acceptance",
            metavar="P1,P2,…",
            help="Draw acceptance by sibling rank: what a step costs, apart from the draft.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Counted rounds.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", help="Rounds before them.")] = 1,
    json_output: Annotated[
        str | None,
        typer.Option("--json", metavar="OUT", help="Write the report; - is standard output."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT.svg", help="Draw tokens/s.")
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Compare all files with their hashes, or none; else all but the weights.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure an engine, or shapes with random weights: plans, plain decoding, transformers.

    The plan off always runs, too. Rounds are interleaved; figures are medians with their spread,
    and every output is compared with that of plain decoding.

    \b
    Examples:
      specc bench engine/
      specc bench engine/ --prompts prompts.jsonl --threads 4 --json out.json --plot out.svg
      specc bench engine/ --against transformers --rounds 7
      specc bench engine/ --plan chain-4 --plan tree-3-2-1 --batch-size 8
      specc bench engine/ --synthetic-acceptance 0.7,0.1,0.05
      specc bench --synthetic llama-3.1-8b/llama-3.2-1b --synthetic-acceptance .8
    """  # noqa: D301
    from specc.cli_bench import BenchOptions, choose_subject
    from specc.cli_bench_shapes import ShapesOptions

    options = BenchOptions(
        plans=tuple(plan or ()),
        against=against,
        target_checkpoint=target_checkpoint,
        draft_checkpoint=draft_checkpoint,
        prompts=prompts,
        num_prompts=num_prompts,
        tokens=tokens,
        batch_size=batch_size,
        threads=threads,
        rounds=rounds,
        warmup=warmup,
        synthetic_acceptance=synthetic_acceptance,
        json=json_output,
        plot=plot,
        verify=verify,
    )
    shapes = ShapesOptions(synthetic, context, tuple(tree or ()), num_speculative_tokens, dtype)
    choose_subject(engine, shapes, options)


@app.command("inspect")
def inspect(
    engine: EngineArgument,
    only: Annotated[
        str | None,
        typer.Option("--pass", help="Only this pass: its rewrites and declined nodes."),
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Every declined node with its reason, not counts.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read all files and compare them with their hashes."),
    ] = False,
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
      specc inspect engine/ --json | jq .manifest.plans
    """  # noqa: D301
    from specc.cli_inspect import run_inspect

    run_inspect(engine, only=only, why=why, verify=verify, as_json=as_json)


@app.command("doctor")
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Show what this machine can do and what it lacks.

    \b
    Examples:
      specc doctor
      specc doctor --json | jq .cpu
    """  # noqa: D301
    from specc.cli_doctor import run_doctor

    run_doctor(as_json=as_json)


def main() -> NoReturn:
    """Entry point of the command `specc`."""
    # text of a model may hold characters that a terminal's encoding lacks
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()
    raise SystemExit(0)
