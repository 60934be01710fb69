"""What types of a manifest cannot say: paths, references, sizes of one engine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from specc.artifact.backends import ACTIVATION_BITS, BackendFacts, backend_names, facts_of
from specc.artifact.block_sums import digits_of
from specc.artifact.kv_rows import AUTO
from specc.artifact.manifest_decoding import invalid
from specc.artifact.manifest_entries import (
    AdapterEntry,
    CacheRowsEntry,
    FileEntry,
    LimitsEntry,
    MemoryEntry,
    ParallelEntry,
    PlanEntry,
    TensorRTEntry,
)
from specc.artifact.model_entry import (
    LayerEntry,
    ModelEntry,
    SelfDraftEntry,
    SlabEntry,
)
from specc.artifact.state_entry import check_states
from specc.drafters.facts import Cache
from specc.drafters.registry import drafter_of
from specc.errors import ConfigError, EngineError, SpeccError

# what chooses the plan of a step
POLICIES = ("fixed", "best", "profile", "measured")
# each is a program to read
_MOST_PLANS = 1024


def check_models(models: Sequence[ModelEntry]) -> None:
    """Models, and caches that their layers have a place in.

    Raises:
        EngineError: no model, a path that leaves the directory, or a layer outside of its slab.
    """
    if not models:
        raise invalid("models is empty", "the target, then drafts")
    for model in models:
        check_relative(model.dir)
        _check_taps(model)
        check_states(model.name, model.state_layers, model.state_slabs)
        if model.state_layers and model.reads_hidden:
            raise invalid(
                f"{model.name} reads hidden states, and has layers that keep states",
                "one of the two",
            )
        if model.reads_hidden and (model is models[0] or models[0].taps is None):
            raise invalid(f"{model.name}.head, and no taps of the target", "a target with taps")
        _check_reads(model, models[0])
        for layer in model.layers:
            if not 0 <= layer.slab < len(model.slabs):
                raise invalid(
                    f"{model.name}.{layer.name} has slab {layer.slab}",
                    f"one of {len(model.slabs)} slabs",
                )
            slab = model.slabs[layer.slab]
            if _geometry(slab) != _geometry(layer) or not 0 <= layer.index < slab.num_layers:
                raise invalid(
                    f"{model.name}.{layer.name} does not fit slab {layer.slab}",
                    f"{slab.num_layers} layers of {slab.num_kv_heads} heads, "
                    f"head_dim {slab.head_dim}",
                )
        taken = Counter(layer.slab for layer in model.layers)
        for number, slab in enumerate(model.slabs):
            if taken[number] != slab.num_layers:
                raise invalid(
                    f"slab {number} of {model.name} has {slab.num_layers} layers",
                    f"the {taken[number]} that say so",
                )


def _check_taps(model: ModelEntry) -> None:
    taps, head = model.taps, model.head
    least = 0 if head is not None and not head.facts.hands_on else 1
    if head is not None and (taps is not None or head.width < least):
        raise invalid(
            f"{model.name}.head has rows of {head.width} columns, and"
            f" {'taps' if taps else 'no taps'}",
            "1 column or more, of a draft that keeps nothing for others",
        )
    if taps is None:
        return
    # of hybrids, layers that keep states have boundaries, too
    last = len(model.layers) + len(model.state_layers)
    if not taps.boundaries or not all(0 <= b <= last for b in taps.boundaries) or taps.width < 1:
        raise invalid(
            f"{model.name}.taps has boundaries {list(taps.boundaries)} of {taps.width} columns",
            f"boundaries 0 … {last}, and 1 column or more",
        )


def _check_reads(model: ModelEntry, target: ModelEntry) -> None:
    """Raises EngineError: a head attends to no layers of the target, or another kind does."""
    head = model.head
    if head is None or (head.facts.cache is not Cache.TARGET and not head.reads):
        return
    is_known = head.facts.cache is Cache.TARGET and set(head.reads) <= set(target.layers)
    if not head.reads or not is_known:
        raise invalid(
            f"{model.name}.head reads layers {', '.join(x.name for x in head.reads) or '(none)'}",
            "layers of the target, as the target has them, of a draft over its cache",
        )


def _geometry(entry: LayerEntry | SlabEntry) -> tuple[int, int, int, bool]:
    return entry.num_kv_heads, entry.head_dim, entry.value_dim, entry.values_in_keys


def check_backend(
    name: str,
    rectangle: CacheRowsEntry | None,
    tensorrt: TensorRTEntry | None,
) -> None:
    """Parts that only some backends have.

    Raises:
        EngineError: a backend that this version does not know, a part that its engines have and
            this one lacks, or one that they do not have.
    """
    if name not in backend_names():
        raise EngineError(
            f"an engine for backend {name}",
            f"one of {', '.join(backend_names())}",
            "compile the engine again on this installation",
        )
    facts = facts_of(name)
    _check_part(facts, "rectangle", rectangle, _whether(facts.is_padded))
    _check_part(facts, "tensorrt", tensorrt, _whether(facts.has_plan_files))


def check_cache_rows(rectangle: CacheRowsEntry | None, limits: LimitsEntry) -> None:
    """Rows of padded caches, which are dense.

    Raises:
        EngineError: rows for other limits than the engine's.
    """
    if rectangle is None:
        return
    needed = limits.max_seq_len + limits.max_nodes
    if rectangle.slots != needed or limits.block_size:
        raise invalid(
            f"rectangle.slots is {rectangle.slots}, limits.block_size is {limits.block_size}",
            f"{needed} slots, max_seq_len and max_nodes together, and dense caches",
        )


def check_checkpoints(limits: LimitsEntry) -> None:
    """Raises EngineError: states of prefixes that are kept where no block ends, or nowhere."""
    count, grid, size = limits.state_checkpoints, limits.state_grid, limits.block_size
    if bool(count) != bool(grid) or (grid and (not size or grid % size)):
        raise invalid(
            f"{count} state checkpoints, every {grid} tokens, and blocks of {size}",
            "a multiple of a block, where there are some",
        )


def check_kv_rows(kv_cache_dtype: str, backend: str) -> None:
    """How caches hold rows.

    Raises:
        EngineError: no type that this version knows, or one that the backend does not read.
    """
    known = (AUTO, *facts_of(backend).kv_rows)
    if kv_cache_dtype not in known:
        raise invalid(f"kv_cache_dtype is {kv_cache_dtype!r}", " or ".join(known))


def check_activation_bits(activation_bits: int | None, backend: str) -> None:
    """Bits of the integers of rows; raises EngineError: the backend has none of so many."""
    known = (None, *ACTIVATION_BITS) if facts_of(backend).takes_activation_bits else (None,)
    if activation_bits not in known:
        raise invalid(f"activation_bits is {activation_bits!r}", " or ".join(map(str, known)))


def check_invariance(batch_invariant: bool, backend: str) -> None:
    """Raises EngineError: what the backend does not promise."""
    if batch_invariant and "batch_invariant" not in facts_of(backend).options:
        raise invalid(f"batch_invariant is true, of the backend {backend}", "false")


def check_plans(
    plans: Sequence[PlanEntry], models: Sequence[ModelEntry], limits: LimitsEntry
) -> None:
    """Plans of different names, each for this engine's models and limits.

    Raises:
        EngineError: no such plan can be, or it asks for what the engine does not have.
    """
    if len(plans) > _MOST_PLANS:
        raise invalid(f"{len(plans)} plans", f"at most {_MOST_PLANS}")
    names = [plan.name for plan in plans]
    if len(set(names)) < len(names):
        raise invalid(f"plans are {', '.join(names)}", "plans of different names")
    heads = [model.name for model in models if model.num_handed_on]
    blocks = [x.name for x in models if x.reads_hidden and not x.num_handed_on]
    for plan in plans:
        _check_plan(plan, [model.name for model in models], limits)
        if list(plan.heads) != [name for name in plan.plan.model_names if name in heads]:
            raise invalid(
                f"plan {plan.name} has heads {', '.join(plan.heads) or '(none)'}",
                f"those of its drafts: {', '.join(heads) or '(none)'}",
            )
        named = [block.draft for block in plan.blocks]
        # models that read tokens alone, too, may propose all levels at a time
        alone = [x.name for x in plan.plan.models if x.is_one_pass and not x.facts.reads_hidden]
        own = [x for x in plan.plan.model_names if x in blocks or (x in alone and x not in heads)]
        if named != own or not set(blocks).isdisjoint(alone):
            raise invalid(
                f"plan {plan.name} has blocks of {', '.join(named) or '(none)'}",
                f"those of its drafts: {', '.join(blocks) or '(none)'}",
            )


def check_self_drafts(
    drafts: Sequence[SelfDraftEntry], target: ModelEntry, plans: Sequence[PlanEntry]
) -> None:
    """Second programs of the target.

    Raises:
        EngineError: one that no plan could name, layers that the target does not have, or a plan
            whose self-draft has no program.
    """
    names = [entry.name for entry in drafts]
    if len(set(names)) < len(names):
        raise invalid(f"self_drafts are {', '.join(names)}", "drafts of different names")
    for entry in drafts:
        check_relative(entry.dir)
        if not _is_second_program(entry):
            raise invalid(
                f"self_drafts has {entry}", "a self-draft, with a window where it has one"
            )
        layers = list(entry.layers)
        if layers != sorted(set(layers)) or not set(layers) <= set(range(len(target.layers))):
            raise invalid(
                f"{entry.name} has layers {layers}", f"some of {len(target.layers)} layers"
            )
    for plan in plans:
        for own in plan.plan.self_drafts:
            if own.has_second_program and own.name not in names:
                raise invalid(f"plan {plan.name} asks {own.name}", f"one of {', '.join(names)}")


def _is_second_program(entry: SelfDraftEntry) -> bool:
    try:
        own = drafter_of(entry.name)
    except ConfigError:
        return False
    return own.facts.is_self and not (entry.is_windowed and own.view is None)


def check_choice(default_plan: str, policy: str, plans: Sequence[PlanEntry]) -> None:
    """The plan of a step where nobody says which, and what chooses it.

    Raises:
        EngineError: a plan that the engine does not have, or a policy that nobody knows.
    """
    names = [plan.name for plan in plans]
    if default_plan not in names:
        raise invalid(f"default_plan is {default_plan}", f"one of {', '.join(names)}")
    if policy not in POLICIES:
        raise invalid(f"policy is {policy}", f"one of {', '.join(POLICIES)}")


def check_parallel(
    parallel: ParallelEntry | None, models: Sequence[ModelEntry], rank_files: Sequence[str]
) -> None:
    """Ranks, the models that are cut, and samples of their files.

    Raises:
        EngineError: one rank alone, models that the engine does not have, or samples of others
            than these files.
    """
    if parallel is None:
        return
    if parallel.tensor_parallel_size < 2 and len(parallel.stages) < 2:
        raise invalid(f"tensor_parallel_size is {parallel.tensor_parallel_size}", "2 or more")
    if parallel.stages:
        _check_stages(parallel, models[0])
    for model in models:
        if parallel.tensor_parallel_size > 1 and model.head is not None and model.head.reads:
            raise invalid(
                f"{model.name} attends to keys and values of a target for"
                f" {parallel.tensor_parallel_size} ranks",
                "one rank, which has all of them",
            )
    names = [model.name for model in models]
    if not parallel.models or not set(parallel.models) <= set(names):
        raise invalid(f"parallel.models is {list(parallel.models)}", f"some of {', '.join(names)}")
    whole = [model.name for model in models[1:] if model.name not in parallel.models]
    most = max(1, min(parallel.tensor_parallel_size, len(whole)))
    if not 1 <= parallel.draft_ranks <= most:
        raise invalid(f"parallel.draft_ranks is {parallel.draft_ranks}", f"1 … {most}")
    if set(parallel.samples) != set(rank_files):
        raise invalid(
            f"parallel.samples of {', '.join(parallel.samples) or 'no file'}",
            ", ".join(rank_files),
        )


def _check_stages(parallel: ParallelEntry, target: ModelEntry) -> None:
    """Raises EngineError: a layer that no stage runs, or not in its turn."""
    for name, field in (("layers", "layers"), ("layers that keep states", "state_layers")):
        layers = [layer for stage in parallel.stages for layer in getattr(stage, field)]
        count = len(getattr(target, field))
        if layers != list(range(count)) or len(parallel.stages) < 2:
            raise invalid(
                f"parallel.stages have {name} {layers}",
                f"2 stages or more, with the {count} {name} of {target.name} in order",
            )


def check_sizes(
    models: Sequence[ModelEntry], memory_plan: Mapping[str, MemoryEntry], limits: LimitsEntry
) -> None:
    """Limits, and the memory of each model.

    Raises:
        EngineError: fewer positions than the engine serves, or a model without memory.
    """
    for model in models:
        if model.max_position < limits.max_seq_len:
            raise invalid(
                f"{model.name} has {model.max_position} positions",
                f"{limits.max_seq_len} or more, limits.max_seq_len",
            )
    unplanned = {model.name for model in models} ^ set(memory_plan)
    if unplanned:
        raise invalid(
            f"memory_plan and models disagree about {', '.join(sorted(unplanned))}",
            "one entry for each model",
        )


def check_files(files: Mapping[str, FileEntry], required: Sequence[str], own: str) -> None:
    """The list of files.

    Args:
        files: path → content.
        required: paths that have to be among them.
        own: the manifest's, which is not.
    Raises:
        EngineError: a path that leaves the directory, no hash, or a file that is not listed.
    """
    for path, entry in files.items():
        check_relative(path)
        if path == own or not re.fullmatch("[0-9a-f]{64}", entry.sha256):
            raise invalid(f"files.{path} is {entry}", "the sha256 and size of another file")
        digits = digits_of(entry.bytes)
        if len(entry.crc32) not in (0, digits) or not re.fullmatch("[0-9a-f]*", entry.crc32):
            raise invalid(f"files.{path}.crc32 is {entry.crc32:.40}", f"{digits} hex digits")
    for path in required:
        if path not in files:
            raise invalid(f"{path} is used but not listed in files", "every file, with hash")


def check_relative(path: str) -> None:
    """Accept paths inside the engine directory only: `a/b.json`, no `..`, not absolute.

    Raises:
        EngineError: the path could name a file elsewhere.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
        raise invalid(f"the path {path!r}", "a path inside the engine directory")


