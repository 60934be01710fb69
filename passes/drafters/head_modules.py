"""Parts that modules of heads and of block drafters are made of, as Llama has them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specc.passes.drafters.head_spec import HeadSpec, LayeredSpec


class DecoderSpec(Protocol):
    """A head with ordinary layers; see `EagleSpec` and `HeadSpec`."""

    @property
    def config(self) -> Any: ...
    @property
    def width(self) -> int: ...
    @property
    def windows(self) -> tuple[int, ...]: ...
    @property
    def has_qk_norm(self) -> bool: ...
    @property
    def tensors(self) -> dict[str, str]: ...


class HasTensors(Protocol):
    """Tensors by the names of parameters."""

    @property
    def tensors(self) -> dict[str, str]: ...


class MLP(nn.Module):
    """Gated, of one layer."""

    def __init__(self, spec: HeadSpec | DecoderSpec, index: int) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        width, inner, name = spec.width, int(spec.config.intermediate_size), f"layers.{index}.mlp"
        self.gate_proj = linear_of(spec, f"{name}.gate_proj", width, inner)
        self.up_proj = linear_of(spec, f"{name}.up_proj", width, inner)
        self.down_proj = linear_of(spec, f"{name}.down_proj", inner, width)
        self.act = ACT2FN[spec.config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """RMSNorm in float32, as Llama's."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: tuple[Tensor, Tensor],
    positions: Tensor,
    group: int,
    window: int,
) -> Tensor:
    """Causal attention after rotary embedding.

    Args:
        q: [1, H, Nt, D].
        k: [1, HK, Nt, D].
        v: [1, HK, Nt, D].
        rotation: cosines and sines, [1, Nt, D] each.
        positions: [1, Nt] int64.
        group: H / HK.
        window: keys that a row sees, 0 is all.
    Returns:
        [1, Nt, H · D].
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

    q, k = apply_rotary_pos_emb(q, k, *rotation)
    k, v = repeat_kv(k, group), repeat_kv(v, group)
    if window:
        keys, queries = positions[:, None, None, :], positions[:, None, :, None]
        mask = (keys <= queries) & (keys > queries - window)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    else:
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attended.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """Of Llama, or of Qwen3 where queries and keys are normalized."""

    def __init__(self, spec: DecoderSpec, index: int) -> None:
        super().__init__()
        width, eps = spec.width, spec.config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(spec, index, width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(spec, index)

    def forward(self, x: Tensor, positions: Tensor, rotation: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, rotation)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    def __init__(self, spec: DecoderSpec, index: int, columns: int) -> None:
        super().__init__()
        config, name = spec.config, f"layers.{index}.self_attn"
        self.head_dim, self.window = int(config.head_dim), spec.windows[index]
        self.group = config.num_attention_heads // config.num_key_value_heads
        size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = linear_of(spec, f"{name}.q_proj", columns, size)
        self.k_proj = linear_of(spec, f"{name}.k_proj", columns, kv_size)
        self.v_proj = linear_of(spec, f"{name}.v_proj", columns, kv_size)
        self.o_proj = linear_of(spec, f"{name}.o_proj", size, spec.width)
        eps = config.rms_norm_eps
        self.q_norm = RMSNorm(self.head_dim, eps) if spec.has_qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, eps) if spec.has_qk_norm else nn.Identity()

    def forward(self, x: Tensor, positions: Tensor, rotation: Any) -> Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        return self.o_proj(attend(q, k, v, rotation, positions, self.group, self.window))


def linear_of(spec: HasTensors, name: str, columns: int, rows: int) -> nn.Linear:
    """With a bias where the checkpoint has one."""
    return nn.Linear(columns, rows, bias=f"{name}.bias" in spec.tensors)


def columns_of_ids(spec: LayeredSpec) -> Tensor | None:
    """[V] int64, the column of the logits of each id of the target: Vd, one past all, for none.

    None where the head has a row for every id, in their order.
    """
    ids = spec.target_ids
    if ids is None:
        return None
    columns = torch.full((spec.target.vocab_size,), spec.draft_vocab_size)
    return columns.index_put((ids.to(columns.device),), torch.arange(spec.draft_vocab_size))


def by_target_ids(logits: Tensor, columns: Tensor | None) -> Tensor:
    """Logits [..., V] by the target's ids, before noise is added, which goes by them.

    Args:
        logits: [..., Vd].
        columns: see `columns_of_ids`; of ids without one the logits are -inf.
    """
    if columns is None:
        return logits
    return F.pad(logits, (0, 1), value=float("-inf")).index_select(-1, columns)


def fill_buffers(head: Any, module: Any) -> None:
    """Fill the buffers of a part of a head that was made on the meta device.

    Args:
        head: has `spec`, `columns` and `rotary_emb`.
        module: it, or its rotary embedding; others are left as they are.
    """
    with torch.device("cpu"):
        if type(module) is type(head) and module.columns is not None:
            module.columns.copy_(columns_of_ids(module.spec))
        elif type(module) is type(head.rotary_emb):
            fresh = type(module)(module.config)
            module.inv_freq.copy_(fresh.inv_freq)
            module.original_inv_freq.copy_(fresh.original_inv_freq)
