"""`specc.compile` takes what the command line takes, and hands it on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import specc
from specc import api
from specc.config import CompileConfig, CompileOptions
from specc.errors import ConfigError
from tests.command_line import assert_refused, invoke

# of each field a value that is not its default, and valid together with the others
GIVEN = {
    "dtype": "bfloat16", "draft_dtype": "float32", "draft_kv": "window=64,sink=4",
    "draft_assume": "is_last_normed=true", "draft_quantize": "int4",
    "max_batch_size": 3, "max_seq_len": 96, "block_size": 8, "prefill_chunk": 32,
    "max_logits_mb": 7, "backend": "eager", "compute_capability": "8.9",
    "decomposable_attention": True, "probe": False, "allow_nonfinite_weights": True,
    "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "draft_tensor_parallel_size": 2,
    "draft_ranks": 2, "rope_length": 512, "kv_cache_tokens": 128, "quantize": "int4",
    "quantize_group": 32, "weight_fragments": True, "segments": True,
    "kv_cache_dtype": "int8", "weight_only": True,
    "activation_bits": 8, "mla_cache": "latent", "calibration": Path("texts.txt"),
    "state_checkpoints": 4, "state_grid": 32, "lora": ("sql=adapters/sql",),
    "batch_invariant": True,
}  # fmt: skip
# fields that take several values, and one alone
LISTS = ("draft_dtype", "draft_kv", "draft_assume", "draft_quantize")
FOUND_BY_OTHERS = {"plans", "policy"}  # by tree, num_speculative_tokens, combine


class Built(Exception):
    """The configuration that would have been built."""


def refuse(target, drafts, output, config, **options):
    raise Built(config)


def test_type_checkers_know_every_option():
    """A TypedDict cannot be made of a dataclass, so it is compared."""
    fields = {field.name: field.type for field in dataclasses.fields(CompileConfig)}
    assert fields.keys() - FOUND_BY_OTHERS == GIVEN.keys()
    wider = {"dtype": "str | torch.dtype", "calibration": "str | Path | None"}
    wider["lora"] = "Mapping[str, str | Path] | Sequence[str]"
    wider |= dict.fromkeys(LISTS, "str | Sequence[str]")
    types = {name: ref.__forward_arg__ for name, ref in CompileOptions.__annotations__.items()}
    assert types == {name: wider.get(name, fields[name]) for name in GIVEN}


@pytest.mark.parametrize("name", GIVEN)
def test_every_option_arrives(name, monkeypatch):
    monkeypatch.setattr(api, "build", refuse)
    # those that are refused alone
    needed = {
        "quantize_group": ("quantize",),
        "calibration": ("quantize",),
        "draft_tensor_parallel_size": ("tensor_parallel_size",),
        "draft_ranks": ("tensor_parallel_size",),
    }.get(name, ())
    given = {key: GIVEN[key] for key in (name, *needed)}
    with pytest.raises(Built) as caught:
        specc.compile("target", "draft", "engine", **given)
    (config,) = caught.value.args
    value = (GIVEN[name],) if name in LISTS else GIVEN[name]
    assert getattr(config, name) == value != getattr(CompileConfig(), name)


class BuiltOf(Exception):
    """What would have been built: the drafts and the configuration."""


def test_vllm_s_json_arrives(monkeypatch):
    def build(target, drafts, output, config, **options):
        raise BuiltOf(drafts, config)

    monkeypatch.setattr(api, "build", build)
    given = {"model": "D/", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}
    line = ["--target", "T/", "-o", "e/", "-tp", "2", "-sc", json.dumps(given)]
    command = invoke("compile", *line).exception
    with pytest.raises(BuiltOf) as caught:
        specc.compile("T/", speculative_config=given, output="e/", tensor_parallel_size=2)
    for drafts, config in (command.args, caught.value.args):
        assert list(drafts) == ["D/"]
        assert [plan.name for plan in config.plans] == ["chain-3"]
        assert config.draft_tensor_parallel_size == 2
    assert_refused(invoke("compile", *line, "--draft", "E/"), "--draft E/")
    with pytest.raises(ConfigError, match="--tree"):
        specc.compile("T/", tree=(2, 1), speculative_config=given)
