"""Masks along trees: against brute force, against matchers that see one path only, and accepted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specc.errors import RequestError
from specc.runtime.constraints.grammar import GrammarState
from specc.runtime.constraints.grammar_masks import TreeMasks, mask_rows, mask_trees, tree_masks
from specc.runtime.constraints.grammars import Grammars
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.sampling.rows import Rule
from specc.sampling.structured import StructuredOutputsParams
from specc.speculation.plans import OFF, SpecPlan
from tests.drafts import PLANS
from tests.tiers import every

# 256 bytes, two ends, and ids that no token has
VOCAB, EOS = 263, frozenset({256, 257})
CHOICES = ["a", "ab", "abc", "abd", "b c", "bé", "cc" * 8]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"enum": ["x", "xy", True]},
        "c": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
    },
    "required": ["a", "c"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(["<|end|>", "<|eot|>"])


def byte_tokenizer(special: Sequence[str] = ()) -> Tokenizer:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(letters, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB, EOS)


def start(grammars: Grammars, **options: Any) -> GrammarState:
    return grammars.start(StructuredOutputsParams(**options))


def ids(mask: bytes | None) -> set[int]:
    """Tokens of a mask, written anew: unpacking in `mask_rows` is under test, too."""
    whole = int.from_bytes(mask or b"", "little")
    return {token for token in range(VOCAB) if whole >> token & 1}


def draw_tree(dice: random.Random, num_nodes: int) -> list[int]:
    """Parents of any shape, about one node in six dead, with what hangs below it."""
    return [-1] + [
        -1 if dice.random() < 0.15 else dice.randrange(max(0, node - 6), node)
        for node in range(1, num_nodes)
    ]


def path_to(node: int, parents: Sequence[int]) -> list[int] | None:
    """Nodes after the root down to a node; None of a node that hangs below no root."""
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = parents[node]
    return path if node == 0 else None


class BruteForce:
    """What may follow a text that is the beginning of a choice, byte by byte."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.whole = [tuple(tokenizer.encode(choice).ids) for choice in CHOICES]

    def allowed(self, path: tuple[int, ...]) -> set[int]:
        found = {w[len(path)] for w in self.whole if w[: len(path)] == path and len(w) > len(path)}
        return found | (EOS if path in self.whole else set())


