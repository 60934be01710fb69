"""What a compilation can refuse before it loads a model: paths, headers, dtypes, lengths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specc.artifact.backends import BackendFacts, backend_names, facts_of
from specc.artifact.decoders.checkpoint_format import open_checkpoint
from specc.artifact.decoders.decoded_reader import DecodedReader
from specc.artifact.safetensors_io import SafetensorsReader, TensorReader
from specc.artifact.weights import MemoryReader
from specc.config import AUTO, DTYPES, CompileConfig
from specc.errors import (
    ConfigError,
    HeadError,
    ModelNotFoundError,
    OutputError,
    SpeccError,
    WeightError,
)
from specc.passes.frontend import hf_model
from specc.passes.frontend.heads.head_spec import HeadSpec, TargetFacts
from specc.passes.frontend.heads.mtp_spec import MTP_DRAFT, recognise_mtp
from specc.passes.frontend.heads.recognise import recognise
from specc.passes.frontend.rotary import check_rope_length, check_rotary
from specc.passes.step.tiles import tile_plan
from specc.speculation.plans import OFF

# Hugging Face directory or id, or a module
ModelLike = str | Path | nn.Module

_CHANGE = "change what {name} computes there; README, What is supported, says what can be compiled"
# beginning of an error's advice → advice for somebody who wrote the module
_ADVICE_FOR_MODULES = {
    "choose a model of a supported architecture": _CHANGE,
    "report the architecture": "change {name}.forward so that torch.export can trace it",
    "choose a rotary scaling": _CHANGE,
    "check the model's configuration": "change the numbers of heads in {name}",
}


@dataclass(frozen=True)
class Candidate:
    """A model of which the configuration is read, and no more.

    Args:
        name: `target` or `draft_0`.
        model: what the user passed.
        directory: of the checkpoint; None for a module.
        config: its configuration, or None.
        checkpoint_dtype: what most of its weights are stored in.
        rope_length: of the engine, see `specc.passes.frontend.rotary.constant_length`.
        scheme: how its checkpoint is quantized; None where it is not.
        head: what it is, where it reads the target's hidden states.
    """

    name: str
    model: ModelLike
    directory: Path | None
    config: Any
    checkpoint_dtype: str
    rope_length: int | None = None
    scheme: str | None = None
    head: HeadSpec | None = None

    @classmethod
    def open(
        cls,
        name: str,
        model: ModelLike,
        rope_length: int | None = None,
        is_weight_only: bool = False,
    ) -> Candidate:
        """Read configuration and headers.

        Raises:
            ModelNotFoundError, NotCausalLMError, UnsupportedRotaryError: see hf_model.
            WeightError: the checkpoint is malformed, or quantized in a way that is not read.
        """
        with errors_of(name):
            if isinstance(model, nn.Module):
                config = getattr(model, "config", None)
                reader: TensorReader = MemoryReader.from_module(model)
                return cls(name, model, None, config, _stored_dtype(reader), rope_length)
            if not str(model).strip():
                raise ModelNotFoundError(
                    "an empty path of a model",
                    "a directory with config.json, model.safetensors and tokenizer.json",
                    "pass its path; an unset variable of a shell is empty, too",
                )
            directory = hf_model.resolve_directory(model)
            config = hf_model.load_config(directory)
            with open_checkpoint(directory, config, is_weight_only) as reader:
                scheme = reader.scheme if isinstance(reader, DecodedReader) else None
                dtype = _stored_dtype(reader)
                return cls(name, model, directory, config, dtype, rope_length, scheme)

    @classmethod
    def open_draft(
        cls,
        name: str,
        model: ModelLike,
        target: Candidate,
        rope_length: int | None = None,
        is_weight_only: bool = False,
    ) -> Candidate:
        """Read a draft, which may be a head of its target; arguments and errors as of `open`.

        Raises:
            HeadError: a draft of hidden states that does not fit this target, or is not known.
        """
        if isinstance(model, nn.Module) or not str(model).strip():
            return cls.open(name, model, rope_length, is_weight_only)
        if str(model) == MTP_DRAFT:
            with errors_of(name):
                return cls._open_mtp(name, target, is_weight_only)
        with errors_of(name):
            directory = hf_model.resolve_directory(model)
            head = _head_of(directory, target)
            if head is None:
                return cls.open(name, model, rope_length, is_weight_only)
            with SafetensorsReader(head.files) as reader:
                dtype = _stored_dtype(reader)
            return cls(name, model, directory, head.config, dtype, None, None, head)

    @classmethod
    def _open_mtp(cls, name: str, target: Candidate, is_weight_only: bool) -> Candidate:
        """The MTP module of the target."""
        if target.directory is None:
            raise HeadError(
                f"--draft {MTP_DRAFT}, and a target that is a module ({_label(target)})",
                "the directory of a target, whose checkpoint holds an MTP module",
                "pass the directory, or another draft",
            )
        if hf_model.holds_more_than_text(target.directory):
            raise HeadError(
                f"--draft {MTP_DRAFT}, and a target that takes images, too ({_label(target)})",
                "the checkpoint of a language model alone",
                "choose another --draft",
            )
        with open_checkpoint(target.directory, target.config, is_weight_only) as reader:
            facts = TargetFacts.of_config(_label(target), target.config)
            head = recognise_mtp(target.config, reader, target.directory, facts)
        given = (target.directory, head.config, target.checkpoint_dtype)
        return cls(name, MTP_DRAFT, *given, target.rope_length, target.scheme, head)

    @property
    def max_position(self) -> int | None:
        return hf_model.max_position(self.config, self.rope_length)


def as_drafts(drafts: ModelLike | Sequence[ModelLike] | None) -> list[ModelLike]:
    """None, one draft or several as a list."""
    if drafts is None:
        return []
    return [drafts] if isinstance(drafts, (str, Path, nn.Module)) else list(drafts)


def open_models(
    target: ModelLike,
    drafts: Sequence[ModelLike],
    rope_length: int | None = None,
    is_weight_only: bool = False,
) -> list[Candidate]:
    """The target and its drafts; see `Candidate`."""
    opened = [Candidate.open("target", target, rope_length, is_weight_only)]
    for number, draft in enumerate(drafts):
        sizes = (opened[0], rope_length, is_weight_only)
        opened.append(Candidate.open_draft(f"draft_{number}", draft, *sizes))
    return opened


def _head_of(directory: Path, target: Candidate) -> HeadSpec | None:
    """The head in a directory; None where it is an ordinary model.

    Raises:
        HeadError: another target's, or a target of which nothing is known.
    """
    name = _label(target)
    facts = TargetFacts.of_config(name, target.config)
    is_known = min(facts.width, facts.num_layers, facts.vocab_size) > 0
    try:
        found = recognise(directory, facts)
    except HeadError as error:
        if is_known:
            raise
        raise HeadError(
            f"{directory}: a draft head, and the target {name} has no configuration that says how"
            " wide and how deep it is",
            "hidden_size, num_hidden_layers and vocab_size",
            "pass the directory of the target",
        ) from error
    return found


def _label(model: Candidate) -> str:
    return type(model.model).__name__ if model.directory is None else str(model.model)


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Say in an error which draft it is about."""
    try:
        yield
    except SpeccError as error:
        if name == "target":
            raise
        raise type(error)(
            f"{name.replace('_', ' ')}: {error.found}", error.needed, error.do
        ) from error


