"""`specc::tree_expand` in two launches: the best of each part of the vocabulary, then of those.

Values become integers that sort as the operator ranks tokens. All of them differ, so a maximum
needs no index beside it, and ties and NaN need no code of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped, with_any_vocab
from specc.kernels.cuda.strided_rows import are_rows_dense, check, said

MAX_CHILDREN = 128
# what one program holds
MAX_CANDIDATES = 8192
# up to this many children, taking the maximum again and again beats sorting
MAX_ROUNDS = 16
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NO_KEY = tl.constexpr(-(1 << 63))


@triton.jit
def order_key(b_value, o_token):
    """Integers that sort by value, NaN above all, equal values by descending token."""
    b_value = tl.where(b_value == 0.0, 0.0, b_value)
    b_bits = b_value.to(tl.int32, bitcast=True)
    b_order = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    b_order = tl.where(b_value != b_value, 0x7FFFFFFF, b_order)
    return (b_order.to(tl.int64) << 32) | (0x7FFFFFFF - o_token).to(tl.int64)


@triton.jit
def token_of(b_key):
    return 0x7FFFFFFF - (b_key & 0xFFFFFFFF)


@triton.jit
def largest_keys(b_key, k, BK: tl.constexpr, IS_SORTED: tl.constexpr):
    """The k largest of distinct keys, in descending order; what lies after them is anything."""
    if IS_SORTED:
        b_best = tl.topk(b_key, BK)
    else:
        o_k = tl.arange(0, BK)
        b_best = tl.full([BK], NO_KEY, tl.int64)
        for i in range(k):
            best = tl.max(b_key, 0)
            b_best = tl.where(o_k == i, best, b_best)
            b_key = tl.where(b_key == best, NO_KEY, b_key)
    return b_best  # [BK]


@triton.jit(do_not_specialize=["num_parts"])
def tree_expand_parts_kernel(
    logits,
    keys,
    row_stride,
    vocab,
    num_parts,
    K: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    MAX_ROUNDS: tl.constexpr,
):
    i_r = (tl.program_id(0) // num_parts).to(tl.int64)
    i_p = tl.program_id(0) % num_parts
    o_v = i_p * BV + tl.arange(0, BV)
    m_v = o_v < vocab
    b_logit = tl.load(logits + i_r * row_stride + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_key = tl.where(m_v, order_key(b_logit, o_v), NO_KEY)  # [BV]
    o_k = tl.arange(0, BK)
    b_best = largest_keys(b_key, K, BK, K > MAX_ROUNDS)
    tl.store(keys + (i_r * num_parts + i_p) * K + o_k, b_best, mask=o_k < K)


@triton.jit(do_not_specialize=["num_candidates"])
def tree_expand_merge_kernel(
    keys,
    out,
    num_candidates,
    K: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    MAX_ROUNDS: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BC)
    b_key = tl.load(keys + i_r * num_candidates + o_c, mask=o_c < num_candidates, other=NO_KEY)
    o_k = tl.arange(0, BK)
    b_best = largest_keys(b_key, K, BK, K > MAX_ROUNDS)
    tl.store(out + i_r * K + o_k, token_of(b_best), mask=o_k < K)


def parts_config(vocab: int, num_children: int, least: int) -> dict[str, int]:
    """Block sizes: a part has to hold its children, and all parts' children have to fit one block.

    One row of a large vocabulary makes about as many programs as a device has processors. `least`
    is the part of a small one.
    """
    block_k = triton.next_power_of_2(num_children)
    part = least if vocab <= 4096 else 2048 if num_children <= MAX_ROUNDS else 4096
    part = max(part, block_k)
    num_parts = triton.cdiv(vocab, part)
    candidates = triton.next_power_of_2(max(num_parts * num_children, block_k))
    return {
        "BK": block_k,
        "BV": part,
        "BC": candidates,
        "num_parts": num_parts,
        "part_warps": 8 if part > 2048 else 4,
        # 8 warps spill a sort of 4096 on sm_80
        "merge_warps": 16 if candidates > 2048 else 4 if candidates > 256 else 1,
    }


def config(vocab: int, num_children: int) -> dict[str, int]:
    """Of `tree_expand`."""
    return parts_config(vocab, num_children, 256)


def tree_expand(logits: Tensor, num_children: int) -> Tensor:
    check_logits(logits)
    num_rows, vocab = logits.shape
    sizes = check_children("tree_expand", num_children, vocab, config)
    out = torch.empty(num_rows, num_children, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    num_parts = sizes["num_parts"]
    keys = torch.empty(num_rows, num_parts, num_children, dtype=torch.int64, device=logits.device)
    tree_expand_parts_kernel[(num_rows * num_parts,)](
        logits,
        keys,
        logits.stride(0),
        vocab,
        num_parts,
        **_sizes(sizes, num_children, "BV", "part_warps"),
    )
    tree_expand_merge_kernel[(num_rows,)](
        keys,
        out,
        num_parts * num_children,
        **_sizes(sizes, num_children, "BC", "merge_warps"),
    )
    return out


def _sizes(sizes: dict[str, int], num_children: int, block: str, warps: str) -> dict[str, int]:
    """Of one of the launches, what `config` says under these names."""
    own = {"BK": sizes["BK"], block: sizes[block], "num_warps": sizes[warps]}
    return own | {"K": num_children, "MAX_ROUNDS": MAX_ROUNDS}


def check_children(
    operator: str, num_children: int, vocab: int, config: Callable[[int, int], dict[str, int]]
) -> dict[str, int]:
    """What `config` says of them.

    Raises:
        ValueError: more children than a vocabulary or a program has.
    """
    found = f"{num_children} children of a vocabulary of {vocab}"
    most = min(vocab, MAX_CHILDREN)
    check(1 <= num_children <= most, operator, found, f"1 … {most}")
    sizes = config(vocab, num_children)
    found = f"{found}, which leave {sizes['BC']} candidates"
    check(sizes["BC"] <= MAX_CANDIDATES, operator, found, f"at most {MAX_CANDIDATES}")
    return sizes


def check_logits(logits: Tensor) -> None:
    """Refuse what is no row of logits."""
    is_right = logits.dim() == 2 and logits.dtype in DTYPES and logits.shape[1] > 0
    needed = "[R, V] of float32, float16 or bfloat16, V at least 1, rows of one piece"
    check(is_right and are_rows_dense(logits), "logits", said("logits", logits), needed)


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability: integers and comparisons alone."""
    for num_children in (1, 2, 3, 4, 6, 8, 10, 16, 32, 64):
        for dtype in DTYPES:
            yield from with_any_vocab(
                Shipped.of(
                    f"parts-{TYPE_NAMES[dtype]}-k{num_children}",
                    tree_expand_parts_kernel, {dtype: ("logits",), torch.int64: ("keys",)},
                    **_sizes(config(131072, num_children), num_children, "BV", "part_warps"),
                )
            )  # fmt: skip
        # vocabularies of 32k, 128k and 256k leave different numbers of candidates
        for vocab in (32768, 131072, 262144):
            yield Shipped.of(
                f"merge-v{vocab}-k{num_children}",
                tree_expand_merge_kernel, {torch.int64: ("keys", "out")},
                **_sizes(config(vocab, num_children), num_children, "BC", "merge_warps"),
            )  # fmt: skip
