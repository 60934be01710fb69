"""Structured outputs of whole engines: valid, and the same with speculation as without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from specc.errors import RequestError
from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.eager.step import EagerStep
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.speculation.plans import MERGE, DynamicTree, SpecPlan
from tests.drafts import in_tiles
from tests.runtime.backends.captured.captured_engine import capture_steps
from tests.tiers import every

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "cow", 7]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 300},
    },
    "required": ["kind", "tags", "age"],
    "additionalProperties": False,
}
LIST = 'root ::= "(" item ("," item)? ")"\nitem ::= [a-c]{1,3} | "[" item "]"'
STRUCTURES = {
    "json": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "regex": StructuredOutputsParams(regex="[0-9]{2,5}-[a-f]{1,9}"),
    # as the prompt goes on, but for one place: lookups walk deep into their trees
    "repetition": StructuredOutputsParams(regex="(ab){2,5}c(ab){3}"),
    "choice": StructuredOutputsParams(choice=["yes", "yesterday", "no", "nothing else"]),
    "grammar": StructuredOutputsParams(grammar=LIST),
}
PROMPTS = ["hello", "ab", "abab" * 4, "a longer prompt, of which nothing is left", "{"]
DATA_PLANS = (
    SpecPlan.from_dynamic(DynamicTree(5, 3, 2)),
    SpecPlan.from_widths((1, 1), ("draft_0", "lookup-2"), MERGE),
    SpecPlan.from_widths((1, 1, 1), ("lookup-2",)),
)


def assert_valid(structure: str, text: str) -> None:
    """By what knows nothing of the library that made the masks."""
    if structure == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif structure in ("regex", "repetition"):
        assert re.fullmatch(STRUCTURES[structure].text, text)
    elif structure == "choice":
        assert text in ("yes", "yesterday", "no", "nothing else")
    else:
        while "[" in text:
            text, count = re.subn(r"\[([a-c]{1,3})\]", r"\1", text)
            assert count
        assert re.fullmatch(r"\([a-c]{1,3}(,[a-c]{1,3})?\)", text)


def generate(engine: Engine, plan: str, prompts: Any = None, **options: Any) -> list[Any]:
    options = {"max_tokens": 60, **options}
    names = list(STRUCTURES) if prompts is None else [None] * len(prompts)
    params = [
        SamplingParams(**({"temperature": 0, "structured_outputs": STRUCTURES.get(name)} | options))
        for name in names
    ]
    outputs = LLM(engine, plan).generate(PROMPTS if prompts is None else prompts, params)
    return [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module")
def engine(tiny_engine: Path) -> Engine:
    return Engine.load(tiny_engine)


@pytest.fixture(scope="module")
def data_engine(tiny_engine: Path) -> Engine:
    """Whose trees are data, with dead nodes."""
    engine = Engine.load(tiny_engine)
    models = {"target": engine.target, "draft_0": engine.drafts[0]}
    slabs = {name: len(own) for name, own in engine.cache.slabs.items()}
    for plan in DATA_PLANS:
        assert plan.num_rows <= engine.cache.shape.max_nodes
        program = json.loads(json.dumps(fuse_step(plan, slabs).to_json()))
        engine.steps[plan.name] = EagerStep(program, models)
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "sampled"])
def test_outputs_are_valid_and_those_of_plain_decoding(engine, data_engine, temperature) -> None:
    options = {"temperature": temperature, "seed": 11}
    for one, plans in ((engine, ("tree-2-1", "chain-3")), (data_engine, DATA_PLANS)):
        plain = generate(one, "off", **options)
        for structure, output in zip(STRUCTURES, plain, strict=True):
            assert (output.finish_reason, output.stop_reason) == ("stop", None)
            assert output.token_ids[-1] == 256
            assert_valid(structure, output.text)
        for plan in plans:
            assert generate(one, getattr(plan, "name", plan), **options) == plain


@pytest.mark.parametrize("rule", every(3, ["delta", "mss", "swor"], 1))
def test_every_rule_keeps_to_the_grammar(engine, rule) -> None:
    for seed in range(2):
        for output, structure in zip(
            generate(engine, "tree-2-1", temperature=1.5, rule=rule, seed=seed),
            STRUCTURES,
            strict=True,
        ):
            assert output.finish_reason == "stop"
            assert_valid(structure, output.text)


def test_drafts_are_accepted_under_a_grammar(data_engine) -> None:
    """Otherwise the equality above would compare plain decoding with itself."""
    for plan in DATA_PLANS[1:]:
        llm = LLM(data_engine, plan.name)
        params = SamplingParams(
            temperature=0, max_tokens=60, structured_outputs=STRUCTURES["repetition"]
        )
        llm.generate(PROMPTS[2], params)
        assert llm.get_metrics().accepted_at_depth[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(2, ["off", "tree-2-1"], 1))
def test_others_in_the_batch_are_left_alone(engine, plan) -> None:
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    own = SamplingParams(temperature=0, max_tokens=60, structured_outputs=STRUCTURES["json"])
    alone = [
        LLM(engine, plan).generate(p, q)[0] for p, q in ((PROMPTS[0], free), (PROMPTS[1], own))
    ]
    both = LLM(engine, plan).generate(PROMPTS[:3], [free, own, free])
    assert [output.outputs for output in both[:2]] == [output.outputs for output in alone]
    assert engine.steps[plan].before_accept is None


@pytest.mark.parametrize("plan", ["off", "chain-3"])
def test_logprobs_are_those_of_the_model(engine, plan) -> None:
    """What the model thinks of the same text where nothing constrains it."""
    (output,) = LLM(engine, plan).generate(
        PROMPTS[0],
        SamplingParams(
            temperature=0, max_tokens=12, structured_outputs=STRUCTURES["regex"], logprobs=4
        ),
    )
    tokens, found = output.outputs[0].token_ids, output.outputs[0].logprobs
    contexts = [[*output.prompt_token_ids, *tokens[:i]] for i in range(len(tokens))]
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=4)
    num_other = 0
    for place, wanted in enumerate(LLM(engine, "off").generate(contexts, free)):
        own = dict(found[place])
        assert tokens[place] in own
        for token, entry in wanted.outputs[0].logprobs[0].items():
            assert own[token].rank == entry.rank
            assert own[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
        num_other += wanted.outputs[0].token_ids[0] != tokens[place]
    assert num_other


@pytest.mark.default("tree-2-1")
@pytest.mark.parametrize("plan", ["off", "tree-2-1"])
def test_other_ends_go_before_that_of_the_grammar(engine, plan) -> None:
    def run(**options: Any) -> Any:
        own = {"structured_outputs": STRUCTURES["json"], "max_tokens": 60} | options
        return (
            LLM(engine, plan)
            .generate(PROMPTS[0], SamplingParams(**{"temperature": 0, **own}))[0]
            .outputs[0]
        )

    whole = run()
    cut = run(max_tokens=5)
    assert (cut.finish_reason, cut.token_ids) == ("length", whole.token_ids[:5])
    stopped = run(stop='"tags"')
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", '"tags"')
    assert stopped.text == whole.text.partition('"tags"')[0]
    colon = LLM(engine).tokenizer.encode(":").ids[0]
    assert run(stop_token_ids=[colon]).stop_reason == colon
    # nothing may follow the end
    assert run(ignore_eos=True) == whole
    # the bytes of a text that ends with its last token
    exact = run(max_tokens=len(whole.token_ids) - 1)
    assert (exact.finish_reason, exact.text) == ("length", whole.text)


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(2, ["off", "tree-2-1"], 1))
def test_a_model_without_eos(tiny_engine, plan) -> None:
    engine = Engine.load(tiny_engine)
    engine.eos_token_ids = frozenset()
    outputs = generate(engine, plan)
    for structure, output in zip(STRUCTURES, outputs, strict=True):
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert_valid(structure, output.text)
    assert outputs == generate(engine, "off")


def test_a_grammar_that_fails_ends_its_request_alone(engine, monkeypatch) -> None:
    """In the middle of an output, as where the library gives up: an error, and nobody else's."""
    broken = StructuredOutputsParams(regex="[a-z]{40,50}")
    start = engine.grammars.start

    def fragile(params: StructuredOutputsParams) -> Any:
        state = start(params)
        if params is broken:
            advance, calls = state.advance, iter(range(100))
            # no token of the model
            monkeypatch.setattr(
                state, "advance", lambda token: advance(token if next(calls) < 9 else 299)
            )
        return state

    monkeypatch.setattr(engine.grammars, "start", fragile)
    params = [
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=one)
        for one in (broken, STRUCTURES["choice"])
    ]
    bad, good = (o.outputs[0] for o in LLM(engine, "tree-2-1").generate(PROMPTS[:2], params))
    assert bad.finish_reason == "error"
    assert "299" in bad.stop_reason
    assert len(bad.token_ids) == 9
    assert_valid("choice", good.text)