@contextmanager
def advice_for(model: ModelLike) -> Iterator[None]:
    """Advise the author of a module to change it, where errors send others to another model."""
    try:
        yield
    except SpeccError as error:
        if not isinstance(model, nn.Module):
            raise
        name = type(model).__name__
        for begin, advice in _ADVICE_FOR_MODULES.items():
            if error.do.startswith(begin):
                raise type(error)(error.found, error.needed, advice.format(name=name)) from error
        raise


def choose_dtypes(
    config: CompileConfig, models: Sequence[Candidate], backend: BackendFacts
) -> tuple[list[str], list[str]]:
    """Type of each model, and warnings.

    `auto` is the type of the checkpoint, or float32, which holds all of its values, where the
    backend does not compute in it. Drafts that are told nothing take what the target has.

    Raises:
        ConfigError: a type that the backend, or specc, does not compute in.
    """
    wanted = config.dtypes_of(len(models) - 1)
    warnings: list[str] = []
    chosen: list[str] = []
    for model, dtype in zip(models, wanted, strict=True):
        if dtype != AUTO:
            chosen.append(dtype)
        elif chosen and not config.draft_dtypes:
            chosen.append(chosen[0])
        else:
            chosen.append(_automatic(model, backend, warnings))
    for dtype in chosen:
        if dtype not in backend.dtypes:
            raise _not_computed(dtype, backend)
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
        label = type(model.model).__name__ if model.directory is None else str(model.model)
        lengths = (config.max_seq_len, config.rope_length)
        with errors_of(model.name), advice_for(model.model):
            check_rotary(model.config, label, *lengths)
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


def _not_computed(dtype: str, backend: BackendFacts) -> ConfigError:
    others = [name for name in backend_names() if dtype in facts_of(name).dtypes]
    return ConfigError(
        f"dtype {dtype} for the backend {backend.name}",
        f"{' or '.join(backend.dtypes)}, or one of the backends {', '.join(others)}",
        f"pass --dtype {backend.dtypes[-1]}, or --backend {others[0]}",
    )


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


def _stored_dtype(reader: TensorReader) -> str:
    """The floating-point type of most weights by name; empty where there is none."""
    counts: Counter[torch.dtype] = Counter()
    # of a quantized checkpoint, what is not: embeddings and norms have the model's own type
    keys = reader.plain_keys() if isinstance(reader, DecodedReader) else reader.keys()
    for key in keys:
        # types that only quantized checkpoints have are refused later, with the tensor's name
        with suppress(WeightError):
            counts[reader.dtype(key)] += math.prod(reader.shape(key))
    floating = Counter({dtype: n for dtype, n in counts.items() if dtype.is_floating_point})
    return str(floating.most_common(1)[0][0]).removeprefix("torch.") if floating else ""
