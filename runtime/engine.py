"""A loaded engine: programs bound to their weights and caches, and the facts that requests need."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from specc.artifact.backends import BackendFacts, backend_names, facts_of
from specc.artifact.directory import open_engine, unreplaced
from specc.errors import EngineError

# importing this registers the operators that programs call
from specc.kernels import ops as _ops  # noqa: F401
from specc.runtime.backends.base import LoadedPrograms, LoadLimits
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.engine_cache import DTYPES
from specc.runtime.backends.held_weights import check_mmap
from specc.runtime.backends.offload_budget import check_offload, least_of
from specc.runtime.backends.overlap import check_overlap
from specc.runtime.backends.program_files import MappedWeights, StoredWeights
from specc.runtime.backends.registry import backend_of
from specc.runtime.backends.step import Model, Step
from specc.runtime.constraints.grammars import Grammars
from specc.runtime.draft_weights import DraftWeights
from specc.runtime.execution.draws import BegunModel, DrawnPrograms
from specc.runtime.execution.link import HostLink, Link
from specc.runtime.kept_latency import with_kept_latency
from specc.runtime.profile import load_profile
from specc.runtime.ranks.rank_options import RankOptions
from specc.runtime.runner import Runner
from specc.runtime.scheduling.kv_cache import KVCache
from specc.runtime.scheduling.state_slabs import StateSlabs
from specc.runtime.shared_loop import FairLock
from specc.runtime.sleep import Sleep
from specc.speculation.plans import OFF, SpecPlan
from specc.system.allocator import give_back
from specc.system.machine import check_threads

if TYPE_CHECKING:
    from specc.artifact.manifest import Manifest
    from specc.runtime.in_flight import InFlight

_DO = "compile the engine again"


@dataclass
class Engine:
    """Everything `LLM` needs; `Engine.load` makes one from an engine directory.

    Args:
        target: the target's program.
        drafts: programs of the drafts, draft_0 first.
        steps: plan name → step program; `off` is among them.
        cache: that all programs are bound to.
        default_plan: name of a plan.
        prefill_chunk: tokens of a causal pass at most.
        vocab_size: token ids of the target; the compiler fits drafts to it.
        position_limit: positions 0 … position_limit - 1 exist in every model.
        tokenizer: None where the engine has none; prompts are token ids then.
        eos_token_ids: end an output.
        bos_token_id: put before a text prompt where `add_bos`.
        manifest: None for an engine made by hand.
        backend: what runs the programs, see `facts`.
        operators: namespace of the `specc::` operators that this backend runs.
        mapped_weights: files that the programs read, to be checked while they run.
        profile: what `specc tune` measured, and the latency table of this machine, where one is
            known; empty where neither is.
        directory: that it was loaded from; None for an engine made by hand.
        link: to the device that the programs run on.
        drawn: for batches whose tokens the target draws; None where it cannot.
        staged: the target, where it has stages.
        self_drafts: name → second program of the target, bound to its weights and caches.
        loaded_with: options of loading that change how long passes take.
        runner_type: what runs batches of its steps.
        turn: held for each iteration of the `LLM`s over this engine, in whatever threads.
        stored_weights: files that weights of its programs are in, or were read from.
        loops: that run its steps.
    """

    target: Model
    drafts: list[Model]
    steps: dict[str, Step]
    cache: KVCache
    default_plan: str
    prefill_chunk: int
    vocab_size: int
    position_limit: int
    tokenizer: Tokenizer | None = None
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    add_bos: bool = False
    manifest: Manifest | None = None
    backend: str = "eager"
    operators: Any = torch.ops.specc
    mapped_weights: tuple[MappedWeights, ...] = ()
    profile: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None
    link: Link = field(default_factory=HostLink)
    drawn: DrawnPrograms | None = None
    staged: BegunModel | None = None
    self_drafts: Mapping[str, Model] = field(default_factory=dict)
    loaded_with: Mapping[str, Any] = field(default_factory=dict)
    runner_type: type[Runner] = Runner
    turn: FairLock = field(default_factory=FairLock, repr=False, compare=False)
    stored_weights: tuple[StoredWeights, ...] = ()
    loops: weakref.WeakSet[InFlight] = field(
        default_factory=weakref.WeakSet, repr=False, compare=False
    )

    @property
    def facts(self) -> BackendFacts:
        """What the backend can do."""
        return facts_of(self.backend)

    @property
    def plans(self) -> dict[str, SpecPlan]:
        return {name: step.plan for name, step in self.steps.items()}

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Compiled grammars of structured outputs."""
        return Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids)

    @functools.cached_property
    def draft_weights(self) -> DraftWeights:
        """Takes new weights of its drafts."""
        return DraftWeights(self)

    @functools.cached_property
    def sleep(self) -> Sleep:
        """Lets its weights and caches leave memory, and come back."""
        return Sleep(self)

    def settle(self) -> None:
        """Commit what is queued on its device, of all that run it: no step is in flight then."""
        for loop in list(self.loops):
            loop.finish()

    def states_of(self, model: Model) -> StateSlabs | None:
        """States that the layers of a program read; None where they keep none."""
        for number, states in self.cache.draft_states.items():
            if self.drafts[number] is model:
                return states
        own = (self.target, *self.self_drafts.values())
        return self.cache.states if any(x is model for x in own) else None

    @property
    def policy(self) -> str:
        """What chooses plans, unless a caller does: `fixed`, `best` or `profile`."""
        return self.manifest.policy if self.manifest else "fixed"

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the target's adapters, in the order of their numbers."""
        return tuple(entry.name for entry in self.manifest.adapters) if self.manifest else ()

    @property
    def window(self) -> int:
        """The smallest window of the target's layers; 0 where none has one."""
        layers = self.manifest.models[0].layers if self.manifest else []
        return min((layer.window for layer in layers if layer.window), default=0)

    @property
    def max_seq_len(self) -> int:
        return self.cache.shape.max_seq_len

    @property
    def is_lost(self) -> bool:
        """A rank of a sharded engine is lost: every call fails from now on."""
        leader = getattr(self.target, "leader", None)
        return leader is not None and leader.is_lost

    def close(self) -> None:
        """End the other ranks of a sharded engine, which can run no more; of others, do nothing."""
        leader = getattr(self.target, "leader", None)
        if leader is not None:
            leader.close()

    def check_weights(self) -> None:
        """Raises EngineError: a mapped file was cut while in use."""
        for weights in self.mapped_weights:
            weights.check()

    @classmethod
    def load(
        cls,
        path: str | Path,
        verify: bool | None = None,
        num_threads: int | None = None,
        max_num_seqs: int | None = None,
        backend: str | None = None,
        capture: CaptureLimits | None = None,
        kv_cache_tokens: int | None = None,
        ranks: RankOptions | None = None,
        rank_timeout_s: float = 30.0,
        oversubscribes: bool = False,
        offload_weights: int | str | None = None,
        overlaps: bool = False,
        mmap: bool | None = None,
        check_weights: bool = True,
    ) -> Engine:
        """Open an engine directory.

        Args:
            path: the engine directory.
            verify: compare every file with its hash in the manifest; None leaves out the weights,
                which would be read for it; False compares none.
            num_threads: threads of torch, for the whole process; None leaves them alone. Compiled
                programs keep the number that they were loaded with.
            max_num_seqs: sequences that run together, and the size of the caches; None is what
                the engine was compiled for.
            backend: `eager` runs the graphs of any engine; None is what it was compiled for.
            capture: what capturing CUDA graphs may cost here; None is the default.
            kv_cache_tokens: rows of the cache, for all sequences together: where they run out,
                requests give way to others. None is what it was compiled for, or the worst case of
                `max_num_seqs` sequences.
            ranks: processes that run it together, of which this one leads; None is as many as it
                was cut for.
            rank_timeout_s: after which a rank that does not get on counts as lost, where `ranks`
                is None.
            oversubscribes: ranks of this machine may be more than its cores, where `ranks` is None.
            offload_weights: bytes of memory that weights of the target may take, or `auto`: the
                others are read from their file in every pass, for engines with segments, or on a
                GPU copied from the host's memory.
            overlaps: captured steps draft for one half of their sequences while they verify the
                other half, see `check_overlap`.
            mmap: on CPUs, weights stay in the mapped files, which processes share, True, or are
                read into memory in huge pages, where passes are faster, False. None reads them
                where Linux gives huge pages and there is room.
            check_weights: compare the weights with their sums in the manifest, while they are
                read, or before they are mapped.
        Raises:
            EngineError: the directory is no engine, is altered, or needs another runtime or more
                memory; or a rank cannot load it.
            ConfigError: more sequences or fewer threads than possible; ranks that cannot be, or
                steps that cannot overlap.
        """
        path = Path(path)
        with unreplaced(path):
            manifest = open_engine(
                path,
                verify,
                backend=backend,
                backends=backend_names(),
                max_num_seqs=max_num_seqs,
                kv_cache_tokens=kv_cache_tokens,
                weights_budget=least_of(offload_weights),
            )
            if not check_weights:
                manifest = manifest.unchecked()
            _check_dtypes(manifest)
            check_offload(manifest, backend or manifest.backend, offload_weights)
            check_mmap(backend or manifest.backend, mmap, offload_weights)
            if overlaps:
                run_by = backend or manifest.backend
                check_overlap(manifest, run_by, max_num_seqs, offload_weights)
            check_threads(num_threads, "num_threads")
            if num_threads is not None:
                torch.set_num_threads(num_threads)
            limits = LoadLimits(
                max_num_seqs,
                kv_cache_tokens,
                capture,
                offload_weights=offload_weights,
                overlaps=overlaps,
                mmap=mmap,
            )
            backend = backend or manifest.backend
            if ranks is None and manifest.parallel is not None:
                ranks = RankOptions(
                    manifest.num_ranks, rank_timeout_s, oversubscribes=oversubscribes
                )
            if ranks is None or (ranks.num_ranks == 1 and manifest.parallel is None):
                loaded = backend_of(backend).load(path, manifest, limits)
            else:
                from specc.runtime.ranks.launch import load_led

                how = (verify, num_threads, check_weights)
                loaded = load_led(path, manifest, backend, limits, ranks, *how)
            engine = cls._bind(path, manifest, backend, loaded, offload_weights)
            engine.loaded_with = {
                "offload_weights": offload_weights,
                "overlaps": overlaps,
                "mmap": mmap,
            }
            engine.profile = with_kept_latency(engine)
            return engine

    @classmethod
    def _bind(
        cls,
        path: Path,
        manifest: Manifest,
        backend: str,
        loaded: LoadedPrograms,
        offload_weights: int | str | None,
    ) -> Engine:
        """Add what goes with the programs."""
        _check_plans(manifest, loaded.steps)
        target, *drafts = loaded.models.values()
        tokenizer = manifest.tokenizer
        return cls(
            target=target,
            drafts=drafts,
            steps=loaded.steps,
            cache=loaded.cache,
            default_plan=manifest.default_plan,
            prefill_chunk=manifest.limits.prefill_chunk,
            vocab_size=manifest.models[0].vocab_size,
            position_limit=min(
                loaded.cache.shape.max_seq_len, *(model.max_position for model in manifest.models)
            ),
            tokenizer=_load_tokenizer(path, tokenizer.file),
            eos_token_ids=frozenset(tokenizer.eos_token_ids),
            bos_token_id=tokenizer.bos_token_id,
            add_bos=tokenizer.add_bos,
            manifest=manifest,
            backend=backend,
            operators=loaded.operators,
            mapped_weights=loaded.mapped_weights,
            profile=load_profile(path, manifest, loaded.steps, offload_weights),
            directory=path,
            link=loaded.link,
            drawn=loaded.drawn,
            staged=loaded.staged,
            self_drafts=loaded.self_drafts,
            runner_type=loaded.runner_type,
            stored_weights=loaded.stored_weights,
        )


def _check_dtypes(manifest: Manifest) -> None:
    for model in manifest.models:
        if model.dtype not in DTYPES:
            raise EngineError(
                f"{model.name} of dtype {model.dtype}", f"dtype {' or '.join(DTYPES)}", _DO
            )


def _check_plans(manifest: Manifest, steps: Mapping[str, Step]) -> None:
    """Raises EngineError: a step program is another plan's, or none is that of `off`."""
    for plan in manifest.plans:
        if (step := steps[plan.name]).plan != plan.plan:
            raise EngineError(f"{plan.file} holds {step.plan}", f"plan {plan.name}", _DO)
    if OFF.name not in steps:
        raise EngineError(f"plans {', '.join(steps)}", f"plan {OFF.name} among them", _DO)


def _load_tokenizer(directory: Path, file: str | None) -> Tokenizer | None:
    if file is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(directory / file))
    except Exception as error:  # the library raises plain Exception for a malformed file
        raise EngineError(f"{directory / file}: {error}", "a tokenizer.json", _DO) from error
    # settings of training runs: a prompt must neither be cut nor padded silently
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # of a vocabulary of 262,144 tokens 200 MB are left over
    give_back()
    return tokenizer
