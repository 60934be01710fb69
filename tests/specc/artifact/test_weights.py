"""Streaming weights: what is written equals what torch computes, in flat memory, or is an error."""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import textwrap
import zlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specc.artifact.safetensors_io import INDEX_FILE, SINGLE_FILE, SafetensorsReader
from specc.artifact.safetensors_writer import OutputTensor, convert_chunks, write_safetensors
from specc.artifact.weight_layout import to_blocks
from specc.artifact.weight_spec import Source, WeightSpec
from specc.artifact.weights import MemoryReader, write_weights
from specc.errors import ModelNotFoundError, OutputError, WeightError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {
        "q": torch.randn(6, 4),
        "k": torch.randn(3, 4),
        "bias": torch.randn(7).bfloat16(),
        "half": torch.randn(5, 3).half(),
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "stack": torch.randn(2, 3, 4),
    }


@pytest.fixture(params=["disk", "memory"])
def reader(request, tensors, tmp_path):
    if request.param == "memory":
        yield MemoryReader(tensors)
        return
    save_file(tensors, tmp_path / SINGLE_FILE)
    with SafetensorsReader(tmp_path) as reader:
        yield reader


def spec_of(key, tensors, dtype=None):
    tensor = tensors[key]
    return WeightSpec(key, dtype or tensor.dtype, tuple(tensor.shape), (Source(key),))


def read_all(reader, key, **options):
    return b"".join(bytes(chunk) for chunk in reader.read_chunks(key, **options))


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class TestReader:
    @pytest.mark.parametrize("chunk_bytes", [1, 7, 10, 64, 1 << 20])
    def test_chunks_are_whole_elements_in_order(self, reader, tensors, chunk_bytes):
        assert set(reader.keys()) == tensors.keys()
        for key, tensor in tensors.items():
            assert (reader.dtype(key), reader.shape(key)) == (tensor.dtype, tuple(tensor.shape))
            chunks = list(map(bytes, reader.read_chunks(key, chunk_bytes)))
            assert all(len(chunk) % tensor.element_size() == 0 for chunk in chunks)
            assert b"".join(chunks) == raw(tensor), key

    @pytest.mark.parametrize("chunk_bytes", [4, 20, 1 << 20])
    def test_rows_and_transpose(self, reader, tensors, chunk_bytes):
        q, options = tensors["q"], {"chunk_bytes": chunk_bytes}
        assert read_all(reader, "q", rows=(2, 5), **options) == raw(q[2:5])
        assert read_all(reader, "q", rows=(2, 2), **options) == b""
        assert read_all(reader, "stack", rows=(1, 2), **options) == raw(tensors["stack"][1:])
        assert read_all(reader, "q", transpose=True, **options) == raw(q.T)
        assert read_all(reader, "q", rows=(1, 4), transpose=True, **options) == raw(q[1:4].T)
        assert read_all(reader, "half", transpose=True, **options) == raw(tensors["half"].T)

    def test_missing_tensor_names_close_ones(self, reader):
        with pytest.raises(WeightError, match="no tensor biased; close names: bias"):
            reader.shape("biased")

    def test_sharded_directory(self, tensors, tmp_path):
        write_sharded(tensors, tmp_path)
        with SafetensorsReader(tmp_path) as reader:
            assert set(reader.keys()) == tensors.keys()
            assert all(read_all(reader, key) == raw(value) for key, value in tensors.items())
            assert reader.location("q") == str(tmp_path / "part-0.safetensors")

    def test_meta_tensor(self):
        reader = MemoryReader({"a": torch.zeros(2, device="meta")})
        with pytest.raises(WeightError, match="meta device"):
            read_all(reader, "a")


