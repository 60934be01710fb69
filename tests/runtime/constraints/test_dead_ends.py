"""Grammars that end without being complete: nothing a draft looks at changes what comes out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llguidance
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specc.runtime.constraints import mask_maker
from specc.runtime.constraints.drafted_places import DraftedPlaces
from specc.runtime.constraints.grammar import GrammarState
from specc.runtime.constraints.grammar_compile import Ends
from specc.runtime.constraints.grammar_masks import tree_masks
from specc.runtime.constraints.grammars import Grammars
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from tests.runtime.constraints.test_grammar_masks import (
    EOS,
    VOCAB,
    byte_tokenizer,
    draw_tree,
    ids,
    path_to,
    start,
)
from tests.tiers import every

CLOSED = {"type": "object", "additionalProperties": False}
BOOLEAN = {"type": "boolean"}
# properties that two rules of a schema allow: after the comma that follows them nothing may come
ONE = CLOSED | {"properties": {"a": BOOLEAN}, "patternProperties": {"^a$": BOOLEAN}}
OVERLAP = CLOSED | {
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": BOOLEAN},
    "required": ["a", "b"],
    "patternProperties": {"^a$": {"type": "integer"}},
}
DEAD_ENDS = {
    "one": ONE,
    "two": OVERLAP,
    "list": {"type": "array", "items": ONE, "maxItems": 3},
    "inner": CLOSED | {"properties": {"x": ONE, "y": BOOLEAN}, "required": ["x", "y"]},
    "merged": {"allOf": [ONE, {"type": "object"}]},
    "none": CLOSED | {"properties": {"a": BOOLEAN}, "required": ["a"]},
}


@pytest.fixture(scope="module")
def engine(tiny_engine: Path) -> Engine:
    return Engine.load(tiny_engine)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(byte_tokenizer(["<|end|>", "<|eot|>"]), VOCAB, EOS)
    yield made
    made.close()


def schema(name: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=DEAD_ENDS[name], disable_any_whitespace=True)


def generate(engine: Engine, plan: str, seeds: Sequence[int], **options: Any) -> list[Any]:
    """Each schema with each seed, in one batch."""
    params = [
        SamplingParams(
            seed=seed,
            structured_outputs=schema(name),
            **{"max_tokens": 40, "temperature": 1.2} | options,
        )
        for seed in seeds
        for name in DEAD_ENDS
    ]
    outputs = LLM(engine, plan).generate(["hello"] * len(params), params)
    return [one for output in outputs for one in output.outputs]


@pytest.mark.default("tree-2-1-{'rule': 'delta'}")
@pytest.mark.parametrize(
    ("plan", "options"),
    every(
        3,
        [
            ("chain-3", {}),
            ("tree-2-1", {"rule": "delta"}),
            ("tree-2-1", {"n": 2, "top_k": 9}),
            ("chain-3", {"temperature": 0.0}),
            ("tree-2-1", {"temperature": 1.7}),
            ("chain-3", {"ignore_eos": True, "min_tokens": 12}),
        ],
        1,
    ),
    ids=str,
)
def test_every_plan_ends_where_plain_decoding_does(engine, plan, options) -> None:
    """Tokens, reasons and errors."""
    plain = generate(engine, "off", range(4), **options)
    assert generate(engine, plan, range(4), **options) == plain
    ends = [output.stop_reason for output in plain if output.finish_reason == "error"]
    assert options.get("temperature") == 0.0 or len(ends) > 4
    assert all("dead end" in end or "min_tokens" in end for end in ends)
    # nothing that the grammar does not allow
    assert all(output.text[-1] == "," for output in plain if "dead end" in str(output.stop_reason))


@pytest.mark.slow
@pytest.mark.parametrize("rule", every(2, ["mss", "swor"], 1))
def test_other_rules_put_out_nothing_else(engine, rule) -> None:
    ends = generate(engine, "tree-2-1", range(6), rule=rule)
    errors = [output for output in ends if output.finish_reason == "error"]
    assert 0 < len(errors) < len(ends)
    for output in errors:
        assert "dead end" in output.stop_reason
        assert output.text[-1] == ","


def test_a_stream_says_why_it_ends(engine) -> None:
    """Its last event has the reason, and no token."""
    for seed in range(9):
        params = SamplingParams(
            max_tokens=40, temperature=1.2, seed=seed, structured_outputs=schema("one")
        )
        llm = LLM(engine, "chain-3")
        (output,) = llm.generate("hello", params)
        if output.outputs[0].finish_reason == "error":
            break
    *events, last = llm.stream("hello", params)
    assert (last.finish_reason, last.token_id) == ("error", None)
    assert last.stop_reason == output.outputs[0].stop_reason
    assert [event.token_id for event in events] == output.outputs[0].token_ids


@pytest.mark.slow
def test_a_preempted_request_ends_where_it_would(tiny_engine: Path, engine: Engine) -> None:
    """Its rows are computed again, after its grammar has seen what its drafts looked at."""
    params = [
        SamplingParams(max_tokens=40, temperature=1.2, seed=seed, structured_outputs=schema("two"))
        for seed in range(8)
    ]
    prompts = [text * 12 for text in ("abc", "hey", "{..", "xyz")] * 2
    crowded = LLM(Engine.load(tiny_engine, kv_cache_tokens=112), "tree-2-1")
    outputs = crowded.generate(prompts, params)
    assert crowded.get_metrics().num_preemptions > 0
    plain = LLM(engine, "off").generate(prompts, params)
    assert [o.outputs for o in outputs] == [o.outputs for o in plain]
    assert {o.outputs[0].finish_reason for o in plain} == {"stop", "error"}


def test_looking_ahead_has_its_own_seconds(engine, monkeypatch) -> None:
    """A request that has used them up decodes plainly, without an error, and puts out the same."""
    params = SamplingParams(
        max_tokens=40, temperature=0.0, structured_outputs=StructuredOutputsParams(regex="[ab]{30}")
    )
    (plain,) = LLM(engine, "off").generate("hello", params)
    monkeypatch.setattr(DraftedPlaces, "is_slow", property(lambda places: True))
    llm = LLM(engine, "chain-3")
    (output,) = llm.generate("hello", params)
    assert output.outputs == plain.outputs
    # the first step drafts, and no other
    assert llm.get_metrics().num_spec_steps == 1


def test_an_empty_mask_of_a_draft_is_no_error_of_the_request(grammars) -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode('{"a":1,"b":true').ids
    comma, brace = tokenizer.encode(",}").ids
    grammar = start(grammars, json=OVERLAP, disable_any_whitespace=True)
    assert all(grammar.advance(token) for token in tokens)
    for _ in range(2):
        # the comma is allowed, and a place after which plain decoding would end
        masks = tree_masks(grammar, [0, comma, brace, comma], [-1, 0, 0, 1])
        assert {node: ids(mask) for node, mask in masks.items()} == {0: {comma, brace}, 2: EOS}
    assert (grammar.error, grammar.is_over) == (None, False)
    assert grammar.advance(comma)
    assert not grammar.is_over
    assert grammar.mask() is None
    assert not grammar.advance(brace)
    assert grammar.is_over
    assert "dead end" in (grammar.error or "")


def test_branches_with_the_same_lexeme_have_masks_of_their_own() -> None:
    """The library, rolled back from one, gives its mask to the other (llguidance 1.9.1)."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(letters | {"x1": 256, "x2": 257}, [("x", "1"), ("x", "2")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    own = Grammars(made, 259, frozenset({258}))
    a, b, x = made.encode("abx").ids
    grammar = start(own, grammar='start: ("a" X "1") | ("b" X "2")\nX: /[xyz]/')
    for tokens in ([0, b, a], [0, a, b]):
        masks = tree_masks(grammar, tokens, [-1, 0, 0])
        found = {token: ids(masks[node]) & {256, 257} for node, token in enumerate(tokens)}
        assert (found[a], found[b]) == ({256}, {257})
    # a matcher that a branch has moved would fail on another, and the request would not draft on
    assert grammar.may_look_ahead
    # after a draft that was not accepted, too
    assert grammar.advance(b)
    assert ids(grammar.mask()) & {256, 257} == {257}
    assert ids(tree_masks(grammar, [0, x], [-1, 0])[1]) == {*made.encode("2").ids}
    own.close()


