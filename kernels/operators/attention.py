"""Attention over paged caches: `tree_attention`, its two halves, and what models call."""

from __future__ import annotations

from torch import Tensor

from specc.artifact.backends import NATIVE, PARTS, SPLIT
from specc.artifact.weight_layout import BLOCK
from specc.kernels.operator import (
    AlongLast,
    Cut,
    NoRule,
    OfHeads,
    Operand,
    Operator,
    PassLimits,
    nothing,
)
from specc.kernels.reference import core, dense, kv_rows, latent
from specc.kernels.reference.kv_rows import columns_of

_FLOAT_BYTES = 4
# rows of the tiles of attention that are split on a large GPU: 8 programs of up to 128 rows for
# each of 160 multiprocessors
SPLIT_ROWS = 8 * 160 * 128
# tiles of attention in C++: keys, rows, floats of a vector, and threads that a machine may have
_NATIVE_TILE, _NATIVE_ROWS, _LANES, _THREADS = 64, 128, 16, 64
# of latents: bytes of what heads expand to at a time, and rows (kernels/cpu/attend_expanded.cpp)
_EXPANDED_BYTES, _LATENTS = 32 << 20, 1024
_OF_HEADS = ("sink_logits", "slopes")
_WHOLE = "attention goes over it"


def _native_scratch(width: int) -> int:
    """What threads of attention hold, of heads that are so wide."""
    accumulators = 3 * _NATIVE_ROWS * (width + 2 * _LANES)
    tiles = _NATIVE_TILE * (2 * width + _NATIVE_ROWS) + _NATIVE_ROWS * width
    return _FLOAT_BYTES * _THREADS * (accumulators + tiles)


def _tree_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object
) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], v.shape[2]).transpose(0, 1)


def _scratch(limits: PassLimits, q: Operand, k_cache: Operand, value_dim: int) -> int:
    """In C++: tiles and partial results of each thread. In torch: gathered keys and values.

    Besides, there, scores and probabilities of as many rows as it takes at once. On a GPU: partial
    results of the splits of a context, which fill the machine up to four times.
    """
    num_heads, num_kv_heads = int(q.shape[0]), int(k_cache.shape[2])
    if limits.attention == PARTS:
        return _FLOAT_BYTES * SPLIT_ROWS * (value_dim + 1)
    # the wider of keys and values
    head_dim = max(int(q.shape[2]), value_dim)
    if limits.attention == NATIVE:
        return _native_scratch(head_dim)
    rows = limits.longest
    if limits.attention == SPLIT:
        rows = min(rows, core.rows_at_once(num_heads, limits.context))
    scores = 2 * num_heads * rows * limits.context
    gathered = 2 * num_kv_heads * head_dim * limits.context
    return _FLOAT_BYTES * (scores + gathered)


TREE_ATTENTION = Operator(
    "tree_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor q_start, Tensor position, Tensor slot, Tensor cache_len, Tensor? ancestors,"
    " Tensor block_table, Tensor? sink_logits=None, Tensor? slopes=None, *, float scale,"
    " int window=0, int sink=0, float softcap=0.0, bool rounds_bias=False, int most_rows=0,"
    " int chunk=0) -> Tensor",
    reference=core.tree_attention_reference,
    fake=_tree_attention_fake,
    tokens=OfHeads(("q", "k", "v"), parameters=_OF_HEADS),
    cut=Cut(
        {
            "q": "heads . *",
            "k": "kv_heads . *",
            "v": "kv_heads . *",
            "k_cache": ". . kv_heads *",
            "v_cache": ". . kv_heads *",
            "sink_logits": "heads",
            "slopes": "heads",
        },
        "heads . *",
        _WHOLE,
        heads=("q", "k"),
    ),
    scratch=lambda limits, q, k_cache, v, **_: _scratch(limits, q, k_cache, int(v.shape[2])),
    cuda="tree_attention:tree_attention",
    cpu=True,
)


def _attend_expanded_fake(absorbed: Tensor, q: Tensor, *args: object, **kwargs: object) -> Tensor:
    num_heads, num_tokens, value_dim = absorbed.shape
    return q.new_empty(num_tokens, num_heads, value_dim).transpose(0, 1)


def _attend_expanded_scratch(
    limits: PassLimits, q: Operand, k_cache: Operand, up_v: Operand, **_: object
) -> int:
    """Keys and values of a sequence's latents, of some heads, or of all and their scores."""
    num_heads, rows = int(up_v.shape[0]), limits.context
    width = int(q.shape[2]) + int(up_v.shape[1])
    gathered = min(rows, _LATENTS) * int(k_cache.shape[3])
    if limits.attention == NATIVE:
        head = rows * width * k_cache.itemsize
        # of fewer rows, more heads at a time; attention over them has its own
        expanded = max(head, min(_EXPANDED_BYTES, num_heads * head))
        # latents, and the blocks of a head's projection
        multiplied = gathered + (width + BLOCK) * int(up_v.shape[2])
        return expanded + multiplied * k_cache.itemsize + _native_scratch(width)
    tokens = min(limits.longest, core.rows_at_once(num_heads, rows))
    # own keys, values, both together, and once more in float32
    return _FLOAT_BYTES * (2 * num_heads * tokens * rows + 3 * num_heads * rows * width)


