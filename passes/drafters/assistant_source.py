"""Files of Gemma 4 assistants: recognized, and compared with their target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from specc.artifact.safetensors_io import TensorReader
from specc.drafters.assistant import FACTS
from specc.errors import HeadError
from specc.passes.drafters.assistant_head import AssistantHead
from specc.passes.drafters.assistant_spec import FULL, SLIDING, AssistantSpec, Clusters
from specc.passes.drafters.head_config import read_number
from specc.passes.drafters.head_spec import EMBEDDING, HEAD, TargetFacts
from specc.passes.drafters.head_tensors import check_left, check_shape, missing_error
from specc.passes.drafters.vocabulary_map import read_integers
from specc.passes.frontend.config_numbers import check_heads, check_numbers
from specc.passes.frontend.hf_model import quiet_transformers

LAYOUT = "transformers"
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_CLASSES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_TEXT, _WIDTH, _ORDERED = "text_config", "backbone_hidden_size", "use_ordered_embeddings"
_CLUSTERS, _CHOSEN, _TIED = "num_centroids", "centroid_intermediate_top_k", "tie_word_embeddings"
# keys of config.json beside those that every configuration of transformers has; MLX writes how many
# tokens a round drafts
_KEYS = {_TEXT, _WIDTH, _ORDERED, _CLUSTERS, _CHOSEN, _TIED, "block_size", "torch_dtype"}
# of layers, which transformers turns into others
_TEXT_KEYS = {"global_head_dim", "num_global_key_value_heads", "rope_scaling", "torch_dtype"}
_TABLE, _ORDER = "model.embed_tokens.weight", "masked_embedding.token_ordering"
_DO = "pass the assistant of this target, or download it again"


def says_assistant(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of an assistant."""
    classes = raw.get("architectures")
    named = classes if isinstance(classes, list) else []
    return raw.get("model_type") in MODEL_TYPES or any(x in _CLASSES for x in named)


def fit_assistant(
    reader: TensorReader, raw: Mapping[str, Any], directory: Path, target: TargetFacts
) -> AssistantSpec:
    """An assistant, compared with its target.

    Args:
        raw: contents of config.json.
    Raises:
        HeadError: another target's, tensors too many or too few, or what specc does not compute.
        NotCausalLMError: numbers that no model has.
    """
    name = str(directory)
    check_numbers(raw, name)
    config = _read_config(raw, name)
    check_heads(config, name)
    _require(raw.get(_WIDTH), target.width, "hidden size", target, name)
    _require(config.vocab_size, target.vocab_size, "ids", target, name)
    spec = AssistantSpec(
        kind=FACTS.kind,
        layout=LAYOUT,
        directory=directory,
        target=target,
        config=config,
        boundaries=(target.num_layers,),
        is_last_normed=True,
        shared=(EMBEDDING,),
        warnings=(),
        tensors={},
        clusters=_clusters(reader, raw, config, name),
    )
    names = set(reader.keys())
    with torch.device("meta"):
        stored = AssistantHead(spec).state_dict()
    is_tied = raw.get(_TIED, True) is not False
    places = {
        key: _tensor_of(key, is_tied)
        for key, value in stored.items()
        if key != EMBEDDING and value.is_floating_point()
    }
    if missing := [tensor for tensor in places.values() if tensor not in names]:
        raise missing_error(missing, reader, name)
    for key, tensor in places.items():
        check_shape(reader, tensor, tuple(stored[key].shape), name)
    known = {*places.values(), *([] if spec.clusters is None else [_ORDER]), HEAD, _TABLE}
    check_left([item for item in reader.keys() if item not in known], name)  # noqa: SIM118
    spec.tensors.update(places)
    return spec


