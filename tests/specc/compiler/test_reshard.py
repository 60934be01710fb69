"""Engines of another number of ranks: what compiling the checkpoint for so many would write."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import specc
from specc.artifact import directory
from specc.artifact.directory import open_engine, read_manifest
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest import PROFILE_FILE, Manifest
from specc.compiler import reshard
from specc.compiler.build import build
from specc.compiler.reshard import reshard_engine
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError, OutputError, SpeccError
from specc.passes.base import PassResult
from specc.passes.lower.cpu.experts import PackExperts
from specc.speculation.plans import SpecPlan
from tests import models
from tests.traces import shared_traces

# from so many ranks to so many
WAYS = ((2, 1), (2, 4), (4, 2), (1, 2))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and the ways that it goes in the default tier; the others are slow."""

    model: str
    dtype: str
    ways: tuple[tuple[int, int], ...]
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    plans: tuple[SpecPlan, ...] = ()
    backend: str = "cpu"


CASES = {
    # two heads of keys and values, which are copied for four
    "llama": Case("llama", "float32", ()),
    # transposed in the checkpoint, and with biases of sums
    "gpt2": Case("gpt2", "bfloat16", ()),
    "mixtral": Case("mixtral", "float32", ((2, 1), (1, 2)), {"num_hidden_layers": 1}),
    # experts are columns of their parameters
    "turned": Case("llama4_text", "float32", ((1, 2),)),
    # the head is the embedding
    "tied": Case("gemma3-tied", "bfloat16", ()),
    # the model fuses its projections, and columns of logits are padded for four
    "padded": Case(
        "phi3", "float32", ((4, 2), (2, 4)), {"vocab_size": 126, "num_hidden_layers": 1}
    ),
    # states by heads and channels
    "hybrid": Case("qwen3_5", "float32", ((2, 1), (1, 2))),
    # drafts with second programs, and with blocks that passes vote on
    "self-drafts": Case(
        "llama",
        "float32",
        ((2, 1), (1, 2)),
        {"num_hidden_layers": 3},
        tuple(SpecPlan.from_widths((1, 1), (x,)) for x in ("self_l0to1", "self_w16_s0_b16")),
    ),
    "windows": Case(
        "gemma3",
        "float32",
        (),
        {"num_hidden_layers": 3},
        (SpecPlan.from_widths((1, 1), ("self_w16_s4",)),),
    ),
    # tables take the place of constants, and kernels that of what is cut
    "gpu": Case(
        "llama",
        "bfloat16",
        (),
        {"num_hidden_layers": 2},
        (SpecPlan.from_widths((1, 1), ("self_l0",)),),
        "cuda",
    ),
}
ROUTES = [
    pytest.param(
        name,
        way,
        marks=() if way in case.ways else pytest.mark.slow,
        id=f"{name}-{way[0]}-to-{way[1]}",
    )
    for name, case in CASES.items()
    for way in WAYS
    # an engine of one rank has no graph that can be cut there
    if case.backend == "cpu" or way[0] > 1
]
CHAIN = SpecPlan.from_widths((1, 1))


def config_for(num_ranks: int, **options: Any) -> CompileConfig:
    return CompileConfig(
        max_batch_size=2,
        max_seq_len=64,
        probe=False,
        tensor_parallel_size=num_ranks,
        **{"backend": "eager", **options},
    )


