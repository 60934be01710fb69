"""How many nodes of drafted trees are worth verifying, by what their drafter says of them.

A DSpark drafter may have a head that says of each node how likely the target accepts one of its
children, given the path down to it. A level is verified while some path down to it has been likely
enough at every node, as deepseek-ai/DeepSpec ends a chain before the first token that is less
likely than `confidence_threshold` (deepspec/eval/dspark/draft_ops.py). These numbers look at the
draws of the step: that is lossless for greedy requests, `coupled` and `delta` alone, see
`specc.speculation.live_nodes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.speculation.plans import SpecPlan


class ConfidentNodes:
    """Counts them where the confidence is, without a word of the host.

    Args:
        plan: of the steps, one whose trees can be cut.
        threshold: least probability that one of a node's children is accepted.
    """

    def __init__(
        self, plan: SpecPlan, threshold: float, device: torch.device | str = "cpu"
    ) -> None:
        tree, self._threshold = plan.tree, threshold
        leaves = set(tree.leaves)
        fed = [node for node in range(tree.num_nodes) if node not in leaves]
        place = {node: i for i, node in enumerate(fed)}
        paths: list[list[int]] = []
        for node in fed:
            above = [] if node == 0 else paths[place[tree.parents[node]]]
            paths.append([*above, place[node]])
        # [F, D] of each node with children, places of those on its path; its own stands for none
        most = plan.max_depth
        wide = [[*own, *own[-1:] * (most - len(own))] for own in paths]
        self._paths = torch.tensor(wide, device=device)
        # [D, F] those of each depth, and [D] nodes of the depth below
        levels = [[len(own) == depth + 1 for own in paths] for depth in range(most)]
        self._levels = torch.tensor(levels, device=device)
        self._sizes = torch.tensor([len(level) for level in tree.levels[1:]], device=device)

    def __call__(self, confidence: Tensor) -> Tensor:
        """Live nodes [B] int32 of each sequence, its root included.

        Args:
            confidence: [B, F] of each node with children, in the order of nodes.
        """
        # of types with fewer bits each value is a double, as the threshold is one
        is_sure = confidence.double() >= self._threshold
        goes_on = is_sure[:, self._paths].all(dim=-1)
        # of a depth that nobody reaches, no path goes on
        reached = (goes_on[:, None] & self._levels).any(dim=-1)
        return 1 + (reached * self._sizes).sum(dim=-1, dtype=torch.int32)
