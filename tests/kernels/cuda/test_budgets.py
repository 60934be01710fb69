"""What the shipped configurations use, compared with committed tables, and that they are launched.

A compiler of one version gives one result, so a table says what was measured and a test asks for
the same: an upper bound would hide what grows below it. `docs/notebook/triton-budgets.md` says how
to write the tables anew.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.kernels.cuda import attend_config, dependent, few_rows_tiles
from specc.kernels.cuda.shipped import CAPABILITIES, Shipped
from specc.system.file_cache import FileCache
from tests.kernels.cuda import aot, launches, launches_attention
from tests.kernels.cuda.aot import Usage
from tests.tiers import every

ROOT = Path(__file__).resolve().parents[3]
TABLES = Path(__file__).parent / "budget"
# what `aot.py` has found
USAGE = "usage.jsonl"
PINNED = re.findall(r"^triton==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
# the oldest version that pyproject.toml allows; `make test-full` installs it
OLDEST = "3.6.0"
CONDITIONS = [*((PINNED, capability) for capability in CAPABILITIES), (OLDEST, 90)]
# limits of a multiprocessor (CUDA programming guide, technical specifications per compute
# capability): bytes of shared memory, of which a block takes 1024 more than it asks for, and warps
SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
WARPS = {80: 64, 90: 64, 100: 64, 120: 48}
REGISTERS = 65536
# registers are handed out to a warp in units
REGISTER_UNIT = 256
TENSOR_MEMORY = 512
# one of each way in which `attend` uses tensor cores: mma.sync, wgmma, tcgen05
SAMPLED_ATTEND = (
    "sm_80/attend/attend-bf16-d128-rows64-page0-tree",
    "sm_90/attend/attend-bf16-d128-rows128-page0-tree",
    "sm_100/attend/attend-fp16-d64-rows64-page16-causal",
)
# vocabularies that are no multiple of 16
SAMPLED_ODD = (
    "sm_80/row_filters/cut-tree-bf16-odd",
    "sm_90/child_keys/parts-bf16-k4-odd",
    "sm_100/node_best/nodes-bf16-odd",
    "sm_120/accept_walk/walk-drafts-bf16-odd",
)

ATTENTION = (
    "attend_kernel", "attend_few_kernel", "attend_wide_kernel", "attend_latent_few_kernel",
    "invariant_attend_kernel",
)  # fmt: skip
# products of half precision besides attention
PRODUCTS = (
    "_add_norm_kernel", "_add_norm_rope_write_kernel",
    "experts_gate_up_kernel", "experts_down_kernel",
    "experts_fragments_gate_up_kernel", "experts_fragments_down_kernel",
    "_votes_kernel", "linear_q_kernel",
    "linear_q_fragments_kernel", "add_norm_fragments_kernel", "add_norm_rope_fragments_kernel",
    "_skinny_linear_kernel", "_route_kernel", "_invariant_linear_kernel",
)  # fmt: skip

every_table = pytest.mark.parametrize(
    ("version", "capability"), CONDITIONS, ids=[f"{v}-sm_{c}" for v, c in CONDITIONS]
)
every_capability = pytest.mark.parametrize("capability", CAPABILITIES)


def shipped(capability: int) -> dict[str, Shipped]:
    return {
        f"{module}/{item.name}": item
        for module in aot.MODULES
        for item in aot.items(module, capability)
    }


def read_table(version: str, capability: int) -> dict[str, Usage]:
    path = aot.table_path(TABLES, version, capability)
    table = json.loads(path.read_text(encoding="utf-8"))
    assert (table["triton"], table["capability"]) == (version, capability)
    rows = table["budgets"].items()
    return {name: Usage(**dict(zip(table["columns"], row, strict=True))) for name, row in rows}


def resident(usage: Usage, num_warps: int, capability: int) -> int:
    """Programs that a multiprocessor holds at a time; 0 is a kernel that cannot be launched."""
    per_warp = -(-usage.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    most = [
        WARPS[capability] // num_warps,
        REGISTERS // (per_warp * num_warps),
        SHARED[capability] // (usage.shared + 1024),
    ]
    return min(*most, TENSOR_MEMORY // usage.tensor_memory if usage.tensor_memory else most[0])


def config_of(item: Shipped, capability: int) -> attend_config.AttendConfig:
    """Launch parameters that a configuration of `attend` was made of."""
    dtype = next(d for d in launches.FLOATS if _type_of(item) == launches.TYPE_NAMES[d])
    sizes = item.constexprs
    c = attend_config.config(dtype, sizes["D"], sizes["BM"], capability)
    assert (c.block_m, c.block_n, c.num_warps) == (sizes["BM"], sizes["BN"], item.num_warps)
    return c


def differences(found: Mapping[str, Usage], table: Mapping[str, Usage]) -> list[str]:
    """What moved, a line for each number."""
    return [
        f"{name}: {key} {value}, in the table {asdict(table[name])[key]}"
        for name, usage in found.items()
        for key, value in asdict(usage).items()
        if value != asdict(table[name])[key]
    ]


@pytest.mark.parametrize("name", aot.MODULES)
@pytest.mark.parametrize("capability", every(4, CAPABILITIES, first=1))
def test_what_ships_is_what_is_launched(
    name: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"specc.kernels.cuda.{name}")
    items = {launches.shipped_launch(item): item.name for item in module.shipped(capability)}
    assert len(items) == len(list(module.shipped(capability))), "two names of one configuration"
    launched = set(launches.record(module, capability, monkeypatch))
    assert [name for launch, name in items.items() if launch not in launched] == []
    assert launched - set(items) == set()


@pytest.mark.parametrize("name", ["attend", "attend_few", "rope_write"])
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8])
def test_quantized_caches_launch_what_is_looked_at(
    name: str, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables have none of it: `aot.py --rows` compiles it."""
    module = importlib.import_module(f"specc.kernels.cuda.{name}")
    items = aot.items(name, 90, rows={torch.int8: "int8", torch.uint8: "fp8"}[stored])
    owner = launches if name == "rope_write" else launches_attention
    calls = functools.partial(getattr(owner, f"{name}_calls"), stored=stored)
    launched = {x.compiled for x in launches.record(module, 90, monkeypatch, calls)}
    assert launched == {launches.shipped_launch(item).compiled for item in items}


