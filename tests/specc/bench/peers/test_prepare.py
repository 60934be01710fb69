"""Peers in processes of their own: conversion, settings, what fails, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from specc.bench.peers import prepare as prepare_module
from specc.bench.peers.convert import converted
from specc.bench.peers.installed import check_installed
from specc.bench.peers.peer import BatchTimes, Form, measurement
from specc.bench.peers.prepare import Pair, Prepared, prepare_peers
from specc.bench.peers.resident import ResidentContender
from specc.bench.rounds import Difference, equal_token_share, run_rounds
from specc.errors import ConfigError, EngineError, ModelNotFoundError
from specc.progress import PhaseTimer
from tests.specc.bench.peers import fake_peer
from tests.specc.bench.peers.fake_peer import ANSWERS, NAME

BATCHES = [[[5, 6], [7]], [[8, 9, 10]]]
RUNS = ["fake", "fake-assisted", "fake-lookup"]


@pytest.fixture(autouse=True)
def _fake(monkeypatch, tmp_path):
    fake_peer.register(monkeypatch, tmp_path / "cache")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def pair_of(target: Path, draft: Path | None) -> Pair:
    special = ("the engine has wings",)
    return Pair(str(target), draft and str(draft), "there is no draft", "float32", 3, special)


def prepare(target: Path, draft: Path | None = None, tokens: int = 5) -> Prepared:
    phases = PhaseTimer(lambda event: None)
    return prepare_peers([NAME], pair_of(target, draft), BATCHES, tokens, 1, phases)


def test_modes_are_loaded_and_the_fastest_setting_is_kept(checkpoint, tmp_path):
    answers = {"[5, 6]": [1, 2, 3, 4, 5], "[7]": [6] * 5, "[8, 9, 10]": [7] * 5}
    (checkpoint / ANSWERS).write_text(json.dumps(answers))
    with prepare(checkpoint, checkpoint) as prepared:
        assert [one.name for one in prepared.contenders] == RUNS[:2]
        assert prepared.not_available == [{"name": RUNS[2], "reason": "it has no lookups"}]
        assert [one.setting for one in prepared.contenders] == ["default", "fast"]
        # target and draft are one checkpoint here
        size = 2 * len(json.dumps(answers))
        kept = {"name": "fast", "model_bytes": size, "num": 4}
        assert prepared.settings()[RUNS[1]] == kept
        special, note = prepared.notes
        assert special == "the engine has wings"
        assert "fastest setting, fast (before the rounds: slow 1.05 s, fast 1.00 s)" in note
        rounds = run_rounds(prepared.contenders, 2, 0)
        for _, measured in rounds:
            assert [one.outputs for one in measured] == [list(answers.values())] * 2
        assisted = rounds.of(RUNS[1])[0]
        # 4 tokens of each of 3 prompts after its first one, in 2 steps each
        assert assisted.mean_acceptance_length == 12 / 6
        assert (assisted.num_steps, assisted.num_request_steps) == (4, 6)
        assert rounds.of(NAME)[0].mean_acceptance_length is None
        processes = [one._process for one in prepared.contenders]
        assert [process.poll() for process in processes] == [None, None]
    assert [process.poll() for process in processes] == [0, 0]


def test_a_checkpoint_is_converted_once_for_what_it_holds(checkpoint, tmp_path):
    first = converted(NAME, checkpoint, Form("float32"), 1)
    assert (first / "model").is_dir()
    other = converted(NAME, checkpoint, Form("bfloat16"), 1)
    rounded = converted(NAME, checkpoint, Form("float32", "int8"), 1)
    assert len({first, other, rounded}) == 3
    moved = checkpoint.rename(tmp_path / "moved")
    assert converted(NAME, moved, Form("float32"), 1) == first
    (moved / "config.json").write_text("{ }")
    third = converted(NAME, moved, Form("float32"), 1)
    assert third not in (first, other, rounded)
    log = fake_peer.log(tmp_path / "cache").read_text()
    int8 = "float32 with weights in int8"
    assert log.splitlines() == ["float32", "bfloat16", int8, "float32"]
    assert os.listdir(tmp_path / "cache" / "scratch") == []


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        pytest.param("no such model", "it has no such model", marks=pytest.mark.slow),
        pytest.param("broken converter", "its converter failed on", marks=pytest.mark.slow),
        ("crash plain", "its process ended with code 7 (a last word)"),
    ],
)
def test_what_fails_before_the_rounds_is_said(checkpoint, monkeypatch, what, reason):
    monkeypatch.setenv("FAKE_PEER", what)
    with prepare(checkpoint) as prepared:
        assert prepared.not_available[0]["name"] == NAME
        assert prepared.not_available[0]["reason"].startswith(reason)
        # without a draft, none of the other modes is there
        assert prepared.not_available[1] == {"name": RUNS[1], "reason": "there is no draft"}
        assert prepared.contenders == []
    if what == "broken converter":
        assert "converter is broken" in prepared.not_available[0]["reason"]


def test_one_that_fails_while_it_is_tried_leaves_the_others(checkpoint, monkeypatch):
    monkeypatch.setenv("FAKE_PEER", "late crash assisted")
    with prepare(checkpoint, checkpoint) as prepared:
        assert [one.name for one in prepared.contenders] == [NAME]
        assert (
            prepared.not_available[0]["reason"]
            == "its process ended with code 9 (libraries print what they like)"
        )


def test_one_that_fails_within_the_rounds_is_an_error(checkpoint, monkeypatch):
    monkeypatch.setenv("FAKE_PEER", "late crash plain")
    with prepare(checkpoint) as prepared, pytest.raises(EngineError) as caught:
        run_rounds(prepared.contenders, 1, 0)
    assert caught.value.found.startswith("fake ended within the rounds: its process ended with")


def test_an_interrupt_ends_a_process_that_computes(checkpoint, monkeypatch):
    """At once: nobody waits for the run that was going on, or for a time limit."""
    monkeypatch.setenv("FAKE_PEER", "never ends plain")
    started = []

    class Interrupted(ResidentContender):
        def run_with(self, setting):
            started.append(self._process)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            return super().run_with(setting)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "ResidentContender", Interrupted)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            prepare(checkpoint)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_checkpoint_that_is_gone(checkpoint, tmp_path):
    with pytest.raises(ModelNotFoundError) as caught:
        prepare(tmp_path / "no")
    assert (str(tmp_path / "no") in caught.value.found, "--target-" in caught.value.do) == (1, 1)
    with pytest.raises(ModelNotFoundError) as caught:
        prepare(checkpoint, tmp_path / "no")
    assert "--draft-checkpoint" in caught.value.do


def test_a_package_that_is_absent(monkeypatch):
    facts = fake_peer.PeerFacts("m", None, {"json": "json"}, {"no_such_module": "no-such"}, "peers")
    monkeypatch.setitem(fake_peer.names.PEERS, "absent", facts)
    with pytest.raises(ConfigError) as caught:
        check_installed([NAME, "absent"])
    assert caught.value.found == "--against absent, and no no-such in this environment"
    assert caught.value.do.startswith("pip install")


def test_figures_of_a_run():
    """Two batches, of 2 and 1 prompts, 4 tokens each: 9 of 12 tokens after the first ones."""
    times = [BatchTimes(2, 0.5, 3, 5), BatchTimes(1, 0.25, 2, 2)]
    found = measurement([[1] * 4] * 3, 2.0, times, drafts=True)
    assert found.first_token_s == pytest.approx((0.5 + 0.5 + 0.25) / 3)
    assert found.decode_s == 1.25
    assert (found.num_decode_tokens, found.num_steps, found.num_request_steps) == (9, 5, 7)
    assert found.mean_acceptance_length == 9 / 7
    assert measurement([[1] * 4] * 3, 2.0, times, drafts=False).mean_acceptance_length is None
    times[1].first_tokens = 3
    assert measurement([[1] * 4] * 3, 2.0, times, drafts=True).num_decode_tokens == 12 - 2 - 3
    times[1].request_steps = None
    untold = measurement([[1] * 4] * 3, 2.0, times, drafts=True)
    assert (untold.mean_acceptance_length, untold.num_request_steps) == (None, 0)


def test_share_of_equal_tokens():
    reference = [[1, 2, 3, 4], [5, 6], [7, 8]]
    differences = [Difference(0, 1, 2, 9), Difference(2, 2, None, 4)]
    assert equal_token_share(reference, differences) == 1 - 3 / 8
    assert equal_token_share(reference, []) == 1.0
