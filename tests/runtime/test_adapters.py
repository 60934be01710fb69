"""Low-rank adapters: each request has the target with its own adapter merged, and nobody else's.

The reference is `transformers.generate` with scale · B · A added to the weights, tests/adapters.py.
Bits are compared by log probabilities: of a request in a mixed batch with those that it has alone,
and, without an adapter, with those of an engine that has none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.directory import read_manifest
from specc.artifact.manifest import Manifest
from specc.cli.render import adapter_lines
from specc.compiler import build as compiler
from specc.config import CompileConfig
from specc.errors import ConfigError, RequestError, SpeccError
from specc.lora.request import LoRARequest
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import RequestOutput
from specc.sampling.params import SamplingParams
from specc.speculation.plans import DynamicTree, SpecPlan
from tests import engines, models
from tests.adapters import ALL, ATTENTION, merged, save_adapter
from tests.kept import content_hash
from tests.lossless import Zoo, generate
from tests.near_ties import NEAR_TIE
from tests.runtime.test_quantized import reference_model
from tests.traces import shared_traces

NUM_TOKENS = 24
PLANS = (
    SpecPlan.from_widths(()),
    SpecPlan.from_widths((1, 1, 1)),
    SpecPlan.from_widths((2, 2, 1)),
    SpecPlan.from_dynamic(DynamicTree(6, 3, 3)),
    SpecPlan.from_widths((1, 1), ("self_w8_s4",)),
    # sees all rows of these sequences: it is the target
    SpecPlan.from_widths((1, 1, 1), ("self_w88_s0",)),
    SpecPlan.from_widths((2, 1), ("self_x1",)),
    SpecPlan.from_widths((1,) * 4, ("suffix",)),
)
PLAN_IDS = [plan.name for plan in PLANS]
# what adapters may be: parts of what is fused, ranks that differ, scales, single layers
KINDS: tuple[dict[str, Any], ...] = (
    {"modules": ALL},
    {"modules": ("q_proj", "v_proj"), "rank": 8, "lora_alpha": 8},
    {"modules": ALL, "rank": 2, "ranks": {"down_proj": 6, r"layers\.1\.self_attn\.k_proj": 3}},
    {"modules": ("up_proj",), "rank": 16, "use_rslora": True},
    {"modules": ATTENTION, "layers": (1,), "alpha_pattern": {"o_proj": 3.5}},
    {"modules": ("gate_proj", "down_proj"), "rank": 1},
    {"modules": ("k_proj",), "rank": 5},
    {"modules": ALL, "rank": 3, "lora_alpha": 1.5},
)
NAMES = tuple(f"a{i}" for i in range(len(KINDS)))


def options(**changes: Any) -> CompileConfig:
    config = CompileConfig(
        plans=PLANS,
        max_batch_size=9,
        max_seq_len=models.MAX_SEQ_LEN,
        block_size=4,
        prefill_chunk=24,
        backend="eager",
        probe=False,
    )
    return replace(config, **changes)


class Rig:
    """A tiny target, adapters beside it, engines with them, and the references."""

    def __init__(
        self,
        zoo: Zoo,
        name: str,
        kinds: Sequence[dict[str, Any]],
        turned: bool,
        label: str = "adapters",
    ) -> None:
        self.zoo, self.name, self.kinds, self.turned = zoo, name, kinds, turned
        self.label = f"{label}-{name}"
        self.model = zoo.reference_model(name)
        self.merged = functools.cache(self._merged)

    def adapter(self, number: int) -> Path:
        kind = {"is_turned": self.turned, "seed": number, **self.kinds[number]}
        return self.zoo.once(
            f"{self.label}-{number}", lambda path: save_adapter(path, self.model, **kind)
        )

    def engine(self, label: str = "eager", with_adapters: bool = True, **changes: Any) -> Path:
        paths = [self.adapter(i) for i in range(len(self.kinds))] if with_adapters else []
        given = tuple(f"a{i}={path}" for i, path in enumerate(paths))
        checkpoint, draft = (self.zoo.checkpoint(self.name, draft=x) for x in ("target", "noisy"))

        def compile_one(target: Path, drafts: Sequence[Path], made: Path, config: Any) -> None:
            with shared_traces():
                compiler.build(target, drafts, made, replace(config, lora=given))

        config = options(**changes)
        return self.zoo.once(
            f"{self.label}-{label}-{with_adapters}",
            lambda path: engines.build(
                checkpoint, draft, path, config, builder=compile_one,
                key=("adapters", *map(content_hash, paths)),
            ),
        )  # fmt: skip

    def _merged(self, number: int | None) -> Any:
        if number is None:
            return self.model
        return merged(self.model, self.adapter(number), self.turned)


@pytest.fixture(scope="module")
def rig(zoo: Zoo) -> Rig:
    return Rig(zoo, "llama", KINDS, False)


@functools.cache
def load(path: Path, **options: Any) -> Engine:
    return Engine.load(path, num_threads=1, **options)


def params(number: int | None, **changes: Any) -> SamplingParams:
    lora = None if number is None else f"a{number}"
    given = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 3}
    return SamplingParams(**given | {"lora": lora} | changes)


def numbers(count: int) -> list[int | None]:
    """Of requests: each adapter once, and none."""
    return [*range(count), None]


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    lengths = [3 + 5 * i for i in range(count)]
    return [torch.randint(0, models.VOCAB, (n,), generator=generator).tolist() for n in lengths]


def bits(output: RequestOutput) -> tuple[list[int], list[dict[int, float]]]:
    """Tokens, and the log probabilities that they and the best ones had."""
    (one,) = output.outputs
    assert one.logprobs is not None
    return one.token_ids, [{t: x.logprob for t, x in row.items()} for row in one.logprobs]


def check_greedy(
    found: list[int], model: Any, prompt: list[int], what: str, tie: float = NEAR_TIE
) -> list[int]:
    """Compare an output with `generate`, up to a near tie of the reference; returns its tokens."""
    reference = generate(model, prompt, len(found))
    for i, (token, wanted) in enumerate(zip(found, reference.tokens, strict=True)):
        if token != wanted:
            best = reference.logits[i].topk(2).values
            assert best[0] - best[1] < tie, f"{what}: {token} for {wanted} at {i}"
            break
    return reference.tokens


@pytest.mark.parametrize("plan", PLAN_IDS)
def test_a_mixed_batch_is_that_of_merged_weights(rig, plan):
    llm = LLM(load(rig.engine()), plan=plan)
    wanted, texts = numbers(len(KINDS)), prompts(len(KINDS) + 1)
    outputs = llm.generate(texts, [params(number) for number in wanted])
    references = []
    for number, prompt, output in zip(wanted, texts, outputs, strict=True):
        found = output.outputs[0].token_ids
        references.append(check_greedy(found, rig.merged(number), prompt, f"{plan}, {number}"))
    plain = generate(rig.model, texts[0], NUM_TOKENS).tokens
    assert references[0] != plain, "an adapter that changes nothing"


@pytest.mark.parametrize("plan", PLAN_IDS)
def test_eight_in_a_batch_are_eight_alone(rig, plan):
    """To the bit, on the CPU: whatever adapters the neighbors of a row have."""
    engine = load(rig.engine("cpu", backend="cpu"))
    wanted, texts = numbers(len(KINDS)), prompts(len(KINDS) + 1)
    llm = LLM(engine, plan=plan)
    together = llm.generate(texts, [params(number) for number in wanted])
    for number, prompt, output in zip(wanted, texts, together, strict=True):
        (alone,) = llm.generate([prompt], params(number))
        assert bits(output) == bits(alone), f"{plan}, adapter {number}"
    if plan == "off":
        for number, prompt, output in zip(wanted, texts, together, strict=True):
            check_greedy(output.outputs[0].token_ids, rig.merged(number), prompt, f"{number}")


def test_a_view_of_the_target_has_the_adapter_of_its_request(rig):
    """Else it would propose what the target without an adapter finds likely."""
    llm = LLM(load(rig.engine()), plan=PLANS[5].name)
    llm.generate(prompts(4), [params(number) for number in (0, 2, 7, None)])
    stats = llm.get_metrics()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 60


@pytest.mark.parametrize("plan", ["off", "tree-2-2-1"])
def test_without_an_adapter_bits_are_those_of_an_engine_that_has_none(rig, plan):
    with_some = LLM(load(rig.engine("cpu", backend="cpu")), plan=plan)
    without = LLM(load(rig.engine("cpu", False, backend="cpu")), plan=plan)
    texts = prompts(3)
    mixed = with_some.generate([*texts, *texts], [params(None)] * 3 + [params(i) for i in range(3)])
    for output, plain in zip(mixed[:3], without.generate(texts, params(None)), strict=True):
        assert bits(output) == bits(plain)


def test_a_prefix_belongs_to_its_adapter(rig):
    engine = Engine.load(rig.engine("cpu", backend="cpu"), num_threads=1)
    llm = LLM(engine, plan="chain-3")
    (prompt,) = prompts(8)[-1:]
    for number in (None, 0, 7):
        (first,) = llm.generate([prompt], params(number))
        (again,) = llm.generate([prompt], params(number))
        assert first.metrics.num_cached_tokens == 0
        assert again.metrics.num_cached_tokens > 20
        assert bits(first) == bits(again)
    first, second = llm.generate([prompt], params(0, n=2))[0].outputs
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize("plan", ["off", "tree-2-2-1"])
def test_requests_that_give_way_come_back_with_their_adapters(rig, plan):
    """More requests than places, a cache that is too small, outputs of several lengths."""
    path = rig.engine("cpu", backend="cpu")
    small = Engine.load(path, num_threads=1, max_num_seqs=4, kv_cache_tokens=128)
    wanted = [*numbers(len(KINDS)), 3, 0, None]
    texts = prompts(len(wanted))[::-1]
    asked = [params(x, max_tokens=12 + 5 * (i % 4)) for i, x in enumerate(wanted)]
    llm = LLM(small, plan=plan)
    found = llm.generate(texts, asked)
    assert llm.get_metrics().num_preemptions > 0
    whole = LLM(load(path), plan=plan)
    for prompt, own, output in zip(texts, asked, found, strict=True):
        (alone,) = whole.generate([prompt], own)
        assert bits(output) == bits(alone)


def test_sampled_tokens_are_the_same_with_any_draft(rig):
    engine = load(rig.engine("cpu", backend="cpu"))
    texts = prompts(4)
    asked = [params(i, temperature=0.8, seed=i) for i in range(4)]
    plain = [bits(x) for x in LLM(engine, plan="off").generate(texts, asked)]
    for plan in ("tree-2-2-1", "chain-3"):
        assert [bits(x) for x in LLM(engine, plan=plan).generate(texts, asked)] == plain


@pytest.mark.parametrize(
    ("label", "changes", "tie"),
    [
        ("int8", {"quantize": "int8"}, NEAR_TIE),
        ("int4", {"quantize": "int4", "quantize_group": 32}, NEAR_TIE),
    ],
    ids=["int8", "int4"],
)
def test_beside_rounded_weights(rig, label, changes, tie):
    """The base may be integers; terms stay floats."""
    plans = (PLANS[0], PLANS[2])
    path = rig.engine(f"cpu-{label}", backend="cpu", plans=plans, **changes)
    rounded = reference_model(rig.zoo.checkpoint(rig.name), path)
    texts = prompts(3)
    for plan in plans:
        outputs = LLM(load(path), plan=plan.name).generate(texts, [params(i) for i in (0, 2, None)])
        for number, prompt, output in zip((0, 2, None), texts, outputs, strict=True):
            model = rounded if number is None else merged(rounded, rig.adapter(number))
            check_greedy(output.outputs[0].token_ids, model, prompt, f"{label} {number}", tie)


def test_in_bfloat16_rows_are_what_they_are_alone(rig):
    plans = (PLANS[0], PLANS[2])
    path = rig.engine("cpu-bfloat16", backend="cpu", plans=plans, dtype="bfloat16")
    texts, wanted = prompts(4), [0, 1, 7, None]
    found = []
    for plan in plans:
        llm = LLM(load(path), plan=plan.name)
        together = llm.generate(texts, [params(number) for number in wanted])
        alone = [llm.generate([x], params(i))[0] for x, i in zip(texts, wanted, strict=True)]
        assert [bits(x) for x in together] == [bits(x) for x in alone]
        found.append([bits(x) for x in together])
    assert found[0] == found[1]


# names of projections: fused by the model, turned, with norms of queries and keys, of a hybrid
OTHERS: dict[str, tuple[str, ...]] = {
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gemma3": ALL,
    "qwen3_moe": ATTENTION,
}


@pytest.mark.default("gpt2")
@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures(zoo, name):
    turned = name == "gpt2"
    kinds = [{"modules": OTHERS[name]}, {"modules": OTHERS[name][:1], "rank": 3}]
    rig = Rig(zoo, name, kinds, turned)
    plans = (PLANS[0], PLANS[2])
    llm = LLM(load(rig.engine(plans=plans)), plan="tree-2-2-1")
    texts = prompts(3)
    outputs = llm.generate(texts, [params(i) for i in (0, 1, None)])
    for number, prompt, output in zip((0, 1, None), texts, outputs, strict=True):
        check_greedy(output.outputs[0].token_ids, rig.merged(number), prompt, f"{name} {number}")


def build(rig: Rig, path: Path, lora: Any, **changes: Any) -> None:
    config = options(plans=PLANS[:1], lora=lora, **changes)
    compiler.build(rig.zoo.checkpoint(rig.name), None, path, config)


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        ({"lm_head": (128, 64)}, "adapter x: lm_head"),
        ({"model.layers.7.mlp.up_proj": (96, 64)}, "layers.7"),
        ({"model.layers.0.mlp.up_proj": (64, 64)}, "64 inputs and 64 outputs"),
        ({"model.embed_tokens": (128, 64)}, "embed_tokens"),
    ],
    ids=["head", "absent", "size", "embedding"],
)
def test_terms_beside_no_projection_are_refused(rig, tmp_path, modules, found):
    holder = torch.nn.Module()
    for name, (outputs, inputs) in modules.items():
        parent: Any = holder
        for part in name.split(".")[:-1]:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(name.split(".")[-1], torch.nn.Linear(inputs, outputs, bias=False))
    last = next(iter(modules)).split(".")[-1]
    save_adapter(tmp_path / "adapter", holder, (last,))
    with pytest.raises(SpeccError, match=found):
        build(rig, tmp_path / "engine", (f"x={tmp_path / 'adapter'}",))
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"backend": "onnx"}, "--lora with backend onnx"),
        ({"segments": True}, "--segments"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    ],
)
def test_what_does_not_go_together(rig, tmp_path, changes, found):
    with pytest.raises(ConfigError, match=found):
        build(rig, tmp_path / "engine", (f"x={rig.adapter(0)}",), **changes)


def test_names_of_requests(rig):
    llm = LLM(load(rig.engine()), plan="off")
    assert llm.engine.adapters == NAMES
    (prompt,) = prompts(1)
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    wanted = llm.generate([prompt], replace(plain, lora="a1"))[0].outputs[0].token_ids
    for given in ("a1", LoRARequest("a1", 1)):
        assert llm.generate([prompt], plain, lora_request=given)[0].outputs[0].token_ids == wanted
    both = llm.generate([prompt, prompt], plain, lora_request=[None, LoRARequest("a1")])
    assert both[1].outputs[0].token_ids == wanted
    for wrong in ({"lora_request": "a99"}, {"lora_request": 5}, {"lora_request": ["a1", "a2"]}):
        with pytest.raises(RequestError):
            llm.generate([prompt], plain, **wrong)
    with pytest.raises(RequestError, match="one adapter"):
        llm.generate([prompt], replace(plain, lora="a2"), lora_request="a1")


def test_what_is_told(rig):
    manifest = read_manifest(rig.engine())
    lines = adapter_lines(manifest)
    assert lines[3].startswith("adapter a3: terms of rank 16 or less beside 2 projections")
    assert Manifest.from_json(manifest.to_json()) == manifest
    bare = read_manifest(rig.engine("cpu", False, backend="cpu"))
    assert "adapters" not in bare.to_json()
    assert adapter_lines(bare) == []


def test_an_engine_without_adapters_says_so(rig):
    llm = LLM(load(rig.engine("cpu", False, backend="cpu")), plan="off")
    with pytest.raises(RequestError, match="this one has none"):
        llm.generate([[1, 2]], params(0))


def test_an_engine_with_adapters_is_not_cut_anew(rig, tmp_path):
    from specc.compiler.reshard import reshard_engine

    with pytest.raises(ConfigError, match="with adapters"):
        reshard_engine(rig.engine(), tmp_path / "cut", 2)
