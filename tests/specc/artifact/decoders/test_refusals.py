"""What of quantized checkpoints is refused: every error says what was found, needed, and to do."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.artifact.decoders.checkpoint_format import open_checkpoint
from specc.artifact.decoders.decoded_reader import DecodedReader
from specc.artifact.quantized_weights import integer_rows
from specc.errors import WeightError
from tests import quantized_checkpoints as made
from tests.quantized_checkpoints import FILE
from tests.specc.artifact.decoders.test_decoders import NAME, Config, open_written, values_of

KEY = f"{NAME}.weight"
PACKED, ZEROS, FLOAT8 = made.packed(4, 32), made.packed(4, 32, False), made.float8_channels()
BLOCKS, GPTQ, AWQ, WHOLE = made.float8_blocks(32), made.gptq(4, 32), made.awq(32), made.whole()


def check_refused(tmp_path, form, change, *, weight_only=True, edit=None) -> str:
    """The error of a checkpoint whose configuration and tensors were changed; its text."""
    torch.manual_seed(0)
    form = made.Format(copy.deepcopy(dict(form.config)), form.writer)
    change(form.config)
    directory = tmp_path / "model"
    directory.mkdir()
    tensors, _ = form.writer(NAME, torch.randn(64, 96))
    if edit is not None:
        edit(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, directory / FILE)
    with pytest.raises(WeightError) as caught:
        open_checkpoint(directory, Config(form.config), weight_only)
    error = caught.value
    assert str(directory) in error.found
    assert error.needed
    assert error.do
    return str(error)


def weights_of(config):
    return config["config_groups"]["group_0"]["weights"]


def set_weights(**changes):
    return lambda config: weights_of(config).update(changes)


def put(**changes):
    return lambda config: config.update(changes)


@pytest.mark.parametrize(
    ("form", "change", "found"),
    [
        (PACKED, set_weights(num_bits=3), "3 bits"),
        (PACKED, set_weights(strategy="tensor_group"), "strategy tensor_group"),
        (PACKED, set_weights(group_size=48), "a scale for each 48 columns"),
        (PACKED, set_weights(group_size="x"), "group_size x"),
        (PACKED, set_weights(type="float"), "of type float"),
        (PACKED, put(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (PACKED, put(quantization_status="frozen"), "quantization_status frozen"),
        (PACKED, put(config_groups={}), "without config_groups"),
        (PACKED, put(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (PACKED, put(transform_config={"config_groups": {"R1": {}}}), "transform"),
        (PACKED, put(quant_method="eetq"), "quantized (eetq)"),
        (PACKED, put(quant_method="torchao"), "quantized (torchao)"),
        (PACKED, put(quant_library="modelopt"), "quantized (modelopt, None)"),
        (PACKED, put(quant_method="hqq"), "quantized (hqq)"),
        (
            PACKED,
            put(quant_method="gptq", bits=4, format="gptq"),
            "no weights that are quantized as gptq",
        ),
        (FLOAT8, set_weights(strategy="block", block_structure=[16]), "block_structure [16]"),
        (FLOAT8, set_weights(strategy="group"), "a scale for each group"),
        (FLOAT8, set_weights(symmetric=False), "with zero points"),
        (BLOCKS, put(weight_block_size=[128, 0]), "weight_block_size [128, 0]"),
        (made.float8_blocks(48), put(), "a scale for each 48 columns"),
        (BLOCKS, put(weight_block_size=[64, 64]), "[2, 3] of float32"),
        (BLOCKS, put(fmt="e5m2"), "e5m2"),
        (BLOCKS, put(expert_dtype="fp4"), "experts in fp4"),
        (GPTQ, put(bits=3), "gptq, 3 bits"),
        (GPTQ, put(checkpoint_format="marlin"), "marlin"),
        (GPTQ, put(is_marlin_format=True), "marlin"),
        (GPTQ, put(dynamic={"-:.*skip.*": {}, "+:.*q_proj.*": {"bits": 8}}), "+:.*q_proj.*"),
        (GPTQ, put(group_size=0), "group_size 0"),
        (AWQ, put(version="gemv"), "version gemv"),
        (AWQ, put(bits=8), "8 bits"),
        (AWQ, put(zero_point=False), "zero_point: false"),
    ],
)
def test_schemes(tmp_path, form, change, found) -> None:
    text = check_refused(tmp_path, form, change)
    assert found in text
    assert "docs/guide/quantization.md" in text or "config.json" in text or "--quantize" in text


@pytest.mark.parametrize(
    ("form", "change", "found"),
    [
        (WHOLE, put(), "W8A8), and its input activations, too"),
        (BLOCKS, put(), "activations (dynamic)"),
        (BLOCKS, put(activation_scheme="static"), "activations (static)"),
        (PACKED, put(kv_cache_scheme={"num_bits": 8}), "keys and values"),
        (
            PACKED,
            lambda config: config["config_groups"]["group_0"].update(
                input_activations={"num_bits": 8}
            ),
            "W4A8",
        ),
    ],
)
def test_activations_need_a_word(tmp_path, form, change, found) -> None:
    text = check_refused(tmp_path, form, change, weight_only=False)
    assert found in text
    assert "--weight-only" in text
    config = copy.deepcopy(dict(form.config))
    change(config)
    assert open_checkpoint(tmp_path / "model", Config(config), True).decoded(KEY) is not None


def drop(suffix):
    return lambda tensors: tensors.pop(f"{NAME}.{suffix}")


def cut(suffix):
    def edit(tensors):
        tensors[f"{NAME}.{suffix}"] = tensors[f"{NAME}.{suffix}"][:1]

    return edit


def retype(suffix, dtype):
    def edit(tensors):
        tensors[f"{NAME}.{suffix}"] = tensors[f"{NAME}.{suffix}"].to(dtype)

    return edit


@pytest.mark.parametrize(
    ("form", "edit", "found"),
    [
        (PACKED, drop("weight_scale"), "holds no tensor"),
        (PACKED, drop("weight_shape"), "holds no tensor"),
        (ZEROS, drop("weight_zero_point"), "holds no tensor"),
        (ZEROS, cut("weight_zero_point"), "[1, 3]"),
        # zero points that are not packed
        (ZEROS, retype("weight_zero_point", torch.int8), "of int8"),
        (PACKED, cut("weight_scale"), "[1, 3]"),
        (PACKED, retype("weight_packed", torch.uint8), "of uint8"),
        (FLOAT8, drop("weight_scale"), "holds no tensor"),
        (BLOCKS, drop("weight_scale_inv"), "holds no tensor"),
        (BLOCKS, cut("weight_scale_inv"), "[1, 3]"),
        (GPTQ, drop("scales"), "holds no tensor"),
        (GPTQ, drop("qzeros"), "holds no tensor"),
        (GPTQ, cut("g_idx"), "[1]"),
        (AWQ, drop("qzeros"), "holds no tensor"),
        (AWQ, cut("scales"), "[1, 64]"),
    ],
)
def test_tensors(tmp_path, form, edit, found) -> None:
    assert found in check_refused(tmp_path, form, put(), edit=edit)


def test_scaled_activations_of_awq(tmp_path) -> None:
    def add(tensors):
        tensors["model.layers.0.mlp.act.scales"] = torch.ones(4)

    assert "mlp.act.scales" in check_refused(tmp_path, AWQ, put(), edit=add)


def test_float8_without_a_decoder(tmp_path) -> None:
    """A float8 tensor that is no quantized weight, and one without quantization_config."""

    def add(tensors):
        tensors["model.norm.other"] = torch.ones(4).to(torch.float8_e4m3fn)

    assert "no quantized weight has it" in check_refused(tmp_path, BLOCKS, put(), edit=add)
    with pytest.raises(WeightError, match="F8_E4M3"):
        open_checkpoint(tmp_path / "model", Config(None)).dtype(KEY)


def test_groups_of_other_sizes(tmp_path) -> None:
    """`g_idx` is read whatever the configuration says, and each group has its columns."""

    def grow(tensors):
        tensors[f"{NAME}.g_idx"][40] = 0

    assert "not of 32 columns each" in check_refused(tmp_path, GPTQ, put(), edit=grow)

    def leave_out(tensors):
        tensors[f"{NAME}.weight_g_idx"] = torch.full((96,), -1)

    (tmp_path / "other").mkdir()
    assert "weight_g_idx" in check_refused(tmp_path / "other", PACKED, put(), edit=leave_out)
    (tmp_path / "third").mkdir()
    assert "g_idx" in check_refused(
        tmp_path / "third", GPTQ, put(desc_act=True), edit=drop("g_idx")
    )
    directory = tmp_path / "plain"
    directory.mkdir()
    form = made.Format(dict(GPTQ.config) | {"desc_act": True}, GPTQ.writer)
    reader, exact = open_written(directory, form, torch.randn(64, 96))
    assert torch.equal(values_of(reader, KEY), exact)


def stream(reader: DecodedReader):
    layout = reader.decoded(KEY).layout
    return list(integer_rows(reader, [(KEY, None)], layout))


def test_zero_points_that_programs_read_differently(tmp_path) -> None:
    form = made.gptq(4, 32, False)
    reader, _ = open_written(tmp_path, form, torch.randn(64, 96))
    tensors = load_file(tmp_path / FILE)
    tensors[f"{NAME}.qzeros"][1, 2] = -1  # eight times 15
    save_file(tensors, tmp_path / FILE)
    reader = open_checkpoint(tmp_path, Config(form.config))
    with pytest.raises(WeightError, match="some programs take for 16, others for 0"):
        stream(reader)


def test_zero_points_that_are_not_symmetric(tmp_path) -> None:
    """A version 1 checkpoint that says it is version 2 is one step off everywhere."""
    form = made.Format(dict(GPTQ.config) | {"checkpoint_format": "gptq_v2"}, GPTQ.writer)
    reader, _ = open_written(tmp_path, form, torch.randn(64, 96))
    with pytest.raises(WeightError, match="zero points other than 8"):
        stream(reader)


@pytest.mark.parametrize(
    ("form", "key", "place", "found"),
    [
        (PACKED, "weight_scale", (3, 1), r"the scales of .* at \[3, 1\]"),
        (FLOAT8, "weight", (40, 7), r"NaN, the first at \[40, 7\]"),
    ],
)
def test_numbers_that_are_not_finite(tmp_path, form, key, place, found) -> None:
    reader, _ = open_written(tmp_path, form, torch.randn(64, 96), True)
    tensors = load_file(tmp_path / FILE)
    # float8 takes no assignment by place
    whole = tensors[f"{NAME}.{key}"].float()
    whole[place] = torch.nan
    tensors[f"{NAME}.{key}"] = whole.to(tensors[f"{NAME}.{key}"].dtype)
    save_file(tensors, tmp_path / FILE)
    reader = open_checkpoint(tmp_path, Config(form.config), True)
    with pytest.raises(WeightError, match=found):
        stream(reader)


def test_modelopt_beside_the_configuration(tmp_path) -> None:
    open_written(tmp_path, PACKED, torch.randn(64, 96))
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(WeightError, match="modelopt"):
        open_checkpoint(tmp_path, Config(None))


def test_which_group_a_layer_is_of(tmp_path) -> None:
    """By name before pattern before class; two classes are refused."""
    config = copy.deepcopy(dict(PACKED.config))
    groups = config["config_groups"]
    groups["other"] = {"targets": ["re:.*k_proj"], "weights": {"num_bits": 3}}
    form = made.Format(config, PACKED.writer)
    reader, exact = open_written(tmp_path, form, torch.randn(64, 96))
    assert torch.equal(values_of(reader, KEY), exact)
    # a layer's name and a pattern without dots are no names of classes
    for target in ("lm_head", "re:lm_head"):
        groups["other"]["targets"] = [target]
        open_checkpoint(tmp_path, Config(config))
    groups["other"]["targets"] = ["re:.*q_proj"]
    with pytest.raises(WeightError, match="3 bits"):
        open_checkpoint(tmp_path, Config(config))
    groups["other"]["targets"] = ["Embedding"]
    with pytest.raises(WeightError, match="2 of the config_groups"):
        open_checkpoint(tmp_path, Config(config))
