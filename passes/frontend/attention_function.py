"""Attention as transformers' models hand it over: a function that is registered with transformers.

Models that go through its interface call one function with all that their attention does besides
the products: scale, softcap, sinks. Under this name that function is specc's, while a model is
traced. What torch's own attention expresses becomes `scaled_dot_product_attention`, as before; the
rest becomes `specc::dense_attention`. What neither expresses is refused by name: transformers'
functions drop arguments that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from specc.errors import UnsupportedAttentionError
from specc.kernels import ops

# one with "sdpa" in it would count as that
NAME = "specc"
# what says nothing that the mask and the other arguments do not say
SAID_ELSEWHERE = frozenset(
    (
        "sliding_window", "position_ids", "cache_position", "use_cache", "return_dict",
        "output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep",
        "num_items_in_batch",
    )
)  # fmt: skip


@contextmanager
def registered_attention(model: nn.Module) -> Iterator[None]:
    """Let a model of transformers attend by `dense_attention`, while it is traced.

    Args:
        model: of transformers, or any other, which is left alone; as it was, afterwards.
    """
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    if can_set is None or not can_set():
        yield
        return
    _register()
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    before = {
        key: config._attn_implementation_internal
        for key, config in configs.items()
        if hasattr(config, "_attn_implementation_internal")
    }
    try:
        for key in before:
            # its setter would go on to the configurations of parts, each of which is among these
            configs[key]._attn_implementation_internal = NAME
        yield
    finally:
        for key, value in before.items():
            configs[key]._attn_implementation_internal = value


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a layer of transformers calls.

    Args:
        query: [B, H, T, D].
        key: [B, HK, T, D].
        value: [B, HK, T, DV].
        attention_mask: see `specc::dense_attention`.
        dropout: 0.
        scaling: of the scores; None is D^-½.
        softcap: of the scores, or None.
        s_aux: [H] sinks, or None.
        is_causal: where there is no mask; None is what the layer says.
        others: see `SAID_ELSEWHERE`.
    Returns:
        [B, T, H, DV], and no weights.
    Raises:
        UnsupportedAttentionError: an argument that this does not express.
    """
    for name, argument in others.items():
        if argument is not None and name not in SAID_ELSEWHERE:
            raise _error(module, f"its attention takes an argument {name}")
    if softcap is None and s_aux is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        options: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_mask is None and not (
        getattr(module, "is_causal", True) if is_causal is None else is_causal
    ):
        raise _error(module, "bidirectional attention: no mask and is_causal is False")
    if dropout:
        raise _error(module, f"dropout {dropout} in attention")
    if softcap is not None and not softcap > 0:
        raise _error(module, f"a softcap of {softcap}")
    if s_aux is not None and tuple(s_aux.shape) != (query.shape[1],):
        raise _error(module, f"sinks of shape {list(s_aux.shape)} for {query.shape[1]} heads")
    scale = float(query.shape[-1]) ** -0.5 if scaling is None else float(scaling)
    attended = ops.dense_attention(
        query, key, value, attention_mask, s_aux, scale=scale, softcap=float(softcap or 0.0)
    )
    return attended.transpose(1, 2).contiguous(), None


def _error(module: nn.Module, reason: str) -> UnsupportedAttentionError:
    layer = getattr(module, "layer_idx", None)
    return UnsupportedAttentionError(
        f"{type(module).__name__}{'' if layer is None else f' of layer {layer}'}: {reason}",
        "causal attention, optionally with one sliding window, sinks and a softcap",
        "choose a model of a supported architecture (see docs/guide/models.md)",
    )
