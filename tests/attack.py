"""A server under attack: what its ordinary clients see of it, and what is left afterwards.

    python tests/attack.py --engine ENGINE --seconds 600 --json out/attacks.json

`specc serve` runs as a process that may open 1024 files. Ordinary requests come at a fixed rate
all the time; phases of quiet and of attack take turns. Where a limit is missed, the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.attack_figures import Answered, Figures, percentile_of  # noqa: E402
from tests.attack_process import ATTACKS  # noqa: E402
from tests.attackers import CHATS, COMPLETIONS, TEMPLATE, ask, request  # noqa: E402

# what a phase of attack still disturbs when it has ended counts as its own
SETTLE_S = 5.0
WARM_UP_S = 8.0
MAX_FILES = 1024
# ordinary requests: seconds until one counts as failed, and a question for the health
PATIENCE_S, HEALTH_S = 30.0, 5.0
MAIN = "from specc.cli.main import main; main()"
WORDS = ("bright", "cold", "day", "April", "clocks", "striking", "thirteen", "was", "the", "were")


class Process:
    """`specc serve` with few files, and what it takes of the machine."""

    def __init__(self, engine: Path, scratch: Path) -> None:
        template, self.log = scratch / "template.jinja", scratch / "log"
        template.write_text(TEMPLATE, encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        args = [str(engine), "--port", str(self.port), "--chat-template", str(template)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "bash", "-c", f'ulimit -n {MAX_FILES} && exec "$@"', "bash",
                    sys.executable, "-P", "-c", MAIN, "serve", *args, "--no-measure",
                    "--served-model-name", "engine",
                ],
                stderr=log,
                cwd=ROOT,
                # which nobody knows
                env=os.environ | {"SPECC_ADMIN_KEY": secrets.token_hex()},
            )  # fmt: skip

    async def wait_until_ready(self) -> None:
        end_s = time.monotonic() + 120
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end_s, "the server does not start"
            with contextlib.suppress(OSError):
                if (await ask(self.port, request("/health", method="GET"), 5))[0] == 200:
                    return
            await asyncio.sleep(0.2)

    def memory(self) -> int:
        """Bytes, with those of its children: pages that several have count once."""
        pids, total = [self.process.pid], 0
        while pids:
            pid = pids.pop()
            with contextlib.suppress(OSError, IndexError):
                sizes = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
                total += int(sizes.split("\nPss:")[1].split()[0]) << 10
                for task in Path(f"/proc/{pid}/task").iterdir():
                    pids += map(int, (task / "children").read_text(encoding="ascii").split())
        return total

    def count(self, what: str) -> int:
        """Of its threads (`task`) or open files (`fd`)."""
        with contextlib.suppress(OSError):
            return len(list(Path(f"/proc/{self.process.pid}/{what}").iterdir()))
        return 0

    async def end(self, figures: Figures) -> None:
        figures.has_died = self.process.poll() is not None
        if not figures.has_died:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, 45)
        figures.exit_code = self.process.poll()
        if figures.exit_code is None:
            self.process.kill()
        text = self.log.read_text(encoding="utf-8", errors="replace")
        figures.log_bytes, figures.num_tracebacks = len(text), text.count("Traceback")


def ordinary(index: int) -> tuple[str, bytes]:
    """Kind and bytes of an ordinary request; none of them is the same as another one soon."""
    turn = index // 5
    words = " ".join(WORDS[(turn + i) % len(WORDS)] for i in range(3 + turn % 7))
    body: dict[str, Any] = {"max_tokens": 12 + turn % 9, "temperature": 0}
    text = {"prompt": words, "ignore_eos": True}
    match index % 5:
        case 0:
            return "completion", request(COMPLETIONS, body | text)
        case 1:
            return "stream", request(COMPLETIONS, body | text | {"stream": True})
        case 2:
            messages = [{"role": "user", "content": words}]
            return "chat", request(CHATS, body | {"messages": messages, "ignore_eos": True})
        case 3:
            options = [f"{word} {turn % 50}" for word in WORDS[:5]]
            form = {"prompt": words, "guided_choice": options, "max_tokens": 40}
            return "choice", request(COMPLETIONS, body | form)
        case _:
            form = {"prompt": words, "guided_regex": "[a-z]{2,8} [0-9]{2}", "max_tokens": 40}
            return "regex", request(COMPLETIONS, body | form)


def check(kind: str, status: int, body: bytes) -> str:
    if status != 200:
        return f"{status} {body[:60]!r}"
    if kind == "stream":
        return "" if body.rstrip().endswith(b"[DONE]\n\n\r\n0".rstrip()) else "a stream that is cut"
    choice = json.loads(body)["choices"][0]
    text = choice["message"]["content"] if kind == "chat" else choice["text"]
    if kind == "regex" and not re.fullmatch("[a-z]{2,8} [0-9]{2}", text):
        return f"text {text!r}"
    if kind == "choice" and not any(text.startswith(word) for word in WORDS[:5]):
        return f"text {text!r}"
    return "" if choice["finish_reason"] in ("stop", "length") else "no end"


class Run:
    """Phases of quiet and attack, with ordinary requests all the time.

    Args:
        rate: ordinary requests a second.
    """

    def __init__(self, process: Process, names: list[str], rate: float) -> None:
        self.figures = Figures()
        self._process, self._names, self._rate = process, names, rate
        self._phase = "warm-up"
        self._open: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float, phase_s: float) -> Figures:
        tasks = [asyncio.create_task(work()) for work in (self._ordinary, self._health, self._look)]
        await asyncio.sleep(WARM_UP_S)
        end_s = time.monotonic() + seconds
        await self._quiet(phase_s)
        while time.monotonic() < end_s and self._is_alive:
            await self._attack(phase_s)
            await self._quiet(phase_s)
        self._phase = "end"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._open, return_exceptions=True)
        return self.figures

    @property
    def _is_alive(self) -> bool:
        return self._process.process.poll() is None

    async def _quiet(self, seconds: float) -> None:
        self._phase = "quiet"
        begin = len(self.figures.memory)
        await asyncio.sleep(seconds)
        sizes = [size for _, size in self.figures.memory[begin:]]
        # of the second half: what was in flight has gone
        self.figures.levels.append(int(median(sizes[len(sizes) // 2 :])))
        self.figures.threads.append(self._process.count("task"))
        self.figures.files.append(self._process.count("fd"))
        self._tell()

    async def _attack(self, seconds: float) -> None:
        self._phase = "attack"
        args = [str(self._process.port), ",".join(self._names), str(seconds)]
        attackers = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.attack_process", *args, stdout=subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        try:
            out, _ = await asyncio.wait_for(attackers.communicate(), seconds + 60)
            self.figures.attacks.update(json.loads(out))
        finally:
            if attackers.returncode is None:
                attackers.kill()
        await asyncio.sleep(SETTLE_S)

    async def _ordinary(self) -> None:
        """At a fixed rate, whether the server keeps up or not."""
        begin_s = time.monotonic()
        for index in range(10_000_000):
            due_s = begin_s + index / self._rate
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            task = asyncio.create_task(self._ask(index, due_s, self._phase))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            # a server that hangs would get one after the other
            while len(self._open) > 200:
                await asyncio.sleep(0.1)

    async def _ask(self, index: int, due_s: float, phase: str) -> None:
        kind, data = ordinary(index)
        error = ""
        try:
            status, body = await ask(self._process.port, data, PATIENCE_S)
            error = check(kind, status, body)
        except TimeoutError:
            error = "late"
        except OSError as failure:
            error = type(failure).__name__
        self.figures.answers.append(Answered(phase, kind, time.monotonic() - due_s, error))

    async def _health(self) -> None:
        data = request("/health", method="GET")
        while True:
            try:
                is_ok = (await ask(self._process.port, data, HEALTH_S))[0] == 200
            except (OSError, TimeoutError):
                is_ok = False
            self.figures.num_health_failures += not is_ok
            await asyncio.sleep(1.0)

    async def _look(self) -> None:
        while True:
            # reading it takes a while of what it is read from
            self.figures.memory.append((self._phase, self._process.memory()))
            await asyncio.sleep(1.0)

    def _tell(self) -> None:
        found = self.figures
        p99 = [percentile_of(found.seconds(phase), 99) * 1e3 for phase in ("quiet", "attack")]
        print(
            f"p99: {p99[0]:.0f} ms in quiet, {p99[1]:.0f} ms under attack;"
            f" {found.levels[-1] >> 20} MiB, {found.threads[-1]} threads, {found.files[-1]} files;"
            f" failed: {dict(found.failures)}",
            flush=True,
        )


async def run_attacks(
    engine: Path,
    names: list[str],
    *,
    seconds: float,
    phase_s: float = 30.0,
    rate: float = 4.0,
) -> Figures:
    """Serve an engine, attack it, and end it.

    Args:
        names: of attacks, see `ATTACKS`.
        seconds: for all phases together.
        phase_s: seconds of each.
        rate: ordinary requests a second.
    """
    with tempfile.TemporaryDirectory() as scratch:
        process = Process(engine, Path(scratch))
        try:
            await process.wait_until_ready()
            run = Run(process, names, rate)
            figures = await run.run(seconds, phase_s)
            await process.end(figures)
            return figures
        finally:
            if process.process.poll() is None:
                process.process.kill()
            process.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--phase", type=float, default=30.0, help="Seconds of each phase.")
    parser.add_argument("--rate", type=float, default=4.0, help="Ordinary requests a second.")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="Names, with commas between.")
    parser.add_argument("--max-ratio", type=float, default=3.0, help="Of the two p99.")
    parser.add_argument("--json", type=Path, help="Where the figures go.")
    args = parser.parse_args()
    names = args.attacks.split(",")
    if unknown := [name for name in names if name not in ATTACKS]:
        parser.error(f"unknown attacks {unknown}: choose from {', '.join(ATTACKS)}")
    figures = asyncio.run(
        run_attacks(args.engine, names, seconds=args.seconds, phase_s=args.phase, rate=args.rate)
    )
    misses = figures.misses(args.max_ratio)
    if args.json:
        report = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": {"processor": platform.processor(), "cores": os.cpu_count()},
            "seconds": args.seconds,
            "phase_s": args.phase,
            "requests_per_s": args.rate,
            "max_p99_ratio": args.max_ratio,
            "kinds_of_attack": names,
            **figures.to_json(),
            "misses": misses,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for miss in misses:
        print(f"MISSED: {miss}")
    print("the server has held" if not misses else "the server has not held")
    return bool(misses)


if __name__ == "__main__":
    sys.exit(main())
