"""A plan's step without Python inside: the library's runner goes from stage to stage."""

from __future__ import annotations

import array
import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specc.artifact.graph_io import read_graph
from specc.kernels.ranks import rank_error
from specc.runtime.backends.cpu.native_calls import (
    NativeTensor,
    Pool,
    describe,
    describe_all,
    functions,
    made,
    tensor_at,
)
from specc.runtime.backends.cpu.program import CpuProgram, failed, refusal
from specc.runtime.backends.cpu.segments import CpuSegments, stream_error
from specc.runtime.backends.cpu.step_encoder import StepEncoder
from specc.runtime.backends.program_files import plan_of
from specc.runtime.backends.step import StagedStep
from specc.runtime.backends.step_constants import drafter_tensors, step_constants
from specc.runtime.backends.step_io import (
    BeforeAccept,
    Drafted,
    MaskDrafts,
    StepInputs,
    StepResult,
)

# address and length
_NO_RESULTS = 0, 0


class NativeStep:
    """The library's runner of a step: see kernels/cpu/step_runner.h.

    Args:
        pool: memory of the engine's programs.
    """

    def __init__(self, encoder: StepEncoder, pool: Pool) -> None:
        self._library = library = functions()
        self._encoder, self._pool = encoder, pool
        self._pointer = made(library.specc_step_new(encoder.code, pool.pointer))
        self._finalizer = weakref.finalize(self, library.specc_step_free, self._pointer)
        self._finalizer.atexit = False
        # what was set: the memory has to stay
        self._held: dict[int, Tensor] = {}
        self._results = array.array("q", encoder.host_slots)
        self._results_at = self._results.buffer_info()
        self._table = NativeTensor()
        self._table_of: Tensor | None = None
        self._count = ctypes.c_int64()

    def set(self, slot: int, value: Tensor) -> None:
        """Set a value from outside."""
        self._held[slot] = value
        found = describe(value)
        self._check(self._library.specc_step_set(self._pointer, slot, ctypes.byref(found)))

    def get(self, slot: int) -> Tensor:
        """A copy of a value that a stage has made."""
        found = NativeTensor()
        if self._library.specc_step_get(self._pointer, slot, ctypes.byref(found)):
            raise failed()
        return tensor_at(found).clone()

    def run(self, inputs: Sequence[Tensor], first: int, last: int) -> None:
        """Run some stages; before the first one inputs are set."""
        self._held.update(enumerate(inputs))
        given = describe_all(inputs)
        self._check(self._library.specc_step_run(self._pointer, given, len(inputs), first, last))

    def step(
        self,
        rows: Sequence[int],
        block_table: Tensor,
        first: int,
        last: int,
        reads: bool,
        stays: bool = False,
    ) -> list[int]:
        """Run stages first … last - 1; returns the integers of the results where that `reads`."""
        flat = array.array("q", rows)
        if block_table is not self._table_of:
            self._bind_table(block_table)
        status = self._library.specc_step_step(
            self._pointer, *flat.buffer_info(), self._table,
            *(self._results_at if reads else _NO_RESULTS), first, last, stays,
        )  # fmt: skip
        if status:
            self._check(status)
        return self._found() if reads else []

    def steps(
        self, rows: Sequence[int], block_table: Tensor, count: int, ends: Sequence[int]
    ) -> list[int]:
        """Several steps; returns the integers of each, one after the other."""
        flat, last = array.array("q", rows), array.array("q", ends)
        if block_table is not self._table_of:
            self._bind_table(block_table)
        self._check(
            self._library.specc_step_steps(
                self._pointer, *flat.buffer_info(), self._table, *self._results_at, count,
                *last.buffer_info(),
            )
        )  # fmt: skip
        return self._found()

    def end(self) -> None:
        """Values of a step that stayed are gone."""
        self._check(self._library.specc_step_end(self._pointer))

    def seconds(self) -> list[float]:
        """Of each stage of each of the last steps."""
        return self._doubles(self._library.specc_step_seconds)

    def program_seconds(self) -> list[float]:
        """Of each stage of the last step, those inside programs."""
        return self._doubles(self._library.specc_step_program_seconds)

    def _bind_table(self, block_table: Tensor) -> None:
        # rows come and go; mostly it is the same tensor, and nobody comes here
        describe(block_table, self._table)
        self._table_of = block_table

    def _found(self) -> list[int]:
        data = self._library.specc_step_found(self._pointer, self._count)
        count = self._count.value
        return (ctypes.c_int64 * count).from_address(data)[:] if count else []

    def _doubles(self, function: Any) -> list[float]:
        data = function(self._pointer, self._count)
        count = self._count.value
        return (ctypes.c_double * count).from_address(data)[:] if count else []

    def _check(self, status: int) -> None:
        """Raise what a call has failed with.

        Raises:
            EngineError: weights that stay in their file could not be read, or an operator refuses
                what the step hands it.
            RankError: another rank is why a collective failed, whatever it could not read.
        """
        if status:
            error = failed()
            found = rank_error(error) or stream_error(error) or refusal(error)
            raise found or error from None


