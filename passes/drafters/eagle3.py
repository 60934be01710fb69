"""EAGLE-3 and 3.1 heads: their files, compared with a target.

Sources: SafeAILab/EAGLE eagle/model/cnets.py; vllm-project/speculators models/eagle3;
deepseek-ai/DeepSpec deepspec/modeling/eagle3; vllm-project/vllm worker/gpu/spec_decode/eagle.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specc.artifact.safetensors_io import TensorReader
from specc.errors import HeadError
from specc.passes.drafters.feature_head import FeatureHead
from specc.passes.drafters.head import CompilerHead
from specc.passes.drafters.head_config import HeadConfig, read_head_config
from specc.passes.drafters.head_spec import (
    DEEPSPEC,
    EAGLE3,
    EMBEDDING,
    EagleSpec,
    HeadSwitches,
    TargetFacts,
)
from specc.passes.drafters.head_tensors import Shapes, count_layers, count_taps, match_tensors
from specc.passes.drafters.kinds import layout_of
from specc.passes.drafters.tap_ids import CONVENTIONS, ENTERING, choose_taps, default_ids
from specc.passes.drafters.vocabulary_map import num_rows_of, read_target_ids


class CompilerEagle3(CompilerHead):
    def says(self, raw: Mapping[str, Any], name: str) -> bool:
        return layout_of(raw, (), name) is not None

    def fit(
        self,
        reader: TensorReader,
        raw: dict[str, Any],
        directory: Path,
        weights: Path,
        target: TargetFacts,
        switches: HeadSwitches,
    ) -> EagleSpec | None:
        name, names = str(directory), list(reader.keys())
        layout = layout_of(raw, names, name)
        if layout is None:
            return None
        config = read_head_config(raw, layout, count_layers(names), switches, name)
        return fit_eagle(reader, config, layout, directory, target, switches, raw, {})

    def module(self, spec: EagleSpec) -> FeatureHead:
        return FeatureHead(spec)


DRAFTER = CompilerEagle3()


def fit_eagle(
    reader: TensorReader,
    config: HeadConfig,
    layout: str,
    directory: Path,
    target: TargetFacts,
    switches: HeadSwitches,
    raw: dict[str, Any],
    more: Shapes,
) -> EagleSpec:
    """A head, compared with its target.

    Args:
        reader: of its checkpoint.
        config: what its configuration says.
        layout: see `HeadSpec`.
        directory: of its files.
        target: that it is to draft for.
        switches: what to take in place of what the files say.
        raw: contents of its config.json.
        more: shapes of parameters that it has besides those of EAGLE-3.
    Raises:
        HeadError: another target's, or one with tensors too many or too few.
    """
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
    tensors, shared = match_tensors(reader, config, num_taps, num_rows, target, name, more)
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
