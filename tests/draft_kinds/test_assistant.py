"""Gemma 4 assistants: the contract's rigs, transformers' own generator, and their files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specc.compiler.build import build
from specc.drafters.assistant import AssistantDraft
from specc.errors import ConfigError, HeadError, SpeccError
from specc.passes.drafters.head_spec import TargetFacts
from specc.passes.drafters.recognise import recognise
from specc.runtime.backends.engine_cache import features_of
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan
from tests.assistants import (
    ASSISTANT_CASES,
    FULL,
    GEMMA_LAYERS,
    SLIDING,
    AssistantCase,
    AssistantReference,
    TargetRows,
    config_of,
    double,
    draw_tensors,
    write_assistant,
    write_gemma,
)
from tests.draft_kinds.rig import DraftRig, Said
from tests.heads import LAYERS, VOCAB, WIDTH
from tests.lossless import Zoo
from tests.runtime.draft_cases import write_target
from tests.runtime.head_rig import BLOCK, CLOSE, load, options, owner_of, prompts_of, serve

WIDE = SpecPlan.from_widths((3, 2, 1))


@dataclass
class AssistantOracle:
    """Compares all logits with the formulas, and what the target keeps for the draft."""

    reference: AssistantReference
    number: int = 0
    num_nodes: int = 0
    num_rows: int = 0
    most_sequences: int = 0
    depths: set[int] = field(default_factory=set)
    # rows that are still compared with what a request had before
    _tokens: dict[tuple[str, int], int] = field(default_factory=dict)

    def watch(self, core: EngineCore) -> None:
        """Look at every pass of the draft from here on."""
        model: Any = core.engine.drafts[self.number]
        model.register_forward_hook(lambda _, given, logits: self._look(core, given, logits))

    def reset(self) -> None:
        self._tokens.clear()

    def check_rows(self, engine: Engine, request: Request) -> None:
        """The draft has no rows of a sequence; the target's is there that it begins with."""
        if (count := request.cache_len) < 1:
            return
        _, wanted = self.reference.rows.of(request.token_ids[:count])
        assert engine.manifest is not None
        slab = features_of(engine.manifest.models[0], engine.cache)
        blocks = engine.cache.block_table([request.blocks])[0].long()
        found = slab[blocks[(count - 1) // slab.shape[1]], (count - 1) % slab.shape[1]]
        torch.testing.assert_close(found, wanted[-1].float(), **CLOSE)
        self.num_rows += 1

    def _look(self, core: EngineCore, given: Sequence[Any], logits: Tensor) -> None:
        tokens, positions, q_start, slot, cache_len, ancestors, table, logit_rows, rows = given
        starts = q_start.tolist()
        owner = [b for b in range(len(starts) - 1) for _ in range(starts[b], starts[b + 1])]
        requests = [owner_of(core, row.tolist()) for row in table]
        self.most_sequences = max(self.most_sequences, len(requests))
        for i, b in enumerate(owner):
            self._tokens[requests[b].request_id, int(slot[i])] = int(tokens[i])
        for row, i in zip(logits, logit_rows.tolist(), strict=True):
            request, length = requests[owner[i]], int(cache_len[owner[i]])
            assert length == request.cache_len == len(request.token_ids) - 1
            assert int(positions[i]) == length
            path: list[int] = []
            if ancestors is not None:
                # node 0 is the root, which is no drafted token
                bits = int(ancestors[i, 0])
                nodes = [node for node in range(1, 63) if bits >> node & 1]
                path = [self._tokens[request.request_id, length + node] for node in nodes]
            assert (int(rows[i, 0]) == length - 1) == (not path)
            wanted = self.reference.logits(request.token_ids, path).float()
            # scores of a random Gemma are so large that its own float32 is as far off
            is_sharp = self.reference.case.target != "llama"
            close = {"rtol": 5e-4, "atol": 5e-4} if is_sharp else CLOSE
            torch.testing.assert_close(row, wanted, **close)
            self.num_nodes += 1
            self.depths.add(len(path))


@functools.cache
def rows_of(path: Path) -> TargetRows:
    return TargetRows(double(path))


class AssistantRig(DraftRig):
    cases = ASSISTANT_CASES
    prefix = "assistant"

    def __init__(self, case: str, is_first: bool = True) -> None:
        super().__init__("gemma4_assistant", case, AssistantDraft(0), is_first)
        layers = LAYERS if case == "llama" else GEMMA_LAYERS
        self.said = Said(
            (layers,), "transformers", ("embed_tokens.weight",), True, WIDTH, WIDTH,
            lines=(
                "draft_0 is a Gemma 4 assistant (gemma4_assistant, files of transformers): it reads"
                f" the target at boundaries {layers}, the last after the final norm, and was"
                " trained for 256 positions; weights of the target: embed_tokens.weight",
            ),
        )  # fmt: skip

    def write(self, path: Path, case: str) -> object:
        return write_assistant(path, ASSISTANT_CASES[case])

    def target(self, zoo: Zoo, case: str) -> Path:
        own = ASSISTANT_CASES[case]
        if own.target == "llama":
            return write_target(zoo)
        name = f"assistant-target-{own.shared}"
        return zoo.once(name, lambda path: write_gemma(path, own.shared))

    def oracle(self, zoo: Zoo, case: str = "", number: int = 0) -> AssistantOracle:
        case = case or self.case
        own, rows = ASSISTANT_CASES[case], rows_of(self.target(zoo, case))
        return AssistantOracle(AssistantReference(own, draw_tensors(own), rows), number)

    def num_looked(self, oracle: AssistantOracle) -> int:
        return oracle.num_nodes


RIGS = (AssistantRig("plain"), AssistantRig("llama", is_first=False))
RIG = RIGS[0]


@pytest.mark.parametrize("case", ["plain", "clusters"])
def test_formulas_are_those_of_transformers(
    case: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of transformers' generator: positions, rows that are seen, windows, clusters."""
    from transformers import Gemma4AssistantForCausalLM, Gemma4TextConfig, GenerationConfig
    from transformers.generation.candidate_generator import (
        SinglePositionMultiTokenCandidateGenerator as Generator,
    )

    modes: Any = Gemma4TextConfig.kv_sharing_modes

    def modes_of(config: Any) -> Any:
        """Some versions make no model of layers all of which have others' keys and values."""
        count = config.num_hidden_layers
        return ["reuse"] * count if config.num_kv_shared_layers == count else modes.fget(config)

    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes_of))
    own, path = ASSISTANT_CASES[case], RIG.target(zoo, case)
    rows = rows_of(path)
    draft: Any = Gemma4AssistantForCausalLM.from_pretrained(
        RIG.draft(zoo, case), dtype=torch.float64
    ).eval()
    draft.generation_config.num_assistant_tokens = 3
    reference = AssistantReference(own, draw_tensors(own), rows)
    # the longest is longer than a window, by more than one
    for prompt in (prompts_of(BLOCK)[0], prompts_of(BLOCK)[2], prompts_of(BLOCK)[3]):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = rows.target(
                ids, output_hidden_states=True, return_shared_kv_states=True, use_cache=True
            )
        root = int(out.logits[0, -1].argmax())
        generator = Generator(
            draft, rows.target.get_input_embeddings(), GenerationConfig(max_length=200)
        )
        with_root = torch.tensor([[*prompt, root]])
        found, logits = generator.get_candidates(with_root, {}, out, False, 0)
        assert logits is not None
        path_ids = found[0, len(prompt) + 1 :].tolist()
        for depth, row in enumerate(logits[0]):
            wanted = reference.logits([*prompt, root], path_ids[:depth])
            # transformers writes a number below all others in place of none
            kept = wanted > float("-inf")
            # its norms are in float32
            torch.testing.assert_close(row[kept], wanted[kept], rtol=1e-4, atol=1e-5)
            assert bool((row[~kept] < row[kept].min()).all())
            assert int(kept.sum()) == (VOCAB if case == "plain" else VOCAB // 12 * 4)


@pytest.mark.parametrize("case", ["plain", "llama"])
def test_wide_trees(case: str, zoo: Zoo) -> None:
    """All nodes of trees of 3, 2, 1 children, of two sequences in a pass, after rejections."""
    path = RIG.engine(zoo, case, "wide", plans=(WIDE,))
    core, oracle = EngineCore(load(path), WIDE.name), RIG.oracle(zoo, case)
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK)[1:4], num_tokens=7, temperature=1.5, rule="swor", every=1)
    assert oracle.most_sequences > 1
    assert oracle.num_nodes > 60
    assert oracle.depths == {0, 1, 2}
    assert core.scheduler.stats.mean_acceptance_length < 3


