"""Attention with a tree's mask as a quickly deployable plugin of full TensorRT.

Experimental: what is checked is the code for the GPU (assembled by ptxas) and what the plugin
registers; no TensorRT at hand could run it. TensorRT-RTX has no plugins of this kind.

    register_plugin()
    output = add_attention(network, q, k_cache, v_cache, mask, scale)

The kernel is compiled when an engine is built and stored in it, so that running the engine takes
neither Python nor Triton. TensorRT launches it with the pointers of the inputs, the numbers of
`extra_args`, and the pointer of the output; Triton adds parameters of its own after them, which
are taken out of the code here.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from specc.errors import TensorRTError
from specc.kernels.cuda.experimental.masked_attend import (
    DTYPES,
    HEAD_DIMS,
    NUM_STAGES,
    NUM_WARPS,
    TILE_ROWS,
    masked_attend_kernel,
    num_keys,
    padded,
)
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.tensorrt import library as tensorrt

NAMESPACE, NAME = "specc", "masked_attention"
PLUGIN = f"{NAMESPACE}::{NAME}"
# pointers of the inputs, numbers, pointer of the output: what TensorRT passes
INPUTS = ("q", "k_cache", "v_cache", "mask")
NUMBERS = ("num_nodes", "length", "num_heads", "num_kv_heads")
NUM_PARAMETERS = len(INPUTS) + len(NUMBERS) + 1
# of a block, without a call to the driver that the launcher would have to make
MAX_SHARED = 48 << 10

_ENTRY = re.compile(r"(\.visible \.entry (\w+)\(\n)(.*?)(\n\))", re.DOTALL)
_registered: dict[ModuleType, int] = {}


@dataclass(frozen=True)
class PluginKernel:
    """A compiled kernel as a plugin hands it over.

    Args:
        name: of its entry.
        ptx: code, with the parameters that TensorRT passes and no others.
        num_threads: of a block.
        shared: bytes of a block's shared memory.
        tile_rows: packed rows (nodes × query heads of a KV head) of a block.
    """

    name: str
    ptx: str
    num_threads: int
    shared: int
    tile_rows: int


def plugin_configuration(
    dtype: torch.dtype, head_dim: int, scale: float, tile_rows: int
) -> Shipped:
    """One configuration of the kernel; addresses are aligned, as TensorRT demands of them."""
    name = TYPE_NAMES[dtype]
    tensors = dict.fromkeys(("q", "k_cache", "v_cache", "out"), f"*{name}") | {"mask": "*u8"}
    return Shipped(
        f"masked_attend-{name}-d{head_dim}-rows{tile_rows}",
        masked_attend_kernel,
        tensors | dict.fromkeys(NUMBERS, "i32"),
        {
            "SCALE": scale, "D": head_dim, "BD": padded(head_dim),
            "BM": tile_rows, "BN": num_keys(head_dim),
        },
        NUM_WARPS,
        NUM_STAGES,
        tuple(tensors),
    )  # fmt: skip


def compile_plugin(
    dtype: torch.dtype, head_dim: int, scale: float, tile_rows: int, capability: int
) -> PluginKernel:
    """Compile the kernel for a GPU that need not be here.

    Args:
        dtype: of queries and caches.
        head_dim: D.
        scale: factor of the scores; part of the code, since a plugin passes no fractions.
        tile_rows: one of `TILE_ROWS`.
        capability: 10 · major + minor.
    Raises:
        TensorRTError: a dtype or size that the kernel does not take, or code that cannot be
            launched with TensorRT's parameters.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    if dtype not in DTYPES or head_dim not in HEAD_DIMS:
        raise TensorRTError(
            f"plugin {PLUGIN} for {dtype} and heads of {head_dim}",
            f"one of {', '.join(map(str, DTYPES))}, and heads of {_either(HEAD_DIMS)}",
            "build the engine without the plugin",
        )
    item = plugin_configuration(dtype, head_dim, scale, tile_rows)
    with knobs.compilation.scope():
        # an engine is to name no file of this machine
        knobs.compilation.disable_line_info = True
        compiled = triton.compile(
            item.source(), target=GPUTarget("cuda", capability, 32), options=item.options
        )
    metadata = compiled.metadata
    if metadata.shared > MAX_SHARED or metadata.global_scratch_size:
        raise _unfit(
            f"{metadata.shared} bytes of shared, {metadata.global_scratch_size} of global memory",
            f"up to {MAX_SHARED}, and none",
        )
    ptx = strip_hidden_parameters(compiled.asm["ptx"], NUM_PARAMETERS)
    return PluginKernel(metadata.name, ptx, 32 * metadata.num_warps, metadata.shared, tile_rows)


def strip_hidden_parameters(ptx: str, num_parameters: int) -> str:
    """Take trailing pointers out of an entry: memory for scratch and profiles, which is not used.

    Args:
        ptx: of one kernel.
        num_parameters: that its launcher passes.
    Raises:
        TensorRTError: the kernel reads a parameter that nobody would pass, has too few, or one
            more that is no pointer.
    """
    entries = list(_ENTRY.finditer(ptx))
    if len(entries) != 1:
        raise _unfit(f"{len(entries)} entries", "one kernel")
    (entry,) = entries
    parameters = [line.strip().rstrip(",") for line in entry[3].splitlines()]
    if len(parameters) < num_parameters:
        raise _unfit(f"{len(parameters)} parameters", f"{num_parameters}, which TensorRT passes")
    for hidden in parameters[num_parameters:]:
        name = hidden.split()[-1]
        if not hidden.startswith(".param .u64 .ptr"):
            raise _unfit(f"the parameter {hidden}", "pointers alone after those of TensorRT")
        if re.search(rf"\b{re.escape(name)}\b", ptx[entry.end() :]):
            raise _unfit(f"code that reads {name}", "code that leaves Triton's own pointers alone")
    kept = ",\n".join(f"\t{line}" for line in parameters[:num_parameters])
    return ptx[: entry.start()] + entry[1] + kept + entry[4] + ptx[entry.end() :]


