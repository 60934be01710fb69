"""Children of draft rows whose filters are known: best keys of parts of rows, then of all parts.

A key is a value and its token as one integer, as in `tree_expand`. Greedy rows and delta rank
logits, coupled and SWOR rows s + noise; an MSS row keeps one best for each child's own noise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.row_noise import (
    COLUMN_PURPOSES,
    DRAW_NOISE,
    TOKEN_NOISE,
    first_of_four,
    noise_bits,
    value_of_key,
)
from specc.kernels.cuda.row_options import (
    COUPLED,
    DELTA,
    MSS,
    RULE,
    SEED,
    Bounded,
    factor_of,
    has_filter,
    is_sampled,
)
from specc.kernels.cuda.sampling import LANES, gumbel_of_bits
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped, with_any_vocab
from specc.kernels.cuda.tree_context import scores_at
from specc.kernels.cuda.tree_expand import (
    DTYPES,
    MAX_ROUNDS,
    NO_KEY,
    order_key,
    token_of,
)


@triton.jit
def _largest_keys(b_key, k, BK: tl.constexpr, IS_SORTED: tl.constexpr):
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


@triton.jit
def _keys(b_value, o_t, vocab):
    return tl.where(o_t < vocab, order_key(b_value, o_t), NO_KEY)


@triton.jit
def _kept(b_score, cut):
    return tl.where(b_score >= cut, b_score, -float("inf"))


@triton.jit
def _sum_of_exps(b_value, best):
    """Of values relative to the best; NaN and infinity go on as the logarithm of a sum has it."""
    return tl.sum(tl.where(b_value == -float("inf"), 0.0, tl.exp(b_value - best)), 0)


@triton.jit(
    do_not_specialize=[
        "len_stride",
        "column_stride",
        "value_stride",
        "word_stride",
        "num_rows",
        "num_parts",
        "k",
        "depth",
    ]
)
def draft_parts_kernel(
    logits,
    cache_len,
    columns,
    values,
    words,
    stats,
    keys,
    sums,
    row_stride,
    len_stride,
    column_stride,
    value_stride,
    word_stride,
    vocab,
    num_rows,
    num_parts,
    k,
    depth,
    IS_SORTED: tl.constexpr,
    BK: tl.constexpr,
    BQ: tl.constexpr,
):
    i_r = (tl.program_id(0) // num_parts).to(tl.int64)
    i_p = tl.program_id(0) % num_parts
    i_b = i_r // num_rows
    length = tl.load(cache_len + i_b * len_stride)
    if length >= 0:
        p_values = values + i_b * value_stride
        p_words = words + i_b * word_stride
        rule = tl.load(p_words + RULE)
        is_noisy = is_sampled(p_values) & (rule != DELTA)
        factor = tl.where(is_noisy, factor_of(p_values), 1.0)
        row = (logits + i_r * row_stride, vocab, factor)
        o_q = i_p * BQ + tl.arange(0, BQ)
        o_t = first_of_four(o_q)
        b_0 = scores_at(o_t, row)
        b_1 = scores_at(o_t + LANES, row)
        b_2 = scores_at(o_t + 2 * LANES, row)
        b_3 = scores_at(o_t + 3 * LANES, row)
        if is_noisy & has_filter(p_values, p_words, vocab):
            cut = tl.load(stats + i_r * 3 + 1)
            b_0 = _kept(b_0, cut)
            b_1 = _kept(b_1, cut)
            b_2 = _kept(b_2, cut)
            b_3 = _kept(b_3, cut)
        seed = tl.load(p_words + SEED)
        offset = (length + depth).to(tl.int64) + 1
        column = tl.load(columns + (i_r - i_b * num_rows) * column_stride)
        draw = DRAW_NOISE + COLUMN_PURPOSES * column
        p_keys = keys + (i_r * num_parts + i_p) * k
        # what is scored: s of rows that draw, else what is ranked
        b_s0, b_s1, b_s2, b_s3 = b_0, b_1, b_2, b_3
        if is_noisy & (rule == MSS):
            for i in range(k):
                b_i, b_j, b_k, b_l = noise_bits(seed, offset, draw + COLUMN_PURPOSES * i, o_q)
                b_key = _keys(b_0 + gumbel_of_bits(b_i), o_t, vocab)
                b_more = _keys(b_1 + gumbel_of_bits(b_j), o_t + LANES, vocab)
                b_key = tl.maximum(b_key, b_more)
                b_more = _keys(b_2 + gumbel_of_bits(b_k), o_t + 2 * LANES, vocab)
                b_key = tl.maximum(b_key, b_more)
                b_more = _keys(b_3 + gumbel_of_bits(b_l), o_t + 3 * LANES, vocab)
                tl.store(p_keys + i, tl.max(tl.maximum(b_key, b_more), 0))
        else:
            if is_noisy:
                purpose = tl.where(rule == COUPLED, TOKEN_NOISE, draw)
                b_i, b_j, b_k, b_l = noise_bits(seed, offset, purpose, o_q)
                b_0 += gumbel_of_bits(b_i)
                b_1 += gumbel_of_bits(b_j)
                b_2 += gumbel_of_bits(b_k)
                b_3 += gumbel_of_bits(b_l)
                if rule == COUPLED:
                    b_s0, b_s1, b_s2, b_s3 = b_0, b_1, b_2, b_3
            b_near = tl.join(_keys(b_0, o_t, vocab), _keys(b_1, o_t + LANES, vocab))
            b_far = tl.join(_keys(b_2, o_t + 2 * LANES, vocab), _keys(b_3, o_t + 3 * LANES, vocab))
            b_key = tl.reshape(tl.join(b_near, b_far), [4 * BQ], can_reorder=True)
            b_best = _largest_keys(b_key, k, BK, IS_SORTED)
            o_k = tl.arange(0, BK)
            tl.store(p_keys + o_k, b_best, mask=o_k < k)
        if sums is not None:
            # beyond the vocabulary lies -inf, before noise and after
            b_best = tl.maximum(tl.maximum(b_s0, b_s1), tl.maximum(b_s2, b_s3))
            best = tl.max(b_best, 0)
            total = _sum_of_exps(b_s0, best) + _sum_of_exps(b_s1, best)
            total += _sum_of_exps(b_s2, best) + _sum_of_exps(b_s3, best)
            p_sums = sums + (i_r * num_parts + i_p) * 2
            tl.store(p_sums, best)
            tl.store(p_sums + 1, total)


@triton.jit(
    do_not_specialize=["len_stride", "value_stride", "word_stride", "num_rows", "num_parts", "k"]
)
def draft_merge_kernel(
    logits,
    cache_len,
    values,
    words,
    stats,
    keys,
    sums,
    tokens,
    scores,
    row_stride,
    len_stride,
    value_stride,
    word_stride,
    vocab,
    num_rows,
    num_parts,
    k,
    IS_SORTED: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    BS: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    i_b = i_r // num_rows
    p_values = values + i_b * value_stride
    p_words = words + i_b * word_stride
    rule = tl.load(p_words + RULE)
    is_noisy = is_sampled(p_values) & (rule != DELTA)
    p_keys = keys + i_r * num_parts * k
    o_k = tl.arange(0, BK)
    o_s = tl.arange(0, BS)
    is_padding = tl.load(cache_len + i_b * len_stride) < 0
    b_best = tl.full([BK], 0x7FFFFFFF, tl.int64)
    if is_padding == 0:
        if is_noisy & (rule == MSS):
            m = (o_s < num_parts)[:, None] & (o_k < k)[None, :]
            b_draw = tl.load(p_keys + o_s[:, None] * k + o_k[None, :], mask=m, other=NO_KEY)
            b_best = tl.max(b_draw, 0)
        else:
            o_c = tl.arange(0, BC)
            b_key = tl.load(p_keys + o_c, mask=o_c < num_parts * k, other=NO_KEY)
            b_best = _largest_keys(b_key, k, BK, IS_SORTED)
    b_token = token_of(b_best)
    tl.store(tokens + i_r * k + o_k, b_token, mask=o_k < k)
    if sums is not None:
        b_value = value_of_key(b_best)
        if is_noisy & (rule != COUPLED) & (is_padding == 0):
            row = (logits + i_r * row_stride, vocab, factor_of(p_values))
            b_value = scores_at(tl.where(o_k < k, b_token, -1), row)
            if has_filter(p_values, p_words, vocab):
                b_value = _kept(b_value, tl.load(stats + i_r * 3 + 1))
        p_sums = sums + (i_r * num_parts + o_s) * 2
        b_part = tl.load(p_sums, mask=o_s < num_parts, other=-float("inf"))
        b_sum = tl.load(p_sums + 1, mask=o_s < num_parts, other=0.0)
        best = tl.max(b_part, 0)
        b_sum = tl.where(b_part == -float("inf"), b_sum, b_sum * tl.exp(b_part - best))
        total = best + tl.log(tl.sum(b_sum, 0))
        b_score = tl.where(is_padding, 0.0, b_value - total)
        tl.store(scores + i_r * k + o_k, b_score, mask=o_k < k)


def config(vocab: int, num_children: int) -> dict[str, int]:
    """Block sizes: a part has to hold its children, and all parts' children have to fit one block.

    One row of a large vocabulary makes about as many programs as a device has processors.
    """
    block_k = triton.next_power_of_2(num_children)
    part = 512 if vocab <= 4096 else 2048 if num_children <= MAX_ROUNDS else 4096
    num_parts = triton.cdiv(vocab, part)
    candidates = triton.next_power_of_2(max(num_parts * num_children, block_k))
    return {
        "IS_SORTED": num_children > MAX_ROUNDS,
        "BK": block_k,
        "BQ": part // 4,
        "BC": candidates,
        "BS": triton.next_power_of_2(num_parts),
        "num_parts": num_parts,
        "part_warps": 8 if part > 2048 else 4,
        "merge_warps": 16 if candidates > 2048 else 4 if candidates > 256 else 1,
    }


def best_children(
    logits: Tensor,
    num_children: int,
    columns: Tensor,
    depth: int,
    values: Tensor,
    words: Tensor,
    cache_len: Tensor,
    stats: Tensor,
    *,
    scored: bool,
) -> tuple[Tensor, Tensor]:
    """Tokens and scores of `draft_children` in two launches; `stats` are those of `row_filters`."""
    num_rows, vocab = logits.shape
    frontier, device = len(columns), logits.device
    sizes = config(vocab, num_children)
    num_parts = sizes["num_parts"]
    keys = torch.empty(num_rows, num_parts, num_children, dtype=torch.int64, device=device)
    tokens = torch.empty(num_rows, num_children, dtype=torch.int64, device=device)
    scores = torch.empty(
        num_rows, num_children if scored else 0, dtype=torch.float32, device=device
    )
    sums = torch.empty(num_rows, num_parts, 2, device=device) if scored else None
    draft_parts_kernel[(num_rows * num_parts,)](
        logits,
        cache_len,
        columns,
        values,
        words,
        stats,
        keys,
        sums,
        logits.stride(0),
        cache_len.stride(0),
        columns.stride(0),
        values.stride(0),
        words.stride(0),
        vocab,
        frontier,
        num_parts,
        num_children,
        depth,
        **{name: sizes[name] for name in ("IS_SORTED", "BK", "BQ")},
        num_warps=sizes["part_warps"],
        maxnreg=_most_registers(sizes["part_warps"]),
        enable_fp_fusion=False,
    )
    draft_merge_kernel[(num_rows,)](
        logits if scored else None,
        cache_len,
        values,
        words,
        stats,
        keys,
        sums,
        tokens,
        scores if scored else None,
        logits.stride(0),
        cache_len.stride(0),
        values.stride(0),
        words.stride(0),
        vocab,
        frontier,
        num_parts,
        num_children,
        **{name: sizes[name] for name in ("IS_SORTED", "BK", "BC", "BS")},
        num_warps=sizes["merge_warps"],
        maxnreg=_most_registers(sizes["merge_warps"]),
        enable_fp_fusion=False,
    )
    return tokens, scores


def _most_registers(num_warps: int) -> int:
    """What a multiprocessor has for each thread of a program."""
    return min(255, 2048 // num_warps)


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability."""
    for dtype in DTYPES:
        for num_children in (1, 2, 4, 8, 16):
            yield from _parts(dtype, num_children, scored=False)
        for num_children in (8, 16):
            yield from _parts(dtype, num_children, scored=True)
    # a sort takes long to compile
    yield from _parts(torch.bfloat16, 64, scored=False)
    for vocab, num_children in SHIPPED_MERGES:
        yield from _merge(None, vocab, num_children)
    for dtype in DTYPES:
        for num_children in (8, 10):
            yield from _merge(dtype, 131072, num_children)


