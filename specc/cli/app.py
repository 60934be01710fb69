"""The application of the command line: how commands end, what several share, other names."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from specc.cli.options.with_options import with_options
from specc.errors import RankError, SpeccError

_LOST = 1  # of several processes; nothing that the user passed
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_PIPE_CLOSED = 141  # 128 + SIGPIPE
# option of vLLM, transformers or TensorRT-LLM → option of specc
_SYNONYMS = {
    "--model": "--target",
    "--model-path": "--target",
    "--speculative-model": "--draft",
    "--draft-model": "--draft",
    "--speculative-num-tokens": "--num-speculative-tokens",
    "--max-model-len": "--max-seq-len",
    "--max-batch": "--max-batch-size",
    "--max-num-seqs": "--max-batch-size",
    "--max-num-batched-tokens": "--prefill-chunk",
    "--torch-dtype": "--dtype",
    "--data-type": "--dtype",
    "--output-dir": "--output",
    "--output-directory": "--output",
}
# a field of a dataclass of options at the start of an error, and its value; without the equals
# sign the value is one word, as others are prose
_FIELD = re.compile(r"(\w+)(?:=('?)(.*?)\2| (\S+))$", re.DOTALL)


class _Commands(TyperGroup):
    """Ends every command the same way: three lines for a user's error, one for Ctrl-C.

    A command's name may be two words, where the first one is a command, too. Of each command there
    is the name and the help; its options are made when it is called.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        two_words = " ".join(args[:2])
        if two_words in self.commands:
            args = [two_words, *args[2:]]
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None, "an unknown command is a usage error"
        self.commands[name] = command = _with_all_options(name)
        return name, command, rest

    def _explain_option(self, error: Any) -> None:
        """Exit with three lines where an option is another program's name for one of ours."""
        known = _options_of(error.ctx.command) if error.ctx else set()
        if (meant := synonym(error.option_name, known)) is None:
            return
        typer.echo(f"found:  {error.option_name}", err=True)
        typer.echo(f"needed: {meant}, as specc calls it", err=True)
        typer.echo(f"do:     pass {meant} instead of {error.option_name}", err=True)
        raise typer.Exit(2) from None

    def _for_command_line(self, error: SpeccError, ctx: Any) -> SpeccError:
        """An error of a dataclass names its field; here it is an option of the command."""
        command = self.commands.get(ctx.invoked_subcommand)
        parameters = command.params if command else []
        options = {one.name: one.opts[0] for one in parameters if one.opts[0].startswith("--")}
        return in_words_of(options, error)

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
                typer.echo(str(self._for_command_line(error, ctx)), err=True)
            raise typer.Exit(_LOST if isinstance(error, RankError) else 2) from None
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
        except Exception as error:
            # of click, which newer versions of typer hold a copy of: no class to name here
            if type(error).__name__ != "NoSuchOption":
                raise
            self._explain_option(error)
            raise


# name → what runs, whose parameters are the options
_functions: dict[str, Callable[..., None]] = {}


def add_command(name: str, function: Callable[..., None]) -> None:
    """Give the command line a command.

    Args:
        name: one word, or two.
        function: its parameters are arguments and options as typer takes them, or dataclasses of
            options; its docstring is the help.
    """

    def stub() -> None:
        raise AssertionError(f"{name} was called without its options")

    stub.__doc__ = function.__doc__
    app.command(name)(stub)
    _functions[name] = function


def _with_all_options(name: str) -> Any:
    """A command as typer builds it, which takes long enough to do it for one alone."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name)(with_options(_functions[name]))
    return typer.main.get_command(alone)


def _options_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


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


def print_version(value: bool) -> None:
    if value:
        from specc.version import __version__

        typer.echo(f"specc {__version__}")
        raise typer.Exit


Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        callback=_set_debug,
        help="Show the traceback of an error, not just its three lines.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
EngineArgument = Annotated[
    Path, typer.Argument(help="The engine directory that specc compile made.", show_default=False)
]


def synonym(option: str, known: Collection[str]) -> str | None:
    """The option that another program calls `option`; None where there is none.

    Args:
        known: options of the command.
    """
    found = _SYNONYMS.get(option)
    return found if found in known else None


def in_words_of(options: Mapping[str, str], error: SpeccError) -> SpeccError:
    """An error that names a field, as the command line has it: `top_p=2.0` is `--top-p 2.0`.

    Args:
        options: field → option of the command.
        error: any; it comes back as it is where it names no such field.
    """
    match = _FIELD.match(error.found)
    if match is None or (option := options.get(match[1])) is None:
        return error
    value = match[4].strip("'") if match[3] is None else match[3]
    do = _in_advice(match[1], option, error.do)
    return type(error)(f"{option} {value}", error.needed, do)


def _in_advice(field: str, option: str, do: str) -> str:
    """Advice with the option in place of its field.

    A name without an underscore, such as plan, may be a word of the sentence, or an option already,
    as in --port: it is a field after what is to be done with it.
    """
    before = "" if "_" in field else r"\b(?:raise|lower|correct|pass|set|change|leave) "
    return re.sub(rf"({before})\b{field}\b", rf"\g<1>{option}", do)
