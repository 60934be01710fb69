"""MTP modules in a target's checkpoint: which form they have, and whether all of it is there.

A module reads the embedding of the next token and the hidden state before it, each after a norm of
its own, side by side; a layer of the target's kind and a norm follow. Checkpoints name it in two
ways, where n is the number of the target's layers:

| | DeepSeek V3, GLM-4.x MoE | Qwen3-Next |
|---|---|---|
| all begin with | `model.layers.n.` | `mtp.` |
| norms | `enorm`, `hnorm` | `pre_fc_norm_embedding`, `pre_fc_norm_hidden` |
| projection | `eh_proj` | `fc` |
| layer | beside them | `layers.0.` |
| last norm | `shared_head.norm` | `norm` |

The first form may have an embedding and a head of its own, `embed_tokens` and `shared_head.head`.

The hidden state is that after the target's final norm, and a module hands on what its own last norm
returns: as transformers has it (modeling_layers.py `MtpLayer`, generation/candidate_generator.py
`MTPCandidateGenerator`), and vLLM since its pull requests 46075 and 47448. Row i, of hidden state i
and token i + 1, stands at position i here, as in vLLM, and at i + 1 in transformers: rotary
embeddings see distances alone. The embedding at position 0 is not zeroed, as vLLM's is.
Sources of names: vllm-project/vllm models/deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specc.artifact.decoders.checkpoint_format import without_quantization
from specc.artifact.safetensors_io import TensorReader
from specc.errors import HeadError
from specc.passes.drafters.head_spec import (
    EMBEDDING,
    HEAD,
    MTP,
    HeadSpec,
    HeadSwitches,
    TargetFacts,
)

# what `--draft` calls the module of the target's own checkpoint
MTP_DRAFT = "mtp"
# whose names a checkpoint has
DEEPSEEK, QWEN = "DeepSeek", "Qwen3-Next"
ENORM, HNORM, PROJECTION, NORM = "enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight"

_QWEN_PREFIX = "mtp."
_DEEPSEEK_MODULE = re.compile(r"^model\.layers\.(\d+)\.eh_proj\.weight$")
_QWEN_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.")
# parameter of the module → tensor after the prefix
_TENSORS = {
    DEEPSEEK: {
        ENORM: ENORM,
        HNORM: HNORM,
        PROJECTION: PROJECTION,
        NORM: "shared_head.norm.weight",
        EMBEDDING: EMBEDDING,
        HEAD: "shared_head.head.weight",
    },
    QWEN: {
        ENORM: "pre_fc_norm_embedding.weight",
        HNORM: "pre_fc_norm_hidden.weight",
        PROJECTION: "fc.weight",
        NORM: NORM,
    },
}
# keys that say how many modules a checkpoint has
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_FULL = "full_attention"
_DO = "pass the checkpoint as it was published, or another --draft"


@dataclass(frozen=True, eq=False)
class MtpSpec(HeadSpec):
    """An MTP module; `config` is the target's with a layer more, which is the module's.

    Args:
        layer: what its layer's tensors begin with in the checkpoint.
        tensors: parameter of the module, but those of its layer → tensor of the checkpoint.
    """

    layer: str

    @property
    def place(self) -> str:
        """What all of its tensors begin with."""
        return _QWEN_PREFIX if self.layout == QWEN else self.layer


def recognise_mtp(
    config: Any,
    reader: TensorReader,
    directory: Path,
    target: TargetFacts,
    switches: HeadSwitches | None = None,
) -> MtpSpec:
    """The MTP module in a target's checkpoint; headers are read, and no weight.

    Args:
        switches: what to take in place of what is said above; None takes that.
    Raises:
        HeadError: there is none, there are several, or a tensor is missing or has another shape.
    """
    names = set(reader.keys())
    form, count = _form_of(names, target.num_layers)
    stated = _stated(config)
    if form is None:
        said = f"; {stated[0]} is {stated[1]} in config.json" if stated else ""
        raise HeadError(
            f"--draft {MTP_DRAFT}, and no MTP module in {reader.location()}{said}",
            f"model.layers.{target.num_layers}.{PROJECTION} or mtp.fc.weight: a module that was"
            " trained with the target",
            "choose another --draft, or download the checkpoint with its MTP layers",
        )
    if count != 1 or (stated is not None and stated[1] != 1):
        said = f", and {stated[0]} {stated[1]} in config.json" if stated else ""
        raise HeadError(
            f"{target.name}: {count} MTP modules in its checkpoint{said}",
            "one module, which drafts at every depth",
            "choose another --draft",
        )
    prefix = _QWEN_PREFIX if form == QWEN else f"model.layers.{target.num_layers}."
    layer = "mtp.layers.0." if form == QWEN else prefix
    tensors = {key: prefix + name for key, name in _TENSORS[form].items()}
    shared = tuple(key for key in (EMBEDDING, HEAD) if tensors.get(key) not in names)
    tensors = {key: name for key, name in tensors.items() if key not in shared}
    _check_tensors(tensors, names, reader, target)
    is_normed = switches is None or switches.is_last_normed is not False
    return MtpSpec(
        kind=MTP,
        layout=form,
        directory=directory,
        target=target,
        config=_with_a_layer(config, target),
        boundaries=(target.num_layers,),
        is_last_normed=is_normed,
        shared=shared,
        warnings=(),
        layer=layer,
        tensors=tensors,
    )


def _form_of(names: Iterable[str], num_layers: int) -> tuple[str | None, int]:
    """Whose names a checkpoint has, and how many modules of them; None where there is none."""
    places = {int(match[1]) for item in names if (match := _DEEPSEEK_MODULE.match(item))}
    if num_layers in places:
        return DEEPSEEK, len(places)
    layers = {match[1] for item in names if (match := _QWEN_LAYER.match(item))}
    if "mtp.fc.weight" in names or layers:
        return QWEN, len(layers)
    return None, 0


def _stated(config: Any) -> tuple[str, int] | None:
    """Key and value of what a configuration says of their number."""
    found = ((key, getattr(config, key, None)) for key in _COUNTS)
    return next(((key, value) for key, value in found if type(value) is int), None)


def _check_tensors(
    tensors: Mapping[str, str], names: set[str], reader: TensorReader, target: TargetFacts
) -> None:
    width = target.width
    shapes = {
        PROJECTION: (width, 2 * width),
        EMBEDDING: (target.vocab_size, width),
        HEAD: (target.vocab_size, width),
    }
    for key, name in tensors.items():
        if name not in names:
            raise HeadError(
                f"{target.name}: an MTP module without {name} in {reader.location()}",
                f"{', '.join(tensors.values())}",
                _DO,
            )
        if (found := tuple(reader.shape(name))) != (needed := shapes.get(key, (width,))):
            raise HeadError(
                f"{target.name}: {name} is {list(found)}",
                f"{list(needed)}, as config.json says",
                _DO,
            )


def _with_a_layer(config: Any, target: TargetFacts) -> Any:
    """The target's configuration with one layer more, the module's."""
    deeper = without_quantization(config)
    count = target.num_layers
    deeper.num_hidden_layers = count + 1
    for key, usual in (("layer_types", _FULL), ("mlp_layer_types", None)):
        kinds = getattr(config, key, None)
        if kinds is None:
            continue
        own = getattr(config, f"mtp_{key}", None)
        kind = own[0] if own else usual or kinds[-1]
        if key == "layer_types" and kind != _FULL:
            raise HeadError(
                f"{target.name}: an MTP module whose layer is of kind {kind}",
                f"a layer of {_FULL}",
                "choose another --draft",
            )
        setattr(deeper, key, [*kinds[:count], kind])
    return deeper