class CpuStep:
    """One plan's step as instructions of the library's runner: a `StagedStep` and a `RepeatedStep`.

    Args:
        program: content of `steps/<plan>.json`.
        models: name → program, for the stages' calls.
        pool: memory of the engine's programs; None: its own.
    Raises:
        EngineError: a malformed program.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        models: Mapping[str, CpuProgram | CpuSegments],
        pool: Pool | None = None,
    ) -> None:
        self.plan = plan_of(program)
        self.before_accept: BeforeAccept | None = None
        self._program, self._models = program, models
        self._pool = Pool() if pool is None else pool
        stages = {stage["name"]: read_graph(stage["graph"], models) for stage in program["stages"]}
        draft_lens = self.plan.draft_lens
        self._drafts = list(draft_lens)
        constants = step_constants(program, self.plan) | drafter_tensors(self.plan, models)
        self._encoder = StepEncoder(stages, constants, models, list(draft_lens.values()))
        self._stages = list(stages)
        accept = self._stages.index("accept_commit")
        self._native = NativeStep(self._encoder, self._pool)
        for name, value in constants.items():
            self._native.set(self._encoder.input_slots[name], value)
        self._bound: Mapping[str, Tensor] | None = None
        self._rows: dict[str, Tensor] = {}
        seen = {**self._encoder.input_slots, **self._encoder.slots_before(accept)}
        self._values = _RunnerValues(self._native, seen)
        # as the runner counts them: the draft's has a part for each pass, and one for what follows
        self._num_passes = len(self._encoder.passes)
        self._verify = self._num_passes + self._stages.index("verify")
        self._accept = self._num_passes + accept
        self._end = self._num_passes + len(self._stages)
        self._width = self.plan.max_depth + 1

    @property
    def runner(self) -> NativeStep:
        """The runner: `seconds()` and `program_seconds()` of each stage, for profiles."""
        return self._native

    @property
    def python_names(self) -> list[str]:
        """Operators without a kernel, of each instruction that calls one."""
        return self._encoder.python_names

    @torch.inference_mode()
    def run(self, environment: dict[str, Tensor]) -> dict[str, float]:
        """Run all stages; results are added to the environment.

        Returns:
            seconds of each stage, by name.
        """
        encoder, native = self._encoder, self._native
        # these take the place of what is bound
        self._bound = None
        self._rows.clear()
        self._run_stages([environment[name] for name in encoder.inputs])
        results = [native.get(slot) for slot in encoder.output_slots]
        native.end()
        environment.update(zip(encoder.output_names, results, strict=True))
        return self._stage_s(native.seconds())

    def advance(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], reads: Sequence[str] = ()
    ) -> StepResult:
        """See `Step.advance`."""
        self._bind(inputs, slabs)
        # Python between two steps finds its code evicted by the weights: few calls, plain slices
        rows, block_table = inputs.rows, inputs.block_table
        flat_rows = [value for row in rows for value in row]
        first = 0
        if inputs.mask_drafts is not None:
            first = self._draft_masked(flat_rows, block_table, inputs.mask_drafts)
        if self.before_accept is not None:
            self._native.step(flat_rows, block_table, first, self._accept, reads=False)
            first = self._accept
            self._values.show_to(self.before_accept)
        return self._finish(flat_rows, block_table, first, reads)

    def advance_often(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], count: int, ends: Sequence[int]
    ) -> list[StepResult]:
        """See `RepeatedStep`."""
        self._bind(inputs, slabs)
        flat_rows = [value for row in inputs.rows for value in row]
        batch = inputs.block_table.shape[0]
        ints = self._native.steps(flat_rows, inputs.block_table, count, ends)
        seconds = self._native.seconds()
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
        self._values.forget()
        self._bind(inputs, slabs)
        flat_rows = [value for row in inputs.rows for value in row]
        first = 0
        if inputs.mask_drafts is not None:
            first = self._draft_masked(flat_rows, inputs.block_table, inputs.mask_drafts)
        self._native.step(flat_rows, inputs.block_table, first, self._verify, reads=False)

        def accept(values: Mapping[str, Tensor], reads: Sequence[str]) -> StepResult:
            for name, value in values.items():
                self._values[name] = value
            if self.before_accept is not None:
                self._values.show_to(self.before_accept)
            return self._finish(flat_rows, inputs.block_table, self._accept, reads)

        return Drafted(self._values, accept)

    def another(self) -> StagedStep:
        """Another one: what was drafted is kept in the runner of a step."""
        return CpuStep(self._program, self._models, self._pool)

    def _bind(self, inputs: StepInputs, slabs: Mapping[str, Tensor]) -> None:
        """Set what stays the same from step to step, where it has not."""
        slots = self._encoder.input_slots
        if slabs is not self._bound:
            for name in self._encoder.bindable:
                if name in slabs:
                    self._native.set(slots[name], slabs[name])
            self._bound = slabs
        rows = self._rows
        given = {"sampling_values": inputs.sampling_values, "sampling_words": inputs.sampling_words}
        for name in self._encoder.extra:
            given[name] = inputs.extra[name]
        for name, value in given.items():
            if rows.get(name) is not value:
                rows[name] = value
                self._native.set(slots[name], value)

    def _draft_masked(
        self, flat_rows: list[int], block_table: Tensor, mask_drafts: MaskDrafts
    ) -> int:
        """Run the draft's passes, and change the logits of each; returns the part that follows."""
        native = self._native
        for part, one in enumerate(self._encoder.passes):
            native.step(flat_rows, block_table, part, part + 1, reads=False)
            with torch.inference_mode():
                given = [None if slot is None else native.get(slot) for slot in one.inputs]
                logits = native.get(one.logits)
                native.set(one.logits, mask_drafts(given, logits))
        return self._num_passes

    def _finish(
        self, flat_rows: list[int], block_table: Tensor, first: int, reads: Sequence[str]
    ) -> StepResult:
        """Run the stages that are left, and read the results."""
        native = self._native
        ints = native.step(flat_rows, block_table, first, self._end, reads=True, stays=bool(reads))
        values: dict[str, Tensor] = {}
        if reads:
            values = {name: native.get(self._encoder.slot_of(name)) for name in reads}
            native.end()
        return self._result(ints, native.seconds(), block_table.shape[0], values)

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
        self._values.show_to(self.before_accept)
        native.run([], self._accept, last)