# vocabularies leave different numbers of candidates
SHIPPED_MERGES = [(131072, k) for k in (1, 2, 4, 8, 16, 64)] + [(32768, 4), (262144, 4)]


def _parts(dtype: torch.dtype, num_children: int, *, scored: bool) -> Iterator[Shipped]:
    sizes = config(131072, num_children)
    pointers = {
        "logits": f"*{TYPE_NAMES[dtype]}",
        **dict.fromkeys(("cache_len", "columns"), "*i32"),
        **dict.fromkeys(("values", "stats"), "*fp32"),
        **dict.fromkeys(("words", "keys"), "*i64"),
        **({"sums": "*fp32"} if scored else {}),
    }
    strides = ("row_stride", "len_stride", "column_stride", "value_stride", "word_stride")
    item = Bounded(
        name=f"parts-{TYPE_NAMES[dtype]}-k{num_children}{'-scored' * scored}",
        kernel=draft_parts_kernel,
        signature={
            **pointers,
            **dict.fromkeys((*strides, "vocab", "num_rows", "num_parts", "k", "depth"), "i32"),
        },
        constexprs={
            **{name: sizes[name] for name in ("IS_SORTED", "BK", "BQ")},
            **({} if scored else {"sums": None}),
        },
        num_warps=sizes["part_warps"],
        num_stages=3,
        divisible=(*pointers, "row_stride", "vocab"),
        max_registers=_most_registers(sizes["part_warps"]),
    )
    return with_any_vocab(item)


