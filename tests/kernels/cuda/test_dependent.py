"""Kernels that are launched early wait before they touch memory: read from what is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.kernels.cuda import add_norm_gate_up, dependent, few_rows
from specc.kernels.cuda.attend_config import machine
from specc.kernels.cuda.dependent import launch_options
from specc.kernels.cuda.launch import dependent_launches
from specc.kernels.cuda.recorded import recorded
from specc.kernels.cuda.shipped import CAPABILITIES
from tests.kernels.cuda import aot, ptx_order
from tests.kernels.cuda.launches_products import CALLS
from tests.kernels.cuda.ptx_order import problems

ARGUMENTS = ("x", "weight", "out", "K")
# as products have them: lines of the weight, the wait, a loop over loads, a store
ASK = """
    mul.wide.s32 %rd4, %r1, 2;
    add.s64 %rd5, %rd2, %rd4;
    // begin inline asm
    prefetch.global.L2 [%rd5]; // %r9
    // end inline asm
"""
WAIT = "    griddepcontrol.wait; // dummy %r8\n"
START = "    griddepcontrol.launch_dependents; // dummy %r7\n"
LOAD = "    @%p1 ld.global.b32 { %r2 }, [ %rd6 + 0 ];\n"
STORE = "    st.global.b32 [ %rd3 + 0 ], { %r2 };\n"


def module(body: str) -> str:
    return f"""
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u32 kernel_param_3
)
.reqntid 128
{{
    .reg .b32 %r<9>;
    .loc 1 12 25
    ld.param.b32 %r1, [kernel_param_3];
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    ld.param.b64 %rd3, [kernel_param_2];
    add.s64 %rd6, %rd1, 4;
    st.shared.b32 [%r1], %r1;
    setp.gt.s32 %p1, %r1, 0;
{body}
    ret;
}}
.section .debug_abbrev {{ .b8 1 }}
"""


LOOP = f"""$L__BB0_1:
{LOAD}
    cp.async.cg.shared.global [ %r3 + 0 ], [ %rd6 + 0 ], 0x10, %r4;
    @%p1 bra $L__BB0_1;
