"""The grammars and controls of a step's requests, as masks of the nodes of their trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specc.runtime.backends.captured.step_masks import MaskRow, NodeMasks
from specc.runtime.constraints.draft_masks import DraftMasks
from specc.runtime.constraints.grammar_masks import tree_masks
from specc.runtime.constraints.tree_controls import ends_of, reads_trees
from specc.runtime.execution.link import Link
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan

Trees = tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]


class MaskRules:
    """What the requests of one step allow; the trees may be known now, or once they are drafted.

    `masks` may be asked for when the step before has ended, later than this is made: by then fewer
    controls may be active, never more, and requests that have ended need no masks.

    Args:
        requests: of the step, at least one with a grammar or with active controls.
        plan: of the step, whose logits exist.
        proposals: [B, L] int64, -1 after the last of each request, where the host proposes.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        plan: SpecPlan,
        proposals: Tensor | None,
        link: Link,
    ) -> None:
        assert plan.tile is None, "trees in tiles leave no logits"
        self._requests = requests
        self._plan = plan
        self._link = link
        self._proposals = proposals if plan.is_hosts else None
        self.has_biases = any(s.has_active_controls for s in requests)
        is_read = reads_trees(requests) or any(s.grammar is not None for s in requests)
        self._looks = is_read and plan.num_nodes > 1
        # proposals of the host: it knows all tokens before the step is queued
        self.is_late = is_read and self._proposals is None
        # the host cannot know what the device will draft
        self.reads_draft = self.is_late and plan.num_nodes > 1
        # drafts are asked, and somebody has a grammar: what it forbids is not proposed
        self.masks_drafts = DraftMasks.of(requests, plan) is not None

    def draft_masks(self, num_rows: int) -> DraftMasks:
        """Of the passes of the step's drafts, for so many sequences; where `masks_drafts` is set.

        To be asked for when the step before has ended, as `masks`.
        """
        found = DraftMasks.of(self._requests, self._plan, num_rows)
        assert found is not None, "drafts without masks"
        return found

    def known_trees(self) -> Trees:
        """[B][N] tokens and parents, where `reads_draft` is not set.

        Roots' tokens are never looked at, nor are any where the masks do not depend on them.
        """
        batch, size = len(self._requests), self._plan.num_nodes
        if not self._looks:
            return [[0] * size] * batch, [[-1] * size] * batch
        assert self._proposals is not None, "the device drafts"
        chains = self._proposals.tolist()
        # as the draft stage makes them of proposals
        tokens = [[0, *(max(token, 0) for token in chain)] for chain in chains]
        parents = [[-1, *(i if t >= 0 else -1 for i, t in enumerate(chain))] for chain in chains]
        return tokens, parents

    def masks(self, trees: Trees, device: torch.device) -> NodeMasks:
        """Of trees whose tokens are known.

        Args:
            trees: [B][N] tokens and parents, -1 at the root and at dead nodes.
        """
        rows: dict[int, MaskRow] = {}
        size = self._plan.num_nodes
        active = [s.controls if s.has_active_controls else None for s in self._requests]
        pairs = zip(self._requests, active, *trees, strict=True)
        for b, (request, controls, tokens, parents) in enumerate(pairs):
            if request.is_finished:
                continue
            own: dict[int, MaskRow] = {}
            if request.grammar is not None:
                masks = tree_masks(request.grammar, tokens, parents)
                own = {node: MaskRow(mask) for node, mask in masks.items()}
            count = request.num_output_tokens
            if controls and (controls.num_tokens_read or controls.depends_on_depth(count)):
                width = controls.num_tokens_read
                ends = ends_of(request.output_tail(width), width, tokens, parents)
                for node, (end, depth) in ends.items():
                    if found := controls.forbidden(end, count + depth):
                        mask = own[node].mask if node in own else None
                        own[node] = MaskRow(mask, tuple(found))
            rows.update((b * size + node, row) for node, row in own.items())
        return NodeMasks(
            rows,
            [controls is not None for controls in active],
            [controls.row(device, self._link) if controls else None for controls in active],
        )
