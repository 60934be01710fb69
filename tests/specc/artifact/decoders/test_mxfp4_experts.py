"""The experts of gpt-oss: tensors of two names become one parameter, transposed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.artifact.decoders.checkpoint_format import open_checkpoint
from specc.artifact.quantized_layout import dequantize
from specc.artifact.quantized_weights import integer_rows
from specc.errors import WeightError
from tests.quantized_checkpoints import FILE, write_mxfp4
from tests.specc.artifact.decoders.test_decoders import Config, blocks_of, values_of

NAME = "model.layers.0.mlp.experts.gate_up_proj"
CONFIG = Config({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def write(directory, experts):
    """Blocks [E, N, K / 32, 16] and scales [E, N, K / 32]; returns what they are, [E, K, N]."""
    parts = [write_mxfp4(weight) for weight in experts]
    blocks = torch.stack([codes.view(codes.shape[0], -1, 16) for codes, _, _ in parts])
    scales = torch.stack([exponents for _, exponents, _ in parts])
    tensors = {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales, f"{NAME}_bias": torch.ones(3, 8)}
    save_file(tensors, directory / FILE)
    return torch.stack([exact.t() for _, _, exact in parts])


def test_values(tmp_path) -> None:
    torch.manual_seed(0)
    exact = write(tmp_path, torch.randn(3, 8, 64) * torch.tensor([1e-6, 1.0, 1e6])[:, None, None])
    reader = open_checkpoint(tmp_path, CONFIG)
    assert sorted(reader.keys()) == [NAME, f"{NAME}_bias"]
    assert reader.shape(NAME) == (3, 64, 8)
    assert torch.equal(values_of(reader, NAME), exact)
    assert torch.equal(values_of(reader, NAME, (1, 2)), exact[1:2])
    weight = reader.decoded(NAME)
    # the engine has rows of the transposes
    assert (weight.layout.name, weight.is_turned, weight.outputs) == ("mxfp4", True, 8)
    stored = blocks_of(reader, [(NAME, (0, 1)), (NAME, (1, 3))], weight.layout, (3, 8, 64))
    found = dequantize(stored, (3, 8, 64), weight.layout)
    assert torch.equal(found, exact.transpose(1, 2))


def test_scales_that_engines_do_not_hold(tmp_path) -> None:
    write(tmp_path, torch.randn(3, 8, 64))
    tensors = load_file(tmp_path / FILE)
    for value, found in ((0, r"a scale of 2\^-127"), (255, r"1 NaN\), the first at \[1, 5, 1\]")):
        tensors[f"{NAME}_scales"][1, 5, 1] = value
        save_file(tensors, tmp_path / FILE)
        reader = open_checkpoint(tmp_path, CONFIG)
        with pytest.raises(WeightError, match=found):
            list(integer_rows(reader, [(NAME, None)], reader.decoded(NAME).layout))


def test_every_code_and_exponent(tmp_path) -> None:
    """All 16 codes; exponents from 2^-127 to 2^127, and NaN."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    scales = torch.tensor([0, 1, 126, 127, 128, 200, 254, 255] * 2, dtype=torch.uint8)
    tensors = {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales.view(1, 1, 16)}
    save_file(tensors, tmp_path / FILE)
    found = values_of(open_checkpoint(tmp_path, CONFIG), NAME)[0, :, 0].tolist()
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    for k, value in enumerate(found):
        byte, scale = k // 2, int(scales[k // 32])
        code = byte % 16 if k % 2 == 0 else byte // 16
        if scale == 255:
            assert value != value
        else:
            exact = torch.tensor(table[code] * 2.0 ** (scale - 127), dtype=torch.float32)
            assert value == exact.item(), (k, code, scale)


@pytest.mark.parametrize("suffix", ["_scales", "_blocks"])
def test_parts_that_do_not_fit(tmp_path, suffix) -> None:
    write(tmp_path, torch.randn(3, 8, 64))
    tensors = load_file(tmp_path / FILE)
    tensors[f"{NAME}{suffix}"] = tensors[f"{NAME}{suffix}"][:, :4, :1].contiguous()
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(WeightError, match=f"{NAME}_scales"):
        open_checkpoint(tmp_path, CONFIG)
