"""Model types of configurations: what transformers knows by another name, and what it cannot trace.

A checkpoint whose model type only its own code knows may name a class of transformers
(`kimi_k2`: `DeepseekV3ForCausalLM`), and is a model of that class. Layers that keep a state, and
attention to keys that the model chooses, are told from the configuration: to trace such a model
takes minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specc.errors import NotCausalLMError, UnsupportedAttentionError

_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


def known_type(raw: Mapping[str, Any], name: str) -> str:
    """The model type of transformers that a configuration has.

    Args:
        raw: contents of config.json.
        name: what the user called the model.
    Raises:
        NotCausalLMError: transformers does not know it, nor the class that the file names.
    """
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    own = raw.get("model_type")
    if own in CONFIG_MAPPING:
        return str(own)
    classes = raw.get("architectures") or [None]
    for model_type, kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if isinstance(own, str) and kind == classes[0] and model_type in CONFIG_MAPPING:
            return str(model_type)
    raise NotCausalLMError(
        f"{name}: config.json: the model type {own}"
        + (f" and the class {classes[0]}" if classes[0] else ""),
        f"one of the model types of transformers {__version__}; code that comes with a checkpoint"
        " is not run",
        "update transformers if it is newer than that, or pass another model",
    )


def check_layers_of(config: Any, name: str) -> None:
    """Refuse what is no attention to all keys, a window or chunks, before anything is traced.

    Args:
        config: of transformers, whose classes say of which kind each layer is.
        name: what the user called the model.
    Raises:
        UnsupportedAttentionError: layers with a state, or attention to keys that are chosen.
    """
    kinds = _field(config, "layer_types") or ()
    others = [kind for kind in kinds if isinstance(kind, str) and kind not in _ATTENTION]
    # a model without layers of attention may not say of which kind they are
    if not kinds and _field(config, "num_attention_heads") is None:
        others = ["no attention"]
    if others:
        raise UnsupportedAttentionError(
            f"{name}: config.json: {config.model_type} has layers of the kind {others[0]}",
            "layers that attend to all keys, to a window or to chunks; what others remember of a"
            " tree cannot be taken back",
            "pass a model of such layers",
        )


def _field(config: Any, key: str) -> Any:
    try:
        return getattr(config, key, None)
    except RuntimeError:  # layers differ, and the configuration of all of them has no such field
        return [getattr(layer, key, None) for layer in config.per_layer_config]
