"""Engines whose target is segments: the same tokens, whatever stays in memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.manifest import Manifest
from specc.artifact.offload import least_budget, read_pieces
from specc.artifact.segments import SegmentedModel
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError
from specc.runtime.engine import Engine
from specc.runtime.engine_args import EngineArgs
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from specc.system.json_file import read_json
from tests import models
from tests.engines import build
from tests.interleavings import Figures, NearTies, Solo, run_interleaving
from tests.runtime.backends import broken_disk, lose_reads
from tests.runtime.ranks.test_micro_batches import draw

PROMPTS = models.prompts()[1:4]
PLAN = SpecPlan.from_widths((3, 2, 1))
# of the six layers of the tiny target two buffers and two layers fit
BUDGET = 500_000
# of a rank of two, its projections in float32: q, k, v and o of 64 columns, and three of 128
LAYER_BYTES = 4 * 64 * (32 + 16 + 16 + 32 + 3 * 64)


def make(root: Path, backend: str, width: int = 96, **options: object) -> Path:
    """An engine of segments, of a target with so many columns between its projections."""
    checkpoints = [root / "target", root / "draft"]
    models.save_tiny("qwen3", checkpoints[0], num_hidden_layers=6, intermediate_size=width)
    models.save_tiny("qwen3", checkpoints[1], noise=models.DRAFT_NOISE["qwen3"])
    config = CompileConfig(
        plans=(PLAN,),
        max_seq_len=models.MAX_SEQ_LEN,
        max_batch_size=4,
        backend=backend,
        probe=False,
        segments=True,
        **options,  # type: ignore[arg-type]
    )
    return build(checkpoints[0], checkpoints[1], root / "engine", config)


def tokens(engine: Engine, plan: str, **params: object) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=12, **{"temperature": 0, **params})  # type: ignore[arg-type]
    return [
        list(out.outputs[0].token_ids) for out in LLM(engine, plan=plan).generate(PROMPTS, sampling)
    ]


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("eager"), "eager")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("cpu"), "cpu")


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("cut"), "cpu", tensor_parallel_size=2)


def whole_of(path: Path, root: Path) -> Path:
    """The same engine, whose manifest knows of no segments: eager then runs the whole graph."""
    copy = root / "whole"
    shutil.copytree(path, copy)
    data = json.loads((copy / "manifest.json").read_text())
    del data["segments"]
    (copy / "manifest.json").write_text(json.dumps(data))
    return copy


@pytest.mark.slow
def test_weights_in_memory_and_weights_in_the_mapped_file_give_the_same_tokens(
    compiled: Path,
) -> None:
    held, mapped = (Engine.load(compiled, mmap=mmap) for mmap in (False, True))
    assert held.mapped_weights == ()
    assert len(mapped.mapped_weights) == 2
    for plan in ("off", PLAN.name):
        assert tokens(held, plan) == tokens(mapped, plan)
    # what streams weights from their file does not hold them besides
    assert Engine.load(compiled, offload_weights=BUDGET).mapped_weights


def test_an_eager_engine_runs_its_segments(eager: Path, tmp_path: Path) -> None:
    whole = Engine.load(whole_of(eager, tmp_path))
    engine = Engine.load(eager)
    assert type(engine.target).__name__ == "SegmentedProgram"
    assert type(whole.target).__name__ == "ModelProgram"
    for plan in ("off", PLAN.name):
        assert tokens(engine, plan) == tokens(whole, plan)
    sampled = {"temperature": 1.0, "seed": 3}
    assert tokens(engine, PLAN.name, **sampled) == tokens(whole, PLAN.name, **sampled)


@pytest.mark.slow
def test_passes_of_one_row_before_passes_of_many(eager: Path) -> None:
    """What a segment hands on from one row of logits has the shape of logits, and is none."""
    engine, (prompt, *_) = Engine.load(eager), PROMPTS
    sampling = SamplingParams(max_tokens=12, temperature=0)
    (alone,) = LLM(engine, plan="off").generate([prompt], sampling)
    assert alone.outputs[0].token_ids == tokens(engine, PLAN.name)[0]


def test_the_manifest_counts_segments_and_kinds(eager: Path) -> None:
    manifest = Manifest.from_json(read_json(eager / "manifest.json", EngineError, "", ""))
    assert manifest.segments is not None
    assert (manifest.segments.num_segments, manifest.segments.num_kinds) == (8, 3)
    assert "target/segments.json" in manifest.required_files


def test_only_the_backend_cpu_reads_weights_from_files(eager: Path) -> None:
    with pytest.raises(ConfigError, match="--offload-weights with backend eager"):
        Engine.load(eager, offload_weights=BUDGET)


@pytest.mark.parametrize(
    ("given", "parsed"),
    [("700M", 700 << 20), ("1.5GiB", 3 << 29), ("4 GB", 4 << 30), ("auto", "auto"), (77, 77)],
)
def test_budgets_are_read_as_people_write_them(given: str | int, parsed: str | int) -> None:
    assert EngineArgs("engine", offload_weights=given).offload_weights == parsed


@pytest.mark.parametrize("given", ["much", "-3M", "0", "4X", 0, -1, True])
def test_other_budgets_are_refused(given: str | int) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--offload-weights {given}")):
        EngineArgs("engine", offload_weights=given)


@pytest.mark.slow
def test_offloaded_weights_give_the_same_tokens(compiled: Path) -> None:
    """Greedy and sampled, off and with trees, with all, some and none of the layers in memory."""
    wanted = Engine.load(compiled, backend="eager")
    plans = ("off", PLAN.name)
    sampled = {"temperature": 1.0, "seed": 3}
    kept = []
    for budget in (None, "auto", BUDGET, 300_000):
        engine = Engine.load(compiled, offload_weights=budget)
        for plan in plans:
            assert tokens(engine, plan) == tokens(wanted, plan), budget
            assert tokens(engine, plan, **sampled) == tokens(wanted, plan, **sampled), budget
        offload = engine.target.offload  # type: ignore[attr-defined]
        if offload is not None:
            kept.append((len(offload.kept), len(offload.streamed)))
    assert kept[0] == (7, 0)
    assert kept[-1] == (0, 7)
    assert 0 < kept[1][0] < 7


@pytest.mark.slow
def test_interleavings_with_offloaded_weights(compiled: Path) -> None:
    """Requests join, leave, give way, share prefixes, by trees, dice, grammars, log probabilities.

    Some layers in memory, and none; against solo runs with all of them.
    """
    room: dict[str, Any] = {"kv_cache_tokens": 160}
    solo, ties = Solo(Engine.load(compiled)), NearTies(Engine.load(compiled))
    for budget in (BUDGET, 300_000):
        engine, figures = Engine.load(compiled, offload_weights=budget, **room), Figures()
        prompts = [list(prompt[:40]) for prompt in models.prompts()]
        for seed in range(4):
            run_interleaving(
                engine, solo, seed, prompts, figures, ties,
                draw=draw, max_tokens=70, num_requests=9,
            )  # fmt: skip
        assert figures.num_ties <= figures.num_compared // 20
        assert figures.num_preemptions > 0
        assert figures.num_cached_tokens > 0
        assert figures.num_cancelled > 0
        assert set(figures.steps) == set(engine.plans)


@pytest.mark.slow
def test_a_pass_reads_what_stays_in_the_file_once(compiled: Path) -> None:
    engine = Engine.load(compiled, offload_weights=300_000)
    target = engine.target
    tokens(engine, "off")
    steps, before = 50, target.stream.bytes_read()  # type: ignore[attr-defined]
    inputs = _pass(engine)
    for _ in range(steps):
        target(*inputs)
    read = (target.stream.bytes_read() - before) / steps  # type: ignore[attr-defined]
    offload = target.offload  # type: ignore[attr-defined]
    assert read == pytest.approx(offload.bytes_per_pass, rel=0.02)
    assert offload.memory_bytes <= 300_000


def _pass(engine: Engine) -> tuple:
    import torch

    table = torch.zeros(1, 1, dtype=torch.int32)
    one = torch.zeros(1, dtype=torch.int32)
    start = torch.tensor([0, 1], dtype=torch.int32)
    words = torch.ones(1, 1, dtype=torch.int64)
    return (one.long(), one.long(), start, one, one, words, table, one.long())


@pytest.mark.slow
def test_a_budget_below_two_buffers_is_refused(compiled: Path) -> None:
    with pytest.raises(ConfigError, match=r"at least 2\d\d\.\d KiB: two buffers for segments"):
        Engine.load(compiled, offload_weights=100_000)


@pytest.mark.slow
def test_a_file_that_is_cut_ends_open_requests_and_nothing_else(compiled: Path) -> None:
    """Named, and when the file is whole again the next request runs."""
    engine = Engine.load(compiled, offload_weights=300_000)
    wanted = tokens(engine, PLAN.name)
    file = compiled / "target" / "weights.safetensors"
    data = file.read_bytes()
    piece = engine.target.offload.streamed[3]  # type: ignore[attr-defined]
    os.truncate(file, piece.offset)
    try:
        with pytest.raises(EngineError, match=r"weights\.safetensors was cut|ends at byte"):
            tokens(engine, PLAN.name)
    finally:
        with open(file, "r+b") as opened:
            opened.write(data)
    assert tokens(engine, PLAN.name) == wanted


def on_a_broken_disk(
    engine: Path, root: Path, budget: int, name: str, kinds: str
) -> dict[str, Any]:
    """What `broken_disk` says; skips where the file system takes no O_DIRECT."""
    shim = str(broken_disk.build_shim(root))
    extra = {"LD_PRELOAD": shim, "BROKEN_DISK": str(root / "switch"), "BROKEN_NAME": name}
    done = subprocess.run(
        [sys.executable, "-P", broken_disk.__file__, str(engine), str(budget), kinds],
        env=os.environ | extra,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not report["direct"]:
        pytest.skip("the file system of temporary files takes no O_DIRECT")
    return report


FAILED = r"\S+weights\.safetensors cannot be read at byte \d+: Input/output error"
STOPPED = r"\S+weights\.safetensors: no byte of the weights was read for 8 seconds"


@pytest.mark.slow
def test_a_disk_that_fails_or_stops_is_named_within_ten_seconds(
    compiled: Path, tmp_path: Path
) -> None:
    """An error of a read, and one that never returns; after the first the engine goes on."""
    report = on_a_broken_disk(compiled, tmp_path, 300_000, "weights", "eh")
    assert re.match(r"EngineError: found:  " + FAILED, report["e"])
    assert report["after"]
    assert re.match(r"EngineError: found:  " + STOPPED, report["h"])
    assert report["e_s"] < 5
    assert report["h_s"] < 10
    assert not report["lost"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", lose_reads.KINDS)
@pytest.mark.parametrize("which", ["compiled", "cut"])
def test_requests_whose_weights_cannot_be_read(
    request: pytest.FixtureRequest, tmp_path: Path, which: str, kind: str
) -> None:
    """Those that run get an error; those that wait go on, where there is one process."""
    engine = shutil.copytree(request.getfixturevalue(which), tmp_path / "engine")
    lose_reads.lose(engine, kind, broken_disk.build_shim(tmp_path)).check()


@pytest.mark.slow
def test_ranks_read_their_own_parts(cut: Path) -> None:
    """Two ranks, each with some of its layers in memory: the tokens of both with all of them."""
    found = []
    for budget in (None, 200_000):
        engine = Engine.load(cut, offload_weights=budget, oversubscribes=True)
        try:
            found.append([tokens(engine, plan) for plan in ("off", PLAN.name)])
        finally:
            engine.close()
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounded", "part"),
    [
        ({"quantize": "int8"}, 3.0),
        ({"quantize": "fp8"}, 3.0),
        ({"quantize": "int4", "quantize_group": 32}, 5.0),
    ],
    ids=["int8", "fp8", "int4"],
)
def test_ranks_read_their_own_integers(
    tmp_path: Path, rounded: dict[str, object], part: float
) -> None:
    """Offloaded weights of a cut target that are quantized: tokens as in memory, fewer bytes.

    By rank 0's part: a layer in float32 has at least `part` times the bytes that are read of it.
    """
    path = make(tmp_path, "cpu", width=128, tensor_parallel_size=2, **rounded)
    model = SegmentedModel.from_json(json.loads((path / "target/segments.json").read_text()))
    pieces, _ = read_pieces(model, path / "target/rank-0.weights.safetensors")
    least, found = least_budget(pieces), []
    for budget in (None, least + 2 * max(piece.span for piece in pieces), least):
        engine = Engine.load(path, offload_weights=budget, oversubscribes=True)
        try:
            drawn = tokens(engine, PLAN.name, temperature=1.0, seed=3)
            found.append([*(tokens(engine, plan) for plan in ("off", PLAN.name)), drawn])
            offload = engine.target.program.offload  # type: ignore[attr-defined]
        finally:
            engine.close()
        if budget is not None:
            assert bool(offload.kept) == (budget > least)
            assert offload.memory_bytes <= budget
            layers = [piece for piece in offload.streamed if "layers" in piece.keys[0]]
            assert layers
            assert all(piece.size * part < LAYER_BYTES for piece in layers)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == found[0][1]
    assert len(set(found[0][0][0])) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "kind", "told"),
    [(0, "e", FAILED), (1, "h", STOPPED)],
    ids=["rank-0-fails", "rank-1-stops"],
)
def test_a_disk_of_one_rank_ends_the_engine_and_is_named(
    cut: Path, tmp_path: Path, rank: int, kind: str, told: str
) -> None:
    """The others wait in a sum of the same pass, so there is no next one."""
    report = on_a_broken_disk(cut, tmp_path, 200_000, f"rank-{rank}.weights", kind)
    begins = rf"RankError: found:  rank {rank} \(pid \d+\) failed( in order \d+)?: "
    assert re.match(begins + told, report[kind]), report[kind]
    assert report[f"{kind}_s"] < 10
    assert report["lost"]
