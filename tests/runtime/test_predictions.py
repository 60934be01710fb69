"""Predicted outputs through whole engines: what comes out is the target's own, in fewer steps."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from specc.errors import RequestError
from specc.runtime.core import EngineCore
from specc.runtime.drafters.prediction import Prediction
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import RequestOutput
from specc.runtime.policies.base import FixedPolicy
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan
from tests.runtime.conftest import VOCAB, build_engine

SUFFIX = SpecPlan.from_widths((1,) * 4, ("suffix",))
DEEP = SpecPlan.from_widths((1,) * 7, ("suffix",))
MERGED = SpecPlan.from_widths((1, 1, 1), ("draft_0", "suffix"), "merge")
CHAIN = SpecPlan.from_widths((1, 1, 1))
# by default: off, the host's plan, a draft model, both together
ENGINES = {
    "off": [SUFFIX, OFF],
    "suffix": [OFF, SUFFIX],
    "two": [SUFFIX, DEEP, OFF],
    "draft": [SUFFIX, OFF, CHAIN],
    "merged": [OFF, MERGED],
}
COUNT = 40
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
PROMPT = [*range(3, 15)]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return build_engine(plans=ENGINES[request.param])


def ask(engine: Engine, params: SamplingParams = GREEDY, **options: Any) -> RequestOutput:
    # nothing of the requests before it
    with LLM(engine, shares_prefixes=False, shares_outputs=False) as llm:
        return llm.generate([PROMPT], params, **options)[0]


def plain(engine: Engine, params: SamplingParams = GREEDY) -> list[int]:
    return ask(engine, dataclasses.replace(params, speculative=False)).outputs[0].token_ids


def predictions(output: list[int]) -> dict[str, list[int]]:
    dice = random.Random(0)
    edit = [t for i, t in enumerate(output) if i not in (11, 12)]
    edit[20:20] = [1, 2, 3]
    return {
        "same": output,
        "edited": edit,
        "late": output[9:],
        "wrong": dice.choices(range(VOCAB), k=COUNT),
        "empty": [],
        "short": output[:3],
    }


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.7, "seed": 6, "rule": "delta"}],
    ids=["greedy", "coupled", "delta"],
)
def test_outputs_are_those_of_the_target(engine: Engine, options: dict[str, Any]) -> None:
    params = dataclasses.replace(GREEDY, **options)
    want = plain(engine, params)
    if params.is_greedy:
        assert want == engine.target.greedy(PROMPT, COUNT)
    for name, predicted in predictions(want).items():
        found = ask(engine, params, prediction=predicted)
        if params.rule != "delta":
            # which draws with a draft's tokens in mind; its distribution is the target's own
            assert found.outputs[0].token_ids == want, name


def test_a_right_prediction_takes_as_few_steps_as_there_can_be(engine: Engine) -> None:
    want = plain(engine)
    depth = max(x.max_depth for x in engine.plans.values() if x.reads_proposals)
    found = ask(engine, prediction=want).metrics
    # the first token is the prompt's
    assert found.num_steps == -(-(COUNT - 1) // (depth + 1))
    assert found.num_prediction_accepted_tokens == COUNT - 1 - found.num_steps
    assert found.num_prediction_draft_tokens == found.num_prediction_accepted_tokens
    assert (found.accepted_prediction_tokens, found.rejected_prediction_tokens) == (COUNT, 0)


def test_after_an_edit_it_goes_on(engine: Engine) -> None:
    want = plain(engine)
    predicted = [*want[:10], 1, 2, 3, *want[12:]]
    none, found = ask(engine).metrics, ask(engine, prediction=predicted).metrics
    # a tree of a draft model is right often enough as it is
    has_models = any(plan.combine for plan in engine.plans.values())
    assert found.num_steps < none.num_steps - (0 if has_models else 10)
    # two tokens are another two or three, and two have to come before the place is known
    assert found.accepted_prediction_tokens == COUNT - 4
    assert found.rejected_prediction_tokens == len(predicted) - (COUNT - 4)


def test_figures_follow_from_the_tokens_alone(engine: Engine) -> None:
    """Whatever the steps were: `Prediction.coverage` has an oracle of its own."""
    want = plain(engine)
    for predicted in predictions(want).values():
        accepted, rejected = Prediction(predicted).coverage(want)
        stats = ask(engine, prediction=predicted).metrics
        found = stats.accepted_prediction_tokens, stats.rejected_prediction_tokens
        assert found == (accepted, rejected)


def test_a_prediction_is_of_one_request_alone(engine: Engine) -> None:
    """The others run what the policy has chosen, and no prediction is another's."""
    with LLM(engine, shares_prefixes=False, shares_outputs=False) as llm:
        prompts = [[*range(3 + i, 15 + i)] for i in range(3)]
        wants = [engine.target.greedy(prompt, COUNT) for prompt in prompts]
        alone = llm.generate([prompts[1]], GREEDY)[0].metrics
        given = [wants[0], None, wants[1]]
        found = llm.generate(prompts, GREEDY, prediction=given)
    assert [x.outputs[0].token_ids for x in found] == wants
    first, second, third = (x.metrics for x in found)
    assert first.accepted_prediction_tokens == COUNT
    # nothing but its own is proposed
    assert first.num_prediction_accepted_tokens == first.num_prediction_draft_tokens > COUNT // 2
    assert second.num_prediction_draft_tokens == second.rejected_prediction_tokens == 0
    assert second.num_spec_steps == alone.num_spec_steps
    accepted, rejected = Prediction(wants[1]).coverage(wants[2])
    assert (third.accepted_prediction_tokens, third.rejected_prediction_tokens) == (
        accepted, rejected,
    )  # fmt: skip