# integers that Triton compiles a kernel anew for, if they are 1 or a multiple of 16: what all loads
# of a row are aligned by. None is 1 while a vocabulary has two tokens and a head eight columns.
ALIGNING = {
    "row_stride", "vocab", "slice_size", "size", "D", "K", "inner", "outer",
    "x_inner", "x_outer", "residual_inner", "residual_outer",
    "stride_qh", "stride_qt", "stride_kh", "stride_kt", "stride_vh", "stride_vt",
    "stride_kb", "stride_ks", "stride_vb", "stride_vs", "stride_cos", "stride_sin",
    "stride_kcb", "stride_kcs", "stride_kch", "stride_vcb", "stride_vcs", "stride_vch",
    "width", "stride_x", "stride_sb", "stride_ss",
    "stride_rh", "stride_rt", "stride_lt", "stride_st",
}  # fmt: skip


@every_capability
def test_no_integer_makes_another_binary_but_those_that_align(capability: int) -> None:
    """A batch of 1, or of 16, must launch what was compiled for 4."""
    for name, item in shipped(capability).items():
        integers = {key for key, kind in item.signature.items() if kind in ("i32", "i64")}
        special = integers & set(launches.specialized(item.kernel))
        assert special <= ALIGNING, f"{name}: do_not_specialize {sorted(special - ALIGNING)}"
        # a tail of the name says which do not align
        unaligned = special - set(item.divisible)
        assert unaligned <= {"row_stride", "vocab"}, name
        assert bool(unaligned) == name.removesuffix(dependent.SUFFIX).endswith("-odd"), name


