"""Random arrivals, cancellations, plans and samplers over one engine, against solo runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specc.runtime.backends.step_io import StepInputs
from specc.runtime.constraints.grammar_masks import mask_roots
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.execution.pass_inputs import causal_inputs
from specc.runtime.policies.base import Policy
from specc.runtime.scheduling.batch import Span
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.sampling.rows import Word
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF


class Moody(Policy):
    """A plan for every request and step, by dice; often the same for all."""

    chooses_late = True

    def __init__(self, names: Sequence[str], dice: random.Random) -> None:
        self._names = list(names)
        self._dice = dice

    def choose(self, num_running: int, stats: SpecStats) -> str:
        return self._dice.choice(self._names)

    def choose_each(self, requests: list[Request], stats: SpecStats) -> list[str]:
        names = self._names
        if self._dice.random() < 0.3:
            names = [self._dice.choice(names)]
        return [self._dice.choice(names) for _ in requests]


def check_each_step(patch: Any, engine: Engine, check: Callable[[Engine, Request], object]) -> None:
    """Look at the rows of all running requests of an engine after every step."""
    advance = EngineCore.advance

    def checked(core: EngineCore) -> bool:
        did = advance(core)
        if core.engine is engine:
            for request in core.scheduler.running:
                if request.cache_len and request.blocks:
                    check(engine, request)
        return did

    patch.setattr(EngineCore, "advance", checked)


@dataclass
class Figures:
    """What happened in some interleavings, so that a test can tell that it did."""

    num_interleavings: int = 0
    num_requests: int = 0
    num_compared: int = 0
    num_tokens: int = 0
    num_greedy: int = 0
    num_seeded: int = 0
    num_cancelled: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_shared_passes: int = 0
    num_ties: int = 0
    num_iterations: int = 0
    num_ahead: int = 0
    num_tables: int = 0
    steps: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "steps": dict(sorted(self.steps.items()))}


# options of a request: dice, most tokens, vocabulary
Draw = Callable[[random.Random, int, int], SamplingParams]
# what else of a request is compared with its solo run, up to a position where they differ
Compare = Callable[[Request, Request, int], None]
# what chooses plans: names of an engine's plans, dice
Choose = Callable[[Sequence[str], random.Random], Any]
# how a mismatch is judged: request, its solo tokens, where they differ
Judge = Callable[[Request, list[int], int], None]


def refuse(request: Request, wanted: list[int], position: int) -> None:
    """No mismatch is forgiven."""
    raise AssertionError(
        f"request {request.request_id} {request.params}: {request.output_token_ids}"
        f" instead of {wanted}, from {position} on"
    )


class Solo:
    """Tokens of requests that have the engine to themselves, without speculation or prefixes."""

    def __init__(self, engine: Engine) -> None:
        self._core = EngineCore(engine, OFF.name, shares_prefixes=False)
        self._known: dict[tuple[Any, ...], Request] = {}

    def tokens(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        return self.run(prompt, params).output_token_ids

    def run(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        key = (tuple(prompt), repr(params))
        if key not in self._known:
            request = self._core.requests.make(list(prompt), params)
            self._core.scheduler.add(request)
            while not request.is_finished:
                assert self._core.advance()
            self._known[key] = request
        return self._known[key]


def draw_params(dice: random.Random, max_tokens: int, vocab_size: int) -> SamplingParams:
    """Greedy for half of the requests; the others seeded, with any of the options."""
    options: dict[str, Any] = {"max_tokens": dice.randint(1, max_tokens)}
    if dice.random() < 0.5:
        options |= {"temperature": dice.choice([0.5, 1.0]), "seed": dice.randrange(3)}
        options |= dice.choice([{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}])
    if dice.random() < 0.25:
        options |= dice.choice(
            [{"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}]
        )
    options["speculative"] = dice.random() < 0.85
    if dice.random() < 0.2:
        options["stop_token_ids"] = [dice.randrange(vocab_size)]
    return SamplingParams(**{"temperature": 0, **options})


def _check_tables(core: EngineCore, figures: Figures) -> None:
    """Let every table that a step gets be compared with one that is built anew."""
    rows, cache = core.runner._rows, core.engine.cache
    make = rows.inputs

    def checked(requests: list[Request], *args: Any) -> StepInputs:
        made = make(requests, *args)
        wanted = cache.block_table([request.blocks for request in requests])
        assert torch.equal(made.block_table, wanted), "a table that is not the requests' blocks"
        figures.num_tables += 1
        return made

    rows.inputs = checked  # type: ignore[method-assign]


def run_interleaving(
    engine: Engine,
    solo: Solo,
    seed: int,
    prompts: Sequence[Sequence[int]],
    figures: Figures,
    judge: Judge = refuse,
    *,
    num_requests: int = 12,
    max_tokens: int = 24,
    draw: Draw = draw_params,
    compare: Compare | None = None,
    policy: Choose = Moody,
    make_core: Callable[..., EngineCore] = EngineCore,
) -> None:
    """Serve random requests in a random order of events; compare those that were not cancelled.

    Args:
        engine: whose cache is small enough that requests have to give way.
        solo: of an engine with the same models.
        seed: of the dice.
        prompts: that requests begin with; each request takes a part of one, and tokens of its own.
        figures: counted up.
        judge: of mismatches.
        num_requests: to serve.
        max_tokens: of a request at most.
        draw: its options.
        compare: what else is compared.
        policy: chooses plans.
        make_core: of the engine.
    """
    dice = random.Random(seed)
    core = make_core(engine, policy=policy(list(engine.plans), dice))
    _check_tables(core, figures)
    crowd = dice.choice([0.2, 0.5, 0.95])
    engine.cache.allocator.forget_all()
    requests: list[Request] = []
    cancelled: set[int] = set()

    def arrive() -> None:
        prompt = list(dice.choice(prompts))
        prompt = prompt[: dice.randint(1, len(prompt))] if dice.random() < 0.5 else prompt
        prompt += [dice.randrange(engine.vocab_size) for _ in range(dice.randrange(3))]
        params = draw(dice, max_tokens, engine.vocab_size)
        request = core.requests.make(prompt, params, priority=dice.randrange(-1, 2))
        core.scheduler.add(request)
        requests.append(request)

    while len(requests) < num_requests or core.scheduler.has_work:
        if len(requests) < num_requests and dice.random() < crowd:
            arrive()
        elif dice.random() < 0.02 and (open_ones := [r for r in requests if not r.is_finished]):
            victim = dice.choice(open_ones)
            core.scheduler.abort(victim)
            cancelled.add(id(victim))
        elif core.scheduler.has_work:
            assert core.advance(), "somebody waits, and nobody runs"
            figures.steps.update(core.scheduler.last_plans)
            figures.num_shared_passes += core.runner.num_shared_passes
            core.runner.num_shared_passes = 0
    core.in_flight.settle()
    assert core.engine.cache.allocator.num_free == core.engine.cache.allocator.num_blocks
    figures.num_interleavings += 1
    figures.num_requests += len(requests)
    figures.num_cancelled += len(cancelled)
    figures.num_preemptions += core.scheduler.stats.num_preemptions
    figures.num_iterations += core.in_flight.num_iterations
    figures.num_ahead += core.in_flight.num_ahead
    figures.num_cached_tokens += core.scheduler.stats.num_cached_tokens
    for request in requests:
        if id(request) in cancelled:
            continue
        alone = solo.run(request.token_ids[: request.num_prompt_tokens], request.params)
        wanted = alone.output_token_ids
        figures.num_compared += 1
        figures.num_tokens += len(wanted)
        figures.num_greedy += request.params.is_greedy
        figures.num_seeded += not request.params.is_greedy
        found = request.output_token_ids
        num_same = len(wanted)
        if found != wanted:
            pairs = zip(found, wanted, strict=False)
            position = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
            judge(request, wanted, position)
            figures.num_ties += 1
            num_same = position
        if compare is not None:
            compare(request, alone, num_same)


class NearTies:
    """Forgives a token where logits that differ by `EPSILON` would draw the other one.

    Args:
        engine: with the same models; nobody else is at work on it.
    """

    # wider passes round sums of float32 differently
    EPSILON = 1e-4

    def __init__(self, engine: Engine) -> None:
        self._core = EngineCore(engine, OFF.name, shares_prefixes=False)

    def __call__(self, request: Request, wanted: list[int], position: int) -> None:
        found = request.output_token_ids
        assert 0 <= position < min(len(found), len(wanted)), "one of the outputs is too short"
        pair = found[position], wanted[position]
        num_prompt = request.num_prompt_tokens
        context = [*request.token_ids[:num_prompt], *wanted[:position]]
        again = self._core.requests.make(context, request.params)
        # penalties count what is output, and controls look at it
        again.sampling_words[Word.NUM_PROMPT] = num_prompt
        again.controls = None
        whole = self._core.requests.make(context[:num_prompt], request.params)
        whole.token_ids += context[num_prompt:]
        runner, cache = self._core.runner, self._core.engine.cache
        count = cache.shape.blocks_for(len(context), 1)
        again.blocks = cache.allocator.allocate(count)
        if cache.places is not None:
            again.state_place = cache.places.take()
        try:
            rows = cache.history_rows(again.blocks, 0, len(context))
            cache.record(rows, torch.tensor(context))
            last = torch.tensor([len(context) - 1])
            inputs = causal_inputs([Span(again, 0, len(context))], cache, last)
            logits = self._core.engine.target(*inputs.of_model(cache.states is not None))
            drawn = []
            for sign in (1, -1):
                moved = logits.clone()
                moved[0, pair[0]] += sign * self.EPSILON
                moved[0, pair[1]] -= sign * self.EPSILON
                drawn += runner._prompts.first_tokens(mask_roots(moved, [whole]), [again]).tolist()
        finally:
            cache.allocator.free(again.blocks)
            if cache.places is not None:
                cache.places.give_back(again.state_place)
        if tuple(drawn) != pair:
            refuse(request, wanted, position)
