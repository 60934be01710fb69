"""`specc compare`: figures beside those of transformers and of `prompt_logprobs`."""

from __future__ import annotations

import json
import math

import pytest
import torch

from specc.artifact.directory import read_manifest
from specc.bench.text_scores import score_texts, windows_of
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from tests.command_line import assert_refused, invoke
from tests.models import save_tiny

# several passes of 64 rows in the first window; the second text is shorter than a window
TEXTS = ["the first text, " * 6, "another one"]
CONTEXT = 72


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint, its engines in float32 and in int4, and texts."""
    root = tmp_path_factory.mktemp("compare")
    target = save_tiny("llama", root / "target")
    for name, quantize in (("float32", None), ("int4", "int4")):
        config = CompileConfig(
            quantize=quantize, plans=(), backend="eager", max_seq_len=96, max_batch_size=2,
            probe=False,
        )  # fmt: skip
        build(target, None, root / name, config)
    lines = (json.dumps({"prompt": text}) + "\n" for text in TEXTS)
    (root / "texts.jsonl").write_text("".join(lines))
    (root / "text.txt").write_text(TEXTS[0])
    return root


def compare(*args) -> dict:
    result = invoke("compare", *args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def engine_rows(path, windows) -> list[torch.Tensor]:
    """Log probabilities of every id after each token but the last, a window in one pass."""
    engine, found = Engine.load(path), []
    for own in windows:
        count = len(own) - 1
        places = torch.arange(count)
        logits = engine.target(
            torch.tensor(own[:-1]), places, torch.tensor([0, count], dtype=torch.int32),
            places.int(), torch.zeros(1, dtype=torch.int32), None,
            torch.arange(6, dtype=torch.int32)[None], places,
        )  # fmt: skip
        found.append(logits.double().log_softmax(-1))
    return found


def prompt_loss(path, windows) -> float:
    """Mean -log P, as requests are told of their prompts."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    outputs = LLM(path).generate([{"prompt_token_ids": own} for own in windows], params)
    rows = [row for output in outputs for row in output.prompt_logprobs if row is not None]
    return -sum(entry.logprob for row in rows for entry in row.values()) / len(rows)


def checkpoint_rows(checkpoint, windows) -> list[torch.Tensor]:
    """Those of transformers, a whole window in one pass."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = [model(torch.tensor([own])).logits[0, :-1].double() for own in windows]
    return [rows.log_softmax(-1) for rows in logits]


def test_figures_are_those_of_other_paths(made) -> None:
    engine = made / "int4"
    tokenizer = LLM(engine).tokenizer
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    windows = [ids[0][:CONTEXT], ids[0][CONTEXT:], ids[1]]
    assert [len(own) for own in windows] == [72, 6, 10]
    own, other = engine_rows(engine, windows), checkpoint_rows(made / "target", windows)
    after = torch.tensor([token for window in windows for token in window[1:]])
    p, q = torch.cat(other), torch.cat(own)
    loss = -q.gather(1, after[:, None]).mean()
    assert prompt_loss(engine, windows) == pytest.approx(float(loss), rel=1e-5)
    kl = (p.exp() * (p - q)).sum(1)
    tops = zip(p.argsort(1)[:, -10:].tolist(), q.argsort(1)[:, -10:].tolist(), strict=True)
    common = sum(len({*one} & {*two}) for one, two in tops)
    found = compare(
        engine, "--texts", made / "texts.jsonl", "--against", made / "target", "--context", CONTEXT
    )
    assert (found["windows"], found["tokens"]) == (3, len(after))
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    beside = found["against"]
    expected = math.exp(-p.gather(1, after[:, None]).mean())
    assert beside["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert beside["perplexity_ratio"] == pytest.approx(found["perplexity"] / expected, rel=1e-5)
    assert beside["kl_mean"] == pytest.approx(float(kl.mean()), rel=1e-3)
    assert beside["kl_99"] == pytest.approx(float(kl.quantile(0.99)), rel=1e-3)
    assert beside["different_tokens"] == int((p.argmax(1) != q.argmax(1)).sum()) > 0
    assert beside["top_10_overlap"] == pytest.approx(common / (10 * len(after)), abs=2e-3)


@pytest.mark.slow
def test_an_engine_is_no_way_from_itself(made) -> None:
    found = compare(made / "float32", "--texts", made / "text.txt", "--against", made / "float32")
    beside = found["against"]
    assert (beside["kl_mean"], beside["kl_99"], beside["different_tokens"]) == (0, 0, 0)
    assert (beside["top_10_overlap"], beside["perplexity_ratio"]) == (1, 1)
    rounded = compare(made / "int4", "--texts", made / "text.txt", "--against", made / "float32")
    assert rounded["against"]["kl_mean"] > 1e-5
    assert rounded["against"]["perplexity"] == found["perplexity"]
    # fewer windows, and nothing to compare with
    one = compare(
        made / "int4", "--texts", made / "texts.jsonl", "--context", 16, "--num-windows", 2
    )
    assert (one["windows"], one["tokens"], "against" in one) == (2, 30, False)


@pytest.mark.slow
def test_what_people_read(made) -> None:
    given = ("compare", made / "int4", "--texts", made / "texts.jsonl")
    text = invoke(*given).stdout
    assert f"{made / 'int4'}: perplexity " in text
    assert "over 85 tokens (3 windows of at most 64)" in invoke(*given, "--context", 64).stdout
    text = invoke(*given, "--against", made / "float32", "--context", 64).stdout
    assert [line.split(":")[0] for line in text.splitlines()[2:]] == [
        "KL divergence from it", "most likely token", "10 most likely tokens",
    ]  # fmt: skip


def test_windows_begin_with_the_token_that_texts_begin_with() -> None:
    found = list(windows_of([[1, 2, 3, 4, 5], [6], []], 3, 0))
    assert found == [[0, 1, 2], [0, 3, 4], [0, 5], [0, 6]]
    assert list(windows_of([[1, 2, 3, 4, 5], [6], []], 2, None)) == [[1, 2], [3, 4]]


def test_what_is_refused(made, tmp_path, tiny_engine) -> None:
    texts = made / "texts.jsonl"
    given = ("compare", made / "int4", "--texts")
    assert_refused(invoke(*given, texts, "--context", 97), "97", "2 … 96")
    assert_refused(invoke(*given, texts, "--against", tmp_path / "no"), "no such directory")
    assert_refused(invoke(*given, texts, "--against", tmp_path), "transformers does not load it")
    assert_refused(invoke(*given, texts, "--against", tiny_engine, "--context", 64), "token ids")
    assert_refused(invoke(*given, tmp_path / "no.txt"), "no.txt")
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"prompt_token_ids": [1, 5000]}))
    assert_refused(invoke(*given, ids), "token id 5000")
    ids.write_text(json.dumps({"prompt_token_ids": [1]}))
    assert_refused(invoke(*given, ids, "--context", 64), "no text of two tokens")
    assert read_manifest(tiny_engine).models[0].vocab_size != 128
    with pytest.raises(Exception, match="no text"):
        score_texts(None, [], None, print)  # type: ignore[arg-type]
