"""Models through the pipeline: traced, rewritten, and described for the manifest."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from specc.artifact.model_entry import ModelEntry
from specc.compiler.adapters import adapter_phases
from specc.compiler.calibration import calibration_phases
from specc.compiler.candidate import advice_for
from specc.compiler.context import CompileContext
from specc.compiler.model_entries import check_windows, describe_model
from specc.compiler.phases import CUT, draft_phases, head_phases, target_phases
from specc.compiler.stateful import check_states
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.passes.drafters.head_source import share_equal
from specc.passes.drafters.registry import drafter_of_files
from specc.passes.drafters.shared_weights import integers_of_target
from specc.passes.frontend.model_source import ModelSource
from specc.passes.frontend.position_limit import position_limit
from specc.passes.frontend.trace import trace
from specc.passes.lower.cpu.phases import CPU
from specc.passes.pipeline import FUSE, PassRecord, Phases, Pipeline
from specc.passes.program import ROWS, AttentionLayer, Program, Weight, constant_key
from specc.passes.program_json import program_to_json
from specc.passes.quantize.quantize_embeddings import layouts_of_lookups
from specc.passes.quantize.quantize_linear import QUANTIZE
from specc.passes.quantize.row_integers import has_rows_of
from specc.passes.segments.cut_segments import Segment
from specc.passes.step.step_graph import TARGET


@dataclass
class CompiledModel:
    """A model after its last pass, and what the manifest says about it."""

    source: ModelSource
    program: Program
    entry: ModelEntry
    # over padded batches, where the backend takes those
    padded: Program | None = None
    # the program before it was cut for ranks, or quantized
    whole: dict[str, Any] | None = None
    # its layers then
    whole_layers: tuple[AttentionLayer, ...] = ()
    # the target's before projections were fused, where its plans draft with it
    unfused: Program | None = None
    # the target's before the backend's phases, where it is cut into stages there
    unlowered: Program | None = None
    # what the program is cut into, where the engine has segments
    segments: list[Segment] | None = None
    # what it is cut into for the stages of a pipeline, if there are several
    stages: tuple[Segment, ...] = ()
    # by key, what the program's file has beside its own weights: quantized ones that self-drafts
    # alone read, those that steps read, and tables of numbers that they need
    copies: dict[str, Weight] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """Ranks that have files of their own of the model; (None,) where it is not cut."""
        plan = self.program.shard
        return (None,) if plan is None else tuple(range(plan.num_ranks))


def compile_models(
    context: CompileContext, sources: Sequence[ModelSource]
) -> tuple[list[CompiledModel], list[PassRecord]]:
    """Trace and rewrite the models of an engine; no weight is read.

    Args:
        sources: the target first.
    Returns:
        the models, and what each pass did.
    Raises:
        SpeccError: a model that specc does not compile, or a plan that it cannot verify.
    """
    models: list[CompiledModel] = []
    records: list[PassRecord] = []
    for source in sources:
        if source.head is not None:
            share_equal(source, sources[0])
        author = source.module if source.is_given else source.label
        with context.timer.phase(f"trace {source.name}"), advice_for(author):
            program = _trace(source, context)
        check_states(context, program)
        with context.timer.phase(f"rewrite {source.name}") as advance, advice_for(author):
            if source.name == TARGET:
                calibration = calibration_phases(context, source, advance)
                layout = target_phases(context, calibration, adapter_phases(context, source))
                drafts = any(plan.self_drafts for plan in context.plans)
                places = (FUSE if drafts else None, context.cuts_at)
                kept = KeptGraphs(program, layout, (CUT, CPU, QUANTIZE), *places)
            else:
                # an uncut draft stays as it is, whatever the target becomes
                num_ids = models[0].entry.vocab_size
                if source.head is None:
                    layout = draft_phases(context, source, num_ids)
                else:
                    first = models[0]
                    program.integers |= integers_of_target(
                        source.head, first.source.module, first.program
                    )
                    keeps = bool(program.integers)
                    layout = head_phases(context, source, num_ids, keeps, first.program)
                kept = KeptGraphs(program, layout, (CUT, CPU))
            records += Pipeline(layout, context.dump, kept.before).run(program)
        first_entry = models[0].entry if models else None
        entry = describe_model(source, program, context.limits.max_seq_len, first_entry)
        model = CompiledModel(source, program, entry)
        if (head := source.head) is not None:
            drafter = drafter_of_files(head)
            beside, model.tables = drafter.step_weights(head, source.dtype)
            # what the program has as it is, too, is in its file already
            there = {x.key for x in program.weights.values() if x.layout == ROWS}
            model.copies = {key: x for key, x in beside.items() if key not in there}
        if kept.whole is not None:
            model.whole, model.whole_layers = kept.whole.to_json(program), kept.whole.layers
        model.unfused, model.unlowered = kept.unfused, kept.unlowered
        models.append(model)
        check_windows(entry, context.plans)
    return models, records


def _trace(source: ModelSource, context: CompileContext) -> Program:
    head = source.head
    program = trace(
        source.module,
        source.name,
        source.rope_length,
        rows=() if head is None else drafter_of_files(head).rows(head, source.dtype),
        hands_on=head is not None and head.hands_on,
    )
    source.position_rows = position_limit(program)
    for name, kept in source.integers(program).items():
        if (held := kept.held_as(context.facts.quantized)) is not None:
            program.integers[name] = held
    program.most_positions = context.limits.max_seq_len
    return program


class WholeGraph:
    """What `whole.json` holds.

    Constants that a backend's phases do away with, as those that tables take the place of, are in
    no weight file: their values, which are small, are in the JSON.

    Args:
        program: that is about to be cut or quantized.
        keeps_order: write the keys of weights and constants in their order: files of quantized
            weights have them in another one, and under other names.
    """

    def __init__(self, program: Program, keeps_order: bool = False) -> None:
        self._data = program_to_json(program)
        if keeps_order:
            keys = [weight.key for weight in program.weights.values()]
            self._data["keys"] = [*keys, *map(constant_key, program.constants)]
        self._constants = dict(program.constants)
        self.layers = tuple(program.layers)

    def to_json(self, program: Program) -> dict[str, Any]:
        """JSON-ready data.

        Args:
            program: the same after its last pass.
        """
        keys = {program.constant_keys.get(name, constant_key(name)) for name in program.constants}
        for entry in self._data["inputs"]:
            if entry["kind"] == "constant" and entry["key"] not in keys:
                entry["value"] = self._constants[entry["name"]].tolist()
        return self._data


class KeptGraphs:
    """What a program was before some of its phases.

    Args:
        firsts: phases before the first of which it is kept whole, for other cuts; `staged_at` is
            among them.
        unfused_at: phase before which it is copied for self-drafts, or None.
        staged_at: phase before which it is copied for its stages, or None.
    """

    def __init__(
        self,
        program: Program,
        layout: Phases,
        firsts: Collection[str] = (),
        unfused_at: str | None = None,
        staged_at: str | None = None,
    ) -> None:
        self._program, self._unfused_at, self._staged_at = program, unfused_at, staged_at
        names = [phase for phase, _ in layout]
        self._is_rounded = QUANTIZE in names
        self._first = next((x for x in names if x in firsts or x == staged_at), None)
        self.whole: WholeGraph | None = None
        self.unfused: Program | None = None
        self.unlowered: Program | None = None

    @property
    def before(self) -> dict[str, Callable[[], None]]:
        """See `Pipeline`."""
        phases = {self._first, self._unfused_at, self._staged_at}
        return {phase: partial(self._keep, phase) for phase in phases if phase is not None}

    def _keep(self, phase: str) -> None:
        program = self._program
        if phase == self._first:
            self.whole = WholeGraph(program, self._is_rounded)
        if phase == self._unfused_at:
            self.unfused = program.copy(program.name)
        if phase == self._staged_at:
            self.unlowered = program.copy(program.name)


def describe_quantization(model: CompiledModel, asked: str | None) -> ModelEntry:
    """The entry of a model, with how its projections and its embedding are stored.

    Args:
        model: after its last pass.
        asked: layout that it was to be rounded to, or None.
    """
    counts: Counter[str] = Counter()
    for weight in model.program.weights.values():
        if weight.quantized is not None:
            counts[weight.quantized.unpaired.name] += math.prod(weight.shape)
    names = [name for name, _ in counts.most_common()]
    scheme = model.source.scheme
    # where nothing was asked for, weights that a head shares with its target are as they are there
    is_asked = scheme is None and (asked is not None or model.source.head is None)
    stored = asked if is_asked else " and ".join(names) or None
    return dataclasses.replace(
        model.entry,
        quantization=stored,
        checkpoint_scheme=scheme,
        embedding=" and ".join(layouts_of_lookups(model.program)) or None,
    )


def told_of_quantized(models: Sequence[CompiledModel]) -> list[str]:
    """Weights that are quantized in the checkpoint, and that the engine holds in its own type."""
    told = []
    for model in models:
        names = model.source.decoded_names(model.program)
        if names:
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            told.append(
                f"{model.name}: {len(names)} quantized weight{'s' * (len(names) != 1)} of the"
                f" checkpoint become {model.entry.dtype}, since no operator of the engine reads"
                f" them as they are: {shown}"
            )
    return told


def check_used_bits(config: CompileConfig, programs: Iterable[Program]) -> None:
    """Refuse a number of bits that no product has in the end.

    Args:
        programs: of all models and self-drafts, after their last passes.
    Raises:
        ConfigError: rows have as few bits anyway, or the checkpoint's weights are not integers.
    """
    bits = config.activation_bits
    if bits is None or any(has_rows_of(program, bits) for program in programs):
        return
    raise ConfigError(
        f"--activation-bits {bits}, which changes no product of these models in {config.dtype}",
        "weights in int8, int4 or mxfp4, and rows of more bits: bfloat16 has 16, float32 24",
        "leave it out" + (", or pass --activation-bits 8" if bits > 8 else ""),
    )
