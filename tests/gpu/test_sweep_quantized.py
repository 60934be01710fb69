"""The sweep of quantized products without a GPU: every path, and what is wrong is not timed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.kernels.cuda import linear_q_fragments, linear_q_unpack
from specc.kernels.cuda import linear_q_fragments_kernels as kernels
from tests.gpu import quantized_products, quantized_sweep, sweep_lines, sweep_quantized
from tests.gpu.graph_timer import Graphs, NoGraphs
from tests.gpu.quantized_products import KINDS, SHAPES, SHARED_BYTES, candidates, name_of
from tests.gpu.quantized_sweep import Sweep
from tests.kernels.cuda.gluon_emulator import Launcher, emulated


def options_of(output: Path, *more: str) -> argparse.Namespace:
    return sweep_quantized.parse(["--dry-run", "--output", str(output), "--most", "1", *more])


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAYERS", "LEAST_BYTES", "LEAST_CALLS", "REPLAYS"):
        monkeypatch.setattr(quantized_sweep, name, 1)


def swept(output: Path) -> dict[str, Any]:
    sweep_lines.assemble(Path(f"{output}.lines"), output)
    return json.loads(output.read_text())


def test_every_path(tmp_path: Path) -> None:
    output = tmp_path / "swept.json"
    sweep_quantized.work(options_of(output))
    result = swept(output)
    found, layers = result["found"], result["layers"]
    assert not [item for item in (*found, *layers) if "error" in item]
    names = {f"{kind} {shape}" for kind in (*KINDS, "bfloat16") for shape in SHAPES}
    assert {item["shape"] for item in found} == names
    forms = {item["candidate"].split("-")[0] for item in found}
    assert forms == {"library", "dot", "slices", "vector", "fragments"}
    both_ways = {(item["candidate"].split("-")[0], item["is_dependent"]) for item in found}
    assert ("fragments", True) in both_ways
    # of two layouts, two models and two numbers of rows, ordinary and dependent
    assert len(layers) == 2 * 2 * 2 * 2
    assert len(result["checks"]) == len(KINDS) * len(quantized_sweep.CHECKED) * 4
    assert {"copy 2 GB", "L2", "us of a launch"} <= result["facts"].keys()


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
def emulated_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    shapes = {"8b o": (32, 256), "8b down": (64, 512)}
    for module in (quantized_sweep, quantized_products):
        monkeypatch.setattr(module, "SHAPES", shapes)
        monkeypatch.setattr(module, "OUTPUTS", 32)
    copy = emulated(kernels, linear_q_unpack)
    launcher = Launcher(copy.linear_q_fragments_kernel, ("launch_pdl",))
    monkeypatch.setattr(linear_q_fragments, "linear_q_fragments_kernel", launcher)
    return Sweep(options_of(tmp_path / "swept.json"), Computing())


@pytest.mark.parametrize("kind", ["int4-g128", "fp8"])
def test_right_results_are_seen(emulated_sweep: Sweep, kind: str) -> None:
    assert emulated_sweep.is_right(kind)


def multiplied_by(change: Any) -> Any:
    multiply = linear_q_fragments.multiply

    def changed(x: Tensor, *given: Any) -> Tensor:
        return change(multiply(x, *given))

    return changed


def other_each_time(out: Tensor, calls: list[None] = []) -> Tensor:  # noqa: B006
    calls.append(None)
    return out + 1e-3 * len(calls)


@pytest.mark.parametrize("change", [lambda out: out.roll(1, 1), other_each_time])
def test_what_is_wrong_is_not_timed(
    emulated_sweep: Sweep, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    monkeypatch.setattr(linear_q_fragments, "multiply", multiplied_by(change))
    assert not emulated_sweep.is_right("int4-g128")


def test_other_layouts_get_the_best_tiles_where_int4_is_at_its_aim(
    emulated_sweep: Sweep, tmp_path: Path
) -> None:
    sweep = emulated_sweep
    assert not sweep.is_at_aim()
    tile = candidates("int4-g128", 1)[4]
    item = {"shape": "int4-g128 8b down", "rows": 1, "is_dependent": False}
    sweep.found = [
        item | {"candidate": "vector-2", "us": 1.0},
        item | {"candidate": name_of(candidates("int4-g128", 1)[5]), "us": 12.5},
    ]
    assert not sweep.is_at_aim()
    sweep.found.append(item | {"candidate": name_of(tile), "us": 11.5})
    assert sweep.is_at_aim()
    assert sweep.best("int4-g128", "8b down", 1)[0] == name_of(tile)
