"""GGUF files: every bit of a block, rows in pairs, and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specc.artifact.decoders.checkpoint_format import open_checkpoint
from specc.artifact.decoders.gguf_architectures import model_name
from specc.artifact.decoders.gguf_file import GGUFReader
from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.errors import WeightError
from tests.gguf_files import FILE, draw, paired, write_file, write_parts
from tests.specc.artifact.decoders.test_decoders import blocks_of, values_of

CONFIG = SimpleNamespace(model_type="llama", num_attention_heads=2, num_key_value_heads=2)
FIELDS = {"general.architecture": "llama", "llama.attention.head_count": 2}
KEY = "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("kind", "layout"), [("Q4_0", "q4_0"), ("Q8_0", "q8_0"), ("Q4_K", "q4_k"), ("Q6_K", "q6_k")]
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
        (FIELDS, {"blk.0.ffn_up.weight": (40, (1, 64), bytes(36))}, "of the type NVFP4"),
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


PARTS = {
    "token_embd.weight": ("F32", (2, 2), bytes(16)),
    "blk.0.ffn_up.weight": ("F32", (1, 2), torch.tensor([3.0, 4.0]).numpy().tobytes()),
    "output.weight": ("F32", (2, 2), torch.arange(4.0).numpy().tobytes()),
}


def test_parts(tmp_path) -> None:
    """Any of them stands for all, and a directory of them for one file."""
    files = write_parts(tmp_path / "m", FIELDS, PARTS, [1, 0, 1, 1])
    head, up = "lm_head.weight", "model.layers.0.mlp.up_proj.weight"
    for path in files:
        reader = GGUFReader(path, model_name)
        assert sorted(reader.keys()) == [head, "model.embed_tokens.weight", up]
        assert reader.fields["general.architecture"] == "llama"
        assert reader.files == files
        assert reader.location(head) == str(files[3])
        assert torch.equal(values_of(reader, head), torch.arange(4.0).view(2, 2))
        assert torch.equal(values_of(reader, up), torch.tensor([[3.0, 4.0]]))
        reader.close()
    with open_checkpoint(tmp_path, CONFIG) as reader:
        assert head in list(reader.keys())
        assert reader.location(head) == str(files[3])


def lose_one(files: list[Path]) -> None:
    files[1].unlink()


def swap_two(files: list[Path]) -> None:
    first, second = (file.read_bytes() for file in files[1:3])
    files[1].write_bytes(second)
    files[2].write_bytes(first)


def of_another_model(files: list[Path]) -> None:
    fields = {"split.no": 2, "split.count": 3, "split.tensors.count": 4}
    write_file(files[2], fields, PARTS | ONE)


def of_fewer_tensors(files: list[Path]) -> None:
    write_file(files[2], {"split.no": 2, "split.count": 3, "split.tensors.count": 3}, {})


def of_a_smaller_split(files: list[Path]) -> None:
    write_file(files[2], {"split.no": 2, "split.count": 2, "split.tensors.count": 3}, {})


def without_numbers(files: list[Path]) -> None:
    write_file(files[2], {}, {"output.weight": PARTS["output.weight"]})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lose_one, "m-00002-of-00003.gguf is not beside it"),
        (swap_two, "m-00002-of-00003.gguf has split.no 2"),
        (of_another_model, "which m-00002-of-00003.gguf holds, too"),
        (of_fewer_tensors, "hold 2 tensors, and split.tensors.count says 3"),
        (of_a_smaller_split, "has split.count 2"),
        (without_numbers, "has split.no None"),
    ],
)
def test_parts_that_do_not_fit(tmp_path, change, found) -> None:
    files = write_parts(tmp_path / "m", FIELDS, PARTS, [1, 1, 1])
    change(files)
    assert found in refused(tmp_path).found


def test_parts_under_other_names(tmp_path) -> None:
    """A part alone looks like a whole model, in which whatever is optional is absent."""
    first, second = write_parts(tmp_path / "m", FIELDS, PARTS, [2, 1])
    second.unlink()
    with pytest.raises(WeightError, match=r"m-00002-of-00002\.gguf is not beside it"):
        GGUFReader(first)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(WeightError, match=r"one of 2 parts of a model \(split.count\)"):
        GGUFReader(renamed)
    # a name that says more than its fields
    write_file(renamed, FIELDS, PARTS)
    named = renamed.rename(first)
    with pytest.raises(WeightError, match=r"has split.count None"):
        GGUFReader(named)
    # what is merged keeps the field, and is whole
    write_file(named, FIELDS | {"split.count": 0}, PARTS)
    assert len(GGUFReader(named).tensors) == 3


def test_several_files(tmp_path) -> None:
    write_file(tmp_path / FILE, FIELDS, ONE)
    write_file(tmp_path / "other.gguf", FIELDS, ONE)
    assert "other.gguf" in refused(tmp_path).found
    for name in (FILE, "other.gguf"):
        (tmp_path / name).unlink()
    for name in ("a", "b"):
        write_parts(tmp_path / name, FIELDS, PARTS, [2, 1])
    assert "b-00002-of-00002.gguf" in refused(tmp_path).found
