"""The walk of `specc::accept`: one program a sequence.

Greedy, coupled and delta rows read what `node_best` has found. MSS and SWOR rows try the proposals
of a node one by one: P and q are computed from logits as they are needed, block by block, and what
rejections leave of P lies in one row of scratch a sequence. A first proposal that is accepted costs
a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.row_noise import uniform_of
from specc.kernels.cuda.row_options import (
    DELTA,
    NUM_PROMPT,
    RULE,
    SEED,
    SWOR,
    Bounded,
    factor_of,
    is_sampled,
)
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped, with_any_vocab
from specc.kernels.cuda.tree_context import has_penalty
from specc.kernels.cuda.tree_expand import DTYPES, NO_KEY, token_of
from specc.kernels.cuda.tried_probs import draft_probs, sample_rest, target_probs

# parts of rows whose keys one load takes
PARTS = 128
# tokens of a block of a pass over the vocabulary, and counters, of four tokens, of one with noise
BLOCK, COUNTERS = 2048, 1024
WARPS = 8
MAX_REGISTERS = 255


@triton.jit(
    do_not_specialize=[
        "token_stride",
        "parent_stride",
        "image_stride",
        "q_stride",
        "draft_stride",
        "value_stride",
        "word_stride",
        "len_stride",
        "num_nodes",
        "num_columns",
        "num_drafts",
        "max_depth",
        "num_parts",
    ]
)
def accept_walk_kernel(
    best,
    logits,
    tokens,
    parents,
    image,
    q_rows,
    drafts,
    target_stats,
    draft_stats,
    values,
    words,
    cache_len,
    counts,
    rest,
    tried,
    path,
    num_accepted,
    output_tokens,
    row_stride,
    token_stride,
    parent_stride,
    image_stride,
    q_stride,
    draft_stride,
    value_stride,
    word_stride,
    len_stride,
    vocab,
    num_nodes,
    num_columns,
    num_drafts,
    max_depth,
    num_parts,
    IS_TRIED: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
    BV: tl.constexpr,
    BQ: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    length = tl.load(cache_len + i_b * len_stride)
    p_tokens = tokens + i_b * token_stride
    p_parents = parents + i_b * parent_stride
    p_values = values + i_b * value_stride
    p_words = words + i_b * word_stride
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_s = tl.arange(0, BS)
    m_n = (o_n > 0) & (o_n < num_nodes)
    b_token = tl.load(p_tokens + o_n, mask=m_n, other=-1)  # [BN]
    b_parent = tl.load(p_parents + o_n, mask=m_n, other=-1)  # [BN]
    b_path = tl.where(o_d == 0, 0, -1)  # [BD]
    b_output = tl.full([BD], -1, tl.int64)
    node = tl.full([], 0, tl.int32)
    depth = tl.full([], 0, tl.int32)
    is_alive = (length >= 0).to(tl.int32)
    b_output = tl.where((o_d == 0) & (is_alive == 0), 0, b_output)
    is_tried = False
    if IS_TRIED:
        rule = tl.load(p_words + RULE)
        is_tried = is_sampled(p_values) & (rule > DELTA)
        is_tried = is_tried & (length >= 0)
        seed = tl.load(p_words + SEED)
        factor = factor_of(p_values)
        is_penalized = has_penalty(p_values)
        num_prompt = tl.load(p_words + NUM_PROMPT)
        o_c = tl.arange(0, BT)
        m_c = o_c < num_columns
        b_image = o_c
        if image is not None:
            b_image = tl.load(image + i_b * image_stride + o_c, mask=m_c, other=-1)
        m_c = m_c & (b_image > 0) & (b_image < num_nodes)
        # node that a column's proposal hangs below; -1 for none
        b_above = tl.load(p_parents + b_image, mask=m_c, other=-1)  # [BT]
        p_tried = tried + i_b * num_columns
        draft = (0,)
        if drafts is not None:
            p_rows = drafts + i_b * num_drafts * draft_stride
            p_draft = draft_stats + i_b * num_drafts * 3
            draft = (p_rows, p_draft, p_tried, draft_stride, vocab, factor)  # type: ignore
    while is_alive > 0:
        i_row = i_b * num_nodes + node
        child = tl.full([], BN, tl.int32)
        wanted = tl.full([], 0, tl.int64)
        if is_tried:
            if IS_TRIED:
                offset = (length + depth).to(tl.int64) + 1
                p_counts = counts + i_b * vocab
                place = length + depth
                context = (p_counts, p_tokens, p_parents, p_values, num_prompt, node, place)
                p_stats = target_stats + i_row * 3
                p_row = logits + i_row * row_stride
                p_rest = rest + i_b * vocab
                row_of_node = (p_row, vocab, factor, is_penalized, context)
                target = (row_of_node, p_rest, p_stats, vocab)
                # sum of what lies in p_rest; 0 before the first rejection
                rest_sum = tl.full([], 0.0, tl.float32)
                num_tried = tl.full([], 0, tl.int32)
                column = tl.full([], -1, tl.int32)
                is_looking = depth < max_depth
                while is_looking:
                    m_next = (b_above == node) & (o_c > column)
                    column = tl.min(tl.where(m_next, o_c, BT), 0)
                    is_looking = column < num_columns
                    if is_looking:
                        proposed = column
                        if image is not None:
                            proposed = tl.load(image + i_b * image_stride + column)
                        token = tl.load(p_tokens + proposed)
                        row = tl.full([], -1, tl.int32)
                        num_known = tl.full([], 0, tl.int32)
                        if drafts is not None:
                            row = tl.load(q_rows + column * q_stride)
                            row = tl.where(row < num_drafts, row, -1)
                            # what was tried before is known to be none of the draws that follow
                            num_known = tl.where((rule == SWOR) & (row >= 0), num_tried, 0)
                        left = tl.full([], 1.0, tl.float32)
                        if num_known > 0:
                            b_sum = tl.zeros([BV], tl.float32)
                            for start in range(0, vocab, BV):
                                o_t = start + tl.arange(0, BV)
                                b_sum += draft_probs(
                                    o_t, token, draft, row, num_known, drafts is not None
                                )
                            left = tl.sum(b_sum, 0)
                        q = draft_probs(token, token, draft, row, num_known, drafts is not None)
                        # also where nothing is left of q
                        if q > 0.0:
                            q = q / left
                            # between reads of other threads
                            tl.debug_barrier()
                            tl.store(p_tried + num_tried, (row.to(tl.int64) << 32) | token)
                            tl.debug_barrier()
                            num_tried += 1
                            uniform = uniform_of(seed, offset, column)
                            is_entered = uniform * q <= target_probs(token, target, rest_sum)
                            if is_entered == 0:
                                tl.debug_barrier()
                                b_sum = tl.zeros([BV], tl.float32)
                                for start in range(0, vocab, BV):
                                    o_t = start + tl.arange(0, BV)
                                    b_q = draft_probs(
                                        o_t, token, draft, row, num_known, drafts is not None
                                    )
                                    b_rest = target_probs(o_t, target, rest_sum) - b_q / left
                                    b_rest = tl.maximum(b_rest, 0.0)
                                    tl.store(p_rest + o_t, b_rest, mask=o_t < vocab)
                                    b_sum += b_rest
                                tl.debug_barrier()
                                rest_sum = tl.sum(b_sum, 0)
                                # a rejection that leaves nothing is the rounding of P = q
                                is_entered = rest_sum == 0.0
                            child = tl.where(is_entered, proposed, child)
                            wanted = tl.where(is_entered, token, wanted)
                            is_looking = is_entered == 0
                if child == BN:
                    wanted = sample_rest(target, rest_sum, vocab, seed, offset, BQ)
        else:
            b_key = tl.load(best + i_row * num_parts + o_s, mask=o_s < num_parts, other=NO_KEY)
            wanted = tl.minimum(token_of(tl.max(b_key, 0)), vocab - 1)
            m_child = (b_parent == node) & (b_token == wanted)
            child = tl.min(tl.where(m_child, o_n, BN), 0)
        b_output = tl.where(o_d == depth, wanted, b_output)
        is_alive = ((child < BN) & (depth < max_depth)).to(tl.int32)
        node = tl.where(is_alive > 0, child, node)
        depth += is_alive
        b_path = tl.where((o_d == depth) & (is_alive > 0), node, b_path)
    m_d = o_d <= max_depth
    tl.store(path + i_b * (max_depth + 1) + o_d, b_path, mask=m_d)
    tl.store(output_tokens + i_b * (max_depth + 1) + o_d, b_output, mask=m_d)
    tl.store(num_accepted + i_b, depth)


def walk_config(num_nodes: int, num_columns: int, max_depth: int, num_parts: int) -> dict[str, int]:
    return {
        "BN": max(16, triton.next_power_of_2(num_nodes)),
        "BT": max(16, triton.next_power_of_2(num_columns)),
        "BD": max(16, triton.next_power_of_2(max_depth + 1)),
        "BS": max(PARTS, triton.next_power_of_2(num_parts)),
        "BV": BLOCK,
        "BQ": COUNTERS,
    }


def accept_walk(
    best: Tensor,
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    max_depth: int,
    image: Tensor | None,
    q_rows: Tensor | None,
    drafts: Tensor | None,
    stats: tuple[Tensor, Tensor | None],
    values: Tensor,
    words: Tensor,
    cache_len: Tensor,
    counts: Tensor,
    *,
    is_tried: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Path, number of accepted tokens and output tokens of `accept`, in one launch.

    `best` are keys of `node_best`, `stats` those of `row_filters` for logits and for drafts,
    `counts` of `tree_context`; `drafts` [B * G, V] are the logits of all draft rows, None where no
    proposal was drawn from one; the others are inputs of `accept`. Where `is_tried` is not set,
    MSS and SWOR rows are walked as the others are, which needs keys of all rules.
    """
    batch, num_nodes = tokens.shape
    vocab, device = logits.shape[1], logits.device
    num_columns = num_nodes if image is None else image.shape[1]
    path = torch.empty(batch, max_depth + 1, dtype=torch.int32, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int32, device=device)
    output_tokens = torch.empty(batch, max_depth + 1, dtype=torch.int64, device=device)
    rest = tried = None
    if is_tried:
        rest = torch.empty(batch, vocab, dtype=torch.float32, device=device)
        tried = torch.empty(batch, num_columns, dtype=torch.int64, device=device)
    accept_walk_kernel[(batch,)](
        best,
        logits,
        tokens,
        parents,
        image,
        None if drafts is None else q_rows,
        drafts,
        stats[0],
        stats[1],
        values,
        words,
        cache_len,
        counts,
        rest,
        tried,
        path,
        num_accepted,
        output_tokens,
        logits.stride(0),
        tokens.stride(0),
        parents.stride(0),
        0 if image is None else image.stride(0),
        0 if q_rows is None else q_rows.stride(0),
        0 if drafts is None else drafts.stride(0),
        values.stride(0),
        words.stride(0),
        cache_len.stride(0),
        vocab,
        num_nodes,
        num_columns,
        0 if drafts is None else drafts.shape[0] // batch,
        max_depth,
        best.shape[1],
        IS_TRIED=is_tried,
        **walk_config(num_nodes, num_columns, max_depth, best.shape[1]),
        num_warps=WARPS,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False,
    )
    return path, num_accepted, output_tokens


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability."""
    for dtype in DTYPES:
        for block_n in (16, 64):
            yield from _shipped(dtype, block_n, block_n, 16, has_drafts=False)
            yield from _shipped(dtype, block_n, block_n, 16, has_drafts=True)
        # a merged tree
        yield from _shipped(dtype, 64, 128, 16, has_drafts=True)
        yield from _shipped(dtype, 16, 16, 16, has_drafts=False, is_tried=False)
    for block_n, block_d in ((256, 16), (1024, 64), (1024, 1024)):
        yield from _shipped(torch.bfloat16, block_n, block_n, block_d, has_drafts=False)
        yield from _shipped(torch.bfloat16, block_n, block_n, block_d, has_drafts=True)


def _shipped(
    dtype: torch.dtype,
    block_n: int,
    block_t: int,
    block_d: int,
    *,
    has_drafts: bool,
    is_tried: bool = True,
) -> Iterator[Shipped]:
    kind = "drafts" if has_drafts else "alone" if is_tried else "roots"
    is_merged = block_t != block_n
    columns = f"-columns{block_t}" if is_merged else ""
    pointers = {
        "logits": f"*{TYPE_NAMES[dtype]}", "drafts": f"*{TYPE_NAMES[dtype]}",
        **dict.fromkeys(("best", "tokens", "words", "tried", "output_tokens"), "*i64"),
        **dict.fromkeys(("parents", "image", "q_rows", "cache_len", "counts"), "*i32"),
        **dict.fromkeys(("path", "num_accepted"), "*i32"),
        **dict.fromkeys(("target_stats", "draft_stats", "values", "rest"), "*fp32"),
    }  # fmt: skip
    absent = [] if has_drafts else ["q_rows", "drafts", "draft_stats"]
    absent += [] if is_merged else ["image"]
    absent += [] if is_tried else ["rest", "tried"]
    pointers = {name: kind for name, kind in pointers.items() if name not in absent}
    strides = ("row", "token", "parent", "image", "q", "draft", "value", "word", "len")
    counts = ("num_nodes", "num_columns", "num_drafts", "max_depth", "num_parts")
    item = Bounded(
        name=f"walk-{kind}-{TYPE_NAMES[dtype]}-nodes{block_n}{columns}-depth{block_d}",
        kernel=accept_walk_kernel,
        signature={
            **pointers,
            **dict.fromkeys((f"{name}_stride" for name in strides), "i32"),
            **dict.fromkeys(("vocab", *counts), "i32"),
        },
        constexprs={
            **dict.fromkeys(absent),
            "IS_TRIED": is_tried,
            "BN": block_n, "BT": block_t, "BD": block_d, "BS": PARTS,
            "BV": BLOCK, "BQ": COUNTERS,
        },
        num_warps=WARPS,
        num_stages=3,
        max_registers=MAX_REGISTERS,
        # a root is the last column of a step's tokens: not aligned
        divisible=(*(x for x in pointers if is_tried or x != "tokens"), "row_stride", "vocab"),
    )  # fmt: skip
    return with_any_vocab(item)
