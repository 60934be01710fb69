"""Checkpoints of more programs against their writers, and what of them is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.artifact.decoders.checkpoint_format import open_checkpoint
from specc.artifact.decoders.decoded_reader import DecodedReader
from specc.artifact.quantized_layout import QuantizedLayout
from specc.errors import WeightError
from tests import branded_checkpoints as branded
from tests import quantized_checkpoints as made
from tests.quantized_checkpoints import FILE, Format
from tests.specc.artifact.decoders.test_decoders import NAME, Config, open_written, values_of

KEY = f"{NAME}.weight"
# with the layout of the engine that holds the same numbers, if one does
FORMATS: dict[str, tuple[Format, str | None]] = {
    "auto-round-gptq": (branded.auto_round(made.gptq(4, 32), "auto_gptq"), "int4-g32"),
    "auto-round-gptq-8": (branded.auto_round(made.gptq(8, -1), "auto_gptq"), "int8"),
    "auto-round-awq": (branded.auto_round(made.awq(32), "auto_awq", sym=False), "int4-g32-zeros"),
    "awq-w_bit": (branded.awq_by_its_own_names(32), "int4-g32-zeros"),
    "fbgemm_fp8": (branded.fbgemm(), "fp8"),
    "modelopt-fp8": (branded.modelopt_fp8(), "fp8"),
    "modelopt-by-its-producer": (branded.of_a_producer(branded.modelopt_fp8()), "fp8"),
    "modelopt-nvfp4": (branded.modelopt_nvfp4(), "nvfp4"),
    "modelopt-mixed": (branded.mixed(branded.modelopt_nvfp4()), "nvfp4"),
    "modelopt-mixed-fp8": (branded.mixed(branded.modelopt_fp8()), "fp8"),
    "modelopt-mixed-groups": (branded.mixed(branded.modelopt_fp8(), by_groups=True), "fp8"),
    "packed-nvfp4": (branded.packed_nvfp4(), "nvfp4"),
    "quark-fp8": (branded.quark_fp8(), "fp8"),
    "quark-mxfp4": (branded.quark_mxfp4(), "mxfp4"),
    "nf4": (branded.bitsandbytes("nf4"), None),
    "nf4-nested": (branded.bitsandbytes("nf4", 64, 8), None),
    "bitsandbytes-int8": (branded.bitsandbytes_int8(), "int8"),
    "fp4-nested": (branded.bitsandbytes("fp4", 128, 16), None),
}
GPTQ, NF4 = FORMATS["auto-round-gptq"][0], FORMATS["nf4"][0]
MODELOPT, QUARK = FORMATS["modelopt-nvfp4"][0], FORMATS["quark-mxfp4"][0]


@pytest.mark.parametrize("name", FORMATS)
def test_values(tmp_path, name) -> None:
    form, layout = FORMATS[name]
    torch.manual_seed(0)
    reader, exact = open_written(tmp_path, form, torch.randn(40, 96), True)
    # what activations are rounded with is no parameter
    assert sorted(reader.keys()) == [KEY, "model.norm.weight"]
    assert torch.equal(values_of(reader, KEY), exact)
    for rows in ((0, 5), (3, 35), (33, 40)):
        assert torch.equal(values_of(reader, KEY, rows), exact[slice(*rows)])
    weight = reader.decoded(KEY)
    assert weight.layout == (None if layout is None else QuantizedLayout.named(layout))
    if weight.layout is None:
        return
    part, own = weight.integers(reader.stored, 3, 35), weight.layout
    assert torch.equal(part.values(own), exact[3:35])


BESIDE = {
    "quantize_config.json": (
        {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.01},
        made.gptq(4, 32),
    ),
    "quant_config.json": (
        {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"},
        made.awq(64),
    ),
    "hf_quant_config.json": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
        branded.modelopt_fp8(),
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_configurations_beside(tmp_path, name) -> None:
    """A model whose config.json says nothing of it."""
    config, form = BESIDE[name]
    _, exact = open_written(tmp_path, form, torch.randn(64, 96), True)
    (tmp_path / name).write_text(json.dumps(config))
    reader = open_checkpoint(tmp_path, Config(None), True)
    assert isinstance(reader, DecodedReader)
    assert torch.equal(values_of(reader, KEY), exact)
    for text in ("[]", "{", '{"quantization": {"quant_algo": 7}, "bits": "x"}'):
        (tmp_path / name).write_text(text)
        with pytest.raises(WeightError) as caught:
            open_checkpoint(tmp_path, Config(None), True)
        assert str(tmp_path) in caught.value.found


def test_weights_of_another_name(tmp_path) -> None:
    """AutoGPTQ's files, which its configuration names; a file of the usual name goes before."""
    config, form = BESIDE["quantize_config.json"]
    name = "gptq_model-4bit-32g"
    _, exact = open_written(tmp_path, form, torch.randn(64, 96))
    (tmp_path / FILE).rename(tmp_path / f"{name}.safetensors")
    text = json.dumps(config | {"model_file_base_name": name})
    (tmp_path / "quantize_config.json").write_text(text)
    assert torch.equal(values_of(open_checkpoint(tmp_path, Config(None)), KEY), exact)
    _, other = open_written(tmp_path, form, torch.randn(64, 96))
    assert torch.equal(values_of(open_checkpoint(tmp_path, Config(None)), KEY), other)


