"""The kernel of `accept_walk`: a part of a pass over the vocabulary, then the walk up to the next.

What a walk of an MSS or SWOR row needs all of the vocabulary for is a pass: what a rejection leaves
of P, and a draw from that. Each program of a row makes its part of the pass that the row waits for;
the last to be done (`arrivals.py`) adds the parts up in their order, walks on until the next pass
is needed, and leaves where it stands. The last launch waits for nobody: the program that walks
there makes whole passes itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.accept_pass import (
    DONE,
    DRAW,
    LEFT,
    REST,
    WALK,
    draft_probs,
    pass_of_part,
    target_probs,
    whole_pass,
)
from specc.kernels.cuda.arrivals import is_last
from specc.kernels.cuda.dependent import wait_for_earlier
from specc.kernels.cuda.row_noise import uniform_of
from specc.kernels.cuda.row_options import (
    DELTA,
    NUM_PROMPT,
    RULE,
    SEED,
    SWOR,
    factor_of,
    is_sampled,
)
from specc.kernels.cuda.tree_context import has_penalty
from specc.kernels.cuda.tree_expand import NO_KEY, token_of

# beyond all nodes and columns
NONE = tl.constexpr(1 << 30)
# where a walk stands: what it waits for, node, depth, column, proposals tried at the node; row and
# number of known tokens that the sum of q is of
NUM_STATES = 7
# sum of what lies in `rest`, 0 before a node's first rejection; sum of q
NUM_SUMS = 2


@triton.jit
def _child_of(p_tokens, p_parents, node, token, num_nodes, BN: tl.constexpr):
    """First child of a node that carries a token; NONE for none."""
    child = tl.full([], NONE, tl.int32)
    for start in range(0, num_nodes, BN):
        o_n = start + tl.arange(0, BN)
        m_n = (o_n > 0) & (o_n < num_nodes)
        b_token = tl.load(p_tokens + o_n, mask=m_n, other=-1)
        b_parent = tl.load(p_parents + o_n, mask=m_n, other=-1)
        m_child = (b_parent == node) & (b_token == token)
        child = tl.minimum(child, tl.min(tl.where(m_child, o_n, NONE), 0))
    return child


@triton.jit
def _follow_best(
    p_best, p_tokens, p_parents, p_path, p_output, num_keys, num_nodes, max_depth, vocab,
    BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Walk to the children that carry the best tokens; returns how many were accepted."""
    o_s = tl.arange(0, BS)
    node = tl.full([], 0, tl.int32)
    depth = tl.full([], 0, tl.int32)
    is_alive = tl.full([], 1, tl.int32)
    while is_alive > 0:
        p_keys = p_best + node * num_keys
        b_key = tl.load(p_keys + o_s, mask=o_s < num_keys, other=NO_KEY)
        wanted = tl.minimum(token_of(tl.max(b_key, 0)), vocab - 1)
        tl.store(p_output + depth, wanted)
        child = _child_of(p_tokens, p_parents, node, wanted, num_nodes, BN)
        is_alive = ((child < NONE) & (depth < max_depth)).to(tl.int32)
        if is_alive > 0:
            node = child
            depth += 1
            tl.store(p_path + depth, node)
    return depth


@triton.jit
def _next_column(p_image, p_parents, node, column, num_columns, num_nodes, BN: tl.constexpr):
    """Column of a node's next proposal; NONE for none."""
    found = tl.full([], NONE, tl.int32)
    for start in range(0, num_columns, BN):
        o_c = start + tl.arange(0, BN)
        m_c = o_c < num_columns
        b_image = o_c
        if p_image is not None:
            b_image = tl.load(p_image + o_c, mask=m_c, other=-1)
        m_c = m_c & (b_image > 0) & (b_image < num_nodes)
        b_above = tl.load(p_parents + b_image, mask=m_c, other=-1)
        m_next = (b_above == node) & (o_c > column)
        found = tl.minimum(found, tl.min(tl.where(m_next, o_c, NONE), 0))
    return found


@triton.jit
def _proposal(column, num_tried, is_swor, p_image, q_rows, q_stride, num_drafts, p_tokens):
    """Node and token of a column, its row of drafts, and how many tokens its q is known to lack."""
    column = tl.where(column < NONE, tl.maximum(column, 0), 0)
    proposed = column
    if p_image is not None:
        proposed = tl.maximum(tl.load(p_image + column), 0)
    token = tl.load(p_tokens + proposed)
    row = tl.full([], -1, tl.int32)
    num_known = tl.full([], 0, tl.int32)
    if q_rows is not None:
        row = tl.load(q_rows + column * q_stride)
        row = tl.where(row < num_drafts, row, -1)
        # what was tried before is known to be none of the draws that follow
        num_known = tl.where(is_swor & (row >= 0), num_tried, 0)
    return proposed, token, row, num_known


