"""Replays of a captured step equal the same operators one by one, bit for bit, every time.

Inputs and caches are the same before each; 50 of them show what a race or memory that nobody
wrote does only now and then.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu import products
from tests.gpu.count_compiles import count_compiles
from tests.gpu.pair import pair_engine
from tests.gpu.results import Device, Results

REPLAYS = 50
BATCHES = (1, 3, 8)
# steps that are queued one after another, to time one of them, and how often
QUEUED, ROUNDS = 20, 5
SEED = 3
# the same shapes as those of the step benchmark: what it has compiled is used again
SHAPES = "llama-3.1-8b/llama-3.2-1b"
CHAIN, CONTEXT, TOKENS = 5, 1024, 96
# of more rows than the kernel of a single sequence's chains takes
TREE = (3, 2, 1, 1)
# ways of drawing tokens: greedy, filtered, penalized, and each rule of trees
KINDS = 6


def check_pair(results: Results, device: Device) -> None:
    """The demo pair in float32: all plans, several batch sizes, mixed sampling options."""
    device.prepare()
    import torch

    from specc.runtime.backends.capture_limits import CaptureLimits
    from tests.mixed_sampling import mixed_sampling

    count = count_compiles(device)
    products.watch(results)
    with tempfile.TemporaryDirectory() as scratch:
        # each graph when it is asked for: what is found first need not wait for the rest
        engine = pair_engine(Path(scratch) / "pair", "float32", CaptureLimits.lazy())
        shape = engine.cache.shape
        table = torch.arange(shape.num_blocks, dtype=torch.int32).view(shape.max_num_seqs, -1)
        for plan, step in engine.steps.items():
            for batch in BATCHES:
                rows = [(5 + b, 9 + b, 11 + 7 * b) for b in range(batch)]
                inputs = (rows, table[:batch], *mixed_sampling(batch))
                run = partial(compare, engine, step, inputs, device)
                results.check(f"{plan}, {batch} sequences", run)
                results.note(compiles=count())


def check_overlap(results: Results, device: Device) -> None:
    """The demo pair in float32: one half of eight sequences drafts while the other is verified."""
    device.prepare()
    from specc.runtime.backends.capture_limits import CaptureLimits
    from specc.runtime.engine import Engine
    from tests.mixed_sampling import mixed_sampling

    count, batch = count_compiles(device), 8
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "pair"
        whole = pair_engine(path, "float32", CaptureLimits.lazy())
        halves = Engine.load(path, capture=CaptureLimits.lazy(), overlaps=True)
        table = _blocks(whole)
        for plan, step in halves.steps.items():
            if not step.plan.speculates:
                continue
            rows = [(5 + b, 9 + b, 11 + 7 * b) for b in range(batch)]
            inputs = (rows, table[:batch], *mixed_sampling(batch))
            run = partial(compare_halves, whole, halves, plan, inputs, device)
            results.check(f"{plan}, {batch} sequences in halves", run)
            results.note(compiles=count())


def check_8b(results: Results, device: Device) -> None:
    """8B and 1B shapes in bfloat16, each way of drawing tokens."""
    device.prepare()
    from specc.bench.device import open_device
    from specc.bench.synthetic.engine import make_engine
    from specc.bench.synthetic.weights import make_weights
    from specc.runtime.backends.cuda import choose_launches
    from specc.runtime.execution.batch_rows import last_tokens_of
    from tests.mixed_sampling import mixed_sampling

    count = count_compiles(device)
    products.watch(results)
    results.begin("compile")
    graphs, backend = open_device()
    programs = compile_8b(widths=((1,) * CHAIN, TREE))
    results.begin("draw weights")
    weights = {
        model.entry.name: make_weights(model, graphs.device, seed)
        for seed, model in enumerate(programs.models)
    }
    engine = make_engine(programs, weights, graphs, backend)
    num_last = last_tokens_of(engine.plans.values())
    table = _blocks(engine)
    for plan, step in engine.steps.items():
        for kind in range(KINDS):
            rows = [(*range(7, 7 + num_last), CONTEXT)]
            inputs = (rows, table, *mixed_sampling(1, first=kind))
            run = partial(compare, engine, step, inputs, device)
            results.check(f"{plan}, options {kind}", run)
            results.note(compiles=count())
        if choose_launches.can_launch_dependent(graphs.device):
            inputs = ([(*range(7, 7 + num_last), CONTEXT)], table, *mixed_sampling(1))
            run = partial(compare_dependent, engine, step, inputs, device)
            results.check(f"{plan}, dependent launches", run)


def compile_8b(
    acceptance: tuple[float, ...] | None = None,
    widths: tuple[tuple[int, ...], ...] = ((1,) * CHAIN,),
) -> Any:
    """Programs of the shapes, as the step benchmark compiles them, with its dice or without."""
    from specc.bench.synthetic.shapes import parse_shapes
    from specc.compiler.in_memory import ShapeOptions, compile_shapes, load_config
    from specc.progress import PhaseTimer
    from specc.speculation.plans import SpecPlan

    shapes = [shape for shape in parse_shapes(SHAPES) if shape is not None]
    configs = [s.make_config() if s.directory is None else load_config(s.directory) for s in shapes]
    for config in configs:
        config.bos_token_id = config.eos_token_id = None
    plans = tuple(SpecPlan.from_widths(each) for each in widths)
    options = ShapeOptions(plans, "bfloat16", 1, CONTEXT, TOKENS, "cuda", acceptance)
    return compile_shapes([shape.label for shape in shapes], configs, options, PhaseTimer())


def compare(engine: Any, step: Any, inputs: Any, device: Device) -> dict[str, Any]:
    """Fill the caches, and hold each replay to the step without a graph.

    Raises:
        AssertionError: a replay differs in a result or in a cache; or there is no graph.
    """
    from specc.runtime.backends.step_io import STATES, StepInputs
    from specc.runtime.execution.state_rows import state_rows

    given = StepInputs(*inputs)
    if engine.cache.states is not None:
        given = given._replace(extra={STATES: state_rows(range(len(given.rows)))})
    fill(engine.cache.environment, engine.vocab_size)
    return replays_alike(step, engine.cache.environment, given, device)


def compare_dependent(engine: Any, step: Any, inputs: Any, device: Device) -> dict[str, Any]:
    """As `compare`, of a graph whose kernels may start early, whatever the engine has chosen.

    Raises:
        AssertionError: as `compare`.
    """
    chosen, captured, bound = step.launches_dependent, dict(step._captured), dict(step._bound)
    step._captured.clear()
    step.launches_dependent = True
    try:
        return compare(engine, step, inputs, device) | {"chosen": chosen}
    finally:
        step.launches_dependent, step._captured, step._bound = chosen, captured, bound


def compare_halves(
    whole: Any, halves: Any, plan: str, inputs: Any, device: Device
) -> dict[str, Any]:
    """As `compare`, of a step in halves; its tokens are those of a whole one. Both are timed.

    Returns:
        as `compare`, and ms of a step both ways: medians of rounds that alternate.
    Raises:
        AssertionError: as `compare`; or the tokens are others.
    """
    from specc.runtime.backends.captured.overlapped_step import OverlappedStep
    from specc.runtime.backends.step_io import StepInputs

    found = compare(halves, halves.steps[plan], inputs, device)
    bucket = halves.steps[plan].bucket_of(len(inputs[0]))
    is_split = isinstance(halves.steps[plan]._bound[bucket, False], OverlappedStep)
    assert is_split, f"{plan} for {bucket} sequences is not in halves"
    said = []
    for engine in (whole, halves):
        fill(engine.cache.environment, engine.vocab_size)
        step = engine.steps[plan]
        said.append(step.advance(StepInputs(*inputs), engine.cache.environment)[:4])
    assert said[0] == said[1], f"in halves {said[1]}; as a whole {said[0]}"
    rounds = [
        [_step_ms(engine.steps[plan], StepInputs(*inputs), device) for engine in (whole, halves)]
        for _ in range(ROUNDS)
    ]
    ms = [statistics.median(column) for column in zip(*rounds, strict=True)]
    return found | {"whole_ms": ms[0], "halves_ms": ms[1]}


def _step_ms(step: Any, inputs: Any, device: Device) -> float:
    """Of steps that are queued one after another, each going on from what the last has left."""
    step.submit(inputs).result()
    begin_s = time.perf_counter()
    pending = None
    for _ in range(QUEUED):
        pending = step.submit_next(len(inputs.rows))
    device.synchronize()
    ms = 1000 * (time.perf_counter() - begin_s) / QUEUED
    assert pending is not None
    pending.result()
    return ms


def fill(slabs: Mapping[str, Any], vocab_size: int) -> None:
    """Caches of other rows than a step writes, all of them seen by it or by none."""
    import torch

    for name, slab in slabs.items():
        generator = torch.Generator(device=slab.device).manual_seed(SEED)
        if name == "history":
            slab.random_(0, vocab_size, generator=generator)
        else:
            slab.normal_(generator=generator)


def replays_alike(
    step: Any, slabs: Mapping[str, Any], inputs: Any, device: Device, count: int | None = None
) -> dict[str, Any]:
    """Run a step once without its graph, then replay it; caches are put back each time.

    Args:
        step: captured, or to be captured.
        slabs: name → cache.
        count: replays; None is `REPLAYS`.
    Raises:
        AssertionError: which replay differs, and where.
    """
    from specc.kernels.cuda import few_rows

    count = count or REPLAYS
    bucket = step.bucket_of(len(inputs.rows))
    step.capture(bucket)
    key = (bucket, step.is_split)
    require_graphs(step)
    captured = step._captured[key]
    before = {name: slab.clone() for name, slab in slabs.items()}
    step._captured[key] = None
    try:
        # of products that differ by launches those of the graph, whose roundings are the same
        with few_rows.chosen_for(step.launches_dependent):
            wanted = step.advance(inputs, slabs)[:4]
        device.synchronize()
    finally:
        step._captured[key] = captured
    after = {name: slab.clone() for name, slab in slabs.items()}
    for number in range(1, count + 1):
        for name, slab in slabs.items():
            slab.copy_(before[name])
        found = step.advance(inputs, slabs)[:4]
        device.synchronize()
        assert found == wanted, f"replay {number} of {count}: {found}; without a graph {wanted}"
        for name, slab in slabs.items():
            differ = _differences(slab, after[name])
            assert not differ, f"replay {number} of {count}: {differ} elements of {name} differ"
    tokens = sum(1 + accepted for accepted in wanted[0])
    return {"replays": count, "sequences": len(inputs.rows), "tokens": tokens, "is_captured": True}


def require_graphs(step: Any) -> None:
    """Raises AssertionError: a capture fell back to operators, now or while the engine loaded."""
    tried = step._captured
    assert tried, f"{step.plan.name}: nothing was captured"
    left = [f"{size} sequences" for (size, _), graphs in tried.items() if graphs is None]
    assert not left, f"{step.plan.name} runs operator by operator for {', '.join(left)}"


def _differences(found: Any, wanted: Any) -> int:
    """Elements whose bits differ; a NaN equals itself, and -0 is not 0."""
    import torch

    if found.is_floating_point():
        bits = {2: torch.int16, 4: torch.int32}[found.element_size()]
        found, wanted = found.view(bits), wanted.view(bits)
    return int((found != wanted).sum())


def _blocks(engine: Any) -> Any:
    import torch

    shape = engine.cache.shape
    blocks = torch.arange(shape.num_blocks, dtype=torch.int32)
    return blocks.view(shape.max_num_seqs, shape.blocks_per_sequence)
