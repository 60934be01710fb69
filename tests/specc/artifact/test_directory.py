"""An engine directory is written whole or not at all, and every defect of it is an error."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from specc.artifact import directory as artifact
from specc.artifact import engine_writer
from specc.artifact.directory import Manifest, open_engine, torch_version
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest import SCHEMA_VERSION
from specc.artifact.manifest_entries import (
    LimitsEntry,
    MemoryEntry,
    ParallelEntry,
    PlanEntry,
    TokenizerEntry,
)
from specc.artifact.model_entry import LayerEntry, ModelEntry, SlabEntry
from specc.errors import EngineError, OutputError
from specc.speculation.plans import OFF, SpecPlan

FILES = {
    "target/program.json": b'{"name": "target"}',
    "target/weights.safetensors": bytes(range(256)) * 20,
    "draft-0/program.json": b'{"name": "draft_0"}',
    "draft-0/weights.safetensors": bytes(range(255, -1, -1)),
    "steps/off.json": b"{}",
    "steps/chain-4.json": b'{"plan": {}}',
    "report.json": b"[]",
    "tokenizer.json": '{"é": 1}'.encode(),
    "empty.bin": b"",
}


def make_model(name, directory):
    layers = tuple(LayerEntry(f"model.layers.{i}.self_attn", 4, 2, 8, 0, 0, i) for i in range(2))
    slabs = (SlabEntry(2, 2, 8),)
    kind = ("Qwen3ForCausalLM", "qwen3", 100, 1234, 64)
    return ModelEntry(name, directory, *kind, layers, slabs, "somewhere", "float32")


def make_manifest(**changes):
    values = {
        "specc_version": "0.1.0",
        "torch_version": torch_version(),
        "created": "2025-01-01T00:00:00+00:00",
        "backend": "eager",
        "device": "cpu",
        "models": (make_model("target", "target"), make_model("draft_0", "draft-0")),
        "plans": (
            PlanEntry.of(OFF, "steps/off.json"),
            PlanEntry.of(SpecPlan.from_widths((1, 1, 1, 1)), "steps/chain-4.json"),
        ),
        "default_plan": "chain-4",
        "limits": LimitsEntry(8, 64, 16, 32, 5, 512),
        "tokenizer": TokenizerEntry("tokenizer.json", "ab" * 32, (0, 2), None, False),
        "memory_plan": {
            "target": MemoryEntry(1000, 200, 30, 4),
            "draft_0": MemoryEntry(100, 20, 3, 4),
        },
        "probe": {"mean_acceptance_length": 2.5},
    }
    return Manifest(**values | changes)


def staging_names(writer):
    """The directory and the lock that says whose it is."""
    return [writer.staging.name, f"{writer.staging.name}.lock"]


def write_engine(output, manifest=None, **options):
    with EngineWriter(output, **options) as writer:
        for name, data in FILES.items():
            writer.write_bytes(name, data)
        return writer.commit(manifest or make_manifest())


@pytest.fixture
def engine(tmp_path):
    write_engine(tmp_path / "engine")
    return tmp_path / "engine"


def edit(engine, **changes):
    file = engine / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(engine, found, **options):
    """Open an engine that must be refused; returns the error."""
    with pytest.raises(EngineError, match=found) as caught:
        open_engine(engine, **options)
    assert all((caught.value.found, caught.value.needed, caught.value.do))
    return caught.value


class TestWriter:
    def test_round_trip(self, tmp_path):
        written = write_engine(tmp_path / "engine")
        manifest = open_engine(tmp_path / "engine")
        assert manifest == written
        assert manifest.files.keys() == FILES.keys()
        assert dataclasses.replace(manifest, files={}) == make_manifest()
        assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
        assert os.listdir(tmp_path) == ["engine"]
        for name, data in FILES.items():
            assert (tmp_path / "engine" / name).read_bytes() == data

    def test_manifest_json_follows_the_contract(self, engine):
        data = json.loads((engine / "manifest.json").read_text())
        assert next(iter(data)) == "schema_version"
        assert data["memory_plan"]["total"] == 1361
        assert data["plans"][1] == {
            "name": "chain-4",
            "widths": [1, 1, 1, 1],
            "parents": [],
            "dynamic": None,
            "drafts": ["draft_0"],
            "combine": "",
            "tile": None,
            "file": "steps/chain-4.json",
        }
        assert data["models"][1]["layers"][1]["index"] == 1
        assert data["files"]["steps/off.json"]["bytes"] == 2

    def test_recorded_hash_is_not_computed_again(self, tmp_path):
        with EngineWriter(tmp_path / "engine") as writer:
            for name, data in FILES.items():
                writer.path(name).write_bytes(data)
            writer.record("report.json", "ab" * 32, 2)
            manifest = writer.commit(make_manifest())
            assert manifest.files["report.json"].sha256 == "ab" * 32
        refused(tmp_path / "engine", r"report\.json has sha256")
        with EngineWriter(tmp_path / "other") as writer:
            writer.path("report.json").write_bytes(b"[]")
            writer.record("report.json", "ab" * 32, 3)
            with pytest.raises(ValueError, match="2 bytes, 3 were recorded"):
                writer.commit(make_manifest())

    def test_copied_and_json_files(self, tmp_path):
        (tmp_path / "source").write_bytes(b"text")
        with EngineWriter(tmp_path / "engine") as writer:
            writer.copy_file(tmp_path / "source", "a/copy")
            writer.write_json("b.json", {"é": [1]})
            assert writer.path("a/copy").read_bytes() == b"text"
            assert json.loads(writer.path("b.json").read_text()) == {"é": [1]}

    @pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "", "a\\x"])
    def test_paths_stay_inside(self, name, tmp_path):
        with EngineWriter(tmp_path / "engine") as writer, pytest.raises(EngineError):
            writer.path(name)

    def test_a_manifest_without_its_files_is_not_written(self, tmp_path):
        with (
            pytest.raises(EngineError, match=r"target/program\.json is used but not listed"),
            EngineWriter(tmp_path / "engine") as writer,
        ):
            writer.commit(make_manifest())
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
    def test_an_exception_leaves_nothing(self, error, tmp_path):
        def fail():
            with EngineWriter(tmp_path / "engine") as writer:
                writer.write_bytes("target/program.json", b"{}")
                assert sorted(os.listdir(tmp_path)) == sorted(staging_names(writer))
                raise error

        with pytest.raises(error):
            fail()
        assert os.listdir(tmp_path) == []

    def test_leaving_without_commit_leaves_nothing(self, tmp_path):
        with EngineWriter(tmp_path / "engine") as writer:
            writer.write_bytes("a", b"")
        assert os.listdir(tmp_path) == []

    def test_a_sealed_engine_can_be_tried_before_it_is_committed(self, tmp_path):
        with EngineWriter(tmp_path / "engine") as writer:
            for name, data in FILES.items():
                writer.write_bytes(name, data)
            writer.seal(make_manifest(probe=None))
            assert open_engine(writer.staging).probe is None
            assert not (tmp_path / "engine").exists()
            written = writer.commit(make_manifest())
        assert open_engine(tmp_path / "engine") == written
        assert written.probe == {"mean_acceptance_length": 2.5}

    def test_signal_handlers_are_restored(self, tmp_path):
        before = signal.getsignal(signal.SIGTERM)
        with EngineWriter(tmp_path / "engine"):
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) is before

    def test_a_signal_leaves_nothing(self, tmp_path):
        script = """
            import os, signal, sys, time
            from pathlib import Path
            from specc.artifact.engine_writer import EngineWriter

            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # a shell may have started the tests with the signal ignored
                is_ctrl_c = number == signal.SIGINT
                default = signal.default_int_handler if is_ctrl_c else signal.SIG_DFL
                signal.signal(number, default)
                pid = os.fork()  # imports torch once for all three
                if pid == 0:
                    with EngineWriter(sys.argv[1] + "/engine") as writer:
                        writer.write_bytes("target/weights.safetensors", bytes(1000))
                        time.sleep(60)
                file = ".engine.partial-*/target/weights.safetensors"
                while not any(Path(sys.argv[1]).glob(file)):
                    time.sleep(0.01)
                os.kill(pid, number)
                _, status = os.waitpid(pid, 0)
                print(number.name, status != 0, os.listdir(sys.argv[1]))
        """
        command = [sys.executable, "-P", "-c", textwrap.dedent(script), tmp_path]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        expected = [f"{name} True []" for name in ("SIGINT", "SIGTERM", "SIGHUP")]
        assert result.stdout.splitlines() == expected


class TestOutput:
    def test_existing_output(self, engine):
        before = (engine / "manifest.json").read_bytes()
        with pytest.raises(OutputError, match="exists") as error:
            write_engine(engine)
        assert "--force" in error.value.do
        assert (engine / "manifest.json").read_bytes() == before
        assert len(os.listdir(engine.parent)) == 1

    def test_force_replaces_an_engine(self, engine):
        (engine / "old").write_bytes(b"")
        write_engine(engine, make_manifest(created="later"), force=True)
        assert open_engine(engine).created == "later"
        assert not (engine / "old").exists()
        assert os.listdir(engine.parent) == ["engine"]

    def test_force_keeps_the_old_engine_when_writing_fails(self, engine, monkeypatch):
        def fail():
            with EngineWriter(engine, force=True) as writer:
                writer.write_bytes("a", b"")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        open_engine(engine)
        # where two directories cannot be swapped
        monkeypatch.setattr(engine_writer, "exchange", lambda *paths: False)
        rename = Path.rename

        def interrupted(source, target):
            if ".partial-" in source.name:
                raise KeyboardInterrupt
            return rename(source, target)

        monkeypatch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_engine(engine, make_manifest(created="later"), force=True)
        assert open_engine(engine).created != "later"
        assert os.listdir(engine.parent) == ["engine"]

    def test_the_old_engine_is_there_until_the_new_one_is(self, engine, monkeypatch):
        """There is no moment in which a crash would leave the name without an engine."""
        seen = []
        real = {name: getattr(engine_writer.os, name) for name in ("rename", "replace")}
        for name, call in real.items():

            def watch(*args, call=call, **options):
                result = call(*args, **options)
                seen.append((engine / "manifest.json").exists())
                return result

            monkeypatch.setattr(engine_writer.os, name, watch)
        write_engine(engine, make_manifest(created="later"), force=True)
        assert open_engine(engine).created == "later"
        assert all(seen)
        assert os.listdir(engine.parent) == ["engine"]

    def test_an_engine_has_the_mode_of_the_user_s_mask(self, tmp_path):
        before = os.umask(0o027)
        try:
            write_engine(tmp_path / "engine")
        finally:
            os.umask(before)
        assert (tmp_path / "engine").stat().st_mode & 0o777 == 0o750

    @pytest.mark.parametrize("kind", ["directory", "file"])
    def test_force_replaces_engines_only(self, kind, tmp_path):
        if kind == "directory":
            (tmp_path / "data").mkdir()
            (tmp_path / "data" / "thesis.tex").write_bytes(b"")
        else:
            (tmp_path / "data").write_bytes(b"")
        with pytest.raises(OutputError, match="is no engine"):
            write_engine(tmp_path / "data", force=True)
        assert (tmp_path / "data" / "thesis.tex").exists() or kind == "file"

    def test_missing_parents_are_made(self, tmp_path):
        write_engine(tmp_path / "a" / "b" / "engine")
        open_engine(tmp_path / "a" / "b" / "engine")
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(OutputError, match="file is no directory"):
            write_engine(tmp_path / "file" / "b" / "engine")

    def test_parents_of_no_engine_go(self, tmp_path):
        (tmp_path / "kept").mkdir()

        def fail():
            with EngineWriter(tmp_path / "kept" / "a" / "b" / "engine"):
                assert (tmp_path / "kept" / "a" / "b").is_dir()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert os.listdir(tmp_path) == ["kept"]
        assert os.listdir(tmp_path / "kept") == []

    def test_unwritable_parent(self, tmp_path, monkeypatch):
        with pytest.raises(OutputError, match="engine failed"):
            write_engine("/proc/engine")  # refuses also root
        monkeypatch.setattr(engine_writer.os, "access", lambda *args: False)
        with pytest.raises(OutputError, match="not writable"):
            write_engine(tmp_path / "engine")

    def test_disk_full(self, tmp_path):
        def write():
            with EngineWriter(tmp_path / "engine") as writer:
                writer.path("big").symlink_to("/dev/full")
                writer.write_bytes("big", b"data")

        with pytest.raises(OutputError, match="No space left"):
            write()
        assert os.listdir(tmp_path) == []

    def test_disk_full_while_committing(self, tmp_path, monkeypatch):
        def full(path):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(engine_writer, "fsync_path", full)
        with pytest.raises(OutputError, match="No space left"):
            write_engine(tmp_path / "engine")
        assert os.listdir(tmp_path) == []

    def test_stale_staging_of_dead_writers_is_removed(self, tmp_path):
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait()
        stale = [f".engine.partial-{process.pid}", f".engine.partial-{os.getpid()}"]
        kept = [f".engine.partial-{os.getppid()}", ".engine.partial-x", ".other.partial-1"]
        for name in (*stale, *kept):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_bytes(b"")
        write_engine(tmp_path / "engine")
        assert sorted(os.listdir(tmp_path)) == sorted([*kept, "engine"])

    def test_a_killed_writer_s_staging_is_removed(self, tmp_path):
        """Known by the lock that it held, since process ids repeat, in containers at once."""
        script = """
            import os, signal, sys
            from specc.artifact.engine_writer import EngineWriter

            with EngineWriter(sys.argv[1]) as writer:
                writer.write_bytes("file", bytes(1000))
                print(writer.staging.name, flush=True)
                sys.stdin.read()
        """
        command = [sys.executable, "-P", "-c", textwrap.dedent(script), tmp_path / "[engine]"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as killed:
            staging = killed.stdout.readline().strip()
            killed.kill()
        assert (tmp_path / staging / "file").exists()
        with subprocess.Popen(command, **pipes) as living:
            staging = living.stdout.readline().strip()
            # what the dead one left is gone, and what the living one does is left alone
            with pytest.raises(OutputError, match="another process"):
                write_engine(tmp_path / "[engine]")
            assert sorted(os.listdir(tmp_path)) == [staging, f"{staging}.lock"]
            living.communicate("")
        write_engine(tmp_path / "[engine]")
        assert os.listdir(tmp_path) == ["[engine]"]

    def test_an_engine_that_a_dead_writer_moved_aside_comes_back(self, engine):
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait()
        engine.rename(engine.with_name(f".engine.old-{process.pid}"))
        with pytest.raises(OutputError, match="exists"):
            write_engine(engine)
        open_engine(engine)

    def test_two_writers_of_one_output(self, tmp_path):
        with EngineWriter(tmp_path / "engine") as writer:
            with pytest.raises(OutputError, match="being written"):
                write_engine(tmp_path / "engine")
            assert writer.staging.is_dir()


class TestOpen:
    def test_absent_and_not_an_engine(self, tmp_path):
        refused(tmp_path / "absent", "does not exist")
        (tmp_path / "file").write_bytes(b"")
        refused(tmp_path / "file", "is no directory")
        refused(tmp_path, "is not an engine")

    @pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe\x00", b"{} x"])
    def test_manifest_that_is_no_json(self, engine, data):
        (engine / "manifest.json").write_bytes(data)
        refused(engine, "is no JSON")

    @pytest.mark.parametrize("data", [b"[]", b"{}", b'{"schema_version": "1"}', b"3"])
    def test_manifest_without_schema(self, engine, data):
        (engine / "manifest.json").write_bytes(data)
        refused(engine, "schema_version")

    def test_other_schema(self, engine):
        edit(engine, schema_version=SCHEMA_VERSION + 1, specc_version="9.0", models="something new")
        error = refused(engine, r"written by a newer specc \(9\.0\)")
        assert "update specc" in error.do
        edit(engine, schema_version=0)
        refused(engine, "older specc")

    def test_other_runtime(self, engine):
        edit(engine, torch_version="2.12.1")
        assert "install torch 2.12.1" in refused(engine, r"torch 2\.12\.1").do
        edit(engine, torch_version=torch_version(), backend="cuda")
        refused(engine, "backend cuda", backends=("eager",))
        edit(engine, backend="tensorrt")
        refused(engine, "backend tensorrt with rectangle")
        edit(engine, backend="eager", device="npu")
        refused(engine, "device npu")

    def test_torch_version_has_no_local_part(self, monkeypatch):
        for version, wanted in [
            ("2.13.0+cpu", "2.13.0"),
            ("2.14.0.dev20260101+cu130", "2.14.0"),
            ("2.14.0a0+git12", "2.14.0"),
            ("2.11.1", "2.11.1"),
        ]:
            monkeypatch.setattr(torch, "__version__", version)
            assert torch_version() == wanted

    def test_too_little_memory(self, engine):
        assert open_engine(engine, available_memory=1361).total_memory == 1361
        error = refused(engine, "1360|1.3 KiB", available_memory=1360)
        assert "max_batch_size 8" in error.needed
        assert "--max-batch-size" in error.do
        assert "--max-seq-len" in error.do

    def test_available_memory(self):
        assert 1 << 20 < artifact.available_memory_bytes() < 1 << 60

    @pytest.mark.parametrize("name", FILES)
    def test_missing_file(self, engine, name):
        (engine / name).unlink()
        assert name in refused(engine, "is missing", verify=False).found

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("change", [-1, 1])
    def test_wrong_size(self, engine, name, change):
        data = FILES[name]
        if not data and change < 0:
            return
        (engine / name).write_bytes(data[:-1] if change < 0 else data + b"\0")
        assert name in refused(engine, "bytes", verify=False).found

    @pytest.mark.parametrize("name", [name for name, data in FILES.items() if data])
    def test_any_flipped_byte(self, engine, name):
        data = FILES[name]
        for position in {0, len(data) // 2, len(data) - 1}:
            changed = bytearray(data)
            changed[position] ^= 1
            (engine / name).write_bytes(changed)
            assert name in refused(engine, "has sha256", verify=True).found
            open_engine(engine, verify=False)  # sees sizes only
        (engine / name).write_bytes(data)
        open_engine(engine)

    def test_progress(self, engine):
        calls = []
        open_engine(engine, verify=True, progress=lambda *call: calls.append(call))
        total = sum(map(len, FILES.values()))
        assert calls[-1] == (total, total)

    def test_weights_are_read_only_when_asked(self, engine):
        name = "target/weights.safetensors"
        calls = []
        open_engine(engine, progress=lambda *call: calls.append(call))
        read = [data for file, data in FILES.items() if not file.endswith("weights.safetensors")]
        assert calls[-1][1] == sum(map(len, read))
        (engine / name).write_bytes(FILES[name][::-1])
        open_engine(engine)
        refused(engine, "has sha256", verify=True)

    @pytest.mark.parametrize(
        "path", ["../secret", "/etc/hostname", "a/../../b", "", ".", "manifest.json", "a\\..\\b"]
    )
    def test_paths_that_escape(self, engine, path):
        files = json.loads((engine / "manifest.json").read_text())["files"]
        edit(engine, files=files | {path: {"sha256": "ab" * 32, "bytes": 1}})
        refused(engine, "manifest is invalid")

    def test_a_copied_engine_opens(self, engine, tmp_path):
        shutil.copytree(engine, tmp_path / "copy")
        assert open_engine(tmp_path / "copy") == open_engine(engine)


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
            (("backend",), "cpu", "backend cpu with native None"),
            (("backend",), "onnx", "backend onnx with rectangle None"),
            (("native",), {"library": "a.so", "isa_flags": []}, r"a\.so is used but not listed"),
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
