"""A draft for a target: read texts, let the target write, train, measure, write the files."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specc.errors import ConfigError, OutputError, VocabMismatchError
from specc.fit.chains import Chains, Followed
from specc.fit.documents import (
    Document,
    Encoder,
    Row,
    read_documents,
    split,
    without,
)
from specc.fit.drafters.fitter import DraftShape, Fitter, LayerShape
from specc.fit.drafters.registry import fitter_of
from specc.fit.optimizer import Schedule
from specc.fit.options import FitOptions
from specc.fit.target import Sizes, Target
from specc.fit.texts import TextStore
from specc.fit.trainer import Checkpoint, TrainerConfig, TrainingResult, train
from specc.fit.training_data import FEW_TOKENS, PROMPT, Budget, TrainingData, padded
from specc.passes.frontend.hf_tokenizer import HfTokenizer
from specc.progress import PhaseTimer

WORK, REPORT, HELD_OUT = "fitting", "fit.json", "held_out.jsonl"
# there once all texts are; how many seconds they took
_COMPLETE = "complete"
_WRITE, _READ = "write continuations", "read documents"
# of the minutes: what the target writes, and what it reads
_WRITING, _READING = 0.25, 0.2
# from which on a draft proposes some ids alone, and how many
_LARGE_VOCABULARY, _DRAFT_VOCABULARY = 65_536, 16_384
_RATES = (0.02, 4e-3)
# of what is followed: prompts, and tokens after each
_WALKS, _WALK_TOKENS = 32, 96


@dataclass(frozen=True)
class Fit:
    """What came out.

    Args:
        directory: of the draft.
        compile: command that makes an engine with it.
        parameters: of the draft, without what it shares with the target.
        tokens: learned from, by kind of texts.
        result: see there.
        followed: acceptance of greedy chains by kind of prompts.
        seconds: by phase.
        warnings: what the user should know.
    """

    directory: Path
    compile: str
    parameters: int
    tokens: dict[str, int]
    result: TrainingResult
    followed: dict[str, Followed]
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "directory": str(self.directory),
            "compile": self.compile,
            "parameters": self.parameters,
            "tokens": self.tokens,
            "training": asdict(self.result),
            "greedy_chains": {name: x.to_json() for name, x in self.followed.items()},
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
        }


def fit_draft(target: str, options: FitOptions, timer: PhaseTimer | None = None) -> Fit:
    """Fit a draft to a target.

    Args:
        target: directory, GGUF file or hub id, whatever `specc compile` reads.
        options: see there.
        timer: of the phases.
    Raises:
        SpeccError: found / needed / do, of the target, texts, or options.
    """
    timer = timer or PhaseTimer()
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    fitter = fitter_of(options.kind, options.num_speculative_tokens)
    _check_output(options)
    _check_sizes(options, fitter)
    with timer.phase("read texts"):
        documents, held, asked = _documents(options)
    with timer.phase("read the target") as advance:
        model = Target.load(target, _checked_device(options.device), advance)
    sizes, encoder = model.sizes, _encoder(model)
    fitter.check(sizes)
    boundaries = _boundaries(options, sizes)
    work = _make_output(options)
    store = TextStore(work / "texts")
    length = min(options.length, model.max_position or options.length)
    training_data = TrainingData(model, boundaries, encoder, store, length, options.seed)
    complete = work / _COMPLETE
    if not complete.is_file():
        _fill(training_data, documents, options, timer)
        complete.write_text(str(sum(timer.seconds.get(x, 0.0) for x in (_WRITE, _READ))))
    if not store.kinds():
        raise ConfigError(
            "texts of which no row is left to learn from",
            "documents of 16 tokens or more, or prompts and --generate above 0",
            "pass more text",
        )
    shape = _shape(options, model, fitter, boundaries, store)
    torch.manual_seed(options.seed)
    draft = fitter.build(sizes, shape)
    spent = float(complete.read_text())
    _check_time_left(options, spent)
    result = _train(draft, fitter, store, options, model, timer, spent)
    fitter.end(draft)
    fitter.save(draft, sizes, boundaries, options.output)
    with timer.phase("follow held-out texts"):
        prompts = _held_out_prompts(held, encoder, options.seed)
        walks = {"held out": [tokens for _, tokens in prompts]}
        if asked:
            walks["prompts"] = [encoder.encode(text) for text in asked]
        followed = {
            name: _follow(draft, fitter, model, boundaries, own) for name, own in walks.items()
        }
    fit = Fit(
        options.output,
        f"specc compile --target {target} --draft {options.output}"
        f" --num-speculative-tokens {options.num_speculative_tokens} -o engine/",
        sum(p.numel() for p in draft.parameters()),
        {kind: store.num_tokens(kind) for kind in store.kinds()},
        result,
        followed,
        dict(timer.seconds),
        model.warnings,
    )
    _write_beside(options, target, fit, [line for line, _ in prompts])
    shutil.rmtree(work)
    return fit


def _check_output(options: FitOptions) -> None:
    """Raises OutputError: there is something at the output, or nothing to go on with."""
    output, is_begun = options.output, (options.output / WORK).is_dir()
    if options.resume:
        if not is_begun:
            raise OutputError(
                f"{output} has no {WORK}/: no run that was ended there",
                "a run of specc fit-draft that did not come to its end",
                "leave out --resume",
            )
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OutputError(
            f"{output} exists",
            "a directory that is empty, or not there",
            "pass --resume to go on with it" if is_begun else "choose another --output",
        )


def _make_output(options: FitOptions) -> Path:
    """The directory of what a run that goes on needs.

    Raises:
        OutputError: it cannot be made.
    """
    work = options.output / WORK
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{work}: {error.strerror}", "a directory that can be written", "choose another"
        ) from error
    return work


def _check_sizes(options: FitOptions, fitter: Fitter) -> None:
    """Raises ConfigError: a size of a draft that has the target's."""
    if fitter.has_draft_vocab:
        return
    given = {"--draft-vocab-size": options.draft_vocab_size, "--width": options.width}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name} {value} of --kind {options.kind}, whose embedding and head are the"
                " target's",
                "the target's sizes",
                f"leave out {name}",
            )


