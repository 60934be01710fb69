"""A plan's step as torch runs it: its stages one after the other, operator by operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from specc.artifact.graph_io import graph_from_json
from specc.runtime.backends.eager.rehearsal import Rehearsal, cannot_run
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
from specc.speculation.plans import SpecPlan


class EagerStep:
    """One plan's step: stages that read an environment of tensors and add to it.

    Args:
        program: content of `steps/<plan>.json`.
        models: name → program, for the stages' calls.
        adapt: called with each stage's graph, which it may change.
    Raises:
        EngineError: a malformed program.

    `before_accept`, where set, is called with all values between verification and acceptance:
    benchmarks read the tree's `tokens` there, and read or replace the target's `logits`, or, of
    plans in tiles, its `winners`.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        models: Mapping[str, nn.Module],
        adapt: Callable[[fx.GraphModule], object] = lambda graph: None,
    ) -> None:
        self.plan = plan_of(program)
        self.before_accept: BeforeAccept | None = None
        self._constants = step_constants(program, self.plan) | drafter_tensors(self.plan, models)
        # while drafts run
        self._mask_drafts: list[MaskDrafts] = []
        drafts = {name: _Masked(model, self._mask_drafts) for name, model in models.items()}
        self._stages: list[tuple[str, list[str], nn.Module, Rehearsal]] = []
        for stage in program["stages"]:
            called = drafts if stage["name"] == "draft" else models
            graph = graph_from_json(stage["graph"], modules=called)
            adapt(graph)
            names = [node.target for node in graph.graph.find_nodes(op="placeholder")]
            # the module and its graph name each other: with that cycle, weights and caches would
            # outlive the engine until the garbage collector comes by
            graph.graph.owning_module = None
            rehearsal = Rehearsal(f"{stage['name']} of {self.plan.name}", graph.graph, called)
            self._stages.append((stage["name"], names, graph, rehearsal))

    @torch.inference_mode()
    def run(self, environment: dict[str, Tensor]) -> dict[str, float]:
        """Run all stages; results are added to the environment.

        Returns:
            seconds of each stage, by name.
        """
        environment.update(self._constants)
        return self._run_stages(environment, [name for name, *_ in self._stages])

    def _run_stages(self, environment: dict[str, Tensor], names: Sequence[str]) -> dict[str, float]:
        stage_s = {}
        for name, inputs, graph, rehearsal in self._stages:
            if name not in names:
                continue
            if name == "accept_commit" and self.before_accept is not None:
                self.before_accept(environment)
            begin = time.perf_counter()
            try:
                values = [environment[key] for key in inputs]
                rehearsal.check(values)
                # not the call of the module, which prints an error, too
                made = graph.forward(*values)
            except _HookError as failed:
                raise failed.error from None
            except Exception as error:
                raise cannot_run(f"{name} of {self.plan.name}", error) from error
            environment.update(made)
            stage_s[name] = time.perf_counter() - begin
        return stage_s

    def advance(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], reads: Sequence[str] = ()
    ) -> StepResult:
        """See `Step.advance`."""
        environment = _environment(inputs, slabs)
        with self._masked(inputs):
            stage_s = self.run(environment)
        return _result(self.plan, environment, stage_s, reads)

    @torch.inference_mode()
    def draft(self, inputs: StepInputs, slabs: Mapping[str, Tensor]) -> Drafted:
        """Run what stands before the target's pass; see `Drafted`."""
        environment = {**_environment(inputs, slabs), **self._constants}
        with self._masked(inputs):
            stage_s = self._run_stages(environment, ["draft"])

        def accept(values: Mapping[str, Tensor], reads: Sequence[str]) -> StepResult:
            environment.update(values)
            stage_s.update(self._run_stages(environment, ["accept_commit"]))
            return _result(self.plan, environment, stage_s, reads)

        return Drafted(environment, torch.inference_mode()(accept))

    def another(self) -> StagedStep:
        """Itself: each draft has an environment of its own."""
        return self

    @contextmanager
    def _masked(self, inputs: StepInputs) -> Iterator[None]:
        """What its drafts find likely is changed as the inputs say."""
        self._mask_drafts[:] = [] if inputs.mask_drafts is None else [inputs.mask_drafts]
        try:
            yield
        finally:
            self._mask_drafts.clear()


class _Masked(nn.Module):
    """A program whose logits are changed, as a draft stage calls it.

    Args:
        masks: what changes them, at the time of the call; one or none.
    """

    def __init__(self, program: nn.Module, masks: Sequence[MaskDrafts]) -> None:
        super().__init__()
        # not a module of this one: it is listed elsewhere
        self._program = [program]
        self._masks = masks
        self.rehearse = getattr(program, "rehearse", None)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        logits = self._program[0](*inputs)
        for mask in self._masks:
            try:
                logits = mask(inputs, logits)
            except Exception as error:
                raise _HookError(error) from error
        return logits


class _HookError(Exception):
    """Takes the error of a hook past what blames the graph that called it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _environment(inputs: StepInputs, slabs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the first stage of a step reads, by name."""
    return {
        "last_tokens": torch.tensor([row[:-1] for row in inputs.rows]),
        "cache_len": torch.tensor([row[-1] for row in inputs.rows], dtype=torch.int32),
        "block_table": inputs.block_table,
        "sampling_values": inputs.sampling_values,
        "sampling_words": inputs.sampling_words,
        **inputs.extra,
        **slabs,
    }


def _result(
    plan: SpecPlan,
    environment: Mapping[str, Tensor],
    stage_s: dict[str, float],
    reads: Sequence[str],
) -> StepResult:
    """What the host reads of an environment after the last stage.

    Raises:
        EngineError: it is not there.
    """
    try:
        accepted, tokens = environment["num_accepted"], environment["output_tokens"]
        lengths = [environment[name] for name in ("next_cache_len", *plan.draft_lens.values())]
        batch = environment["cache_len"].shape
        if any(value.shape != batch for value in (accepted, *lengths)) or tokens.dim() != 2:
            raise ValueError("results of other shapes than one for each sequence")
        if tokens.shape[:1] != batch or not ((accepted >= 0) & (accepted < tokens.shape[1])).all():
            raise ValueError(f"{accepted.tolist()!s:.60} accepted tokens")
        return StepResult(
            accepted.tolist(),
            tokens.tolist(),
            environment["next_cache_len"].tolist(),
            {index: environment[name].tolist() for index, name in plan.draft_lens.items()},
            stage_s,
            {name: environment[name] for name in reads},
        )
    except (KeyError, AttributeError, ValueError) as error:
        raise cannot_run(f"plan {plan.name}", error) from error
