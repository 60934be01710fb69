"""Sliding windows: of models, which bound the depth of trees, and of the caches of drafts."""

from __future__ import annotations

from specc.compiler.build import build
from specc.errors import ConfigError, TreeError
from specc.speculation.plans import SpecPlan
from tests.models import build_model
from tests.specc.compiler.builds import PROMPTS, Custom, generate, greedy, near, options, refused


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
