"""`build` writes an engine that generates the target's own tokens, or leaves nothing behind."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from specc.compiler.build import build
from specc.compiler.context import engine_plans
from specc.errors import (
    ConfigError,
    ModelNotFoundError,
    OutputError,
    VocabMismatchError,
)
from specc.speculation.plans import OFF, SpecPlan
from tests.models import build_model
from tests.specc.compiler.builds import (
    NUM_TOKENS,
    PROMPTS,
    TREE,
    Custom,
    generate,
    greedy,
    near,
    options,
    refused,
)


def hf_logits(directory):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return lambda ids, positions: model(input_ids=ids, position_ids=positions).logits


@pytest.fixture(scope="module")
def built(models, tmp_path_factory):
    """An engine of target and draft, its compilation and the events of the build."""
    path = tmp_path_factory.mktemp("engines") / "engine"
    events = []
    config = options(TREE, SpecPlan.from_widths((1,)))
    compilation = build(
        models / "target",
        models / "draft",
        path,
        config,
        dump_graphs=path.parent / "graphs",
        listen=events.append,
    )
    return path, compilation, events


@pytest.fixture(scope="module")
def wanted(models):
    logits_of = hf_logits(models / "target")
    return [greedy(logits_of, prompt) for prompt in PROMPTS]


@pytest.mark.default("tree-2-2-1")
@pytest.mark.parametrize("plan", ["off", "chain-1", "tree-2-2-1"])
def test_generates_the_targets_own_tokens(built, wanted, plan):
    outputs, stats = generate(built[0], plan)
    assert outputs == wanted
    assert (stats.num_spec_steps > 0) == (plan != "off")


def test_manifest(built, models):
    path, compilation, _ = built
    manifest = compilation.manifest
    assert [plan.name for plan in manifest.plans] == ["tree-2-2-1", "chain-1", "off"]
    assert manifest.default_plan == "tree-2-2-1"
    assert (manifest.limits.max_nodes, manifest.limits.max_seq_len) == (11, 64)
    target, draft = manifest.models
    assert (target.name, target.dir, target.vocab_size) == ("target", "target", 128)
    assert (draft.name, draft.dir, draft.vocab_size) == ("draft_0", "draft-0", 128)
    assert target.architecture == "LlamaForCausalLM"
    assert target.max_position == 256
    assert target.source == str(models / "target")
    (layer,) = target.layers
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window) == (4, 2, 16, 0)
    (slab,) = target.slabs
    assert (slab.num_layers, slab.num_kv_heads, slab.head_dim) == (1, 2, 16)
    assert set(manifest.files) == {
        str(file.relative_to(path))
        for file in path.rglob("*")
        if file.is_file() and file.name != "manifest.json"
    }
    assert manifest.memory_plan["target"].weights >= target.num_parameters * 4
    # two sequences of five blocks of 16 rows: 64 positions and 11 nodes
    assert manifest.memory_plan["target"].cache == 2 * 2 * 16 * (2 * 5 * 16) * 4
    assert manifest.memory_plan["target"].logits == 2 * 11 * 128 * 4


def test_report_and_dumps(built):
    path, compilation, events = built
    report = json.loads((path / "report.json").read_text())
    assert report["passes"] == [record.to_json() for record in compilation.records]
    assert {row["program"] for row in report["passes"]} == {"target", "draft_0"}
    phases = [event.phase for event in events if event.seconds is not None]
    assert phases == list(compilation.seconds)
    assert phases[:2] == ["check models", "load models"]
    assert phases[2:6] == ["trace target", "rewrite target", "trace draft_0", "rewrite draft_0"]
    assert phases[6:] == ["write programs", "write target weights", "write draft_0 weights"]
    names = {file.name for file in (path.parent / "graphs").iterdir()}
    assert {"target.0-trace.txt", "draft_0.6-vocabulary.txt"} <= names
    assert compilation.warnings == []


def test_weights_are_the_checkpoints(built, models):
    from safetensors.torch import load_file

    source = load_file(models / "target" / "model.safetensors")
    stored = load_file(built[0] / "target" / "weights.safetensors")
    name = "model.layers.0.self_attn.{}_proj.weight"
    parts = [name.format(part) for part in "qkv"]
    assert torch.equal(stored["+".join(parts)], torch.cat([source[part] for part in parts]))
    assert torch.equal(stored["model.norm.weight"], source["model.norm.weight"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [pytest.param((128, 136), marks=pytest.mark.slow), (136, 128)], ids=str
)
def test_vocabulary_padded_to_another_size(tmp_path, sizes):
    """A draft proposes no id past the target's, and survives the ids that it lacks."""
    target, draft = Custom(0, sizes[0]), Custom(1, sizes[1])
    rows = min(sizes)
    with torch.no_grad():  # right where both have the id, tempted by its own ids elsewhere
        draft.load_state_dict(
            {k: v for k, v in target.state_dict().items() if k[:4] not in ("toke", "head")},
            strict=False,
        )
        draft.tokens.weight[:rows] = target.tokens.weight[:rows]
        draft.head.weight[:rows] = target.head.weight[:rows]
        (draft if sizes[1] > sizes[0] else target).head.weight[128:] *= 1.5
    build(target, draft, tmp_path / "engine", options(TREE))
    prompts = PROMPTS if rows == sizes[0] else [[5, 133, 3, 135, 41, 7, 7], [130]]
    want = [greedy(target, prompt) for prompt in prompts]
    assert (max(map(max, want)) >= 128) == (sizes[0] > 128)
    outputs, stats = generate(tmp_path / "engine", prompts=prompts)
    assert outputs == want
    assert stats.mean_acceptance_length > 1
    manifest = json.loads((tmp_path / "engine" / "manifest.json").read_text())
    assert [model["vocab_size"] for model in manifest["models"]] == [sizes[0], min(sizes)]