def test_every_file_with_kernels_is_compiled() -> None:
    files = (ROOT / "kernels" / "cuda").glob("*.py")
    found = {p.stem for p in files if "\ndef shipped(" in p.read_text(encoding="utf-8")}
    assert found == set(aot.MODULES)
    jitted = {
        f"{module}.{name}"
        for module in (
            *aot.MODULES,
            "attend_kernels",
            "attend_latent_few_kernels",
        )
        for name, value in vars(importlib.import_module(f"specc.kernels.cuda.{module}")).items()
        if name.endswith("_kernel") and hasattr(value, "arg_names")
    }
    kernels = {item.kernel.__name__ for item in shipped(90).values()}
    assert {name.split(".")[1] for name in jitted} == kernels


@every_table
def test_a_table_lists_what_ships(version: str, capability: int) -> None:
    items = shipped(capability)
    assert sorted(read_table(version, capability)) == sorted(items)
    # a tile that changed may keep its name: what it needs now is only known once it is compiled
    held = json.loads(aot.table_path(TABLES, version, capability).read_text(encoding="utf-8"))
    ships = aot.digests(items)
    changed = [file for file in ships if held["configurations"].get(file) != ships[file]]
    assert changed == [], "to be compiled anew, as docs/notebook/triton-budgets.md says"
    assert held["configurations"].keys() == ships.keys()


def test_there_is_no_other_table() -> None:
    wanted = {aot.table_path(TABLES, version, capability) for version, capability in CONDITIONS}
    assert set(TABLES.iterdir()) == wanted


@every_table
def test_nothing_spills(version: str, capability: int) -> None:
    rows = read_table(version, capability).items()
    assert [name for name, usage in rows if usage.spilled or usage.stack] == []


@every_table
def test_every_configuration_can_be_launched(version: str, capability: int) -> None:
    items = shipped(capability)
    rows = read_table(version, capability).items()
    too_large = [
        name for name, usage in rows if resident(usage, items[name].num_warps, capability) < 1
    ]
    assert too_large == []


@every_table
def test_as_many_programs_are_resident_as_splits_are_made_for(
    version: str, capability: int
) -> None:
    table = read_table(version, capability)
    for name, item in shipped(capability).items():
        if not name.startswith("attend/"):
            continue
        programs = config_of(item, capability).programs_per_sm
        assert resident(table[name], item.num_warps, capability) >= programs, name


@every_table
def test_products_of_half_precision_use_tensor_cores_and_no_others(
    version: str, capability: int
) -> None:
    table = read_table(version, capability)
    for name, item in shipped(capability).items():
        is_product = item.kernel.__name__ in PRODUCTS and not _is_of_floats(item)
        # one row is multiplied without them
        is_product &= item.constexprs.get("FORM") != few_rows_tiles.VECTOR
        is_attend = item.kernel.__name__ in ATTENTION
        is_half = is_product or (is_attend and _type_of(item) != "fp32")
        assert (table[name].tensor_core > 0) == is_half, name


def test_a_measured_number_that_moves_is_named() -> None:
    usage = Usage(128, 0, 0, 4096, 0, 16)
    moved = Usage(130, 0, 0, 4096, 0, 16)
    assert differences({"a": usage}, {"a": usage, "b": moved}) == []
    assert differences({"a": moved}, {"a": usage}) == ["a: registers 130, in the table 128"]
    # 31 KiB of shared memory thrice, and 1 KiB each that the device takes
    assert resident(Usage(32, 0, 0, 31 << 10, 0, 0), 4, 120) == 3
    assert resident(Usage(255, 0, 0, 0, 0, 0), 8, 90) == 1
    assert resident(Usage(32, 0, 0, 0, 256, 0), 4, 100) == 2
    assert resident(Usage(32, 0, 0, 101_377, 0, 0), 4, 120) == 0


