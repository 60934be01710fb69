"""What operators do along a dimension of tokens, by name without namespace and overload."""

from __future__ import annotations

# the same numbers in the same order, under another shape or dtype
CONVERSIONS = frozenset(("to", "_to_copy", "type_as", "contiguous", "clone", "alias", "detach"))
VIEWS = frozenset(("view", "reshape", "_unsafe_view", "flatten", "unflatten"))
MOVES = frozenset(
    ("unsqueeze", "squeeze", "transpose", "permute", "movedim", "swapaxes", "t", "mT", "numpy_T")
)
SAME = CONVERSIONS | VIEWS | MOVES
# along dims named by the arguments `dim`, `dims` or `dimension`; without one, along all
ALONG = frozenset(
    (
        "softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp", "sum", "mean", "prod",
        "max", "min", "amax", "amin", "argmax", "argmin", "median", "kthvalue", "topk",
        "all", "any", "count_nonzero", "norm", "linalg_vector_norm",
        "var", "std", "var_mean", "std_mean",
        "sort", "argsort", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "diff",
        "flip", "roll", "glu", "cat", "chunk", "split", "split_with_sizes", "unbind", "narrow",
        "select", "slice", "index_select", "gather", "scatter", "repeat_interleave", "unfold",
    )
)  # fmt: skip
REDUCTIONS = frozenset(("max", "min", "amax", "amin", "sum", "mean", "prod"))
# along the last dimension where no shape says otherwise
NORMS = frozenset(("layer_norm", "native_layer_norm", "rms_norm", "add_rms_norm", "act_and_mul"))
# operands that are [heads, tokens, head_dim], the first of each operator, then tables
ATTENTION = {
    "tree_attention": (3, 0),
    "attend": (1, 0),
    "write_kv": (2, 0),
    "rope_write": (3, 2),
}
# products of rows of tokens with parameters; operands of tokens by name, then tables
ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "add_norm_linear": (("x", "residual"), ()),
    "add_norm_gate_up": (("x", "residual"), ()),
    "add_norm_rope_write": (("x", "residual"), ("cos", "sin")),
    "add_norm_head": (("x", "residual"), ()),
    "embed_norm_rope_write": (("tokens",), ("cos", "sin")),
    "experts": (("x",), ("ids", "weights")),
}
# what of these operands is a parameter
PARAMETERS = ("gamma", "weight", "bias", "embedding", "gate_up", "down")
PRODUCTS = frozenset(("linear", "mm", "bmm", "matmul", "addmm", "baddbmm"))
# element by element, and yet without the tag; `repeat` of tokens would change their number
POINTWISE = frozenset(
    (
        "floor_divide", "hardswish", "log_sigmoid", "__and__", "__or__", "repeat", "stack",
        "zeros_like", "ones_like", "full_like",
        "all_reduce",  # the same element of every rank
    )
)  # fmt: skip
# may take the number of tokens as an argument, which can only name a size of the result
SIZED = VIEWS | {"expand"}