def test_module_of_another_dtype_is_refused(tmp_path):
    found = refused(ConfigError, tmp_path, Custom(), None, options(dtype="bfloat16"))
    assert found == "Custom has parameters of float32; dtype is bfloat16"


@pytest.mark.slow
def test_bfloat16(tmp_path):
    from safetensors.torch import load_file

    config, target = options(TREE, dtype="bfloat16"), Custom().bfloat16()
    manifest = build(target, target, tmp_path / "engine", config).manifest
    assert manifest.dtype == "bfloat16"
    # two sequences of five blocks of 16 rows, keys and values of two heads of 8
    assert manifest.memory_plan["target"].cache == 2 * 2 * 8 * (2 * 5 * 16) * 2
    weights = load_file(tmp_path / "engine" / "target" / "weights.safetensors")
    assert torch.equal(weights["tokens.weight"], target.tokens.weight)
    outputs, stats = generate(tmp_path / "engine")
    assert [len(tokens) for tokens in outputs] == [NUM_TOKENS] * 2
    # the draft is the target: nearly all of it is accepted, but for ties of coarse logits
    assert stats.mean_acceptance_length > 2.5


def test_no_draft(tmp_path):
    target = Custom()
    manifest = build(target, None, tmp_path / "engine", options()).manifest
    assert [plan.name for plan in manifest.plans] == ["off"]
    assert [model.name for model in manifest.models] == ["target"]
    outputs, stats = generate(tmp_path / "engine")
    assert outputs == [greedy(target, prompt) for prompt in PROMPTS]
    assert stats.num_spec_steps == 0


def test_modules_with_their_own_weights(tmp_path):
    target = Custom()
    config = options(TREE, max_seq_len=48)
    manifest = build(target, near(target), tmp_path / "engine", config).manifest
    assert [m.architecture for m in manifest.models] == ["Custom", "Custom"]
    assert manifest.tokenizer.file is None
    assert manifest.models[0].num_parameters == sum(p.numel() for p in target.parameters())
    want = [greedy(target, prompt) for prompt in PROMPTS]
    outputs, stats = generate(tmp_path / "engine")
    assert outputs == want
    assert stats.mean_acceptance_length > 1.5


@pytest.mark.slow
def test_directory_with_a_draft_in_memory(models, tmp_path, wanted):
    """The draft is a loaded Hugging Face module, equal to the target: all is accepted."""
    draft = build_model("llama", num_hidden_layers=1)
    build(models / "target", draft, tmp_path / "engine", options(SpecPlan.from_widths((1, 1))))
    outputs, stats = generate(tmp_path / "engine")
    assert outputs == wanted
    assert stats.acceptance_rate == 1.0


