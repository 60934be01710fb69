"""Domino and XPress from their files: what they are, which do not fit, and logits along a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.drafters.domino import DominoDraft
from specc.drafters.scored_block import ScoredBlock
from specc.drafters.xpress import XPressDraft
from specc.errors import HeadError
from specc.passes.drafters.block import CompilerBlock
from specc.passes.drafters.block_spec import BlockSpec
from specc.passes.drafters.head_spec import TargetFacts
from specc.passes.drafters.recognise import recognise
from specc.passes.drafters.registry import drafter_of_files
from tests.block_heads import MASK
from tests.draft_kinds.domino import DOMINO_CASES, DominoCase, DominoReference
from tests.draft_kinds.xpress import XPRESS_CASES, XPressReference
from tests.heads import LAYERS, VOCAB, WIDTH, write_files

TARGET = TargetFacts("the target", WIDTH, LAYERS, VOCAB)
CASES: dict[str, Any] = {
    **DOMINO_CASES,
    # as few rows as a file of z-lab may have
    "domino-partial": replace(DOMINO_CASES["domino"], rows=60),
    **XPRESS_CASES,
}


def written(path: Path, name: str) -> Path:
    case = CASES[name]
    tensors = case.tensors()
    if case.rows < VOCAB and not case.has_own_ends:
        tensors["lm_head.weight"] = torch.randn(case.rows, case.width)
    write_files(path, case.written(), tensors)
    return path


def read(path: Path) -> tuple[BlockSpec, ScoredBlock]:
    spec = recognise(path, TARGET)
    assert isinstance(spec, BlockSpec)
    assert isinstance(spec.block, ScoredBlock)
    return spec, spec.block


@pytest.mark.parametrize("name", CASES)
def test_what_files_say(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    spec, block = read(written(tmp_path, name))
    assert (spec.kind, spec.layout, spec.boundaries) == (case.kind, case.layout, case.boundaries)
    is_domino = isinstance(case, DominoCase)
    wanted = (DominoDraft if is_domino else XPressDraft)(
        case.size, MASK, case.from_anchor, case.is_causal, is_biased=True, kind=case.kind,
        is_partial=case.rows < VOCAB, hidden_columns=case.width,
        inner_width=case.state if is_domino else case.columns,
    )  # fmt: skip
    assert block == wanted
    assert type(block).from_json(block.to_json()) == block
    assert block.num_proposed == case.size - (is_domino or not case.from_anchor)
    kind = drafter_of_files(spec)
    assert isinstance(kind, CompilerBlock)
    weights, tables = kind.step_weights(spec, torch.float32)
    assert {*weights, *tables} == set(block.tensors.values())
    assert ([*tables] == [block.columns]) == block.is_partial
    assert f"{block.num_proposed} tokens a pass" in "\n".join(spec.describe())


@pytest.mark.parametrize("name", CASES)
def test_logits_along_a_text(name: str, tmp_path: Path) -> None:
    """As `specc tune` asks for them: after the root, and after each token that came."""
    case = CASES[name]
    spec, block = read(written(tmp_path, name))
    generator = torch.Generator().manual_seed(2)
    taps, embedding, head = (
        torch.randn(shape, generator=generator)
        for shape in ((7, len(case.boundaries) * WIDTH), (VOCAB, WIDTH), (case.rows, WIDTH))
    )
    of = DominoReference if isinstance(case, DominoCase) else XPressReference
    reference: Any = of(case, case.tensors(), embedding, head)
    rows = torch.cat([reference.rows(taps, 9), reference.hidden(taps, 9)], 1)
    before, tokens = 17, [9, 3, 50, 21][: block.num_proposed]
    made = rows[block.logit_places(0, block.num_proposed)]
    kind = drafter_of_files(spec)
    _, tables = kind.step_weights(spec, torch.float32)
    found = block.logits_along({**reference.w, **tables}, made, tokens, before)
    more = () if isinstance(case, DominoCase) else (before,)
    for count in range(len(tokens)):
        wanted = reference.after(taps, 9, tokens[1 : count + 1], *more)
        torch.testing.assert_close(found[count], wanted, atol=1e-4, rtol=1e-4)


def nested(**values: Any) -> Callable[[Any], None]:
    return lambda config: config["dflash_config"].update(values)


def top(**values: Any) -> Callable[[Any], None]:
    return lambda config: config.update(values)


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("domino", nested(shift_label=None), "no shift_label"),
        ("domino", nested(pure_draft_prefix_len=0), "pure_draft_prefix_len is 0"),
        ("domino", nested(pure_draft_prefix_len=None), "pure_draft_prefix_len is None"),
        ("domino", nested(gru_hidden_dim=None), "no gru_hidden_dim"),
        ("domino", nested(gru_hidden_dim=5), "weight_ih_l0 is [18, 32]"),
        ("domino", nested(emb_dim=None), "no emb_dim"),
        ("domino", top(emb_dim=8), "emb_dim is 8, and in dflash_config 7"),
        ("domino", nested(emb_dim=6), "embed_proj.0.weight is [7, 38]"),
        ("domino", nested(projector_type="causal_v5"), "Domino (the checkpoint has prefix_gru"),
        ("domino", nested(projector_type="dflash"), "Domino (the checkpoint has prefix_gru"),
        ("domino", nested(conv_kernel_size=2, conv_group_size=8), "conv_kernel_size is 2"),
        ("domino", nested(markov_rank=4), "markov_rank is 4"),
        ("domino", nested(selector_rank=4), "selector_rank is 4"),
        ("domino", nested(block_size=1), "block_size 1"),
        ("domino", nested(emb_dim_of=1), "dflash_config.emb_dim_of is 1"),
        ("xpress", top(xpress_rank=None), "no xpress_rank"),
        ("xpress", top(xpress_mlp_ratio=2), "mlp_gate.weight is [18, 6]"),
        ("xpress", top(block_size=4), "refiner_head.mix_l is [6, 5, 5]"),
        ("xpress", top(speculators_model_type="dflash"), "XPress (architectures: XPress"),
        (
            "xpress",
            top(speculators_model_type="dflash", architectures=["DFlashSpeculator"]),
            "XPress (the checkpoint has refiner_head",
        ),
        ("xpress", top(output_multiplier=2.0), "output_multiplier is 2.0"),
    ],
)  # fmt: skip
def test_configurations_that_do_not_fit(
    name: str, change: Callable[[Any], None], found: str, tmp_path: Path
) -> None:
    case = CASES[name]
    config = case.written()
    change(config)
    write_files(tmp_path, config, case.tensors())
    with pytest.raises(HeadError, match=re.escape(found)) as raised:
        recognise(tmp_path, TARGET)
    assert raised.value.needed
    assert raised.value.do


def test_a_missing_tensor_and_one_too_many(tmp_path: Path) -> None:
    case = CASES["domino"]
    tensors = case.tensors()
    tensors["prefix_gru.bias_ih_l0"] = torch.zeros(18)
    write_files(tmp_path, case.written(), tensors)
    with pytest.raises(HeadError, match="1 tensors that its configuration has no place for"):
        recognise(tmp_path, TARGET)
    del tensors["prefix_gru.bias_ih_l0"], tensors["embed_proj.2.weight"]
    write_files(tmp_path, case.written(), tensors)
    with pytest.raises(HeadError, match=r"embed_proj\.2\.weight is not in"):
        recognise(tmp_path, TARGET)
