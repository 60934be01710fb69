"""`build` writes an engine that generates the target's own tokens, or leaves nothing behind."""

from __future__ import annotations

import copy
import json
import shutil
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specc.artifact.backends import facts_of
from specc.artifact.manifest import Manifest
from specc.cli.render import cache_room, rotary_lines
from specc.compiler.build import build
from specc.compiler.engine_plans import engine_plans
from specc.config import CompileConfig
from specc.errors import (
    ConfigError,
    ModelNotFoundError,
    NotCausalLMError,
    OutputError,
    TreeError,
    UnsupportedRotaryError,
    VocabMismatchError,
    WeightError,
)
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from tests.models import build_model, save_tiny

PROMPTS = [[5, 17, 3, 99, 41, 7, 7], [64]]
NUM_TOKENS = 20
TREE = SpecPlan.from_widths((2, 2, 1))


def options(*plans, **changes):
    fields = {"max_batch_size": 2, "max_seq_len": 64, "prefill_chunk": 4, "probe": False}
    return CompileConfig(plans=plans, **(fields | changes))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of Llamas of one layer."""
    root = tmp_path_factory.mktemp("models")
    changes = {"num_hidden_layers": 1}
    save_tiny("llama", root / "target", **changes)
    save_tiny("llama", root / "draft", noise=0.1, **changes)
    return root


class Custom(nn.Module):
    """A language model of somebody's own: learned positions, grouped heads, no configuration."""

    def __init__(self, seed: int = 0, vocab: int = 128, window: int = 100, dim: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.window, self.dim = window, dim
        self.tokens, self.places = nn.Embedding(vocab, 32), nn.Embedding(64, 32)
        self.qkv = nn.Linear(32, 8 * dim)
        self.out, self.head = nn.Linear(4 * dim, 32), nn.Linear(32, vocab, bias=False)
        self.register_buffer("gain", torch.linspace(0.5, 3, 32))
        self.head.weight.data *= 4

    def forward(self, input_ids, position_ids):
        x = self.tokens(input_ids) + self.places(position_ids)
        sizes = [count * self.dim for count in (4, 2, 2)]
        q, k, v = self.qkv(F.layer_norm(x, (32,))).split(sizes, -1)
        q, k, v = (item.unflatten(-1, (-1, self.dim)).transpose(1, 2) for item in (q, k, v))
        distance = position_ids[0][:, None] - position_ids[0][None]
        mask = (distance >= 0) & (distance < self.window)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )
        return self.head(x * self.gain)


def near(model, noise=0.02):
    """A draft that is mostly right: the model, disturbed."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        draft.out.weight += noise * torch.randn_like(draft.out.weight)
    return draft


def greedy(logits_of, prompt, count=NUM_TOKENS):
    """Plain greedy decoding by whole passes."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        ids = torch.tensor([tokens])
        with torch.no_grad():
            logits = logits_of(ids, torch.arange(len(tokens))[None])
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def hf_logits(directory):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return lambda ids, positions: model(input_ids=ids, position_ids=positions).logits


def generate(engine, plan=None, prompts=PROMPTS):
    llm = LLM(engine, plan=plan)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
    return outputs, llm.get_metrics()


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
    assert {"target.0-trace.txt", "draft_0.5-vocabulary.txt"} <= names
    assert compilation.warnings == []


def test_weights_are_the_checkpoints(built, models):
    from safetensors.torch import load_file

    source = load_file(models / "target" / "model.safetensors")
    stored = load_file(built[0] / "target" / "weights.safetensors")
    name = "model.layers.0.self_attn.{}_proj.weight"
    parts = [name.format(part) for part in "qkv"]
    assert torch.equal(stored["+".join(parts)], torch.cat([source[part] for part in parts]))
    assert torch.equal(stored["model.norm.weight"], source["model.norm.weight"])


@pytest.mark.parametrize("sizes", [(128, 136), (136, 128)], ids=str)
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


