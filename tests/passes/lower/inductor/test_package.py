"""What is handed to Inductor: programs without their weights."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.graph_io import graph_to_json
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.kernels import native
from specc.passes.lower.cpu import lower as lower_cpu
from specc.passes.lower.inductor import package as lower_aot_inductor
from specc.passes.lower.inductor.package import BoundProgram, _content_key, compile_package
from specc.passes.program import RUNTIME_INPUTS
from specc.system.cxx_compiler import find_compiler
from specc.system.warm_process import WarmProcess
from tests.models import MAX_SEQ_LEN, save_tiny


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As JSON, a program that tests/runtime/backends/cpu compile, too."""
    root, found = tmp_path_factory.mktemp("lowered"), []

    def keep(program: dict[str, Any], package: Path, children: object) -> None:
        found.append(json.dumps(program))
        package.touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower_cpu, "_compile", keep)
        patch.setattr(lower_cpu, "_copy_library", lambda library, children: library.touch())
        config = CompileConfig(backend="cpu", max_seq_len=MAX_SEQ_LEN, probe=False)
        build(save_tiny("opt", root / "model"), None, root / "engine", config)
    (program,) = found
    return program


@pytest.fixture
def program(lowered: str) -> dict[str, Any]:
    return json.loads(lowered)


def test_inductor_has_nothing_to_copy(program) -> None:
    """It clones buffers, which costs as much memory as the checkpoint, and takes parameters."""
    module = BoundProgram(program)
    kinds = [entry["kind"] for entry in program["inputs"]]
    num_weights = kinds.count("weight") + kinds.count("constant")
    assert list(module.buffers()) == []
    assert [name for name, _ in module.named_parameters()] == [f"w{i}" for i in range(num_weights)]
    assert not any(weight.requires_grad for weight in module.parameters())


def test_code_declares_the_functions_that_it_calls(program, tmp_path) -> None:
    """And none of operators that only other programs have, such as sums over ranks."""
    package = tmp_path / "program.pt2"
    package.write_bytes(compile_package(program))
    with zipfile.ZipFile(package) as archive:
        (source,) = (name for name in archive.namelist() if name.endswith(".wrapper.cpp"))
        code = archive.read(source).decode()
    declared = re.findall(r"extern AOTITorchError aoti_torch_cpu_(\w+)\(", code)
    calls = set(re.findall(r"(?<!extern AOTITorchError )aoti_torch_cpu_(\w+)\(", code))
    called = {name for name in native.C_SHIMS if f"specc.{name}.default" in json.dumps(program)}
    assert called
    assert called == set(declared) == calls & native.C_SHIMS.keys()


def test_the_cache_knows_all_that_a_package_is_made_of(program, monkeypatch, tmp_path) -> None:
    compiler = find_compiler()
    key = _content_key(program, compiler)
    assert key == _content_key(program, compiler)
    graph = json.dumps(program["graph"])
    assert "aten.mul" in graph
    other = json.loads(graph.replace("aten.mul", "aten.add", 1))
    assert key != _content_key(program | {"graph": other}, compiler)
    for i in (0, -1):
        for change in ({"dtype": "float16"}, {"shape": [7, 7]}, {"kind": "constant"}):
            inputs = list(program["inputs"])
            inputs[i] = inputs[i] | change
            assert key != _content_key(program | {"inputs": inputs}, compiler), change
    # which model it is, and where its weights come from, are no part of the code
    keys = [entry | {"key": f"other {i}"} for i, entry in enumerate(program["inputs"])]
    assert key == _content_key(program | {"name": "draft_0", "inputs": keys}, compiler)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.13.1")
        assert key != _content_key(program, compiler)
    # the code takes the layouts of results for granted
    for module in (lower_aot_inductor.ops,):
        changed = tmp_path / Path(str(module.__file__)).name
        changed.write_text(Path(str(module.__file__)).read_text() + "# a change\n")
        with monkeypatch.context() as patch:
            patch.setattr(module, "__file__", str(changed))
            assert key != _content_key(program, compiler), module.__name__
    # options that Inductor takes from the environment, but for the directory of its files
    for name, is_part in (("TORCHINDUCTOR_CACHE_DIR", False), ("AOT_INDUCTOR_DEBUG_COMPILE", True)):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert (key != _content_key(program, compiler)) == is_part, name
    # the same compiler by way of a script with other arguments
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path))
    keys = set()
    for flags in ("-g0", "-O1"):
        monkeypatch.setenv("CXX", f"{compiler} {flags}")
        keys.add(_content_key(program, find_compiler()))
    assert len(keys | {key}) == 3


