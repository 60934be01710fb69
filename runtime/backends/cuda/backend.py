"""The backend cuda: graphs of the engine with Triton kernels, weights in the memory of a GPU."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.artifact.lent_keys import lent_keys, with_lent
from specc.artifact.manifest import Manifest
from specc.artifact.model_entry import ModelEntry
from specc.runtime.backends.captured.backend import CapturedBackend
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.cuda import choose_launches
from specc.runtime.backends.cuda.choose_products import DeviceLostError, choose_products
from specc.runtime.backends.cuda.kept_measurements import Conditions, KeptLaunches, KeptProducts
from specc.runtime.backends.cuda.product_candidates import Timer
from specc.runtime.backends.cuda.step_rows import step_rows
from specc.runtime.backends.cuda.streamed_program import StreamedProgram, load_streamed
from specc.runtime.backends.device_models import DeviceModels
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.engine_cache import caches_of, states_of
from specc.runtime.backends.graph_device import GraphDevice
from specc.runtime.backends.program_files import (
    MappedWeights,
    map_weights,
    read_json,
    read_self_draft,
)
from specc.runtime.scheduling.kv_cache import KVCache


class CudaBackend(CapturedBackend):
    """See `RuntimeBackend`."""

    skips_filters = True

    def load_models(
        self,
        path: Path,
        manifest: Manifest,
        cache: KVCache,
        graphs: GraphDevice,
        rank: int = 0,
        weights_budget: int | None = None,
    ) -> DeviceModels:
        """See `CapturedBackend.load_models`; products are timed, unless that was done before."""
        models: dict[str, ModelProgram] = {}
        target = manifest.models[0]
        for model in manifest.models:
            if weights_budget is not None and model is target:
                models[model.name] = load_streamed(path, manifest, cache, graphs, weights_budget)
            else:
                models[model.name] = _load_model(
                    path,
                    model,
                    map_weights(path, manifest, manifest.weights_file(model, rank)),
                    cache,
                    graphs.device,
                    {} if model is target else models[target.name].weights,
                )
        self_drafts = {
            entry.name: ModelProgram(
                read_self_draft(path, entry),
                models[target.name].weights,
                caches_of(target, cache),
                graphs.device,
            )
            for entry in manifest.self_drafts
        }
        # weights that share a slot would be read from the GPU's own cache while they are timed
        timed = [m for m in models.values() if not isinstance(m, StreamedProgram) or m.is_resident]
        for own in timed:
            choose_on_gpu([own], graphs, _step_rows(manifest, own.name, cache))
        # the products of self-drafts are among the target's own, but for weights of their own
        rows = _step_rows(manifest, target.name, cache)
        choose_on_gpu(self_drafts.values(), graphs, rows)
        return DeviceModels(models, models | self_drafts)

    def prepare_steps(
        self,
        steps: Mapping[str, CapturedStep],
        manifest: Manifest,
        cache: KVCache,
        graphs: GraphDevice,
    ) -> None:
        """See `CapturedBackend.prepare_steps`; chooses how their kernels are launched."""
        if choose_launches.can_launch_dependent(graphs.device):
            kept = KeptLaunches(Conditions.of(graphs.device), _programs_digest(manifest))
            choose_launches.choose_launches(steps, cache, graphs, kept)


BACKEND = CudaBackend()


def choose_on_gpu(
    models: Iterable[ModelProgram], graphs: GraphDevice, rows: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Measure which products are the fastest, before a step is captured with them.

    What an earlier load has measured on such a GPU is not measured again. Elsewhere than on a GPU
    nothing is measured, and the library's stay.

    Args:
        models: on the device.
        graphs: the device.
        rows: as `choose_products` has it.
    Returns:
        what was measured now, see `choose_products`.
    """
    if graphs.device.type != "cuda":
        return []
    can_depend = choose_launches.can_launch_dependent(graphs.device)
    kept = KeptProducts(Conditions.of(graphs.device), can_depend=can_depend)
    return choose_and_keep(models, graphs, kept, rows=rows)


def choose_and_keep(
    models: Iterable[ModelProgram],
    graphs: GraphDevice,
    kept: KeptProducts,
    timer: Timer | None = None,
    rows: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Take what is kept, measure what is left, and keep that, too.

    Args:
        models: on the device.
        graphs: the device.
        kept: for this device.
        timer: what measures; None replays graphs.
        rows: as `choose_products` has it.
    Returns:
        what was measured now, see `choose_products`.
    Raises:
        DeviceLostError: as `choose_products`; what was found is kept, and the next load goes on.
    """
    kept.take()
    try:
        found = choose_products(models, graphs, timer, rows, can_depend=kept.can_depend)
    except DeviceLostError as error:
        kept.add(error.report)
        raise
    kept.add(found)
    return found


def _step_rows(manifest: Manifest, model: str, cache: KVCache) -> tuple[int, ...] | None:
    """Rows that the steps of an engine have; None where it has none, as ranks that follow."""
    plans = [entry.plan for entry in manifest.plans]
    draft = None if model == manifest.models[0].name else model
    return step_rows(plans, draft, cache.shape.max_num_seqs) if plans else None


def _programs_digest(manifest: Manifest) -> str:
    """Of the files that are no weights: models and steps."""
    files = sorted((name, entry.sha256) for name, entry in manifest.files.items())
    text = json.dumps([item for item in files if item[0].endswith(".json")])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _load_model(
    path: Path,
    model: ModelEntry,
    mapped: MappedWeights,
    cache: KVCache,
    device: torch.device,
    lent: Mapping[str, Tensor],
) -> ModelProgram:
    own = {key: weight.to(device) for key, weight in mapped.items()}
    program = read_json(path / model.dir / "program.json")
    # copies: kernels keep counters beside weights, and a draft may run while the target does
    copies = {key: lent[key].clone() for key in lent_keys(program)}
    return ModelProgram(
        program,
        with_lent(own, copies),
        caches_of(model, cache),
        device,
        states=states_of(model, cache),
    )
