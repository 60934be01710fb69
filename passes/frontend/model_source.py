"""Where a model comes from: a Hugging Face directory or a module in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from specc.artifact.decoders.checkpoint_format import open_checkpoint, without_quantization
from specc.artifact.decoders.decoded_reader import DecodedReader
from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.quantized_weights import kept_integers
from specc.artifact.safetensors_io import TensorReader
from specc.artifact.weight_spec import Source, WeightSpec
from specc.artifact.weights import MemoryReader
from specc.errors import ConfigError, WeightError
from specc.passes.drafters.head_spec import HeadSpec
from specc.passes.frontend import hf_model
from specc.passes.frontend.checkpoint import CheckpointMap
from specc.passes.frontend.config_numbers import check_layers
from specc.passes.frontend.gguf_tensors import check_tensors
from specc.passes.frontend.rotary import frozen_length
from specc.passes.frontend.text_part import TextReader, language_parameters, whole_config
from specc.passes.program import Program, Weight, constant_key
from specc.speculation.kv_window import KVWindow
from specc.speculation.vocabulary_map import VocabularyMap


@dataclass
class ModelSource:
    """A model to compile.

    Args:
        name: `target` or `draft_0`.
        label: what the user called it.
        dtype: of arithmetic, weights and caches.
        module: on the meta device if it comes from a directory, else with its weights.
        directory: of the checkpoint, or None.
        config: the module's configuration, or None.
        reader: the tensors of the checkpoint, or of the module.
        warnings: what the user should know.
        position_rows: positions that the traced graph's tables hold, once it is known.
        unread_tensors: of the checkpoint, which no weight of the program comes from, once
            `weight_specs` has been called.
        is_given: the module is the user's own object.
        rope_length: length whose rotary frequencies every position has, where that is not what
            transformers computes; else None.
        kv_window: rows that its layers attend to, where it is a draft that does not see all.
        places: what a parameter consists of in its checkpoint; None asks transformers.
        read_by_drafts: tensors of its checkpoint that drafts read.
        vocabulary: which of its ids stand for the target's, where it is a draft of other tokens.
        head: what it is, where it reads the target's hidden states.
        quantize: format that its weights are rounded to, where it is a draft that has one of its
            own; see `CompileConfig.draft_quantize`.
    """

    name: str
    label: str
    dtype: torch.dtype
    module: nn.Module
    directory: Path | None
    config: Any
    reader: TensorReader
    warnings: list[str] = field(default_factory=list)
    position_rows: int | None = None
    unread_tensors: tuple[str, ...] = ()
    is_given: bool = False
    rope_length: int | None = None
    kv_window: KVWindow | None = None
    places: Callable[[str], tuple[Source, ...]] | None = None
    read_by_drafts: set[str] = field(default_factory=set)
    vocabulary: VocabularyMap | None = None
    head: HeadSpec | None = None
    quantize: str | None = None

    @classmethod
    def load(
        cls,
        name: str,
        model: str | Path | nn.Module,
        dtype: torch.dtype,
        rope_length: int | None = None,
        is_weight_only: bool = False,
    ) -> ModelSource:
        """Open a directory without reading a weight, or take a module as it is.

        Args:
            name: `target` or `draft_0`.
            model: directory, hub id or module.
            dtype: of the weights.
            rope_length: see `rotary.constant_length`.
            is_weight_only: see `open_checkpoint`.
        Raises:
            ModelNotFoundError, NotCausalLMError, UnsupportedRotaryError: see hf_model.
            WeightError: the checkpoint is malformed, or quantized in a way that is not read.
            ConfigError: a module in another dtype.
        """
        if isinstance(model, nn.Module):
            config = getattr(model, "config", None)
            label = type(model).__name__
            _require_dtype(model, label, dtype)
            reader: TensorReader = MemoryReader.from_module(model)
            source = cls(name, label, dtype, model.eval(), None, config, reader, is_given=True)
            source.rope_length = frozen_length(config, rope_length)
            return source
        directory = hf_model.resolve_directory(model)
        config = hf_model.load_config(directory)
        # before minutes of tracing: headers say whether the checkpoint can be read
        reader, warnings = open_checkpoint(directory, config, is_weight_only), []
        config = without_quantization(config)
        # a GGUF file holds the language model alone, whatever config.json beside it is of
        is_text = isinstance(reader, DecodedReader) and reader.has_parameter_names
        holds_more = hf_model.holds_more_than_text(directory) and not is_text
        check_layers(config, len(list(reader.keys())), str(model))
        module = hf_model.build_on_meta(config, dtype)
        if holds_more:
            text = TextReader(reader, _text_names(config, module, reader))
            reader = reader.renamed(text.names) if isinstance(reader, DecodedReader) else text
            warnings = [
                f"{name.replace('_', ' ')}: the language model of {model}; images and sound are not"
                f" taken, and {text.num_others} tensors are not read"
            ]
        _check_embedding(module, reader, str(model))
        if isinstance(reader, DecodedReader):
            check_tensors(reader, module, config)
        if (directory / hf_model.ADAPTER).is_file():
            warnings.append(
                f"{name.replace('_', ' ')}: {model} holds {hf_model.ADAPTER}: an adapter, which"
                " transformers adds to the weights where peft is installed; specc takes the"
                " weights without it"
            )
        source = cls(name, str(model), dtype, module, directory, config, reader, warnings)
        source.rope_length = frozen_length(config, rope_length)
        return source

    @classmethod
    def of_shape(cls, name: str, label: str, config: Any, dtype: torch.dtype) -> ModelSource:
        """A model that has a configuration and no weights.

        Raises:
            NotCausalLMError: the configuration makes no model.
        """
        module = hf_model.build_on_meta(config, dtype)
        return cls(name, label, dtype, module, None, config, MemoryReader({}, label))

    @property
    def architecture(self) -> str:
        return type(self.module).__name__

    @property
    def location(self) -> str | None:
        """Absolute path of the checkpoint; None for a hub id, whose cache moves, and a module."""
        is_path = self.directory is not None and Path(self.label).exists()
        return str(Path(self.label).resolve()) if is_path else None

    @property
    def model_type(self) -> str:
        return getattr(self.config, "model_type", self.architecture)

    @property
    def max_position(self) -> int | None:
        """Longest sequence of the model, or None where neither config nor graph says."""
        stated = hf_model.max_position(self.config, self.rope_length)
        if self.kv_window is not None or self.head is not None:
            # no query meets a key that is further back; a table of positions ends all the same
            stated = None
        known = [limit for limit in (stated, self.position_rows) if limit is not None]
        return min(known, default=None)

    @property
    def is_quantized(self) -> bool:
        """Whether its checkpoint holds quantized weights."""
        return self.scheme is not None

    @property
    def scheme(self) -> str | None:
        """How its checkpoint is quantized, for people; None where it is not."""
        return self.reader.scheme if isinstance(self.reader, DecodedReader) else None

    def decoded_names(self, program: Program) -> list[str]:
        """Parameters of a program whose integers the checkpoint has and the engine has not."""
        if not isinstance(self.reader, DecodedReader):
            return []
        sources_of, reader = self._sources()[0], self.reader
        plain = (w.parameters for w in program.weights.values() if w.quantized is None)
        names = dict.fromkeys(name for parameters in plain for name in parameters)
        found = []
        for name in names:
            weights = (reader.decoded(source.name) for source in sources_of(name))
            if any(weight is not None and weight.is_quantized for weight in weights):
                found.append(name)
        return found

    def integers(self, program: Program) -> dict[str, KeptIntegers]:
        """Parameters of a program of which the checkpoint has integers → what holds those.

        Raises:
            WeightError: a parameter has no tensor in the checkpoint.
        """
        if not self.is_quantized:
            return {}
        sources_of, found = self._sources()[0], {}
        for name in (name for weight in program.weights.values() for name in weight.parameters):
            kept = kept_integers(sources_of(name), self.reader)
            if kept is not None:
                found[name] = kept
        return found

    def weight_specs(
        self,
        program: Program,
        copies: Iterable[Weight] = (),
        tables: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> list[WeightSpec]:
        """What to write for each weight and constant of a program, whole where it is cut.

        Args:
            program: of the model.
            copies: what else to write of its parameters.
            tables: what else to write, by key.
        Raises:
            WeightError: a parameter has no tensor in the checkpoint.
        """
        sources_of, checkpoint = self._sources()
        specs = []
        cuts = program.shard.by_key if program.shard else {}
        own = [x for name, x in program.weights.items() if name not in program.of_target]
        # last, so that they come and go without the others
        shared = [] if program.is_lent else [program.weights[x] for x in program.of_target]
        for weight in (*own, *copies, *shared):
            sources = tuple(s for name in weight.parameters for s in sources_of(name))
            is_turned = weight.is_turned
            if is_turned and len(weight.shape) == 2:
                # of matrices, readers bring the transpose themselves, and a rank's part of it
                sources, is_turned = _turned_sources(weight, sources), False
            shape = cuts[weight.key].shape if weight.key in cuts else weight.shape
            # what is quantized is not rounded to the engine's type before that
            dtype = weight.dtype if weight.quantized is None else torch.float32
            layout = weight.in_blocks, weight.quantized, is_turned
            specs.append(WeightSpec(weight.key, dtype, shape, sources, None, *layout))
        for name, value in program.constants.items():
            specs.append(WeightSpec.from_tensor(constant_key(name), value))
        specs += [WeightSpec.from_tensor(key, value) for key, value in tables.items()]
        first = len(own) + len(tuple(copies))
        specs += [specs.pop(first) for _ in shared]
        if checkpoint is not None:
            unread = checkpoint.unread()
            self.unread_tensors = tuple(x for x in unread if x not in self.read_by_drafts)
        return specs

    def parameter_sources(self) -> Callable[[str], tuple[Source, ...]]:
        """What tells which tensors of the checkpoint a parameter consists of."""
        return self._sources()[0]

    def _sources(self) -> tuple[Callable[[str], tuple[Source, ...]], CheckpointMap | None]:
        """What tells the sources of a parameter, and what transformers knows of the checkpoint."""
        if self.places is not None:
            return self.places, None
        if self.directory is None:
            return own_source, None
        module: Any = self.module
        checkpoint = CheckpointMap(module, self.reader)
        return checkpoint.sources, checkpoint


def _check_embedding(module: nn.Module, reader: TensorReader, label: str) -> None:
    """Weights of another width or vocabulary are met here rather than after minutes of tracing.

    Raises:
        WeightError: the checkpoint's embedding has another shape than the configuration says.
    """
    find = getattr(module, "get_input_embeddings", None)
    weight = getattr(find() if find else None, "weight", None)
    for key, parameter in module.named_parameters():
        if parameter is not weight or key not in set(reader.keys()):
            continue
        if (found := tuple(reader.shape(key))) != tuple(parameter.shape):
            raise WeightError(
                f"{label}: {key} is {list(found)} in {reader.location(key)}",
                f"{list(parameter.shape)}, as config.json says",
                "pass the config.json of this checkpoint",
            )


def _text_names(config: Any, module: Any, reader: TensorReader) -> dict[str, str] | None:
    """Of a wrapper that is traced, its language model's tensors, which keep their names."""
    if whole_config(config) is None:
        return None
    own = CheckpointMap(module, reader).tensors_of(language_parameters(module))
    return dict(zip(own, own, strict=True))


def own_source(name: str) -> tuple[Source, ...]:
    """Of a reader that has each tensor under the name of its parameter."""
    return (Source(name),)


def _turned_sources(weight: Weight, sources: Sequence[Source]) -> tuple[Source, ...]:
    """Sources of the transpose of each parameter of a weight.

    Raises:
        WeightError: a parameter is made of several tensors, which are rows of it, not columns.
    """
    if len(sources) != len(weight.parameters):
        raise WeightError(
            f"{weight.key} of {', '.join(source.name for source in sources)}",
            "a parameter that is one tensor of the checkpoint, since it is stored transposed",
            "load the model with transformers and pass the module to specc.compile",
        )
    return tuple(replace(source, transpose=not source.transpose) for source in sources)


def _require_dtype(module: nn.Module, label: str, dtype: torch.dtype) -> None:
    """A module is traced as it is: its own dtype is that of the program and its caches."""
    found = {p.dtype for p in module.parameters() if p.dtype.is_floating_point}
    if found - {dtype}:
        names = ", ".join(sorted(_name(item) for item in found))
        raise ConfigError(
            f"{label} has parameters of {names}; dtype is {_name(dtype)}",
            "one dtype",
            f"pass the module as .to(torch.{_name(dtype)}), or another dtype",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