def _whether(has_it: bool) -> str:
    return "always" if has_it else "never"


def _check_part(facts: BackendFacts, name: str, part: object, when: str) -> None:
    """Compare a part of the manifest with `always`, `sometimes` or `never`."""
    if part is None and when == "always":
        raise invalid(f"backend {facts.name} with {name} None", f"{name}, which its engines have")
    if part is not None and when == "never":
        raise invalid(
            f"backend {facts.name} with {name} {part}", f"null: its engines have no {name}"
        )


def _check_plan(entry: PlanEntry, models: Sequence[str], limits: LimitsEntry) -> None:
    try:
        plan = entry.plan
    except SpeccError as error:
        raise invalid(f"plan {entry.name} is {error.found}", error.needed) from error
    if missing := [model for model in plan.model_names if model not in models]:
        raise invalid(f"plan {entry.name} asks {missing[0]}", f"one of {', '.join(models)}")
    if plan.self_drafts and not limits.block_size:
        raise invalid(
            f"plan {entry.name} drafts with the target, limits.block_size is 0",
            "a cache in blocks, for self-drafts",
        )
    if plan.num_rows > limits.max_nodes:
        raise invalid(
            f"plan {entry.name} takes {plan.num_rows} rows, limits.max_nodes is {limits.max_nodes}",
            "rows for every plan",
        )


def check_adapters(adapters: Sequence[AdapterEntry]) -> None:
    """Raises EngineError: adapters without names of their own."""
    names = Counter(entry.name for entry in adapters)
    if wrong := [name for name, count in names.items() if count > 1 or not name]:
        raise invalid(f"adapters called {wrong[0]!r}", "a name for each")
