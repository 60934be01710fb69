"""Profile-guided speculation: measure acceptance and latency, choose plans, check them, keep them.

For every batch size: the optimal static tree by measured acceptance and pass times (Sequoia), the
best chain, dynamic trees, and what the engine has, are run as whole steps on the user's prompts,
interleaved with plain decoding. The fastest is kept; where none beats plain decoding, that is off.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from specc.artifact.directory import open_engine, torch_version
from specc.artifact.manifest import Manifest
from specc.bench.engine import EngineContender
from specc.bench.rounds import Spread, run_rounds
from specc.compiler.extend import extend_engine
from specc.cost.critical_length import CriticalLength, best_critical_length
from specc.cost.latency_table import LatencyTable
from specc.cost.step_seconds import StepSeconds
from specc.drafters.drafter import Drafter
from specc.drafters.registry import drafter_of, head_draft
from specc.drafters.views import View
from specc.errors import ConfigError, RequestError, TreeError
from specc.progress import Advance, Counted, PhaseTimer
from specc.runtime.backends.offload_budget import least_of
from specc.runtime.engine import Engine
from specc.speculation.plans import OFF, SpecPlan
from specc.system.machine import describe_machine
from specc.tune.acceptance import (
    Trajectory,
    self_acceptance,
)
from specc.tune.candidates import (
    candidates,
    drafts_of,
    is_outgrown,
    views_to_measure,
    with_sharpness,
)
from specc.tune.drafters.acceptance_of_draft import acceptance_of_draft
from specc.tune.latency import measure_latency
from specc.tune.options import TuneOptions
from specc.tune.outputs import own_outputs, params_of, typical_context

# children of a node that acceptance is measured for
_WIDTH = 8
# a plan has to beat plain decoding by more than the noise of its measurement
_MARGIN = 1.01


@dataclass(frozen=True)
class MeasuredPlan:
    """One plan at one batch size.

    Args:
        predicted: tokens a second over those of off, from the tables; None where they say nothing.
        measured: likewise, of whole runs: the median of rounds, each against off in that round.
    """

    plan: SpecPlan
    predicted: float | None
    measured: float
    spread: tuple[float, float]
    mean_acceptance_length: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan.name,
            "predicted_speedup": self.predicted,
            "measured_speedup": self.measured,
            "spread": list(self.spread),
            "mean_acceptance_length": self.mean_acceptance_length,
        }


@dataclass(frozen=True)
class BatchTuning:
    """The outcome for one batch size; `break_even` is that of the chosen or best plan."""

    batch_size: int
    chosen: SpecPlan
    candidates: list[MeasuredPlan]
    break_even: float | None


@dataclass(frozen=True)
class _Readers:
    """Drafts that read the target's hidden states, or propose more than a level at a time."""

    drafters: dict[str, Drafter]

    @classmethod
    def of(cls, manifest: Manifest) -> _Readers:
        """Of an engine.

        Raises:
            ConfigError: no plan says how a draft is asked that proposes all levels in one pass.
        """
        asked = {x.name: x for entry in manifest.plans for x in entry.plan.models}
        found: dict[str, Drafter] = {}
        for model in manifest.models[1:]:
            if model.name in asked:
                found[model.name] = asked[model.name]
            elif model.head is None:
                continue
            elif model.head.facts.hands_on:
                found[model.name] = head_draft(manifest.models.index(model) - 1, model.head.kind)
            else:
                raise ConfigError(
                    f"an engine with a {model.head.facts.called} ({model.name}), and no plan that"
                    " asks it",
                    "one, which says what a pass of it reads",
                    "compile the engine again, and tune it without --prune",
                )
        return cls(found)

    def takes(self, plans: Mapping[SpecPlan, float | None]) -> dict[SpecPlan, float | None]:
        """The plans, each with those among its drafts; without what a block cannot offer."""
        found = {}
        for plan, promised in plans.items():
            with contextlib.suppress(TreeError):
                found[plan.with_drafters(self.drafters)] = promised
        return found


