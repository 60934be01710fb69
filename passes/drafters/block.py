"""Block drafters (DFlash 1 and 2, DSpark): one pass, then trees of its rows of logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.artifact.safetensors_io import TensorReader
from specc.drafters.block import BlockDraft
from specc.drafters.drafter import Drafter
from specc.drafters.scored_block import ScoredBlock
from specc.errors import HeadError
from specc.passes.base import Pass
from specc.passes.drafters.block_bias import BlockBias
from specc.passes.drafters.block_config import read_block_config
from specc.passes.drafters.block_head import BlockHead, step_weights
from specc.passes.drafters.block_parts import ScoreFiles
from specc.passes.drafters.block_pass import block_levels
from specc.passes.drafters.block_spec import BlockSpec
from specc.passes.drafters.compiler_drafter import CompilerDrafter
from specc.passes.drafters.head_modules import columns_of_ids
from specc.passes.drafters.head_spec import (
    DFLASH,
    DFLASH2,
    DSPARK,
    EMBEDDING,
    HeadSwitches,
    TargetFacts,
)
from specc.passes.drafters.head_tensors import count_layers, count_taps, match_block_tensors
from specc.passes.drafters.kinds import block_layout_of
from specc.passes.drafters.lattice import Lattice
from specc.passes.drafters.see_blocks import SeeBlocks
from specc.passes.drafters.tap_ids import choose_taps
from specc.passes.drafters.vocabulary_map import num_rows_of, read_target_ids
from specc.passes.program import RowInput, Weight
from specc.passes.rewrite.read_features import PLACES, ReadFeatures
from specc.passes.step.proposer import Proposer
from specc.passes.step.step_graph import StepGraph
from specc.speculation.live_nodes import can_cut
from specc.speculation.plans import SpecPlan


class CompilerBlock(CompilerDrafter):
    """Of those kinds whose files differ from DFlash's in what is added to its rows.

    Args of the class:
        kinds: that it reads.
        score: of a kind whose steps read the weights of a score.
    """

    kinds: tuple[str, ...] = (DFLASH, DSPARK, DFLASH2)
    score: ScoreFiles | None = None

    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        assert isinstance(drafter, BlockDraft)
        levels = block_levels(g, plan, drafter)
        if not drafter.is_biased:
            return Lattice(drafter, levels)
        asks = drafter.says_confidence and can_cut(plan)
        return Lattice(drafter, levels, BlockBias(drafter, asks))

    def says(self, raw: Mapping[str, Any], name: str) -> bool:
        found = block_layout_of(raw, (), name)
        return found is not None and found[0] in self.kinds

    def fit(
        self,
        reader: TensorReader,
        raw: dict[str, Any],
        directory: Path,
        weights: Path,
        target: TargetFacts,
        switches: HeadSwitches,
    ) -> BlockSpec | None:
        found = block_layout_of(raw, reader.keys(), str(directory))
        if found is None or found[0] not in self.kinds:
            return None
        return _fit_block(self, reader, raw, found, directory, target, switches)

    def earlier_name(self, tensor: str) -> str:
        """What early files call a tensor."""
        return tensor

    def rows(self, spec: BlockSpec, dtype: torch.dtype) -> tuple[RowInput, ...]:
        rows = super().rows(spec, dtype)
        return rows if spec.conv is None else (*rows, RowInput(PLACES, 1, torch.int32))

    def module(self, spec: BlockSpec) -> BlockHead:
        return BlockHead(spec)

    def passes(self, spec: BlockSpec) -> tuple[Callable[[], Pass], ...]:
        is_plain = not spec.block.causal_layers and not (spec.is_anchored and any(spec.windows))
        return (ReadFeatures,) if is_plain else (ReadFeatures, partial(SeeBlocks, spec))

    def hidden_columns(self, spec: BlockSpec) -> int:
        return spec.block.hidden_columns

    def step_weights(
        self, spec: BlockSpec, dtype: torch.dtype
    ) -> tuple[dict[str, Weight], dict[str, Tensor]]:
        if self.score is None:
            return step_weights(spec, dtype)
        shapes = {EMBEDDING: (spec.target.vocab_size, spec.width), **spec.parts}
        keys = [key for key in spec.block.tensors.values() if key in shapes]
        assert isinstance(spec.block, ScoredBlock)
        columns = columns_of_ids(spec)
        tables = {} if columns is None else {spec.block.columns: columns}
        return {key: Weight((key,), dtype, shapes[key]) for key in keys}, tables


DRAFTER = CompilerBlock()


def _fit_block(
    kind_of: CompilerBlock,
    reader: TensorReader,
    raw: dict[str, Any],
    found: tuple[str, str],
    directory: Path,
    target: TargetFacts,
    switches: HeadSwitches,
) -> BlockSpec:
    """A drafter, compared with its target.

    Args:
        kind_of: what reads files of its kind.
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
    config = read_block_config(raw, kind, layout, num_layers, directory, switches, kind_of.score)
    width = int(config.layers.hidden_size)
    target.require("layers", config.num_target_layers, target.num_layers, name)
    # without the key a drafter is as wide as its target
    num_taps = count_taps(reader, width, config.target_width or width, target, name, True)
    num_rows = num_rows_of(reader, config.draft_vocab_size, target.vocab_size, name)
    given = (config.layers, num_taps, num_rows, target, name, config.more_tensors(num_rows, target))
    tensors, shared = match_block_tensors(reader, *given, kind_of.earlier_name)
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
    if is_partial and config.block.candidates:
        raise HeadError(
            f"{name}: rows for {num_rows} of {target.vocab_size} ids, and {kind}",
            "a row for every id: its candidates are ids of the target",
            "pass another draft",
        )
    candidates = switches.candidates or config.block.candidates
    if candidates and not (config.block.is_biased and candidates <= num_rows):
        is_biased = "" if config.block.is_biased else ", of the same tokens after every token"
        raise HeadError(
            f"{name}: --draft-assume candidates={candidates}, and logits of {num_rows}"
            f" tokens{is_biased}",
            f"1 … {num_rows} candidates, of a drafter whose logits depend on the token before",
            "leave out candidates",
        )
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
        block=replace(config.block, is_partial=is_partial, candidates=candidates),
        draft_vocab_size=num_rows,
        target_ids=target_ids,
        windows=config.windows,
        is_anchored=config.is_anchored,
        rank=config.rank,
        conv=config.conv,
        scale=config.scale,
        parts=config.parts(num_rows, target.vocab_size),
        tensors=tensors,
        rope=config.rope,
    )
