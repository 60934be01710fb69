"""Which queries vote, in which rows of a pass, and when: in engines that serve several requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specc.runtime.core import EngineCore
from specc.runtime.drafters.block_choice import BlockChoice
from specc.runtime.engine import Engine
from specc.runtime.scheduling.batch import StepGroup
from specc.runtime.scheduling.kv_cache import NOBODY
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan

OFF = SpecPlan.from_widths(())
PLAN = SpecPlan.from_widths((1, 1, 1), ("self_w4_s4_b8",))
CHUNK = 16
LENGTHS = (3, 16, 17, 40, 33)


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(plans=[OFF, PLAN], max_num_seqs=5, prefill_chunk=CHUNK)


@pytest.fixture(scope="module")
def plain(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(plans=[OFF, PLAN], max_num_seqs=5)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[tuple[BlockChoice, Tensor, int, int]]:
    """What choices are given: themselves, votes, their number, and the length of the request."""
    found: list[tuple[BlockChoice, Tensor, int, int]] = []
    add = BlockChoice.add

    def noted(self: BlockChoice, votes: Tensor, num_voters: int, length: int) -> None:
        found.append((self, votes.clone(), num_voters, length))
        add(self, votes, num_voters, length)

    monkeypatch.setattr(BlockChoice, "add", noted)
    return found


def text_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 60, (length,), generator=generator).tolist()


@torch.inference_mode()
def votes_of(plain: Engine, tokens: list[int], count: int) -> Tensor:
    """[n] of the last `count` of these tokens, alone in passes of the target."""
    cache = plain.cache
    blocks = cache.allocator.allocate(cache.shape.blocks_per_sequence)
    table = cache.block_table([blocks])
    mass = torch.zeros(1, cache.shape.blocks_per_sequence)
    for first, last in ((0, len(tokens) - count), (len(tokens) - count, len(tokens))):
        if first == last:
            continue
        places = torch.arange(first, last)
        plain.target(
            torch.tensor(tokens[first:last]), places,
            torch.tensor([0, last - first], dtype=torch.int32), places.int(),
            torch.tensor([first], dtype=torch.int32), None, table, torch.tensor([0]),
            *([mass] if last == len(tokens) else []),
        )  # fmt: skip
    cache.allocator.free(blocks)
    return mass[0]


def start(core: EngineCore, lengths: tuple[int, ...], max_tokens: int = 4) -> list[Request]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    requests = [core.requests.make(text_of(n), params) for n in lengths]
    for request in requests:
        core.scheduler.add(request)
    return requests


def finish(core: EngineCore) -> None:
    mass = core.engine.cache.block_mass
    while core.scheduler.has_work:
        assert core.advance()
        assert mass is not None
        assert (mass == NOBODY).all(), "nobody votes between steps"


def test_votes_of_prompts(engine: Engine, plain: Engine, added: list) -> None:
    """The last chunk of each, of several in one pass; a chunk that ends nothing says nothing."""
    core = EngineCore(engine, PLAN.name, shares_prefixes=False)
    requests = start(core, LENGTHS, max_tokens=1)
    finish(core)
    assert len(added) == len(requests)
    for request in requests:
        (found,) = [one for one in added if one[0] is request.block_choice]
        _, votes, num_voters, length = found
        assert length == request.num_prompt_tokens
        assert 1 <= num_voters <= min(CHUNK, length)
        wanted = votes_of(plain, request.token_ids[:length], num_voters)
        torch.testing.assert_close(votes, wanted)


def test_a_prompt_that_is_in_the_cache(engine: Engine, plain: Engine, added: list) -> None:
    """One query votes, over rows that another request computed."""
    core = EngineCore(engine, PLAN.name)
    (first,) = start(core, (33,), max_tokens=1)
    finish(core)
    (second,) = start(core, (33,), max_tokens=1)
    finish(core)
    assert second.stats.num_cached_tokens == 32
    (_, votes, num_voters, length) = added[-1]
    assert (added[-1][0], num_voters, length) == (second.block_choice, 1, 33)
    torch.testing.assert_close(votes, votes_of(plain, first.token_ids[:33], 1))


def test_votes_of_steps(engine: Engine, added: list) -> None:
    """All nodes of a step, again and again."""
    core = EngineCore(engine, PLAN.name, shares_prefixes=False)
    requests = start(core, (3, 17), max_tokens=70)
    finish(core)
    for request in requests:
        own = [one[1:] for one in added if one[0] is request.block_choice]
        assert len(own) == 3
        lengths = [length for *_, length in own]
        for before, after in itertools.pairwise(lengths):
            assert 32 <= after - before < 32 + PLAN.num_nodes
        for votes, num_voters, length in own[1:]:
            assert num_voters == PLAN.num_nodes
            used = -(-(length + PLAN.num_nodes) // 4)
            assert votes[:used].gt(0).all()
            assert not votes[used:].any()
            # of 2 layers of heads
            assert votes.sum() == pytest.approx(own[0][0].sum() * num_voters / own[0][1])


def test_plans_that_choose_nothing(engine: Engine, added: list) -> None:
    core = EngineCore(engine, "off", shares_prefixes=False)
    start(core, (17,), max_tokens=70)
    finish(core)
    assert len(added) == 1, "at the end of the prompt: another plan may follow"


def test_a_shared_pass(engine: Engine, plain: Engine, added: list) -> None:
    """Prompts and trees in one pass: each sequence has its own row."""
    core = EngineCore(engine, PLAN.name, shares_prefixes=False)
    late, early = start(core, (17,), max_tokens=60), []
    while late[0].cache_len < 49:
        assert core.advance()
    assert late[0].block_choice.num_voters < 32
    before = core.runner.num_shared_passes
    due = late[0].block_choice.is_due(late[0].cache_len, PLAN.views)
    early = start(core, (5, 6), max_tokens=1)
    assert core.advance()
    assert due
    assert core.runner.num_shared_passes == before + 1
    found = {id(choice): (votes, count, length) for choice, votes, count, length in added[-3:]}
    assert len(found) == 3
    for request in early:
        votes, count, length = found[id(request.block_choice)]
        torch.testing.assert_close(votes, votes_of(plain, request.token_ids[:length], count))
    votes, count, length = found[id(late[0].block_choice)]
    assert count == PLAN.num_nodes
    used = -(-(length + count) // 4)
    assert votes[:used].gt(0).all()
    assert not votes[used:].any()
    finish(core)


def test_voters_of_a_step_are_its_live_nodes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockChoice, "is_due", lambda *_: True)
    core = EngineCore(engine, PLAN.name)
    requests = start(core, (3, 5))
    votes = core.runner._votes
    assert votes.of_step(StepGroup(PLAN, requests, live=(2, 3))).counts == [2, 3]
    assert votes.of_step(StepGroup(PLAN, requests)).counts == [PLAN.num_nodes] * 2
    for request in requests:
        core.scheduler.abort(request)
