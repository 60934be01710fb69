"""Commands whose options are fields of dataclasses."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from specc.cli.options.with_options import Fields, with_options
from specc.option import check_ranges, option


@dataclass(frozen=True)
class Base:
    place: Path | None = option(None, "Where to look.", metavar="FILE")
    num_threads: int | None = option(None, "How many.", "--threads", least=1)
    inner: int = 7

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Args(Base):
    words: tuple[str, ...] = option((), "Repeatable.", "--word", env="TEST_WORD")
    sizes: tuple[int, ...] = option((), "Repeatable, too.", "--size")
    verify: bool | None = option(None, "Or not.", "--verify/--no-verify")
    rate: float = option(2.5, "A second.")
    hidden: int = option(3, "Its default is not shown.", shows_default=False)


@dataclass(frozen=True)
class Needed:
    prompts: Path = option(..., "A file.")
    name: str | None = option(None, "Of the file.")


def invoke(command, *words, **more):
    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    return CliRunner().invoke(app, [str(word) for word in words], **more)


@with_options
def everything(engine: str, args: Args, stats: bool = False) -> None:
    """Print what came."""
    print(json.dumps([engine, asdict(args), stats], default=str))


def told(*words, **more):
    result = invoke(everything, *words, **more)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_defaults_are_those_of_the_fields():
    assert told("e") == ["e", asdict(Args()) | {"words": [], "sizes": []}, False]


def test_every_kind_of_value_arrives():
    words = ["--place", "f", "--threads", 2, "--word", "a", "--word", "b", "--size", 3]
    words += ["--no-verify", "--rate", "0.5", "--hidden", 9, "--stats"]
    engine, args, stats = told("e", *words)
    want = Args(Path("f"), 2, 7, ("a", "b"), (3,), False, 0.5, 9)
    assert (engine, stats) == ("e", True)
    assert args == json.loads(json.dumps(asdict(want), default=str))


def test_the_environment_gives_a_value():
    assert told("e", env={"TEST_WORD": "x y"})[1]["words"] == ["x", "y"]


def test_help_has_text_names_and_defaults():
    text = " ".join(invoke(everything, "--help").stdout.split())
    for part in (
        "--place FILE Where to look.",
        "--threads <int> How many." if "<int>" in text else "--threads INTEGER How many.",
        "--verify / --no-verify Or not.",
        "[env var: TEST_WORD]",
        "[default: 2.5]",
    ):
        assert part in text
    assert "default: 3" not in text
    assert "--inner" not in text


def test_what_the_dataclass_refuses_is_an_error_of_the_command():
    result = invoke(everything, "e", "--threads", 0)
    assert "num_threads=0" in str(result.exception)


def test_a_command_chooses_fields_and_changes_them():
    @with_options
    def some(
        args: Annotated[Args, Fields("rate", "num_threads", rate={"default": 9.0, "help": "New."})],
        file: Annotated[Needed, Fields(name={"names": ("--title",)})],
    ) -> None:
        print(args.rate, args.words, file.prompts, file.name)

    text = invoke(some, "--help").stdout
    assert "--word" not in text
    assert "New." in text
    assert text.index("--rate") < text.index("--threads") < text.index("--prompts")
    assert invoke(some, "--prompts", "p", "--title", "t").stdout == "9.0 () p t\n"
    # a field without a default must be given
    assert invoke(some).exit_code == 2


def test_mistakes_of_ours_are_found_when_the_command_is_made():
    with pytest.raises(AssertionError, match=r"Base\.inner is no option"):

        @with_options
        def wrong(args: Annotated[Base, Fields("inner")]) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name"):

        @with_options
        def twice(first: Base, second: Base) -> None: ...