def _documents(options: FitOptions) -> tuple[list[Document], list[Document], list[str]]:
    """Documents to learn from, those that are held out, and prompts of --prompts."""
    found = read_documents(options.texts)
    asked = [x.text for x in read_documents([options.prompts])] if options.prompts else []
    documents, held = split(without(found, asked))
    return documents, held, asked


def _checked_device(device: str) -> str:
    kind = device.partition(":")[0]
    is_there = kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
    if not is_there:
        raise ConfigError(
            f"--device {device}", "cpu, or cuda where torch finds a GPU", "pass --device cpu"
        )
    return device


def _encoder(model: Target) -> Encoder:
    needed = "tokenizer.json, which transformers loads"
    do = "put tokenizer.json and tokenizer_config.json beside the checkpoint"
    try:
        # without the file, transformers may make an empty one
        directory = model.directory
        is_there = directory is not None and (directory / "tokenizer.json").is_file()
        tokenizer = HfTokenizer.load(directory) if directory is not None and is_there else None
        if tokenizer is not None:
            # what it begins every text with
            begin = tokenizer.encode("a")[: -len(tokenizer.encode("a", add_special_tokens=False))]
            return Encoder(tokenizer, begin[0] if begin else None)
    except ValueError as error:
        raise VocabMismatchError(f"{model.label}: {error}", needed, do) from error
    raise VocabMismatchError(f"{model.label}: no tokenizer", needed, do)


def _boundaries(options: FitOptions, sizes: Sizes) -> tuple[int, ...]:
    boundaries = options.boundaries() or sizes.default_taps()
    if boundaries[-1] >= sizes.num_layers:
        raise ConfigError(
            f"--taps {options.taps}, and a target of {sizes.num_layers} layers",
            f"layers 0 … {sizes.num_layers - 1}",
            "choose others",
        )
    return boundaries


