"""GGUF files: every bit of a block, rows in pairs, and what is refused."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest
import torch

from specc.artifact.decoders.checkpoint_format import open_checkpoint
from specc.artifact.decoders.gguf_file import GGUFReader
from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.errors import WeightError
from tests.gguf_files import FILE, draw, paired, write_file
from tests.specc.artifact.decoders.test_decoders import blocks_of, values_of

CONFIG = SimpleNamespace(model_type="llama", num_attention_heads=2, num_key_value_heads=2)
FIELDS = {"general.architecture": "llama", "llama.attention.head_count": 2}
KEY = "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("kind", "layout"), [("Q4_0", "int4-g32"), ("Q8_0", "int8-g32"), ("Q4_K", None), ("Q6_K", None)]
)
def test_blocks(tmp_path, kind, layout, version) -> None:
    shape = (40, 512)
    data, exact = draw(kind, shape, 1)
    norm = torch.randn(8)
    tensors = {
        "blk.3.ffn_up.weight": (kind, shape, data),
        "output_norm.weight": ("F32", (8,), norm.numpy().tobytes()),
    }
    write_file(tmp_path / FILE, FIELDS, tensors, version)
    with open_checkpoint(tmp_path, CONFIG) as reader:
        assert sorted(reader.keys()) == [KEY, "model.norm.weight"]
        assert reader.shape(KEY) == shape
        assert torch.equal(values_of(reader, KEY), exact)
        assert torch.equal(values_of(reader, KEY, (3, 37)), exact[3:37])
        chunks = b"".join(map(bytes, reader.read_chunks("model.norm.weight", rows=(2, 5))))
        assert torch.equal(torch.frombuffer(bytearray(chunks), dtype=torch.float32), norm[2:5])
        weight = reader.decoded(KEY)
        assert (weight.layout.name if weight.layout else None) == layout
        assert reader.scheme == f"gguf, {kind}"
        if layout is not None:
            own = QuantizedLayout.named(layout)
            found = dequantize(blocks_of(reader, [(KEY, None)], own, shape), shape, own)
            assert torch.equal(found, exact)


@pytest.mark.parametrize("kind", ["Q4_0", "F16"])
def test_rows_in_pairs(tmp_path, kind) -> None:
    """Queries and keys of llama; values are as they are."""
    if kind == "Q4_0":
        data, exact = draw(kind, (16, 32), 2)
    else:
        exact = torch.randn(16, 32).half().float()
        data = exact.half().numpy().tobytes()
    tensors = {
        f"blk.0.attn_{name}.weight": (kind, (16, 32), paired(data, 16, 8) if name != "v" else data)
        for name in "qkv"
    }
    write_file(tmp_path / FILE, FIELDS, tensors)
    with open_checkpoint(tmp_path, CONFIG) as reader:
        names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk"]
        assert all(torch.equal(values_of(reader, name), exact) for name in names)
        assert torch.equal(values_of(reader, names[0], (5, 11)), exact[5:11])
        value = "model.layers.0.self_attn.v_proj.weight"
        chunks = bytearray(b"".join(map(bytes, reader.read_chunks(value))))
        dtype = torch.float32 if kind == "Q4_0" else torch.float16
        assert torch.equal(torch.frombuffer(chunks, dtype=dtype).view(16, 32).float(), exact)
        assert reader.scheme == (None if kind == "F16" else "gguf, Q4_0")


def refused(directory, config=CONFIG) -> WeightError:
    with pytest.raises(WeightError) as caught:
        open_checkpoint(directory, config)
    assert caught.value.needed
    assert caught.value.do
    return caught.value


ONE = {"blk.0.ffn_up.weight": ("Q4_0", (1, 32), bytes(18))}


@pytest.mark.parametrize(
    ("fields", "tensors", "found"),
    [
        ({"general.architecture": "gemma2"}, ONE, "architecture gemma2"),
        ({"general.architecture": "qwen2"}, ONE, "of the model type llama"),
        (FIELDS | {"llama.attention.head_count": 4}, ONE, "head_count 4, and config.json 2"),
        (FIELDS, {"blk.0.ffn_up.weight": (13, (1, 256), bytes(176))}, "of the type Q5_K"),
        (FIELDS, {"blk.0.ffn_up.weight": (77, (1, 256), bytes(176))}, "of the type 77"),
        (FIELDS, {"blk.0.attn_q.bias": ("F32", (4,), bytes(16))}, "with a bias"),
        (FIELDS, {"blk.0.x.weight": ("Q4_0", (2, 2, 32), bytes(72))}, "experts"),
        (FIELDS, {"blk.0.ffn_up.weight": ("Q4_0", (1, 40), bytes(18))}, "rows of 40 values"),
        (FIELDS, {"blk.0.ffn_up.weight": ("Q4_0", (3, 32), bytes(18))}, "it ends inside of"),
        (FIELDS | {"general.alignment": 0}, ONE, "an alignment of 0"),
    ],
)
def test_what_is_refused(tmp_path, fields, tensors, found) -> None:
    write_file(tmp_path / FILE, fields, tensors)
    error = refused(tmp_path)
    text = f"{error.found} {error.needed}"
    assert found in text
    assert str(tmp_path) in error.found


def test_damaged_files(tmp_path) -> None:
    write_file(tmp_path / FILE, FIELDS, ONE)
    whole = (tmp_path / FILE).read_bytes()
    for size in range(0, len(whole) - 18, 7):
        (tmp_path / FILE).write_bytes(whole[:size])
        assert "malformed" in refused(tmp_path).found, size
    for change in (b"GGML" + whole[4:], whole[:8] + struct.pack("<Q", 1 << 60) + whole[16:]):
        (tmp_path / FILE).write_bytes(change)
        assert "malformed" in refused(tmp_path).found
    (tmp_path / FILE).write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    assert "version 1" in refused(tmp_path).found
    (tmp_path / FILE).write_bytes(whole)
    GGUFReader(tmp_path / FILE).close()


def test_several_files(tmp_path) -> None:
    write_file(tmp_path / FILE, FIELDS, ONE)
    write_file(tmp_path / "other.gguf", FIELDS, ONE)
    assert "other.gguf" in refused(tmp_path).found
