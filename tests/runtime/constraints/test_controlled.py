"""Controlled outputs of whole engines: those of plain decoding by transformers, by every plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specc.errors import RequestError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import CompletionOutput
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.speculation.plans import OFF
from tests.drafts import PLAN_IDS, PLAN_PARAMS, PLANS, in_tiles
from tests.runtime.backends.captured.captured_engine import capture_steps
from tests.runtime.conftest import EOS, VOCAB, TinyModel, build_engine, text_tokenizer
from tests.tiers import every

NUM_TOKENS = 24
MODEL = TinyModel()
LETTER_OF = {i: letter for letter, i in text_tokenizer().get_vocab().items()}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(plans=[OFF, *PLANS], max_num_seqs=5, eos=(EOS,))


@torch.inference_mode()
def decode(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Greedy decoding, one whole pass a token, every row of logits processed on the way."""
    controls = LogitsProcessorList()
    if params.logit_bias:
        bias = {(token,): value for token, value in params.logit_bias.items()}
        controls.append(SequenceBiasLogitsProcessor(bias))
    if params.allowed_token_ids:
        banned = [i for i in range(VOCAB) if i not in params.allowed_token_ids]
        controls.append(SuppressTokensLogitsProcessor(banned, device="cpu"))
    ends = [EOS, *params.stop_token_ids]
    if params.min_tokens:
        controls.append(MinNewTokensLengthLogitsProcessor(0, params.min_tokens, ends, device="cpu"))
    if params.bad_words:
        id_of = {letter: i for i, letter in LETTER_OF.items()}
        words = [[id_of[letter] for letter in word] for word in params.bad_words]
        controls.append(NoBadWordsLogitsProcessor(words))
    penalty = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    output: list[int] = []
    while len(output) < params.max_tokens and not set(output[-1:]) & set(ends):
        ids = torch.tensor([[*prompt, *output]])
        row = MODEL.dense_logits(ids[0].tolist())[None]
        # what is bad is so for an output, whatever the prompt ends with; penalties come last
        row = penalty(ids, controls(ids[:, len(prompt) :], row))
        output.append(int(row.argmax()))
    return output


def word(tokens: Sequence[int]) -> str:
    return "".join(LETTER_OF[token] for token in tokens)


@pytest.fixture(scope="module")
def requests(prompts: list[list[int]]) -> list[tuple[SamplingParams, list[int]]]:
    """For each prompt, controls that get in the way of its output, and the output under them."""
    # all but the space, which words do not begin with
    letters = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, allowed_token_ids=[*range(59), EOS]
    )
    own = [decode(prompt, letters) for prompt in prompts[:5]]
    changes: list[dict[str, Any]] = [
        {"allowed_token_ids": None, "logit_bias": {own[0][2]: -100.0, own[0][5]: 1.5, EOS: -2.0}},
        {"allowed_token_ids": range(20, 59)},
        {"bad_words": [word(own[2][:1]), word(own[2][4:6]), word(own[2][8:11]), "xyz"]},
        {"min_tokens": 14, "stop_token_ids": own[3][1:4]},
        {
            "logit_bias": {own[4][3]: -3.0, EOS: 50.0},
            "bad_words": [word(own[4][1:3]), word(own[4][6:8]), word(own[4][12:15])],
            "min_tokens": 17,
            "repetition_penalty": 1.3,
        },
    ]
    found = []
    for prompt, free, change in zip(prompts, own, changes, strict=False):
        if change.get("allowed_token_ids"):
            change["allowed_token_ids"] = list(change["allowed_token_ids"])
        params = replace(letters, **change)
        wanted = decode(prompt, params)
        assert wanted != free
        found.append((params, wanted))
    # the last two end by a token, after their least length
    assert [len(wanted) for _, wanted in found] == [24, 24, 24, 22, 18]
    return found


def generate(
    engine: Engine, plan: str, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[CompletionOutput]:
    count = len(params)
    outputs = LLM(engine, plan=plan).generate(list(prompts[:count]), list(params))
    return [output.outputs[0] for output in outputs]


@pytest.mark.default("off", "vote-0+1-chain-4")
@pytest.mark.parametrize("plan", every(2, ["off", *PLAN_PARAMS]))
def test_greedy_outputs_are_those_of_plain_decoding(engine, prompts, requests, plan) -> None:
    outputs = generate(engine, plan, prompts, [params for params, _ in requests])
    assert [output.token_ids for output in outputs] == [wanted for _, wanted in requests]
    assert engine.steps[plan].before_accept is None


@pytest.mark.parametrize("plan", every(3, (PLAN_IDS[0], PLAN_IDS[2], PLAN_IDS[5]), 1))
def test_drafts_are_accepted_under_controls(engine, prompts, requests, plan) -> None:
    """Otherwise the equality above would compare plain decoding with itself."""
    for i, (params, _) in enumerate(requests):
        llm = LLM(engine, plan=plan)
        llm.generate(prompts[i], params)
        assert llm.get_metrics().num_accepted_tokens > 2


@pytest.fixture(scope="module")
def seeded(engine, prompts, requests) -> tuple[list[SamplingParams], list[CompletionOutput]]:
    """The controls with seeds, and what plain decoding makes of them."""
    sampled = [
        replace(params, temperature=0.8, seed=7, top_k=(0, 9)[i % 2], frequency_penalty=0.3)
        for i, (params, _) in enumerate(requests)
    ]
    wanted = generate(engine, "off", prompts, sampled)
    assert [o.token_ids for o in wanted] != [tokens for _, tokens in requests]
    return sampled, wanted


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(3, PLAN_PARAMS, 2))
def test_a_seed_gives_the_same_tokens_with_any_plan(engine, prompts, seeded, plan) -> None:
    sampled, wanted = seeded
    assert generate(engine, plan, prompts, sampled) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("rule", every(3, ["delta", "mss", "swor"], 1))