def refused(error, tmp_path, *args, **kwargs):
    output = tmp_path / "out" / "engine"
    output.parent.mkdir()
    with pytest.raises(error) as caught:
        build(args[0], args[1], output, args[2], **kwargs)
    assert list(output.parent.iterdir()) == []
    assert caught.value.needed
    assert caught.value.do
    return caught.value.found


def test_tree_as_deep_as_the_window(tmp_path):
    plan = SpecPlan.from_widths((1,) * 4)
    found = refused(TreeError, tmp_path, Custom(window=4), Custom(), options(plan))
    assert found.startswith("plan chain-4 of depth 4; layer ")
    assert found.endswith(" of target has a sliding window of 4")


def test_window_of_the_draft_counts_too(tmp_path):
    plan = SpecPlan.from_widths((1,) * 4)
    found = refused(TreeError, tmp_path, Custom(), Custom(window=4), options(plan))
    assert found.endswith(" of draft_0 has a sliding window of 4")


def test_tree_just_within_the_window(tmp_path):
    target = Custom(window=4)
    build(target, near(target), tmp_path / "engine", options(SpecPlan.from_widths((2, 1, 1))))
    outputs, stats = generate(tmp_path / "engine")
    assert outputs == [greedy(target, prompt) for prompt in PROMPTS]
    assert stats.mean_acceptance_length > 1.5


VIEW = SpecPlan.from_widths((1, 1), ("self_w32_s4",))


@pytest.mark.parametrize(
    ("window", "sink", "changes", "found"),
    [
        (15, 4, {}, "--draft self:window=15,sink=4, and blocks of 16 rows"),
        (64, 4, {"max_seq_len": 80}, "in sequences of at most 80 tokens"),
        (16, 60, {"max_seq_len": 80}, "in sequences of at most 80 tokens"),
        (64, 4, {"block_size": 0}, "and --block-size 0"),
        (64, 4, {"backend": "onnx"}, "and the backend onnx"),
        (64, 4, {"backend": "tensorrt"}, "and the backend tensorrt"),
    ],
)
def test_views_that_cannot_be(models, tmp_path, window, sink, changes, found):
    plan = SpecPlan.from_widths((1, 1), (f"self_w{window}_s{sink}",))
    config = options(plan, **{"max_seq_len": 200, "block_size": 16} | changes)
    assert found in refused(ConfigError, tmp_path, models / "target", None, config)


def test_a_view_that_just_fits(models, tmp_path):
    """One block, and a budget one block below the longest sequence."""
    for window, length in ((16, 200), (48, 65)):
        plan = SpecPlan.from_widths((1, 1), (f"self_w{window}_s4",))
        config = options(plan, max_seq_len=length, block_size=16, backend="eager")
        manifest = build(models / "target", None, tmp_path / str(window), config).manifest
        assert [model.name for model in manifest.models] == ["target"]
        assert manifest.default_plan == plan.name


BLOCKS = SpecPlan.from_widths((1, 1, 1), ("self_w4_s0_b8",))


@pytest.mark.parametrize(
    ("view", "changes", "found"),
    [
        ("self_w16_s0_b15", {}, "--draft self:blocks=15,window=16,sink=0, and blocks of 16 rows"),
        ("self_w16_s4_b48", {"max_seq_len": 80}, "in sequences of at most 80 tokens"),
        ("self_w16_s4_b16", {"backend": "onnx"}, "and the backend onnx"),
        ("self_w16_s4_b16", {"tensor_parallel_size": 2}, "and --tensor-parallel-size 2"),
    ],
)
def test_chosen_blocks_that_cannot_be(models, tmp_path, view, changes, found):
    config = options(
        SpecPlan.from_widths((1, 1), (view,)),
        **{"max_seq_len": 200, "block_size": 16} | changes,
    )
    assert found in refused(ConfigError, tmp_path, models / "target", None, config)


