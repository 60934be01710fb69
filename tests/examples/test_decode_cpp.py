"""The example that decodes in C++: the tokens of `LLM`, without Python or torch in the process."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specc.config import CompileConfig
from specc.kernels import native
from specc.kernels.library_files import library_path
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.system.cxx_compiler import find_compiler
from tests import engines
from tests.kept import keep
from tests.models import MAX_SEQ_LEN, NUM_TOKENS, VOCAB, prompts, save_tiny

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples" / "decode.cpp"
# biases and learned positions; constants, windows and weights that serve twice; lists of parts
# (chunk); experts, and values that are cached in their keys
NAMES = (
    "opt",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("gemma3-tied", "gpt_neox", "deepseek_v2")
    ),
)
PROMPTS = prompts()[0], prompts()[-1]
USAGE = "usage: decode ENGINE NUM_TOKENS TOKEN_ID..."
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, compiled with the command of its own comment."""
    comment = re.search(r"^// +(g\+\+ .*\n// .*)", SOURCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert comment, "the comment has a command of two lines"
    library = library_path()
    command = comment[1].replace("//", "").replace("libspecc_cpu-$SET.so", library.name)
    command = command.replace("$PWD/kernels/lib", str(library.parent))
    values = {
        "g++": find_compiler(),
        "examples/decode.cpp": str(SOURCE),
        "-Ikernels/cpu": f"-I{native.SOURCE_DIR}",
        "-Lkernels/lib": f"-L{library.parent}",
    }
    words = [values.get(word, word) for word in shlex.split(command)]

    def make(path: Path) -> None:
        path.mkdir()
        placed = [str(path / "decode") if word == "decode" else word for word in words]
        subprocess.run(placed, check=True)

    path = tmp_path_factory.mktemp("decode") / "made"
    headers = ("kernels/cpu/specc.h", "kernels/cpu/specc_programs.h")
    sources = ("examples/decode.cpp", "examples/decode", *headers)
    return keep(path, make, words, sources=sources) / "decode"


@pytest.fixture(scope="module")
def decode(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the example with nothing in its environment that leads to Python."""
    place = tmp_path_factory.mktemp("elsewhere")

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(program), *map(str, arguments)]
        env = {"OMP_NUM_THREADS": "1", **environment}
        return subprocess.run(
            command, env=env, cwd=place, capture_output=True, text=True, timeout=120
        )

    return run


def build(name: str, root: Path) -> Path:
    save_tiny(name, root / "model")
    config = CompileConfig(backend="cpu", max_seq_len=MAX_SEQ_LEN, probe=False)
    return engines.build(root / "model", [], root / "engine", config)


@pytest.fixture(scope="module", params=NAMES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("opt", tmp_path_factory.mktemp("one"))


@pytest.fixture
def copy(opt: Path, tmp_path: Path) -> Iterator[Path]:
    """An engine with no more than the example reads, to be changed."""
    place = tmp_path / "engine"
    copy_parts(opt, place)
    yield place
    shutil.rmtree(place)


def copy_parts(engine: Path, place: Path) -> None:
    (place / "target").mkdir(parents=True)
    for name in ("manifest.json", "target/program.json", "target/weights.safetensors"):
        shutil.copy(engine / name, place / name)


def change(path: Path, edit: Callable[[Any], object]) -> None:
    """Change a file of JSON in place."""
    data = json.loads(path.read_bytes())
    edit(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def found_in(result: subprocess.CompletedProcess[str]) -> str:
    assert (result.returncode, result.stdout) == (1, "")
    found, needed, todo = result.stderr.splitlines()
    assert needed.startswith("needed: ")
    assert todo.startswith("do:     ")
    return found.removeprefix("found:  ")


class TestDecode:
    def test_tokens_of_llm(self, engine, decode, tmp_path):
        copy_parts(engine, tmp_path / "moved")
        llm = LLM(engine, plan="off")
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        for prompt in PROMPTS:
            (output,) = llm.generate([prompt], params)
            result = decode(tmp_path / "moved", NUM_TOKENS, *prompt)
            assert (result.returncode, result.stderr) == (0, "")
            assert list(map(int, result.stdout.split())) == list(output.outputs[0].token_ids)

    @pytest.mark.slow
    def test_values_that_lie_in_their_keys(self, decode, tmp_path):
        """Attention that is not told of it finds them in the cache of values."""
        copy = tmp_path / "copy"
        copy_parts(build("deepseek_v2", tmp_path), copy)
        expected = decode(copy, NUM_TOKENS, *PROMPTS[1]).stdout

        def edit(program: Any) -> None:
            for call in program["graph"]["nodes"]:
                if call.get("target") == "specc.attend.default":
                    del call["kwargs"]["values_in_keys"]

        change(copy / "target" / "program.json", edit)
        assert decode(copy, NUM_TOKENS, *PROMPTS[1]).stdout == expected != ""

    def test_numbers_in_the_place_of_tensors(self, copy, decode):
        expected = decode(copy, 4, 1, 2).stdout

        def edit(program: Any) -> None:
            graph = program["graph"]
            # what takes no number
            call = {"name": "more", "op": "call_function", "target": "aten.type_as.default"}
            graph["nodes"].append(call | {"args": [graph["output"], 2.0]})
            graph["output"] = {"node": "more"}

        change(copy / "target" / "program.json", edit)
        assert decode(copy, 4, 1, 2).stdout == expected != ""

    def test_no_python_and_no_torch(self, opt, program, decode):
        """Neither among what it is linked with, nor among what it loads."""
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True)
        assert library_path().name in linked.stdout
        result = decode(opt, 1, 2, 3, LD_DEBUG="files")
        assert result.returncode == 0
        loaded = linked.stdout + result.stderr
        assert "libpython" not in loaded
        assert "libtorch" not in loaded
        assert "libc10" not in loaded


class TestRefusals:
    def test_no_engine(self, decode, tmp_path):
        assert found_in(decode(tmp_path, 4, 1)) == f"{tmp_path}/manifest.json, which cannot be read"

    def test_operators_without_a_kernel(self, copy, decode):
        def edit(program: Any) -> None:
            calls = [x for x in program["graph"]["nodes"] if x["op"] == "call_function"]
            calls[1]["target"] = "aten.erfinv.default"
            calls[2]["target"] = "aten.acosh.default"
            # more parts than a call has results
            calls[3] |= {
                "target": "aten.chunk.default",
                "val": "(int64[1]" + ", int64[1]" * 4 + ")",
            }

        change(copy / "target" / "program.json", edit)
        names = "aten.acosh.default, aten.chunk.default, aten.erfinv.default"
        assert found_in(decode(copy, 4, 1)).endswith(f"has no kernel for: {names}")

    @pytest.mark.parametrize(
        ("key", "value", "found"),
        [
            ("backend", "cuda", "an engine for the backend cuda"),
            ("instructions", 99, "an engine of instructions 99"),
            ("schema_version", 1, "an engine of schema version 1"),
            ("segments", {}, "a target cut for ranks or in segments"),
            ("models", [], "an engine without models"),
            ("models", 5, "no models, or one of another kind"),
        ],
    )
    def test_manifests(self, copy, decode, key, value, found):
        change(copy / "manifest.json", lambda data: data.update({key: value}))
        assert found_in(decode(copy, 4, 1)) == found

    @pytest.mark.parametrize(
        ("edit", "found"),
        [
            (lambda call: call["args"].append(1), "arguments of "),
            (lambda call: call.update(kwargs={"nothing": 1}), "arguments of "),
            (lambda call: call.update(args=[]), " without "),
            (lambda call: call.update(args=[{"node": "nobody"}]), "nobody that nothing makes"),
            (lambda call: call.update(args=[{"dict": {}}]), "cannot be read"),
            (lambda call: call.update(op="call_module"), "a node call_module"),
        ],
    )
    def test_calls(self, copy, decode, edit, found):
        def change_call(program: Any) -> None:
            nodes = program["graph"]["nodes"]
            edit(next(x for x in nodes if x.get("target", "").startswith("specc.")))

        change(copy / "target" / "program.json", change_call)
        assert found in found_in(decode(copy, 4, 1))

    def test_weights(self, copy, decode):
        path = copy / "target" / "weights.safetensors"
        whole = path.read_bytes()
        for data in (whole[:4], whole[:100], struct.pack("<Q", 1 << 63) + whole[8:]):
            path.write_bytes(data)
            assert found_in(decode(copy, 4, 1)) == f"{path}, which is cut"
        # the header is whole, the last tensor is not
        path.write_bytes(whole[:-4])
        assert found_in(decode(copy, 4, 1)).startswith("another weight ")
        path.unlink()
        assert found_in(decode(copy, 4, 1)) == f"{path}, which cannot be read"

    @pytest.mark.parametrize(
        "text", ["", "{", "[" * 9999, '{"a": 1e999}', '{"a": "\\ud800"}', "{}x"]
    )
    def test_json(self, copy, decode, text):
        (copy / "manifest.json").write_text(text, encoding="utf-8")
        assert found_in(decode(copy, 4, 1)).startswith(f"{copy}/manifest.json")

    def test_deep_json(self, copy, decode):
        (copy / "manifest.json").write_text("[" * 1_000_000, encoding="utf-8")
        assert found_in(decode(copy, 4, 1)).endswith("nested too deeply")

    def test_tokens(self, opt, decode):
        assert found_in(decode(opt, 4, VOCAB)) == f"the token {VOCAB}"
        assert found_in(decode(opt, MAX_SEQ_LEN, 1)) == f"{MAX_SEQ_LEN + 1} tokens with the prompt"

    @pytest.mark.parametrize("arguments", [(), ("engine", 4), ("engine", "four", 1), ("e", 1, -1)])
    def test_usage(self, decode, arguments):
        result = decode(*arguments)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.splitlines()[-1] == USAGE
