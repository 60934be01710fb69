"""The demo pair, which was trained, cut for ranks and compiled: the same tokens as the whole one.

In float32: a trained model's tokens are certain, so that sums in another order change none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines
from tests.runtime.ranks.conftest import OPTIONS
from tests.runtime.ranks.test_led_engine import KINDS

pytestmark = pytest.mark.slow

PAIR = Path(__file__).resolve().parents[3] / "examples" / "pair"
PLANS = tuple(SpecPlan.from_widths(widths) for widths in ((1, 1, 1, 1), (3, 2, 1)))
PLAN_IDS = ["off", *(plan.name for plan in PLANS)]
NUM_TOKENS = 40
# of log probabilities, whose sums are in another order
TOLERANCE = 1e-3
# less than four of the longest requests need
ROWS = 416


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pair")


def load(root: Path, num_ranks: int) -> Engine:
    path = root / str(num_ranks)
    config = CompileConfig(
        plans=PLANS, max_batch_size=4, max_seq_len=256, dtype="float32", backend="cpu",
        probe=False, tensor_parallel_size=num_ranks,
    )  # fmt: skip
    engines.build(PAIR / "target", PAIR / "draft", path, config)
    options = {} if num_ranks == 1 else {"ranks": replace(OPTIONS, num_ranks=num_ranks)}
    return Engine.load(path, kv_cache_tokens=ROWS, **options)


@pytest.fixture(scope="module")
def whole(root: Path) -> Engine:
    return load(root, 1)


@pytest.fixture(scope="module", params=[2, 4], ids=["tp-2", "tp-4"])
def cut(request: pytest.FixtureRequest, root: Path) -> Iterator[Engine]:
    engine = load(root, request.param)
    yield engine
    engine.target.leader.close()  # type: ignore[attr-defined]


def prompts(count: int) -> list[str]:
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


def outputs(llm: LLM, given: list[SamplingParams]) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(prompts(len(given)), given)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLAN_IDS)
def test_tokens(whole: Engine, cut: Engine, plan: str, kind: str) -> None:
    given = [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            seed=50 + i,
            ignore_eos=kind != "grammar",
            **{"temperature": 0, **KINDS[kind]},
        )
        for i in range(3)
    ]
    llm = LLM(cut, plan=plan)
    wanted, found = outputs(LLM(whole, plan=plan), given), outputs(llm, given)
    assert [item.token_ids for item in found] == [item.token_ids for item in wanted]
    for mine, other in zip(found, wanted, strict=True):
        for row, expected in zip(mine.logprobs or [], other.logprobs or [], strict=True):
            values = {token: entry.logprob for token, entry in expected.items()}
            assert {token: entry.logprob for token, entry in row.items()} == pytest.approx(
                values, abs=TOLERANCE
            )
    if plan != "off" and kind == "greedy":
        assert llm.get_metrics().mean_acceptance_length > 1.5


def test_requests_give_way_and_share_prefixes(whole: Engine, cut: Engine) -> None:
    given = [SamplingParams(temperature=0, max_tokens=150, ignore_eos=True) for _ in range(4)]
    llm = LLM(cut, plan="tree-3-2-1")
    found, wanted = outputs(llm, given), outputs(LLM(whole, plan="tree-3-2-1"), given)
    assert [item.token_ids for item in found] == [item.token_ids for item in wanted]
    assert llm.get_metrics().num_preemptions > 0
    first = prompts(1)[0]
    texts = []
    for engine in (whole, cut):
        llm = LLM(engine, plan="tree-3-2-1")
        llm.generate([first], SamplingParams(temperature=0, max_tokens=8))
        again = llm.generate([f"{first}a", f"{first}b"], given[:2])
        assert llm.get_metrics().num_cached_tokens > 0
        texts.append([output.outputs[0].token_ids for output in again])
    assert texts[0] == texts[1]
