"""What it costs to draw tokens: `specc::accept` of a chain, over the vocabulary of Llama 3."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from tests.gpu.results import Device, Results

VOCAB = 128_256
CHAIN = (1, 1, 1, 1, 1)
BATCHES = (1, 16)
# calls of one graph, and graphs that are timed
CALLS, ROUNDS = 10, 20
# name → options of every row
OPTIONS = {
    "greedy": {"temperature": 0.0},
    "temperature .6, top-p .9": {"temperature": 0.6, "top_p": 0.9},
    "temperature .6": {"temperature": 0.6},
    "temperature .6, top-k 40": {"temperature": 0.6, "top_k": 40},
}


def measure(results: Results, device: Device) -> None:
    """Microseconds of a call by batch size and options, beside the time to read its logits."""
    device.prepare()
    import torch

    from specc.bench.device import measure_copy_bandwidth

    place = torch.device(device.place)
    bandwidth = measure_copy_bandwidth(place)
    results.note(copy_bandwidth=bandwidth)
    for batch in BATCHES:
        for name, options in OPTIONS.items():
            run = partial(_measure, options, batch, place, bandwidth["gb_s"])
            results.check(f"batch {batch}, {name}", run)


def _measure(options: dict[str, Any], batch: int, place: Any, gb_s: float) -> dict[str, Any]:
    import torch

    from specc.bench.device import make_clock
    from specc.kernels.cuda.accept import accept
    from tests.kernels.cuda.typed_trees import Row, forest

    # a small vocabulary repeated: to draw all of it on the host would take longer than the rest
    rows = [Row(**options)] * batch
    made = forest(rows, CHAIN, min(VOCAB, 2004), torch.bfloat16)
    logits = made.logits.repeat(1, VOCAB // made.logits.shape[1] + 1)[:, :VOCAB]
    logits = (logits + 1e-3 * torch.randn(VOCAB)).to(torch.bfloat16)
    drafts = [torch.zeros(level.shape[0], VOCAB).bfloat16() for level in made.draft_logits]
    arguments = [_on(x, place) for x in (logits, *made.arguments()[1:])]
    arguments[6] = _on(drafts, place)
    out = accept(*arguments)
    clock = make_clock(place)

    def work() -> None:
        for _ in range(CALLS):
            accept(*arguments)

    if place.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        run = graph.replay
        run()
    else:
        run = work
    times = []
    for _ in range(ROUNDS):
        begin = clock.mark()
        run()
        end = clock.mark()
        clock.wait()
        times.append(1000 * clock.ms(begin, end) / CALLS)
    floor_us = logits.nbytes / gb_s / 1e3
    return {
        "us": statistics.median(times),
        "us_min": min(times),
        "us_max": max(times),
        "reading_logits_us": floor_us,
        "num_accepted": out[1].tolist(),
    }


def _on(value: Any, place: Any) -> Any:
    if isinstance(value, list):
        return [_on(item, place) for item in value]
    return value.to(place) if hasattr(value, "to") else value
