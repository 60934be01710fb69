"""The example that decodes in C++: the tokens of `LLM`, and no Python in the process."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from specc.config import CompileConfig
from specc.kernels import native
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.system.cxx_compiler import find_compiler
from tests import engines
from tests.kept import keep
from tests.models import MAX_SEQ_LEN, NUM_TOKENS, prompts, save_tiny

SOURCE = Path(__file__).parents[2] / "examples" / "decode.cpp"
# biases and learned positions; the other adds constants, windows and weights that serve twice
NAMES = ("opt", pytest.param("gemma3-tied", marks=pytest.mark.slow))
PROMPTS = prompts()[0], prompts()[-1]
USAGE = "usage: decode ENGINE NUM_TOKENS TOKEN_ID..."
Decode = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, compiled with the command of its own comment."""
    comment = re.search(r"^// +(g\+\+ .*\n// .*)", SOURCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert comment, "the comment has a command of two lines"
    command = comment[1].replace("//", "").replace("$TORCH", torch.__path__[0])
    values = {
        "g++": find_compiler(),
        "examples/decode.cpp": str(SOURCE),
    }
    words = [values.get(word, word) for word in shlex.split(command)]

    def make(path: Path) -> None:
        path.mkdir()
        placed = [str(path / "decode") if word == "decode" else word for word in words]
        subprocess.run(placed, check=True)

    path = tmp_path_factory.mktemp("decode") / "made"
    return keep(path, make, words, sources=("examples/decode.cpp",)) / "decode"


@pytest.fixture(scope="module")
def decode(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Decode:
    """Run the example with nothing in its environment that leads to Python."""
    place = tmp_path_factory.mktemp("elsewhere")

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(program), *map(str, arguments)]
        env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(place), **environment}
        return subprocess.run(
            command, env=env, cwd=place, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.fixture(scope="module", params=NAMES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, root / "model")
    config = CompileConfig(backend="cpu", max_seq_len=MAX_SEQ_LEN, probe=False)
    return engines.build(root / "model", [], root / "engine", config)


@pytest.fixture(scope="module")
def moved(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The engine in another place, with no more than the example says that it needs."""
    place = tmp_path_factory.mktemp("moved")
    (place / "target").mkdir()
    for name in ("program.json", "program.pt2", "weights.safetensors"):
        shutil.copy(engine / "target" / name, place / "target")
    shutil.copytree(engine / "native", place / "native")
    yield place
    shutil.rmtree(place)


class TestDecode:
    @pytest.mark.slow
    def test_tokens_of_llm(self, engine, moved, decode):
        llm = LLM(engine, plan="off")
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        for prompt in PROMPTS:
            (output,) = llm.generate([prompt], params)
            result = decode(moved, NUM_TOKENS, *prompt)
            assert (result.returncode, result.stderr) == (0, "")
            assert list(map(int, result.stdout.split())) == list(output.outputs[0].token_ids)

    @pytest.mark.slow
    def test_no_python(self, moved, program, decode):
        """Neither among what it is linked with, nor among what the engine loads."""
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True)
        assert "libtorch_cpu" in linked.stdout
        result = decode(moved, 1, 2, 3, LD_DEBUG="files")
        assert result.returncode == 0
        assert "libspecc_cpu" in result.stderr
        assert ".wrapper.so" in result.stderr
        loaded = linked.stdout + result.stderr
        assert "libpython" not in loaded
        assert "libtorch_python" not in loaded


class TestErrors:
    def test_no_engine(self, decode, tmp_path):
        result = decode(tmp_path / "nothing", 4, 1)
        assert (result.returncode, result.stdout) == (1, "")
        first, last = result.stderr.splitlines()
        assert first.startswith(f"decode: {tmp_path}/nothing/native/{native.LIBRARY_NAME}: ")
        assert last == USAGE

    @pytest.mark.slow
    def test_part_of_an_engine(self, moved, decode, tmp_path):
        shutil.copytree(moved, tmp_path / "engine")
        (tmp_path / "engine" / "target" / "weights.safetensors").unlink()
        result = decode(tmp_path / "engine", 4, 1)
        assert (result.returncode, result.stdout) == (1, "")
        assert "weights.safetensors" in result.stderr

    @pytest.mark.parametrize("arguments", [(), ("engine", 4), ("engine", "four", 1)])
    def test_usage(self, decode, arguments):
        result = decode(*arguments)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.splitlines()[-1] == USAGE
