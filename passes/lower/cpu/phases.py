"""The phases of an engine for the CPU: what they leave is what its kernels run."""

from __future__ import annotations

from functools import partial

from specc.passes.lower.cpu.experts import LowerExperts, PackExperts
from specc.passes.lower.cpu.linear import LowerLinear
from specc.passes.lower.cpu.pack_weights import PackWeights
from specc.passes.pipeline import Phases
from specc.passes.rewrite.fuse_rms_norm import FuseAddRMSNorm, FuseRMSNorm
from specc.passes.rewrite.fuse_rope_write import FuseRopeWrite, SplitTreeAttention
from specc.passes.rewrite.fuse_swiglu import FuseSwiGLU
from specc.passes.rewrite.split_complex import SplitComplexWhereKnown
from specc.passes.rewrite.tabulate_rotary import TabulateRotary

# of graphs before it other ones can be made: it does nothing itself
CPU = "cpu"
LAYOUT_PHASES: Phases = (("layout", (PackWeights, PackExperts)),)
CPU_PHASES: Phases = (("products", (LowerLinear, LowerExperts)),)


def cpu_phases(num_positions: int) -> Phases:
    """The phases of an engine.

    Args:
        num_positions: rows of passes are at positions 0 … num_positions - 1. Those of a block
            drafter's pass may lie beyond the last position that the engine serves.
    """
    return (
        (CPU, ()),
        # kernels compute with real numbers
        ("complex", (SplitComplexWhereKnown,)),
        ("norms", (FuseRMSNorm, FuseAddRMSNorm)),
        ("gates", (FuseSwiGLU,)),
        # from here on operators communicate through the caches, in the order of the graph
        ("caches", (FuseRopeWrite, SplitTreeAttention)),
        ("tables", (partial(TabulateRotary, num_positions),)),
        *LAYOUT_PHASES,
        *CPU_PHASES,
    )
