"""Where a rank is among stages, and what bad stages are told."""

from __future__ import annotations

import re

import pytest
import torch

from specc.artifact.model_entry import LayerEntry, ModelEntry, SlabEntry
from specc.compiler.stages import cut_stages
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.passes.pipeline import PHASES, Pipeline
from specc.runtime.ranks.stage_groups import StageGroups, StagePlace
from specc.speculation.plans import SpecPlan
from tests import models
from tests.traces import trace_once


def test_ranks_of_a_stage_are_neighbours() -> None:
    """As vLLM numbers them: tensor parallelism first."""
    places = [StagePlace(rank, 2, 3) for rank in range(6)]
    assert [place.stage for place in places] == [0, 0, 1, 1, 2, 2]
    assert [place.place for place in places] == [0, 1, 0, 1, 0, 1]
    assert [place.gives_results for place in places] == [False] * 4 + [True, False]
    assert places[0].members() == {
        "stage 0": (0, 1),
        "stage 1": (2, 3),
        "stage 2": (4, 5),
        "link 0 to 2": (0, 2),
        "link 1 to 3": (1, 3),
        "link 2 to 4": (2, 4),
        "link 3 to 5": (3, 5),
        "results": (4, 0),
    }
    assert dict(places[2].own()).keys() == {"stage 1", "link 0 to 2", "link 2 to 4"}


def test_a_job_fails_while_links_are_opened() -> None:
    """By the thread that watches the ranks; the one that opens links goes on meanwhile."""
    groups = StageGroups(StagePlace(0, 1, 3), range(3), 1.0)
    ended: list[str] = []

    class Opened:
        def abort(self, reason: str) -> None:
            ended.append(reason)
            groups._links["results"] = self  # type: ignore[assignment]

        def close(self) -> None:
            groups._links.pop("results", None)

    groups._links["link 0 to 1"] = groups._links["link 1 to 2"] = Opened()  # type: ignore[assignment]
    groups.abort("rank 1 is gone")
    assert ended == ["rank 1 is gone"] * 2
    groups.close()


def test_more_stages_than_layers_are_refused() -> None:
    program = trace_once(models.build_model("llama"), "target")
    Pipeline(PHASES).run(program)
    layers = len(program.layers)
    with pytest.raises(ConfigError) as caught:
        cut_stages(program, layers + 1)
    assert f"a target of {layers} layers" in caught.value.found
    assert "choose a smaller --pipeline-parallel-size" in caught.value.do


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (
            {"draft_tensor_parallel_size": 2, "tensor_parallel_size": 2},
            "--draft-tensor-parallel-size 2 and --pipeline-parallel-size 2",
        ),
        ({"segments": True}, "--segments and --pipeline-parallel-size 2"),
        (
            {"plans": (SpecPlan.from_widths((1, 1), ("self_w16_s4",)),)},
            "--draft self:window=16,sink=4 and --pipeline-parallel-size 2",
        ),
    ],
)
def test_what_goes_without_stages(options: dict, found: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(found)):
        CompileConfig(pipeline_parallel_size=2, **options)


def test_caches_of_a_stage() -> None:
    """Each layer has a place of its own, in slabs of the whole target's geometries."""
    layers = [
        LayerEntry(f"layers.{i}", 4, heads, 16, 0, slab, index)
        for i, (heads, slab, index) in enumerate([(2, 0, 0), (4, 1, 0), (2, 0, 1), (2, 0, 2)])
    ]
    slabs = (SlabEntry(3, 2, 16), SlabEntry(1, 4, 16))
    entry = ModelEntry(
        "target", "target", "A", "a", 8, 8, 8, tuple(layers), slabs, "source", "float32"
    )
    first, last = entry.stage(0, (0, 1)), entry.stage(1, (2, 3))
    assert [(layer.name, layer.slab, layer.index) for layer in last.layers] == [
        ("layers.2", 0, 0),
        ("layers.3", 0, 1),
    ]
    assert [slab.num_layers for slab in first.slabs] == [1, 1]
    assert [slab.num_layers for slab in last.slabs] == [2, 0]
    assert last.program_file == "target/stage-1/program.json"


def test_who_waits_for_another_stage_keeps_nobody_waiting() -> None:
    groups = StageGroups(StagePlace(1, 1, 2), range(2), 5.0)
    before = groups.position
    seen: list[int] = []

    class Sender:
        def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            seen.append(groups.position)
            return torch.zeros(shape, dtype=dtype)

    groups._links["link 0 to 1"] = Sender()  # type: ignore[assignment]
    assert groups.take((1, 2), torch.float32).shape == (1, 2)
    assert seen[0] > before == groups.position
