"""Random checkpoints of block drafters (DFlash 1 and 2, DSpark), in the published layouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.drafters.block import OF_ROW, OF_TOKEN
from tests.heads import HEADS, INNER, KV_HEADS, LAYERS, VOCAB, WIDTH, layer_config, write_files
from tests.lilicorr_reference import LiLiCorrCase, early

MASK = 5


@dataclass(frozen=True)
class BlockCase:
    """A drafter to write.

    Args:
        layout: `z-lab`, `speculators`, `DeepSpec` or `SpecForge`.
        size: B.
        width: d.
        rows: Vd.
        vocab: V.
        boundaries: that its taps are, in order.
        config: keys at the top of config.json.
        nested: keys of `dflash_config`.
        from_anchor: what its rows predict, see `BlockDraft`.
        is_causal: what they see in layers with a window, or in all.
        window: of each layer, 0 is none; see `BlockSpec`.
        is_mixed: the last layer is a full one, which is not causal; the others have the window.
        biases: projections of the first layer that have one.
        kind: `dflash`, `dspark`, `dflash2` or `lilicorr`.
        rank: r, of what DSpark and DFlash 2 add for the token before.
        bias_kind: how that depends on more than this token.
        has_confidence: it has a head that says how likely tokens are accepted.
        confidence_reads_token: that head reads the token before, too.
        candidates: K of DFlash 2.
        conv: rows that its convolutions add up, and channels that share a factor.
        scale: what its logits are multiplied with, and what they stay below.
        lilicorr: its transformer over candidates.
    """

    layout: str
    size: int = 5
    width: int = WIDTH
    rows: int = VOCAB
    vocab: int = VOCAB
    boundaries: tuple[int, ...] = (2, 5)
    config: dict[str, Any] = field(default_factory=dict)
    nested: dict[str, Any] = field(default_factory=dict)
    layer: dict[str, Any] = field(default_factory=dict)
    num_layers: int = 2
    from_anchor: bool = False
    is_causal: bool = False
    window: int = 0
    is_mixed: bool = False
    biases: tuple[str, ...] = ()
    kind: str = "dflash"
    rank: int = 0
    bias_kind: str = "vanilla"
    has_confidence: bool = False
    confidence_reads_token: bool = True
    candidates: int = 0
    conv: tuple[int, int] | None = None
    scale: tuple[float, float] | None = None
    lilicorr: LiLiCorrCase | None = None

    @property
    def head_dim(self) -> int:
        return self.layer.get("head_dim", self.width // HEADS)

    @property
    def windows(self) -> tuple[int, ...]:
        last = 0 if self.is_mixed else self.window
        return (*[self.window] * (self.num_layers - 1), last)

    @property
    def causal_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_layers - 1)) if self.is_mixed and self.is_causal else ()

    @property
    def is_anchored(self) -> bool:
        """Windows end at the anchor, for all rows of a block."""
        return self.layout == "speculators"

    @property
    def is_partial(self) -> bool:
        """It adds something to logits of some of the target's ids alone."""
        return self.rank > 0 and self.rows < self.vocab

    @property
    def confidence(self) -> str:
        """What that head reads, where steps ask it."""
        if not self.has_confidence or not self.rank:
            return ""
        return OF_TOKEN if self.confidence_reads_token else OF_ROW

    @property
    def hidden_columns(self) -> int:
        """Of hidden states after its logits."""
        reads = self.confidence or self.lilicorr or self.bias_kind != "vanilla"
        return self.width if reads else 0

    def sees_up_to_itself(self, layer: int) -> bool:
        """Whether rows of a block see no later one there."""
        return layer in self.causal_layers if self.is_mixed else self.is_causal

    @property
    def has_own_ends(self) -> bool:
        """Whether embedding and head are its own."""
        return self.layout not in ("z-lab", "SpecForge")


_SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
# DSpark, of which the kind of bias differs
_SPECULATORS = BlockCase(
    "speculators",
    size=4,
    width=24,
    rows=60,
    config={"block_size": 4, "target_hidden_size": WIDTH},
    layer={"head_dim": 8},
    num_layers=1,
    from_anchor=True,
    kind="dspark",
    rank=5,
)
BLOCK_CASES = {
    "z-lab": BlockCase("z-lab", config={"num_target_layers": LAYERS, "block_size": 5}),
    # in a later layout all keys are in one place
    "z-lab-causal": BlockCase(
        "z-lab",
        boundaries=(6, 2, 3),
        nested={"block_size": 5},
        layer={**_SLIDING, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        is_causal=True,
        window=6,
        biases=("self_attn.q_proj", "self_attn.v_proj"),
    ),
    "speculators": BlockCase(
        "speculators",
        size=4,
        width=24,
        rows=60,
        config={"block_size": 4, "target_hidden_size": WIDTH, "sample_from_anchor": True},
        layer={"head_dim": 8},
        num_layers=1,
        from_anchor=True,
    ),
    "speculators-sliding": BlockCase(
        "speculators",
        config={"block_size": 5, "sliding_window_non_causal": True, "shift_label": False},
        layer=_SLIDING,
        window=6,
    ),
    # as most of z-lab's drafters are
    "z-lab-mixed": BlockCase(
        "z-lab",
        config={"block_size": 5},
        layer={**_MIXED, "sliding_window": 6},
        is_causal=True,
        window=6,
        is_mixed=True,
    ),
    # a window that ends at the anchor may be shorter than a block
    "speculators-mixed": BlockCase(
        "speculators",
        size=4,
        config={"block_size": 4, "sample_from_anchor": True},
        layer={**_MIXED, "sliding_window": 3},
        from_anchor=True,
        is_causal=True,
        window=3,
        is_mixed=True,
    ),
    "dspark-deepspec": BlockCase(
        "DeepSpec",
        boundaries=(0, 3, 6),
        config={"num_target_layers": LAYERS, "block_size": 4},
        size=4,
        from_anchor=True,
        kind="dspark",
        rank=6,
        has_confidence=True,
    ),
    "dspark-speculators": _SPECULATORS,
    "dspark-gated": BlockCase(
        "DeepSpec",
        config={"num_target_layers": LAYERS, "block_size": 4},
        size=4,
        num_layers=1,
        from_anchor=True,
        kind="dspark",
        rank=6,
        bias_kind="gated",
    ),
    # a confidence head that reads no token, of which only its weight in the loss tells
    "dspark-specforge": BlockCase(
        "SpecForge",
        config={"num_target_layers": LAYERS, "block_size": 4},
        nested={"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0},
        size=4,
        num_layers=1,
        from_anchor=True,
        kind="dspark",
        rank=6,
        bias_kind="gated",
        has_confidence=True,
        confidence_reads_token=False,
    ),
    # the first ones that it wrote are named after themselves; their layers are Qwen3's
    "dspark-specforge-first": BlockCase(
        "SpecForge",
        config={"num_target_layers": LAYERS, "block_size": 4, "model_type": "dspark"},
        nested={"projector_type": "dspark", "attention_mode": "gqa"},
        size=4,
        num_layers=1,
        from_anchor=True,
        kind="dspark",
        rank=6,
    ),
    "dspark-rnn": replace(_SPECULATORS, bias_kind="rnn"),
    # DFlash's files, of which one key says that a block is causal
    "jetspec": BlockCase(
        "z-lab",
        size=16,
        config={"num_target_layers": LAYERS},
        nested={"block_size": 16, "causal_head": True},
        is_causal=True,
    ),
    # as published: windows of all layers, which no row of a block is outside of
    "dflash2": BlockCase(
        "z-lab",
        config={"is_causal": False, "num_target_layers": LAYERS},
        nested={"block_size": 5},
        layer=_SLIDING,
        window=6,
        kind="dflash2",
        rank=6,
        bias_kind="selector",
        candidates=7,
        conv=(2, 8),
    ),
    # all keys in one place; a block in which more than one row is read
    "dflash2-speculators": BlockCase(
        "speculators",
        size=4,
        width=24,
        config={"block_size": 4, "target_hidden_size": WIDTH},
        layer={"head_dim": 8, "layer_types": ["sliding_attention"], "sliding_window": 3},
        num_layers=1,
        window=3,
        kind="dflash2",
        rank=5,
        bias_kind="selector",
        candidates=4,
        conv=(3, 4),
        scale=(1.5, 3.0),
    ),
    # a causal block, tokens from the anchor on, and no convolutions
    "dflash2-plain": BlockCase(
        "speculators",
        size=4,
        config={
            "block_size": 4,
            "sample_from_anchor": True,
            "sliding_window_non_causal": False,
        },
        layer=_SLIDING,
        window=6,
        from_anchor=True,
        is_causal=True,
        kind="dflash2",
        rank=3,
        bias_kind="selector",
        candidates=5,
    ),
    "lilicorr": BlockCase(
        "z-lab",
        config={"block_size": 5, "num_target_layers": LAYERS},
        kind="lilicorr",
        lilicorr=LiLiCorrCase(width=12, layers=2, heads=3),
    ),
    # as wide as the drafter, with convolutions; of a causal block, from an early file
    "lilicorr-conv": BlockCase(
        "z-lab",
        nested={"block_size": 5, "causal": True},
        num_layers=1,
        is_causal=True,
        kind="lilicorr",
        conv=(2, 16),
        lilicorr=LiLiCorrCase(count=8, middle=1.5, is_early=True),
    ),
    # tokens from the first mask on, and nothing added
    "dspark-plain": BlockCase(
        "speculators",
        config={"block_size": 5, "sample_from_anchor": False},
        kind="dspark",
        has_confidence=True,
    ),
}


def write_block(directory: Path, case: BlockCase, seed: int = 0) -> dict[str, Tensor]:
    """Write a drafter; returns its tensors."""
    tensors = draw_tensors(case, seed)
    if case.lilicorr and case.lilicorr.is_early:
        tensors = early(tensors)
    return write_files(directory, config_of(case), tensors)


def config_of(case: BlockCase) -> dict[str, Any]:
    """Contents of config.json."""
    layer = layer_config(case, "qwen3")
    parts: dict[str, Any] = {}
    if case.kind == "dflash2":
        parts = {"selector_rank": case.rank, "selector_top_k": case.candidates}
    if case.conv:
        parts |= dict(zip(("conv_kernel_size", "conv_group_size"), case.conv, strict=True))
    if case.lilicorr:
        parts |= case.lilicorr.config()
    if case.scale:
        keys = ("output_multiplier", "final_logit_softcapping")
        parts |= dict(zip(keys, case.scale, strict=True))
    if case.kind == "dspark":
        spark = {"markov_rank": case.rank, "enable_confidence_head": case.has_confidence}
        spark |= {"markov_head_type": case.bias_kind, "confidence_head_with_markov": case.rank > 0}
    else:
        spark = {}
    ids = [boundary - 1 for boundary in case.boundaries]
    if case.layout == "SpecForge":
        own = {"target_layer_ids": ids, "mask_token_id": MASK, "markov_rank": case.rank}
        own |= {"markov_head_type": case.bias_kind, **case.nested}
        named = {"architectures": ["DSparkDraftModel"], "dflash_config": own}
        return {**named, **layer, **case.config}
    if case.layout == "DeepSpec":
        own = {"target_layer_ids": ids, "mask_token_id": MASK, "num_anchors": 8}
        return {"architectures": ["Qwen3DSparkModel"], **layer, **own, **spark, **case.config}
    if case.layout == "speculators":
        return {
            "architectures": ["DSparkSpeculator" if spark else "DFlashSpeculator"],
            "speculators_model_type": case.kind,
            "draft_vocab_size": case.rows,
            **spark,
            **parts,
            "transformer_layer_config": layer,
            "aux_hidden_state_layer_ids": list(case.boundaries),
            "mask_token_id": MASK,
            **case.config,
        }
    nested = {"mask_token_id": MASK, "target_layer_ids": ids, **parts, **case.nested}
    if "rope_parameters" in case.layer:
        del layer["rope_theta"]
    classes = {"dflash2": "DFlash2DraftModel", "lilicorr": "LiLiCorrDraftModel"}
    named = classes.get(case.kind, "DFlashDraftModel")
    return {"architectures": [named], **layer, "dflash_config": nested, **case.config}


def draw_tensors(case: BlockCase, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of the checkpoint, drawn from the seed, with norms that none goes unnoticed."""
    d, size = case.width, case.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, len(case.boundaries) * WIDTH), "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }  # fmt: skip
    for i in range(case.num_layers):
        own = {
            "input_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (HEADS * size, d),
            "self_attn.k_proj.weight": (KV_HEADS * size, d),
            "self_attn.v_proj.weight": (KV_HEADS * size, d),
            "self_attn.o_proj.weight": (d, HEADS * size),
            "self_attn.q_norm.weight": (size,),
            "self_attn.k_norm.weight": (size,),
            "post_attention_layernorm.weight": (d,),
            "mlp.gate_proj.weight": (INNER, d),
            "mlp.up_proj.weight": (INNER, d),
            "mlp.down_proj.weight": (d, INNER),
        }
        if i == 0:
            own |= {f"{key}.bias": own[f"{key}.weight"][:1] for key in case.biases}
        shapes |= {f"layers.{i}.{key}": shape for key, shape in own.items()}
    if case.has_own_ends:
        shapes |= {"embed_tokens.weight": (case.vocab, d), "lm_head.weight": (case.rows, d)}
    for i in range(case.num_layers) if case.conv else ():
        taps, group = case.conv
        for part in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{i}.{part}.base_kernel"] = (2, taps, d)
            columns = 2 * taps * d // group
            shapes[f"layers.{i}.{part}.kernel_projection.weight"] = (columns, d)
    if case.lilicorr:
        shapes |= case.lilicorr.shapes(d, case.size)
    if case.bias_kind == "selector":
        for name in ("predecessor", "successor"):
            shapes[f"candidate_selector.{name}_codebook"] = (case.vocab, case.rank)
        shapes["candidate_selector.hidden_projection.weight"] = (case.rank, d)
    elif case.rank:
        shapes["markov_head.markov_w1.weight"] = (case.vocab, case.rank)
        shapes["markov_head.markov_w2.weight"] = (case.rows, case.rank)
    if case.bias_kind == "gated":
        shapes["markov_head.gate_proj.weight"] = (case.rank, d + case.rank)
        shapes["markov_head.gate_proj.bias"] = (case.rank,)
    if case.bias_kind == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * case.rank, 2 * case.rank + d)
        shapes["markov_head.joint_proj.bias"] = (3 * case.rank,)
    if case.has_confidence:
        columns = d + (case.rank if case.confidence_reads_token else 0)
        shapes |= {"confidence_head.proj.weight": (1, columns)}
        shapes |= {"confidence_head.proj.bias": (1,)}
    generator = torch.Generator().manual_seed(70 + seed)
    tensors = {}
    for key, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        # what is added for the token before counts as much as the rest
        scale = (
            0.7
            if "lilicorr" in key or "markov" in key or "codebook" in key or "base_kernel" in key
            else 0.25
        )
        tensors[key] = 1.0 + 0.4 * values if "norm" in key else scale * values
    if case.rows < case.vocab:
        kept = torch.randperm(case.vocab, generator=generator)[: case.rows].sort().values
        tensors["d2t"] = kept - torch.arange(case.rows)
        tensors["t2d"] = torch.zeros(case.vocab, dtype=torch.bool).index_fill(0, kept, True)
    return tensors
