"""What the compiler asks of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from specc.artifact.backends import BackendFacts, facts_of
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest import Manifest
from specc.artifact.manifest_entries import CacheRowsEntry, LimitsEntry, TensorRTEntry
from specc.compiler.compiled_model import CompiledModel
from specc.compiler.context import LEAST_PREFILL_CHUNK, CompileContext
from specc.compiler.self_drafts import SelfDraftProgram
from specc.config import CompileConfig
from specc.errors import SpeccError
from specc.passes.memory import ModelMemory
from specc.passes.pipeline import PassRecord, Phases
from specc.speculation.plans import SpecPlan


@dataclass(frozen=True)
class UnfinishedEngine:
    """An engine whose graphs and weights are written: what a backend makes the rest from.

    Args:
        context: of its compilation, with the final plans and limits.
        models: after their last pass, the target first.
        self_drafts: second programs of the target, whose graphs are written, too.
    """

    context: CompileContext
    writer: EngineWriter
    models: Sequence[CompiledModel]
    self_drafts: Sequence[SelfDraftProgram] = ()


@dataclass(frozen=True)
class Emitted:
    """What a backend has added to an engine.

    Args:
        rectangle: of engines whose programs take padded batches.
        records: what its passes did.
        warnings: what the user should know.
    """

    rectangle: CacheRowsEntry | None = None
    tensorrt: TensorRTEntry | None = None
    records: list[PassRecord] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class CompilerBackend:
    """How engines of one backend are compiled.

    A backend overrides what is different for it; a compilation calls the methods in the order in
    which they stand here. Its object holds no state, so that one serves all compilations.

    Attributes:
        facts: of the backend that the engine names, and that runs it.
        aliases: what people and other programs call it; an error then says the right name.
        prefill_chunk: tokens of a prefill pass where nobody says how many.
        cuts_first: stages of a pipeline are cut before its phases, which each stage then goes
            through by itself; else the target is cut after them.
    """

    facts: BackendFacts
    aliases: tuple[str, ...] = ()
    prefill_chunk: int = LEAST_PREFILL_CHUNK
    cuts_first: bool = False

    @property
    def name(self) -> str:
        """As `--backend` has it."""
        return self.facts.name

    @property
    def options(self) -> tuple[str, ...]:
        """See `BackendFacts`."""
        return self.facts.options

    def is_default(self) -> bool:
        """Whether a compilation that names no backend may choose it on this machine."""
        return facts_of(self.name).by_default

    def check_machine(self) -> None:
        """Ask, before anything else, whether this machine can compile for it.

        Raises:
            SpeccError: it cannot; what is missing, and where to get it.
        """

    def instead_of(self, error: SpeccError) -> str:
        """What to tell a user who named no backend, and for whom a better one cannot compile."""
        return f"{error.found}, so the engine is for the backend {self.name}; {error.do}"

    def adapt(self, config: CompileConfig) -> CompileConfig:
        """Options as engines of this backend have them.

        Raises:
            ConfigError: packages are missing that it compiles with.
        """
        return config

    def check_config(self, config: CompileConfig, dtypes: Sequence[str]) -> None:
        """Refuse options before anything is traced.

        Args:
            dtypes: of the models, each among those of the facts.
        Raises:
            SpeccError: a combination that it cannot compile here.
        """

    def ahead(self) -> AbstractContextManager[None]:
        """Entered before anything is traced: what needs no model may be made beside that. What is
        not ready when the block ends is given up.
        """
        return nullcontext()

    def phases(self, max_seq_len: int, pass_tokens: int | None = None) -> Phases:
        """Phases of the pipeline after those of every backend; what they leave is written.

        Args:
            max_seq_len: positions that rows of passes may have: those that the engine serves, and
                with block drafters the rows of a block beyond the last.
            pass_tokens: that a sequence brings to a pass at most; None is one for each position.
        """
        return ()

    def invariant_phases(self, phases: Phases) -> Phases:
        """Phases of a target whose rows have the same bits whatever else is in a pass.

        Args:
            phases: of the same target without that.
        """
        return phases

    def phase_of_stages(self, num_stages: int, max_seq_len: int) -> str | None:
        """The phase before which the target is cut into stages; None: after all, or not at all.

        Args:
            max_seq_len: see `phases`.
        """
        cuts_first = self.cuts_first and num_stages > 1
        return self.phases(max_seq_len)[0][0] if cuts_first else None

    def model_memory(
        self, memory: ModelMemory, limits: LimitsEntry, plans: Sequence[SpecPlan]
    ) -> ModelMemory:
        """Memory of a model at run time.

        Args:
            memory: with caches of as many rows as the limits say.
        """
        return memory

    def emit(self, engine: UnfinishedEngine) -> Emitted:
        """Compile and write what the engine has besides graphs and weights.

        Raises:
            SpeccError: a program that it cannot compile, or a file that cannot be written.
        """
        return Emitted()

    def probe_refusal(self, manifest: Manifest) -> str | None:
        """Why the engine cannot be tried on this machine; None where it can."""
        if self.facts.is_on_gpu and not torch.cuda.is_available():
            return "this machine has no GPU that torch can use"
        return None

    def extended_nodes(self, manifest: Manifest, plans: Sequence[SpecPlan], max_nodes: int) -> int:
        """Rows after committed ones of a finished engine that gets other plans.

        Args:
            max_nodes: rows that they need.
        Raises:
            ConfigError: what is compiled cannot run them.
        """
        return max_nodes