def split_name(name: str) -> tuple[int, str]:
    """(capability, name) of `sm_90/rows/tree_rows`."""
    capability, rest = name.split("/", 1)
    return int(capability.removeprefix("sm_")), rest


@pytest.fixture(scope="module")
def compiled_sample(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Usage]:
    """One configuration of every kernel, the capabilities in turn; the slow tier compiles all."""
    names = [*SAMPLED_ATTEND, *SAMPLED_ODD]
    kernels = {
        capability: {
            item.kernel.__name__: name for name, item in reversed(shipped(capability).items())
        }
        for capability in CAPABILITIES
    }
    sampled = {shipped(c)[n].kernel.__name__ for c, n in map(split_name, names)}
    for i, kernel in enumerate(sorted(kernels[CAPABILITIES[0]].keys() - sampled)):
        capability = CAPABILITIES[i % len(CAPABILITIES)]
        names.append(f"sm_{capability}/{kernels[capability][kernel]}")
    folder = tmp_path_factory.mktemp("aot")
    found = compile_changed(folder, names, PINNED)
    assert len(found) == len(names) > 20
    return found


@every_capability
def test_compiled_sample(capability: int, compiled_sample: dict[tuple[int, str], Usage]) -> None:
    table = read_table(PINNED, capability)
    found = {name: usage for (c, name), usage in compiled_sample.items() if c == capability}
    assert differences(found, table) == []


@pytest.mark.slow
@every_capability
def test_compiled(capability: int, tmp_path: Path) -> None:
    check_compiled(capability, tmp_path, PINNED)


@pytest.mark.slow
def test_compiled_with_the_oldest_triton(tmp_path: Path) -> None:
    folder = ROOT / "build" / f"triton-{OLDEST}"
    assert folder.is_dir(), f"found no {folder}; do: make {folder.relative_to(ROOT)}/.installed"
    check_compiled(90, tmp_path, OLDEST, PYTHONPATH=str(folder))


def check_compiled(capability: int, folder: Path, version: str, **environment: str) -> None:
    """Compile all that ships for a capability, and compare it with the table."""
    table = read_table(version, capability)
    names = [f"sm_{capability}/{name}" for name in shipped(capability)]
    found = compile_changed(folder, names, version, **environment)
    assert sorted(name for _, name in found) == sorted(table)
    assert differences({name: usage for (_, name), usage in found.items()}, table) == []


def compile_kernels(
    folder: Path, options: Sequence[str], version: str, **environment: str
) -> dict[tuple[int, str], Usage]:
    """(capability, name) → what `aot.py` finds, in a process of its own."""
    output = folder / USAGE
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-P", aot.__file__, "--output", str(output), *options],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    lines: dict[Any, dict[str, Any]] = aot.read_lines(output)
    assert {found for found, _, _ in lines} == {version}
    return {(c, name): aot.usage_of(line) for (_, c, name), line in lines.items()}


def compile_changed(
    folder: Path, names: Sequence[str], version: str, **environment: str
) -> dict[tuple[int, str], Usage]:
    """Likewise for `names`; of the same names only what has changed since is compiled.

    What is kept holds for a kernel's source, its options and the checks of `aot.py`.
    """
    key = hashlib.sha256(" ".join([version, *names]).encode()).hexdigest()[:32]
    cache, kept = FileCache(), f"usage/{key}.jsonl"
    (folder / USAGE).write_bytes(cache.read(kept) or b"")
    try:
        return compile_kernels(folder, ["--names", *names], version, **environment)
    finally:
        # a run that is interrupted goes on where it was
        cache.write(kept, (folder / USAGE).read_bytes())


def _is_of_floats(item: Shipped) -> bool:
    """Of a kernel among `PRODUCTS`."""
    given = [item.signature[name] for name in ("weight", "q", "x") if name in item.signature]
    return given[0] == "*fp32"


def _type_of(item: Shipped) -> str:
    return item.signature["q"].removeprefix("*")
