"""The phases that a model goes through: one list for each role that it may have in an engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from specc.artifact.backends import LATENT_ROWS, QUANTIZED_LATENT, VALUE_WIDTH
from specc.artifact.kv_rows import AUTO as AS_MODEL
from specc.artifact.mixes import MIXES
from specc.artifact.mla_cache import AUTO, EXPANDED
from specc.artifact.model_entry import SelfDraftEntry
from specc.compiler.context import CompileContext, chosen_blocks
from specc.drafters.drafter import Drafter
from specc.passes.drafters.registry import drafter_of_files
from specc.passes.frontend.model_source import ModelSource
from specc.passes.pipeline import FUSE_PHASES, LAYERLESS_PHASES, TRACED_PHASES, Phases
from specc.passes.program import Program
from specc.passes.quantize.apply_mix import MIX, ApplyMix
from specc.passes.quantize.quantize_linear import quantize_phases
from specc.passes.rewrite.absorb_latent import AbsorbLatent
from specc.passes.rewrite.expand_prompts import ExpandPrompts
from specc.passes.rewrite.fuse_rms_norm import FuseAddRMSNorm
from specc.passes.rewrite.insert_block_mass import InsertBlockMass
from specc.passes.rewrite.map_vocabulary import fits_target
from specc.passes.rewrite.quantize_caches import QuantizeCaches
from specc.passes.rewrite.require_supported import RequireAttention, RequireLayouts
from specc.passes.rewrite.return_hidden import ReturnHidden
from specc.passes.rewrite.skip_layers import SkipLayers
from specc.passes.rewrite.tap_features import TapFeatures
from specc.passes.rewrite.window_attention import WindowAttention
from specc.passes.shard.shard import Shard
from specc.speculation.kv_window import KVWindow

# how caches hold rows, what fits a draft to its target, what bounds the rows that it attends to,
# and what cuts a model for ranks
CACHE, VOCABULARY, WINDOW, CUT = "cache", "vocabulary", "window", "shard"
# what lets long prompts expand latents for their own pass
PROMPTS = "prompts"
# what lets caches hold the latents that keys and values are expanded from
MLA = "latent"
# what rounds its projections by what they multiply
CALIBRATION = "calibration"
# what asks a target's attention for the blocks that it looks at
VOTES = "votes"
# what lets a target keep hidden states for drafts, and drafts read them
TAPS = "taps"
HIDDEN = "hidden states"
# what makes a second program of the target's
DERIVE = "derive"
# phases that run before a model is cut for ranks
BEFORE_CUT = (
    *(name for name, _ in (*TRACED_PHASES, *FUSE_PHASES)),
    *(MLA, MIX, TAPS, CACHE, VOCABULARY, WINDOW, HIDDEN, PROMPTS, CALIBRATION, DERIVE),
)


def target_phases(
    context: CompileContext, calibration: Phases = (), adapters: Phases = ()
) -> Phases:
    """Of the target; `calibration` comes before anything is cut or rounded, and `adapters` after
    it: texts are passed through the target without them.
    """
    config = context.config
    return (
        *TRACED_PHASES,
        *_latent(context, config.tensor_parallel_size),
        *_mix(config.quantize),
        *FUSE_PHASES,
        # after the graph that self-drafts take: they keep nothing
        *_taps(context),
        *_quantized_rows(context),
        *_prompts(context),
        *calibration,
        *cut_phases(config.tensor_parallel_size),
        *adapters,
        *_rounded(context, context.quantization, tables=context.quantization),
        *_required(context),
        *_invariant(context, (*_apart(context, context.lowering()), *vote_phases(context))),
    )


def draft_phases(context: CompileContext, draft: ModelSource, num_ids: int) -> Phases:
    """Of a draft model, which takes and proposes the ids of its target, `num_ids` of them."""
    ranks = context.config.draft_tensor_parallel_size
    return (
        *TRACED_PHASES,
        *_latent(context, ranks),
        *_mix(context.rounded_to(draft)),
        *FUSE_PHASES,
        *_quantized_rows(context),
        *_vocabulary(draft, num_ids),
        *_window(draft.kv_window),
        *_prompts(context),
        *cut_phases(ranks),
        *_rounded(context, context.layout_of(draft), tables=context.layout_of(draft)),
        *_required(context),
        *context.lowering(),
    )


def head_phases(
    context: CompileContext,
    draft: ModelSource,
    num_ids: int,
    keeps_integers: bool,
    target: Program,
) -> Phases:
    """Of a draft that reads hidden states: rank 0 has all of it, and its weights keep their type
    unless it is to be rounded, the checkpoint has integers, or the target of those that it shares.

    Args:
        target: its program, after its last pass.
    """
    head = draft.head
    assert head is not None
    drafter = drafter_of_files(head)
    width = drafter.hidden_columns(head)
    return (
        *(
            (*TRACED_PHASES, *_latent(context, 1), *FUSE_PHASES)
            if drafter.has_layers(head)
            else LAYERLESS_PHASES
        ),
        (TAPS, (*drafter.target_passes(head, target), *drafter.passes(head))),
        *_mix(context.rounded_to(draft)),
        *_quantized_rows(context),
        *_vocabulary(draft, num_ids),
        # from here on columns of the output are not all ids
        *(((HIDDEN, (partial(ReturnHidden, width),)),) if width else ()),
        *_prompts(context),
        # no table: it is often the target's, and a lookup reads few bytes as it is
        *_rounded(context, context.layout_of(draft), keeps_integers, tables=None),
        *_required(context),
        *context.lowering(),
    )


def self_draft_phases(
    context: CompileContext,
    draft: Drafter,
    entry: SelfDraftEntry,
    is_quantized: bool,
    kept: Sequence[int] | None,
) -> tuple[Phases, Phases]:
    """Of a second program of the target, from the graph before `FUSE_PHASES`: before and after the
    cut for ranks.

    Args:
        context: of the compilation.
        draft: what was asked for.
        entry: which layers it has, and whether it attends to a window.
        is_quantized: the target's checkpoint is.
        kept: layers that are left, as of `SkipLayers`; None is all.
    """
    view, layout = draft.view, draft.quantization or context.quantization
    first: Phases = (
        (
            DERIVE,
            (
                *([] if kept is None else [partial(SkipLayers, kept)]),
                *(
                    [partial(WindowAttention, KVWindow(view.window, view.sink))]
                    if entry.is_windowed and view is not None
                    else []
                ),
            ),
        ),
        *FUSE_PHASES,
        *_quantized_rows(context),
    )
    last = (
        # a draft that is rounded for itself has no table of its own
        *_rounded(context, layout, is_quantized, tables=context.quantization),
        *_apart(context, (*_required(context), *context.lowering())),
    )
    return first, last


def stored_phases(
    context: CompileContext, *, is_target: bool, keeps_integers: bool, looks_up: bool = True
) -> Phases:
    """Of a graph that an engine has from before it was cut: what follows a cut.

    Args:
        context: of the new engine.
        is_target: or a second program of the target.
        keeps_integers: the engine has integers of its weights,
        looks_up: and its embedding reads some.
    """
    lowering = (
        *_rounded(context, None, keeps_integers, looks_up),
        *context.backend.phases(context.positions),
    )
    return _apart(context, lowering) if is_target else lowering


def cut_phases(num_ranks: int) -> Phases:
    """What cuts a model for ranks."""
    return ((CUT, (partial(Shard, num_ranks),)),) if num_ranks > 1 else ()


def vote_phases(context: CompileContext) -> Phases:
    """What tells drafts of some plan which blocks the target looked at."""
    is_asked = any(plan.chooses_blocks for plan in context.plans)
    return ((VOTES, (InsertBlockMass,)),) if is_asked else ()


def _latent(context: CompileContext, num_ranks: int) -> Phases:
    config, facts = context.config, context.facts
    rows = LATENT_ROWS if config.kv_cache_dtype == AS_MODEL else QUANTIZED_LATENT
    computes = rows in facts.attention_extras
    if config.mla_cache == EXPANDED or (config.mla_cache == AUTO and not computes):
        return ()
    absorb = partial(
        AbsorbLatent,
        config.mla_cache,
        config.kv_cache_dtype,
        num_ranks,
        most=facts.most_latent,
        takes_two_widths=VALUE_WIDTH in facts.attention_extras,
        most_voting=facts.most_voting_dim if chosen_blocks(context.plans) else None,
    )
    return ((MLA, (absorb,)),)


def _mix(kind: str | None) -> Phases:
    """What says which weight has which format, where a mix of them was asked for."""
    mix = MIXES.get(kind or "")
    return () if mix is None else ((MIX, (partial(ApplyMix, mix),)),)


def _prompts(context: CompileContext) -> Phases:
    # a prompt's chunks and what stands beside them decide which sequences are expanded
    expands = context.facts.expands_prompts and not context.config.batch_invariant
    expands = expands and bool(_latent(context, 1))
    return ((PROMPTS, (ExpandPrompts,)),) if expands else ()


def _taps(context: CompileContext) -> Phases:
    taps = context.taps
    return () if taps is None else ((TAPS, (partial(TapFeatures, taps),)),)


def _quantized_rows(context: CompileContext) -> Phases:
    kind = context.config.kv_cache_dtype
    return () if kind == AS_MODEL else ((CACHE, (partial(QuantizeCaches, kind),)),)


def _vocabulary(draft: ModelSource, num_ids: int) -> Phases:
    return ((VOCABULARY, (partial(fits_target, draft.vocabulary, num_ids),)),)


def _window(rows: KVWindow | None) -> Phases:
    return () if rows is None else ((WINDOW, (partial(WindowAttention, rows),)),)


def _rounded(
    context: CompileContext,
    layout: str | None,
    keeps_integers: bool | None = None,
    looks_up: bool = True,
    tables: str | None = None,
) -> Phases:
    """Weights in integers.

    Args:
        layout: of projections; None leaves those that have no integers.
        tables: layout that embeddings go by, likewise.
    """
    if keeps_integers is None:
        keeps_integers = context.keeps_integers
    facts, config = context.facts, context.config
    return quantize_phases(
        layout,
        keeps_integers,
        facts.quantizes_experts,
        config.activation_bits,
        embeddings=tables,
        lookups=looks_up and facts.looks_up_quantized,
        fragments=config.weight_fragments,
    )


def _required(context: CompileContext) -> Phases:
    """What refuses models that a backend does not run, before anything slow is done for them."""
    kinds = (RequireAttention, RequireLayouts)
    return (("backend", tuple(partial(kind, context.facts) for kind in kinds)),)


def _invariant(context: CompileContext, phases: Phases) -> Phases:
    return context.backend.invariant_phases(phases) if context.config.batch_invariant else phases


def _apart(context: CompileContext, lowering: Phases) -> Phases:
    """Where a model is cut between its layers, one value leads from each to the next: the norm of a
    layer is no part of the sum that the layer before ends with.
    """
    if not context.cuts_layers:
        return lowering
    return tuple(
        (name, tuple(each for each in passes if each is not FuseAddRMSNorm))
        for name, passes in lowering
    )