class OnePath:
    """The library itself, asked anew for every path."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=VOCAB, eos_token=sorted(EOS))
        own = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides=own)
        self._fresh = llguidance.LLMatcher(tokens, grammar, log_level=0)

    def allowed(self, path: tuple[int, ...]) -> set[int]:
        matcher = self._fresh.deep_copy()
        assert matcher.consume_tokens(list(path))
        return ids(matcher.compute_bitmask())


def draw_tokens(
    dice: random.Random, parents: Sequence[int], before: tuple[int, ...], oracle: Any
) -> tuple[list[int], dict[int, set[int]]]:
    """Tokens of a tree, allowed ones, ends, strays and repetitions; and what the masks must be."""
    tokens, wanted = [0] * len(parents), {0: oracle.allowed(before)}
    for node in range(1, len(parents)):
        above = wanted.get(parents[node])
        tokens[node] = dice.randrange(VOCAB)
        if above and dice.random() < 0.8:
            tokens[node] = dice.choice(sorted(above))
        elif dice.random() < 0.5:
            # as a sibling or an uncle has it
            tokens[node] = tokens[dice.randrange(node)]
        path = path_to(node, parents)
        if above and path is not None and tokens[node] in above - EOS:
            wanted[node] = oracle.allowed((*before, *(tokens[i] for i in path)))
    return tokens, wanted


def check_random_trees(grammar: GrammarState, oracle: Any, seed: int, num_nodes: int) -> set[int]:
    """Trees at every place of one output; returns the lengths at which the grammar ended."""
    dice = random.Random(seed)
    before: tuple[int, ...] = ()
    while not grammar.is_over and len(before) < 40:
        parents = draw_tree(dice, num_nodes)
        tokens, wanted = draw_tokens(dice, parents, before, oracle)
        for _ in range(2):
            # twice: the grammar is where it was before
            found = tree_masks(grammar, tokens, parents)
            assert {node: ids(mask) for node, mask in found.items()} == wanted
        token = dice.choice(sorted(oracle.allowed(before)))
        assert grammar.advance(token)
        assert grammar.is_over == (token in EOS)
        before += (token,)
    assert grammar.error is None
    return {len(before)}


def test_masks_of_choices_are_those_of_brute_force(grammars, tokenizer) -> None:
    lengths: set[int] = set()
    for seed in range(12):
        grammar = start(grammars, choice=CHOICES)
        lengths |= check_random_trees(grammar, BruteForce(tokenizer), seed, 24)
    assert len(lengths) > 2


def test_masks_of_json_are_those_of_each_path_alone(grammars, tokenizer) -> None:
    oracle = OnePath(tokenizer)
    for seed in range(6):
        check_random_trees(start(grammars, json=SCHEMA), oracle, seed, 24)


def test_a_chain_may_be_deeper_than_python_calls(grammars) -> None:
    num_nodes = 1024
    masks = tree_masks(
        start(grammars, regex="a*"), [97 - 33] * num_nodes, [*range(-1, num_nodes - 1)]
    )
    assert len(masks) == num_nodes
    assert ids(masks[num_nodes - 1]) == {97 - 33, *EOS}


def test_rows_are_masked_by_their_own_masks() -> None:
    """In any order, for a width that fills no byte; other rows and the input stay as they are."""
    logits = torch.randn(5, 19)
    before = logits.clone()
    masks = {3: bytes([0b101, 0, 0b11111100, 0]), 1: bytes([0, 0x80, 0, 0xFF])}
    found = mask_rows(logits, masks)
    assert torch.equal(logits, before)
    allowed = {3: {0, 2, 18}, 1: {15}}
    for row in range(5):
        for token in range(19):
            is_kept = token in allowed.get(row, range(19))
            assert found[row, token] == (before[row, token] if is_kept else -torch.inf)
    assert mask_rows(logits, {}) is logits


@pytest.mark.parametrize(
    "plan",
    [OFF, PLANS[0], SpecPlan.from_widths((2, 1, 1)), PLANS[2], PLANS[4]],
    ids=lambda plan: plan.name,
)
def test_the_hook_masks_by_the_tree_of_its_plan(grammars, tokenizer, plan) -> None:
    """Of static plans the plan's own; else the one that the step has grown."""
    dice, oracle, size = random.Random(5), BruteForce(tokenizer), plan.num_nodes
    parents = [list(plan.tree.parents)] * 2 if plan.is_static else [draw_tree(dice, size)] * 2
    drawn = [draw_tokens(dice, row, (), oracle) for row in parents]
    values = {
        "tokens": torch.tensor([tokens for tokens, _ in drawn]),
        "parents": torch.tensor(parents, dtype=torch.int32),
        "logits": torch.zeros(3 * size, VOCAB),
    }
    if plan.is_static:
        del values["parents"]
    # between the two, one that nothing constrains
    for name in values.keys() - {"logits"}:
        values[name] = torch.cat([values[name][:1], values[name]])
    own = [start(grammars, choice=CHOICES), None, start(grammars, choice=CHOICES)]
    requests = [
        Request("0", [1], SamplingParams(temperature=0), max_seq_len=64, grammar=grammar)
        for grammar in own
    ]
    TreeMasks(requests, plan)(values)
    wanted = [drawn[0][1], {}, drawn[1][1]]
    for row, logits in enumerate(values["logits"]):
        b, node = divmod(row, size)
        found = set((logits == 0).nonzero()[:, 0].tolist())
        assert found == wanted[b].get(node, set(range(VOCAB)))
    assert plan is OFF or max(len(masks) for masks in wanted) > 2


def accept(logits, tokens, parents, depth, image, q_rows, draft_logits, temperature, rule, seeds):
    batch = len(tokens)
    values = torch.tensor([[temperature, 1.0, 0.0, 1.0, 0.0, 0.0]] * batch)
    words = torch.tensor([[seed, 0, rule, 1] for seed in seeds])
    return torch.ops.specc.accept(
        logits, tokens, parents, depth, image, q_rows, draft_logits, values, words,
        torch.full((batch,), 3, dtype=torch.int32),
        torch.zeros(1, 16, dtype=torch.int32),
        torch.zeros(batch, 1, dtype=torch.int32),
    )  # fmt: skip


def draw(logits, count, temperature, rule, seeds):
    batch = len(seeds)
    values = torch.tensor([[temperature, 1.0, 0.0, 1.0, 0.0, 0.0]] * batch)
    words = torch.tensor([[seed, 0, rule, 1] for seed in seeds])
    lengths = torch.full((batch,), 3, dtype=torch.int32)
    columns = torch.ones(1, dtype=torch.int32)
    return torch.ops.specc.draft_children(logits, count, lengths, columns, 0, values, words)[0]


