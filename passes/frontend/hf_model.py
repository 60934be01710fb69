"""Models in Hugging Face directories: configuration, checks, and the module on the meta device."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specc.artifact.decoders.gguf_checkpoint import find_gguf
from specc.artifact.decoders.gguf_file import GGUFReader
from specc.errors import ModelNotFoundError, NotCausalLMError, SpeccError
from specc.passes.frontend.config_numbers import check_heads, check_numbers
from specc.passes.frontend.gguf_ends import end_token_ids
from specc.passes.frontend.model_types import causal_class, check_layers_of, known_type
from specc.passes.frontend.rotary import by_its_name, constant_length
from specc.passes.frontend.text_part import is_wrapper, text_config, whole_config
from specc.system.json_file import read_json

_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
# of PEFT, beside the weights of an adapter
ADAPTER = "adapter_config.json"
_MOST_TEXT = 300  # of somebody else's error


def resolve_directory(source: str | Path) -> Path:
    """The directory of a model: a path, or a hub id that is in the local cache.

    Of a GGUF file, alone or in a directory without config.json, it is made of the file's fields.

    Raises:
        ModelNotFoundError: there is no such directory, or it holds no config.json.
        WeightError, VocabMismatchError: a GGUF file whose fields say something that is not read.
    """
    path = Path(source)
    if not path.is_dir() and not path.is_absolute() and str(source).count("/") <= 1:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):
            path = Path(snapshot_download(str(source), local_files_only=True))
    if (file := _lone_gguf(path)) is not None:
        from specc.passes.frontend.gguf_directory import directory_of

        return directory_of(file)
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
        if (path / ADAPTER).is_file():
            raise ModelNotFoundError(
                f"{source} holds {ADAPTER} and no config.json: an adapter",
                "a model: the adapter is added to another one's weights",
                "merge them: PeftModel.from_pretrained(…).merge_and_unload().save_pretrained(…)",
            )
        raise ModelNotFoundError(
            f"{source}: no config.json",
            "a directory with config.json, model.safetensors and tokenizer.json",
            "pass the directory that save_pretrained wrote",
        )
    return path


def _lone_gguf(path: Path) -> Path | None:
    """A GGUF file without a configuration beside it: the file itself, or alone in a directory."""
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    return find_gguf(path)


def load_config(path: Path) -> Any:
    """The model's configuration, checked.

    Raises:
        NotCausalLMError: not a causal language model, unknown to transformers, or with numbers
            that no model has.
        UnsupportedAttentionError: layers that are no attention to all keys, a window or chunks.
        UnsupportedRotaryError: a rotary scaling that transformers cannot read.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    needed = "the configuration of a causal language model (…ForCausalLM)"
    do = "check config.json, or update transformers"
    raw = read_json(path / "config.json", NotCausalLMError, needed, do)
    if not isinstance(raw, dict):
        raise NotCausalLMError(f"{path}: config.json: not an object", needed, do)
    check_numbers(raw, str(path))
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise NotCausalLMError(f"{path}: config.json: architectures is {names!r}", needed, do)
    model_type = known_type(raw, str(path))
    try:
        with quiet_transformers():
            kind: Any = AutoConfig
            if model_type != raw.get("model_type"):
                kind = CONFIG_MAPPING[model_type]
            if (renamed := by_its_name(raw)) is raw:
                config = kind.from_pretrained(path)
            else:
                config = CONFIG_MAPPING[model_type].from_dict(renamed)
            config.model_type = model_type
    except Exception as error:  # whatever the class of this model makes of what it says
        raise NotCausalLMError(f"{path}: config.json: {_reason(error)}", needed, do) from error
    if (text := text_config(config, names[0] if names else "")) is not None:
        config, names = text, []
    is_causal = causal_class(config.model_type) is not None
    is_causal &= not names or names[0].endswith(_CAUSAL_SUFFIXES)
    is_causal |= whole_config(config) is not None
    if not is_causal:
        raise NotCausalLMError(
            f"{path}: {names[0] if names else config.model_type}",
            needed,
            "pass a decoder-only language model",
        )
    check_layers_of(config, str(path))
    check_heads(config, str(path))
    return config