@pytest.mark.default("items", "fuel")
@pytest.mark.parametrize(
    "limits",
    [
        llguidance.LLParserLimits(step_max_items=60),
        llguidance.LLParserLimits(step_lexer_fuel=135),
        llguidance.LLParserLimits(max_lexer_states=34),
    ],
    ids=["items", "fuel", "states"],
)
def test_limits_are_met_where_plain_decoding_meets_them(limits) -> None:
    """Whatever trees were looked at before: their work makes later masks cheaper, or dearer.

    Steps put out several tokens, whose masks only drafts have asked for.
    """
    tokenizer, dice = byte_tokenizer(["<|end|>", "<|eot|>"]), random.Random(3)
    tokens = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=VOCAB, eos_token=sorted(EOS))
    text = 'start: ("a" | b | /c[d-f]{2,9}g/)+ \n b: "b" ("c" | "d" b | "e" b b | b)*'

    def compiled() -> llguidance.LLMatcher:
        grammar = llguidance.grammar_from("grammar", text)
        return llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)

    def begin() -> GrammarState:
        ends = Ends(tuple(sorted(EOS)), False)
        return GrammarState(compiled(), VOCAB, ends, (compiled(), compiled))

    def plain_mask(path: Sequence[int]) -> bytes | None:
        state = begin()
        return state.mask() if all(state.advance(token) for token in path) else None

    letters = tokenizer.encode("abcdefg").ids
    errors, num_seen = [], 0
    for _ in range(4):
        plain, drafting = begin(), begin()
        output: list[int] = []
        while (mask := plain.mask()) is not None and not plain.is_over and len(output) < 30:
            if dice.random() < 0.4:
                parents = draw_tree(dice, 16)
                drafted = [dice.choice(letters) for _ in parents]
                masks = tree_masks(drafting, drafted, parents)
                assert masks[0] == mask
                for node in range(16):
                    path = path_to(node, parents)
                    if path is None:
                        continue
                    wanted = plain_mask([*output, *(drafted[i] for i in path)])
                    # where plain decoding would end, the request does, whatever its drafts find
                    assert wanted is None or masks.get(node) == wanted
                    num_seen += node > 0 and wanted is not None
            output.append(dice.choice(sorted(ids(mask) - EOS)))
            assert plain.advance(output[-1]) == drafting.advance(output[-1])
            assert plain.error == drafting.error
        errors.append(plain.error)
    assert any(errors)
    assert num_seen > 5


def test_seconds_of_drafts_are_not_those_of_the_request(grammars, monkeypatch) -> None:
    grammar = start(grammars, regex="[a-z]{3,9}")
    tree_masks(grammar, [0, 64, 65], [-1, 0, 1])
    assert (grammar.may_look_ahead, grammar.error) == (True, None)
    clock = mask_maker.time.thread_time
    late = iter(range(0, 1000, 2))
    monkeypatch.setattr(mask_maker.time, "thread_time", lambda: clock() + next(late))
    tree_masks(grammar, [0, 66, 67], [-1, 0, 1])
    assert not grammar.may_look_ahead
    assert grammar.error is None
    assert grammar.advance(64)
