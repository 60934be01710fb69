"""Rows have one order of sums in all kernels of invariant operators, as compiled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from fractions import Fraction

import pytest

from specc.kernels.cuda import invariant_attend, invariant_linear, tree_recurrence
from specc.kernels.cuda.shipped import CAPABILITIES
from tests.kernels.cuda import row_orders
from tests.kernels.cuda.row_orders import head_of

HEADS = sorted({head_of(item.name) for item in tree_recurrence.shipped(90)})
# rows of the first operand, and columns that an instruction adds up
INSTRUCTION = "mma.sync.aligned.m16n8k16.row.col.f32"
LAYOUT = "#ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, instrShape = [16, 8]}>"


def compiled(capability: int, module: str, *further: str) -> dict[str, dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    options = ["--capability", str(capability), "--module", module, *further]
    process = subprocess.run(
        [sys.executable, "-P", row_orders.__file__, *options],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    found: dict[str, dict] = json.loads(process.stdout)
    return found


def check_products(name: str, made: dict) -> None:
    """All products of a configuration are of one instruction, columns after each other."""
    assert made["products"], name
    if name.startswith("fp32"):
        # each thread multiplies and adds for itself
        assert made["instructions"] == []
        assert all("tt.dot" in x and "mma" not in x for x in made["products"]), name
        return
    kind = name.partition("-")[0].replace("fp", "f")
    assert made["instructions"] == [f"{INSTRUCTION}.{kind}.{kind}.f32"], name
    for product in made["products"]:
        assert product.startswith("tt.dot "), name
        layouts = re.sub(r"\d+x\d+x\w+ ", "", product.removeprefix("tt.dot "))
        operands = (
            f"#ttg.dot_op<{{opIdx = {i}, parent = {LAYOUT}, kWidth = 2}}>" for i in range(2)
        )
        assert layouts == " ".join((*operands, LAYOUT)), name


@pytest.mark.default("90")
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_both_tiles_of_a_product_add_up_alike(capability: int) -> None:
    """So rows have the same bits in either, and there is no other place where they are added."""
    found = compiled(capability, "invariant_linear")
    items = {item.name: item for item in invariant_linear.shipped(capability)}
    assert found.keys() == items.keys()
    for name, made in found.items():
        check_products(name, made)
        assert made["sums"] == []
        # the bias alone: partial sums, of programs, warps or halves of a step, would be added, too
        outputs = items[name].constexprs["BM"] * items[name].constexprs["BN"]
        most = outputs // (32 * items[name].num_warps)
        assert made["additions"] == (most if name.endswith("-bias") else 0), name
        # a bias that is fused would be rounded otherwise than beside an instruction's sum
        assert items[name].options["enable_fp_fusion"] is False


@pytest.mark.default("90")
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_blocks_of_keys_are_added_up_alike(capability: int) -> None:
    """Those that all tokens of a tile share, and those of one token."""
    found = compiled(capability, "invariant_attend")
    items = {item.name: item for item in invariant_attend.shipped(capability)}
    assert found.keys() == items.keys()
    for name, made in found.items():
        check_products(name, made)
        sizes = items[name].constexprs
        # scores, and what they make of values, which have the same sizes where keys are as many as
        # columns; both copies of the loop have the same two
        assert len(made["products"]) == 1 + (sizes["BN"] != sizes["BD"]), name
        (layout,) = made["sums"]
        assert layout.startswith(f"1 {sizes['BM']}x{sizes['BN']} "), name
        assert items[name].options["enable_fp_fusion"] is False


@pytest.mark.default("90-linear_q_fragments")
@pytest.mark.parametrize("module", ["linear_q_fragments", "experts_fragments"])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_all_tiles_of_fragments_add_up_alike(capability: int, module: str) -> None:
    """Of a layout they have the same instruction, the same sum of warps, and as many additions of
    an output, of which the same are fused; so do both products of experts, of few tokens.
    """
    leave_out = ("--leave-out", "dependent|decode|^int8-|^int4-g128")
    found = compiled(capability, module, *leave_out)
    layouts: dict[str, list[str]] = {}
    for name in found:
        layouts.setdefault(name.partition("-m")[0], []).append(name)
    assert all(len(names) > 1 for names in layouts.values())
    for names in layouts.values():
        orders = []
        for name in names:
            made, rows, *blocks = found[name], *map(int, re.findall(r"-[mn](\d+)", name))
            outputs = blocks[0] if blocks else 32
            assert made["instructions"] == [f"{INSTRUCTION}.bf16.bf16.f32"], name
            (layout,) = {re.sub(rf"x16x{rows} ", "", item) for item in made["sums"]}
            counted = (made[x] for x in ("additions", "fused", "products of floats"))
            orders.append((layout, *(Fraction(x, rows * outputs) for x in counted)))
        assert len(set(orders)) == 1, (names, orders)


@pytest.mark.default("90-k128-v128-beta")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_of_a_head_add_up_in_one_order(capability: int, head: str) -> None:
    """Nodes, plain decoding and folds: those with words, those without, and the fold."""
    made = compiled(capability, "tree_recurrence", "--head", head)
    items = [item for item in tree_recurrence.shipped(capability) if head_of(item.name) == head]
    assert made.keys() == {item.name for item in items}
    # a fold without beta adds up nothing
    summed = {name: found["sums"] for name, found in made.items() if found["sums"]}
    assert made.keys() - summed.keys() <= {"fold-k128-v64"}
    (layout,) = {layout for layouts in summed.values() for layout in layouts}
    for item in items:
        sizes = item.constexprs
        assert layout.startswith(f"0 {sizes['BK']}x{sizes['BV']} #ttg.blocked")
        # an addition that is fused is another sum
        assert item.options["enable_fp_fusion"] is False


def test_orders_are_found_in_what_is_compiled() -> None:
    text = """#mma = #ttg.nvidia_mma<{versionMajor = 2, warpsPerCTA = [1, 4], instrShape = [16, 8]}>
