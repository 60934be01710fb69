"""A plan's step without Python inside: the native runner goes from stage to stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specc.artifact.graph_io import graph_from_json
from specc.kernels.ranks import rank_error
from specc.runtime.backends.cpu.compiled_program import CompiledProgram
from specc.runtime.backends.cpu.compiled_segments import CompiledSegments, stream_error
from specc.runtime.backends.cpu.step_encoder import StepEncoder
from specc.runtime.backends.program_files import plan_of
from specc.runtime.backends.step import RepeatedStep, StagedStep
from specc.runtime.backends.step_constants import drafter_tensors, step_constants
from specc.runtime.backends.step_io import (
    BeforeAccept,
    Drafted,
    MaskDrafts,
    StepInputs,
    StepResult,
)


class CompiledStep:
    """One plan's step as instructions of the native runner: a `StagedStep`.

    Args:
        program: content of `steps/<plan>.json`.
        models: name → program, for the stages' calls.
    Raises:
        EngineError: a malformed program.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        models: Mapping[str, CompiledProgram | CompiledSegments],
    ) -> None:
        self.plan = plan_of(program)
        self.before_accept: BeforeAccept | None = None
        self._program, self._models = program, models
        stages = {
            stage["name"]: graph_from_json(stage["graph"], modules=dict.fromkeys(models, _NOTHING))
            for stage in program["stages"]
        }
        draft_lens = self.plan.draft_lens
        self._drafts = list(draft_lens)
        constants = step_constants(program, self.plan) | drafter_tensors(self.plan, models)
        self._encoder = StepEncoder(stages, constants, models, list(draft_lens.values()))
        self._stages = list(stages)
        accept = self._stages.index("accept_commit")
        self._native = self._encoder.runner
        self._values = _RunnerValues(self._native, self._encoder.slots_before(accept))
        # as the runner counts them: the draft's has a part for each pass, and one for what follows
        self._num_passes = len(self._encoder.passes)
        self._verify = self._num_passes + self._stages.index("verify")
        self._accept = self._num_passes + accept
        self._end = self._num_passes + len(self._stages)
        self._width = self.plan.max_depth + 1

    @property
    def runner(self) -> Any:
        """The native runner: `seconds()` and `program_seconds()` of each stage, for profiles."""
        return self._native

    @torch.inference_mode()
    def run(self, environment: dict[str, Tensor]) -> dict[str, float]:
        """Run all stages; results are added to the environment.

        Returns:
            seconds of each stage, by name.
        """
        encoder, native = self._encoder, self._native
        encoder.unbind()
        self._run_stages([environment[name] for name in encoder.inputs])
        results = native.outputs(encoder.output_slots)
        environment.update(zip(encoder.output_names, results, strict=True))
        return self._stage_s(native.seconds())

    @property
    def staged(self) -> StagedStep | None:
        """Itself: see `StagedStep`."""
        return self

    @property
    def queued(self) -> None:
        """The host runs it."""
        return None

    def advance(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], reads: Sequence[str] = ()
    ) -> StepResult:
        """See `Step.advance`."""
        self._encoder.bind(slabs)
        self._encoder.bind_rows(inputs)
        # Python between two steps finds its code evicted by the weights: few calls, plain slices
        rows, block_table = inputs.rows, inputs.block_table
        flat_rows = [value for row in rows for value in row]
        first = 0
        if inputs.mask_drafts is not None:
            first = self._draft_masked(flat_rows, block_table, inputs.mask_drafts)
        if self.before_accept is not None:
            self._step(flat_rows, block_table, [], first, self._accept, [])
            first = self._accept
            with torch.inference_mode():
                self.before_accept(self._values)
        return self._finish(flat_rows, block_table, first, reads)

    @property
    def repeated(self) -> RepeatedStep | None:
        """Itself, where nobody looks at values between two of its stages."""
        return self if self.before_accept is None else None

    def advance_often(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], count: int, ends: Sequence[int]
    ) -> list[StepResult]:
        """See `RepeatedStep`."""
        self._encoder.bind(slabs)
        self._encoder.bind_rows(inputs)
        flat_rows = [value for row in inputs.rows for value in row]
        batch = inputs.block_table.shape[0]
        ints, seconds = self._native_call(
            self._native.steps, flat_rows, inputs.block_table, self._encoder.host_slots, count, ends
        )
        num_steps = len(seconds) // self._end
        width = len(ints) // num_steps
        return [
            self._result(
                ints[i * width : (i + 1) * width],
                seconds[i * self._end : (i + 1) * self._end],
                batch,
                {},
            )
            for i in range(num_steps)
        ]

    def draft(self, inputs: StepInputs, slabs: Mapping[str, Tensor]) -> Drafted:
        """Run what stands before the target's pass; see `Drafted`."""
        self._encoder.bind(slabs)
        self._encoder.bind_rows(inputs)
        flat_rows = [value for row in inputs.rows for value in row]
        first = 0
        if inputs.mask_drafts is not None:
            first = self._draft_masked(flat_rows, inputs.block_table, inputs.mask_drafts)
        self._step(flat_rows, inputs.block_table, [], first, self._verify, [])

        def accept(values: Mapping[str, Tensor], reads: Sequence[str]) -> StepResult:
            for name, value in values.items():
                self._values[name] = value
            if self.before_accept is not None:
                with torch.inference_mode():
                    self.before_accept(self._values)
            return self._finish(flat_rows, inputs.block_table, self._accept, reads)

        return Drafted(self._values, accept)

    def another(self) -> StagedStep:
        """Another one: what was drafted is kept in the native runner of a step."""
        return CompiledStep(self._program, self._models)

    def _draft_masked(
        self, flat_rows: list[int], block_table: Tensor, mask_drafts: MaskDrafts
    ) -> int:
        """Run the draft's passes, and change the logits of each; returns the part that follows."""
        native = self._native
        for part, one in enumerate(self._encoder.passes):
            self._step(flat_rows, block_table, [], part, part + 1, [])
            with torch.inference_mode():
                given = [None if slot is None else native.get(slot) for slot in one.inputs]
                logits = native.get(one.logits)
                native.set_constant(one.logits, mask_drafts(given, logits))
        return self._num_passes

    def _finish(
        self, flat_rows: list[int], block_table: Tensor, first: int, reads: Sequence[str]
    ) -> StepResult:
        """Run the stages that are left, and read the results."""
        native = self._native
        slots, last = self._encoder.host_slots, self._end
        kept = [self._encoder.slot_of(name) for name in reads]
        ints, seconds = self._step(flat_rows, block_table, slots, first, last, kept)
        values = {name: native.get(slot) for name, slot in zip(reads, kept)}  # noqa: B905
        return self._result(ints, seconds, block_table.shape[0], values)

    def _result(
        self,
        ints: list[int],
        seconds: Sequence[float],
        batch: int,
        values: dict[str, Tensor],
    ) -> StepResult:
        """What the runner's integers say of one step."""
        width = self._width
        end = batch * (1 + width)
        if batch == 1:
            outputs = [ints[1:end]]
        else:
            outputs = [ints[b : b + width] for b in range(batch, end, width)]
        starts = range(end + batch, len(ints), batch)
        return StepResult(
            ints[:batch],
            outputs,
            ints[end : end + batch],
            {
                draft: ints[start : start + batch]
                for draft, start in zip(self._drafts, starts)  # noqa: B905
            },
            self._stage_s(seconds),
            values,
        )

    def _step(self, *arguments: Any) -> Any:
        """Run some stages; see `StepRunner.step` of kernels/cpu/step_runner.h."""
        return self._native_call(self._native.step, *arguments)

    def _native_call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """A method of the native runner.

        Raises:
            EngineError: weights that stay in their file could not be read.
            RankError: another rank is why a collective failed, whatever it could not read.
        """
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise rank_error(error) or stream_error(error) or error from None

    def _stage_s(self, seconds: Sequence[float]) -> dict[str, float]:
        """Seconds of each stage, of those that the runner counts."""
        if count := self._num_passes:
            seconds = [sum(seconds[: count + 1]), *seconds[count + 1 :]]
        return dict(zip(self._stages, seconds))  # noqa: B905

    def _run_stages(self, inputs: list[Tensor]) -> None:
        native, last = self._native, self._end
        if self.before_accept is None:
            native.run(inputs, 0, last)
            return
        native.run(inputs, 0, self._accept)
        self.before_accept(self._values)
        native.run([], self._accept, last)


class _RunnerValues:
    """What the stages before a hook computed, where the runner keeps it.

    A hook pays for the values that it looks at.
    """

    def __init__(self, runner: Any, slots: Mapping[str, int]) -> None:
        self._runner = runner
        self._slots = slots

    def __getitem__(self, name: str) -> Tensor:
        return self._runner.get(self._slots[name])

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._runner.set_constant(self._slots[name], value)


class _Nothing(torch.nn.Module):
    """Stands for a program while a step's graph is read."""


_NOTHING = _Nothing()