def test_nodes_of_clusters(zoo: Zoo) -> None:
    """Logits of the ids of some clusters: of others -inf, for drawing and for rules."""
    path = RIG.engine(zoo, "clusters", "wide", plans=(WIDE,))
    core, oracle = EngineCore(load(path), WIDE.name), RIG.oracle(zoo, "clusters")
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK)[2:4], num_tokens=5, temperature=1.5, rule="mss")
    assert oracle.num_nodes > 20


def test_a_head_of_its_own(zoo: Zoo, tmp_path: Path) -> None:
    """A head that is not the table, which nothing reads then."""
    own = replace(ASSISTANT_CASES["llama"], config={"tie_word_embeddings": False})
    tensors = write_assistant(tmp_path, own)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    spec: Any = recognise(tmp_path, TargetFacts("T", WIDTH, LAYERS, VOCAB))
    assert spec.tensors["lm_head.weight"] == "lm_head.weight"


def test_every_layer_has_rows_of_its_own(zoo: Zoo) -> None:
    """Of a target without shared layers, and an assistant of more than one layer of a kind."""
    path = RIG.engine(zoo, "unshared", "short", plans=(SpecPlan.from_widths((1, 1)),))
    core, oracle = EngineCore(load(path), "chain-2"), RIG.oracle(zoo, "unshared")
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK)[2:4], num_tokens=5, temperature=1.0)
    assert oracle.num_nodes > 8
    manifest = Engine.load(path).manifest
    assert manifest is not None
    head = manifest.models[1].head
    assert head is not None
    # the last of each kind
    assert head.reads == manifest.models[0].layers[4:]