@pytest.mark.parametrize("plan", [pytest.param("off", marks=pytest.mark.slow), "tree-2-1"])
def test_a_preempted_request_keeps_its_place_in_the_grammar(tiny_engine, engine, plan) -> None:
    """Its rows are computed again, its tokens and their grammar are not."""
    crowded = Engine.load(tiny_engine, kv_cache_tokens=112)
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=STRUCTURES["json"])
    prompts = [text * 12 for text in ("abc", "hey", "{..", "xyz")]
    llm = LLM(crowded, plan)
    outputs = llm.generate(prompts, params)
    assert llm.get_metrics().num_preemptions > 0
    wanted = LLM(engine, "off").generate(prompts, params)
    assert [o.outputs for o in outputs] == [o.outputs for o in wanted]


def test_requests_with_a_wrong_grammar_never_start(engine) -> None:
    llm = LLM(engine)
    wrong = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="(a"))
    with pytest.raises(RequestError, match="llguidance"):
        llm.generate(PROMPTS[:2], [SamplingParams(temperature=0), wrong])
    assert llm.get_metrics().num_prompt_tokens == 0


def test_trees_in_tiles_decode_plainly(data_engine) -> None:
    with in_tiles(data_engine, 2):
        plan = DATA_PLANS[0].name
        llm = LLM(data_engine, plan)
        params = [
            SamplingParams(temperature=0, max_tokens=60, structured_outputs=s)
            for s in STRUCTURES.values()
        ]
        outputs = llm.generate(PROMPTS, params)
        assert llm.get_metrics().num_spec_steps == 0
    assert [o.outputs[0] for o in outputs] == generate(data_engine, "off")


def test_a_hook_that_was_there_goes_first_and_stays(engine) -> None:
    step, seen = engine.steps["chain-3"], []

    def hook(values: Any) -> None:
        seen.append(bool(torch.isinf(values["logits"]).any()))
        values["logits"] = torch.zeros_like(values["logits"])

    step.before_accept = hook
    try:
        (first, *_) = generate(engine, "chain-3")
        assert step.before_accept is hook
    finally:
        step.before_accept = None
    # of equal logits the lowest allowed id wins
    assert_valid("json", first.text)
    assert json.loads(first.text)["age"] == 0
    assert seen
    assert not any(seen)


def test_captured_steps_run_with_the_masks(tiny_engine, engine) -> None:
    """A batch with a grammar is not queued; others are, before and after."""
    other = Engine.load(tiny_engine)
    capture_steps(other, tiny_engine)
    for _ in range(2):
        for plan in ("tree-2-1", "off"):
            assert generate(other, plan) == generate(engine, plan)
            free = generate(other, plan, PROMPTS[:2], ignore_eos=True, max_tokens=8)
            assert free == generate(engine, plan, PROMPTS[:2], ignore_eos=True, max_tokens=8)
