"""Which layers a self-draft does without: a greedy search by what is measured on prompts.

Source of the idea: Draft & Verify, arXiv:2309.08168, which searches by Bayesian optimisation, for
hours. Here a choice is judged by the speed-up that its best chain promises: by what it accepts of
the target's own outputs, and by what the latency table says of its passes.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specc.artifact.directory import open_engine, torch_version
from specc.compiler.stored_models import SkippedLayers
from specc.cost.latency_table import LatencyTable
from specc.cost.plan_choice import best_plan
from specc.cost.step_seconds import StepSeconds
from specc.drafters.layers import Layers
from specc.drafters.self import SelfDraft
from specc.progress import Counted, PhaseTimer
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.engine_cache import caches_of
from specc.runtime.engine import Engine
from specc.system.machine import describe_machine
from specc.tune.acceptance import Trajectory, self_acceptance
from specc.tune.latency import measure_latency
from specc.tune.options import TuneOptions
from specc.tune.outputs import own_outputs, typical_context

# choices that are measured, and prompts that they are measured on, at most
MOST_CHOICES, MOST_PROMPTS = 30, 3
# a prediction has to promise more than its own error
LEAST_SPEEDUP = 1.03
# layers that are tried first, where the target has more: the rest of the choices is for the next
_FIRST = 20
# layers that are tried in addition to those that are out already
_NEXT = 3
# layers in turn that may make it worse before the search ends
_PATIENCE = 2


@dataclass(frozen=True)
class SkipChoice:
    """Layers that a draft does without, and what it promises.

    Args:
        skipped: numbers, ascending.
        acceptance: of the first token of a chain.
        num_draft_tokens: of the best chain; 0 where no chain yields anything.
        tokens: expected of its step, bonus token included.
        pass_share: seconds of a pass over one token, of those of the target's.
        speedup: predicted, over plain decoding.
    """

    skipped: tuple[int, ...]
    acceptance: float
    num_draft_tokens: int
    tokens: float
    pass_share: float
    speedup: float

    @property
    def draft(self) -> SelfDraft:
        """The draft that it is."""
        return SelfDraft(None, Layers(self.skipped, are_skipped=True))

    def to_json(self) -> dict[str, Any]:
        return {
            "draft": self.draft.option,
            "skipped": list(self.skipped),
            "acceptance": self.acceptance,
            "num_draft_tokens": self.num_draft_tokens,
            "expected_tokens": self.tokens,
            "pass_share": self.pass_share,
            "predicted_speedup": self.speedup,
        }


@dataclass
class SkipSearch:
    """What a search has found.

    Args:
        num_layers: of the target.
        batch_size: sequences that it is for.
        context: committed rows of each.
        choices: that were measured, in this order.
    """

    num_layers: int
    batch_size: int
    context: int
    choices: list[SkipChoice] = field(default_factory=list)

    @property
    def best(self) -> SkipChoice:
        return max(self.choices, key=lambda choice: choice.speedup)

    @property
    def pays(self) -> bool:
        """Whether the best promises enough to be compiled and measured whole."""
        return self.best.speedup >= LEAST_SPEEDUP

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "torch_version": torch_version(),
            "num_layers": self.num_layers,
            "batch_size": self.batch_size,
            "context": self.context,
            "least_speedup": LEAST_SPEEDUP,
            "pays": self.pays,
            "best": self.best.to_json(),
            "choices": [choice.to_json() for choice in self.choices],
        }


# several choices → what each of them promises
Judge = Callable[[Sequence[tuple[int, ...]]], list[SkipChoice]]


def search_skips(
    directory: Path, prompts: Sequence[str | list[int]], options: TuneOptions, phases: PhaseTimer
) -> SkipSearch:
    """Search for layers of an engine's target that a self-draft could do without.

    The engine stays as it is. Choices run operator by operator; what their passes cost follows
    from the target's measured passes: as much less as their weights and layers are fewer.

    Args:
        prompts: like those that it will serve; the first three count.
        options: what to measure; the first batch size, or 1.
        phases: tells the listener how far this is.
    Raises:
        ConfigError: a target of one layer, an engine that is cut, or of another backend.
        UnsupportedGraphError: layers that a value leads past.
        RequestError: text for an engine without a tokenizer.
    """
    manifest = open_engine(directory, None)
    layers = SkippedLayers(directory, manifest)
    with phases.phase("target's own outputs") as advance:
        engine = Engine.load(directory, verify=False)
        _, trajectories = own_outputs(engine, prompts[:MOST_PROMPTS], options, advance)
    with phases.phase("latency of passes") as advance:
        latency = measure_latency(engine, advance, options.latency_s)
    size = options.batch_sizes[0] if options.batch_sizes else 1
    context = typical_context(engine, trajectories, options)
    found = SkipSearch(layers.num_layers, size, context)

    def judge(choices: Sequence[tuple[int, ...]]) -> list[SkipChoice]:
        name = f"acceptance without layers, {len(found.choices)} of {MOST_CHOICES} measured"
        with phases.phase(name) as advance:
            counted = Counted(trajectories, advance)
            tables = _acceptance(engine, layers, choices, counted, options.max_depth)
        judged = [
            _judged(skipped, table, _seconds(latency, layers, skipped), size, context, options)
            for skipped, table in zip(choices, tables, strict=True)
        ]
        found.choices += judged
        return judged

    greedily(layers.num_layers, judge)
    engine.close()
    return found


def greedily(num_layers: int, judge: Judge, most: int = MOST_CHOICES) -> None:
    """Leave out one layer more at a time: of those that were best alone, the best in addition.

    It ends after so many choices, or when two layers in turn have made it worse.

    Args:
        num_layers: of the target; 2 or more.
        judge: measures choices.
        most: choices that are measured.
    """
    count = min(num_layers, _FIRST, most)
    # where there are many, evenly spaced
    first = sorted({round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count)})
    alone = judge([(number,) for number in first])
    left, best = most - len(alone), max(alone, key=_speedup)
    order = [c.skipped[0] for c in sorted(alone, key=_speedup, reverse=True)]
    # neighbours of the best are next where not all were tried
    order += sorted(set(range(num_layers)) - set(first), key=lambda n: abs(n - order[0]))
    now, worse = best, 0
    while left > 0 and worse < _PATIENCE and len(now.skipped) + 1 < num_layers:
        further = [number for number in order if number not in now.skipped][: min(_NEXT, left)]
        tried = judge([tuple(sorted((*now.skipped, number))) for number in further])
        left -= len(tried)
        now = max(tried, key=_speedup)
        worse = 0 if now.speedup > best.speedup else worse + 1
        best = max(best, now, key=_speedup)


def _speedup(choice: SkipChoice) -> float:
    return choice.speedup


def _draft_without(skipped: tuple[int, ...]) -> SelfDraft:
    """The target without these layers."""
    return SelfDraft(None, Layers(skipped, are_skipped=True))


def _acceptance(
    engine: Engine,
    layers: SkippedLayers,
    choices: Sequence[tuple[int, ...]],
    trajectories: Sequence[Trajectory],
    depth: int,
) -> list[list[list[float]]]:
    """Acceptance of the first child of chains, [choices][depth][1]."""
    target = engine.target
    caches = caches_of(engine.manifest.models[0], engine.cache)  # type: ignore[union-attr]
    programs = {}
    drafts = [_draft_without(skipped) for skipped in choices]
    for draft, skipped in zip(drafts, choices, strict=True):
        weights = target.weights  # type: ignore[attr-defined]
        programs[draft.name] = ModelProgram(layers.program(skipped), weights, caches)
    trying = replace(engine, self_drafts={**engine.self_drafts, **programs})
    return self_acceptance(trying, drafts, trajectories, 1, depth)


def _seconds(
    latency: LatencyTable, layers: SkippedLayers, skipped: tuple[int, ...]
) -> LatencyTable:
    """A table in which the draft's passes are the target's, less what it leaves out."""
    name = _draft_without(skipped).name
    share = 1 - len(skipped) / layers.num_layers
    passes = latency.target.scaled(layers.weight_share(skipped), share)
    return replace(latency, drafts={**latency.drafts, name: passes})


def _judged(
    skipped: tuple[int, ...],
    table: list[list[float]],
    latency: LatencyTable,
    size: int,
    context: int,
    options: TuneOptions,
) -> SkipChoice:
    seconds = StepSeconds(latency, _draft_without(skipped), size, context)
    chain = best_plan(table, seconds, options.max_nodes, options.max_depth).speculative
    share = seconds.level(0, 1) / (seconds.off - latency.iteration_s)
    if chain is None:
        return SkipChoice(skipped, table[0][0], 0, 1.0, share, 0.0)
    tokens, depth = chain.expected_tokens, chain.tree.max_depth
    return SkipChoice(skipped, table[0][0], depth, tokens, share, chain.speedup)
