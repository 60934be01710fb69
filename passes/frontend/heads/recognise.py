"""Is a directory a draft head, and does it fit its target? Headers and one map are read, no weight.

Sources: SafeAILab/EAGLE eagle/model/cnets.py; vllm-project/speculators models/eagle3;
deepseek-ai/DeepSpec deepspec/modeling/eagle3; vllm-project/vllm worker/gpu/spec_decode/eagle.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specc.artifact.safetensors_io import (
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsReader,
    TensorReader,
)
from specc.errors import HeadError
from specc.passes.frontend.heads.block_config import read_block_config
from specc.passes.frontend.heads.block_spec import BlockSpec
from specc.passes.frontend.heads.head_config import HeadConfig, read_head_config
from specc.passes.frontend.heads.head_modules import OwnSpec
from specc.passes.frontend.heads.head_spec import (
    DEEPSPEC,
    EAGLE3,
    EMBEDDING,
    EagleSpec,
    HeadSwitches,
    TargetFacts,
)
from specc.passes.frontend.heads.head_tensors import (
    count_layers,
    count_taps,
    match_block_tensors,
    match_tensors,
)
from specc.passes.frontend.heads.kinds import block_layout_of, layout_of, medusa_layout_of
from specc.passes.frontend.heads.medusa_spec import MEDUSA_FILE, fit_medusa
from specc.passes.frontend.heads.tap_ids import (
    CONVENTIONS,
    ENTERING,
    choose_taps,
    default_ids,
)
from specc.passes.frontend.heads.vocabulary_map import num_rows_of, read_target_ids
from specc.system.json_file import read_json

_DO = "pass the head of this target, or download it again"
# what files say, and else what their own trainers take
AS_TRAINED = HeadSwitches()
_PICKLED = ("*.bin", "*.pt", "*.pth")


def recognise(
    directory: Path, target: TargetFacts, switches: HeadSwitches = AS_TRAINED
) -> OwnSpec | None:
    """What head, block drafter or set of Medusa heads a directory holds.

    Args:
        directory: of a draft.
        target: that it is to draft for.
        switches: what to take in place of what the files say.
    Returns:
        the head; None where this is an ordinary model, or no model at all.
    Raises:
        HeadError: another target's head, one with tensors too many or too few, a kind of draft
            that specc does not run, or weights that are pickled alone.
        WeightError: a checkpoint that cannot be read.
        NotCausalLMError, UnsupportedRotaryError: see `read_head_config`.
    """
    file, name = directory / "config.json", str(directory)
    if not file.is_file():
        return None
    raw = read_json(file, HeadError, "the configuration of a model", "correct config.json")
    if not isinstance(raw, dict):
        return None
    weights = directory
    if not (directory / SINGLE_FILE).is_file() and not (directory / INDEX_FILE).is_file():
        is_medusa = medusa_layout_of(raw, ()) is not None
        if is_medusa and (directory / MEDUSA_FILE).is_file():
            weights = directory / MEDUSA_FILE
        elif is_medusa or block_layout_of(raw, (), name) or layout_of(raw, (), name):
            raise _no_tensors(directory)
        else:
            return None
    with SafetensorsReader(weights) as reader:
        return fit_head(reader, raw, directory, weights, target, switches)


def fit_head(
    reader: TensorReader,
    raw: dict[str, Any],
    directory: Path,
    weights: Path,
    target: TargetFacts,
    switches: HeadSwitches = AS_TRAINED,
) -> OwnSpec | None:
    """What head a configuration and names of tensors are of; results and errors as of `recognise`.

    Args:
        reader: of tensors, of which shapes are read, and the values of maps of ids.
        raw: contents of config.json.
        directory: of a draft; what errors call it.
        weights: directory or file that `reader` reads.
        target: that it is to draft for.
        switches: what to take in place of what the files say.
    """
    names, name = list(reader.keys()), str(directory)
    if (medusa := medusa_layout_of(raw, names)) is not None:
        return fit_medusa(reader, raw, medusa, directory, weights, target)
    if (found := block_layout_of(raw, names, name)) is not None:
        return _fit_block(reader, raw, found, directory, target, switches)
    layout = layout_of(raw, names, name)
    if layout is None:
        return None
    config = read_head_config(raw, layout, count_layers(names), switches, name)
    return _fit_eagle(reader, config, layout, directory, target, switches, raw)


def _fit_eagle(
    reader: TensorReader,
    config: HeadConfig,
    layout: str,
    directory: Path,
    target: TargetFacts,
    switches: HeadSwitches,
    raw: dict[str, Any],
) -> EagleSpec:
    name, width = str(directory), int(config.layers.hidden_size)
    if layout == DEEPSPEC:
        target.require("layers", raw.get("num_target_layers"), target.num_layers, name)
        if len(config.windows) > 1:
            raise HeadError(
                f"{name}: a head of {DEEPSPEC} of {len(config.windows)} layers, each of which reads"
                " tokens and features",
                "one layer, as published heads have",
                "pass such a head",
            )
    # without the key a head is as wide as its target
    num_taps = count_taps(reader, width, config.target_width or width, target, name)
    num_rows = num_rows_of(reader, config.draft_vocab_size, target.vocab_size, name)
    tensors, shared = match_tensors(reader, config, num_taps, num_rows, target, name)
    if EMBEDDING in shared:
        # else its own embedding has been compared with the target's
        target.require("ids", config.vocab_size, target.vocab_size, name)
    boundaries, is_last_normed, words = _taps(config, num_taps, target, switches, name)
    return EagleSpec(
        kind=EAGLE3,
        layout=layout,
        directory=directory,
        target=target,
        config=config.layers,
        boundaries=boundaries,
        is_last_normed=is_last_normed,
        draft_vocab_size=num_rows,
        target_ids=read_target_ids(reader, num_rows, target.vocab_size, name),
        flags=config.flags,
        windows=config.windows,
        has_qk_norm=config.has_qk_norm,
        tensors=tensors,
        shared=shared,
        rope=config.rope,
        warnings=(*config.warnings, *words),
    )


def _taps(
    config: HeadConfig, num_taps: int, target: TargetFacts, switches: HeadSwitches, name: str
) -> tuple[tuple[int, ...], bool, list[str]]:
    """Boundaries, whether the last is taken after the final norm, and what to tell the user."""
    words: list[str] = []
    ids, convention = config.ids, config.convention
    if convention not in CONVENTIONS:
        raise ValueError(f"no convention of ids is called {convention}")
    if ids is None:
        ids, convention = default_ids(target.num_layers), switches.tap_convention or ENTERING
        if num_taps == len(ids):
            words.append(
                f"config.json names no layers: {', '.join(map(str, ids))} ({convention}) are"
                " taken, which heads are trained with where nobody chooses"
            )
    named = len(ids) if config.ids else 0
    given = (num_taps, target.num_layers, switches.is_last_normed, name, named)
    boundaries, is_last_normed = choose_taps(ids, convention, *given)
    return boundaries, is_last_normed, words


def _fit_block(
    reader: TensorReader,
    raw: dict[str, Any],
    found: tuple[str, str],
    directory: Path,
    target: TargetFacts,
    switches: HeadSwitches,
) -> BlockSpec:
    """A drafter, compared with its target.

    Args:
        reader: of its checkpoint.
        raw: contents of its config.json.
        found: kind and layout, see `HeadSpec`.
        directory: of its files.
        target: that it is to draft for.
        switches: what to take in place of what the files say.
    Raises:
        HeadError: another target's, one with tensors too many or too few, or one that computes
            what specc does not.
        NotCausalLMError, UnsupportedRotaryError: see `read_block_config`.
    """
    name, (kind, layout) = str(directory), found
    num_layers = count_layers(reader.keys())
    config = read_block_config(raw, kind, layout, num_layers, directory, switches)
    width = int(config.layers.hidden_size)
    target.require("layers", config.num_target_layers, target.num_layers, name)
    # without the key a drafter is as wide as its target
    num_taps = count_taps(reader, width, config.target_width or width, target, name, True)
    num_rows = num_rows_of(reader, config.draft_vocab_size, target.vocab_size, name)
    given = (config.layers, num_taps, num_rows, target, name, config.more_tensors(num_rows, target))
    tensors, shared = match_block_tensors(reader, *given)
    if EMBEDDING in shared:
        # else its own embedding has been compared with the target's
        target.require("ids", config.vocab_size, target.vocab_size, name)
    if config.block.mask_token_id >= target.vocab_size:
        raise HeadError(
            f"{name}: mask_token_id {config.block.mask_token_id}; {target.name} has ids 0 …"
            f" {target.vocab_size - 1}",
            "a row of the target's embedding",
            "pass the drafter of this target",
        )
    boundaries, is_last_normed = choose_taps(
        config.ids,
        config.convention,
        num_taps,
        target.num_layers,
        switches.is_last_normed,
        name,
    )
    target_ids = read_target_ids(reader, num_rows, target.vocab_size, name)
    is_partial = config.block.is_biased and target_ids is not None
    return BlockSpec(
        kind=kind,
        layout=layout,
        directory=directory,
        target=target,
        config=config.layers,
        boundaries=boundaries,
        is_last_normed=is_last_normed,
        shared=shared,
        warnings=config.warnings,
        block=replace(config.block, is_partial=is_partial),
        draft_vocab_size=num_rows,
        target_ids=target_ids,
        windows=config.windows,
        is_anchored=config.is_anchored,
        rank=config.rank,
        tensors=tensors,
        rope=config.rope,
    )


def _no_tensors(directory: Path) -> HeadError:
    pickled = [item.name for pattern in _PICKLED for item in sorted(directory.glob(pattern))]
    what = f"its weights are pickled ({pickled[0]})" if pickled else "it has no weights"
    do = "convert them with safetensors.torch.save_file where you trust them"
    return HeadError(
        f"{directory}: a draft head; {what}",
        SINGLE_FILE,
        do if pickled else "download the head again",
    )