def test_only_engines_that_choose_blocks_ask_for_votes(models, tmp_path):
    """In all layers of the target, not in a draft; programs of other engines are what they were."""
    programs = {}
    chain = SpecPlan.from_widths((1,))
    kinds = {"off": (chain,), "window": (chain, VIEW), "blocks": (chain, VIEW, BLOCKS)}
    for name, plans in kinds.items():
        config = options(*plans, max_seq_len=64, block_size=4, backend="eager")
        manifest = build(models / "target", models / "draft", tmp_path / name, config).manifest
        for model in manifest.models:
            programs[name, model.name] = (tmp_path / name / model.program_file).read_text()
    for model in ("target", "draft_0"):
        assert programs["window", model] == programs["off", model]
    assert programs["blocks", "draft_0"] == programs["off", "draft_0"]
    found = json.loads(programs["blocks", "target"])
    inputs = [(entry["name"], entry["kind"]) for entry in found["inputs"]]
    place = inputs.index(("mass", "input"))
    assert inputs[place - 1] == ("logit_rows", "input")
    assert {kind for _, kind in inputs[place + 1 :]} == {"cache"}
    calls = [node.get("target") for node in found["graph"]["nodes"]]
    assert calls.count("specc.block_mass.default") == calls.count("specc.tree_attention.default")
    before = json.loads((tmp_path / "window" / f"steps/{VIEW.name}.json").read_text())
    after = json.loads((tmp_path / "blocks" / f"steps/{VIEW.name}.json").read_text())
    assert before == after


def test_an_engine_that_chooses_blocks(models, tmp_path):
    """Compiled and as graphs: the same tokens as without, from the same drafts."""
    config = options(BLOCKS, max_seq_len=64, block_size=4, backend="cpu")
    build(models / "target", None, tmp_path / "engine", config)
    prompts = [[5, 17, 3, 99, 41, 7, 7] * 3, [64], list(range(1, 30))]
    params = SamplingParams(max_tokens=34, ignore_eos=True)
    found = {}
    for backend in ("cpu", "eager"):
        engine = Engine.load(tmp_path / "engine", backend=backend)
        for plan in ("off", BLOCKS.name):
            llm = LLM(engine, plan=plan, shares_prefixes=False)
            outputs = llm.generate(prompts, [params] * 3)
            stats = llm.get_metrics()
            tokens = [output.outputs[0].token_ids for output in outputs]
            found[backend, plan] = tokens, stats.num_spec_steps, stats.num_accepted_tokens
    for backend in ("cpu", "eager"):
        assert found[backend, BLOCKS.name][0] == found[backend, "off"][0] == found["cpu", "off"][0]
    assert found["cpu", BLOCKS.name] == found["eager", BLOCKS.name]


def test_a_view_of_a_sliding_window(tmp_path):
    """A second program, unless no sequence outgrows the window."""
    config = options(VIEW, max_seq_len=64, block_size=16, backend="eager")
    for window, names in ((63, ["self_w32_s4"]), (64, [])):
        path = tmp_path / str(window)
        manifest = build(Custom(window=window), None, path, config).manifest
        assert [entry.name for entry in manifest.self_drafts] == names
        assert (path / "self-w32-s4" / "program.json").exists() == bool(names)
        assert ("self_drafts" in json.loads((path / "manifest.json").read_text())) == bool(names)
    found = refused(ConfigError, tmp_path, Custom(window=32), None, config)
    assert found.startswith("--draft self:window=32,sink=4; no layer of the target sees more than")


