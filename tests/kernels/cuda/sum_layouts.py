"""In which order kernels of recurrences add up the rows of a state, found out without a GPU.

    python -P tests/kernels/cuda/sum_layouts.py --capability 90 --head k128-v128-beta

A process of its own, without TRITON_INTERPRET. A sum over the rows of a block is added up in each
thread, then between threads, as the layout of the block has them: kernels of one layout have sums
of the same bits. Prints JSON: name of a configuration → layouts of the blocks that are summed up,
each once, with the blocks' sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile

# aliases of layouts, and what reductions over rows read, in Triton's intermediate language
_ALIAS = re.compile(r"^(#\w+) = (#ttg\.\S.*)$", re.MULTILINE)
_REDUCE = re.compile(
    r'"tt\.reduce"\([^)]*\) <\{axis = 0 : i32[^}]*\}> \(\{.*?\}\) :'
    r" \(tensor<(\d+x\d+)xf32, (#\w+)>\)",
    re.DOTALL,
)


def layouts(text: str) -> list[str]:
    """Of a kernel: sizes and layout of each block of which rows are added up."""
    aliases = dict(_ALIAS.findall(text))
    return sorted({f"{sizes} {aliases[name]}" for sizes, name in _REDUCE.findall(text)})


def head_of(name: str) -> str:
    """What heads look like, of the name of a configuration."""
    return name.removeprefix("tree-").removeprefix("fold-").removesuffix("-words")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, required=True)
    parser.add_argument("--head", required=True, help="as names of configurations have it")
    options = parser.parse_args()
    capability = options.capability
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter compiles nothing"
    import triton
    from triton.backends.compiler import GPUTarget

    from specc.kernels.cuda import tree_recurrence

    target, found = GPUTarget("cuda", capability, 32), {}
    with tempfile.TemporaryDirectory(prefix="specc-layouts-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for item in tree_recurrence.shipped(capability):
            if head_of(item.name) != options.head:
                continue
            made = triton.compile(item.source(), target=target, options=item.options)
            found[item.name] = layouts(made.asm["ttgir"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
