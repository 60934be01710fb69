"""Model types of configurations: what transformers knows by another name, and what it cannot trace.

A checkpoint whose model type only its own code knows may name a class of transformers
(`kimi_k2`: `DeepseekV3ForCausalLM`), and is a model of that class. Layers whose state no operator
of specc computes, and attention to keys that the model chooses, are told from the configuration: to
trace such a model takes minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from specc.errors import NotCausalLMError, UnsupportedAttentionError
from specc.passes.frontend.recurrence_functions import are_known

_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
# kinds of layers that keep a state, or go token by token, beside convolutions and recurrences that
# `recurrence_functions` knows
_STATES = frozenset({"linear_attention", "conv", "hybrid", "mamba", "mlp", "moe"})
# models whose attention is causal in what they write alone; transformers' code would be traced
# without a word
_PREFIX_LMS = frozenset({"paligemma"})
# what there is no operator for
_MAMBA1 = "the selective scan of Mamba-1, where each column of a state has its own decay"
_MISSING = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), _MAMBA1),
    "recurrent_gemma": "RG-LRU, whose state transformers keeps in the module",
    "minimax": "lightning attention",
    "rwkv": "WKV, the recurrence of RWKV",
    "xlstm": "the mLSTM of xLSTM",
}


def known_type(raw: Mapping[str, Any], name: str) -> str:
    """The model type of transformers that a configuration has.

    Args:
        raw: contents of config.json.
    Raises:
        NotCausalLMError: transformers does not know it, nor the class that the file names; or a
            prompt's attention is not causal.
    """
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    own = raw.get("model_type")
    if own in _PREFIX_LMS:
        raise NotCausalLMError(
            f"{name}: config.json: {own}, where tokens of a prompt see the later ones",
            "a model whose tokens see those before them",
            "pass a causal language model",
        )
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


def causal_class(model_type: str) -> str | None:
    """Name of the class of transformers of a causal language model, or None.

    Some are among those that also take images (`mistral4`).
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if (found := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)) is not None:
        return str(found)
    other = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type, "")
    return str(other) if str(other).endswith("ForCausalLM") else None


def check_layers_of(config: Any, name: str) -> None:
    """Refuse what is neither attention to all keys, a window or chunks, nor a known recurrence.

    Args:
        config: of transformers, whose classes say of which kind each layer is.
    Raises:
        UnsupportedAttentionError: layers with another state, or attention to keys that are chosen.
    """
    kinds = _field(config, "layer_types") or ()
    others = [kind for kind in kinds if isinstance(kind, str) and kind not in _ATTENTION]
    if others and _has_operators(config):
        others = [kind for kind in others if kind not in _STATES]
    # a model without layers of attention may not say of which kind they are
    if not kinds and _field(config, "num_attention_heads") is None:
        others = ["no attention"]
    if others:
        missing = _MISSING.get(config.model_type)
        raise UnsupportedAttentionError(
            f"{name}: config.json: {config.model_type} has layers of the kind {others[0]}"
            + (f": {missing}" if missing else ""),
            "layers that attend to all keys, to a window or to chunks, short convolutions, gated"
            " delta rules (KDA, too), and scans of Mamba-2",
            "pass a model of such layers",
        )


def _has_operators(config: Any) -> bool:
    """Whether the file of a model has convolutions or recurrences, and operators compute them."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return kind is not None and are_known(vars(sys.modules[kind.__module__]))


def _field(config: Any, key: str) -> Any:
    try:
        return getattr(config, key, None)
    except RuntimeError:  # layers differ, and the configuration of all of them has no such field
        return [getattr(layer, key, None) for layer in config.per_layer_config]
