"""`specc bench`: an engine against itself with speculation off, and against transformers."""

from __future__ import annotations

import json
import random
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.cli.progress import make_listener
from specc.cli.prompts import needs_ids, plain_prompts
from specc.errors import ConfigError, OutputError, RequestError
from specc.progress import Phases
from specc.speculation.plans import SpecPlan
from specc.system.files import output_error
from specc.system.machine import check_threads

if TYPE_CHECKING:
    from specc.bench.report import Settings
    from specc.bench.rounds import Contender
    from specc.cli.bench.synthetic import ShapesOptions
    from specc.runtime.engine import Engine

BUILT_IN = "built-in"
_PROMPTS = (
    "def fibonacci(n):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, ",
    "import json\n\ndef load(path):\n    with open(path) as file:\n        ",
    "The capital of France is Paris. The capital of Italy is",
    "Once upon a time there was a king who had three daughters. The youngest",
    "1 2 3 4 5 6 7 8 9 10 11 12 13",
)
# of a prompt for an engine without a tokenizer
_RANDOM_TOKENS = 24
_TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class BenchOptions:
    """What the command line asks for.

    Args:
        plans: of the engine, next to off; empty is its default plan.
        against: `transformers`, or None.
        prompts: JSON lines with `prompt`; None takes the built-in ones.
        synthetic_acceptance: such as `0.7,0.1`, or None.
        json: file for the report, `-` is standard output.
    """

    plans: tuple[str, ...] = ()
    against: str | None = None
    target_checkpoint: str | None = None
    draft_checkpoint: str | None = None
    prompts: Path | None = None
    num_prompts: int | None = None
    tokens: int = 128
    batch_size: int = 1
    threads: int | None = None
    rounds: int = 5
    warmup: int = 1
    synthetic_acceptance: str | None = None
    json: str | None = None
    plot: Path | None = None
    verify: bool | None = None

    def check(self) -> None:
        """Find what can be found before anything loads.

        Raises:
            ConfigError: a value outside its range.
            OutputError: the directory of an output is absent.
        """
        check_threads(self.threads)
        for option, value, low in (
            ("--tokens", self.tokens, 2),
            ("--batch-size", self.batch_size, 1),
            ("--rounds", self.rounds, 1),
            ("--warmup", self.warmup, 0),
            ("--num-prompts", self.num_prompts, 1),
        ):
            if value is not None and value < low:
                raise ConfigError(f"{option} {value}", f"{low} or more", f"raise {option}")
        if self.against not in (None, _TRANSFORMERS):
            raise ConfigError(
                f"--against {self.against}", _TRANSFORMERS, f"--against {_TRANSFORMERS}"
            )
        if self.json not in (None, "-"):
            _check_output(Path(str(self.json)))
        if self.plot is not None:
            from specc.draw.bench import check_plot

            check_plot(self.plot)
            _check_output(self.plot)

    def named(self) -> dict[str, object]:
        """Options that only an engine has, by name."""
        return {
            "--plan": self.plans,
            "--prompts": self.prompts,
            "--num-prompts": self.num_prompts,
            "--target-checkpoint": self.target_checkpoint,
            "--draft-checkpoint": self.draft_checkpoint,
            "--verify": self.verify,
        }

    def settings(self) -> Settings:
        """The part of the options that the report repeats."""
        from specc.bench.dice import parse_probabilities
        from specc.bench.report import Settings

        text = self.synthetic_acceptance
        return Settings(
            rounds=self.rounds,
            warmup=self.warmup,
            tokens=self.tokens,
            batch_size=self.batch_size,
            prompts=BUILT_IN if self.prompts is None else str(self.prompts),
            synthetic_acceptance=None if text is None else list(parse_probabilities(text)),
        )