def test_layers_with_bits_of_their_own(tmp_path) -> None:
    """By their names, or by patterns of them."""
    wide = made.gptq(8, 32)
    for extra in ({NAME: {"bits": 8}}, {r".*self_attn.*": {"bits": 8}, "lm_head": {"bits": 16}}):
        config = dict(GPTQ.config) | {"extra_config": extra}
        reader, exact = open_written(tmp_path, Format(config, wide.writer), torch.randn(64, 96))
        assert torch.equal(values_of(reader, KEY), exact)
        assert reader.decoded(KEY).layout == QuantizedLayout(8, 32)


def with_config(form: Format, **changes) -> Format:
    return Format(dict(form.config) | changes, form.writer)


@pytest.mark.parametrize(
    ("form", "found"),
    [
        (with_config(GPTQ, packing_format="auto_round:llm_compressor"), "llm_compressor"),
        (with_config(GPTQ, bits=2), "2 bits"),
        (with_config(GPTQ, extra_config={"(": {"bits": 4}}), "extra_config"),
        (with_config(GPTQ, data_type="mx_fp"), "in mx_fp"),
        (with_config(NF4, quant_method="torchao"), "quantized (torchao)"),
        (with_config(MODELOPT, quant_algo="W4A8_AWQ"), "modelopt, W4A8_AWQ"),
        (with_config(MODELOPT, quant_algo="FP8"), "no weights that are quantized as modelopt"),
        (with_config(MODELOPT, quant_algo="MIXED_PRECISION"), "MIXED_PRECISION of no layers"),
        (
            with_config(
                MODELOPT,
                quant_algo="MIXED_PRECISION",
                quantized_layers={"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "MXFP8"}},
            ),
            "modelopt, MXFP8",
        ),
        (with_config(QUARK, layer_quant_config={"a": {}}), "layer_quant_config"),
        (
            with_config(QUARK, global_quant_config={"weight": {"dtype": "int4"}}),
            "quark, int4, None",
        ),
        (with_config(QUARK, export={"weight_format": "fake_quantized"}), "fake_quantized"),
    ],
)
def test_schemes_that_are_refused(tmp_path, form, found) -> None:
    with pytest.raises(WeightError) as caught:
        open_written(tmp_path, form, torch.randn(32, 64), True)
    assert found in caught.value.found
    assert caught.value.needed
    assert caught.value.do


def test_weights_alone(tmp_path) -> None:
    """Nothing else is rounded, and nobody has to say so."""
    form = with_config(MODELOPT, quant_algo="W4A16_NVFP4")
    reader, exact = open_written(tmp_path, form, torch.randn(32, 64))
    assert torch.equal(values_of(reader, KEY), exact)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("fbgemm_fp8", "activations (dynamic)"),
        ("modelopt-fp8", "input activations"),
        ("modelopt-nvfp4", "input activations"),
        ("modelopt-mixed", "input activations"),
        ("quark-fp8", "activations"),
        ("bitsandbytes-int8", "activations (int8, but for outliers)"),
    ],
)
def test_activations_need_a_word(tmp_path, name, found) -> None:
    with pytest.raises(WeightError, match="--weight-only") as caught:
        open_written(tmp_path, FORMATS[name][0], torch.randn(32, 64))
    assert found in caught.value.found


