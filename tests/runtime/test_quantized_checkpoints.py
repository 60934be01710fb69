"""Engines of quantized checkpoints: the checkpoint's own integers, and every plan as off.

The reference is plain transformers on a float32 checkpoint of (u - z) · s, which the writer of each
format has made on its own: see `tests/quantized_checkpoints.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import specc
from specc.artifact.backends import facts_of
from specc.artifact.directory import read_manifest
from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.cli.render import weight_lines
from specc.compile_request import CompileRequest
from specc.compiler.candidate import open_models
from specc.config import CompileConfig
from specc.errors import ConfigError, WeightError
from specc.refusals import refuse
from specc.runtime.backends.program_files import read_json
from tests import engines, models
from tests import quantized_checkpoints as made
from tests.quantized_checkpoints import Format, Written
from tests.runtime.test_quantized import PLANS, TOLERANCE, check_logits, check_plans

SLOW = pytest.mark.slow
FILE = "weights.safetensors"


def reference(checkpoint: Written):
    """Plain transformers on the float32 checkpoint."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint.exact, dtype=torch.float32).eval()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Written, Path]]:
    """(checkpoint, engine) of a tiny model, with a noisy draft in float32."""

    def make_one(name: str, form: Format, is_quantized=made.is_projection, **options):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        target = models.save_tiny(name, root / "target")
        draft = models.save_tiny(name, root / "draft", 0, models.DRAFT_NOISE[name])
        written = made.write_checkpoint(target, root, form.config, form.writer, is_quantized)
        options = {"backend": "eager", "dtype": "float32"} | options
        config = CompileConfig(
            plans=PLANS, max_seq_len=models.MAX_SEQ_LEN, probe=False, **options
        )  # fmt: skip
        return written, engines.build(written.quantized, draft, root / "engine", config)

    return make_one


def stored_layouts(engine: Path) -> dict[str, str]:
    entries = read_json(engine / "target" / "program.json")["inputs"]
    return {x["key"]: x["layout"] for x in entries if "quantized_of" in x}


def check_integers(written: Written, engine: Path, is_ordered: bool = False) -> None:
    """What the engine's blocks stand for is the float32 checkpoint, bit for bit."""
    held, checked = load_file(engine / "target" / "weights.safetensors"), 0
    for entry in read_json(engine / "target" / "program.json")["inputs"]:
        if "quantized_of" not in entry:
            continue
        names, _, layout = entry["key"].rpartition(":")
        layout = QuantizedLayout.named(layout)
        value = dequantize(held[entry["key"]], entry["quantized_of"], layout)
        want = torch.cat([written.weights[name] for name in names.split("+")])
        if is_ordered:
            # columns of equal numbers may be in any order here: logits say the rest
            value, want = value.sort(1).values, want.sort(1).values
        assert torch.equal(value, want), names
        checked += len(names.split("+"))
    assert checked == len(written.weights)


@pytest.mark.parametrize(
    ("name", "form", "dtype", "layout"),
    [
        ("llama", made.packed(4, 32, False), "float32", "int4-g32-zeros"),
        # the last group of down_proj is short
        pytest.param("llama", made.awq(64), "bfloat16", "int4-g64-zeros", marks=SLOW),
        pytest.param("qwen3", made.gptq(4, 32), "float32", "int4-g32", marks=SLOW),
        pytest.param("mistral", made.gptq(8, -1), "bfloat16", "int8", marks=SLOW),
        pytest.param("phi3", made.packed(8, None), "float32", "int8", marks=SLOW),
        pytest.param("qwen2", made.packed(8, 32), "float32", "int8-g32", marks=SLOW),
        pytest.param(
            "qwen3",
            made.packed(4, None, False),
            "float32",
            "int4-g64-zeros int4-g128-zeros",
            marks=SLOW,
        ),
        pytest.param("llama", made.gptq(4, 64, False), "float32", "int4-g64-zeros", marks=SLOW),
        pytest.param("llama", made.gptq(4, 64, False, 2), "float32", "int4-g64-zeros", marks=SLOW),
        pytest.param("llama", made.float8_channels(), "float32", "fp8", marks=SLOW),
        pytest.param("llama", made.float8_channels("tensor"), "bfloat16", "fp8", marks=SLOW),
        pytest.param("qwen3", made.float8_blocks(32), "float32", "fp8-g32", marks=SLOW),
        pytest.param("llama", made.packed_mxfp4(), "float32", "mxfp4", marks=SLOW),
        pytest.param("llama", made.whole(), "float32", "int8", marks=SLOW),
    ],
)
def test_plans_and_logits(make, name, form, dtype, layout) -> None:
    written, engine = make(name, form, dtype=dtype, weight_only=True)
    check_integers(written, engine)
    assert set(stored_layouts(engine).values()) == {f"blocks-{item}" for item in layout.split()}
    check_logits(engine, reference(written), dtype, TOLERANCE)
    check_plans(engine, num_prompts=3, max_tokens=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (made.gptq(4, 64, False), "float32"),
        (made.awq(32), "bfloat16"),
        (made.float8_blocks(32), "float32"),
    ],
)
def test_compiled_engines(make, form, dtype) -> None:
    """The C++ operator in compiled programs."""
    written, engine = make("llama", form, dtype=dtype, backend="cpu", weight_only=True)
    check_integers(written, engine)
    check_logits(engine, reference(written), dtype, TOLERANCE)
    check_plans(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dtype", "backend"),
    [
        (made.in_order(made.gptq(4, 32, False)), "float32", "eager"),
        pytest.param(made.in_order(made.packed(4, 32, False)), "bfloat16", "eager", marks=SLOW),
        pytest.param(made.in_order(made.gptq(4, 64)), "float32", "cpu", marks=SLOW),
    ],
)
def test_columns_in_another_order(make, form, dtype, backend) -> None:
    """Act-order: rows are read in the order of the weight's groups, q, k and v as one."""
    written, engine = make("llama", form, dtype=dtype, backend=backend)
    check_integers(written, engine, is_ordered=True)
    assert len(stored_layouts(engine)) == 8
    check_logits(engine, reference(written), dtype, TOLERANCE)
    if dtype == "bfloat16" or backend == "cpu":
        check_plans(engine)


