"""In which order kernels add up a row, or the rows of a state, found out without a GPU.

    python -P tests/kernels/cuda/row_orders.py --capability 90 --module invariant_linear

A process of its own, without TRITON_INTERPRET. A product adds up columns in the order of its
instructions, which its operands' layouts decide; a sum along a row, or over the rows of a block, is
added up in each thread, then between threads, as the layout of the block has them. Prints JSON:
name of a configuration → products and sums as `orders` has them, and matrix instructions of the
code.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import tempfile

_ALIAS = re.compile(r"^(#\w+) = (#ttg\.\S.*)$", re.MULTILINE)
# of intermediate language: products, also those of wgmma and tcgen05, and reductions of floats
_DOT = re.compile(r"(\w+\.\w*(?:dot|mma)\w*) [^\n]*? : (tensor<\S+xf32|[^\n]*?) loc\(")
_OPERANDS = re.compile(r"tensor<(\w+), (#ttg\.dot_op<\{[^}]*\}>|#\w+)>")
_REDUCE = re.compile(
    r'"tt\.reduce"\([^)]*\) <\{axis = (\d) : i32[^}]*\}> \(\{(?:(?!\}\)).)*\}\) :'
    r" \(tensor<(\d+(?:x\d+)+)xf32, (#\w+)>\)",
    re.DOTALL,
)
_INSTRUCTION = re.compile(r"\b((?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*)")
# how many a thread has, of floats
_FLOATS = {"additions": "add", "products of floats": "mul", "fused": "fma"}
# which warp has which rows and outputs: nothing that a sum goes over
_WARPS = re.compile(r", warpsPerCTA = \[[^]]*\]")


def orders(text: str) -> dict[str, list[str]]:
    """Of a kernel: products, with layouts but for their warps, and sizes and layouts of sums."""
    aliases = dict(_ALIAS.findall(text))
    products = set()
    for name, types in _DOT.findall(text):
        parts = [name]
        for sizes, layout in _OPERANDS.findall(types):
            for alias in sorted(re.findall(r"#(?!ttg)\w+", layout), key=len, reverse=True):
                layout = layout.replace(alias, _WARPS.sub("", aliases[alias]))
            parts.append(f"{sizes} {layout}")
        products.add(" ".join(parts))
    sums = {f"{axis} {sizes} {aliases[name]}" for axis, sizes, name in _REDUCE.findall(text)}
    return {"products": sorted(products), "sums": sorted(sums)}


def head_of(name: str) -> str:
    """What heads look like, of the name of a configuration of a recurrence."""
    return name.removeprefix("tree-").removeprefix("fold-").removesuffix("-words")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, required=True)
    parser.add_argument("--module", required=True, help="file of specc/kernels/cuda")
    parser.add_argument("--leave-out", default="$^", help="pattern of names of configurations")
    parser.add_argument("--head", help="configurations of this one alone")
    options = parser.parse_args()
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter compiles nothing"
    import triton
    from triton.backends.compiler import GPUTarget

    module = importlib.import_module(f"specc.kernels.cuda.{options.module}")
    target, found = GPUTarget("cuda", options.capability, 32), {}
    with tempfile.TemporaryDirectory(prefix="specc-orders-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for item in module.shipped(options.capability):
            is_left_out = re.search(options.leave_out, item.name) is not None
            if is_left_out or options.head not in (None, head_of(item.name)):
                continue
            made = triton.compile(item.source(), target=target, options=item.options)
            instructions = sorted(set(_INSTRUCTION.findall(made.asm["ptx"])))
            found[item.name] = orders(made.asm["ttgir"]) | {"instructions": instructions}
            for key, name in _FLOATS.items():
                # two at a time from 10.0 on
                pairs = re.findall(rf"\b{name}(?:\.rn)?\.f32(x2)?", made.asm["ptx"])
                found[item.name][key] = sum(2 if pair else 1 for pair in pairs)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
