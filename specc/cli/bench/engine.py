"""`specc bench`: an engine against itself with speculation off, and against other programs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.bench.peers.installed import check_installed
from specc.bench.peers.names import ASSISTED, TRANSFORMERS, run_of
from specc.cli.bench.report import command_line, put_out
from specc.cli.options.bench import BenchOptions
from specc.cli.progress import make_listener
from specc.cli.prompts import needs_ids, plain_prompts
from specc.close_name import advice
from specc.errors import ConfigError, RequestError
from specc.progress import PhaseTimer
from specc.speculation.plans import SpecPlan

if TYPE_CHECKING:
    from specc.artifact.manifest import Manifest
    from specc.bench.peers.prepare import Prepared
    from specc.bench.rounds import Contender
    from specc.cli.options.common import PromptFile
    from specc.runtime.engine import Engine

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


def run_bench(directory: Path, options: BenchOptions) -> None:
    """Measure, and print or write the report.

    Raises:
        SpeccError: of an option, of a prompt, of the engine or of a checkpoint.
    """
    options.check_outputs()
    check_installed(options.against)
    given = None if options.prompts is None else plain_prompts(options.prompts)
    with make_listener() as listen:
        report = measure(directory, given, options, PhaseTimer(listen))
    from specc.cli.bench.engine_table import print_report

    put_out(report, options, print_report)


def read_prompts(options: PromptFile, engine: Engine | None = None) -> list[str | list[int]]:
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
    phases: PhaseTimer,
) -> dict[str, Any]:
    """Load everything, run the rounds, and make the report."""
    settings = options.settings()
    import torch

    from specc.bench.engine import EngineContender, tokenize
    from specc.bench.report import Bench, make_report
    from specc.bench.rounds import run_rounds
    from specc.bench.step_bytes import measure_read_bandwidth

    with phases.phase("load engine"):
        engine = replace(options.args, engine=directory, max_num_seqs=options.batch_size).load()
    plans = plans_beside_off(engine, options)
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
    with _prepare_peers(engine, options, plans, batches, phases) as peers:
        contenders += peers.contenders
        notes += peers.notes
        with phases.phase("rounds") as advance:
            rounds = run_rounds(contenders, options.rounds, options.warmup, advance)
    settings.peers = peers.settings()
    settings.assisted = _without_name(settings.peers.get(run_of(TRANSFORMERS, ASSISTED)))
    settings.num_prompts = len(prompts)
    settings.num_prompt_tokens = sum(map(len, token_ids))
    settings.threads = torch.get_num_threads()
    bench = Bench(
        directory,
        engine,
        settings,
        token_ids,
        rounds,
        bandwidth,
        notes,
        not_available=peers.not_available,
    )
    return make_report(bench, command_line())


def plans_beside_off(engine: Engine, options: BenchOptions) -> list[str]:
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
                advice(name, engine.plans, "choose one of them, or compile the engine again"),
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


def _prepare_peers(
    engine: Engine,
    options: BenchOptions,
    plans: Sequence[str],
    batches: Sequence[Sequence[list[int]]],
    phases: PhaseTimer,
) -> Prepared:
    import torch

    from specc.bench.peers.prepare import Pair, Prepared, prepare_peers

    if not options.against:
        return Prepared()
    manifest = engine.manifest
    assert manifest is not None, "an engine that was loaded has a manifest"
    sources = [model.checkpoint for model in manifest.models]
    depth = max((engine.plans[name].max_depth for name in plans[:1]), default=0)
    draft, why = options.draft_checkpoint, ""
    if draft is None and len(sources) > 1:
        draft = sources[1]
        if manifest.models[1].reads_hidden:
            draft, why = None, f"it has no draft like {sources[1]}, a head"
    if depth == 0:
        draft = None
    pair = Pair(
        options.target_checkpoint or sources[0],
        draft,
        why or "the engine has no draft, or no plan drafts",
        manifest.dtype,
        depth,
        tuple(_special(manifest)),
        _integers(manifest),
    )
    names = list(dict.fromkeys(options.against))
    threads = torch.get_num_threads()
    return prepare_peers(names, pair, batches, options.tokens, threads, phases)


def _special(manifest: Manifest) -> Iterator[str]:
    """What times of the engine depend on, and differs in the programs beside it."""
    if manifest.device != "cpu":
        yield f"the engine has a device, {manifest.device}: the programs beside it have not"
    if kinds := {model.quantization for model in manifest.models if model.quantization}:
        yield (
            f"the engine has weights in {' and '.join(sorted(kinds))}: the programs beside it round"
            " in their own way"
        )
    if (bits := manifest.activation_bits) is not None:
        yield f"the engine multiplies integers with values of {bits} bits, as others by default"


def _integers(manifest: Manifest) -> tuple[str | None, str | None]:
    """Of target and draft: what others are to round weights to, each in its own layout."""
    kinds = [model.quantization for model in manifest.models]
    target, draft = [kind and kind.partition("-")[0] for kind in [*kinds, None, None][:2]]
    return target, draft


def _without_name(setting: dict[str, Any] | None) -> dict[str, Any] | None:
    """What is given to `generate`, without what only reports have."""
    own = ("name", "model_bytes")
    return setting and {key: value for key, value in setting.items() if key not in own}