STATE = f"{KEY}.quant_state.bitsandbytes__nf4"


def change_state(**changes):
    def edit(tensors):
        state = json.loads(bytes(tensors[STATE].tolist())) | changes
        tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return edit


@pytest.mark.default(
    "nf4-<lambda>-holds no tensor",
    "nf4-edit-[1920, 1]",
    "nf4-edit-blocks of x",
    "nf4-nested-edit-[8]",
    "bitsandbytes-int8-<lambda>-holds no tensor",
    "bitsandbytes-int8-<lambda>-in an order of its own",
)
@pytest.mark.parametrize(
    ("name", "edit", "found"),
    [
        ("nf4", lambda tensors: tensors.pop(f"{KEY}.absmax"), "holds no tensor"),
        ("nf4", change_state(shape=[40, 97]), "shape [40, 97]"),
        ("nf4", change_state(shape=[20, 96]), "[1920, 1]"),
        ("nf4", change_state(blocksize=0), "blocks of 0"),
        ("nf4", change_state(blocksize="x"), "blocks of x"),
        ("nf4-nested", change_state(nested_offset=None), "offset None"),
        ("nf4-nested", change_state(nested_blocksize=7), "[8]"),
        ("nf4", lambda tensors: tensors.update({STATE: torch.zeros(3, dtype=torch.uint8)}),
         "not the state"),
        ("bitsandbytes-int8", lambda tensors: tensors.pop(KEY), "holds no tensor"),
        ("bitsandbytes-int8", lambda tensors: tensors.update({f"{NAME}.SCB": torch.ones(7)}),
         "[40, 96]"),
        ("bitsandbytes-int8",
         lambda tensors: tensors.update({f"{KEY}_format": torch.tensor(2, dtype=torch.uint8)}),
         "in an order of its own"),
        ("modelopt-nvfp4", lambda tensors: tensors.pop(f"{KEY}_scale_2"), "holds no tensor"),
        (
            "modelopt-nvfp4",
            lambda tensors: tensors.update({f"{NAME}.pre_quant_scale": torch.ones(96)}),
            "pre_quant_scale",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(tmp_path, name, edit, found) -> None:
    form = FORMATS[name][0]
    open_written(tmp_path, form, torch.randn(40, 96), True)
    tensors = load_file(tmp_path / FILE)
    edit(tensors)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(WeightError) as caught:
        open_checkpoint(tmp_path, Config(form.config), True)
    assert found in str(caught.value)


def test_scales_of_nvfp4_with_a_sign(tmp_path) -> None:
    """No program writes them: engines have their sign at the numbers."""
    _, exact = open_written(tmp_path, MODELOPT, torch.randn(40, 96), True)
    tensors = load_file(tmp_path / FILE)
    scales = tensors[f"{KEY}_scale"].float()
    scales[3, 2] *= -1
    tensors[f"{KEY}_scale"] = scales.to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / FILE)
    reader = open_checkpoint(tmp_path, Config(MODELOPT.config), True)
    exact[3, 32:48] *= -1
    assert torch.equal(values_of(reader, KEY), exact)
    assert bool((reader.decoded(KEY).integers(reader.stored, 0, 40).scales >= 0).all())
