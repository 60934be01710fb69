"""Every field of a manifest that cannot be is an error."""

from __future__ import annotations

import dataclasses
import json

import pytest

from specc.artifact.directory import open_engine
from specc.artifact.manifest_entries import ParallelEntry, TokenizerEntry
from specc.artifact.model_entry import TapsEntry, VocabularyEntry
from tests.specc.artifact.engine_folders import make_manifest, refused, write_engine


@pytest.fixture
def engine(tmp_path):
    write_engine(tmp_path / "engine")
    return tmp_path / "engine"


class TestManifest:
    @pytest.mark.parametrize(
        ("path", "value", "found"),
        [
            (("models", 0, "dtype"), None, "dtype is None"),
            (("models", 0, "dtype"), ..., "dtype is missing"),
            (("surprise",), 1, "surprise is unknown"),
            (("models",), {}, "models is {}"),
            (("models", 0, "vocab_size"), "100", r"models\[0\]\.vocab_size is '100'"),
            (("models", 0, "vocab_size"), True, r"models\[0\]\.vocab_size is True"),
            (("models", 0, "vocab_size"), 1.0, r"models\[0\]\.vocab_size is 1\.0"),
            (("models", 0, "layers", 1, "window"), ..., r"layers\[1\]\.window is missing"),
            (("models", 0, "layers", 1, "slab"), 1, "has slab 1"),
            (("models", 0, "layers", 1, "index"), 2, "does not fit slab 0"),
            (("models", 0, "layers", 1, "head_dim"), 4, "does not fit slab 0"),
            (("models", 0, "dir"), "../elsewhere", "the path '../elsewhere'"),
            (("models", 0, "dir"), "elsewhere", "elsewhere/program.json is used but not listed"),
            (("models",), [], "models is empty"),
            (("plans", 0, "widths"), ["a"], r"plans\[0\]\.widths\[0\] is 'a'"),
            (("plans", 0, "drafts"), "draft_0", r"plans\[0\]\.drafts is 'draft_0'"),
            (("plans", 0, "combine"), ..., r"plans\[0\]\.combine is missing"),
            (("plans", 1, "dynamic"), {}, r"plans\[1\]\.dynamic\.depth is missing"),
            (("plans", 1, "dynamic"), 4, r"plans\[1\]\.dynamic is 4"),
            (
                ("plans", 1, "dynamic"),
                {"num_nodes": 4, "top_k": 2, "depth": 2},
                "plan chain-4 is a plan",
            ),
            (("plans", 1, "widths"), [0], "plan chain-4 is tree widths 0"),
            (("plans", 1, "combine"), "vote", "plan chain-4 is 1 drafts, combined by 'vote'"),
            (("plans", 1, "drafts"), [], "plan chain-4 is a plan of the drafts"),
            (("plans", 1, "drafts"), ["draft_1"], "plan chain-4 asks draft_1"),
            (("plans", 0, "name"), "chain-4", "plans are chain-4, chain-4"),
            (("plans", 1, "widths"), [2, 2], "plan chain-4 takes 7 rows, limits.max_nodes is 5"),
            (("plans", 0, "file"), "/etc/passwd", "used but not listed"),
            (("default_plan",), "tree-2", "default_plan is tree-2"),
            (("limits", "max_batch_size"), -1, "limits.max_batch_size is -1"),
            (("tokenizer", "bos_token_id"), "x", "tokenizer.bos_token_id is 'x'"),
            (("tokenizer", "file"), "absent.json", "absent.json is used but not listed"),
            (("memory_plan",), 3, "memory_plan has no total"),
            (("memory_plan", "total"), 1, "memory_plan.total is 1"),
            (("memory_plan", "target"), ..., r"memory_plan\.total"),
            (("memory_plan", "target", "cache"), -1, "memory_plan"),
            (("files", "report.json", "sha256"), "AB" * 32, r"files\.report\.json"),
            (("files", "report.json"), [], r"files\.report\.json is \[\]"),
            (("files", "steps/off.json"), ..., r"steps/off\.json is used but not listed"),
            (("probe",), [], r"probe is \[\]"),
            (("backend",), "abacus", "an engine for backend abacus"),
            (("backend",), "onnx", "backend onnx with rectangle None"),
            (("native",), {"library": "a.so", "isa_flags": []}, "native is unknown"),
            (("instructions",), "1", "instructions is '1'"),
            (
                ("tensorrt",),
                {"name": "a", "version": "1", "compute_capability": None},
                "backend eager with tensorrt TensorRT",
            ),
        ],
    )
    def test_invalid_field(self, engine, path, value, found):
        data = json.loads((engine / "manifest.json").read_text())
        parent = data
        for key in path[:-1]:
            parent = parent[key]
        if value is ...:
            del parent[path[-1]]
        else:
            parent[path[-1]] = value
        (engine / "manifest.json").write_text(json.dumps(data))
        refused(engine, found)

    def test_no_probe_and_no_tokenizer(self, tmp_path):
        tokenizer = TokenizerEntry(None, "", (), None, False)
        write_engine(tmp_path / "engine", make_manifest(probe=None, tokenizer=tokenizer))
        manifest = open_engine(tmp_path / "engine")
        assert manifest.probe is None
        assert manifest.tokenizer.file is None


@pytest.mark.parametrize(
    ("name", "entry"),
    [("vocabulary", VocabularyEntry(90, 100, 4)), ("taps", TapsEntry((1, 2), False, 16))],
)
def test_a_model_names_only_what_it_has(tmp_path, name, entry):
    """Versions that refuse fields which they do not know open engines that need none of them."""
    plain = make_manifest()
    assert all(name not in model for model in plain.to_json()["models"])
    models = (dataclasses.replace(plain.models[0], **{name: entry}), plain.models[1])
    write_engine(tmp_path / "engine", make_manifest(models=models))
    said = json.loads((tmp_path / "engine/manifest.json").read_text())
    assert [name in model for model in said["models"]] == [True, False]
    assert open_engine(tmp_path / "engine").models == models


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("eager", ["weights.safetensors"]),
        ("onnx", ["model.onnx", "weights.safetensors"]),
        ("tensorrt", ["build.json", "model.onnx", "model.plan", "weights.safetensors"]),
    ],
)
def test_each_rank_has_the_files_that_name_its_weights(backend, names):
    cut = ParallelEntry(2, ("target",))
    needed = make_manifest(backend=backend, parallel=cut).required_files
    of_ranks = [x.removeprefix("target/rank-") for x in needed if x.startswith("target/rank-")]
    assert sorted(of_ranks) == [f"{rank}.{name}" for rank in (0, 1) for name in names]
    assert not {f"target/{name}" for name in names} & set(needed)
    # the draft is whole
    assert {f"draft-0/{name}" for name in names} <= set(needed)
