"""Engines of quantized checkpoints: the checkpoint's own integers, and every plan as off.

The reference is plain transformers on a float32 checkpoint of (u - z) · s, which the writer of each
format has made on its own: see `tests/quantized_checkpoints.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.config import CompileConfig
from specc.runtime.backends.program_files import read_json
from tests import engines, models
from tests import quantized_checkpoints as made
from tests.quantized_checkpoints import Format, Written
from tests.runtime.test_quantized import PLANS, check_logits, check_plans

SLOW = pytest.mark.slow


def reference(checkpoint: Written):
    """Plain transformers on the float32 checkpoint."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint.exact, dtype=torch.float32).eval()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Written, Path]]:
    """(checkpoint, engine) of a tiny model, with a noisy draft in float32."""

    def make_one(name: str, form: Format, **options):
        target = models.save_tiny(name, tmp_path / "target")
        draft = models.save_tiny(name, tmp_path / "draft", 0, models.DRAFT_NOISE[name])
        written = made.write_checkpoint(target, tmp_path, form.config, form.writer)
        options = {"backend": "eager", "dtype": "float32"} | options
        config = CompileConfig(
            plans=PLANS, max_seq_len=models.MAX_SEQ_LEN, probe=False, **options
        )  # fmt: skip
        return written, engines.build(written.quantized, draft, tmp_path / "engine", config)

    return make_one


def stored_layouts(engine: Path) -> dict[str, str]:
    entries = read_json(engine / "target" / "program.json")["inputs"]
    return {x["key"]: x["layout"] for x in entries if "quantized_of" in x}


def check_integers(written: Written, engine: Path) -> None:
    """What the engine's blocks stand for is the float32 checkpoint, bit for bit."""
    held, checked = load_file(engine / "target" / "weights.safetensors"), 0
    for entry in read_json(engine / "target" / "program.json")["inputs"]:
        if "quantized_of" not in entry:
            continue
        names, _, layout = entry["key"].rpartition(":")
        layout = QuantizedLayout.named(layout)
        value = dequantize(held[entry["key"]], entry["quantized_of"], layout)
        want = torch.cat([written.weights[name] for name in names.split("+")])
        assert torch.equal(value, want), names
        checked += len(names.split("+"))
    assert checked == len(written.weights)


@pytest.mark.parametrize(
    ("name", "form", "dtype", "layout"),
    [
        ("llama", made.packed(4, 32, False), "float32", "int4-g32-zeros"),
        # the last group of down_proj is short
        pytest.param("llama", made.awq(64), "bfloat16", "int4-g64-zeros", marks=SLOW),
        pytest.param("qwen3", made.gptq(4, 32), "float32", "int4-g32", marks=SLOW),
        pytest.param("mistral", made.gptq(8, -1), "bfloat16", "int8", marks=SLOW),
        pytest.param("phi3", made.packed(8, None), "float32", "int8", marks=SLOW),
        pytest.param("llama", made.gptq(4, 64, False, 2), "float32", "int4-g64-zeros", marks=SLOW),
    ],
)
def test_plans_and_logits(make, name, form, dtype, layout) -> None:
    written, engine = make(name, form, dtype=dtype)
    check_integers(written, engine)
    assert set(stored_layouts(engine).values()) == {f"blocks-{layout}"}
    check_logits(engine, reference(written), dtype)
    check_plans(engine)
