"""Lower programs to CUDA: the phases before capture, and how many kernels they leave."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from specc.kernels import ops
from specc.passes.pipeline import Phases
from specc.passes.program import Program, is_update
from specc.passes.rewrite.fix_row_sums import FixRowSums
from specc.passes.rewrite.fuse_add_norm import FuseAddNorm
from specc.passes.rewrite.fuse_embed_norm import FuseEmbedNorm
from specc.passes.rewrite.fuse_experts import FuseExperts
from specc.passes.rewrite.fuse_head_norm import FuseHeadNorm
from specc.passes.rewrite.fuse_latent_write import FuseLatentWrite
from specc.passes.rewrite.fuse_norm_head import FuseNormHead
from specc.passes.rewrite.fuse_projections import FuseLatentDown
from specc.passes.rewrite.fuse_rms_norm import FuseAddRMSNorm, FuseRMSNorm
from specc.passes.rewrite.fuse_rope_write import FuseRopeWrite, SplitTreeAttention
from specc.passes.rewrite.fuse_router import FuseRouter
from specc.passes.rewrite.fuse_swiglu import FuseSwiGLU
from specc.passes.rewrite.join_shared_experts import JoinSharedExperts
from specc.passes.rewrite.pair_fragments import PairFragments
from specc.passes.rewrite.read_weight_views import ReadWeightViews
from specc.passes.rewrite.tabulate_rotary import TabulateRotary
from specc.passes.rewrite.use_skinny_linear import UseSkinnyLinear
from specc.passes.rewrite.widen_ancestors import WidenAncestors
from specc.passes.rewrite.write_heads_by_token import WriteHeadsByToken

# what joins products with what stands around them
_JOINED = "products"
_ATTENTION = (ops.attend, ops.invariant_attend, ops.tree_attention)
# what to count with, for every dynamic size; one token would make some copies look like none
_ENTRIES = 8


def cuda_phases(num_positions: int, pass_tokens: int | None = None) -> Phases:
    """The phases of an engine.

    Args:
        num_positions: rows of passes are at positions 0 … num_positions - 1. Those of a block
            drafter's pass may lie beyond the last position that the engine serves.
        pass_tokens: that a sequence brings to a pass at most; None is one for each position.
    """
    most = min(num_positions, pass_tokens or num_positions)
    return (
        ("latents", (FuseLatentDown,)),
        ("norms", (FuseRMSNorm, FuseAddRMSNorm)),
        ("gates", (FuseSwiGLU,)),
        ("mixtures", (FuseExperts, FuseRouter, JoinSharedExperts)),
        # from here on operators communicate through the caches, in the order of the graph
        (
            "caches",
            (
                FuseRopeWrite,
                FuseHeadNorm,
                FuseLatentWrite,
                SplitTreeAttention,
                partial(WidenAncestors, most),
            ),
        ),
        ("fragments", (PairFragments,)),
        (_JOINED, (FuseAddNorm, FuseNormHead, FuseEmbedNorm)),
        ("few rows", (UseSkinnyLinear, ReadWeightViews, WriteHeadsByToken)),
        ("tables", (partial(TabulateRotary, num_positions),)),
    )


def invariant_phases(phases: Phases) -> Phases:
    """The same phases for a target whose rows have the same bits whatever else is in a pass.

    Products stay alone: in the tiles that join them with norms a row is summed up in an order that
    goes by the number of rows.
    """
    return (*(phase for phase in phases if phase[0] != _JOINED), ("bits of rows", (FixRowSums,)))


def launches(program: Program) -> list[fx.Node]:
    """Calls that run on the device: not views, not arithmetic on sizes, not copies that are none.

    An operator may be more than one kernel: attention over a long context has a second stage.
    """
    return _Count(program).run()


def launches_per_layer(program: Program) -> tuple[int, ...]:
    """Launches of each layer but the first, from after one attention to the end of the next."""
    nodes = launches(program)
    ends = [i for i, node in enumerate(nodes) if node.target in _ATTENTION]
    return tuple(after - before for before, after in itertools.pairwise(ends))


class _Count(fx.Interpreter):
    """Runs a program without data: what a node returns tells whether it wrote anything."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.graph_module)
        self._found: list[fx.Node] = []

    def run(self) -> list[fx.Node]:  # type: ignore[override]
        with FakeTensorMode(), enable_python_dispatcher():
            inputs = [
                torch.empty(_shape(node.meta["val"]), dtype=node.meta["val"].dtype)
                for node in self.graph.find_nodes(op="placeholder")
            ]
            super().run(*inputs)
        return self._found

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload):
            read = {_storage(x) for x in _tensors([self.env[item] for item in n.all_input_nodes])}
            written = [x for x in _tensors(result) if x.numel() and _storage(x) not in read]
            if written or is_update(n):
                self._found.append(n)
        return result


def _shape(value: Tensor) -> list[int]:
    return [size if isinstance(size, int) else _ENTRIES for size in value.shape]


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, Tensor)]


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata
