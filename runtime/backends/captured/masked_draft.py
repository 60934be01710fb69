"""A draft stage in pieces, between which the host masks what grammars forbid.

The host cannot be asked inside of a graph. So a piece ends with a pass of a draft, and the next one
begins with the masks of its logits, before children are drawn of them. What the pass is fed, which
is all that masks follow from, is on its way to the host before the pass: the host makes the masks
while the device computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from specc.errors import EngineError
from specc.runtime.backends.captured.bound_step import BoundStage
from specc.runtime.backends.captured.step_masks import MaskRow, NodeMasks, StepMasks
from specc.runtime.backends.failed_operator import do_named
from specc.runtime.backends.graph_device import GraphDevice
from specc.runtime.constraints.draft_masks import DraftMasks
from specc.speculation.plans import SpecPlan

# no token, not of padding either
NOTHING = torch.iinfo(torch.int64).min
# places of inputs of a pass, as of `ModelProgram.forward`, that masks follow from: all but
# positions and block table
_READ = frozenset({0, 2, 3, 4, 5, 7, 8})


def unread_error(
    plan: str, others: str = "requests without grammars and logit controls"
) -> EngineError:
    """The device says that it has drafted, and what it has drafted is not there.

    Args:
        others: whom that does not concern.
    """
    return EngineError(
        f"a draft of plan {plan} that is not there, though its event has come",
        "events of a graph that are those of its last replay",
        f"report this; {others} are not concerned",
    )


class MaskedDraft:
    """The pieces of a draft stage, see the module.

    What one piece hands to the next stays in memory of the graphs for as long as this object lives,
    the logits of each pass among it: a graph keeps none of what it reads, see
    `GraphDevice.capture`.

    Args:
        batch: B.
    """

    def __init__(self, graphs: GraphDevice, batch: int, plan: SpecPlan, stage: BoundStage) -> None:
        self._stage = stage
        self._passes = [
            _MaskedPass(graphs, batch, plan, node, stage.constant) for _, node in stage.passes
        ]
        ends = [number + 1 for number, _ in stage.passes]
        self._spans = list(zip([0, *ends], [*ends, stage.num_calls], strict=True))
        # what each piece but the last has left
        self._values: list[dict[fx.Node, Any]] = [{} for _ in self._passes]

    @property
    def num_passes(self) -> int:
        """Of drafts; 0 where none is asked on this device."""
        return len(self._passes)

    @property
    def pieces(self) -> list[Callable[[], None]]:
        """One more than passes; the last one leaves the outputs of the stage."""

        def piece(number: int) -> Callable[[], None]:
            return lambda: self._run(number)

        return [piece(number) for number in range(len(self._spans))]

    def _run(self, number: int) -> None:
        first, last = self._spans[number]
        if number == 0:
            values = self._stage.begin()
        else:
            # a capture may run a piece twice
            values = dict(self._values[number - 1])
            before = self._passes[number - 1]
            do_named("masks of a draft", before.mask, values[before.node])
        if number == len(self._passes):
            self._stage.run_calls(values, first, last)
            self._stage.leave(values)
            return
        self._stage.run_calls(values, first, last - 1)
        do_named("reading what a draft is fed", self._passes[number].leave, values)
        self._stage.run_calls(values, last - 1, last)
        self._values[number] = values

    def expect(self, number: int) -> None:
        """Before a piece is queued: what is there from an older one must not pass for its own."""
        if number < len(self._passes):
            self._passes[number].expect()

    def fill(self, number: int, masks: DraftMasks) -> None:
        """Wait for what a pass is fed, and queue its masks, which the next piece applies.

        Args:
            number: of a piece that was queued, and of its pass.
            masks: of the step's B sequences; asked pass by pass.
        Raises:
            EngineError: the device says that it is there, and it is not.
        """
        self._passes[number].fill(masks)


class _MaskedPass:
    """One pass of a draft: what it is fed, on the host, and the masks of its logits.

    Args:
        graphs, batch, plan: as of `MaskedDraft`.
        constant: nodes whose values are the same at every run.
    """

    def __init__(
        self, graphs: GraphDevice, batch: int, plan: SpecPlan, node: fx.Node, constant: set[fx.Node]
    ) -> None:
        self.node = node
        self._graphs = graphs
        self._batch = batch
        self._plan = plan.name
        drafter = plan.drafter(str(node.target))
        # hidden states, which come after the logits of each row
        self._more_columns = 0 if drafter is None else drafter.hidden_columns
        self._given: list[fx.Node | None] = [
            value if isinstance(value, fx.Node) and place in _READ else None
            for place, value in enumerate(node.args)
        ]
        self._is_constant = [value in constant for value in self._given]
        # on the host; made when the pass first runs, outside of a capture
        self._inputs: list[Tensor | None] = []
        self._masks: StepMasks | None = None
        self._num_logits = 0
        self._event = graphs.replayed_event()

    def leave(self, values: dict[fx.Node, Any]) -> None:
        """Before the pass: copy what it is fed, and mark where that is there."""
        found = [None if node is None else values[node] for node in self._given]
        if not self._inputs:
            self._inputs = [
                None if x is None else self._graphs.host_buffer(*x.shape, dtype=x.dtype)
                for x in found
            ]
            self._copy(found, True)
        self._copy(found, False)
        self._event.record()

    def _copy(self, found: Sequence[Tensor | None], is_constant: bool) -> None:
        copies = zip(self._inputs, found, self._is_constant, strict=True)
        for to, value, own in copies:
            if to is not None and value is not None and own is is_constant:
                to.copy_(value, non_blocking=True)

    def mask(self, logits: Tensor) -> None:
        """Change the logits of the pass's [R, V + d] in place, as its masks say."""
        self._num_logits = len(logits)
        if self._masks is None:
            rows = logits.shape[0] // self._batch
            self._masks = StepMasks(self._graphs, self._batch, rows, False, revives=True)
        self._masks.apply(logits[:, : logits.shape[1] - self._more_columns])

    def expect(self) -> None:
        tokens = self._inputs[0]
        assert tokens is not None
        tokens.fill_(NOTHING)

    def fill(self, masks: DraftMasks) -> None:
        self._event.synchronize()
        tokens = self._inputs[0]
        assert tokens is not None
        assert self._masks is not None
        if NOTHING in tokens.tolist():
            raise unread_error(self._plan)
        rows = masks.rows(self._inputs, self._num_logits)
        self._masks.fill(NodeMasks({row: MaskRow(mask) for row, mask in rows.items()}, (), ()))
