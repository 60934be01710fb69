"""Configurations of DFlash drafters, as their trainers write them, as one.

Keys are at the top of config.json or in `dflash_config`, which counts first. What is read where:

| | z-lab | speculators |
|---|---|---|
| layers | top | `transformer_layer_config` |
| taps | `target_layer_ids`, after the layer | `aux_hidden_state_layer_ids`, entering it |
| tokens from the anchor on | never | `sample_from_anchor`, `shift_label` |
| a block is causal | `is_causal`, `causal`; else in sliding layers | in sliding layers, unless |
| | | `sliding_window_non_causal` |
| a window ends at | each row | the anchor, for all rows of a block |

Sources: z-lab/dflash dflash/model.py; vllm-project/speculators models/dflash/config.py and
attention.py; vllm-project/vllm models/qwen3_dflash.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specc.errors import HeadError
from specc.passes.frontend.config_numbers import check_numbers
from specc.passes.frontend.heads.head_config import (
    id_list,
    read_layers,
    read_number,
    read_windows,
)
from specc.passes.frontend.heads.head_spec import SPECULATORS, HeadSwitches, RopeFacts
from specc.passes.frontend.heads.tap_ids import AFTER, ENTERING
from specc.passes.frontend.rotary import check_former
from specc.speculation.block_drafts import MOST_ROWS, BlockDraft

_DO = "correct config.json, or download the drafter again"
_OTHER_DRAFT = "pass another draft"
_NESTED = "dflash_config"
# what specc does not compute: the values that change nothing
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "projector_type": ("dflash",),
    "attention_mode": ("gqa", "mha"),
    "input_embedding_scale": (1,),
    "output_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "is_neox_style": (True,),
    "selector_rank": (),
    "markov_rank": (0,),
    "enable_confidence_head": (False,),
}
_MASK_FILE = "mask_embedding.pt"


@dataclass(frozen=True)
class BlockConfig:
    """What a configuration says.

    Args:
        layers: of transformers, of its layers; Qwen3's.
        block: what a pass fills.
        windows: see `BlockSpec`.
        is_anchored: see there.
        ids: of layers of the target.
        convention: what ids mean, see `tap_ids`.
        num_target_layers: n where it is said, or None.
        target_width: H where it is said, or None.
        draft_vocab_size: Vd where it is said, or None.
        vocab_size: V where it is said, or None.
        rope: of the layers.
        warnings: what the user should know.
    """

    layers: Any
    block: BlockDraft
    windows: tuple[int, ...]
    is_anchored: bool
    ids: tuple[int, ...]
    convention: str
    num_target_layers: int | None
    target_width: int | None
    draft_vocab_size: int | None
    vocab_size: int | None
    rope: RopeFacts
    warnings: tuple[str, ...]


def read_block_config(
    raw: Mapping[str, Any],
    layout: str,
    num_layers: int,
    directory: Path,
    switches: HeadSwitches,
) -> BlockConfig:
    """Read what a drafter's config.json says.

    Args:
        raw: its contents.
        layout: see `HeadSpec`.
        num_layers: that the checkpoint has tensors of.
        directory: of the drafter.
        switches: see there.
    Raises:
        HeadError: something is missing, or is not computed here.
        NotCausalLMError: numbers that no model has.
        UnsupportedRotaryError: see `rotary.check_former`.
    """
    name = str(directory)
    check_numbers(raw, name)
    if "quantization_config" in raw or "compression_config" in raw:
        raise HeadError(f"{name}: a quantized drafter", "one whose weights are floats", _DO)
    if (directory / _MASK_FILE).exists():
        raise HeadError(
            f"{name}: {_MASK_FILE}, an embedding of masks beside the table",
            "masks that are a row of the embedding",
            _OTHER_DRAFT,
        )
    nested = raw.get(_NESTED, {})
    if not isinstance(nested, Mapping):
        raise HeadError(f"{name}: config.json: {_NESTED} is {nested!r:.40}", "an object", _DO)
    values = {**raw, **nested}
    own = raw.get("transformer_layer_config") if layout == SPECULATORS else raw
    if not isinstance(own, Mapping):
        raise HeadError(f"{name}: config.json: no transformer_layer_config", "an object", _DO)
    _check_plain({**own, **values}, name)
    check_former(dict(own), name)
    if own.get("model_type") != "qwen3":
        found = own.get("model_type")
        raise HeadError(f"{name}: layers of model type {found!r:.40}", "qwen3", _OTHER_DRAFT)
    warnings: list[str] = []
    # of attention; what it means for a block is read below
    plain = {key: value for key, value in own.items() if key != "is_causal"}
    layers, rope = read_layers(plain, True, num_layers, name, warnings)
    windows = read_windows(own, num_layers, name)
    key, convention = ("target_layer_ids", AFTER)
    if layout == SPECULATORS:
        key, convention = ("aux_hidden_state_layer_ids", ENTERING)
    ids = id_list(values, key, name)
    if ids is None:
        raise HeadError(f"{name}: config.json: no {key}", "layers of the target", _DO)
    return BlockConfig(
        layers=layers,
        block=_block(values, own, layout, windows, name),
        windows=windows,
        is_anchored=layout == SPECULATORS,
        ids=ids,
        convention=switches.tap_convention or convention,
        num_target_layers=read_number(values, "num_target_layers", name),
        target_width=read_number(values, "target_hidden_size", name),
        draft_vocab_size=read_number(values, "draft_vocab_size", name),
        vocab_size=read_number(own, "vocab_size", name),
        rope=rope,
        warnings=tuple(warnings),
    )


def _check_plain(values: Mapping[str, Any], name: str) -> None:
    for key, plain in _PLAIN.items():
        found = values.get(key)
        if found is not None and found not in plain:
            needed = f"{plain[0]}, or none" if plain else "none"
            raise HeadError(f"{name}: config.json: {key} is {found!r:.40}", needed, _OTHER_DRAFT)


def _block(
    values: Mapping[str, Any],
    own: Mapping[str, Any],
    layout: str,
    windows: tuple[int, ...],
    name: str,
) -> BlockDraft:
    size, mask = read_number(values, "block_size", name), values.get("mask_token_id")
    if size is None:
        raise HeadError(f"{name}: config.json: no block_size", "its tokens", _DO)
    if type(mask) is not int or mask < 0:
        raise HeadError(f"{name}: config.json: mask_token_id is {mask!r:.40}", "a token id", _DO)
    from_anchor = _flag(values, ("sample_from_anchor", "shift_label"), name)
    if from_anchor is None and "num_anchors" in values:
        raise HeadError(
            f"{name}: a drafter of DeepSpec; nothing says which token the anchor's row proposes",
            "sample_from_anchor, true or false",
            "write what it was trained with into its config.json",
        )
    kinds = _are_causal(values, own, layout, windows, name)
    causal_layers = () if all(kinds) else tuple(i for i, kind in enumerate(kinds) if kind)
    block = BlockDraft(size, mask, bool(from_anchor), all(kinds), causal_layers)
    if causal_layers and size > MOST_ROWS:
        raise HeadError(
            f"{name}: config.json: block_size {size}, and layers that differ in what a row sees",
            f"blocks of {MOST_ROWS} rows or less",
            _OTHER_DRAFT,
        )
    if block.num_proposed < 1:
        raise HeadError(f"{name}: config.json: block_size {size}", "2 or more", _DO)
    ends_at_rows = layout != SPECULATORS
    if small := [window for window in windows if ends_at_rows and window and window < size]:
        raise HeadError(
            f"{name}: config.json: a window of {small[0]} rows, and blocks of {size}",
            f"a window of {size} or more",
            _OTHER_DRAFT,
        )
    return block


def _are_causal(
    values: Mapping[str, Any],
    own: Mapping[str, Any],
    layout: str,
    windows: tuple[int, ...],
    name: str,
) -> list[bool]:
    """Whether rows of a block see those up to themselves alone, in each layer."""
    if layout == SPECULATORS:
        both = _flag(values, ("sliding_window_non_causal",), name)
        return [bool(window) and not both for window in windows]
    said = _flag({**own, **values}, ("is_causal", "causal"), name)
    return [bool(window) if said is None else said for window in windows]


def _flag(values: Mapping[str, Any], keys: tuple[str, ...], name: str) -> bool | None:
    """The first of these keys that is there."""
    for key in keys:
        value = values.get(key)
        if value is None:
            continue
        if not isinstance(value, bool):
            raise HeadError(f"{name}: config.json: {key} is {value!r:.40}", "true or false", _DO)
        return value
    return None
