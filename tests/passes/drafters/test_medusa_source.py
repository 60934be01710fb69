"""Medusa heads from their files: what they are, which do not fit, and what they compute."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.artifact.graph_io import graph_from_json, graph_to_json
from specc.errors import HeadError, SpeccError
from specc.passes.drafters.head_source import head_source
from specc.passes.drafters.head_spec import TargetFacts
from specc.passes.drafters.recognise import recognise
from specc.passes.drafters.registry import drafter_of_files
from specc.passes.frontend.trace import trace
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.pipeline import LAYERLESS_PHASES, Pipeline
from tests.heads import LAYERS, VOCAB, WIDTH
from tests.medusa_heads import MEDUSA_CASES, MedusaReference, config_of, name_of, write_medusa

TARGET = TargetFacts("the target", WIDTH, LAYERS, VOCAB)
BLOCK, BLOCKS = 4, 6


def changed(path, name, change=lambda config: None, tensors=lambda found: None):
    """Heads of `MEDUSA_CASES` of which some things are different."""
    case = MEDUSA_CASES[name]
    write_medusa(path, case)
    config = config_of(case)
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    found = load_file(path / case.file)
    tensors(found)
    save_file(found, path / case.file)
    return path


@pytest.mark.parametrize("name", MEDUSA_CASES)
def test_what_files_say(name, tmp_path):
    case = MEDUSA_CASES[name]
    tensors = write_medusa(tmp_path, case)
    spec = recognise(tmp_path, TARGET)
    assert (spec.kind, spec.layout, spec.width) == ("medusa", case.layout, WIDTH)
    # the last hidden state of transformers
    assert (spec.boundaries, spec.is_last_normed) == ((LAYERS,), True)
    assert (spec.block.size, spec.block.num_proposed) == (case.num_heads, case.num_heads)
    assert spec.block.is_flat
    assert spec.num_layers == case.num_layers
    assert set(spec.tensors.values()) == {name_of(case, key) for key in tensors} - {
        name_of(case, "ids")
    }
    assert sum(key.endswith("bias") for key in spec.tensors) == (
        case.num_heads * case.num_layers * case.has_bias
    )
    told = "\n".join(spec.describe())
    assert f"{case.kept} of {VOCAB} ids" in told
    assert f"{case.num_heads} tokens a pass" in told


@pytest.mark.parametrize("name", ["faster", "faster-file", "vllm-one"])
def test_numbers_that_files_do_not_say(name, tmp_path):
    """Tensors say how many heads there are, and how many layers they have."""

    def forget(config):
        for key in [key for key in config if key.startswith(("medusa_num", "num_"))]:
            del config[key]
        config["model_type"] = "medusa"

    spec = recognise(changed(tmp_path, name, forget), TARGET)
    case = MEDUSA_CASES[name]
    assert (spec.block.size, spec.num_layers) == (case.num_heads, case.num_layers)


def test_heads_are_told_by_their_tensors(tmp_path):
    """Where config.json says nothing, names do that no other model has."""

    def forget(config):
        config.clear()

    assert recognise(changed(tmp_path / "a", "faster", forget), TARGET).layout == "FasterDecoding"
    # in a file that nothing calls a model's
    assert recognise(changed(tmp_path / "b", "faster-file", forget), TARGET) is None
    whole = MEDUSA_CASES["vllm-one"]
    assert (
        recognise(changed(tmp_path / "c", "vllm-one", forget_kept), TARGET).layout == whole.layout
    )


def forget_kept(config):
    """All but what tensors do not say."""
    for key in config.keys() - {"truncated_vocab_size", "original_lm_head"}:
        del config[key]


def top(**values):
    return lambda config: config.update(values)


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("vllm", top(hidden_size=16), "hidden size 16; the target has 32"),
        ("vllm", top(vocab_size=64), "a target of 64 ids; the target has 96"),
        ("vllm", top(num_heads=5), "blocks.4.layers.0.weight"),
        ("vllm", top(num_heads=3), "5 tensors that its configuration has no place for"),
        ("vllm", top(num_heads="4"), "num_heads is '4'"),
        ("vllm", top(num_hidden_layers=3), "blocks.0.layers.2.weight"),
        ("vllm", top(truncated_vocab_size=50), "projections of 60 rows"),
        ("vllm", top(truncated_vocab_size=None), "projections of 60 rows"),
        ("vllm", top(truncated_vocab_size=97), "projections of 60 rows"),
        ("vllm", top(medusa_fc_bias=False), "8 tensors that its configuration has no place for"),
        ("vllm", top(medusa_fc_bias=1), "medusa_fc_bias is 1"),
        ("vllm", top(original_lm_head=True), "lm_heads.1.weight"),
        ("vllm", top(logit_scale=0.5), "logit_scale is 0.5"),
        ("vllm", top(quantization_config={}), "quantized Medusa heads"),
        ("vllm-one", top(original_lm_head=None), "lm_heads.0.weight"),
        ("vllm-one", top(medusa_fc_bias=True), "blocks.0.layers.0.bias"),
        ("vllm-one", top(truncated_vocab_size=None), "token_map is torch.int64 [60]"),
        ("faster", top(medusa_num_heads=3), "5 tensors that its configuration"),
        ("faster", top(medusa_num_layers=1), "0.1.weight"),
    ],
)  # fmt: skip
def test_configurations_that_do_not_fit(name, change, found, tmp_path):
    with pytest.raises(SpeccError, match=re.escape(found)) as raised:
        recognise(changed(tmp_path, name, change), TARGET)
    assert raised.value.needed
    assert raised.value.do


def mapped(*changes):
    def change(found):
        for place, value in changes:
            found["medusa_heads.token_map"][place] = value

    return change


def second(found, change=1.0):
    """The projection of all heads under its other name, too; one number of it is changed."""
    other = found["lm_head.weight"].clone()
    other[-1, -1] += change
    return {"lm_heads.0.weight": other}


def test_one_projection_of_two_names(tmp_path):
    path = changed(tmp_path, "vllm-one", tensors=lambda x: x.update(second(x, 0.0)))
    assert recognise(path, TARGET).tensors["lm_head.weight"] == "lm_head.weight"


@pytest.mark.parametrize(
    ("name", "tensors", "found"),
    [
        ("vllm", lambda x: x.pop("medusa_heads.lm_heads.2.weight"), "lm_heads.2.weight is not in"),
        ("vllm-one", lambda x: x.pop("lm_head.weight"), "lm_heads.0.weight is not in"),
        ("faster", lambda x: x.pop("medusa_head.1.2.weight"), "head.1.2.weight is not in"),
        ("faster", lambda x: x.pop("medusa_head.1.0.linear.bias"), "1.0.linear.bias is not in"),
        ("vllm", lambda x: x.pop("medusa_heads.token_map"), "60 of 96 ids, and no token_map"),
        ("vllm", mapped((3, VOCAB)), "maps rows to ids"),
        ("vllm", mapped((3, -1)), "maps rows to ids -1"),
        ("vllm", mapped((3, 7), (4, 7)), "maps two rows to one id"),
        ("faster", lambda x: x.update({"model.norm.weight": torch.ones(3)}), "1 tensors that"),
        ("vllm-one", lambda x: x.update(second(x)), "two that differ: lm_head.weight and lm_heads"),
        (
            "vllm-one",
            lambda x: x.update({"lm_heads.0.weight": x["lm_head.weight"][:60].clone()}),
            "lm_heads.0.weight is [60, 32]",
        ),
        (
            "vllm-one",
            lambda x: x.update({"lm_heads.0.weight": x["lm_head.weight"].half()}),
            "two that differ: lm_head.weight and lm_heads",
        ),
        (
            "faster",
            lambda x: x.update({"medusa_head.0.0.linear.weight": torch.ones(16, 16)}),
            "linear.weight is [16, 16]",
        ),
        (
            "faster",
            lambda x: x.update({"medusa_head.3.2.weight": torch.ones(90, WIDTH)}),
            "3.2.weight is [90, 32]",
        ),
        (
            "faster",
            lambda x: x.update({f"medusa_head.{j}.2.weight": torch.ones(90, 32) for j in range(4)}),
            "projections of 90 rows; config.json and the target say 96 of 96 ids",
        ),
    ],
)
def test_tensors_that_do_not_fit(name, tensors, found, tmp_path):
    with pytest.raises(HeadError, match=re.escape(found)) as raised:
        recognise(changed(tmp_path, name, tensors=tensors), TARGET)
    assert raised.value.needed
    assert raised.value.do


def test_a_map_of_all_ids(tmp_path):
    """Its readers differ in whether they look at one; so it says nothing, or is refused."""
    ids = torch.arange(VOCAB)
    changed(
        tmp_path, "vllm-one", top(truncated_vocab_size=VOCAB), lambda x: x.update(token_map=ids)
    )
    assert recognise(tmp_path, TARGET).columns is None
    changed(
        tmp_path, "vllm-one", top(truncated_vocab_size=VOCAB),
        lambda x: x.update(token_map=ids.flip(0)),
    )  # fmt: skip
    with pytest.raises(HeadError, match="in another order"):
        recognise(tmp_path, TARGET)


def test_pickled_heads(tmp_path):
    write_medusa(tmp_path, MEDUSA_CASES["faster"])
    (tmp_path / "model.safetensors").rename(tmp_path / "medusa_lm_head.pt")
    with pytest.raises(HeadError, match=r"pickled \(medusa_lm_head.pt\)") as raised:
        recognise(tmp_path, TARGET)
    assert "convert" in raised.value.do


@pytest.mark.default(
    "flat-vllm", "flat-vllm-one", "flat-faster", "flat-faster-file", "cuda-vllm-one"
)
@pytest.mark.parametrize("name", MEDUSA_CASES)
@pytest.mark.parametrize("more", [(), cuda_phases(130)], ids=["flat", "cuda"])
def test_a_pass(name, more, tmp_path):
    """Rows of a slab of two sequences, and the logits of all heads of each."""
    case = MEDUSA_CASES[name]
    tensors = write_medusa(tmp_path, case)
    spec = recognise(tmp_path, TARGET)
    source = head_source(spec, SimpleNamespace(reader=None), torch.float32)
    rows = drafter_of_files(spec).rows(spec, torch.float32)
    program = trace(source.module, "draft_0", rows=rows)
    passes = drafter_of_files(spec).passes(spec)
    Pipeline((*LAYERLESS_PHASES, ("features", passes), *more)).run(program)
    assert program.vocab_size == VOCAB
    graph = graph_from_json(json.loads(json.dumps(graph_to_json(program.graph))))
    generator = torch.Generator().manual_seed(1)
    slab = torch.randn(2 * BLOCKS, BLOCK, WIDTH, generator=generator)
    tables = torch.randperm(2 * BLOCKS, generator=generator).int().view(2, -1)
    rows = torch.tensor([10, 5], dtype=torch.int32)
    stored = load_file(tmp_path / case.file)
    values = {
        key: stored[spec.tensors[weight.key]] for key, weight in program.weights.items()
    }  # fmt: skip
    values |= {key: spec.columns for key in program.constants}
    values |= {
        "tokens": torch.zeros(2, dtype=torch.int64),
        "positions": rows.long() + 1,
        "q_start": torch.arange(3).int(),
        "slot": rows + 1,
        "cache_len": rows + 1,
        "ancestors": None,
        "block_table": tables,
        "logit_rows": torch.arange(2),
        "feature_rows": torch.stack([rows, torch.full_like(rows, -1)], 1),
        "features": slab,
    }
    found = graph(*(values[node.target] for node in graph.graph.find_nodes(op="placeholder")))
    reference = MedusaReference(case, tensors)
    for b, row in enumerate(rows.tolist()):
        known = slab[tables[b, row // BLOCK].item(), row % BLOCK]
        wanted = reference.proposed(known[None], 0)
        own = found.view(2, case.num_heads, VOCAB)[b]
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)
