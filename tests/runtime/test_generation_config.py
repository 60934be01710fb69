"""A checkpoint's own defaults of sampling, at every endpoint: taken where a request says nothing.

`top_k` 1 leaves one token, so that drawing gives what transformers draws, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.directory import read_manifest
from specc.compiler.engine_files import told_of_sampling
from specc.compiler.tokenizer import TokenizerFiles
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError
from specc.runtime import engine_args
from specc.runtime.async_llm import AsyncLLM
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines
from tests.command_line import invoke
from tests.specc.server.serving import serve

FILE = "generation_config.json"
PROMPT = "hello"
CONFIG = {
    "do_sample": True,
    "temperature": 1.5,
    "top_k": 1,
    "repetition_penalty": 1.7,
    "max_new_tokens": 12,
}
OWN = {k: v for k, v in CONFIG.items() if k not in ("do_sample", "max_new_tokens")}
OWN["max_tokens"] = 12


@pytest.fixture(scope="module")
def path(tiny_models, tmp_path_factory) -> Path:
    """An engine of a checkpoint that says how it wants to be sampled."""
    root = tmp_path_factory.mktemp("own")
    target = Path(shutil.copytree(tiny_models.target, root / "target"))
    (target / FILE).write_text(json.dumps(CONFIG))
    plans = (SpecPlan.from_widths((2, 1)),)
    config = CompileConfig(
        plans=plans, max_seq_len=96, max_batch_size=4, backend="eager", probe=False
    )
    return engines.build(target, tiny_models.draft, root / "engine", config)


@pytest.fixture(scope="module")
def wanted(path) -> list[int]:
    """What transformers makes of the checkpoint, with the settings that it brings."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent / "target", dtype=torch.float32)
    ids = LLM(path).tokenizer.encode(PROMPT).ids
    return model.generate(torch.tensor([ids]))[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def llm(path) -> Iterator[LLM]:
    with LLM(path) as llm:
        yield llm


def ids_of(outputs: Any) -> list[int]:
    return list(outputs[0].outputs[0].token_ids)


def test_a_call_without_options_has_those_of_transformers(llm, wanted) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(**OWN)
    assert ids_of(llm.generate(PROMPT)) == wanted
    assert ids_of(llm.generate([PROMPT], None)) == wanted
    assert [event.token_id for event in llm.stream(PROMPT)] == wanted
    template = "{{ messages[0].content }}"
    (llm.engine.directory / "chat_template.jinja").write_text(template)
    assert ids_of(llm.chat([{"role": "user", "content": PROMPT}])) == wanted
    # each of them counts: greedy alone is another text
    greedy = ids_of(llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12)))
    assert len(greedy) == len(wanted) == 12
    assert greedy != wanted


def test_params_made_by_hand_have_nothing_of_them(llm, path) -> None:
    given = SamplingParams(seed=3)
    other = LLM(path, generation_config="vllm")
    assert other.get_default_sampling_params() == SamplingParams()
    assert ids_of(llm.generate(PROMPT, given)) == ids_of(other.generate(PROMPT, given))
    assert len(ids_of(llm.generate(PROMPT, given))) == 16


def test_other_sources(path, tmp_path) -> None:
    (tmp_path / FILE).write_text('{"top_p": 0.5}')
    llm = LLM(path, generation_config=str(tmp_path), override_generation_config={"min_p": 0.25})
    assert llm.get_default_sampling_params() == SamplingParams(top_p=0.5, min_p=0.25)
    with pytest.raises(ConfigError, match="generation_config"):
        LLM(path, generation_config=str(tmp_path / "absent"))
    for wrong in ("[1]", "{", 3):
        with pytest.raises(ConfigError, match="override_generation_config"):
            LLM(path, override_generation_config=wrong)


