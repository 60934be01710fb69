"""Small engine directories, for tests of what writes and opens them."""

from __future__ import annotations

import json

import pytest

from specc.artifact.directory import Manifest, open_engine, torch_version
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest_entries import LimitsEntry, MemoryEntry, PlanEntry, TokenizerEntry
from specc.artifact.model_entry import LayerEntry, ModelEntry, SlabEntry
from specc.errors import EngineError
from specc.speculation.plans import OFF, SpecPlan
from specc.version import __version__

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
        "specc_version": __version__,
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


def edit(engine, **changes):
    file = engine / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(engine, found, **options):
    """Open an engine that must be refused; returns the error."""
    with pytest.raises(EngineError, match=found) as caught:
        open_engine(engine, **options)
    assert all((caught.value.found, caught.value.needed, caught.value.do))
    return caught.value
