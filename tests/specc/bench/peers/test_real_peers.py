"""The programs themselves, where they are installed, on tiny models: all emit the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specc.bench.peers import names, transformers_generate
from specc.bench.peers.peer import Form, Job, NotAvailableError
from specc.bench.peers.prepare import Pair, prepare_peers
from specc.bench.rounds import run_rounds
from specc.progress import PhaseTimer
from tests import models
from tests.conftest import save_tiny_llama

pytestmark = pytest.mark.slow

# of several lengths; 0 and 1 are tokens like others, and 256 is the model's end
PROMPTS = [[70, 71, 72, 73, 74, 0], [80, 81], [90, 91, 256, 92, 70, 71, 70, 71]]
TOKENS = 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    """Heads of 16, the narrowest that all of them have."""
    root = tmp_path_factory.mktemp("pair")
    for name, seed, layers in (("target", 1, 2), ("draft", 2, 1)):
        save_tiny_llama(root / name, seed, layers, hidden_size=64)
    return Pair(str(root / "target"), str(root / "draft"), "", "float32", 3)


@pytest.fixture(scope="module")
def outputs(pair) -> list[list[int]]:
    """Of `generate`, in this process."""
    batches = [[ids] for ids in PROMPTS]
    job = Job(names.PLAIN, pair.target, None, "float32", 1, batches, TOKENS, 0)
    return transformers_generate.PEER.load(job).run("default").outputs


@pytest.fixture(scope="module")
def _cache(tmp_path_factory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("peer", "modes_of_batches"),
    [
        ("transformers", 1),
        ("onnxruntime-genai", 1),
        ("openvino-genai", 3),
        ("llama.cpp", 3),
    ],
)
def test_all_modes_emit_the_tokens_of_generate(pair, outputs, peer, modes_of_batches, size):
    facts = names.PEERS[peer]
    for module in (*facts.packages, *facts.converters):
        pytest.importorskip(module)
    batches = [PROMPTS[i : i + size] for i in range(0, len(PROMPTS), size)]
    phases = PhaseTimer(lambda event: None)
    with prepare_peers([peer], pair, batches, TOKENS, 1, phases) as prepared:
        num_modes = 3 if size == 1 else modes_of_batches
        expected = [names.run_of(peer, mode) for mode in names.MODES]
        assert [one.name for one in prepared.contenders] == expected[:num_modes], (
            prepared.not_available
        )
        assert [item["name"] for item in prepared.not_available] == expected[num_modes:]
        for item in prepared.not_available:
            assert "one sequence at a time" in item["reason"]
        for contender, (found,) in run_rounds(prepared.contenders, 1, 0):
            assert found.outputs == outputs, contender.name
            assert 0 < found.first_token_s < found.elapsed_s
            assert 0 < found.decode_s < found.elapsed_s
            if contender.name == peer:
                assert found.mean_acceptance_length is None
                sizes = list(map(len, batches))
                assert found.num_steps == len(sizes) * (TOKENS - 1)
                assert found.num_request_steps == sum(sizes) * (TOKENS - 1)
            elif found.mean_acceptance_length is not None:
                assert 1 <= found.mean_acceptance_length <= 11
                assert found.num_steps <= len(batches) * (TOKENS - 1)


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2", "qwen3"])
def test_gguf_files_that_are_written(tmp_path, kind):
    """llama.cpp computes with them what transformers does with the checkpoint."""
    for module in ("gguf", "llama_cpp"):
        pytest.importorskip(module)
    from specc.bench.peers import llama_cpp

    changes = {}
    if kind == "llama3":
        changes["rope_parameters"] = {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }  # fmt: skip
    name = "llama" if kind == "llama3" else kind
    models.build_model(name, **changes).save_pretrained(tmp_path / "model")
    llama_cpp.PEER.convert(tmp_path / "model", Form("float32"), tmp_path)
    prompts = [[[5, 6, 7, 8] * 12]]
    jobs = [
        Job(names.PLAIN, str(path), None, "float32", 1, prompts, 30, 0)
        for path in (tmp_path / "model", tmp_path / "model.gguf")
    ]
    expected = transformers_generate.PEER.load(jobs[0]).run("default").outputs
    assert llama_cpp.PEER.load(jobs[1]).run("default").outputs == expected
    assert len(set(expected[0])) > 5


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize(
    ("peer", "integers"),
    [
        ("llama.cpp", "int8"),
        ("llama.cpp", "int4"),
        ("onnxruntime-genai", "int4"),
        ("openvino-genai", "int8"),
        ("openvino-genai", "int4"),
    ],
)
def test_weights_in_integers_are_the_program_s_own(pair, outputs, peer, integers):
    """Smaller models; first tokens are still those of the weights that were rounded."""
    facts = names.PEERS[peer]
    for module in (*facts.packages, *facts.converters):
        pytest.importorskip(module)
    phases = PhaseTimer(lambda event: None)
    batches = [[ids] for ids in PROMPTS]
    own = replace(pair, integers=(integers, None))
    with (
        prepare_peers([peer], pair, batches, TOKENS, 1, phases) as whole,
        prepare_peers([peer], own, batches, TOKENS, 1, phases) as rounded,
    ):
        assert len(rounded.contenders) == 3, rounded.not_available
        sizes = [one.contenders[0].model_bytes for one in (rounded, whole)]
        assert sizes[0] < sizes[1]
        found = rounded.contenders[0].run().outputs
    # four bits of random weights change a choice now and then; other weights change them all
    same = sum(a[0] == b[0] for a, b in zip(found, outputs, strict=True))
    assert same >= 2, (found, outputs)


def test_what_no_gguf_file_is_written_of(tmp_path):
    pytest.importorskip("gguf")
    from specc.bench.peers.gguf_export import export

    for config, words in (
        ('{"model_type": "gpt2"}', "convert_hf_to_gguf.py"),
        ('{"model_type": "mistral", "sliding_window": 64}', "without windows"),
        ('{"model_type": "llama", "quantization_config": {"a": 1}}', "not quantized"),
    ):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(NotAvailableError, match=words):
            export(tmp_path, Form("float32"), tmp_path / "model.gguf")
