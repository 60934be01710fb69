"""The phases of the compiler, in one list, and what runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from specc.artifact.graph_io import describe_value
from specc.errors import SpeccError
from specc.passes.base import Fact, Pass
from specc.passes.program import Declined, Program
from specc.passes.proof.verify_graph import verify_graph
from specc.passes.rewrite.classify_masks import ClassifyMasks
from specc.passes.rewrite.drop_sentinel_masks import DropSentinelMasks
from specc.passes.rewrite.fuse_projections import FuseGateUp, FuseQKV, FuseRecurrent
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.read_places import ReadPlaces
from specc.passes.rewrite.read_tables import ReadTables
from specc.passes.rewrite.recover_attention import RecoverAttention
from specc.passes.rewrite.recover_linear import RecoverLinear
from specc.passes.rewrite.replace_grouped_mm import ReplaceGroupedMM
from specc.passes.rewrite.route_experts import RouteExperts
from specc.passes.rewrite.select_logits import SelectLogits
from specc.passes.rewrite.tree_attention import RewriteTreeAttention
from specc.passes.rewrite.tree_recurrence import RewriteTreeRecurrence

# phases by name, each a list of passes (classes, or functions that make one)
Phases = tuple[tuple[str, tuple[Callable[[], Pass], ...]], ...]

# from here on projections of a layer are one, and its weights are as they are stored
FUSE = "fuse"
# phases of every model, verified after each; between these two a model may get others
TRACED_PHASES: Phases = (
    (
        "normalize",
        (Normalize, RecoverLinear, ReadTables, ReplaceGroupedMM, RouteExperts, DropSentinelMasks),
    ),
    (
        "attention",
        (RecoverAttention, ClassifyMasks, RewriteTreeRecurrence, RewriteTreeAttention, ReadPlaces),
    ),
    ("logits", (SelectLogits,)),
)
FUSE_PHASES: Phases = ((FUSE, (FuseQKV, FuseGateUp, FuseRecurrent)),)
PHASES: Phases = (*TRACED_PHASES, *FUSE_PHASES)
# of a draft that attends to nothing
LAYERLESS_PHASES: Phases = (
    ("normalize", (Normalize, RecoverLinear, ReadTables)),
    ("logits", (SelectLogits,)),
)


class PassError(RuntimeError):
    """A pass broke its contract: a bug of specc, reported with the passes that ran before."""


@dataclass(frozen=True)
class PassRecord:
    """What one pass did to one program."""

    program: str
    phase: str
    name: str
    rewrites: int
    seconds: float
    declined: tuple[Declined, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "phase": self.phase,
            "pass": self.name,
            "rewrites": self.rewrites,
            "seconds": round(self.seconds, 4),
            "declined": [{"node": item.node, "reason": item.reason} for item in self.declined],
        }


@dataclass
class Pipeline:
    """Runs phases over a program.

    Args:
        dump_dir: directory that gets the graph after each phase as text, or None.
        before: phase → what is called before it.
        verifies: run the specification of a flat program between phases.
    """

    phases: Phases = PHASES
    dump_dir: Path | None = None
    before: Mapping[str, Callable[[], None]] = field(default_factory=dict)
    verifies: bool = True
    records: list[PassRecord] = field(default_factory=list)

    def run(self, program: Program) -> list[PassRecord]:
        """Rewrite in place; returns the records of this program.

        Raises:
            SpeccError: the model cannot be compiled.
            PassError: a pass broke the program.
        """
        first = len(self.records)
        self._dump(program, 0, "trace")
        for number, (phase, passes) in enumerate(self.phases, start=1):
            if phase in self.before:
                self.before[phase]()
            for kind in passes:
                self._run_pass(kind(), program, phase)
            if self.verifies:
                is_final = number == len(self.phases)
                check = partial(verify_graph, program, phase, is_final=is_final)
                self._guard(check, program, f"verification after {phase}")
            self._dump(program, number, phase)
        return self.records[first:]

    def _run_pass(self, item: Pass, program: Program, phase: str) -> None:
        self._check(item, program, item.requires, "requires")
        start = time.perf_counter()
        result = self._guard(partial(item.run, program), program, item.name)
        seconds = time.perf_counter() - start
        record = PassRecord(
            program.name, phase, item.name, result.rewrites, seconds, tuple(result.declined)
        )
        self.records.append(record)
        self._check(item, program, item.ensures, "ensures")

    def _check(self, item: Pass, program: Program, facts: tuple[Fact, ...], verb: str) -> None:
        for fact in facts:
            if not fact(program):
                raise PassError(
                    f"{item.name} {verb} that {fact.__name__} holds for {program.name}:"
                    f" {fact.__doc__} It does not. {self._history(program)}"
                )

    def _guard(self, action: Callable[[], Any], program: Program, what: str) -> Any:
        try:
            return action()
        except SpeccError:
            raise
        except Exception as error:
            raise PassError(
                f"{what} failed on {program.name}: {type(error).__name__}: {error}."
                f" {self._history(program)}"
            ) from error

    def _history(self, program: Program) -> str:
        names = [record.name for record in self.records if record.program == program.name]
        return f"Passes that ran before: {', '.join(names) or 'none'}."

    def _dump(self, program: Program, number: int, phase: str) -> None:
        if self.dump_dir is None:
            return
        self.dump_dir.mkdir(parents=True, exist_ok=True)
        lines = []
        for node in program.graph.nodes:
            value = describe_value(node.meta.get("val"))
            lines.append(f"{node.format_node()}" + (f"  # {value}" if value else ""))
        path = self.dump_dir / f"{program.name}.{number}-{phase}.txt"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
