"""Iterations that are chosen while the results of the one before are on their way."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specc.runtime.drafters.prediction import Prediction
from specc.runtime.policies.base import FixedPolicy, Policy
from specc.runtime.scheduling.batch import Batch
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.scheduler import Scheduler
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan
from tests.runtime.scheduling.test_scheduler import (
    CHAIN,
    MAX_SEQ_LEN,
    groups,
    make_request,
    make_scheduler,
    run,
    running,
    spans,
)

TREE = SpecPlan.from_widths([2, 1])


class Script(Policy):
    """Plans by request, which a test changes."""

    chooses_late = True

    def __init__(self, **plans: str) -> None:
        self.plans = plans

    def choose(self, num_running: int, stats: SpecStats) -> str:
        return CHAIN.name

    def choose_each(self, requests: list[Request], stats: SpecStats) -> list[str]:
        return [self.plans[request.request_id] for request in requests]


def scripted(policy: Any, *plans: SpecPlan, prefill_chunk: int = 100, **options: Any) -> Scheduler:
    _, cache = make_scheduler(max_num_seqs=3, **options)
    known = {plan.name: plan for plan in (OFF, CHAIN, *plans)}
    return Scheduler(cache, known, policy, prefill_chunk, MAX_SEQ_LEN, shares_prefixes=False)


def ahead_of(scheduler: Scheduler, *queued: Batch) -> dict[str, list[str]] | None:
    batch = scheduler.schedule_ahead(queued)
    return None if batch is None else groups(batch)


def test_steps_go_on_while_nothing_else_comes() -> None:
    scheduler, _ = make_scheduler(chunk=100)
    batch = running(scheduler, make_request("a", max_tokens=20), make_request("b", max_tokens=20))
    assert batch.groups[0].ahead == ()
    following = scheduler.schedule_ahead([batch])
    assert following is not None
    assert groups(following) == {"chain-2": ["a", "b"]}
    assert following.groups[0].ahead == (3, 3)
    scheduler.hold(following)
    scheduler.postprocess(batch, run(batch, 1))
    third = scheduler.schedule_ahead([following])
    assert third is not None
    assert groups(third) == {"chain-2": ["a", "b"]}
    # no slot for c; a leaves, and its row is not asked for again
    scheduler.add(make_request("c"))
    assert ahead_of(scheduler, following) == {"chain-2": ["a", "b"]}
    scheduler.abort(batch.groups[0].requests[0])
    assert ahead_of(scheduler, following) == {"chain-2": ["b"]}


def test_prompts_join_while_steps_are_in_flight() -> None:
    """In chunks, and with a first step once the first token is there."""
    scheduler, _ = make_scheduler(chunk=4)
    first = running(scheduler, make_request("a", max_tokens=20))
    scheduler.add(make_request("b", 6, max_tokens=20))
    seen = [first]
    for wanted in (
        ([("b", 0, 4)], {"chain-2": ["a"]}, (3,)),
        ([("b", 4, 6)], {"chain-2": ["a"]}, (3,)),
        # the last of the prompt is in flight
        ([], {"chain-2": ["a"]}, (3,)),
        # the first token has come: its step is the first one
        ([], {"chain-2": ["a", "b"]}, (3, 0)),
        ([], {"chain-2": ["a", "b"]}, (3, 3)),
    ):
        batch = scheduler.schedule_ahead(seen[-1:])
        assert batch is not None
        assert (spans(batch), groups(batch), batch.groups[0].ahead) == wanted
        assert [span.drafts for span in batch.prefill] == [(0,)] * len(batch.prefill)
        scheduler.hold(batch)
        scheduler.postprocess(seen[-1], run(seen[-1], 1))
        seen.append(batch)
    # six iterations later
    assert [len(s.output_token_ids) for s in scheduler.running] == [11, 3]


def test_prompts_alone_are_queued_chunk_after_chunk() -> None:
    scheduler, _ = make_scheduler(chunk=4)
    scheduler.add(make_request("a", 10))
    batch = scheduler.schedule()
    scheduler.hold(batch)
    following = scheduler.schedule_ahead([batch])
    assert following is not None
    assert spans(following) == [("a", 4, 8)]
    scheduler.hold(following)
    scheduler.postprocess(batch, run(batch))
    last = scheduler.schedule_ahead([following])
    assert last is not None
    assert spans(last) == [("a", 8, 10)]
    scheduler.hold(last)
    scheduler.postprocess(following, run(following))
    assert scheduler.schedule_ahead([last]) is None, "its first token comes first"


def test_a_draft_that_a_chunk_in_flight_leaves_behind_is_not_fed_the_next() -> None:
    scheduler = scripted(FixedPolicy(CHAIN.name), prefill_chunk=4)
    one = make_request("a", 12)
    scheduler.add(one)
    batch = scheduler.schedule()
    assert batch.prefill[0].drafts == (0,)
    scheduler.hold(batch)
    scheduler.use(FixedPolicy(OFF.name))
    second = scheduler.schedule_ahead([batch])
    assert second is not None
    assert second.prefill[0].drafts == ()
    scheduler.hold(second)
    scheduler.postprocess(batch, run(batch))
    scheduler.use(FixedPolicy(CHAIN.name))
    third = scheduler.schedule_ahead([second])
    assert third is not None
    assert third.prefill[0].drafts == ()
    scheduler.postprocess(second, run(second))
    assert (one.cache_len, one.draft_lens) == (8, [4])


def test_a_request_that_leaves_in_its_prompt_keeps_blocks_until_its_pass_is_done() -> None:
    scheduler, cache = make_scheduler(chunk=4)
    one, other = make_request("a", 10), make_request("b", 4, max_tokens=9)
    scheduler.add(one)
    batch = scheduler.schedule()
    scheduler.hold(batch)
    following = scheduler.schedule_ahead([batch])
    assert following is not None
    scheduler.hold(following)
    scheduler.abort(one)
    scheduler.add(other)
    free = cache.allocator.num_free
    assert one.blocks
    scheduler.postprocess(batch, run(batch))
    assert one.blocks
    assert cache.allocator.num_free == free
    scheduler.postprocess(following, run(following))
    assert one.blocks == []
    assert cache.allocator.num_free == cache.allocator.num_blocks
    assert (one.cache_len, scheduler.stats.num_prefill_passes) == (0, 0), "nothing was committed"
    assert spans(scheduler.schedule()) == [("b", 0, 4)]


@pytest.mark.parametrize(
    ("max_tokens", "wanted"),
    [
        # one token of two is out, and the step emits one at least
        pytest.param((2, 20), ["1"], id="certain-end"),
        pytest.param((3, 20), ["0", "1"], id="possible-end"),
        # up to three tokens more
        pytest.param((4, 4), None, id="all-may-end"),
        pytest.param((4, 5), ["0", "1"], id="one-goes-on"),
    ],
)
def test_lengths_that_end_sequences(max_tokens: tuple[int, int], wanted: Any) -> None:
    scheduler, _ = make_scheduler(chunk=100)
    requests = [make_request(str(i), max_tokens=n) for i, n in enumerate(max_tokens)]
    batch = running(scheduler, *requests)
    assert ahead_of(scheduler, batch) == (wanted and {"chain-2": wanted})


@pytest.mark.parametrize(
    ("num_prompt", "wanted"), [(25, "chain-2"), (26, None), (27, None), (28, None), (29, "off")]
)
def test_no_node_lies_beyond_the_last_position(num_prompt: int, wanted: str | None) -> None:
    """Up to three tokens more, and two levels: 25 + 3 + 2 < 31. 28 + 1 + 2 no longer is.

    From 26 to 28 it is the results that tell; 28 speculates now, and plainly decodes after that.
    """
    scheduler, _ = make_scheduler(chunk=100, limit=31)
    batch = running(scheduler, make_request("a", num_prompt, max_tokens=99))
    found = scheduler.schedule_ahead([batch])
    if num_prompt == 28:
        # it may get blocks for no more than there are
        assert found is None or groups(found) == {"off": ["a"]}
    else:
        assert (found and groups(found)) == (wanted and {wanted: ["a"]})


def test_blocks_are_taken_for_the_longest_that_results_may_be() -> None:
    """Rows 0 … 4, three more, and three nodes: 11 of them, and blocks of 4."""
    scheduler, _ = make_scheduler(chunk=100, num_blocks=5, looks_ahead=False)
    one, other = make_request("a", max_tokens=8), make_request("b", max_tokens=8)
    batch = running(scheduler, one, other)
    assert [len(s.blocks) for s in (one, other)] == [2, 2]
    assert ahead_of(scheduler, batch) is None, "one block is free, and both need one more"
    assert scheduler.stats.num_preemptions == 0
    scheduler.abort(other)
    scheduler.recover()
    batch = scheduler.schedule()
    scheduler.hold(batch)
    assert ahead_of(scheduler, batch) == {"chain-2": ["a"]}
    assert len(one.blocks) == 3


def test_plans_change_where_drafts_are_in_step() -> None:
    """From one tree of a draft to another at once; from off only when its tokens are known."""
    policy = Script(a=CHAIN.name, b=CHAIN.name, c=OFF.name)
    scheduler = scripted(policy, TREE)
    requests = [make_request(name, max_tokens=20) for name in "abc"]
    batch = running(scheduler, *requests)
    assert groups(batch) == {"chain-2": ["a", "b"], "off": ["c"]}
    policy.plans["a"] = TREE.name
    following = scheduler.schedule_ahead([batch])
    assert following is not None
    assert groups(following) == {"tree-2-1": ["a"], "chain-2": ["b"], "off": ["c"]}
    assert [group.ahead for group in following.groups] == [(3,), (3,), (1,)]
    scheduler.hold(following)
    scheduler.postprocess(batch, run(batch, 2))
    # one row behind, which the first level reads: in step
    assert requests[2].cache_len - requests[2].draft_lens[0] == 1
    policy.plans["c"] = CHAIN.name
    assert scheduler.schedule_ahead([following]) is None, (
        "two rows behind, and nobody knows the tokens"
    )
    scheduler.postprocess(following, run(following, 2))
    third = scheduler.schedule()
    assert groups(third)["chain-2"] == ["b", "c"]
    assert [group.catches_up for group in third.groups] == [False, True]


def test_results_come_first_where_they_decide_whether_a_tree_fits() -> None:
    """Three rows on, a chain has no position for its last token; one row on, it has."""
    scheduler, _ = make_scheduler(chunk=100, limit=10)
    # node 2 of the chain at 10 - 1 - 3 rows is the last that fits
    batch = running(scheduler, make_request("a", 6, max_tokens=20))
    assert groups(batch) == {"chain-2": ["a"]}
    assert ahead_of(scheduler, batch) is None
    scheduler.postprocess(batch, run(batch, 0))
    assert groups(scheduler.schedule()) == {"chain-2": ["a"]}


def test_a_draft_that_is_in_step_by_one_row_needs_no_results() -> None:
    policy = Script(a=OFF.name)
    scheduler = scripted(policy)
    batch = running(scheduler, make_request("a", max_tokens=20))
    policy.plans["a"] = CHAIN.name
    following = scheduler.schedule_ahead([batch])
    assert following is not None
    assert groups(following) == {"chain-2": ["a"]}
    assert not following.groups[0].catches_up
    scheduler.hold(following)
    scheduler.postprocess(batch, run(batch))
    # what another draft made, a chain's first level does not reach back to
    policy.plans["a"] = OFF.name
    assert ahead_of(scheduler, following) == {"off": ["a"]}


def test_merging_leaves_more_to_catch_up_than_a_chain_reads() -> None:
    merge = SpecPlan.from_widths((1, 1, 1), drafts=("draft_0", "lookup-3"), combine="merge")
    assert merge.catch_up > CHAIN.catch_up
    policy = Script(a=merge.name)
    scheduler = scripted(policy, merge)
    batch = running(scheduler, make_request("a", max_tokens=20))
    assert ahead_of(scheduler, batch) == {merge.name: ["a"]}
    policy.plans["a"] = CHAIN.name
    assert ahead_of(scheduler, batch) is None


def test_lookups_on_the_host_wait_for_tokens() -> None:
    suffix = SpecPlan.from_widths((1, 1), drafts=("suffix",))
    policy = Script(a=suffix.name, b=CHAIN.name)
    scheduler = scripted(policy, suffix)
    batch = running(scheduler, make_request("a", max_tokens=20), make_request("b", max_tokens=20))
    assert ahead_of(scheduler, batch) is None
    policy.plans["a"] = OFF.name
    assert ahead_of(scheduler, batch) == {"chain-2": ["b"], "off": ["a"]}


def test_a_prediction_that_may_go_on_waits_for_tokens() -> None:
    """Whatever plan it would leave; one that has been lost for long keeps nobody."""
    suffix = SpecPlan.from_widths((1, 1), drafts=("suffix",))
    scheduler = scripted(Script(a=OFF.name, b=CHAIN.name), suffix)
    request = make_request("a", max_tokens=20)
    request.prediction = Prediction([1001, 1002, 1003])
    batch = running(scheduler, request, make_request("b", max_tokens=20))
    assert groups(batch) == {"chain-2": ["b"], "off": ["a"]}
    assert ahead_of(scheduler, batch) is None
    request.prediction.propose([1000] * 80, 1)
    assert ahead_of(scheduler, batch) == {"chain-2": ["b"], "off": ["a"]}


class Fickle(FixedPolicy):
    needs_results = True


class Late(Fickle):
    chooses_late = True


class Reserved(Policy):
    """Says nothing of results, so it needs them."""

    def choose(self, num_running: int, stats: SpecStats) -> str:
        return CHAIN.name


@pytest.mark.parametrize(
    ("policy", "is_asked"),
    [
        (FixedPolicy(CHAIN.name), True),
        (Fickle(CHAIN.name), False),
        (Late(CHAIN.name), True),
        (Reserved(), False),
    ],
)
def test_a_policy_says_whether_it_chooses_without_results(policy: Any, is_asked: bool) -> None:
    scheduler = scripted(policy)
    batch = running(scheduler, make_request("a", max_tokens=20))
    assert (ahead_of(scheduler, batch) is not None) == is_asked


@pytest.mark.parametrize("seed", range(6))
def test_blocks_and_lengths_hold_whatever_is_accepted(seed: int) -> None:
    """Random plans, arrivals, aborts and results: nobody reaches into what it does not have."""
    dice = random.Random(seed)
    policy = Script()
    scheduler = scripted(policy, TREE, num_blocks=dice.choice([14, 20, None]))
    blocks = scheduler._blocks._pool
    everyone: list[Request] = []
    num_ahead = num_steps = 0
    # rows that the device has by now, of each request, while the host may know of less
    device: dict[str, int] = {}
    in_flight: list[tuple[Batch, Any]] = []

    def launch(batch: Batch) -> None:
        for group in batch.groups:
            for i, s in enumerate(group.requests):
                known = (
                    s.cache_len if not (group.ahead and group.ahead[i]) else device[s.request_id]
                )
                assert known <= s.cache_len + (group.ahead[i] if group.ahead else 0)
                assert known + group.plan.num_rows <= len(s.blocks) * 4
                assert all(blocks.is_used(block) for block in s.blocks)
                device[s.request_id] = known
        # every sequence of a group accepts as many
        accepted = dice.randrange(3)
        result = run(batch, accepted)
        for group, step in zip(batch.groups, result.steps, strict=True):
            for i, s in enumerate(group.requests):
                device[s.request_id] += step.num_accepted[i] + 1
                step.next_cache_len[i] = device[s.request_id]
        scheduler.hold(batch)
        in_flight.append((batch, result))

    for turn in range(150):
        if dice.random() < 0.3:
            name = str(turn)
            policy.plans[name] = CHAIN.name
            params = {"max_tokens": dice.randrange(1, 16), "speculative": dice.random() < 0.8}
            everyone.append(make_request(name, dice.randrange(1, 14), **params))
            scheduler.add(everyone[-1])
        if dice.random() < 0.05 and everyone:
            scheduler.abort(dice.choice(everyone))
        if dice.random() < 0.3 and policy.plans:
            policy.plans[dice.choice(list(policy.plans))] = dice.choice(
                [CHAIN.name, TREE.name, OFF.name]
            )
        if not in_flight:
            batch = scheduler.schedule()
            if not (batch.groups or batch.prefill):
                continue
            launch(batch)
        num_steps += 1
        if (batch := scheduler.schedule_ahead([b for b, _ in in_flight])) is not None:
            assert batch.groups or batch.prefill
            num_ahead += 1
            launch(batch)
        scheduler.postprocess(*in_flight.pop(0))
    while in_flight or scheduler.has_work:
        if not in_flight:
            launch(scheduler.schedule())
        scheduler.postprocess(*in_flight.pop(0))
    assert blocks.num_free == blocks.num_blocks
    assert all(s.is_finished or s not in scheduler.running for s in everyone)
    assert num_ahead > 0.4 * num_steps


def test_a_choice_that_cannot_be_queued_ahead_is_asked_for_again() -> None:
    """A draft that has missed tokens in flight reads them first; the policy knows of that."""

    class Asked(Script):
        num_again = 0

        def choose_again(self) -> None:
            self.num_again += 1

    policy = Asked(a=OFF.name)
    scheduler = scripted(policy)
    batch = running(scheduler, make_request("a", max_tokens=20))
    assert groups(batch) == {OFF.name: ["a"]}
    following = scheduler.schedule_ahead([batch])
    assert following is not None
    scheduler.hold(following)
    scheduler.postprocess(batch, run(batch))
    assert policy.num_again == 0
    policy.plans["a"] = CHAIN.name
    assert scheduler.schedule_ahead([following]) is None
    assert policy.num_again == 1
    scheduler.postprocess(following, run(following))
    assert groups(scheduler.schedule()) == {CHAIN.name: ["a"]}
    assert policy.num_again == 1
