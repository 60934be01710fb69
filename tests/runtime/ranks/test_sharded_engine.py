"""Engines whose target is cut for ranks generate what the whole one does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from specc.artifact.directory import open_engine, read_manifest
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError
from specc.runtime.engine import Engine
from specc.runtime.engine_args import EngineArgs
from specc.runtime.llm import LLM
from specc.runtime.ranks.rank_options import RankOptions
from specc.sampling.params import SamplingParams
from tests import engines, models
from tests.lossless import Zoo
from tests.runtime.ranks.conftest import OPTIONS, PLANS
from tests.runtime.ranks.processes import ENDS_S, wait_gone
from tests.runtime.ranks.test_led_engine import (
    COUPLED,
    GRAMMAR,
    GREEDY,
    LOGPROBS,
    MSS,
    PLAN_IDS,
    cases,
    generate,
    params,
    rule_of,
)

# log probabilities of float32 sums in another order
TOLERANCE = 1e-4
# of rows whose tokens the ranks draw together
PLAIN: dict[str, Any] = {"temperature": 0.8}
ARCHITECTURES = ("llama", "gpt_neox", "mixtral")
# a cache in which not all of the longest requests have room
FEW: dict[str, Any] = {"kv_cache_tokens": 160}


def path_of(zoo: Zoo, name: str, backend: str, num_ranks: int, stages: int = 1) -> Path:
    """A compiled engine, whole or cut, or in stages."""

    def make(path: Path) -> Path:
        config = CompileConfig(
            plans=PLANS,
            max_batch_size=4,
            max_seq_len=models.MAX_SEQ_LEN,
            prefill_chunk=24,
            backend=backend,
            probe=False,
            tensor_parallel_size=num_ranks,
            pipeline_parallel_size=stages,
        )
        target, draft = zoo.checkpoint(name), zoo.checkpoint(name, draft="noisy")
        return engines.build(target, draft, path, config)

    return zoo.once(f"sharded-{name}-{backend}-{num_ranks}-{stages}", make)


class Engines:
    """Engines that are open: whole ones, and one that is cut. A process is in one group."""

    def __init__(self, zoo: Zoo) -> None:
        self._zoo = zoo
        self._whole: dict[Any, Engine] = {}
        self._cut: tuple[Any, Engine] | None = None

    def __call__(self, name: str, num_ranks: int, backend: str = "eager", **options: Any) -> Engine:
        key = (name, num_ranks, backend, *options.items())
        path = path_of(self._zoo, name, backend, num_ranks)
        if num_ranks == 1:
            if key not in self._whole:
                self._whole[key] = Engine.load(path, **options)
            return self._whole[key]
        if self._cut is None or self._cut[0] != key:
            self.close()
            ranks = replace(OPTIONS, num_ranks=num_ranks)
            self._cut = key, Engine.load(path, ranks=ranks, **options)
        return self._cut[1]

    def close(self) -> None:
        """End the ranks of the engine that is cut."""
        if self._cut is not None:
            self._cut[1].target.leader.close()  # type: ignore[attr-defined]
        self._cut = None


@pytest.fixture(scope="module")
def load(zoo: Zoo) -> Iterator[Engines]:
    loaded = Engines(zoo)
    yield loaded
    loaded.close()


def assert_same(whole: Engine, cut: Engine, plan: str, given: list[SamplingParams]) -> None:
    wanted, found = (generate(LLM(engine, plan=plan), given) for engine in (whole, cut))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, mine), (_, other) in zip(found, wanted, strict=True):
        assert (mine is None) == (other is None)
        for row, expected in zip(mine or [], other or [], strict=True):
            assert row == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "options"), cases({"off-greedy", "chain-3-logprobs", "tree-3-2-1-mss"})
)
def test_two_ranks_generate_what_one_does(
    load: Engines, plan: str, options: dict[str, Any]
) -> None:
    given = params(4, **rule_of(plan, options))
    assert_same(load("llama", 1, **FEW), load("llama", 2, **FEW), plan, given)


@pytest.mark.slow
def test_requests_that_give_way_and_prefixes_that_are_shared(load: Engines) -> None:
    whole, cut = load("llama", 1, **FEW), load("llama", 2, **FEW)
    given = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True) for _ in range(4)]
    llm = LLM(cut, plan="tree-3-2-1")
    assert generate(llm, given) == generate(LLM(whole, plan="tree-3-2-1"), given)
    assert llm.get_metrics().num_preemptions > 0
    prompt, found = models.prompts()[-1], []
    for engine in (whole, cut):
        llm = LLM(engine, plan="tree-3-2-1")
        llm.generate([prompt], given[0])
        again = llm.generate([[*prompt, 1, 2], [*prompt, 3]], given[:2])
        assert llm.get_metrics().num_cached_tokens > 0
        found.append([output.outputs[0].token_ids for output in again])
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [GREEDY, MSS], ids=["drawn", "gathered"])
def test_collectives_are_as_many_as_the_plan_says(
    load: Engines, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two a layer and one for the embedding in each pass, and one for its logits or its tokens."""
    cut = load("llama", 2, **FEW)
    leader = cut.target.leader  # type: ignore[attr-defined]
    passes: list[str] = []
    for name in ("run_pass", "run_draw"):
        run = getattr(leader, name)

        def count(*args: Any, name: str = name, run: Any = run) -> Any:
            passes.append(name)
            return run(*args)

        monkeypatch.setattr(leader, name, count)
    before = leader._job.group.position
    generate(LLM(cut, plan="chain-3"), params(2, **options))
    layers = len(read_manifest(cut.directory).models[0].layers)
    assert len(passes) > 3
    assert {*passes} == {"run_draw" if options is GREEDY else "run_pass"}
    assert leader._job.group.position - before == len(passes) * (2 * layers + 1 + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt_neox", "llama"])
def test_four_ranks_share_two_heads(load: Engines, name: str) -> None:
    """Keys and values of two heads are copied; experts are cut inside."""
    whole, cut = load(name, 1), load(name, 4)
    for plan in ("off", "chain-3", "tree-3-2-1"):
        for options in (GREEDY, MSS):
            assert_same(whole, cut, plan, params(3, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks", "step"),
    [
        # whose whole program other tests compile, too
        ("qwen3", 2, 10),
        *(
            pytest.param(name, num_ranks, 1, marks=pytest.mark.slow)
            for name in ARCHITECTURES
            for num_ranks in (2, 4)
        ),
    ],
)
def test_compiled_ranks(load: Engines, name: str, num_ranks: int, step: int) -> None:
    """Every plan with every kind of rows, or with greedy ones and one of so many others."""
    whole, cut = load(name, 1, "cpu"), load(name, num_ranks, "cpu")
    for i, plan in enumerate(PLAN_IDS):
        for j, options in enumerate((GREEDY, PLAIN, COUPLED, MSS, LOGPROBS, GRAMMAR)):
            is_asked = options is GREEDY or (i + j) % step == 0
            if is_asked and not (plan.startswith("tiles") and options in (LOGPROBS, GRAMMAR)):
                assert_same(whole, cut, plan, params(3, **rule_of(plan, options)))


def test_a_manifest_says_what_the_whole_is(zoo: Zoo) -> None:
    """And the memory of a rank."""
    manifest = read_manifest(path_of(zoo, "llama", "eager", 2))
    assert manifest.models[0].vocab_size == models.VOCAB
    whole = read_manifest(path_of(zoo, "llama", "eager", 1))
    share = manifest.memory_plan["target"].weights / whole.memory_plan["target"].weights
    assert 0.5 <= share < 0.52


def test_one_sharded_engine_in_a_process(zoo: Zoo, load: Engines) -> None:
    """A second one is refused, and leaves the first alone; after `close` there is room for it.

    It starts its own ranks, as for the commands, the servers and `LLM`: the manifest says how many.
    """
    load.close()
    path = path_of(zoo, "llama", "eager", 2)
    with LLM(path, oversubscribes=True) as llm:
        wanted = generate(llm, params(2))
        with pytest.raises(ConfigError) as caught:
            LLM(path, oversubscribes=True)
        assert caught.value.found == "a second sharded engine in this process"
        assert "LLM.close" in caught.value.do
        assert generate(llm, params(2)) == wanted
        # whole engines have no ranks
        assert generate(LLM(load("llama", 1)), params(2))[0][0] == wanted[0][0]
        pids = llm.engine.target.leader.pids  # type: ignore[attr-defined]
    del llm
    assert not wait_gone(pids, ENDS_S)
    engine = EngineArgs(path, rank_timeout_s=20.0, oversubscribes=True).load()
    pids = engine.target.leader.pids  # type: ignore[attr-defined]
    assert len(pids) == 1
    assert generate(LLM(engine), params(2)) == wanted
    engine.close()
    assert not wait_gone(pids, ENDS_S)
    load("llama", 1).close()


def test_another_number_of_ranks_is_told(zoo: Zoo) -> None:
    path = path_of(zoo, "llama", "eager", 2)
    with pytest.raises(ConfigError, match=re.escape("3 ranks, and an engine that was cut for 2")):
        Engine.load(path, ranks=RankOptions(3))


def test_files_of_ranks_that_are_mixed_up_are_told(zoo: Zoo, tmp_path: Path) -> None:
    """Each is as long as the other, and weights are hashed on request alone."""
    copy = Path(shutil.copytree(path_of(zoo, "llama", "eager", 2), tmp_path / "engine"))
    first, second = (copy / name for name in read_manifest(copy).rank_files)
    content = first.read_bytes(), second.read_bytes()
    assert len(content[0]) == len(content[1])
    second.write_bytes(content[0])
    with pytest.raises(EngineError, match=re.escape(f"{second} is {first.relative_to(copy)}")):
        open_engine(copy)
    # the last page: weights of a model that was trained on
    second.write_bytes(content[1][:-1] + bytes([content[1][-1] ^ 1]))
    with pytest.raises(EngineError, match=re.escape(f"{second} is of another engine, or was")):
        open_engine(copy, False)
    second.unlink()
    with pytest.raises(EngineError, match=re.escape(f"{second} is missing")):
        Engine.load(copy, ranks=OPTIONS)
    second.write_bytes(content[1])
    assert open_engine(copy).num_ranks == 2


@pytest.mark.slow
def test_two_launches_meet_over_tcp(zoo: Zoo, load: Engines, tmp_path: Path) -> None:
    """As torchrun starts them on two hosts, each with one rank: the same tokens as one process."""
    path = path_of(zoo, "llama", "eager", 2)
    # the launcher's
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    prompts = tmp_path / "prompts.jsonl"
    given = models.prompts()[1]
    prompts.write_text(json.dumps({"prompt_token_ids": given}) + "\n", encoding="utf-8")
    command = [sys.executable, "-P", "-m", "specc", "run", str(path), "--prompts", str(prompts)]
    command += ["--temperature", "0", "--max-tokens", "12", "--ignore-eos", "--json"]
    command += ["--plan", "tree-3-2-1"]
    processes = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        (first, told), (other, _) = (process.communicate(timeout=120) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], told
    assert other == ""
    params_ = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (wanted,) = LLM(load("llama", 1), plan="tree-3-2-1").generate([given], params_)
    assert json.loads(first)["outputs"][0]["token_ids"] == list(wanted.outputs[0].token_ids)
