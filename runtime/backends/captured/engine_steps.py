"""The steps of an engine on a device: common buffers, and which graphs are captured at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import nn

from specc.artifact.manifest import Manifest
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.step_binder import StepBinder
from specc.runtime.backends.captured.step_buffers import StepBuffers
from specc.runtime.backends.captured.step_scores import UNFILTERED
from specc.runtime.backends.device_models import Adapt, leave_alone
from specc.runtime.backends.graph_device import GraphDevice
from specc.runtime.backends.program_files import read_json
from specc.runtime.execution.batch_rows import last_tokens_of
from specc.runtime.scheduling.kv_cache import KVCache
from specc.speculation.plans import VOTE, SpecPlan


def load_steps(
    path: Path,
    manifest: Manifest,
    models: Mapping[str, nn.Module],
    cache: KVCache,
    graphs: GraphDevice,
    limits: CaptureLimits,
    adapt: Adapt = leave_alone,
    *,
    skips_filters: bool = False,
    overlaps: bool = False,
    before_capture: Callable[[Mapping[str, CapturedStep]], object] = lambda steps: None,
) -> dict[str, CapturedStep]:
    """The steps of an engine; what is captured at once is up to `limits`.

    Args:
        path: the engine directory.
        manifest: its manifest.
        models: name → program on the device, as steps call them.
        cache: on the device.
        graphs: the device.
        limits: of capturing.
        adapt: called with each stage's graph, which it may change; see `Adapt`.
        skips_filters: see `CapturedStep`.
        overlaps: steps may run in halves, see `OverlappedStep`.
        before_capture: called with the steps, of which nothing is captured yet.
    Raises:
        EngineError: a file is absent or malformed, or a step cannot run.
    """
    plans = [entry.plan for entry in manifest.plans]
    # of the drafts, other ranks may have some
    num_models = max(len(manifest.models), *(1 + len(plan.models) for plan in plans))
    buffers = make_buffers(graphs, cache, plans, num_models)
    side = graphs.side_stream() if overlaps else None
    steps = {
        entry.name: CapturedStep(
            StepBinder(
                read_json(path / entry.file),
                models,
                cache.environment,
                buffers,
                graphs,
                adapt,
                side,
            ),
            limits.buckets(cache.shape.max_num_seqs),
            by_block=cache.rows is not None,
            skips_filters=skips_filters,
        )
        for entry in manifest.plans
    }
    before_capture(steps)
    # the plan that most steps run comes first
    order = sorted(steps, key=lambda name: name != manifest.default_plan)
    capture_within(limits, [steps[name] for name in order], graphs)
    return steps


def make_buffers(
    graphs: GraphDevice, cache: KVCache, plans: Sequence[SpecPlan], num_models: int
) -> StepBuffers:
    """Inputs and results that hold the steps of all these plans."""
    depth = max(plan.max_depth for plan in plans)
    return StepBuffers(
        graphs,
        cache.shape.max_num_seqs,
        cache.shape.blocks_per_sequence,
        2 + depth + 1 + num_models - 1,
        num_last=last_tokens_of(plans),
        num_votes=max(len(plan.drafters) if plan.combine == VOTE else 0 for plan in plans),
        num_proposals=depth if any(plan.reads_proposals for plan in plans) else 0,
        num_chosen=max(plan.num_chosen(cache.shape.rows_per_block) for plan in plans),
        has_states=cache.states is not None,
    )


def capture_within(
    limits: CaptureLimits, steps: Sequence[CapturedStep], graphs: GraphDevice
) -> int:
    """Capture steps, large batches first so that smaller graphs fit into their memory.

    Those for any batch come first, then those for batches without filters.

    Returns:
        number of graphs; the remaining ones would exceed the limits and are captured when used.
    """
    seconds, free = 0.0, graphs.free_bytes()
    sizes = sorted({bucket for step in steps for bucket in step.buckets}, reverse=True)
    every = [(step, size, None) for size in sizes for step in steps if size in step.buckets]
    fewer = [(step, size, UNFILTERED) for step, size, _ in every if step.skips_filters]
    for count, (step, size, kind) in enumerate([*every, *fewer]):
        if seconds > limits.max_seconds or free - graphs.free_bytes() > limits.max_bytes:
            return count
        seconds += step.capture(size, kind)
    return len(every) + len(fewer)