def register_plugin(capability: int | None = None) -> ModuleType:
    """Make the plugin known to full TensorRT; once is enough.

    Args:
        capability: of the GPU that engines are for, 10 · major + minor; None is the one here.
    Returns:
        TensorRT's module `plugin`.
    Raises:
        TensorRTError: no TensorRT with such plugins, no GPU, or the plugin is registered for
            another GPU.
    """
    trt = tensorrt.load()
    trtp = _plugin_module(trt)
    if capability is None:
        capability = _own_capability()
    known = _registered.setdefault(trtp, capability)
    if known != capability:
        raise TensorRTError(
            f"plugin {PLUGIN} for sm_{capability}, and registered for sm_{known}",
            "one GPU in a process: TensorRT takes a plugin once",
            "build engines for other GPUs in processes of their own",
        )
    if getattr(getattr(trtp.op, NAMESPACE, None), NAME, None) is None:
        _register(trt, trtp, capability)
    return trtp


def add_attention(network: Any, q: Any, k_cache: Any, v_cache: Any, mask: Any, scale: float) -> Any:
    """Add the plugin to a network.

    Args:
        network: of full TensorRT.
        q: tensor [B, H, N, D], float16 or bfloat16; H and D static.
        k_cache: [B, HK, L, D].
        v_cache: [B, HK, L, D].
        mask: [B, 1, N, L] bool; True is attended to.
        scale: factor of the scores.
    Returns:
        the tensor [B, H, N, D].
    Raises:
        TensorRTError: see `register_plugin`.
    """
    plugin = getattr(getattr(register_plugin().op, NAMESPACE), NAME)
    layer = network.add_plugin(plugin(q, k_cache, v_cache, mask, scale=float(scale)), aot=True)
    return layer.get_output(0)


def _register(trt: ModuleType, trtp: ModuleType, capability: int) -> None:
    desc = trtp.TensorDesc
    types = {trt.DataType.HALF: torch.float16, trt.DataType.BF16: torch.bfloat16}

    def describe(q, k_cache, v_cache, mask, scale):  # type: ignore[no-untyped-def]
        return q.like()

    def autotune(q, k_cache, v_cache, mask, outputs):  # type: ignore[no-untyped-def]
        same = "FP16|BF16"
        return [
            trtp.AutoTuneCombination(
                f"{same}, {same}, {same}, BOOL, {same}", "LINEAR", range(1, len(TILE_ROWS) + 1)
            )
        ]

    def implement(q, k_cache, v_cache, mask, scale, outputs, tactic):  # type: ignore[no-untyped-def]
        batch, num_heads, num_nodes, head_dim = q.shape_expr
        _, num_kv_heads, length, _ = k_cache.shape_expr
        if q.dtype not in types or not head_dim.is_constant:
            raise TensorRTError(
                f"plugin {PLUGIN} for {q.dtype} with heads of no fixed size",
                "float16 or bfloat16, and a head size known when the engine is built",
                "name every size of the queries but batch and nodes",
            )
        kernel = compile_plugin(
            types[q.dtype], int(head_dim.constant_value()), float(scale),
            TILE_ROWS[tactic - 1], capability,
        )  # fmt: skip
        launch = trtp.KernelLaunchParams()
        rows = num_nodes * (num_heads // num_kv_heads)
        launch.grid_x = trtp.cdiv(rows, kernel.tile_rows)
        launch.grid_y = batch * num_kv_heads
        launch.block_x = kernel.num_threads
        launch.shared_mem = kernel.shared
        numbers = (num_nodes, length, num_heads, num_kv_heads)
        extra = trtp.SymIntExprs.from_tuple([trtp.SymInt32(number) for number in numbers])
        return kernel.name, kernel.ptx, launch, extra

    # classes, which TensorRT asks for; this file's own annotations are text
    tensors = dict.fromkeys(INPUTS, desc)
    describe.__annotations__ = {**tensors, "scale": float, "return": desc}
    code = str | bytes
    made = tuple[code, code, trtp.KernelLaunchParams, trtp.SymIntExprs]  # type: ignore[name-defined]
    implement.__annotations__ = {**tensors, "scale": float, "tactic": int, "return": made}
    trtp.register(PLUGIN)(describe)
    trtp.autotune(PLUGIN)(autotune)
    trtp.aot_impl(PLUGIN)(implement)


def _plugin_module(trt: ModuleType) -> ModuleType:
    try:
        module = importlib.import_module(f"{trt.__name__}.plugin")
    except ImportError:
        module = None  # type: ignore[assignment]
    if module is None or not hasattr(module, "aot_impl"):
        raise TensorRTError(
            f"{tensorrt.facts().title}, which has no plugins with code compiled ahead of time",
            "full TensorRT 10.8 or newer",
            f"install it with its libraries, and set {tensorrt.ENV}=tensorrt",
        )
    return module


def _own_capability() -> int:
    if not torch.cuda.is_available():
        raise TensorRTError(
            f"plugin {PLUGIN} and no GPU that torch can use",
            "the compute capability of the GPU that the engine is for",
            "pass it: register_plugin(90) for 9.0",
        )
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _either(items: Sequence[int]) -> str:
    return ", ".join(map(str, items))


def _unfit(found: str, needed: str) -> TensorRTError:
    return TensorRTError(
        f"plugin {PLUGIN}: Triton made {found}",
        needed,
        "use a version of Triton that specc was tested with, and report this",
    )