def test_what_no_request_can_have_is_said_at_compile_and_refused_at_load(path, tmp_path) -> None:
    target = Path(shutil.copytree(path.parent / "target", tmp_path / "target"))
    (target / FILE).write_text('{"temperature": -1}')
    entry = read_manifest(path).tokenizer
    (told,) = told_of_sampling(TokenizerFiles(entry, target / "tokenizer.json"))
    assert "temperature=-1" in told
    assert "--generation-config vllm" in told
    assert told_of_sampling(TokenizerFiles(entry, path.parent / "target" / "tokenizer.json")) == []
    own = Path(shutil.copytree(path, tmp_path / "engine"))
    (own / FILE).write_text('{"temperature": -1, "top_k": 1}')
    manifest = json.loads((own / "manifest.json").read_text())
    del manifest["files"][FILE]
    (own / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineError, match="temperature=-1") as refused:
        LLM(own)
    assert 'generation_config="vllm"' in refused.value.do
    assert LLM(own, generation_config="vllm").generate(PROMPT)


def test_asynchronously(path, wanted) -> None:
    async def tokens() -> list[int]:
        async with AsyncLLM(path) as llm:
            assert llm.get_default_sampling_params() == SamplingParams(**OWN)
            async for output in llm.generate(PROMPT):
                found = ids_of([output])
        return found

    assert asyncio.run(tokens()) == wanted


def test_it_is_said_once_at_load(path, caplog, monkeypatch) -> None:
    engine_args._say.cache_clear()
    with caplog.at_level(logging.WARNING):
        LLM(path).close()
        LLM(path).close()
        LLM(path, generation_config="vllm").close()
    (line,) = [record.message for record in caplog.records if record.name == "specc.engine"]
    assert "temperature=1.5, top_k=1" in line
    assert 'generation_config "vllm"' in line


@pytest.mark.slow
def test_the_commands(path, llm, wanted) -> None:
    text = llm.tokenizer.decode(wanted)
    assert invoke("run", path, PROMPT).stdout == text + "\n"
    drawn = invoke("run", path, PROMPT, "--seed", 3, "--generation-config", "vllm", "--json")
    params = SamplingParams(seed=3, max_tokens=128)
    (output,) = json.loads(drawn.stdout)["outputs"]
    assert output["token_ids"] == ids_of(llm.generate(PROMPT, params))
    greedy = invoke("run", path, PROMPT, "--temperature", 0, "--repetition-penalty", 1, "--json")
    (output,) = json.loads(greedy.stdout)["outputs"]
    plain = SamplingParams(temperature=0, max_tokens=12)
    assert output["token_ids"] == ids_of(llm.generate(PROMPT, plain))
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    talk = invoke("chat", path, stdin=f"{PROMPT}\n")
    assert talk.stdout == text + "\n"
    assert "after 12 tokens" in talk.stderr
    shorter = invoke("chat", path, "--max-tokens", 5, stdin=f"{PROMPT}\n")
    assert shorter.stdout == llm.tokenizer.decode(wanted[:5]) + "\n"


def test_over_http_a_field_that_is_left_out(path, llm, wanted) -> None:
    text = llm.tokenizer.decode(wanted)
    user = [{"role": "user", "content": PROMPT}]
    template = "{{ messages[0].content }}"
    with serve(llm.engine, template, plan="off", defaults=OWN) as server:
        model = server.get("/v1/models").json()["data"][0]["id"]

        def ask(kind: str, **body: Any) -> Any:
            answer = server.post(f"/v1/{kind}", {"model": model, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]

        assert ask("completions", prompt=PROMPT)["text"] == text
        assert ask("completions", prompt=PROMPT, temperature=None)["text"] == text
        assert ask("chat/completions", messages=user)["message"]["content"] == text
        # as with vLLM, max_new_tokens is a limit of the whole server
        long = ask("chat/completions", messages=user, max_tokens=40)
        assert (long["message"]["content"], long["finish_reason"]) == (text, "length")
        assert ask("completions", prompt=PROMPT, max_tokens=5)["text"] == llm.tokenizer.decode(
            wanted[:5]
        )
        other = ask("completions", prompt=PROMPT, temperature=0, repetition_penalty=1.0)["text"]
        plain = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))
        assert other == plain[0].outputs[0].text
