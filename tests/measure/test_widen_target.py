"""The script that widens a target: more parameters, the same function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.measure import widen_target
from tests.models import prompts, save_tiny


def widened(source: Path, output: Path, *options: str, parameters: str = "0.5M") -> Path:
    command = ["--source", str(source), "--output", str(output), "--parameters", parameters]
    widen_target.main([*command, *options])
    return output


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_a_widened_model_computes_the_same(tied: bool, tmp_path: Path) -> None:
    source = save_tiny("qwen3", tmp_path / "source", tie_word_embeddings=tied)
    old, new = map(widen_target.load, (source, widened(source, tmp_path / "wide")))
    assert abs(new.num_parameters() / 500_000 - 1) < 0.02
    assert 2 < new.config.num_hidden_layers <= 24
    for prompt in prompts():
        want, got = (model(torch.tensor([prompt])).logits for model in (old, new))
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    # with a cache
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    ids = torch.tensor([prompts()[-1]])
    assert torch.equal(new.generate(ids, **options), old.generate(ids, **options))
    # what is added is as large as what was there, but for what writes into the residual stream
    before, after = (dict(model.named_parameters()) for model in (old, new))
    assert not after["model.layers.1.self_attn.o_proj.weight"].any()
    for name in ("self_attn.q_proj", "mlp.up_proj"):
        added = after[f"model.layers.1.{name}.weight"]
        spread = before[f"model.layers.0.{name}.weight"].std()
        assert added.std() == pytest.approx(float(spread), rel=0.2)


@pytest.mark.parametrize("leaked", [1e-3, float("nan")])
@pytest.mark.parametrize("broken", ["o_proj", "down_proj"])
def test_output_that_is_not_zero_is_noticed(
    broken: str, leaked: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widen = widen_target.widen

    def leak(name: str, *args: Any) -> torch.Tensor:
        new = widen(name, *args)
        return torch.where(new == 0, leaked, new) if broken in name else new

    monkeypatch.setattr(widen_target, "widen", leak)
    source = save_tiny("qwen3", tmp_path / "source")
    with pytest.raises(SystemExit, match="logits differ"):
        widened(source, tmp_path / "wide")