def _merge(dtype: torch.dtype | None, vocab: int, num_children: int) -> Iterator[Shipped]:
    """Scored where it has a dtype."""
    sizes = config(vocab, num_children)
    scoring = {"sums": "*fp32", "scores": "*fp32"}
    pointers = {
        **{"cache_len": "*i32", "values": "*fp32", "stats": "*fp32"},
        **dict.fromkeys(("words", "keys", "tokens"), "*i64"),
        **({} if dtype is None else {"logits": f"*{TYPE_NAMES[dtype]}", **scoring}),
    }
    strides = ("row_stride", "len_stride", "value_stride", "word_stride")
    kind = "" if dtype is None else f"-scored-{TYPE_NAMES[dtype]}"
    item = Bounded(
        name=f"merge{kind}-v{vocab}-k{num_children}",
        kernel=draft_merge_kernel,
        signature={
            **pointers,
            **dict.fromkeys((*strides, "vocab", "num_rows", "num_parts", "k"), "i32"),
        },
        constexprs={
            **{name: sizes[name] for name in ("IS_SORTED", "BK", "BC", "BS")},
            **({} if dtype else dict.fromkeys(("logits", *scoring))),
        },
        num_warps=sizes["merge_warps"],
        num_stages=3,
        divisible=(*pointers, "row_stride", "vocab"),
        max_registers=_most_registers(sizes["merge_warps"]),
    )
    return with_any_vocab(item)