#mma1 = #ttg.nvidia_mma<{versionMajor = 3, warpsPerCTA = [4, 1], instrShape = [16, 64, 16]}>
  %0 = tt.dot %a, %b, %c : tensor<16x64xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma}>> * \
tensor<64x32xbf16, #ttg.dot_op<{opIdx = 1, parent = #mma}>> -> tensor<16x32xf32, #mma> loc(#loc1)
  %1 = ttng.warp_group_dot %a, %b, %c : !ttg.memdesc<64x64xbf16, #shared, #smem> * \
!ttg.memdesc<64x64xbf16, #shared, #smem> -> tensor<64x64xf32, #mma1> loc(#loc1)
  %2 = "tt.reduce"(%0) <{axis = 0 : i32}> ({
  ^bb0(%x: i32 loc(#loc1)):
  }) : (tensor<64x2xi32, #mma>) -> tensor<2xi32, #ttg.slice<{dim = 0, parent = #mma}>>
  %3 = "tt.reduce"(%0) <{axis = 1 : i32}> ({
  ^bb0(%x: f32 loc(#loc1)):
  }) : (tensor<16x32xf32, #mma>) -> tensor<16xf32, #ttg.slice<{dim = 1, parent = #mma}>>
"""
    two, three = (
        "versionMajor = 2, instrShape = [16, 8]",
        "versionMajor = 3, instrShape = [16, 64, 16]",
    )
    whole = two.replace(",", ", warpsPerCTA = [1, 4],", 1)
    assert row_orders.orders(text) == {
        "products": [
            f"tt.dot 16x64xbf16 #ttg.dot_op<{{opIdx = 0, parent = #ttg.nvidia_mma<{{{two}}}>}}>"
            f" 64x32xbf16 #ttg.dot_op<{{opIdx = 1, parent = #ttg.nvidia_mma<{{{two}}}>}}>"
            f" 16x32xf32 #ttg.nvidia_mma<{{{two}}}>",
            f"ttng.warp_group_dot 64x64xf32 #ttg.nvidia_mma<{{{three}}}>",
        ],
        "sums": [f"1 16x32 #ttg.nvidia_mma<{{{whole}}}>"],
    }
