"""Put each mutant into a copy of the working tree and see that the tests that it names fail."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.library_build import LibraryBuild, cmake
from tests.mutants.mutant import Mutant, MutantError, file_of
from tests.mutants.results import Results
from tests.mutants.tree_copy import TreeCopy
from tests.mutants.verdict import CAUGHT, NO_MATCH, UNSOUND, judge, sound
from tests.mutants.worker import Answer

# imported once a worker: none of them is the repository's
PRELOADED = (
    "numpy", "torch", "torch.fx", "torch.export", "torch._dynamo", "hypothesis",
    "networkx", "tokenizers", "transformers", "transformers.models.llama.modeling_llama",
    "triton", "triton.language",
    # plugins of pytest, which otherwise every run would import
    *(entry.module for entry in importlib.metadata.entry_points(group="pytest11")),
)  # fmt: skip
# of a time limit there is no use where machines differ: a hang is far above the slowest test
LIMIT_S = 240.0


@dataclass(frozen=True)
class Options:
    """How mutants are run.

    Args:
        root: the working tree.
        scratch: directory for copies, byte code and the output of tests.
        jobs: workers, each with a copy of its own.
        limit_s: seconds for each test, unless a mutant has a limit of its own.
        seconds: after these no mutant is begun any more.
        preloaded: modules that a worker imports before it forks.
        say: called with lines of progress.
    """

    root: Path
    scratch: Path
    jobs: int = 1
    limit_s: float = LIMIT_S
    seconds: float = float("inf")
    preloaded: tuple[str, ...] = PRELOADED
    say: Callable[[str], None] = print


class Worker:
    """A copy of the working tree, and the process that runs tests in it."""

    def __init__(self, options: Options, index: int) -> None:
        self.copy = TreeCopy(options.root, options.scratch / f"copy-{index}")
        self._library: LibraryBuild | None = None
        self.output = options.scratch / f"output-{index}.txt"
        environment = dict(os.environ) | {
            "PYTHONPATH": str(self.copy.path),
            "PYTHONSAFEPATH": "1",
            "PYTHONPYCACHEPREFIX": str(options.scratch / "bytecode"),
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",
            # libraries of mutants are nobody else's
            "SPECC_CACHE_DIR": str(options.scratch / "cache"),
        }
        # a run imports all of specc: byte code is half of its time
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if compiler := _cached_compiler(options.scratch):
            environment["CXX"] = str(compiler)
        if (self.copy.path / "CMakeLists.txt").is_file() and compiler and cmake():
            objects, output = options.scratch / f"library-{index}", self.copy.path / "kernels/lib"
            shutil.rmtree(objects, ignore_errors=True)
            self._library = LibraryBuild(self.copy.path, objects, output, (), environment)
        self._process = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).with_name("worker.py"), *options.preloaded],
            cwd=self.copy.path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: list[str], limit_s: float, stop: bool) -> Answer:
        """Run tests, up to the first failure where `stop` says so; the copy's library is built."""
        self._build()
        request = {"tests": tests, "limit_s": limit_s, "stop": stop, "output": str(self.output)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def _build(self) -> None:
        """Compile what has changed; without a library, tests of it fail before they begin."""
        if self._library is not None and (done := self._library.build()).returncode:
            shutil.rmtree(self._library.output, ignore_errors=True)
            self.output.write_text(done.stdout, encoding="utf-8")

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


def _cached_compiler(scratch: Path) -> Path | None:
    """Path of a compiler that compiles again only what has changed; None where there is none."""
    real = shutil.which(os.environ.get("CXX", "g++"))
    if real is None:
        return None
    script = Path(__file__).with_name("cached_compiler.py")
    words = shlex.join([sys.executable, "-I", str(script), real, str(scratch / "objects")])
    # Inductor tells compilers apart by their names
    path = scratch / "compiler" / Path(real).name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def run_mutants(mutants: list[Mutant], results: Results, options: Options) -> int:
    """Run those of the mutants that are not known to be caught; returns how many were not begun.

    Tests run without a mutant before the first mutant that names one of their file.
    """
    deadline = time.monotonic() + options.seconds
    waiting = [mutant for mutant in mutants if not results.is_known(mutant)]
    options.say(f"{len(mutants)} mutants, {len(waiting)} to run")
    done = len(mutants) - len(waiting)
    tests = {test for mutant in waiting for test in mutant.tests} - set(results.sound)
    unseen: dict[str, list[str]] = {}
    for test in sorted(tests):
        unseen.setdefault(file_of(test), []).append(test)
    lock, lock_of = threading.Lock(), {file: threading.Lock() for file in unseen}

    def see_sound(worker: Worker, file: str) -> None:
        with lock_of.get(file, contextlib.nullcontext()):
            if not (tests := unseen.pop(file, [])):
                return
            answer = worker.run(tests, options.limit_s * len(tests), stop=False)
            answers = dict.fromkeys(tests, (answer, answer["seconds"] / len(tests)))
            if answer["status"] == pytest.ExitCode.USAGE_ERROR:
                # one that is not there keeps all others from running
                for test in tests:
                    answer = worker.run([test], options.limit_s, stop=False)
                    answers[test] = answer, answer["seconds"]
            good = [test for test, (answer, _) in answers.items() if sound(answer, test)]
            with lock:
                results.sound |= {test: answers[test][1] for test in good}
                results.write()
                for test in sorted(set(tests) - set(good)):
                    options.say(f"fails or does not run without a mutant: {test}")

    def see(worker: Worker, mutant: Mutant) -> None:
        nonlocal done
        for file in {file_of(test) for test in mutant.tests}:
            see_sound(worker, file)
        began = time.monotonic()
        outcome, by = _outcome(worker, mutant, results, options)
        with lock:
            done += 1
            results.add(mutant, outcome, by, time.monotonic() - began)
            options.say(f"{done}/{len(mutants)} {outcome}: {mutant.name}  {' '.join(by)}")

    with _workers(options, len(waiting)) as workers:
        return _share(workers, waiting, see, deadline)


def _outcome(
    worker: Worker, mutant: Mutant, results: Results, options: Options
) -> tuple[str, list[str]]:
    """What became of a mutant: caught where each of its tests fails."""
    if unsound := [test for test in mutant.tests if test not in results.sound]:
        return UNSOUND, unsound
    by = []
    try:
        with worker.copy.mutated(mutant):
            for test in mutant.tests:
                answer = worker.run([test], mutant.limit_s or options.limit_s, stop=True)
                outcome, case = judge(mutant, answer)
                if outcome != CAUGHT:
                    return outcome, [case or test]
                by.append(case)
    except MutantError as error:
        return NO_MATCH, [str(error)]
    return CAUGHT, by


@contextlib.contextmanager
def _workers(options: Options, num_tasks: int) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        workers = []
        for index in range(min(options.jobs, num_tasks)):
            workers.append(Worker(options, index))
            stack.callback(workers[-1].close)
        yield workers


def _share(
    workers: list[Worker],
    mutants: Iterable[Mutant],
    do: Callable[[Worker, Mutant], None],
    deadline: float,
) -> int:
    """Let workers do something with mutants until the deadline; returns how many are left."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    failures: list[BaseException] = []

    def work(worker: Worker) -> None:
        try:
            while not failures and time.monotonic() < deadline:
                do(worker, waiting.get_nowait())
        except queue.Empty:
            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return waiting.qsize()
