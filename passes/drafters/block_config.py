"""Configurations of DFlash (1 and 2) and DSpark drafters, as their trainers write them, as one.

Keys are at the top of config.json or in `dflash_config`, which counts first. What is read where:

| | z-lab, DeepSpec, SpecForge | speculators |
|---|---|---|
| layers | top | `transformer_layer_config` |
| taps | `target_layer_ids`, after the layer | `aux_hidden_state_layer_ids`, entering it |
| tokens from the anchor on | DSpark alone | `sample_from_anchor`, `shift_label`; else likewise |
| a block is causal | `is_causal`, `causal`, `causal_head` | in sliding layers, unless |
| | (JetSpec); else in sliding layers | `sliding_window_non_causal`, which |
| | | DFlash 2 has where nothing is said |
| a window ends at | each row | the anchor, for all rows of a block |

Sources: z-lab/dflash dflash/model.py; vllm-project/speculators models/dflash/config.py and
attention.py, models/dspark; deepseek-ai/DeepSpec deepspec/modeling/dspark;
sgl-project/SpecForge specforge/modeling/draft/dspark.py, and for what rows predict
specforge/algorithms/common/dflash_family_model.py;
vllm-project/vllm models/qwen3_dflash.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specc.drafters.block import (
    CONFIDENCE_TENSORS,
    GATED,
    MOST_ROWS,
    OF_ROW,
    OF_TOKEN,
    RNN,
    SELECTOR,
    VANILLA,
    BlockDraft,
    bias_tensors,
    joint_shapes,
)
from specc.errors import HeadError
from specc.passes.drafters.block_parts import (
    CONV_KEYS,
    SCALE_KEYS,
    SELECTOR_KEYS,
    Conv,
    LogitScale,
    ScoreFiles,
    Shapes,
    ShapesOf,
    read_confidence,
    read_conv,
    read_flag,
    read_markov,
    read_scale,
    read_selector,
)
from specc.passes.drafters.head_config import (
    id_list,
    read_layers,
    read_number,
    read_windows,
)
from specc.passes.drafters.head_spec import (
    DFLASH,
    DFLASH2,
    DSPARK,
    SPECFORGE,
    SPECULATORS,
    HeadSwitches,
    RopeFacts,
    TargetFacts,
)
from specc.passes.drafters.tap_ids import AFTER, ENTERING
from specc.passes.frontend.config_numbers import check_numbers
from specc.passes.frontend.rotary import by_its_name

_DO = "correct config.json, or download the drafter again"
_OTHER_DRAFT = "pass another draft"
_NESTED = "dflash_config"
# of the layers; the first files of SpecForge are called after the drafter, and have the same ones
_QWEN3 = "qwen3"
# what specc does not compute: the values that change nothing
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "projector_type": ("dflash",),
    "attention_mode": ("gqa", "mha"),
    "input_embedding_scale": (1,),
    "is_neox_style": (True,),
}
# of all but DFlash 2, of all without convolutions, and of all but DSpark
_NO_SELECTOR: dict[str, tuple[Any, ...]] = {
    "output_multiplier": (1,),
    "final_logit_softcapping": (0,),
    **dict.fromkeys(SELECTOR_KEYS, ()),
}
_NO_CONV: dict[str, tuple[Any, ...]] = dict.fromkeys(CONV_KEYS, ())
_NO_BIAS: dict[str, tuple[Any, ...]] = {
    "markov_rank": (0,),
    "enable_confidence_head": (False,),
}
# of DSpark alone
_PLAIN_DSPARK: dict[str, tuple[Any, ...]] = {
    "projector_type": ("dspark",),
    "dspark_backbone_conv_enabled": (False,),
}
_PLAIN_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    DFLASH: {**_NO_BIAS, **_NO_CONV, **_NO_SELECTOR},
    DFLASH2: _NO_BIAS,
    DSPARK: {**_PLAIN_DSPARK, **_NO_CONV, **_NO_SELECTOR},
}
# what `dflash_config` may say of every kind; another key may change what the drafter computes
_READ = frozenset(
    (
        "block_size", "mask_token_id", "target_layer_ids", "num_target_layers",
        "target_hidden_size", "draft_vocab_size", "num_anchors", "sample_from_anchor",
        "shift_label", "is_causal", "causal", "causal_head", "markov_rank", "markov_head_type",
        "enable_confidence_head", "confidence_head_alpha", "confidence_head_with_markov",
        # a window where `use_swa` says that there is one
        "swa_window_size", *CONV_KEYS, *SELECTOR_KEYS, *SCALE_KEYS,
    )
)  # fmt: skip
_CAUSAL = ("is_causal", "causal", "causal_head")
_MASK_FILE = "mask_embedding.pt"


@dataclass(frozen=True)
class BlockConfig:
    """What a configuration says.

    Args:
        layers: of transformers, of its layers; Qwen3's.
        block: what a pass fills.
        windows: see `BlockSpec`.
        is_anchored: see there.
        rank: see there.
        confidence_columns: that a confidence head reads, 0 of a drafter without one.
        conv: convolutions of its layers, or None.
        scale: of logits.
        parts: of further tensors, which steps read.
        ids: of layers of the target.
        convention: what ids mean, see `tap_ids`.
        num_target_layers: n where it is said, or None.
        target_width: H where it is said, or None.
        draft_vocab_size: Vd where it is said, or None.
        vocab_size: V where it is said, or None.
        warnings: what the user should know.
    """

    layers: Any
    block: BlockDraft
    windows: tuple[int, ...]
    is_anchored: bool
    rank: int
    confidence_columns: int
    conv: Conv | None
    scale: LogitScale
    parts: ShapesOf
    ids: tuple[int, ...]
    convention: str
    num_target_layers: int | None
    target_width: int | None
    draft_vocab_size: int | None
    vocab_size: int | None
    rope: RopeFacts
    warnings: tuple[str, ...]

    def more_tensors(self, num_rows: int, target: TargetFacts) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that DSpark and DFlash 2 have and DFlash has not, by name.

        Args:
            num_rows: Vd.
        """
        found = dict(self.parts(num_rows, target.vocab_size))
        width = int(self.layers.hidden_size)
        if self.rank:
            kind = self.block.bias_kind
            own = bias_tensors(kind)
            found[own["bias_in"]] = (target.vocab_size, self.rank)
            found[own["bias_out"]] = (num_rows, self.rank)
            found |= joint_shapes(kind, self.rank, width)
        if self.conv is not None:
            found |= self.conv.shapes(self.layers.num_hidden_layers, width)
        if self.confidence_columns:
            weight, offset = CONFIDENCE_TENSORS.values()
            found |= {weight: (1, self.confidence_columns), offset: (1,)}
        return found