def choose_subject(directory: Path | None, shapes: ShapesOptions, options: BenchOptions) -> None:
    """Measure the engine or the shapes, whichever is there.

    Raises:
        ConfigError: both, neither, or options of the other.
        SpeccError: see `run_bench` and `run_shapes_bench`.
    """
    from specc.cli.bench.synthetic import run_shapes_bench

    if shapes.synthetic is None and directory is None:
        raise ConfigError(
            "no engine to measure",
            "an engine directory, or shapes to draw random weights for",
            "specc bench ENGINE, or specc bench --synthetic llama-3.1-8b/llama-3.2-1b",
        )
    if shapes.synthetic is None:
        _refuse_options(shapes.named(), "an engine", "--synthetic", "leave it out")
        assert directory is not None
        run_bench(directory, options)
        return
    if directory is not None:
        raise ConfigError(
            f"both {directory} and --synthetic {shapes.synthetic}",
            "one of them",
            "leave out the engine, or --synthetic",
        )
    do = "leave it out; shapes take --tree or --num-speculative-tokens, --context and --tokens"
    _refuse_options(options.named(), "--synthetic", "an engine", do)
    run_shapes_bench(shapes, options)


def _refuse_options(given: Mapping[str, object], subject: str, other: str, do: str) -> None:
    for name, value in given.items():
        if value not in (None, ()):
            raise ConfigError(f"{name} with {subject}", f"{name} with {other} only", do)


def run_bench(directory: Path, options: BenchOptions) -> None:
    """Measure, and print or write the report.

    Raises:
        SpeccError: of an option, of a prompt, of the engine or of a checkpoint.
    """
    options.check()
    given = None if options.prompts is None else plain_prompts(options.prompts)
    with make_listener() as listen:
        report = measure(directory, given, options, Phases(listen))
    from specc.cli.bench.engine_table import print_report

    put_out(report, options, print_report)


def put_out(
    report: dict[str, Any], options: BenchOptions, show: Callable[[dict[str, Any]], None]
) -> None:
    """Draw, write and print a report, as the options ask for.

    Raises:
        OutputError: a file cannot be written.
    """
    if options.plot is not None:
        from specc.draw.bench import write_plot

        write_plot(report, options.plot)
    text = json.dumps(report, indent=1, ensure_ascii=False)
    if options.json == "-":
        print(text)
        return
    if options.json is not None:
        path = Path(options.json)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise output_error(path, error) from error
    show(report)


def read_prompts(options: BenchOptions, engine: Engine | None = None) -> list[str | list[int]]:
    """The prompts, as many as asked for; of an engine without a tokenizer, random token ids.

    Raises:
        InputFileError: the file cannot be read.
        RequestError: it holds no prompt, or an empty one.
    """
    given = None if options.prompts is None else plain_prompts(options.prompts)
    return choose_prompts(given, options.num_prompts, engine)


def choose_prompts(
    given: Sequence[str | list[int]] | None, count: int | None, engine: Engine | None
) -> list[str | list[int]]:
    """The given prompts, else built-in ones that suit the engine.

    Raises:
        RequestError: text for an engine without a tokenizer.
    """
    has_tokenizer = engine is None or engine.tokenizer is not None
    if given is None and engine is not None and not has_tokenizer:
        return _random_prompts(engine.vocab_size)[:count]
    prompts = list(_PROMPTS if given is None else given)[:count]
    needs_ids(prompts, has_tokenizer)
    return prompts


def _random_prompts(vocab_size: int) -> list[str | list[int]]:
    """As many as the built-in ones; the same ones every time."""
    dice = random.Random(0)
    return [dice.choices(range(vocab_size), k=_RANDOM_TOKENS) for _ in _PROMPTS]