def holds_more_than_text(path: Path) -> bool:
    """Whether a checkpoint is that of a wrapper, see `text_part`, of which `load_config` took text.

    Args:
        path: directory whose config.json `load_config` has read.
    """
    raw = read_json(path / "config.json", NotCausalLMError, "a configuration", "check config.json")
    return is_wrapper(raw.get("architectures"))


def build_on_meta(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model without weights, with scaled_dot_product_attention where it has that.

    Raises:
        NotCausalLMError: the configuration makes no model.
    """
    try:
        return _build_on_meta(config, dtype)
    except SpeccError:
        raise
    except Exception as error:  # whatever torch makes of sizes that do not fit
        raise NotCausalLMError(
            f"{getattr(config, '_name_or_path', '')}: config.json: {_reason(error)}",
            "a configuration that transformers makes a model of",
            "correct config.json, or download the model again",
        ) from error


def _build_on_meta(config: Any, dtype: torch.dtype) -> nn.Module:
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    whole = whole_config(config)
    config = whole or config
    kind: Any = AutoModelForCausalLM
    if whole is not None or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is None:
        kind = AutoModelForImageTextToText
    # some versions of transformers drop the softcap under sdpa without a word
    softcap = getattr(config, "attn_logit_softcapping", None)
    with quiet_transformers(), torch.device("meta"):
        try:
            if softcap:
                raise ValueError("softcapped attention has no sdpa form")
            model = kind.from_config(config, dtype=dtype, attn_implementation="sdpa")
        except ValueError:
            # traced all the same, so that the error can name the layer and its reason
            model = kind.from_config(config, dtype=dtype, attn_implementation="eager")
    return model.eval()


def max_position(config: Any, rope_length: int | None = None) -> int | None:
    """Longest sequence that an engine of the model can have, or None where it does not say.

    Args:
        rope_length: see `rotary.constant_length`.
    """
    if (length := constant_length(config, rope_length)) is not None:
        return length
    for key in (
        "max_position_embeddings",
        "n_positions",
        "max_sequence_length",
        "max_seq_len",
        "n_ctx",
    ):
        if isinstance(value := getattr(config, key, None), int):
            return value
    return None


def eos_token_ids(path: Path | None, config: Any) -> list[int]:
    """EOS ids of generation_config.json, else of the configuration, and those of a GGUF file.

    Raises:
        NotCausalLMError: generation_config.json is no JSON object, or the ids are none.
        WeightError: the GGUF file is malformed.
    """
    values: Any = getattr(config, "eos_token_id", None)
    source = "config.json"
    if path is not None and (path / "generation_config.json").is_file():
        file = path / "generation_config.json"
        needed, do = "an object with the settings of generation", "correct the file, or remove it"
        generation = read_json(file, NotCausalLMError, needed, do)
        if not isinstance(generation, dict):
            raise NotCausalLMError(f"{file} is no object", needed, do)
        if "eos_token_id" in generation:
            values, source = generation["eos_token_id"], file.name
    if values is None:
        values = []
    ids = list(values) if isinstance(values, list | tuple) else [values]
    if wrong := [value for value in ids if type(value) is not int or not 0 <= value < 1 << 31]:
        raise NotCausalLMError(
            f"{path or 'the model'}: {source}: eos_token_id holds {wrong[0]!r:.40}",
            "token ids, from 0 on",
            f"correct {source}",
        )
    # a configuration beside the file may know fewer
    return list(dict.fromkeys([*ids, *_gguf_ends(path)]))


def _gguf_ends(path: Path | None) -> list[int]:
    if path is None or (file := find_gguf(path)) is None:
        return []
    reader = GGUFReader(file, reads_lists=True)
    reader.close()
    return end_token_ids(reader.fields)


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


def _reason(error: Exception) -> str:
    """What an error of transformers or torch says, on one line; its first words say where."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_MOST_TEXT]}" if text else repr(error)