@pytest.mark.parametrize(
    ("draft", "changes", "found"),
    [
        ("self_l0to2", {}, "--draft self:layers=0-2, and a target of 2 layers"),
        ("self_x2", {}, "--draft self:skip=2, and a target of 2 layers"),
        ("self_x0to1", {}, "--draft self:skip=0-1, and a target of 2 layers"),
        ("self_l0to1", {}, "--draft self:layers=0-1, all 2 layers of the target"),
        ("self_l0_w8_s4", {}, "--draft self:layers=0,window=8,sink=4, and blocks of 16 rows"),
        (
            "self_l0_w64_s4",
            {},
            "--draft self:layers=0,window=64,sink=4, in sequences of at most 64",
        ),
        ("self_l0", {"block_size": 0}, "--draft self:layers=0 and --block-size 0"),
        ("self_l0_w16_s4_b16", {}, "--draft self:layers=0,blocks=16,window=16,sink=4: blocks, and"),
        ("self_l0", {"tensor_parallel_size": 2}, "and --tensor-parallel-size 2"),
        ("self_l0", {"backend": "onnx"}, "--draft self:layers=0 and the backend onnx"),
    ],
)
def test_self_drafts_that_cannot_be(two_layers, tmp_path, draft, changes, found):
    plan = SpecPlan.from_widths((1, 1), (draft,))
    config = options(plan, **{"block_size": 16, "backend": "eager"} | changes)
    assert found in refused(ConfigError, tmp_path, two_layers, None, config)


@pytest.mark.parametrize("is_module", [False, True], ids=["checkpoint", "module"])
def test_heads_too_large_to_vote(tmp_path, monkeypatch, is_module):
    """Of a checkpoint before anything is traced; of a module, as soon as its layers are known."""
    target = Custom(dim=136)
    if not is_module:
        target = save_tiny("qwen3", tmp_path / "target", head_dim=136)
        monkeypatch.setattr("specc.compiler.build.compile_models", None)
    chain = SpecPlan.from_widths((1,), ("self_w16_s4_b16",))
    config = options(chain, max_seq_len=60, block_size=16, backend="cuda")
    found = refused(ConfigError, tmp_path, target, None, config)
    assert found == "--draft self:blocks=16,window=16,sink=4, and heads of 136 in float32"


def test_what_votes_is_what_the_kernel_takes():
    """What is refused early is what the kernel itself refuses."""
    from specc.kernels.cuda.block_mass import most_head_dim

    facts = facts_of("cuda")
    assert {x: facts.most_voting_dim(x) for x in facts.dtypes} == {
        x: most_head_dim(getattr(torch, x)) for x in facts.dtypes
    }
    assert facts_of("cpu").most_voting_dim("float32") is None


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "target"
    save_tiny("llama", path)
    return path


def test_longer_than_the_models_positions(models, tmp_path):
    config = options(max_seq_len=257)
    found = refused(ConfigError, tmp_path, models / "target", None, config)
    assert found == "--max-seq-len 257; the target model has 256 positions"


def test_longer_than_the_drafts_positions(models, tmp_path):
    draft = build_model("llama", num_hidden_layers=1, max_position_embeddings=32)
    config = options(SpecPlan.from_widths((1,)), max_seq_len=33)
    found = refused(ConfigError, tmp_path, models / "target", draft, config)
    assert "the draft 0 model has 32 positions" in found


@pytest.mark.parametrize(("positions", "length"), [(40, 40), (100_000, 64), (None, 64)])
def test_max_seq_len_defaults_to_the_models_positions(tmp_path, positions, length):
    """Custom has a table of 64 positions, whatever a config says."""
    target = Custom()
    if positions:
        target.config = types.SimpleNamespace(max_position_embeddings=positions)
    config = options(max_seq_len=None)
    limits = build(target, None, tmp_path / "engine", config).manifest.limits
    assert limits.max_seq_len == length


def test_absent_target(models, tmp_path):
    refused(ModelNotFoundError, tmp_path, tmp_path / "nowhere", models / "draft", options(TREE))


def test_absent_draft(models, tmp_path):
    refused(ModelNotFoundError, tmp_path, models / "target", tmp_path / "nowhere", options(TREE))


def test_not_a_language_model(tmp_path):
    (tmp_path / "bert").mkdir()
    config = {"model_type": "bert", "architectures": ["BertModel"]}
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config))
    assert "BertModel" in refused(NotCausalLMError, tmp_path, tmp_path / "bert", None, options())


