"""What every step of a compilation knows: options, backend, plans, sizes, and where to report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specc.artifact.backends import BackendFacts
from specc.artifact.manifest_entries import LimitsEntry
from specc.compiler.engine_plans import reached_positions, tokens_of_passes
from specc.config import CompileConfig
from specc.passes.pipeline import Phases
from specc.progress import PhaseTimer
from specc.speculation.plans import SpecPlan
from specc.speculation.taps import Taps

if TYPE_CHECKING:
    from specc.compiler.backends.base import CompilerBackend


@dataclass(frozen=True)
class CompileContext:
    """What every step of a compilation knows.

    Args:
        config: options, as the backend has adapted them.
        backend: of the engine.
        plans: of the engine, the default first; in tiles once the logits of the models are known.
        limits: of the engine.
        timer: tells the listener how far this is.
        dump: directory that gets each program's graph after each phase, or None.
        taps: hidden states that the target keeps for drafts.
        keeps_integers: a checkpoint is quantized, and its integers are kept.
    """

    config: CompileConfig
    backend: CompilerBackend
    plans: Sequence[SpecPlan]
    limits: LimitsEntry
    timer: PhaseTimer
    dump: Path | None = None
    taps: Taps | None = None
    keeps_integers: bool = False

    @property
    def facts(self) -> BackendFacts:
        return self.backend.facts

    @property
    def positions(self) -> int:
        """Rows of passes are at positions 0 … positions - 1."""
        return reached_positions(self.plans, self.limits.max_seq_len)

    @property
    def cuts_layers(self) -> bool:
        """Whether the target is cut between its layers after the phases of the backend."""
        is_cut = self.config.segments or self.config.pipeline_parallel_size > 1
        return is_cut and not self.backend.cuts_first

    @property
    def cuts_at(self) -> str | None:
        """See `CompilerBackend.phase_of_stages`."""
        return self.backend.phase_of_stages(self.config.pipeline_parallel_size, self.positions)

    def lowering(self) -> Phases:
        """Phases of the backend."""
        tokens = tokens_of_passes(self.plans, self.limits.prefill_chunk)
        return self.backend.phases(self.positions, tokens)
