"""Generation of the 8B and 1B shapes beside transformers': each is there as soon as it has run.

What is compared with comes first, and what compiles for minutes last; time that runs out costs
what had not run yet. specc's chain has the dice of the step benchmark, whose report, in command A,
has its rates, too; assisted generation has the real acceptance of random weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tests.gpu import benchmark, products, replay
from tests.gpu.count_compiles import count_compiles
from tests.gpu.results import Device, Results, Skipped

ROUNDS = 2


def measure(results: Results, device: Device) -> None:
    """Plain and assisted generation of transformers, off and a chain of specc, a static cache."""
    device.prepare()
    from specc.bench.baseline import PLAIN
    from specc.bench.device import open_device

    count = count_compiles(device)
    products.watch(results)
    results.begin("compile")
    graphs, backend = open_device()
    programs = replay.compile_8b((float(benchmark.ACCEPTANCE),))
    results.begin("draw weights")
    weights = draw_weights(programs, graphs.device)
    prompts = draw_prompts(programs)
    modules = [model.module for model in programs.models]
    figures: dict[str, dict[str, Any]] = {}

    def measured(name: str, make: Callable[[], Any]) -> None:
        """One contender, made when it is its turn."""

        def run() -> dict[str, Any]:
            figures[name] = rates(make())
            plain = figures.get(PLAIN)
            return figures[name] | ({} if plain is None else compared(figures[name], plain))

        def run_other() -> dict[str, Any]:
            try:
                return run()
            except Exception as error:
                # what it refuses is no fault of specc's
                raise Skipped(f"{type(error).__name__}: {str(error)[:500]}") from error

        results.check(name, run_other if name.startswith(PLAIN) else run)
        results.note(compiles=count())

    for name, make in baselines(modules, prompts).items():
        measured(name, make)
    results.begin("load")
    engine = make_engine_of(programs, weights, graphs, backend)
    for name, make in own_contenders(engine, prompts).items():
        measured(name, make)
    if device.kind == "cuda":
        for name, make in compiled_baseline(modules[0], prompts).items():
            measured(name, make)


def rates(contender: Any) -> dict[str, Any]:
    """Figures of some rounds after one that warms up."""
    warm_up_s = contender.run().elapsed_s
    found = [contender.run() for _ in range(ROUNDS)]
    decode = [measurement.decode_tokens_per_s for measurement in found]
    return {
        "decode_tokens_per_s": statistics.median(decode),
        "decode_tokens_per_s_min": min(decode),
        "decode_tokens_per_s_max": max(decode),
        "ms_per_step": statistics.median(m.ms_per_step for m in found),
        "tokens_per_s": statistics.median(m.tokens_per_s for m in found),
        "mean_acceptance_length": found[0].mean_acceptance_length,
        "num_output_tokens": found[0].num_output_tokens,
        "warm_up_s": warm_up_s,
    }


def compared(figures: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, float]:
    """Ratio of the rates of decoding; time for the prompt is in neither."""
    ratio = figures["decode_tokens_per_s"] / plain["decode_tokens_per_s"]
    return {"decode_over_transformers": ratio}


def draw_weights(programs: Any, place: Any) -> dict[str, Any]:
    """Of specc's programs; transformers' modules are views of the same memory."""
    from specc.bench.synthetic.weights import make_weights

    return {
        model.entry.name: make_weights(model, place, seed)
        for seed, model in enumerate(programs.models)
    }


def draw_prompts(programs: Any) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    vocab_size = programs.models[0].entry.vocab_size
    return torch.randint(0, vocab_size, (1, replay.CONTEXT), generator=generator).tolist()


def baselines(modules: Sequence[Any], prompts: list[list[int]]) -> dict[str, Callable[[], Any]]:
    """Transformers' own generation with the draft's constant number of tokens, and without."""
    from specc.bench.baseline import ASSISTED, PLAIN, TransformersContender, constant_draft

    plain = partial(TransformersContender, PLAIN, modules[0], [prompts], benchmark.TOKENS)
    assisted = partial(
        TransformersContender, ASSISTED, modules[0], [prompts], benchmark.TOKENS,
        modules[1], constant_draft(replay.CHAIN),
    )  # fmt: skip
    return {PLAIN: plain, ASSISTED: assisted}


def own_contenders(engine: Any, prompts: list[list[int]]) -> dict[str, Callable[[], Any]]:
    from specc.bench.engine import EngineContender

    return {
        f"specc, {plan}": partial(EngineContender, engine, plan, plan, [prompts], benchmark.TOKENS)
        for plan in sorted(engine.steps, key=lambda name: name != "off")
    }


def compiled_baseline(module: Any, prompts: list[list[int]]) -> dict[str, Callable[[], Any]]:
    """Transformers with a static cache and torch.compile: a minute or more before its first run."""
    from specc.bench.baseline import STATIC, TransformersContender, static_cache_options

    make = partial(TransformersContender, STATIC, module, [prompts], benchmark.TOKENS)
    return {STATIC: partial(make, options=static_cache_options())}


def make_engine_of(programs: Any, weights: Any, graphs: Any, backend: str) -> Any:
    from specc.bench.synthetic.engine import make_engine

    return make_engine(programs, weights, graphs, backend)
