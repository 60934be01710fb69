"""A layer up to its attention, by weights in fragments, equals its oracle; emulated on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.rounding import quantize
from specc.kernels.cuda import (
    add_norm_fragments_kernels,
    add_norm_rope_fragments,
    linear_q_fragments,
    linear_q_fragments_kernels,
    rope_write,
)
from specc.kernels.cuda import add_norm_rope_fragments_kernels as kernels
from specc.kernels.cuda.add_norm_rope_fragments import add_norm_rope_write
from specc.kernels.cuda.few_rows import forced
from specc.kernels.cuda.few_rows_tiles import FRAGMENT_LAYOUTS, all_normed_tiles
from specc.kernels.reference.products import add_norm_rope_write_reference
from tests.kernels.cuda import cases_add_norm as cases
from tests.kernels.cuda.cases_write_kv import CANARY, Case, break_rows, split_slabs
from tests.kernels.cuda.emulated_fragments import launcher

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BF16 = torch.bfloat16
# heads whose halves are blocks; what else there is to places is as of the products in bfloat16
ROTATED = {
    name: replace(case, sizes={80: (96, 96), 16: (32, 32)}.get(case.sizes[0], case.sizes))
    for name, case in cases.ROTATED.items()
    if name != "odd-half"
}
# fewer tokens than a kernel takes leave some that no sequence has
ROTATED["tail"] = Case(((2, 9), (1, 3)), tail=3)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[dict[str, Any]]:
    """Constants of the launches of the kernel."""
    found: list[dict[str, Any]] = []
    kernel = add_norm_rope_fragments.add_norm_rope_fragments_kernel
    if device.type == "cpu":
        kernel = launcher(kernels, "add_norm_rope_fragments_kernel", add_norm_fragments_kernels)
        of_rows = launcher(linear_q_fragments_kernels, "linear_q_fragments_kernel")
        monkeypatch.setattr(linear_q_fragments, "linear_q_fragments_kernel", of_rows)

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                found.append(options)
                kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(add_norm_rope_fragments, "add_norm_rope_fragments_kernel", Counted())
    monkeypatch.setattr(add_norm_rope_fragments, "num_programs", lambda *_: 3)
    return found


def arguments(
    name: str, case: Case, rows: int, has_bias: bool, device: torch.device
) -> dict[str, Any]:
    """Of the operator, and the slabs: no more tokens than `rows`."""
    tile = next(t for t in all_normed_tiles(name, 90) if t.block_m == rows)
    made = cases.make_rotation(case, BF16, tile, has_bias, device)
    layout = QuantizedLayout.named(name).paired(case.sizes[0] // 2)
    weight = quantize(made["weight"].float().cpu(), layout).to(device)
    return made | {"weight": weight, "layout": layout.name}


def check(
    name: str, case: Case, rows: int, has_bias: bool, device: Any, is_broken: bool = False
) -> None:
    """Queries, the sum, and all of the slabs."""
    made = arguments(name, case, rows, has_bias, device)
    args, slabs = split_slabs(break_rows(made) if is_broken else made)
    expected, wanted = split_slabs(arguments(name, case, rows, has_bias, device))
    if is_broken:
        expected["slot"][:2] = -1
        expected["slot"][5:] = -1
    found, total = add_norm_rope_write(**args)
    want, sums = add_norm_rope_write_reference(**expected)
    cases.assert_close(found, want, BF16)
    assert torch.equal(total, sums)
    for slab, other in zip(slabs, wanted, strict=True):
        is_written = other != slab.new_tensor(CANARY)
        assert torch.equal(slab[~is_written], other[~is_written])
        cases.assert_close(slab, other, BF16)


@pytest.mark.parametrize("case", ROTATED)
def test_places(case: str, launched: list[Any], device: torch.device) -> None:
    """Every kind of place, with and without a bias, in layouts in turn."""
    i = [*ROTATED].index(case)
    check(FRAGMENT_LAYOUTS[i % len(FRAGMENT_LAYOUTS)], ROTATED[case], 8, i % 2 == 0, device)
    assert [item["BS"] for item in launched] == [1 if case == "one-token" else 8]


@pytest.mark.parametrize("name", ["int4-g128-zeros-fragments", "fp8-fragments"])
def test_one_row(name: str, launched: list[Any], device: torch.device) -> None:
    for case in ("one-token", "dense"):
        check(name, ROTATED[case], 1, case == "dense", device)
    assert [item["BS"] for item in launched] == [1, 1]


def test_rows_without_a_place(device: torch.device) -> None:
    """They are not written; queries are computed all the same."""
    case = Case(((2, 15), (3, 20), (2, 12)))
    check("int8-fragments", case, 8, False, device, is_broken=True)


def test_separate_kernels(launched: list[Any], device: torch.device, monkeypatch: Any) -> None:
    """The norm, `linear_q` by its own choice, and what rotates and writes."""
    used = []

    def noted(*args: Any) -> Any:
        used.append(len(args))
        return rope_write.rope_write(*args)

    monkeypatch.setattr(add_norm_rope_fragments, "rope_write", noted)
    with forced(None):
        check("int4-g64-fragments", ROTATED["tree"], 8, True, device)
    assert (used, launched) == ([10], [])


def test_bad_operands_are_refused(device: torch.device) -> None:
    args, _ = split_slabs(arguments("int8-fragments", ROTATED["tree"], 8, True, device))
    with pytest.raises(ValueError, match="needed int8-fragments-48"):
        add_norm_rope_write(**args | {"layout": "int8-fragments"})
    with pytest.raises(ValueError, match="found cos"):
        add_norm_rope_write(**args | {"cos": args["cos"][:, :32]})
    with pytest.raises(ValueError, match="rows, weight"):
        add_norm_rope_write(**args | {"slot": args["slot"][1:]})
