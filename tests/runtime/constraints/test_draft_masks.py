"""Drafts that obey grammars: what they propose, what they were drawn from, and what comes out."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.eager.step import EagerStep
from specc.runtime.constraints.draft_masks import DraftMasks
from specc.runtime.constraints.drafted_places import DraftedPlaces
from specc.runtime.constraints.grammar_masks import TreeMasks, tree_masks
from specc.runtime.constraints.grammars import Grammars
from specc.runtime.constraints.mask_maker import MaskMaker
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree
from tests.runtime.constraints.test_grammar_masks import CHOICES, EOS, VOCAB, byte_tokenizer
from tests.tiers import every

# what follows a node depends on its depth
TURNS = StructuredOutputsParams(regex="([a-c][d-f][g-i]){2,6}")
CODE = StructuredOutputsParams(regex="[0-9]{2,5}-[a-f]{1,9}")
ONE = StructuredOutputsParams(choice=["nothing else but this one"])
FREE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# whose first child ends, and whose second goes on
IRREGULAR = SpecPlan.from_tree(TokenTree((-1, 0, 0, 2, 3)))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(5, 3, 2))
# a view of one block of the sink and the last two, of sequences that have more
VIEW = "self_w16_s4"
SEVERAL = (
    SpecPlan.from_widths((2, 1), (VIEW,)),
    SpecPlan.from_widths((1, 1), ("draft_0", VIEW), MERGE),
    SpecPlan.from_widths((1, 1, 1), (VIEW, "draft_0"), VOTE),
)
PLANS = ("tree-2-1", "chain-3", IRREGULAR.name, DYNAMIC.name)


@pytest.fixture(scope="module")
def engine(tiny_engine: Path) -> Engine:
    engine = Engine.load(tiny_engine)
    models = {"target": engine.target, "draft_0": engine.drafts[0]}
    slabs = {name: len(own) for name, own in engine.cache.slabs.items()}
    block_size = engine.cache.shape.block_size
    for plan in (IRREGULAR, DYNAMIC, *SEVERAL):
        assert plan.num_rows <= engine.cache.shape.max_nodes
        program = fuse_step(plan, slabs, block_size=block_size).to_json()
        engine.steps[plan.name] = EagerStep(json.loads(json.dumps(program)), models)
    return engine


class Watch:
    """What may follow each node of each verified tree, by matchers of its own."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self._engine = engine
        self.see: Callable[[TreeMasks, Any, int, dict[int, set[int]]], None] = _look_away
        hook = TreeMasks.__call__

        def watched(masks: TreeMasks, values: Any) -> None:
            parents = _parents(masks, values)
            for b, request in enumerate(masks._requests):
                if request.grammar is not None:
                    tokens = values["tokens"][b].tolist()
                    self.see(masks, values, b, self.allowed(request, tokens, parents[b]))
            hook(masks, values)

        patch.setattr(TreeMasks, "__call__", watched)

    def allowed(
        self, request: Request, tokens: Sequence[int], parents: Sequence[int]
    ) -> dict[int, set[int]]:
        """Node → what may follow it, of nodes on allowed paths that are no ends."""
        found = {}
        paths = {0: ()}
        for node, parent in enumerate(parents):
            if node and parent in found and tokens[node] in found[parent]:
                paths[node] = (*paths[parent], tokens[node])
            if node in paths and (mask := self._fresh(request, paths[node])) is not None:
                whole = int.from_bytes(mask, "little")
                found[node] = {token for token in range(260) if whole >> token & 1}
        return found

    def _fresh(self, request: Request, path: Sequence[int]) -> bytes | None:
        grammar = self._engine.grammars.start(request.params.structured_outputs)
        tokens = [*request.token_ids[request.num_prompt_tokens :], *path]
        goes_on = all(grammar.advance(token) and not grammar.is_over for token in tokens)
        return grammar.mask() if goes_on else None


def _look_away(masks: TreeMasks, values: Any, b: int, allowed: dict[int, set[int]]) -> None:
    """Nobody asks."""


def _parents(masks: TreeMasks, values: Any) -> list[list[int]]:
    if masks._plan.is_static:
        return [list(masks._plan.tree.parents)] * len(masks._requests)
    return values["parents"].tolist()


@pytest.fixture
def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(engine, monkeypatch)