class _RunnerValues:
    """Inputs, and what the stages before a hook computed, where the runner keeps them.

    A hook pays for the values that it looks at. These are copies, which somebody may keep; where
    the hook has changed one, the runner gets it when the hook has ended.
    """

    def __init__(self, runner: NativeStep, slots: Mapping[str, int]) -> None:
        self._runner = runner
        self._slots = slots
        # slot → the copy, and its version
        self._read: dict[int, tuple[Tensor, int]] = {}

    def __getitem__(self, name: str) -> Tensor:
        slot = self._slots[name]
        if slot not in self._read:
            with torch.inference_mode(False):  # else nothing counts its changes
                value = self._runner.get(slot)
            self._read[slot] = value, value._version
        return self._read[slot][0]

    def __setitem__(self, name: str, value: Tensor) -> None:
        slot = self._slots[name]
        self._runner.set(slot, value)
        self._read[slot] = value, _UNCOUNTED

    def forget(self) -> None:
        """Another step begins."""
        self._read.clear()

    def show_to(self, hook: BeforeAccept) -> None:
        """Call a hook, and let the runner have what it changed."""
        self.forget()
        try:
            with torch.inference_mode():
                hook(self)
            for slot, (value, version) in self._read.items():
                if version != _UNCOUNTED and value._version != version:
                    self._runner.set(slot, value)
        finally:
            self.forget()


# of a value that the runner has
_UNCOUNTED = -1
