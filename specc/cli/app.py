"""The application of the command line: how commands end, and options that several share."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specc.cli.synonyms import as_option, synonym
from specc.errors import SpeccError

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_PIPE_CLOSED = 141  # 128 + SIGPIPE


class _Commands(TyperGroup):
    """Ends every command the same way: three lines for a user's error, one for Ctrl-C.

    A command's name may be two words, where the first one is a command, too.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = " ".join(args[:2])
        if name in self.commands:
            args = [name, *args[2:]]
        return super().resolve_command(ctx, args)

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
        """An error of `SamplingParams` names its field; here it is an option of the command."""
        command = self.commands.get(ctx.invoked_subcommand)
        known = _options_of(command) if command else set()
        if (found := as_option(error.found, known)) is None:
            return error
        option = found.partition(" ")[0]
        return type(error)(
            found, error.needed, error.do.replace(option[2:].replace("-", "_"), option)
        )

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
        except Exception as error:
            # of click, which newer versions of typer hold a copy of: no class to name here
            if type(error).__name__ != "NoSuchOption":
                raise
            self._explain_option(error)
            raise


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
        from specc import __version__

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
