"""What was seen of a server under attack, and the limits that it is held to."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from specc.percentile import percentile

# what may be left in the end: bytes, their share, threads, open files. Pools of threads fill where
# a machine is slow: 16 for chats, 3 for long texts, and asyncio's
MORE_BYTES, MORE_SHARE, MORE_THREADS, MORE_FILES = 128 << 20, 0.2, 25, 16
MAX_LOG_BYTES = 1 << 20


@dataclass
class Answered:
    """An ordinary request: its phase, its kind, its seconds from when it was due, its error."""

    phase: str
    kind: str
    seconds: float
    error: str = ""


@dataclass
class Figures:
    answers: list[Answered] = field(default_factory=list)
    attacks: Counter[str] = field(default_factory=Counter)
    num_health_failures: int = 0
    # phase → resident bytes of the server and its children, once a look
    memory: list[tuple[str, int]] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    exit_code: int | None = None
    has_died: bool = False
    log_bytes: int = 0
    num_tracebacks: int = 0

    def seconds(self, phase: str) -> list[float]:
        return sorted(a.seconds for a in self.answers if a.phase == phase)

    @property
    def ratio(self) -> float:
        """The 99th percentile under attack over that in quiet."""
        return percentile_of(self.seconds("attack"), 99) / percentile_of(self.seconds("quiet"), 99)

    @property
    def failures(self) -> Counter[str]:
        return Counter(f"{a.phase} {a.kind}: {a.error}" for a in self.answers if a.error)

    def misses(self, max_ratio: float) -> list[str]:
        """Limits that are not met; none is what it should be."""
        before, after = self.levels[0], self.levels[-1]
        most = before + max(MORE_BYTES, MORE_SHARE * before)
        limits = {
            "the server has ended": self.has_died,
            f"exit code {self.exit_code} after SIGTERM": self.exit_code != 0,
            f"failed requests: {dict(self.failures)}": bool(self.failures),
            f"{self.num_health_failures} times no health": self.num_health_failures > 0,
            f"p99 under attack is {self.ratio:.2f} x that in quiet": not self.ratio <= max_ratio,
            f"memory: {before >> 20} MiB before, {after >> 20} MiB after": after > most,
            f"threads: {self.threads[0]} before, {self.threads[-1]} after": (
                self.threads[-1] > self.threads[0] + MORE_THREADS
            ),
            f"open files: {self.files[0]} before, {self.files[-1]} after": (
                self.files[-1] > self.files[0] + MORE_FILES
            ),
            f"a log of {self.log_bytes} bytes": self.log_bytes > MAX_LOG_BYTES,
        }
        return [text for text, is_missed in limits.items() if is_missed]

    def to_json(self) -> dict[str, Any]:
        phases = {phase: self.seconds(phase) for phase in ("quiet", "attack")}
        return {
            "requests": {
                phase: {
                    "count": len(seconds),
                    "p50_ms": round(percentile_of(seconds, 50) * 1e3, 1),
                    "p99_ms": round(percentile_of(seconds, 99) * 1e3, 1),
                    "max_ms": round(seconds[-1] * 1e3, 1) if seconds else None,
                    "kinds_p50_p99_ms": self._kinds(phase),
                }
                for phase, seconds in phases.items()
            },
            "p99_ratio": round(self.ratio, 3),
            "failures": dict(self.failures),
            "health_failures": self.num_health_failures,
            "attacks": dict(sorted(self.attacks.items())),
            "memory_mib": {
                "quiet_phases": [level >> 20 for level in self.levels],
                "peak": max(size for _, size in self.memory) >> 20,
            },
            "threads": self.threads,
            "open_files": self.files,
            "log_bytes": self.log_bytes,
            "tracebacks": self.num_tracebacks,
            "exit_code": self.exit_code,
        }

    def _kinds(self, phase: str) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for kind in sorted({a.kind for a in self.answers}):
            seconds = sorted(a.seconds for a in self.answers if (a.phase, a.kind) == (phase, kind))
            found[kind] = [round(percentile_of(seconds, p) * 1e3, 1) for p in (50, 99)]
        return found


def percentile_of(values: list[float], percent: float) -> float:
    """NaN of no values, which no limit allows."""
    found = percentile(values, percent)
    return math.nan if found is None else found