@dataclass
class Tuning:
    """What `tune` found.

    Args:
        acceptance: draft → table by depth and sibling rank.
        latency: of single passes, which the policy `goodput` reads.
        others: plans that the engine had, and that no batch size has chosen.
        contexts: fewest and most tokens of the prompts.
        is_repeated: prompts were repeated to get so long.
        critical: of each batch size and each self-draft whose budget all prompts outgrow: from
            which context on it pays.
        whole: self-drafts whose budget some prompt does not outgrow: what they accept is not what
            they would at long context.
        offload_weights: memory of the target's weights that it holds for; None: all of them.
        sharpness: of draft models that accept more with it: factors of their logits by depth.
    """

    acceptance: dict[str, list[list[float]]]
    batches: list[BatchTuning] = field(default_factory=list)
    latency: LatencyTable | None = None
    others: list[SpecPlan] = field(default_factory=list)
    contexts: tuple[int, int] = (0, 0)
    is_repeated: bool = False
    critical: list[CriticalLength] = field(default_factory=list)
    whole: list[View] = field(default_factory=list)
    offload_weights: int | str | None = None
    sharpness: dict[str, list[float]] = field(default_factory=dict)

    @property
    def plans(self) -> list[SpecPlan]:
        """What was chosen, that of the smallest batch first; off is in it."""
        return list(dict.fromkeys([*(batch.chosen for batch in self.batches), OFF]))

    def to_json(self, options: TuneOptions) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "torch_version": torch_version(),
            "temperature": options.temperature,
            "plans": {str(batch.batch_size): batch.chosen.name for batch in self.batches},
            ("removed_plans" if options.prunes else "kept_plans"): [p.name for p in self.others],
            **({"offload_weights": given} if (given := self.offload_weights) else {}),
            "contexts": list(self.contexts),
            "repeats_prompts": self.is_repeated,
            "acceptance": self.acceptance,
            **({"sharpness": self.sharpness} if self.sharpness else {}),
            "critical_lengths": [one.to_json() for one in self.critical],
            **({"latency": self.latency.to_json()} if self.latency else {}),
            "batches": [
                {
                    "batch_size": batch.batch_size,
                    "chosen": batch.chosen.name,
                    "break_even_acceptance_length": batch.break_even,
                    "candidates": [candidate.to_json() for candidate in batch.candidates],
                }
                for batch in self.batches
            ],
        }


def tune(
    directory: Path,
    prompts: Sequence[str | list[int]],
    options: TuneOptions,
    phases: PhaseTimer,
    offload_weights: int | str | None = None,
) -> Tuning:
    """Choose an engine's plans by measuring, and write them and profile.json into it.

    Args:
        prompts: like those that it will serve.
        phases: tells the listener how far this is.
        offload_weights: see `Engine.load`; the plans are chosen for this budget.
    Raises:
        ConfigError: an engine without drafts, or batch sizes that it was not compiled for.
        RequestError: text for an engine without a tokenizer.
    """
    manifest = open_engine(directory, None, weights_budget=least_of(offload_weights))
    drafts = drafts_of([entry.plan for entry in manifest.plans], len(manifest.models) - 1)
    if not drafts:
        raise ConfigError(
            "an engine without drafts", "a draft or a lookup to tune", "compile it with --draft"
        )
    readers = _Readers.of(manifest)
    sizes = _batch_sizes(options, manifest.limits.max_batch_size)
    if manifest.tokenizer.file is None and any(isinstance(prompt, str) for prompt in prompts):
        raise RequestError(
            "a prompt that is text, and an engine without a tokenizer",
            "token ids",
            'pass --prompts FILE with lines such as {"prompt_token_ids": [1, 2, 3]}',
        )
    known = [entry.plan for entry in manifest.plans if entry.plan.speculates]
    room = max(options.max_nodes, *(plan.num_rows for plan in known), 1)
    with extend_engine(directory, manifest) as extension:
        extension.try_plans([OFF], room)
        # outputs, acceptance, latency, and whole steps of each size
        drafts = [readers.drafters.get(x.name, x) for x in drafts]
        selves = [x for x in drafts if x.facts.is_self]
        num_tables = len(drafts) - len(selves) + bool(selves)
        phases.num_phases = 2 + num_tables + len(sizes)
        with phases.phase("target's own outputs") as advance:
            load = partial(
                Engine.load, extension.directory, verify=False, offload_weights=offload_weights
            )
            engine = load()
            prompted, trajectories = own_outputs(engine, prompts, options, advance)
            token_ids = prompted.token_ids
        contexts = min(map(len, token_ids)), max(map(len, token_ids))
        block_size = manifest.limits.block_size
        views = views_to_measure(drafts, block_size, contexts[0])
        if manifest.windowed:
            # other windows would need programs of their own
            views = [view for view in views if view in [draft.view for draft in selves]]
        others = [draft for draft in selves if draft.has_second_program]
        own = [*(drafter_of(view.name) for view in views), *others]
        sharpness: dict[str, list[float]] = {}
        acceptance = _acceptance(engine, drafts, own, trajectories, options, phases, sharpness)
        with phases.phase("latency of passes") as advance:
            latency = measure_latency(engine, advance, options.latency_s)
        tuning = Tuning(acceptance, [], latency, [], contexts, prompted.is_repeated)
        tuning.offload_weights, tuning.sharpness = offload_weights, sharpness
        outgrown = [view for view in views if is_outgrown(view, block_size, contexts[0])]
        tuning.whole = [view for view in views if view not in outgrown]
        tuning.critical = [
            best_critical_length(latency, view, acceptance[view.name], size, options.max_depth)
            for size in sizes
            for view in outgrown
        ]
        context = typical_context(engine, trajectories, options, room)
        # a process has one sharded engine at a time, and the next one is loaded below
        engine.close()
        by_name = {draft.name: draft for draft in drafts}
        for size in sizes:
            seconds = {
                name: StepSeconds(latency, by_name.get(name) or drafter_of(name), size, context)
                for name in acceptance
            }
            known_plans = with_sharpness(candidates(acceptance, seconds, known, options), sharpness)
            plans = readers.takes(known_plans)
            with phases.phase(f"whole steps, batch {size}") as advance:
                extension.try_plans([*plans, OFF], room)
                tuning.batches.append(_measure(load, plans, token_ids, size, options, advance))
        chosen = {plan.name for plan in tuning.plans}
        tuning.others = [plan for plan in known if plan.name not in chosen]
        kept = [] if options.prunes else tuning.others
        extension.commit([*tuning.plans, *kept], "profile", tuning.to_json(options))
    return tuning


