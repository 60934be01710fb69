"""What the host does for drafts: proposals of its index, weights of votes, and lookups."""

from __future__ import annotations

import random

import pytest

from specc.drafters.registry import drafter_of
from specc.runtime.backends.step_io import StepResult
from specc.runtime.drafters.host_drafts import HostDrafts
from specc.runtime.drafters.vote_weights import VoteWeights, leader
from specc.runtime.policies.best import BestPolicy
from specc.runtime.scheduling.batch import StepGroup
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan

CHAIN = SpecPlan.from_widths((1,) * 4)
LOOKUP = SpecPlan.from_widths((1,) * 6, ("suffix",))
VOTE = SpecPlan.from_widths((1, 1, 1), ("draft_0", "draft_1", "lookup-2"), "vote")


def make(tokens: list[int], name: str = "0") -> Request:
    return Request(name, tokens, SamplingParams(temperature=0, max_tokens=64), max_seq_len=256)


def ended(prompt: list[int], output: list[int]) -> Request:
    request = make(prompt)
    request.append(output)
    return request


def plans(*found: SpecPlan) -> dict[str, SpecPlan]:
    return {plan.name: plan for plan in (*found, OFF)}


def result(num_accepted: list[int], seconds: float, **lens: list[int]) -> StepResult:
    drafts = {int(key.removeprefix("draft_")): value for key, value in lens.items()}
    next_len = [10 + count + 1 for count in num_accepted]
    return StepResult(
        num_accepted, [[0]] * len(num_accepted), next_len, drafts, {"verify": seconds}
    )


def test_proposals_follow_the_request_as_it_grows():
    host = HostDrafts(plans(LOOKUP))
    request = make([1, 2, 3, 9, 1, 2])
    assert host.propose(request, 3, drafter_of("suffix")) == ([3, 9, 1], 2)
    request.append([3])
    assert host.propose(request, 3, drafter_of("suffix")) == ([9, 1, 2], 3)
    # of n-grams of at most two tokens, the longest is as long as that
    assert host.propose(request, 3, drafter_of("lookup-2")) == ([9, 1, 2], 2)
    request.append([50])
    assert host.propose(request, 3, drafter_of("suffix")) == ([], 0)


def test_a_longer_suffix_of_an_earlier_output_wins():
    host = HostDrafts(plans(LOOKUP))
    host.finish(ended([7], [8, 1, 2, 40, 41, 42]))
    request = make([1, 2, 3, 8, 1, 2])
    assert host.propose(request, 3, drafter_of("suffix")) == ([40, 41, 42], 3)
    # lookup-N stays within the request
    assert host.propose(request, 3, drafter_of("lookup-3")) == ([3, 8, 1], 2)


def test_nothing_of_a_prompt_is_looked_up_for_others():
    """What is accepted of a draft would tell whether another caller has sent a text."""
    host = HostDrafts(plans(LOOKUP))
    host.finish(ended([1, 2, 3, 4, 5], [6, 7, 8]))
    assert host.propose(make([9, 1, 2, 3], "1"), 3, drafter_of("suffix")) == ([], 0)
    # nor how an output begins, which says what came before it
    assert host.propose(make([9, 4, 5], "1"), 3, drafter_of("suffix")) == ([], 0)
    assert host.propose(make([9, 6, 7], "1"), 3, drafter_of("suffix")) == ([8], 2)


def test_outputs_need_not_be_shared():
    host = HostDrafts(plans(LOOKUP), shares_outputs=False)
    host.finish(ended([1], [6, 7, 8]))
    assert host.propose(make([9, 6, 7], "1"), 3, drafter_of("suffix")) == ([], 0)
    assert host.propose(make([6, 7, 8, 6, 7], "1"), 1, drafter_of("suffix")) == ([8], 2)


def test_inputs_are_padded_and_only_for_plans_that_read_them():
    host = HostDrafts(plans(LOOKUP, VOTE, CHAIN))
    requests = [make([1, 2, 3, 9, 1, 2]), make([5, 6], "1")]
    assert host.inputs(CHAIN, requests) == {}
    assert host.inputs(OFF, requests) == {}
    extra = host.inputs(LOOKUP, requests)
    assert extra["proposals"].tolist() == [[3, 9, 1, 2, 3, 9], [-1] * 6]
    weights = host.inputs(VOTE, requests)["vote_weights"]
    # the first step is led by the first model
    assert weights.tolist() == [[3.0, 1.0, 1.0]] * 2
    assert weights.is_contiguous()


@pytest.mark.parametrize("chances", [(0.4, 0.8), (0.8, 0.4)])
def test_the_draft_that_the_target_agrees_with_comes_to_lead(chances):
    """Only what was verified is known: tokens of a draft that was outvoted are not."""
    plan = SpecPlan.from_widths((1,) * 4, ("draft_0", "draft_1"), "vote")
    host, chooser = HostDrafts(plans(plan)), random.Random(0)
    requests = [make([1, 2, 3]), make([4, 5], "1")]
    led = []
    for _ in range(320):
        extra = host.inputs(plan, requests)
        row = extra["vote_weights"][0].tolist()
        # a tie is the first draft's
        led.append(0 if row[0] >= row[1] else 1)
        counts = [
            next((i for i in range(4) if chooser.random() >= chances[led[-1]]), 4) for _ in requests
        ]
        host.observe(plan, requests, extra, result(counts, 0.0))
    best = 0 if chances[0] > chances[1] else 1
    # the other one leads in its turns alone, once in 16 steps
    assert sum(draft != best for draft in led[64:]) == (320 - 64) // 16


