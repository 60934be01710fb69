"""Requests that are sampled: seeds, rules, filters, penalties and log probabilities, end to end.

Small models on eager graphs; distributions of whole joint outputs are those of
tests/kernels/test_distribution.py, and of the demo pair in test_sampling_pair.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.errors import RequestError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from tests import drafts, models
from tests.drafts import PLAN_IDS, PLAN_PARAMS
from tests.lossless import Zoo
from tests.tiers import every

NAME = "qwen3"
NUM_TOKENS = 32
# of each request of the batch, besides the seed
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9, "rule": "delta"},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.05, "frequency_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1, "top_p": 0.95},
)


@pytest.fixture(scope="module")
def engine(zoo: Zoo) -> Engine:
    return drafts.engine(zoo, NAME, "eager")


def generate(engine: Engine, plan: str, params: list[SamplingParams]) -> list[list[int]]:
    prompts = [list(prompt) for prompt in models.prompts()[: len(params)]]
    return [o.outputs[0].token_ids for o in LLM(engine, plan=plan).generate(prompts, params)]


def requests(**changes: Any) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            seed=100 + i,
            **{"temperature": 0, **options},
            **changes,
        )
        for i, options in enumerate(OPTIONS)
    ]


@pytest.fixture(scope="module")
def plainly(engine: Engine) -> list[list[int]]:
    """The tokens of the requests without speculation."""
    tokens = generate(engine, "off", requests())
    assert len(set(map(tuple, tokens))) == len(tokens)
    return tokens


@pytest.mark.default("tree-n10-d4-e3d3")
@pytest.mark.parametrize("plan", every(4, PLAN_PARAMS))
def test_a_seed_gives_the_same_tokens_with_any_plan(
    engine: Engine, plainly: list[list[int]], plan: str
) -> None:
    assert generate(engine, plan, requests()) == plainly


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_alone_and_in_another_place(
    engine: Engine, plainly: list[list[int]]
) -> None:
    wanted = plainly
    prompts = [list(prompt) for prompt in models.prompts()]
    llm = LLM(engine, plan=PLAN_IDS[2])
    for prompt, params, tokens in zip(prompts, requests(), wanted, strict=True):
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == tokens
    turned = llm.generate(prompts[::-1], requests()[::-1])
    assert [output.outputs[0].token_ids for output in turned[::-1]] == wanted


@pytest.mark.slow
def test_other_seeds_give_other_tokens(engine: Engine) -> None:
    def first(seed: int | None) -> list[int]:
        params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, seed=seed)
        return generate(engine, PLAN_IDS[0], [params])[0]

    assert first(3) == first(3)
    assert len({tuple(first(seed)) for seed in (0, 1, 2, (1 << 63) - 1)}) == 4
    assert first(None) != first(None)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [pytest.param("mss", marks=pytest.mark.slow), "swor"])
def test_rules_that_draw_repeat_with_their_seed_and_plan(engine: Engine, rule: str) -> None:
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=i, rule=rule, temperature=0.8)
        for i in range(3)
    ]
    plan = PLAN_IDS[5]
    assert generate(engine, plan, params) == generate(engine, plan, params)
    # rejected proposals are replaced by residual samples: mostly not what the seed gives plainly
    assert generate(engine, plan, params) != generate(engine, "off", params)


@pytest.mark.slow
def test_greedy_requests_are_greedy_among_sampled_ones(engine: Engine, zoo: Zoo) -> None:
    params = [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            temperature=0.0 if i % 2 else 1.0,
            rule=(None, None, "mss", "swor", "delta")[i],
        )
        for i in range(5)
    ]
    found = generate(engine, PLAN_IDS[5], params)
    for i in (1, 3):
        prompt = models.prompts()[i]
        assert found[i] == zoo.reference(NAME, prompt, models.NUM_TOKENS).tokens[:NUM_TOKENS]


@pytest.mark.parametrize("plan", every(2, ["off", *PLAN_IDS[2::4]], 1))
def test_logprobs_are_the_models_own(engine: Engine, zoo: Zoo, plan: str) -> None:
    model = zoo.reference_model(NAME)
    counts = (None, 0, 1, 5, 20)
    params = [
        SamplingParams(
            max_tokens=12, ignore_eos=True, temperature=0.8, seed=i, logprobs=count, top_k=30
        )
        for i, count in enumerate(counts)
    ]
    prompts = [list(prompt) for prompt in models.prompts()]
    outputs = LLM(engine, plan=plan).generate(prompts, params)
    assert outputs[0].outputs[0].logprobs is None
    for prompt, output, count in zip(prompts[1:], outputs[1:], counts[1:], strict=True):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        assert count is not None
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.token_ids])).logits[0]
        rows = logits.float().log_softmax(dim=-1)[len(prompt) - 1 : -1]
        total = 0.0
        for token, row, entries in zip(
            completion.token_ids, rows, completion.logprobs, strict=True
        ):
            best = row.topk(count).indices.tolist()
            assert set(entries) == {token, *best}
            for entry, found in entries.items():
                assert found.logprob == pytest.approx(float(row[entry]), abs=2e-5)
                assert found.rank == int((row > row[entry]).sum()) + 1
            total += float(row[token])
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_streams_carry_the_logprobs_of_each_token(engine: Engine) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2, temperature=0.5, seed=1)
    prompt = list(models.prompts()[1])
    llm = LLM(engine, plan=PLAN_IDS[0])
    whole = llm.generate([prompt], params)[0].outputs[0]
    events = list(llm.stream([prompt], params))
    assert [event.token_id for event in events] == whole.token_ids
    assert [event.logprobs for event in events] == whole.logprobs


@pytest.mark.parametrize("rule", ["mss", "swor"])
def test_a_rule_that_is_not_lossless_for_the_trees_is_refused(engine: Engine, rule: str) -> None:
    plan = next(name for name in PLAN_IDS if name.startswith("dynamic"))
    params = SamplingParams(temperature=0.7, rule=rule)
    with pytest.raises(RequestError, match=f"rule='{rule}'; the trees of plan {plan}") as error:
        LLM(engine, plan=plan).generate([[1, 2, 3]], params)
    assert "coupled, delta" in error.value.needed
    # greedy requests need no rule, plain ones no tree
    for harmless in (
        SamplingParams(temperature=0, max_tokens=4, rule=rule),
        SamplingParams(max_tokens=4, temperature=0.7, rule=rule, speculative=False),
    ):
        LLM(engine, plan=plan).generate([[1, 2, 3]], harmless)


def test_a_refused_request_leaves_the_others_alone(engine: Engine) -> None:
    llm = LLM(engine, plan="off")
    good = SamplingParams(max_tokens=8, temperature=0.7, seed=4, ignore_eos=True)
    wanted = llm.generate([[1, 2, 3]], good)[0].outputs[0].token_ids
    stream = llm.stream([[1, 2, 3]], good)
    tokens = [next(stream).token_id]
    with pytest.raises(RequestError, match="top_p=0"):
        llm.generate([[1, 2]], SamplingParams(temperature=0, top_p=0))
    assert tokens + [event.token_id for event in stream] == wanted
