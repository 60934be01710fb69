"""Models through the pipeline: traced, rewritten, and described for the manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from specc.artifact.kv_rows import AUTO, INT8
from specc.artifact.model_entry import ModelEntry
from specc.compiler.candidate import advice_for
from specc.compiler.model_entries import check_windows, describe_model
from specc.compiler.whole_graph import KeptGraphs
from specc.passes.base import Pass
from specc.passes.frontend.heads.block_head import step_weights
from specc.passes.frontend.heads.block_spec import BlockSpec
from specc.passes.frontend.heads.feature_head import head_rows
from specc.passes.frontend.heads.medusa_spec import MedusaSpec
from specc.passes.frontend.model_source import ModelSource
from specc.passes.frontend.position_limit import position_limit
from specc.passes.frontend.trace import trace
from specc.passes.lower.cpu.phases import CPU, with_layers_apart
from specc.passes.lower.cpu.quantize_linear import QUANTIZE
from specc.passes.pipeline import (
    FUSE,
    LAYERLESS_PHASES,
    PHASES,
    PassRecord,
    Phases,
    Pipeline,
)
from specc.passes.program import AttentionLayer, Program, Weight
from specc.passes.rewrite.expand_prompts import ExpandPrompts
from specc.passes.rewrite.insert_block_mass import InsertBlockMass
from specc.passes.rewrite.map_vocabulary import fits_target
from specc.passes.rewrite.return_hidden import ReturnHidden
from specc.passes.rewrite.see_blocks import feature_passes
from specc.passes.rewrite.store_int8 import StoreInt8
from specc.passes.rewrite.tap_features import TapFeatures
from specc.passes.rewrite.window_attention import WindowAttention
from specc.passes.segments.cut_segments import Segment
from specc.passes.shard.shard import Shard
from specc.passes.step.step_graph import TARGET
from specc.progress import PhaseTimer
from specc.speculation.plans import SpecPlan
from specc.speculation.taps import Taps

# phases that not every model has: how caches hold rows, what fits a draft to its target, what
# bounds the rows that it attends to, and what cuts a target
CACHE, VOCABULARY, WINDOW, CUT = "cache", "vocabulary", "window", "shard"
# what lets long prompts expand latents for their own pass
PROMPTS = "prompts"
# what lets caches hold the latents that keys and values are expanded from
MLA = "latent"
# what asks a target's attention for the blocks that it looks at
VOTES = "votes"
# what lets a target keep hidden states for drafts, and drafts read them
TAPS = "taps"
HIDDEN = "hidden states"
# those, beside the ones of every engine, that come before a model is cut for ranks
BEFORE_CUT = (MLA, TAPS, CACHE, VOCABULARY, WINDOW, HIDDEN, PROMPTS)


@dataclass
class CompiledModel:
    """A model after its last pass, and what the manifest says about it."""

    source: ModelSource
    program: Program
    entry: ModelEntry
    # over padded batches, where the backend takes those
    padded: Program | None = None
    # the program before it was cut for ranks, or quantized
    whole: dict[str, Any] | None = None
    # its layers then
    whole_layers: tuple[AttentionLayer, ...] = ()
    # the target's before projections were fused, where its plans draft with it
    unfused: Program | None = None
    # the target's before the backend's phases, where it is cut into stages there
    unlowered: Program | None = None
    # what the program is cut into, where the engine has segments
    segments: list[Segment] | None = None
    # what it is cut into for the stages of a pipeline, if there are several
    stages: tuple[Segment, ...] = ()
    # by key, what the program's file has beside its own weights: quantized ones that self-drafts
    # alone read, those that steps read, and tables of numbers that they need
    copies: dict[str, Weight] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """Ranks that have files of their own of the model; (None,) where it is not cut."""
        plan = self.program.shard
        return (None,) if plan is None else tuple(range(plan.num_ranks))


def compile_models(
    sources: Sequence[ModelSource],
    plans: Sequence[SpecPlan],
    max_seq_len: int,
    lowering: Phases,
    phases: PhaseTimer,
    dump: Path | None = None,
    num_ranks: int = 1,
    num_draft_ranks: int = 1,
    kv_cache_dtype: str = AUTO,
    latent: Callable[[int], Pass] | None = None,
    stages_before: str | None = None,
    taps: Taps | None = None,
    expands_prompts: bool = True,
    lowering_of_heads: Phases | None = None,
    layers_apart: bool = False,
) -> tuple[list[CompiledModel], list[PassRecord]]:
    """Trace and rewrite the models of an engine; no weight is read.

    Args:
        sources: the target first.
        plans: of the engine.
        max_seq_len: positions that the engine serves.
        lowering: phases of the backend, after those of every engine.
        phases: tells the listener how far this is.
        dump: directory that gets each program's graph after each phase, or None.
        num_ranks: that share the target.
        num_draft_ranks: that share each draft.
        kv_cache_dtype: see `specc.artifact.kv_rows`.
        latent: makes the pass that has caches hold latents, for a number of ranks; None leaves keys
            and values as models compute them.
        stages_before: see `CompilerBackend.phase_of_stages`.
        taps: hidden states that the target keeps for drafts.
        expands_prompts: where caches hold latents, long prompts may expand them for their own pass.
        lowering_of_heads: that of drafts that read hidden states; None is `lowering`.
        layers_apart: see `with_layers_apart`, of the target.
    Returns:
        the models, and what each pass did.
    Raises:
        SpeccError: a model that specc does not compile, or a plan that it cannot verify.
    """
    models: list[CompiledModel] = []
    records: list[PassRecord] = []
    for source in sources:
        author = source.module if source.is_given else source.label
        with phases.phase(f"trace {source.name}"), advice_for(author):
            rows = () if source.head is None else head_rows(source.head, source.dtype)
            hands_on = source.head is not None and source.head.hands_on
            program = trace(
                source.module, source.name, source.rope_length, rows=rows, hands_on=hands_on
            )
            source.position_rows = position_limit(program)
            program.integers = source.integers(program)
            program.most_positions = max_seq_len
        ranks = num_ranks if source.name == TARGET else num_draft_ranks
        layout = first_phases(latent, ranks)
        if isinstance(source.head, MedusaSpec):
            layout = LAYERLESS_PHASES
        if source.name == TARGET and taps is not None:
            # after the graph that self-drafts take: they keep nothing
            layout = (*layout, (TAPS, (partial(TapFeatures, taps),)))
        if source.head is not None:
            layout = (*layout, (TAPS, feature_passes(source.head)))
        layout = (*layout, *cache_phases(kv_cache_dtype))
        if source.name != TARGET:
            num_ids = models[0].entry.vocab_size
            fits = partial(fits_target, source.vocabulary, num_ids)
            layout = (*layout, (VOCABULARY, (fits,)))
            if source.kv_window is not None:
                layout = (*layout, (WINDOW, (partial(WindowAttention, source.kv_window),)))
        if isinstance(source.head, BlockSpec) and source.head.block.hidden_columns:
            # from here on columns of the output are not all ids
            width = source.head.block.hidden_columns
            layout = (*layout, (HIDDEN, (partial(ReturnHidden, width),)))
        if latent is not None and expands_prompts:
            layout = (*layout, (PROMPTS, (ExpandPrompts,)))
        if ranks > 1:
            layout = (*layout, (CUT, (partial(Shard, ranks),)))
        own = lowering if source.head is None or lowering_of_heads is None else lowering_of_heads
        if layers_apart and source.name == TARGET:
            own = with_layers_apart(own)
        # an uncut draft stays as it is, whatever the target becomes
        is_rounded = any(phase == QUANTIZE for phase, _ in own)
        firsts = (CUT, CPU, *((QUANTIZE,) if source.name == TARGET else ()))
        last: Phases = ()
        if source.name == TARGET and any(plan.chooses_blocks for plan in plans):
            last = ((VOTES, (InsertBlockMass,)),)
        is_target = source.name == TARGET
        drafts = is_target and any(plan.self_drafts for plan in plans)
        places = (FUSE if drafts else None, stages_before if is_target else None)
        kept = KeptGraphs(program, firsts, is_rounded, *places)
        with phases.phase(f"rewrite {source.name}"), advice_for(author):
            records += Pipeline((*layout, *own, *last), dump, kept.keep).run(program)
        entry = describe_model(source, program, max_seq_len)
        model = CompiledModel(source, program, entry)
        if isinstance(source.head, BlockSpec):
            model.copies, model.tables = step_weights(source.head, source.dtype)
        if kept.whole is not None:
            model.whole, model.whole_layers = kept.whole.to_json(program), kept.whole.layers
        model.unfused, model.unlowered = kept.unfused, kept.unlowered
        models.append(model)
        check_windows(entry, plans)
    return models, records


def first_phases(latent: Callable[[int], Pass] | None, num_ranks: int) -> Phases:
    """Those of every engine, and before projections are fused what lets caches hold latents."""
    if latent is None:
        return PHASES
    place = [phase for phase, _ in PHASES].index(FUSE)
    return (*PHASES[:place], (MLA, (partial(latent, num_ranks),)), *PHASES[place:])


def cache_phases(kv_cache_dtype: str) -> Phases:
    """What lets caches hold rows of this type."""
    return ((CACHE, (StoreInt8,)),) if kv_cache_dtype == INT8 else ()
