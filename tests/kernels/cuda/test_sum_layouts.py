"""Sums over the rows of a state have one order in all kernels of a head's size, as compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from specc.kernels.cuda import tree_recurrence
from specc.kernels.cuda.shipped import CAPABILITIES
from tests.kernels.cuda import sum_layouts
from tests.kernels.cuda.sum_layouts import head_of

HEADS = sorted({head_of(item.name) for item in tree_recurrence.shipped(90)})


@pytest.mark.default("90-k128-v128-beta")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_of_a_head_add_up_in_one_order(capability: int, head: str) -> None:
    """Nodes, plain decoding and folds: those with words, those without, and the fold."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    options = ["--capability", str(capability), "--head", head]
    process = subprocess.run(
        [sys.executable, "-P", sum_layouts.__file__, *options],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    found: dict[str, list[str]] = json.loads(process.stdout)
    items = [item for item in tree_recurrence.shipped(capability) if head_of(item.name) == head]
    assert found.keys() == {item.name for item in items}
    # a fold without beta adds up nothing
    summed = {name: layouts for name, layouts in found.items() if layouts}
    assert found.keys() - summed.keys() <= {"fold-k128-v64"}
    (layout,) = {layout for layouts in summed.values() for layout in layouts}
    for item in items:
        sizes = item.constexprs
        assert layout.startswith(f"{sizes['BK']}x{sizes['BV']} #ttg.blocked")
        # an addition that is fused is another sum
        assert item.options["enable_fp_fusion"] is False


def test_layouts_are_found_in_what_is_compiled() -> None:
    text = """#blocked = #ttg.blocked<{a = 1}>
#blocked1 = #ttg.blocked<{a = 2}>
  %1 = "tt.reduce"(%0) <{axis = 0 : i32}> ({
    ^bb0(%a: f32, %b: f32):
      %c = arith.addf %a, %b : f32
      tt.reduce.return %c : f32
  }) : (tensor<128x8xf32, #blocked1>) -> tensor<8xf32, #ttg.slice<{dim = 0, parent = #blocked1}>>
  %2 = "tt.reduce"(%0) <{axis = 0 : i32}> ({
  }) : (tensor<64xi32, #blocked>) -> i32
"""
    assert sum_layouts.layouts(text) == ["128x8 #ttg.blocked<{a = 2}>"]
