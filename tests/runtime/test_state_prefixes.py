"""Prefixes of targets whose layers keep states: hits and tokens are the same whatever runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.speculation.plans import OFF, SpecPlan
from tests.runtime.states_rig import PlainStates, build_hybrid
from tests.runtime.test_states import CHAIN, LOOKUP, TREE, greedy, prompt_of, run
from tests.tiers import only

GRID = 8
CASES = [
    pytest.param(plan, chunk, id=f"{plan.name}-{chunk}")
    for plan in (OFF, CHAIN, TREE, LOOKUP)
    for chunk in (5, 16, 64)
]


@pytest.fixture(scope="module")
def plain() -> PlainStates:
    return PlainStates()


def hybrid(plan: SpecPlan, chunk: int = 16, count: int = 20, **sizes: int) -> Engine:
    return build_hybrid(
        [plan], prefill_chunk=chunk, num_checkpoints=count, grid=GRID if count else 0, **sizes
    )


def chats(
    engine: Engine, plan: SpecPlan, plain: PlainStates, shares: bool = True
) -> tuple[list[int], list[list[int]]]:
    """Three turns of two chats with one system prompt; tokens that each turn found, and outputs."""
    core = EngineCore(engine, plan.name, shares_prefixes=shares)
    system, found, outputs = prompt_of(19), [], []
    histories = [[*system, *prompt_of(6, seed)] for seed in (1, 2)]
    for turn in range(3):
        for chat, history in enumerate(histories):
            # outputs that end where states are kept, whose last token has no row, or anywhere
            count = GRID - len(history) % GRID if chat == 0 else 9 + turn
            (request,) = run(core, [history], count, lambda: plain.check(core))
            found.append(request.stats.num_cached_tokens)
            outputs.append(request.output_token_ids)
            history += [*request.output_token_ids, *prompt_of(4 + turn, chat + 7)]
    assert core.scheduler.stats.num_cached_tokens == sum(found)
    return found, outputs


def wanted_hits(outputs: Sequence[Sequence[int]]) -> list[int]:
    """Of `chats`: the second chat finds the system prompt, later turns all rows before theirs."""
    lengths = [25, 25]
    hits = [0, 19 // GRID * GRID]
    for turn in range(2):
        totals = [length + len(outputs[2 * turn + i]) for i, length in enumerate(lengths)]
        # the last token of an output has no row
        hits += [(total - 1) // GRID * GRID for total in totals]
        lengths = [total + 4 + turn for total in totals]
    return hits


@pytest.mark.parametrize(("plan", "chunk"), only(["off-16", "chain-4-5", "tree-2-2-1-64"], CASES))
def test_hits_depend_on_tokens_alone(plan: SpecPlan, chunk: int, plain: PlainStates) -> None:
    found, outputs = chats(hybrid(plan, chunk), plan, plain)
    _, alone = chats(hybrid(plan, chunk), plan, plain, shares=False)
    assert outputs == alone
    assert found == wanted_hits(outputs)


def test_without_checkpoints_nothing_is_shared(plain: PlainStates) -> None:
    found, _ = chats(hybrid(OFF, count=0), OFF, plain)
    assert found == [0] * 6


def test_few_checkpoints_are_those_of_the_last_prompts(plain: PlainStates) -> None:
    """Three are enough for two chats and what they have in common."""
    (one, outputs), (three, _) = (chats(hybrid(TREE, count=count), TREE, plain) for count in (1, 3))
    assert three == wanted_hits(outputs)
    # each chat takes the only place from the other
    assert one == [0] * 6


def test_many_prompts_at_once_share_what_is_there(plain: PlainStates) -> None:
    """Prompts of one batch leave the same checkpoints, once; and each output one of its own."""
    engine = hybrid(TREE, max_num_seqs=3)
    core = EngineCore(engine, TREE.name)
    system = prompt_of(24)
    prompts = [[*system, *prompt_of(5, seed)] for seed in range(3)]
    first = run(core, prompts, 6, lambda: plain.check(core))
    states = engine.cache.states
    assert states is not None
    assert len(states.checkpoints._place_of) == 3 + 3
    again = run(core, prompts, 6, lambda: plain.check(core))
    assert [x.stats.num_cached_tokens for x in again] == [24, 24, 24]
    assert [x.output_token_ids for x in first] == [x.output_token_ids for x in again]


def test_blocks_that_are_gone_end_a_prefix(plain: PlainStates) -> None:
    """A checkpoint without the rows before it is of no use."""
    engine = hybrid(TREE)
    core = EngineCore(engine, TREE.name)
    prompt = prompt_of(30)
    run(core, [prompt], 4)
    engine.cache.allocator.forget_all()
    (request,) = run(core, [prompt], 4, lambda: plain.check(core))
    assert request.stats.num_cached_tokens == 0


def test_drafts_go_on_where_the_prefix_ends(plain: PlainStates) -> None:
    """Blocks that are there beyond the last checkpoint are of use to nobody."""
    engine = hybrid(CHAIN)
    core = EngineCore(engine, CHAIN.name)
    run(core, [prompt_of(30)], 3)
    request = core.requests.make([*prompt_of(30), 1], greedy(4))
    core.scheduler.add(request)
    core.scheduler.schedule()
    assert (request.cache_len, request.draft_lens) == (24, [24])