def test_every_rule_keeps_to_the_controls(engine, prompts, requests, rule) -> None:
    for seed in range(2):
        sampled = [replace(params, temperature=1.2, seed=seed, rule=rule) for params, _ in requests]
        for output, params in zip(
            generate(engine, PLAN_IDS[0], prompts, sampled), sampled, strict=True
        ):
            assert output.finish_reason in ("stop", "length")
            assert set(output.token_ids) <= set(params.allowed_token_ids or range(VOCAB))
            assert not any(bad in word(output.token_ids) for bad in params.bad_words or ())
            ends = {EOS, *params.stop_token_ids}
            assert not ends & set(output.token_ids[: params.min_tokens])


@pytest.mark.slow
def test_others_in_the_batch_are_left_alone(engine, prompts, requests, greedy) -> None:
    free = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    params = [free, requests[1][0], free, free, requests[4][0]]
    for plan in ("off", PLAN_IDS[0], PLAN_IDS[3]):
        outputs = generate(engine, plan, prompts, params)
        for i in (0, 2, 3):
            assert outputs[i].token_ids == greedy(prompts[i], NUM_TOKENS)
        assert outputs[1].token_ids == requests[1][1]
        assert outputs[4].token_ids == requests[4][1]


@pytest.mark.slow
def test_a_preempted_request_goes_on_under_its_controls(engine, prompts, requests) -> None:
    """Its rows are computed again; what its output is does not change."""
    crowded = build_engine(plans=[OFF, *PLANS], max_num_seqs=5, eos=(EOS,))
    crowded.cache.allocator = type(engine.cache.allocator)(20)
    crowded.cache.shape = replace(crowded.cache.shape, pool_blocks=20)
    for plan in ("off", PLAN_IDS[0]):
        llm = LLM(crowded, plan=plan)
        outputs = llm.generate(prompts[:5], [params for params, _ in requests])
        assert llm.get_metrics().num_preemptions > 0
        assert [o.outputs[0].token_ids for o in outputs] == [wanted for _, wanted in requests]


def test_trees_in_tiles_decode_plainly(engine, prompts, requests) -> None:
    with in_tiles(engine, 2):
        llm = LLM(engine, plan=PLAN_IDS[0])
        outputs = llm.generate(prompts[:5], [params for params, _ in requests])
        assert llm.get_metrics().num_spec_steps == 0
    assert [o.outputs[0].token_ids for o in outputs] == [wanted for _, wanted in requests]


@pytest.mark.parametrize("plan", ["off", PLAN_IDS[0], PLAN_IDS[2]])
def test_logprobs_are_the_models_own(engine, prompts, requests, plan) -> None:
    """From before all controls: also of the first token, and of tokens that are very unlikely."""
    outputs = generate(
        engine, plan, prompts, [replace(params, logprobs=3) for params, _ in requests]
    )
    for prompt, output, (_, wanted) in zip(prompts, outputs, requests, strict=False):
        assert output.token_ids == wanted
        for i, found in enumerate(output.logprobs):
            own = MODEL.dense_logits([*prompt, *wanted[:i]]).log_softmax(0)
            assert found[wanted[i]].rank == 1 + int((own > own[wanted[i]]).sum())
            for token, entry in found.items():
                assert entry.logprob == pytest.approx(float(own[token]), abs=1e-4)


@pytest.mark.slow
def test_a_stop_string_ends_nothing_before_the_least_length(engine, prompts, requests) -> None:
    """One that begins before and ends after it does."""
    free = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (whole,) = generate(engine, "off", prompts, [free])
    text = whole.text
    assert len(text) == NUM_TOKENS
    at = next(i for i in range(3, 20) if text.find(text[i : i + 3]) == i)
    stop = text[at : at + 3]
    for plan in ("off", PLAN_IDS[0]):
        for length in (0, at + 2, at + 3, NUM_TOKENS):
            (output,) = generate(
                engine, plan, prompts, [replace(free, stop=[stop], min_tokens=length)]
            )
            if length < at + 3:
                assert (output.text, output.stop_reason) == (text[:at], stop)
            elif text.find(stop, at + 1) < 0:
                assert (output.text, output.finish_reason) == (text, "length")


