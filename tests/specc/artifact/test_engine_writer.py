"""An engine directory is written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from specc.artifact import engine_writer
from specc.artifact.directory import Manifest, open_engine
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest_entries import FileEntry
from specc.errors import EngineError, OutputError
from tests.specc.artifact.engine_folders import (
    FILES,
    make_manifest,
    refused,
    staging_names,
    write_engine,
)


@pytest.fixture
def engine(tmp_path):
    write_engine(tmp_path / "engine")
    return tmp_path / "engine"


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
            writer.record("report.json", FileEntry("ab" * 32, 2))
            manifest = writer.commit(make_manifest())
            assert manifest.files["report.json"].sha256 == "ab" * 32
        refused(tmp_path / "engine", r"report\.json has sha256")
        with EngineWriter(tmp_path / "other") as writer:
            writer.path("report.json").write_bytes(b"[]")
            writer.record("report.json", FileEntry("ab" * 32, 3))
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

    @pytest.mark.slow
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

    def test_what_a_killed_writer_leaves_is_no_engine(self, tmp_path):
        """Not even with all of its files; and the next one begins anew."""
        pid = os.fork()
        if pid == 0:
            try:
                with EngineWriter(tmp_path / "engine") as writer:
                    for name, data in FILES.items():
                        writer.write_bytes(name, data)
                    os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        (staging,) = (path for path in tmp_path.iterdir() if path.is_dir())
        assert staging.name.startswith(".engine.partial-")
        error = refused(staging, "manifest.json")
        assert "specc compile" in error.do
        write_engine(tmp_path / "engine")
        open_engine(tmp_path / "engine")
        assert os.listdir(tmp_path) == ["engine"]

    def test_an_engine_that_a_dead_writer_moved_aside_comes_back(self, engine):
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait()
        engine.rename(engine.with_name(f".engine.old-{process.pid}"))
        with pytest.raises(OutputError, match="exists"):
            write_engine(engine)
        open_engine(engine)
