"""Log probabilities of prompts: those of the target alone, however the prompt was read."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from specc.errors import RequestError
from specc.runtime.llm import LLM
from specc.runtime.outputs.logprobs import PromptLogprobs
from specc.sampling.params import SamplingParams
from tests.runtime.conftest import TinyModel

PLANS = ("off", "chain-4", "tree-3-2-1")
# plan, tokens of a chunk, and whether prompts share a pass
USUAL = {("chain-4", 3, True), ("off", 3, False), ("tree-3-2-1", 16, True)}


@pytest.fixture(scope="module")
def logprobs_of() -> Callable[[list[int]], torch.Tensor]:
    """[n - 1, V]: of what follows each token of a prompt, without caches."""
    model = TinyModel()

    def score(prompt: list[int]) -> torch.Tensor:
        rows = [model.dense_logits(prompt[: i + 1]) for i in range(len(prompt) - 1)]
        return torch.stack(rows).log_softmax(dim=-1) if rows else torch.zeros(0, 1)

    return score


def check(found: PromptLogprobs | None, prompt: list[int], want: torch.Tensor, count: int) -> None:
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    for token, entries, row in zip(prompt[1:], found[1:], want, strict=True):
        assert entries is not None
        own = entries[token]
        assert own.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert own.rank == 1 + sum(other > row[token] + 1e-6 for other in row.tolist())
        best = row.topk(count).indices.tolist()
        assert {t for t, entry in entries.items() if entry.rank <= count} >= set(best)
        assert len(entries) == count + (token not in best)
        for other in best:
            assert entries[other].logprob == pytest.approx(row[other].item(), abs=1e-4)


@pytest.mark.parametrize(
    ("plan", "chunk", "shares_pass"),
    [
        pytest.param(*case, marks=[] if case in USUAL else [pytest.mark.slow])
        for case in itertools.product(PLANS, (3, 16), (True, False))
    ],
)
def test_they_are_the_targets_own(
    make_engine, prompts, greedy, logprobs_of, plan: str, chunk: int, shares_pass: bool
) -> None:
    """In chunks, beside requests that decode, and again where the cache has all of it."""
    llm = LLM(make_engine(prefill_chunk=chunk), plan=plan)
    llm._runner.shares_pass = shares_pass
    spans = llm._scheduler._prompts
    llm._scheduler._prompts = dataclasses.replace(spans, shares_pass=shares_pass)
    asked = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=2, logprobs=1)
    params = [
        asked,
        *[SamplingParams(temperature=0, max_tokens=7)] * 2,
        *[asked] * (len(prompts) - 3),
    ]
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        for prompt, own, output in zip(prompts, params, outputs, strict=True):
            assert output.outputs[0].token_ids == greedy(prompt, own.max_tokens)
            if own.prompt_logprobs is None:
                assert output.prompt_logprobs is None
            else:
                check(output.prompt_logprobs, prompt, logprobs_of(prompt), 2)
                assert output.num_cached_tokens == 0
    # others find what a scored prompt has left
    assert llm.generate([prompts[4]])[0].num_cached_tokens == 32


@pytest.mark.parametrize("count", [0, 20])
def test_counts(make_engine, logprobs_of, count: int) -> None:
    prompt = [5, 5, 9, 1]
    (output,) = LLM(make_engine()).generate(
        [prompt], SamplingParams(temperature=0, prompt_logprobs=count)
    )
    check(output.prompt_logprobs, prompt, logprobs_of(prompt), count)
    assert output.outputs[0].logprobs is None


def test_a_prompt_of_one_token_has_none(make_engine) -> None:
    (output,) = LLM(make_engine()).generate([[3]], SamplingParams(temperature=0, prompt_logprobs=1))
    assert output.prompt_logprobs == [None]


def test_a_pass_has_no_more_logits_than_a_step(make_engine, prompts, monkeypatch) -> None:
    engine = make_engine(max_num_seqs=2, prefill_chunk=64)
    llm = LLM(engine)
    most = 2 * engine.cache.shape.max_nodes
    some = [prompts[3], prompts[4]]
    assert most < sum(map(len, some))
    rows: list[int] = []
    forward = TinyModel.forward

    def count(self: TinyModel, *inputs: torch.Tensor) -> torch.Tensor:
        rows.append(len(inputs[-1]))
        return forward(self, *inputs)

    monkeypatch.setattr(TinyModel, "forward", count)
    llm.generate(some, SamplingParams(temperature=0, prompt_logprobs=0, max_tokens=1))
    assert max(rows) == most
    assert sum(rows) == sum(map(len, some))


@pytest.mark.slow
def test_preempted_in_the_prompt_and_after_it(make_engine, prompts, greedy, logprobs_of) -> None:
    """A cache for one of them at a time: whoever gives way reads its prompt again."""
    seen = []
    for num_blocks in range(13, 30, 4):
        engine = make_engine(prefill_chunk=5)
        llm = LLM(engine, plan="chain-4")
        pool = engine.cache.allocator
        taken = pool.allocate(pool.num_free - num_blocks)
        params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1)
        some = [prompts[4], prompts[3], prompts[2]]
        for prompt, output in zip(some, llm.generate(some, params), strict=True):
            assert output.outputs[0].token_ids == greedy(prompt, 12)
            check(output.prompt_logprobs, prompt, logprobs_of(prompt), 1)
        seen.append(llm.get_metrics().num_preemptions)
        pool.free(taken)
    assert max(seen) > 0


def test_preempted_between_two_chunks(make_engine, prompts, greedy, logprobs_of) -> None:
    llm = LLM(make_engine(prefill_chunk=5), plan="chain-4")
    prompt, params = prompts[4], SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
    stream = llm.stream([prompt], params)
    (request,) = stream.gi_frame.f_locals["groups"][0]  # type: ignore[attr-defined]
    llm._scheduler.add(request)
    llm._core.advance()  # type: ignore[union-attr]
    llm._core.advance()  # type: ignore[union-attr]
    assert 0 < len(request.prompt_logprobs) < len(prompt) - 1
    llm._scheduler._preempt(request)
    while not request.is_finished:
        llm._core.advance()  # type: ignore[union-attr]
    assert request.output_token_ids == greedy(prompt, 4)
    check(request.all_prompt_logprobs, prompt, logprobs_of(prompt), 1)


def test_a_backend_without_rows_for_them_says_so(make_engine) -> None:
    engine = make_engine()
    engine.backend = "tensorrt"
    with pytest.raises(RequestError, match="prompt_logprobs=0"):
        LLM(engine).generate([[1, 2]], SamplingParams(temperature=0, prompt_logprobs=0))


def test_they_are_those_of_transformers(tiny_models, tiny_engine) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_models.target).eval()
    llm = LLM(tiny_engine)
    prompts = [llm.get_tokenizer().encode(text) for text in ("def f(x):", "a" * 70, "b")]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, prompt_logprobs=3, max_tokens=4))
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, :-1]
        check(output.prompt_logprobs, prompt, logits.log_softmax(dim=-1), 3)
