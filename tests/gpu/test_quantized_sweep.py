"""The sweep of quantized products without a GPU: every path, and what is wrong is not timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.kernels.cuda import (
    add_norm_fragments,
    add_norm_fragments_kernels,
    linear_q_fragments,
)
from specc.kernels.cuda import linear_q_fragments_kernels as kernels
from tests.gpu import quantized_products, quantized_sweep
from tests.gpu.graph_timer import Graphs, NoGraphs
from tests.gpu.quantized_products import KINDS, SHAPES, SHARED_BYTES, candidates, name_of
from tests.gpu.quantized_sweep import QuantizedSweep
from tests.gpu.results import Results
from tests.gpu.test_sweep_tiles import DEVICE, values
from tests.kernels.cuda.emulated_fragments import launcher


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAYERS", "LEAST_BYTES", "LEAST_CALLS", "REPLAYS", "MOST"):
        monkeypatch.setattr(quantized_sweep, name, 1)


def test_every_path(tmp_path: Path) -> None:
    path = tmp_path / "events"
    quantized_sweep.measure(Results(path), DEVICE, 60.0)
    found = values(path)
    assert {"copy 2 GB", "L2", "us of a launch"} <= found.pop("device").keys()
    checks = [name for name in found if name.endswith("is right")]
    assert len(checks) == len(KINDS) * len(quantized_sweep.CHECKED)
    # of those with few columns also with a norm in front
    counts = {name: len(found.pop(name)["cases"]) for name in checks}
    assert set(counts.values()) == {4, 6}
    assert {name for name in counts if counts[name] == 6} == {
        f"{kind} 8b o is right" for kind in KINDS
    }
    items = [*found.values()]
    assert not [item for item in items if "error" in item]
    layers = [item for item in items if item["shape"].startswith("layer")]
    # of two layouts, two models and two numbers of rows, ordinary and dependent
    assert len(layers) == 2 * 2 * 2 * 2
    products = [item for item in items if item not in layers]
    names = {f"{kind} {shape}" for kind in (*KINDS, "bfloat16") for shape in SHAPES}
    assert {item["shape"] for item in products} == names
    forms = {item["candidate"].split("-")[0] for item in products}
    assert forms == {"library", "dot", "fragments"}
    assert {item["is_dependent"] for item in products} == {True, False}


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_fit_and_are_told_apart(kind: str) -> None:
    for rows in (1, 6, 16, 32):
        tiles = candidates(kind, rows)
        assert len({name_of(tile) for tile in tiles}) == len(tiles) > 10
        for tile in tiles:
            assert tile.block_m >= rows
            ring = tile.num_stages if tile.num_stages > 2 else 0
            bits = 4 if kind.startswith(("int4", "mxfp4")) else 8
            step = tile.block_n * tile.block_k * tile.num_warps * bits // 8
            assert ring * step <= SHARED_BYTES


class Computing(NoGraphs):
    """Compares what was computed on the CPU."""

    device = torch.device("cpu")
    off, same = Graphs.off, Graphs.same

    def __init__(self) -> None: ...


@pytest.fixture
def emulated_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QuantizedSweep:
    shapes = {"8b o": (32, 256), "8b down": (64, 512)}
    for module in (quantized_sweep, quantized_products):
        monkeypatch.setattr(module, "SHAPES", shapes)
        monkeypatch.setattr(module, "OUTPUTS", 32)
    for launches, module, name in (
        (linear_q_fragments, kernels, "linear_q_fragments_kernel"),
        (add_norm_fragments, add_norm_fragments_kernels, "add_norm_fragments_kernel"),
    ):
        monkeypatch.setattr(launches, name, launcher(module, name))
    sweep = QuantizedSweep(Results(tmp_path / "events"), DEVICE, 600.0, (1, 6, 16))
    sweep.graphs = Computing()
    return sweep


@pytest.mark.parametrize("kind", ["int4-g128", "fp8"])
def test_right_results_are_seen(emulated_sweep: QuantizedSweep, kind: str) -> None:
    assert emulated_sweep.is_right(kind)


def multiplied_by(change: Any) -> Any:
    multiply = linear_q_fragments.multiply

    def changed(x: Tensor, *given: Any) -> Tensor:
        return change(multiply(x, *given))

    return changed


def test_a_wrong_norm_is_seen(emulated_sweep: QuantizedSweep, monkeypatch: Any) -> None:
    right = quantized_products.Weight.normed

    def changed(self: Any, x: Tensor, residual: Tensor, gamma: Tensor) -> Tensor:
        return right(self, x, x, gamma)

    monkeypatch.setattr(quantized_products.Weight, "normed", changed)
    assert not emulated_sweep.is_right("int4-g128")


def other_each_time(out: Tensor, calls: list[None] = []) -> Tensor:  # noqa: B006
    calls.append(None)
    return out + 1e-3 * len(calls)


@pytest.mark.parametrize("change", [lambda out: out.roll(1, 1), other_each_time])
def test_what_is_wrong_is_not_timed(
    emulated_sweep: QuantizedSweep, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    monkeypatch.setattr(linear_q_fragments, "multiply", multiplied_by(change))
    assert not emulated_sweep.is_right("int4-g128")


def test_other_layouts_get_the_best_tiles_where_int4_is_at_its_aim(
    emulated_sweep: QuantizedSweep,
) -> None:
    sweep = emulated_sweep
    assert not sweep.is_at_aim()
    tile = candidates("int4-g128", 1)[4]
    item = {"shape": "int4-g128 8b down", "rows": 1, "is_dependent": False}
    sweep.found = [
        item | {"candidate": "dot-1", "us": 1.0},
        item | {"candidate": name_of(candidates("int4-g128", 1)[5]), "us": 12.5},
    ]
    assert not sweep.is_at_aim()
    sweep.found.append(item | {"candidate": name_of(tile), "us": 11.5})
    assert sweep.is_at_aim()
    assert sweep.best("int4-g128", "8b down", 1)[0] == name_of(tile)
