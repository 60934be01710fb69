"""Whether steps of an engine can draft for some sequences while they verify others."""

from __future__ import annotations

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.manifest import Manifest
from specc.errors import ConfigError
from specc.runtime.backends.captured.overlapped_step import FEWEST, whole_reason


def check_overlap(
    manifest: Manifest,
    backend: str,
    max_num_seqs: int | None = None,
    offload_weights: int | str | None = None,
) -> None:
    """Refuse `--overlap` where it would change nothing, or what it changes is not safe.

    Args:
        max_num_seqs: sequences that run together; None is as many as it was compiled for.
        offload_weights: as of `LoadLimits`.
    Raises:
        ConfigError: a backend whose steps are not captured as graphs of two branches, an engine of
            several ranks, weights that are copied in every pass, drafts of the target itself or
            of its hidden states, no draft model, or too few sequences.
    """
    found = "--overlap"
    if not facts_of(backend).overlaps:
        takers = [name for name in backend_names() if facts_of(name).overlaps]
        raise ConfigError(
            f"{found} with backend {backend}",
            f"backend {' or '.join(takers)}, whose steps are graphs that may have two branches",
            "leave it out",
        )
    if manifest.parallel is not None:
        raise ConfigError(
            f"{found} of an engine of {manifest.num_ranks} ranks",
            "an engine of one rank: collectives of two branches come in no order that all ranks"
            " share",
            "leave it out, or compile for one rank",
        )
    if offload_weights is not None:
        raise ConfigError(
            f"{found} with --offload-weights",
            "one of them: each half of a batch would copy the weights once more",
            "leave --overlap out",
        )
    plans = [entry.plan for entry in manifest.plans]
    names = dict.fromkeys(draft.option for plan in plans for draft in plan.self_drafts)
    if names:
        raise ConfigError(
            f"{found} of an engine whose target drafts, too ({', '.join(names)})",
            "draft models: counters beside the target's weights and caches serve one pass at a"
            " time",
            "leave it out, or compile with other drafts alone",
        )
    if heads := [model.name for model in manifest.models if model.reads_hidden]:
        raise ConfigError(
            f"{found} of an engine whose draft reads the target's hidden states"
            f" ({', '.join(heads)})",
            "draft models that read tokens alone: only they are known to run beside the target",
            "leave it out, or compile with another draft",
        )
    if all(map(whole_reason, plans)):
        reasons = "; ".join(f"{plan.name} {whole_reason(plan)}" for plan in plans)
        raise ConfigError(
            f"{found} of an engine without a draft model: {reasons}",
            "a plan with a draft model, whose passes can run beside the target's",
            "leave it out, or compile with --draft and a model",
        )
    most = manifest.limits.max_batch_size
    if min(most, max_num_seqs or most) < FEWEST:
        raise ConfigError(
            f"{found} of {min(most, max_num_seqs or most)} sequences that run together",
            f"{FEWEST} or more: the halves of smaller batches are not verified in less time",
            "leave it out, or raise --max-batch-size of specc compile, or --max-num-seqs",
        )