def test_counters_of_the_engine_are_sums(engine: Engine) -> None:
    want = plain(engine)
    total = SpecStats()
    with LLM(engine, shares_prefixes=False, shares_outputs=False) as llm:
        for predicted in predictions(want).values():
            total.merge(llm.generate([PROMPT], GREEDY, prediction=predicted)[0].metrics)
        engines = llm.get_metrics()
    names = [name for name in vars(SpecStats()) if "prediction" in name]
    assert len(names) == 4
    for name in names:
        assert getattr(engines, name) == getattr(total, name) > 0, name


def test_tokens_after_the_end_are_no_figures() -> None:
    """As of any draft: what the target would have accepted after an end says nothing."""
    engine = build_engine(plans=[OFF, SUFFIX])
    want = plain(engine)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    stats = ask(engine, params, prediction=[want[0], want[1], want[2], want[3], want[4]]).metrics
    assert stats.num_prediction_accepted_tokens == stats.num_accepted_tokens == 1
    assert stats.num_prediction_draft_tokens == 1
    assert (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens) == (3, 2)


class Told(FixedPolicy):
    """Remembers what it was told."""

    def __init__(self, plan: str) -> None:
        super().__init__(plan)
        self.steps: list[int] = []
        self.batches = 0

    def observe(self, group: Any, step: Any) -> None:
        self.steps += step.num_accepted

    def observe_batch(self, batch: Any, result: Any) -> None:
        self.batches += 1


@pytest.mark.parametrize("predicts", [True, False])
def test_policies_learn_nothing_of_predictions(predicts: bool) -> None:
    engine = build_engine(plans=[OFF, SUFFIX])
    policy = Told(SUFFIX.name)
    want = plain(engine)
    core = EngineCore(engine, policy=policy, shares_outputs=False)
    request = core.requests.make(PROMPT, GREEDY, prediction=want if predicts else None)
    core.scheduler.add(request)
    while core.scheduler.has_work:
        core.advance()
    # the pass over the prompt alone, where each step was the prediction's
    assert (policy.batches == 1) is predicts
    assert (policy.steps == []) is predicts


def test_it_survives_preemption(engine: Engine) -> None:
    """Rows go, where the output is in the prediction stays."""
    want = plain(engine)
    predicted = predictions(want)["edited"]
    metrics = []
    for preempts in (False, True):
        core = EngineCore(engine, shares_outputs=False, shares_prefixes=False)
        request = core.requests.make(PROMPT, GREEDY, prediction=predicted)
        core.scheduler.add(request)
        has_waited = False
        while core.scheduler.has_work:
            core.advance()
            if preempts and not has_waited and request.num_output_tokens > 12:
                core.in_flight.settle()
                core.scheduler._preempt(request)
                has_waited = True
        assert request.output_token_ids == want
        metrics.append(request.stats)
    assert metrics[1].num_preemptions == 1
    names = ("num_steps", "num_prediction_accepted_tokens", "accepted_prediction_tokens")
    assert [getattr(metrics[0], x) for x in names] == [getattr(metrics[1], x) for x in names]


def test_several_outputs_follow_the_same_prediction_each(engine: Engine) -> None:
    params = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=COUNT, ignore_eos=True)
    want = [
        x.token_ids for x in ask(engine, dataclasses.replace(params, speculative=False)).outputs
    ]
    found = ask(engine, params, prediction=want[1])
    assert [x.token_ids for x in found.outputs] == want
    each = [Prediction(want[1]).coverage(output) for output in want]
    assert found.metrics.accepted_prediction_tokens == sum(x.accepted for x in each)


def test_text_and_the_form_of_openai() -> None:
    engine = build_engine(plans=[SUFFIX, OFF])
    want = plain(engine)
    text = engine.tokenizer.decode(want)
    assert engine.tokenizer.encode(text).ids == want
    parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    for prediction in (
        text, want, tuple(want), {"type": "content", "content": text},
        {"type": "content", "content": parts}, [text],
    ):  # fmt: skip
        assert ask(engine, prediction=prediction).metrics.accepted_prediction_tokens == COUNT


def test_what_is_wrong_is_named() -> None:
    engine = build_engine(plans=[SUFFIX, OFF])
    for prediction, found in (
        (5, "prediction of type int"),
        ({"type": "text", "content": "a"}, "prediction of type 'text'"),
        ({"type": "content", "content": 5}, "a part that is no text"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "a part that is no text"),
        ([VOCAB], f"token id {VOCAB}"),
        ([1] * 97, "prediction of 97 tokens"),
        ("a" * 10_000, "prediction of 10000 bytes"),
        (["a", "b"], "1 prompts and 2 predictions"),
    ):
        with pytest.raises(RequestError, match=found):
            ask(engine, prediction=prediction)
    with pytest.raises(RequestError, match="speculative=False"):
        ask(engine, dataclasses.replace(GREEDY, speculative=False), prediction="a")
    for plans in ([OFF], [OFF, CHAIN], [SpecPlan.from_widths((1, 1), ("lookup-3",)), OFF]):
        with pytest.raises(RequestError, match="--draft suffix"):
            ask(build_engine(plans=plans), prediction="a")