@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name.lower())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_rule_accepts_what_a_mask_forbids(grammars, tokenizer, rule, temperature) -> None:
    """The draft proposes little else, the target likes it, and nodes below have no mask."""
    oracle, dice = BruteForce(tokenizer), random.Random(rule)
    parents, depth = [-1, 0, 0, 0, 1, 1, 2, 3], 2
    batch, q_rows = 40, torch.tensor([-1, 0, 0, 0, 1, 1, 2, 3], dtype=torch.int32)
    likely = torch.tensor([[0.0] * VOCAB])
    likely[0, :5] = 12.0
    draft_logits = [likely.repeat(batch, 1), likely.repeat(3 * batch, 1)]
    logits = torch.randn(batch * 8, VOCAB) + likely
    own = [start(grammars, choice=CHOICES) for _ in range(batch)]
    tokens = torch.randint(0, 5, (batch, 8))
    # some paths are allowed, so that walks get deeper
    first, second = tokenizer.encode("ab").ids
    for b in range(0, batch, 2):
        tokens[b, dice.choice([1, 2, 3])] = first
        tokens[b, 4:] = second
    above = torch.tensor([parents] * batch, dtype=torch.int32)
    masked = mask_trees(logits, own, tokens.tolist(), above.tolist())
    _, accepted, output = accept(
        masked, tokens, above, depth, None, q_rows, draft_logits, temperature, rule,
        range(batch),
    )  # fmt: skip
    for count, row in zip(accepted.tolist(), output.tolist(), strict=True):
        path: tuple[int, ...] = ()
        for token in row[: count + 1]:
            assert token in oracle.allowed(path)
            if token in EOS:
                break
            path += (token,)
    # without masks, they would
    _, _, free = accept(
        logits, tokens, above, depth, None, q_rows, draft_logits, temperature, rule,
        range(batch),
    )  # fmt: skip
    assert (free[:, 0] < 5).float().mean() > 0.8


@pytest.mark.parametrize("rule", every(4, Rule, 3), ids=lambda rule: rule.name.lower())
def test_tokens_are_distributed_as_the_masked_target(grammars, tokenizer, rule) -> None:
    batch, allowed = 400, sorted(BruteForce(tokenizer).allowed(()))
    target, draft = torch.randn(1, VOCAB), torch.randn(1, VOCAB)
    # the draft proposes allowed and forbidden tokens about equally often
    draft[0, allowed] += 6.0
    draft[0, :4] += 6.0
    target[0, :4] += 6.0
    target[0, allowed] += torch.tensor([0.0, 1.0, 2.0])
    seeds = range(1000, 1000 + batch)
    draft_logits = draft.repeat(batch, 1)
    children = draw(draft_logits, 2, 1.0, rule, seeds)
    tokens = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), children], dim=1)
    above = torch.tensor([[-1, 0, 0]] * batch, dtype=torch.int32)
    grammar = start(grammars, choice=CHOICES)
    masked = mask_trees(
        target.repeat(batch * 3, 1), [grammar] * batch, tokens.tolist(), above.tolist()
    )
    q_rows = torch.tensor([-1, 0, 0], dtype=torch.int32)
    _, accepted, output = accept(
        masked, tokens, above, 1, None, q_rows, [draft_logits], 1.0, rule, seeds
    )  # fmt: skip
    assert 0 < int(accepted.sum()) < batch
    wanted = target[0, allowed].softmax(0)
    found = torch.tensor([(output[:, 0] == token).sum().item() for token in allowed]) / batch
    assert float(found.sum()) == pytest.approx(1.0)
    # four standard deviations of a share
    assert bool(((found - wanted).abs() < 4 * (wanted * (1 - wanted) / batch).sqrt()).all())


def test_a_model_without_eos_ends_where_only_an_end_may_follow() -> None:
    for vocab_size in (256, 257, 300):
        # an id of the model's that no token has is no end either
        grammars = Grammars(byte_tokenizer(), vocab_size, frozenset({299}))
        grammar = start(grammars, regex="a{1,2}")
        assert ids(grammar.mask()) == {64}
        assert grammar.advance(64)
        assert not grammar.is_over
        masks = tree_masks(grammar, [0, 64, 64, 3], [-1, 0, 1, 0])
        # after the second node only an end may follow
        assert {node: ids(mask) for node, mask in masks.items()} == {0: {64}}
        assert grammar.advance(64)
        assert (grammar.is_over, grammar.error) == (True, None)


def test_an_end_that_is_complete_takes_eos_alone(grammars) -> None:
    grammar = start(grammars, regex="a")
    assert grammar.advance(64)
    assert not grammar.is_over
    assert ids(grammar.mask()) == EOS
    assert grammar.advance(257)
    assert (grammar.is_over, grammar.error) == (True, None)
    grammar = start(grammars, regex="a")
    grammar.advance(64)
    assert not grammar.advance(64)
    assert "64" in (grammar.error or "")


