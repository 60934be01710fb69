"""A model of which the configuration is read, and no more: a checkpoint, a module, a head."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specc.artifact.decoders.checkpoint_format import open_checkpoint
from specc.artifact.decoders.decoded_reader import DecodedReader
from specc.artifact.safetensors_io import SafetensorsReader, TensorReader
from specc.artifact.weights import MemoryReader
from specc.compiler.assumptions import with_assumptions
from specc.drafters.drafter import Drafter
from specc.drafters.facts import DrafterFacts
from specc.drafters.registry import kind_of_target, meant_draft
from specc.errors import (
    HeadError,
    ModelNotFoundError,
    NotCausalLMError,
    SpeccError,
    WeightError,
)
from specc.passes.drafters.head_spec import HeadSpec, HeadSwitches, TargetFacts
from specc.passes.drafters.recognise import AS_TRAINED, recognise
from specc.passes.drafters.registry import (
    compiler_drafter,
    drafter_of_config,
    drafters_of_files,
)
from specc.passes.frontend import hf_model
from specc.system.json_file import read_json

# Hugging Face directory or id, or a module
ModelLike = str | Path | nn.Module

_CHANGE = "change what {name} computes there; docs/guide/models.md says what can be compiled"
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
        asked: how plans ask it, where it reads tokens alone, and proposes more than a level at a
            time.
    """

    name: str
    model: ModelLike
    directory: Path | None
    config: Any
    checkpoint_dtype: str
    rope_length: int | None = None
    scheme: str | None = None
    head: HeadSpec | None = None
    asked: Drafter | None = None

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
            _refuse_draft(directory)
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
        switches: HeadSwitches = AS_TRAINED,
    ) -> Candidate:
        """Read a draft, which may be a head of its target; arguments and errors as of `open`.

        Args:
            name: `draft_0`, ….
            model: what the user passed.
            rope_length: see `open`.
            is_weight_only: likewise.
            switches: what to take for what files of a head leave open.
        Raises:
            HeadError: a draft of hidden states that does not fit this target, or is not known.
            ConfigError: switches that this kind of head does not ask.
        """
        if isinstance(model, nn.Module) or not str(model).strip():
            return cls._open_model(name, model, rope_length, is_weight_only)
        if (kind := kind_of_target(str(model))) is not None:
            with errors_of(name):
                return cls._open_in_target(kind, name, target, is_weight_only, switches)
        with errors_of(name):
            directory = _directory_of_draft(model)
            head = _head_of(directory, target, switches)
            if head is None:
                return cls._open_model(name, model, rope_length, is_weight_only)
            with SafetensorsReader(head.files) as reader:
                dtype = _stored_dtype(reader)
            return cls(name, model, directory, head.config, dtype, None, None, head)

    @classmethod
    def _open_model(
        cls, name: str, model: ModelLike, rope_length: int | None, is_weight_only: bool
    ) -> Candidate:
        """A draft that reads tokens alone."""
        found = cls.open(name, model, rope_length, is_weight_only)
        return replace(found, asked=drafter_of_config(found.config, label(found)))

    @classmethod
    def _open_in_target(
        cls,
        kind: DrafterFacts,
        name: str,
        target: Candidate,
        is_weight_only: bool,
        switches: HeadSwitches,
    ) -> Candidate:
        """A draft that is in the target's checkpoint."""
        if target.directory is None:
            raise HeadError(
                f"--draft {kind.kind}, and a target that is a module ({label(target)})",
                f"the directory of a target, whose checkpoint holds an {kind.called}",
                "pass the directory, or another draft",
            )
        if hf_model.holds_more_than_text(target.directory):
            raise HeadError(
                f"--draft {kind.kind}, and a target that takes images, too ({label(target)})",
                "the checkpoint of a language model alone",
                "choose another --draft",
            )
        with open_checkpoint(target.directory, target.config, is_weight_only) as reader:
            facts = TargetFacts.of_config(label(target), target.config)
            drafter = compiler_drafter(kind)
            found = drafter.fit_in_target(target.config, reader, target.directory, facts, switches)
        head = with_assumptions(found, switches)
        given = (target.directory, head.config, target.checkpoint_dtype)
        return cls(name, kind.kind, *given, target.rope_length, target.scheme, head)

    @property
    def drafter(self) -> Drafter | None:
        """How plans ask it; None of a draft that they ask level by level, for tokens alone."""
        return self.asked if self.head is None else self.head.drafter(self.name)

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
    switches: Sequence[HeadSwitches] = (),
) -> list[Candidate]:
    """The target and its drafts, with the switches of each; see `Candidate`."""
    opened = [Candidate.open("target", target, rope_length, is_weight_only)]
    for number, draft in enumerate(drafts):
        sizes = (opened[0], rope_length, is_weight_only)
        own = switches[number] if switches else AS_TRAINED
        opened.append(Candidate.open_draft(f"draft_{number}", draft, *sizes, own))
    return opened


def _head_of(directory: Path, target: Candidate, switches: HeadSwitches) -> HeadSpec | None:
    """The head in a directory; None where it is an ordinary model.

    Raises:
        HeadError: another target's, or a target of which nothing is known.
    """
    name = label(target)
    facts = TargetFacts.of_config(name, target.config)
    is_known = min(facts.width, facts.num_layers, facts.vocab_size) > 0
    try:
        found = recognise(directory, facts, switches)
    except HeadError as error:
        if is_known:
            raise
        raise HeadError(
            f"{directory}: a draft head, and the target {name} has no configuration that says how"
            " wide and how deep it is",
            "hidden_size, num_hidden_layers and vocab_size",
            "pass the directory of the target",
        ) from error
    return None if found is None else with_assumptions(found, switches)


def _refuse_draft(directory: Path) -> None:
    """Raises HeadError: no model by itself, though transformers knows it as a language model."""
    file = directory / "config.json"
    raw = read_json(file, NotCausalLMError, "the configuration of a model", "correct config.json")
    for kind in drafters_of_files():
        if isinstance(raw, dict) and kind.is_no_model(raw):
            raise HeadError(
                f"{directory}: a {kind.called}, which is no model without its target",
                "a language model",
                f"pass its target, and this with --draft {directory}",
            )


def _directory_of_draft(model: ModelLike) -> Path:
    """Raises ModelNotFoundError: there is none, and what may have been meant instead."""
    try:
        return hf_model.resolve_directory(model)  # type: ignore[arg-type]
    except ModelNotFoundError as error:
        if (meant := meant_draft(str(model))) is None:
            raise
        do = f"did you mean --draft {meant}? Otherwise {error.do}"
        raise ModelNotFoundError(error.found, error.needed, do) from error


def label(model: Candidate) -> str:
    """What errors call it."""
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
