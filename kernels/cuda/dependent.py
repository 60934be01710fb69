"""Programmatic dependent launch: a kernel that starts while the one before it still runs.

Launched so (`launch_pdl`, from compute capability 9.0 on), the programs of a kernel may start as
soon as every program of the kernel before it has called `griddepcontrol.launch_dependents` or has
ended, and wait at `griddepcontrol.wait` until that kernel has completed and its writes are visible
(PTX ISA, griddepcontrol; CUDA programming guide, programmatic dependent launch). Under stream
capture the launch attribute becomes an edge of the graph, from the programmatic port of the kernel
before (the same guide, "Use in CUDA Graphs"; CUDA 12.3 and newer).

Why one wait is enough. Let kernels 1, 2, … run in a stream. Claim: when kernel n completes, kernels
1 … n have completed. If n was launched in the ordinary way it started after n - 1 had completed. If
it was launched so, every program of it waits before it ends, on every path, and returns from that
only when n - 1 has completed; so n completes after n - 1. Either way the claim for n - 1 gives that
for n. What a kernel reads or writes after its wait therefore comes after all that any earlier
kernel reads or writes: no read comes before the write that it needs, and no write before a read or
a write that it must not overtake. This needs that a program waits even where it has no work, and
that nothing but constants is touched before: `tests/kernels/cuda/ptx_order.py` checks both in the
code that is compiled. Kernels of the library, copies and collectives are launched in the ordinary
way.

What was written before the kernel before can be read before the wait. A program starts when every
program of the kernel before, n - 1, has returned from its wait or has ended; n - 2 has completed
then, and so has all before it. `attend` reads integers so: which rows it has, and how many keys.
The kernel before it writes keys and reads its places from the same integers, so they are older than
that kernel. They are read past the first-level cache (`load_early`): its lines may be older still.

So are rows of the cache that the kernel before does not write: those below the committed length and
below every slot of the pass, of which `attend` of a single sequence of few rows reads a key block.
The length alone does not do: the first pass of a draft in a step feeds again what the draft may
lack, and writes committed rows. Whoever else writes the cache (passes before, `commit_rows` of the
step before) has completed, as the kernel before, whose queries the pass reads, comes between.

What is read before the wait otherwise, when the next kernel may start, and what that gains is in
docs/design/cuda.md (Dependent launches) and docs/results/gpu.json#gpu_dependent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specc.kernels.cuda.launch import is_dependent
from specc.kernels.cuda.shipped import Shipped

# Triton's interpreter runs programs one after another, and has no such instructions
INTERPRETED = triton.knobs.runtime.interpret
# compute capabilities from here on have the instructions
LEAST_CAPABILITY = 90
# of rows: each has configurations of its own, and others are rare or there to compare with
DTYPES = (torch.bfloat16,)
# end of the names of such configurations
SUFFIX = "-dependent"
# lines of each row of a weight that a program asks for before it waits, and bytes of a line
LINES = tl.constexpr(8)
LINE_BYTES = tl.constexpr(128)


def launch_options(dtype: torch.dtype | None, is_able: bool = True) -> dict[str, bool]:
    """Options of a launch: the constexpr of the kernel, and what Triton's launcher takes.

    Args:
        dtype: of the rows; None of a kernel of integers alone.
        is_able: there is such a configuration of the kernel, and it was not found to be slower.
    """
    if not (is_able and (dtype is None or dtype in DTYPES) and is_dependent()) or INTERPRETED:
        return {"IS_DEPENDENT": False}
    return {"IS_DEPENDENT": True, "launch_pdl": True}


def with_dependent(
    item: Shipped, capability: int, dtype: torch.dtype | None, is_able: bool = True
) -> Iterator[Shipped]:
    """A configuration, and the same that is launched so, where a capability has that.

    Args:
        item: of a kernel with a constexpr `IS_DEPENDENT`.
        capability: of the device.
        dtype: as `launch_options` has it.
        is_able: likewise.
    """
    constexprs = {**item.constexprs, "IS_DEPENDENT": False}
    yield replace(item, constexprs=constexprs)
    if is_able and (dtype is None or dtype in DTYPES) and capability >= LEAST_CAPABILITY:
        yield replace(
            item,
            name=f"{item.name}{SUFFIX}",
            constexprs={**constexprs, "IS_DEPENDENT": True},
            is_dependent=True,
        )


@triton.jit
def wait_for_earlier(IS_DEPENDENT: tl.constexpr):
    """Before anything is read or written; then the next kernel may start.

    For kernels of few programs: they leave room everywhere.
    """
    wait_alone(IS_DEPENDENT)
    let_next_start(IS_DEPENDENT)


@triton.jit
def wait_alone(IS_DEPENDENT: tl.constexpr):
    """Before anything is read or written; `let_next_start` comes later."""
    if IS_DEPENDENT:
        gdc_wait()


@triton.jit
def let_next_start(IS_DEPENDENT: tl.constexpr):
    """After the loop, in kernels that fill the device."""
    if IS_DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def load_early(p, mask, other):
    """Integers that are older than the kernel before this one: they may be read before the wait."""
    return tl.load(p, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def ask_and_wait(weight, o_a, o_b, K, IS_DEPENDENT: tl.constexpr):
    """Ask for the first lines of rows o_a and o_b [BN] of a weight, then wait."""
    if IS_DEPENDENT:
        _ask(weight, o_a, 0, K)
        _ask(weight, o_b, 0, K)
    wait_alone(IS_DEPENDENT)


@triton.jit
def ask_part_and_wait(weight, o_n, begin, K, IS_DEPENDENT: tl.constexpr):
    """Ask for lines of rows o_n [BN] of a weight from this column on, then wait."""
    if IS_DEPENDENT:
        _ask(weight, o_n, begin, K)
    wait_alone(IS_DEPENDENT)


@triton.jit
def _ask(weight, o_n, begin, K):
    COLUMNS: tl.constexpr = LINE_BYTES * 8 // weight.dtype.element_ty.primitive_bitwidth
    o_k = tl.minimum(begin + tl.arange(0, LINES) * COLUMNS, K - 1)  # inside the row
    p_line = weight + o_n.to(tl.int64)[:, None] * K + o_k[None, :]  # [BN, LINES]
    # Triton wants a result of every inline assembly; nothing writes or reads it
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [p_line], dtype=tl.int32, is_pure=False, pack=1
    )