def test_a_token_that_the_grammar_refuses_is_an_error(grammars) -> None:
    grammar = start(grammars, regex="ab")
    assert not grammar.advance(65)
    assert grammar.is_over
    assert "65" in (grammar.error or "")


def test_a_grammar_that_becomes_too_complex_is_an_error(tokenizer) -> None:
    """Its mask is none, not that of a complete output, which the library would show."""
    limits = llguidance.LLParserLimits(step_max_items=60)
    grammars = Grammars(tokenizer, VOCAB, EOS, limits)
    grammar = start(grammars, grammar='start: ("a" | b)+ \n b: "b" ("c" | "d" b | "e" b b | b)*')
    while grammar.mask() is not None:
        assert grammar.advance(65)
        assert not grammar.is_over
    assert tree_masks(grammar, [0, 65], [-1, 0]) == {}
    assert not grammar.advance(65)
    assert "items" in (grammar.error or "")


BAD = {
    "regex": {"regex": "(a"},
    "look-behind": {"regex": "(?<=a)b"},
    "lark": {"grammar": "start: x"},
    "gbnf": {"grammar": 'root ::= "a'},
    "type": {"json": {"type": "objekt"}},
    "unsatisfiable": {"json": {"enum": []}},
    "not-implemented": {"json": {"type": "array", "uniqueItems": True}},
    "white-space": {"json_object": True, "whitespace_pattern": "["},
    "deep": {"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000},
}


@pytest.mark.parametrize("options", BAD.values(), ids=BAD)
def test_what_the_library_refuses(grammars, options) -> None:
    with pytest.raises(RequestError, match="llguidance") as caught:
        start(grammars, **options)
    assert len(caught.value.found) < 400
    assert "<state>" not in str(caught.value)


def test_a_vocabulary_that_cannot_begin_is_refused() -> None:
    digits = Tokenizer(models.BPE({str(i): i for i in range(10)}, []))
    digits.decoder = decoders.ByteLevel()
    grammars = Grammars(digits, 10, frozenset())
    assert ids(start(grammars, regex="[0-9]+").mask()) == set(range(10))
    with pytest.raises(RequestError, match="no token begins"):
        start(grammars, json_object=True)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
def test_a_tokenizer_that_nobody_can_read(decoder) -> None:
    made = byte_tokenizer()
    if decoder is None:
        made = Tokenizer(models.BPE({"a": 0}, []))
    else:
        made.decoder = decoder
    with pytest.raises(RequestError, match="byte-level"):
        start(Grammars(made, VOCAB, frozenset()), regex="a")


def test_a_tokenizer_that_is_read_otherwise_than_it_writes() -> None:
    made = byte_tokenizer()
    made.decoder = decoders.Sequence([decoders.Replace("a", "b"), decoders.ByteLevel()])
    with pytest.raises(RequestError, match="read as"):
        start(Grammars(made, VOCAB, frozenset()), regex="a")


def test_an_engine_without_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        start(Grammars(None, VOCAB, EOS), regex="a")


def test_without_the_library(tokenizer, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match='pip install "llguidance'):
        start(Grammars(tokenizer, VOCAB, EOS), regex="a")


def test_requests_are_made_in_any_thread(grammars) -> None:
    """At the same time as others, and used in another thread than the one that made them."""
    options = [{"choice": [f"a{i % 7}b"]} for i in range(64)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda one: start(grammars, **one), options))
    for i, grammar in enumerate(made):
        for letter in f"a{i % 7}b":
            assert ids(grammar.mask()) == {ord(letter) - 33}
            grammar.advance(ord(letter) - 33)


def test_grammars_are_compiled_once_and_requests_share_nothing(tokenizer, monkeypatch) -> None:
    made = []
    matcher = llguidance.LLMatcher

    class Counted:
        grammar_from_json_schema = matcher.grammar_from_json_schema

        def __new__(cls, *args: Any, **options: Any) -> Any:
            made.append(args)
            return matcher(*args, **options)

    grammars = Grammars(tokenizer, VOCAB, EOS)
    monkeypatch.setattr(llguidance, "LLMatcher", Counted)
    first, second = (start(grammars, json_object=True) for _ in range(2))
    assert len(made) == 2  # one for requests, one for what their drafts look at
    begin = ids(second.mask())
    first.advance(tokenizer.encode("{").ids[0])
    assert ids(first.mask()) != begin
    assert ids(second.mask()) == begin == ids(start(grammars, json_object=True).mask())
