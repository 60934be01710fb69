"""The manifest of an engine directory: typed, validated, and the same facts in JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from specc.artifact.backends import facts_of
from specc.artifact.kv_rows import AUTO
from specc.artifact.manifest_checks import (
    check_activation_bits,
    check_adapters,
    check_backend,
    check_cache_rows,
    check_checkpoints,
    check_choice,
    check_files,
    check_invariance,
    check_kv_rows,
    check_models,
    check_parallel,
    check_plans,
    check_self_drafts,
    check_sizes,
)
from specc.artifact.manifest_decoding import decode, invalid
from specc.artifact.manifest_entries import (
    AdapterEntry,
    CacheRowsEntry,
    FileEntry,
    LimitsEntry,
    MemoryEntry,
    ParallelEntry,
    PlanEntry,
    SegmentsEntry,
    StageEntry,
    TensorRTEntry,
    TokenizerEntry,
)
from specc.artifact.model_entry import ModelEntry, SelfDraftEntry
from specc.artifact.state_entry import drop_states
from specc.bounds import MOST_LAYERS, number
from specc.drafters.one_pass import without_defaults
from specc.errors import EngineError

SCHEMA_VERSION = 6
# of the operators that graphs call, and of what these mean: graphs of another one do not run
INSTRUCTIONS_VERSION = 1
MANIFEST_FILE = "manifest.json"
# written by `specc tune`
PROFILE_FILE = "profile.json"


@dataclass(frozen=True)
class Manifest:
    """manifest.json. `memory_plan` in JSON also has a key `total`, which is derived.

    Args:
        torch_version: without the local part (`+cpu`).
        created: ISO 8601.
        models: the target first.
        memory_plan: model name → bytes.
        policy: what chooses the plan of a step, see `CompileConfig`.
        rectangle: cache rows of engines whose programs take padded batches; else None.
        tensorrt: of engines for TensorRT; else None.
        self_drafts: programs that self-drafts run beside the target's own.
        segments: of the target, which then has no compiled program of its own; else None.
        kv_cache_dtype: how caches hold rows, see `specc.artifact.kv_rows`.
        activation_bits: of the integers that rows become before quantized weights multiply them;
            None is as many as their type asks for.
        batch_invariant: logits have the same bits with any plan, batch, chunk and preemption.
        adapters: of the target, which requests choose by name.
        probe: what the compiler measured at the end, or None.
        instructions: version of the operators that its graphs call.
        files: every file but the manifest, path with `/` relative to the engine → content.
    """

    specc_version: str
    torch_version: str
    created: str
    backend: str
    device: str
    models: tuple[ModelEntry, ...]
    plans: tuple[PlanEntry, ...]
    default_plan: str
    limits: LimitsEntry
    tokenizer: TokenizerEntry
    memory_plan: dict[str, MemoryEntry]
    policy: str = "fixed"
    rectangle: CacheRowsEntry | None = None
    tensorrt: TensorRTEntry | None = None
    parallel: ParallelEntry | None = None
    self_drafts: tuple[SelfDraftEntry, ...] = ()
    segments: SegmentsEntry | None = None
    kv_cache_dtype: str = AUTO
    activation_bits: int | None = number(1, 64, default=None)
    batch_invariant: bool = False
    adapters: tuple[AdapterEntry, ...] = ()
    probe: dict[str, Any] | None = None
    instructions: int = number(0, MOST_LAYERS, default=INSTRUCTIONS_VERSION)
    files: dict[str, FileEntry] = dataclasses.field(default_factory=dict)
    schema_version: int = number(0, MOST_LAYERS, default=SCHEMA_VERSION)

    @property
    def dtype(self) -> str:
        """Of the target; drafts may have others."""
        return self.models[0].dtype

    @property
    def total_memory(self) -> int:
        return sum(entry.total for entry in self.memory_plan.values())

    def memory_of(
        self,
        ranks: Collection[int],
        max_num_seqs: int | None = None,
        kv_cache_tokens: int | None = None,
        weights_budget: int | None = None,
    ) -> int:
        """Bytes that these ranks take together: each its part of what is cut, and its drafts.

        Args:
            ranks: some of 0 … num_ranks - 1.
            max_num_seqs: sequences that caches are made for; None is what the engine allows.
            kv_cache_tokens: rows of all sequences together; None is what the engine has.
            weights_budget: bytes that weights of the target take on each rank; None is all of them.
        """
        planned, needed = self.limits.cache_rows(), 0
        made = self.limits.cache_rows(max_num_seqs, kv_cache_tokens)
        most_seqs = self.limits.max_batch_size
        num_seqs = min(max_num_seqs or most_seqs, most_seqs)
        for model in self.models:
            home = self.draft_homes.get(model.name, 0)
            for rank in ranks:
                if rank != home and not self.is_cut(model):
                    continue
                entry = self._memory_of(model, rank)
                weights = entry.weights
                if weights_budget is not None and model is self.models[0]:
                    weights = min(weights, weights_budget)
                rest = entry.logits + entry.workspace
                rest += entry.states * num_seqs // most_seqs + entry.checkpoints
                needed += weights + rest + entry.cache * made // planned
        return needed

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready data, `schema_version` first."""
        data = {"schema_version": self.schema_version} | _plain(dataclasses.asdict(self))
        data["memory_plan"]["total"] = self.total_memory
        for model in data["models"]:
            # engines without such drafts are as they were before there were some: versions of specc
            # that know none of these fields open them
            for name in ("taps", "vocabulary", "head"):
                if model[name] is None:
                    del model[name]
            if "head" in model and not model["head"]["reads"]:
                del model["head"]["reads"]
        drop_states(data)
        for entry in data["files"].values():
            if not entry["crc32"]:
                del entry["crc32"]
        for plan in data["plans"]:
            for name in ("heads", "sharpness", "blocks", "kinds"):
                if not plan[name]:
                    del plan[name]
            if "blocks" in plan:
                plan["blocks"] = [without_defaults(block) for block in plan["blocks"]]
        if not self.tokenizer.tokenizer_eos:
            del data["tokenizer"]["tokenizer_eos"]
        if self.parallel is None:
            # engines of one rank are as they were before there were others
            del data["parallel"]
        else:
            # nor what engines of one stage would say of stages
            if not self.parallel.stages:
                del data["parallel"]["stages"]
            if self.parallel.draft_ranks == 1:
                del data["parallel"]["draft_ranks"]
        if not self.self_drafts:
            del data["self_drafts"]
        if self.segments is None:
            del data["segments"]
        if self.kv_cache_dtype == AUTO:
            del data["kv_cache_dtype"]
        if self.activation_bits is None:
            del data["activation_bits"]
        if not self.batch_invariant:
            del data["batch_invariant"]
        if not self.adapters:
            del data["adapters"]
        return data

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Decode and validate.

        Raises:
            EngineError: the schema is newer, or a field is absent, unknown, of another type, or
                names something that does not exist.
        """
        if not isinstance(data, dict) or type(data.get("schema_version")) is not int:
            raise invalid("it has no schema_version", f"schema_version {SCHEMA_VERSION}")
        version = data["schema_version"]
        if version > SCHEMA_VERSION:
            raise EngineError(
                f"an engine of schema version {version}, written by a newer specc "
                f"({data.get('specc_version')})",
                f"schema version {SCHEMA_VERSION}",
                "update specc, or compile the engine again with this version",
            )
        if version < SCHEMA_VERSION:
            raise EngineError(
                f"an engine of schema version {version}, written by an older specc "
                f"({data.get('specc_version')})",
                f"schema version {SCHEMA_VERSION}",
                "compile the engine again with this version",
            )
        memory = data.get("memory_plan")
        if not isinstance(memory, dict) or "total" not in memory:
            raise invalid("memory_plan has no total", "an object with a total")
        models_memory = {name: entry for name, entry in memory.items() if name != "total"}
        # engines of one rank do not say so, nor those whose drafts need no program of their own, or
        # whose rows are in the type of the model
        absent: dict[str, Any] = {
            "parallel": None, "self_drafts": [], "segments": None, "kv_cache_dtype": AUTO,
            "activation_bits": None, "batch_invariant": False, "adapters": [],
        }  # fmt: skip
        if isinstance(data.get("parallel"), dict):
            absent["parallel"] = {"draft_ranks": 1, "stages": []} | data["parallel"]
            data = {name: value for name, value in data.items() if name != "parallel"}
        fields = absent | data | {"memory_plan": models_memory}
        manifest = decode(cls, fields, "")
        if memory["total"] != manifest.total_memory:
            raise invalid(
                f"memory_plan.total is {memory['total']!r}", f"the sum {manifest.total_memory}"
            )
        manifest.validate()
        return manifest

    def validate(self) -> None:
        """Check what types cannot say.

        Raises:
            EngineError: a path leaves the directory, or a reference has no referent.
        """
        check_models(self.models)
        check_backend(self.backend, self.rectangle, self.tensorrt)
        check_cache_rows(self.rectangle, self.limits)
        check_checkpoints(self.limits)
        check_kv_rows(self.kv_cache_dtype, self.backend)
        check_activation_bits(self.activation_bits, self.backend)
        check_invariance(self.batch_invariant, self.backend)
        check_plans(self.plans, self.models, self.limits)
        check_self_drafts(self.self_drafts, self.models[0], self.plans)
        check_adapters(self.adapters)
        check_choice(self.default_plan, self.policy, self.plans)
        check_sizes(self.models, self.memory_plan, self.limits)
        check_parallel(self.parallel, self.models, self.rank_files)
        check_files(self.files, self.required_files, MANIFEST_FILE)

    @property
    def num_ranks(self) -> int:
        return self.parallel.num_ranks if self.parallel else 1

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that have a part of each weight, or of each that their stage has."""
        return self.parallel.tensor_parallel_size if self.parallel else 1

    @property
    def stages(self) -> tuple[StageEntry, ...]:
        """Of a pipeline, one after the other; none where every rank runs all layers."""
        return self.parallel.stages if self.parallel else ()

    def unchecked(self) -> Manifest:
        """The same without sums of weights: what loads it compares none."""
        files = {name: dataclasses.replace(entry, crc32="") for name, entry in self.files.items()}
        return dataclasses.replace(self, files=files)

    def of_rank(self, rank: int) -> Manifest:
        """What a rank loads: of a target in stages, its own; else all."""
        if not self.stages or self.parallel is None:
            return self
        target, *drafts = self.models
        part = self._stage_entry(self.parallel.stage_of(rank))
        parallel = dataclasses.replace(self.parallel, stages=())
        memory = self.memory_plan | {target.name: self._memory_of(target, rank)}
        models = (part, *drafts)
        return dataclasses.replace(self, models=models, parallel=parallel, memory_plan=memory)

    def _stage_entry(self, number: int) -> ModelEntry:
        stage = self.stages[number]
        return self.models[0].stage(number, stage.layers, stage.state_layers)

    def _memory_of(self, model: ModelEntry, rank: int) -> MemoryEntry:
        """Of a model on one rank that runs it."""
        if self.stages and self.parallel is not None and model is self.models[0]:
            return self.stages[self.parallel.stage_of(rank)].memory
        return self.memory_plan[model.name]

    def is_cut(self, model: ModelEntry) -> bool:
        """Whether each rank has a part of this model; else each rank that runs it has all."""
        return self.parallel is not None and model.name in self.parallel.models

    def ranks_of(self, model: ModelEntry) -> tuple[int | None, ...]:
        """Ranks that have a file of their own of this model; (None,) where there is one file."""
        return tuple(range(self.num_ranks)) if self.is_cut(model) else (None,)

    @property
    def led_models(self) -> tuple[str, ...]:
        """Names of the models that all ranks run, the target first; see `led_programs`."""
        return tuple(
            model.name for i, model in enumerate(self.models) if i == 0 or self.is_cut(model)
        )

    @property
    def led_programs(self) -> tuple[str, ...]:
        """Names of what orders are about: models, then second programs of the target."""
        return (*self.led_models, *(draft.name for draft in self.self_drafts))

    @property
    def draft_homes(self) -> dict[str, int]:
        """Draft model → the one rank that has it, where that is not rank 0."""
        count = self.parallel.draft_ranks if self.parallel else 1
        homes = {model.name: i % count for i, model in enumerate(self.models[1:])}
        return {name: rank for name, rank in homes.items() if rank}

    def drafts_of(self, rank: int) -> tuple[str, ...]:
        """Draft models that this rank has, and rank 0 has not."""
        return tuple(name for name, home in self.draft_homes.items() if home == rank)

    @property
    def ordered_programs(self) -> tuple[str, ...]:
        """What orders are about, by number: that of all ranks, then drafts of single ones."""
        return (*self.led_programs, *self.draft_homes)

    def part_of(self, names: Collection[str]) -> Manifest:
        """The same of some of the models, for a rank that loads no others."""
        return dataclasses.replace(
            self,
            models=tuple(model for model in self.models if model.name in names),
            memory_plan={name: self.memory_plan[name] for name in names},
        )

    def weights_file(self, model: ModelEntry, rank: int = 0) -> str:
        """The weights of a model that a rank reads."""
        if self.stages and self.parallel is not None and model is self.models[0]:
            return self._stage_entry(self.parallel.stage_of(rank)).rank_file(rank)
        return model.rank_file(rank) if self.is_cut(model) else model.weights_file

    @property
    def windowed(self) -> frozenset[str]:
        """Self-drafts whose programs see a part of the cache by themselves."""
        return frozenset(draft.name for draft in self.self_drafts if draft.is_windowed)

    @property
    def weights_files(self) -> tuple[str, ...]:
        """Of all models and ranks."""
        ranks = range(self.num_ranks)
        return tuple(
            dict.fromkeys(self.weights_file(model, r) for model in self.models for r in ranks)
        )

    @property
    def step_files(self) -> dict[str, str]:
        """Plan → its step program."""
        return {plan.name: plan.file for plan in self.plans}

    @property
    def winners_files(self) -> dict[str, str]:
        """Plan → its step program whose acceptance reads what ranks have drawn; of cut engines."""
        if self.parallel is None:
            return {}
        return {plan.name: plan.winners_file for plan in self.plans}

    @property
    def rank_files(self) -> tuple[str, ...]:
        """Weights of which each rank has its own file."""
        ranks, cut = range(self.num_ranks), [model for model in self.models if self.is_cut(model)]
        return tuple(self.weights_file(model, rank) for model in cut for rank in ranks)

    @property
    def required_files(self) -> tuple[str, ...]:
        """Files that the runtime opens; each is listed in `files`."""
        facts = facts_of(self.backend)
        fields = ("program_file", *facts.model_files)
        programs = (*self.models, *self.self_drafts)
        files = [getattr(program, field) for program in programs for field in fields]
        for model in self.models if facts.has_files_of_ranks else ():
            for field in facts.model_files:
                files.remove(file := getattr(model, field))
                files += [model.part_of(file, rank) for rank in self.ranks_of(model)]
        if self.segments is not None:
            files.append(self.models[0].segments_file)
        if self.stages:
            parts = [self._stage_entry(number) for number in range(len(self.stages))]
            files += [getattr(part, field) for part in parts for field in fields]
        files += self.weights_files
        is_tensor_cut = self.tensor_parallel_size > 1
        cut = [model for model in self.models if self.is_cut(model) and is_tensor_cut]
        files += [file for model in cut for file in (model.shard_file, model.whole_file)]
        if self.is_cut(self.models[0]):
            files += [draft.whole_file for draft in self.self_drafts]
        files += [*self.step_files.values(), *self.winners_files.values()]
        return (*files, self.tokenizer.file) if self.tokenizer.file else tuple(files)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