def test_probe_gets_a_finished_engine(models, tmp_path):
    seen = []

    def probe(directory):
        outputs, _ = generate(directory)
        seen.append((directory.name, outputs))
        return {"num_tokens": 3}

    output = tmp_path / "engine"
    compilation = build(
        Custom(), None, output, options(probe=True), tokenizer=models / "target", probe=probe
    )
    assert compilation.manifest.probe == {"num_tokens": 3}
    assert json.loads((output / "manifest.json").read_text())["probe"] == {"num_tokens": 3}
    ((name, outputs),) = seen
    assert name != "engine"
    assert generate(output)[0] == outputs


# bad input: each is refused with its numbers and leaves nothing behind


def test_absent_target(models, tmp_path):
    refused(ModelNotFoundError, tmp_path, tmp_path / "nowhere", models / "draft", options(TREE))


def test_plan_without_draft(models, tmp_path):
    found = refused(ConfigError, tmp_path, models / "target", None, options(TREE))
    assert found == "plan tree-2-2-1 without a draft"


@pytest.mark.slow
def test_other_tokens(models, tmp_path):
    """A draft that has two of the target's tokens the other way round is told, and mapped."""
    other = tmp_path / "other"
    shutil.copytree(models / "draft", other)
    swap_tokens(other / "tokenizer.json")
    found = build(models / "target", other, tmp_path / "engine", options(TREE, backend="eager"))
    (told,) = [text for text in found.warnings if "other tokens" in text]
    assert "proposes 128 of 128 target ids, and reads 0 as" in told
    assert "Outputs stay the target's" in told
    outputs, metrics = generate(tmp_path / "engine")
    assert outputs == generate(tmp_path / "engine", "off")[0]
    assert metrics.mean_acceptance_length > 1.0


def test_tokens_without_known_bytes(models, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models / "draft", other)
    swap_tokens(other / "tokenizer.json", decoder=None, pre_tokenizer=None)
    found = refused(VocabMismatchError, tmp_path, models / "target", other, options(TREE))
    assert "without bytes or the sign ▁" in found


def test_ranks_do_not_share_a_draft_of_other_tokens(models, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models / "draft", other)
    swap_tokens(other / "tokenizer.json")
    shared = options(TREE, tensor_parallel_size=2, draft_tensor_parallel_size=2)
    found = refused(ConfigError, tmp_path, models / "target", other, shared)
    assert found.startswith("--draft-tensor-parallel-size 2, and draft_0")


def swap_tokens(file, **changes):
    """Give two tokens of a tokenizer each other's id."""
    data = json.loads(file.read_text()) | changes
    vocab = data["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[5:7]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(data))


def test_missing_tokenizer(models, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models / "draft", other)
    (other / "tokenizer.json").unlink()
    refused(VocabMismatchError, tmp_path, models / "target", other, options(TREE))


def test_existing_output(tmp_path):
    output = tmp_path / "engine"
    output.mkdir()
    (output / "mine").write_text("x")
    for force in (False, True):
        with pytest.raises(OutputError):
            build(Custom(), None, output, options(), force=force)
    assert (output / "mine").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def fail(directory):
    raise RuntimeError("no")


def test_failing_probe_leaves_nothing(models, tmp_path):
    file, config = models / "target" / "tokenizer.json", options(probe=True)
    with pytest.raises(RuntimeError, match="no"):
        build(Custom(), None, tmp_path / "engine", config, tokenizer=file, probe=fail)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_probed_without_a_tokenizer(tmp_path):
    config = options(probe=True)
    manifest = build(Custom(), None, tmp_path / "engine", config, probe=fail).manifest
    assert manifest.probe is None


@pytest.mark.parametrize(
    ("plans", "has_draft", "names"),
    [
        ((), True, ["chain-4", "off"]),
        ((), False, ["off"]),
        ((OFF,), True, ["off"]),
        ((OFF,), False, ["off"]),
        ((TREE,), True, ["tree-2-2-1", "off"]),
        ((OFF, TREE, TREE), True, ["tree-2-2-1", "off"]),
    ],
)
def test_engine_plans(plans, has_draft, names):
    assert [plan.name for plan in engine_plans(options(*plans), has_draft)] == names
