"""The padded form of a program: [B, N] tokens, caches [B, HK, L, D], functional operators.

ONNX and TensorRT want it. The flat program of the same model comes first: its passes recover what
masks mean, prove that tokens meet in attention alone, and lay out the weights that both read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import nn

from specc.errors import UnsupportedAttentionError, UnsupportedGraphError
from specc.kernels import ops
from specc.passes.frontend.trace_padded import trace_padded
from specc.passes.pipeline import PassRecord, Phases, Pipeline
from specc.passes.program import AttentionLayer, Program, Slopes, bind_args
from specc.passes.quantize.quantize_like import QuantizeLike
from specc.passes.rewrite.cached_attention import RewriteCachedAttention
from specc.passes.rewrite.drop_sentinel_masks import DropSentinelMasks
from specc.passes.rewrite.fuse_projections import FuseGateUp, FuseQKV
from specc.passes.rewrite.fuse_rms_norm import FuseRMSNorm
from specc.passes.rewrite.map_vocabulary import fits_target
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.read_padded_places import ReadPaddedPlaces
from specc.passes.rewrite.read_tables import ReadTables
from specc.passes.rewrite.recover_attention import RecoverAttention
from specc.passes.rewrite.recover_linear import RecoverLinear
from specc.passes.rewrite.replace_grouped_mm import ReplaceGroupedMM
from specc.passes.rewrite.select_logits import SelectLogits
from specc.passes.rewrite.split_complex import SplitComplex
from specc.passes.shard.shard import Shard
from specc.sharding.shard_plan import ShardPlan
from specc.speculation.vocabulary_map import VocabularyMap


def padded_program(
    module: nn.Module,
    flat: Program,
    cache_rows: int,
    dump: Path | None = None,
    rope_length: int | None = None,
    whole_layers: Sequence[AttentionLayer] = (),
    vocabulary: VocabularyMap | None = None,
) -> tuple[Program, list[PassRecord]]:
    """Trace and rewrite a model whose flat program went through all phases.

    Args:
        flat: its finished flat program; that of one of several ranks where it was cut.
        cache_rows: L, rows of a sequence's cache.
        dump: directory for the graphs after each phase.
        rope_length: of the flat program, see `specc.passes.frontend.rotary.constant_length`.
        whole_layers: of the flat program before it was cut, if it was.
        vocabulary: of a draft of other tokens than the target's.
    Returns:
        the program, cut as the flat one is, and what each pass did.
    Raises:
        UnsupportedAttentionError, UnsupportedGraphError: it computes other things than the flat
            one, or is cut in another way.
    """
    cut, layers = flat.shard, whole_layers or flat.layers
    width = logits_width(flat) if cut is None else cut.vocab_size
    slopes = _slopes_of(flat)
    program = trace_padded(module, flat.name, rope_length)
    program.integers = dict(flat.integers)
    phases: Phases = (
        (
            "normalize",
            (
                Normalize,
                RecoverLinear,
                SplitComplex,
                ReadTables,
                ReplaceGroupedMM,
                DropSentinelMasks,
            ),
        ),
        (
            "attention",
            (
                RecoverAttention,
                partial(RewriteCachedAttention, layers, cache_rows, slopes),
                ReadPaddedPlaces,
            ),
        ),
        ("logits", (SelectLogits,)),
        ("fuse", (FuseQKV, FuseGateUp)),
        ("norms", (FuseRMSNorm,)),
        ("vocabulary", (partial(fits_target, vocabulary, width),)),
        ("quantize", (partial(QuantizeLike, flat),)),
    )
    if cut is not None:
        phases = (*phases, ("shard", (partial(Shard, cut.num_ranks),)))
    # the proof that tokens meet in attention alone is that of the flat program
    pipeline = Pipeline(phases, dump and dump / "padded", verifies=False)
    records = pipeline.run(program)
    if cut is not None and program.shard is not None:
        _require_same_cut(cut, program.shard, flat.name)
    _require_same_weights(flat, program)
    return program, records


def _slopes_of(flat: Program) -> list[Slopes | None]:
    """Slopes of the flat program's layers; none where no layer has any."""
    if not any(layer.has_slopes for layer in flat.layers):
        return []
    if flat.shard is not None:
        raise UnsupportedAttentionError(
            f"{flat.name} is cut for {flat.shard.num_ranks} ranks, and adds a bias by the distance"
            " of keys (ALiBi) to its scores",
            "a network of one rank, or another model",
            "compile without --tensor-parallel-size, or with --backend cpu",
        )
    found: list[Slopes | None] = []
    for node in flat.calls(ops.tree_attention):
        bound = bind_args(node)
        slopes = bound["slopes"]
        values = None if slopes is None else flat.constants[slopes.target]
        found.append(None if values is None else Slopes(values, bound["rounds_bias"]))
    return found


def logits_width(program: Program) -> int:
    """V of a program's logits."""
    return int(program.logits.meta["val"].shape[-1])


def _require_same_weights(flat: Program, program: Program) -> None:
    """Both are to read one file."""
    known = {weight.key: weight for weight in flat.weights.values()}
    for weight in program.weights.values():
        if known.get(weight.key) != weight:
            raise UnsupportedGraphError(
                f"{program.name} reads {weight.key} where tokens are [batch, nodes], and other"
                " weights where they are flat",
                "a model that computes the same for both",
                "compile with --backend cpu or cuda, which take flat tokens",
            )


def _require_same_cut(flat: ShardPlan, padded: ShardPlan, name: str) -> None:
    """Both read the files of the same ranks: the same pieces of weights, and inputs of each rank.

    Sums are compared, too: after as many layers, and of as many bytes.
    """

    def facts(plan: ShardPlan) -> tuple[object, ...]:
        held = {
            cut.key: [cut.held_by(rank) for rank in range(plan.num_ranks)] for cut in plan.weights
        }
        sums = [(item.kind, item.layer, item.bytes_per_token) for item in plan.collectives]
        return held, set(plan.constants), sums, plan.local_vocab_size

    if facts(flat) != facts(padded):
        raise UnsupportedGraphError(
            f"{name} is cut in one way where tokens are flat, and in another where they are"
            " [batch, nodes]",
            "a model that is cut in one way",
            "compile with --backend cpu or cuda, which take flat tokens",
        )