def write_sharded(tensors, path):
    weight_map = {}
    for i in range(2):
        part = dict(list(tensors.items())[i::2])
        save_file(part, path / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{i}.safetensors")
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def encode(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


class TestMalformed:
    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            pytest.param(b"", "header", id="empty"),
            pytest.param(b"abc", "header", id="short"),
            pytest.param((1 << 40).to_bytes(8, "little") + b"{}", "header", id="huge-header"),
            pytest.param(encode(b"{nope"), "invalid JSON", id="no-json"),
            pytest.param(encode(b"\xff\xfe"), "invalid UTF-8", id="no-utf8"),
            pytest.param(encode([1]), "invalid JSON", id="list"),
            pytest.param(encode({"a": {"dtype": "F32"}}), "missing field", id="no-shape"),
            pytest.param(encode({"a": 3}), "invalid type", id="number"),
            pytest.param(
                encode({"a": entry(shape=(-2,))}, b"x" * 8), "invalid value", id="negative"
            ),
            pytest.param(encode({"a": entry(shape=(3,))}, b"x" * 8), "invalid shape", id="size"),
            pytest.param(encode({"a": entry()}, b"x" * 7), "not fully covered", id="truncated"),
            pytest.param(encode({"a": entry()}, b"x" * 9), "not fully covered", id="too-long"),
            pytest.param(
                encode({"a": entry(begin=4, end=12)}, b"x" * 12), "invalid offset", id="hole"
            ),
            pytest.param(
                encode({"a": entry(), "b": entry(begin=4, end=12)}, b"x" * 12),
                "invalid offset",
                id="overlap",
            ),
        ],
    )
    def test_file(self, content, reason, tmp_path):
        file = tmp_path / SINGLE_FILE
        file.write_bytes(content)
        with pytest.raises(WeightError, match=reason) as error:
            SafetensorsReader(tmp_path)
        assert str(file) in error.value.found

    def test_truncated_while_open(self, tensors, tmp_path):
        save_file({"a": torch.zeros(100)}, tmp_path / SINGLE_FILE)
        with SafetensorsReader(tmp_path) as reader:
            (tmp_path / SINGLE_FILE).write_bytes((tmp_path / SINGLE_FILE).read_bytes()[:-9])
            with pytest.raises(WeightError, match="ends at byte"):
                read_all(reader, "a")

    def test_absent_empty_and_pickled(self, tmp_path):
        with pytest.raises(ModelNotFoundError, match="does not exist"):
            SafetensorsReader(tmp_path / "nowhere")
        with pytest.raises(ModelNotFoundError, match="no checkpoint"):
            SafetensorsReader(tmp_path)
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(ModelNotFoundError, match="convert it") as error:
            SafetensorsReader(tmp_path)
        assert "pytorch_model.bin" in error.value.found
        assert "save_pretrained" in error.value.do

    def test_index(self, tensors, tmp_path):
        write_sharded(tensors, tmp_path)
        index = tmp_path / INDEX_FILE
        weight_map = json.loads(index.read_text())["weight_map"]
        (tmp_path / "part-1.safetensors").rename(tmp_path / "away")
        with pytest.raises(WeightError, match=r"names part-1\.safetensors, which is absent"):
            SafetensorsReader(tmp_path)
        (tmp_path / "away").rename(tmp_path / "part-1.safetensors")
        wrong = weight_map | {"q": weight_map["k"]}
        for content, reason in [
            ({"weight_map": wrong}, "which does not hold it"),
            ({"weight_map": {"q": "../part-0.safetensors"}}, "outside"),
            ({}, "no readable weight_map"),
        ]:
            index.write_text(json.dumps(content))
            with pytest.raises(WeightError, match=reason):
                SafetensorsReader(tmp_path)

    @pytest.mark.parametrize("first", ["base", "overlay"])
    def test_older_copies(self, tmp_path, first):
        """The index decides which shard a tensor is of, in whatever order it names them."""
        save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "base.safetensors")
        save_file({"a": torch.ones(2)}, tmp_path / "overlay.safetensors")
        places = {"a": "overlay.safetensors", "b": "base.safetensors"}
        keys = sorted(places, reverse=first == "base")
        weight_map = {key: places[key] for key in keys}
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
        with SafetensorsReader(tmp_path) as reader:
            assert read_all(reader, "a") == raw(torch.ones(2))
            assert read_all(reader, "b") == raw(torch.zeros(2))
            assert reader.location("a") == str(tmp_path / "overlay.safetensors")

    def test_copies_that_no_index_places(self, tmp_path):
        for name, more in (("base", "b"), ("overlay", "c")):
            held = {"a": torch.zeros(2), more: torch.zeros(2)}
            save_file(held, tmp_path / f"{name}.safetensors")
        weight_map = {"b": "base.safetensors", "c": "overlay.safetensors"}
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(WeightError, match="does not say which is meant") as error:
            SafetensorsReader(tmp_path)
        assert all(word in error.value.found for word in ("base", "overlay", " a,"))
        # what one shard alone holds is read, as transformers does
        save_file({"c": torch.zeros(2)}, tmp_path / "overlay.safetensors")
        with SafetensorsReader(tmp_path) as reader:
            assert sorted(reader.keys()) == ["a", "b", "c"]

    def test_dtype_of_quantized_checkpoints(self, tmp_path):
        save_file({"a": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / SINGLE_FILE)
        with SafetensorsReader(tmp_path) as reader, pytest.raises(WeightError, match="unquantized"):
            reader.dtype("a")


class TestConvert:
    @pytest.mark.parametrize("source", DTYPES)
    @pytest.mark.parametrize("target", DTYPES)
    @pytest.mark.parametrize("size", [1, 3, 5, 64])
    def test_any_chunk_boundary(self, source, target, size):
        values = torch.randn(23).to(source)
        data = raw(values)
        chunks = [data[i : i + size] for i in range(0, len(data), size)]
        got = b"".join(map(bytes, convert_chunks(chunks, source, target)))
        assert got == raw(values.to(target))

    def test_stream_that_ends_within_an_element(self):
        with pytest.raises(WeightError, match="2 bytes of an element"):
            list(convert_chunks([b"abcd", b"ef"], torch.float32, torch.bfloat16))


class TestWriteWeights:
    @pytest.mark.parametrize("dtype", [None, *DTYPES])
    def test_file_is_valid_for_safetensors(self, reader, tensors, dtype, tmp_path):
        path, calls = tmp_path / "out.safetensors", []
        specs = [spec_of(key, tensors) for key in tensors]
        entry = write_weights(specs, reader, path, dtype, progress=lambda *call: calls.append(call))
        data = path.read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry.sha256
        assert f"{zlib.crc32(data):08x}" == entry.crc32
        assert path.stat().st_size == entry.bytes
        got = load_file(path)
        assert got.keys() == tensors.keys()
        for key, value in tensors.items():
            wanted = value.to(dtype) if dtype and value.is_floating_point() else value
            assert got[key].dtype == wanted.dtype
            assert torch.equal(got[key], wanted)
        total = sum(value.numel() * value.element_size() for value in got.values())
        assert calls[-1] == (total, total)
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)

    def test_every_tensor_is_aligned(self, reader, tensors, tmp_path):
        path = tmp_path / "out.safetensors"
        write_weights([spec_of(key, tensors) for key in tensors], reader, path)
        header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
        assert (8 + header_bytes) % 64 == 0
        header = json.loads(path.read_bytes()[8 : 8 + header_bytes])
        for key, value in header.items():
            assert value["data_offsets"][0] % tensors[key].element_size() == 0

    def test_concatenation_stack_rows_and_transpose(self, reader, tensors, tmp_path):
        path, f32 = tmp_path / "out.safetensors", torch.float32
        q, k, stack = tensors["q"], tensors["k"], tensors["stack"]
        specs = [
            WeightSpec("qk", f32, (9, 4), (Source("q"), Source("k"))),
            WeightSpec("twice", f32, (2, 3, 4), (Source("k"), Source("k"))),
            WeightSpec("mixed", f32, (2, 3, 4), (Source("stack", (1, 2)), Source("k"))),
            WeightSpec("part", f32, (2, 4), (Source("q", (1, 3)),)),
            WeightSpec("turned", f32, (4, 6), (Source("q", transpose=True),)),
            WeightSpec("both", f32, (8, 3), (Source("q", (3, 6), True), Source("k", None, True))),
            WeightSpec("columns", f32, (2, 4, 3), (Source("stack"),), is_turned=True),
            WeightSpec(
                "blocks", f32, (2, 4, 3), (Source("stack"),), in_blocks=True, is_turned=True
            ),
            WeightSpec("biases", torch.bfloat16, (2, 7), (Source("bias"), Source("bias"))),
        ]
        write_weights(specs, reader, path)
        got = load_file(path)
        assert torch.equal(got["qk"], torch.cat([q, k]))
        assert torch.equal(got["twice"], torch.stack([k, k]))
        assert torch.equal(got["mixed"], torch.stack([stack[1], k]))
        assert torch.equal(got["part"], q[1:3])
        assert torch.equal(got["turned"], q.T)
        assert torch.equal(got["both"], torch.cat([q[3:6].T, k.T]))
        assert torch.equal(got["columns"], stack.mT)
        assert torch.equal(got["blocks"], to_blocks(stack.mT.contiguous()))
        assert torch.equal(got["biases"], torch.stack([tensors["bias"]] * 2))

    def test_constants_keep_their_dtype(self, reader, tensors, tmp_path):
        path = tmp_path / "out.safetensors"
        inv_freq = torch.randn(2, 8)[:, ::2]  # not contiguous
        constants = {"inv_freq": inv_freq, "scale": torch.tensor(4.0), "n": torch.arange(3)}
        specs = [WeightSpec.from_tensor(key, value) for key, value in constants.items()]
        write_weights([*specs, spec_of("q", tensors)], reader, path, torch.bfloat16)
        got = load_file(path)
        assert got["q"].dtype == torch.bfloat16
        for key, value in constants.items():
            assert got[key].dtype == value.dtype
            assert torch.equal(got[key], value)

    def test_equal_keys_are_written_once(self, reader, tensors, tmp_path):
        path = tmp_path / "out.safetensors"
        write_weights([spec_of("q", tensors), spec_of("q", tensors)], reader, path)
        with safe_open(path, framework="pt") as file:
            assert list(file.keys()) == ["q"]
        other = WeightSpec("q", torch.float32, (3, 4), (Source("k"),))
        with pytest.raises(ValueError, match="two different"):
            write_weights([spec_of("q", tensors), other], reader, path)

    @pytest.mark.parametrize(
        ("shape", "sources"),
        [
            pytest.param((4, 6), (Source("q"),), id="transposed"),
            pytest.param((24,), (Source("q"),), id="flattened"),
            pytest.param((3, 8), (Source("q"),), id="reshaped"),
            pytest.param((6, 4), (Source("q"), Source("k")), id="too-many-rows"),
            pytest.param((10, 4), (Source("q"), Source("k")), id="too-few-rows"),
            pytest.param((9, 4), (Source("q"), Source("half")), id="other-columns"),
            pytest.param((6, 4), (Source("q", (0, 7)),), id="rows-out-of-range"),
            pytest.param((2, 3, 4), (Source("stack", None, True),), id="transpose-3d"),
            pytest.param((6, 4), (Source("absent"),), id="absent"),
            pytest.param((5,), (Source("ids"),), id="integers-as-floats"),
        ],
    )
    def test_specs_are_checked_before_writing(self, reader, shape, sources, tmp_path):
        path = tmp_path / "out.safetensors"
        with pytest.raises(WeightError):
            write_weights([WeightSpec("w", torch.float32, shape, sources)], reader, path)
        assert not path.exists()

    def test_module_with_tied_parameters(self, tmp_path):
        module = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
        module["b"].weight = module["a"].weight
        reader = MemoryReader.from_module(module)
        specs = [
            WeightSpec(key, torch.float32, reader.shape(key), (Source(key),))
            for key in reader.keys()  # noqa: SIM118 - a reader is no mapping
        ]
        write_weights(specs, reader, tmp_path / "out")
        got = load_file(tmp_path / "out")
        assert got.keys() == {"a.weight", "a.bias", "b.weight", "b.bias"}
        assert torch.equal(got["b.weight"], module["a"].weight)

    def test_rows_larger_than_a_chunk(self):
        tensor = torch.randn(2, 3, 50)
        reader = MemoryReader({"a": tensor})
        chunks = list(map(bytes, reader.read_chunks("a", 400)))
        assert max(map(len, chunks)) <= 400
        assert b"".join(chunks) == raw(tensor)


