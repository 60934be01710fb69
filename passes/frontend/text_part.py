"""The language model inside a model that also takes images: its configuration and its tensors.

Such a checkpoint names a wrapper (`Gemma3ForConditionalGeneration`), whose `text_config` is that of
a causal language model, and whose tensors of text have a prefix. Where transformers has no class of
such a model alone (`Qwen2VLForConditionalGeneration`), the wrapper itself is traced with text. Only
text goes through what is compiled of it, and the user is told so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from specc.artifact.decoders.checkpoint_format import QUANTIZATION_FIELDS
from specc.artifact.forwarding_reader import ForwardingReader
from specc.artifact.safetensors_io import TensorReader

_SUFFIX = "ForConditionalGeneration"
# attribute of a text's configuration: that of the wrapper to trace
_WHOLE = "_specc_whole"
# of newer checkpoints, then of older ones; what has none of them is not read, but for the head
_PREFIXES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)


def text_config(config: Any, architecture: str) -> Any | None:
    """Configuration of the language model in a wrapper; None where this is no such wrapper.

    Where the wrapper is to be traced, `whole_config` of it is the whole one.

    Args:
        config: of transformers, of the whole model.
        architecture: class that config.json names, or "".
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    own: Any = getattr(config, "text_config", None)
    if own is None or not architecture.endswith(_SUFFIX):
        return None
    if not MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(own.model_type, "").endswith("ForCausalLM"):
        found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
        if found != architecture or getattr(own, "is_encoder_decoder", False):
            return None
        setattr(own, _WHOLE, copy.copy(config))
    # the wrapper has the head, and says whether that is the embedding
    tied = getattr(config, "tie_word_embeddings", None)
    if isinstance(tied, bool):
        own.tie_word_embeddings = tied
    # and what begins and ends an output, where it says that: transformers asks it first
    for name in ("bos_token_id", "eos_token_id"):
        if (token := getattr(config, name, None)) is not None:
            setattr(own, name, token)
    # and how the whole checkpoint is quantized
    for name in QUANTIZATION_FIELDS:
        if getattr(own, name, None) is None and hasattr(config, name):
            setattr(own, name, getattr(config, name))
    return own


def whole_config(config: Any) -> Any | None:
    """Of a `text_config` of which transformers has no model alone: the configuration around it."""
    return getattr(config, _WHOLE, None)


def is_wrapper(architectures: Any) -> bool:
    """Whether config.json names a wrapper first."""
    names = architectures if isinstance(architectures, list) else []
    return bool(names) and isinstance(names[0], str) and names[0].endswith(_SUFFIX)


def language_parameters(module: Any) -> set[str]:
    """Names of a wrapper's parameters and saved buffers that belong to its language model.

    Args:
        module: of transformers, which says what its decoder and its head are.
    """
    parts = (module.get_decoder(), module.get_output_embeddings())
    paths = [path for path, part in module.named_modules() if any(part is x for x in parts)]
    keys = module.state_dict().keys()
    return {
        key for key in keys if any(key.startswith(f"{path}." if path else "") for path in paths)
    }


class TextReader(ForwardingReader):
    """The tensors of the language model, under the names that it has alone.

    Args:
        names: of these tensors, and the names that they have there; None goes by their prefixes.
    """

    def __init__(self, reader: TensorReader, names: Mapping[str, str] | None = None) -> None:
        self._reader = reader
        self.names: dict[str, str] = dict(names or {})
        for name in reader.keys() if names is None else ():
            for prefix, own in _PREFIXES:
                if name.startswith(prefix):
                    self.names.setdefault(own + name.removeprefix(prefix), name)
                    break

    @property
    def num_others(self) -> int:
        """Tensors of the checkpoint that are not the language model's."""
        return len(list(self._reader.keys())) - len(self.names)

    def keys(self) -> Iterable[str]:
        return self.names.keys()

    def location(self, key: str | None = None) -> str:
        return self._reader.location(None if key is None else self.names.get(key, key))

    def source_of(self, key: str) -> tuple[TensorReader, str]:
        # of a tensor that is not there, the whole reader says so
        return self._reader, self.names.get(key, key)
