"""lm-eval's class for completions scores texts as transformers does."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specc.api import compile_with
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from tests.clients.environment import HERE, python_with
from tests.specc.server.serving import MODEL, Server, serve

pytestmark = pytest.mark.slow

PACKAGE = "lm-eval[api]==0.4.13"
PAIR = Path(__file__).resolve().parents[2] / "examples" / "pair"
TARGET = PAIR / "target"
CLIENT = HERE / "lm_eval_client.py"
PAIRS = [
    ("def read_lines(path):\n    with open(path) as", " file:\n        return file.readlines()"),
    ("def read_lines(path):\n    with open(path) as", " f:\n        return list(f)"),
    ("def read_lines(path):\n    with open(path) as", " socket:\n"),
    ("    for i in range", "("),
    # lm-eval moves the space to the continuation
    ("import ", "os"),
    ("import ", "sys, os.path, json"),
    # nothing comes before it but the prefix that lm-eval has for that
    ("", "class Reader:"),
    ("é", " is not ASCII \N{SNOWMAN}"),
    ("# " + "a long comment " * 30, "\n\ndef main():\n    pass\n"),
]
TEXTS = ["class Writer:\n    def write(self, data):\n        raise NotImplementedError\n", "x = 1"]


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment with lm-eval."""
    found, missing = python_with((PACKAGE,))
    assert not missing, missing
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo pair in float32, with chunks that most of the prompts do not fit in."""
    path = tmp_path_factory.mktemp("lm_eval") / "engine"
    config = CompileConfig(dtype="float32", prefill_chunk=8, max_seq_len=256)
    compile_with(TARGET, [PAIR / "draft"], path, config)
    engine = Engine.load(path)
    with serve(engine, None, plan=engine.default_plan) as running:
        yield running
        running.wait_until_idle()


class Oracle:
    """What transformers' own model says of the same tokens."""

    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
        file = str(TARGET / "tokenizer.json")
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=file)
        self._prefix = self._tokenizer.convert_tokens_to_ids("<|endoftext|>")

    def score(self, tokens: list[int], num_context: int) -> tuple[float, bool]:
        """Of the tokens after the context, and whether each of them is the likeliest."""
        with torch.no_grad():
            rows = self._model(torch.tensor([tokens])).logits[0, num_context - 1 : -1]
        own = torch.tensor(tokens[num_context:])
        found = rows.log_softmax(-1).gather(1, own[:, None]).sum().item()
        return found, bool((rows.argmax(-1) == own).all())

    def pair(self, context: str, continuation: str) -> tuple[float, bool]:
        if not context:
            tokens = self._tokenizer.encode(continuation)
            return self.score([self._prefix, *tokens], 1)
        bare = context.rstrip()
        whole = self._tokenizer.encode(context + continuation)
        return self.score(whole, len(self._tokenizer.encode(bare)))

    def text(self, text: str) -> float:
        return self.score([self._prefix, *self._tokenizer.encode(text)], 1)[0]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tokenizer_backend": "remote"}, id="ids"),
        pytest.param({"tokenizer_backend": "auto", "tokenized_requests": False}, id="text"),
        pytest.param({"tokenizer_backend": "remote", "batch_size": 3}, id="batches"),
        pytest.param({"tokenizer_backend": "remote", "num_concurrent": 4}, id="concurrent"),
    ],
)
def test_log_likelihoods_are_those_of_transformers(
    server: Server, python: Path, options: dict[str, Any]
) -> None:
    """A second run finds the prompts of the first one in the cache, and says the same."""
    given = {"model": MODEL, "pairs": PAIRS, "texts": TEXTS, "options": options}
    command = [str(python), str(CLIENT), f"{server.base}/v1/completions", json.dumps(given)]
    oracle = Oracle()
    pairs, texts = [oracle.pair(*pair) for pair in PAIRS], [oracle.text(text) for text in TEXTS]
    assert any(is_greedy for _, is_greedy in pairs)
    assert not all(is_greedy for _, is_greedy in pairs)
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        scores = [score for score, _ in found["loglikelihood"]]
        assert scores == pytest.approx([score for score, _ in pairs], abs=1e-4)
        assert [is_greedy for _, is_greedy in found["loglikelihood"]] == [g for _, g in pairs]
        assert found["rolling"] == pytest.approx(texts, abs=1e-4)
