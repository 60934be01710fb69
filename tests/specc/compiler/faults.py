"""Faults in every phase of `specc compile`, and what they leave: each case in a forked process.

    python -P -m tests.specc.compiler.faults TARGET DRAFT ROOT OUT.json [BACKEND [PHASE,…]]

runs all of them and writes what came of each. The fault strikes as the phase begins, or some
seconds later where processes have to be at work; after SIGKILL the same is compiled once more.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
# what a command answers to each, as a shell reports it
EXIT_CODES = {"kill": -signal.SIGKILL, "term": 128 + signal.SIGTERM, "int": 130}
PLACES = ("output", "cache", "temporary")
_MOUNT_SIZE = "400m"
_TIMEOUT_SECONDS = 400
# what is cached is there already, so that a case takes seconds
_COLD_PHASE, _COLD_DELAY = "compile programs", 4.0


@dataclass(frozen=True)
class Case:
    """A fault.

    Args:
        fault: kill, term, int, or full.
        place: what is full: output, cache or temporary.
        replaces: whether there is an engine at the output.
        is_cold: whether the cache is empty.
    """

    phase: str
    fault: str
    place: str = ""
    replaces: bool = False
    is_cold: bool = False


@dataclass
class Outcome:
    """What came of a case; `problems` is empty where all is well."""

    case: Case
    exit_code: int
    message: str
    problems: list[str]


class Faults:
    """Runs cases."""

    def __init__(self, target: Path, draft: Path, root: Path, backend: str) -> None:
        self._command = ["compile", "--target", str(target), "--draft", str(draft)]
        self._command += ["--backend", backend, "--max-seq-len", "64", "--max-batch-size", "2"]
        self._root = root
        self._numbers = itertools.count()
        self._warm = root / "warm"
        self.phases: list[str] = []

    def prepare(self) -> None:
        """Fill the cache and learn the phases."""
        places = self._make_places(is_cold=True)
        log = places["output"] / "phases"
        code, text = self._compile(places, lambda phase: _append(log, phase))
        assert code == 0, text
        self.phases = log.read_text().split("\n")[:-1]
        places["cache"].rename(self._warm)
        (places["output"] / "engine").rename(self._root / "engine")
        shutil.rmtree(places["output"].parent)

    def run(self, case: Case) -> Outcome:
        with self._mounted(case) as places:
            engine = places["output"] / "engine"
            before = None
            if case.replaces:
                shutil.copytree(self._root / "engine", engine)
                before = (engine / "manifest.json").read_bytes()
            clean = _listing(places["cache"] if not case.is_cold else self._warm)
            code, text = self._compile(places, self._strike(case, places))
            for place in places.values():
                (place / "filler").unlink(missing_ok=True)
            problems = self._check(case, places, code, text, before)
            if case.fault != "kill":
                problems += _left(places, clean)
            if case.fault == "kill":
                problems += self._compile_again(places, clean)
        last = [line for line in text.splitlines() if line.strip()][-3:]
        return Outcome(case, code, "\n".join(last), problems)

    def _compile_again(self, places: dict[str, Path], clean: set[str]) -> list[str]:
        engine = places["output"] / "engine"
        code, text = self._compile(places, force=engine.exists())
        if code != 0:
            return [f"the next compilation: {code}: {text[-500:]}"]
        _open(engine)
        return [f"after the next one, {problem}" for problem in _left(places, clean)]

    def _check(
        self, case: Case, places: dict[str, Path], code: int, text: str, before: bytes | None
    ) -> list[str]:
        problems = []
        engine = places["output"] / "engine"
        if case.fault != "full" and code != EXIT_CODES[case.fault]:
            problems.append(f"exit code {code}")
        if case.fault == "full" and code not in (0, 2):
            problems.append(f"exit code {code}: {text[-800:]}")
        if code == 2 and not all(f"\n{word}" in text for word in ("found:", "needed:", "do:")):
            problems.append(f"no found, needed, do: {text[-800:]}")
        if case.fault == "full" and code == 0:
            _open(engine)  # the phases from there on write nothing to this place
        elif before is None:
            if engine.exists():
                problems.append("an engine at the output")
        elif (engine / "manifest.json").read_bytes() != before:
            problems.append("another engine at the output")
        else:
            _open(engine)
        return problems

    def _strike(self, case: Case, places: dict[str, Path]) -> Callable[[str], None]:
        def strike(phase: str) -> None:
            if phase != case.phase:
                return
            if case.fault == "full":
                _fill(places[case.place])
            elif case.is_cold:  # when children are at work
                timer = threading.Timer(_COLD_DELAY, os.kill, (os.getpid(), SIGNALS[case.fault]))
                timer.daemon = True
                timer.start()
            else:
                os.kill(os.getpid(), SIGNALS[case.fault])

        return strike

    def _make_places(self, is_cold: bool) -> dict[str, Path]:
        base = self._root / str(next(self._numbers))
        places = {name: base / name for name in PLACES}
        for place in places.values():
            place.mkdir(parents=True, mode=0o700)
        if not is_cold and self._warm.is_dir():
            shutil.copytree(self._warm, places["cache"], dirs_exist_ok=True)
        return places

    @contextlib.contextmanager
    def _mounted(self, case: Case) -> Iterator[dict[str, Path]]:
        """Directories of a case; the one that is to be full has a file system of its own."""
        places = self._make_places(case.is_cold)
        try:
            if case.place:
                place = places[case.place]
                with mounted(place):
                    if case.place == "cache" and not case.is_cold and self._warm.is_dir():
                        shutil.copytree(self._warm, place, dirs_exist_ok=True)
                    yield places
            else:
                yield places
        finally:
            shutil.rmtree(places["output"].parent)

    def _compile(
        self,
        places: dict[str, Path],
        listen: Callable[[str], None] | None = None,
        force: bool = False,
    ) -> tuple[int, str]:
        """Exit code (negative for a signal) and what was written."""
        command = [*self._command, "-o", str(places["output"] / "engine")]
        command += ["--force"] if force or listen is not None else []
        with tempfile.TemporaryFile("w+") as text:
            pid = os.fork()
            if pid == 0:
                _be_command(command, places, listen, text.fileno())
            code = _wait(pid)
            text.seek(0)
            return code, "\n" + text.read()


@contextlib.contextmanager
def mounted(place: Path) -> Iterator[None]:
    """A small file system of its own.

    Raises:
        OSError: nothing can be mounted here.
    """
    options = f"size={_MOUNT_SIZE},mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", options, "specc-faults", str(place)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"nothing can be mounted: {result.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _be_command(command: list[str], places: dict[str, Path], listen: Any, descriptor: int) -> None:
    """Be `specc COMMAND` in a forked process; does not return."""
    code: Any = 99
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ["SPECC_CACHE_DIR"] = str(places["cache"])
        os.environ["TMPDIR"] = str(places["temporary"])
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        tempfile.tempdir = None
        from specc.cli import build_engine
        from specc.cli import main as cli

        make_listener = build_engine.make_listener

        @contextlib.contextmanager
        def make_struck() -> Iterator[Any]:
            begun: set[str] = set()
            with make_listener() as told:

                def tell(event: Any) -> None:
                    told(event)
                    if listen is not None and event.phase not in begun:
                        begun.add(event.phase)
                        listen(event.phase)

                yield tell

        build_engine.make_listener = make_struck  # type: ignore[assignment]
        sys.argv = ["specc", *command]
        cli.main()
    except SystemExit as error:
        code = error.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _wait(pid: int) -> int:
    end = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"{pid} did not end")


def _fill(place: Path) -> None:
    with open(place / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def _append(path: Path, line: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def _listing(place: Path) -> set[str]:
    """Files, but of what only says that somebody was there."""
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


def _left(places: dict[str, Path], cache: set[str]) -> list[str]:
    problems = []
    names = sorted(path.name for path in places["output"].iterdir() if path.name != "engine")
    if names:
        problems.append(f"beside the output: {names}")
    if names := sorted(path.name for path in places["temporary"].iterdir()):
        problems.append(f"in the temporary directory: {names}")
    if odd := sorted(_listing(places["cache"]) - cache):
        problems.append(f"in the cache: {odd[:5]}")
    scratch = places["cache"] / "scratch"
    if scratch.is_dir() and (names := sorted(path.name for path in scratch.iterdir())):
        problems.append(f"in the cache's scratch directory: {names}")
    return problems


def _open(engine: Path) -> None:
    from specc.artifact.directory import open_engine

    open_engine(engine, verify=True)


def all_cases(phases: Sequence[str]) -> list[Case]:
    """Each fault in each phase, and once more where there is an engine to lose."""
    cases = []
    for phase in phases:
        for fault in SIGNALS:
            cases.append(Case(phase, fault, replaces=True))
            if phase == _COLD_PHASE:
                cases.append(Case(phase, fault, is_cold=True))
        for place in PLACES:
            is_cold = phase == _COLD_PHASE and place == "cache"
            cases.append(Case(phase, "full", place, replaces=place != "cache", is_cold=is_cold))
    return cases


def warm_up() -> None:
    """Import what a compilation does, before processes are forked; nothing is computed."""
    import torch
    import torch._dynamo
    import transformers.models.llama.modeling_llama  # noqa: F401

    from specc import api  # noqa: F401
    from specc.cli import main as cli  # noqa: F401
    from specc.compiler import build as compiler  # noqa: F401
    from specc.runtime import llm  # noqa: F401

    torch.set_num_threads(1)


def main(
    target: str, draft: str, root: str, output: str, backend: str = "cpu", phases: str = ""
) -> None:
    """See above; `phases` are some of them, separated by commas."""
    warm_up()
    Path(root).mkdir(parents=True, exist_ok=True)
    faults = Faults(Path(target).resolve(), Path(draft).resolve(), Path(root).resolve(), backend)
    faults.prepare()
    outcomes = []
    for case in all_cases(phases.split(",") if phases else faults.phases):
        outcome = faults.run(case)
        outcomes.append(asdict(outcome))
        print(asdict(case), outcome.exit_code, outcome.problems or "ok", flush=True)
        Path(output).write_text(json.dumps(outcomes, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