def run(engine: Engine, plan: str, **options: Any) -> tuple[LLM, list[Any]]:
    """Two grammars, and between them a request that nothing constrains."""
    own = [
        SamplingParams(
            max_tokens=30, structured_outputs=one, seed=3, **{"temperature": 0, **options}
        )
        for one in (TURNS, CODE)
    ]
    llm = LLM(engine, plan)
    outputs = llm.generate(["hello", "abab", "{.." * 17], [own[0], FREE, own[1]])
    return llm, [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Callable[[float], list[Any]]:
    """Outputs of plain decoding at a temperature."""
    return functools.cache(lambda temperature: run(engine, "off", temperature=temperature)[1])


@pytest.mark.parametrize("plan", every(3, [*PLANS, *(plan.name for plan in SEVERAL)]))
def test_drafts_propose_what_the_grammar_allows(engine, plain, watch, plan) -> None:
    """At every node, and where less is allowed than proposed, all of it; nothing else comes out."""
    seen = []

    def see(masks: TreeMasks, values: Any, b: int, allowed: dict[int, set[int]]) -> None:
        parents, tokens = _parents(masks, values)[b], values["tokens"][b].tolist()
        for node, wanted in allowed.items():
            made = [tokens[i] for i, parent in enumerate(parents) if i and parent == node]
            likely = made[: len(wanted)]
            assert set(likely) <= wanted, (node, made, wanted)
            seen.append((node > 0, len(likely)))

    watch.see = see
    for temperature in (0.0, 1.2):
        _, outputs = run(engine, plan, temperature=temperature)
        assert outputs == plain(temperature)
        assert [output.finish_reason for output in outputs] == ["stop", "length", "stop"]
    # below the root, too
    assert sum(count for is_below, count in seen if is_below) > 10


@pytest.mark.parametrize("rule", every(2, ["mss", "swor"]))
@pytest.mark.parametrize("plan", ["tree-2-1", "chain-3", IRREGULAR.name])
def test_acceptance_sees_what_was_drawn_from(engine, watch, plan, rule) -> None:
    """The kept logits of a draft are those of the grammar's tokens; others' are whole."""
    seen = []

    def see(masks: TreeMasks, values: Any, b: int, allowed: dict[int, set[int]]) -> None:
        batch, tree = len(masks._requests), masks._plan.tree
        for depth in range(tree.max_depth):
            fed = [node for node in tree.levels[depth] if node not in tree.leaves]
            rows = values[f"q_{depth}"].view(batch, len(fed), -1)
            for node, row in zip(fed, rows[b], strict=True):
                if node in allowed:
                    finite = set((row > -torch.inf).nonzero()[:, 0].tolist())
                    assert finite == allowed[node]
                    seen.append(depth)
            if batch == 3:
                assert bool((rows[1] > -torch.inf).all())

    watch.see = see
    run(engine, plan, temperature=1.2, rule=rule)
    assert seen.count(1) > 2


@pytest.mark.parametrize("plan", [IRREGULAR.name, DYNAMIC.name])
def test_delta_puts_out_what_plain_decoding_does(engine, plain, plan) -> None:
    assert run(engine, plan, temperature=1.2, rule="delta")[1] == plain(1.2)


def test_what_alone_may_follow_is_proposed(engine) -> None:
    """Models of random weights agree on a text that leaves no choice."""
    params = SamplingParams(temperature=0, max_tokens=30, structured_outputs=ONE)
    llm = LLM(engine, "chain-3")
    (output,) = llm.generate("hello", params)
    num_tokens = len(output.outputs[0].token_ids)
    assert output.outputs[0].text == ONE.choice[0]
    # the prompt yields the first; each step four, until EOS
    assert llm.get_metrics().num_spec_steps == -(-(num_tokens - 1) // 4)


def test_plans_that_share_a_pass_mask_their_drafts(engine, watch) -> None:
    """A prompt comes while another request is in its trees: all have one pass of the target."""
    seen = []

    def see(masks: TreeMasks, values: Any, b: int, allowed: dict[int, set[int]]) -> None:
        tokens = values["tokens"][b].tolist()
        reached = [node for node in range(3) if node in allowed and len(allowed[node])]
        assert all(tokens[node + 1] in allowed[node] for node in reached)
        seen.append(len(reached))

    watch.see = see
    llm = LLM(engine, "chain-3")
    params = SamplingParams(temperature=0, max_tokens=30, structured_outputs=CODE)
    # more requests than places: prompts of the last ones come while others are in their trees
    llm.generate(["a", "b" * 9, "hello", "abab", "c", "d"], params)
    assert llm._runner.num_shared_passes > 0
    assert len(seen) > 10


def test_a_mask_is_made_once(engine, monkeypatch) -> None:
    """Drafts and verification ask at the same nodes."""
    made: list[tuple[int, int, tuple[int, ...]]] = []
    # kept, so that no two have one id
    states: list[DraftedPlaces] = []
    make = DraftedPlaces._make

    def counted(places: DraftedPlaces, path: list[int]) -> bytes | None:
        states.append(places)
        made.append((id(places), id(places._made), tuple(path)))
        kept.append(places._made)
        return make(places, path)

    kept: list[Any] = []
    monkeypatch.setattr(DraftedPlaces, "_make", counted)
    run(engine, IRREGULAR.name)
    assert len(made) > 20
    assert len(made) == len(set(made))


def test_a_step_that_fails_leaves_no_mask(engine, monkeypatch) -> None:
    """The next step of the plan, of a request without a grammar, drafts as before."""
    step, trees = engine.steps["chain-3"], []
    monkeypatch.setattr(step, "before_accept", lambda v: trees.append(v["tokens"].tolist()))
    state, call, left = engine.grammars.start(CODE), DraftMasks.__call__, iter(range(4))
    LLM(engine, "chain-3").generate("abab", FREE)
    wanted = trees[:]

    def fails(masks: DraftMasks, inputs: Any, logits: Any) -> Any:
        if next(left, None) is None:
            raise RuntimeError("a draft's pass")
        return call(masks, inputs, logits)

    with monkeypatch.context() as patch:
        patch.setattr(engine.grammars, "start", lambda params: state)
        patch.setattr(DraftMasks, "__call__", fails)
        with pytest.raises(RuntimeError, match="a draft's pass"):
            LLM(engine, "chain-3").generate(
                "hello", SamplingParams(temperature=0, structured_outputs=CODE)
            )
    trees.clear()
    LLM(engine, "chain-3").generate("abab", FREE)
    assert trees == wanted


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(byte_tokenizer(["<|end|>", "<|eot|>"]), VOCAB, EOS)


@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_a_grammar_is_at_the_root_after_a_failure(grammars, monkeypatch, calls) -> None:
    tokenizer = byte_tokenizer(["<|end|>", "<|eot|>"])
    a, b, c, d = tokenizer.encode("abcd").ids
    tokens, parents = [0, a, b, c, d, b], [-1, 0, 1, 2, 2, 0]
    wanted = tree_masks(grammars.start(StructuredOutputsParams(choice=CHOICES)), tokens, parents)
    assert len(wanted) == 6
    grammar = grammars.start(StructuredOutputsParams(choice=CHOICES))
    make, left = MaskMaker.make, iter(range(calls))

    def fails(maker: MaskMaker, matcher: Any) -> bytes | None:
        if next(left, None) is None:
            raise RuntimeError("no mask")
        return make(maker, matcher)

    with monkeypatch.context() as patch:
        patch.setattr(MaskMaker, "make", fails)
        with pytest.raises(RuntimeError, match="no mask"):
            tree_masks(grammar, tokens, parents)
    assert tree_masks(grammar, tokens, parents) == wanted
    # as the output grows, too
    assert grammar.advance(a)
    below = {0: wanted[1], 1: wanted[2], 2: wanted[3], 3: wanted[4]}
    assert tree_masks(grammar, [0, b, c, d], [-1, 0, 1, 1]) == below
    assert grammar.advance(b)
    assert tree_masks(grammar, [0, c], [-1, 0]) == {0: wanted[2], 1: wanted[3]}


def test_a_draft_whose_states_are_behind_begins_at_the_root(grammars) -> None:
    """Its first level counts rows from those that its states have seen."""
    a, b = byte_tokenizer(["<|end|>", "<|eot|>"]).encode("ab").ids
    states = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32)
    found = []
    for lengths, more in (([7, 7], []), ([6, 5], [states])):
        own = [grammars.start(StructuredOutputsParams(choice=CHOICES)) for _ in range(2)]
        masks = DraftMasks(own)
        first = (
            torch.zeros(6, dtype=torch.int64), None, torch.tensor([0, 3, 6]),
            torch.tensor([-1, 6, 7, 5, 6, 7]), torch.tensor(lengths), None, None,
            torch.tensor([2, 5]), *more,
        )  # fmt: skip
        second = (
            torch.tensor([a, b]), None, torch.tensor([0, 1, 2]), torch.tensor([8, 8]),
            torch.tensor([7, 7]), torch.tensor([[1], [1]]), None, torch.tensor([0, 1]), *more,
        )  # fmt: skip
        found.append([masks.rows(first, 2), masks.rows(second, 2)])
    assert found[0] == found[1]
    assert list(found[0][0]) == list(found[0][1]) == [0, 1]
    assert found[0][0][0] != found[0][1][0] != found[0][1][1]


def test_a_draft_without_any_allowed_token_finds_all_of_them_likely(grammars) -> None:
    """As where it has no row of these tokens; a row that has one keeps to it."""
    first = byte_tokenizer().encode("abc").ids
    own = [grammars.start(StructuredOutputsParams(choice=CHOICES)) for _ in range(2)]
    logits = torch.full((2, VOCAB), 5.0)
    logits[0, first] = logits[1, first[1:]] = -torch.inf
    ones = torch.ones(2, dtype=torch.int32)
    places = torch.arange(3)
    inputs = (places[:2], None, places, ones, ones, None, None, places[:2])
    found = DraftMasks(own)(inputs, logits)
    wanted = torch.full((2, VOCAB), -torch.inf)
    wanted[0, first], wanted[1, first[0]] = 0.0, 5.0
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("more", "reads_tokens", "others"),
    [(0, False, ()), (3, False, ()), (0, True, ()), (3, False, (0, 4))],
    ids=["depths", "hidden-states", "tokens", "a-row-of-the-context"],
)
def test_the_first_depth_of_a_block_obeys(
    grammars, more: int, reads_tokens: bool, others: tuple[int, ...]
) -> None:
    """Of two sequences, one with a grammar; the other depths, and the other one, stay as drawn.

    So do hidden states, where they come after the logits, and other rows that a step reads. Where
    the context is tokens, a pass is causal, and reads no features.
    """
    first = byte_tokenizer().encode("abc").ids
    own = [None, grammars.start(StructuredOutputsParams(choice=CHOICES))]
    count = 4 + len(others)
    logits = torch.arange(count * (VOCAB + more)).float().view(count, VOCAB + more)
    # a row of the context, the root and two masks, twice; one depth after the other
    slots = torch.tensor([3, 4, 5, 6, 1, 2, 3, 4])
    features = torch.tensor([[3, -1], [-1, -1], [-1, -2], [-1, -3]] * 2)
    features[4, 0] = 1
    inputs = (
        torch.full((8,), 9), slots, torch.tensor([0, 4, 8]), slots, torch.tensor([4, 2]),
        torch.tensor([[0], [7], [7], [7]] * 2), torch.zeros(2, 1),
        torch.tensor([2, 6, 3, 7, *others]), features,
    )  # fmt: skip
    if reads_tokens:
        inputs = (*inputs[:5], None, *inputs[6:8])
    found = DraftMasks(own)(inputs, logits)
    allowed = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(first), True)
    wanted = logits.clone()
    wanted[1, :VOCAB][~allowed] = -torch.inf
    assert torch.equal(found, wanted)


def test_the_first_of_medusa_heads_obeys(grammars) -> None:
    """Three heads make rows of one root each, of one sequence after the other."""
    first = byte_tokenizer().encode("abc").ids
    own = [None, grammars.start(StructuredOutputsParams(choice=CHOICES))]
    logits = torch.arange(6 * VOCAB).view(6, VOCAB).float()
    slots = torch.tensor([4, 2])
    features = torch.tensor([[3, -1], [1, -1]])
    inputs = (
        torch.full((2,), 9), slots, torch.tensor([0, 1, 2]), slots, slots, None,
        torch.zeros(2, 1), torch.arange(2), features,
    )  # fmt: skip
    found = DraftMasks(own)(inputs, logits)
    allowed = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(first), True)
    wanted = logits.clone()
    wanted[3, ~allowed] = -torch.inf
    assert torch.equal(found, wanted)
