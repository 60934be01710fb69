"""Engines against `generate` where requests end, or change precision."""

from __future__ import annotations

import copy

import pytest
import torch

from specc.errors import EngineError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from tests import models
from tests.lossless import PLANS, Zoo, check_bfloat16, layout_of
from tests.near_ties import forgive_near_ties, is_within_rounding

LIMIT = 48


# the default tier has it of the tiny model: test_runner.py
@pytest.mark.slow
@pytest.mark.parametrize(("name", "field"), [("gpt2", "n_positions"), ("opt", None)])
def test_context_limit(zoo: Zoo, name: str, field: str | None) -> None:
    """Learned positions end where the context ends, and no node may lie beyond them."""
    changes = {field or "max_position_embeddings": LIMIT}
    engine = zoo.engine(name, "target", max_seq_len=LIMIT, prefill_chunk=16, **changes)
    # a node beyond the context would not pass unnoticed
    with pytest.raises(EngineError, match="index out of range"):
        feed_position(engine, LIMIT)
    for plan in PLANS:
        llm = LLM(engine, plan=plan.name)
        prompts = models.prompts()
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
        )
        for prompt, output in zip(prompts, outputs, strict=True):
            completion = output.outputs[0]
            wanted = zoo.reference(name, prompt, LIMIT - len(prompt), **changes)
            forgive_near_ties(llm, plan.name, prompt, completion.token_ids, wanted)
            assert completion.finish_reason == "length"
        stats = llm.get_metrics()
        assert bool(plan.widths) == (stats.num_spec_steps > 0)
        if plan.tree.max_depth > 1:
            # the last tokens have no room for a tree
            assert stats.num_steps > stats.num_spec_steps


def feed_position(engine: Engine, position: int) -> None:
    """Feed a token at a position to the target."""
    llm = LLM(engine, plan="off")
    llm.generate([[1]], SamplingParams(temperature=0, max_tokens=1))
    one = torch.tensor([1], dtype=torch.int32)
    blocks = engine.cache.block_table([[0] * engine.cache.shape.blocks_per_sequence])
    engine.target(
        torch.tensor([1]),
        torch.tensor([position]),
        torch.tensor([0, 1], dtype=torch.int32),
        one,
        one,
        torch.tensor([[1]]),
        blocks,
        torch.tensor([0]),
    )


@pytest.mark.slow
def test_eos_inside_an_accepted_run(zoo: Zoo) -> None:
    """The EOS of generation_config.json goes through the compiler; `generate` stops there too."""
    prompt = models.prompts()[1]
    free = zoo.reference("llama", prompt, models.NUM_TOKENS).tokens
    # a chain of 4 emits tokens 1 … 5 and 6 … 10 together: neither of these is the last
    eos = next(t for i, t in enumerate(free) if i in (7, 8, 9) and free.index(t) == i)
    engine = zoo.engine("llama", "target", eos_token_id=eos)
    wanted = zoo.reference("llama", prompt, models.NUM_TOKENS, eos_token_id=eos).tokens
    assert wanted == free[: free.index(eos) + 1]
    for plan in (PLANS[2], PLANS[4]):
        (output,) = LLM(engine, plan=plan.name).generate(
            [prompt], SamplingParams(temperature=0, max_tokens=models.NUM_TOKENS)
        )
        assert output.outputs[0].token_ids == wanted
        assert output.outputs[0].finish_reason == "stop"
        if plan.name == "chain-4":
            assert output.metrics.num_trimmed_tokens > 0


def test_stop_string_that_spans_tokens(zoo: Zoo) -> None:
    # the engine of backends/cpu/test_lossless.py, which has requests that join and leave, too
    engine = zoo.engine("qwen3", "noisy", **layout_of("qwen3"), backend="cpu")
    found = 0
    for prompt in models.prompts():
        wanted = zoo.reference("qwen3", prompt, models.NUM_TOKENS).tokens
        letters = [engine.tokenizer.decode([token]) for token in wanted]
        for end in range(3, 40, 14):
            pair = letters[end - 1] + letters[end]
            text = "".join(letters[: end + 1])
            if not pair.isascii() or text.index(pair) != len(text) - 2:
                continue
            found += 1
            for plan in ("off", "chain-4", "tree-3-2-1-1"):
                params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, stop=[pair])
                (output,) = LLM(engine, plan=plan).generate([prompt], params)
                assert output.outputs[0].token_ids == wanted[: end + 1]
                assert output.outputs[0].text == engine.tokenizer.decode(wanted[: end - 1])
                assert output.outputs[0].stop_reason == pair
    assert found > 2


# the default tier has it compiled: backends/cpu/test_lossless.py
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bfloat16(zoo: Zoo, name: str) -> None:
    check_bfloat16(zoo, name, zoo.engine(name, "noisy", dtype="bfloat16"))


@pytest.mark.slow
def test_few_tokens_are_within_rounding(zoo: Zoo) -> None:
    """The rule that forgives a token in bfloat16 would refuse the second best almost everywhere."""
    model = zoo.reference_model("gemma3", dtype="bfloat16")
    exact = copy.deepcopy(model).float()
    found = []
    for prompt in models.prompts():
        reference = zoo.reference("gemma3", prompt, 32, dtype="bfloat16")
        for position, token in enumerate(reference.tokens):
            rival = reference.logits[position].topk(2).indices[1].item()
            tokens = [*prompt, *reference.tokens[:position]]
            found.append(is_within_rounding(model, exact, tokens, token, rival))
    assert 0 < sum(found) < len(found) / 10
