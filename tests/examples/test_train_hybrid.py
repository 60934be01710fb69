"""The example that trains a hybrid: its delta rule is transformers', and a run can go on."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.examples.imported import imported

VOCAB = 48
# of a state that is taken over, and of chunks of 32: one token, a chunk, one more, several
LENGTHS = [1, 32, 33, 100]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("train_hybrid") as module:
        yield module


@pytest.fixture(scope="module")
def teacher(script: ModuleType) -> Qwen3ForCausalLM:
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> Tensor:
    """What tokens read, by the recurrence itself; heads side by side, S is changed in place."""
    read = []
    for t in range(q.shape[1]):
        for row in range(len(q)):
            for h in range(v.shape[2]):
                own = h // (v.shape[2] // k.shape[2])
                key, query = (x[row, t, own] / x[row, t, own].norm() for x in (k, q))
                state = s[row, h] * g[row, t, h].exp()
                change = beta[row, t, h] * (v[row, t, h] - state.T @ key)
                s[row, h] = state + key[:, None] * change
                read.append(s[row, h].T @ query / len(query) ** 0.5)
    return torch.stack(read).view(q.shape[1], len(q), v.shape[2], -1).transpose(0, 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_are_the_recurrence(script: ModuleType, length: int) -> None:
    torch.manual_seed(length)
    rule = sys.modules["delta_rule"].chunked_delta_rule
    q, k = torch.randn(2, 2, length, 2, 8)
    v, beta = torch.randn(2, length, 4, 6), torch.rand(2, length, 4)
    g, state = -torch.rand(2, length, 4), torch.randn(2, 4, 8, 6)
    found, last = rule(
        q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    exact = state.double()
    wanted = token_by_token(*(x.double() for x in (q, k, v, g, beta)), exact)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(last.double(), exact, rtol=0, atol=1e-5)


def gradients(hybrid: Any, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    hybrid.zero_grad()
    logits = hybrid(input_ids=tokens, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), [parameter.grad.clone() for parameter in hybrid.parameters()]


def test_a_hybrid_learns_as_transformers_computes_it(
    script: ModuleType, teacher: Qwen3ForCausalLM
) -> None:
    hybrid = sys.modules["hybrid_model"].build_hybrid(teacher)
    tokens = torch.randint(VOCAB, (2, 45))
    plain, plain_gradients = gradients(hybrid, tokens)
    with sys.modules["delta_rule"].fast_delta_rule():
        fast, fast_gradients = gradients(hybrid, tokens)
    # summed in another order, so it was used
    assert not fast.equal(plain)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    for own, other in zip(fast_gradients, plain_gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4 * other.abs().max().item())
    again, _ = gradients(hybrid, tokens)
    assert again.equal(plain)


def test_a_hybrid_begins_with_parts_of_its_teacher(
    script: ModuleType, teacher: Qwen3ForCausalLM
) -> None:
    teacher = copy.deepcopy(teacher)
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
    hybrid = sys.modules["hybrid_model"].build_hybrid(teacher)
    kinds = hybrid.config.layer_types
    assert kinds == ["linear_attention"] * 3 + ["full_attention"]
    assert hybrid.lm_head.weight is hybrid.model.embed_tokens.weight
    assert hybrid.lm_head.weight.equal(teacher.lm_head.weight)
    x = torch.randn(3, 32)
    torch.testing.assert_close(hybrid.model.norm(x), teacher.model.norm(x))
    for i, layer in enumerate(hybrid.model.layers):
        first, second = teacher.model.layers[2 * i], teacher.model.layers[2 * i + 1]
        torch.testing.assert_close(layer.input_layernorm(x), first.input_layernorm(x))
        own, other = (part.mlp(part.post_attention_layernorm(x)) for part in (layer, second))
        torch.testing.assert_close(own, other)
    # some heads keep a state for long
    keeps = torch.stack(
        [
            layer.linear_attn.A_log.exp() * torch.nn.functional.softplus(layer.linear_attn.dt_bias)
            for layer in hybrid.model.layers[:3]
        ]
    )
    assert keeps.min() < 0.05
    assert keeps.max() > 0.1


def run_of(script: ModuleType, hybrid: Any, teacher: Any, file: Path, seed: int) -> Any:
    args = Namespace(kl_share=0.5, muon_rate=0.01, adam_rate=3e-3, seed=seed, steps=6, minutes=1e6)
    stream = torch.randint(VOCAB, (200,), generator=torch.Generator().manual_seed(1))
    return script.CorpusStage(hybrid, teacher, stream, args, file)


def test_a_run_that_was_ended_goes_on_as_if_it_had_not_been(
    script: ModuleType,
    teacher: Qwen3ForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the last of six steps reads longer texts
    monkeypatch.setattr(script, "SEQUENCE", 24)
    monkeypatch.setattr(script, "BATCH_TOKENS", 96)
    monkeypatch.setattr(script, "PART_TOKENS", 48)
    build = sys.modules["hybrid_model"].build_hybrid
    whole = run_of(script, build(teacher), teacher, tmp_path / "state.pt", 3)
    wanted = []
    for step in range(6):
        if step == 3:
            whole.keep()
        wanted.append(whole.learn())
    assert whole.is_over
    # what it does not take from the file is another's
    rest = run_of(script, build(teacher), teacher, tmp_path / "state.pt", 4)
    rest.go_on()
    assert rest.step == 3
    assert [rest.learn() for _ in range(3)] == wanted[3:]
    for own, other in zip(rest.hybrid.parameters(), whole.hybrid.parameters(), strict=True):
        assert own.equal(other)


def test_parts_of_a_batch_are_one_step(
    script: ModuleType,
    teacher: Qwen3ForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss and weights do not depend on how many backward passes a step has."""
    monkeypatch.setattr(script, "SEQUENCE", 24)
    monkeypatch.setattr(script, "BATCH_TOKENS", 72)
    monkeypatch.setattr(script, "autocast", lambda: torch.autocast("cpu", enabled=False))
    torch.manual_seed(9)
    first = sys.modules["hybrid_model"].build_hybrid(teacher)
    found = []
    for part in (72, 48):
        monkeypatch.setattr(script, "PART_TOKENS", part)
        hybrid = Qwen3_5ForCausalLM(first.config)
        hybrid.load_state_dict(first.state_dict())
        found.append(run_of(script, hybrid, teacher, tmp_path / "state.pt", 3).learn())
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0][0] != pytest.approx(found[0][1], rel=1e-2)
