"""A peer that needs no package: it gives out answers that a test has written down.

Its model is a file of answers, `{"prompt": [tokens]}`, in the checkpoint, or else the same token
over and over. It has two settings with a draft, and no lookups; what `FAKE_PEER` names goes wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from specc.bench.peers import names
from specc.bench.peers.names import ASSISTED, LOOKUP, PeerFacts
from specc.bench.peers.peer import BatchTimes, Form, Job, NotAvailableError, measurement
from specc.bench.rounds import Measurement

NAME = "fake"
ROOT = Path(__file__).parents[4]
ANSWERS = "answers.json"
SECONDS = {"default": 0.0, "slow": 0.05, "fast": 0.0}


def register(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Make `--against fake` known, to processes too, with a cache of its own."""
    module = "tests.specc.bench.peers.fake_peer"
    monkeypatch.setitem(names.PEERS, NAME, PeerFacts(module, "model", {}, {}, "peers"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SPECC_CACHE_DIR", str(cache))
    monkeypatch.setenv("FAKE_PEER_LOG", str(log(cache)))


def log(cache: Path) -> Path:
    """Where the form of each conversion is written."""
    return cache.with_name("conversions")


class FakePeer:
    """See `Peer`."""

    def convert(self, checkpoint: Path, form: Form, output: Path) -> None:
        if os.environ.get("FAKE_PEER") == "no such model":
            raise NotAvailableError("it has no such model")
        if os.environ.get("FAKE_PEER") == "broken converter":
            raise RuntimeError("converter is broken")
        with open(os.environ["FAKE_PEER_LOG"], "a") as file:
            file.write(f"{form}\n")
        (output / "model").mkdir()
        if (checkpoint / ANSWERS).is_file():
            shutil.copy(checkpoint / ANSWERS, output / "model")

    def load(self, job: Job) -> FakeLoaded:
        print("libraries print what they like")
        if os.environ.get("FAKE_PEER") == f"crash {job.mode}":
            print("a last word", file=sys.stderr, flush=True)
            os._exit(7)
        if job.mode == LOOKUP:
            raise NotAvailableError("it has no lookups")
        assert Path(job.target).is_dir()
        assert (job.draft is not None) == (job.mode == ASSISTED)
        return FakeLoaded(job)


PEER = FakePeer()


class FakeLoaded:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._runs = 0
        self.settings = {"default": {}}
        if job.mode == ASSISTED:
            self.settings = {"slow": {"num": job.depth}, "fast": {"num": job.depth + 1}}
        file = Path(job.target) / ANSWERS
        self._answers = json.loads(file.read_text()) if file.is_file() else {}

    def run(self, setting: str) -> Measurement:
        self._runs += 1
        if os.environ.get("FAKE_PEER") == f"late crash {self._job.mode}" and self._runs > 1:
            os._exit(9)
        if os.environ.get("FAKE_PEER") == f"never ends {self._job.mode}":
            print("it runs", file=sys.stderr, flush=True)
            time.sleep(600)
        time.sleep(SECONDS[setting])
        num = self._job.max_tokens
        outputs = [
            self._answers.get(json.dumps(ids), [3] * num)[:num]
            for batch in self._job.batches
            for ids in batch
        ]
        steps = num - 1 if setting == "default" else (num - 1) // 2
        times = [BatchTimes(len(b), 0.25, steps, steps * len(b)) for b in self._job.batches]
        return measurement(outputs, 1 + SECONDS[setting], times, setting != "default")