def measure(
    directory: Path,
    given: Sequence[str | list[int]] | None,
    options: BenchOptions,
    phases: Phases,
) -> dict[str, Any]:
    """Load everything, run the rounds, and make the report."""
    settings = options.settings()
    import torch

    from specc.bench.engine import EngineContender, tokenize
    from specc.bench.report import Bench, make_report
    from specc.bench.rounds import run_rounds
    from specc.bench.step_bytes import measure_read_bandwidth
    from specc.runtime.engine import Engine

    with phases.phase("load engine"):
        engine = Engine.load(
            directory,
            verify=options.verify,
            num_threads=options.threads,
            max_num_seqs=options.batch_size,
        )
    plans = choose_plans(engine, options)
    prompts = choose_prompts(given, options.num_prompts, engine)
    with phases.phase("read bandwidth"):
        bandwidth = measure_read_bandwidth()
    with phases.phase("read weights"):
        token_ids = tokenize(engine, prompts, options.tokens)
    size = options.batch_size
    batches = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
    contenders: list[Contender] = [EngineContender(engine, "off", "off", batches, options.tokens)]
    contenders += [
        EngineContender(
            engine, "speculative", name, batches, options.tokens, settings.synthetic_acceptance
        )
        for name in plans
    ]
    notes: list[str] = []
    if given is None and engine.tokenizer is None:
        notes.append(
            "prompts: random token ids, as the engine has no tokenizer; acceptance on real prompts"
            " differs: pass --prompts"
        )
    if options.against is not None:
        depth = max((engine.plans[name].max_depth for name in plans[:1]), default=0)
        with phases.phase("prepare transformers"):
            baselines, more = _load_baselines(engine, options, batches, depth)
        contenders += baselines
        notes += more
        settings.assisted = next((c.settings for c in baselines if c.name != _TRANSFORMERS), None)

    total = (options.rounds + options.warmup) * len(contenders)
    done = 0
    with phases.phase("rounds") as advance:

        def on_run(number: int, place: int, contender: Contender) -> None:
            nonlocal done
            advance(done, total)
            done += 1

        measured = run_rounds(contenders, options.rounds, options.warmup, on_run)
    settings.num_prompts = len(prompts)
    settings.num_prompt_tokens = sum(map(len, token_ids))
    settings.threads = torch.get_num_threads()
    bench = Bench(directory, engine, settings, token_ids, contenders, measured, bandwidth, notes)
    return make_report(bench, shlex.join(["specc", *sys.argv[1:]]))


def choose_plans(engine: Engine, options: BenchOptions) -> list[str]:
    """Plans to compare with off, which runs in any case.

    Raises:
        RequestError: the engine has no such plan.
        ConfigError: synthetic acceptance without a plan that drafts.
    """
    names = list(dict.fromkeys(options.plans or (engine.default_plan,)))
    for name in names:
        if name not in engine.plans:
            raise RequestError(
                f"plan {name!r}",
                f"a plan of this engine: {', '.join(engine.plans)}",
                "choose one of them, or compile the engine with this plan",
            )
    plans: dict[str, SpecPlan] = engine.plans
    names = [name for name in names if plans[name].speculates]
    if options.synthetic_acceptance is not None and not names:
        raise ConfigError(
            f"--synthetic-acceptance {options.synthetic_acceptance} with plan off alone",
            "a plan that drafts",
            "choose a plan, or compile the engine with a draft",
        )
    return names


def _load_baselines(
    engine: Engine, options: BenchOptions, batches: Any, depth: int
) -> tuple[list[Any], list[str]]:
    from specc.bench.baseline import Checkpoints, load_contenders

    manifest = engine.manifest
    assert manifest is not None, "an engine that was loaded has a manifest"
    sources = [model.checkpoint for model in manifest.models]
    draft = options.draft_checkpoint or (sources[1] if len(sources) > 1 else None)
    checkpoints = Checkpoints(options.target_checkpoint or sources[0], draft, manifest.dtype)
    return load_contenders(checkpoints, batches, options.tokens, depth)


def _check_output(path: Path) -> None:
    parent = path.resolve().parent
    if not parent.is_dir() or path.is_dir():
        found = f"{path} is a directory" if path.is_dir() else f"no directory {parent}"
        raise OutputError(found, "a file in a directory that exists", "choose another output")
