"""Adapters as models of the API: listed, chosen by the field `model`, and named in responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specc.errors import ConfigError
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.service.service import Service
from specc.sampling.params import SamplingParams
from specc.server.app import create_app
from specc.server.config import ServeConfig
from tests.lossless import Zoo, shared_zoo
from tests.runtime.test_adapters import KINDS, Rig
from tests.specc.server.serving import serve

PROMPT = [5, 17, 80, 3, 9, 33]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    zoo: Zoo = shared_zoo(tmp_path_factory.getbasetemp())
    return Rig(zoo, "llama", KINDS, False)


@pytest.fixture(scope="module")
def path(rig: Rig) -> Path:
    return rig.engine()


def test_an_adapter_is_a_model(path):
    engine = Engine.load(path)
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    plain = LLM(engine, plan="off").generate([PROMPT, PROMPT], asked, lora_request=[None, "a1"])
    wanted = [x.outputs[0].token_ids for x in plain]
    assert wanted[0] != wanted[1]
    with serve(engine, model_names=("tiny",), plan="chain-3") as server:
        listed = {x["id"]: x for x in server.get("/v1/models").json()["data"]}
        assert list(listed) == ["tiny", *(f"a{i}" for i in range(len(KINDS)))]
        assert (listed["a1"]["parent"], listed["a1"]["root"]) == ("tiny", "a1")
        assert (listed["tiny"]["parent"], listed["tiny"]["root"]) == (None, "tiny")
        assert server.get("/v1/models/a1").json()["id"] == "a1"
        body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6}
        body |= {"ignore_eos": True, "return_token_ids": True}
        for name, tokens in zip(("tiny", "a1"), wanted, strict=True):
            answer = server.complete(model=name, **body)
            assert answer["model"] == name
            assert answer["choices"][0]["token_ids"] == tokens
        assert server.complete(**body)["choices"][0]["token_ids"] == wanted[0]
        unknown = server.post("/v1/completions", {"model": "a99", **body})
        assert unknown.status_code == 404
        assert "a1" in unknown.text


def test_a_name_for_both_is_refused(path):
    engine = Engine.load(path)
    service = Service(EngineCore(engine, "off"))
    try:
        with pytest.raises(ConfigError, match="both called 'a1'"):
            create_app(service, ServeConfig(model_names=("a1",)))
    finally:
        service.close()
