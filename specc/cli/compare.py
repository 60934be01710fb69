"""`specc compare`: perplexity of an engine, and its distance from another model."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.artifact.manifest import MANIFEST_FILE
from specc.cli import render
from specc.cli.print_table import print_lines
from specc.cli.prompts import decode, needs_ids, not_empty, plain_prompts, read_bytes
from specc.errors import ConfigError, RequestError

# tokens of a window, as llama.cpp's `llama-perplexity` has it
_CONTEXT = 512

if TYPE_CHECKING:
    from specc.runtime.engine import Engine
    from specc.runtime.engine_args import EngineArgs


def run_compare(
    args: EngineArgs,
    texts: Path,
    against: Path | None,
    context: int | None,
    num_windows: int | None,
    *,
    as_json: bool,
) -> None:
    """Score texts and print what was found.

    Args:
        args: the engine, and how it is loaded.
        texts: file of one text, or of JSON lines.
        against: engine or checkpoint to compare with, or None.
        context: tokens of a window; None is 512, or what the engine takes.
        num_windows: that are read; None is all.
        as_json: one JSON object.
    Raises:
        SpeccError: of the engines, of the texts.
    """
    prompts = _read_texts(texts)  # before the engine loads: a bad file fails at once
    if against is not None and not against.is_dir():
        raise ConfigError(
            f"--against {against}: no such directory",
            "an engine, or a checkpoint in Hugging Face's format",
            "check the path",
        )
    from specc.bench.text_scores import ScoredCheckpoint, ScoredEngine, score_texts, windows_of

    engine = args.load()
    needs_ids(prompts, engine.tokenizer is not None)
    if context is None:
        context = min(_CONTEXT, engine.max_seq_len)
    elif context > engine.max_seq_len:
        raise ConfigError(
            f"--context {context}, and an engine for {engine.max_seq_len} tokens",
            f"2 … {engine.max_seq_len}",
            f"pass --context {engine.max_seq_len}",
        )
    first = engine.bos_token_id if engine.add_bos else None
    windows = list(
        itertools.islice(windows_of(_token_ids(engine, prompts), context, first), num_windows)
    )
    other: ScoredEngine | ScoredCheckpoint | None = None
    if against is not None and (against / MANIFEST_FILE).is_file():
        other = ScoredEngine(replace(args, engine=against, backend=None).load())
    elif against is not None:
        other = ScoredCheckpoint(against)
    scores = score_texts(ScoredEngine(engine), windows, other, _show_progress).to_json()
    if as_json:
        data = {"engine": str(args.engine), "texts": str(texts), "context": context, **scores}
        print(json.dumps(data, ensure_ascii=False, indent=1))
        return
    print_lines(render.make_console(), _lines(str(args.engine), against, context, scores))


def _read_texts(path: Path) -> list[str | list[int]]:
    if path.suffix == ".jsonl":
        return plain_prompts(path)
    return [not_empty(decode(read_bytes(path), str(path)), str(path))]


def _token_ids(engine: Engine, prompts: list[str | list[int]]) -> list[list[int]]:
    """Of each text, without tokens that begin or end it.

    Raises:
        RequestError: ids that the model has not got.
    """
    found = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            assert engine.tokenizer is not None
            prompt = engine.tokenizer.encode(prompt, add_special_tokens=False).ids
        wrong = next((token for token in prompt if not 0 <= token < engine.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"text {number} holds token id {wrong}",
                f"0 … {engine.vocab_size - 1}",
                "tokenize with the engine's own tokenizer",
            )
        found.append(prompt)
    return found


def _show_progress(done: int, total: int) -> None:
    """Counts on one line of a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{done}/{total} windows" + ("\n" if done == total else ""))
        sys.stderr.flush()


def _lines(name: str, against: Path | None, context: int, scores: dict[str, Any]) -> list[str]:
    lines = [
        f"{name}: perplexity {scores['perplexity']:.4g} over {scores['tokens']} tokens"
        f" ({scores['windows']} windows of at most {context})"
    ]
    if (found := scores.get("against")) is None:
        return lines
    differ = found["different_tokens"]
    share = differ / scores["tokens"]
    overlap = next(value for key, value in found.items() if key.endswith("_overlap"))
    return [
        *lines,
        f"{against}: perplexity {found['perplexity']:.4g}, of which the engine's is"
        f" {found['perplexity_ratio']:.4f} times",
        f"KL divergence from it: {found['kl_mean']:.4g} nats a token, 99 % of them below"
        f" {found['kl_99']:.4g}",
        f"most likely token: another one at {differ} of {scores['tokens']} tokens ({share:.1%})",
        f"10 most likely tokens: {overlap:.1%} are the same",
    ]
