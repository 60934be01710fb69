"""Convolutions and recurrences as transformers' models call them, replaced while a model is traced.

Each modeling file of transformers has its own copies of a few functions of one shape: a causal
convolution, the gated delta rule, KDA, the scan of Mamba-2. What they compute over chunks, with
loops whose lengths torch cannot trace, is one operator of specc: `specc::dense_conv` or
`specc::dense_recurrence`. What those do not express is refused by name.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specc.errors import UnsupportedAttentionError
from specc.kernels import ops
from specc.passes.frontend.attention_function import SAID_ELSEWHERE

_MODELS = "transformers.models."
_SILU = ("silu", "swish")
# that go to every layer, and that none of these functions reads
_UNREAD = SAID_ELSEWHERE | {"position_embeddings"}


@contextmanager
def registered_recurrences(model: nn.Module) -> Iterator[None]:
    """Let a model of transformers convolve and recur by operators of specc, while it is traced.

    Args:
        model: of transformers, or any other, which is left alone; as it was, afterwards.
    """
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    files = [sys.modules[name] for name in sorted(names) if name.startswith(_MODELS)]
    with ExitStack() as stack:
        replaced: dict[int, Callable[..., Any]] = {}
        for file in files:
            for name, function in _FUNCTIONS.items():
                original = vars(file).get(name)
                if callable(original):
                    own = functools.partial(function, vars(file))
                    replaced[id(original)] = own
                    stack.callback(setattr, file, name, original)
                    setattr(file, name, own)
        # what a layer has kept of them
        for module in model.modules() if replaced else ():
            for name, value in list(vars(module).items()):
                if id(value) in replaced:
                    stack.callback(setattr, module, name, value)
                    setattr(module, name, replaced[id(value)])
        yield


def causal_conv(
    file: Mapping[str, Any],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """A convolution over the tokens before each.

    Args:
        file: names of the model's file.
        hidden_states: [1, C, T].
        weight: [C, K], of the oldest token first.
        bias: [C], or None.
        activation: name of a function, or None.
        others: see `_check`.
    Returns:
        [1, C, T] in the dtype of `hidden_states`.
    """
    _check("convolution", others)
    x = hidden_states.transpose(1, 2).to(weight.dtype)
    fused = "silu" if activation in _SILU else ""
    y = ops.dense_conv(x, weight, bias, activation=fused)
    if activation is not None and not fused:
        y = file["ACT2FN"][activation](y)
    return y.to(hidden_states.dtype).transpose(1, 2)


def delta_rule(
    file: Mapping[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule, with one decay for a head, or with one for each of its rows (KDA).

    Args:
        file: names of the model's file, of which it takes `l2norm`.
        query: [1, T, HK, DK].
        key: [1, T, HK, DK].
        value: [1, T, HV, DV].
        g: [1, T, HV] or [1, T, HV, DK] logarithm of the decay.
        beta: [1, T, HV].
        chunk_size: says nothing of the result.
        initial_state: None.
        output_final_state: False.
        use_qk_l2norm_in_kernel: queries and keys are normalized first.
        others: see `_check`.
    Returns:
        [1, T, HV, DV] in the dtype of the query, and no state.
    """
    _check("delta rule", others | {"initial_state": initial_state})
    _check("delta rule", {"output_final_state": output_final_state or None})
    dtype = query.dtype
    query, key, value, g, beta = (x.float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (file["l2norm"](x, dim=-1, eps=1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    return ops.dense_recurrence(query, key, value, g, beta).to(dtype), None


def mamba2_scan(
    file: Mapping[str, Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **others: Any,
) -> Tensor:
    """The scan of Mamba-2: a state [N, P] decays by dt · A and takes in dt · B xᵀ.

    transformers clamps dt for prompts, and not for the tokens after one; here it always is.

    Args:
        file: names of the model's file.
        hidden_states: x, [1, T, H, P].
        dt: [1, T, H].
        A: [H], negative.
        B: [1, T, G, N], the keys; G divides H.
        C: [1, T, G, N], the queries.
        chunk_size: says nothing of the result.
        D: [H] share of x itself, or None.
        dt_bias: [H], or None.
        initial_states: None.
        dt_softplus: dt is the softplus of what is given.
        dt_limit: least and most that dt may be.
        return_final_states: False.
        others: see `_check`.
    Returns:
        [1, T, H, P] float32.
    Source: arXiv:2405.21060 §2.
    """
    _check("scan of Mamba-2", others | {"initial_states": initial_states})
    _check("scan of Mamba-2", {"return_final_states": return_final_states or None})
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    low, high = dt_limit
    if not (dt_softplus and low <= 0 and high == math.inf):
        dt = torch.clamp(dt, min=low, max=high)
    x, dt = hidden_states.float(), dt.float()
    y = ops.dense_recurrence(C.float(), B.float(), x * dt[..., None], A.float() * dt, None)
    return y if D is None else y + D[:, None] * x


def _refused(piece: str, file: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedAttentionError(
        f"{file['__name__'].rpartition('.')[2]}: {piece}",
        "convolutions, gated delta rules and scans of Mamba-2, beside attention",
        "choose a model of a supported architecture (see docs/guide/models.md)",
    )


_MAMBA1 = "the selective scan of Mamba-1, where each column of a state has its own decay"
# as the files of models call them → what they become
_KNOWN: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
}
_REFUSED = ("mamba_selective_scan", "mamba_inner_fn")
_FUNCTIONS = _KNOWN | dict.fromkeys(_REFUSED, functools.partial(_refused, _MAMBA1))


def are_known(file: Mapping[str, Any]) -> bool:
    """Whether a model's file has convolutions or recurrences, and none that are refused.

    Args:
        file: its names.
    """
    return not file.keys().isdisjoint(_KNOWN) and file.keys().isdisjoint(_REFUSED)


def _check(what: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that say something of the result, beside those that are always there.

    Raises:
        UnsupportedAttentionError: one that is not None, and not of `_UNREAD`.
    """
    for name, argument in arguments.items():
        if argument is not None and name not in _UNREAD:
            raise UnsupportedAttentionError(
                f"a {what} takes an argument {name}",
                "one sequence from its beginning, of one kind of token",
                "choose a model of a supported architecture (see docs/guide/models.md)",
            )
