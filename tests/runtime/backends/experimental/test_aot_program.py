"""Compiled passes on a GPU, with packages that compute by the graph: loading, binding, running."""

from __future__ import annotations

import gc
import json
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from specc.artifact.directory import read_manifest
from specc.config import CompileConfig
from specc.errors import EngineError
from specc.passes.lower.experimental import aot_inductor
from specc.runtime.backends.captured.captures import CaptureWarning
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.experimental import aot_program as aot_cuda_program
from specc.runtime.backends.experimental.aot_program import (
    CompiledCudaProgram,
    PackageWarning,
    load_model,
)
from specc.runtime.backends.program_files import read_json
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan

# no GPU has run it, and no default path uses it
pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7, 8], [40, 41], [9] * 7]
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
CPU = torch.device("cpu")


class Package:
    """A loaded package: the program's graph over the weights that were bound to it, and no others.

    Like torch's, it keeps what is bound, and knows nothing but what it is given: its content is
    its file in the engine and the program.
    """

    made: ClassVar[list[Package]] = []

    def __init__(self, data: bytes, device: torch.device) -> None:
        self.file, program = json.loads(data)
        self._entries = [e for e in program["inputs"] if e["kind"] in ("weight", "constant")]
        self._program = program
        self._weights: dict[str, Tensor] = {}
        self.shapes: list[tuple] = []
        self.made.append(self)

    def get_constant_fqns(self) -> list[str]:
        return [f"w{i}" for i in range(len(self._entries))]

    def load_constants(
        self, constants_map: dict[str, Tensor], *, check_full_update: bool, user_managed: bool
    ) -> None:
        assert check_full_update
        assert user_managed
        self._weights = constants_map

    def __call__(self, inputs: list[Tensor | None], caches: list[Tensor]) -> Tensor:
        self.shapes.append(tuple(None if x is None else tuple(x.shape) for x in inputs))
        weights = {e["key"]: self._weights[f"w{i}"] for i, e in enumerate(self._entries)}
        # k and v of each layer, in the order of the program's inputs
        kept = [e for e in self._program["inputs"] if e["kind"] == "cache"]
        layers: dict[int, dict[str, Tensor]] = {}
        for entry, cache in zip(kept, caches, strict=True):
            layers.setdefault(entry["layer"], {})[entry["part"]] = cache
        pairs = [(layers[i]["k"], layers[i]["v"]) for i in sorted(layers)]
        return ModelProgram(self._program, weights, pairs)(*inputs)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> list[Package]:
    """What was loaded, in order; the streams are those that a test names."""
    Package.made = []
    # a default is bound when its function is made
    defaults = (Package, lambda device: 1, lambda: False)
    monkeypatch.setattr(CompiledCudaProgram.__init__, "__defaults__", defaults)
    return Package.made


def write_package(program: Any, sizes: Any, caches: Any, package: Path) -> None:
    file = package.relative_to(package.parents[2]).as_posix()
    package.write_text(json.dumps([file, program]))