def _fill(
    training_data: TrainingData,
    documents: Sequence[Document],
    options: FitOptions,
    timer: PhaseTimer,
) -> None:
    """Fill the store, or what is missing of it."""
    seconds, most = options.minutes * 60, round(options.disk_gb * 1e9)
    characters = sum(len(x.text) for x in documents if not x.is_prompt)
    # four characters a token, as a rule
    are_few = characters / 4 < FEW_TOKENS
    tokens = options.generate if options.generate is not None else None if are_few else 0
    if tokens != 0:
        limit = float("inf") if tokens is not None else _WRITING * seconds
        with timer.phase(_WRITE) as advance:
            training_data.write(documents, Budget(limit, tokens, most // 2), advance)
    limit = float("inf") if options.steps is not None else _READING * seconds
    with timer.phase(_READ) as advance:
        training_data.read(documents, Budget(limit, None, most), advance)


def _shape(
    options: FitOptions,
    model: Target,
    fitter: Fitter,
    boundaries: tuple[int, ...],
    store: TextStore,
) -> DraftShape:
    sizes, width = model.sizes, options.width or model.sizes.width
    layer = LayerShape.of_width(width)
    if options.inner is not None:
        layer = LayerShape(width, options.inner, layer.heads, layer.kv_heads, layer.head_dim)
    count = options.draft_vocab_size
    if count is None:
        is_large = sizes.vocab_size > _LARGE_VOCABULARY and fitter.has_draft_vocab
        count = _DRAFT_VOCABULARY if is_large else sizes.vocab_size
    longest = max(part.length for kind in store.kinds() for part in store.parts(kind))
    kept = kept_ids(store, min(count, sizes.vocab_size), sizes.vocab_size)
    mask = sizes.eos_token_id if sizes.eos_token_id is not None else 0
    depth = options.num_speculative_tokens
    return DraftShape(layer, boundaries, depth, longest, kept.to(model.device), mask)


def kept_ids(store: TextStore, count: int, vocab_size: int) -> Tensor:
    """The ids that the target finds likely most often in texts, ascending."""
    mass = torch.zeros(vocab_size)
    for kind in store.kinds():
        for part in store.parts(kind):
            is_text = torch.arange(part.length) < part.ends[:, None]
            mass.index_add_(0, part.tokens[is_text], torch.ones(int(is_text.sum())))
            ids, odds = part.ids[is_text].long(), part.odds[is_text].float()
            mass.index_add_(0, ids.flatten(), odds.flatten())
    return mass.topk(count).indices.sort().values


def _check_time_left(options: FitOptions, spent: float) -> None:
    """Training of a few seconds makes no draft; the texts are kept for a run that goes on.

    Args:
        spent: seconds of the minutes that texts have taken.
    Raises:
        ConfigError: less than a tenth of the minutes is left.
    """
    left = options.minutes * 60 - spent
    if options.steps is None and left < 6 * options.minutes:
        raise ConfigError(
            f"writing and reading texts took {spent / 60:.1f} minutes of --minutes"
            f" {options.minutes:g}",
            "a tenth of the minutes or more to train in",
            f"pass --resume --minutes {math.ceil(2 * spent / 60 + 1)}: the texts are kept",
        )


def _train(
    draft: nn.Module,
    fitter: Fitter,
    store: TextStore,
    options: FitOptions,
    model: Target,
    timer: PhaseTimer,
    spent: float,
) -> TrainingResult:
    """Train a draft, or go on with that.

    Args:
        spent: seconds of the minutes that texts have taken.
    """
    with timer.phase("train") as advance:
        fitter.begin(draft, store)
        # of a run of so many steps, time does not count
        minutes = options.minutes - spent / 60 if options.steps is None else 1e6
        schedule = Schedule(options.steps or 10**9, max(minutes, 0.05), decay=0.7)
        config = TrainerConfig(
            schedule, _RATES, fitter.batch_tokens, options.seed + 3, model.device
        )
        names = ("kind", "num_speculative_tokens", "width", "inner", "taps", "length", "seed")
        settings = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
        checkpoint = Checkpoint(options.output / WORK / "training.pt", settings)
        return train(draft, lambda *x: fitter.losses(draft, *x), store, config, checkpoint, advance)


def _held_out_prompts(
    held: Sequence[Document], encoder: Encoder, seed: int
) -> list[tuple[dict[str, Any], list[int]]]:
    """Prompts of documents that training never saw, a few of each: as a line, and as tokens."""
    generator = torch.Generator().manual_seed(seed + 4)
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    for number in range(4 * _WALKS):
        document = held[number % len(held)]
        if document.messages:
            tokens = encoder.prompt(document, PROMPT, generator)
            line: dict[str, Any] = {"prompt_token_ids": tokens}
        else:
            text = encoder.cut(document, PROMPT, generator)
            line, tokens = {"prompt": text}, encoder.encode(text)
        if tokens and len(found) < _WALKS:
            found[tuple(tokens)] = line
    return [(line, list(tokens)) for tokens, line in found.items()]


def _follow(
    draft: nn.Module,
    fitter: Fitter,
    model: Target,
    boundaries: Sequence[int],
    prompts: Sequence[list[int]],
) -> Followed:
    """Greedy chains along the target's own greedy output after prompts."""
    chains = Chains(fitter.depth)
    for first in range(0, len(prompts), 8):
        own = prompts[first : first + 8]
        written = model.write(own, _WALK_TOKENS, 0.0, is_exact=True)
        for prompt, tokens in zip(own, written, strict=True):
            if len(tokens) < len(prompt) + 3:
                continue
            rows = padded([Row(tokens, len(prompt))])
            text = model.read(rows[0], boundaries, *rows[1:], is_greedy=True, is_exact=True)
            text = text.to(model.device)
            chains.follow(text, fitter.hits(draft, text, fitter.depth).cpu())
    return chains.figures()


def _write_beside(
    options: FitOptions, target: str, fit: Fit, prompts: Sequence[dict[str, Any]]
) -> None:
    """The report, and prompts that training never saw, beside the weights."""
    facts = {
        "target": target,
        "options": {key: _plain(value) for key, value in asdict(options).items()},
        "torch": torch.__version__,
        **fit.to_json(),
    }
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    (options.output / REPORT).write_text(text, encoding="utf-8")
    lines = "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in prompts)
    (options.output / HELD_OUT).write_text(lines, encoding="utf-8")


def _plain(value: object) -> object:
    """An option as JSON has it."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