@pytest.mark.slow
def test_layers_that_are_not_quantized(make) -> None:
    """Ignored layers stay in the engine's type, or are rounded where --quantize says so."""
    form = made.packed(4, 32)
    only = lambda name: "_proj." in name and "layers.1.self_attn" not in name  # noqa: E731
    written, engine = make("llama", form, is_quantized=only)
    check_integers(written, engine)
    assert len(stored_layouts(engine)) == 4 + 2
    check_logits(engine, reference(written), "float32", TOLERANCE)
    model = read_manifest(engine).models[0]
    assert model.quantization == "int4-g32"
    assert model.checkpoint_scheme == "compressed-tensors, pack-quantized, 4 bits, groups of 32"
    assert (model.unread_tensors, model.nonfinite_weights) == ((), 0)
    assert read_manifest(engine).models[1].checkpoint_scheme is None
    lines = weight_lines(read_manifest(engine))
    assert f"target has a quantized checkpoint: {model.checkpoint_scheme}" in lines
    _, rounded = make("llama", form, is_quantized=only, quantize="int8")
    found = stored_layouts(rounded)
    assert sorted(found.values()) == ["blocks-int4-g32"] * 6 + ["blocks-int8"] * 4
    held, other = (load_file(path / "target" / FILE) for path in (engine, rounded))
    assert all(torch.equal(held[key], other[key]) for key in stored_layouts(engine))


@pytest.mark.slow
def test_projections_of_different_schemes(make) -> None:
    """q, k and v of different groups are not fused, and are the checkpoint's all the same."""
    small, large = made.packed(4, 32), made.packed(4, 64)
    config = copy.deepcopy(dict(small.config))
    group = copy.deepcopy(large.config["config_groups"]["group_0"])
    config["config_groups"]["group_1"] = group | {"targets": ["re:.*k_proj"]}
    write = lambda name, weight: (large if "k_proj" in name else small).writer(name, weight)  # noqa: E731
    written, engine = make("llama", Format(config, write))
    check_integers(written, engine)
    layouts = stored_layouts(engine)
    assert [key for key in layouts if "q_proj.weight+" in key] == []
    assert len([key for key in layouts if "gate_proj.weight+" in key]) == 2
    check_logits(engine, reference(written), "float32", TOLERANCE)
    report = read_json(engine / "report.json")
    told = [item["reason"] for record in report["passes"] for item in record["declined"]]
    assert "the weights are quantized in different ways: int4-g32, int4-g64" in told


def test_what_is_told(tmp_path) -> None:
    """Of quantized weights that the engine does not hold as they are: one expert is not."""
    form = made.gptq(4, 32)
    target = models.save_tiny("mixtral", tmp_path / "target", num_hidden_layers=1)
    only = lambda name: ".experts." in name and ".experts.0." not in name  # noqa: E731
    written = made.write_checkpoint(target, tmp_path, form.config, form.writer, only)
    found = specc.compile(
        written.quantized, None, tmp_path / "engine", backend="eager", probe=False, max_seq_len=64
    )
    (told,) = [text for text in found.warnings if "quantized" in text]
    assert "2 quantized weights of the checkpoint become float32" in told


@pytest.mark.slow
def test_an_option_and_a_draft(tmp_path) -> None:
    """--weight-only goes for drafts, too; without it the error names the draft."""
    form = made.whole()
    target = models.save_tiny("llama", tmp_path / "target", num_hidden_layers=1)
    written = made.write_checkpoint(target, tmp_path, form.config, form.writer)
    options = {"backend": "eager", "probe": False, "max_seq_len": 64}
    with pytest.raises(WeightError, match=r"draft 0: .*W8A8"):
        specc.compile(target, written.quantized, tmp_path / "engine", **options)
    found = specc.compile(
        target, written.quantized, tmp_path / "engine", weight_only=True, **options
    )
    assert [item.quantization for item in found.manifest.models] == [None, "int8"]


def test_a_backend_without_quantized_weights(tmp_path) -> None:
    form = made.packed(4, 32)
    target = models.save_tiny("llama", tmp_path / "target", num_hidden_layers=1)
    written = made.write_checkpoint(target, tmp_path, form.config, form.writer)
    (target,) = open_models(written.quantized, [])
    asked = CompileRequest(CompileConfig(), (), facts_of("cpu"), schemes={"target": target.scheme})
    with pytest.raises(ConfigError) as caught:
        refuse(asked)
    assert caught.value.found.startswith("a quantized checkpoint (target: compressed-tensors")
    assert caught.value.found.endswith("with backend cpu")


def test_a_head_with_integers_of_its_own(tmp_path) -> None:
    """They are kept: not rounded to 8 bits, as --quantize does with heads."""
    form = made.packed(4, 32)
    target = models.save_tiny("llama", tmp_path / "target", num_hidden_layers=1)
    only = lambda name: "_proj." in name or "lm_head" in name  # noqa: E731
    written = made.write_checkpoint(target, tmp_path, form.config, form.writer, only)
    specc.compile(
        written.quantized, None, tmp_path / "engine", backend="eager", probe=False, max_seq_len=64
    )
    assert stored_layouts(tmp_path / "engine")["lm_head.weight:int4-g32"] == "blocks-int4-g32"
    check_integers(written, tmp_path / "engine")
