"""The models of an engine after all checks that need no module: types, lengths, tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specc.artifact.backends import BackendFacts
from specc.compile_request import CompileRequest
from specc.compiler.assumptions import AS_FILES_SAY, switches_of
from specc.compiler.backends.base import CompilerBackend
from specc.compiler.candidate import Candidate, ModelLike, advice_for, errors_of, label, open_models
from specc.compiler.context import check_seq_len, check_voters, engine_plans
from specc.compiler.heads import called, check_heads, taps_of, with_confidence, with_heads
from specc.compiler.stages import check_num_stages
from specc.compiler.tokenizer import TokenizerFiles, check_tokenizers
from specc.config import CompileConfig
from specc.dtypes import AUTO, DTYPES
from specc.errors import (
    ConfigError,
    OutputError,
)
from specc.passes.drafters.head_source import head_source
from specc.passes.frontend.config_numbers import whole_number
from specc.passes.frontend.model_source import ModelSource
from specc.passes.frontend.rotary import check_rope_length, check_rotary
from specc.passes.step.tiles import tile_plan
from specc.refusals import refuse
from specc.speculation.kv_window import KVWindow
from specc.speculation.plans import OFF, SpecPlan
from specc.speculation.taps import Taps

# what has to be divisible, by the names that configurations have for it
_SIZES = {
    "attention heads": ("num_attention_heads", "n_head"),
    "inner features": ("intermediate_size", "ffn_dim", "n_inner"),
    "inner features of experts": ("moe_intermediate_size",),
}
_LAYERS = ("num_hidden_layers", "n_layer")
_KV_HEADS = "num_key_value_heads"


@dataclass(frozen=True)
class CheckedModels:
    """Models that may be loaded.

    Args:
        candidates: the target first.
        warnings: what the user should know.
        kv_windows: rows that the layers of each attend to; None is all of them.
        rounded: what each is rounded to, where it is a draft that has a format of its own.
        plans: of the engine, with the heads among its drafts.
        taps: hidden states that the target keeps for its heads, or None.
        is_weight_only: see `open_checkpoint`.
    """

    candidates: list[Candidate]
    dtypes: list[str]
    tokens: TokenizerFiles
    warnings: list[str]
    kv_windows: list[KVWindow | None]
    rounded: list[str | None]
    plans: list[SpecPlan]
    taps: Taps | None
    is_weight_only: bool = False

    @classmethod
    def check(
        cls,
        target: ModelLike,
        drafts: Sequence[ModelLike],
        config: CompileConfig,
        backend: CompilerBackend,
        tokenizer: str | Path | None,
        request: CompileRequest,
    ) -> CheckedModels:
        """Read configurations and headers, and refuse what cannot be compiled.

        Args:
            target: as the user has passed it.
            drafts: likewise.
            tokenizer: directory or tokenizer.json, where the target is a module.
            request: what is known before the models are.
        Raises:
            SpeccError: found / needed / do.
        """
        switches = switches_of(config, len(drafts))
        candidates = open_models(target, drafts, config.rope_length, config.weight_only, switches)
        check_assumptions(candidates, config)
        candidates = with_confidence(candidates, backend.facts, engine_plans(config, len(drafts)))
        dtypes, told = choose_dtypes(config, candidates, backend.facts)
        request = replace(
            request,
            heads={x.name: called(x) for x in candidates if x.head is not None},
            schemes={x.name: x.scheme for x in candidates if x.scheme is not None},
            dtypes=dtypes,
        )
        refuse(request)
        backend.check_config(config, dtypes)
        told += check_lengths(config, candidates)
        check_heads(candidates, dtypes)
        check_logits(config, candidates[0], dtypes[0])
        check_voters(config.plans, _head_dims(candidates[0].config), dtypes[0], backend.facts)
        for candidate in candidates:
            is_draft = candidate is not candidates[0]
            check_ranks(config, candidate.config, candidate.name, is_draft=is_draft)
        if num_layers := _named_size(candidates[0].config, _LAYERS):
            check_num_stages(config.pipeline_parallel_size, num_layers)
        tokens = check_tokenizers(candidates, tokenizer)
        plans = with_heads(request.plans or (), candidates)
        reads_hidden = request.reads_hidden or bool(request.heads)
        refuse(replace(request, plans=plans, reads_hidden=reads_hidden, mapped=tuple(tokens.maps)))
        windows = config.kv_windows_of(len(drafts))
        rounded = [None, *config.rounded_drafts(len(drafts))]
        told, taps = [*tokens.warnings, *told], taps_of(candidates)
        given = (windows, rounded, plans, taps, config.weight_only)
        return cls(candidates, dtypes, tokens, told, *given)

    def load(self) -> list[ModelSource]:
        """Open them; no weight is read.

        Raises:
            SpeccError: see `ModelSource.load`.
        """
        sources: list[ModelSource] = []
        models = zip(self.candidates, self.dtypes, self.kv_windows, self.rounded, strict=True)
        for candidate, dtype, window, rounded in models:
            with errors_of(candidate.name), advice_for(candidate.model):
                kind = getattr(torch, dtype)
                if candidate.head is not None:
                    given = (sources[0], kind, candidate.name)
                    source = head_source(candidate.head, *given)
                    source.quantize = rounded
                    sources.append(source)
                    continue
                sizes = (kind, candidate.rope_length, self.is_weight_only)
                source = ModelSource.load(candidate.name, candidate.model, *sizes)
                source.kv_window, source.quantize = window, rounded
                source.vocabulary = self.tokens.maps.get(candidate.name)
                sources.append(source)
        return sources


def _head_dims(model: Any) -> list[int]:
    """Of the attention of a configuration; empty where it does not say."""
    heads = _size(model, "num_attention_heads") or _size(model, "n_head")
    width = _size(model, "hidden_size") or _size(model, "n_embd")
    own = _size(model, "head_dim") or (width // heads if heads and width else None)
    return [own] if own else []


def check_ranks(
    config: CompileConfig, model: Any, name: str = "target", *, is_draft: bool = False
) -> None:
    """Sizes that a configuration names; what it does not name, the cut itself checks.

    Args:
        model: configuration of a model; None for a module without one.
        is_draft: whether it is a draft.
    Raises:
        ConfigError: a size that the number of ranks does not divide.
    """
    num_ranks = config.draft_tensor_parallel_size if is_draft else config.tensor_parallel_size
    if num_ranks == 1 or model is None:
        return
    found = {what: size for what, names in _SIZES.items() if (size := _named_size(model, names))}
    for what, size in found.items():
        if size % num_ranks:
            raise _indivisible(num_ranks, f"{size} {what}", [size], name, is_draft)
    kv_heads = _size(model, _KV_HEADS)
    if kv_heads and kv_heads % num_ranks and num_ranks % kv_heads:
        what = f"{kv_heads} key and value heads"
        raise _indivisible(num_ranks, what, list(found.values()), name, is_draft)


def _named_size(model: Any, names: Sequence[str]) -> int | None:
    """The size that a configuration gives under the first of these names that it knows."""
    return next((size for name in names if (size := _size(model, name))), None)


def _size(model: Any, name: str) -> int | None:
    value = whole_number(model, name)
    return value if value > 0 else None


def _indivisible(
    num_ranks: int, found: str, sizes: list[int], name: str, is_draft: bool
) -> ConfigError:
    fits = [n for n in range(2, min(sizes) + 1) if all(size % n == 0 for size in sizes)]
    names = ", ".join(map(str, fits[:6]))
    option = "--draft-tensor-parallel-size" if is_draft else "--tensor-parallel-size"
    return ConfigError(
        f"{option} {num_ranks}, and {found} in {name if is_draft else 'the target'}",
        f"a number that divides them: {names}" if fits else "a size that divides them",
        f"leave {option} at 1: rank 0 drafts alone" if is_draft else f"choose another {option}",
    )


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
        target: one without a configuration is looked at when it is traced.
    Raises:
        ConfigError: not even those fit.
    """
    # a module may bring a configuration of its own kind
    num_ids = getattr(target.config, "vocab_size", None)
    if num_ids is not None:
        row_bytes = {"target": num_ids * getattr(torch, dtype).itemsize}
        tile_plan(OFF, row_bytes, config.max_batch_size, config.max_logits_mb)


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
