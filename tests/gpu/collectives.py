"""NCCL with one rank: inside of a captured step, and what a collective costs as a node of a graph.

More ranks need more GPUs. With one, every collective gives back what it got, so a step that has
them says what it says without; how they are captured and replayed is the same.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from typing import Any

from tests.gpu import products, replay
from tests.gpu.count_compiles import count_compiles
from tests.gpu.results import APART, Device, Results, Skipped

# a residual stream of an 8B model
WIDTH = 4096
ROWS = (1, 8, 64)
# calls of one graph, and graphs that are timed
CALLS, ROUNDS = 100, 20


def check_step(results: Results, device: Device) -> None:
    """8B and 1B shapes with collectives where two ranks have them; replays, bit for bit."""
    device.prepare()
    from specc.bench.device import open_device
    from specc.bench.synthetic.engine import make_engine
    from specc.bench.synthetic.weights import make_weights
    from specc.runtime.execution.batch_rows import last_tokens_of
    from tests.mixed_sampling import mixed_sampling

    count = count_compiles(device)
    products.watch(results)
    results.begin("compile")
    graphs, backend = open_device()
    programs = replay.compile_8b()
    results.begin("draw weights")
    weights = {
        model.entry.name: make_weights(model, graphs.device, seed)
        for seed, model in enumerate(programs.models)
    }
    engine = make_engine(programs, weights, graphs, backend)
    num_last = last_tokens_of(engine.plans.values())
    rows = [(*range(7, 7 + num_last), replay.CONTEXT)]
    inputs = (rows, replay._blocks(engine), *mixed_sampling(1, first=0))
    wanted = {}
    results.begin("steps without collectives")
    for plan, step in engine.steps.items():
        wanted[plan] = _tokens(engine, step, inputs)
        # what was captured has none
        step._captured.clear()
    group = join(results, device)
    num_sums = add_collectives(engine.target, group)

    def compare(plan: str, step: Any) -> dict[str, Any]:
        found = _tokens(engine, step, inputs)
        assert found == wanted[plan], f"{found}; without collectives {wanted[plan]}"
        before = group.position
        told = replay.compare(engine, step, inputs, device)
        # once without a graph; a replay calls nothing on the host
        begun = group.position - before
        return {**told, "sums": num_sums, "begun_on_the_host": begun}

    for plan, step in engine.steps.items():
        results.check(f"captured step, {plan}", partial(compare, plan, step))
        results.note(compiles=count())
    results.check("leaving the group", partial(_leave, group))


def measure(results: Results, device: Device) -> None:
    """Microseconds of a node by the rows that it adds up, gathers or sends."""
    device.prepare()
    import torch

    from specc.bench.device import make_clock, open_device
    from specc.kernels import ops

    group = join(results, device)
    graphs, _ = open_device()
    clock = make_clock(graphs.device)
    for rows in ROWS:
        x = torch.ones(rows, WIDTH, dtype=torch.bfloat16, device=graphs.device)
        for operator in (ops.all_reduce, ops.gather_rows, ops.from_first):
            name = f"{operator._opname} [{rows}, {WIDTH}]"
            results.check(name, partial(_measure, operator, x, graphs, clock))
    results.check("leaving the group", partial(_leave, group))


def join(results: Results, device: Device) -> Any:
    """A group of this process alone, over NCCL, or over gloo in a rehearsal."""
    if device.kind == APART:
        raise Skipped("gloo takes no tensors of a device that only says it is one")
    from specc.runtime.ranks import nccl

    if device.kind != "cuda":
        _rehearse_on_gloo(nccl)
    results.begin("join")
    gathering = nccl.NcclGathering(None, 1)
    begin = time.perf_counter()
    # nobody else is to come, so nobody can fail to
    group = gathering.meet(60.0, lambda: None)
    results.note(join_s=round(time.perf_counter() - begin, 3), nccl=_version(device))
    return group


def add_collectives(target: Any, group: Any) -> int:
    """Put into a target what one of several ranks has; returns the number of sums.

    Its inputs come by `from_first`, each product whose sum is read by others is reduced, and its
    logits are gathered.
    """
    import torch

    from specc.kernels import ops
    from specc.runtime.ranks.device_work import give

    inner = target._graph
    products = (torch.ops.aten.linear.default, ops.skinny_linear)
    found = [node for node in inner.graph.nodes if node.target in products]
    assert found, "no product whose sum ranks would add up"
    for node in found:
        with inner.graph.inserting_after(node):
            total = inner.graph.call_function(torch.ops.specc.all_reduce.default, (node,))
        node.replace_all_uses_with(
            total, delete_user_cb=lambda user, total=total: user is not total
        )
    inner.recompile()
    names = [node.target for node in inner.graph.find_nodes(op="placeholder")]
    first = names.index("tokens")
    last = names.index("logit_rows") + 1

    class OneRank(torch.nn.Module):
        graph = inner.graph

        def forward(self, *tensors: Any) -> Any:
            give(tensors[first:last])
            return group.gather(inner.forward(*tensors))

    target._graph = OneRank()
    return len(found)


def _tokens(engine: Any, step: Any, inputs: Any) -> Any:
    """Results of a captured step over caches that are filled anew."""
    from specc.runtime.backends.step_io import StepInputs

    replay.fill(engine.cache.environment, engine.vocab_size)
    return step.advance(StepInputs(*inputs), engine.cache.environment)[:4]


def _measure(operator: Any, x: Any, graphs: Any, clock: Any) -> dict[str, float]:
    import torch

    def work() -> None:
        for _ in range(CALLS):
            operator(x)

    with torch.inference_mode(), graphs.active():
        graph = graphs.capture(work)
        graph.replay()
        times = []
        for _ in range(ROUNDS):
            begin = clock.mark()
            graph.replay()
            end = clock.mark()
            clock.wait()
            times.append(1000 * clock.ms(begin, end) / CALLS)
    return {"us": statistics.median(times), "us_min": min(times), "us_max": max(times)}


def _leave(group: Any) -> dict[str, float]:
    """Whether a communicator goes while graphs hold it: what nobody knows before."""
    begin = time.perf_counter()
    group.close()
    return {"seconds": round(time.perf_counter() - begin, 3)}


def _version(device: Device) -> str:
    import torch

    if device.kind != "cuda":
        return "gloo"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _rehearse_on_gloo(nccl: Any) -> None:
    import torch
    import torch.distributed as dist

    assert os.environ.get("TRITON_INTERPRET") or not torch.cuda.device_count()

    def make(store: Any, rank: int, size: int, limit: Any, _: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, limit)

    for name, value in (("make_processes", make), ("group_device", lambda: torch.device("cpu"))):
        assert hasattr(nccl, name), name
        setattr(nccl, name, value)