class TestFailures:
    def test_disk_full(self, tensors, tmp_path):
        path = tmp_path / "out"
        path.symlink_to("/dev/full")  # every write there fails with ENOSPC
        with pytest.raises(OutputError, match="No space left") as error:
            write_weights([spec_of("q", tensors)], MemoryReader(tensors), path)
        assert "free some space" in error.value.do

    def test_file_size_limit_removes_the_partial_file(self, tmp_path):
        tensors = {"a": torch.zeros(1 << 20)}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with pytest.raises(OutputError, match="File too large"):
                write_weights([spec_of("a", tensors)], MemoryReader(tensors), tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not (tmp_path / "out").exists()

    def test_too_little_space_is_found_before_writing(self, tmp_path):
        huge = OutputTensor("a", torch.float32, (1 << 60,), iter(()))
        with pytest.raises(OutputError, match="free for"):
            write_safetensors(tmp_path / "out", [huge])
        assert not (tmp_path / "out").exists()

    def test_absent_directory(self, tensors, tmp_path):
        with pytest.raises(OutputError, match="No such file"):
            write_weights([], MemoryReader(tensors), tmp_path / "absent" / "out")

    def test_stream_of_the_wrong_length_leaves_no_file(self, tmp_path):
        for chunks in ([b"1234"], [b"12345678", b"1"]):
            short = OutputTensor("a", torch.float32, (2,), iter(chunks))
            with pytest.raises(ValueError, match="instead of 8"):
                write_safetensors(tmp_path / "out", [short])
            assert not (tmp_path / "out").exists()


_MEASURE = """
    import sys, torch
    from safetensors.torch import load_file
    from specc.artifact.safetensors_io import SafetensorsReader
    from specc.artifact.weights import write_weights
    from specc.artifact.weight_spec import Source, WeightSpec

    def peak():
        # not ru_maxrss: a child inherits its parent's
        for line in open("/proc/self/status"):
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024

    source, out = sys.argv[1:]
    torch.zeros(1000).to(torch.bfloat16)
    before = peak()
    with SafetensorsReader(source) as reader:
        shape = reader.shape("a")
        specs = [
            WeightSpec("plain", torch.bfloat16, shape, (Source("a"),)),
            WeightSpec("turned", torch.float32, shape[::-1], (Source("a", transpose=True),)),
        ]
        write_weights(specs, reader, out)
    streamed = peak()
    keep = load_file(source)["a"].clone()
    print(streamed - before, peak() - before)
"""


@pytest.mark.slow
def test_memory_stays_flat(tmp_path):
    shape = (4096, 12800)  # 200 MiB of float32, as a sparse file
    header = encode({"a": entry(shape=shape, end=shape[0] * shape[1] * 4)})
    source = tmp_path / "source.safetensors"
    with open(source, "wb") as file:
        file.write(header)
        file.truncate(len(header) + shape[0] * shape[1] * 4)
    command = [sys.executable, "-P", "-c", textwrap.dedent(_MEASURE), source, tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    streamed, whole = map(float, result.stdout.split())
    assert streamed < 80
    assert whole > 190  # the measure does see a tensor that is loaded whole
    with safe_open(tmp_path / "out", framework="pt") as file:
        assert file.get_slice("turned").get_shape() == list(shape[::-1])
