"""The stages of one plan's step on a device, and how they are bound to rows of the buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from specc.artifact.graph_io import graph_from_json
from specc.runtime.backends.captured.bound_step import BoundStep, StepParts
from specc.runtime.backends.captured.confident_step import CONFIDENCE, ConfidentStep
from specc.runtime.backends.captured.extended_step import ExtendedStep
from specc.runtime.backends.captured.live_pass import without_output
from specc.runtime.backends.captured.overlapped_step import OverlappedStep, halves_of, whole_reason
from specc.runtime.backends.captured.step_buffers import StepBuffers
from specc.runtime.backends.captured.step_scores import UNFILTERED, StepKind
from specc.runtime.backends.device_models import Adapt, leave_alone
from specc.runtime.backends.graph_device import GraphDevice, SideStream
from specc.runtime.backends.program_files import place, plan_of
from specc.runtime.backends.step_constants import drafter_tensors, step_constants

Bound = BoundStep | OverlappedStep | ConfidentStep


def calls_of(bound: Bound, is_parted: bool) -> Sequence[Callable[[], object]]:
    """The parts of a step, or the whole as one; where the host reads between, there are parts."""
    if is_parted or isinstance(bound, ConfidentStep):
        return bound.parts
    return [bound.run]


class StepBinder:
    """Binds the stages, for each number of rows and each kind.

    Args:
        program: content of `steps/<plan>.json`.
        models: name → program on the device.
        slabs: the caches under their names in the environment.
        buffers: inputs and results; common to the steps of an engine.
        adapt: called with each stage's graph, which it may change; see `Adapt`.
        side: steps draft there for half of their sequences while they verify the other half, see
            `OverlappedStep`; None: never.
    Raises:
        EngineError: a malformed program.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        models: Mapping[str, nn.Module],
        slabs: Mapping[str, Tensor],
        buffers: StepBuffers,
        graphs: GraphDevice,
        adapt: Adapt = leave_alone,
        side: SideStream | None = None,
    ) -> None:
        self.plan = plan_of(program)
        self.buffers, self.graphs, self.slabs = buffers, graphs, slabs
        self._side = None if whole_reason(self.plan) else side
        constants = step_constants(program, self.plan) | drafter_tensors(self.plan, models)
        self._constants = {name: value.to(graphs.device) for name, value in constants.items()}
        self.stages: dict[str, fx.GraphModule] = {
            stage["name"]: place(graph_from_json(stage["graph"], modules=models), graphs.device)
            for stage in program["stages"]
        }
        for stage in self.stages.values():
            adapt(stage, self.plan.name, self._constants)
            # the module and its graph name each other: weights would outlive the engine until the
            # garbage collector comes by
            stage.graph.owning_module = None
        # of steps that do not ask how sure a drafter is
        self._unasked = {name: without_output(x, CONFIDENCE) for name, x in self.stages.items()}

    def bind(self, bucket: int, kind: StepKind | None, is_split: bool) -> Bound:
        """A step of the first rows of the buffers.

        Args:
            bucket: rows.
            kind: what it does besides; None is nothing.
            is_split: its stages are captured one by one.
        """
        if kind and kind.threshold:
            asked = self._of_rows(0, bucket)._replace(stages=self.stages)
            return ConfidentStep(kind, self.graphs, self.plan, asked)
        if kind and kind != UNFILTERED:
            return ExtendedStep(kind, self.graphs, self.plan, self._of_rows(0, bucket))
        side = None if is_split else self._side
        halves = halves_of(bucket) if side else None
        parts = [
            BoundStep(self._of_rows(*rows), is_filtered=kind is None)
            for rows in halves or [(0, bucket)]
        ]
        return OverlappedStep(parts[0], parts[1], side) if side and halves else parts[0]

    def _of_rows(self, first: int, last: int) -> StepParts:
        """What a bound step takes, of some rows of the buffers."""
        # plans read as many proposals, weights and blocks as they have
        widths = {
            "proposals": self.plan.max_depth,
            "vote_weights": len(self.plan.drafters),
            "chosen_blocks": self.plan.num_chosen(self.slabs["history"].shape[1]),
        }
        inputs = {**self.slabs, **self.buffers.rows(first, last, widths)}
        results = self.buffers.results[first:last]
        lens = tuple(self.plan.draft_lens.values())
        return StepParts(self._unasked, self._constants, inputs, results, lens)
