"""transformers as a peer: the pair, the settings that are tried, and what it refuses."""

from __future__ import annotations

import pytest

from specc.bench.engine import EngineContender
from specc.bench.peers.names import ASSISTED, LOOKUP, PLAIN
from specc.bench.peers.peer import Job, NotAvailableError
from specc.bench.peers.transformers_generate import PEER
from specc.runtime.engine import Engine

PROMPTS = [[70, 71, 72, 73, 74], [80, 81], [90, 91, 92]]
CONSTANT_3 = {
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}


@pytest.fixture(scope="module")
def off_outputs(tiny_engine) -> list[list[int]]:
    engine = Engine.load(tiny_engine, verify=False)
    return EngineContender(engine, "off", "off", [[ids] for ids in PROMPTS], 20).run().outputs


def job(mode: str, target: object, draft: object = None, batches: object = None) -> Job:
    path = None if draft is None else str(draft)
    return Job(mode, str(target), path, "float32", 1, batches or [[ids] for ids in PROMPTS], 20, 3)


@pytest.mark.slow
def test_all_modes_emit_what_the_engine_does(tiny_models, off_outputs):
    for mode, draft, settings in (
        (PLAIN, None, {"default": {}}),
        (ASSISTED, tiny_models.draft, {"constant 3": CONSTANT_3, "defaults": {}}),
        (
            LOOKUP,
            None,
            {n: {"prompt_lookup_num_tokens": int(n[:-7])} for n in ("3 tokens", "10 tokens")},
        ),
    ):
        loaded = PEER.load(job(mode, tiny_models.target, draft))
        assert loaded.settings == settings
        for setting in settings:
            found = loaded.run(setting)
            assert found.outputs == off_outputs, (mode, setting)
            assert found.drafts is (mode != PLAIN)
            assert (found.mean_acceptance_length is None) is (mode == PLAIN)


@pytest.mark.parametrize("mode", [ASSISTED, LOOKUP])
def test_drafts_and_lookups_are_for_one_sequence(tiny_models, mode):
    draft = tiny_models.draft if mode == ASSISTED else None
    with pytest.raises(NotAvailableError, match="one sequence"):
        PEER.load(job(mode, tiny_models.target, draft, [PROMPTS]))
    found = PEER.load(job(PLAIN, tiny_models.target, None, [PROMPTS])).run("default")
    assert len(found.outputs) == 3


def test_a_pair_that_transformers_refuses(tiny_models, tmp_path, save_llama):
    """The compiler fits a padded vocabulary; transformers wants a tokenizer for that."""
    save_llama(tmp_path / "padded", 3, vocab_size=272)
    loaded = PEER.load(job(ASSISTED, tiny_models.target, tmp_path / "padded"))
    with pytest.raises(NotAvailableError, match="transformers refuses it"):
        loaded.run("defaults")


def test_a_directory_without_weights(tiny_models, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_models.target / "config.json").read_bytes())
    with pytest.raises(NotAvailableError, match=f"cannot load {tmp_path}"):
        PEER.load(job(PLAIN, tmp_path))