@pytest.mark.default("1.0-off", "1.0-tree-n10-d4-e3d3")
@pytest.mark.parametrize("plan", ["off", PLAN_IDS[0], PLAN_IDS[2], PLAN_IDS[9]])
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_an_output_that_nothing_can_follow_ends_with_an_error(
    engine, prompts, plan, temperature
) -> None:
    """Alone: no token of it is forbidden, and others in the batch go on."""
    stuck = SamplingParams(
        max_tokens=NUM_TOKENS,
        allowed_token_ids=[0, 1],
        bad_words=["aaaa", "ba", "bb", "aab"],
        temperature=temperature,
        seed=1,
    )
    free = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=1)
    bad, good = generate(engine, plan, prompts, [stuck, free])
    assert bad.finish_reason == "error"
    assert bad.stop_reason == "allowed_token_ids and bad_words leave no token that can follow"
    # the only outputs that end there
    assert bad.text in ("b", "ab")
    assert len(bad.token_ids) == len(bad.text)
    (_, alone) = generate(engine, "off", prompts, [free, free])
    assert good == alone


def test_grammars_and_controls_go_together(tiny_engine) -> None:
    shape = StructuredOutputsParams(regex="[a-f]{3,12}")
    for plan in ("off", "tree-2-1", "chain-3"):
        llm = LLM(tiny_engine, plan=plan)
        for seed, options in enumerate(({}, {"temperature": 1.2})):
            params = SamplingParams(
                max_tokens=40,
                seed=seed,
                structured_outputs=shape,
                bad_words=["a", "bc", "ff"],
                min_tokens=7,
                **{"temperature": 0, **options},
            )
            output = llm.generate("hello", params)[0].outputs[0]
            assert output.finish_reason == "stop"
            assert 7 <= len(output.text) <= 12
            assert set(output.text) <= set("bcdef")
            assert "bc" not in output.text
            assert "ff" not in output.text


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_a_grammar_that_ends_before_the_least_length_is_an_error(tiny_engine, temperature) -> None:
    for plan in ("off", "tree-2-1"):
        params = SamplingParams(
            max_tokens=20,
            min_tokens=5,
            temperature=temperature,
            seed=2,
            structured_outputs=StructuredOutputsParams(regex="ab?"),
        )
        output = LLM(tiny_engine, plan=plan).generate("hello", params)[0].outputs[0]
        assert output.finish_reason == "error"
        assert output.stop_reason == (
            "min_tokens and structured_outputs leave no token that can follow"
        )
        assert output.text == "ab"


# the default tier has them in backends/captured/test_extended_step.py
@pytest.mark.slow
def test_captured_steps_run_with_the_controls(tiny_engine: Path) -> None:
    """A batch with them is not queued; others are, before and after, and once they are over."""
    engine, other = Engine.load(tiny_engine), Engine.load(tiny_engine)
    capture_steps(other, tiny_engine)
    options: list[dict[str, Any]] = [
        {"logit_bias": {66: 3.0}, "bad_words": ["ab", "c"]},
        {"min_tokens": 9, "stop_token_ids": [*range(60, 120)]},
        {"allowed_token_ids": [*range(64, 90)], "logprobs": 2},
    ]
    texts = ["hello", "ab", "abab"]
    for plan in ("tree-2-1", "off", "chain-3"):
        params = [SamplingParams(max_tokens=20, **{"temperature": 0, **each}) for each in options]
        free = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * 3
        for each in (params, free, params[1:2], params):
            found, wanted = (
                [o.outputs[0] for o in LLM(one, plan).generate(texts[: len(each)], each)]
                for one in (other, engine)
            )
            assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
            for one_, other_ in zip(found, wanted, strict=True):
                for got, own in zip(one_.logprobs or (), other_.logprobs or (), strict=True):
                    assert {token: e.logprob for token, e in got.items()} == pytest.approx(
                        {token: e.logprob for token, e in own.items()}, abs=1e-4
                    )


@pytest.mark.parametrize(
    "options",
    [
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [VOCAB]},
        {"stop_token_ids": [1 << 70]},
        {"logit_bias": {VOCAB: 1.0}},
        {"allowed_token_ids": [0, VOCAB]},
        {"bad_words": ["é"]},
        {"allowed_token_ids": [EOS], "min_tokens": 1},
    ],
    ids=repr,
)
def test_what_the_engine_has_not_got_is_refused_before_any_work(engine, options) -> None:
    llm = LLM(engine, plan="off")
    with pytest.raises(RequestError) as caught:
        llm.generate([[1, 2]], SamplingParams(**{"temperature": 0, **options}))
    assert all(name in caught.value.found for name in options)
    assert llm.get_metrics().num_prompt_tokens == 0