# of sequences with more tokens than `most_rows`, over keys and values that latents expand to
ATTEND_EXPANDED = Operator(
    "attend_expanded(Tensor absorbed, Tensor q, Tensor k_cache, Tensor up_k, Tensor up_v,"
    " Tensor q_start, Tensor position, Tensor slot, Tensor cache_len, Tensor? ancestors,"
    " Tensor block_table, Tensor? sink_logits=None, *, int most_rows, float scale,"
    " float softcap=0.0) -> Tensor",
    reference=latent.attend_expanded_reference,
    fake=_attend_expanded_fake,
    tokens=OfHeads(("absorbed", "q"), parameters=("sink_logits",)),
    cut=Cut(
        {
            "absorbed": "heads * *",
            "q": "heads * *",
            # all heads read its rows
            "k_cache": "* * * *",
            "up_k": "heads * *",
            "up_v": "heads * *",
            "sink_logits": "heads",
        },
        "heads . *",
        _WHOLE,
    ),
    scratch=_attend_expanded_scratch,
    cpu=True,
)


def _dense_attention_fake(
    query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object
) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


# what models call, as torch's, with what that lacks
DENSE_ATTENTION = Operator(
    "dense_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask,"
    " Tensor? sink_logits, *, float scale, float softcap=0.0) -> Tensor",
    reference=dense.dense_attention_reference,
    fake=_dense_attention_fake,
    tokens=NoRule("it mixes all rows: a pass rewrites it"),
    cut=NoRule("a pass rewrites it before the cut"),
    stored=False,
)

HADAMARD = Operator(
    "hadamard(Tensor x) -> Tensor",
    reference=kv_rows.hadamard_reference,
    fake=lambda x: x.new_empty(x.shape),
    tokens=AlongLast(),
    cut=Cut({"x": "... *"}, "... *", "columns of a head are added up"),
    cuda="hadamard:hadamard",
    cpu=True,
)

# tree_attention in two: what follows rotary embedding directly, and the rest
WRITE_KV = Operator(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor q_start,"
    " Tensor slot, Tensor block_table, *, bool values_in_keys=False) -> ()",
    reference=core.write_kv_reference,
    fake=nothing,
    tokens=OfHeads(("k", "v")),
    cut=NoRule("made of tree_attention after the cut"),
    cuda="tree_attention:write_kv",
    cpu=True,
)


def _rope_write_latent_fake(q: Tensor, q_rest: Tensor, *args: object) -> Tensor:
    heads, tokens, size = q.shape
    return q.new_empty(tokens, heads, size + q_rest.shape[2]).transpose(0, 1)


ROPE_WRITE_LATENT = Operator(
    "rope_write_latent(Tensor q, Tensor q_rest, Tensor latent, Tensor shared, Tensor cos,"
    " Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor q_start, Tensor slot,"
    " Tensor block_table, str pairs) -> Tensor",
    reference=latent.rope_write_latent_reference,
    fake=_rope_write_latent_fake,
    tokens=OfHeads(("q", "q_rest", "latent", "shared"), ("cos", "sin")),
    cut=NoRule("made of tree_attention after the cut"),
    cuda="rope_write_latent:rope_write_latent",
)


def _attend_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: object, **_: object) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], columns_of(v_cache)).transpose(0, 1)


ATTEND = Operator(
    "attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor q_start, Tensor position,"
    " Tensor slot, Tensor cache_len, Tensor? ancestors, Tensor block_table,"
    " Tensor? sink_logits=None, Tensor? slopes=None, *, float scale, int window=0, int sink=0,"
    " float softcap=0.0, bool values_in_keys=False, bool rounds_bias=False, int most_rows=0,"
    " int chunk=0) -> Tensor",
    reference=core.attend_reference,
    fake=_attend_fake,
    tokens=OfHeads(("q",), parameters=_OF_HEADS),
    cut=NoRule("made of tree_attention after the cut"),
    scratch=lambda limits, q, k_cache, v_cache, **_: _scratch(
        limits, q, k_cache, int(v_cache.shape[3])
    ),
    cuda="attend:attend",
    cpu=True,
)


def _invariant_scratch(limits: PassLimits, q: Operand, v_cache: Operand, **_: object) -> int:
    """Parts of splits: rows, and a sum and a maximum of each."""
    return _FLOAT_BYTES * SPLIT_ROWS * (int(v_cache.shape[3]) + 2)


# rows have the same bits whatever else is in the pass
INVARIANT_ATTEND = Operator(
    "invariant_attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor q_start, Tensor position,"
    " Tensor slot, Tensor cache_len, Tensor? ancestors, Tensor block_table,"
    " Tensor? sink_logits=None, Tensor? slopes=None, *, float scale, int window=0, int sink=0,"
    " float softcap=0.0, bool rounds_bias=False, int chunk=0) -> Tensor",
    reference=core.attend_reference,
    fake=_attend_fake,
    tokens=OfHeads(("q",), parameters=_OF_HEADS),
    cut=NoRule("made of attend after the cut"),
    scratch=_invariant_scratch,
    cuda="invariant_attend:invariant_attend",
)
