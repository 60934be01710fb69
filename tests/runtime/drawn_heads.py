"""Targets of six tokens, and random drafts of every kind for them, with the formulas of each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import models
from tests.adapters import adapted, save_adapter
from tests.assistants import (
    ASSISTANT_CASES,
    AssistantReference,
    TargetRows,
    write_assistant,
)
from tests.assistants import draw_tensors as draw_assistant
from tests.block_heads import BLOCK_CASES, write_block
from tests.block_heads import draw_tensors as draw_block
from tests.block_reference import BlockReference
from tests.draft_kinds.domino import DOMINO_CASES, DominoReference, write_domino
from tests.draft_kinds.pard import PardReference
from tests.draft_kinds.peagle import PEAGLE_CASES, PeagleReference, Read, draw_peagle, write_peagle
from tests.draft_kinds.test_hydra import HYDRA_CASES, HydraReference, write_hydra
from tests.draft_kinds.test_hydra import draw_tensors as draw_hydra
from tests.draft_kinds.xpress import XPRESS_CASES, XPressReference, write_xpress
from tests.head_reference import Reference, hidden_states
from tests.heads import CASES, WIDTH, write_head
from tests.heads import draw_tensors as draw_head
from tests.kernels.distribution import VOCAB
from tests.lilicorr_reference import LiLiCorrCase
from tests.medusa_heads import MEDUSA_CASES, MedusaReference, write_medusa
from tests.medusa_heads import draw_tensors as draw_medusa
from tests.mtp import MtpReference
from tests.runtime.head_draws import Head, fitted

LAYERS, PLACES = 4, (2, 3)
# kind → a head with logits for some of the target's tokens, where the layout has that
HEADS = {
    "eagle3": replace(
        CASES["speculators-3.1"],
        rows=4,
        vocab=VOCAB,
        boundaries=PLACES,
        config={"norm_output": True, "eagle_aux_hidden_state_layer_ids": list(PLACES)},
    )
}
# likes what the target does: whatever it reads in place of what it has to, it proposes worse tokens
FITTED = "eagle3-fitted"
HEADS[FITTED] = HEADS["eagle3"]
JETSPEC = "jetspec"
BLOCKS = {
    "dflash": replace(
        BLOCK_CASES["z-lab"],
        rows=VOCAB,
        vocab=VOCAB,
        boundaries=PLACES,
        config={"num_target_layers": LAYERS, "block_size": 5},
    ),
    # a causal block
    JETSPEC: replace(
        BLOCK_CASES["jetspec"],
        size=5,
        rows=VOCAB,
        vocab=VOCAB,
        boundaries=PLACES,
        config={"num_target_layers": LAYERS},
        nested={"block_size": 5, "causal_head": True},
    ),
    "dspark": replace(BLOCK_CASES["dspark-speculators"], rows=4, vocab=VOCAB, boundaries=PLACES),
    # what is added for the token before depends on a row's hidden state, or on all tokens before
    "dspark-gated": replace(
        BLOCK_CASES["dspark-gated"],
        rows=VOCAB,
        vocab=VOCAB,
        boundaries=PLACES,
        config={"num_target_layers": LAYERS, "block_size": 4},
    ),
    "dspark-rnn": replace(BLOCK_CASES["dspark-rnn"], rows=4, vocab=VOCAB, boundaries=PLACES),
    # among some tokens of each row alone, by the token before, or by which of them it is
    "dflash2": replace(
        BLOCK_CASES["dflash2"],
        rows=VOCAB,
        vocab=VOCAB,
        boundaries=PLACES,
        candidates=4,
        config={"is_causal": False, "num_target_layers": LAYERS},
    ),
    "lilicorr": replace(
        BLOCK_CASES["lilicorr"],
        rows=VOCAB,
        vocab=VOCAB,
        boundaries=PLACES,
        lilicorr=LiLiCorrCase(width=12, layers=2, heads=3, scale=1.5),
        config={"block_size": 5, "num_target_layers": LAYERS},
    ),
}
DOMINOS = {
    "domino": replace(
        DOMINO_CASES["domino"],
        rows=VOCAB,
        vocab=VOCAB,
        boundaries=PLACES,
        config={"num_target_layers": LAYERS, "block_size": 5},
    )
}
# one of its rows follows the token before the newest one
XPRESSES = {"xpress": replace(XPRESS_CASES["xpress"], rows=4, vocab=VOCAB, boundaries=PLACES)}
MEDUSA = "medusa"
# with logits for some of the target's tokens, of rows in another order
MEDUSAS = {MEDUSA: replace(MEDUSA_CASES["vllm"], kept=4, rows=4, vocab=VOCAB, boundaries=(LAYERS,))}
MTP = "glm4_moe"
# heads that read the tokens drafted before, and the hidden states of all tokens
HYDRAS = {
    "hydra": replace(HYDRA_CASES["mlp"], vocab=VOCAB, boundaries=(LAYERS,)),
    "hydra_prefix": replace(HYDRA_CASES["prefix"], vocab=VOCAB, boundaries=(LAYERS,)),
}
# reads tokens and masks alone; its mask is none of the target's ids
PARD = "pard"
PARD_SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 48, "head_dim": 8, "vocab_size": VOCAB + 2,
    "pard_token": VOCAB + 1,
}  # fmt: skip
# the mask is one of the target's ids, as all that it reads are
PEAGLES = {
    "peagle": replace(
        PEAGLE_CASES["speculators-peagle"],
        rows=4,
        vocab=VOCAB,
        boundaries=PLACES,
        config={
            **PEAGLE_CASES["speculators-peagle"].config,
            "eagle_aux_hidden_state_layer_ids": list(PLACES),
            "mask_token_id": VOCAB - 1,
        },
    )
}
# over the target's own cache
ASSISTANTS = {"gemma4_assistant": replace(ASSISTANT_CASES["llama"], vocab=VOCAB)}
# an adapter of the target, through which noise goes
UNO, UNO_DRAFT = "uno", "uno_a0"
KINDS = (
    "eagle3", "mtp", *BLOCKS, *DOMINOS, *XPRESSES, MEDUSA, *HYDRAS, PARD, *PEAGLES, *ASSISTANTS,
    UNO,
)  # fmt: skip
# of the target
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
}  # fmt: skip


def write_draft(kind: str, path: Path, target: Callable[[], Any]) -> object:
    """Write a checkpoint of it.

    Args:
        target: that it is fitted to, of those that are.
    """
    if kind in BLOCKS:
        return write_block(path, BLOCKS[kind])
    if kind in DOMINOS:
        return write_domino(path, DOMINOS[kind])
    if kind in XPRESSES:
        return write_xpress(path, XPRESSES[kind])
    if kind in MEDUSAS:
        return write_medusa(path, MEDUSAS[kind])
    if kind in HYDRAS:
        return write_hydra(path, HYDRAS[kind])
    if kind in PEAGLES:
        return write_peagle(path, PEAGLES[kind])
    if kind == PARD:
        return models.save_tiny("qwen3", path, 31, **PARD_SIZES)
    if kind in ASSISTANTS:
        return write_assistant(path, ASSISTANTS[kind])
    if kind == UNO:
        return save_adapter(path, target())
    write_head(path, HEADS[kind])
    if kind == FITTED:
        tensors = tensors_of(kind, target())
        save_file(tensors, path / "model.safetensors")
    return path


def tensors_of(kind: str, target: Any) -> dict[str, Tensor]:
    """Of a head's checkpoint."""
    tensors = draw_head(HEADS[kind])
    return fitted(HEADS[kind], tensors, target) if kind == FITTED else tensors