@pytest.fixture(scope="module")
def aot_engine(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair with packages."""
    from specc.compiler.build import build

    path = tmp_path_factory.mktemp("engines") / "aot"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECC_EXPERIMENTAL", "aot-inductor")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(aot_inductor, "compile_package", write_package)
        config = CompileConfig(
            plans=(SpecPlan.from_widths((2, 1)),),
            max_seq_len=48,
            max_batch_size=2,
            backend="aot-inductor",
        )
        build(str(tiny_models.target), str(tiny_models.draft), path, config)
    return path


def generate(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("plan", ["off", "tree-2-1"])
def test_steps_run_packages_alone(aot_engine, tiny_engine, plan, device, packages) -> None:
    """The sizes that the compiler foresaw are those of the steps, and the output is the same."""
    ran: list[tuple] = []
    eager = ModelProgram.forward

    def counted(program: ModelProgram, *inputs: Any) -> Tensor:
        if isinstance(program, CompiledCudaProgram):
            ran.append(tuple(x.shape[0] for x in inputs if x is not None))
        return eager(program, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelProgram, "forward", counted)
        llm = LLM(aot_engine, plan=plan)
        assert ran == [], "a captured step ran a graph: the compiler did not foresee its sizes"
        index = [
            entry["file"]
            for model in read_manifest(aot_engine).models
            for entry in read_json(aot_engine / model.dir / "packages.json")["packages"]
        ]
        assert sorted(package.file for package in packages) == sorted(index)
        found = generate(llm)
    assert ran, "prompts run by the graph"
    assert found == generate(LLM(tiny_engine, plan="off"))


def hashes_of(path: Path) -> dict[str, str]:
    return {name: entry.sha256 for name, entry in read_manifest(path).files.items()}


def program_of(path: Path, **options: Any) -> tuple[CompiledCudaProgram, list[Tensor]]:
    """The target with packages for passes of two tokens, and weights of ones."""
    program = read_json(path / "target/program.json")
    weights = {
        e["key"]: torch.ones(e["shape"], dtype=getattr(torch, e["dtype"]))
        for e in program["inputs"]
        if e["kind"] in ("weight", "constant")
    }
    shapes = [e["shape"] for e in program["inputs"] if e["kind"] == "cache"]
    caches = [(torch.zeros(8, 16, *s), torch.zeros(8, 16, *s)) for s in shapes[::2]]
    index = read_json(path / "target/packages.json")
    packages = {
        tuple(None if x is None else tuple(x) for x in entry["inputs"]): (
            path / entry["file"],
            hashes_of(path)[entry["file"]],
        )
        for entry in index["packages"]
    }
    made = CompiledCudaProgram(program, packages, weights, caches, CPU, **options)
    return made, list(weights.values())


def one_token(batch: int = 1) -> list[Tensor | None]:
    """Inputs of plain decoding."""
    i32 = torch.int32
    return [
        torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64),
        torch.arange(batch + 1, dtype=i32), torch.zeros(batch, dtype=i32),
        torch.zeros(batch, dtype=i32), None, torch.zeros(batch, 4, dtype=i32),
        torch.arange(batch),
    ]  # fmt: skip


def test_each_stream_has_a_runner_of_its_own(aot_engine, packages) -> None:
    streams = [1]
    program, _ = program_of(aot_engine, stream=lambda device: streams[0])
    for streams[0] in (1, 2, 1, 2):
        program(*one_token())
    assert [len(package.shapes) for package in packages] == [2, 2]
    program(*one_token(2))
    assert len(packages) == 3
    assert len({package.file for package in packages}) == 2


def test_other_shapes_run_the_graph(aot_engine, packages) -> None:
    program, _ = program_of(aot_engine)
    inputs = one_token()
    inputs[6] = torch.zeros(1, 5, dtype=torch.int32)  # a wider block table is another pass
    assert program(*inputs).shape == (1, 260)
    assert program(*one_token(3)).shape == (3, 260)
    assert packages == []


def test_a_capture_loads_nothing(aot_engine, packages) -> None:
    capturing = [True]
    program, _ = program_of(aot_engine, is_capturing=lambda: capturing[0])
    with pytest.raises(RuntimeError, match="before its capture"):
        program(*one_token())
    assert packages == []
    capturing[0] = False
    program(*one_token())
    capturing[0] = True
    program(*one_token())
    assert len(packages) == 1


def test_packages_get_what_they_were_compiled_for(aot_engine, packages) -> None:
    """Tensors in one piece, weights without a copy, and caches in the order of the program."""
    program, weights = program_of(aot_engine)
    inputs = one_token(2)
    inputs[6] = torch.zeros(2, 8, dtype=torch.int32)[:, ::2]
    seen: list[Any] = []
    run = Package.__call__

    def checked(package: Package, given: Any, caches: Any) -> Tensor:
        assert all(x is None or x.is_contiguous() for x in given)
        seen.append({x.data_ptr() for x in package._weights.values()})
        return run(package, given, caches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Package, "__call__", checked)
        program(*inputs)
    assert seen == [{weight.data_ptr() for weight in weights}]


def test_weights_go_with_the_program(aot_engine, packages) -> None:
    """A package that torch keeps does not keep the memory of the weights."""
    program, _ = program_of(aot_engine)
    program(*one_token())
    (package,) = packages
    held = package._weights
    assert all(x.numel() for x in held.values())
    del program
    gc.collect()
    assert not any(x.numel() or x.untyped_storage().nbytes() for x in held.values())


def caches_of(path: Path, blocks: int) -> list[tuple[Tensor, Tensor]]:
    shapes = read_json(path / "target/packages.json")["caches"]
    return [(torch.zeros(blocks, *s[1:]), torch.zeros(blocks, *s[1:])) for s in shapes[::2]]


def weights_of(path: Path) -> dict[str, Tensor]:
    from specc.runtime.backends.program_files import MappedWeights

    return dict(MappedWeights(path / "target/weights.safetensors").items())


def test_other_caches_are_no_reason_to_compute_nonsense(aot_engine) -> None:
    weights = weights_of(aot_engine)
    hashes = hashes_of(aot_engine)
    with pytest.warns(PackageWarning, match="max_num_seqs"):
        found = load_model(aot_engine, "target", weights, caches_of(aot_engine, 4), CPU, hashes)
    assert type(found) is ModelProgram
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_model(aot_engine, "target", weights, caches_of(aot_engine, 8), CPU, hashes)
    assert type(found) is CompiledCudaProgram


def test_code_of_another_gpu_is_not_loaded(aot_engine, monkeypatch) -> None:
    index = read_json(aot_engine / "target/packages.json")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    reason = aot_cuda_program._mismatch(index, [], torch.device("cuda"))
    assert reason == "it is for GPUs of capability 9.0, this one's is 8.0"


def test_fewer_sequences_run_without_packages(aot_engine, device, packages) -> None:
    with pytest.warns(PackageWarning):
        loaded = Engine.load(aot_engine, max_num_seqs=1)
    assert packages == []
    assert loaded.backend == "cuda"


def test_a_malformed_index_is_an_error(aot_engine, tmp_path) -> None:
    directory = tmp_path / "target"
    directory.mkdir()
    for name in ("program.json", "packages.json"):
        (directory / name).write_bytes((aot_engine / "target" / name).read_bytes())
    index = read_json(directory / "packages.json") | {"schema_version": 2}
    (directory / "packages.json").write_text(json.dumps(index))
    with pytest.raises(EngineError, match="schema 2"):
        load_model(tmp_path, "target", weights_of(aot_engine), caches_of(aot_engine, 8), CPU, {})


def test_code_that_the_manifest_does_not_list_is_not_loaded(aot_engine, packages) -> None:
    """An index may name any file of the machine."""
    hashes = hashes_of(aot_engine)
    file = read_json(aot_engine / "target/packages.json")["packages"][0]["file"]
    del hashes[file]
    with pytest.raises(EngineError, match=f"names {file}, which the manifest does not list"):
        load_model(
            aot_engine, "target", weights_of(aot_engine), caches_of(aot_engine, 8), CPU, hashes
        )
    assert packages == []


def test_code_of_an_engine_that_took_its_place_is_not_loaded(aot_engine, packages) -> None:
    """Packages are read at their first pass, when another engine may have this one's name."""
    made, _ = program_of(aot_engine)
    made._packages = {shapes: (file, "0" * 64) for shapes, (file, _) in made._packages.items()}
    with pytest.raises(EngineError, match="as the manifest says"):
        made(*one_token())
    assert packages == []


def test_a_package_that_was_not_warm_leaves_the_step_uncaptured(
    aot_engine, tiny_engine, device, monkeypatch
) -> None:
    """Nothing loads in a capture: such a step runs operator by operator, and says so."""
    made = device.capture
    is_capturing = [False]

    def capture(run: Any) -> Any:
        is_capturing[0] = True
        try:
            return made(run)
        finally:
            is_capturing[0] = False

    device.capture = capture
    # the stream of the capture is not that of the run before it
    defaults = (Package, lambda _: int(is_capturing[0]), lambda: is_capturing[0])
    monkeypatch.setattr(CompiledCudaProgram.__init__, "__defaults__", defaults)
    with pytest.warns(CaptureWarning, match="before its capture"):
        llm = LLM(aot_engine, plan="tree-2-1")
    assert generate(llm) == generate(LLM(tiny_engine, plan="off"))


def test_the_check_for_a_gpu_compares_both(
    tiny_models, device, packages, monkeypatch, tmp_path
) -> None:
    """What a GPU is asked, asked of the device that stands for one."""
    from tests.gpu.aot_packages import compare, first_difference

    for name in ("SPECC_EXPERIMENTAL", "PYTHONPATH"):  # it sets them
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(aot_inductor, "compile_package", write_package)
    pair = (str(tiny_models.target), str(tiny_models.draft))
    found = compare(*pair, (2, 1), PROMPTS[:2], 9)
    assert found["aot_inductor_packages"] == 8
    assert found["cuda_packages"] == 0
    assert found["equal_tokens"] == [9, 9]
    assert found["aot_inductor_captured"] == found["cuda_captured"] == [True, True]
    assert found["aot_inductor_warnings"] == found["cuda_warnings"] == []
    assert len(packages) == 8
    assert [first_difference([1, 2, 3], x) for x in ([1, 2, 3], [1, 4, 3])] == [3, 1]