def compare(found: Path, wanted: Path) -> None:
    """Equal to the byte but for the report; and nothing else of the manifest differs."""
    files = {path.relative_to(wanted) for path in wanted.rglob("*") if path.is_file()}
    assert {path.relative_to(found) for path in found.rglob("*") if path.is_file()} == files
    for name in files - {Path("manifest.json"), Path("report.json")}:
        assert (found / name).read_bytes() == (wanted / name).read_bytes(), name
    # those for GPUs as well
    mine, other = (open_engine(x, verify=True, backend="eager") for x in (found, wanted))
    same = {"created": "", "files": {}}
    assert dataclasses.replace(mine, **same) == dataclasses.replace(other, **same)
    passes = [
        json.loads((engine / "report.json").read_text())["passes"] for engine in (found, wanted)
    ]
    # program by program: a cut comes after the earlier passes of all. What a backend refuses was
    # refused when the engine was compiled, for the same backend: that check changes nothing
    names = [
        sorted(
            (
                (item["program"], item["pass"], item["rewrites"])
                for item in one
                if item["pass"] not in ("RequireAttention", "RequireLayouts")
            ),
            key=lambda item: item[0],
        )
        for one in passes
    ]
    assert names[0] == names[1]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Engines as they are compiled of checkpoints."""
    root = tmp_path_factory.mktemp("fresh")

    @cache
    def checkpoint(name: str) -> Path:
        return models.save_tiny(CASES[name].model, root / name, **CASES[name].changes)

    @cache
    def engine(name: str, num_ranks: int) -> Path:
        path = root / f"{name}-{num_ranks}"
        case = CASES[name]
        config = config_for(num_ranks, backend=case.backend, dtype=case.dtype, plans=case.plans)
        with shared_traces():
            build(checkpoint(name), None, path, config)
        return path

    return engine


@pytest.mark.default(
    "mixtral-1-to-2", "turned-1-to-2", "padded-4-to-2", "self-drafts-2-to-1", "self-drafts-1-to-2"
)
@pytest.mark.parametrize(("name", "way"), ROUTES)
def test_engines_are_those_that_the_checkpoint_makes(
    fresh: Callable[[str, int], Path], tmp_path: Path, name: str, way: tuple[int, int]
) -> None:
    """In blocks, as for the CPU; among the files is what its code would be compiled of."""
    before, after = way
    reshard_engine(fresh(name, before), tmp_path / "engine", after)
    compare(tmp_path / "engine", fresh(name, after))
    # nothing was written through a link
    open_engine(fresh(name, before), verify=True, backend="eager")


@pytest.mark.slow
def test_a_whole_engine_for_gpus_cannot_be_cut(tmp_path: Path) -> None:
    checkpoint = models.save_tiny("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    build(checkpoint, None, tmp_path / "whole", config_for(1, backend="cuda", dtype="bfloat16"))
    with pytest.raises(ConfigError) as caught:
        reshard_engine(tmp_path / "whole", tmp_path / "engine", 2)
    assert caught.value.found.endswith("an engine of one rank for the backend cuda")
    assert caught.value.do == "compile it with --backend cuda --tensor-parallel-size 2"


@pytest.mark.parametrize(
    "way",
    [
        pytest.param((1, 2), id="1-to-2"),
        pytest.param((2, 1), id="2-to-1", marks=pytest.mark.slow),
    ],
)
def test_experts_of_an_older_engine_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: tuple[int, int]
) -> None:
    """It has them as parameters are, [E, K, N]; what is cut today is [E, N, K]."""
    before, after = way
    checkpoint = models.save_tiny("llama4_text", tmp_path / "checkpoint")
    with monkeypatch.context() as patch, shared_traces():
        patch.setattr(PackExperts, "run", lambda *_: PassResult())
        build(checkpoint, None, tmp_path / "old", config_for(before, backend="cpu"))
    with pytest.raises(EngineError) as caught:
        reshard_engine(tmp_path / "old", tmp_path / "engine", after)
    told = r"experts\.gate_up_proj \[4, 64, 192\], which is \[4, 192, 64\] here$"
    assert re.search(told, caught.value.found), caught.value.found
    assert caught.value.needed == "an engine of this version of specc"
    assert not (tmp_path / "engine").exists()


class Pair:
    """A target and its draft, compiled for two ranks and for one."""

    def __init__(self, root: Path) -> None:
        one = {"num_hidden_layers": 1}
        self.target = models.save_tiny("llama", root / "target", **one)
        self.draft = models.save_tiny("llama", root / "draft", noise=0.05, **one)
        self.two, self.one = root / "two", root / "one"
        for path, num_ranks in ((self.two, 2), (self.one, 1)):
            with shared_traces():
                build(self.target, self.draft, path, config_for(num_ranks, plans=(CHAIN,)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def engine(pair: Pair, tmp_path: Path) -> Path:
    """A copy of the engine of two ranks, to be broken."""
    return Path(shutil.copytree(pair.two, tmp_path / "engine"))


def test_drafts_carry_over_and_the_result_is_probed(pair: Pair, tmp_path: Path) -> None:
    told: list[str] = []
    output = tmp_path / "one"
    made = specc.reshard(pair.two, output, 1, listen=lambda event: told.append(event.phase))
    assert made.manifest.probe is not None
    assert made.manifest.probe["num_spec_steps"] > 0
    assert not made.warnings
    draft = read_manifest(pair.one).files["draft-0/weights.safetensors"]
    assert made.manifest.files["draft-0/weights.safetensors"] == draft
    assert list(dict.fromkeys(told)) == [
        "check engine", "read target", "read draft_0", "rewrite target", "check files",
        "write programs", "write target weights", "probe",
    ]  # fmt: skip
    specc.reshard(pair.two, tmp_path / "unprobed", 1, probe=False)
    compare(tmp_path / "unprobed", pair.one)
    # nothing was written through a link
    open_engine(pair.two, verify=True)


@pytest.mark.slow
def test_drafts_that_are_cut_are_cut_anew(pair: Pair, tmp_path: Path) -> None:
    """For another number of ranks, or whole again for one."""
    for num_ranks in (2, 4):
        config = config_for(num_ranks, plans=(CHAIN,), draft_tensor_parallel_size=num_ranks)
        with shared_traces():
            build(pair.target, pair.draft, tmp_path / f"both-{num_ranks}", config)
    made = specc.reshard(tmp_path / "both-2", tmp_path / "four", 4, probe=False)
    assert made.manifest.led_models == ("target", "draft_0")
    compare(tmp_path / "four", tmp_path / "both-4")
    specc.reshard(tmp_path / "both-2", tmp_path / "one", 1, probe=False)
    compare(tmp_path / "one", pair.one)


@pytest.mark.slow
def test_whole_drafts_of_engines_for_gpus_are_taken_over(pair: Pair, tmp_path: Path) -> None:
    """Their graphs hold kernels, and are not read as models are."""
    for num_ranks in (4, 2):
        config = config_for(num_ranks, plans=(CHAIN,), backend="cuda", dtype="bfloat16")
        with shared_traces():
            build(pair.target, pair.draft, tmp_path / f"fresh-{num_ranks}", config)
    specc.reshard(tmp_path / "fresh-4", tmp_path / "two", 2, probe=False)
    compare(tmp_path / "two", tmp_path / "fresh-2")


def test_tiles_are_those_of_the_new_number_of_ranks(tmp_path: Path) -> None:
    """Rank 0 of two holds half of the columns beside all of them, so that fewer rows fit."""
    checkpoint = models.save_tiny("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    plan = SpecPlan.from_widths((1,) * 24, ("lookup-3",))
    for num_ranks in (1, 2):
        config = CompileConfig(
            plans=(plan,),
            max_batch_size=64,
            max_seq_len=64,
            max_logits_mb=1,
            backend="eager",
            tensor_parallel_size=num_ranks,
        )
        with shared_traces():
            build(checkpoint, None, tmp_path / f"fresh-{num_ranks}", config)
    for before, after, tile in ((1, 2, 13), (2, 1, None)):
        made = reshard_engine(tmp_path / f"fresh-{before}", tmp_path / f"for-{after}", after)
        assert made.manifest.plans[0].tile == tile
        compare(tmp_path / f"for-{after}", tmp_path / f"fresh-{after}")


@pytest.mark.slow
def test_an_engine_can_take_its_own_place(engine: Path, pair: Pair) -> None:
    with pytest.raises(OutputError, match="exists"):
        reshard_engine(engine, engine, 1)
    reshard_engine(engine, engine, 1, force=True)
    compare(engine, pair.one)


@pytest.mark.slow
def test_nonfinite_weights_that_were_allowed_stay(tmp_path: Path) -> None:
    """Those of a part that two ranks share are counted once."""
    checkpoint = models.save_tiny("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5:7] = torch.nan
    tensors["model.norm.weight"][1] = torch.inf
    save_file(tensors, file, {"format": "pt"})
    for num_ranks in (1, 2):
        config = config_for(num_ranks, allow_nonfinite_weights=True)
        build(checkpoint, None, tmp_path / f"fresh-{num_ranks}", config)
    made = reshard_engine(tmp_path / "fresh-2", tmp_path / "engine", 1)
    compare(tmp_path / "engine", tmp_path / "fresh-1")
    assert made.manifest.models[0].nonfinite_weights == 3


@pytest.mark.slow
def test_a_profile_is_left_out(engine: Path, tmp_path: Path) -> None:
    with EngineWriter(engine, force=True) as writer:
        manifest = read_manifest(engine)
        for name, entry in manifest.files.items():
            writer.link_file(engine / name, name, entry)
        writer.write_json(PROFILE_FILE, {"plans": {"1": CHAIN.name}})
        writer.commit(manifest)
    made = reshard_engine(engine, tmp_path / "one", 1)
    assert PROFILE_FILE not in made.manifest.files
    assert "specc tune" in made.warnings[0]


def change(engine: Path, **fields: Any) -> None:
    file = engine / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def lose(engine: Path) -> None:
    (engine / "target" / "rank-1.weights.safetensors").unlink()


def swap(engine: Path) -> None:
    """A file of the same tensors, but of another engine."""
    file = engine / "target" / "rank-1.weights.safetensors"
    file.write_bytes((engine / "target" / "rank-0.weights.safetensors").read_bytes())


BROKEN: list[tuple[Callable[[Path], object], type[SpeccError], str]] = [
    (shutil.rmtree, EngineError, "engine does not exist"),
    (lambda engine: (engine / "manifest.json").unlink(), EngineError, "is not an engine"),
    (lambda engine: change(engine, schema_version=4), EngineError, "written by an older specc"),
    (lambda engine: change(engine, instructions=9), EngineError, "of instructions 9"),
    (lose, EngineError, r"rank-1\.weights\.safetensors is missing"),
    (swap, EngineError, r"rank-1\.weights\.safetensors is target/rank-0"),
    (lambda engine: (engine / "target" / "whole.json").write_text("{}"), EngineError, "whole.json"),
]


@pytest.mark.parametrize(("breaks", "kind", "told"), BROKEN)
def test_what_is_wrong_with_an_engine_is_told(
    engine: Path, breaks: Callable[[Path], object], kind: type[SpeccError], told: str
) -> None:
    breaks(engine)
    output = engine.parent / "output"
    with pytest.raises(kind, match=told):
        reshard_engine(engine, output, 1)
    assert [path.name for path in engine.parent.iterdir() if path != engine] == []


def test_a_weight_between_the_samples_was_altered(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What loads compare sees all of a small file; of a large one it may miss this."""
    file = engine / "target" / "rank-1.weights.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    monkeypatch.setattr(directory, "_check_rank_files", lambda *_: None)
    with pytest.raises(EngineError, match=r"rank-1\.weights\.safetensors has sha256"):
        reshard_engine(engine, engine.parent / "output", 1)
    assert not (engine.parent / "output").exists()


@pytest.mark.parametrize(
    ("num_ranks", "told"),
    [
        (2, "an engine of 2 ranks"),
        (0, "--tensor-parallel-size 0"),
        (3, "for 3 ranks"),
        pytest.param(8, "for 8 ranks", marks=pytest.mark.slow),
    ],
)
def test_numbers_of_ranks_are_refused_before_weights_are_read(
    engine: Path, num_ranks: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("too late")

    monkeypatch.setattr(reshard, "check_hashes", read)
    with pytest.raises(ConfigError, match=told):
        reshard_engine(engine, engine.parent / "output", num_ranks)
    assert not (engine.parent / "output").exists()


def test_other_backends_are_refused(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Manifest.from_json

    def read(data: Any) -> Manifest:
        return dataclasses.replace(plain(data), backend="onnx")

    monkeypatch.setattr(Manifest, "from_json", read)
    with pytest.raises(ConfigError, match="an engine for the backend onnx") as error:
        reshard_engine(engine, engine.parent / "output", 4)
    assert "one for cpu or cuda or eager" in error.value.needed
