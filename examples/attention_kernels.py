"""The CPU kernel of `specc::tree_attention` alone, of any commit's sources, as a shared library.

`measure_cached_attention.py` times it. It is called as the operator calls it, by a struct, of which
earlier commits have fewer fields.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

from specc.kernels import native
from specc.system.cxx_compiler import find_compiler

# of kernel sources; those of earlier commits lack the last
SOURCES = ("tree_attention.cpp", "bandwidth.cpp", "tree_attention_int8.cpp", "kv_rows.cpp")
ATTENTION = "_ZN5specc14tree_attentionERKNS_13TreeAttentionEi"
SUM = "_ZN5specc10sum_floatsEPKfli"
# fields that earlier kernels lack, in the order in which they came
LATER = ("most_rows", "chunk")


def fields_of_call(num_later: int) -> list[tuple[str, Any]]:
    """Of the struct TreeAttention in kernels/cpu/kernels.h, with the first of `LATER`."""
    return (
        [("dtype", ctypes.c_int32), ("holds_int8", ctypes.c_bool)]
        + [
            (name, ctypes.c_int64)
            for name in (
                "num_heads",
                "num_kv_heads",
                "num_tokens",
                "head_dim",
                "value_dim",
                "batch",
            )
        ]
        + [("q", ctypes.c_void_p), ("q_head", ctypes.c_int64), ("q_token", ctypes.c_int64)]
        + [("k", ctypes.c_void_p), ("k_head", ctypes.c_int64), ("k_token", ctypes.c_int64)]
        + [("v", ctypes.c_void_p), ("v_head", ctypes.c_int64), ("v_token", ctypes.c_int64)]
        + [("k_cache", ctypes.c_void_p)]
        + [(f"k_cache_{name}", ctypes.c_int64) for name in ("block", "row", "head")]
        + [("v_cache", ctypes.c_void_p)]
        + [(f"v_cache_{name}", ctypes.c_int64) for name in ("block", "row", "head")]
        + [("num_blocks", ctypes.c_int64), ("block_size", ctypes.c_int64)]
        + [
            (name, ctypes.c_void_p)
            for name in ("q_start", "position", "slot", "cache_len", "ancestors")
        ]
        + [("num_words", ctypes.c_int64), ("block_table", ctypes.c_void_p)]
        + [("blocks_per_sequence", ctypes.c_int64), ("scale", ctypes.c_float)]
        + [("window", ctypes.c_int64), ("sink", ctypes.c_int64)]
        + [("sink_logits", ctypes.c_void_p), ("softcap", ctypes.c_float)]
        + [("slopes", ctypes.c_void_p), ("rounds_bias", ctypes.c_bool)]
        + [(name, ctypes.c_int64) for name in LATER[:num_later]]
        + [("out", ctypes.c_void_p), ("out_head", ctypes.c_int64), ("out_token", ctypes.c_int64)]
    )


class TreeAttention(ctypes.Structure):
    _fields_ = fields_of_call(len(LATER))


class WithoutChunks(ctypes.Structure):
    _fields_ = fields_of_call(1)


class Earliest(ctypes.Structure):
    _fields_ = fields_of_call(0)


# as CMakeLists.txt compiles them for this machine
FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math",
    "-fassociative-math", "-fno-signed-zeros", "-freciprocal-math", "-ffp-contract=fast",
    "-fopenmp", "-fPIC",
)  # fmt: skip
STRUCTS = (Earliest, WithoutChunks, TreeAttention)


class Kernels:
    """The attention and the yardstick of a directory of kernel sources.

    Args:
        sources: kernels/cpu of any commit.
        scratch: directory that the library is built in.
    """

    def __init__(self, sources: Path, scratch: Path) -> None:
        library = scratch / f"attention-{len(list(scratch.iterdir()))}.so"
        files = [str(sources / name) for name in SOURCES if (sources / name).exists()]
        command = [find_compiler(), *FLAGS, "-shared", *files, "-o", str(library)]
        subprocess.run([*command, *native.openmp_flags()], check=True)
        loaded = ctypes.CDLL(str(library))
        self.attend = getattr(loaded, ATTENTION)
        self.attend.argtypes, self.attend.restype = (ctypes.c_void_p, ctypes.c_int), None
        self.sum = getattr(loaded, SUM)
        self.sum.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        self.sum.restype = ctypes.c_float
        header = (sources / "kernels.h").read_text(encoding="utf-8")
        self.num_later = sum(f"int64_t {name};" in header for name in LATER)
