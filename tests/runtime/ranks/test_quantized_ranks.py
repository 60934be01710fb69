"""Quantized engines that ranks share: every plan as off, and the tokens of the whole engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.directory import read_manifest
from specc.config import CompileConfig
from specc.runtime.backends.program_files import read_json
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests import quantized_checkpoints as made
from tests.gguf_files import write_model
from tests.mxfp4_experts import write_experts
from tests.runtime.ranks.conftest import OPTIONS
from tests.runtime.test_quantized import check_logits, generate, reference_model
from tests.runtime.test_quantized_checkpoints import reference

# the default tier cuts integers without running them: tests/specc/sharding/test_quantized_pieces.py
pytestmark = pytest.mark.slow
WIDE = {"intermediate_size": 128}
INT4 = {"quantize": "int4", "quantize_group": 32}
PLANS = tuple(SpecPlan.from_widths(widths) for widths in ((1, 1, 1), (2, 2, 1)))
SELF = SpecPlan.from_widths((1, 1, 1), ("self_int8",))
FEW = {"max_tokens": 10}


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Path]:
    """An engine of a tiny model, whole or cut, with its noisy draft."""

    def build_one(name: str, num_ranks: int, target: Path | None = None, **options: Any) -> Path:
        target = target or models.save_tiny(name, tmp_path / "target", **WIDE)
        draft = models.save_tiny(name, tmp_path / "draft", 0, models.draft_noise(name), **WIDE)
        given = {"backend": "eager", "dtype": "float32", "plans": PLANS} | options
        config = CompileConfig(
            max_seq_len=models.MAX_SEQ_LEN, max_batch_size=4, probe=False,
            tensor_parallel_size=num_ranks, **given,
        )  # fmt: skip
        path = tmp_path / f"engine-{num_ranks}-{options.get('pipeline_parallel_size', 1)}"
        return engines.build(target, draft, path, config)

    return build_one


@pytest.fixture
def load() -> Iterator[Callable[..., Engine]]:
    loaded: list[Engine] = []

    def load_one(path: Path, num_ranks: int) -> Engine:
        loaded.append(Engine.load(path, ranks=replace(OPTIONS, num_ranks=num_ranks)))
        return loaded[-1]

    yield load_one
    for engine in loaded:
        engine.target.leader.close()


def check(whole: Engine, cut: Engine, plans: tuple[str, ...]) -> None:
    """Every plan has the tokens of off, and off those of the engine of one rank."""
    prompts = models.prompts()[:3]
    plain, _ = generate(cut, "off", prompts, **FEW)
    assert len(set(plain[1])) > 3
    assert plain == generate(whole, "off", prompts, **FEW)[0]
    for plan in plans:
        found, stats = generate(cut, plan, prompts, **FEW)
        assert found == plain, plan
        assert stats.mean_acceptance_length > 1
        drawn = {"temperature": 0.8, "seed": 3, **FEW}
        want, _ = generate(cut, "off", prompts[:2], **drawn)
        assert generate(cut, plan, prompts[:2], **drawn)[0] == want


@pytest.mark.parametrize(
    ("name", "num_ranks", "options"),
    [
        ("llama", 2, INT4),
        ("llama", 2, {"quantize": "int8", "dtype": "bfloat16"}),
        ("llama", 2, INT4 | {"backend": "cpu"}),
        ("mixtral", 2, INT4 | {"backend": "cpu"}),
        ("mixtral", 2, {"quantize": "fp8"}),
        # the draft is cut, too
        ("llama", 2, INT4 | {"draft_tensor_parallel_size": 2}),
        # rounded copies, which are cut as the target is
        ("llama", 2, {"plans": (SELF,)}),
    ],
)
def test_ranks_generate_what_one_does(build, load, name, num_ranks, options) -> None:
    cut = load(build(name, num_ranks, **options), num_ranks)
    options = {key: value for key, value in options.items() if key[:6] != "draft_"}
    whole = Engine.load(build(name, 1, **options))
    plans = tuple(plan.name for plan in options.get("plans", PLANS))
    check(whole, cut, plans)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_stages(build, load, backend) -> None:
    options = {"backend": backend, **INT4}
    cut = load(build("llama", 1, pipeline_parallel_size=2, **options), 2)
    check(Engine.load(build("llama", 1, **options)), cut, tuple(plan.name for plan in PLANS))


def test_experts_in_mxfp4(build, load, tmp_path) -> None:
    target = models.save_tiny("gpt_oss", tmp_path / "plain", **WIDE)
    written = write_experts(target, tmp_path)
    cut = load(build("gpt_oss", 2, written.quantized), 2)
    whole = Engine.load(build("gpt_oss", 1, written.quantized))
    check(whole, cut, tuple(plan.name for plan in PLANS))


@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_columns_in_another_order(build, load, tmp_path, backend) -> None:
    target = models.save_tiny("llama", tmp_path / "plain", **WIDE)
    form = made.in_order(made.gptq(4, 32, False))
    written = made.write_checkpoint(target, tmp_path, form.config, form.writer)
    cut = load(build("llama", 2, written.quantized, backend=backend), 2)
    whole = Engine.load(build("llama", 1, written.quantized, backend=backend))
    check(whole, cut, tuple(plan.name for plan in PLANS))


def test_logits_of_ranks(build, load) -> None:
    """They are those of transformers with the weights that integers stand for."""
    one, two = (build("llama", ranks, **INT4) for ranks in (1, 2))
    check_logits(load(two, 2), reference_model(one.parent / "target", one), "float32")


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0"])
def test_blocks_of_gguf_files(build, load, tmp_path, kind) -> None:
    """256 columns of o, half of which a rank has, are blocks of Q5_0, and numbers of Q4_K."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    source = models.save_tiny("llama", tmp_path / "plain", **wide)
    form = lambda name: "F16" if "embed" in name else kind  # noqa: E731
    config = models.tiny_config("llama", **wide)
    written = write_model(source, tmp_path, "llama", form, config)
    path = build("llama", 2, written.quantized)
    program = read_manifest(path).of_rank(1).models[0].program_file
    entries = read_json(path / program)["inputs"]
    held = {x["key"]: x["layout"] for x in entries if "quantized_of" in x}
    blocks = f"blocks-{kind.lower()}"
    assert held[f"model.layers.0.mlp.down_proj.weight:{kind.lower()}"] == blocks
    output = f"model.layers.0.self_attn.o_proj.weight:{kind.lower()}"
    assert held.get(output) == (None if kind == "Q4_K" else blocks)
    check_logits(load(path, 2), reference(written), "float32")
