"""Models in Hugging Face directories: configuration, checks, and the module on the meta device."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specc.errors import ModelNotFoundError, NotCausalLMError, UnsupportedRotaryError

# frequencies that depend on the longest position of a pass
_LENGTH_DEPENDENT_ROTARY = ("dynamic", "longrope", "su")
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")


def resolve_directory(source: str | Path) -> Path:
    """The directory of a model: a path, or a hub id that is in the local cache.

    Raises:
        ModelNotFoundError: there is no such directory, or it holds no config.json.
    """
    path = Path(source)
    if not path.is_dir() and not path.is_absolute() and str(source).count("/") <= 1:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):
            path = Path(snapshot_download(str(source), local_files_only=True))
    if path.is_file():
        raise ModelNotFoundError(
            f"{source} is a file",
            "a directory with config.json, model.safetensors and tokenizer.json",
            "pass the directory that holds it",
        )
    if (path / "manifest.json").is_file():
        raise ModelNotFoundError(
            f"{source} is an engine of specc",
            "a directory with config.json, model.safetensors and tokenizer.json",
            "pass the model that it was compiled from; specc run takes engines",
        )
    if not path.is_dir():
        raise ModelNotFoundError(
            f"{source}: no such directory, and no such model in the local Hugging Face cache",
            "a directory with config.json, model.safetensors and tokenizer.json",
            "check the path, or download the model first (hf download NAME)",
        )
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(
            f"{source}: no config.json",
            "a directory with config.json, model.safetensors and tokenizer.json",
            "pass the directory that save_pretrained wrote",
        )
    return path


def load_config(path: Path) -> Any:
    """The model's configuration, checked.

    Raises:
        NotCausalLMError: not a causal language model, or unknown to transformers.
        UnsupportedRotaryError: rotary frequencies that depend on length.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    needed = "the configuration of a causal language model (…ForCausalLM)"
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("not an object")
        # as written: transformers renames some types and cannot read others
        check_rotary(raw, str(path))
        with quiet_transformers():
            config = AutoConfig.from_pretrained(path)
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise NotCausalLMError(
            f"{path}: config.json: {reason}", needed, "check config.json, or update transformers"
        ) from error
    names = raw.get("architectures") or []
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    is_causal = known is not None and (not names or names[0].endswith(_CAUSAL_SUFFIXES))
    if not is_causal:
        raise NotCausalLMError(
            f"{path}: {names[0] if names else config.model_type}",
            needed,
            "pass a decoder-only language model",
        )
    check_rotary(config, str(path))
    return config


def check_rotary(config: Any, name: str) -> None:
    """Refuse rotary scalings whose frequencies depend on the longest position of a pass.

    Args:
        config: a configuration of transformers, or the contents of config.json.
        name: what the user called the model.
    Raises:
        UnsupportedRotaryError: dynamic NTK or longrope.
    """
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key) if isinstance(config, dict) else getattr(config, key, None)
        for kind in _rotary_types(value):
            if kind in _LENGTH_DEPENDENT_ROTARY:
                raise UnsupportedRotaryError(
                    f"{name}: rotary scaling {kind}",
                    "frequencies that depend on each token's position only"
                    " (default, linear, llama3, yarn)",
                    "a tree pass would change numbers: choose another scaling in config.json, if"
                    " the context that you need allows it",
                )


def build_on_meta(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model without weights, with scaled_dot_product_attention where it has that."""
    from transformers import AutoModelForCausalLM

    # some versions of transformers drop the softcap under sdpa without a word
    softcap = getattr(config, "attn_logit_softcapping", None)
    with quiet_transformers(), torch.device("meta"):
        try:
            if softcap:
                raise ValueError("softcapped attention has no sdpa form")
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            )
        except ValueError:
            # traced all the same, so that the error can name the layer and its reason
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="eager"
            )
    return model.eval()


def max_position(config: Any) -> int | None:
    """Longest sequence that the model was made for, or None where it does not say."""
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"):
        if isinstance(value := getattr(config, key, None), int):
            return value
    return None


def eos_token_ids(path: Path | None, config: Any) -> list[int]:
    """EOS ids of generation_config.json, else of the configuration."""
    values: Any = getattr(config, "eos_token_id", None)
    if path is not None and (path / "generation_config.json").is_file():
        generation = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
        values = generation.get("eos_token_id", values)
    if values is None:
        return []
    return list(values) if isinstance(values, list | tuple) else [values]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No warnings of transformers: specc reports what matters in its own words."""
    from transformers.utils import logging as hf_logging

    before = hf_logging.get_verbosity()
    hf_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(before)


def _rotary_types(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key in ("rope_type", "type"):
            if isinstance(value.get(key), str):
                yield value[key]
        for inner in value.values():
            yield from _rotary_types(inner)