"""
GOOD = ASK + WAIT + LOOP + START + STORE


def found(body: str) -> list[str]:
    return problems(module(body), ARGUMENTS, ("weight",))


def test_a_kernel_in_order() -> None:
    assert found(GOOD) == []
    assert found(WAIT + START + LOOP + STORE) == []
    # what begins or ends a program in ordinary ways
    assert not ptx_order.is_ordinary(module(GOOD))
    assert ptx_order.is_ordinary(module(LOOP + STORE))


# code as a name would be too long
OUT_OF_ORDER = [
    (ASK + START + LOOP + STORE, "before it waits: ld.global.b32"),
    (ASK + LOAD + WAIT + START + STORE, "before it waits: ld.global.b32"),
    (STORE + WAIT + START, "before it waits: st.global.b32"),
    ("    atom.global.gpu.add.u32 %r5, [%rd3], 1;\n" + WAIT + START, "before it waits: atom"),
    ("    ld.b32 %r2, [%rd6];\n" + WAIT + START, "before it waits: ld.b32"),
    (LOOP + WAIT + START, "before it waits: cp.async"),
    # lines of what the step writes, and of places that memory names
    (ASK.replace("%rd2", "%rd1") + WAIT + START, "before it waits: prefetch"),
    (ASK.replace("%rd2", "%rd1, %rd2") + WAIT + START, "before it waits: prefetch"),
    # a wait of some threads, of some programs, and none
    ("    @%p1 griddepcontrol.wait;\n" + START + STORE, "before it waits: st.global"),
    (f"    @%p1 bra $L__BB0_2;\n{WAIT}$L__BB0_2:\n{START}{STORE}", "before it waits: st"),
    (f"    @%p1 ret;\n{WAIT}{START}{STORE}", "ends before it waits: ret"),
    (f"    @%p1 bra $L__BB0_2;\n    ret;\n$L__BB0_2:\n{WAIT}{START}", "ends before it waits"),
    ("    call.uni helper;\n" + WAIT + START, "leads away before it waits: call.uni"),
    (START, "no griddepcontrol.wait"),
    (START + WAIT, "lets the next kernel start before it waits"),
    (ASK + WAIT + LOOP + STORE, "no griddepcontrol.launch_dependents"),
]


@pytest.mark.parametrize(("body", "problem"), OUT_OF_ORDER, ids=range(len(OUT_OF_ORDER)))
def test_what_is_out_of_order(body: str, problem: str) -> None:
    assert any(text.startswith(problem) for text in found(body)), found(body)


EARLY = "    @%p1 ld.global.cg.b32 { %r2 }, [ %rd6 + 0 ];\n"


OLDER = [
    (EARLY + WAIT + START + STORE, True),
    # at a place that an older integer names
    (EARLY + "    add.s64 %rd6, %rd1, %r2;\n" + EARLY + WAIT + START + STORE, True),
    # through the first-level cache; of another argument; a store; and nobody waits
    (LOAD + WAIT + START + STORE, False),
    (EARLY.replace("%rd6", "%rd3") + WAIT + START, False),
    ("    st.global.cg.b32 [ %rd6 + 0 ], { %r2 };\n" + WAIT + START, False),
    (EARLY + START + STORE, False),
]


@pytest.mark.parametrize(("body", "is_fine"), OLDER, ids=range(len(OLDER)))
def test_integers_that_are_older_than_the_kernel_before(body: str, is_fine: bool) -> None:
    wrong = problems(module(body), ARGUMENTS, ("weight",), early=("x",))
    assert not wrong if is_fine else wrong


def test_a_copy_of_constants_may_be_asked_for_before_the_wait() -> None:
    """As the first words of a ring are; not at places that memory names, nor of other arguments."""
    copy = "    cp.async.cg.shared.global [ %r3 + 0 ], [ %rd5 + 0 ], 0x10, 0x10;\n"
    begin = "    add.s64 %rd5, %rd2, %rd4;\n" + copy + "    cp.async.commit_group;\n"
    assert found(begin + WAIT + LOOP + START + STORE) == []
    for other in (begin.replace("%rd2", "%rd1"), LOAD + "    add.s64 %rd5, %rd2, %r2;\n" + copy):
        assert found(other + WAIT + START + STORE) != []


def test_the_next_kernel_starts_after_the_loop() -> None:
    """Rows that are no stream, as parts of a sum are, may be read later."""
    streamed = LOOP.replace("%rd6", "%rd2")
    for body, is_fine in (
        (streamed + START, True),
        (START + LOOP, True),
        (START + streamed, False),
    ):
        soon = ptx_order.starts_soon(module(WAIT + body), ARGUMENTS, ("weight",))
        assert len(soon) == (0 if is_fine else 2), soon


def test_both_sides_of_a_branch_may_wait() -> None:
    sides = f"    @%p1 bra $L__BB0_2;\n{WAIT}    bra.uni $L__BB0_3;\n$L__BB0_2:\n{WAIT}"
    assert found(f"{sides}$L__BB0_3:\n{START}{STORE}") == []


# one that reads rows before its product, one that leaves early without work, one that writes
# caches, one whose programs share sums, one that ends a step
SAMPLED = (
    "sm_90/add_norm_head/bf16-swap-n64-dependent",
    "sm_100/attend/attend-bf16-d64-rows16-page0-causal-dependent",
    "sm_120/add_norm_rope_write/bf16-vector-n4-dependent",
    "sm_90/skinny_linear/bf16-n32-split-dependent",
    "sm_90/leave_step/drafts-dependent",
)


@pytest.mark.slow
def test_compiled_kernels_are_in_order(tmp_path: Path) -> None:
    """`aot.py` fails where one is not; all configurations pass by it when tables are made."""
    output = tmp_path / "usage.jsonl"
    process = subprocess.run(
        [sys.executable, "-P", aot.__file__, "--output", str(output), "--names", *SAMPLED],
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert len(aot.read_lines(output)) == len(SAMPLED)


class _Item:
    """What `aot.check_order` reads of a configuration."""

    kernel = type("kernel", (), {"arg_names": [*ARGUMENTS, "IS_DEPENDENT"]})
    signature = dict.fromkeys(ARGUMENTS, "*bf16")
    name = "item"
    early = ()

    def __init__(self, is_dependent: bool) -> None:
        self.is_dependent = is_dependent


def test_ordinary_kernels_know_nothing_of_it() -> None:
    aot.check_order(_Item(True), module(GOOD))
    aot.check_order(_Item(False), module(LOOP + STORE))
    for body in (GOOD, ASK + LOOP, WAIT + LOOP):
        with pytest.raises(ValueError, match="dependent launches"):
            aot.check_order(_Item(False), module(body))
    with pytest.raises(ValueError, match="before it waits"):
        aot.check_order(_Item(True), module(LOAD + GOOD))
    with pytest.raises(ValueError, match="lets the next kernel start"):
        aot.check_order(_Item(True), module(GOOD + LOOP.replace("%rd6", "%rd2")))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_ships(capability: int) -> None:
    """From 9.0 on: in bfloat16 every product of few rows, experts of few tokens, norms, what
    stands before experts and attention, and attention of few rows; what ends a step.
    """
    items = {module: aot.items(module, capability) for module in aot.MODULES}
    has = {name for name, own in items.items() if any(item.is_dependent for item in own)}
    products = {name for name in aot.MODULES if "add_norm" in name or name.startswith("embed")}
    products |= {"skinny_linear", "linear_q_fragments", "experts", "experts_fragments", "route"}
    products |= {"rms_norm", "hadamard", "rope_write", "rope_write_latent"}
    ends = {"accept_walk", "rows", "trees", "leave_step"}
    attends = {"attend", "attend_latent_few", *(["attend_few"] if capability == 90 else [])}
    assert has == (products | attends | ends if capability >= 90 else set())
    for item in (item for own in items.values() for item in own):
        assert item.constexprs.get("IS_DEPENDENT", False) == item.is_dependent
        assert ("launch_pdl" in item.options) == item.is_dependent
        assert item.name.endswith(dependent.SUFFIX) == item.is_dependent


def test_launches_say_so_only_where_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, early = {"IS_DEPENDENT": False}, {"IS_DEPENDENT": True, "launch_pdl": True}
    bf16 = torch.bfloat16
    monkeypatch.setattr(dependent, "INTERPRETED", True)
    with dependent_launches():
        # the interpreter has no such instructions
        assert launch_options(bf16) == ordinary
    monkeypatch.setattr(dependent, "INTERPRETED", False)
    assert launch_options(bf16) == ordinary
    with dependent_launches():
        assert launch_options(bf16) == launch_options(None) == early
        assert launch_options(torch.float32) == launch_options(bf16, False) == ordinary
        with dependent_launches(False):
            assert launch_options(bf16) == ordinary
    assert launch_options(bf16) == ordinary


PRODUCTS = (
    "add_norm_gate_up", "add_norm_head", "add_norm_linear", "add_norm_rope_write",
    "embed_norm_rope_write", "skinny_linear",
)  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_tile_that_starts_late_is_launched_so(name: str, monkeypatch: Any) -> None:
    """In the ordinary way, while the launches around it are dependent."""

    def first_of(tiles: Iterable[few_rows.Tile]) -> dict[int, few_rows.Tile]:
        # of so many rows: number 0 of such a product
        return {tile.block_m: tile for tile in reversed(tuple(tiles))}

    for table in ("TILES", "EMBED_TILES", "LINEAR_TILES"):
        tiles = {
            dtype: tuple(replace(tile, starts_early=tile in first_of(own).values()) for tile in own)
            for dtype, own in getattr(few_rows, table).items()
        }
        monkeypatch.setattr(few_rows, table, tiles)
    seen = set()

    def note(kernel: str, tensors: Mapping[str, torch.Tensor], is_dependent: bool) -> None:
        forced = few_rows._forced.get() or ()
        seen.add((tensors["weight"].dtype == torch.bfloat16, 0 in forced, is_dependent))

    with recorded(note):
        for _ in CALLS[name]():
            pass
    assert {is_early for is_half, is_first, is_early in seen if is_half and is_first} == {True}
    assert {is_early for is_half, is_first, is_early in seen if is_half > is_first} == {False}
    assert {is_early for is_half, _, is_early in seen if not is_half} == {False}


def test_results_are_the_same(device: torch.device) -> None:
    """On a GPU that has them, of two kernels; the interpreter runs the ordinary one twice."""
    dice = torch.Generator().manual_seed(3)
    x = torch.randn(1, 3, 64, generator=dice).bfloat16().to(device)
    weight = torch.randn(64, 64, generator=dice).bfloat16().to(device)
    ones = torch.ones(64, dtype=torch.bfloat16, device=device)
    operands: tuple[Any, ...] = (x, x, ones, 1e-6, False, weight, "silu")
    is_able = machine(device)[0] >= dependent.LEAST_CAPABILITY
    with few_rows.forced(0):
        wanted = add_norm_gate_up.add_norm_gate_up(*operands)
        with dependent_launches(is_able):
            got = add_norm_gate_up.add_norm_gate_up(*operands)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
