"""What a compilation can refuse before it loads a model: paths, headers, dtypes, lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from specc.artifact.backends import BackendFacts
from specc.compiler.assumptions import AS_FILES_SAY
from specc.compiler.candidate import Candidate, advice_for, errors_of, label
from specc.config import AUTO, DTYPES, CompileConfig
from specc.errors import (
    ConfigError,
    OutputError,
)
from specc.passes.frontend.rotary import check_rope_length, check_rotary
from specc.passes.step.tiles import tile_plan
from specc.speculation.plans import OFF


def choose_dtypes(
    config: CompileConfig, models: Sequence[Candidate], backend: BackendFacts
) -> tuple[list[str], list[str]]:
    """Type of each model, and warnings.

    `auto` is the type of the checkpoint, or float32, which holds all of its values, where the
    backend does not compute in it. Drafts that are told nothing take what the target has.

    Raises:
        ConfigError: a checkpoint in a type that specc does not compute in.
    """
    wanted = config.dtypes_of(len(models) - 1)
    warnings: list[str] = []
    chosen: list[str] = []
    for model, dtype in zip(models, wanted, strict=True):
        if dtype != AUTO:
            chosen.append(dtype)
        elif chosen and not config.draft_dtype:
            chosen.append(chosen[0])
        else:
            chosen.append(_automatic(model, backend, warnings))
    return chosen, warnings


def check_lengths(config: CompileConfig, models: Sequence[Candidate]) -> list[str]:
    """Compare lengths with what configurations say. A draft with a window may be outgrown.

    Returns:
        what the user should know.
    Raises:
        UnsupportedRotaryError: `max_seq_len` is beyond what rotary frequencies are constant for.
        ConfigError: `max_seq_len` or a draft's window is beyond the positions of a model, or
            `rope_length` is of no use.
    """
    # how far a head was trained is no limit: what it proposes is verified
    configs = {model.name: model.config for model in models if model.head is None}
    told = check_rope_length(configs, config.rope_length)
    windows = config.kv_windows_of(len(models) - 1)
    known = {}
    for model, rows in zip(models, windows, strict=True):
        if model.head is not None:
            continue
        lengths = (config.max_seq_len, config.rope_length)
        with errors_of(model.name), advice_for(model.model):
            check_rotary(model.config, label(model), *lengths)
        if rows is None:
            known[model.name] = model.max_position
        elif model.max_position is not None and rows.window > model.max_position:
            raise ConfigError(
                f"--draft-kv {rows.option}; the {model.name.replace('_', ' ')} model has"
                f" {model.max_position} positions",
                f"a window of {model.max_position} rows or less: it was trained on no distance"
                " beyond",
                f"pass --draft-kv window={model.max_position}, or less",
            )
    check_seq_len(config.max_seq_len, {name: most for name, most in known.items() if most})
    return told


def check_logits(config: CompileConfig, target: Candidate, dtype: str) -> None:
    """Compare the limit of logits with what one token of each sequence takes.

    Args:
        config: with the limit.
        target: one without a configuration is looked at when it is traced.
        dtype: of the target.
    Raises:
        ConfigError: not even those fit.
    """
    # a module may bring a configuration of its own kind
    num_ids = getattr(target.config, "vocab_size", None)
    if num_ids is not None:
        row_bytes = {"target": num_ids * getattr(torch, dtype).itemsize}
        tile_plan(OFF, row_bytes, config.max_batch_size, config.max_logits_mb)


def check_seq_len(max_seq_len: int | None, longest: dict[str, int]) -> None:
    """Compare the length that was asked for with the positions of the models.

    Raises:
        ConfigError: it is beyond them.
    """
    if max_seq_len is None or not longest or max_seq_len <= min(longest.values()):
        return
    name = min(longest, key=lambda key: longest[key])
    most = longest[name]
    raise ConfigError(
        f"--max-seq-len {max_seq_len}; the {name.replace('_', ' ')} model has {most} positions",
        f"{most} or less",
        f"pass --max-seq-len {most}",
    )


def check_dump(directory: Path | None) -> None:
    """Make the directory for graphs, which are written late.

    Raises:
        OutputError: it cannot be made or written to.
    """
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".specc-write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(
            f"--dump-graphs {directory}: {error.strerror or error}",
            "a directory that this user may write to",
            "choose another directory, or leave out --dump-graphs",
        ) from error


def _automatic(model: Candidate, backend: BackendFacts, warnings: list[str]) -> str:
    dtype = model.checkpoint_dtype
    if dtype in DTYPES and dtype not in backend.dtypes:
        warnings.append(
            f"{model.name}: its checkpoint is in {dtype}, which the backend {backend.name} does"
            " not compute in; --dtype auto is float32 here"
        )
        return "float32"
    if dtype not in DTYPES:
        raise ConfigError(
            f"--dtype auto, and the {model.name.replace('_', ' ')} model is stored in"
            f" {dtype or 'no floating-point type'}",
            f"a checkpoint in {', '.join(DTYPES)}, or a type by name",
            f"pass --dtype {DTYPES[0]}",
        )
    return dtype


def check_assumptions(candidates: Sequence[Candidate], config: CompileConfig) -> None:
    """Refuse what was said of drafts that are no heads.

    Args:
        candidates: the target first.
        config: options; what is said once is of all heads among the drafts.
    Raises:
        ConfigError: it is said of an ordinary model.
    """
    drafts, given = candidates[1:], config.draft_assume
    if not given:
        return
    texts = config.assumptions_of(len(drafts))
    plain = [
        (draft, text)
        for draft, text in zip(drafts, texts, strict=True)
        if draft.head is None and text.strip() != AS_FILES_SAY
    ]
    if plain and (len(given) > 1 or len(plain) == len(drafts)):
        draft, text = plain[0]
        called = f"{draft.name.replace('_', ' ')} ({label(draft)})"
        raise ConfigError(
            f"--draft-assume {text}, and {called}, which is an ordinary model",
            "a head or a block drafter, whose files leave something open",
            f"leave it out, or pass --draft-assume {AS_FILES_SAY} for this draft",
        )