def head_of(kind: str, target: Any, adapter: Path | None = None) -> Head:
    """Logits of a reference of the head: by formulas, or by transformers.

    Args:
        adapter: of Uno.
    """
    ends = (target.get_input_embeddings(), target.get_output_embeddings())
    embedding, head = (end.weight.detach() for end in ends)
    if kind == UNO:
        assert adapter is not None
        return UnoReference(target, adapter).logits
    if kind == PARD:
        model = PardReference(models.build_model("qwen3", 31, **PARD_SIZES), VOCAB)
        return lambda tokens, path: model.after(torch.tensor(tokens[:-1]), tokens[-1], path)
    if kind in PEAGLES:
        masked = PeagleReference(PEAGLES[kind], draw_peagle(PEAGLES[kind]), embedding)

        def logits_of_masks(tokens: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
            taps = hidden_states(target, tokens[:-1], masked.case.boundaries)
            return masked.after(Read(taps, list(tokens)), tokens[-1], path)

        return logits_of_masks
    if kind in ASSISTANTS:
        case, rows = ASSISTANTS[kind], TargetRows(copy.deepcopy(target).double())
        assistant = AssistantReference(case, draw_assistant(case), rows)
        return lambda tokens, path: assistant.logits(tokens, path).float()
    if kind not in ("mtp", *HEADS):
        block: Any
        if kind in MEDUSAS:
            block = MedusaReference(MEDUSAS[kind], draw_medusa(MEDUSAS[kind]))
        elif kind in DOMINOS:
            block = DominoReference(DOMINOS[kind], DOMINOS[kind].tensors(), embedding, head)
        elif kind in XPRESSES:
            block = XPressReference(XPRESSES[kind], XPRESSES[kind].tensors(), embedding, head)
        elif kind in HYDRAS:
            block = HydraReference(HYDRAS[kind], draw_hydra(HYDRAS[kind]), embedding)
        else:
            block = BlockReference(BLOCKS[kind], draw_block(BLOCKS[kind]), embedding, head)
        boundaries = block.case.boundaries

        def logits(tokens: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
            taps = hidden_states(target, tokens[:-1], boundaries)
            more = (tokens[-2],) if kind in XPRESSES else ()
            return block.after(taps, tokens[-1], path, *more)

        return logits
    reference: Reference | MtpReference
    if kind == "mtp":
        reference = MtpReference(target, MTP)
    else:
        reference = Reference(HEADS[kind], tensors_of(kind, target), embedding)

    def logits_of_rows(tokens: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        taps = hidden_states(target, tokens[:-1], reference.case.boundaries)
        return reference.logits(taps, tokens, path)

    return logits_of_rows


class UnoReference:
    """Noise after the newest token, which goes through an adapter."""

    def __init__(self, target: Any, adapter: Path) -> None:
        self._target, self._adapter = target, adapter

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        """[V] after tokens and a path of drafted ones, of which only the length counts."""
        places = range(len(tokens), len(tokens) + len(path))
        own = [place * 2654435761 % 2**32 * VOCAB >> 32 for place in places]
        rows = torch.full((len(tokens) + len(own),), -1)
        rows[len(tokens) :] = 0
        with torch.no_grad(), adapted(self._target, {0: self._adapter}, rows):
            return self._target(torch.tensor([[*tokens, *own]]), use_cache=False).logits[0, -1]
