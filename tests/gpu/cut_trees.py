"""Captured steps that verify a part of each tree: by a policy's numbers, or by what drafts say.

In float32 tokens, steps and counters are those of the backend eager with the same choices. Steps of
the demo pair are timed as well: whole trees beside halves of them, and drafters that are asked
beside those that are not.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu import products
from tests.gpu.count_compiles import count_compiles
from tests.gpu.grammar import require_alike
from tests.gpu.pair import pair_engine, pair_prompts
from tests.gpu.replay import require_graphs
from tests.gpu.results import Device, Results

NUM_PROMPTS, NUM_TOKENS = 4, 48
# prompts that are decoded together while steps are timed
TIMED = 8
# a threshold that leaves out next to nothing: what asking costs
LEAST = 1e-6
DRAFTERS = ("dspark-deepspec", "dspark-specforge")


def check_policies(results: Results, device: Device) -> None:
    """The demo pair in float32: a number of live nodes for each request and step."""
    device.prepare()
    from specc.runtime.backends.capture_limits import CaptureLimits
    from specc.runtime.engine import Engine
    from tests.runtime.live_rig import ScriptedNodes

    class Told(ScriptedNodes):
        # asked when all results are there: the same numbers on every backend
        needs_results = True

    count = count_compiles(device)
    products.watch(results)
    results.begin("compile")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "pair"
        engine = pair_engine(path, "float32", CaptureLimits.lazy())
        host = Engine.load(path, backend="eager")
        prompts = [engine.tokenizer.encode(text).ids for text in pair_prompts(TIMED)]
        for plan in (plan for plan in engine.plans.values() if plan.speculates):
            run = partial(compare, engine, host, plan, partial(Told, plan), prompts[:NUM_PROMPTS])
            results.check(f"{plan.name}, tokens", run)
            results.check(f"{plan.name}, ms", partial(_policy_ms, engine, plan, prompts))
            results.note(compiles=count())


def check_drafters(results: Results, device: Device) -> None:
    """Drafters with confidence heads, in float32, with and without a policy that cuts as well."""
    device.prepare()
    from specc.compiler.build import build
    from specc.runtime.policies.base import FixedPolicy
    from tests.runtime.backends.cuda import confident_rig as rig
    from tests.runtime.head_rig import CHAIN, TREE, load, options

    count = count_compiles(device)
    products.watch(results)
    # of a dynamic tree nothing is left out
    plans = (CHAIN, TREE)
    config = options(backend="cuda", plans=plans)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        rig.write_target(root / "target")
        for name in DRAFTERS:
            results.begin(f"compile {name}")
            rig.write_drafter(root / name, name)
            path = root / f"engine-{name}"
            build(root / "target", [root / name], path, config)
            for plan in plans:
                for policy in (FixedPolicy, rig.Cut):
                    # a policy of one plan is made of its name, one that cuts of the plan
                    make = partial(policy, plan.name if policy is FixedPolicy else plan)
                    run = partial(_compare_drafters, path, make)
                    results.check(f"{name}, {plan.name}, {policy.__name__}", run)
                    results.note(compiles=count())
                results.check(
                    f"{name}, {plan.name}, ms", partial(_drafter_ms, load, path, plan.name)
                )


def compare(
    engine: Any, host: Any, plan: Any, policy: Callable[[], Any], prompts: Sequence[list[int]]
) -> dict[str, Any]:
    """Raises AssertionError: another token, another counter, or no step was cut."""
    wanted, accepted, asked = generate(host, policy(), prompts)
    with _all_captured():
        tokens, own, live = generate(engine, policy(), prompts)
    require_alike(tokens, wanted)
    assert live == asked, "the policy was asked for other requests"
    assert own == accepted, f"accepted at depth 1, 2, …: {own}, not {accepted}"
    require_graphs(engine.steps[plan.name])
    assert any(len(set(counts)) > 1 for counts in live), "all requests had the same number"
    return {"steps": len(live), "live": sum(map(sum, live)), "accepted": own}


def generate(
    engine: Any, policy: Any, prompts: Sequence[list[int]]
) -> tuple[list[list[int]], list[int], list[tuple[int, ...]]]:
    """Greedy output, accepted tokens of each depth, and what the policy has said."""
    from specc.runtime.llm import LLM
    from specc.sampling.params import SamplingParams

    llm = LLM(engine, policy=policy)
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS - i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    outputs = llm.generate(list(prompts), params)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, list(llm.get_metrics().accepted_at_depth), list(policy.asked)


def _policy_ms(engine: Any, plan: Any, prompts: Sequence[list[int]]) -> dict[str, float]:
    """Milliseconds an iteration of whole trees, of all nodes as live ones, and of half of them."""
    from specc.runtime.policies.base import FixedPolicy
    from tests.runtime.live_rig import EveryNode

    half = (plan.num_nodes + 1) // 2
    return {
        "whole": _ms(engine, lambda: FixedPolicy(plan.name), prompts),
        "all live": _ms(engine, lambda: EveryNode(plan, plan.num_nodes), prompts),
        "half live": _ms(engine, lambda: EveryNode(plan, half), prompts),
    }


def _drafter_ms(load: Callable[..., Any], path: Path, plan: str) -> dict[str, float]:
    """Milliseconds an iteration with a drafter that is not asked, and with one that is."""
    from specc.runtime.backends.capture_limits import CaptureLimits
    from specc.runtime.policies.base import FixedPolicy
    from tests.runtime.backends.cuda.confident_rig import PROMPTS

    engine = load(path, capture=CaptureLimits.lazy())
    own = partial(_ms, engine, lambda: FixedPolicy(plan), PROMPTS)
    return {"not asked": own(), "asked": own(confidence_threshold=LEAST)}


def _ms(
    engine: Any, policy: Callable[[], Any], prompts: Sequence[list[int]], **options: Any
) -> float:
    """Milliseconds an iteration, prompts included, when kernels and graphs are there."""
    from specc.runtime.llm import LLM
    from specc.sampling.params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for _ in range(2):
        llm = LLM(engine, policy=policy(), **options)
        begin_s = time.perf_counter()
        llm.generate(list(prompts), params)
        seconds = time.perf_counter() - begin_s
    return 1000 * seconds / max(1, llm.get_metrics().num_step_passes)


@contextlib.contextmanager
def _all_captured() -> Iterator[None]:
    """A graph that cannot be captured is an error, not a warning."""
    from specc.runtime.backends.captured.captures import CaptureWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", category=CaptureWarning)
        yield


def _compare_drafters(path: Path, policy: Callable[[], Any]) -> dict[str, Any]:
    """Raises AssertionError: tokens, live nodes or counters are not those of the backend eager."""
    from tests.runtime.backends.cuda.confident_rig import params, served

    own = [replace(one, max_tokens=NUM_TOKENS // 2) for one in params(None)]
    wanted = served(path, "eager", policy(), own)
    with _all_captured():
        found = served(path, None, policy(), own)
    require_alike(found.tokens, wanted.tokens)
    assert found.steps == wanted.steps, "live nodes or accepted tokens of a step differ"
    assert found.counters == wanted.counters, f"{found.counters}, not {wanted.counters}"
    live = {count for counts in found.batches for count in counts}
    assert len(live) > 1, f"every tree was verified as a whole or not at all: {live}"
    return {"steps": len(found.batches), "live": sorted(live), "counters": found.counters}
