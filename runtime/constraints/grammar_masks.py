"""At each node of a tree, what may follow the path down to it: masks of grammars, and controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from specc.runtime.backends.step import Step
from specc.runtime.backends.step_io import BeforeAccept, StepResult, StepValues
from specc.runtime.constraints.grammar import GrammarState
from specc.runtime.constraints.tree_controls import control_trees, reads_trees
from specc.runtime.execution.link import Link, to_device
from specc.runtime.outputs.step_logprobs import wants_logprobs
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan


class TreeMasks:
    """Changes the target's logits between verification and acceptance; a hook of one step.

    Whatever a tree's drafts propose: a token that the grammar does not allow has the logit -inf at
    its parent, so that no rule accepts it, and nothing below it is ever reached.

    Args:
        requests: of the step, at least one with a grammar or with controls.
        before: another hook, which goes first.
        keeps: keep `logits` as they were, for log probabilities.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        plan: SpecPlan,
        before: BeforeAccept | None = None,
        keeps: bool = False,
    ) -> None:
        assert plan.tile is None, "trees in tiles leave no logits"
        self.logits: Tensor | None = None
        self._requests = requests
        self._plan = plan
        self._before = before
        self._keeps = keeps

    def __call__(self, values: StepValues) -> None:
        if self._before is not None:
            self._before(values)
        logits = values["logits"]
        if self._keeps:
            self.logits = logits.clone()
        tokens, parents = self._trees(values)
        grammars = [request.grammar for request in self._requests]
        masked = mask_trees(logits, grammars, tokens, parents)
        values["logits"] = control_trees(masked, self._requests, tokens, parents)

    def _trees(self, values: StepValues) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
        """[B][N] tokens and parents; any where nobody looks at them, so that no host waits."""
        batch, size = len(self._requests), self._plan.num_nodes
        is_read = reads_trees(self._requests) or any(s.grammar for s in self._requests)
        if size == 1 or not is_read:
            return [[0] * size] * batch, [[-1] * size] * batch
        is_static = self._plan.is_static
        own = self._plan.tree.parents if is_static else ()
        parents = [own] * batch if is_static else values["parents"].tolist()
        return values["tokens"].tolist(), parents


def hooked(
    step: Step,
    requests: Sequence[Request],
    run: Callable[[Sequence[str]], StepResult],
    wanted: Sequence[str] = (),
) -> StepResult:
    """Run a step; grammars and controls change the logits that acceptance looks at.

    Args:
        run: the step, given the names of values that are wanted.
    """
    reads = ("logits", "path") if wants_logprobs(requests) else tuple(wanted)
    if not has_masks(requests):
        return run(reads)
    before = step.before_accept
    masks = TreeMasks(requests, step.plan, before, keeps="logits" in reads)
    step.before_accept = masks
    try:
        result = run(reads)
    finally:
        step.before_accept = before
    if masks.logits is not None:
        # log probabilities are the model's own
        result.values["logits"] = masks.logits
    return result


def has_masks(requests: Sequence[Request]) -> bool:
    """Whether the logits of what follows any of them are changed."""
    # asked at each step: no generator
    for request in requests:
        if request.grammar is not None:
            return True
        if request.controls is not None and request.has_active_controls:
            return True
    return False


def mask_trees(
    logits: Tensor,
    grammars: Sequence[GrammarState | None],
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
) -> Tensor:
    """The logits of B trees, -inf at what the grammars do not allow.

    Args:
        logits: [B * N, V].
        grammars: B of them, each at its tree's root; None leaves the rows as they are.
        tokens: [B][N] token of each node; node 0 is the root.
        parents: [B][N], -1 at the root and at dead nodes.
    Returns:
        [B * N, V], new; or the same where no row has a mask.
    """
    rows: dict[int, bytes] = {}
    for b, (grammar, row, above) in enumerate(zip(grammars, tokens, parents, strict=True)):
        if grammar is not None:
            masks = tree_masks(grammar, row, above)
            rows.update((b * len(row) + node, mask) for node, mask in masks.items())
    return mask_rows(logits, rows)


def mask_roots(logits: Tensor, requests: Sequence[Request], link: Link | None = None) -> Tensor:
    """The logits [B, V] of what follows each request, as its grammar and controls change them.

    With a link nothing waits for the device.
    """
    masks = {i: s.grammar.mask() for i, s in enumerate(requests) if s.grammar is not None}
    masked = mask_rows(logits, {i: mask for i, mask in masks.items() if mask is not None}, link)
    roots, parents = [[0]] * len(requests), [[-1]] * len(requests)
    return control_trees(masked, requests, roots, parents, link)


def tree_masks(
    grammar: GrammarState, tokens: Sequence[int], parents: Sequence[int]
) -> dict[int, bytes]:
    """Node → mask of the grammar after the path from the root to it.

    Nodes are left out that no walk reaches, because the grammar does not allow their token or
    theirs above, and those after which plain decoding would end: after the end of the output, or
    where nothing may follow. What a walk brings after such a node is not put out.

    Args:
        tokens: [N] token of each node; that of the root is not looked at.
        parents: [N], each before its children; -1 at the root and at dead nodes.
    """
    if (root := grammar.mask()) is None:
        return {}
    masks, places = {0: root}, {0: 0}
    for node, parent in enumerate(parents):
        if parent in masks and grammar.goes_on(masks[parent], tokens[node]):
            places[node] = grammar.drafted.after(places[parent], tokens[node])
            if (mask := grammar.drafted.mask(places[node])) is not None:
                masks[node] = mask
    return masks


def mask_rows(
    logits: Tensor,
    masks: Mapping[int, bytes],
    link: Link | None = None,
    revives: bool = False,
) -> Tensor:
    """Logits [R, V] with -inf wherever a row's mask has no bit; rows without a mask stay.

    Args:
        logits: [R, V].
        masks: row → mask.
        link: with one, nothing waits for the device.
        revives: where the logits have nothing but -inf for what a mask allows, as those of a
            draft that lacks these tokens, all that is allowed is equally likely.
    """
    if not masks:
        return logits
    device, num_rows = logits.device, len(masks)
    packed = torch.frombuffer(bytearray(b"".join(masks.values())), dtype=torch.uint8)
    packed, rows = to_device([packed.view(num_rows, -1), torch.tensor(list(masks))], device, link)
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    masked = logits[rows].masked_fill(~is_allowed, -torch.inf)
    if revives:
        is_dead = masked.amax(dim=-1, keepdim=True) == -torch.inf
        masked = masked.masked_fill(is_allowed & is_dead, 0.0)
    return logits.index_copy(0, rows, masked)