@triton.jit(
    do_not_specialize=[
        "token_stride", "parent_stride", "image_stride", "q_stride", "draft_stride",
        "value_stride", "word_stride", "len_stride", "num_nodes", "num_columns", "num_drafts",
        "max_depth", "num_keys", "num_parts", "num_blocks", "all_blocks", "i_round", "num_rounds",
    ],
    # rows of them begin anywhere
    do_not_specialize_on_alignment=["tokens"],
)  # fmt: skip
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
    state,
    sums,
    part_sums,
    part_keys,
    arrived,
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
    num_keys,
    num_parts,
    num_blocks,
    all_blocks,
    i_round,
    num_rounds,
    IS_TRIED: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
    BV: tl.constexpr,
    BQ: tl.constexpr,
    BP: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_earlier(IS_DEPENDENT)
    i_b = (tl.program_id(0) // num_parts).to(tl.int64)
    i_p = tl.program_id(0) % num_parts
    p_tokens = tokens + i_b * token_stride
    p_parents = parents + i_b * parent_stride
    p_values = values + i_b * value_stride
    p_words = words + i_b * word_stride
    p_path = path + i_b * (max_depth + 1)
    p_output = output_tokens + i_b * (max_depth + 1)
    work = tl.full([], DONE, tl.int32)
    if IS_TRIED:
        p_state = state + i_b * 7
        if i_round > 0:
            work = tl.load(p_state)
    if i_round == 0:
        length = tl.load(cache_len + i_b * len_stride)
        if IS_TRIED:
            is_tried = is_sampled(p_values) & (tl.load(p_words + RULE) > DELTA) & (length >= 0)
            work = tl.where(is_tried, WALK, DONE).to(tl.int32)
            tl.store(arrived + i_b, 0)
        o_n = tl.arange(0, BN)
        for start in range(0, max_depth + 1, BN):
            o_d = start + o_n
            m_d = o_d <= max_depth
            tl.store(p_path + o_d, tl.where(o_d == 0, 0, -1), mask=m_d)
            first = tl.where(length < 0, 0, -1)
            tl.store(p_output + o_d, tl.where(o_d == 0, first, -1), mask=m_d)
        # before other threads put the walk there
        tl.debug_barrier()
        if work == DONE:
            accepted = tl.full([], 0, tl.int32)
            if length >= 0:
                accepted = _follow_best(
                    best + i_b * num_nodes * num_keys, p_tokens, p_parents, p_path, p_output,
                    num_keys, num_nodes, max_depth, vocab, BN, BS,
                )  # fmt: skip
            tl.store(num_accepted + i_b, accepted)
            if IS_TRIED:
                tl.store(p_state, DONE)
    if IS_TRIED:  # noqa: SIM102
        if work != DONE:
            length = tl.load(cache_len + i_b * len_stride)
            seed = tl.load(p_words + SEED)
            factor = factor_of(p_values)
            is_penalized = has_penalty(p_values)
            num_prompt = tl.load(p_words + NUM_PROMPT)
            is_swor = tl.load(p_words + RULE) == SWOR
            p_image = image
            if image is not None:
                p_image = image + i_b * image_stride
            p_tried = tried + i_b * num_columns
            p_sums = sums + i_b * 2
            p_counts = counts + i_b * vocab
            p_rest = rest + i_b * vocab
            draft = (0,)
            if drafts is not None:
                p_rows = drafts + i_b * num_drafts * draft_stride
                p_draft = draft_stats + i_b * num_drafts * 3
                draft = (p_rows, p_draft, p_tried, draft_stride, vocab, factor)  # type: ignore
            node = tl.full([], 0, tl.int32)
            depth = tl.full([], 0, tl.int32)
            column = tl.full([], -1, tl.int32)
            num_tried = tl.full([], 0, tl.int32)
            left_row = tl.full([], -1, tl.int32)
            left_known = tl.full([], 0, tl.int32)
            rest_sum = tl.full([], 0.0, tl.float32)
            left_sum = tl.full([], 1.0, tl.float32)
            if i_round > 0:
                node = tl.load(p_state + 1)
                depth = tl.load(p_state + 2)
                column = tl.load(p_state + 3)
                num_tried = tl.load(p_state + 4)
                left_row = tl.load(p_state + 5)
                left_known = tl.load(p_state + 6)
                rest_sum = tl.load(p_sums)
                left_sum = tl.load(p_sums + 1)
            # of the pass that the walk waits for
            new_rest = tl.full([], 0.0, tl.float32)
            new_left = tl.full([], 0.0, tl.float32)
            key = tl.full([], NO_KEY, tl.int64)
            is_mine = work != DONE
            is_part = work != WALK
            is_going = is_mine
            while is_going:
                offset = (length + depth).to(tl.int64) + 1
                place = length + depth
                i_row = i_b * num_nodes + node
                context = (p_counts, p_tokens, p_parents, p_values, num_prompt, node, place)
                p_row = logits + i_row * row_stride
                row_of_node = (p_row, vocab, factor, is_penalized, context)
                target = (row_of_node, p_rest, target_stats + i_row * 3, vocab)
                own = _proposal(
                    column, num_tried - 1, is_swor, p_image, q_rows, q_stride, num_drafts, p_tokens
                )
                next_column = _next_column(
                    p_image, p_parents, node, column, num_columns, num_nodes, BN
                )
                next_column = tl.where(depth < max_depth, next_column, NONE)
                following = _proposal(
                    next_column, num_tried, is_swor,
                    p_image, q_rows, q_stride, num_drafts, p_tokens,
                )  # fmt: skip
                next_known = tl.where(next_column < NONE, following[3], 0)
                following = (following[0], following[1], following[2], next_known)
                if work > WALK:
                    left = tl.where(own[3] > 0, left_sum, 1.0)
                    first = tl.where(is_part, i_p * num_blocks * 4 * BQ, 0)
                    # after reads of other threads
                    tl.debug_barrier()
                    new_rest, new_left, key = pass_of_part(
                        work, first, tl.where(is_part, num_blocks, all_blocks), target, draft,
                        own, left, following, rest_sum, seed, offset,
                        drafts is not None, BV, BQ,
                    )  # fmt: skip
                    if is_part:
                        p_part = part_sums + i_b * num_parts * 2
                        p_key = part_keys + i_b * num_parts
                        tl.store(p_part + i_p * 2, new_rest)
                        tl.store(p_part + i_p * 2 + 1, new_left)
                        tl.store(p_key + i_p, key)
                        is_mine = is_last(arrived + i_b, num_parts)
                        is_part = work == WALK
                        if is_mine:
                            new_rest, new_left, key = whole_pass(p_part, p_key, num_parts, BP)
                    # of other threads
                    tl.debug_barrier()
                    child = tl.full([], -1, tl.int32)
                    token = own[1]
                    if work == DRAW:
                        work = tl.full([], DONE, tl.int32)
                        token = tl.minimum(token_of(key), vocab - 1)
                        if is_mine:
                            tl.store(p_output + depth, token)
                            tl.store(num_accepted + i_b, depth)
                    else:
                        rest_sum = tl.where(work == REST, new_rest, rest_sum)
                        left_sum = new_left
                        left_row = following[2]
                        left_known = next_known
                        # a rejection that leaves nothing is the rounding of P = q
                        is_entered = (work == REST) & (new_rest == 0.0)
                        child = tl.where(is_entered, own[0], -1)
                        work = tl.full([], WALK, tl.int32)
                else:
                    child = tl.full([], -1, tl.int32)
                    token = following[1]
                    if next_column == NONE:
                        work = tl.full([], DRAW, tl.int32)
                    else:
                        is_known = (left_row == following[2]) & (left_known == next_known)
                        if (next_known > 0) & (is_known == 0):
                            work = tl.full([], LEFT, tl.int32)
                        else:
                            column = next_column
                            q = draft_probs(
                                token, token, draft, following[2], next_known, drafts is not None
                            )
                            # also where nothing is left of q
                            if q > 0.0:
                                q = q / tl.where(next_known > 0, left_sum, 1.0)
                                # between reads of other threads
                                tl.debug_barrier()
                                p_new = p_tried + num_tried
                                tl.store(p_new, (following[2].to(tl.int64) << 32) | token)
                                tl.debug_barrier()
                                num_tried += 1
                                uniform = uniform_of(seed, offset, column)
                                p = target_probs(token, target, rest_sum)
                                if uniform * q <= p:
                                    child = following[0]
                                else:
                                    work = tl.full([], REST, tl.int32)
                if child >= 0:
                    if is_mine:
                        tl.store(p_output + depth, token)
                        depth += 1
                        tl.store(p_path + depth, child)
                    node = child
                    column = tl.full([], -1, tl.int32)
                    num_tried = tl.full([], 0, tl.int32)
                    left_known = tl.full([], 0, tl.int32)
                    rest_sum = tl.full([], 0.0, tl.float32)
                is_own_pass = (work > WALK) & (i_round == num_rounds)
                is_going = is_mine & ((work == WALK) | is_own_pass)
            if is_mine:
                tl.store(p_state, work)
                tl.store(p_state + 1, node)
                tl.store(p_state + 2, depth)
                tl.store(p_state + 3, column)
                tl.store(p_state + 4, num_tried)
                tl.store(p_state + 5, left_row)
                tl.store(p_state + 6, left_known)
                tl.store(p_sums, rest_sum)
                tl.store(p_sums + 1, left_sum)