FACTS = TargetFacts.of_config("T", SimpleNamespace(
    hidden_size=WIDTH, num_hidden_layers=GEMMA_LAYERS, vocab_size=VOCAB, model_type="gemma4_text",
))  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., Path]:
    def make(case: str = "plain", change: Any = lambda tensors: None, **config: Any) -> Path:
        own = replace(ASSISTANT_CASES[case], config=config)
        tensors = draw_tensors(own)
        change(tensors)
        (tmp_path / "config.json").write_text(json.dumps(config_of(own)), encoding="utf-8")
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return make


def test_what_it_is(files: Callable[..., Path]) -> None:
    spec: Any = recognise(files("clusters"), FACTS)
    assert (spec.kind, spec.boundaries, spec.is_last_normed) == ("gemma4_assistant", (6,), True)
    assert (spec.width, spec.hands_on, spec.shared) == (WIDTH, True, ("embed_tokens.weight",))
    assert spec.drafter("draft_1") == AssistantDraft(1)
    assert spec.drafter("draft_1").candidates == VOCAB // 12 * 4
    assert "4 of 12 clusters" in "\n".join(spec.describe())
    # by its class alone, or its model type, of which the newest is another
    assert recognise(files(model_type=None), FACTS)
    assert recognise(files(architectures=None), FACTS)
    assert recognise(files(model_type="gemma4_assistant", architectures=["X"]), FACTS)


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def with_tensor(name: str, *shape: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def with_text(**changes: Any) -> dict[str, Any]:
    return {"text_config": config_of(AssistantCase())["text_config"] | changes}


WRONG: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "another width": ("plain", None, {"backbone_hidden_size": 64}, "a target of 64 hidden size"),
    "no width": ("plain", None, {"backbone_hidden_size": None}, "backbone_hidden_size"),
    "other ids": ("plain", None, with_text(vocab_size=97), "a target of 97 ids"),
    "no layers": ("plain", None, {"text_config": None}, "no text_config"),
    "a key": ("plain", None, {"draft_block": 4}, "config.json: draft_block"),
    "a key of layers": ("plain", None, with_text(qk_gain=2), "text_config.qk_gain"),
    "quantized": ("plain", None, {"quantization": {"bits": 4}}, "config.json: quantization"),
    "embeddings of layers": (
        "plain", None, with_text(hidden_size_per_layer_input=8), "hidden_size_per_layer_input",
    ),
    "layers with keys": ("plain", None, with_text(num_kv_shared_layers=2), "must be shared"),
    "a layer more": (
        "plain", with_tensor("model.layers.4.layer_scalar", 1), {}, "layers.4.layer_scalar",
    ),
    "keys": (
        "plain", with_tensor("model.layers.0.self_attn.k_proj.weight", 32, 24), {}, "k_proj",
    ),
    "no projection": ("plain", without("post_projection.weight"), {}, "post_projection.weight"),
    "a projection": (
        "plain", with_tensor("post_projection.weight", 24, 32), {}, "post_projection.weight is",
    ),
    "clusters that are not read": (
        "clusters", None, {"use_ordered_embeddings": False}, "masked_embedding",
    ),
    "no clusters": ("plain", None, {"use_ordered_embeddings": True, "num_centroids": 12,
                                    "centroid_intermediate_top_k": 4}, "token_ordering"),
    "clusters of some more": ("clusters", None, {"num_centroids": 11}, "96 ids in 11 clusters"),
    "more than all": ("clusters", None, {"centroid_intermediate_top_k": 13}, "13 of them"),
    "an id twice": (
        "clusters",
        lambda x: x["masked_embedding.token_ordering"].__setitem__(0, 1) or x[
            "masked_embedding.token_ordering"].__setitem__(1, 1),
        {},
        "not all ids",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_files_that_are_refused(name: str, files: Callable[..., Path]) -> None:
    case, change, config, found = WRONG[name]
    with pytest.raises(HeadError, match=found) as raised:
        recognise(files(case, change or (lambda tensors: None), **config), FACTS)
    assert raised.value.do


def test_an_assistant_is_no_target(files: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(HeadError, match="a Gemma 4 assistant, which is no model without its"):
        build(files(), None, tmp_path / "e", options(plans=()))


def test_targets_that_it_does_not_fit(zoo: Zoo, tmp_path: Path) -> None:
    """Heads of another size, or no layers of a kind: told when the target is known."""
    path = tmp_path / "other"
    write_assistant(path, replace(ASSISTANT_CASES["llama"], kinds=(SLIDING, FULL)))
    with pytest.raises(SpeccError, match=r"layers of kind sliding_attention, and .* has none"):
        build(write_target(zoo), path, tmp_path / "e", options(plans=()))
    write_assistant(path, AssistantCase(kinds=(FULL,)))
    with pytest.raises(SpeccError, match=r"reads 2 heads of 32 columns; layer .* has 2 of 8"):
        build(write_target(zoo), path, tmp_path / "e", options(plans=()))


def test_what_it_does_not_go_with(zoo: Zoo, tmp_path: Path) -> None:
    target, draft = RIG.target(zoo, "clusters"), RIG.draft(zoo, "clusters")
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2, and the Gemma 4 assistant"):
        build(target, draft, tmp_path / "e", options(plans=(), tensor_parallel_size=2))
    few = tmp_path / "few"
    write_assistant(few, AssistantCase(clusters=(48, 1)))
    with pytest.raises(ConfigError, match=r"of 3 children, and draft_0, which .* among 2 tokens"):
        build(target, few, tmp_path / "e", options(plans=(WIDE,)))
