"""Attention within chunks, with sinks and with softcaps, compiled for GPUs ahead of time.

It is compiled for an engine's own chunk, so no table has it, and few models have the others. It has
to be what the table has of attention without: nothing spills, but for two tiles with chunks, as
many key blocks are in flight, and as many programs are resident as tiles are split for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from specc.kernels.cuda import attend
from specc.kernels.cuda.shipped import CAPABILITIES
from tests.kernels.cuda import launches, launches_attention
from tests.kernels.cuda.aot import ATTENTION, Usage
from tests.kernels.cuda.test_budgets import (
    OLDEST,
    PINNED,
    ROOT,
    compile_kernels,
    config_of,
    read_table,
    resident,
    shipped,
    split_name,
)
from tests.tiers import every

# Llama 4's
CHUNK = 8192
# nodes of a tree and rows of prompts by mma.sync, wgmma and tcgen05; the first is one that spills
# if ptxas chooses how many registers a thread has
FEW = (
    "sm_90/attend/attend-bf16-d128-rows16-page16-tree",
    "sm_90/attend/attend-bf16-d128-rows128-page0-causal",
    "sm_100/attend/attend-bf16-d128-rows64-page0-tree",
)
OLDEST_TOO = (*FEW[:2], "sm_90/attend/attend-bf16-d128-rows128-page0-tree")
# bytes that a thread stores and loads; without chunks it has all registers that it can have, too
SPILLED = {
    f"sm_{capability}/attend/attend-{dtype}-{tile}-tree": spilled
    for dtype in ("bf16", "fp16")
    for capability, tile, spilled in (
        (80, "d64-rows128-page0", 64),
        (90, "d256-rows64-page0", 68),
        (90, "d256-rows64-page16", 28),
    )
}


# a kernel each, those of gpt-oss and Gemma 2 among them
WITH_SINKS = (
    "sm_90/attend/attend-bf16-d64-rows16-page16-tree",
    "sm_90/attend_few/bf16-d64-rows16-page16-tree",
    "sm_90/attend_wide/bf16-d128-rows128-page16-tree",
    "sm_90/attend_latent/latent-bf16-r512-rows32-page16-tree",
    "sm_90/attend_latent_few/bf16-r512-values1-page16-tree",
    "sm_80/attend/attend-bf16-d256-rows32-page16-tree",
    "sm_120/attend/attend-bf16-d64-rows16-page16-tree",
)


def check_compiled(names: Iterable[str], folder: Path, version: str, **environment: str) -> None:
    """Compile what calls with chunks launch in place of what ships, and compare it with that."""
    names = list(names)
    capabilities = sorted({split_name(name)[0] for name in names})
    options = ["--only", "attend", "--chunk", str(CHUNK), "--names", *names]
    options += ["--capabilities", *map(str, capabilities)]
    compare_compiled(names, compile_kernels(folder, options, version, **environment), version)


def compare_compiled(
    names: list[str], found: Mapping[tuple[int, str], Usage], version: str
) -> None:
    """Compare what was compiled with what the tables have of the same configurations."""
    capabilities = sorted({split_name(name)[0] for name in names})
    assert sorted(found) == sorted(map(split_name, names))
    plain = {capability: read_table(version, capability) for capability in capabilities}
    items = {capability: shipped(capability) for capability in capabilities}
    for (capability, name), usage in found.items():
        label = f"sm_{capability}/{name}"
        wanted, item = plain[capability][name], items[capability][name]
        assert usage.spilled == SPILLED.get(label, 0), label
        # the same products, of keys that are loaded ahead as far
        assert usage.tensor_core == wanted.tensor_core, label
        assert usage.shared == wanted.shared, label
        if not name.startswith("attend/"):
            continue
        # those of float32 need more registers, and are split for one program
        programs = config_of(item, capability).programs_per_sm
        assert resident(usage, item.num_warps, capability) >= programs, label


@pytest.mark.slow
def test_a_sample_spills_nothing(tmp_path: Path) -> None:
    check_compiled(FEW, tmp_path, PINNED)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [["sinks"], ["softcap"], ["sinks", "softcap"]], ids="-".join)
def test_sinks_and_softcaps_spill_nothing(beside: list[str], tmp_path: Path) -> None:
    options = ["--only", *ATTENTION, "--beside", *beside, "--names", *WITH_SINKS]
    compare_compiled([*WITH_SINKS], compile_kernels(tmp_path, options, PINNED), PINNED)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_nothing_spills(capability: int, tmp_path: Path) -> None:
    names = [name for name in shipped(capability) if name.startswith("attend/")]
    check_compiled([f"sm_{capability}/{name}" for name in names], tmp_path, PINNED)


@pytest.mark.slow
def test_nothing_spills_with_the_oldest_triton(tmp_path: Path) -> None:
    folder = ROOT / "build" / f"triton-{OLDEST}"
    assert folder.is_dir(), f"found no {folder}; do: make {folder.relative_to(ROOT)}/.installed"
    check_compiled(OLDEST_TOO, tmp_path, OLDEST, PYTHONPATH=str(folder))


@pytest.mark.parametrize("capability", every(4, CAPABILITIES, first=1))
def test_what_is_compiled_is_what_is_launched(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = {launches.shipped_launch(item): item.name for item in attend.shipped(capability, CHUNK)}
    calls = functools.partial(launches_attention.attend_calls, CHUNK)
    launched = set(launches.record(attend, capability, monkeypatch, calls))
    assert [name for launch, name in items.items() if launch not in launched] == []
    assert launched - set(items) == set()