def _batch_sizes(options: TuneOptions, most: int) -> list[int]:
    if not options.batch_sizes:
        return [size for size in (1, 2, 4, 8) if size <= most]
    if wrong := [size for size in options.batch_sizes if not 1 <= size <= most]:
        raise ConfigError(
            f"--batch-size {wrong[0]}",
            f"1 … {most}, the engine's max_batch_size",
            "choose a size in this range, or compile with a larger --max-batch-size",
        )
    return sorted(set(options.batch_sizes))


def _acceptance(
    engine: Engine,
    drafts: Sequence[Drafter],
    own: Sequence[Drafter],
    trajectories: Sequence[Trajectory],
    options: TuneOptions,
    phases: PhaseTimer,
    sharpness: dict[str, list[float]],
) -> dict[str, list[list[float]]]:
    """Draft → table by depth and sibling rank; those of draft models with their best `sharpness`.

    Factors are learned for sampled requests: the first child of a greedy one is the same with all.
    """
    width, depth = min(_WIDTH, engine.vocab_size, options.max_nodes), options.max_depth
    found = {}
    for draft in drafts:
        if draft.facts.is_self:
            continue
        with phases.phase(f"acceptance of {draft.name}") as advance:
            counted = Counted(trajectories, advance)
            found[draft.name], factors = acceptance_of_draft(
                engine, draft, counted, width, depth, is_sampled=bool(options.temperature)
            )
            if any(factor != 1 for factor in factors):
                sharpness[draft.name] = factors
    if own:
        with phases.phase("acceptance of self-drafts") as advance:
            tables = self_acceptance(engine, own, Counted(trajectories, advance), width, depth)
        found |= {draft.name: table for draft, table in zip(own, tables, strict=True)}
    return found


def _measure(
    load: Callable[[], Engine],
    plans: dict[SpecPlan, float | None],
    token_ids: Sequence[list[int]],
    batch_size: int,
    options: TuneOptions,
    advance: Advance,
) -> BatchTuning:
    """Run every candidate and off, round by round."""
    engine = load()
    prompts = [list(ids) for ids in token_ids]
    while len(prompts) < batch_size:
        prompts += prompts
    prompts = prompts[: max(batch_size, len(prompts) // batch_size * batch_size)]
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    params = params_of(options, batch_size)
    contenders = [
        EngineContender(engine, plan.name, plan.name, batches, options.max_tokens, params=params)
        for plan in (OFF, *plans)
    ]
    rounds = run_rounds(contenders, options.rounds, 1, advance)
    engine.close()
    measured = []
    for plan, predicted in plans.items():
        pairs = list(zip(rounds.of(plan.name), rounds.of(OFF.name), strict=True))
        ratios = [own.decode_tokens_per_s / off.decode_tokens_per_s for own, off in pairs]
        spread, length = Spread.of(ratios), pairs[-1][0].mean_acceptance_length
        measured.append(
            MeasuredPlan(plan, predicted, spread.median, (spread.min, spread.max), length)
        )
    best = max(measured, key=lambda item: item.measured)
    length = best.mean_acceptance_length
    # a step of it takes this many times as long as one of off
    break_even = length / best.measured if length else None
    chosen = best.plan if best.measured > _MARGIN else OFF
    return BatchTuning(batch_size, chosen, measured, break_even)