def _read_config(raw: Mapping[str, Any], name: str) -> Any:
    """The configuration of its layers.

    Raises:
        HeadError: there is none, or a key in it that is not read.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig, __version__

    named = raw.get("model_type")
    # of a file that says its class alone
    model_type = named if named in MODEL_TYPES else MODEL_TYPES[0]
    own = raw.get(_TEXT)
    if not isinstance(own, Mapping):
        raise HeadError(f"{name}: config.json: no {_TEXT}", "an object", _DO)
    if model_type not in CONFIG_MAPPING:
        raise HeadError(
            f"{name}: a Gemma 4 assistant, and transformers {__version__}",
            "a version that knows Gemma 4 assistants",
            "update transformers",
        )
    common = PreTrainedConfig().to_dict().keys()
    try:
        with quiet_transformers():
            config: Any = (
                CONFIG_MAPPING[model_type].from_dict({**raw, "model_type": model_type}).text_config
            )
            known = type(config)().to_dict().keys()
    except Exception as error:  # whatever the class makes of what it says
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise HeadError(
            f"{name}: config.json: {lines[-1].strip():.300}",
            "the configuration of a Gemma 4 assistant",
            _DO,
        ) from error
    for place, keys, allowed in (
        ("", raw.keys(), {*common, *_KEYS}),
        (f"{_TEXT}.", own.keys(), {*common, *known, *_TEXT_KEYS}),
    ):
        if unknown := sorted(set(keys) - allowed):
            raise HeadError(
                f"{name}: config.json: {place}{unknown[0]}",
                "keys whose meaning specc knows",
                "remove the key if it changes nothing, or report it",
            )
    for key, plain in (("use_bidirectional_attention", (None, "vision")),):
        if getattr(config, key, None) not in plain:
            raise HeadError(
                f"{name}: config.json: {_TEXT}.{key} is {getattr(config, key)!r:.40}", "none", _DO
            )
    if others := sorted(set(config.layer_types) - {FULL, SLIDING}):
        raise HeadError(f"{name}: layers of kind {others[0]}", f"{FULL} or {SLIDING}", _DO)
    return config


def _require(found: Any, needed: int, what: str, target: TargetFacts, name: str) -> None:
    if found != needed:
        raise HeadError(
            f"{name}: an assistant for a target of {found} {what}; {target.name} has {needed}",
            f"an assistant for a target of {needed} {what}",
            "pass the assistant of this target",
        )


def _clusters(
    reader: TensorReader, raw: Mapping[str, Any], config: Any, name: str
) -> Clusters | None:
    """Raises HeadError: clusters that are not all ids, each once."""
    if raw.get(_ORDERED, False) is not True:
        return None
    count, chosen = (read_number(raw, key, name) for key in (_CLUSTERS, _CHOSEN))
    size = int(config.vocab_size)
    if not count or not chosen or size % count or chosen > count:
        raise HeadError(
            f"{name}: config.json: {size} ids in {count} clusters, {chosen} of them chosen",
            "clusters of as many ids each, and a part of them",
            _DO,
        )
    if _ORDER not in set(reader.keys()):
        raise missing_error([_ORDER], reader, name)
    order = read_integers(reader, _ORDER, (size,), (torch.int64, torch.int32), name).long()
    if not torch.equal(order.sort().values, torch.arange(size)):
        raise HeadError(f"{name}: {_ORDER} with ids that are not all ids, once", "all ids", _DO)
    return Clusters(count, chosen, order.view(count, size // count))


def _tensor_of(parameter: str, is_tied: bool) -> str:
    """The tensor of a parameter of `AssistantHead`."""
    if parameter == HEAD:
        return _TABLE if is_tied else HEAD
    is_of_model = parameter.startswith(("layers.", "norm."))
    return f"model.{parameter}" if is_of_model else parameter


def row_inputs(spec: AssistantSpec) -> Iterator[tuple[str, str, int]]:
    """Kind of layers, name and columns of each input that stands for keys or values of the target.

    That of values has the name of that of keys, but for its end.
    """
    for kind in spec.kinds:
        heads, columns = spec.heads_of(kind)
        for part in ("keys", "values"):
            yield kind, f"{kind}_{part}", heads * columns