def test_names_of_nodes_are_no_part_of_the_code(program) -> None:
    """They depend on what else the process has traced; which node reads which does not."""
    compiler = find_compiler()
    key, graph = _content_key(program, compiler), program["graph"]
    names = [node["name"] for node in graph["nodes"]]
    new = {name: f"other_{len(names) - i}" for i, name in enumerate(names)}

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(item) for item in value]
        if isinstance(value, dict):
            return {k: new[v] if k == "node" else renamed(v) for k, v in value.items()}
        return value

    nodes = [renamed(node) | {"name": new[node["name"]], "val": "?"} for node in graph["nodes"]]
    other = {"nodes": nodes, "output": renamed(graph["output"])}
    assert json.dumps(other) != json.dumps(graph)
    assert key == _content_key(program | {"graph": other}, compiler)
    # each reference of its own: to the node before it
    keys, texts = {key}, [json.dumps(graph)]
    for name in {name for name in names if f'{{"node": "{name}"}}' in texts[0]}:
        before = names[names.index(name) - 1]
        texts.append(texts[0].replace(f'{{"node": "{name}"}}', f'{{"node": "{before}"}}', 1))
        keys.add(_content_key(program | {"graph": json.loads(texts[-1])}, compiler))
    assert len(keys) == len(texts) > 50


@pytest.mark.slow  # compiles twice
def test_inductor_leaves_nothing(program, monkeypatch, tmp_path) -> None:
    """Neither in the temporary directory nor beside the package, and it uses nothing from there."""
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("SPECC_CACHE_DIR", str(cache))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    seen = []

    run = WarmProcess.run

    def see(self, arguments, environment, children):
        result = run(self, arguments, environment, children)
        seen.append(sorted(path.name for path in Path(environment["TMPDIR"]).iterdir()))
        (inductor,) = {Path(environment["TORCHINDUCTOR_CACHE_DIR"])}
        assert any(inductor.iterdir()), "Inductor works in the directory that it is given"
        return result

    monkeypatch.setattr(WarmProcess, "run", see)
    data = lower_aot_inductor.compile_package(program)
    assert len(seen) == 1
    assert list(temporary.iterdir()) == []
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert sorted(path.suffix for path in files) == [".pt2", ".sha256"]
    (package,) = (path for path in files if path.suffix == ".pt2")
    # a damaged one is compiled again
    package.write_bytes(data[: len(data) // 2])
    again = lower_aot_inductor.compile_package(program)
    assert len(seen) == 2
    assert package.read_bytes() == again
    assert zipfile.is_zipfile(package)


@pytest.mark.slow  # compiles
def test_constants_of_one_element_are_read_when_it_runs(tmp_path) -> None:
    """Inductor would compute with what is in their memory while it compiles, which is nothing."""
    graph = torch.fx.Graph()
    names = ("factor", *RUNTIME_INPUTS)
    factor, tokens, *_ = (graph.placeholder(name) for name in names)
    wide = graph.call_function(torch.ops.aten.to.dtype, (factor, torch.float32))
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (tokens, wide)))
    inputs: list[dict[str, Any]] = [{"name": name, "kind": "input"} for name in names]
    inputs[0] |= {"kind": "constant", "dtype": "int64", "shape": []}
    path = tmp_path / "program.pt2"
    lower_aot_inductor.lower({"inputs": inputs, "graph": graph_to_json(graph)}, path)
    program = torch._inductor.aoti_load_package(str(path))
    given, _ = lower_aot_inductor._example_inputs(
        BoundProgram({"inputs": inputs, "graph": graph_to_json(graph)})
    )
    for value in (7, -3):
        program.load_constants({"w0": torch.tensor(value)}, check_full_update=True)
        torch.testing.assert_close(program(*given), given[0][0] * float(value))
