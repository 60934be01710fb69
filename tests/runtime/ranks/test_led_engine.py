"""Led engines generate what the same engine does alone, and all ranks keep the same caches."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.service.service import Service
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from tests import models
from tests.runtime.ranks.conftest import OPTIONS, PLANS

NUM_TOKENS = 16
PLAN_IDS = ["off", *(plan.name for plan in PLANS)]
GREEDY: dict[str, Any] = {}
COUPLED = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}
MSS = {"temperature": 0.9, "rule": "mss"}
LOGPROBS = {"logprobs": 3, "prompt_logprobs": 2}
GRAMMAR = {"structured_outputs": StructuredOutputsParams(regex="([a-e]{2}[0-9]){5,9}")}
KINDS = {
    "greedy": GREEDY,
    "coupled": COUPLED,
    "mss": MSS,
    "logprobs": LOGPROBS,
    "grammar": GRAMMAR,
}
# a cache in which not all of the longest requests have room
FEW: dict[str, Any] = {"kv_cache_tokens": 160}
LogProbs = list[dict[int, float]] | None


def params(count: int, **options: Any) -> list[SamplingParams]:
    given = {"max_tokens": NUM_TOKENS, "ignore_eos": "structured_outputs" not in options}
    return [
        SamplingParams(seed=100 + i, **{"temperature": 0, **given, **options}) for i in range(count)
    ]


def generate(llm: LLM, given: Sequence[SamplingParams]) -> list[tuple[list[int], LogProbs]]:
    outputs = llm.generate([list(p) for p in models.prompts()[: len(given)]], list(given))
    return [(list(o.outputs[0].token_ids), numbers(o.outputs[0].logprobs)) for o in outputs]


def numbers(rows: Any) -> LogProbs:
    return rows and [{token: entry.logprob for token, entry in row.items()} for row in rows]


def check_caches(engine: Engine) -> None:
    """What attends to rows that a rank has and another has not computes something else."""
    sums = engine.target.leader.checksums(engine.cache.slabs["target"])
    assert len(sums) == len(engine.target.leader.pids) + 1
    assert len({*sums}) == 1, [one.hex()[:8] for one in sums]


@pytest.fixture(scope="module")
def alone(engine_path: Path) -> Engine:
    return Engine.load(engine_path, **FEW)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def led(request: pytest.FixtureRequest, engine_path: Path, load_led) -> Engine:
    return load_led(engine_path, request.param, **FEW)


def rule_of(plan: str, options: dict[str, Any]) -> dict[str, Any]:
    lossy = plan.startswith(("dynamic", "tiles"))
    return {**options, "rule": "delta"} if lossy and "rule" in options else options


# each plan, and each kind of rows that ranks have to answer differently
USUAL = {
    "off-greedy",
    "chain-3-logprobs",
    "tree-3-2-1-greedy",
    "tree-3-2-1-mss",
    "dynamic-10-3-3-greedy",
    "merge-0+lookup2-tree-2-1-greedy",
}


def cases(usual: Collection[str] = USUAL) -> list[Any]:
    """Every plan with every kind of rows: all but the usual ones are slow."""
    return [
        pytest.param(
            plan,
            options,
            id=f"{plan}-{name}",
            marks=[] if f"{plan}-{name}" in usual else [pytest.mark.slow],
        )
        for plan in PLAN_IDS
        for name, options in KINDS.items()
        # a plan in tiles has no logits for them
        if not (plan.startswith("tiles") and options in (LOGPROBS, GRAMMAR))
    ]


@pytest.mark.default("2-off-greedy", "2-tree-3-2-1-greedy", "2-dynamic-10-3-3-greedy")
@pytest.mark.parametrize(("plan", "options"), cases())
def test_tokens_and_caches(alone: Engine, led: Engine, plan: str, options: dict[str, Any]) -> None:
    given = params(4, **rule_of(plan, options))
    wanted = generate(LLM(alone, plan=plan), given)
    llm = LLM(led, plan=plan)
    assert generate(llm, given) == wanted
    assert len({tuple(tokens) for tokens, _ in wanted}) > 1
    if plan != "off" and options is not GRAMMAR:
        # or no accepted row would have to be moved
        assert llm.get_metrics().mean_acceptance_length > 1.2
    check_caches(led)


@pytest.mark.slow
def test_plans_that_share_a_pass(alone: Engine, led: Engine) -> None:
    """Requests without speculation, trees and chunks of prompts, all in one pass."""
    given = [
        SamplingParams(temperature=0, max_tokens=8 + 6 * i, ignore_eos=True, speculative=i % 2 == 0)
        for i in range(5)
    ]
    llm = LLM(led, plan="tree-3-2-1")
    assert generate(llm, given) == generate(LLM(alone, plan="tree-3-2-1"), given)
    assert llm._runner.num_shared_passes > 3
    check_caches(led)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["chain-3", "dynamic-10-3-3"])
def test_requests_that_give_way_to_others(alone: Engine, led: Engine, plan: str) -> None:
    """Rows are given up, and computed again."""
    given = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True) for _ in range(4)]
    llm = LLM(led, plan=plan)
    assert generate(llm, given) == generate(LLM(alone, plan=plan), given)
    assert llm.get_metrics().num_preemptions > 0
    check_caches(led)


def test_prefixes_that_are_shared(alone: Engine, led: Engine) -> None:
    prompt = models.prompts()[-1]
    given = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for engine in (alone, led):
        llm = LLM(engine, plan="tree-3-2-1")
        first = llm.generate([prompt], given)
        again = llm.generate([[*prompt, 1, 2], [*prompt, 3]], given)
        assert llm.get_metrics().num_cached_tokens >= 64
        found.append([o.outputs[0].token_ids for o in first + again])
    assert found[0] == found[1]
    check_caches(led)


@pytest.mark.slow
def test_compiled_programs(cpu_path: Path, load_led) -> None:
    alone, led = Engine.load(cpu_path), load_led(cpu_path)
    assert led.backend == "cpu"
    assert led.operators is torch.ops.specc_cpu
    for plan in PLAN_IDS:
        for options in (GREEDY, COUPLED, MSS):
            given = params(4, **rule_of(plan, options))
            found = generate(LLM(led, plan=plan), given)
            assert found == generate(LLM(alone, plan=plan), given), (plan, options)
            check_caches(led)


def test_a_service_over_a_led_engine(alone: Engine, led: Engine) -> None:
    """What servers call: the same tokens, and nothing of it knows of the ranks."""
    prompt = models.prompts()[2]
    given = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (wanted,) = LLM(alone, plan="tree-3-2-1").generate([prompt], given)
    updates: list[Any] = []
    with Service(EngineCore(led, "tree-3-2-1")) as service:
        service.submit(prompt, given, updates.append)
        assert service.drain(60.0)
    assert [t for update in updates for t in update.token_ids] == wanted.outputs[0].token_ids
    assert updates[-1].is_last


def test_a_hook_that_fails_leaves_the_ranks_alike(alone: Engine, led: Engine) -> None:
    """The step is done again from what was committed before, on all ranks."""
    given = params(2)
    llm = LLM(led, plan="tree-3-2-1")
    calls = 0

    def fail_once(values: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("of a hook")

    led.steps["tree-3-2-1"].before_accept = fail_once
    try:
        with pytest.raises(ValueError, match="of a hook"):
            generate(llm, given)
    finally:
        led.steps["tree-3-2-1"].before_accept = None
    assert generate(llm, given) == generate(LLM(alone, plan="tree-3-2-1"), given)
    check_caches(led)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_ranks_end_with_the_engine(engine_path: Path) -> None:
    engine = Engine.load(engine_path, ranks=OPTIONS)
    pids = engine.target.leader.pids
    assert pids
    assert not any(map(is_gone, pids))
    begin_s = time.monotonic()
    llm = LLM(engine)
    del engine
    llm.close()
    gc.collect()
    assert all(map(is_gone, pids))
    assert time.monotonic() - begin_s < 8


@pytest.mark.slow
def test_ranks_outlive_the_thread_that_loads_the_engine(engine_path: Path) -> None:
    """Linux counts the thread that starts a process as its parent."""
    loaded: list[Engine] = []
    thread = threading.Thread(target=lambda: loaded.append(Engine.load(engine_path, ranks=OPTIONS)))
    thread.start()
    thread.join()
    (engine,) = loaded
    time.sleep(0.3)
    assert generate(LLM(engine, plan="chain-3"), params(1))
    check_caches(engine)
    pids = engine.target.leader.pids
    assert not any(map(is_gone, pids))
    engine.target.leader.close()
    assert all(map(is_gone, pids))


def test_a_child_that_is_forked_ends_no_ranks(led: Engine) -> None:
    pid = os.fork()
    if pid == 0:
        led.target.leader.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not any(map(is_gone, led.target.leader.pids))
    check_caches(led)


@pytest.mark.slow
def test_drafts_and_history_are_of_rank_0(led: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass that is ordered is of the target."""
    ordered: list[int] = []
    leader = led.target.leader
    run_pass: Callable[..., Any] = leader.run_pass
    monkeypatch.setattr(
        leader, "run_pass", lambda number, *rest: ordered.append(number) or run_pass(number, *rest)
    )
    generate(LLM(led, plan="tree-3-2-1"), params(2))
    assert {*ordered} == {0}
    assert len(ordered) > 4
