"""Does a DFlash drafter fit its target? Headers and one map are read, no weight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specc.artifact.safetensors_io import TensorReader
from specc.errors import HeadError
from specc.passes.frontend.heads.block_config import read_block_config
from specc.passes.frontend.heads.block_spec import BlockSpec
from specc.passes.frontend.heads.head_spec import EMBEDDING, HeadSwitches, TargetFacts
from specc.passes.frontend.heads.head_tensors import (
    count_layers,
    count_taps,
    match_block_tensors,
)
from specc.passes.frontend.heads.tap_ids import choose_taps
from specc.passes.frontend.heads.vocabulary_map import num_rows_of, read_target_ids


def fit_block(
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