def read_block_config(
    raw: Mapping[str, Any],
    kind: str,
    layout: str,
    num_layers: int,
    directory: Path,
    switches: HeadSwitches,
    score: ScoreFiles | None = None,
) -> BlockConfig:
    """Read what a drafter's config.json says.

    Args:
        kind: see `HeadSpec`.
        layout: see there.
        num_layers: that the checkpoint has tensors of.
        switches: see there.
        score: of a kind whose steps read the weights of one.
    Raises:
        HeadError: something is missing, or is not computed here.
        NotCausalLMError: numbers that no model has.
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
    own_keys = score.keys if score else ()
    known = _READ | _PLAIN.keys() | _PLAIN_DSPARK.keys() | {*own_keys}
    if unknown := [key for key in nested if key not in known and nested[key] is not None]:
        raise HeadError(
            f"{name}: config.json: {_NESTED}.{unknown[0]} is {nested[unknown[0]]!r:.40}",
            f"keys that specc reads: {', '.join(sorted(known))}",
            _OTHER_DRAFT,
        )
    twice = [key for key in own_keys if key in nested and raw.get(key, nested[key]) != nested[key]]
    if twice:
        raise HeadError(
            f"{name}: config.json: {twice[0]} is {raw[twice[0]]!r:.40}, and in {_NESTED}"
            f" {nested[twice[0]]!r:.40}",
            "one value",
            _DO,
        )
    values = {**raw, **nested}
    own = raw.get("transformer_layer_config") if layout == SPECULATORS else raw
    if not isinstance(own, Mapping):
        raise HeadError(f"{name}: config.json: no transformer_layer_config", "an object", _DO)
    _check_plain({**own, **values}, {**_PLAIN, **_plain_of(kind, score)}, name)
    own = by_its_name(dict(own))
    found = own.get("model_type")
    if found != _QWEN3 and (layout, found) != (SPECFORGE, DSPARK):
        raise HeadError(f"{name}: layers of model type {found!r:.40}", _QWEN3, _OTHER_DRAFT)
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
    vocab_size, width = read_number(own, "vocab_size", name), int(layers.hidden_size)
    rank, bias = read_markov(values, name) if kind == DSPARK else (0, VANILLA)
    candidates, scale = 0, LogitScale()
    if kind == DFLASH2:
        (rank, candidates), bias = read_selector(values, vocab_size, name), SELECTOR
        scale = read_scale(values, name)
    conv = read_conv(values, width, name)
    block = _block(values, own, kind, layout, windows, switches, name)
    reads_token = read_confidence(values, layout, name) if kind == DSPARK else None
    confidence = "" if reads_token is None or not rank else OF_TOKEN if reads_token else OF_ROW
    block = replace(block, is_biased=rank > 0, bias_kind=bias, confidence=confidence)
    block = replace(block, hidden_columns=width if block.reads_hidden else 0, candidates=candidates)
    parts: ShapesOf = _no_shapes
    if score:
        block = replace(block, is_biased=True, kind=kind, hidden_columns=width)
        block, parts = score.read(values, block, layers, name)
    if block.num_proposed < 1:
        raise HeadError(f"{name}: config.json: block_size {block.size}", "2 or more", _DO)
    if bias == RNN and not block.from_anchor:
        is_assumed = switches.sample_from_anchor is False
        said = (
            "--draft-assume sample_from_anchor=false" if is_assumed else "sample_from_anchor false"
        )
        raise HeadError(
            f"{name}: config.json: markov_head_type {RNN!r}, and {said}: its trainer begins with"
            " the state that the anchor's row leaves, and no reader is known that says what a"
            " drafter begins with",
            f"sample_from_anchor true, or {VANILLA} or {GATED}",
            "leave out sample_from_anchor" if is_assumed else _OTHER_DRAFT,
        )
    columns = 0
    if reads_token is not None:
        columns = width + (rank if reads_token else 0)
    if reads_token is not None and not confidence:
        warnings.append(
            "its confidence head is not read: all nodes of a depth have the same children"
        )
    return BlockConfig(
        layers=layers,
        block=block,
        windows=windows,
        is_anchored=layout == SPECULATORS,
        rank=rank,
        confidence_columns=columns,
        conv=conv,
        scale=scale,
        parts=parts,
        ids=ids,
        convention=switches.tap_convention or convention,
        num_target_layers=read_number(values, "num_target_layers", name),
        target_width=read_number(values, "target_hidden_size", name),
        draft_vocab_size=read_number(values, "draft_vocab_size", name),
        vocab_size=vocab_size,
        rope=rope,
        warnings=tuple(warnings),
    )


def _no_shapes(num_rows: int, vocab_size: int) -> Shapes:
    return {}


def _plain_of(kind: str, score: ScoreFiles | None) -> dict[str, tuple[Any, ...]]:
    """Keys of which a kind has such values alone, or no value."""
    if score is None:
        return _PLAIN_OF.get(kind, {})
    plain = {**_NO_BIAS, **_NO_SELECTOR, **({} if score.may_convolve else _NO_CONV)}
    return plain | ({"projector_type": (score.projector,)} if score.projector else {})


def _check_plain(
    values: Mapping[str, Any], plain_values: Mapping[str, tuple[Any, ...]], name: str
) -> None:
    for key, plain in plain_values.items():
        found = values.get(key)
        if found is not None and found not in plain:
            needed = f"{plain[0]}, or none" if plain else "none"
            raise HeadError(f"{name}: config.json: {key} is {found!r:.40}", needed, _OTHER_DRAFT)


def _block(
    values: Mapping[str, Any],
    own: Mapping[str, Any],
    kind: str,
    layout: str,
    windows: tuple[int, ...],
    switches: HeadSwitches,
    name: str,
) -> BlockDraft:
    size, mask = read_number(values, "block_size", name), values.get("mask_token_id")
    if size is None:
        raise HeadError(f"{name}: config.json: no block_size", "its tokens", _DO)
    if type(mask) is not int or mask < 0:
        raise HeadError(f"{name}: config.json: mask_token_id is {mask!r:.40}", "a token id", _DO)
    from_anchor = switches.sample_from_anchor
    if from_anchor is None:
        from_anchor = read_flag(values, ("sample_from_anchor", "shift_label"), name)
    if from_anchor is None:
        from_anchor = {DFLASH: None, DSPARK: True}.get(kind, False)
    if from_anchor is None and "num_anchors" in values:
        raise HeadError(
            f"{name}: a drafter of DeepSpec; nothing says which token the anchor's row proposes",
            "sample_from_anchor, true or false",
            "pass --draft-assume sample_from_anchor=false, or true: what it was trained with",
        )
    kinds = _are_causal(values, own, kind, layout, windows, name)
    causal_layers = () if all(kinds) else tuple(i for i, kind in enumerate(kinds) if kind)
    block = BlockDraft(size, mask, bool(from_anchor), all(kinds), causal_layers)
    if causal_layers and size > MOST_ROWS:
        raise HeadError(
            f"{name}: config.json: block_size {size}, and layers that differ in what a row sees",
            f"blocks of {MOST_ROWS} rows or less",
            _OTHER_DRAFT,
        )
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
    kind: str,
    layout: str,
    windows: tuple[int, ...],
    name: str,
) -> list[bool]:
    """Whether rows of a block see those up to themselves alone, in each layer."""
    if layout == SPECULATORS:
        both = read_flag(values, ("sliding_window_non_causal",), name)
        both = kind == DFLASH2 if both is None else both
        return [bool(window) and not both for window in windows]
    said = {key: read_flag({**own, **values}, (key,), name) for key in _CAUSAL}
    given = {key: value for key, value in said.items() if value is not None}
    if len(set(given.values())) > 1:
        answers = ", ".join(f"{key} {str(value).lower()}" for key, value in given.items())
        raise HeadError(f"{name}: config.json: {answers}", "one answer to what a row sees", _DO)
    return [next(iter(given.values()), bool(window)) for window in windows]
