"""The padded form of a program: [B, N] tokens, caches [B, HK, L, D], functional operators.

ONNX and TensorRT want it. The flat program of the same model comes first: its passes recover what
masks mean, prove that tokens meet in attention alone, and lay out the weights that both read.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import nn

from specc.errors import UnsupportedGraphError
from specc.passes.frontend.trace import trace_padded
from specc.passes.pipeline import PassRecord, Phases, Pipeline
from specc.passes.program import Program
from specc.passes.rewrite.cached_attention import RewriteCachedAttention
from specc.passes.rewrite.fit_vocabulary import FitVocabulary
from specc.passes.rewrite.fuse_projections import FuseGateUp, FuseQKV
from specc.passes.rewrite.fuse_rms_norm import FuseRMSNorm
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.replace_grouped_mm import ReplaceGroupedMM
from specc.passes.rewrite.select_logits import SelectLogits


def padded_program(
    module: nn.Module,
    flat: Program,
    cache_rows: int,
    dump: Path | None = None,
    rope_length: int | None = None,
) -> tuple[Program, list[PassRecord]]:
    """Trace and rewrite a model whose flat program went through all phases.

    Args:
        module: of the model.
        flat: its finished flat program.
        cache_rows: L, rows of a sequence's cache.
        dump: directory for the graphs after each phase.
        rope_length: of the flat program, see `specc.passes.frontend.rotary.constant_length`.
    Returns:
        the program, and what each pass did.
    Raises:
        UnsupportedAttentionError, UnsupportedGraphError: it computes other things than the flat
            one.
    """
    program = trace_padded(module, flat.name, rope_length)
    phases: Phases = (
        ("normalize", (Normalize, ReplaceGroupedMM)),
        ("attention", (partial(RewriteCachedAttention, flat.layers, cache_rows),)),
        ("logits", (SelectLogits,)),
        ("fuse", (FuseQKV, FuseGateUp)),
        ("norms", (FuseRMSNorm,)),
        ("vocabulary", (partial(FitVocabulary, logits_width(flat)),)),
    )
    # the proof that tokens meet in attention alone is that of the flat program
    pipeline = Pipeline(phases, dump and dump / "padded", verifies=False)
    records = pipeline.run(program)
    _require_same_weights(flat, program)
    return program, records


def logits_width(program: Program) -> int:
    """V of a program's logits."""
    (output,) = program.graph.find_nodes(op="output")
    return int(output.args[0].meta["val"].shape[-1])


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
