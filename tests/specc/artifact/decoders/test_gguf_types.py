"""Every type of GGUF's blocks: numbers of random bytes against gguf-py's own, bit for bit."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from specc.artifact.decoders.checkpoint_format import open_checkpoint
from specc.artifact.decoders.decoded_reader import DecodedReader
from specc.artifact.decoders.gguf_file import BLOCKS
from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.artifact.quantized_weights import quantized_chunks
from specc.artifact.weight_spec import Source, WeightSpec
from specc.errors import WeightError
from tests.gguf_files import FILE, write_file
from tests.specc.artifact.decoders.test_decoders import blocks_of, values_of

gguf = pytest.importorskip("gguf")

CONFIG = SimpleNamespace(model_type="llama", num_attention_heads=2, num_key_value_heads=2)
FIELDS = {"general.architecture": "llama", "llama.attention.head_count": 2}
TYPES = {name: (number, columns, size) for number, (name, columns, size) in BLOCKS.items()}
# of what is no format of an engine, or of one that is no format of ggml's
LAYOUTS = {
    "MXFP4": "mxfp4", "IQ1_S": "int8-g32", "IQ2_XXS": "int8-g32", "IQ3_XXS": "int8-g32",
    "IQ3_S": "int8-g32", "TQ1_0": "int4-g128", "TQ2_0": "int4-g128", "IQ2_XS": None, "IQ2_S": None,
    "IQ1_M": None,
}  # fmt: skip
WIDENED = {
    "Q4_0": "int4-g32", "Q5_0": "int8-g32", "Q8_0": "int8-g32", "IQ4_NL": "int8-g32",
    "IQ4_XS": "int8-g32",
}  # fmt: skip
KEY = "model.layers.0.mlp.up_proj.weight"


def draw(name: str, shape: tuple[int, int]) -> tuple[bytes, Tensor]:
    """Blocks of random bytes whose numbers are all finite, and their numbers."""
    number, columns, size = TYPES[name]
    count = shape[0] * shape[1] // columns
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    blocks = rng.integers(0, 256, (2 * count, size), dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(1, 255, len(blocks))
        blocks[0] = 0
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(blocks.copy(), gguf.GGMLQuantizationType(number))
    finite = np.isfinite(values).all(1).nonzero()[0][:count]
    assert len(finite) == count
    return blocks[finite].tobytes(), torch.from_numpy(values[finite].reshape(shape).copy())


def quantized(reader: DecodedReader, layout: QuantizedLayout, shape: tuple[int, int]) -> Tensor:
    """Blocks as a backend without ggml's has them."""
    spec = WeightSpec(KEY, torch.float32, shape, (Source(KEY),), quantized=layout)
    data = bytearray(b"".join(map(bytes, quantized_chunks(spec, reader, ()))))
    return torch.frombuffer(data, dtype=torch.uint8).view(layout.stored_shape(shape))


@pytest.mark.parametrize("name", TYPES)
def test_numbers_are_those_of_ggml(tmp_path, name) -> None:
    number, shape = TYPES[name][0], (70, 768)
    data, exact = draw(name, shape)
    write_file(tmp_path / FILE, FIELDS, {"blk.0.ffn_up.weight": (number, shape, data)})
    with open_checkpoint(tmp_path, CONFIG) as reader:
        assert reader.scheme == f"gguf, {name}"
        assert torch.equal(values_of(reader, KEY), exact)
        assert torch.equal(values_of(reader, KEY, (3, 37)), exact[3:37])
        layout = reader.decoded(KEY).layout
        assert (layout.name if layout else None) == LAYOUTS.get(name, name.lower())
        if layout is None:
            return
        found = blocks_of(reader, [(KEY, None)], layout, shape)
        assert torch.equal(dequantize(found, shape, layout), exact)
        if layout.format:
            # 96 outputs are as many bytes as those of 96 rows in the file
            assert found.numel() == 96 * len(data) // shape[0]
        wide = layout.widened
        assert (wide.name if wide else None) == WIDENED.get(name)
        if wide is not None:
            stored = quantized(reader, wide, shape)
            assert torch.equal(dequantize(stored, shape, wide), exact)


@pytest.mark.parametrize(
    ("name", "place"), [("Q8_0", 0), ("IQ4_NL", 0), ("MXFP4", 1), ("MXFP4", 2)]
)
def test_scales_that_no_engine_holds(tmp_path, name, place) -> None:
    """Infinite ones, and of MXFP4 the smallest, where it is not that of zeros."""
    number, columns, size = TYPES[name]
    block = bytearray(b"\1" * size)
    block[:2] = np.float16(np.inf).tobytes() if name != "MXFP4" else bytes([(0, 255, 0)[place], 1])
    tensors = {"blk.0.ffn_up.weight": (number, (1, columns), bytes(block))}
    write_file(tmp_path / FILE, FIELDS, tensors)
    with open_checkpoint(tmp_path, CONFIG) as reader:
        layout = reader.decoded(KEY).layout
        with pytest.raises(WeightError, match=r"2\^-127" if place == 2 else "nan|inf"):
            blocks_of(reader, [(KEY, None)], layout, (1, columns))