def test_weights_follow_a_change():
    weights = VoteWeights(2)
    for chances in ((0.9, 0.3), (0.3, 0.9)):
        chooser = random.Random(1)
        for _ in range(1600):
            first = leader(weights.next_row())
            count = next((i for i in range(4) if chooser.random() >= chances[first]), 4)
            weights.observe(first, [count], 4)
        assert (weights.values[0] > weights.values[1]) == (chances[0] > chances[1])
    assert all(0.1 <= value <= 10.0 for value in weights.values)


def test_two_that_agree_outvote_one_that_is_a_little_better():
    weights = VoteWeights(3)
    for draft, hits in enumerate((8, 7, 7)):
        for _ in range(200):
            weights.observe(draft, [hits] * 1, hits + 1)
    a, b, c = weights.values
    assert a > b
    assert b == c
    assert b + c > a
    assert leader([a, b, c]) is None
    assert leader([3.0, 1.0, 1.0]) == 0
    assert leader([1.0, 1.0]) is None


def test_a_lookup_is_counted_at_every_step_by_what_it_proposed():
    """The host knows its tokens: those after a longer one that was accepted count, too."""
    plan = SpecPlan.from_widths((1, 1, 1), ("draft_0", "lookup-2"), "vote")
    for tokens, grows in (([1, 2, 3, 4], True), ([9, 2, 3, 4], False)):
        host = HostDrafts(plans(plan))
        # proposes 1 2 3 after 7 8
        requests = [make([7, 8, 1, 2, 3, 7, 8])]
        for _ in range(8):
            extra = host.inputs(plan, requests)
            step = result([3], 0.0)
            step = step._replace(output_tokens=[tokens])
            host.observe(plan, requests, extra, step)
        for _ in range(8):
            row = host.inputs(plan, requests)["vote_weights"][0].tolist()
        assert (row[1] > VoteWeights(2).values[1]) == grows


class Simulation:
    """Requests whose lookups and drafts are accepted as often as it says."""

    def __init__(
        self,
        of_lookup: float,
        of_model: float,
        *,
        lookup_s: float,
        model_s: float,
        is_shared: bool = True,
    ) -> None:
        self.is_shared = is_shared
        self.accepted = {LOOKUP.name: of_lookup, CHAIN.name: of_model}
        self.seconds = {LOOKUP.name: lookup_s, CHAIN.name: model_s}
        self.plans = plans(CHAIN, LOOKUP)
        self.policy = BestPolicy(self.plans, HostDrafts(self.plans))
        self.random = random.Random(0)

    def run(self, requests: list[Request], rounds: int) -> list[list[str]]:
        chosen = []
        for _ in range(rounds):
            names = self.policy.choose_each(requests, SpecStats())
            chosen.append(names)
            for name in dict.fromkeys(names):
                own = [s for s, n in zip(requests, names, strict=True) if n == name]
                most = self.plans[name].max_depth
                counts = []
                for _ in own:
                    count = 0
                    while count < most and self.random.random() < self.accepted[name]:
                        count += 1
                    counts.append(count)
                group = StepGroup(self.plans[name], own)
                seconds = self.seconds[name] * (1 if self.is_shared else len(own))
                self.policy.observe(group, result(counts, seconds))
        return chosen


REPEATING = [1, 2, 3, 4] * 5


def test_lookups_win_where_they_are_accepted():
    sim = Simulation(0.95, 0.5, lookup_s=1.0, model_s=1.5)
    chosen = sim.run([make(REPEATING)], 300)
    assert sum(names == [LOOKUP.name] for names in chosen[50:]) > 0.95 * 250


def test_the_model_wins_where_lookups_fail():
    sim = Simulation(0.05, 0.8, lookup_s=1.0, model_s=1.5)
    chosen = sim.run([make(REPEATING)], 300)
    assert sum(names == [CHAIN.name] for names in chosen[100:]) > 0.9 * 200


def test_a_sequence_without_a_match_asks_the_model():
    sim = Simulation(0.95, 0.5, lookup_s=1.0, model_s=1.5)
    sim.run([make(REPEATING)], 50)
    assert sim.run([make(list(range(20)), "1")], 3) == [[CHAIN.name]] * 3


def test_a_batch_is_split_only_where_two_passes_pay():
    mixed = [make(REPEATING), make(list(range(20)), "1")]
    # passes take as long as they have requests
    cheap = Simulation(0.98, 0.6, lookup_s=1.0, model_s=1.0, is_shared=False)
    assert cheap.run(mixed, 100)[-1] == [LOOKUP.name, CHAIN.name]
    # a pass takes as long whoever takes part: two of them lose
    costly = Simulation(0.3, 0.6, lookup_s=1.0, model_s=1.0)
    last = costly.run(mixed, 100)[-1]
    assert len(set(last)) == 1


def test_it_follows_a_change():
    sim = Simulation(0.95, 0.5, lookup_s=1.0, model_s=1.5)
    request = make(REPEATING)
    sim.run([request], 200)
    sim.accepted[LOOKUP.name] = 0.0
    assert sim.run([request], 1500)[500:].count([CHAIN.name]) >= 800
    sim.accepted[LOOKUP.name] = 0.97
    # tried again now and then
    assert sim.run([request], 1000)[500:].count([LOOKUP.name]) >= 450