def test_plan_without_draft(models, tmp_path):
    found = refused(ConfigError, tmp_path, models / "target", None, options(TREE))
    assert found == "plan tree-2-2-1 without a draft"


def test_other_tokenizer(models, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models / "draft", other)
    text = (other / "tokenizer.json").read_text()
    data = json.loads(text)
    vocab = data["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[5:7]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(data))
    found = refused(VocabMismatchError, tmp_path, models / "target", other, options(TREE))
    assert found.startswith(f"token 5 is {first!r}")


def test_missing_tokenizer(models, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models / "draft", other)
    (other / "tokenizer.json").unlink()
    refused(VocabMismatchError, tmp_path, models / "target", other, options(TREE))


def test_missing_weights(models, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models / "target", other)
    (other / "model.safetensors").unlink()
    refused(ModelNotFoundError, tmp_path, other, None, options())


def test_missing_tensor(models, tmp_path):
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(models / "target", other)
    tensors = load_file(other / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, other / "model.safetensors")
    found = refused(WeightError, tmp_path, other, None, options())
    assert "model.layers.0.mlp.up_proj.weight" in found


def test_dynamic_rotary_of_a_module(models, tmp_path):
    target = build_model("llama", num_hidden_layers=1)
    target.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    found = refused(UnsupportedRotaryError, tmp_path, target, None, options(max_seq_len=300))
    assert "LlamaForCausalLM: rotary scaling dynamic" in found


def test_one_rotary_length_for_every_position(tmp_path):
    """Beyond a model's own length: said aloud, in the manifest, and the same with a draft."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    changes = {"rope_parameters": rope, "num_hidden_layers": 1, "max_position_embeddings": 32}
    target = save_tiny("llama", tmp_path / "model", **changes)
    config = options(TREE, backend="eager", max_seq_len=96, rope_length=128)
    compilation = build(target, target, tmp_path / "engine", config)
    assert sum("--rope-length 128" in text for text in compilation.warnings) == 2
    models = Manifest.from_json(compilation.manifest.to_json()).models
    assert [(model.rope_length, model.max_position) for model in models] == [(128, 128)] * 2
    assert "pass of 128 tokens" in rotary_lines(compilation.manifest)[0]
    engine = Engine.load(tmp_path / "engine")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    plain, tree = (
        [output.outputs[0].token_ids for output in LLM(engine, plan=plan).generate(PROMPTS, params)]
        for plan in ("off", TREE.name)
    )
    assert plain == tree
    assert all(len(tokens) == 40 for tokens in plain)


def test_a_cache_of_fewer_tokens(models, tmp_path):
    """Said at compile: planned, loaded and shown; a load may still say another size."""
    config = options(backend="eager", kv_cache_tokens=53)
    manifest = build(models / "target", None, tmp_path / "engine", config).manifest
    worst = build(models / "target", None, tmp_path / "worst", options(backend="eager")).manifest
    assert Manifest.from_json(manifest.to_json()).limits.kv_cache_tokens == 53
    # blocks of 16: three of them, where two sequences of 64 tokens need five each
    assert worst.memory_plan["target"].cache * 3 == manifest.memory_plan["target"].cache * 10
    assert manifest.memory_of((0,)) == manifest.total_memory
    assert manifest.memory_of((0,), kv_cache_tokens=1000) == worst.total_memory
    assert manifest.memory_of((0,), max_num_seqs=1) == manifest.total_memory
    assert "caches hold 48 tokens" in cache_room(manifest)
    assert cache_room(worst) == ""
    for kv_cache_tokens, num_blocks in ((None, 3), (16, 1), (160, 10)):
        engine = Engine.load(tmp_path / "engine", kv_cache_tokens=kv_cache_tokens)
        assert engine.cache.shape.num_blocks == num_blocks
    llm, other = LLM(Engine.load(tmp_path / "engine")), LLM(Engine.load(tmp_path / "worst"))
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    found, expected = (
        [output.outputs[0].token_ids for output in item.generate(PROMPTS, params)]
        for item in (llm, other)
    )
    assert found == expected


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"kv_cache_tokens": 15}, "--kv-cache-tokens 15"),
        ({"kv_cache_tokens": 161}, "--kv-cache-tokens 161"),
        ({"kv_cache_tokens": 64, "block_size": 0}, "a cache of one block a sequence"),
    ],
)
def test_caches_that_cannot_be(models, tmp_path, changes, found):
    config = options(backend="eager", **changes)
    assert found in refused(ConfigError, tmp_path, models / "target", None, config)


def test_existing_output(tmp_path):
    output = tmp_path / "engine"
    output.mkdir()
    (output / "mine").write_text("x")
    for force in (False, True):
        with pytest.raises(OutputError):
            build(Custom(), None, output, options(), force=force)
    assert (output / "mine").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_force_replaces_an_engine(built, tmp_path):
    output = tmp_path / "engine"
    shutil.copytree(built[0], output)
    with pytest.raises(OutputError):
        build(Custom(), None, output, options())
    manifest = build(Custom(), None, output, options(), force=True).manifest
    assert [plan.name for plan in manifest.plans] == ["off"]
    assert not (output / "draft-0").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


@pytest.mark.parametrize(
    ("phase", "error"),
    [
        ("trace target", RuntimeError),
        ("rewrite target", KeyboardInterrupt),
        ("write target weights", KeyboardInterrupt),
    ],
)
def test_interrupted_build_leaves_nothing(tmp_path, phase, error):
    def listen(event):
        if event.phase == phase and (event.seconds is not None or event.done):
            raise error

    with pytest.raises(error):
        build(Custom(), None, tmp_path / "engine", options(max_seq_len=48), listen=listen)
    assert list(tmp_path.iterdir()) == []


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


def test_a_window_is_no_longer_than_the_drafts_positions(models, tmp_path):
    draft = build_model("llama", num_hidden_layers=1, max_position_embeddings=32)
    config = options(SpecPlan.from_widths((1,)), max_seq_len=64, draft_kv=("window=33",))
    found = refused(ConfigError, tmp_path, models / "target", draft, config)
    assert found == "--draft-kv window=33,sink=4; the draft 0 model has 32 positions"
    config = options(SpecPlan.from_widths((1,)), max_seq_len=64, draft_kv=("window=32",))
    limits = build(models / "target", draft, tmp_path / "engine", config).manifest.limits
    assert limits.max_seq_len == 64


def test_a_window_does_not_lengthen_a_table_of_positions(tmp_path):
    """Custom has 64 learned positions, and no row for another one."""
    config = options(SpecPlan.from_widths((1,)), max_seq_len=65, draft_kv=("window=8",))
    target = build_model("llama")
    found = refused(ConfigError, tmp_path, target, Custom(), config)
    assert found == "--max-seq-len 65; the draft 0 model has 64 positions"


def test_a_window_as_long_as_sequences(models, tmp_path):
    config = options(SpecPlan.from_widths((1,)), max_seq_len=64, draft_kv=("window=60",))
    found = refused(ConfigError, tmp_path, models / "target", models / "draft", config)
    assert found == "--draft-kv window=60,sink=4, in sequences of at most 64 tokens"


def test_a_window_where_masks_have_no_sink(models, tmp_path):
    config = options(SpecPlan.from_widths((1,)), draft_kv=("window=8",), backend="onnx")
    found = refused(ConfigError, tmp_path, models / "target", models / "draft", config)
    assert found.startswith("--draft-kv window=8,sink=4 and the backend onnx")


def test_a_window_without_a_draft(models, tmp_path):
    config = options(draft_kv=("window=8",))
    found = refused(ConfigError, tmp_path, models / "target", None, config)
    assert found == "1 times --draft-kv, and 0 draft models"
