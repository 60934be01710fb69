"""Every format against its writer: values, integers, and any range of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specc.artifact.decoders.checkpoint_format import open_checkpoint
from specc.artifact.decoders.decoded_reader import DecodedReader
from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.packed_stream import packed_stream
from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.artifact.quantized_weights import integer_rows
from specc.artifact.safetensors_io import CHUNK_BYTES
from tests import quantized_checkpoints as made
from tests.quantized_checkpoints import Format

NAME = "model.layers.0.self_attn.q_proj"
FORMATS: dict[str, tuple[Format, str | None]] = {
    "packed-4-g32": (made.packed(4, 32), "int4-g32"),
    "packed-4-g64": (made.packed(4, 64), "int4-g64"),
    "packed-4-g32-zeros": (made.packed(4, 32, False), "int4-g32-zeros"),
    "packed-4-channel": (made.packed(4, None), "int4-g128"),
    "packed-4-channel-zeros": (made.packed(4, None, False), "int4-g128-zeros"),
    "packed-8-channel": (made.packed(8, None), "int8"),
    "gptq-4-g32": (made.gptq(4, 32), "int4-g32"),
    "gptq-4-g128": (made.gptq(4, 128), "int4-g128"),
    "gptq-4-g256": (made.gptq(4, 256), "int4-g128"),
    "gptq-4-channel": (made.gptq(4, -1), "int4-g128"),
    "gptq-4-g64-zeros": (made.gptq(4, 64, False), "int4-g64-zeros"),
    "gptq-v2-4-g64-zeros": (made.gptq(4, 64, False, 2), "int4-g64-zeros"),
    "gptq-8-channel": (made.gptq(8, -1), "int8"),
    "gptq-8-g32": (made.gptq(8, 32), "int8-g32"),
    "packed-8-g64-zeros": (made.packed(8, 64, False), "int8-g64-zeros"),
    "packed-8-channel-zeros": (made.packed(8, None, False), "int8-zeros"),
    "whole-channel": (made.whole(), "int8"),
    "float8-channel": (made.float8_channels(), "fp8"),
    "float8-tensor": (made.float8_channels("tensor"), "fp8"),
    "float8-block": (made.float8_channels("block", 32), "fp8-g32"),
    "fp8-g32": (made.float8_blocks(32), "fp8-g32"),
    "fp8-g128": (made.float8_blocks(128), "fp8-g128"),
    "packed-mxfp4": (made.packed_mxfp4(), "mxfp4"),
    "gptq-order": (made.in_order(made.gptq(4, 64)), "int4-g64"),
    "gptq-order-zeros": (made.in_order(made.gptq(4, 32, False)), "int4-g32-zeros"),
    "packed-order-zeros": (made.in_order(made.packed(4, 32, False)), "int4-g32-zeros"),
    "awq-g32": (made.awq(32), "int4-g32-zeros"),
    "awq-g128": (made.awq(128), "int4-g128-zeros"),
}


class Config:
    """Of a model, with a `quantization_config`."""

    def __init__(self, fields) -> None:
        self.quantization_config = fields


def open_written(directory: Path, form: Format, weight, weight_only=False):
    """(reader, weight in float32) of a checkpoint of one layer."""
    tensors, exact = form.writer(NAME, weight)
    tensors["model.norm.weight"] = torch.ones(4)
    save_file({key: value.contiguous() for key, value in tensors.items()}, directory / made.FILE)
    return open_checkpoint(directory, Config(form.config), weight_only), exact


def values_of(reader, name, rows=None, chunk_bytes=CHUNK_BYTES):
    data = b"".join(bytes(chunk) for chunk in reader.read_chunks(name, chunk_bytes, rows))
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, *reader.shape(name)[1:])


def blocks_of(reader, parts, layout, shape):
    """Integers of parts in an engine's blocks, of a weight of this shape."""
    rows = integer_rows(reader, parts, layout)
    stored = b"".join(map(bytes, packed_stream(rows, layout, shape[-2])))
    return torch.frombuffer(bytearray(stored), dtype=torch.uint8).view(layout.stored_shape(shape))


# the last group, and the last engine's group of a longer one, are short
CASES = [(name, shape) for name in FORMATS for shape in ((64, 96), (40, 160))]
CASES += [("gptq-4-g256", (64, 544))]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=lambda item: str(item))
def test_values_and_integers(tmp_path, name, shape) -> None:
    form, layout = FORMATS[name]
    torch.manual_seed(0)
    if name.startswith(("packed-4", "packed-8", "fp8", "float8")) and shape[0] == 40:
        shape = (36, 157)  # the last words are part empty
    reader, exact = open_written(tmp_path, form, torch.randn(shape), True)
    assert isinstance(reader, DecodedReader)
    key = f"{NAME}.weight"
    assert sorted(reader.keys()) == [key, "model.norm.weight"]
    assert (reader.shape(key), reader.dtype(key)) == (shape, torch.float32)
    assert torch.equal(values_of(reader, key), exact)
    for rows in ((0, 5), (3, 35), (32, 36)):
        assert torch.equal(values_of(reader, key, rows), exact[slice(*rows)])
    # chunks of one block of rows
    assert torch.equal(values_of(reader, key, None, 32 * 4 * shape[1]), exact)
    weight = reader.decoded(key)
    own = QuantizedLayout.named(layout)
    if own == QuantizedLayout(8, 128, is_float=True) and shape[1] < 128:
        own = QuantizedLayout(8, is_float=True)  # one block of columns
    assert weight.layout == own
    part = weight.integers(reader.stored, 3, 35)
    zeros = own.middle if part.zeros is None else part.zeros.float()
    assert (part.zeros is not None) == own.has_zeros
    wide = lambda item: item.repeat_interleave(own.group or shape[1], 1)[:, : shape[1]]  # noqa: E731
    steps = own.values(part.levels) - (zeros if part.zeros is None else wide(zeros))
    if "order" in name:
        assert not torch.equal(weight.order, torch.arange(shape[1]))
        assert torch.equal(KeptIntegers.of(weight).columns, weight.order)
        exact = exact[:, weight.order]
    else:
        assert KeptIntegers.of(weight) == KeptIntegers(own)
    assert torch.equal(steps * wide(part.scales), exact[3:35])
    # the engine's own blocks, of rows that are no whole blocks
    sizes = [(key, (0, 7)), (key, (7, shape[0])), (key, None)]
    twice = (2 * shape[0], shape[1])
    blocks = blocks_of(reader, sizes, own, twice)
    assert torch.equal(dequantize(blocks, twice, own), torch.cat([exact, exact]))
    with reader:
        pass
