"""What configurations and files of LiLiCorr drafters say, beside those of DFlash.

Every key but `lilicorr_enabled` is needed: some change no shape, and nothing would tell.
Sources: NVIDIA/Model-Optimizer modelopt/torch/speculative; sgl-project/sglang models/lilicorr.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specc.drafters.block import BlockDraft
from specc.drafters.lilicorr import FEATURES, PREFIX, LiLiCorrDraft
from specc.errors import HeadError
from specc.passes.drafters.block_parts import ScoreFiles, Shapes, ShapesOf, read_flag, required

_DO = "correct config.json, or download the drafter again"
_COUNTS = tuple(
    f"lilicorr_{key}" for key in ("candidate_topk", "num_layers", "num_heads", "factor_dim")
)
_WIDTH, _ENABLED = "lilicorr_hidden_size", "lilicorr_enabled"
_NUMBERS = tuple(f"lilicorr_{key}" for key in ("mlp_ratio", "logit_scale", "vector_eps"))
KEYS = (*_COUNTS, _WIDTH, _ENABLED, *_NUMBERS)
# candidates that other programs take at most
_MOST_CANDIDATES = 64


def read_lilicorr(
    values: Mapping[str, Any], block: BlockDraft, layers: Any, name: str
) -> tuple[LiLiCorrDraft, ShapesOf]:
    """The drafter, and the shapes of its transformer's tensors, by name.

    Args:
        values: keys of its configuration.
        block: what its pass fills.
        layers: of transformers, of the layers of that pass.
        name: of the drafter, for errors.
    Raises:
        HeadError: a key is missing, or its value no transformer's.
    """
    if read_flag(values, (_ENABLED,), name) is False:
        raise HeadError(f"{name}: config.json: {_ENABLED} is False", "true", _DO)
    count, num_layers, num_heads, factors = required(values, _COUNTS, name)
    ratio, scale, eps = (_number(values, key, name) for key in _NUMBERS)
    width, inner = int(layers.hidden_size), values.get(_WIDTH)
    if type(inner) is not int or inner < 0:
        raise HeadError(
            f"{name}: config.json: {_WIDTH} is {inner!r:.40}",
            "a number, or 0 for the hidden size",
            _DO,
        )
    inner = inner or width
    if inner % num_heads or count > _MOST_CANDIDATES:
        raise HeadError(
            f"{name}: config.json: {inner} columns for {num_heads} heads, {count} candidates",
            f"a multiple of the heads, and {_MOST_CANDIDATES} candidates or fewer",
            _DO,
        )
    if block.from_anchor:
        raise HeadError(
            f"{name}: config.json: sample_from_anchor true, of LiLiCorr",
            "false: each mask proposes the token in its own place",
            "pass another draft",
        )
    fields = asdict(block) | {
        "candidates": count,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "inner_width": inner,
        "scale": scale,
        "vector_eps": eps,
        "norm_eps": float(layers.rms_norm_eps),
    }
    draft = LiLiCorrDraft(**fields)
    shapes = _shapes(draft, width, factors, int(inner * ratio))
    return draft, lambda num_rows, vocab_size: shapes


def _number(values: Mapping[str, Any], key: str, name: str) -> float:
    value = values.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < float(value or 0) < 1e6:
        raise HeadError(f"{name}: config.json: {key} is {value!r:.40}", "a number above 0", _DO)
    return float(value or 0)


def _shapes(draft: LiLiCorrDraft, width: int, factors: int, middle: int) -> Shapes:
    """Of the transformer's tensors: d, f, and columns of an MLP's middle."""
    w, slots, count = draft.inner_width, draft.num_proposed, draft.candidates
    linear = {
        "pass_hidden_proj": (w, width),
        "context_proj": (w, width),
        "feature_mlp.up_proj": (w, FEATURES),
        "feature_mlp.down_proj": (w, w),
        "factor_input_proj": (w, 3 * w),
        "out_head": (factors, w),
        "in_head": (factors, w),
        "anchor_out_head": (factors, w),
    }
    if not draft.is_as_wide:
        linear["token_proj"] = (w, width)
    shapes: Shapes = {
        "feature_norm.weight": (FEATURES,),
        "feature_norm.bias": (FEATURES,),
        "slot_embedding": (1, 1, slots, 1, w),
        "rank_embedding": (1, 1, 1, count, w),
        "relative_slot_bias": (draft.num_heads, 2 * draft.size - 1),
        "same_slot_bias": (draft.num_heads,),
        "output_norm.weight": (w,),
        "anchor_norm.weight": (w,),
    }
    for layer in range(draft.num_layers):
        prefix = f"layers.{layer}"
        linear |= {
            f"{prefix}.attn.out_proj": (w, w),
            f"{prefix}.mlp.up_proj": (middle, w),
            f"{prefix}.mlp.down_proj": (w, middle),
        }
        shapes |= {
            f"{prefix}.attn_norm.weight": (w,),
            f"{prefix}.attn.in_proj_weight": (3 * w, w),
            f"{prefix}.attn.in_proj_bias": (3 * w,),
            f"{prefix}.mlp_norm.weight": (w,),
        }
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {f"{PREFIX}{name}": shape for name, shape in shapes.items()}


def earlier_name(tensor: str) -> str:
    """What early files call a tensor of the transformer, whose MLPs are numbered lists there."""
    if not tensor.startswith(PREFIX):
        return tensor
    for name, number in (
        ("feature_norm.", "feature_mlp.0."),
        ("feature_mlp.up_proj.", "feature_mlp.1."),
        ("feature_mlp.down_proj.", "feature_mlp.3."),
        (".mlp.up_proj.", ".mlp.0."),
        (".mlp.down_proj.", ".mlp.2."),
    ):
        tensor = tensor.replace(name, number)
    return tensor


FILES = ScoreFiles(read_lilicorr, KEYS, "lilicorr", may_convolve=True)
